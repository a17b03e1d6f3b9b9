"""The chart of the road, from the records in the project."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks import road

TABLES = road.RESULTS / "batch-h200/tables.json"
PEERS = road.RESULTS / "gpu-peers-h200/peers.json"


def test_bars_are_the_records_figures():
    tables, peers = road.read(TABLES), road.read(PEERS)
    one, many = road.stages(tables, peers)
    plain = next(c for c in tables["tables"]["batch"] if c["variant"] == "if" and c["batch"] == 1)
    assert one[0].label == "if"
    assert one[0].value == statistics.median(plain["pass_s"])
    streamed = next(bar for bar in many if bar.label == "float16, 50,000 streamed")
    row = next(r for r in peers["rows"] if r["name"] == "fused float16, streamed")
    assert streamed.value == row["images_per_s"]
    assert all(bar.value > 0 for bar in one + many)
    assert sum("best peer" in bar.label for bar in one + many) == 4


def test_the_chart_is_written(tmp_path):
    path = tmp_path / "road.png"
    assert road.main(["--output", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "expected a record as JSON"),
        ("[]", "expected a record as JSON, found list"),
        ("{}", "records: expected those of benchmarks"),
        (json.dumps({"tables": {"batch": []}}), "tables: expected if at batch 1, found none"),
    ],
)
def test_what_is_no_record_is_named(content, message, tmp_path, capsys):
    path = tmp_path / "tables.json"
    if content is not None:
        path.write_text(content)
    assert road.main(["--tables", str(path), "--output", str(tmp_path / "road.png")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "road.png").exists()
