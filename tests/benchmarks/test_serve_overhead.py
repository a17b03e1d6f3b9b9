"""``benchmarks.serve_overhead`` and ``benchmarks.serve_all``: a short run of each."""

from __future__ import annotations

import importlib
import json

import pytest

pytest.importorskip("onnx")
pytest.importorskip("tritonclient.http")
pytest.importorskip("uvicorn")

from benchmarks import serve_all, serve_overhead
from benchmarks.serve_process import write_network
from cnn_engine.io.model_metadata import PREPROCESS


@pytest.fixture
def network(tmp_path):
    write_network(tmp_path / "small.onnx", 0)
    return tmp_path / "small.onnx"


def test_times_of_both_transports_and_what_is_refused(network, tmp_path):
    words = ["--rounds=2", "--requests=3", "--threads=1", f"--json={tmp_path / 'o.json'}"]
    page = tmp_path / "o.md"
    assert serve_overhead.main([f"--model={network}", *words, f"--markdown={page}"]) == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["wrong"] == 0
    rows = {(row["datatype"], row["transport"]): row for row in found["rows"]}
    for transport, bound in serve_overhead.BOUNDS_US.items():
        row = rows["FP32", transport]
        assert row["bound_us"] == bound
        assert row["serve_us"] > row["empty_us"] > 0
        assert row["predict_us"] > 0
        low, high = row["added_quartiles_us"]
        assert low <= row["added_us"] <= high
        assert "expected FP32, found UINT8" in rows["UINT8", transport]["refused"]
    assert page.read_text().count("| FP32 |") == 2


def test_pixels_are_normalised_as_serve_does(tmp_path):
    import onnx

    network = tmp_path / "small.onnx"
    write_network(network, 0, size=224)
    model = onnx.load(network)
    onnx.helper.set_model_props(model, {PREPROCESS: "imagenet"})
    onnx.save(model, network)
    words = ["--rounds=1", "--requests=1", "--threads=1", f"--json={tmp_path / 'o.json'}"]
    assert serve_overhead.main([f"--model={network}", *words]) == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["wrong"] == 0
    assert all("refused" not in row and row["serve_us"] > 0 for row in found["rows"])


def test_what_is_added_is_less_the_empty_handler_and_predict(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(serve_overhead, "perf_counter", lambda: now[0])

    def taking(seconds):
        def ask():
            now[0] += seconds

        return ask

    kinds = {"empty": taking(200e-6), "predict": taking(1000e-6), "serve": taking(1250e-6)}
    found = serve_overhead._times(kinds, rounds=3, requests=5)
    assert found["added_us"] == pytest.approx(50)
    assert found["serve_us"] == pytest.approx(1250)


def test_one_that_fails_ends_no_other(network, tmp_path, monkeypatch):
    made = {
        "serve_batching": ["--no-such-option"],
        "serve_overhead": [f"--model={network}", "--rounds=1", "--requests=1", "--threads=1"],
    }
    monkeypatch.setattr(serve_all, "parts", lambda options: made)
    words = [
        f"--model={network}", f"--folder={tmp_path / 'parts'}", f"--json={tmp_path / 'a.json'}",
        f"--markdown={tmp_path / 'a.md'}",
    ]  # fmt: skip
    assert serve_all.main(words) == 1
    parts = json.loads((tmp_path / "a.json").read_text())["parts"]
    assert parts["serve_batching"]["exit_code"] == 2
    assert "--no-such-option" in " ".join(parts["serve_batching"]["said"])
    assert len(parts["serve_overhead"]["result"]["rows"]) == 4
    assert "## What serve adds to predict" in (tmp_path / "a.md").read_text()


def test_the_options_of_every_part_are_its_own():
    options = serve_all.parser().parse_args(["--model=x.onnx"])
    for name, words in serve_all.parts(options).items():
        importlib.import_module(f"benchmarks.{name}").parser().parse_args(words)
