"""Functions of two numbers: y = f(a, b) for every element, shapes broadcast by NumPy's rules.

One record a function, named for it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, broadcast, check_types, float64, need, record, same_dtype


@record
class Binary(Operator):
    """Inputs: a and b, of one type and of shapes that broadcast.

    Attributes:
        types: what both may be: ``numbers``, ``integers`` or ``booleans``.
    """

    in_place: ClassVar[bool] = True
    types: ClassVar[str] = "numbers"

    @property
    def function(self) -> str:
        """The name of the function among a kernel's."""
        return self.kind

    def infer(self, inputs):
        need(inputs, 2)
        dtype = same_dtype(inputs)
        check_types(self.types, dtype)
        return ((broadcast(inputs[0].shape, inputs[1].shape), self.result(dtype)),)

    def result(self, dtype: str) -> str:
        """Returns the type of the output for inputs of ``dtype``."""
        return dtype

    def reference(self, a, b):
        with np.errstate(all="ignore"):
            return self.of(float64(a), float64(b))

    def of(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns f(a, b) for float64, or exactly for other types."""
        raise NotImplementedError


@record
class Add(Binary):
    """a + b."""

    kind: ClassVar[str] = "add"

    def of(self, a, b):
        return a + b


@record
class Sub(Binary):
    """a - b."""

    kind: ClassVar[str] = "sub"

    def of(self, a, b):
        return a - b


@record
class Mul(Binary):
    """a * b."""

    kind: ClassVar[str] = "mul"

    def of(self, a, b):
        return a * b


@record
class Div(Binary):
    """a / b; of integers, cut off towards 0."""

    kind: ClassVar[str] = "div"

    def of(self, a, b):
        if a.dtype.kind == "f":
            return a / b
        quotient = np.floor_divide(a, b)
        if a.dtype.kind == "u":
            return quotient
        return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


@record
class Pow(Binary):
    """a to the power of b; b may be of another type, the output has a's."""

    kind: ClassVar[str] = "pow"

    def infer(self, inputs):
        need(inputs, 2)
        if any(value.dtype == "bool" for value in inputs):
            raise InputError("expected numbers, found bool")
        return ((broadcast(inputs[0].shape, inputs[1].shape), inputs[0].dtype),)

    def of(self, a, b):
        if a.dtype.kind == "f":
            return np.power(a, b.astype(np.float64))
        if b.dtype.kind == "f":
            return np.power(a.astype(np.float64), b).astype(a.dtype)
        exact = np.power(a, np.maximum(b, 0).astype(a.dtype))
        return np.where(b < 0, np.power(a.astype(np.float64), b).astype(a.dtype), exact)


@record
class Min(Binary):
    """The lesser; NaN wins."""

    kind: ClassVar[str] = "min"

    def of(self, a, b):
        return np.minimum(a, b)


@record
class Max(Binary):
    """The greater; NaN wins."""

    kind: ClassVar[str] = "max"

    def of(self, a, b):
        return np.maximum(a, b)


@record
class Mod(Binary):
    """The remainder of a divided by b.

    Attributes:
        fmod: whether it has a's sign; else it has b's.
    """

    kind: ClassVar[str] = "mod"
    fmod: bool = False

    @property
    def function(self) -> str:
        return "fmod" if self.fmod else "mod"

    def of(self, a, b):
        return np.fmod(a, b) if self.fmod else np.mod(a, b)


@record
class Prelu(Binary):
    """a, or slope * a below 0; the slope broadcasts to a's shape."""

    kind: ClassVar[str] = "prelu"

    def infer(self, inputs):
        ((shape, dtype),) = super().infer(inputs)
        if shape != inputs[0].shape:
            raise InputError(
                f"slope: expected a shape that broadcasts to {list(inputs[0].shape)}, "
                f"found {list(inputs[1].shape)}"
            )
        return ((shape, dtype),)

    def of(self, a, b):
        return np.where(a < 0, a * b, a)


@record
class BitwiseAnd(Binary):
    """Bits that are in both."""

    kind: ClassVar[str] = "bitwise_and"
    types: ClassVar[str] = "integers"

    def of(self, a, b):
        return a & b


@record
class BitwiseOr(Binary):
    """Bits that are in either."""

    kind: ClassVar[str] = "bitwise_or"
    types: ClassVar[str] = "integers"

    def of(self, a, b):
        return a | b


@record
class BitwiseXor(Binary):
    """Bits that are set in exactly one of both."""

    kind: ClassVar[str] = "bitwise_xor"
    types: ClassVar[str] = "integers"

    def of(self, a, b):
        return a ^ b


@record
class BitShift(Binary):
    """a with its bits moved by b positions.

    Attributes:
        direction: ``LEFT`` or ``RIGHT``.
    """

    kind: ClassVar[str] = "bit_shift"
    types: ClassVar[str] = "integers"
    direction: str = "LEFT"

    def of(self, a, b):
        return a << b if self.direction == "LEFT" else a >> b
