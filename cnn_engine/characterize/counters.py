"""``characterize --ncu``: Nsight Compute's metrics of each kernel of one pass.

A process of its own (:mod:`.one_pass`) runs the pass under ``ncu``, which repeats each kernel as often as its
counters need. So these times are no part of the other reports. Source: Nsight Compute CLI, "Metrics".
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UnsupportedError
from ..report import units

#: Column -> metric; all but the time are percent of the peak.
METRICS = {
    "time_s": "gpu__time_duration.sum",
    "sm_throughput": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory_throughput": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_throughput": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_active": "sm__warps_active.avg.pct_of_peak_sustained_active",
}

#: What NVIDIA's driver says where counters are for administrators alone.
FORBIDDEN = "ERR_NVGPUCTRPERM"

#: Seconds that the profiled process may take.
LIMIT_S = 600


@dataclass
class CounterRow:
    """A row of ``ncu.csv``: all launches of a kernel in a pass; shares of the peak, weighted by time."""

    subject: str
    batch: int
    name: str
    launches: int
    time_s: float
    sm_throughput: float | None = None
    memory_throughput: float | None = None
    dram_throughput: float | None = None
    l2_throughput: float | None = None
    warps_active: float | None = None


def find() -> str:
    """Returns the path of ``ncu``.

    Raises:
        UnsupportedError: there is none.
    """
    path = shutil.which("ncu")
    if path is None:
        raise UnsupportedError("--ncu: expected Nsight Compute's ncu on PATH, found none")
    return path


def collect(subject: str, batch: int, command: Sequence[str]) -> list[CounterRow]:
    """Runs ``command`` under ``ncu`` and returns its kernels, the longest first.

    Raises:
        UnsupportedError: in one line why there are no metrics, such as a lack of permission.
    """
    words = [
        find(), "--csv", "--print-units", "base", "--print-fp", "--profile-from-start", "off",
        "--target-processes", "all", "--metrics", ",".join(METRICS.values()), *command,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", check=False, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"--ncu: expected ncu to run, found: {error}") from None
    if FORBIDDEN in done.stdout + done.stderr:
        raise UnsupportedError(
            f"--ncu: expected permission to read the GPU's counters, found none ({FORBIDDEN}): run as "
            "root, or have an administrator set NVreg_RestrictProfilingToAdminUsers=0"
        )
    rows = parse(done.stdout, subject, batch)
    if done.returncode or not rows:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
        reason = " ".join((lines or (done.stderr or "no kernel").splitlines())[-1].split())
        raise UnsupportedError(f"--ncu: expected metrics of kernels, found: {reason[:300]}")
    return rows


def parse(text: str, subject: str, batch: int) -> list[CounterRow]:
    """Returns the kernels of ``ncu --csv``: a line for each launch and metric, after lines of its own."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), len(lines))
    launches: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    columns = {metric: column for column, metric in METRICS.items()}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        column = columns.get(row.get("Metric Name") or "")
        try:
            value = float((row.get("Metric Value") or "").replace(",", ""))
        except ValueError:  # a metric that this GPU does not have
            continue
        if column is None or not row["ID"].isdecimal():
            continue
        names[row["ID"]] = row["Kernel Name"]
        launches.setdefault(row["ID"], {})[column] = value * (1e-9 if column == "time_s" else 1e-2)
    kernels: dict[str, list[dict[str, float]]] = {}
    for number, found in launches.items():
        if "time_s" in found:
            kernels.setdefault(names[number], []).append(found)
    rows = [_summed(subject, batch, name, found) for name, found in kernels.items()]
    return sorted(rows, key=lambda row: -row.time_s)


def _summed(subject: str, batch: int, name: str, found: list[dict[str, float]]) -> CounterRow:
    row = CounterRow(subject, batch, name, len(found), sum(one["time_s"] for one in found))
    for column in list(METRICS)[1:]:
        known = [one for one in found if column in one]
        time_s = sum(one["time_s"] for one in known)
        if time_s:
            mean = sum(one[column] * one["time_s"] for one in known) / time_s
            setattr(row, column, mean)
    return row


def cells(row: CounterRow) -> list[str]:
    """Returns a row of the printed table, without its point."""
    shares = [getattr(row, column) for column in list(METRICS)[1:]]
    return [
        row.name, units.count(row.launches), units.seconds(row.time_s), *map(units.percent, shares)
    ]  # fmt: skip


#: Titles of :func:`cells`.
TITLES = ["Kernel", "launches", "time", "SM", "memory", "DRAM", "L2", "warps"]
