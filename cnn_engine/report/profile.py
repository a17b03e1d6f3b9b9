"""A profile as plain text: tables like nvprof's, at most 100 columns wide.

Every column is explained in ``docs/reference/report_columns.md``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.table import Table

from ..measure.profile_tables import EVENTS, HOST_CLOCK, Capture, Cost, Profile, Row, line_after
from . import openacc, units
from .layout import fields, rendered

RIGHT, LEFT = "right", "left"

NAMESPACE = re.compile(r"(?:\(anonymous namespace\)|\w+)::")
LONGEST_NAME = 60  # of a kernel; templates instantiated with templates have hundreds of characters

TIMES = ("total", "calls", "average", "min", "max")


def render(profile: Profile) -> str:
    """Returns the report on ``profile``."""
    titles = {
        EVENTS: "GPU activities (layers and copies, between events)",
        HOST_CLOCK: "GPU activities",
    }
    if profile.openacc is not None:
        titles = {}
    parts = [
        ["What filled the time", *fields(summary(profile))],
        _activities(titles.get(profile.source, "GPU activities"), profile.gpu, profile.top),
        _activities("CUDA API calls", profile.api, profile.top),
        _activities(
            "Layers, host clock" if profile.openacc else "Layers on the CPU",
            profile.cpu,
            profile.top,
        ),
        _layers(profile),
        _copies(profile),
        _managed(profile),
        [openacc.timing(profile.openacc)] if profile.openacc else [],
        [openacc.exclusive(profile.openacc)] if profile.openacc else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def summary(profile: Profile) -> list[tuple[str, str]]:
    """Returns a profile's totals, a line each; unknown ones are left out."""
    source = {
        EVENTS: "events around layers and copies",
        HOST_CLOCK: "the host's clock around layers",
    }.get(profile.source, "activity records of CUPTI")
    passes = units.count(profile.passes) + (" pass" if profile.passes == 1 else " passes")
    ran = f"{passes} over {units.counted(profile.images, 'image')}"
    if profile.interrupted:
        ran += ", interrupted"
    rows = [("Times come from", source), ("Profiled", ran)]
    if profile.wall_s is not None:
        rows.append(("Wall time of the passes", units.seconds(profile.wall_s)))
    for label, seconds in (
        ("A kernel ran", profile.kernel_s),
        ("A copy ran", profile.copy_s),
        ("Kernel, copy or set ran", profile.gpu_s),
        ("Host in CUDA API calls", profile.api_s),
        ("Host in layers on the CPU", profile.cpu_s),
    ):
        if seconds is not None:
            share = units.percent(units.share(seconds, profile.wall_s))
            rows.append((label, f"{units.seconds(seconds)}, {share} of the wall time"))
    if profile.capture is not None:
        rows += captured(profile.capture)
    if profile.cost is not None:
        rows.append(("Cost of profiling", cost(profile.cost)))
    rows += [("Left out" if index == 0 else "", note) for index, note in enumerate(profile.notes)]
    return [(label, units.printable(value)) for label, value in rows]


def captured(found: Capture) -> list[tuple[str, str]]:
    """Returns the share of launches and copies that have a record, a line each."""
    launches = units.counted(found.launches, "launch", "launches")
    launches = f"{units.count(found.launches_captured)} of {launches}"
    rows = [
        ("Captured", f"{launches} ({units.counted(found.kernels, 'kernel')} recorded)"),
        (
            "",
            f"{units.count(found.steps_captured)} of {units.counted(found.steps, 'step')} of the plan "
            "that launch kernels",
        ),
    ]
    if found.copies:
        copies = f"{units.count(found.copies_captured)} of {units.count(found.copies)}"
        size = f"{units.size(found.bytes_captured)} of {units.size(found.bytes)}"
        rows.append(("", f"{copies} copies of the plan, {size}"))
    if found.kernels_outside or found.calls_outside:
        rows.append(
            (
                "",
                f"outside of the passes' steps: {units.counted(found.kernels_outside, 'kernel')}, "
                f"{units.counted(found.calls_outside, 'API call')} (the calls are not in the table)",
            )
        )
    if found.dropped:
        rows.append(("", f"{units.counted(found.dropped, 'record')} dropped"))
    if not found.complete:
        rows.append(("", "INCOMPLETE: totals and shares are of what was captured"))
    return rows


def cost(found: Cost) -> str:
    """Returns the cost of profiling, in a sentence."""
    text = f"a pass of a full batch takes {units.seconds(found.profiled_s)} profiled"
    text += f", {units.seconds(found.plain_s)} plain"
    if found.ratio is not None:
        text += f": {units.number(found.ratio)} x"
    if found.interval is not None:
        low, high = map(units.number, found.interval)
        text += f" (95 % interval {low} to {high})"
    text += f"; medians of {units.count(found.samples)}, in turn"
    if found.ordinary_s is not None:
        text += f"; {units.seconds(found.ordinary_s)} before anything was recorded"
    return text


def _activities(title: str, table: Sequence[Row], top: float) -> list[str]:
    """Returns the rows that make up ``top`` percent of the time, a line, and the others as one row."""
    if not table:
        return []
    end = line_after(table, top)
    rest = table[end:]
    cells = [_activity(row) for row in table[:end]]
    if rest:
        cells.append(["-----", f"{top:g} %", *["-----"] * 6])
        cells.append(_activity(rest[0] if len(rest) == 1 else _sum(rest)))
    names = [("share", RIGHT), ("sum", RIGHT), *((name, RIGHT) for name in TIMES), ("name", LEFT)]
    return [title, *_table(names, cells)]


def _sum(rows: Sequence[Row]) -> Row:
    calls, total_s = sum(row.calls for row in rows), sum(row.total_s for row in rows)
    known = [row for row in rows if row.min_s is not None]
    complete = len(known) == len(rows)
    shares = [row.share for row in rows if row.share is not None]
    return Row(
        f"({len(rows)} others)", "", calls, total_s, total_s / max(calls, 1),
        min(row.min_s for row in known) if complete else None,
        max(row.max_s for row in known) if complete else None,
        sum(shares) if shares else None, rows[-1].cumulative,
    )  # fmt: skip


def _activity(row: Row) -> list[str]:
    return [
        units.percent(row.share),
        units.percent(row.cumulative),
        *times(row),
        units.printable(short(row.name)),
    ]


def short(kernel: str) -> str:
    """Returns a kernel's name without namespaces and at most :data:`LONGEST_NAME` long; JSON has it whole."""
    return units.shortened(NAMESPACE.sub("", kernel), LONGEST_NAME)


def times(row: object) -> list[str]:
    """Returns the cells of the columns :data:`TIMES`."""
    return [
        units.seconds(row.total_s),
        units.count(row.calls),
        *(units.seconds(value) for value in (row.average_s, row.min_s, row.max_s)),
    ]


def _layers(profile: Profile) -> list[str]:
    cells = [
        [
            units.printable(row.layer),
            units.percent(row.share),
            units.seconds(row.total_s),
            units.count(row.calls),
            units.seconds(row.average_s),
            "x".join(map(str, row.grid)),
            "x".join(map(str, row.block)),
            units.count(row.registers),
            units.size(row.shared_bytes),
            units.printable(short(row.kernel)),
        ]
        for row in profile.layers
    ]
    names = [
        "layer",
        "share",
        "total",
        "calls",
        "average",
        "grid",
        "block",
        "regs",
        "shared",
        "kernel",
    ]
    sides = [LEFT, *[RIGHT] * 8, LEFT]
    return (
        ["Kernels by layer", *_table(list(zip(names, sides, strict=True)), cells)] if cells else []
    )


def _copies(profile: Profile) -> list[str]:
    cells = [
        [
            units.printable(row.what),
            row.direction,
            row.memory,
            units.size(row.bytes),
            units.giga_per_second(row.bytes, row.total_s),
            *times(row),
        ]
        for row in profile.copies
    ]
    names = [
        ("what", LEFT),
        ("direction", LEFT),
        ("memory", LEFT),
        ("size", RIGHT),
        ("GB/s", RIGHT),
    ]
    names += [(name, RIGHT) for name in TIMES]
    return ["Copies by what they move", *_table(names, cells)] if cells else []


def _managed(profile: Profile) -> list[str]:
    cells = [
        [
            row.kind,
            row.cause or units.UNKNOWN,
            units.size(row.bytes) if row.bytes else units.UNKNOWN,
            units.giga_per_second(row.bytes, row.total_s),
            units.count(row.faults) if row.faults else units.UNKNOWN,
            *times(row),
        ]
        for row in profile.managed
    ]
    names = [("event", LEFT), ("cause", LEFT), ("size", RIGHT), ("GB/s", RIGHT), ("faults", RIGHT)]
    names += [(name, RIGHT) for name in TIMES]
    return ["Managed memory", *_table(names, cells)] if cells else []


def _table(names: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table; columns on the right are numbers, which are never broken."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, side in names:
        table.add_column(name, justify=side, no_wrap=side == RIGHT, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return [line.rstrip() for line in rendered(table)]
