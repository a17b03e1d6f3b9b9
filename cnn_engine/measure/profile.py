"""Profiles passes of an engine: the same batches once more, under CUPTI's activity records.

Plain and profiled passes take turns, so that what profiling costs is measured beside what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from ..plan.plan import Plan, Step
from ..workload import Samples
from . import openacc_profile, profile_tables, statistics, timing
from .cupti import activity
from .cupti.activity_records import Trace
from .profile_tables import PROFILED, SET_NAME, Cost, Profile, copy_name
from .result import Result, TimelineEvent
from .step_times import TIMELINE_EVENTS

if TYPE_CHECKING:
    from ..engine.engine import Engine

__all__ = ["TOP", "Profile", "collect", "timeline_events"]

#: Percent of the time above the line of a table.
TOP = 90.0

#: Plain and profiled passes take turns so often, in rounds of at least so many passes: the first pass after
#: records are switched on is slow, and a median over few would be that one's.
ROUNDS = 10
FEWEST_PASSES = 5

#: Each step makes some five records, and each record takes some microseconds to be read.
MOST_STEPS = 50_000

#: No pass begins after so many seconds, but at least one is run plain and one profiled.
CAP_S = 10.0

ON_A_CPU = (
    "the device is a CPU: there are no kernels, no copies to a device and no CUDA API calls; "
    "the layers' times are of the host's clock, from the run that times layers"
)
WITHOUT_RECORDS = (
    "without activity records: names of kernels, CUDA API calls, the memory of copies, "
    "events of managed memory, launches captured, the cost of profiling; the times are those between "
    "events, from the run that times layers"
)


def collect(
    engine: Engine,
    images: np.ndarray | Samples,
    probabilities: np.ndarray | Samples,
    batch: int,
    result: Result,
    *,
    top: float = TOP,
    progress: Any = None,
) -> Profile:
    """Runs passes over ``images`` once more and returns the parts of their time.

    Args:
        images: uint8 or float32 [N, C, H, W] in host memory, N > 0; or all inputs of any network.
        probabilities: where what comes out goes, such as float32 [N, classes].
        batch: images per pass.
        result: the ordinary result of the same run: its layers stand in where nothing can be recorded.
        top: percent of the time, for the line in the report's tables.
        progress: an object with ``start(what, images)``, ``advance(images)`` and ``stop()``, or None.

    Returns:
        The profile; ``notes`` say what is left out. Ctrl-C ends it early and keeps what was recorded.
    """
    if engine.device.kind == "openacc":
        found, *samples = openacc_profile.collect(
            engine, images, probabilities, batch, result, top=top, progress=progress
        )
        found.cost = cost(*samples, result)
        return found
    if engine.device.kind != "cuda":
        return _without_records(result, top, [ON_A_CPU])
    passes = _Passes(engine, images, probabilities, batch, progress)
    try:
        passes.run()
    except UnsupportedError as error:
        return _without_records(result, top, [str(error), WITHOUT_RECORDS])
    profile = profile_tables.from_trace(
        passes.trace or Trace(), passes.ran, passes.cpu,
        top=top, passes=passes.done, images=passes.images_done, wall_s=passes.wall_s,
    )  # fmt: skip
    profile.interrupted = passes.interrupted
    if passes.done < (whole := -(-len(images) // batch)):
        profile.notes.append(
            f"{whole - passes.done} of {whole} passes (at most {MOST_STEPS:,} steps and {CAP_S:g} s are "
            "profiled)"
        )
    profile.cost = cost(passes.plain_s, passes.profiled_s, result)
    profile.events, profile.events_total = _events(passes, engine.device.name)
    return profile


def timeline_events(profile: Profile, after: Sequence[TimelineEvent] = ()) -> list[TimelineEvent]:
    """Returns the profile's first kernels, copies, sets and API calls: a track a stream, one for calls.

    Their times and passes are counted on from those of ``after``, the timeline of another run.
    """
    after_s = max((event.start_s + event.seconds for event in after), default=0.0)
    passes = max((event.batch + 1 for event in after), default=0)
    return [
        TimelineEvent(name, kind, track, after_s + start_s, seconds, passes + index)
        for name, kind, track, start_s, seconds, index in profile.events
    ]


def cost(plain_s: list[float], profiled_s: list[float], result: Result) -> Cost | None:
    """Returns the cost of profiling; None where no full batch was run both ways."""
    if not plain_s or not profiled_s:
        return None
    plain, profiled = statistics.quantile(plain_s), statistics.quantile(profiled_s)
    ratio = statistics.ratio(profiled, plain)
    ordinary_ms = result.stop.median_ms if result.stop is not None else None
    return Cost(
        plain.value,
        profiled.value,
        ratio and ratio.value,
        (ratio.low, ratio.high) if ratio is not None and ratio.known else None,
        min(len(plain_s), len(profiled_s)),
        None if ordinary_ms is None else ordinary_ms / 1e3,
    )


def _without_records(result: Result, top: float, notes: list[str]) -> Profile:
    return profile_tables.from_steps(result, top=top, notes=notes)


@dataclass
class _Passes:
    """Plain and profiled passes in turn, and what the profiled ones did.

    Attributes:
        ran: the steps of the profiled passes, one after the other; ``starts``: where each pass begins in it.
        cpu: those that worked on the CPU, with their seconds.
        plain_s, profiled_s: seconds of passes of a full batch.
        done, images_done, wall_s: of all profiled passes.
    """

    engine: Engine
    images: np.ndarray | Samples
    probabilities: np.ndarray | Samples
    batch: int
    progress: Any
    trace: Trace | None = None
    ran: list[Step] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    cpu: list[tuple[Step, float]] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    profiled_s: list[float] = field(default_factory=list)
    done: int = 0
    images_done: int = 0
    wall_s: float = 0.0
    interrupted: bool = False
    deadline: float = float("inf")

    def run(self) -> None:
        """Fills everything.

        Raises:
            UnsupportedError: records cannot be had.
        """
        device = self.engine.device
        managed = device.index if self.engine.data_mode == "managed" else None
        passes = -(-len(self.images) // self.batch)
        plan, _ = next(self._window(0, 1))
        most = max(MOST_STEPS // max(len(plan.steps), 1), FEWEST_PASSES)
        in_round = max(-(-min(passes, most) // ROUNDS), FEWEST_PASSES)
        rounds = -(-max(min(passes, most), ROUNDS * FEWEST_PASSES) // in_round)
        if self.progress is not None:
            self.progress.start("profile", rounds * in_round * self.batch)
        try:
            with activity.record(managed_device=managed):  # the first one sets CUPTI up
                plan.run_steps()
            self.deadline = perf_counter() + CAP_S
            for first in range(0, rounds * in_round, in_round):
                for plan, count in self._window(first, in_round):
                    start = perf_counter()
                    plan.run_steps()
                    if count == self.batch:
                        self.plain_s.append(perf_counter() - start)
                with activity.record(self.trace, managed_device=managed) as self.trace:
                    self._profile(first, in_round)
                if perf_counter() > self.deadline:
                    break
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            if self.progress is not None:
                self.progress.stop()

    def _window(self, first: int, count: int) -> Iterator[tuple[Plan, int]]:
        """Yields ``count`` passes from the ``first`` on; after the last batch comes the first again."""
        passes = -(-len(self.images) // self.batch)
        for index in range(first, first + count):
            if index > first and perf_counter() > self.deadline:
                break
            part = slice(index % passes * self.batch, (index % passes + 1) * self.batch)
            yield from timing.batches(
                self.engine, self.images[part], self.probabilities[part], self.batch
            )

    def _profile(self, first: int, count: int) -> None:
        for plan, images in self._window(first, count):
            seconds = self._profile_pass(plan)
            if images == self.batch:
                self.profiled_s.append(seconds)
            self.wall_s += seconds
            self.done += 1
            self.images_done += images
            if self.progress is not None:
                self.progress.advance(images)

    def _profile_pass(self, plan: Plan) -> float:
        """Runs one pass, marking what each step calls with its place in ``ran``; returns its seconds."""
        push, pop = self.trace.push, self.trace.pop
        ran, cpu = self.ran, self.cpu
        self.starts.append(len(ran))
        start = perf_counter()
        for step in plan.steps:
            push(len(ran))
            ran.append(step)
            if step.place == "cpu" and step.kind != "sync":
                begin = perf_counter()
                step.function(*step.args)
                cpu.append((step, perf_counter() - begin))
            else:
                step.function(*step.args)
            pop()
        return perf_counter() - start


def _events(passes: _Passes, device: str) -> tuple[list[list], int]:
    """Returns the first records in time as rows of a timeline, and how many there are in all."""
    trace = passes.trace or Trace()
    found = [(kernel.name, "kernel", kernel) for kernel in trace.kernels]
    found += [(copy_name(copy), "copy", copy) for copy in trace.copies]
    found += [(SET_NAME, "set", record) for record in trace.sets]
    found += [(call.name, "api", call) for call in trace.api]
    found.sort(key=lambda row: row[2].start_s)
    pass_of = dict(enumerate(_pass_indices(passes.starts, len(passes.ran))))
    origin = found[0][2].start_s if found else 0.0
    rows, index = [], 0
    for name, kind, record in found[:TIMELINE_EVENTS]:
        index = pass_of.get(trace.marks.get(record.correlation), index)
        where = f"{device} stream {record.stream}" if kind != "api" else "host CUDA API"
        rows.append([name, kind, where + PROFILED, record.start_s - origin, record.seconds, index])
    return rows, len(found)


def _pass_indices(starts: list[int], steps: int) -> list[int]:
    """Returns the index of its pass for each step."""
    begins = np.zeros(steps, int)
    begins[[start for start in starts[1:] if start < steps]] = 1
    return list(accumulate(int(begin) for begin in begins))
