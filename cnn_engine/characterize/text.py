"""The summary as text: a table for the passes, one for the device, one for the host."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, islice

from rich.table import Table

from ..report import units
from ..report.layout import NO_BREAK, rendered
from ..report.layout import table as text_table
from . import counters
from .counters import CounterRow
from .files import Report
from .points import OK, Point

WIDTH = 120

#: Kernels of a point that the table of Nsight Compute's metrics has.
KERNELS = 10

Column = tuple[str, Callable[[Point], str]]


def _watts(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{units.number(value)} W"


def _mhz(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:,.0f} MHz"


def _degrees(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.0f} C"


PASSES: list[Column] = [
    ("passes", lambda p: units.count(p.passes)),
    ("p50", lambda p: units.seconds(p.latency_p50_s)),
    ("p90", lambda p: units.seconds(p.latency_p90_s)),
    ("p99", lambda p: units.seconds(p.latency_p99_s)),
    ("images/s", lambda p: units.number(p.throughput_images_per_s)),
    ("accuracy", lambda p: units.percent(p.accuracy)),
    ("pass in", lambda p: p.boundary),
    ("status", lambda p: p.status),
]
BUSY: list[Column] = [
    ("kernel runs", lambda p: units.percent(p.gpu_utilization)),
    ("NVML gpu", lambda p: units.percent(p.nvml_gpu_utilization_mean)),
    ("SM busy", lambda p: units.percent(p.sm_utilization)),
    ("occupancy", lambda p: units.percent(p.sm_occupancy)),
    ("DRAM", lambda p: units.percent(p.dram_utilization)),
    ("NVML memory", lambda p: units.percent(p.nvml_memory_utilization_mean)),
    ("profiled", lambda p: units.percent(p.gpu_utilization_profiled)),
    ("cost", lambda p: units.percent(p.profiling_cost)),
]
DEVICE: list[Column] = [
    ("allocated", lambda p: units.size(p.allocated_bytes)),
    ("peak", lambda p: units.size(p.allocated_peak_bytes)),
    ("device used", lambda p: units.size(p.device_memory_used_bytes)),
    ("power", lambda p: _watts(p.power_mean_w)),
    ("most", lambda p: _watts(p.power_max_w)),
    ("SM clock", lambda p: _mhz(p.sm_clock_mean_mhz)),
    ("temperature", lambda p: _degrees(p.temperature_max_c)),
    ("throttled by", lambda p: p.throttle_reasons or units.UNKNOWN),
]
HOST: list[Column] = [
    ("threads", lambda p: units.count(p.threads)),
    ("CPU of threads", lambda p: units.percent(p.cpu_utilization_threads)),
    ("of the machine", lambda p: units.percent(p.cpu_utilization_machine)),
    ("memory", lambda p: units.size(p.rss_bytes)),
    ("peak", lambda p: units.size(p.rss_peak_bytes)),
]
ENERGY: list[Column] = [
    ("CPU", lambda p: units.joules(p.cpu_energy_j_per_image)),
    ("GPU", lambda p: units.joules(p.gpu_energy_j_per_image)),
]


def render(report: Report) -> str:
    """Returns the summary of ``report``: at most :data:`WIDTH` columns wide, without colours."""
    done = [point for point in report.points if point.latency_p50_s is not None]
    on_gpu = any(point.device != "cpu" for point in done)
    tables = [("Passes", report.points, PASSES)]
    if on_gpu:
        tables.append(("GPU", done, BUSY))
        tables.append(("GPU memory and power", done, DEVICE))
    if any(point.rss_bytes is not None for point in done):
        tables.append(("Host", done, HOST))
    if any((p.cpu_energy_j_per_image, p.gpu_energy_j_per_image) != (None, None) for p in done):
        tables.append(("Energy per image", done, ENERGY))
    parts = [_table(title, points, columns) for title, points, columns in tables]
    parts.append(remarks(report))
    return "\n\n".join("\n".join(part) for part in parts if part)


def counted(rows: list[CounterRow]) -> str:
    """Returns Nsight Compute's metrics, the longest kernels of each point."""
    parts = []
    for (subject, batch), found in groupby(rows, key=lambda row: (row.subject, row.batch)):
        shown = [counters.cells(row) for row in islice(found, KERNELS)]
        head = f"Nsight Compute: {units.printable(subject)}, batch {batch}, share of the peak"
        parts.append("\n".join([head, *text_table(counters.TITLES, shown)]))
    return "\n\n".join(parts)


def remarks(report: Report) -> list[str]:
    """Returns how meters were sampled, and the notes, a line each."""
    lines = []
    sampled = [p for p in report.points if p.samples is not None]
    if sampled:
        counts = [point.samples for point in sampled]
        achieved = [
            point.sample_period_achieved_s for point in sampled if point.sample_period_achieved_s
        ]
        asked = units.seconds(sampled[0].sample_period_s)
        text = f"Meters sampled every {asked}"
        if achieved:
            text += f" (achieved {units.seconds(min(achieved))} to {units.seconds(max(achieved))})"
        lines.append(f"{text}, {min(counts)} to {max(counts)} samples per point")
    if report.interrupted:
        done = sum(point.status == OK for point in report.points)
        lines.append(
            f"Interrupted: the passes of {done} of {len(report.points)} points are complete"
        )
    lines += [f"Note: {units.printable(note)}" for note in report.notes]
    notes: dict[str, list[Point]] = {}
    for point in report.points:
        if point.note:
            notes.setdefault(point.note, []).append(point)
    for note, points in notes.items():
        where = "all points" if len(points) == len(report.points) else _where(points)
        lines.append(f"Note on {where}: {units.printable(note)}")
    return lines


def _where(points: list[Point]) -> str:
    batches: dict[str, list[str]] = {}
    for point in points:
        batches.setdefault(point.subject, []).append(str(point.batch))
    return "; ".join(
        f"{units.printable(subject)}, batch {', '.join(found)}"
        for subject, found in batches.items()
    )


def line(point: Point) -> str:
    """Returns a point's figures as one line, once its passes are timed."""
    head = f"{units.printable(point.subject)}, batch {point.batch}: "
    if point.latency_p50_s is None:
        return f"{head}{point.status}: {units.printable(point.note)}"
    rate = units.number(point.throughput_images_per_s)
    return (
        f"{head}p50 {units.seconds(point.latency_p50_s)}, {rate} images/s, {point.passes:,} passes"
    )


def _table(title: str, points: list[Point], columns: list[Column]) -> list[str]:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title.replace(" ", NO_BREAK), overflow="fold")
    table.add_column("batch", justify="right", no_wrap=True)
    for name, _ in columns:
        table.add_column(name.replace(" ", NO_BREAK), justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            units.printable(point.subject), str(point.batch), *(cell(point) for _, cell in columns)
        )
    return [line.replace(NO_BREAK, " ") for line in rendered(table, WIDTH)]
