"""One picture of a network in one mode: points, fits and break, residuals, and GB/s against the peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..io.files import atomic_write
from ..report import units
from ..report.plotting import unavailable
from . import text
from .analysis import Analysis

POINTS, LINE, PIECES, PEAK = "#7f7f7f", "#d62728", ("#1f77b4", "#2ca02c"), "#000000"

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def draw(one: Analysis, path: Path) -> None:
    """Draws ``one``, which has a regression, to the PNG file ``path``.

    Raises:
        UnsupportedError: matplotlib is not installed.
        InputError: the file cannot be written.
    """
    if reason := unavailable():
        raise UnsupportedError(reason)
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(12.5, 8.6), layout="constrained")
    (linear, small), (residual, rate) = figure.subplots(2, 2)
    _times(linear, one)
    linear.set_title("Time to move a batch", fontsize=11, loc="left")
    _times(small, one)
    small.set_title("The same on logarithmic axes: small batches", fontsize=11, loc="left")
    small.set_xscale("log")
    small.set_yscale("log")
    small.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    small.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    small.yaxis.set_minor_formatter(NullFormatter())
    small.set_ylim(0.6 * one.times.min() / _unit(one)[0], 1.6 * one.times.max() / _unit(one)[0])
    _residuals(residual, one)
    _rates(rate, one)
    for axes in (linear, small, residual, rate):
        axes.set_xlabel("images per batch")
        axes.grid(True, which="major", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        _batch_ticks(axes, one.batches)
    handles, labels = linear.get_legend_handles_labels()
    more = residual.get_legend_handles_labels()
    figure.legend(
        handles + more[0], labels + more[1], loc="outside lower center", ncols=3, frameon=False
    )
    machine = (one.environment or {}).get("gpu") or one.gpu
    figure.suptitle(
        f"Transfer of {units.printable(one.network)} images: {one.mode}; "
        f"{units.printable(machine)}",
        fontsize=12,
    )
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def _unit(one: Analysis) -> tuple[float, str]:
    """Returns the unit of time in which the largest time is at least 1."""
    return next((row for row in _TIMES if one.times.max() >= row[0]), _TIMES[-1])


def _times(axes: Any, one: Analysis) -> None:
    factor, unit = _unit(one)
    axes.plot(
        one.batches, one.times / factor, "o", color=POINTS, alpha=0.55, markersize=4.5,
        markeredgewidth=0, label="median of the samples",
    )  # fmt: skip
    # Between the measured sizes too, so that a line stays a line where few are measured.
    low, high = one.batches[0], one.batches[-1]
    dense = np.unique(np.concatenate([np.geomspace(low, high, 200), one.batches.astype(float)]))
    line = one.line.at(dense) / factor
    shown = np.where(line > 0, line, np.nan)  # a time below zero has no logarithm
    off = units.percent(one.line_misfit.max_relative)
    axes.plot(
        dense, shown, "--", color=LINE, linewidth=1.2, label=f"single line: off by up to {off}"
    )
    off = units.percent(one.pieces_misfit.max_relative)
    for number, piece in enumerate(one.pieces.lines):
        x = dense[(dense >= piece.from_batch) & (dense <= piece.to_batch)]
        name = ("first piece", "second piece")[number] if one.pieces.break_batch else "one piece"
        label = f"{name}: {text.line_text(piece)}"
        if piece is one.pieces.lines[-1]:
            label += f" (off by up to {off})"
        axes.plot(x, piece.at(x) / factor, color=PIECES[number], linewidth=1.3, label=label)
    _break(axes, one, labelled=True)
    axes.set_ylabel(f"time, {unit}")
    axes.set_ylim(bottom=0)


def _residuals(axes: Any, one: Analysis) -> None:
    axes.set_title("Residual: measured against fitted", fontsize=11, loc="left")
    series = (
        (one.line.at(one.batches), LINE, "x", 3.5),
        (one.pieces.at(one.batches), PIECES[0], ".", 5),
    )
    shares = []
    for fitted, colour, marker, size in series:
        shares.append(100 * (one.times - fitted) / one.times)
        colours = colour
        if marker == "." and one.pieces.break_batch:
            colours = [PIECES[int(b >= one.pieces.break_batch)] for b in one.batches]
        axes.scatter(one.batches, shares[-1], s=size**2, c=colours, marker=marker, linewidths=0.9)
    if one.hold_out is not None:
        off = 100 * (1 - np.divide(one.hold_out.predicted_s, one.hold_out.measured_s))
        shares.append(off)
        axes.scatter(
            one.hold_out.batch_sizes, off, s=42, facecolors="none", edgecolors="black", linewidths=0.9,
            label=f"{len(off)} held out: predicted within "
            f"{units.percent(one.hold_out.pieces.max_relative)}",
        )  # fmt: skip
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    largest = max(np.abs(share).max() for share in shares)
    if largest > 30:  # the pieces would be flat at zero beside the line
        from matplotlib.ticker import FixedLocator

        axes.set_yscale("symlog", linthresh=10, linscale=2)
        steps = [s for s in (5, 10, 30, 100, 300, 1000, 3000, 10000, 100000) if s < 1.5 * largest]
        axes.yaxis.set_major_locator(FixedLocator([*(-s for s in reversed(steps)), 0, *steps]))
        axes.yaxis.set_minor_locator(FixedLocator([]))
        low, high = (min(map(np.min, shares)), max(map(np.max, shares)))
        axes.set_ylim(min(1.4 * low, -5), max(1.4 * high, 5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g} %")
    axes.set_ylabel("share of the measured time")
    _break(axes, one)


def _rates(axes: Any, one: Analysis) -> None:
    axes.set_title("Achieved rate", fontsize=11, loc="left")
    axes.set_ylabel("GB/s")
    axes.set_xscale("log")
    rates = one.bytes_per_s()
    if rates is None:
        axes.text(
            0.5, 0.5, "the size of an image is not known", ha="center", transform=axes.transAxes
        )
        axes.set_yticks([])
        axes.set_xlim(one.batches[0], max(one.batches[-1], one.batches[0] + 1))
        return
    axes.plot(one.batches, rates / 1e9, ".", color=POINTS, markersize=5, label="wall time")
    device = [point for point in one.points if point.device_median_s is not None]
    if device:
        sizes = np.array([point.batch_size for point in device])
        times = np.array([point.device_median_s for point in device])
        axes.plot(
            sizes, sizes * one.image_bytes / times / 1e9, "+", color="#9467bd", markersize=4.5,
            markeredgewidth=0.9, label="device time",
        )  # fmt: skip
    if one.peak_bytes_per_s is not None:
        peak = one.peak_bytes_per_s / 1e9
        axes.axhline(
            peak, color=PEAK, linewidth=1.2, linestyle=":",
            label=f"measured peak: {units.number(peak)} GB/s",
        )  # fmt: skip
    axes.set_ylim(bottom=0, top=1.12 * axes.get_ylim()[1])
    _break(axes, one)
    axes.legend(frameon=False, loc="best", fontsize=9)


def _break(axes: Any, one: Analysis, labelled: bool = False) -> None:
    at = one.pieces.break_batch
    if at is None:
        return
    low, high = one.pieces.break_interval
    label = f"break at {at} images (95 %: {low} to {high})" if labelled else None
    axes.axvline(at, color="#ff7f0e", linewidth=1.1, linestyle="-.", label=label)
    if high > low:
        axes.axvspan(low, high, color="#ff7f0e", alpha=0.15, linewidth=0)


def _batch_ticks(axes: Any, batches: np.ndarray) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

    if axes.get_xscale() == "log":
        low, high = int(batches[0]), int(batches[-1])
        ticks = [2**power for power in range(25) if low <= 2**power <= high]
        if len(ticks) >= 2:
            axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 12)]))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
