"""OpenACC reports: the compiler's mapping of directives, and the ones that ran."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ..devices.openacc_mapping import Directive, Mapping
from ..measure.openacc_events import Row, Timing
from . import units
from .pages import template

WIDTH = 100


def summary(found: Mapping) -> list[tuple[str, str]]:
    """Returns lines on the compiler of the directives."""
    return [
        ("Compiler", found.compiler),
        ("Offloads to", found.target or "nothing: the host alone (openacc:host)"),
        (
            "Convolutions",
            f"gangs:workers:vector {found.shape}" if found.shape else "shape left to the compiler",
        ),
        ("Directives", str(len(found.directives))),
    ]


def text(found: Mapping) -> str:
    """Returns the listing: every directive, its loop, and the compiler's messages."""
    lines = ["OpenACC directives and what the compiler made of them", ""]
    lines += [f"  {label + ':':<16}{value}" for label, value in summary(found)]
    for (file, function), group in groupby(found.directives, key=lambda d: (d.file, d.function)):
        lines += ["", f"{file}: {function}"]
        for directive in group:
            lines += _wrapped(f"{directive.line:6}  ", directive.source)
            if directive.loops:
                lines += _wrapped(" " * 8, directive.loops)
            for said in said_of(directive, found.target):
                lines += _wrapped(" " * 10 + "-> ", said)
    return "\n".join(map(units.printable, lines)) + "\n"


def said_of(directive: Directive, target: str) -> list[str]:
    """Returns the compiler's messages on a directive; the GPU's by themselves where they differ."""
    rows = [", ".join(group) for group in _grouped(directive.said)]
    if directive.offload and any(fact not in directive.said for fact in directive.offload):
        rows.append(f"{target}: {', '.join(directive.offload)}")
    return rows or ["nothing said"]


def _grouped(said: Sequence[str]) -> Iterator[list[str]]:
    """Yields the loop's facts together, and each data clause by itself."""
    loop = [fact for fact in said if fact.startswith(("loop:", "collapse", "reduction", "tile"))]
    if loop:
        yield loop
    for fact in said:
        if fact not in loop:
            yield [fact]


def _wrapped(start: str, words: str) -> list[str]:
    return textwrap.wrap(
        words, WIDTH, initial_indent=start, subsequent_indent=" " * (len(start) + 2),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def to_dict(found: Mapping) -> dict[str, Any]:
    """Returns the content of ``inspect --device openacc --json``."""
    return {
        "schema": 1,
        "command": "inspect",
        "device": "openacc",
        "compiler": found.compiler,
        "offload": found.target,
        "shape": found.shape,
        "directives": [asdict(directive) for directive in found.directives],
        "sources": found.sources,
    }


def page(found: Mapping) -> str:
    """Returns a page with the sources, and the compiler's messages next to each directive."""
    by_place = {(d.file, d.line): d for d in found.directives}
    sources = {
        file: [
            (
                number,
                line,
                said_of(by_place[file, number], found.target) if (file, number) in by_place else [],
            )
            for number, line in enumerate(lines, 1)
        ]
        for file, lines in found.sources.items()
    }
    return (
        template("openacc.html")
        .render(title="OpenACC directives", summary=summary(found), sources=sources)
        .strip()
        + "\n"
    )


# ---- what ran ----


def timing(found: Timing) -> str:
    """Returns the times in the layout of nvc's ``NV_ACC_TIME=1``, in microseconds."""
    lines = ["Accelerator Kernel Timing data"]
    for file, in_file in groupby(found.rows, key=lambda row: row.file):
        lines.append(file or "(outside of any directive of ours)")
        by_function: dict[str, list[Row]] = {}
        for row in in_file:
            if row.kind == "implicit":
                continue
            by_function.setdefault(row.function, []).append(row)
        for function, rows in by_function.items():
            own = sum(
                row.total_s for row in rows if row.kind in ("region", "data", "copyin", "copyout")
            )
            lines.append(f"  {function}  {found.where}  devicenum={found.number}")
            lines.append(f"    time(us): {_us(own)}")
            for row in rows:
                lines += _row(row, found.host)
    return "\n".join(map(units.printable, lines))


def exclusive(found: Timing) -> str:
    """Returns every event's time without the events inside it, the longest first, as nvprof has them."""
    rows = sorted(found.rows, key=lambda row: row.excl_s, reverse=True)
    whole = sum(row.excl_s for row in rows) or 1.0
    heads = ("Time(%)", "Time", "Calls", "Avg", "Min", "Max")
    lines = ["OpenACC (excl)  " + " ".join(f"{head:>10}" for head in heads) + "  Name"]
    for row in rows:
        what = row.kernel or row.variable
        name = f"{row.event}@{row.file.rpartition('/')[2]}:{row.line}"
        mean_s = row.excl_s / max(row.count, 1)
        cells = [units.percent(row.excl_s / whole), units.seconds(row.excl_s), f"{row.count:,}"]
        cells += map(units.seconds, (mean_s, row.excl_min_s, row.excl_max_s))
        numbers = " ".join(f"{cell:>10}" for cell in cells)
        lines.append(f"{'':<16}{numbers}  {name}{f' ({what})' if what else ''}")
    return "\n".join(map(units.printable, lines))


def _row(row: Row, host: bool) -> list[str]:
    at = f"{row.line}: "
    if row.kind == "region":
        head = [f"    {at}compute region reached {units.counted(row.count, 'time')}"]
        if host:
            head.append(f"        {at}run on the host {units.counted(row.count, 'time')}")
        return [*head, f"            elapsed time(us): {_spread(row)}"]
    if row.kind == "kernel":
        return [
            f"        {at}kernel launched {units.counted(row.count, 'time')}",
            f"            grid: [{row.gangs}]  block: [{row.vector}x{row.workers}]",
            f"             elapsed time(us): {_spread(row)}",
        ]
    if row.kind == "data":
        return [f"    {at}data region reached {units.counted(row.count, 'time')}"]
    if row.kind in ("copyin", "copyout"):
        return [
            f"        {at}data {row.kind} transfers: {units.count(row.count)} ({units.size(row.bytes)})",
            f"             device time(us): {_spread(row)}",
        ]
    return [f"        {at}{row.kind} {units.counted(row.count, 'time')}: {_spread(row)}"]


def _spread(row: Row) -> str:
    return (
        f"total={_us(row.total_s)} max={_us(row.max_s)} min={_us(row.min_s)} "
        f"avg={_us(row.total_s / max(row.count, 1))}"
    )


def _us(seconds: float) -> str:
    """Returns microseconds: whole ones with commas as nvc has them, below ten of them three digits."""
    us = seconds * 1e6
    return f"{us:,.0f}" if us >= 10 else f"{us:.3g}"


#: Of the table of what ran on a page.
COLUMNS = [
    "directive", "what the compiler made of it", "event", "times", "size", "total", "average", "min", "max",
    "grid", "block",
]  # fmt: skip


def table(found: Timing) -> list[tuple[str, list[str]]]:
    """Returns a row for every event of every directive, with a cell for each column."""
    return [
        (
            f"{row.file}:{row.line}",
            [
                row.source, "; ".join(row.said), row.kind, units.count(row.count),
                units.size(row.bytes) if row.kind.startswith("copy") else "-",
                *(
                    units.seconds(value)
                    for value in (row.total_s, row.total_s / max(row.count, 1), row.min_s, row.max_s)
                ),
                str(row.gangs) if row.kind == "kernel" else "-",
                f"{row.vector}x{row.workers}" if row.kind == "kernel" else "-",
            ],
        )
        for row in found.rows
        if row.kind != "implicit"
    ]  # fmt: skip
