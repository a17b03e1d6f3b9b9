"""Comparisons and logic: boolean outputs, shapes broadcast as in NumPy."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .binary import Binary
from .operator import need, record
from .unary import Unary


@record
class Comparison(Binary):
    """Inputs: a and b, numbers of one type; output bool."""

    in_place: ClassVar[bool] = False

    def result(self, dtype):
        return "bool"


@record
class Equal(Comparison):
    """a == b; booleans too."""

    kind: ClassVar[str] = "equal"

    def infer(self, inputs):
        need(inputs, 2)
        logical = inputs[0].dtype == inputs[1].dtype == "bool"
        return And().infer(inputs) if logical else super().infer(inputs)

    def of(self, a, b):
        return a == b


@record
class Less(Comparison):
    """a < b."""

    kind: ClassVar[str] = "less"

    def of(self, a, b):
        return a < b


@record
class LessOrEqual(Comparison):
    """a <= b."""

    kind: ClassVar[str] = "less_or_equal"

    def of(self, a, b):
        return a <= b


@record
class Greater(Comparison):
    """a > b."""

    kind: ClassVar[str] = "greater"

    def of(self, a, b):
        return a > b


@record
class GreaterOrEqual(Comparison):
    """a >= b."""

    kind: ClassVar[str] = "greater_or_equal"

    def of(self, a, b):
        return a >= b


@record
class And(Binary):
    """Both."""

    kind: ClassVar[str] = "and"
    types: ClassVar[str] = "booleans"

    def of(self, a, b):
        return a & b


@record
class Or(Binary):
    """Either."""

    kind: ClassVar[str] = "or"
    types: ClassVar[str] = "booleans"

    def of(self, a, b):
        return a | b


@record
class Xor(Binary):
    """Whether exactly one of both is true."""

    kind: ClassVar[str] = "xor"
    types: ClassVar[str] = "booleans"

    def of(self, a, b):
        return a ^ b


@record
class Not(Unary):
    """The other boolean."""

    kind: ClassVar[str] = "not"
    types: ClassVar[str] = "booleans"

    def of(self, x):
        return ~x


@record
class BitwiseNot(Unary):
    """All bits turned."""

    kind: ClassVar[str] = "bitwise_not"
    types: ClassVar[str] = "integers"

    def of(self, x):
        return ~x


@record
class IsNaN(Unary):
    """Whether x is not a number; output bool."""

    kind: ClassVar[str] = "is_nan"
    in_place: ClassVar[bool] = False

    def result(self, dtype):
        return "bool"

    def of(self, x):
        return np.isnan(x)


@record
class IsInf(Unary):
    """Whether x is infinite; output bool.

    Attributes:
        detect_positive, detect_negative: which infinities count.
    """

    kind: ClassVar[str] = "is_inf"
    in_place: ClassVar[bool] = False
    detect_positive: bool = True
    detect_negative: bool = True

    def result(self, dtype):
        return "bool"

    def of(self, x):
        positive = np.isposinf(x) & bool(self.detect_positive)
        return positive | (np.isneginf(x) & bool(self.detect_negative))
