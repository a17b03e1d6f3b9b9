"""Noise of :mod:`benchmarks.truth`: made-up factors of the times of one run's passes; their median is 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
from scipy.signal import lfilter

Draw = Callable[[np.random.Generator, int], np.ndarray]


def correlated(rng: np.random.Generator, count: int, by: float = 0.9) -> np.ndarray:
    """Returns standard normal noise whose neighbours correlate (AR(1))."""
    fresh = rng.standard_normal(count) * math.sqrt(1 - by**2)
    fresh[0] /= math.sqrt(1 - by**2)
    return lfilter([1.0], [1.0, -by], fresh)


def two_speeds(rng: np.random.Generator, count: int) -> np.ndarray:
    """A clock that is throttled by 1.25 in 3 of 10 passes, for 12 in a row, and then free for 28."""
    slow = np.empty(count, bool)
    state = rng.random() < 0.3
    for index in range(count):
        slow[index] = state
        state = rng.random() >= 1 / 12 if state else rng.random() < 1 / 28
    # The median of all passes lies at the fast ones' 5 / 7.
    fast = 0.01 * statistics.NormalDist().inv_cdf(5 / 7)
    return np.where(slow, 1.25, 1.0) * np.exp(0.01 * rng.standard_normal(count) - fast)


def three_speeds(rng: np.random.Generator, count: int) -> np.ndarray:
    """Clocks 1, 1.15 and 1.35 times as slow, each for 15 passes, and then one of the others."""
    at = np.cumsum(np.where(rng.random(count) < 1 / 15, rng.integers(1, 3, count), 0))
    level = np.array([1, 1.15, 1.35])[(at + rng.integers(3)) % 3]
    return level / 1.15 * np.exp(0.01 * rng.standard_normal(count))


def bursts(rng: np.random.Generator, count: int) -> np.ndarray:
    """Another program that makes 3 of every 20 passes take 1.5 times as long."""
    burst = (np.arange(count) + rng.integers(20)) % 20 < 3
    # The median of all passes lies at the others' 10 / 17.
    fast = 0.02 * statistics.NormalDist().inv_cdf(10 / 17)
    return np.where(burst, 1.5, 1.0) * np.exp(0.02 * rng.standard_normal(count) - fast)


def drift(rng: np.random.Generator, count: int) -> np.ndarray:
    slope = 0.03 * rng.standard_normal() * np.linspace(-0.5, 0.5, count)
    return np.exp(slope + 0.02 * correlated(rng, count, 0.5))


NOISE: dict[str, Draw] = {
    "independent": lambda rng, count: np.exp(0.03 * rng.standard_normal(count)),
    "lognormal, 20 %": lambda rng, count: np.exp(0.2 * rng.standard_normal(count)),
    "correlated 0.6, 20 %": lambda rng, count: np.exp(0.2 * correlated(rng, count, 0.6)),
    "correlated 0.9": lambda rng, count: np.exp(0.03 * correlated(rng, count)),
    "two speeds": two_speeds,
    "three speeds": three_speeds,
    "bursts": bursts,
    "drift": drift,
    "heavy tails": lambda rng, count: np.exp(0.02 * rng.standard_t(2, count)),
    "steps of the clock": lambda rng, count: np.round(1 + 0.02 * rng.standard_normal(count), 2),
}
