"""Times each step of passes, and the time between steps.

Passes of three kinds take turns over the same batches: plain ones, ones with a reading of the host's clock
after each step, and on a device ones that measure each step's work there (:mod:`.meters`). The
usual ones of the second kind are taken apart, less what readings of the clock cost, with the times of the
third (:mod:`.pass_parts`), and shown beside the median of the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import nvtx

from ..errors import UnsupportedError
from ..plan.plan import Plan, Step
from ..workload import Samples
from . import meters, pass_parts, statistics
from .cupti.activity_records import covered
from .meters import EventMeter, InsideMeter, Metered
from .profile_tables import HOST_CLOCK
from .result import Between, CopyTime, LayerPart, LayerTime, TimedPass, TimelineEvent, WholePass
from .timing import Progress, batches

if TYPE_CHECKING:
    from ..engine.engine import Engine

DOMAIN = "cnn_engine"
TIMELINE_EVENTS = 5000

#: Passes of each kind, interleaved in groups of so many, or of one where a pass takes long. They go on, up to
#: the most, until the medians of plain and of clocked ones are known within a share of them.
LAYER_SAMPLES = 60
MOST_SAMPLES = 240
KNOWN_WITHIN = 0.01
IN_A_TURN = 5
LONG_S = 0.05

#: No turn begins after the first so many seconds if the fewest turns are done, nor after the second. A last
#: batch that is smaller gets a quarter of the samples and of these.
CAP_S = 2.0
LIMIT_S = 8.0
FEWEST_TURNS = 6


#: Steps that do nothing, and passes of them, that show what a reading of the clock costs.
EMPTY_STEPS, EMPTY_PASSES = 20, 11


@dataclass
class Steps:
    """Times of every step, and between steps, over all images once.

    ``notes`` say what was measured otherwise than usual, and why.
    """

    layers: list[LayerTime] = field(default_factory=list)
    copies: list[CopyTime] = field(default_factory=list)
    whole_pass: WholePass | None = None
    timed_pass: TimedPass = field(default_factory=TimedPass)
    timeline: list[TimelineEvent] = field(default_factory=list)
    timeline_total: int = 0
    interrupted: bool = False
    hidden: Overlap | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Overlap:
    """Overlap of copies and kernels in the data mode ``stream``, in seconds of device time.

    Attributes:
        chunk: images that move at a time.
        wall_s: from the first step's beginning to the last one's end.
        copies_s: in which at least one copy to or from the device runs.
        hidden_s: of these, in which a kernel runs as well.
    """

    chunk: int
    wall_s: float = 0.0
    copies_s: float = 0.0
    hidden_s: float = 0.0

    def add(self, one: Metered) -> None:
        """Adds a pass."""
        copies, kernels = [], []
        for step, span in zip(one.plan.steps, one.spans, strict=True):
            if span is not None:
                (copies if step.kind == "copy" else kernels).append(span)
        copies_s, kernels_s, either_s = map(covered, (copies, kernels, copies + kernels))
        self.wall_s += one.span_s
        self.copies_s += copies_s
        self.hidden_s += copies_s + kernels_s - either_s

    def describe(self) -> str:
        """Returns a sentence for the report."""
        return (
            f"chunks of {self.chunk} images: copies take {100 * self.copies_s / self.wall_s:.1f} % of "
            f"the passes with timers, and a kernel runs in {100 * self.hidden_s / self.copies_s:.1f} % "
            "of that time"
        )


def time_layers(
    engine: Engine,
    images: np.ndarray | Samples,
    probabilities: np.ndarray | Samples,
    batch: int,
    progress: Progress,
    samples: int = LAYER_SAMPLES,
    records: bool = True,
) -> Steps:
    """Times every step of ``samples`` passes over batches of ``images``, of fewer where they take long.

    Args:
        images, probabilities: in host memory; probabilities are filled.
        batch: images per pass; a last batch that is smaller is looked into by itself.
        progress: called with the images of each plain pass of a full batch.
        records: whether work on a device may be measured by activity records, which slow down later passes
            of the process a little; else by events.
    """
    whole = len(images) // batch
    steps = Steps()
    taken: list[_Taken] = []
    device_meter, reason = meters.device_meter(engine.device, records)
    if reason:
        steps.notes.append(f"times of the device are from events: {reason}")
    try:
        for first, size, count in ((0, batch, whole), (whole * batch, len(images) % batch, 1)):
            if size and count:
                part = slice(first, first + size * count)
                one = _Taken(engine, images[part], probabilities[part], size, count, device_meter)
                taken.append(one)
                one.take(max(samples // 4, 1) if first else samples, first > 0, progress)
                device_meter = one.meter
    except KeyboardInterrupt:
        steps.interrupted = True
    complete = [one for one in taken if one.complete]
    for one in complete:
        steps.notes += [note for note in one.notes if note not in steps.notes]
    if complete:
        _Account(steps, complete).fill()
    return steps


class _Taken:
    """What passes over batches of one size took.

    Attributes:
        count: how many such batches the images have.
        plain: seconds of each plain pass. ``clocked``: of each pass with a reading of the clock after each
            step, all its readings, the one before the first step included; ``clocked_s``: from outside.
        metered: passes whose work on the device was measured. ``inside``: the parts of a fused network.
        reading_s: what a reading of the clock costs.
    """

    def __init__(
        self,
        engine: Engine,
        images: np.ndarray | Samples,
        probabilities: np.ndarray | Samples,
        size: int,
        count: int,
        meter: Any,
    ) -> None:
        self.engine, self.images, self.probabilities = engine, images, probabilities
        self.size, self.count, self.meter = size, count, meter
        self.plain: list[float] = []
        self.clocked: list[list[float]] = []
        self.clocked_s: list[float] = []
        self.metered: list[Metered] = []
        self.notes: list[str] = []
        self._next = 0
        self.plan = self.following()
        self.inside = InsideMeter.find(engine.device, self.plan)
        self.pageable = [meters.is_pageable(engine.device, step) for step in self.plan.steps]
        self.domain = nvtx.get_domain(DOMAIN)
        self.reading_s = reading_cost()

    @property
    def complete(self) -> bool:
        """Whether there is a pass of each kind."""
        metered = self.metered or self.meter is None
        return bool(self.plain and self.clocked_s and metered)

    def following(self) -> Plan:
        """Returns the plan, bound to the next batch; after the last one comes the first again."""
        first = self._next % self.count * self.size
        self._next += 1
        part = slice(first, first + self.size)
        plan, _ = next(batches(self.engine, self.images[part], self.probabilities[part], self.size))
        return plan

    def take(self, samples: int, last: bool, progress: Progress) -> None:
        """Runs passes of all kinds, interleaved; ``last``: of the last batch."""
        part = 0.25 if last else 1.0
        in_a_turn = 1 if self._run_marked(self.plan) > LONG_S else IN_A_TURN
        begin = perf_counter()
        turns = 0
        while len(self.plain) < samples or not self._settled():
            left = samples - len(self.plain)
            passes = min(in_a_turn, left) if left > 0 else in_a_turn
            if in_a_turn > 1:  # what measured the device leaves the next pass slower
                self._run_marked(self.following())
            for index in range(passes):
                for run in (self._plain, self._clocked)[:: 1 if (turns + index) % 2 else -1]:
                    run(self.following())
                if not last:
                    progress(self.size)
            if self.meter is not None:
                self._meter(passes)
            if self.inside is not None:
                self.inside.measure(self.following, passes)
            turns += 1
            elapsed_s = perf_counter() - begin
            enough = elapsed_s > part * CAP_S and turns >= FEWEST_TURNS
            if enough or elapsed_s > part * LIMIT_S:
                break

    def _settled(self) -> bool:
        """Whether the usual plain and the usual clocked pass are known, or will not be.

        Not whether they agree: to go on until they do would make them agree by chance.
        """
        if len(self.plain) >= MOST_SAMPLES:
            return True
        found = (statistics.quantile(times) for times in (self.plain, self.clocked_s))
        return all(
            time.known and time.high - time.low <= 2 * KNOWN_WITHIN * time.value for time in found
        )

    def _plain(self, plan: Plan) -> None:
        start = perf_counter()
        plan.run_steps()
        self.plain.append(perf_counter() - start)

    def _clocked(self, plan: Plan) -> None:
        calls = [(step.function, step.args) for step in plan.steps]
        marks: list[float] = []
        start = perf_counter()
        _run_clocked(calls, marks.append)
        self.clocked_s.append(perf_counter() - start)
        self.clocked.append(marks)

    def _meter(self, passes: int) -> None:
        found, reason = [], "CUPTI's records were not complete"
        try:
            found = self.meter.measure(self.following, passes)
        except UnsupportedError as error:
            reason = str(error)
        if not found and not self.metered and not isinstance(self.meter, EventMeter):
            self.notes.append(f"times of the device are from events: {reason}")
            self.meter = EventMeter(self.engine.device)
            found = self.meter.measure(self.following, passes)
        self.metered += found

    def _run_marked(self, plan: Plan) -> float:
        """Runs a pass with a range of NVTX for each step, for profilers from outside; returns seconds."""
        start = perf_counter()
        for step in plan.steps:
            text = f"{step.name} {step.direction}" if step.kind == "copy" else step.name
            self.domain.push_range(
                self.domain.get_event_attributes(message=text, category=step.kind)
            )
            step.function(*step.args)
            self.domain.pop_range()
        return perf_counter() - start

    def device_s(self) -> list[float | None]:
        """Returns the median of each step's work on the device; None for one that does not work there."""
        found: list[float | None] = []
        for k in range(len(self.plan.steps)):
            seconds = [one.seconds[k] for one in self.metered if one.seconds[k] is not None]
            found.append(float(np.median(seconds)) if seconds else None)
        return found

    def parts(self) -> pass_parts.Parts:
        """Returns the parts of a usual pass."""
        marks, wall_s = pass_parts.usual(self.clocked, self.clocked_s, self.reading_s)
        overlaps = bool(self.plan.chunk)
        return pass_parts.take_apart(
            self.plan.steps, marks, wall_s, self.device_s(), self.pageable, overlaps
        )


def _run_clocked(calls: list[tuple[Callable[..., None], list[Any]]], mark: Any) -> None:
    mark(perf_counter())
    for function, args in calls:
        function(*args)
        mark(perf_counter())


def reading_cost() -> float:
    """Returns the seconds by which a reading of the clock after a step lengthens a pass."""
    calls: list[tuple[Callable[..., None], list[Any]]] = [(int, [])] * EMPTY_STEPS
    costs = []
    for _ in range(EMPTY_PASSES):
        start = perf_counter()
        for function, args in calls:
            function(*args)
        between = perf_counter()
        _run_clocked(calls, [].append)
        costs.append((perf_counter() - between) - (between - start))
    return max(float(np.median(costs)) / (EMPTY_STEPS + 1), 0.0)


class _Account:
    """Adds up what was taken, into ``steps``."""

    def __init__(self, steps: Steps, taken: list[_Taken]) -> None:
        self.steps, self.taken = steps, taken
        self._layers: dict[str, LayerTime] = {}
        self._copies: dict[tuple[str, str | None], CopyTime] = {}

    def fill(self) -> None:
        """Fills everything."""
        steps, largest = self.steps, self.taken[0]
        between: dict[str, float] = defaultdict(float)
        timed = steps.timed_pass
        wall_s = 0.0
        for one in self.taken:
            parts = one.parts()
            device_s = one.device_s()
            for k, step in enumerate(one.plan.steps):
                self._add(step, one, parts.host[k], device_s[k], one.pageable[k])
            for name, seconds in parts.between.items():
                between[name] += seconds * one.count
            wall_s += float(np.median(one.plain)) * one.count
            timed.calls += one.count
            timed.host_s += float(np.median(one.clocked_s)) * one.count
            if one.metered:
                span_s = float(np.median([metered.span_s for metered in one.metered]))
                timed.device_s = (timed.device_s or 0.0) + span_s * one.count
        self._add_samples(largest)
        rows = [Between(n, between[n]) for n in pass_parts.BETWEEN if n in between]
        metered = largest.metered
        inside = largest.inside
        steps.whole_pass = WholePass(
            calls=timed.calls,
            wall_s=wall_s,
            steps_s=sum(step.seconds for step in (*steps.layers, *steps.copies, *rows)),
            source=largest.meter.source if largest.meter is not None else HOST_CLOCK,
            between=rows,
            median_s=float(np.median(largest.plain)),
            clocked_s=float(np.median(largest.clocked_s)),
            metered_s=float(np.median([one.wall_s for one in metered])) if metered else None,
            inside_s=float(np.median(inside.wall_s)) if inside and inside.wall_s else None,
            samples=len(largest.plain),
            metered_samples=len(metered),
            sampled_s=sum(one.wall_s for one in metered) if metered else sum(largest.clocked_s),
            empty_pair_s=getattr(largest.meter, "empty_pair_s", None),
        )
        if inside is not None:
            self._add_inside(largest, inside)
        if largest.plan.chunk and metered:
            steps.hidden = Overlap(largest.plan.chunk)
            for one in metered:
                steps.hidden.add(one)
        self._add_timeline()

    def _row(self, step: Step) -> LayerTime | CopyTime | None:
        """Returns the row that ``step`` counts in, made when first asked for; None for a wait."""
        if step.kind == "sync":
            return None
        if step.kind == "copy":
            copy = self._copies.get((step.name, step.direction))
            if copy is None:
                copy = CopyTime(step.name, step.direction)
                self._copies[step.name, step.direction] = copy
                self.steps.copies.append(copy)
            return copy
        layer = self._layers.get(step.name)
        if layer is None:
            layer = self._layers[step.name] = LayerTime(
                step.name, step.kind, step.place, kernel=step.kernel
            )
            self.steps.layers.append(layer)
        return layer

    def _add(
        self, step: Step, one: _Taken, host_s: float, device_s: float | None, pageable: bool
    ) -> None:
        row = self._row(step)
        if row is None:
            return
        row.calls += one.count
        row.bytes += step.bytes * one.count
        if isinstance(row, CopyTime):
            row.seconds += (host_s if device_s is None else device_s) * one.count
            if step.place == "cuda":
                row.pageable = pageable
            return
        row.flops += step.flops * one.count
        row.host_s += host_s * one.count
        if device_s is not None:
            row.device_s = (row.device_s or 0.0) + device_s * one.count

    def _add_samples(self, one: _Taken) -> None:
        """Adds what the steps of each row took in each pass: ``stream`` has a call a chunk."""
        rows: dict[int, tuple[LayerTime | CopyTime, list[int]]] = {}
        for k, step in enumerate(one.plan.steps):
            if (row := self._row(step)) is not None:
                rows.setdefault(id(row), (row, []))[1].append(k)
        clocked = [np.maximum(np.diff(marks) - one.reading_s, 0.0) for marks in one.clocked]
        for row, positions in rows.values():
            if one.plan.steps[positions[0]].place == "cuda":
                sums = [sum(found.seconds[k] for k in positions) for found in one.metered]
            else:
                sums = [float(seconds[positions].sum()) for seconds in clocked]
            row.samples_s += sums

    def _add_inside(self, one: _Taken, inside: InsideMeter) -> None:
        shares = inside.shares()
        if shares is None:
            return
        layer = self._row(one.plan.steps[inside.position])
        nodes = one.plan.steps[inside.position].parts
        images = sum(other.size * other.count for other in self.taken)
        for part, share in zip(inside.parts, shares, strict=True):
            layers = [nodes[index] for index in part]
            layer.inside.append(
                LayerPart(
                    "+".join(found.name for found in layers),
                    "+".join(dict.fromkeys(found.kind for found in layers)),
                    [found.name for found in layers],
                    share * layer.seconds,
                    share,
                    sum(found.flops for found in layers) // one.plan.batch * images,
                )
            )

    def _add_timeline(self) -> None:
        """Lays the sampled passes one after the other, those that were metered where there are such."""
        begin, index = None, 0
        for one in self.taken:
            device = one.engine.device
            lanes: dict[int, int] = {}
            found = one.metered
            if not found:
                nothing: list[Any] = [None] * len(one.plan.steps)
                found = [Metered(one.plan, marks, nothing, nothing) for marks in one.clocked]
            for metered in found:
                begin = metered.marks[0] if begin is None else begin
                origin = metered.marks[0] - begin
                for k, step in enumerate(one.plan.steps):
                    start, end = (mark - begin for mark in metered.marks[k : k + 2])
                    self._add_event(step.name, step.kind, "host", start, end - start, index)
                    span, track = metered.spans[k], "host"
                    if span is not None:
                        track = f"{device.name} stream"
                        if step.lane is not None:
                            handle = step.lane.stream_handle
                            track += f" {lanes.setdefault(handle, len(lanes) + 1)}"
                        start, end = origin + span[0], origin + span[1]
                        self._add_event(step.name, step.kind, track, start, end - start, index)
                    # On a track of their own: they were measured in other passes.
                    took = end - start
                    for part in self._inside_of(step):
                        seconds = part.share * took
                        track_inside = f"{track}, inside {step.name} (scaled)"
                        self._add_event(part.name, part.kind, track_inside, start, seconds, index)
                        start += seconds
                index += 1

    def _inside_of(self, step: Step) -> list[LayerPart]:
        layer = self._layers.get(step.name) if step.kind == "fused" else None
        return layer.inside if layer is not None else []

    def _add_event(
        self, name: str, kind: str, track: str, start: float, seconds: float, index: int
    ) -> None:
        steps = self.steps
        steps.timeline_total += 1
        if len(steps.timeline) < TIMELINE_EVENTS:
            steps.timeline.append(TimelineEvent(name, kind, track, start, seconds, index))
