"""``benchmarks.serve_gpus`` looks for the fastest rate that is kept, over all processes of LoadGen."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("mlperf_loadgen")
pytest.importorskip("tritonclient.grpc")
pytest.importorskip("uvicorn")

from benchmarks import serve_gpus
from benchmarks.serve_process import write_network


def asked(limit: float, monkeypatch, **more) -> dict:
    """Returns the row of a server that keeps rates up to ``limit``."""

    def ask(options, server, folder, rate):
        return {"target_qps": rate, "valid": rate <= limit, "images_per_s": rate - 1.0,
                "p50_s": 0.002, "p99_s": 0.01}  # fmt: skip

    monkeypatch.setattr(serve_gpus, "_ask", ask)
    options = SimpleNamespace(**{"first": 100.0, "halvings": 2, "seconds": 60.0} | more)
    row = {"devices": "cpu", "rates": []}
    serve_gpus._search(options, None, serve_gpus.Path("nowhere"), row)
    return row


def test_rates_rise_until_one_is_not_kept_and_then_halve_what_is_left(monkeypatch):
    row = asked(200, monkeypatch)
    assert [one["target_qps"] for one in row["rates"]] == [100, 150, 225, 187.5, 206.25]
    assert serve_gpus.kept(row)["target_qps"] == 187.5
    assert [one["target_qps"] for one in asked(50, monkeypatch)["rates"]] == [100]
    assert len(asked(500, monkeypatch, seconds=-1.0)["rates"]) == 1  # whatever the warm-up took


def test_the_table_compares_with_the_first_server(monkeypatch):
    rows = [asked(200, monkeypatch), asked(400, monkeypatch, halvings=0), asked(50, monkeypatch)]
    one, two, none = serve_gpus.table({"rows": rows})[2:]
    assert "| 186 | 1.00 | 2.000 ms | 10.00 ms | 206 |" in one
    assert "| 336 | 1.80 |" in two
    assert two.endswith("| 506 |")
    assert none == "| cpu | none |  |  |  | 100 |"


def test_a_server_is_asked_by_processes_of_loadgen(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_gpus, "QUERIES", 100)
    write_network(tmp_path / "small.onnx", 0)
    paths = [f"--json={tmp_path / 'found.json'}", f"--markdown={tmp_path / 'found.md'}"]
    words = [
        f"--model={tmp_path / 'small.onnx'}", "--devices", "cpu", "--processes=2", "--clients=2",
        "--first=100", "--duration=0.2", "--seconds=1.1", "--latency=100000", *paths,
    ]  # fmt: skip
    code = serve_gpus.main(words)
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    first = row["rates"][0]
    assert code == (0 if first["valid"] else 1)
    assert [run["target_qps"] for run in first["runs"]] == [50, 50]
    rates = [run["completed_images_per_s"] for run in first["runs"]]
    assert first["images_per_s"] == pytest.approx(sum(rates))
    assert min(rates) > 0
    assert first["p99_s"] == max(run["p99_s"] for run in first["runs"])
    assert "| cpu |" in (tmp_path / "found.md").read_text()
