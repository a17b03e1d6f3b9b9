"""Results side by side as one HTML page that needs no network and no script.

This module turns results into what the page shows, with all positions in percent of the width;
``page.html`` is the page. Both are in the order of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..result import Result
from . import text, units

if TYPE_CHECKING:
    from jinja2 import Template

#: Kinds that have a colour of their own in the page; others share one.
KINDS = (
    "conv", "pad", "fused", "relu", "tanh", "pool", "fc", "softmax", "normalize", "copy", "sync",
)  # fmt: skip

BINS = 40
TIMELINE_PASSES = 3
TIMELINE_EVENTS = 240
LABEL_PIXELS = 900  # what a chart is wide on a desktop: whether a name fits into its segment
CHARACTER_PIXELS = 7.5
THINNEST = 0.12  # percent: still a visible line


@dataclass
class Segment:
    """A coloured piece of a bar or a lane: ``x`` and ``width`` in percent, and what it stands for."""

    name: str
    kind: str
    x: float
    width: float
    time: str
    share: str = ""
    start: str = ""

    @property
    def colour(self) -> str:
        """The class of its colour: one of the page's own, whatever the kind is called."""
        return f"k-{self.kind if self.kind in KINDS else 'other'}"

    @property
    def label(self) -> str:
        """Its name where there is room for it."""
        room = self.width / 100 * LABEL_PIXELS - 8
        return self.name if len(self.name) * CHARACTER_PIXELS <= room else ""


@dataclass
class Table:
    """``rows`` of a label and one cell a result."""

    rows: list[tuple[str, list[str]]]

    def differs(self, cells: list[str]) -> bool:
        return len(set(cells)) > 1


@dataclass
class View:
    """What the page shows of one result, ``key`` being the letter that it goes by."""

    key: str
    result: Result
    title: str
    summary: list[tuple[str, str]]
    remarks: list[str]
    extra_lines: list[str]
    steps: str
    scaled: list[Segment] = field(default_factory=list)  # on the scale that all results share
    shares: list[Segment] = field(default_factory=list)  # on its own scale
    histogram: dict[str, Any] | None = None
    timeline: dict[str, Any] | None = None


def render(results: Sequence[Result]) -> str:
    """Returns a page on ``results``, side by side in their order.

    Raises:
        InputError: there are none.
    """
    if not results:
        raise InputError("results: expected at least one to show, found none")
    longest = max(map(_total, results))
    views = [_view(index, result, longest) for index, result in enumerate(results)]
    segments = [
        segment
        for view in views
        for segment in (
            *view.shares,
            *(s for lane in (view.timeline or {}).get("lanes", ()) for s in lane["segments"]),
        )
    ]
    legend = {segment.colour: text.kind_name(segment.kind) for segment in segments}
    if "k-other" in legend:
        legend["k-other"] = "Other"
    page = _template().render(
        title=" / ".join(dict.fromkeys(result.network for result in results)),
        views=views,
        what_ran=_table(dict(text.what_ran(result)) for result in results),
        environment=_table(dict(text.environment(result)) for result in results),
        phases=_table(map(_phases, results)),
        layers=_layers(results),
        copies=_copies(results),
        latency=_table(map(_latency, results)),
        check=_table(map(_check, results)),
        legend=legend,
    )
    return page.strip() + "\n"


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined  # only for those who want a page

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if hasattr(value, "__html__") else units.printable(value),
    )
    return environment.from_string(files(__package__).joinpath("page.html").read_text("utf-8"))


def _view(index: int, result: Result, longest: float) -> View:
    reduction = " with reduction" if result.reduction else ""
    accuracy = result.accuracy and units.percent(result.accuracy.top1)
    verdict = "not made" if result.check is None else ("passed", "FAILED")[not result.check.passed]
    median = result.latency and result.latency.to_dict()["p50"] / 1e3
    return View(
        key=_letters(index),
        result=result,
        title=f"{result.network}, {result.variant}{reduction}, {result.data_mode} on {result.device}",
        summary=[
            ("Forward, all images", units.seconds(result.phases.forward_s)),
            (f"Median latency, batch {units.count(result.batch)}", units.seconds(median)),
            ("Throughput", _throughput(result)),
            ("Accuracy", accuracy or text.accuracy(result)),
            ("Check", verdict),
        ],
        remarks=text.remarks(result),
        extra_lines=result.extra_lines,
        steps=units.seconds(text.steps_seconds(result)),
        scaled=_bar(result, longest),
        shares=_bar(result, _total(result)),
        histogram=_histogram(result),
        timeline=_timeline(result),
    )


def _letters(index: int) -> str:
    """Returns A, B, ... Z, AA, ..."""
    name = ""
    while index >= 0:
        name = chr(ord("A") + index % 26) + name
        index = index // 26 - 1
    return name


def _table(columns: Iterable[dict[str, str]]) -> Table:
    """Makes a table of one dictionary a result; rows are in the order in which they appear."""
    columns = list(columns)
    labels = _merged([list(column) for column in columns])
    return Table([(k, [column.get(k, units.UNKNOWN) for column in columns]) for k in labels])


def _merged(lists: list[list[Any]]) -> list[Any]:
    """Returns all items once, each after those that it follows where it first appears."""
    merged: list[Any] = []
    for items in lists:
        position = 0
        for item in items:
            if item in merged:
                position = merged.index(item) + 1
            else:
                merged.insert(position, item)
                position += 1
    return merged


def _throughput(result: Result) -> str:
    rate = result.throughput_images_per_s
    return units.UNKNOWN if rate is None else f"{units.number(rate)} images/s"


# ---- phases ----


def _phases(result: Result) -> dict[str, str]:
    phases = result.phases
    return {
        "Load data": units.seconds(phases.load_data_s),
        "Create network": units.seconds(phases.create_network_s),
        "Load network parameters": units.seconds(phases.load_parameters_s),
        "Create outputs": units.seconds(phases.create_outputs_s),
        "Forward, all images": units.seconds(phases.forward_s),
        "Accuracy": units.seconds(phases.accuracy_s),
        "Free memory": units.seconds(phases.free_memory_s),
        "Total": units.seconds(phases.total_s),
    }


# ---- layers and copies ----


def _steps(result: Result) -> list[tuple[str, str, float]]:
    """Returns name, kind and seconds of each layer and copy that took any time."""
    steps = [(layer.name, layer.kind, layer.seconds) for layer in result.layers]
    steps += [(f"{copy.what} {copy.direction}", "copy", copy.seconds) for copy in result.copies]
    return [step for step in steps if math.isfinite(step[2]) and step[2] > 0]


def _total(result: Result) -> float:
    return sum(seconds for *_, seconds in _steps(result))


def _bar(result: Result, scale: float) -> list[Segment]:
    own = _total(result)
    x = 0.0
    segments = []
    for name, kind, seconds in _steps(result):
        width = 100 * (seconds / scale)
        share = units.percent(seconds / own)
        segments.append(Segment(name, kind, x, width, units.seconds(seconds), share))
        x += width
    return segments


def _layers(results: Sequence[Result]) -> list[tuple[str, list[list[str] | None]]]:
    """Returns a row a layer, with the cells of each result, or None where a result has no such layer."""
    found = [{layer.name: layer for layer in result.layers} for result in results]
    rows = []
    for name in _merged([list(layers) for layers in found]):
        cells: list[list[str] | None] = []
        for result, layers in zip(results, found, strict=True):
            layer = layers.get(name)
            cells.append(
                layer
                and [
                    units.seconds(layer.seconds),
                    units.percent(units.share(layer.seconds, text.steps_seconds(result))),
                    units.giga_per_second(layer.flops, layer.seconds),
                    units.giga_per_second(layer.bytes, layer.seconds),
                    units.count(layer.calls),
                    layer.place,
                    units.seconds(None if layer.device_s is None else layer.host_s),
                ]
            )
        rows.append((name, cells))
    return rows


def _copies(results: Sequence[Result]) -> list[tuple[str, list[list[str] | None]]]:
    """Returns a row a copy, as :func:`_layers` does."""
    found = [{(copy.what, copy.direction): copy for copy in result.copies} for result in results]
    rows = []
    for key in _merged([list(copies) for copies in found]):
        cells: list[list[str] | None] = []
        for result, copies in zip(results, found, strict=True):
            copy = copies.get(key)
            cells.append(
                copy
                and [
                    units.seconds(copy.seconds),
                    units.percent(units.share(copy.seconds, text.steps_seconds(result))),
                    units.size(copy.bytes),
                    units.giga_per_second(copy.bytes, copy.seconds),
                    units.count(copy.calls),
                ]
            )
        rows.append((" ".join(key), cells))
    return rows


# ---- latency ----


def _latency(result: Result) -> dict[str, str]:
    if result.latency is None:
        return {}
    samples = units.count(len(result.latency.samples_ms))
    return {**dict(text.latency(result.latency)), "samples": samples}


def _histogram(result: Result) -> dict[str, Any] | None:
    """Returns the bins of the latency's samples, without the tail that would squeeze all others."""
    if result.latency is None:
        return None
    samples = np.asarray(result.latency.samples_ms, float)
    samples = samples[np.isfinite(samples)]
    if not len(samples):
        return None
    least, most, p50, p99 = (float(q) for q in np.percentile(samples, (0, 100, 50, 99)))
    end = min(most, p99 + (p99 - least) / 2)
    if not end > least:  # one sample, or a clock too coarse to tell them apart
        least, end = least * 0.99, end * 1.01 or 1.0
    counts, edges = np.histogram(samples, min(BINS, 4 + math.isqrt(len(samples))), (least, end))
    beyond = int(np.count_nonzero(samples > end))
    width = 100 / len(counts)
    return {
        "bins": [
            {
                "x": index * width,
                "width": width,
                "height": 100 * int(number) / int(counts.max() or 1),
                "title": f"{units.seconds(left / 1e3)} to {units.seconds(right / 1e3)}: "
                + units.counted(int(number), "sample"),
            }
            for index, (number, left, right) in enumerate(
                zip(counts, edges[:-1], edges[1:], strict=True)
            )
        ],
        "marks": [
            {"name": name, "x": 100 * (value - least) / (end - least)}
            for name, value in (("p50", p50), ("p99", p99))
            if least <= value <= end
        ],
        "least": units.seconds(least / 1e3),
        "end": units.seconds(end / 1e3),
        "most": units.count(int(counts.max())),
        "beyond": beyond
        and f"{units.counted(beyond, 'sample')} beyond, up to {units.seconds(most / 1e3)}",
    }


# ---- timeline ----


def _timeline(result: Result) -> dict[str, Any] | None:
    """Returns the lanes of the first passes: as many whole passes as there is room for."""
    events = [
        event
        for event in result.timeline
        if event.batch < TIMELINE_PASSES
        and math.isfinite(event.start_s)
        and math.isfinite(event.seconds)
    ]
    while len(events) > TIMELINE_EVENTS and events[-1].batch > 0:
        last = events[-1].batch
        events = [event for event in events if event.batch < last]
    events = events[:TIMELINE_EVENTS]
    if not events:
        return None
    begin = min(event.start_s for event in events)
    end = max(event.start_s + event.seconds for event in events)
    scale = 100 / (end - begin) if end > begin else 0.0
    lanes: dict[str, list[Segment]] = {}
    for event in events:
        lanes.setdefault(event.track, []).append(
            Segment(
                event.name,
                event.kind,
                (event.start_s - begin) * scale,
                max(event.seconds * scale, THINNEST),
                units.seconds(event.seconds),
                start=units.seconds(event.start_s - begin),
            )
        )
    total = max(result.timeline_total, len(result.timeline))
    passes = len({event.batch for event in events})
    return {
        "lanes": [{"track": track, "segments": segments} for track, segments in lanes.items()],
        "ticks": [(25 * tick, units.seconds((end - begin) * tick / 4)) for tick in range(5)],
        "caption": ("first pass" if passes == 1 else f"first {passes} passes")
        + f", {len(events)} of {units.counted(total, 'event')}",
    }


# ---- check ----


def _check(result: Result) -> dict[str, str]:
    found = result.check
    if found is None:
        return {"Verdict": "not made"}
    return {
        "Verdict": "passed" if found.passed else "FAILED, nothing was timed",
        "Reference": found.reference,
        "Images compared": units.count(found.images),
        "Largest difference of a probability": units.number(found.max_abs_diff),
        "Tolerance": f"{found.tolerance:g}",
        "Top-1 agreement": units.percent(found.top1_agreement),
    }
