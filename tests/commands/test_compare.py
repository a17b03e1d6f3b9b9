"""``python -m cnn_engine.compare``: real files, gates, outputs, and every error."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from comparisons import CHECK, made, written

from cnn_engine import report, run
from cnn_engine.compare import command as compare
from cnn_engine.compare.comparison import CANNOT_TELL, FASTER, SLOWER
from cnn_engine.measure import step_times


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Results of real runs: two of ``if``, and one of ``pad`` with reduction."""
    folder = tmp_path_factory.mktemp("results")
    paths = {}
    for name, options in (
        ("if1", ["--variant", "if"]),
        ("if2", ["--variant", "if"]),
        ("pad", ["--variant", "pad", "--reduction"]),
    ):
        paths[name] = str(folder / f"{name}.json")
        common = ["--network", "cifar10", "--device", "cpu", "--threads", "1", "--data", "synthetic",
                  "--images", "60", "--batch", "6", "--quiet", "--json", paths[name]]  # fmt: skip
        assert run.main([*common, *options]) == 0
    return paths


def test_two_real_runs_of_the_same_differ_by_nothing_that_counts(files, capsys):
    assert compare.main([files["if1"], files["if2"], "--threshold", "50%"]) == 0
    out = capsys.readouterr().out
    assert "Differs                      : nothing that was recorded" in out
    assert out.splitlines()[-1].startswith("Summary: ")
    for name in ("pass p50", "throughput", "conv1", "softmax", "images/s", "95 % interval"):
        assert name in out
    assert " 0.00" not in out


def test_a_file_with_itself_is_never_a_difference(files, capsys):
    # Ten passes and no further runs: too little to pass by.
    assert compare.main([files["if1"], files["if1"], "--fail-on", "1%", "--fail-on-layers=1%"]) == 2
    out = capsys.readouterr().out
    assert "faster" not in out.replace("cannot tell whether B is faster", "")
    assert "slower" not in out


def test_if_against_pad(files, capsys):
    assert compare.main([files["if1"], files["pad"]]) == 0
    out, err = capsys.readouterr()
    assert "variant: if -> pad" in out
    assert "reduction: no -> yes" in out
    assert "Only in B                    : pad1, pad2, pad3" in out
    assert "B is slower than A" not in out
    assert err == ""


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("mode", ["resident", "stream"])
def test_runs_on_a_gpu(mode, tmp_path, capsys):
    """Device times and copies have samples; in ``stream`` a pass has many calls of each."""
    paths = []
    for variant in ("pad", "fused"):
        paths.append(str(tmp_path / f"{variant}.json"))
        code = run.main(
            ["--device", "cuda", "--variant", variant, "--data", "synthetic", "--images", "4000",
             "--batch", "200", "--data-mode", mode, "--quiet", "--json", paths[-1]]
        )  # fmt: skip
        assert code == 0
    assert compare.main([paths[0], paths[0]]) == 0
    assert "images h2d" in capsys.readouterr().out
    assert compare.main([*paths, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["comparisons"][0]["rows"]
    copies = {row["name"]: row for row in rows if row["section"] == "copy"}
    samples = copies["images h2d"]["baseline"]["samples"]
    assert 1 < samples <= step_times.MOST_SAMPLES
    assert copies["images h2d"]["ratio"]["value"] > 0
    throughput = next(row for row in rows if row["section"] == "throughput")
    assert throughput["ratio"]["value"] > 1  # fused is many times as fast


def test_a_real_run_made_slower_fails_a_build(files, tmp_path, capsys):
    with open(files["if1"]) as file:
        document = json.load(file)
    document["latency_samples_ms"] = [10 * value for value in document["latency_samples_ms"]]
    for layer in document["layers"]:
        # Beyond any noise of the two runs: on a loaded machine a layer's interval spans a factor of ten.
        layer["samples_s"] = [1000 * value for value in layer["samples_s"]]
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(document))

    assert compare.main([str(slow), files["if1"], "--fail-on", "5%"]) == 0
    out, err = capsys.readouterr()
    assert "Summary: B is faster than A: median pass 0.1000 x" in out
    assert err == ""
    assert compare.main([files["if1"], str(slow), "--fail-on", "0.05"]) == 1
    out, err = capsys.readouterr()
    assert "Summary: B is slower than A: median pass 10.00 x" in out.splitlines()[-1]
    assert err.count("\n") == 1
    assert (
        f"{slow}: pass p50: expected at most 1.050 x the time in {files['if1']}, found 10.00" in err
    )
    assert compare.main([files["if1"], str(slow), "--quiet", "--fail-on", "5000%"]) in (0, 2)
    assert "expected at most" not in capsys.readouterr().err
    assert compare.main([files["if1"], str(slow), "--quiet", "--fail-on-layers", "10%"]) == 2
    err = capsys.readouterr().err
    assert "--fail-on-layers: expected 5 runs of" in err
    assert "further ones with --noise, found 1" in err


def test_the_gate_is_at_the_limit_and_judges_every_file(tmp_path, capsys):
    base = written(tmp_path / "a.json", made())
    small = written(tmp_path / "c.json", made(1.04e-3 * np.ones(60)))
    large = written(tmp_path / "d.json", made(1.06e-3 * np.ones(60)))
    assert compare.main([base, small, "--fail-on", "5%"]) == 0
    assert compare.main([base, large, "--fail-on", "5%"]) == 1
    assert compare.main([base, small, large, small, "--fail-on", "5%"]) == 1
    capsys.readouterr()


def test_a_gate_that_cannot_judge_does_not_pass(tmp_path, capsys):
    base = written(tmp_path / "a.json", made())
    few = written(tmp_path / "b.json", made([9e-3] * 3))
    old = written(tmp_path / "c.json", made(), latency_samples_ms=None)
    for other, found in ((few, "found 3"), (old, "found 0")):
        assert compare.main([base, other, "--fail-on", "5%"]) == 2
        out, err = capsys.readouterr()
        assert "Summary: cannot tell" in out
        assert (
            err
            == f"error: {other}: --fail-on: expected at least 6 samples in it and in {base}, {found}\n"
        )
    assert compare.main([base, few, "--fail-on-layers", "5%"]) == 2
    assert "--fail-on-layers: expected at least 6 samples" in capsys.readouterr().err


@pytest.mark.parametrize(("passes", "spread"), [(6, 0.15), (30, 0.3)])
def test_a_gate_never_passes_a_slower_run_that_it_cannot_judge(passes, spread, rng, tmp_path):
    """20 % slower: the estimate may lie anywhere, but what is not known to be within does not pass."""
    codes = []
    for _ in range(30):
        a, b = (1e-2 * np.exp(spread * rng.standard_normal(passes)) for _ in range(2))
        paths = [
            written(tmp_path / "a.json", made(a)),
            written(tmp_path / "b.json", made(1.2 * b)),
        ]
        codes.append(compare.main([*paths, "--quiet", "--fail-on", "5%"]))
    assert codes.count(0) <= 1
    assert set(codes) <= {0, 1, 2}


def test_the_gate_has_three_outcomes(rng, tmp_path, capsys):
    draw = lambda size, factor: made(factor * 1e-3 * np.exp(size * rng.standard_normal(100)))  # noqa: E731
    base = written(tmp_path / "a.json", draw(0.01, 1))
    for factor, size, code in ((1.0, 0.01, 0), (1.2, 0.01, 1), (1.04, 0.3, 2), (1.0, 0.5, 2)):
        other = written(tmp_path / "b.json", draw(size, factor))
        assert compare.main([base, other, "--quiet", "--fail-on", "5%"]) == code, (factor, size)
        err = capsys.readouterr().err
        assert err.count("error: ") == (code > 0)
        if code == 2:
            assert "--fail-on: pass p50: expected an interval up to 1.050 x the time in" in err


def test_one_known_layer_does_not_let_the_others_pass(tmp_path, capsys):
    def run(seed, fc=1.0, fc_samples=60):
        result = made(seed=seed)
        fc_layer = result.layers[1]
        fc_layer.samples_s = [fc * value for value in fc_layer.samples_s[:fc_samples]]
        return written(tmp_path / f"{seed}.json", result)

    base, *noise = (run(seed) for seed in range(5))
    common = ["--quiet", "--fail-on-layers", "5%", *(f"--noise={path}" for path in noise)]
    assert compare.main([base, run(10), *common]) == 0
    assert compare.main([base, run(11, fc=1.2), *common]) == 1
    assert f"{tmp_path}/11.json: fc: expected at most 1.050 x" in capsys.readouterr().err
    assert compare.main([base, run(12, fc_samples=3), *common]) == 2
    assert "--fail-on-layers: expected at least 6 samples" in capsys.readouterr().err
    assert compare.main([base, run(13), *common[:-1]]) == 2  # four runs, not five
    assert "expected 5 runs of" in capsys.readouterr().err


def test_noise_without_scipy_names_the_package(files, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert compare.main([files["if1"], files["if1"], "--noise", files["if2"]]) == 2
    assert "expected the package scipy, found none" in capsys.readouterr().err


def test_files_from_before_samples_were_kept(tmp_path, capsys):
    result = made()
    old = json.loads(report.json.dumps(result))
    for key in ("latency_samples_ms", "timed_pass", "stop", "timeline", "extra_lines"):
        old.pop(key)
    for step in (*old["layers"], *old["copies"]):
        step.pop("samples_s")
    (tmp_path / "old.json").write_text(json.dumps(old))
    new = written(tmp_path / "new.json", made(2e-3 * np.ones(60)))
    assert compare.main([str(tmp_path / "old.json"), new, "--json", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    assert "no raw samples" in out
    rows = json.loads((tmp_path / "c.json").read_text())["comparisons"][0]["rows"]
    assert {row["verdict"] for row in rows} == {CANNOT_TELL}
    assert {row["name"]: round(row["ratio"]["value"], 2) for row in rows} == {
        "throughput": 0.5, "conv1": 2.0, "fc": 2.0, "images h2d": 2.0, "sum": 2.0,
    }  # fmt: skip


def test_several_files_are_each_compared_with_the_first(tmp_path, capsys):
    samples = np.asarray(made().latency.samples_ms) / 1e3
    paths = [
        written(tmp_path / f"{index}.json", made(factor * samples))
        for index, factor in enumerate((1.0, 2.0, 0.5))
    ]
    outputs = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html")}
    assert compare.main([*paths, *(f"--{name}={path}" for name, path in outputs.items())]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("Summary: B is slower than A: median pass 2.000 x")
    assert last[1].startswith("Summary: C is faster than A: median pass 0.5000 x")
    document = json.loads(outputs["json"].read_text())
    assert (document["schema"], document["kind"]) == (1, "comparison")
    assert [found["verdict"] for found in document["comparisons"]] == [SLOWER, FASTER]
    rows = list(csv.DictReader(io.StringIO(outputs["csv"].read_bytes().decode(), newline="")))
    assert tuple(rows[0]) == tuple(compare.COLUMNS)
    assert len(rows) == 2 * 8
    assert [row["verdict"] for row in rows if row["name"] == "p50"] == [SLOWER, FASTER]
    assert float(rows[0]["ratio_low"]) <= 2 <= float(rows[0]["ratio_high"])
    assert "<html" in outputs["html"].read_text()


def test_many_layers_of_long_names_fill_no_screens(tmp_path, capsys):
    result = made()
    names = [f"backbone.stage{index // 10}.block.convolution/node_{index}" for index in range(40)]
    result.layers = [replace(result.layers[0], name=name) for name in names]
    paths = [written(tmp_path / f"{name}.json", result) for name in "ab"]
    assert compare.main([*paths, "--json", str(tmp_path / "c.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[0] for line in lines if line.startswith("backbone")]
    assert len(set(rows)) == 40
    assert rows[17] == "backbone.stage...lution/node_17"
    assert any("and 37 more" in line for line in lines)  # 40 layers, a copy, their sum; 5 are named
    document = json.loads((tmp_path / "c.json").read_text())
    assert set(names) < {row["name"] for row in document["comparisons"][0]["rows"]}


def test_standard_input_and_output(files):
    with open(files["pad"]) as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "cnn_engine.compare", files["if1"], "-", "--csv", "-"],
            stdin=stdin, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {row["other"] for row in rows} == {"standard input"}


def test_noise_from_the_command_line(files, capsys):
    assert compare.main([files["if1"], files["pad"], "--noise", files["if2"]]) == 0
    out = capsys.readouterr().out
    assert " noise " in out
    assert compare.main([files["if1"], files["pad"], "--noise", files["pad"]]) == 2
    assert "expected another run of" in capsys.readouterr().err


def test_names_that_are_no_text(tmp_path):
    """Bytes that are no UTF-8 in a path, control characters and lone surrogates in a layer's name."""
    result = made(check=None)
    result.layers[0].name = "conv\n\x1b[2J"
    first = written(tmp_path / "a.json", result)
    document = (tmp_path / "a.json").read_text().replace('"fc"', '"fc\\udcff"')
    odd = (str(tmp_path) + "/b\udcff.json").encode("utf-8", "surrogateescape")
    with open(odd, "w") as file:
        file.write(document)
    done = subprocess.run(
        [sys.executable.encode(), b"-m", b"cnn_engine.compare", first.encode(), odd],
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout
    text = "".join(done.stdout.decode().split())  # a long path is folded
    assert "b\\udcff.json:itsoutputswerenotchecked" in text


FAULTS = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "a number": lambda text: "1",
    "binary": lambda text: "\x00\x01",
    "nested too deep": lambda text: "[" * 100_000,
}
CHANGES = {
    "another schema": ({"schema": 2}, "schema"),
    "no schema": ({"schema": None}, "schema"),
    "no layers": ({"layers": 3}, "layers"),
    "no network": ({"network": None}, "network"),
    "infinite time": ({"latency_samples_ms": [1e400] * 9}, "latency_samples_ms"),
    "a time of ages": ({"latency_samples_ms": [1e300] * 9}, "latency_samples_ms"),
    "a negative time": ({"latency_samples_ms": [-1.0] * 9}, "latency_samples_ms"),
    "text for a time": ({"latency_samples_ms": ["1"] * 9}, "samples_ms"),
    "a huge batch": ({"batch": 10**400}, "batch"),
    "no batch": ({"batch": 0}, "batch"),
    "no images": ({"dataset": {"name": "x", "source": "y"}}, "images"),
    "no data set": ({"dataset": {"images": 1}}, "dataset"),
    "huge accuracy": ({"accuracy": {"correct": 10**400, "total": 1}}, "accuracy"),
    "failed": ({"check": {**vars(CHECK), "max_abs_diff": 0.5}}, "nothing was timed"),
    "failed with nan": ({"check": {**vars(CHECK), "max_abs_diff": None}}, "nothing was timed"),
    "negative phase": ({"phases": {"forward_s": -1.0}}, "forward_s"),
}


@pytest.mark.parametrize("fault", [*FAULTS, *CHANGES])
@pytest.mark.parametrize("position", [0, 1])
def test_files_that_are_no_results(fault, position, tmp_path, capsys):
    good = written(tmp_path / "good.json", made())
    bad = tmp_path / "bad.json"
    word = "bad.json"
    if fault in FAULTS:
        bad.write_text(FAULTS[fault](json.dumps(json.loads(report.json.dumps(made())))))
    else:
        changes, word = CHANGES[fault]
        written(bad, made(), **changes)
    paths = [str(bad), good] if position == 0 else [good, str(bad)]
    assert compare.main([*paths, "--json", str(tmp_path / "out.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "bad.json" in err
    assert word in err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(("part", "step"), [("layers", "layer"), ("copies", "copy")])
@pytest.mark.parametrize(
    ("key", "value"), [("samples_s", [-1e-6]), ("calls", -1), ("bytes", 10**400)]
)
def test_steps_out_of_range(part, step, key, value, tmp_path, capsys):
    document = json.loads(report.json.dumps(made()))
    document[part][0][key] = value
    (tmp_path / "bad.json").write_text(json.dumps(document))
    good = written(tmp_path / "good.json", made())
    assert compare.main([good, str(tmp_path / "bad.json")]) == 2
    err = capsys.readouterr().err
    assert f"bad.json: {part[:3]}" in err  # of layers or a layer, copies or a copy
    assert key in err


@pytest.mark.parametrize("path", ["missing.json", ".", "/dev/zero", "/dev/null", "n" * 300])
def test_what_cannot_be_read(path, tmp_path, capsys):
    good = written(tmp_path / "good.json", made())
    path = path if path.startswith("/") else str(tmp_path / path)
    assert compare.main([good, path]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert path in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["{a}"],
        ["{a}", "{b}", "--fail-on", "0"],
        ["{a}", "{b}", "--fail-on", "-5%"],
        ["{a}", "{b}", "--fail-on", "5"],  # 5 % or five times?
        ["{a}", "{b}", "--fail-on", "nan"],
        ["{a}", "{b}", "--fail-on", "5%%"],
        ["{a}", "{b}", "--fail-on", "much"],
        ["{a}", "{b}", "--threshold", "100%"],
        ["{a}", "{b}", "--threshold", "1e-400"],
        ["{a}", "{b}", "--json", "-", "--csv", "-"],
        ["{a}", "{b}", "--json", "{a}"],
        ["{a}", "{b}", "--json", "{folder}/x", "--csv", "{folder}/../{name}/x"],
        ["{a}", "{b}", "--html", "{folder}/none/x.html"],
        ["{a}", "{b}", "--csv", "{folder}"],
        ["-", "-"],
        ["{a}", "{b}", "--fast"],
        ["{a}", *["{b}"] * 30],
    ],
)
def test_options_at_fault(arguments, tmp_path, capsys):
    positions = {
        "a": written(tmp_path / "a.json", made()), "b": written(tmp_path / "b.json", made()),
        "folder": tmp_path, "name": tmp_path.name,
    }  # fmt: skip
    before = sorted((path.name, path.read_text()) for path in tmp_path.iterdir())
    assert compare.main([argument.format(**positions) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted((path.name, path.read_text()) for path in tmp_path.iterdir()) == before


def test_a_link_to_itself(tmp_path, capsys):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    good = written(tmp_path / "good.json", made())
    assert compare.main([good, str(tmp_path / "loop")]) == 2
    assert "loop" in capsys.readouterr().err


def test_shares():
    convert = compare.fraction(100)
    for text in ("5%", "0.05", " 5 %", "5e0%"):
        assert convert(text) == pytest.approx(0.05)
    assert convert("200%") == 2


def test_help(capsys):
    assert compare.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--fail-on-layers" in out
    assert "5%" in out
