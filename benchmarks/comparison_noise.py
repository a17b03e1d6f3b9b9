"""``python -m benchmarks.comparison_noise``: how often ``compare`` is wrong, on simulated noise.

Prints the table of ``docs/comparing.md``: of pairs of identical runs the share that is called faster or
slower at a threshold of 1 %, and of pairs of which one is 10 % slower the share in which that is found.
The noise is seeded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cnn_engine.compare import comparison
from cnn_engine.measure import statistics
from cnn_engine.measure.statistics import Estimate

PASSES, PAIRS, THRESHOLD, SHIFT, SIZE = (20, 100, 1000), 400, 0.01, 0.1, 0.02

Draw = Callable[[np.random.Generator, int], np.ndarray]


def correlated(by: float) -> Draw:
    """Returns a draw of standard normal noise whose neighbours correlate (AR(1))."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        values = rng.standard_normal(count)
        for index in range(1, count):
            values[index] = by * values[index - 1] + np.sqrt(1 - by**2) * values[index]
        return values

    return draw


def stalls(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.exponential(size=count) * np.where(rng.random(count) < 0.05, 10, 1)


def slope(rng: np.random.Generator, count: int) -> np.ndarray:
    return correlated(0.9)(rng, count) + 2 * rng.standard_normal() * np.linspace(-0.5, 0.5, count)


def two_speeds(rng: np.random.Generator, count: int) -> np.ndarray:
    changes = np.cumsum(rng.random(count) < 10 / count) + rng.integers(2)
    return 1.5 * (changes % 2) + 0.25 * rng.standard_normal(count)


def walk(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.cumsum(rng.standard_normal(count)) / np.sqrt(count)


#: In units of 2 % of a pass.
NOISE: dict[str, Draw] = {
    "independent": correlated(0),
    "long tail (5 % of passes stall)": stalls,
    "neighbours correlate by 0.5": correlated(0.5),
    "neighbours correlate by 0.9": correlated(0.9),
    "the same, on a slope (8 % is two sigma)": slope,
    "two speeds, about 10 changes": two_speeds,
    "random walk": walk,
    "neighbours correlate by 0.98": correlated(0.98),
}


def as_if_independent(samples: np.ndarray) -> Estimate:
    """Returns the median with the interval that takes samples as independent, for comparison."""
    first, last = statistics._ranks(len(samples), 0.5)
    ordered = np.sort(samples)
    return Estimate(
        float(np.median(samples)), ordered[first - 1], ordered[last - 1], len(samples), len(samples)
    )


def shares(
    estimator: Callable[[np.ndarray], Estimate], draw: Draw, count: int
) -> tuple[float, float]:
    """Returns how often identical runs are told apart, and how often a slower one is found."""
    rng = np.random.default_rng(7)
    told, found = 0, 0
    for _ in range(PAIRS):
        a, b = (estimator(1 + SIZE * draw(rng, count)) for _ in range(2))
        verdicts = [
            comparison.judge(statistics.ratio(b.scaled(factor), a), THRESHOLD, False)[0]
            for factor in (1, 1 + SHIFT)
        ]
        told += verdicts[0] in (comparison.FASTER, comparison.SLOWER)
        found += verdicts[1] == comparison.SLOWER
    return told / PAIRS, found / PAIRS


def main() -> None:
    """Prints the table."""
    passes = [f"{count:,}" for count in PASSES]
    print(f"| noise | {' | '.join(passes)} | 10 % found: {' | '.join(passes)} |")
    print(f"|---{'|---' * 2 * len(PASSES)}|")
    for name, draw in NOISE.items():
        rows = [shares(statistics.quantile, draw, count) for count in PASSES]
        cells = [f"{100 * row[part]:.3g} %" for part in (0, 1) for row in rows]
        print(f"| {name} | {' | '.join(cells)} |")
    told, _ = shares(as_if_independent, correlated(0.9), 100)
    print(
        f"\nTaken as independent, neighbours that correlate by 0.9, 100 passes: {100 * told:.3g} %"
    )


if __name__ == "__main__":
    main()
