"""``benchmarks.serve_batching`` asks both servers, compares answers, and says what keeps the bound."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc")
pytest.importorskip("uvicorn")

from benchmarks import serve_batching


def row(clients, off, on):
    found = {"clients": clients}
    for name, (rate, p99) in (("off", off), ("on", on)):
        found[name] = {"images_per_s": rate, "p50_ms": p99 / 2, "p99_ms": p99}
    return found


def test_rates_are_compared_within_the_bound():
    rows = [row(1, (10, 90), (11, 80)), row(4, (30, 300), (33, 99)), row(8, (40, 400), (90, 101))]
    document = {"bound_ms": 100.0, "rows": rows}
    assert serve_batching.within(document, "off") == 10
    assert serve_batching.within(document, "on") == 33
    (line,) = serve_batching.summary(document)
    assert "10.0 images/s without batching, 33.0 images/s with it, 3.30 times" in line
    (line,) = serve_batching.summary({**document, "bound_ms": 85.0})
    assert "none without batching, 11.0 images/s with it." in line


def test_both_servers_are_asked_and_a_wrong_answer_fails(tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    words = ["--width=16", "--clients", "2", "--seconds=0.1", "--rounds=1", f"--json={path}"]
    assert serve_batching.main(words) == 0
    found = json.loads(path.read_text())
    assert found["wrong"] == 0
    assert all(found["rows"][0][name]["images_per_s"] > 0 for name in serve_batching.SERVERS)
    made = serve_batching.Clients.__init__

    def wrong(self, model, names, images, wanted, count):
        made(self, model, names, images, np.flip(wanted), count)

    monkeypatch.setattr(serve_batching.Clients, "__init__", wrong)
    assert serve_batching.main(words) == 1
    assert json.loads(path.read_text())["wrong"] > 0
