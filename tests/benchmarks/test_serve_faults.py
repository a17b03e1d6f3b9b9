"""``benchmarks.serve_faults`` finds a server right that is, and says so of none that is not."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("tritonclient.http")
pytest.importorskip("tritonclient.grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("scipy")

from benchmarks import serve_faults, serve_load

WORDS = ["--seconds=1", "--every=0.01", "--clients=4", "--rate=20", "--instances=1"]


def test_answers_and_faults_are_counted(tmp_path):
    path = tmp_path / "found.json"
    faults = ["replace", "wrong_bodies", "vanish", "cut_shared_memory"]
    words = [*WORDS, *(f"--fault={one}" for one in faults), f"--json={path}"]
    assert serve_faults.main(words) == 0
    found = json.loads(path.read_text())
    assert found["passed"]
    assert found["answered_after_sigterm"] == found["asked_before_sigterm"] == serve_faults.LAST
    assert all(found["outcomes"][way]["right"] for way in serve_load.WAYS), found["outcomes"]
    assert not any(found["faults"][one].get("not") for one in faults)
    assert found["waiting_at_the_end"] == 0


def test_a_wrong_row_fails(tmp_path, monkeypatch):
    made = serve_load.Truth.__init__

    def wrong(self, *arguments):
        made(self, *arguments)
        self.rows = [np.nextafter(rows, np.float32(np.inf)) for rows in self.rows]  # the last bit

    monkeypatch.setattr(serve_load.Truth, "__init__", wrong)
    path = tmp_path / "found.json"
    assert serve_faults.main([*WORDS, "--fault=wrong_shapes", f"--json={path}"]) == 1
    found = json.loads(path.read_text())
    assert sum(counts.get("wrong", 0) for counts in found["outcomes"].values())


def test_growth_is_told_from_noise():
    chance, seconds = np.random.default_rng(0), np.arange(600.0)
    noise = 80 + chance.normal(0, 0.5, 600)
    _, low, high = serve_faults.slope(list(seconds), list(noise))
    assert low < 0 < high
    growth, low, high = serve_faults.slope(list(seconds), list(noise + seconds / 60))
    assert low < 60 < high
    assert growth > serve_faults.GROWTH
    assert low > 0
