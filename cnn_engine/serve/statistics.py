"""Statistics of a model since it was loaded: the protocol's, and those that Prometheus reads."""

from __future__ import annotations

import bisect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..locks import ForkSafeLock

if TYPE_CHECKING:
    from .batching import Job

#: Upper bounds of the histogram of latencies, in seconds.
BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip


#: Images of a pass from which on all are counted together: clients choose sizes, and each has memory here.
LARGEST = 4096


@dataclass
class Duration:
    """Number of events and their total time."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one more."""
        self.count += 1
        self.seconds += seconds

    def described(self) -> dict[str, int]:
        """Returns the duration as the protocol has it."""
        return {"count": self.count, "ns": round(self.seconds * 1e9)}


@dataclass
class Statistics:
    """Counts and durations of one model.

    Attributes:
        success, fail: from a request's arrival to its answer.
        queue: from a request's arrival to its pass; the others are of passes, for each request of one.
        compute_input, compute_infer, compute_output: inputs put together, the network, outputs taken apart.
        inferences: images; :attr:`executions` are passes.
        batches: images of a pass -> its three parts; :data:`LARGEST` stands for itself and for more.
        rejected: requests that found the queue full.
        buckets: answers by latency, of :data:`BOUNDS` and above.
        last: when the last pass ended, in milliseconds since 1970.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    inferences: int = 0
    executions: int = 0
    rejected: int = 0
    last: int = 0
    batches: dict[int, tuple[Duration, Duration, Duration]] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    _lock: ForkSafeLock = field(default_factory=ForkSafeLock)

    def failed(self, seconds: float) -> None:
        """Counts a request that was answered with an error."""
        with self._lock:
            self.fail.add(seconds)

    def ran(
        self, jobs: Sequence[Job], rows: int, start: float, ready: float, ran: float, end: float
    ) -> None:
        """Counts a pass and its requests; times are those of ``perf_counter``."""
        parts = (ready - start, ran - ready, end - ran)
        with self._lock:
            for job in jobs:
                self.success.add(end - job.arrived)
                self.queue.add(start - job.arrived)
                self.compute_input.add(parts[0])
                self.compute_infer.add(parts[1])
                self.compute_output.add(parts[2])
                self.buckets[bisect.bisect_left(BOUNDS, end - job.arrived)] += 1
            self.inferences += rows
            self.executions += 1
            self.last = time.time_ns() // 1_000_000
            size = min(rows, LARGEST)
            if size not in self.batches:
                self.batches[size] = (Duration(), Duration(), Duration())
            for duration, seconds in zip(self.batches[size], parts, strict=True):
                duration.add(seconds)

    def described(self, name: str, version: str) -> dict[str, Any]:
        """Returns the statistics as the protocol has them."""
        with self._lock:
            return {
                "name": name,
                "version": version,
                "last_inference": self.last,
                "inference_count": self.inferences,
                "execution_count": self.executions,
                "inference_stats": {
                    "success": self.success.described(),
                    "fail": self.fail.described(),
                    "queue": self.queue.described(),
                    "compute_input": self.compute_input.described(),
                    "compute_infer": self.compute_infer.described(),
                    "compute_output": self.compute_output.described(),
                },
                "batch_stats": [
                    {
                        "batch_size": rows,
                        "compute_input": parts[0].described(),
                        "compute_infer": parts[1].described(),
                        "compute_output": parts[2].described(),
                    }
                    for rows, parts in sorted(self.batches.items())
                ],
            }
