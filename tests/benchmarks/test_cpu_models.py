"""``python -m benchmarks.cpu_models`` on a network of a few layers: what it writes."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import onnx_models
import pytest
from onnx import helper

from benchmarks import cpu_models, cpu_models_page, models, models_worker


@pytest.fixture
def network(tmp_path, rng):
    """The path of a small network's ONNX file, named as the one whose layers are shown."""
    constants = {
        "w1": rng.standard_normal((16, 3, 3, 3)), "b1": rng.standard_normal(16),
        "w2": rng.standard_normal((16, 1, 3, 3)), "w3": rng.standard_normal((16, 10)),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], group=16, strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["c2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w3"], ["y"]),
    ]
    made = onnx_models.model(
        nodes, [onnx_models.tensor("x", ("batch", 3, 12, 12))], [onnx_models.tensor("y", ("batch", 10))],
        {name: values.astype(np.float32) for name, values in constants.items()},
    )  # fmt: skip
    path = tmp_path / f"{cpu_models.SHOWN}.onnx"
    onnx.save(made, path)
    return path


def test_writes_what_it_measured(network, tmp_path):
    pytest.importorskip("onnxruntime")
    chart = ["--chart", str(tmp_path / "c.png")]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        chart = []
    code = cpu_models.main(
        ["--networks", str(network), "--batch", "1", "2", "--threads", "1", "--repeats", "2",
         "--json", str(tmp_path / "m.json"), "--markdown", str(tmp_path / "m.md"), *chart]
    )  # fmt: skip
    assert code == 0
    document = json.loads((tmp_path / "m.json").read_text())
    rows = [row for row in document["rows"] if row["dtype"] == "float32"]
    assert {(row["name"], row["batch"]) for row in rows} >= {
        (name, batch) for name in ("cnn_engine", "ONNX Runtime") for batch in (1, 2)
    }
    assert all(0 < row["error"] < models.LIMIT for row in rows)
    first = rows[0]
    assert first["ours"]
    assert first["ratio"] > 0
    assert first["error_ratio"] > 0
    assert sum(layer["flops"] for layer in document["layers"]) > 2 * 16 * 27 * 144
    memory = document["memory"]
    assert memory["peak_bytes"] > memory["before_bytes"] > memory["weights_bytes"] > 2000
    page = (tmp_path / "m.md").read_text()
    assert f"| {cpu_models.SHOWN} |" in page
    assert f"## Layers of {cpu_models.SHOWN}" in page
    if chart:
        assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_types_can_be_left_out(network, tmp_path):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "m.json"
    code = cpu_models.main(
        ["--networks", str(network), "--batch", "1", "--threads", "1", "--repeats", "1", "--dtype",
         "float32", "--json", str(path)]
    )  # fmt: skip
    assert code == 0
    found = {row["name"]: row["dtype"] for row in json.loads(path.read_text())["rows"]}
    assert found["cnn_engine"] == "float32"
    assert set(found.values()) == {"float32"}


def row(name, dtype, seconds, error, ours=False):
    times = seconds, seconds, seconds
    return cpu_models.Row("n", 1, 1, name, ours, dtype, *times, 1, 1 / seconds, error)


def test_the_ratio_is_to_the_better_library_of_the_same_type():
    rows = [row("cnn_engine", "float32", 2.0, 3e-7, ours=True), row("OpenVINO", "float32", 3.0, 1e-6),
            row("OpenVINO", "bfloat16", 1.0, 1e-2), row("ONNX Runtime", "float32", 5.0, 2e-7)]  # fmt: skip
    cpu_models.compare(rows)
    assert (rows[0].ratio, rows[0].best_peer) == (1.5, "OpenVINO")
    assert rows[0].error_ratio == pytest.approx(1.5)


def test_a_page_sums_up_who_is_ahead():
    ratios = {"a": 2.0, "b": 0.5, "c": 4.0, "left": None}
    rows = [{"network": name, "ratio": ratio} for name, ratio in ratios.items()]
    found = cpu_models_page.summary(rows)[-1]
    assert found == "Ahead in 2 of 3; ratios: geometric mean 1.59, lowest 0.50 (b)."
    assert cpu_models_page.summary(rows[-1:]) == []


def test_exports_are_kept_and_a_failed_one_is_left_out(tmp_path, monkeypatch, capsys):
    """The second run makes no export; of several networks, the one that fails is a line."""
    made = []

    def child(stage, task, *_):
        made.append(task["spec"])
        if "bad" in task["spec"]:
            return {"reason": "make: exit 1: no such network"}
        arrays = {models_worker.images_name(1): np.zeros((1, 3, 8, 8), np.float32)}
        np.savez(
            f"{task['folder']}/logits.npz", **arrays, **{models_worker.logits_name(1): [[0.0]]}
        )
        return {"exports": {"torchscript": {"files": {"1": "kept.onnx"}}}}

    monkeypatch.setattr(models, "child", child)
    options = ["--batch", "1", "--models", str(tmp_path / "kept"), "--export-only", "--networks"]
    assert cpu_models.main([*options, "good,bad"]) == 1
    assert cpu_models.main([*options, "good"]) == 0
    assert [spec.rpartition(":")[2] for spec in made] == ["good", "bad"]
    assert "left out: bad: make: exit 1" in capsys.readouterr().out
    assert cpu_models.main(["--export-only", "--networks", "good"]) == 2


def test_the_drawn_networks_are_known_by_name():
    names = cpu_models.networks("strangers,x.onnx")
    assert len(names) == len(set(names)) == 41
    assert {models.spec_of(name).partition(":")[0] for name in names[:40]} == {"timm.models"}


def test_a_network_that_cannot_be_exported_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "child", lambda *_: {"reason": "make: exit 1: no such network"})
    assert cpu_models.main(["--networks", "nothing"]) != 0
    assert "nothing: make: exit 1: no such network" in capsys.readouterr().err


def test_quantized_files_run_beside_their_peak(network, tmp_path):
    pytest.importorskip("onnxruntime")
    path, page = tmp_path / "m.json", tmp_path / "m.md"
    code = cpu_models.main(
        ["--networks", str(network), "--batch", "1", "2", "--threads", "1", "--repeats", "1", "--dtype",
         "int8", "--json", str(path), "--markdown", str(page)]
    )  # fmt: skip
    assert code == 0
    document = json.loads(path.read_text())
    rows = [row for row in document["rows"] if row["dtype"] == "int8"]
    assert {(row["name"], row["batch"]) for row in rows} >= {
        (name, batch) for name in ("cnn_engine", "ONNX Runtime") for batch in (1, 2)
    }
    others = [row for row in document["rows"] if row not in rows]
    assert {(row["name"], row["dtype"]) for row in others} == {("cnn_engine", "float32")}
    work = (16 * 27 * 144 + 16 * 9 * 36 + 160) / document["integer_peak_macs"]
    for row in rows:
        assert 0 < row["error"] < 0.1  # that of 8 bits
        share = row["batch"] * work / row["seconds"]  # of the median of both batches' peaks
        assert row["share_of_peak"] == pytest.approx(share, rel=0.5)
        assert not row["ours"] or row["ratio"] > 0
    assert "GMAC/s of 8-bit integers" in page.read_text()
    cells = document["int8_cells"]
    assert [one["batch"] for one in cells] == [1, 2]
    for one in cells:
        assert one["ratio"] == pytest.approx(one["peer_seconds"] / one["seconds"])
        assert one["vnni_share"] == pytest.approx(one["ratio"] * one["peer_vnni_share"])
        assert one["to_float32"] > 0
    met = sum(one["met"] for one in cells)
    assert f"of 2 cells, {met} meet their goal" in page.read_text()


@pytest.mark.parametrize(
    ("peer", "own", "whole", "met"),
    [
        (2.0, 1.59, 9.0, True),  # the peer is below 65 % of the peak, and 1.26 times as slow
        (2.0, 1.61, 9.0, False),
        (1.5, 1.1, 9.0, True),  # above it, and ours is at 91 %
        (1.5, 1.2, 9.0, False),
        (1.05, 1.06, 9.0, False),  # not ahead
        (2.0, 1.0, 2.7, False),  # 2.7 times as fast as our float32
    ],
)
def test_goals_of_int8(peer, own, whole, met):
    rows = [row("OpenVINO", "int8", peer, 1e-2), row("ONNX Runtime", "int8", 3.0, 1e-2)]
    for dtype, seconds in (("int8", own), ("float32", whole)):
        rows.append(row("cnn_engine", dtype, seconds, 1e-2, ours=True))
    for one in rows:
        one.network = "resnet50"
    cpu_models.compare(rows)
    found = cpu_models.cell(rows, multiply_adds=100, vnni_peak=100.0)
    assert found["met"] is met
    assert found["best_peer"] == "OpenVINO"
    assert found["vnni_share"] == pytest.approx(1 / own)
    assert ("MISSES" in cpu_models.verdict(found)) is not met


def test_a_file_that_would_crash_openvino_is_found_in_another_process(monkeypatch, tmp_path):
    def run(code):
        monkeypatch.setattr(sys, "executable", code)
        return cpu_models.openvino_crashes("net.onnx", (1, 3, 8, 8))

    for status, crashes in (("kill -SEGV $$", True), ("exit 1", False), ("exit 0", False)):
        stand_in = tmp_path / "python"
        stand_in.write_text(f"#!/bin/sh\n{status}\n")
        stand_in.chmod(0o755)
        assert run(str(stand_in)) is crashes
