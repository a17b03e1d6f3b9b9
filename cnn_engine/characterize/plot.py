"""One picture: throughput and utilisation against the batch, a line a subject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..io.files import atomic_write
from ..report import units
from ..report.plotting import unavailable
from .points import Point

MARKERS = "osD^vP*Xhp"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    label: str
    value: Callable[[Point], float | None]
    share: bool = True


THROUGHPUT = Panel("Throughput", "images/s", lambda p: p.throughput_images_per_s, share=False)
GPU = (
    Panel("GPU utilisation", "share of time in which a kernel runs", lambda p: p.gpu_utilization),
    Panel(
        "What that hides", "multiprocessors that are busy, on average", lambda p: p.sm_utilization
    ),
)
CPU = (
    Panel("CPU utilisation", "CPU time of the threads used", lambda p: p.cpu_utilization_threads),
)


def draw(points: list[Point], machine: str, path: Path) -> None:
    """Draws the points that were measured to the PNG file ``path``.

    Args:
        points: rows of the summary; those without a throughput are left out.
        machine: its name, for the title.

    Raises:
        UnsupportedError: matplotlib is not installed.
        InputError: the file cannot be written.
    """
    if reason := unavailable():
        raise UnsupportedError(reason)
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    done = [point for point in points if point.throughput_images_per_s]
    panels = [THROUGHPUT]
    for panel in CPU if all(point.device == "cpu" for point in done) else GPU:
        if any(panel.value(point) is not None for point in done):
            panels.append(panel)
    figure = Figure(figsize=(1.2 + 4.4 * len(panels), 5.4), layout="constrained")
    lines: dict[str, list[Point]] = {}
    for point in done:
        lines.setdefault(point.subject, []).append(point)
    colours = colormaps["tab10"].colors
    batches = sorted({point.batch for point in done})
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for index, (subject, line) in enumerate(lines.items()):
            _line(
                axes, panel, subject, line, colours[index % len(colours)],
                MARKERS[index % len(MARKERS)],
            )  # fmt: skip
        _decorate(axes, panel, batches)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, [units.printable(label) for label in labels], loc="outside lower center",
        ncols=min(len(labels), 4), frameon=False,
    )  # fmt: skip
    boundary = {point.kind: point.boundary for point in done}
    passes = "; ".join(
        f"{'our' if kind == 'engine' else 'PyTorch'} passes from {where} memory to {where} memory"
        for kind, where in boundary.items()
    )
    figure.suptitle(
        f"Low-batch characterisation: {units.printable(machine)}\n{passes}", fontsize=11
    )
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _line(
    axes: Any, panel: Panel, subject: str, line: list[Point], colour: Any, marker: str
) -> None:
    line = sorted(line, key=lambda point: point.batch)
    found = [(point.batch, panel.value(point)) for point in line]
    known = [(batch, value) for batch, value in found if value is not None]
    # A subject without values keeps its colour and its place in the legend.
    axes.plot(
        [batch for batch, _ in known], [value for _, value in known], color=colour, marker=marker,
        markersize=6, linewidth=1.8, label=subject,
    )  # fmt: skip


def _decorate(axes: Any, panel: Panel, batches: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.set_ylabel(panel.label)
    axes.set_xlabel("images per pass (batch)")
    if len(batches) > 1 and batches[-1] / batches[0] > 40:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if len(batches) <= 8:
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if panel.share:
        axes.set_ylim(0, 1.04)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    else:
        low, high = axes.get_ylim()
        values = [value for line in axes.get_lines() for value in line.get_ydata()]
        if values and max(values) / min(values) > 15:
            axes.set_yscale("log")
            far = max(values) / min(values) > 300
            axes.yaxis.set_major_locator(LogLocator(subs=(1,) if far else (1, 2, 5)))
        else:
            axes.set_ylim(0, high + 0.02 * (high - low))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _short(value: float) -> str:
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return f"{value:.4g}"
