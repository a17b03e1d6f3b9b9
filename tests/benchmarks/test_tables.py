"""``python -m benchmarks.tables``, on few images: what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import configurations, tables
from cnn_engine import Dataset, Engine
from cnn_engine.kernels import select
from cnn_engine.measure import step_times
from cnn_engine.measure.result import Result

FEW = ["--device", "cpu", "--threads", "1", "--images", "3,6", "--repeats", "2"]


@pytest.fixture
def small(test_data, monkeypatch):
    """The tables in little, over the real data."""
    folder = test_data("ece408").parent
    test_data("fashion-mnist")
    test_data("convnetjs-cifar10")
    monkeypatch.setenv("CNN_ENGINE_TEST_DATA", str(folder))
    monkeypatch.setattr(tables, "COURSE_IMAGES", (5, 20))
    monkeypatch.setattr(tables, "BATCH_TABLE_SECONDS", 0.01)
    monkeypatch.setattr(tables, "BATCHES", (1, 5))
    monkeypatch.setattr(tables, "BATCH_TABLE_IMAGES", 5)
    monkeypatch.setattr(configurations, "PILOT_IMAGES", 4)
    for name, least in (("CAP_S", 0.01), ("FEWEST_TURNS", 1), ("IN_A_TURN", 1)):
        monkeypatch.setattr(step_times, name, least)  # what is looked at are tables, not times
    return folder


def test_all_tables(small, tmp_path, capsys):
    output = tmp_path / "new" / "folder"
    arguments = [*FEW, "--limit-seconds", "0.05", "--output", str(output)]
    assert tables.main(arguments) == 0
    charts = ["batch.png", "course.png", "thesis-3.png", "thesis-6.png"]
    assert {path.name for path in output.iterdir()} == {*charts, "tables.json", "tables.md"}
    for name in charts:
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    found = json.loads((output / "tables.json").read_text())
    assert found["environment"]["device"] == "cpu"
    assert "host" not in found["environment"]
    assert found["command"].startswith("python -m benchmarks.tables --device cpu")

    thesis = found["tables"]["thesis"]
    rows = [(cell["images"], cell["variant"], cell["reduction"]) for cell in thesis]
    assert rows == [(n, v, r) for n in (3, 6) for v in ("if", "pad") for r in (False, True)]
    for cell in thesis:
        assert len(cell["forward_s"]) == 2
        assert 1 <= cell["images_measured"] <= cell["images"]
        names = [layer["name"] for layer in cell["median_repeat"]["layers"]]
        assert {"conv1", "conv2", "conv3", "softmax"} < set(names)
        assert ("pad1" in names) == (cell["variant"] == "pad")
        assert cell["median_repeat"]["accuracy"]["total"] == cell["images_measured"]
    course = found["tables"]["course"]
    assert {(cell["images"], cell["batch"]) for cell in course} == {(5, 5), (20, 20)}
    measured = [cell for cell in course if cell["unsupported"] is None and cell["images"] == 5]
    counts = [cell["median_repeat"]["accuracy"] for cell in measured]
    assert all(count == counts[0] for count in counts), "every variant is right on the same images"
    ways = {(cell["variant"], cell["reduction"]) for cell in found["tables"]["batch"]}
    known = {row.name for row in select.VARIANTS.values() if "cpu" in row.devices}
    assert {variant for variant, _ in ways} == known
    assert 0 < found["runner_cost_s_per_layer"] < 5e-6

    text = (output / "tables.md").read_text()
    assert all(f"]({name})" in text for name in charts)
    for part in ("## The thesis", "## The course", "## Every variant", "### 3 images", "Commit:"):
        assert part in text
    assert "0.01450" not in text  # times carry their units
    assert "†" in text
    widths = [
        {line.count("|") for line in block.splitlines()}
        for block in re.findall(r"(?:^\|.*\n)+", text, re.M)
    ]
    assert widths
    assert all(len(width) == 1 for width in widths), "every row has the cells of its head"
    assert str(small) not in text


def test_one_table_alone(small, tmp_path):
    arguments = [*FEW, "--thesis", "--output", str(tmp_path), "--no-charts"]
    assert tables.main(arguments) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tables.json", "tables.md"}
    found = json.loads((tmp_path / "tables.json").read_text())
    assert list(found["tables"]) == ["thesis"]
    assert not any(cell["extrapolated"] for cell in found["tables"]["thesis"])
    assert "~" not in (tmp_path / "tables.md").read_text()


@pytest.mark.gpu
def test_on_a_gpu(small, tmp_path):
    arguments = ["--device", "cuda", "--images", "3", "--repeats", "1", "--no-charts"]
    assert tables.main([*arguments, "--output", str(tmp_path)]) == 0
    thesis = json.loads((tmp_path / "tables.json").read_text())["tables"]["thesis"]
    assert {cell["data_mode"] for cell in thesis} == {"resident", "transfer", "managed"}
    assert (
        "The least improved" not in (tmp_path / "tables.md").read_text()
    )  # nothing published for 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "0"], "--images: expected a whole number from 1 to 1000000, found '0'"),
        (["--images", "1,x"], "--images: expected a whole number from 1 to 1000000, found 'x'"),
        (["--repeats", "0"], "--repeats: expected a whole number"),
        (["--limit-seconds", "0"], "--limit-seconds: expected a number above 0"),
        (
            ["--device", "tpu"],
            "--device: expected auto, cpu, cuda, cuda:N, openacc or openacc:host, found 'tpu'",
        ),
        (["--data", "/nowhere"], "--data: expected cifar-10-batches-bin in /nowhere, found none"),
        (["--weights", "/nowhere"], "--weights: expected a file or folder, found none at /nowhere"),
        (["--output", "/proc/nothing"], "--output: /proc/nothing: No such file or directory"),
    ],
)
def test_wrong_options(small, tmp_path, capsys, arguments, message):
    given = [*FEW, "--no-charts", "--output", str(tmp_path / "out"), *arguments]
    assert tables.main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))


def test_without_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "benchmarks.charts", raising=False)
    monkeypatch.delattr("benchmarks.charts", raising=False)
    assert tables.main([*FEW, "--output", str(tmp_path)]) == 2
    assert "pip install 'cnn-engine[benchmarks]'" in capsys.readouterr().err


def test_a_variant_that_is_wrong_is_not_shown(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("cnn_engine.engine.check.SLACK", 0.0)
    assert tables.main([*FEW, "--thesis", "--no-charts", "--output", str(tmp_path)]) == 1
    assert "cifar10, if, resident: expected outputs within 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_interrupted_after_a_round_shows_that_round(small, monkeypatch, tmp_path):
    profile = Engine.profile
    calls = []

    def interrupt(self, *arguments, **options) -> Result:
        result = profile(self, *arguments, **options)
        calls.append(1)
        result.interrupted = len(calls) > 4 + 8 + 3  # checks, a round, and some of the next
        return result

    monkeypatch.setattr(Engine, "profile", interrupt)
    assert tables.main([*FEW, "--thesis", "--no-charts", "--output", str(tmp_path)]) == 130
    found = json.loads((tmp_path / "tables.json").read_text())
    assert [len(cell["forward_s"]) for cell in found["tables"]["thesis"]] == [1] * 8
    assert "**Interrupted**" in (tmp_path / "tables.md").read_text()


def test_cells_are_measured_in_turn(small, monkeypatch):
    order = []
    monkeypatch.setattr(
        configurations, "_measure_once", lambda cell, *rest: order.append(cell.variant)
    )
    dataset = Dataset("d", "s", np.zeros((4, 3, 32, 32), np.uint8), np.zeros(4, np.uint8))
    engines = configurations.Engines("cpu", 1, {"cifar10": "random"})
    listed = [
        configurations.Cell("cifar10", name, False, "resident", 4, 1) for name in ("if", "pad")
    ]
    configurations.measure(listed, engines, dataset, 3, None, lambda what, left: None)
    assert order == ["if", "pad"] * 3
    assert [cell.measured for cell in listed] == [4, 4]


def test_images_are_repeated_in_order():
    pixels = np.arange(3, dtype=np.uint8)[:, None, None, None].repeat(2, 1)
    found = configurations.repeated(Dataset("d", "s", pixels, np.arange(3)), 7)
    assert found.images[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert configurations.repeated(Dataset("d", "s", pixels), 2).labels is None


@pytest.mark.alone
def test_the_runner_s_own_cost_is_small():
    assert configurations.runner_cost_s() < 5e-6


def test_published_figures_have_sources():
    found = json.loads(Path(tables.__file__).with_name("published.json").read_text("utf-8"))
    assert found["thesis"]["source"]
    assert found["course"]["source"]
    assert len(found["thesis"]["gpu_s"]) == 7
    serial = found["thesis"]["serial_cpu"]
    assert sum(serial["layers_s"].values()) == pytest.approx(serial["seconds"], rel=1e-3)
    assert sum(serial["kinds_s"].values()) == pytest.approx(serial["seconds"], rel=1e-3)
