"""Charts as pictures: the layers of a result, and the ratios of a comparison, drawn by matplotlib.

``run --plot`` and ``compare --plot`` write them. The HTML page draws its own: see ``charts.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError, expected
from ..io.files import atomic_write
from ..measure.result import LayerTime, Result
from . import charts, grouping, text, units
from .plotting import unavailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..compare.comparison import Comparison

#: Endings of file names, each a format that matplotlib writes.
FORMATS = ("png", "svg", "pdf")
#: Rows of a chart: more do not fit on a screen. The longest are shown, the others are summed up.
MOST_ROWS = 24
#: Verdict -> colour.
COLOURS = {
    "faster": "#17692f",
    "slower": "#b3261e",
    "same": "#0b5cad",
    "cannot tell": "#8a939d",
}


def check(option: str, path: str | None) -> None:
    """Refuses a picture that cannot be drawn, before any work is done; None: none is asked for.

    Raises:
        InputError: the name has no ending of :data:`FORMATS`.
        UnsupportedError: matplotlib is not installed.
    """
    if path is None:
        return
    if os.path.splitext(path)[1].lower().lstrip(".") not in FORMATS:
        endings = ", ".join(f".{ending}" for ending in FORMATS)
        raise expected(option, f"a path that ends in one of {endings}", repr(path))
    if reason := unavailable():
        raise UnsupportedError(f"{option}: {reason}")


def draw(result: Result, path: str | os.PathLike[str]) -> None:
    """Draws the time of each layer of ``result``, and the shares of the operators, to a file.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = _shown(result)
    figure = Figure(figsize=(10, 2.2 + 0.28 * len(rows)), layout="constrained")
    shares, layers = figure.subplots(
        2, 1, height_ratios=[1, max(1.0, 0.55 * len(rows))], squeeze=True
    )
    _operators(shares, result)
    _layers(layers, rows, text.whole_seconds(result))
    figure.suptitle(_title(result), x=0.01, ha="left", fontsize=12, fontweight="bold")
    write_figure(figure, path)


def draw_comparisons(
    results: Sequence[Result], found: Sequence[Comparison], path: str | os.PathLike[str]
) -> None:
    """Draws each comparison's ratios with their intervals to a file.

    Args:
        results: the baseline, then the others.
        found: one comparison for each of the others, in their order.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    tables = [_ratios(one) for one in found]
    heights = [1.4 + 0.3 * len(rows) for rows in tables]
    figure = Figure(figsize=(10, sum(heights) + 0.5), layout="constrained")
    all_axes = figure.subplots(len(found), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, one, rows, other in zip(all_axes, found, tables, results[1:], strict=True):
        _forest(axes, rows)
        axes.set_title(f"{_label(other)} / {_label(results[0])}", loc="left", fontsize=11)
        axes.set_xlabel(
            f"ratio of times per {units.printable(one.per)}, 95 % interval: left of 1 is faster",
            fontsize=9,
        )
    title = " and ".join(dict.fromkeys(result.network for result in results))
    figure.suptitle(
        f"{units.printable(title)}: measured times compared", x=0.01, ha="left", fontsize=12,
        fontweight="bold",
    )  # fmt: skip
    write_figure(figure, path)


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format that the file's ending says."""
    from matplotlib import rc_context

    ending = os.path.splitext(os.fspath(path))[1].lower().lstrip(".")
    with atomic_write(path, "wb") as file, rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(file, format=ending, dpi=110)


def _title(result: Result) -> str:
    """Returns what was run and where, in two lines."""
    median = result.latency and result.latency.to_dict()["p50"] / 1e3
    ran = [
        result.network, f"batch {units.count(result.batch)}", result.computes_in, f"variant {result.variant}",
    ]  # fmt: skip
    where = [f"median pass {units.seconds(median)}"] if median else []
    where.append(result.device_name)
    if result.device.startswith("cpu"):
        where.append(units.counted(result.threads, "thread"))
    return "\n".join(units.printable(", ".join(parts)) for parts in (ran, where))


def _label(result: Result) -> str:
    reduction = " with reduction" if result.reduction else ""
    return units.printable(f"{result.network} {result.variant}{reduction} on {result.device}")


def _name(name: str) -> str:
    """Returns a name of at most 34 characters, shortened in the middle."""
    return units.shortened(units.printable(name), 34)


def _shown(result: Result) -> list[LayerTime]:
    """Returns the layers in their order, parts of a fused network by themselves; the shortest as one."""
    rows = [row for row in grouping.steps(result.layers) if 0 < row.seconds < math.inf]
    if len(rows) <= MOST_ROWS:
        return rows
    longest = sorted(rows, key=lambda row: row.seconds, reverse=True)[: MOST_ROWS - 1]
    least = longest[-1].seconds
    kept = [row for row in rows if row.seconds >= least][: MOST_ROWS - 1]
    names = {row.name for row in kept}
    return [*kept, grouping.total("others", [row for row in rows if row.name not in names])]


def _colour(kind: str) -> str:
    return charts.COLOURS.get(kind.partition("+")[0], charts.COLOURS["other"])


def _operators(axes: Axes, result: Result) -> None:
    """Draws one bar: each operator's share of the layers' time."""
    rows = [
        row for row in grouping.grouped(result.layers, "operator") if 0 < row.seconds < math.inf
    ]
    whole = sum(row.seconds for row in rows)
    left = 0.0
    for row in rows:
        share = row.seconds / whole
        axes.barh(0, share, left=left, color=_colour(row.kind), edgecolor="white", height=0.8)
        if share > 0.07:
            name = units.printable(text.kind_name(row.kind))
            said = f"{name}\n{units.percent(share)}"
            axes.text(left + share / 2, 0, said, ha="center", va="center", fontsize=8)
        left += share
    axes.set_xlim(0, 1)
    axes.set_title("Share of each operator", loc="left", fontsize=10)
    axes.axis("off")


def _layers(axes: Axes, rows: Sequence[LayerTime], whole_s: float) -> None:
    """Draws a bar per layer with its time, its share of a pass and its kernel."""
    if not rows:
        axes.text(0.5, 0.5, "no layer was timed", ha="center", va="center")
        axes.axis("off")
        return
    longest = max(row.seconds for row in rows)
    for index, row in enumerate(rows):
        axes.barh(index, row.seconds, color=_colour(row.kind), height=0.75)
        share = units.percent(row.seconds / whole_s) if whole_s > 0 else units.UNKNOWN
        said = f"{units.seconds(row.seconds)}  {share}  {units.printable(row.kernel)}".rstrip()
        axes.text(row.seconds + 0.01 * longest, index, said, va="center", fontsize=8)
    names = [_name(row.name) for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * longest)
    axes.set_xticks([])
    axes.set_title(
        "Time of each layer over all calls, its share of the passes, its kernel", loc="left", fontsize=10
    )  # fmt: skip
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _ratios(found: Comparison) -> list[Any]:
    """Returns the rows with a ratio: whole passes, then the layers and copies that take longest."""
    rows = [
        row
        for row in found.rows
        if row.ratio is not None and row.unit == "s" and 0 < row.ratio.value < math.inf
    ]
    passes = [row for row in rows if row not in found.steps]
    steps = [row for row in rows if row in found.steps]
    longest = sorted(steps, key=lambda row: row.baseline.value, reverse=True)
    kept = longest[: MOST_ROWS - len(passes)]
    return [*passes, *(row for row in steps if row in kept)]


def _forest(axes: Axes, rows: Sequence[Any]) -> None:
    """Draws a ratio and its interval per row, on a logarithmic axis."""
    from matplotlib.ticker import NullFormatter

    if not rows:
        axes.text(0.5, 0.5, "nothing that both results have", ha="center", va="center")
        axes.axis("off")
        return
    for index, row in enumerate(rows):
        ratio, colour = row.ratio, COLOURS[row.verdict]
        if ratio.known:
            axes.plot(
                [max(ratio.low, 1e-9), min(ratio.high, 1e9)], [index] * 2, color=colour, linewidth=2
            )
        axes.plot([ratio.value], [index], "o", color=colour, markersize=5)
        axes.annotate(
            f"{units.number(ratio.value)} x  {row.verdict}", (1.0, index), xytext=(6, 0),
            xycoords=("axes fraction", "data"), textcoords="offset points", va="center", fontsize=8,
            color=colour,
        )  # fmt: skip
    axes.axvline(1, color="#57606a", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(
        range(len(rows)),
        [_name(row.title) for row in rows],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.grid(True, axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
