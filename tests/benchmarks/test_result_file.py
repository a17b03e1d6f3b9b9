"""What the benchmarks share: a record's files and what is in them; and the plain call's, in little."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from benchmarks import add_up, plain_call, predict_cost, result_file
from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.measure.pass_parts import OVERLAP


def options(*words: str) -> argparse.Namespace:
    return result_file.parser("add_up", "", *result_file.FORMS).parse_args(words)


def test_a_record_is_stamped_each_time_it_is_written(tmp_path):
    paths = {form: tmp_path / form for form in result_file.FORMS}
    words = [word for form, path in paths.items() for word in (f"--{form}", str(path))]
    found = result_file.ResultFile("add_up", options(*words), ["--device", "a b"], rows=[])
    found.write()
    assert [path.name for path in tmp_path.iterdir()] == ["json"]
    first = json.loads(paths["json"].read_text())
    assert first["schema"] == "cnn_engine.add_up/1"
    assert first["command"] == "python -m benchmarks.add_up --device 'a b'"
    found.document["rows"].append(1)
    found.write(
        lambda document: f"{document['rows']}\n",
        lambda document, file: file.write(document["started"].encode()),
    )
    second = json.loads(paths["json"].read_text())
    assert second["rows"] == [1]
    assert second["started"] == first["started"] == paths["chart"].read_text()
    assert second["duration_s"] > first["duration_s"]
    assert paths["markdown"].read_text() == "[1]\n"


@pytest.mark.parametrize("form", result_file.FORMS)
def test_what_cannot_be_written_is_refused_before_any_work(form):
    with pytest.raises(InputError, match=f"--{form}: "):
        result_file.ResultFile("add_up", options(f"--{form}", "/proc/nothing/there"), [])


def test_a_benchmark_refuses_it_too(capsys):
    assert predict_cost.main(["--device", "cpu", "--json", "/proc/nothing/there"]) == 2
    assert capsys.readouterr().err.startswith("error: --json: ")


def test_plain_calls_that_take_long_are_beside_the_best_of_a_shorter_sweep(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(plain_call, "SWEPT", 20)
    path, page = tmp_path / "found.json", tmp_path / "page.md"
    words = ["--images", "1", "50", "--threads", "1", "--seconds", "1e-6"]
    assert plain_call.main([*words, "--json", str(path), "--markdown", str(page)]) == 0
    assert " of 2 rows reach 90 %" in capsys.readouterr().out
    one, many = json.loads(path.read_text())["rows"]
    assert set(one["seconds"]) == {"plain", "batch=1"}
    assert many["images"] == 50
    assert many["threads"] == 1
    assert len(many["seconds"]) == 1 + plain_call.CLOSEST
    assert many["best"] in many["seconds"]
    assert many["best_images_per_s"] == pytest.approx(50 / many["seconds"][many["best"]])
    assert many["share"] == pytest.approx(many["seconds"][many["best"]] / many["seconds"]["plain"])
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2


def test_short_calls_are_raced_over_all_images(monkeypatch):
    monkeypatch.setattr(plain_call, "SWEPT", 1)
    (row,) = plain_call.rows("cpu", [3], [1], 5.0)
    assert set(row["seconds"]) == {"plain", "batch=1", "batch=3"}


def test_a_batch_that_finds_something_else_ends_the_run(monkeypatch):
    engine, other = (plain_call.variants_on_cpu(3, 1)[0] for _ in range(2))
    monkeypatch.setattr(Engine, "predict", wrong_for(other, Engine.predict))
    images = np.zeros((3, 3, 32, 32), np.uint8)
    with pytest.raises(RuntimeError, match="other: expected the plain call's"):
        plain_call.measure(3, engine, {"other": (other, 1)}, images, 1e-6)


def wrong_for(engine, predict):
    """Returns a ``predict`` of all engines that is off for one of them."""

    def predicted(self, *arguments):
        return predict(self, *arguments) + (1e-3 if self is engine else 0)

    return predicted


def test_where_chunks_overlap_kernels_are_beside_their_records_together_and_copies():
    rows = {
        "conv1": 3e-6,
        "conv2": 5e-6,
        "images h2d": 9e-6,
        "probabilities d2h": 3e-6,
        OVERLAP: -2e-6,
    }
    recorded = {"conv1": 1e-6, "conv2": 4e-6, "images h2d": 11e-6, "probabilities d2h": 1e-6}
    cell = add_up.Cell(
        "fused", 9, "page-locked", "records", 7e-6, 7e-6, 7e-6, rows=rows, recorded=recorded
    )
    name, seconds, record_s, allowed = cell.off
    assert (name, seconds, record_s) == ("kernels", pytest.approx(3e-6), pytest.approx(5e-6))
    assert allowed == pytest.approx(3.0)
    assert not cell.agrees
    described = {"gpu": "some GPU", "driver": "580", "commit": None}
    stamp = {"command": "c", "started": "now", "duration_s": 1.0}
    page = add_up.markdown([cell], {"environment": described, **stamp})
    assert "| **kernels: 3.000 us, +60.0%** |" in page
    cell.recorded |= {"conv1": 3e-6, "images h2d": 17e-6}
    name, seconds, record_s, _ = cell.off
    assert (name, seconds, record_s) == ("copies", pytest.approx(-6e-6), pytest.approx(18e-6))


def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path, monkeypatch):
    measure, path = plain_call.measure, tmp_path / "found.json"

    def interrupted(count, *rest):
        if count > 1:
            raise KeyboardInterrupt
        return measure(count, *rest)

    monkeypatch.setattr(plain_call, "measure", interrupted)
    words = ["--images", "1", "50", "--threads", "1", "--seconds", "1e-6", "--json", str(path)]
    assert plain_call.main(words) == 130
    assert [row["images"] for row in json.loads(path.read_text())["rows"]] == [1]
