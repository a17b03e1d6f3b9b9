"""Inputs of a kernel under test, their reference, and the comparison."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

import numpy as np

from ..engine.check import differences, tolerance
from ..graph import reference
from .cases import Case
from .memory import POISON
from .process import Fault

#: Units in the last place that a function of the C library may be off, beside the rounding of sums.
FUNCTION_ULPS = 8 * 2.0**-23

#: Bytes of the sets of inputs and outputs of a timed series; fewer sets where they would need more.
MOST_SETS_BYTES = 384 << 20

#: Outputs of a timed series that are compared with the reference; which, the kernel cannot know.
COMPARED = 3


@dataclass(frozen=True)
class Wanted:
    """Inputs of a case, and the expected outputs.

    Attributes:
        inputs: name -> array.
        y: the reference, float64, or None where it is not compared.
        allowed: the tolerance of every element, or None.
    """

    inputs: dict[str, np.ndarray]
    y: np.ndarray | None = None
    allowed: np.ndarray | None = None


def wanted(case: Case, generator: np.random.Generator, compare: bool = True) -> Wanted:
    """Returns fresh inputs, with their reference where they are to be compared."""
    inputs = case.arrays(generator)
    y = None
    if compare:
        (y,) = reference.reference(case.graph, inputs).values()
    return Wanted(inputs, y)


def slack(given: Wanted, case: Case, computes: str) -> float:
    """Returns how far rounding may take an output, where products are rounded to ``computes``."""
    (found,) = tolerance(case.graph, given.inputs, {"y": given.y}, computes).values()
    return found


def room(allowed: float, y: np.ndarray) -> np.ndarray:
    """Returns the tolerance of every element."""
    with np.errstate(invalid="ignore"):
        return allowed + FUNCTION_ULPS * np.abs(np.where(np.isfinite(y), y, 0.0))


def judged(case: Case, generator: np.random.Generator, computes: str) -> Wanted:
    """Returns fresh inputs with their reference and its tolerance."""
    given = wanted(case, generator)
    return replace(given, allowed=room(slack(given, case, computes), given.y))


@dataclass
class Series:
    """Fresh inputs for a series of timed calls, the same for all kernels that are ranked.

    Attributes:
        case: the case.
        sets: as many as there are calls, or fewer where memory is short; some with their reference.
    """

    case: Case
    sets: list[Wanted] = field(default_factory=list)

    @property
    def first(self) -> Wanted:
        """A set that has its reference."""
        return next(given for given in self.sets if given.y is not None)

    def within(self, allowed: float) -> Series:
        """Returns the same inputs with another tolerance."""
        return Series(
            self.case,
            [g if g.y is None else replace(g, allowed=room(allowed, g.y)) for g in self.sets],
        )

    @staticmethod
    def make(case: Case, calls: int) -> Series:
        """Returns ``calls`` sets where memory allows, from numbers that nobody can know beforehand.

        The tolerance is missing: :meth:`within`.
        """
        generator = np.random.default_rng(secrets.randbits(128))
        nbytes = sum(v.nbytes for v in case.graph.inputs) + 4 * int(np.prod(case.outputs))
        count = max(min(calls, MOST_SETS_BYTES // max(nbytes, 1)), 2)
        compared = set(generator.choice(count, min(COMPARED, count), replace=False).tolist())
        return Series(case, [wanted(case, generator, i in compared) for i in range(count)])


def judge_output(found: np.ndarray, given: Wanted, case: Case) -> float:
    """Returns the largest difference of an output from its reference.

    Raises:
        Fault: it is beyond the tolerance; names the first wrong element with both values.
    """
    exact = given.y
    difference = differences(found, exact)
    wrong = ~(difference <= given.allowed)  # NaN is wrong
    if not wrong.any():
        return float(difference.max(initial=0.0))
    standings = np.argwhere(wrong)
    first = tuple(int(i) for i in standings[0])
    unwritten = found.view(np.uint32) == POISON
    value = "nothing written" if unwritten[first] else f"{found[first]:.6g}"
    text = (
        f"wrong: {case.label}: y{list(first)}: expected {exact[first]:.6g}, found {value} "
        f"({len(standings):,} of {found.size:,} elements differ"
    )
    if found.ndim == 4 and len(standings) < found.size:
        rows, columns = found.shape[2:]
        i, j = standings[:, 2], standings[:, 3]
        border = (i == 0) | (i == rows - 1) | (j == 0) | (j == columns - 1)
        if border.all() and rows > 2 and columns > 2:
            text += ", all of them at the image's border"
    return _raise(text + ")")


def _raise(text: str) -> float:
    raise Fault(text)
