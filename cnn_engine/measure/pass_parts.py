"""Splits a pass into parts that add up: its steps, and the time between them.

Pure functions of what was measured elsewhere: when each step's call began and ended on the host, and how long
each step worked on the device. Work on a device is put where it can have been: behind the work before it on
its stream, not before its call, not after the wait that saw it done. What of the pass is left has no device
work in it, and is named for what the host did meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..plan.plan import Step

#: What lies between the steps, in the order of reports.
LAUNCH, STAGING, WAITING, HOST, OVERLAP = "launch", "staging", "waiting", "host", "overlap"
BETWEEN = (LAUNCH, STAGING, WAITING, HOST, OVERLAP)


@dataclass
class Parts:
    """One pass in seconds: ``sum(steps) + sum(between.values())`` is its length where the parts fit into it.

    Attributes:
        steps: of each step of the plan: on the device where it works there, else on the host; 0 for a wait.
        host: of each step's call on the host.
        between: what lies between the steps, by name.
    """

    steps: list[float]
    host: list[float]
    between: dict[str, float] = field(default_factory=dict)


def usual(
    clocked: Sequence[Sequence[float]], lengths: Sequence[float], reading_s: float
) -> tuple[np.ndarray, float]:
    """Returns the marks of a usual pass, from 0 on, and its length, without the cost of the marks.

    It is the mean of the middle quarter of passes by length. Means of whole passes add up, unlike medians:
    the mean of a sum is the sum of the means. Passes are chosen by their own length, not by that of passes
    without marks: those would be the ones in which some step happened to be short.

    Args:
        clocked: of each pass, readings of the clock before the first step and after each.
        lengths: of each pass from outside, in seconds.
        reading_s: what a reading costs.
    """
    order = np.argsort(lengths, kind="stable")
    size = -(-len(order) // 4)
    first = (len(order) - size) // 2
    chosen = order[first : first + size]
    marks = np.asarray(clocked, float)[chosen]
    marks = (marks - marks[:, :1]).mean(axis=0)
    count = len(marks)
    marks = np.maximum.accumulate(np.maximum(marks - reading_s * np.arange(count), 0.0))
    length = float(np.asarray(lengths, float)[chosen].mean()) - reading_s * count
    return marks, max(length, float(marks[-1]))


def take_apart(
    steps: Sequence[Step],
    marks: Sequence[float],
    wall_s: float,
    device_s: Sequence[float | None],
    pageable: Sequence[bool],
    overlaps: bool,
) -> Parts:
    """Returns the steps of a pass, and the time between them.

    Args:
        steps: of the plan.
        marks: of a clock on the host, one before the first step and one after each.
        wall_s: of the pass from outside.
        device_s: of each step's work on the device; None for one that does not work there.
        pageable: whether the step is a copy from or to pageable memory, which the driver stages in its call.
        overlaps: whether steps run at the same time on purpose; ``between`` has then what to take off.
    """
    marks = np.asarray(marks, float) - marks[0]
    host = np.diff(marks)
    works = [work for work in _placed(steps, marks, device_s, pageable) if work is not None]
    free = _free(marks, works)
    between = dict.fromkeys((LAUNCH, STAGING, WAITING, HOST), 0.0)
    between[HOST] = wall_s - float(marks[-1])
    seconds = []
    for k, step in enumerate(steps):
        if step.kind == "sync":
            between[WAITING] += float(free[k])
            seconds.append(0.0)
        elif device_s[k] is None:
            seconds.append(float(host[k]))
        else:
            between[STAGING if pageable[k] else LAUNCH] += float(free[k])
            seconds.append(float(device_s[k]))
    if overlaps:
        between[OVERLAP] = wall_s - sum(seconds) - sum(between.values())
    found = {name: value for name, value in between.items() if value or name == HOST}
    return Parts(seconds, [float(value) for value in host], found)


def _placed(
    steps: Sequence[Step],
    marks: np.ndarray,
    device_s: Sequence[float | None],
    pageable: Sequence[bool],
) -> list[list[float] | None]:
    """Returns from when to when each step worked on the device; None for one that did not."""
    works: list[list[float] | None] = [None] * len(steps)
    reached: dict[int, float] = {}  # until when each stream has work
    queued: dict[int, list[list[float]]] = {}  # on each stream, since the last wait for it
    for k, step in enumerate(steps):
        begin, end = marks[k], marks[k + 1]
        if step.kind == "sync":
            lane = _lane_waited_for(step)
            # What was waited for was done by then, wherever the launches seemed to put it.
            for one in [lane] if lane in queued else list(queued):
                latest = end
                for work in reversed(queued.pop(one)):
                    late = max(work[1] - latest, 0.0)
                    work[0], work[1] = work[0] - late, work[1] - late
                    latest = work[0]
                reached[one] = min(reached[one], end)
        elif device_s[k] is not None:
            lane = id(step.lane) if step.lane is not None else 0
            earliest = max(reached.get(lane, 0.0), begin)
            # A copy through the driver's buffers is done when its call returns; others begin by then.
            start = max(earliest, end - device_s[k] if pageable[k] else end)
            works[k] = [start, start + device_s[k]]
            reached[lane] = works[k][1]
            queued.setdefault(lane, []).append(works[k])
    return works


def _lane_waited_for(step: Step) -> int:
    """Returns which stream a wait is for: that of the lane whose method it calls."""
    return id(getattr(step.function, "__self__", None))


def _free(marks: np.ndarray, works: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns for each step how much of its call had no work on the device."""
    cuts = np.unique(np.concatenate([marks, *(np.asarray(work) for work in works)]))
    cuts = cuts[(cuts >= marks[0]) & (cuts <= marks[-1])]
    middles = (cuts[1:] + cuts[:-1]) / 2
    busy = np.zeros(len(middles), bool)
    for start, end in works:
        busy |= (middles > start) & (middles < end)
    owner = np.clip(np.searchsorted(marks, middles, side="right") - 1, 0, len(marks) - 2)
    return np.bincount(owner, np.where(busy, 0.0, np.diff(cuts)), minlength=len(marks) - 1)
