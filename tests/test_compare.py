"""``python -m cnn_engine.compare``: verdicts on simulated noise, real files, gates, and every error."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from noise import noise

from cnn_engine import InputError, compare, comparison, report, run
from cnn_engine.comparison import CANNOT_TELL, FASTER, SAME, SLOWER
from cnn_engine.result import (
    Accuracy,
    Check,
    CopyTime,
    Latency,
    LayerTime,
    Phases,
    Result,
    TimedPass,
)

CHECK = Check("NumPy float64", 20, 1e-6, 1.0, 1e-5)
OPPOSITE = {FASTER: SLOWER, SLOWER: FASTER, SAME: SAME, CANNOT_TELL: CANNOT_TELL}


def made(samples=None, *, seed=0, **changes) -> Result:
    """A result of ten passes or ``samples`` (seconds), each spent on two layers and a copy."""
    if samples is None:
        samples = 1e-3 * (1 + 0.001 * np.random.default_rng(seed).standard_normal(60))
    samples = np.asarray(samples, float)
    parts = {
        name: list(share * samples)
        for name, share in (("conv1", 0.6), ("fc", 0.2), ("images", 0.1))
    }
    calls, batch = len(samples), changes.get("batch", 10)
    layers = [
        LayerTime(name, kind, "cpu", calls, sum(parts[name]), None, calls, calls, parts[name])
        for name, kind in (("conv1", "conv"), ("fc", "fc"))
    ]
    values = {
        "command": "python -m cnn_engine.run", "network": "small", "weights": "default",
        "environment": {"host": "here", "versions": {"numpy": "2.0"}, "commit": "abc", "warnings": []},
        "dataset": {"name": "synthetic", "source": "synthetic", "images": batch * calls},
        "device": "cpu", "device_name": "CPU", "variant": "pad", "variant_reason": None,
        "reduction": False, "dtype": "float32", "data_mode": "resident", "batch": batch, "threads": 1,
        "phases": Phases(forward_s=float(samples.sum())), "check": CHECK, "layers": layers,
        "copies": [CopyTime("images", "h2d", calls, calls, sum(parts["images"]), parts["images"])],
        "latency": Latency(list(1e3 * samples)), "iterations": 1, "images_done": batch * calls,
        "throughput_images_per_s": batch * calls / float(samples.sum()),
        "timed_pass": TimedPass(calls, float(samples.sum())),
    }  # fmt: skip
    return Result(**{**values, **changes})


def written(path, result: Result, **changes) -> str:
    """Writes ``result`` as JSON, its document changed by ``changes``; returns the path."""
    document = json.loads(report.json.dumps(result)) | changes
    path.write_text(json.dumps(document))
    return str(path)


def whole(a: Result, b: Result, **options) -> str:
    return comparison.compare(a, b, **options).whole.verdict


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


# Verdicts on simulated noise: seeded, so that what is counted is the same on every run.


def trials(draw, count=200, **options) -> list[str]:
    return [whole(made(draw()), made(draw()), **options) for _ in range(count)]


def test_independent_noise_is_hardly_ever_a_difference(rng):
    verdicts = trials(lambda: 1e-3 * (1 + 0.02 * rng.standard_normal(100)), threshold=0.01)
    assert sum(verdict in (FASTER, SLOWER) for verdict in verdicts) <= 2


def test_with_many_samples_the_same_is_the_same(rng):
    verdicts = trials(lambda: 1e-3 * (1 + 0.02 * rng.standard_normal(1000)), threshold=0.01)
    assert verdicts.count(SAME) >= 190


@pytest.mark.parametrize("count", [20, 100, 1000])
def test_a_shift_of_ten_percent_is_slower_and_back_faster(count, rng):
    draw = lambda: made(1e-3 * (1 + 0.02 * rng.standard_normal(count)))  # noqa: E731
    found = [
        (whole(a, b), whole(b, a))
        for a, b in (
            (draw(), made(1.1e-3 * (1 + 0.02 * rng.standard_normal(count)))) for _ in range(50)
        )
    ]
    assert found.count((SLOWER, FASTER)) >= 48


@pytest.mark.parametrize("count", [50, 200, 1000])
def test_noise_that_drifts_is_seldom_a_difference(count, rng):
    """AR(1) on a slope that differs from run to run, of twice the noise's size."""

    def draw():
        slope = 0.04 * rng.standard_normal() * np.linspace(-0.5, 0.5, count)
        return 1e-3 * (1 + 0.02 * noise(count, 0.9, rng) + slope)

    verdicts = trials(draw, threshold=0.01)
    assert sum(verdict in (FASTER, SLOWER) for verdict in verdicts) <= 8  # 4 %


def test_a_random_walk_is_seldom_a_difference(rng):
    draw = lambda: 1e-3 * (1 + 0.02 * np.cumsum(rng.standard_normal(100)) / 10)  # noqa: E731
    verdicts = trials(draw, threshold=0.01)
    assert sum(verdict in (FASTER, SLOWER) for verdict in verdicts) <= 10  # 5 %


@pytest.mark.parametrize("count", [1, 5])
def test_few_samples_cannot_tell_not_even_a_large_difference(count):
    found = comparison.compare(made([1e-3] * count), made([9e-3] * count))
    assert {row.verdict for row in found.rows} == {CANNOT_TELL}
    assert {row.reason for row in found.rows} == {"fewer than 6 samples"}
    assert found.whole.ratio.value == pytest.approx(9)


def test_to_exchange_the_results_exchanges_the_verdicts(rng):
    for size in (1.0, 1.005, 1.02, 1.035, 1.2):
        a = made(1e-3 * (1 + 0.01 * rng.standard_normal(80)))
        b = made(size * 1e-3 * (1 + 0.01 * rng.standard_normal(80)))
        there, back = comparison.compare(a, b), comparison.compare(b, a)
        for one, other in zip(there.rows, back.rows, strict=True):
            assert OPPOSITE[one.verdict] == other.verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.98, 1.02, SAME),
        (1.04, 1.2, SLOWER),
        (0.8, 0.96, FASTER),
        (1.01, 1.2, CANNOT_TELL),
        (0.9, 1.02, CANNOT_TELL),
        (0.5, 2.0, CANNOT_TELL),
    ],
)
def test_the_verdict_is_on_the_whole_interval(low, high, verdict):
    ratio = comparison.Estimate(math.sqrt(low * high), low, high, 50, 50.0)
    assert comparison.judge(ratio, 0.03, more_is_faster=False)[0] == verdict
    assert comparison.judge(ratio, 0.03, more_is_faster=True)[0] == OPPOSITE[verdict]


# What is compared.


def test_layers_copies_and_their_sum():
    slower = made(seed=1)
    slower.layers[0].samples_s = [2 * value for value in slower.layers[0].samples_s]
    found = {(row.section, row.name): row for row in comparison.compare(made(), slower).rows}
    assert found["layer", "conv1"].verdict == SLOWER
    assert found["layer", "conv1"].ratio.value == pytest.approx(2, rel=0.01)
    assert found["layer", "fc"].verdict == SAME
    assert found["copy", "images h2d"].verdict == SAME
    assert found["sum", "sum"].ratio.value == pytest.approx(1.5 / 0.9, rel=0.01)
    assert found["throughput", "throughput"].verdict == SAME
    assert found["throughput", "throughput"].baseline.value == pytest.approx(1e4, rel=0.01)
    assert found["pass", "p50"].baseline.value == pytest.approx(1e-3, rel=0.01)


def test_the_throughput_is_what_the_report_says():
    """It counts passes that are not full too; the interval is that of the full ones."""
    row = next(
        row
        for row in comparison.compare(made(), made(throughput_images_per_s=9e3)).rows
        if row.section == "throughput"
    )
    assert row.other.value == 9e3
    assert row.other.low < 9e3 < row.other.high
    assert row.verdict == SLOWER


def test_what_only_one_of_them_has_is_listed():
    other = made()
    other.layers[1].name, other.copies = "fc2", []
    found = comparison.compare(made(), other, ("a", "b"))
    assert set(found.only) == {
        ("layer", "fc", "a"),
        ("copy", "images h2d", "a"),
        ("layer", "fc2", "b"),
    }
    assert {row.name for row in found.steps} == {"conv1"}
    text = compare.render([found], [made(), other])
    assert "Only in A                    : fc, images h2d" in text
    assert "Only in B                    : fc2" in text


def test_the_calls_of_a_pass_in_chunks_are_added_up():
    """Four chunks a pass against one: the same time a pass, a quarter a call."""
    whole_batch, chunked = made(), made()
    copy = chunked.copies[0]
    copy.samples_s = [part for value in copy.samples_s for part in [value / 4] * 4]
    copy.calls *= 4
    row = next(r for r in comparison.compare(whole_batch, chunked).rows if r.section == "copy")
    assert row.ratio.value == pytest.approx(1)
    assert row.verdict == SAME
    copy.calls, copy.samples_s = 12_000, copy.samples_s[::2]  # thinned: passes no longer together
    row = next(r for r in comparison.compare(whole_batch, chunked).rows if r.section == "copy")
    assert row.verdict == CANNOT_TELL
    assert row.reason == "no raw samples"


def test_other_batches_are_compared_by_the_image():
    found = comparison.compare(made(batch=10), made(2e-3 * np.ones(20), batch=40))
    assert found.per == "image"
    assert found.whole.baseline.value == pytest.approx(1e-4, rel=0.01)
    assert found.whole.ratio.value == pytest.approx(0.5, rel=0.01)
    throughput = next(row for row in found.rows if row.section == "throughput")
    assert throughput.ratio.value == pytest.approx(2, rel=0.01)
    assert throughput.verdict == FASTER
    assert any("batches differ" in warning for warning in found.warnings)
    assert "pass p50, an image" in compare.render([found], [made(), made()])


def test_what_differs_is_listed_and_what_is_of_the_moment_is_not():
    first = made(accuracy=Accuracy(80, 100))
    second = made(variant="if", reduction=True, threads=2, accuracy=Accuracy(10, 100))
    state = {"sm_clock_mhz": 1980, "power_limit_w": 700.0, "temperature_c": 40}
    first.environment |= {"gpu_state": state, "cpu_state": {"governor": "performance"}}
    second.environment |= {
        "versions": {"numpy": "2.1"},
        "commit": None,
        "gpu_state": {**state, "sm_clock_mhz": 1200, "temperature_c": 80},
        "cpu_state": {"governor": "powersave"},
    }
    found = comparison.compare(first, second).differences
    assert found == [
        ("variant", "pad", "if"),
        ("reduction", "no", "yes"),
        ("threads", "1", "2"),
        ("accuracy", "80.00 %", "10.00 %"),
        ("numpy", "2.0", "2.1"),
        ("commit", "abc", "none"),
        ("sm clock mhz", "1,980", "1,200"),
        ("governor", "performance", "powersave"),
    ]
    second.environment["gpu_state"]["sm_clock_mhz"] = 1965  # a boost clock's usual wandering
    assert "sm clock mhz" not in dict(x[:2] for x in comparison.compare(first, second).differences)


def test_warnings():
    other = made(network="large", check=None, interrupted=True)
    other.environment["warnings"] = ["GPU: shared with other processes: 1"]
    other.latency.samples_ms[3] = math.nan
    warnings = "\n".join(comparison.compare(made(), other, ("a", "b")).warnings)
    for text in (
        "the networks differ",
        "b: its outputs were not checked",
        "b: interrupted",
        "b: GPU: shared with other processes: 1",
        "b: 1 sample null",
    ):
        assert text in warnings
    assert comparison.compare(made(), made()).warnings == []


def test_layers_that_ran_elsewhere_are_told():
    other = made()
    other.layers[1].place = "cuda"
    warning = comparison.compare(made(), other, ("a", "b")).warnings[0]
    assert warning.startswith("on cpu in a, on cuda in b: fc; ")


def test_null_samples_are_left_out():
    other = made()
    other.layers[0].samples_s[::2] = [math.nan] * 30
    other.layers[1].samples_s = [math.nan] * 60
    rows = {row.name: row for row in comparison.compare(made(), other).rows}
    assert rows["conv1"].ratio.samples == 30
    assert rows["conv1"].verdict == SAME
    assert rows["fc"].reason == "no raw samples"
    nothing = made(throughput_images_per_s=math.nan)
    nothing.latency.samples_ms = [math.nan] * 60
    assert comparison.compare(made(), nothing).whole is None


def test_a_layer_that_took_no_time():
    other = made()
    other.layers[0].samples_s, other.layers[0].host_s = [0.0] * 60, 0.0
    row = next(row for row in comparison.compare(made(), other).rows if row.name == "conv1")
    assert (row.ratio, row.verdict) == (None, CANNOT_TELL)
    assert "0 s" in compare.render([comparison.compare(made(), other)], [made(), other])


def test_further_runs_of_the_baseline_are_the_noise():
    """5 % slower is a difference; not where runs of the baseline differ by 8 %."""
    samples = np.asarray(made().latency.samples_ms) / 1e3
    base, slower, again = made(samples), made(1.05 * samples), made(0.926 * samples)
    assert whole(base, slower) == SLOWER
    found = comparison.compare(base, slower, repeats=[again])
    assert found.whole.noise == pytest.approx(0.08, abs=0.001)
    assert found.whole.verdict == SAME
    assert not found.whole.exceeds(0.03)
    assert comparison.compare(base, slower).whole.exceeds(0.03)
    assert "7.99 %" in compare.render([found], [base, slower])


# The command.


def test_two_real_runs_of_the_same_differ_by_nothing_that_counts(files, capsys):
    assert compare.main([files["if1"], files["if2"], "--threshold", "50%"]) == 0
    out = capsys.readouterr().out
    assert "Differs                      : nothing that was recorded" in out
    assert out.splitlines()[-1].startswith("Summary: ")
    for name in ("pass p50", "throughput", "conv1", "softmax", "images/s", "95 % interval"):
        assert name in out
    assert " 0.00" not in out


def test_a_file_with_itself_is_never_a_difference(files, capsys):
    assert compare.main([files["if1"], files["if1"], "--fail-on", "1%", "--fail-on-layers=1%"]) == 0
    out = capsys.readouterr().out
    assert "faster" not in out.replace("cannot tell whether B is faster", "")
    assert "slower" not in out


def test_if_against_pad(files, capsys):
    assert compare.main([files["if1"], files["pad"], "--fail-on", "50%"]) == 0
    out, err = capsys.readouterr()
    assert "variant: if -> pad" in out
    assert "reduction: no -> yes" in out
    assert "Only in B                    : pad1, pad2, pad3" in out
    assert "B is slower than A" not in out
    assert err == ""


def test_a_real_run_made_slower_fails_a_build(files, tmp_path, capsys):
    with open(files["if1"]) as file:
        document = json.load(file)
    document["latency_samples_ms"] = [10 * value for value in document["latency_samples_ms"]]
    for layer in document["layers"]:
        layer["samples_s"] = [10 * value for value in layer["samples_s"]]
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
    assert compare.main([files["if1"], str(slow), "--quiet", "--fail-on", "5000%"]) == 0
    assert capsys.readouterr() == ("", "")
    assert compare.main([files["if1"], str(slow), "--quiet", "--fail-on-layers", "10%"]) == 1
    assert f"{slow}: conv1: expected at most 1.100 x" in capsys.readouterr().err


def test_the_gate_is_at_the_limit_and_judges_every_file(tmp_path, capsys):
    base = written(tmp_path / "a.json", made())
    small = written(tmp_path / "c.json", made(1.04e-3 * np.ones(60)))
    large = written(tmp_path / "d.json", made(1.06e-3 * np.ones(60)))
    assert compare.main([base, small, "--fail-on", "5%"]) == 0
    assert compare.main([base, large, "--fail-on", "5%"]) == 1
    assert compare.main([base, small, large, small, "--fail-on", "5%"]) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("value", "low", "noise_share", "is_one"),
    [
        (1.06, 1.01, 0.0, True),
        (1.06, 0.99, 0.0, False),  # perhaps faster
        (1.04, 1.03, 0.0, False),  # slower, but allowed
        (1.06, 1.01, 0.08, False),  # as runs of the baseline differ
        (1.09, 1.01, 0.08, True),
        (1.5, None, 0.0, False),
    ],
)
def test_what_a_regression_is(value, low, noise_share, is_one):
    time = comparison.Estimate(1.0, 0.99, 1.01, 50, 50.0)
    ratio = comparison.Estimate(value, low, low and 2 * value - low, 50, 50.0)
    row = comparison.Row("pass", "p50", "s", time, time, ratio, noise_share, CANNOT_TELL, "")
    assert row.exceeds(0.05) is is_one
    assert not replace(row, ratio=None).exceeds(0.05)


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
    assert tuple(rows[0]) == compare.COLUMNS
    assert len(rows) == 2 * 8
    assert [row["verdict"] for row in rows if row["name"] == "p50"] == [SLOWER, FASTER]
    assert float(rows[0]["ratio_low"]) <= 2 <= float(rows[0]["ratio_high"])
    assert "<html" in outputs["html"].read_text()


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


@pytest.mark.parametrize("path", ["missing.json", ".", "/dev/zero", "/dev/null"])
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
    places = {
        "a": written(tmp_path / "a.json", made()), "b": written(tmp_path / "b.json", made()),
        "folder": tmp_path, "name": tmp_path.name,
    }  # fmt: skip
    before = sorted((path.name, path.read_text()) for path in tmp_path.iterdir())
    assert compare.main([argument.format(**places) for argument in arguments]) == 2
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


def test_the_functions_refuse_what_the_command_refuses():
    failed = made(check=replace(CHECK, max_abs_diff=1.0))
    with pytest.raises(InputError, match="nothing was timed"):
        comparison.compare(made(), failed)
    with pytest.raises(InputError, match="variant"):
        comparison.check_repeat(("a", "b"), made(), made(variant="if"))


def test_help(capsys):
    assert compare.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--fail-on-layers" in out
    assert "5%" in out
