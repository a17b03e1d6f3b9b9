"""Device time of each step of a pass: by CUPTI's activity records, or by a chain of events.

Both change the pass they look into: records make each call on the host slower, events cost the device time
between two steps. So neither's passes are shown as passes; what is taken from them is how long each step's
work took, and from events what two of them with nothing in between take is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from .. import _cpu
from ..plan.plan import Plan, Step
from .cupti import activity
from .cupti.activity_records import Trace, covered
from .profile_tables import EVENTS, RECORDS

#: Seconds of delay queued for each step that follows: more than its call and its event take.
LAUNCH_MARGIN_S = 20e-6

#: Pairs of events with nothing in between, of which the median is what a pair costs.
EMPTY_PAIRS = 31

#: Of page-locked memory that stands for pageable memory while a copy is timed by events.
MOST_TWIN_BYTES = 2**30

Span = tuple[float, float]


@dataclass
class Metered:
    """Measurements of one pass on the device.

    Attributes:
        plan: that was run.
        spans: of each step, from when to when it worked on the device, in seconds since the pass's beginning
            on the host; None where it did not. ``seconds`` of each: the time in which it worked.
        marks: of the host's clock, before the first step and after each.
    """

    plan: Plan
    marks: list[float]
    spans: list[Span | None]
    seconds: list[float | None]

    @property
    def wall_s(self) -> float:
        """Host time of the pass, measuring included."""
        return self.marks[-1] - self.marks[0]

    @property
    def span_s(self) -> float:
        """From the beginning of the first step on the device to the end of the last."""
        spans = [span for span in self.spans if span is not None]
        return max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0


#: Returns a plan, bound to the next batch of the images.
Next = Callable[[], Plan]


def is_pageable(device: Any, step: Step) -> bool:
    """Whether ``step`` is a copy between a CUDA device and memory of the host that is not page-locked."""
    if step.kind != "copy" or step.place != "cuda":
        return False
    to, source = step.args[:2]
    return not device.is_pinned(source if step.direction == "h2d" else to)


def empty_pair_s(device: Any) -> float:
    """Returns the seconds between two events on ``device`` with nothing in between."""
    first, second = device.event(), device.event()
    times = []
    for _ in range(EMPTY_PAIRS):
        device.delay(LAUNCH_MARGIN_S)
        first.record(device.stream)
        second.record(device.stream)
        device.synchronize()
        times.append(device.elapsed_s(first, second))
    return float(np.median(times))


class RecordMeter:
    """Activity records: nothing is added to the stream, and times are the device's own."""

    source = RECORDS
    empty_pair_s = None

    def measure(self, following: Next, passes: int) -> list[Metered]:
        """Runs ``passes`` passes and one before them, and returns those with a record of every step.

        Raises:
            UnsupportedError: CUPTI refused after all.
        """
        ran: list[tuple[int, int]] = []  # pass and step, by mark
        found: list[Metered] = []
        with activity.record() as trace:
            for index in range(passes + 1):  # the first after records are switched on is slow
                plan = following()
                marks = [perf_counter()]
                for k, step in enumerate(plan.steps):
                    trace.push(len(ran))
                    ran.append((index, k))
                    step.function(*step.args)
                    trace.pop()
                    marks.append(perf_counter())
                nothing: list[Any] = [None] * len(plan.steps)
                found.append(Metered(plan, marks, nothing, list(nothing)))
        self._fill(found, trace, ran)
        return [
            one
            for one in found[1:]
            if all(
                (step.place == "cuda") == (seconds is not None)
                for step, seconds in zip(one.plan.steps, one.seconds, strict=True)
            )
        ]

    def _fill(self, found: list[Metered], trace: Trace, ran: list[tuple[int, int]]) -> None:
        work: dict[tuple[int, int], list[Span]] = {}
        for record in (*trace.kernels, *trace.copies, *trace.sets):
            if (mark := trace.marks.get(record.correlation)) is not None:
                work.setdefault(ran[mark], []).append((record.start_s, record.end_s))
        # A step's first call begins just after the host's mark before it: that joins the two clocks.
        behind = [
            call.start_s - found[ran[mark][0]].marks[ran[mark][1]]
            for call in trace.api
            if (mark := trace.marks.get(call.correlation)) is not None
        ]
        offset = min(behind, default=0.0)
        for (index, k), spans in work.items():
            one = found[index]
            origin = offset + one.marks[0]
            begin = min(start for start, _ in spans)
            end = max(end for _, end in spans)
            one.spans[k] = begin - origin, end - origin
            one.seconds[k] = covered(spans)


class EventMeter:
    """Events, where there are no records: one chain for all steps that follow each other on a stream.

    A delay queued ahead keeps the device behind the host, so that the time between two events holds a step
    and not its launch. Pageable memory would hold the driver's staging as well, so a copy from or to it is
    timed on page-locked memory of the same size; what is left of its call is staging. Where copies overlap
    with kernels (``Plan.chunk``) a delay would keep them apart: there each step has two events of its own.
    """

    source = EVENTS

    def __init__(self, device: Any) -> None:
        self.device = device
        self._events: list[Any] = []  # reused from pass to pass
        self._twins: dict[int, np.ndarray] = {}
        self.empty_pair_s = empty_pair_s(device)

    def _event(self, index: int) -> Any:
        while len(self._events) <= index:
            self._events.append(self.device.event())
        return self._events[index]

    def measure(self, following: Next, passes: int) -> list[Metered]:
        """Runs ``passes`` passes and returns them."""
        return [self._measure(following()) for _ in range(passes)]

    def _measure(self, plan: Plan) -> Metered:
        steps = plan.steps
        pairs: list[tuple[Any, Any] | None] = [None] * len(steps)
        used = 0
        last = None  # the end of the step just queued, where the next one begins
        back: list[
            tuple[int, int, int]
        ] = []  # from page-locked memory to the caller's, after the wait
        marks = [perf_counter()]
        for k, step in enumerate(steps):
            if step.place != "cuda":
                last = None
                step.function(*step.args)
                if step.kind == "sync":
                    for to, source, nbytes in back:
                        _cpu.copy(source, to, nbytes, 1)
                    back.clear()
            else:
                args = step.args
                stream = (step.lane or self.device).stream
                if not plan.chunk:
                    args = self._on_twin(k, step, back)
                    if last is None:
                        follow = _following_on_device(steps, k)
                        self.device.delay(LAUNCH_MARGIN_S * follow)
                if last is None or plan.chunk:
                    last, used = self._event(used), used + 1
                    last.record(stream)
                first, last, used = last, self._event(used), used + 1
                step.function(*args)
                last.record(stream)
                pairs[k] = first, last
            marks.append(perf_counter())
        self.device.synchronize()
        begin = next((k for k, pair in enumerate(pairs) if pair is not None), None)
        spans: list[Span | None] = [None] * len(steps)
        seconds: list[float | None] = [None] * len(steps)
        if begin is not None:
            origin, since = pairs[begin][0], marks[begin] - marks[0]
            for k, pair in enumerate(pairs):
                if pair is not None:
                    start = since + self.device.elapsed_s(origin, pair[0])
                    took = max(self.device.elapsed_s(*pair) - self.empty_pair_s, 0.0)
                    spans[k], seconds[k] = (start, start + took), took
        return Metered(plan, marks, spans, seconds)

    def _on_twin(self, k: int, step: Step, back: list[tuple[int, int, int]]) -> list[Any]:
        """Returns the arguments of ``step``, with page-locked memory in the place of pageable memory."""
        if not is_pageable(self.device, step) or not 0 < step.args[2] <= MOST_TWIN_BYTES:
            return step.args
        to, source, nbytes = step.args
        twin = self._twins.get(k)
        if twin is None or twin.nbytes < nbytes:
            twin = self._twins[k] = self.device.empty_pinned((nbytes,), np.uint8)
        address = twin.__array_interface__["data"][0]
        if step.direction == "h2d":
            _cpu.copy(source, address, nbytes, 1)
            return [to, address, nbytes]
        back.append((to, address, nbytes))
        return [address, source, nbytes]


def _following_on_device(steps: Sequence[Step], first: int) -> int:
    """Returns how many steps from ``first`` on are queued on the device, one right after the other."""
    count = 0
    for step in steps[first:]:
        if step.place != "cuda":
            break
        count += 1
    return count


class InsideMeter:
    """The parts of a fused network, counted by the network itself in a pass of its own.

    ``FusedNetwork.parts`` are the layers, by index, that each part computes; ``run_timed`` adds to an array
    how long each took: seconds on a CPU (float64), ticks of the multiprocessors' clock on CUDA (uint64). On
    both, only their shares are used.

    Attributes:
        parts: of the fused step ``position`` of a plan.
    """

    def __init__(self, device: Any, plan: Plan, position: int) -> None:
        self.device = device
        self.position = position
        network = plan.steps[position].function.__self__
        self.parts: list[tuple[int, ...]] = [tuple(part) for part in network.parts]
        self._timed = network.run_timed
        on_device = plan.steps[position].place == "cuda"
        self._counts = (
            device.empty_pinned((len(self.parts),), np.uint64)
            if on_device
            else np.zeros(len(self.parts))
        )
        self._remote = device.allocate(self._counts.nbytes) if on_device else None
        self.counts: list[np.ndarray] = []
        self.wall_s: list[float] = []

    @classmethod
    def find(cls, device: Any, plan: Plan) -> InsideMeter | None:
        """Returns a meter for the fused step of ``plan``; None where there is none, or it cannot count."""
        for position, step in enumerate(plan.steps):
            network = getattr(step.function, "__self__", None)
            if step.kind == "fused" and hasattr(network, "run_timed") and not plan.chunk:
                return cls(device, plan, position)
        return None

    def measure(self, following: Next, passes: int) -> None:
        """Runs ``passes`` passes, and one before them that does not count."""
        address = self._counts.__array_interface__["data"][0]
        for index in range(passes + 1):
            plan = following()
            self._counts[:] = 0
            target = address
            if self._remote is not None:
                target = self._remote.address
                self.device.copy_h2d(target, address, self._counts.nbytes)
                self.device.synchronize()
            calls = [(step.function, step.args) for step in plan.steps]
            calls[self.position] = self._timed, [*plan.steps[self.position].args, target]
            start = perf_counter()
            for function, args in calls:
                function(*args)
            seconds = perf_counter() - start
            if self._remote is not None:
                self.device.copy_d2h(address, target, self._counts.nbytes)
                self.device.synchronize()
            if index and self._counts.any():
                self.wall_s.append(seconds)
                self.counts.append(self._counts.astype(float))

    def shares(self) -> list[float] | None:
        """Returns the share of each part in the fused step; None where nothing was counted."""
        if not self.counts:
            return None
        counts = np.array(self.counts)
        shares = (counts / counts.sum(axis=1, keepdims=True)).mean(axis=0)
        return [float(share) for share in shares]


def device_meter(device: Any, records: bool) -> tuple[RecordMeter | EventMeter | None, str | None]:
    """Returns the meter of work on ``device``, and a reason if it does not use records; None for a CPU."""
    if device.kind != "cuda":
        return None, None
    if not records:
        return EventMeter(device), None
    reason = activity.unavailable()
    return (EventMeter(device), reason) if reason else (RecordMeter(), None)
