"""The thesis' table in OpenACC: cells that are done stay, and what cannot run says why in its row."""

from __future__ import annotations

import json

import pytest

from benchmarks import openacc_table


def test_table_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(cell, weights, data, threads, most_s):
        asked.append(cell.name)
        found = {
            "cell": vars(cell),
            "unsupported": None,
            "seconds": 1.5 if cell.variant == "if" else 0.75,
        }
        if cell.data_mode == "managed":
            return {"cell": vars(cell), "unsupported": "--data-mode: managed: none here"}
        parts = {"conv": 0.5, "pad": 0.125, "relu": 0.0625, "pool": 0.0625, "copies": 0.25}
        found.update(parts=parts, conv_regions=3600, conv_launches=3600)
        return found

    monkeypatch.setattr(openacc_table, "measure", measure)
    arguments = ["--images", "1200", "--output", str(tmp_path)]
    assert openacc_table.main([*arguments, "--limit", "-1"]) == 0
    assert asked == []
    assert "0 cells, 24 left to be measured" in capsys.readouterr().out
    assert openacc_table.main(arguments) == 0
    assert len(asked) == len(set(asked)) == 24  # two devices, three data modes, four ways
    assert openacc_table.main(arguments) == 0
    assert len(asked) == 24
    table = (tmp_path / "openacc.md").read_text().splitlines()
    measured = "0.75 | 0.5 | 0.125 | 0.25 | 0.125 | 3,600, 3,600 | 0.75 | 1 |"
    assert f"| 1,200 | transfer | pad | yes | 3.827 | {measured}" in table
    refused = (
        "| 1,200 | managed | if | no | 7.578 | --data-mode: managed: none here | | | | | | - | |"
    )
    assert refused in table
    assert (
        json.loads((tmp_path / "cuda-resident-if-in-order-1200.json").read_text())["seconds"] == 1.5
    )


def test_a_cell_that_would_outlast_the_limit_is_left(tmp_path, monkeypatch):
    asked = []

    def measure(cell, weights, data, threads, most_s):
        asked.append((cell.variant, cell.images))
        seconds = cell.images / (10.0 if cell.variant == "if" else 1e6)
        return {"cell": vars(cell), "unsupported": None, "seconds": seconds, "parts": {}}

    monkeypatch.setattr(openacc_table, "measure", measure)
    words = ["--images", "100,50000", "--beside", "none", "--limit", "60", "--cell", "1e9"]
    assert openacc_table.main([*words, "--output", str(tmp_path)]) == 0
    assert {variant for variant, images in asked if images == 100} == {"if", "pad"}
    assert {variant for variant, images in asked if images == 50000} == {"pad"}


@pytest.mark.parametrize(("most_s", "ran"), [(1e-9, 8), (1e3, 20)])
def test_many_images_are_run_once_and_scaled_where_they_take_too_long(
    tmp_path, monkeypatch, most_s, ran
):
    monkeypatch.setattr(openacc_table, "COUNTED", 10)
    monkeypatch.setattr(openacc_table, "BLOCK", 8)
    words = ["--device", "cpu", "--beside", "none", "--images", "20", "--modes", "resident"]
    assert openacc_table.main([*words, "--cell", str(most_s), "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "cpu-resident-pad-in-order-20.json").read_text())
    assert found["images"] == ran
    assert len(found["blocks_s"]) == -(-ran // 8)
    assert found["seconds"] == pytest.approx(sum(found["blocks_s"]) * 20 / ran)
    assert found["check"]["max_abs_diff"] <= found["check"]["tolerance"]
    rows = [
        line
        for line in (tmp_path / "openacc.md").read_text().splitlines()
        if "| resident | pad |" in line
    ]
    assert len(rows) == 2
    assert all((", scaled from 8 |" in row) == (ran == 8) for row in rows)


def test_modes_are_known(tmp_path, capsys):
    assert openacc_table.main(["--modes", "resident,both", "--output", str(tmp_path)]) == 2
    assert (
        "--modes: expected some of managed, transfer, resident, found both"
        in capsys.readouterr().err
    )
