"""Noise as timings have it, for the tests of statistics."""

from __future__ import annotations

import math

import numpy as np


def noise(count: int, correlation: float, rng: np.random.Generator) -> np.ndarray:
    """Standard normal noise; neighbours correlate by ``correlation`` (AR(1))."""
    fresh = rng.standard_normal(count)
    values = np.empty(count)
    values[0] = fresh[0]
    for index in range(1, count):
        values[index] = (
            correlation * values[index - 1] + math.sqrt(1 - correlation**2) * fresh[index]
        )
    return values
