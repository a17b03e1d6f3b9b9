"""The charts of the tables, readable without the text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # files only: no display is asked for

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from cnn_engine.io.files import atomic_write
from cnn_engine.report import units

from . import configurations as found
from .configurations import Cell, names_in_order

if TYPE_CHECKING:
    from .tables import Tables

#: A family of colours a kind of layer; its layers are shades, from dark to light.
COLOURS = {
    "conv": "Blues", "pad": "Purples", "relu": "Greens", "pool": "Oranges", "fc": "YlOrBr",
    "softmax": "PuRd", "normalize": "Greys", "tanh": "Greens", "copy": "Reds",
}  # fmt: skip
COPIES = ("copies", "copy")
STYLES = {False: "-", True: "--"}
MARKERS = "osD^vP*X"


def draw(tables: Tables, folder: Path) -> dict[str, str]:
    """Draws a chart for each table that has results; returns name -> file."""
    files = {}
    thesis = [cell for cell in tables.cells.get("thesis", ()) if cell.results]
    for count in dict.fromkeys(cell.images for cell in thesis):
        figure = _layers(tables, [cell for cell in thesis if cell.images == count])
        files[f"thesis-{count}"] = _save(figure, folder / f"thesis-{count}.png")
    for name, function in (("course", _course), ("batch", _batch)):
        cells = [cell for cell in tables.cells.get(name, ()) if cell.results]
        figure = function(tables, cells) if cells else None
        if figure is not None:
            files[name] = _save(figure, folder / f"{name}.png")
    return files


def _save(figure: Figure, path: Path) -> str:
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
    return path.name


def _machine(tables: Tables) -> str:
    environment = tables.environment
    name = environment["gpu"] or environment["cpu"]
    kernels = "" if environment["gpu"] else f", {units.counted(environment['threads'], 'thread')}"
    return f"{name}{kernels}, commit {environment['commit'] or 'not known'}"


def _seconds_axis(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short_seconds(value)))
    axis.set_minor_formatter(NullFormatter())


def _short_seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        if value >= factor * 0.9999:
            return f"{value / factor:.4g} {unit}"
    return "0" if value == 0 else f"{value:.1g} s"


# ---- stacked bars: a bar a variant, a segment a layer ----


def _layers(tables: Tables, cells: list[Cell]) -> Figure:
    """A panel a data mode, each with an axis of its own, since they are orders of magnitude apart."""
    layers = names_in_order(cells)
    if any(cell.results[0].copies for cell in cells):
        layers.append(COPIES)
    modes = list(dict.fromkeys(cell.data_mode for cell in cells))
    rows = len(cells) // len(modes)
    figure, panels = pyplot.subplots(
        len(modes), 1, figsize=(12, 1.9 + len(modes) * (0.75 + 0.42 * rows)), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, mode in zip(panels[:, 0], modes, strict=True):
        _bars(tables, axes, layers, [cell for cell in cells if cell.data_mode == mode])
        if len(modes) > 1:
            axes.set_title(f"data mode: {mode}", fontsize=10, loc="left")
    about = "; ~ extrapolated from fewer" if any(cell.extrapolated for cell in cells) else ""
    panels[-1, 0].set_xlabel(f"seconds for {cells[0].images:,} images, one image a pass{about}")
    figure.suptitle(
        f"Where the time goes: CIFAR-10 network, {cells[0].images:,} images one by one\n"
        f"{_machine(tables)}",
        fontsize=11,
    )
    # Kind by kind, so that what belongs together stands together.
    handles, labels = panels[0, 0].get_legend_handles_labels()
    kinds = dict(layers)
    rank = list(COLOURS)
    order = sorted(
        range(len(labels)),
        key=lambda i: rank.index(kinds[labels[i]]) if kinds.get(labels[i]) in rank else len(rank),
    )
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], ncols=6, fontsize=8,
        loc="outside lower center", frameon=False,
    )  # fmt: skip
    return figure


def _bars(tables: Tables, axes: Axes, layers: list[tuple[str, str]], cells: list[Cell]) -> None:
    colours = _shades(layers)
    positions = range(len(cells))
    left = [0.0] * len(cells)
    for layer in layers:
        of = found.copies_s if layer == COPIES else found.layers_s(name=layer[0])
        widths = [cell.total(of) for cell in cells]
        axes.barh(
            positions, widths, left=left, color=colours[layer], label=layer[0], height=0.72,
            edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    totals = [cell.total(found.forward_s) for cell in cells]
    axes.plot(totals, positions, "kd", markersize=7, label="total, wall time of untimed passes")
    for position, cell, total, end in zip(positions, cells, totals, left, strict=True):
        text = f"{'~' if cell.extrapolated else ''}{units.seconds(total)}"
        if published := tables.published_thesis(cell):
            ratio = published[0] / total
            compared = f"{ratio:,.3g}x faster" if ratio >= 1 else f"{1 / ratio:,.3g}x slower"
            scaled = ", scaled" if published[1] else ""
            text += f":  {compared} than the thesis ({published[0]:.4g} s{scaled})"
        axes.annotate(
            text, (max(end, total), position), xytext=(9, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    axes.set_yticks(positions, [cell.label for cell in cells])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max([*left, *totals]))
    axes.spines[["top", "right"]].set_visible(False)


def _shades(layers: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[float, ...]]:
    """A colour for each layer: its kind's, lighter from layer to layer."""
    shades = {}
    for layer in layers:
        same = [other for other in layers if other[1] == layer[1]]
        depth = 0.85 - 0.5 * same.index(layer) / max(len(same) - 1, 1) if len(same) > 1 else 0.65
        shades[layer] = matplotlib.colormaps[COLOURS.get(layer[1], "Greys")](depth)
    return shades


# ---- lines on log axes ----


def _line_styles(cells: list[Cell]) -> dict[tuple[str, bool], dict[str, object]]:
    """A colour and a marker a variant, dashes with reduction."""
    colours = matplotlib.colormaps["tab10"].colors
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    return {
        (variant, reduction): {
            "color": colours[variants.index(variant) % 10],
            "marker": MARKERS[variants.index(variant) % len(MARKERS)],
            "linestyle": STYLES[reduction],
            "markersize": 5,
            "markerfacecolor": "white" if reduction else colours[variants.index(variant) % 10],
        }
        for variant in variants
        for reduction in (False, True)
    }


def _rows(cells: list[Cell]) -> dict[tuple[str, bool], list[Cell]]:
    rows: dict[tuple[str, bool], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.variant, cell.reduction), []).append(cell)
    return rows


def _legend(panels) -> None:
    """Puts one legend beside the last panel, of every line that any panel has."""
    known = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        known.update({label: handle for handle, label in zip(handles, labels, strict=True)})
    place = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "frameon": False}
    panels[-1].legend(known.values(), known.keys(), **place)


def _batch(tables: Tables, cells: list[Cell]) -> Figure:
    modes = list(dict.fromkeys(cell.data_mode for cell in cells))
    styles = _line_styles(cells)
    figure, panels = pyplot.subplots(
        1, len(modes), figsize=(5.2 * len(modes) + 3.2, 5.6), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    batches = sorted({cell.batch for cell in cells})
    for axes, mode in zip(panels[0], modes, strict=True):
        for row, line in _rows([cell for cell in cells if cell.data_mode == mode]).items():
            times = [cell.median(found.pass_s) for cell in line]
            low = [t - min(c.values(found.pass_s)) for c, t in zip(line, times, strict=True)]
            high = [max(c.values(found.pass_s)) - t for c, t in zip(line, times, strict=True)]
            axes.errorbar(
                [cell.batch for cell in line], times, yerr=[low, high], capsize=2,
                label=line[0].label, **styles[row],
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(batches, [f"{b:,}" for b in batches], rotation=45)
        axes.minorticks_off()
        _seconds_axis(axes.yaxis)
        axes.set_xlabel("images per pass (batch)")
        axes.grid(True, which="major", alpha=0.3)
        if len(modes) > 1:
            axes.set_title(f"data mode: {mode}", fontsize=10)
    panels[0][0].set_ylabel("time of one pass, host memory to host memory")
    _legend(panels[0])
    figure.suptitle(
        f"CIFAR-10 network: time of a pass against the batch (lower is faster)\n{_machine(tables)}",
        fontsize=11,
    )
    return figure


def _course(tables: Tables, cells: list[Cell]) -> Figure | None:
    rows = {
        row: line
        for row, line in _rows(cells).items()
        if sum(layer.kind == "conv" for layer in line[0].results[0].layers) == 2
    }
    if not rows:
        return None
    styles = _line_styles(cells)
    figure, panels = pyplot.subplots(
        1, 2, figsize=(12, 5.2), sharey=True, layout="constrained", squeeze=False
    )
    published = tables.published["course"]["op_times_s"][tables.kind]
    counts = sorted({cell.images for cell in cells})
    for op, axes in enumerate(panels[0]):
        for row, line in rows.items():
            name = [x.name for x in line[0].results[0].layers if x.kind == "conv"][op]
            times = [cell.total(found.layers_s(name=name)) for cell in line]
            axes.plot([cell.images for cell in line], times, label=line[0].label, **styles[row])
        known = [count for count in counts if str(count) in published]
        axes.plot(
            known, [published[str(count)][op] for count in known], color="black", marker="x",
            linewidth=2, label="published",
        )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
        _seconds_axis(axes.yaxis)
        axes.set_xlabel("images")
        axes.set_title(f"op {op + 1}: the {('first', 'second')[op]} convolution", fontsize=10)
        axes.grid(True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("op time over all images (lower is faster)")
    _legend(panels[0])
    figure.suptitle(
        f"The course's network: convolution op times beside the published ones\n{_machine(tables)}",
        fontsize=11,
    )
    return figure
