"""Times whole passes, for the command line and for Python alike.

Two runs, never mixed. :func:`time_passes` times whole passes and nothing inside them: latency, throughput
and the forward time come from it. :func:`cnn_engine.measure.step_times.time_layers` looks into passes, which
costs time itself. Host times are of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from ..devices.energy import Energy
from ..plan.plan import Plan
from ..workload import Samples, addresses
from .result import Stop
from .statistics import CONFIDENCE, Estimate, quantile

if TYPE_CHECKING:
    from ..engine.engine import Engine

#: Called with the number of images done since the last call, between passes, outside what is timed.
Progress = Callable[[int], None]

#: Unless told how long, passes are repeated until the interval of their median is within 1 % of it, but no
#: longer than the cap; whole iterations only, so one that takes longer than the cap is run once. Not before
#: half a second and so many passes: a short stretch misses noise, and may lie in one of two speeds.
MEDIAN_WITHIN = 0.01
LEAST_S = 0.5
CAP_S = 5.0
FEWEST_PASSES = 100

#: Independent samples that an interval needs to be relied on.
FEWEST_SAMPLES = 20


@dataclass
class Passes:
    """Times of whole passes, in which no layer is timed.

    Attributes:
        full_s: the wall time of each pass of a full batch, in seconds.
        forward_s: the wall time of all passes over all images, the mean of the complete iterations.
        iterations: complete passes over all images.
        images_done: images of the first iteration; fewer than all when interrupted.
        images_total, seconds_total: of all iterations, for the throughput.
        joules: source -> energy of all iterations; empty where there is no counter.
    """

    full_s: list[float] = field(default_factory=list)
    forward_s: float = 0.0
    iterations: int = 0
    images_done: int = 0
    images_total: int = 0
    seconds_total: float = 0.0
    joules: dict[str, float] = field(default_factory=dict)
    stop: Stop | None = None
    interrupted: bool = False


def batches(
    engine: Engine,
    images: np.ndarray | Samples,
    probabilities: np.ndarray | Samples,
    batch: int,
) -> Iterator[tuple[Plan, int]]:
    """Yields a plan, bound to its images and to where its outputs go, and how many images they are."""
    for first in range(0, len(images), batch):
        part = slice(first, first + batch)
        ends = addresses(images[part]), addresses(probabilities[part])
        count = min(batch, len(images) - first)
        yield engine.plan_at(*ends, count, images.dtype), count


def time_passes(
    engine: Engine,
    images: np.ndarray | Samples,
    probabilities: np.ndarray | Samples,
    batch: int,
    *,
    warmup: int,
    iterations: int | None,
    duration_s: float | None,
    progress: Progress,
    energy: Energy | None = None,
) -> Passes:
    """Times passes over ``images``, which fills ``probabilities``.

    ``warmup`` passes are run first and not counted. All images are run until ``duration_s`` have passed; or
    else ``iterations`` times; or, when neither is given, until the interval of the median of the passes of a
    full batch is within :data:`MEDIAN_WITHIN` of it, for at most :data:`CAP_S` seconds. Ctrl-C ends early and
    keeps what was measured.
    """
    result = Passes()
    complete_s = 0.0
    reason = "interrupted"
    looks = Looks()
    try:
        done = 0
        while done < warmup:
            for plan, _ in batches(engine, images, probabilities, batch):
                plan.run()
                done += 1
                if done >= warmup:
                    break
        if energy is not None:
            energy.start()
        begin = perf_counter()
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
            if energy is not None:
                result.joules = energy.read()
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
                if elapsed_s >= LEAST_S and looks.see(result.full_s):
                    reason = (
                        "within this run, the median's 95 % interval is within "
                        f"{100 * MEDIAN_WITHIN:g} % of it"
                    )
                    break
                if elapsed_s >= CAP_S:
                    looks.count += 1
                    reason = f"the cap of {CAP_S:g} s was reached"
                    break
    except KeyboardInterrupt:
        result.interrupted = True
    interval = median_interval(result.full_s, looks.count)
    result.stop = Stop(
        reason,
        float(np.median(result.full_s)) * 1e3 if result.full_s else None,
        interval and (interval[0] * 1e3, interval[1] * 1e3),
    )
    return result


@dataclass
class Looks:
    """Decides when a repeated measurement may stop: once its median is known.

    Attributes:
        count: looks so far.
        next: samples that there are at the next one: ever more seldom, since to sort all samples after each
            pass would take longer than it.
    """

    count: int = 0
    next: int = FEWEST_PASSES

    def see(self, samples: Sequence[float]) -> bool:
        """Whether it is time to look, and the median of ``samples`` is known."""
        if len(samples) < self.next:
            return False
        self.count += 1
        self.next = len(samples) * 5 // 4
        return is_known(median(samples, self.count))


def median_interval(samples: Sequence[float], looks: int = 0) -> tuple[float, float] | None:
    """Returns an interval that holds the median with 95 % confidence; None for too few samples.

    ``looks``: as :func:`median` has it.
    """
    found = median(samples, looks) if len(samples) else Estimate(0.0)
    return (found.low, found.high) if found.known else None


def median(samples: Sequence[float], looks: int = 0) -> Estimate:
    """Returns the median of ``samples``, in the order of time, with the interval of one look of several.

    Who looks until an interval is narrow finds it narrow by chance. The intervals of all looks hold the
    median together with 95 % confidence: look k may be wrong in 5 % / (k (k + 1)), which adds up to 5 %
    however many there are. 0: the only look, at a time set beforehand. Samples may depend on each other
    (:func:`cnn_engine.measure.statistics.quantile`).
    """
    wrong = (1 - CONFIDENCE) / (looks * (looks + 1) if looks else 1)
    return quantile(samples, confidence=1 - wrong)


def is_known(found: Estimate) -> bool:
    """Whether the interval is within :data:`MEDIAN_WITHIN`, and of enough samples to rely on."""
    if not found.known or found.independent < FEWEST_SAMPLES:
        return False
    furthest = max(found.high - found.value, found.value - found.low)
    return furthest <= MEDIAN_WITHIN * found.value
