"""``python -m benchmarks.low_batch``: its floor, its tables, and on a GPU a run."""

from __future__ import annotations

import io
import json

import graphs
import pytest

from benchmarks import low_batch


def row(**given):
    found = {
        "network": "resnet18", "size": [224, 224], "dtype": "float16", "batch": 1,
        "name": "cnn_engine", "ours": True, "device_ms": 0.1, "lowest_ms": 0.09, "highest_ms": 0.2,
        "flushed_ms": 0.12, "wall_ms": 0.2, "error": 1e-3, "wrong": None,
    }  # fmt: skip
    return found | given


def document():
    ours = row(
        floor_ms=0.02, ratio=3.6, flushed_ratio=3.0, wall_ratio=2.0, error_ratio=0.9, same_bits=True,
        bits=1000, beside_another=True,
    )  # fmt: skip
    checked = {
        "network": "resnet18", "size": [33, 47], "dtype": "float16", "batch": 7, "name": "cnn_engine",
        "ours": True, "error": 1e-3, "wrong": None, "error_ratio": 1.6,
    }  # fmt: skip
    slow = row(
        dtype="tf32",
        ratio=0.5,
        floor_ms=0.05,
        same_bits=False,
        bits=1000,
        error=None,
        wrong="not finite",
    )
    peers = [
        row(name="PyTorch graph", ours=False, device_ms=0.36, error=2e-3),
        row(name="PyTorch graph, channels last", ours=False, device_ms=0.4),
        row(name="PyTorch graph", ours=False, device_ms=0.05, dtype="tf32"),
    ]
    about = {"gpu": "a GPU", "driver": "CUDA 13", "commit": "abc"}
    return {
        "environment": about, "command": "python -m benchmarks.low_batch", "started": "2026-01-01",
        "rows": [ours, slow, *peers, checked], "left_out": {"torch.compile of resnet18": "no compiler"},
    }  # fmt: skip


def test_tables_name_the_best_peer_and_what_is_behind():
    text = low_batch.markdown(document())
    assert "Ahead in 1 of 2 cells." in text
    assert "| resnet18 | float16 | 1 | 0.100 | 0.360 PyTorch graph | 3.60 |" in text
    assert "| 20% | 1.0e-03 (1.0e-03) |" in text
    assert "| not finite |" in text
    assert "1000 passes gave the same bits in 1 of 2 cells." in text
    assert "another stream passes gave theirs in 1 of 1." in text
    assert "images of 33x47: the error is at most 1.5 times PyTorch's own in 0 of 1 cells" in text
    assert "Left out: torch.compile of resnet18, no compiler" in text


def test_sizes_are_rows_and_columns():
    options = low_batch.parser().parse_args(["--size", "192x160"])
    assert options.size == (192, 160)
    assert low_batch.parser().parse_args(["--size", "33"]).size == (33, 33)


def test_a_chart_has_a_panel_a_type():
    pytest.importorskip("matplotlib")
    file = io.BytesIO()
    low_batch.draw(document(), file)
    assert file.getvalue()[:4] == b"\x89PNG"


def test_the_floor_is_what_must_be_read_and_waited_for():
    """ResNet-50 of small images reads its weights at batch 1; at batch 100 it multiplies."""
    graph = graphs.resnet((3, 4, 6, 3), (1, 3, 112, 112), weights=False)
    layers = 1 + 3 * 16 + 1  # the convolutions beside a block's own do not wait
    weights = sum(array.size for array in graph.constants.values())
    wanted = weights * 2 / low_batch.BYTES_PER_S + layers * low_batch.WAIT_S
    assert low_batch.floor_s(graph, "float16") == pytest.approx(wanted)
    many = graph.with_batch(100)
    flops = sum(many.cost_of(n).flops for n in many.nodes if n.op.kind in low_batch.SUMS)
    products = flops / low_batch.FLOPS_PER_S["tf32"] + layers * low_batch.WAIT_S
    assert low_batch.floor_s(many, "tf32") == pytest.approx(products)


@pytest.mark.gpu
def test_writes_what_it_measured(tmp_path):
    pytest.importorskip("torchvision")
    arguments = (
        "--network mobilenet_v3_small --size 64 --batch 1 3 --dtype float16 --peers torch --rounds 2 "
        f"--milliseconds 2 --bits 20 --steps --json {tmp_path}/l.json --markdown {tmp_path}/l.md"
    )
    assert low_batch.main(arguments.split()) == 0
    found = json.loads((tmp_path / "l.json").read_text())
    ours = [row for row in found["rows"] if row["ours"]]
    assert [row["batch"] for row in ours] == [1, 3]
    assert all(row["same_bits"] and row["error"] < 0.05 for row in ours)
    assert {row["name"] for row in found["rows"]} >= {
        "PyTorch graph",
        "PyTorch graph, channels last",
    }
    assert {step["kernel"] for step in found["steps"][0]["steps"]} >= {"implicit_gemm", "depthwise"}
    assert "mobilenet_v3_small" in (tmp_path / "l.md").read_text()
    again = arguments.replace("--batch 1 3", "--batch 1 3 2 --keep")
    assert low_batch.main(again.split()) == 0
    kept = json.loads((tmp_path / "l.json").read_text())
    assert kept["rows"][: len(found["rows"])] == found["rows"]
    assert [row["batch"] for row in kept["rows"] if row["ours"]] == [1, 3, 2]
    assert all(row["beside_another"] for row in kept["rows"] if row["ours"])


@pytest.mark.gpu
def test_checks_odd_sizes(tmp_path):
    pytest.importorskip("torchvision")
    arguments = (
        "--network mobilenet_v3_small --size 33x47 --batch 1 7 --dtype float16 float32 --peers torch "
        f"--check --json {tmp_path}/l.json"
    )
    assert low_batch.main(arguments.split()) == 0
    ours = [row for row in json.loads((tmp_path / "l.json").read_text())["rows"] if row["ours"]]
    assert len(ours) == 4
    assert all(row["error"] < 0.05 and row["size"] == [33, 47] for row in ours)
