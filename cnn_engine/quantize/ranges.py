"""Calibration: the range of a tensor that 8 bits cover, by minmax, percentile, entropy or mse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..types import Quantization

#: Bins between a tensor's least and greatest number.
BINS = 2048

#: What percentile keeps, in percent.
PERCENTILE = 99.99

#: The part of the numbers that entropy always keeps: it does not see how large those are that it clips.
LEAST_HELD = 0.9999

#: Ranges that mse tries on each side, down to this part of the whole.
TRIED, LEAST_PART = 40, 0.2


@dataclass
class Numbers:
    """Statistics of a tensor's numbers.

    Attributes:
        low, high: its least and greatest number.
        counts: of :data:`BINS` bins between these; None before they are counted.
        channel_sums, channel_count: along dimension 1, for means.
        channel_low, channel_high: the range of each channel.
    """

    low: float = np.inf
    high: float = -np.inf
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS))
    channel_sums: np.ndarray | float = 0.0
    channel_count: int = 0
    channel_low: np.ndarray | float = np.inf
    channel_high: np.ndarray | float = -np.inf

    def see(self, array: np.ndarray) -> None:
        """Adds numbers to the range and to the means of channels."""
        self.low, self.high = min(self.low, float(array.min())), max(self.high, float(array.max()))
        if array.ndim > 1:
            others = (0, *range(2, array.ndim))
            self.channel_sums = self.channel_sums + array.sum(axis=others, dtype=np.float64)
            self.channel_count += array.size // array.shape[1]
            self.channel_low = np.minimum(self.channel_low, array.min(axis=others))
            self.channel_high = np.maximum(self.channel_high, array.max(axis=others))

    def count(self, array: np.ndarray) -> None:
        """Adds numbers to the histogram, once the range is known."""
        if self.high > self.low:
            self.counts += np.histogram(array, BINS, (self.low, self.high))[0]

    @property
    def means(self) -> np.ndarray:
        """The mean of each channel."""
        return np.asarray(self.channel_sums) / max(self.channel_count, 1)

    @property
    def centres(self) -> np.ndarray:
        step = (self.high - self.low) / BINS
        return self.low + step * (np.arange(BINS) + 0.5)


Range = tuple[float, float]


def minmax(numbers: Numbers) -> Range:
    """Returns the whole range: the smallest and the largest number."""
    return numbers.low, numbers.high


def percentile(numbers: Numbers) -> Range:
    """Returns the range of :data:`PERCENTILE` of the numbers, half of the others on each side."""
    cumulated = np.cumsum(numbers.counts) / max(numbers.counts.sum(), 1)
    outside = (100 - PERCENTILE) / 200
    edges = np.linspace(numbers.low, numbers.high, BINS + 1)
    first = int(np.searchsorted(cumulated, outside, side="right"))
    last = int(np.searchsorted(cumulated, 1 - outside))
    return float(edges[min(first, BINS - 1)]), float(edges[min(last + 1, BINS)])


def entropy(numbers: Numbers) -> Range:
    """Returns the range in which 8 bits have the least Kullback-Leibler divergence from the numbers."""
    reach = max(abs(numbers.low), abs(numbers.high))
    counts = np.histogram(np.abs(numbers.centres), BINS, (0, reach), weights=numbers.counts)[0]
    levels = 128 if numbers.low < 0 else 256
    best, width = np.inf, BINS
    held = np.cumsum(counts) / max(counts.sum(), 1)
    first = max(levels, int(np.searchsorted(held, LEAST_HELD)) + 1)
    for kept in (*range(first, BINS, levels // 16), BINS):
        clipped = counts[:kept].copy()
        clipped[-1] += counts[kept:].sum()
        groups = np.arange(kept) * levels // kept
        held = counts[:kept] > 0
        total = np.bincount(groups, counts[:kept], levels)
        alike = np.bincount(groups, held, levels)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.where(held, (total / alike)[groups], 0)
            p, q = clipped / clipped.sum(), spread / spread.sum()
            terms = p * np.log(p / q)
        if not np.isfinite(terms[p > 0]).all():  # numbers where the 8 bits have none
            terms[(p > 0) & (q <= 0)] = p[(p > 0) & (q <= 0)] * 10
        divergence = np.nansum(terms)
        if divergence < best:
            best, width = divergence, kept
    limit = reach * width / BINS
    return max(numbers.low, -limit), min(numbers.high, limit)


def mse(numbers: Numbers) -> Range:
    """Returns the range with the least mean square error of rounding and clipping."""
    low, high = min(numbers.low, 0.0), max(numbers.high, 0.0)
    values, weights = numbers.centres, numbers.counts

    def error(low: float, high: float) -> float:
        step = max((high - low) / 255, 1e-30)
        inside = np.clip(values, low, high)
        return float((weights * ((values - inside) ** 2 + step**2 / 12)).sum())

    for _ in range(2):  # one side after the other
        parts = np.linspace(LEAST_PART, 1, TRIED)
        high = min((high * part for part in parts[::-1]), key=lambda end: error(low, end))
        low = min((low * part for part in parts[::-1]), key=lambda end: error(end, high))
    return low, high


METHODS: Mapping[str, Callable[[Numbers], Range]] = {
    "minmax": minmax, "percentile": percentile, "entropy": entropy, "mse": mse,
}  # fmt: skip


def quantization_of(found: Range, symmetric: bool) -> Quantization:
    """Returns the scale and zero point of a range: of uint8, or of int8 around 0."""
    low, high = min(found[0], 0.0), max(found[1], 0.0)
    if symmetric:
        return Quantization(np.float32(max(-low, high) / 127 or 1.0))
    scale = np.float32((high - low) / 255 or 1.0)
    return Quantization(scale, int(np.clip(np.rint(-low / float(scale)), 0, 255)))


def weight_scales(weight: np.ndarray, axis: int, least: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns the scale of each output of a weight in int8 around 0.

    Args:
        least: scales that a bias needs, so that it fits int32.
    """
    others = tuple(i for i in range(weight.ndim) if i != axis)
    largest = np.abs(weight).max(axis=others).astype(np.float64)
    scale = np.maximum(largest / 127, least)
    return np.where(scale > 0, np.maximum(scale, 1e-30), 1.0).astype(np.float32)
