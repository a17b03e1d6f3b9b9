"""The roofline: where layers stand under given ceilings, and what ``run --roofline`` writes."""

from __future__ import annotations

import json

import characterize_points
import pytest

from cnn_engine import run
from cnn_engine.measure import roofline
from cnn_engine.measure.result import LayerTime
from cnn_engine.measure.roofline import Ceiling
from cnn_engine.report import roofline as roofline_report

CEILINGS = [
    Ceiling("float32", "compute", 100e9, ""),
    Ceiling("memory", "bandwidth", 10e9, ""),
    Ceiling("cache", "bandwidth", 80e9, ""),
]


def layer(flops, nbytes, seconds, calls=2):
    return LayerTime(
        "l", "conv", "cpu", calls, seconds * calls, None, flops * calls, nbytes * calls
    )


@pytest.mark.parametrize(
    ("given", "bound", "share"),
    [
        (layer(50e9, 1e9, 1.0), "float32", 0.5),
        (layer(5e9, 5e9, 1.0), "memory", 0.5),
        (layer(0, 8e9, 1.0), "memory", 0.8),
        (layer(1e9, 40e9, 1.0), "cache", 0.5),  # four times what memory delivers
        (layer(90e9, 40e9, 1.0), "float32", 0.9),
    ],
)
def test_a_layer_is_bound_by_the_ceiling_that_it_is_nearest_to(given, bound, share):
    (point,) = roofline.points([given], CEILINGS)
    assert (point.bound, point.share) == (bound, pytest.approx(share))
    assert point.seconds == 1.0
    assert point.flops_per_s == point.intensity * point.bytes_per_s


@pytest.mark.parametrize(
    ("kind", "dtype", "computes"),
    [("quantized_conv2d", "float32", "int8"), ("conv", "bfloat16", "bfloat16")],
)
def test_other_types_are_not_placed_under_the_ceiling_of_float32(kind, dtype, computes):
    given = layer(300e9, 1e9, 1.0)
    given.kind = kind
    found = roofline.points([given], CEILINGS, dtype)
    assert (found[0].bound, found[0].share) == ("memory", pytest.approx(0.1))
    assert found[0].computes == computes
    said = roofline_report.render(roofline.Roofline(CEILINGS, found))
    assert f"Arithmetic in {computes} has no ceiling here" in said


def test_layers_that_did_not_run_have_no_place():
    assert roofline.points([layer(1, 1, 1.0, calls=0), layer(1, 0, 1.0)], CEILINGS) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_ceilings_are_measured(monkeypatch, threads):
    monkeypatch.setattr(roofline, "SECONDS", 0.02)
    monkeypatch.setattr(roofline, "MEMORY_BYTES", 4 << 20)
    found = {ceiling.name: ceiling for ceiling in roofline.ceilings(threads)}
    assert found.keys() == {"float32", "memory", "cache"}
    assert all(1e6 < ceiling.rate < 1e15 for ceiling in found.values())
    assert found["memory"].how.startswith("copies of 4 MiB")
    for ceiling in found.values():
        assert (ceiling.one_core == ceiling.rate) == (threads == 1)
    assert found["float32"].how.endswith(f"{threads} thread{'s' if threads > 1 else ''}")


def test_run_writes_text_json_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(roofline, "SECONDS", 0.02)
    picture, result = tmp_path / "roof.svg", tmp_path / "run.json"
    words = ["--device=cpu", "--images=4", "--iterations=1", "--variant=if", "--no-check"]
    assert run.main([*words, "--roofline", str(picture), "--json", str(result)]) == 0
    said = capsys.readouterr().out
    assert "FLOP/byte" in said
    found = json.loads(result.read_text())
    layers = {row["name"] for row in found["layers"] if row["bytes"]}
    assert {point["name"] for point in found["roofline"]["points"]} == layers
    assert "conv1" in picture.read_text()
    assert "FLOP per byte" in picture.read_text()


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_runs(tmp_path, capsys):
    assert run.main(["--device=cpu", "--roofline", str(tmp_path / "roof.doc")]) == 2
    assert capsys.readouterr().err.startswith("error: --roofline: expected a path that ends in")


def test_characterize_has_the_layers_of_every_point(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(roofline, "SECONDS", 0.02)
    folder = tmp_path / "found"
    words = ["--variant", "if", "--batch", "1,4", "--no-check", "--threads", "2", "--roofline"]
    assert characterize_points.run(folder, *words) == 0
    said = capsys.readouterr().out
    assert "each layer beside the ceiling that is nearest above it" in said
    assert "one alone" in said
    found = json.loads((folder / "characterize.json").read_text())["roofline"]
    kernels = characterize_points.rows(folder / "kernel.csv")
    layers = {f"{row['subject']}, batch {row['batch']}: {row['name']}" for row in kernels}
    names = {point["name"] for point in found["points"]}
    assert names <= layers
    for batch in (1, 4):
        assert f"cifar10 if, batch {batch}: conv1" in names
    assert all(point["share"] > 0 for point in found["points"])
    assert (folder / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_characterize_without_a_roofline_has_none(tmp_path):
    folder = tmp_path / "found"
    assert (
        characterize_points.run(folder, "--variant=if", "--batch=1", "--no-check", "--quiet") == 0
    )
    assert json.loads((folder / "characterize.json").read_text())["roofline"] is None
    assert not (folder / "roofline.png").exists()
