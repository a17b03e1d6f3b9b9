"""Inputs of a kernel under test, their reference, and the comparison."""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass, replace

import numpy as np

from ..engine.check import differences, tolerance
from ..graph import reference
from .cases import Case
from .memory import POISON
from .process import Fault

#: Units in the last place that a function of the C library may be off, beside the rounding of sums.
FUNCTION_ULPS = 8 * 2.0**-23

#: Bytes of the inputs of a timed series that are kept; others are made again from their seeds.
MOST_KEPT_BYTES = 384 << 20

#: Timed calls that are compared with the reference in full. Of every other call one image is compared.
#: Which calls and which images, the kernel cannot know.
COMPARED = 3


@dataclass(frozen=True)
class Wanted:
    """Inputs of a case, and the expected outputs.

    Attributes:
        inputs: name -> array.
        y: the reference, float64.
        allowed: the tolerance of every element of ``y``, or None: not known yet.
        image: the image that ``y`` is of, or None: of all.
    """

    inputs: dict[str, np.ndarray]
    y: np.ndarray
    allowed: np.ndarray | None = None
    image: int | None = None


def wanted(case: Case, inputs: dict[str, np.ndarray], image: int | None = None) -> Wanted:
    """Returns inputs with their reference, of one image or of all."""
    part, given = (case, inputs) if image is None else case.image(inputs, image)
    (y,) = reference.reference(part.graph, given).values()
    return Wanted(inputs, y, None, image)


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
    given = wanted(case, case.arrays(generator))
    return replace(given, allowed=room(slack(given, case, computes), given.y))


class Series:
    """Fresh inputs for the calls of one case, the same for all kernels that are ranked: none is used twice.

    The first is for a check before the timed calls. They come from numbers that nobody can know beforehand.

    Args:
        case: the case.
        calls: that are timed; :data:`COMPARED` of them are compared in full.
    """

    def __init__(self, case: Case, calls: int) -> None:
        self.case, self.allowed = case, 0.0
        self._seed = secrets.randbits(128)
        generator = np.random.default_rng(secrets.randbits(128))
        full = generator.choice(calls, min(COMPARED, calls), replace=False)
        self._full = {0, *(1 + full).tolist()}
        self._images = generator
        self._made: dict[int, Wanted] = {}
        self._kept: dict[int, dict[str, np.ndarray]] = {}
        self._left = MOST_KEPT_BYTES // max(sum(v.nbytes for v in case.graph.inputs), 1)

    def __getitem__(self, number: int) -> Wanted:
        """Returns the inputs of a call with their reference and its tolerance."""
        inputs = self._kept.get(number)
        if inputs is None:
            inputs = self.case.arrays(np.random.default_rng([self._seed, number]))
            if len(self._kept) < self._left:
                self._kept[number] = inputs
        if number not in self._made:
            image = None
            if number not in self._full and self.case.images > 1:
                image = int(self._images.integers(self.case.images))
            self._made[number] = replace(wanted(self.case, inputs, image), inputs={})
        given = self._made[number]
        return replace(given, inputs=inputs, allowed=room(self.allowed, given.y))

    def within(self, computes: str) -> Series:
        """Returns the same inputs with the tolerance for products that are rounded to ``computes``."""
        found = copy.copy(self)
        found.allowed = slack(self[0], self.case, computes)
        return found


def judge_output(found: np.ndarray, given: Wanted, case: Case) -> float:
    """Returns the largest difference of an output from its reference.

    Raises:
        Fault: it is beyond the tolerance; names the first wrong element with both values.
    """
    exact = given.y
    if given.image is not None:
        found = found[given.image : given.image + 1]
    difference = differences(found, exact)
    wrong = ~(difference <= given.allowed)  # NaN is wrong
    if not wrong.any():
        return float(difference.max(initial=0.0))
    standings = np.argwhere(wrong)
    first = tuple(int(i) for i in standings[0])
    unwritten = found.view(np.uint32) == POISON
    value = "nothing written" if unwritten[first] else f"{found[first]:.6g}"
    place = [first[0] + (given.image or 0), *first[1:]] if first else []
    text = (
        f"wrong: {case.label}: y{place}: expected {exact[first]:.6g}, found {value} "
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
