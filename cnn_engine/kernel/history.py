"""Boards over time: an SQLite file to which ``kernel rank`` and ``kernel grade`` append their results.

Times are compared within a problem only: one pack or network, operator, batch, device and number of threads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..errors import InputError, UnsupportedError, expected
from ..report import pages, units
from .grade import Grade
from .rank import Board

if TYPE_CHECKING:
    import sqlite3

#: In the head of the file: that it is one of these, and which form it has.
APPLICATION, VERSION = 0x434E4E42, 1

#: Seconds to wait for others that write to the same file.
WAIT_S = 60.0

_SCHEMA = f"""
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, at TEXT NOT NULL, task TEXT NOT NULL, operator TEXT NOT NULL,
    batch INTEGER NOT NULL, device TEXT NOT NULL, machine TEXT NOT NULL, threads INTEGER NOT NULL,
    flops INTEGER NOT NULL, calls INTEGER NOT NULL, rounds INTEGER NOT NULL, command TEXT NOT NULL,
    source TEXT
);
CREATE TABLE entries (
    run INTEGER NOT NULL REFERENCES runs (id), name TEXT NOT NULL, computes TEXT NOT NULL,
    seconds REAL, low REAL, high REAL, points REAL, possible REAL, fault TEXT
);
CREATE INDEX entries_of ON entries (run);
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True)
class Problem:
    """A problem; times are compared within one only.

    Attributes:
        task: the pack, or the network.
        operator, batch, device, machine, threads: of the runs; ``machine`` is the CPU's or the GPU's name.
        flops: of one pass.
    """

    task: str
    operator: str
    batch: int
    device: str
    machine: str
    threads: int
    flops: int


@dataclass
class Submission:
    """A kernel's name in the runs of a problem.

    Attributes:
        name, computes: of its last run.
        runs: in how many it was.
        times: (when, seconds) of the runs in which it was right, in order.
        best, low, high: seconds of its fastest run with the interval, or None.
        points, possible: the most that it got in a run, or None without a pack.
        last: when it ran last.
        fault: of its last run, or None.
    """

    name: str
    computes: str
    runs: int
    times: list[tuple[str, float]]
    best: float | None
    low: float | None
    high: float | None
    points: float | None
    possible: float | None
    last: str
    fault: str | None


def prepare(path: str) -> None:
    """Makes the file where there is none.

    Raises:
        InputError: it cannot be made, or is another kind of file.
        UnsupportedError: this Python has no SQLite.
    """
    if path == "-":
        raise expected("--board", "a file", "standard output")
    with _opened(path):
        pass


def append(path: str, found: Board, pack: str | None = None, marks: Sequence[Grade] = ()) -> None:
    """Adds one run, whole or not at all; others may write at the same time.

    Args:
        pack: of a class that was graded, with its ``marks``.

    Raises:
        InputError: the file cannot be written, or is another kind of file.
    """
    environment = found.environment
    on_cpu = found.device == "cpu"
    run = (
        datetime.now(timezone.utc).isoformat(timespec="seconds"), pack or found.network, found.operator,
        found.batch, found.device, str(environment.get("cpu" if on_cpu else "gpu")),
        found.threads if on_cpu else 0, found.flops, found.calls, found.rounds, found.command,
        environment.get("commit"),
    )  # fmt: skip
    graded = {mark.submission: mark for mark in marks}
    with _opened(path) as connection:
        number = connection.execute(
            "INSERT INTO runs (at, task, operator, batch, device, machine, threads, flops, calls, rounds, "
            f"command, source) VALUES ({', '.join('?' * len(run))})",
            run,
        ).lastrowid
        for entry in found.entries:
            total, mark = entry.total, graded.get(entry.name)
            times = (total.value, total.low, total.high) if total else (None,) * 3
            points = (mark.points, mark.possible) if mark else (None, None)
            connection.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (number, entry.name, entry.computes, *times, *points, entry.fault),
            )


def read(path: str) -> dict[Problem, list[Submission]]:
    """Returns the submissions of each problem: the fastest first, those that were never right last.

    Raises:
        InputError: the file cannot be read, or is another kind of file.
    """
    found: dict[Problem, dict[str, list[Mapping[str, Any]]]] = {}
    with _opened(path, make=False) as connection:
        rows = connection.execute(
            "SELECT * FROM entries JOIN runs ON run = id ORDER BY at, id, entries.rowid"
        )
        for row in rows:
            problem = Problem(*(row[name] for name in Problem.__dataclass_fields__))
            found.setdefault(problem, {}).setdefault(row["name"], []).append(row)
    return {
        problem: sorted(
            (_submission(rows) for rows in names.values()),
            key=lambda s: (s.best is None, s.best or 0.0, s.name),
        )
        for problem, names in found.items()
    }


def _submission(rows: Sequence[Mapping[str, Any]]) -> Submission:
    last = rows[-1]
    right = [row for row in rows if row["seconds"] is not None]
    best = min(right, key=lambda row: row["seconds"], default=None)
    marked = [row for row in rows if row["points"] is not None]
    most = max(marked, key=lambda row: row["points"], default=None)
    return Submission(
        last["name"], last["computes"], len(rows), [(row["at"], row["seconds"]) for row in right],
        *((best["seconds"], best["low"], best["high"]) if best else (None,) * 3),
        *((most["points"], most["possible"]) if most else (None,) * 2),
        last["at"], last["fault"],
    )  # fmt: skip


@contextlib.contextmanager
def _opened(path: str, make: bool = True) -> Iterator[sqlite3.Connection]:
    """Opens the file in a transaction, which ends with the block: kept, or undone by an exception."""
    try:
        import sqlite3
    except ImportError:
        raise UnsupportedError("board: expected a Python with sqlite3, found none") from None
    try:
        uri = f"file:{_quoted(path)}?mode={'rwc' if make else 'ro'}"
        with contextlib.closing(
            sqlite3.connect(uri, WAIT_S, isolation_level=None, uri=True)
        ) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN IMMEDIATE" if make else "BEGIN")
            _check(path, connection, make)
            yield connection
            connection.execute("COMMIT")  # closing without it undoes the transaction
    except sqlite3.Error as error:
        raise InputError(
            f"{path}: expected a board that kernel rank made, found: {error}"
        ) from error


def _check(path: str, connection: sqlite3.Connection, make: bool) -> None:
    """Makes the tables of a new file; refuses the files of other programs and of later versions."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if make and not tables and not application:
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
    elif (application, version) != (APPLICATION, VERSION):
        what = "another program's" if application != APPLICATION else f"version {version}"
        raise expected(path, f"a board of version {VERSION} that kernel rank made", what)


def _quoted(path: str) -> str:
    from urllib.parse import quote

    return quote(str(path))


def to_json(found: Mapping[Problem, Sequence[Submission]]) -> str:
    """Returns the content of ``--json``."""
    problems = [
        {**asdict(problem), "submissions": [asdict(s) for s in submissions]}
        for problem, submissions in found.items()
    ]
    return json.dumps({"schema": 1, "problems": problems}, indent=1) + "\n"


def text(found: Mapping[Problem, Sequence[Submission]]) -> str:
    """Returns a table for each problem."""
    return "\n\n".join(_table(problem, found[problem]) for problem in found) or "no run yet"


def _table(problem: Problem, submissions: Sequence[Submission]) -> str:
    width = max([len(s.name) for s in submissions] + [6])
    lines = [
        title(problem),
        f"{'':>5} {'kernel':<{width}} {'best':>10} {'GFLOP/s':>9} {'points':>7} {'runs':>5}  last",
    ]
    for place, s in enumerate(submissions, 1):
        points = "" if s.points is None else f"{s.points:g}"
        if s.best is None:
            lines.append(f"{'-':>5} {s.name:<{width}} {s.fault}")
            continue
        lines.append(
            f"{place:>5} {s.name:<{width}} {units.seconds(s.best):>10} "
            f"{units.giga_per_second(problem.flops, s.best):>9} {points:>7} {s.runs:>5}  "
            f"{s.last[:10]}{' ' + s.fault if s.fault else ''}"
        )
    return "\n".join(lines)


def title(problem: Problem) -> str:
    """Returns a problem in one line."""
    threads = f", {units.counted(problem.threads, 'thread')}" if problem.threads else ""
    return (
        f"{problem.operator} of {problem.task}, batch {problem.batch}, on {problem.device} "
        f"({problem.machine}{threads})"
    )


def page(found: Mapping[Problem, Sequence[Submission]], name: str) -> str:
    """Returns the boards as one HTML page that needs no network."""
    return pages.template("history.html", __package__).render(
        title=f"Boards of {name}", boards=found, units=units, heading=title, line=_line
    )


def _line(submission: Submission, width: int = 160, height: int = 24) -> str:
    """Returns a submission's times as points of an SVG line: the slowest at the top."""
    seconds = [value for _, value in submission.times]
    most, step = max(seconds), width / max(len(seconds) - 1, 1)
    return " ".join(
        f"{2 + i * step:.1f},{height - (height - 4) * value / most:.1f}"
        for i, value in enumerate(seconds)
    )
