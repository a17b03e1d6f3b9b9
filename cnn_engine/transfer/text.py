"""Text output of transfer: a block per network and mode, and predictions."""

from __future__ import annotations

import numpy as np

from ..report import units
from .analysis import Analysis, Prediction
from .regression import Line, Misfit
from .subjects import BETWEEN


def render(one: Analysis) -> str:
    """Returns the block of one network in one mode."""
    first, last = one.points[0], one.points[-1]
    rows = [
        ("batch sizes", f"{units.count(len(one.points))}, {first.batch_size} to {last.batch_size}, "
         f"{units.counted(sum(p.samples for p in one.points), 'sample')}, "
         f"median {units.seconds(first.median_s)} to {units.seconds(last.median_s)}"),
    ]  # fmt: skip
    if one.line is not None:
        rows += _fits(one)
    rates = one.bytes_per_s()
    if rates is not None:
        best = int(np.argmax(rates))
        text = f"best {_rate(rates[best])} at {one.points[best].batch_size}"
        if one.peak_bytes_per_s:
            way = "past the host" if one.mode.direction == BETWEEN else "page-locked"
            text += (
                f", {units.percent(rates[best] / one.peak_bytes_per_s)} of the peak of "
                f"{_rate(one.peak_bytes_per_s)} ({way}, 256 MiB)"
            )
        rows.append(("rate", text))
    if one.weights is not None:
        size = ""
        if one.weights["bytes"]:
            size = (
                f"{units.size(one.weights['bytes'])} in "
                f"{units.counted(one.weights['tensors'], 'tensor')}: "
            )
        rows.append(
            ("weights", f"{size}{units.seconds(one.weights['first_s'])} the first time, median "
             f"{units.seconds(one.weights['median_s'])} of {one.weights['samples']}")
        )  # fmt: skip
    rows += [("note", note) for note in one.notes]
    title = f"{units.printable(one.network)} on {units.printable(one.gpu)}: {one.mode}"
    return "\n".join([title, *(f"  {name:<12}: {text}" for name, text in rows)])


def _fits(one: Analysis) -> list[tuple[str, str]]:
    low, high = map(units.seconds, one.line.intercept_interval_s)
    steep = tuple(map(units.seconds, one.line.slope_interval_s_per_image))
    rows = [
        ("single line", f"{line_text(one.line)}, r2 {units.number(one.line.r2)}"),
        ("95 %", f"intercept {low} to {high}, slope {steep[0]} to {steep[1]}"),
    ]
    if one.pieces.break_batch is None:
        rows.append(("break", "none: two pieces are not shown to be better than one"))
        rows.append(("one piece", line_text(one.pieces.lines[0])))
    else:
        low, high = one.pieces.break_interval
        chance = units.number(one.pieces.p_value)
        rows.append(
            (
                "break",
                f"at {one.pieces.break_batch} images (95 %: {low} to {high}; p {chance})",
            )
        )
        rows.append(("below", line_text(one.pieces.lines[0])))
        rows.append(("from there", line_text(one.pieces.lines[1])))
    rows.append(("pieces off", _misfit(one.pieces_misfit)))
    rows.append(("line off", _misfit(one.line_misfit)))
    if one.device_pieces is not None:
        # Lines fitted as those of the wall time are: a single one is bent by its largest batches.
        *below, last = one.device_pieces.lines
        rows += [("device below", line_text(line)) for line in below]
        since = f"from {one.device_pieces.break_batch} images: " if below else ""
        rows.append(("device time", since + line_text(last)))
    if one.hold_out is not None:
        count = len(one.hold_out.batch_sizes)
        rows.append(("held out", f"{count} sizes; pieces off {_misfit(one.hold_out.pieces)}"))
        rows.append(("held out", f"{count} sizes; line off {_misfit(one.hold_out.line)}"))
    return rows


def predictions(found: list[Prediction], bare: bool) -> str:
    """Returns a line for each prediction: seconds as a plain number, then (unless ``bare``) its subject."""
    lines = []
    for each in found:
        line = f"{each.seconds:.9g}"
        if not bare:
            line += (
                f" s  {units.printable(each.network)} on {units.printable(each.gpu)}, {each.mode}, "
                f"batch {each.batch} ({units.seconds(each.seconds)}"
            )
            if each.extrapolated:
                line += f"; extrapolated: measured {each.measured[0]} to {each.measured[1]}"
            line += ")"
        lines.append(line)
    return "\n".join(lines)


def line_text(line: Line) -> str:
    """Returns ``6.000 us + 340.0 ns per image``."""
    sign = "-" if line.slope_s_per_image < 0 else "+"
    slope = units.seconds(abs(line.slope_s_per_image))
    return f"{units.seconds(line.intercept_s)} {sign} {slope} per image"


def _misfit(misfit: Misfit) -> str:
    return (
        f"at most {units.percent(misfit.max_relative)} (at {misfit.at_batch}), "
        f"median {units.percent(misfit.median_relative)}"
    )


def _rate(bytes_per_s: float) -> str:
    return f"{units.number(bytes_per_s / 1e9)} GB/s"
