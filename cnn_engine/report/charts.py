"""The page's charts: bars, histogram and timeline of a result, with all positions in percent of the width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..measure.profile_tables import PROFILED
from ..measure.result import Result, TimelineEvent
from . import grouping, text, units

#: Kind of layer or step -> its colour in charts, in pages and pictures alike.
COLOURS = {
    "conv": "#6ea8fe", "pad": "#c3d9fb", "fused": "#b197fc", "relu": "#ffb454", "tanh": "#e0c15a",
    "pool": "#5fcf93", "fc": "#f48fb5", "softmax": "#9fe0d0", "normalize": "#63d3e6", "copy": "#ff8278",
    "sync": "#c5cbd2", "kernel": "#7fb3ff", "set": "#ffc9a3", "api": "#b8c0ff", "between": "#c5cbd2",
    "other": "#cbb9a6",
}  # fmt: skip

BINS = 40
FEWEST_SAMPLES = 20  # of a histogram: fewer have no shape to show
MOST_STEPS = 24  # of a bar: more are drawn as one segment per operator
COLUMNS = 300  # stretches of passes in the plot of samples over time
TIMELINE_PASSES = 3
TIMELINE_EVENTS = 400
LABEL_PIXELS = 900  # what a chart is wide on a desktop: whether a name fits into its segment
CHARACTER_PIXELS = 7.5
LABEL_APART = 10  # percent between the beginnings of two labels of the histogram
THINNEST = 0.12  # percent: still a visible line


@dataclass
class Segment:
    """A coloured piece of a bar or a lane: ``x`` and ``width`` in percent, and its name and time."""

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
        return f"k-{self.kind if self.kind in COLOURS else 'other'}"

    @property
    def label(self) -> str:
        """The segment's name; empty where there is no room for it."""
        room = self.width / 100 * LABEL_PIXELS - 8
        return self.name if len(self.name) * CHARACTER_PIXELS <= room else ""


def legend(segments: Iterator[Segment]) -> dict[str, str]:
    """Returns the name of each colour among ``segments``."""
    names = {segment.colour: text.kind_name(segment.kind) for segment in segments}
    if "k-other" in names:
        names["k-other"] = "Other"
    if "k-api" in names:
        names["k-api"] = "API call"
    return names


# ---- bars ----


def total(result: Result) -> float:
    """Returns the seconds of the longest bar that :func:`bar` makes of ``result``."""
    return sum(seconds for *_, seconds in _steps(result))


def bar(result: Result, scale: float) -> list[Segment]:
    """Returns a segment a layer, copy and row between, where ``scale`` seconds are the whole width."""
    own = total(result)
    x = 0.0
    segments = []
    for name, kind, seconds in _steps(result):
        width = 100 * (seconds / scale)
        share = units.percent(seconds / own)
        segments.append(Segment(name, kind, x, width, units.seconds(seconds), share))
        x += width
    return segments


def _steps(result: Result) -> list[tuple[str, str, float]]:
    """Returns name, kind and seconds of each layer, copy and row between that took any time.

    A fused layer is shown as the parts inside of it, where they are known. More than :data:`MOST_STEPS`
    layers are summed up by operator, the longest first.
    """
    rows = grouping.steps(result.layers)
    if len(rows) > MOST_STEPS:
        rows = [
            replace(row, name=text.kind_name(row.kind))
            for row in grouping.grouped(result.layers, "operator")
        ]
    steps = [(row.name, row.kind.partition("+")[0], row.seconds) for row in rows]
    steps += [(f"{copy.what} {copy.direction}", "copy", copy.seconds) for copy in result.copies]
    if result.whole_pass is not None:
        steps += [(row.name, "between", row.seconds) for row in result.whole_pass.between]
    return [step for step in steps if math.isfinite(step[2]) and step[2] > 0]


# ---- ratios ----


def ratios(found: Sequence[Any]) -> list[dict[str, float] | None]:
    """Returns where ratios and their intervals lie on one logarithmic axis, in percent; None where unknown.

    ``one`` is where the ratio is 1: no difference.
    """
    known = [r for r in found if r is not None and math.isfinite(r.value) and r.value > 0]
    # Wide intervals go past the ends, so that they do not squeeze all others.
    reach = 1.5 * max([0.1, *(abs(math.log(r.value)) for r in known)])

    def place(ratio: float) -> float:
        return min(max(50 + 50 * math.log(ratio) / reach, 0.0), 100.0) if ratio > 0 else 0.0

    return [
        None
        if r not in known
        else {
            "value": place(r.value),
            "low": place(r.low) if r.known else place(r.value),
            "high": place(r.high) if r.known else place(r.value),
            "one": 50.0,
        }
        for r in found
    ]


# ---- latency ----


def _samples_ms(result: Result) -> np.ndarray:
    if result.latency is None:
        return np.empty(0)
    samples = np.asarray(result.latency.samples_ms, float)
    return samples[np.isfinite(samples)]


def latency_axis(results: Sequence[Result]) -> tuple[float, float] | None:
    """Returns the ends in ms of one axis for all results, without their longest tails."""
    ends = []
    for samples in filter(len, map(_samples_ms, results)):
        least, most, p95 = (float(q) for q in np.percentile(samples, (0, 100, 95)))
        ends.append((least, min(most, p95 + (p95 - least) / 2)))
    if not ends:
        return None
    least, end = min(low for low, _ in ends), max(high for _, high in ends)
    if not end > least:  # one sample, or a clock too coarse to tell them apart
        least, end = least * 0.99, end * 1.01 or 1.0
    return least, end


def samples(result: Result, axis: tuple[float, float] | None) -> dict[str, Any] | None:
    """Returns the latency of the passes in the order in which they ran: a drift or a stall shows.

    The line is the median of each of up to :data:`COLUMNS` stretches, the band their range, in a box of
    1,000 by 100 whose lower edge is the axis' beginning.
    """
    found = _samples_ms(result)
    if len(found) < 2:
        return None
    least, end = axis
    parts = np.array_split(found, min(COLUMNS, len(found)))
    x = np.linspace(0, 1000, len(parts))
    low, middle, high = (
        100 - 100 * np.clip((np.array([f(part) for part in parts]) - least) / (end - least), 0, 1)
        for f in (np.min, np.median, np.max)
    )

    def points(xs: np.ndarray, ys: np.ndarray) -> list[str]:
        return [f"{a:.1f},{b:.1f}" for a, b in zip(xs, ys, strict=True)]

    return {
        "line": " ".join(points(x, middle)),
        "band": " ".join(points(x, low) + points(x[::-1], high[::-1])),
        "count": units.count(len(found)),
    }


def histogram(result: Result, axis: tuple[float, float] | None) -> dict[str, Any] | None:
    """Returns the bins of the latency's samples between the ends of ``axis``; None for fewer than 20."""
    samples = _samples_ms(result)
    if len(samples) < FEWEST_SAMPLES:
        return None
    least, end = axis
    most = float(samples.max())
    marks = {f"p{q}": float(np.percentile(samples, q)) for q in (50, 90, 99)}
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
        "marks": _apart(
            {
                name: 100 * (value - least) / (end - least)
                for name, value in marks.items()
                if least <= value <= end
            }
        ),
        "least": units.seconds(least / 1e3),
        "end": units.seconds(end / 1e3),
        "most": units.count(int(counts.max())),
        "beyond": beyond
        and f"{units.counted(beyond, 'sample')} beyond, up to {units.seconds(most / 1e3)}",
    }


def _apart(marks: dict[str, float]) -> list[dict[str, Any]]:
    """Returns ``marks``, without the names of those too close to the one before."""
    found: list[dict[str, Any]] = []
    reached = -math.inf
    for name, x in marks.items():
        if x - reached < LABEL_APART:
            name = ""
        else:
            reached = x
        found.append({"name": name, "x": x})
    return found


# ---- timeline ----


def timelines(result: Result) -> list[dict[str, Any]]:
    """Returns a chart of the run that times layers, and one of the profiled run where there was one."""
    events = [
        event
        for event in result.timeline
        if math.isfinite(event.start_s) and math.isfinite(event.seconds)
    ]
    profiled = [event for event in events if event.track.endswith(PROFILED)]
    timed = [event for event in events if not event.track.endswith(PROFILED)]
    charts = [_timeline("layers timed", timed), _timeline("profiled", profiled)]
    total = max(result.timeline_total, len(result.timeline))
    for chart in filter(None, charts):
        chart["caption"] += f" of {units.counted(total, 'event')}"
    return [chart for chart in charts if chart is not None]


def _timeline(run: str, events: list[TimelineEvent]) -> dict[str, Any] | None:
    """Returns the lanes of the first passes: as many whole passes as there is room for."""
    events = [event for event in events if event.batch < TIMELINE_PASSES]
    while len(events) > TIMELINE_EVENTS and events[-1].batch > 0:
        last = events[-1].batch
        events = [event for event in events if event.batch < last]
    events = events[:TIMELINE_EVENTS]
    if not events:
        return None
    begin = min(event.start_s for event in events)
    end = max(event.start_s + event.seconds for event in events)
    lanes: dict[str, list[Segment]] = {}
    for event in events:
        track = event.track.removesuffix(PROFILED)
        lanes.setdefault(track, []).append(_placed(event, begin, end))
    passes = len({event.batch for event in events})
    first = "first pass" if passes == 1 else f"first {passes} passes"
    return {
        "run": run,
        "lanes": lanes,
        "ticks": [(25 * tick, units.seconds((end - begin) * tick / 4)) for tick in range(5)],
        "caption": f"{run}: {first}, {len(events)}",
    }


def _placed(event: TimelineEvent, begin: float, end: float) -> Segment:
    scale = 100 / (end - begin) if end > begin else 0.0
    return Segment(
        event.name,
        event.kind,
        (event.start_s - begin) * scale,
        max(event.seconds * scale, THINNEST),
        units.seconds(event.seconds),
        start=units.seconds(event.start_s - begin),
    )
