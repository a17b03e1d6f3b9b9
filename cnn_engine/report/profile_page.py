"""A profile's tables for the HTML page, with all rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..measure import profile_tables
from ..measure.result import Result
from . import openacc, profile, units


@dataclass
class Activity:
    """One table of a profile: ``rows`` of a name and cells; after ``line`` of them ``top`` is reached."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]
    line: int | None = None
    top: str = ""


def summary(result: Result) -> dict[str, str]:
    """Returns a profile's totals."""
    rows: dict[str, str] = {}
    label = ""
    for name, value in profile.summary(result.profile) if result.profile else ():
        label = name or label  # a line without a name goes on from the one before
        rows[label] = f"{rows[label]}; {value}" if label in rows else value
    return rows


def tables(result: Result) -> list[Activity]:
    """Returns a profile's tables that have rows."""
    found = result.profile
    if found is None:
        return []
    of_all = [
        _activities("GPU activities", found.gpu, found.top),
        _activities("CUDA API calls", found.api, found.top),
        _activities("Layers, host clock" if found.openacc else "Layers on the CPU", found.cpu, found.top),
        Activity(
            "OpenACC directives", openacc.COLUMNS, openacc.table(found.openacc) if found.openacc else []
        ),
        Activity(
            "Kernels by layer",
            ["share", *profile.TIMES, "grid", "block", "registers", "shared", "kernel"],
            [
                (
                    row.layer,
                    [
                        units.percent(row.share), *profile.times(row),
                        *("x".join(map(str, size)) for size in (row.grid, row.block)),
                        units.count(row.registers), units.size(row.shared_bytes),
                        profile.short(row.kernel),
                    ],
                )
                for row in found.layers
            ],
        ),
        Activity(
            "Copies by what they move",
            ["direction", "memory", "size", "GB/s", *profile.TIMES],
            [
                (row.what, [row.direction, row.memory, *_moved(row), *profile.times(row)])
                for row in found.copies
            ],
        ),
        Activity(
            "Managed memory",
            ["cause", "size", "GB/s", "faults", *profile.TIMES],
            [
                (row.kind, [row.cause, *_moved(row), units.count(row.faults), *profile.times(row)])
                for row in found.managed
            ],
        ),
    ]  # fmt: skip
    return [table for table in of_all if table.rows]


def _activities(title: str, rows: Sequence[profile_tables.Row], top: float) -> Activity:
    cells = [
        (
            profile.short(row.name),
            [units.percent(row.share), units.percent(row.cumulative), *profile.times(row)],
        )
        for row in rows
    ]
    line = profile_tables.line_after(rows, top)
    return Activity(title, ["share", "cumulative", *profile.TIMES], cells, line, f"{top:g} %")


def _moved(row: Any) -> list[str]:
    return [units.size(row.bytes), units.giga_per_second(row.bytes, row.total_s)]
