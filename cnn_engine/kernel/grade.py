"""``kernel grade``: marks for a class, of the kernels that it handed in for a problem pack."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..kernels.user import source
from ..measure.statistics import Estimate
from ..report import units
from ..report.csv import cell
from .packs import Pack
from .rank import Entry, over_processes

#: What the baseline is called on the board.
BASELINE = "baseline"

#: Part of a speedup that may be noise.
ALLOWED = 0.05

COLUMNS = (
    "submission", "points", "possible", "correct", "fault", "seconds", "seconds_low", "seconds_high",
    "speedup", "speedup_low", "speedup_high",
)  # fmt: skip


@dataclass
class Grade:
    """One submission's mark.

    Attributes:
        submission: the file.
        points, possible: that it has, and that there are.
        fault: why it has none, in one line, or None.
        seconds: of one pass over the pack's nodes, over the processes.
        speedup: over the baseline, over pairs of processes of one round.
    """

    submission: str
    points: float
    possible: float
    fault: str | None
    seconds: Estimate | None = None
    speedup: Estimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the mark as JSON has it."""
        return {
            "submission": self.submission, "points": self.points, "possible": self.possible,
            "fault": self.fault, "seconds": self.seconds and asdict(self.seconds),
            "speedup": self.speedup and asdict(self.speedup),
        }  # fmt: skip


def entries_of(paths: Sequence[str], pack: Pack, device: str, room: Path) -> list[Entry]:
    """Returns an entry for each submission and the baseline's; unreadable files have a fault.

    Args:
        device: ``cpu`` or ``cuda``.
        room: a folder for the baseline's file.
    """
    names = [Path(path).name for path in paths]
    entries = [Entry(BASELINE, pack.subject(device, room))]
    for path, name in zip(paths, names, strict=True):
        # The folder of a student tells one solution.cpp from another.
        entry = Entry(name if names.count(name) == 1 else path, path)
        entries.append(entry)
        try:
            read = source.read(path)
        except (InputError, OSError) as error:
            entry.fault = str(error).replace(f"{path}:", f"{name}:", 1)
            continue
        entry.computes = read.computes
        for what, wanted, found in (
            ("operator", (pack.operator,), read.contract.op),
            ("device", (device,), read.device),
            ("computes", pack.computes, read.computes),
        ):
            if found not in wanted:
                entry.fault = f"{what}: expected {' or '.join(wanted)}, found {found}"
    return entries


def device_of(paths: Sequence[str]) -> str:
    """Returns the kind of device that most submissions are for, ``cpu`` or ``cuda``."""
    kinds = [source.DEVICES.get(Path(path).suffix.lower()) for path in paths]
    return "cuda" if kinds.count("cuda") > kinds.count("cpu") else "cpu"


def grades(entries: Sequence[Entry], pack: Pack) -> list[Grade]:
    """Returns the marks, the best first, of entries that were ranked.

    A step of speed counts as reached from :data:`ALLOWED` below it on, as far as the interval of the speedup
    reaches: noise costs nobody a point, and a wide interval of few processes gives none away.

    Raises:
        InputError: the baseline has a fault, so that nobody's speed can be judged.
    """
    baseline = next(entry for entry in entries if entry.name == BASELINE)
    if baseline.fault is not None or not baseline.processes:
        raise InputError(f"{pack.name}: baseline: expected a right kernel, found: {baseline.fault}")
    found = []
    for entry in entries:
        if entry is baseline:
            continue
        if entry.fault is not None or not entry.processes:
            fault = entry.fault or "interrupted before it was timed"
            found.append(Grade(entry.name, 0, pack.most, fault))
            continue
        pairs = zip(baseline.totals, entry.totals, strict=False)
        speedup = over_processes([ours / theirs for ours, theirs in pairs])
        allowed = speedup.value * (1 + ALLOWED)
        reached = allowed if speedup.high is None else min(allowed, speedup.high)
        found.append(Grade(entry.name, pack.points(reached), pack.most, None, entry.total, speedup))
    return sorted(
        found, key=lambda grade: (-grade.points, grade.fault is not None, grade.submission)
    )


def table(found: Sequence[Grade]) -> str:
    """Returns the marks as CSV, in seconds."""
    document = io.StringIO()
    writer = csv.writer(document, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for grade in found:
        times = [
            number
            for estimate in (grade.seconds, grade.speedup)
            for number in (
                (estimate.value, estimate.low, estimate.high) if estimate else (None,) * 3
            )
        ]
        row = [
            grade.submission,
            grade.points,
            grade.possible,
            grade.fault is None,
            grade.fault,
            *times,
        ]
        writer.writerow([cell(value) for value in row])
    return document.getvalue()


def text(found: Sequence[Grade], pack: Pack, baseline: Entry) -> str:
    """Returns the marks as text."""
    width = max([len(grade.submission) for grade in found] + [10])
    lines = [
        f"{pack.name}: {pack.title}; the baseline takes {units.seconds(baseline.total.value)}",
        f"{'points':>10}  {'submission':<{width}} {'time':>10} {'speedup':>8}",
    ]
    for grade in found:
        points = f"{grade.points:g} of {grade.possible:g}"
        if grade.fault is not None:
            lines.append(f"{points:>10}  {grade.submission:<{width}} {grade.fault}")
            continue
        lines.append(
            f"{points:>10}  {grade.submission:<{width}} {units.seconds(grade.seconds.value):>10} "
            f"{grade.speedup.value:>7.2f}x"
        )
    return "\n".join(lines)
