"""The times of a result that are compared, each with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..measure import statistics
from ..measure.result import CopyTime, LayerTime, Result
from ..measure.statistics import Estimate
from .verdicts import COPY, LAYER, PASS, SUM, THROUGHPUT

#: Of the latency of a pass; the first is what a regression of the whole pass is judged by.
PERCENTILES = (50, 90, 99)


def times(result: Result, per: str) -> dict[tuple[str, str], Estimate]:
    """Returns all that is compared, by (section, name), in the order of the report."""
    found = {}
    samples = _pass_samples(result, per)
    if len(samples):
        for percentile in PERCENTILES:
            estimate = statistics.quantile(samples, percentile / 100)
            written = (result.latency.written or {}).get(f"p{percentile}", 0.0) / 1e3
            if written > 0 < estimate.value:  # of all samples, of which some were kept
                estimate = estimate.scaled(written / _divisor(result, per) / estimate.value)
            found[PASS, f"p{percentile}"] = estimate
    rate = _throughput(result)
    if rate is not None:
        found[THROUGHPUT, "throughput"] = rate
    for step in (*result.layers, *result.copies):
        seconds = finite(step.samples_s) / _divisor(result, per)
        estimate = statistics.quantile(seconds) if len(seconds) else _point(step, result, per)
        found[LAYER if isinstance(step, LayerTime) else COPY, key_of(step)] = estimate
    if result.layers or result.copies:
        found[SUM, "sum"] = _sum(result, per)
    return found


def _pass_samples(result: Result, per: str) -> np.ndarray:
    """Returns the seconds of each pass of a full batch, or of an image of it; null ones left out."""
    samples = finite([] if result.latency is None else result.latency.samples_ms) / 1e3
    return samples / _divisor(result, per)


def _throughput(result: Result) -> Estimate | None:
    """Returns images per second: what the report says, with the interval of the passes' mean."""
    stated = result.throughput_images_per_s
    stated = stated if stated and 0 < stated < math.inf else None  # NaN fails both
    samples = _pass_samples(result, "image")
    pace = statistics.mean(samples) if len(samples) else Estimate(0.0)
    if pace.value <= 0:
        return None if stated is None else Estimate(stated)
    rate = pace.inverse()
    return rate if stated is None else rate.scaled(stated / rate.value)


def _sum(result: Result, per: str) -> Estimate:
    """Returns what all layers and copies of a pass take together."""
    steps = (*result.layers, *result.copies)
    samples = [finite(step.samples_s) for step in steps]
    if len({len(values) for values in samples}) == 1 and len(samples[0]):
        return statistics.quantile(np.sum(samples, axis=0) / _divisor(result, per))
    return Estimate(sum(_point(step, result, per).value for step in steps))


def _point(step: LayerTime | CopyTime, result: Result, per: str) -> Estimate:
    """Returns the mean over all images, for a file without samples."""
    images = result.images_done or result.dataset["images"]
    a_batch = step.seconds * result.batch / images if images else math.nan
    return Estimate(a_batch / _divisor(result, per))


def _divisor(result: Result, per: str) -> int:
    return result.batch if per == "image" else 1


def key_of(step: LayerTime | CopyTime) -> str:
    """Returns the name of a layer or a copy."""
    return step.name if isinstance(step, LayerTime) else f"{step.what} {step.direction}"


def finite(samples: Sequence[float]) -> np.ndarray:
    """Returns the samples that are numbers; null ones are NaN."""
    values = np.asarray(samples, float)
    return values[np.isfinite(values)]
