"""``benchmarks.loadgen_matrix`` has a row for every cell, and goes on where another run ended."""

from __future__ import annotations

import json
import os
from argparse import ArgumentTypeError

import pytest

pytest.importorskip("mlperf_loadgen")
pytest.importorskip("onnxruntime")

from benchmarks import loadgen_matrix
from benchmarks.serve_process import write_network
from cnn_engine.errors import InputError


@pytest.fixture
def words(tmp_path):
    write_network(tmp_path / "small.onnx", 0)
    return [
        f"--model={tmp_path / 'small.onnx'}", "--threads", "1", "--duration=0.2", "--latency=100000",
        f"--logs={tmp_path / 'logs'}", f"--json={tmp_path / 'found.json'}",
        f"--markdown={tmp_path / 'found.md'}", "--scenario", "SingleStream",
    ]  # fmt: skip


def test_every_cell_has_a_row_and_logs(words, tmp_path):
    both = [*words, "--contestant", "cnn_engine", "onnxruntime"]
    assert loadgen_matrix.main([*words, "--contestant", "cnn_engine"]) == 0
    first = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert loadgen_matrix.main([*both, "--keep"]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert rows[0] == first[0]  # it was not run again
    assert [(row["library"], row["contestant"]) for row in rows] == [
        ("cnn_engine", "cnn_engine"), ("onnxruntime", "ONNX Runtime"),
    ]  # fmt: skip
    for row in rows:
        assert row["validity"] == "VALID"
        assert row["p90_s"] > 0
        detail = tmp_path / "logs" / "small-1" / "SingleStream" / row["library"]
        assert (detail / "mlperf_log_detail.txt").stat().st_size
    page = (tmp_path / "found.md").read_text()
    assert page.count("| small | 1 | SingleStream | ") == 2


def test_what_did_not_run_has_a_row_that_says_why(words, tmp_path):
    (tmp_path / "small.onnx").write_bytes(b"no network")
    assert loadgen_matrix.main([*words, "--contestant", "cnn_engine"]) == 1
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert "small.onnx" in row["error"]
    assert loadgen_matrix.result(row) is None
    assert "did not run: " in (tmp_path / "found.md").read_text()


def test_cells_run_side_by_side_on_cpus_of_their_own(words, tmp_path):
    own = sorted(os.sched_getaffinity(0))[:2]
    asked = [
        *words,
        "--scenario",
        "SingleStream",
        "Offline",
        "--contestant",
        "cnn_engine",
        "--cpus",
    ]
    assert loadgen_matrix.main([*asked, ",".join(map(str, own))]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["scenario"] for row in rows] == ["SingleStream", "Offline"]
    assert {cpu for row in rows for cpu in row["cpus"]} <= {*own}
    assert all(len(row["cpus"]) == 1 and row["validity"] == "VALID" for row in rows)
    assert os.sched_getaffinity(0) >= {*own}  # this thread stays where it was
    assert "side by side" in (tmp_path / "found.md").read_text()


def test_what_the_limit_ended_is_run_again(words, tmp_path):
    words += ["--contestant", "cnn_engine"]
    assert loadgen_matrix.main([*words, "--limit=0.01"]) == 1
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["error"] == "--limit: not done within 0.01 s"
    assert loadgen_matrix.main([*words, "--keep"]) == 0
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert row["validity"] == "VALID"


def test_cpus_are_this_processes_own(words, capsys):
    cpu = min(os.sched_getaffinity(0))
    assert loadgen_matrix.cpus(f"{cpu}-{cpu}") == [cpu]
    for text in ("65535", f"{cpu},{cpu}", "x", ""):
        with pytest.raises((ArgumentTypeError, InputError)):
            loadgen_matrix.cpus(text)
    assert loadgen_matrix.main([*words, "--cpus", str(cpu), "--threads", "2"]) == 2
    assert "expected 2 CPUs or more" in capsys.readouterr().err


def test_the_result_is_what_the_scenario_is_judged_by():
    figures = {"p50_s": 1.0, "p90_s": 2.0, "p99_s": 3.0, "images_per_s": 4.0}
    for scenario, wanted in (("SingleStream", 2.0), ("MultiStream", 3.0), ("Offline", 4.0)):
        row = {"scenario": scenario, "validity": "VALID", **figures}
        assert loadgen_matrix.result(row) == wanted
        assert loadgen_matrix.result({**row, "validity": "INVALID"}) is None
    served = {"scenario": "Server", "validity": "VALID", "completed_images_per_s": 5.0}
    assert loadgen_matrix.result(served) == 5.0
