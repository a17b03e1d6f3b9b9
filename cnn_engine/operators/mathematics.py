"""Mathematical functions of every element: roots, logarithms, rounding, trigonometry. One record each."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .operator import record
from .unary import Unary


@record
class Sqrt(Unary):
    """The square root; NaN below 0."""

    kind: ClassVar[str] = "sqrt"

    def of(self, x):
        return np.sqrt(x)


@record
class Exp(Unary):
    """e to the x."""

    kind: ClassVar[str] = "exp"

    def of(self, x):
        return np.exp(x)


@record
class Log(Unary):
    """The natural logarithm."""

    kind: ClassVar[str] = "log"

    def of(self, x):
        return np.log(x)


@record
class Abs(Unary):
    """|x|."""

    kind: ClassVar[str] = "abs"
    types: ClassVar[str] = "numbers"

    def of(self, x):
        return np.abs(x)


@record
class Neg(Unary):
    """-x."""

    kind: ClassVar[str] = "neg"
    types: ClassVar[str] = "numbers"

    def of(self, x):
        return np.negative(x)


@record
class Reciprocal(Unary):
    """1 / x."""

    kind: ClassVar[str] = "reciprocal"

    def of(self, x):
        return 1.0 / x


@record
class Floor(Unary):
    """The largest whole number up to x."""

    kind: ClassVar[str] = "floor"

    def of(self, x):
        return np.floor(x)


@record
class Ceil(Unary):
    """The smallest whole number from x."""

    kind: ClassVar[str] = "ceil"

    def of(self, x):
        return np.ceil(x)


@record
class Round(Unary):
    """The nearest whole number; halves go to the even one."""

    kind: ClassVar[str] = "round"

    def of(self, x):
        return np.rint(x)


@record
class Sign(Unary):
    """-1, 0 or 1."""

    kind: ClassVar[str] = "sign"
    types: ClassVar[str] = "numbers"

    def of(self, x):
        return np.sign(x)


@record
class Sin(Unary):
    """The sine."""

    kind: ClassVar[str] = "sin"

    def of(self, x):
        return np.sin(x)


@record
class Cos(Unary):
    """The cosine."""

    kind: ClassVar[str] = "cos"

    def of(self, x):
        return np.cos(x)


@record
class Tan(Unary):
    """The tangent."""

    kind: ClassVar[str] = "tan"

    def of(self, x):
        return np.tan(x)


@record
class Asin(Unary):
    """The inverse of the sine."""

    kind: ClassVar[str] = "asin"

    def of(self, x):
        return np.arcsin(x)


@record
class Acos(Unary):
    """The inverse of the cosine."""

    kind: ClassVar[str] = "acos"

    def of(self, x):
        return np.arccos(x)


@record
class Atan(Unary):
    """The inverse of the tangent."""

    kind: ClassVar[str] = "atan"

    def of(self, x):
        return np.arctan(x)


@record
class Sinh(Unary):
    """The hyperbolic sine."""

    kind: ClassVar[str] = "sinh"

    def of(self, x):
        return np.sinh(x)


@record
class Cosh(Unary):
    """The hyperbolic cosine."""

    kind: ClassVar[str] = "cosh"

    def of(self, x):
        return np.cosh(x)


@record
class Asinh(Unary):
    """The inverse of the hyperbolic sine."""

    kind: ClassVar[str] = "asinh"

    def of(self, x):
        return np.arcsinh(x)


@record
class Acosh(Unary):
    """The inverse of the hyperbolic cosine."""

    kind: ClassVar[str] = "acosh"

    def of(self, x):
        return np.arccosh(x)


@record
class Atanh(Unary):
    """The inverse of the hyperbolic tangent."""

    kind: ClassVar[str] = "atanh"

    def of(self, x):
        return np.arctanh(x)
