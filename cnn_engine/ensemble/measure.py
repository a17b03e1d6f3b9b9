"""Measurements of one rank: times of its steps, and limits of each part alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..measure.result import TimelineEvent

#: Events of a rank's timeline that are kept.
MOST_EVENTS = 4000


@dataclass
class Steps:
    """Times of a rank's steps, from its first batch to its last; the parts add up to ``total_s``.

    Attributes:
        steps, images: how many; an image counts once, however many members saw it.
        compute_s: in the members.
        waiting_s: for the next batch.
        augment_s: in augmentation, and in copies to a GPU.
        extra_s: everything else.
        total_s: all.
        slowest_s: the longest step.
    """

    steps: int = 0
    images: int = 0
    compute_s: float = 0.0
    waiting_s: float = 0.0
    augment_s: float = 0.0
    extra_s: float = 0.0
    total_s: float = 0.0
    slowest_s: float = 0.0
    members_s: dict[int, float] = field(default_factory=dict)
    timeline: list[TimelineEvent] = field(default_factory=list)
    events: int = 0

    def event(self, name: str, kind: str, begin: float, end: float, step: int) -> None:
        """Keeps one part of a step for the trace; ``begin`` and ``end`` are seconds since the run began."""
        self.events += 1
        if len(self.timeline) < MOST_EVENTS:
            self.timeline.append(TimelineEvent(name, kind, "host", begin, end - begin, step))

    def to_dict(self) -> dict[str, Any]:
        return {
            key: value for key, value in asdict(self).items() if key not in ("timeline", "events")
        }


def fill(samples: Iterable[int], size: int) -> dict[str, Any]:
    """Returns how full a queue of ``size`` was."""
    found = np.array(list(samples), int)
    if not len(found):
        return {"size": size, "mean": None, "empty": None, "full": None}
    return {
        "size": size,
        "mean": float(found.mean()),
        "empty": float((found == 0).mean()),
        "full": float((found >= size).mean()),
    }


def rate(work: Callable[[], int], seconds: float, tick: Callable[[], None]) -> float:
    """Returns images/s of ``work``, which returns how many it did, over ``seconds`` after a first time."""
    work()
    tick()
    images, begin = 0, time.perf_counter()
    while True:
        images += work()
        tick()
        if (passed := time.perf_counter() - begin) >= seconds:
            return images / passed
