"""The command: its reports, its options, and what goes wrong."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from characterize_points import QUICK, point, rows, run

from cnn_engine import Engine, characterize
from cnn_engine.characterize import files, measure, plot, points, text
from cnn_engine.characterize.measure import Passes
from cnn_engine.characterize.points import IterationRow, KernelRow, Point
from cnn_engine.characterize.subjects import EngineSubject
from cnn_engine.errors import InputError
from cnn_engine.measure import step_times
from cnn_engine.measure.result import Check

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def few_passes_of_each_step(monkeypatch):
    """What is looked at are reports, not times."""
    for name, least in (("CAP_S", 0.01), ("FEWEST_TURNS", 1), ("IN_A_TURN", 1)):
        monkeypatch.setattr(step_times, name, least)


def test_two_variants_on_the_cpu(tmp_path, capsys, monkeypatch):
    # No pass is thinned away, so that the summary can be recomputed from the iterations.
    monkeypatch.setattr(measure, "MOST_ITERATIONS", 10**6)
    folder = tmp_path / "new" / "folder"
    assert run(folder, "--variant", "if,fused", "--batch", "1,5", "--batch", "8") == 0
    out, err = capsys.readouterr()
    assert "images/s" in out
    assert "cifar10 fused, batch 8: p50" in err
    assert re.search(r"sampled every 20\.00 ms \(achieved .*\), \d+ to \d+ samples per point", out)

    summary = rows(folder / "summary.csv")
    assert [(row["subject"], row["batch"]) for row in summary] == [
        (f"cifar10 {variant}", batch) for variant in ("if", "fused") for batch in ("1", "5", "8")
    ]
    iterations = rows(folder / "iteration.csv")
    kernels = rows(folder / "kernel.csv")
    for row in summary:
        assert row["status"] == "ok"
        assert row["note"] == ""
        mine = [
            float(i["wall_s"])
            for i in iterations
            if (i["subject"], i["batch"]) == (row["subject"], row["batch"])
        ]
        assert len(mine) == int(row["passes"])
        assert float(row["latency_p50_s"]) == pytest.approx(np.median(mine))
        assert float(row["latency_max_s"]) == max(mine)
        rate = int(row["batch"]) * len(mine) / sum(mine)
        assert float(row["throughput_images_per_s"]) == pytest.approx(rate)
        assert float(row["measured_s"]) >= 0.06
        assert 0 < float(row["cpu_utilization_machine"]) <= 1.2
        assert int(row["samples"]) >= 2
        assert int(row["rss_peak_bytes"]) >= int(row["rss_bytes"]) > 2**20
        assert 0 < float(row["check_max_abs_diff"]) < 1e-5
        assert row["kernel_source"] == "host"
        assert row["gpu_utilization"] == row["accuracy"] == row["power_mean_w"] == ""
        inside = [
            k for k in kernels if (k["subject"], k["batch"]) == (row["subject"], row["batch"])
        ]
        assert {k["source"] for k in inside} == {"host"}
        assert sum(float(k["share"]) for k in inside) == pytest.approx(1)
        layers = {k["name"] for k in inside}
        assert layers >= ({"network"} if row["variant"] == "fused" else {"conv1", "fc", "softmax"})
        for k in inside:
            low, mean, high = (float(k[name]) for name in ("min_s", "average_s", "max_s"))
            assert low <= mean * 1.000001
            assert mean <= high * 1.000001
            assert int(k["calls"]) % int(k["passes"]) == 0

    document = json.loads((folder / "characterize.json").read_text())
    assert document["schema"] == 1
    assert document["command"].startswith("cnn-engine characterize --device cpu")
    assert document["interrupted"] is False
    assert document["environment"]["cpu"]
    assert document["environment"]["versions"]["psutil"]
    assert document["options"]["dataset"]["labels"] is False
    assert [p["batch"] for p in document["points"]] == [1, 5, 8] * 2
    assert (folder / "characterize.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in folder.iterdir()) == [
        "characterize.json", "characterize.png", "iteration.csv", "kernel.csv", "summary.csv",
    ]  # fmt: skip


def test_quiet_and_without_a_plot(tmp_path, capsys):
    assert run(tmp_path, "--batch", "2", "--quiet", "--no-plot") == 0
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "characterize.png").exists()
    [row] = rows(tmp_path / "summary.csv")
    assert row["subject"] == "cifar10 auto"
    assert row["variant"] == "fused"  # what auto chose


def test_accuracy_is_that_of_the_images_with_their_labels(tmp_path):
    generator = np.random.default_rng(3)
    images = generator.integers(0, 256, (23, 3, 32, 32), dtype=np.uint8)
    with Engine(device="cpu", variant="if") as engine:
        found = engine.predict(images).argmax(1)
    labels = found.astype(np.uint8)
    labels[:4] = (labels[:4] + 1) % 10
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    code = characterize.main(
        ["--device", "cpu", "--data", str(tmp_path / "data.npz"), "--batch", "1,10", "--variant", "if",
         "--duration", "0.001", "--settle", "0.001", "--quiet", "--no-plot",
         "--output", str(tmp_path / "out")]
    )  # fmt: skip
    assert code == 0
    one, ten = rows(tmp_path / "out" / "summary.csv")
    assert (one["correct"], one["labelled"]) == ("19", "23")  # all, however short the duration
    assert (ten["correct"], ten["labelled"]) == ("16", "20")  # full batches alone
    assert float(ten["accuracy"]) == 0.8


def test_every_column_is_explained():
    schema = (ROOT / "cnn_engine" / "report" / "results.schema.json").read_text("utf-8")
    point = json.loads(schema)["$defs"]["characterize"]["properties"]["points"]["items"]
    explained = {name for name, column in point["properties"].items() if column["description"]}
    assert explained == {column.name for column in dataclasses.fields(Point)}
    document = (ROOT / "docs" / "reference" / "characterize.md").read_text("utf-8")
    for row in (KernelRow, IterationRow):
        for column in dataclasses.fields(row):
            assert f"`{column.name}`" in document, column.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network", "vgg"], "network: expected one of"),
        (["--variant", "if,best"], "--variant: expected one of auto"),
        (["--variant", "tiled"], "expected a device of kind cuda, found cpu"),
        (["--variant", ""], "--variant: expected"),
        (["--batch", "1,x"], "--batch: expected sizes such as 1-256"),
        (["--batch", ","], "--batch: expected sizes such as 1-256"),
        (["--batch", "0"], "--batch: expected rising ranges"),
        (["--batch", "25"], "--batch: expected at most 24 (the images), found 25"),
        (["--duration", "0"], "--duration: expected a number above 0"),
        (["--duration", "nan"], "--duration: expected a number"),
        (["--sample-period", "-1"], "--sample-period: expected a number"),
        (["--dtype", "float8"], "--dtype: expected one of"),
        (
            ["--device", "gpu"],
            "--device: expected auto, cpu, cuda, cuda:N, openacc or openacc:host",
        ),
        (["--data", "/none"], "/none"),
        (["--weights", "/none"], "/none"),
        (["--shape", "3,224"], "--shape: expected C,H,W"),
        (["--torch-dtype", "int8"], "--torch-dtype: expected one of"),
        (["--frobnicate"], "unrecognized arguments"),
    ],
)
def test_input_at_fault_is_one_line(tmp_path, capsys, options, message):
    assert run(tmp_path / "out", *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))


def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run(tmp_path / "file") == 2
    assert "--output: expected a folder, found a file" in capsys.readouterr().err
    assert run(tmp_path / "file" / "below") == 2
    assert "--output: cannot create" in capsys.readouterr().err
    (tmp_path / "kernel.csv").mkdir()
    assert run(tmp_path) == 2
    assert "found a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_fewer_images_than_the_default_are_enough(tmp_path):
    np.savez(
        tmp_path / "few.npz",
        images=np.zeros((7, 3, 32, 32), np.uint8),
        labels=np.zeros(7, np.uint8),
    )
    common = ["--device", "cpu", "--data", str(tmp_path / "few.npz"), "--duration", "0.01",
              "--settle", "0.01", "--quiet", "--no-plot", "--output", str(tmp_path / "out")]  # fmt: skip
    assert characterize.main([*common, "--batch", "7"]) == 0
    assert characterize.main([*common, "--batch", "8"]) == 2
    assert characterize.main([*common, "--batch", "1", "--images", "8"]) == 2


def test_a_point_that_fails_leaves_the_others(tmp_path, capsys, monkeypatch):
    load = EngineSubject.load

    @contextmanager
    def fails_at_two(self, batch):
        if batch == 2:
            raise MemoryError("no room\nfor two")
        with load(self, batch) as found:
            yield found

    monkeypatch.setattr(EngineSubject, "load", fails_at_two)
    assert run(tmp_path, "--batch", "1,2,3", "--no-plot") == 1
    out, err = capsys.readouterr()
    assert "1 of 3 points failed" in err.splitlines()[-1]
    assert "no room for two" in out
    summary = rows(tmp_path / "summary.csv")
    assert [row["status"] for row in summary] == ["ok", "failed", "ok"]
    assert summary[1]["note"] == "MemoryError: no room for two"
    assert summary[1]["latency_p50_s"] == ""
    assert {row["batch"] for row in rows(tmp_path / "kernel.csv")} == {"1", "3"}


def test_an_inside_that_fails_leaves_the_times(tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no inside")

    monkeypatch.setattr(measure, "profile_point", broken)
    assert run(tmp_path, "--batch", "1", "--quiet", "--no-plot") == 0
    [row] = rows(tmp_path / "summary.csv")
    assert row["status"] == "ok"
    assert "no inside" in row["note"]
    assert float(row["latency_p50_s"]) > 0


def test_a_variant_that_is_wrong_is_not_timed(tmp_path, capsys, monkeypatch):
    check = Engine.check

    def wrong(self, images):
        found = check(self, images)
        return Check("x", 1, 0.5, 0.0, 1e-5) if self.choice.variant == "if" else found

    monkeypatch.setattr(Engine, "check", wrong)
    assert run(tmp_path, "--batch", "1", "--variant", "if,pad", "--no-plot") == 1
    assert "float64 reference" in capsys.readouterr().err
    wrong_row, right = rows(tmp_path / "summary.csv")
    assert (wrong_row["status"], wrong_row["passes"]) == ("failed", "")
    assert wrong_row["check_max_abs_diff"] == "0.5"
    assert right["status"] == "ok"
    words = ["--batch", "1", "--variant", "if,pad", "--no-check", "--quiet", "--no-plot"]
    assert run(tmp_path, *words) == 0


@pytest.mark.parametrize(
    ("package", "note"),
    [
        ("psutil", "CPU utilisation and memory: expected the package psutil"),
        ("matplotlib", "no plot: expected the package matplotlib"),
    ],
)
def test_a_missing_package_is_a_note(tmp_path, capsys, monkeypatch, package, note):
    monkeypatch.setitem(sys.modules, package, None)
    assert run(tmp_path, "--batch", "1") == 0
    out = capsys.readouterr().out
    assert note in out
    assert "cnn-engine[lab]" in out
    notes = json.loads((tmp_path / "characterize.json").read_text())["notes"]
    assert any(note in found for found in notes)
    assert (tmp_path / "characterize.png").exists() == (package != "matplotlib")


#: The command, interrupted after two timed passes of the second point.
INTERRUPTED = """
import signal, sys
from cnn_engine.characterize import command, measure

points, run = [], measure.Passes.run

class Sampler(measure.Sampler):
    def __enter__(self):
        points.append(1)
        return super().__enter__()

def interrupted(passes, next_pass, *arguments, **options):
    def following():
        if len(points) == 2 and len(passes) == 2:
            signal.raise_signal(signal.SIGINT)
        return next_pass()
    run(passes, following, *arguments, **options)

measure.Sampler, measure.Passes.run = Sampler, interrupted
sys.exit(command.main())
"""


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *QUICK, "--duration", "0.1", "--batch", "1,2,3",
         "--variant", "if", "--output", str(tmp_path / "out")],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.returncode == 130, process.stderr
    assert "Traceback" not in process.stderr
    assert "Interrupted: the passes of 1 of 3 points are complete" in process.stdout
    summary = rows(tmp_path / "out" / "summary.csv")
    assert [row["status"] for row in summary] == ["ok", "interrupted", "not run"]
    assert int(summary[1]["passes"]) == 2
    batches = {row["batch"] for row in rows(tmp_path / "out" / "iteration.csv")}
    assert batches == {"1", "2"}
    assert json.loads((tmp_path / "out" / "characterize.json").read_text())["interrupted"] is True
    assert (tmp_path / "out" / "characterize.png").exists()
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


# ---- reports ----


def test_csv_cells_have_neither_control_characters_nor_infinities():
    row = point(subject="a\nb,c", latency_p50_s=float("inf"), power_mean_w=0.0, reduction=True)
    [cells] = csv.DictReader(io.StringIO(files.as_csv(Point, [row])))
    assert cells["subject"] == r"a\nb,c"
    assert cells["latency_p50_s"] == ""
    assert cells["power_mean_w"] == "0.0"
    assert cells["reduction"] == "yes"


def test_iterations_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr(measure, "MOST_ITERATIONS", 10)
    passes = Passes()
    passes.run(lambda: int, 60.0, most=95)
    kept = measure._thinned(passes)
    assert [index for index, *_ in kept] == list(range(0, 95, 10))


def gpu_points() -> list[Point]:
    """A table as a GPU gives it: six subjects, one of which has no utilisation, and one point failed."""
    made = []
    for number, subject in enumerate(
        ("cifar10 if", "cifar10 pad", "cifar10 tiled", "cifar10 fused", "resnet152", "densenet201")
    ):
        for batch in (1, 5, 10, 15, 20):
            known = number != 1
            made.append(
                point(
                    subject=subject, kind="torch" if number > 3 else "engine",
                    boundary="device" if number > 3 else "host", batch=batch, status=points.OK,
                    passes=1000, latency_p50_s=1e-5 * batch, latency_p90_s=2e-5, latency_p99_s=3e-5,
                    throughput_images_per_s=10.0 ** (6 - number) * batch**0.7,
                    gpu_utilization=min(1, 0.1 * (number + 1) + 0.02 * batch) if known else None,
                    sm_utilization=0.05 + 0.02 * batch if known else None, rss_bytes=10**9,
                    power_mean_w=200.0, throttle_reasons="power cap", sample_period_s=0.1,
                    sample_period_achieved_s=0.1, samples=20,
                )
            )  # fmt: skip
    made[-1] = point(subject="densenet201", batch=20, status=points.FAILED, note="out of memory")
    return made


def test_the_text_of_a_gpu():
    report = files.Report(Path("unused"), {}, gpu_points(), notes=["GPU: warm"])
    lines = text.render(report).splitlines()
    assert max(map(len, lines)) <= text.WIDTH
    for title in ("Passes", "GPU", "GPU memory and power", "Host"):
        assert any(line.startswith(title) for line in lines), title
    assert "Note: GPU: warm" in lines
    assert "Note on densenet201, batch 20: out of memory" in lines
    assert any(line.startswith("densenet201") and line.endswith("failed") for line in lines)
    assert not any(re.search(r"\b0\.00\b", line) for line in lines)


def test_long_names_are_folded_between_words():
    full = dataclasses.replace(
        gpu_points()[0], subject="densenet201-224x224 auto float16", allocated_bytes=10**8,
        allocated_peak_bytes=10**8, device_memory_used_bytes=10**9, power_max_w=300.0,
        sm_clock_mean_mhz=1980.0, temperature_max_c=50.0,
    )  # fmt: skip
    lines = text.render(files.Report(Path("unused"), {}, [full])).splitlines()
    assert max(map(len, lines)) <= text.WIDTH
    folded = [line for line in lines if not line.endswith("ok") and line.startswith("densenet201")]
    assert folded
    for line in lines:
        if line.startswith("densenet201"):
            assert re.match(r"densenet201-224x224( auto( float16)?)?  +1 ", line), line


def test_the_plot_of_a_gpu(tmp_path):
    path = tmp_path / "plot.png"
    plot.draw(gpu_points(), "a GPU", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    plot.draw([p for p in gpu_points() if p.batch == 5][:1], "a GPU, one point", path)
    with pytest.raises(InputError, match="cannot write"):
        plot.draw(gpu_points(), "a GPU", tmp_path / "missing" / "plot.png")
