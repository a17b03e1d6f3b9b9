"""The reports as files: three CSV documents (RFC 4180) and ``characterize.json``.

They are written again after every point, each whole or not at all, so that what is measured stays.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..io.files import atomic_write, check_writable, make_folder
from ..measure.roofline import Roofline
from ..report.csv import cell
from ..report.json import finite
from .counters import CounterRow
from .points import IterationRow, KernelRow, Point

SCHEMA = 1

SUMMARY, KERNEL, ITERATION = "summary.csv", "kernel.csv", "iteration.csv"
COUNTERS = "ncu.csv"
DOCUMENT, PLOT, ROOFLINE = "characterize.json", "characterize.png", "roofline.png"


class Table:
    """Rows of one report that never change, as CSV text that grows."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.text = as_csv(kind, [])

    def extend(self, rows: list[Any]) -> None:
        self.text += as_csv(self._kind, rows, header=False)


@dataclass
class Report:
    """All that was found so far.

    Attributes:
        folder: where the files go.
        header: the JSON document without its points: command, environment, options.
        points: rows of the summary, all that were asked for, in order.
        kernels, iterations: these reports.
        notes: sentences on the whole, such as a meter that is missing.
        roofline: of ``--roofline``: the machine's ceilings, and each layer of each point under them.
        counters: of ``--ncu``: rows of ``ncu.csv``.
        interrupted: whether Ctrl-C ended the measurement.
    """

    folder: Path
    header: dict[str, Any]
    points: list[Point]
    kernels: Table = field(default_factory=lambda: Table(KernelRow))
    iterations: Table = field(default_factory=lambda: Table(IterationRow))
    notes: list[str] = field(default_factory=list)
    roofline: Roofline | None = None
    counters: list[CounterRow] = field(default_factory=list)
    interrupted: bool = False

    def save(self) -> None:
        """Writes all files but the plot.

        Raises:
            InputError: a file cannot be written.
        """
        for name, document in (
            (SUMMARY, as_csv(Point, self.points)),
            (KERNEL, self.kernels.text),
            (ITERATION, self.iterations.text),
        ):
            with atomic_write(self.folder / name) as file:
                file.write(document)
        if self.counters:
            with atomic_write(self.folder / COUNTERS) as file:
                file.write(as_csv(CounterRow, self.counters))
        with atomic_write(self.folder / DOCUMENT) as file:
            json.dump(self.to_dict(), file, indent=1, allow_nan=False)
            file.write("\n")

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON document, schema 1."""
        return finite(
            {
                "schema": SCHEMA,
                **self.header,
                "files": {"summary": SUMMARY, "kernel": KERNEL, "iteration": ITERATION},
                "roofline": self.roofline and dataclasses.asdict(self.roofline),
                "counters": [dataclasses.asdict(row) for row in self.counters] or None,
                "interrupted": self.interrupted,
                "notes": self.notes,
                "points": [dataclasses.asdict(point) for point in self.points],
            }
        )


def prepare(folder: str) -> Path:
    """Creates ``folder`` where it is missing and sees that the reports can be written there.

    Raises:
        InputError: they cannot.
    """
    path = make_folder(folder, "--output")
    for name in (SUMMARY, KERNEL, ITERATION, DOCUMENT, PLOT, ROOFLINE, COUNTERS):
        check_writable(path / name, "--output")
    return path


def as_csv(kind: type, rows: list[Any], header: bool = True) -> str:
    """Returns ``rows``, objects of the dataclass ``kind``, as CSV with its fields as columns."""
    columns = [column.name for column in dataclasses.fields(kind)]
    document = io.StringIO()
    writer = csv.writer(document, lineterminator="\r\n")
    if header:
        writer.writerow(columns)
    writer.writerows([cell(getattr(row, name)) for name in columns] for row in rows)
    return document.getvalue()
