"""The one table of tolerances, with its reasons; no test has its own.

The kernels compute in float32, the reference in float64. A sum of n products has a rounding error of at
most about n * eps * sum |x||w| in any order (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
section 3.1); with random signs it grows as sqrt(n) * eps. The bounds below take that as it is: the scale
of the sum, sum |x||w|, is computed for each element, so they tighten as well as widen with the data.
"""

from __future__ import annotations

import numpy as np

EPS = np.finfo(np.float32).eps

#: Times sqrt(n): the slack over the expected error of random signs, so that a tail event is not a failure.
SLACK = 8.0

#: exp, tanh and the division of softmax: a few units in the last place each (CUDA C++ Programming Guide,
#: "Mathematical Functions": expf 2 ulp, tanhf 2 ulp, division 0 to 2 ulp), on numbers of at most 1.
FUNCTION_ULPS = 8.0

#: Probabilities of a whole network in float32: three layers of sums; the project's own limit.
PROBABILITY = 1e-5


def sum_of_products(terms: int, magnitude: np.ndarray) -> np.ndarray:
    """The bound for sums of ``terms`` products whose absolute values sum to ``magnitude``."""
    return SLACK * np.sqrt(terms) * EPS * magnitude + np.finfo(np.float32).tiny


def softmax(x: np.ndarray) -> np.ndarray:
    """The bound for the softmax of rows ``x``: the rounding of x - max is amplified by exp."""
    finite = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=1, keepdims=True, initial=0)
    return FUNCTION_ULPS * EPS * (1 + finite) * np.ones_like(x)


def assert_close(found: np.ndarray, wanted: np.ndarray, bound, **parameters: object) -> None:
    """Asserts |found - wanted| <= bound; on failure names the worst place and all ``parameters``.

    NaN must meet NaN, and an infinity the same infinity.
    """
    assert found.shape == wanted.shape, (
        f"shape {found.shape}, expected {wanted.shape}; {parameters}"
    )
    found = np.asarray(found, np.float64)
    bound = np.broadcast_to(bound, wanted.shape)
    with np.errstate(invalid="ignore"):
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        excess = np.where(same, -np.inf, np.abs(found - wanted) - bound)
    excess = np.where(np.isnan(excess), np.inf, excess)
    if not (excess <= 0).all():
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        place = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{int((excess > 0).sum())} of {excess.size} elements differ; worst at {place}: found "
            f"{found[worst]!r}, expected {wanted[worst]!r} +- {bound[worst]:.3g}; {parameters}"
        )


def assert_same_function(found: np.ndarray, wanted: np.ndarray) -> None:
    """Asserts that two ways of computing one thing in float64 agree.

    A rewrite changes the order of sums and folds factors together: a few roundings a node, over some twenty
    nodes whose sums have up to 40 terms: 2^13 units in the last place of the largest number there is.
    """
    scale = np.abs(wanted).max(initial=1.0)
    bound = 2**13 * np.finfo(np.float64).eps * scale
    assert_close(found, wanted, bound)
