"""The table of what the measuring tools say beside the truth, with few trials and fixed seeds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import truth
from benchmarks.truth import Found
from cnn_engine.measure import statistics


@pytest.mark.parametrize(
    ("tool", "trials"),
    [("noise", 40), ("layers", 10), ("transfer", 8), ("rank", 100), ("infer", 40)],
)
def test_no_tool_breaks_what_the_pages_promise(tool, trials):
    rows = list(truth.rows(trials, [tool]))
    assert len(rows) >= 4
    assert [(row.noise, row.samples, truth.broken(row)) for row in rows if truth.broken(row)] == []


def test_verdicts_and_gates_keep_their_promises():
    rows = {(row.noise, row.samples): row for row in truth.compare_rows(50, (6, 30))}
    assert not any(map(truth.broken, rows.values()))
    # What is steady is told, and a run of six passes is no reason to pass a gate.
    steady = rows["independent", "30"].found
    assert steady["20 % slower found"] == 1
    assert steady["gate exits 1, equal"] == 0
    for noise in truth.NOISE:
        assert rows[noise, "6"].found[truth.PASSES_SLOWER] <= truth.MOST_FALSE
        assert rows[noise, "6"].found["same found"] == 0
        assert rows[noise, "6"].warned == 1


def test_a_broken_promise_is_found():
    good = Found(
        "compare", "independent", "30", 1000,
        false=0.2, false_unwarned=0.05, held=0.5, missed_unwarned=0.07,
    )  # fmt: skip
    assert truth.broken(good) == []  # what is false has a warning
    for change, word in (
        ({"false_unwarned": 0.08}, "false without a warning in 8.00 %"),
        ({"false_unwarned": None}, "false without a warning in 20.00 %"),  # a tool that never warns
        ({"missed_unwarned": 0.12}, "intervals miss without a warning in 12.00 %"),
        ({"found": {truth.PASSES_SLOWER: 0.2}}, "gate exits 0, 20 % slower in 20.00 %"),
    ):
        assert truth.broken(Found(**{**vars(good), **change})) == [word]


def test_a_warned_trial_is_counted_apart():
    held, warned, false = (
        np.array(bits, bool) for bits in ([1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 1])
    )
    row = truth._held(Found("compare", "independent", "30", 4), held, warned, false)
    assert (row.held, row.warned, row.missed_unwarned) == (0.5, 0.5, 0.25)
    assert (row.false, row.false_unwarned) == (0.75, 0.25)


def test_intervals_that_take_samples_as_independent_are_found(monkeypatch):
    law = "correlated 0.9"
    monkeypatch.setattr(truth, "NOISE", {law: truth.NOISE[law]})
    monkeypatch.setattr(statistics, "autocorrelation_time", lambda series: 1.0)
    (row,) = truth.compare_rows(100, (100,))
    assert any("intervals miss" in fault for fault in truth.broken(row))


def test_the_command_writes_a_page_and_says_what_it_found(tmp_path, capsys):
    paths = [f"--json={tmp_path / 'a.json'}", f"--markdown={tmp_path / 'a.md'}"]
    assert truth.main(["--trials", "20", "--tool", "rank", *paths]) in (0, 1)
    assert "kernel rank, runs 3 % apart" in capsys.readouterr().out
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["schema"] == "cnn_engine.truth/1"
    assert document["trials"] == 20
    assert len(document["rows"]) == 8
    assert "## kernel rank" in (tmp_path / "a.md").read_text()
    assert truth.main(["--trials", "5"]) == 2
