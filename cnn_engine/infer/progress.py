"""Progress of a run: rate, images left, remaining time."""

from __future__ import annotations

from collections import deque
from time import monotonic

from .display import State
from .shards import Shard
from .supervise import Supervisor

#: Seconds over which a rate is taken.
WINDOW_S = 15.0


class Tracker:
    """Turns a supervisor's counts into states for the display.

    Args:
        every: all shards of this command.
        before: of them, how many had been done.
        todo: those that are left.
    """

    def __init__(self, every: int, before: int, todo: list[Shard]) -> None:
        self._every, self._before = every, before
        self._bytes = sum(shard.bytes for shard in todo)
        self._sizes = {shard.index: shard.bytes for shard in todo}
        known = all(shard.images >= 0 for shard in todo)
        self._total = sum(shard.images for shard in todo) if known else None
        self._samples: deque[tuple[float, int, int]] = deque([(monotonic(), 0, 0)])

    def state(self, supervisor: Supervisor) -> State:
        """Returns the progress so far."""
        counts, now = supervisor.counts, monotonic()
        self._samples.append((now, counts.images, counts.images - counts.errors))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        (first_at, *first), (last_at, *last) = self._samples[0], self._samples[-1]
        took = last_at - first_at
        speed, rate = (  # of all images, which tells the end, and of those that are not bad
            (b - a) / took if took > 0 and b > a else None for a, b in zip(first, last, strict=True)
        )
        done = sum(self._sizes[index] for index in supervisor.done)
        fraction = done / self._bytes if self._bytes else 1.0
        if self._total:
            fraction = min(max(fraction, counts.images / self._total), 1.0)
        eta = None
        if speed and self._total is not None:
            eta = max(self._total - counts.images, 0) / speed
        elif speed and (finished := sum(record.rows for record in supervisor.done.values())):
            eta = max(self._bytes * finished / max(done, 1) - counts.images, 0) / speed
        return State(
            shards=self._every,
            shards_done=self._before + len(supervisor.done),
            images=counts.images,
            total=self._total,
            fraction=fraction,
            rate=rate,
            eta_s=eta,
            errors=counts.errors,
            retries=counts.retries,
            set_aside=len(supervisor.set_aside),
            workers=supervisor.workers,
            bound_by=counts.bound_by(),
            peak_bytes=counts.peak_bytes,
        )
