"""The road of imported networks, from the records in the history of a clone."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import low_batch_road as road


def row(network: str, ms: float, ours: bool = True, **more) -> dict:
    known = {"network": network, "size": [224, 224], "dtype": "float16", "batch": 1, "ours": ours}
    return {**known, "device_ms": ms, "floor_ms": 0.03125, "name": "x", **more}


def document(commit: str, started: str, *rows: dict) -> dict:
    return {
        "schema": road.SCHEMA, "environment": {"commit": commit, "gpu": "a GPU"}, "rows": list(rows),
        "started": started,
    }  # fmt: skip


@pytest.fixture
def clone(tmp_path):
    """A history of two versions of a record, one beside it, and files that are none."""
    folder = tmp_path / "clone" / "results"
    folder.mkdir(parents=True)

    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)

    def commit(**files):
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{name}.json").write_text(text)
        git("add", "-A")
        git("commit", "-qm", "records")

    git("init", "-q")
    old = document(
        "aaaaaaabbbbb", "2026-01-01T00:00:00Z", row("net", 0.5), row("other", 0.75),
        row("net", 1.5, ours=False), row("net", 1.25, ours=False), row("other", 1.75, ours=False),
    )  # fmt: skip
    commit(matrix=old, broken="{", list="[]")
    new = document(
        "cccccccddddd", "2026-03-01T00:00:00Z", row("net", 0.25), row("net", 1.0, ours=False),
        row("net", 9.0, size=[33, 47]), row("net", 8.0, dtype="tf32"), row("net", 7.0, batch=20),
        row("stranger", 6.0), {**row("net", 0), "device_ms": None}, row("other", 2.0, ours=False),
    )  # fmt: skip
    commit(
        matrix=new,
        part=document("eeeeeeefffff", "2026-02-01T00:00:00Z", row("net", 0.375, size=None)),
        dirty=document("0123456-dirty", "2026-02-02T00:00:00Z", row("net", 0.125)),
    )
    return folder


def test_a_stop_is_what_a_commit_took_in_the_order_of_runs(clone):
    found = road.road(road.history(clone), ["net", "other"], "float16", 1)
    assert [stop.commit for stop in found.stops] == ["aaaaaaa", "eeeeeee", "ccccccc"]
    assert [stop.ours.get("net") for stop in found.stops] == [0.5, 0.375, 0.25]
    assert found.stops[0].ours["other"] == 0.75
    first, last = {"net": 1.25, "other": 1.75}, {"net": 1.0, "other": 2.0}
    assert [stop.peers for stop in found.stops] == [first, {}, last]
    assert found.peers == {"net": 1.0, "other": 1.75}
    assert found.floors == {"net": 0.03125, "other": 0.03125}


def test_a_table_and_a_chart_a_batch(clone, tmp_path, capsys):
    page, chart = tmp_path / "road.md", tmp_path / "road.png"
    words = ["--folder", str(clone), "--network", "net", "other", "--batch", "1", "20", "5"]
    assert road.main([*words, "--markdown", str(page), "--chart", str(chart)]) == 0
    assert capsys.readouterr().out == ""
    assert chart.read_bytes().startswith(b"\x89PNG")
    first, _, rest = page.read_text().partition("## float16, batch 20")
    assert first.strip().splitlines()[-7:] == [
        "| commit | net | other |",
        "|---|---:|---:|",
        "| aaaaaaa | 0.500 | 0.750 |",
        "| eeeeeee | 0.375 |  |",
        "| ccccccc | 0.250 |  |",
        "| best peer | 1.000 | 1.750 |",
        "| floor | 0.031 | 0.031 |",
    ]
    assert "| ccccccc | 7.000 |  |" in rest
    assert road.main(words) == 0
    assert capsys.readouterr().out.count("## float16, batch") == 3


def test_where_there_is_no_record_is_said(tmp_path, capsys):
    assert road.main(["--folder", str(tmp_path)]) == 2
    assert "expected a folder of a clone, found" in capsys.readouterr().err
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    assert road.main(["--folder", str(tmp_path)]) == 2
    assert "--folder" in capsys.readouterr().err
    assert road.main(["--folder", str(tmp_path), "--chart", str(tmp_path / "no" / "x.png")]) == 2
    assert "error: --chart" in capsys.readouterr().err
