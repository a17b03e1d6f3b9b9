"""The one path on which passes are timed, for the command line and for Python.

Two runs, never mixed. :func:`time_passes` times whole passes and nothing inside them: latency, throughput
and the forward time come from it. :func:`time_layers` times every step, which costs time itself. Host times
are of a monotonic clock. Device times lie between two events around a step on its own stream; a short delay
queued ahead keeps the GPU behind the host, so that they hold the step and not its launch. Between two kernels
lies one event, the end of the first and the start of the second: each costs the GPU some two microseconds
(docs/measuring.md), and so the layers add up to the pass around them and never to more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import nvtx

from ..engine.plan import Plan, Step
from .records.activity_records import covered
from .result import CopyTime, LayerTime, Stop, TimedPass, TimelineEvent

if TYPE_CHECKING:
    from ..engine.engine import Engine

#: Called with the number of images done since the last call, between passes, outside what is timed.
Progress = Callable[[int], None]

DOMAIN = "cnn_engine"
TIMELINE_EVENTS = 5000

#: Seconds of delay queued for each kernel that follows: more than a launch and its two events take.
LAUNCH_MARGIN_S = 20e-6

#: Unless told how long, passes are repeated until the 95 % interval of their median is within 1 % of it, but
#: no longer than the cap; whole iterations only, so one that takes longer than the cap is run once. Not
#: before half a second: the interval takes samples as independent, and a short stretch misses a machine's
#: noise.
MEDIAN_WITHIN = 0.01
LEAST_S = 0.5
CAP_S = 5.0
FEWEST_SAMPLES = 20

#: Passes of a full batch whose steps are sampled: those over all images and, where they are fewer than this,
#: further ones for so many seconds, which count as samples only.
LAYER_SAMPLES = 30
LAYER_SAMPLES_S = 1.0


@dataclass
class Passes:
    """Whole passes, not looked into.

    Attributes:
        full_s: the wall time of each pass of a full batch, in seconds.
        forward_s: the wall time of all passes over all images, the mean of the complete iterations.
        iterations: complete passes over all images.
        images_done: images of the first iteration; fewer than all when interrupted.
        images_total, seconds_total: of all iterations, for the throughput.
    """

    full_s: list[float] = field(default_factory=list)
    forward_s: float = 0.0
    iterations: int = 0
    images_done: int = 0
    images_total: int = 0
    seconds_total: float = 0.0
    stop: Stop | None = None
    interrupted: bool = False


@dataclass
class Steps:
    """Every step, summed over the passes."""

    layers: list[LayerTime] = field(default_factory=list)
    copies: list[CopyTime] = field(default_factory=list)
    timed_pass: TimedPass = field(default_factory=TimedPass)
    timeline: list[TimelineEvent] = field(default_factory=list)
    timeline_total: int = 0
    interrupted: bool = False
    hidden: Overlap | None = None


@dataclass
class Overlap:
    """How copies and kernels overlap in the data mode ``stream``, in seconds of device time.

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

    def describe(self) -> str:
        """Returns a sentence for the report."""
        return (
            f"chunks of {self.chunk} images: copies take {100 * self.copies_s / self.wall_s:.1f} % of "
            f"the passes with timers, and a kernel runs in {100 * self.hidden_s / self.copies_s:.1f} % "
            "of that time"
        )


def batches(
    engine: Engine, images: np.ndarray, probabilities: np.ndarray, batch: int
) -> Iterator[tuple[Plan, int]]:
    """Yields a plan, bound to its images and probabilities, and its number of images for each pass."""
    image_bytes = images.nbytes // len(images) if len(images) else 0
    row_bytes = probabilities.nbytes // len(probabilities) if len(images) else 0
    source = images.__array_interface__["data"][0]
    target = probabilities.__array_interface__["data"][0]
    for first in range(0, len(images), batch):
        count = min(batch, len(images) - first)
        address = source + first * image_bytes
        yield engine.plan_at(address, target + first * row_bytes, count, images.dtype), count


def time_passes(
    engine: Engine,
    images: np.ndarray,
    probabilities: np.ndarray,
    batch: int,
    *,
    warmup: int,
    iterations: int | None,
    duration_s: float | None,
    progress: Progress,
) -> Passes:
    """Times passes over ``images``, which fills ``probabilities``.

    ``warmup`` passes are run first and not counted. All images are run until ``duration_s`` have passed; or
    else ``iterations`` times; or, when neither is given, until the 95 % interval of the median of the passes
    of a full batch is within :data:`MEDIAN_WITHIN` of it, for at most :data:`CAP_S` seconds. Ctrl-C ends
    early and keeps what was measured.
    """
    result = Passes()
    complete_s = 0.0
    reason = "interrupted"
    try:
        done = 0
        while done < warmup:
            for plan, _ in batches(engine, images, probabilities, batch):
                plan.run()
                done += 1
                if done >= warmup:
                    break
        begin = perf_counter()
        next_look = FEWEST_SAMPLES
        while True:
            iteration_s = 0.0
            for plan, count in batches(engine, images, probabilities, batch):
                start = perf_counter()
                plan.run()
                seconds = perf_counter() - start
                iteration_s += seconds
                if count == batch:
                    result.full_s.append(seconds)
                result.images_total += count
                result.seconds_total += seconds
                if result.iterations == 0:
                    result.images_done += count
                    result.forward_s = iteration_s
                progress(count)
            result.iterations += 1
            complete_s += iteration_s
            result.forward_s = complete_s / result.iterations
            elapsed_s = perf_counter() - begin
            if duration_s is not None:
                if elapsed_s >= duration_s:
                    reason = f"{duration_s:g} s were asked for"
                    break
            elif iterations is not None:
                if result.iterations >= iterations:
                    reason = "as many iterations as were asked for"
                    break
            else:
                if len(result.full_s) >= next_look and elapsed_s >= LEAST_S:
                    if _within(result.full_s):
                        reason = (
                            f"the median's 95 % interval is within {100 * MEDIAN_WITHIN:g} % of it"
                        )
                        break
                    # Ever more seldom: to sort all samples after each pass would take longer than it.
                    next_look = len(result.full_s) * 5 // 4
                if elapsed_s >= CAP_S:
                    reason = f"the cap of {CAP_S:g} s was reached"
                    break
    except KeyboardInterrupt:
        result.interrupted = True
    interval = median_interval(result.full_s)
    result.stop = Stop(
        reason,
        float(np.median(result.full_s)) * 1e3 if result.full_s else None,
        interval and (interval[0] * 1e3, interval[1] * 1e3),
    )
    return result


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Returns an interval that holds the median with 95 % confidence; None for fewer than six samples.

    Its ends are order statistics (the binomial interval in its normal approximation; see W. J. Conover,
    "Practical Nonparametric Statistics", 3rd ed., section 3.2). Samples are taken as independent.
    """
    count = len(samples)
    if count < 6:
        return None
    half = 1.96 * math.sqrt(count) / 2
    lower = max(math.floor(count / 2 - half), 0)
    upper = min(math.ceil(count / 2 + half), count - 1)
    ends = np.partition(np.asarray(samples, float), (lower, upper))
    return float(ends[lower]), float(ends[upper])


def _within(samples: Sequence[float]) -> bool:
    lower, upper = median_interval(samples)
    median = float(np.median(samples))
    return max(upper - median, median - lower) <= MEDIAN_WITHIN * median


def time_layers(
    engine: Engine,
    images: np.ndarray,
    probabilities: np.ndarray,
    batch: int,
    progress: Progress,
    samples: int = LAYER_SAMPLES,
) -> Steps:
    """Times every step of one pass over each batch of ``images``.

    Where these are fewer than ``samples``, passes of a full batch are repeated for their samples alone.
    """
    result = Steps()
    recorder = _Recorder(engine.device, result)
    try:
        begin = perf_counter()
        full = 0
        for index, (plan, count) in enumerate(batches(engine, images, probabilities, batch)):
            recorder.run(plan, index, full=count == batch)
            full += count == batch
            progress(count)
        recorder.result = Steps(result.layers, result.copies)
        recorder.only_samples = True
        whole = slice(0, len(images) // batch * batch)
        while full < samples and perf_counter() - begin < LAYER_SAMPLES_S:
            for plan, _ in batches(engine, images[whole], probabilities[whole], batch):
                recorder.run(plan, 0, full=True)
                full += 1
                if full >= samples or perf_counter() - begin >= LAYER_SAMPLES_S:
                    break
    except KeyboardInterrupt:
        result.interrupted = True
    return result


class _Timed(NamedTuple):
    """A step that was run: when it began and what it took on the host, and the events around it."""

    step: Step
    start: float
    host_s: float
    events: tuple[Any, Any] | None


class _Recorder:
    """Runs plans step by step and adds up what each step took."""

    def __init__(self, device: Any, result: Steps) -> None:
        self.device = device
        self.result = result
        self.domain = nvtx.get_domain(DOMAIN)
        self.origin = perf_counter()
        self.only_samples = False
        self._layers: dict[str, LayerTime] = {}
        self._copies: dict[tuple[str, str], CopyTime] = {}
        self._events: list[Any] = []  # reused from pass to pass
        self._marks: dict[str, Any] = {}
        self._lanes: dict[int, int] = {}

    def run(self, plan: Plan, index: int, full: bool) -> None:
        steps = plan.steps
        needed = 2 * sum(step.place == "cuda" for step in steps)
        while len(self._events) < needed:
            self._events.append(self.device.event())
        events = iter(self._events)
        timed: list[_Timed] = []
        # Where copies are to overlap with kernels, a delay would keep them apart.
        kernels_follow = [0] * len(steps) if plan.chunk else _kernels_that_follow(steps)
        kernels_left = 0
        end = None  # of the kernel just queued, where the next one begins
        begin = perf_counter()
        for position, step in enumerate(steps):
            pair = None
            if step.place == "cuda":
                stream = (step.lane or self.device).stream
                if kernels_follow[position]:
                    kernels_left = kernels_follow[position]
                    self.device.delay(LAUNCH_MARGIN_S * kernels_left)
                    end = None
                first = end
                if first is None:
                    first = next(events)
                    first.record(stream)
                pair = first, next(events)
            self.domain.push_range(self._mark(step))
            start = perf_counter()
            step.function(*step.args)
            seconds = perf_counter() - start
            if pair is not None:
                pair[1].record(stream)
                kernels_left = max(kernels_left - 1, 0)
                end = pair[1] if kernels_left else None
            self.domain.pop_range()
            timed.append(_Timed(step, start - self.origin, seconds, pair))
        self.device.synchronize()
        whole = self.result.timed_pass
        whole.calls += 1
        whole.host_s += perf_counter() - begin
        on_device = [item.events for item in timed if item.events is not None]
        if on_device:
            origin = on_device[0][0]
            span_s = max(self.device.elapsed_s(origin, last) for _, last in on_device)
            whole.device_s = (whole.device_s or 0.0) + span_s
        self._add_up(timed, index, full)
        if plan.chunk:
            self._add_overlap(plan.chunk, timed)

    def _mark(self, step: Step) -> Any:
        text = f"{step.name} {step.direction}" if step.kind == "copy" else step.name
        if text not in self._marks:
            self._marks[text] = self.domain.get_event_attributes(message=text, category=step.kind)
        return self._marks[text]

    def _add_up(self, timed: list[_Timed], index: int, full: bool) -> None:
        first = next((item for item in timed if item.events is not None), None)
        took: dict[int, list[Any]] = {}  # what of the report, and its seconds in this pass
        for step, start, host_s, pair in timed:
            device_s = None if pair is None else self.device.elapsed_s(*pair)
            seconds = host_s if device_s is None else device_s
            found: LayerTime | CopyTime | None = None
            if step.kind == "copy":
                found = self._add_copy(step, seconds)
            elif step.kind != "sync":
                found = self._add_layer(step, host_s, device_s)
            if found is not None:  # ``stream`` has a call a chunk
                took.setdefault(id(found), [found, 0.0])[1] += seconds
            self._add_event(step.name, step.kind, "host", start, host_s, index)
            if pair is not None:
                since = self.device.elapsed_s(first.events[0], pair[0])
                track = f"{self.device.name} stream"
                if step.lane is not None:
                    lanes = self._lanes
                    track += f" {lanes.setdefault(step.lane.stream_handle, len(lanes) + 1)}"
                self._add_event(step.name, step.kind, track, first.start + since, device_s, index)
        if full:
            for found, seconds in took.values():
                found.samples_s.append(seconds)

    def _add_overlap(self, chunk: int, timed: list[_Timed]) -> None:
        origin = next(item.events[0] for item in timed if item.events is not None)
        copies, kernels = [], []
        for item in timed:
            if item.events is not None:
                interval = tuple(self.device.elapsed_s(origin, event) for event in item.events)
                (copies if item.step.kind == "copy" else kernels).append(interval)
        overlap = self.result.hidden = self.result.hidden or Overlap(chunk)
        overlap.wall_s += max(end for _, end in copies + kernels)
        copies_s, kernels_s, either_s = (
            covered(intervals) for intervals in (copies, kernels, copies + kernels)
        )
        overlap.copies_s += copies_s
        overlap.hidden_s += copies_s + kernels_s - either_s

    def _add_layer(self, step: Step, host_s: float, device_s: float | None) -> LayerTime:
        layer = self._layers.get(step.name)
        if layer is None:
            layer = self._layers[step.name] = LayerTime(step.name, step.kind, step.place)
            self.result.layers.append(layer)
        if self.only_samples:
            return layer
        layer.calls += 1
        layer.host_s += host_s
        if device_s is not None:
            layer.device_s = (layer.device_s or 0.0) + device_s
        layer.flops += step.flops
        layer.bytes += step.bytes
        return layer

    def _add_copy(self, step: Step, seconds: float) -> CopyTime:
        key = (step.name, step.direction)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = CopyTime(step.name, step.direction)
            self.result.copies.append(copy)
        if self.only_samples:
            return copy
        copy.calls += 1
        copy.bytes += step.bytes
        copy.seconds += seconds
        return copy

    def _add_event(
        self, name: str, kind: str, track: str, start: float, seconds: float, index: int
    ) -> None:
        self.result.timeline_total += 1
        if len(self.result.timeline) < TIMELINE_EVENTS:
            self.result.timeline.append(TimelineEvent(name, kind, track, start, seconds, index))


def _kernels_that_follow(steps: list[Step]) -> list[int]:
    """Returns, at the first of each run of kernels on the device, how many there are; else 0."""
    counts = [0] * len(steps)
    first = None
    for position, step in enumerate(steps):
        if step.place == "cuda" and step.kind != "copy":
            first = position if first is None else first
            counts[first] += 1
        else:
            first = None
    return counts
