"""The roofline of a run as text, and as a picture by matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..measure.roofline import Ceiling, Roofline
from . import units

#: Layers whose names the picture has: those that take the longest.
NAMED = 5

COLOURS = {"float32": "#b3261e", "memory": "#0b5cad", "cache": "#17692f"}


def render(found: Roofline, top: int | None = None, what: str = "layer") -> str:
    """Returns the ceilings, and the layers in order; with ``top`` those that take the longest.

    Args:
        what: a row is, such as ``kernel``.
    """
    lines = [f"Roofline: each {what} beside the ceiling that is nearest above it"]
    for ceiling in found.ceilings:
        line = f"  {ceiling.name:<8} {_rate(ceiling):>16}  {ceiling.how}"
        if ceiling.one_core is not None and ceiling.one_core != ceiling.rate:
            line += f"; one alone {_rate(replace(ceiling, rate=ceiling.one_core))}"
        lines.append(line)
    shown = found.points
    if top is not None:
        shown = sorted(shown, key=lambda point: -point.seconds)[:top]
    width = max(len(name) for name in (what, *(point.name for point in shown)))
    lines.append(
        f"{what:<{width}}  {'time':>10}  {'FLOP/byte':>9}  {'GFLOP/s':>9}  {'GB/s':>8}  bound by"
    )
    for point in shown:
        lines.append(
            f"{point.name:<{width}}  {units.seconds(point.seconds):>10}  {point.intensity:>9.2f}  "
            f"{point.flops_per_s / 1e9:>9.1f}  {point.bytes_per_s / 1e9:>8.1f}  "
            f"{point.bound}, {units.percent(point.share)}"
        )
    if others := sorted({point.computes for point in found.points} - {"float32"}):
        lines.append(
            f"Arithmetic in {', '.join(others)} has no ceiling here: it is placed under the memory's alone"
        )
    return "\n".join(lines)


def _rate(ceiling: Ceiling) -> str:
    unit = "GFLOP/s" if ceiling.kind == "compute" else "GB/s"
    return f"{ceiling.rate / 1e9:,.1f} {unit}"


def draw(found: Roofline, title: str, path: str | os.PathLike[str]) -> None:
    """Draws the roofline to a file: FLOP per byte across, FLOP/s up, both logarithmic.

    The area of a point grows with the layer's time. Layers without arithmetic have no place in it.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    from .plot import write_figure

    shown = [point for point in found.points if point.flops_per_s > 0]
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    across = [point.intensity for point in shown] or [1.0]
    span = np.geomspace(min(across) / 3, max(*across, _ridge(found.ceilings)) * 3, 200)
    alone = [
        replace(c, rate=c.one_core) for c in found.ceilings if c.one_core not in (None, c.rate)
    ]
    for ceilings, style, what in ((found.ceilings, "-", ""), (alone, ":", ", one core")):
        peak = next((c.rate for c in ceilings if c.kind == "compute"), math.inf)
        for ceiling in ceilings:
            roof = np.full_like(span, ceiling.rate)
            if ceiling.kind == "bandwidth":
                roof = np.minimum(peak, span * ceiling.rate)
            label = f"{ceiling.name}{what}: {_rate(ceiling)}"
            axes.plot(span, roof / 1e9, style, color=COLOURS[ceiling.name], label=label)
    most = max((point.seconds for point in shown), default=1.0)
    axes.scatter(
        across[: len(shown)], [point.flops_per_s / 1e9 for point in shown],
        [20 + 380 * point.seconds / most for point in shown],
        c=[COLOURS[point.bound] for point in shown], alpha=0.6, edgecolors="black", linewidths=0.5,
    )  # fmt: skip
    for point in sorted(shown, key=lambda point: -point.seconds)[:NAMED]:
        name = units.shortened(point.name, 24)
        axes.annotate(name, (point.intensity, point.flops_per_s / 1e9), fontsize=8)
    axes.legend(loc="lower right")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    write_figure(figure, path)


def _ridge(ceilings: Sequence[Ceiling]) -> float:
    """Returns the intensity from which memory no longer binds."""
    rates: dict[str, Any] = {ceiling.name: ceiling.rate for ceiling in ceilings}
    return rates["float32"] / rates["memory"]
