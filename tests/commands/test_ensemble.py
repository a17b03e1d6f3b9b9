"""The ensemble in one process: its command, members, sources, reports and tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import onnx
import onnx_models
import pytest
from onnx import helper

from cnn_engine import cli, workload
from cnn_engine.ensemble import (
    collect,
    command,
    members,
    meters,
    outputs,
    roles,
    source,
    transport,
    watchdog,
)
from cnn_engine.ensemble.order import Order
from cnn_engine.errors import InputError
from cnn_engine.io import model_metadata
from cnn_engine.io.preprocess import Preprocess

ROOT = Path(__file__).resolve().parents[2]
QUIET = ["--quiet", "--no-ceilings", "--device", "cpu", "--threads", "1"]


# ---- the command ----


def run(tmp_path, *words):
    path = tmp_path / "report.json"
    assert command.main(["--json", str(path), *QUIET, *words]) == cli.DONE
    return json.loads(path.read_text())


@pytest.mark.parametrize("design", list(roles.DESIGNS))
def test_all_designs_give_members_the_same_bits(tmp_path, design):
    words = ("--data", "jpeg:40x30", "--images", "70", "--batch", "16", "--augment", "full",
             "--shuffle", "--seed", "5", "--members", "2", "--digest")  # fmt: skip
    alone = run(tmp_path, "--design", "none", *words)
    found = run(tmp_path, "--design", design, *words)
    digests = found["rank_reports"][0]["digests"]
    assert digests == alone["rank_reports"][0]["digests"]
    assert digests["0"] == digests["1"]
    assert found["images"] == 70
    decoded = found["rank_reports"][0]["preprocessing"]["images"]
    assert decoded == (140 if design == roles.NONE else 70)


def test_probabilities_are_those_of_the_engine(tmp_path, capsys):
    from cnn_engine.workloads.cifar10 import dataset

    import cnn_engine

    words = ["--data", "synthetic", "--images", "90", "--batch", "40", "--member", "weights=random"]
    words += ["--member", "network=cifar10,name=own", "--combine", "3,1", "--device", "cpu"]
    output = tmp_path / "output"
    assert command.main([*words, "--output", str(output), "--ceilings", "0.05"]) == cli.DONE
    images = dataset.load("synthetic", 90).images
    engine = cnn_engine.Engine("cifar10", device="cpu")
    wanted = np.concatenate([engine.predict(images[k : k + 40]) for k in (0, 40, 80)])
    found = [np.load(output / f"member-{k}.npy") for k in (0, 1)]
    assert (found[1] == wanted).all()
    mean = np.tensordot([0.75, 0.25], found, 1).astype(np.float32)
    assert (np.load(output / "ensemble.npy") == mean).all()
    assert sorted(path.name for path in output.iterdir()) == [
        "ensemble.npy", "member-0.npy", "member-1.npy", "report.json",
    ]  # fmt: skip
    text = capsys.readouterr().out
    assert "Ensemble of 2 members, in-process, 1 rank" in text
    assert "Bound by" in text
    document = json.loads((output / "report.json").read_text())
    steps = document["rank_reports"][0]["steps"]
    parts = sum(steps[key] for key in ("compute_s", "waiting_s", "augment_s", "extra_s"))
    assert parts == pytest.approx(steps["total_s"])
    limits = document["ceilings_images_per_s"]
    assert limits["communication"] is None
    assert limits[document["bound_by"]] == min(limits["members"], limits["preprocessing"])


@pytest.mark.parametrize("balance", [[], ["--balance"]])
def test_members_read_what_preprocess_makes(tmp_path, balance):
    import cnn_engine

    preprocess = Preprocess.parse("resize=36,crop=32,mean=0.5/0.4/0.3,std=0.2/0.3/0.4")
    words = [
        "--data",
        "jpeg:50x40",
        "--images",
        "20",
        "--batch",
        "8",
        "--preprocess",
        str(preprocess),
    ]
    output = tmp_path / "output"
    assert command.main([*words, *balance, *QUIET, "--output", str(output)]) == cli.DONE
    network = workload.get("cifar10")
    jpegs = source.source("jpeg:50x40", network, 20, preprocess)
    pixels = np.empty((20, 3, 32, 32), np.uint8)
    for sample in range(20):
        jpegs.decode(sample, jpegs.read(sample), pixels[sample])
    images = preprocess.normalised(pixels)
    with cnn_engine.Engine(network, device="cpu", threads=1) as engine:
        wanted = np.concatenate([engine.predict(images[k : k + 8]) for k in (0, 8, 16)])
    assert (np.load(output / "member-0.npy") == wanted).all()


def test_members_may_give_outputs_of_any_rank(tmp_path, capsys):
    """A segmentation network beside a network of several outputs, prepared as their files say."""
    import cnn_engine

    prepared = Preprocess(letterbox=(8, 12), fill=114)
    for name, seed in (("a", 0), ("b", 1)):
        weights = np.random.default_rng(seed).normal(size=(2, 3, 3, 3)).astype(np.float32)
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["planes"], pads=[1] * 4),
            helper.make_node("GlobalAveragePool", ["planes"], ["mean"]),
        ]
        given = [
            onnx_models.tensor("planes", ["n", 2, "h", "w"]),
            onnx_models.tensor("mean", ["n", 2, 1, 1]),
        ]
        read = [onnx_models.tensor("x", ["n", 3, "h", "w"])]
        made = onnx_models.model(nodes, read, given[: 1 + seed], {"w": weights})
        helper.set_model_props(made, model_metadata.entries(prepared, None))
        onnx.save(made, tmp_path / f"{name}.onnx")
    one, two = (f"model={tmp_path / name}.onnx" for name in "ab")
    words = ["--data", "jpeg:30x40", "--images", "9", "--batch", "4", *QUIET]
    found = run(
        tmp_path,
        *words,
        "--member",
        one,
        "--member",
        f"{two},output=planes",
        "--output",
        str(tmp_path / "o"),
    )
    assert found["accuracy"] is None
    network = members.Spec(0, model=one[6:], preprocess=str(prepared)).workload()
    jpegs = source.source("jpeg:30x40", network, 9, prepared)
    pixels = np.empty((9, 3, 8, 12), np.uint8)
    for sample in range(9):
        jpegs.decode(sample, jpegs.read(sample), pixels[sample])
    images = prepared.normalised(pixels)
    rows = []
    for number, path in enumerate((one[6:], two[6:])):
        with cnn_engine.Engine(path, device="cpu", threads=1) as engine:
            rows.append(
                np.concatenate([engine.run({"x": images[k : k + 4]})["planes"] for k in (0, 4, 8)])
            )
        assert (np.load(tmp_path / f"o/member-{number}.npy") == rows[-1]).all()
    mean = np.stack(rows).mean(0, dtype=np.float64).astype(np.float32)
    assert (np.load(tmp_path / "o/ensemble.npy") == mean).all()
    for more, message in (
        (["--member", two], "--member: expected output=NAME beside model="),
        (["--member", "network=a.onnx"], "--member: expected model=a.onnx for a file"),
        (
            ["--member", f"{two},output=mean", "--member", one],
            "--member: expected the same shape of outputs",
        ),
        (
            ["--member", one, "--combine", "vote"],
            "--combine vote: expected members that give a row of",
        ),
        (["--member", one, "--data", "synthetic"], "--data: expected images of pixels"),
    ):
        assert command.main([*words, *more]) == cli.INPUT_AT_FAULT
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_page_trace_and_csv_are_written(tmp_path):
    paths = {kind: tmp_path / f"found.{kind}" for kind in ("html", "trace", "csv")}
    words = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    run(tmp_path, "--data", "synthetic", "--images", "50", *words)
    assert "preprocesses; member 0 (cifar10-0)" in paths["html"].read_text()
    events = json.loads(paths["trace"].read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} == {
        "compute", "waiting", "augment",
    }  # fmt: skip
    assert paths["csv"].read_text().splitlines()[0] == ",".join(collect.COLUMNS)


def test_a_member_that_raises_is_named(tmp_path, monkeypatch, capsys):
    def fail(self, *rest):
        raise ValueError("on purpose")

    ended = []
    monkeypatch.setattr(members.InferMember, "step", fail)
    monkeypatch.setattr("os._exit", lambda code: ended.append(code))
    command.main(["--data", "synthetic", "--images", "50", *QUIET])
    assert ended == [1]
    line = capsys.readouterr().err
    assert line.startswith("error: preprocesses; member 0 (cifar10-0): ValueError: on purpose (")


def test_a_rank_that_told_of_a_fault_and_ended_is_not_said_to_have_died(monkeypatch, capsys):
    class World:
        def iprobe(self, tag):
            return tag == watchdog._FAULT

        def recv(self, tag):
            return "rank 1: expected a sign of life", 1

        def Abort(self, code):
            raise SystemExit(code)

    monkeypatch.setattr(watchdog, "GRACE_S", 0.0)
    monkeypatch.setattr(watchdog._thread, "interrupt_main", lambda: None)
    watching = watchdog.Watchdog(transport.Alone())
    watching.stop()
    watching._stop.clear()
    watching._world, watching._processes = World(), {7: 2}
    monkeypatch.setattr(watching, "_poll", types.SimpleNamespace(poll=lambda wait: [(7, 1)]))
    with pytest.raises(SystemExit):
        watching._look_at_processes()
    assert watching.fault == "rank 1: expected a sign of life"
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--design", "ring"], "--design: expected one of none, all-shared"),
        (["--design", "none", "--preprocessors", "1"], "--preprocessors: expected the design"),
        (["--design", "multi-bcast", "--dedicated"], "--dedicated: expected at least two ranks"),
        (["--design", "single-bcast", "--preprocessors", "2"], "--preprocessors: expected at most 1"),
        (["--member", "speed=3"], "--member: expected KEY=VALUE"),
        (["--member", "network=cifar10", "--members", "2"], "--members: expected as many"),
        (["--member", "network=cifar10", "--member", "network=ece408"], "--member: expected the same"),
        (["--combine", "1,2,3"], "--combine: expected"),
        (["--data", "jpeg:32"], "--data: expected jpeg:WIDTHxHEIGHT"),
        (["--data", "n" * 300 + ".tar"], "File name too long"),
        (["--ranks", "3"], "--ranks: expected the option --dry-run"),
        (["--preprocess", "resize=4,crop=4", "--data", "jpeg:32x32"], "--preprocess: expected images"),
        (["--preprocess", "imagenet", "--work", "train", "--output", "o"], "--preprocess: expected no mean"),
        (["--collect", "nowhere-at-all"], "--collect"),
    ],
)  # fmt: skip
def test_options_at_fault(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.main([*words, *QUIET]) == cli.INPUT_AT_FAULT
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("words", "shell", "message"),
    [
        (
            "--json -",
            "{} > /dev/full",
            "standard output: expected to write to it, found: No space left",
        ),
        (
            "--output out",
            "ulimit -f 1; {}",
            "--output: cannot write out/member-0.part: File too large",
        ),
    ],
)
def test_what_cannot_be_written_is_at_fault(words, shell, message, tmp_path):
    options = "--data synthetic --images 40 --batch 8 " + " ".join(QUIET)
    line = f"{sys.executable} -m cnn_engine.ensemble {options} {words}"
    done = subprocess.run(
        ["sh", "-c", shell.format(line)], cwd=tmp_path, stderr=-1, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (cli.INPUT_AT_FAULT, 1)
    assert message in done.stderr


def test_a_dry_run_prints_every_role(capsys):
    words = ["--dry-run", "--ranks", "3", "--design", "single-bcast", "--members", "2"]
    assert command.main([*words, "--preprocessors", "2"]) == cli.DONE
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rank 0: preprocesses; merges; member 0 (cifar10-0)",
        "rank 1: preprocesses; member 1 (cifar10-1)",
        "rank 2: idle",
    ]


# ---- sources ----


def test_folders_of_images_are_classes(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, value in (("b/1.png", 20), ("a/2.png", 40), ("a/1.png", 60)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        image.new("RGB", (32, 32), (value, 0, 0)).save(path)
    found = source.source(str(tmp_path), workload.get("cifar10"), None)
    assert [*found.labels] == [0, 0, 1]
    pixels = np.empty((3, 32, 32), np.uint8)
    for sample, value in enumerate((60, 40, 20)):
        found.decode(sample, found.read(sample), pixels)
        assert (pixels[0] == value).all()
    assert len(source.source(str(tmp_path), workload.get("cifar10"), 2)) == 2
    with pytest.raises(InputError, match="images: expected at most 3"):
        source.source(str(tmp_path), workload.get("cifar10"), 4)


def test_what_a_run_left_can_be_read(tmp_path):
    spec = members.Spec(0, weights="random", device="cpu")
    member = members.InferMember(spec, 20, tmp_path, 1)
    order = Order(20, 8)
    images = np.zeros((8, 3, 32, 32), np.uint8)
    member.step(order[1], images, np.zeros(8, np.int32))
    path = tmp_path / "member-0.part"
    with path.open("ab") as file:
        file.write(b"half a row")
    rows = members.read_part(path, 10)
    assert [*rows["sample"]] == [*range(8, 16)]
    assert (rows["probabilities"] == member.probabilities[8:16]).all()
    member.close()


# ---- combinations ----


def test_combinations(monkeypatch):
    rows = np.array([[[0.9, 0.1], [0.4, 0.6]], [[0.2, 0.8], [0.3, 0.7]], [[0.3, 0.7], [0.9, 0.1]]])
    combine = members.combination
    assert combine("mean", 3)(rows) == pytest.approx(rows.mean(0))
    assert combine("vote", 3)(rows) == pytest.approx(np.array([[1, 2], [1, 2]]) / 3)
    assert combine("1,0,3", 3)(rows) == pytest.approx((rows[0] + 3 * rows[2]) / 4)
    assert combine("product", 3)(rows)[0].argmax() == 1
    assert combine("median", 3)(rows) == pytest.approx(np.median(rows, 0))
    made = types.ModuleType("rules")
    made.powers = lambda exponent: lambda some: (some**exponent).mean(0)
    monkeypatch.setitem(sys.modules, "rules", made)
    assert combine("rules:powers,exponent=2", 3)(rows) == pytest.approx((rows**2).mean(0))


def test_accuracy_leaves_out_what_was_not_run_or_has_no_label():
    probabilities = np.array([[1, 0], [0, 1], [np.nan, np.nan], [1, 0]], np.float32)
    found = members.accuracy(probabilities, np.array([0, 0, 1, source.UNKNOWN]))
    assert found == {"correct": 1, "total": 2, "top1": 0.5}
    assert members.accuracy(probabilities, np.full(4, source.UNKNOWN)) is None


# ---- meters ----

MPSTAT = """Linux 6.1.0 (node7) \t11/21/2026 \t_x86_64_\t(2 CPU)

11:59:59 PM  CPU    %usr   %nice    %sys %iowait    %irq   %soft  %steal  %guest  %gnice   %idle
12:00:00 AM  all   50.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00   50.00
12:00:00 AM    0   40.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00   60.00
12:00:00 AM    1    0.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00  100.00

12:00:00 AM  CPU    %usr   %nice    %sys %iowait    %irq   %soft  %steal  %guest  %gnice   %idle
12:00:02 AM  all   50.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00   50.00
12:00:02 AM    0   90.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00   10.00
12:00:02 AM    1   20.00    0.00    5.00    0.00    0.00    0.00    0.00    0.00    0.00   75.00

Average:     all   50.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00    0.00   50.00
"""


def test_an_mpstat_log_is_read(tmp_path):
    path = tmp_path / "mpstat.log"
    path.write_text(MPSTAT)
    usage = meters.read_mpstat(path)
    assert usage.host == "node7"
    assert usage.times_s == [0, 2]
    assert usage.cores[1] == pytest.approx([0.9, 0.25])
    assert usage.core_s == pytest.approx(2.3)
    path.write_text(MPSTAT.splitlines()[0])
    with pytest.raises(InputError, match="expected the log of mpstat"):
        meters.read_mpstat(path)


def test_a_log_past_midnight_goes_on(tmp_path):
    path = tmp_path / "mpstat.log"
    path.write_text(MPSTAT.replace("12:00:00 AM    ", "11:59:59 PM    "))
    assert meters.read_mpstat(path).times_s == [0, 3]


# ---- tables ----


def test_runs_are_collected_into_one_table(tmp_path):
    words = ("--data", "synthetic", "--images", "40")
    for name, count in (("a", "1"), ("b", "1"), ("c", "2")):
        folder = tmp_path / name
        folder.mkdir()
        run(folder, *words, "--members", count)
    (tmp_path / "other.json").write_text('{"kind": "something else"}')
    (tmp_path / "broken.json").write_text("{")
    output = tmp_path / "table"
    assert command.main(["--collect", str(tmp_path), "--output", str(output)]) == cli.DONE
    rows = collect.table(collect.read(tmp_path))
    assert [(one["members"], one["count"]) for one in rows] == [(1, 2), (2, 1)]
    rates = [json.loads((tmp_path / k / "report.json").read_text())["throughput_images_per_s"]
             for k in "ab"]  # fmt: skip
    assert rows[0]["images_per_s"] == pytest.approx(np.mean(rates))
    assert len((output / "ensembles.csv").read_text().splitlines()) == 3
    assert (output / "ensembles.png").read_bytes()[1:4] == b"PNG"


def test_the_table_is_written_as_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    run(tmp_path, "--data", "synthetic", "--images", "40")
    rows = collect.table(collect.read(tmp_path))
    collect.write_parquet(rows, tmp_path / "table.parquet")
    assert parquet.read_table(tmp_path / "table.parquet").to_pylist() == rows


# ---- job scripts ----


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("ensemble.slurm", ["single-bcast: ", "rank 0: preprocesses; merges; member 0 (cifar10-0)",
                            "rank 1: preprocesses; member 1 (cifar10-1)",
                            "rank 2: member 2 (cifar10-2)", "rank 3: member 3 (cifar10-3)"]),
        ("ensemble.pbs", ["all-shared: ", *(f"rank {k}: preprocesses; member {k} (cifar10-{k})"
                                            for k in range(4))]),
    ],
)  # fmt: skip
def test_job_scripts_parse_and_print_every_role(script, wanted):
    path = ROOT / "examples" / "cluster" / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    names = ("PATH", "HOME", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if key in names}
    found = subprocess.run(
        ["bash", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**kept, "DRY_RUN": "1", "DATA": "test.tar", "PYTHON": sys.executable},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == len(wanted)
    assert all(line.startswith(start) for line, start in zip(lines, wanted, strict=True))


@pytest.mark.parametrize("named", [True, False])
def test_last_words_are_whole_or_not_there(named, tmp_path, monkeypatch):
    if not named:  # a file system without files that have no name
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "report.json"
    for number in (1, 2):
        outputs.write_last_words(path, {"number": number, "rate": float("nan")})
        assert json.loads(path.read_text()) == {"number": number, "rate": None}
    assert [*tmp_path.iterdir()] == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    value = os.umask(0)
    os.umask(value)
    return value
