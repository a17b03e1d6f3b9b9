"""Hands shards to workers, restarts those that die, and ends when all is done."""

from __future__ import annotations

import os
import platform
import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from ..errors import InputError
from .output import OutputError, Record
from .output_dir import Folder
from .pipeline import COMMITTERS, STAGES, WRITERS, Failure
from .shards import Shard

#: Workers that a shard may kill, and attempts that may fail, before it is set aside.
DEATHS = ATTEMPTS = 3

#: Shards that a worker has at a time beside those of which only rows are left to be written; how many when
#: few are left, so that all workers end at about the same time; and with those that are written.
AHEAD, LAST_AHEAD = 4, 2
IN_HAND = AHEAD + max(WRITERS.values()) + COMMITTERS

#: Shards that each worker has its stages measured on alone, at most.
MEASURED = 16

#: Workers in a row that may end before they can work.
STARTS = 3

#: Seconds that a worker may go on without a sign of progress.
STALL_S = 600.0

#: Seconds without a word from a worker, which speaks a few times per second, until it is ended; and from then
#: until it is taken for dead, heard of or not.
SILENT_S, GRACE_S = 60.0, 10.0

Event = dict[str, Any]


class Pool(Protocol):
    """Workers of one kind: local processes or Ray's actors. One that ended gives ``{"event": "died"}``."""

    events: queue.Queue[tuple[int, Event]]
    start_limit_s: float | None

    def start(self, worker: int) -> None:
        """Starts worker number ``worker``, which says ``hello`` when it is ready.

        Nothing is heard any more of one that had that number before.
        """

    def send(self, worker: int, message: Event) -> None:
        """Sends a command; a worker that has ended gets none."""

    def kill(self, worker: int) -> None:
        """Ends a worker at once."""

    def cores(self) -> int:
        """Returns the CPUs that all workers share."""

    def close(self) -> None:
        """Ends all workers, and waits for it; does nothing more when called again."""


@dataclass
class SetAside:
    """A shard that could not be done, and why."""

    shard: Shard
    reason: str


@dataclass
class Counts:
    """Counts of all workers, those that ended included, until the last shard was done.

    Attributes:
        peak_bytes: the largest resident size of one of them.
        cpu_s: of all of them, from their first shards on.
        late_s: how long there were shards before the last of them was ready.
    """

    images: int = 0
    errors: int = 0
    restarts: int = 0
    retries: int = 0
    peak_bytes: int = 0
    cpu_s: float = 0.0
    late_s: float = 0.0
    stages: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: {"seconds": 0.0, "images": 0, "bytes": 0} for name in STAGES}
    )

    def bound_by(self) -> str | None:
        """Returns the stage that is at work most of the time."""
        busiest = max(self.stages, key=lambda name: self.stages[name]["seconds"])
        return busiest if self.stages[busiest]["seconds"] else None


@dataclass
class _State:
    """One worker."""

    ready: bool = False
    shards: list[int] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)  # of these
    beat: Event | None = None
    moved: float = field(default_factory=monotonic)
    heard: float = field(default_factory=monotonic)
    opened: bool = False
    killed: float | None = None
    last: float = 0.0  # when it had computed a shard, or was ready


class Supervisor:
    """One run over ``shards`` by ``workers`` workers of a pool.

    Args:
        pool: whose workers :meth:`start_all`, :meth:`first_hello` or :meth:`run` start.
        folder: where shards are recorded as they are done.
        run: what tells this run's files from another's.

    Attributes:
        paces: of each shard that is done, the seconds from when its worker had computed the one before until
            it had computed this one, and its images that are not bad.
    """

    def __init__(self, pool: Pool, workers: int) -> None:
        self.pool, self.workers = pool, workers
        self.done: dict[int, Record] = {}
        self.set_aside: list[SetAside] = []
        self.paces: list[tuple[float, int]] = []
        self._computed_s: dict[int, float] = {}
        self.counts = Counts()
        self.stall_s, self.silent_s, self.grace_s = STALL_S, SILENT_S, GRACE_S
        self._states: dict[int, _State] = {}
        self._hellos: dict[int, Event] = {}
        self._past: list[Event] = []  # the last counts of workers that ended
        self._begin: float | None = None
        self._counting = True
        self._failed_starts = 0
        self._attempt = 0

    def first_hello(self) -> Event:
        """Returns the hello of the first worker that is ready; starts one where none was.

        Raises:
            InputError: the worker's configuration is at fault, or it does not start.
        """
        if not self._states:
            self._start(0)
        while not self._hellos:
            for _ in self._take(1.0):
                pass
            self._check_stalled()
        return next(iter(self._hellos.values()))

    def start_all(self) -> None:
        """Starts all workers at once, so that they are ready when there are shards."""
        for worker in range(self.workers):
            self._start(worker)

    def hosts_of_workers(self) -> list[str]:
        """Returns the machine of each worker that has been ready."""
        return [hello["host"] for hello in self._hellos.values()]

    def hosts(self) -> list[str]:
        """Returns the machines that workers were on."""
        return sorted({hello["host"] for hello in self._hellos.values()})

    def run(
        self,
        folder: Folder,
        shards: list[Shard],
        run: str,
        opening: Event,
        tick: Callable[[Supervisor], None],
    ) -> None:
        """Runs ``shards``; ``done`` and ``set_aside`` have their outcomes.

        Args:
            opening: the message to workers before their first shard.
            tick: called a few times per second.

        Raises:
            OutputError: the output folder cannot be written.
            InputError: no worker can be started.
        """
        self._folder, self._run, self._opening = folder, run, opening
        self._begin = monotonic()
        self._shards = {shard.index: shard for shard in shards}
        self._waiting = deque(shard.index for shard in shards)
        self._suspects: deque[int] = (
            deque()
        )  # which were there when a worker died: each is tried alone
        self._deaths: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        for worker in range(min(self.workers, max(len(shards), 1))):
            if worker not in self._states:
                self._start(worker)
        for worker, state in self._states.items():
            if state.ready:
                self._open(worker)
        self._feed()
        while len(self.done) + len(self.set_aside) < len(shards):
            for _ in self._take(0.2):
                pass
            self._check_stalled()
            self._feed()
            tick(self)
        self._counting = False

    def measure(self, stage: str, shards: list[Shard], seconds: float) -> list[Event]:
        """Has every worker measure ``stage`` alone, all at the same time; returns the measurements.

        Raises:
            CnnEngineError: a worker died of it.
        """
        workers = [worker for worker, state in self._states.items() if state.ready]
        for index, worker in enumerate(workers):
            own = shards[index :: len(workers)][:MEASURED] or shards[:1]
            self.pool.send(
                worker,
                {"command": "measure", "stage": stage, "seconds": seconds,
                 "shards": [vars(shard) for shard in own], "attempt": self._next_attempt()},
            )  # fmt: skip
        found: list[Event] = []
        end = monotonic() + 60 + 10 * seconds
        while len(found) < len(workers):
            for _, event in self._take(1.0):
                if event["event"] == "measured":
                    found.append(event)
                if event["event"] == "died":
                    raise InputError(f"{stage}: a worker ended while it was measured")
            if monotonic() > end:
                raise InputError(f"{stage}: took more than {60 + 10 * seconds:g} s to measure")
        return found

    # ---- workers ----

    def _start(self, worker: int) -> None:
        self._states[worker] = _State()
        self.pool.start(worker)

    def _open(self, worker: int) -> None:
        state = self._states[worker]
        state.opened, state.heard = True, monotonic()
        self.pool.send(worker, {"command": "open", **self._opening})

    def _next_attempt(self) -> str:
        self._attempt += 1
        return f"{os.getpid()}-{self._attempt}"

    def _take(self, timeout: float) -> Iterator[tuple[int, Event]]:
        """Waits for an event and yields it and those behind it, each of them dealt with."""
        with suppress(queue.Empty):
            worker, event = self.pool.events.get(timeout=timeout)
            while True:
                if worker in self._states:
                    self._states[worker].heard = monotonic()
                getattr(self, f"_on_{event['event']}")(worker, event)
                yield worker, event
                worker, event = self.pool.events.get_nowait()

    def _on_hello(self, worker: int, event: Event) -> None:
        first, other = next(iter(self._hellos.items()), (worker, event))
        for key in ("model_sha256", "batch", "classes", "variant", "dtype", "device_kind"):
            if event[key] != other[key]:
                raise InputError(
                    f"worker {worker} on {event['host']}: expected {key} {other[key]}, as worker {first} "
                    f"has, found {event[key]}"
                )
        self._hellos[worker] = event
        if self._begin is not None:
            self.counts.late_s = monotonic() - self._begin
        self._failed_starts = 0
        state = self._states[worker]
        state.ready, state.moved = True, monotonic()
        state.last = state.moved
        if hasattr(self, "_opening"):
            self._open(worker)

    def _on_error(self, worker: int, event: Event) -> None:
        raise InputError(event["message"])

    def _on_beat(self, worker: int, event: Event) -> None:
        state = self._states[worker]
        before = state.beat
        if before is None or before["stages"] != event["stages"]:
            state.moved = monotonic()
        state.beat = event
        if self._counting:
            self._add_up()

    def _on_measured(self, worker: int, event: Event) -> None:
        self._states[worker].moved = monotonic()

    def _on_computed(self, worker: int, event: Event) -> None:
        state, now = self._states[worker], monotonic()
        state.computed.add(event["shard"])
        self._computed_s[event["shard"]] = now - max(state.last, self._begin)
        state.last = now

    def _on_done(self, worker: int, event: Event) -> None:
        index = event["shard"]
        self._forget(worker, index)
        if (
            index in self.done or index not in self._shards
        ):  # a late attempt: the first one's file stays
            return
        record = Record.of(event, event["bytes"])
        self._folder.record(self._run, self._shards[index], record, self._hellos[worker]["host"])
        self.done[index] = record
        if index in self._computed_s:
            self.paces.append((self._computed_s[index], record.rows - record.errors))

    def _on_failed(self, worker: int, event: Event) -> None:
        index, kind, message = event["shard"], event["kind"], event["message"]
        self._forget(worker, index)
        if kind == Failure.OUTPUT:
            raise OutputError(message)
        self._attempts[index] = self._attempts.get(index, 0) + 1
        if kind == Failure.INPUT or self._attempts[index] >= ATTEMPTS:
            self._put_aside(index, message)
        else:
            self.counts.retries += 1
            self._waiting.append(index)

    def _on_died(self, worker: int, event: Event) -> None:
        state = self._states.pop(worker)
        if state.beat is not None:
            self._past.append(state.beat)
        if not state.ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise InputError(
                    f"worker: expected it to start, found that {STARTS} in a row ended: {event['reason']}"
                )
        for index in state.shards:
            self._deaths[index] = self._deaths.get(index, 0) + 1
            if self._deaths[index] >= DEATHS:
                self._put_aside(index, f"killed {DEATHS} workers ({event['reason']})")
            else:
                self.counts.retries += 1
                self._suspects.append(index)
        self.counts.restarts += 1
        self._start(worker)

    def _forget(self, worker: int, index: int) -> None:
        state = self._states[worker]
        if index in state.shards:
            state.shards.remove(index)
        state.computed.discard(index)
        state.moved = monotonic()

    def _put_aside(self, index: int, reason: str) -> None:
        self.set_aside.append(SetAside(self._shards[index], reason))
        self._folder.record(self._run, self._shards[index], None, platform.node())

    def _check_stalled(self) -> None:
        """Ends workers that hang, as on an image that never ends, and those that are silent.

        The end of a machine may be heard of late, or not at all: then it is not waited for.
        """
        now = monotonic()
        for worker, state in list(self._states.items()):
            busy = bool(state.shards) or not state.ready
            limit = self.stall_s if state.ready else self.pool.start_limit_s
            stalled = busy and limit is not None and now - state.moved > limit
            silent = state.opened and now - state.heard > self.silent_s
            if state.killed is None and (stalled or silent):
                state.killed = now
                self.pool.kill(worker)
            elif state.killed is not None and now - state.killed > self.grace_s:
                self._on_died(worker, {"event": "died", "reason": "no sign of life"})

    # ---- shards ----

    def _feed(self) -> None:
        """Gives shards to workers that have room; what a worker died of before is given alone."""
        many = len(self._waiting) > AHEAD * self.workers
        for worker, state in self._states.items():
            if not state.ready:
                continue
            most = AHEAD if many else LAST_AHEAD
            while (
                len(state.shards) - len(state.computed) < most
                and len(state.shards) < IN_HAND
                and not any(i in self._deaths for i in state.shards)
            ):
                if self._suspects:
                    if state.shards:
                        break
                    index = self._suspects.popleft()
                elif self._waiting:
                    index = self._waiting.popleft()
                else:
                    break
                if not state.shards:
                    state.moved = monotonic()
                state.shards.append(index)
                self.pool.send(
                    worker,
                    {"command": "run", "shard": vars(self._shards[index]),
                     "attempt": self._next_attempt()},
                )  # fmt: skip

    def _add_up(self) -> None:
        beats = [*self._past, *(s.beat for s in self._states.values() if s.beat is not None)]
        self.counts.images = sum(beat["images"] for beat in beats)
        self.counts.errors = sum(beat["errors"] for beat in beats)
        self.counts.peak_bytes = max(beat["peak_bytes"] for beat in beats)
        self.counts.cpu_s = sum(beat["cpu_s"] for beat in beats)
        for name, stage in self.counts.stages.items():
            for key in stage:
                stage[key] = sum(beat["stages"][name][key] for beat in beats)
