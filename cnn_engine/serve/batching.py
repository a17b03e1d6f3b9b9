"""The queue of a model, and the threads that empty it: waiting requests go into one pass together."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Hashable
from http import HTTPStatus
from time import perf_counter

import numpy as np

from .errors import Closed, Refused
from .statistics import Statistics

Arrays = dict[str, np.ndarray]

#: Seconds that a pass may take on the event loop, which answers nothing else meanwhile: far less than the
#: second that a health check waits at least.
SHORT_S = 0.02


class Job:
    """One request in the queue.

    Args:
        inputs: name -> tensor.
        rows: images of the request: dimension 0 of its tensors.
        key: requests of one key may share a pass; None: it has a pass of its own.
        priority, timeout_s: of :class:`.protocol.Request`.
        done: is called once, with the outputs or what was raised, by a thread of the queue or, where
            :meth:`Batcher.submit` ran the request at once, by its caller's.
    """

    __slots__ = ("arrived", "deadline", "done", "inputs", "key", "priority", "rows")

    def __init__(
        self,
        inputs: Arrays,
        rows: int,
        key: Hashable,
        priority: int,
        timeout_s: float,
        done: Callable[[Arrays | BaseException], None],
    ) -> None:
        self.inputs, self.rows, self.key, self.done = inputs, rows, key, done
        self.priority = priority
        self.arrived = perf_counter()
        self.deadline = self.arrived + timeout_s if timeout_s else None


class Batcher:
    """Runs requests in passes, the most urgent first, on threads of its own.

    Args:
        runs: what runs a pass, one for each thread: name -> tensor in, name -> tensor out. May be called
            from several threads at once.
        largest: rows of a pass that several requests share at most.
        delay_s: seconds that a request waits at most for others to share its pass; 0: it shares with those
            that wait already, as they do while all threads are busy.
        queue: requests that may wait; more are refused.
        statistics: is told of every request and pass.
        local: whether a pass is work of the thread that runs it, so that it may be any thread.
    """

    def __init__(
        self,
        runs: list[Callable[[Arrays], Arrays]],
        largest: int,
        delay_s: float,
        queue: int,
        statistics: Statistics,
        local: bool = True,
    ) -> None:
        self._local = local
        self._largest, self._delay_s, self._most = largest, delay_s, queue
        self._statistics = statistics
        self._heap: list[tuple[int, int, Job]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._free, self._instances = list(runs), len(runs)
        self._last: tuple[object, float] = (None, 0.0)  # shapes of the last pass, and its seconds
        self._threads = [
            threading.Thread(target=self._work, name="serve", daemon=True) for _ in runs
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, here: bool = False) -> None:
        """Queues a request, or runs it on this thread.

        Args:
            here: run it on this thread where nothing waits or runs, requests do not wait for others, and the
                last pass had its shapes and took at most :data:`SHORT_S`. Waking a thread of the queue, and
                this one afterwards, would cost 0.1 to 0.3 ms.

        Raises:
            Refused: the queue is full, or closed.
        """
        with self._changed:
            if self._closed:
                raise Closed
            run = self._claim(job) if here else None
            if run is None:
                self._push(job)
                return
        self._run(run, [job])
        self._release(run)

    def _push(self, job: Job) -> None:
        if len(self._heap) >= self._most:
            self._statistics.rejected += 1
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{self._most} requests wait already: try again"
            )
        # Priority 0 is the usual one, behind those that a client has named.
        heapq.heappush(self._heap, (job.priority or 2**62, next(self._order), job))
        self._changed.notify()

    def _claim(self, job: Job) -> Callable[[Arrays], Arrays] | None:
        """Returns what runs a request at once; None: it is to be queued."""
        shapes, seconds = self._last
        alone = not self._heap and not self.running and not self._delay_s
        if not (alone and self._local) or seconds > SHORT_S or shapes != _shapes(job.inputs):
            return None
        return self._free.pop()

    def _release(self, run: Callable[[Arrays], Arrays]) -> None:
        with self._changed:
            self._free.append(run)
            if self._heap or self._closed:
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._heap)

    @property
    def running(self) -> int:
        """Passes that run now."""
        return self._instances - len(self._free)

    def close(self) -> None:
        """Refuses new requests, and returns when all waiting ones are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self._changed:  # a pass on the thread that brought it
            self._changed.wait_for(lambda: not self.running)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            run, jobs = found
            if jobs:
                self._run(run, jobs)
            self._release(run)

    def _next(self) -> tuple[Callable[[Arrays], Arrays], list[Job]] | None:
        """Returns the requests of the next pass and what runs it; None: the queue is closed and empty."""
        with self._changed:
            while not self._heap or not self._free:
                if self._closed and not self._heap:
                    return None
                self._changed.wait()
            run = self._free.pop()
            first = heapq.heappop(self._heap)[2]
            jobs, rows = [first], first.rows
            if first.key is not None:
                until = first.arrived + self._delay_s
                rows = self._gather(jobs, rows)
                while rows < self._largest and not self._closed:
                    left = until - perf_counter()
                    if left <= 0 or not self._changed.wait(left):
                        break
                    rows = self._gather(jobs, rows)
                if self._heap:  # of another key, or with no room here: for another thread
                    self._changed.notify()
        now = perf_counter()
        late = [job for job in jobs if job.deadline is not None and now > job.deadline]
        for job in late:
            self._statistics.failed(now - job.arrived)
            message = f"waited {now - job.arrived:.3f} s, longer than its timeout"
            job.done(Refused(HTTPStatus.GATEWAY_TIMEOUT, message))
        return run, [job for job in jobs if job not in late] if late else jobs

    def _gather(self, jobs: list[Job], rows: int) -> int:
        """Moves requests that fit from the queue to ``jobs``; returns the rows of all."""
        if not self._heap or rows >= self._largest:
            return rows
        left: list[tuple[int, int, Job]] = []
        for entry in sorted(self._heap):
            job = entry[2]
            if job.key == jobs[0].key and rows + job.rows <= self._largest:
                jobs.append(job)
                rows += job.rows
            else:
                left.append(entry)
        self._heap = left  # sorted: a heap
        return rows

    def _run(self, run: Callable[[Arrays], Arrays], jobs: list[Job]) -> None:
        """Runs one pass, and answers its requests."""
        start = perf_counter()
        inputs = jobs[0].inputs
        if len(jobs) > 1:
            inputs = {name: np.concatenate([job.inputs[name] for job in jobs]) for name in inputs}
        ready = perf_counter()
        try:
            outputs = run(inputs)
        except Exception as error:
            if len(jobs) > 1 and not isinstance(error, Refused):
                for job in jobs:  # one of them is at fault: the others are answered
                    self._run(run, [job])
                return
            for job in jobs:
                self._statistics.failed(perf_counter() - job.arrived)
                job.done(error)
            return
        ran = perf_counter()
        first, answered = 0, []
        for job in jobs:
            # Copies, so that an answer that waits for a slow client does not keep the whole pass.
            part = outputs if len(jobs) == 1 else {
                name: array[first : first + job.rows].copy() for name, array in outputs.items()
            }  # fmt: skip
            first += job.rows
            answered.append((job, part))
        rows = sum(job.rows for job in jobs)
        self._last = _shapes(inputs), ran - ready
        self._statistics.ran(jobs, rows, start, ready, ran, perf_counter())
        for job, part in answered:
            job.done(part)


def _shapes(inputs: Arrays) -> list[tuple[tuple[int, ...], np.dtype]]:
    return [(array.shape, array.dtype) for array in inputs.values()]
