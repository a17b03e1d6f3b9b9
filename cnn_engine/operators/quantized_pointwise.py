"""quantized_add, quantized_mul and quantized_mean: arithmetic of 8-bit tensors, rounded to 8 bits at the end.

Each makes v, float32 numbers in steps of the output, and y = clip(round_half_even(v) + y_zero, low, high).
Every operation in between is rounded to float32 by itself: no fused multiply-add.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, Shape, Value, axis_in, broadcast, need, record
from .quantized import EIGHT_BITS, check_parameter, check_range, exact, saturated
from .quantized_conv2d import padded_inputs, scaled


@record
class _EightBits(Operator):
    """Base of the records.

    Attributes:
        dtype: of the output: ``int8`` or ``uint8``.
        low, high: the range of the output; a relu's low is the zero point. None: the type's.
    """

    dtype: str = "int8"
    low: int | None = None
    high: int | None = None

    def check(self, y_zero: Value | None, *values: Value) -> None:
        """Raises InputError unless the output's type, range and zero point, and the inputs' types, fit."""
        for dtype in (self.dtype, *(value.dtype for value in values)):
            if dtype not in EIGHT_BITS:
                raise InputError(f"expected int8 or uint8, found {dtype}")
        check_range(self.dtype, self.low, self.high)
        check_parameter("y_zero", y_zero, self.dtype, (), (1,))

    def rounded(self, v: np.ndarray, y_zero: np.ndarray | None) -> np.ndarray:
        """Returns the output of float32 numbers in its steps."""
        zero = None if y_zero is None else np.reshape(y_zero, ())
        return saturated(v, zero, self.dtype, self.low, self.high)


@record
class QuantizedAdd(_EightBits):
    """v = float32(a - a_zero) * a_scale + float32(b - b_zero) * b_scale, rounded as y.

    Inputs: a, a_scale, a_zero, b, b_scale, b_zero, y_zero. a and b are int8 or uint8 and broadcast. The
    scales are one float32 each: a's and b's own divided by the output's. Zero points are one number of their
    tensor's type, or None for 0.
    """

    kind: ClassVar[str] = "quantized_add"

    def infer(self, inputs):
        need([inputs[i] for i in (0, 1, 3, 4)] if len(inputs) > 4 else inputs, 4)
        a, a_scale, a_zero, b, b_scale, b_zero, y_zero = padded_inputs(inputs, 7)
        self.check(y_zero, a, b)
        for name, scale, zero, of in (("a", a_scale, a_zero, a), ("b", b_scale, b_zero, b)):
            check_parameter(f"{name}_scale", scale, "float32", (), (1,))
            check_parameter(f"{name}_zero", zero, of.dtype, (), (1,))
        return ((broadcast(a.shape, b.shape), self.dtype),)

    def reference(self, *arrays):
        a, a_scale, a_zero, b, b_scale, b_zero, y_zero = padded_inputs(arrays, 7)
        with np.errstate(all="ignore"):
            return self.rounded(scaled(a, a_scale, a_zero) + scaled(b, b_scale, b_zero), y_zero)


@record
class QuantizedMul(_EightBits):
    """v = float32((a - a_zero) * (b - b_zero)) * scale, rounded as y.

    Inputs: a, a_zero, b, b_zero, scale, y_zero. a and b are int8 or uint8 and broadcast. The scale is one
    float32, a_scale * b_scale / y_scale; zero points are one number of their tensor's type, or None for 0.
    """

    kind: ClassVar[str] = "quantized_mul"

    def infer(self, inputs):
        need([inputs[i] for i in (0, 2, 4)] if len(inputs) > 4 else inputs, 3)
        a, a_zero, b, b_zero, scale, y_zero = padded_inputs(inputs, 6)
        self.check(y_zero, a, b)
        check_parameter("a_zero", a_zero, a.dtype, (), (1,))
        check_parameter("b_zero", b_zero, b.dtype, (), (1,))
        check_parameter("scale", scale, "float32", (), (1,))
        return ((broadcast(a.shape, b.shape), self.dtype),)

    def reference(self, *arrays):
        a, a_zero, b, b_zero, scale, y_zero = padded_inputs(arrays, 6)
        product = (exact(a, a_zero) * exact(b, b_zero)).astype(np.float32)
        with np.errstate(all="ignore"):
            return self.rounded(product * np.float32(np.reshape(scale, ())), y_zero)


@record
class QuantizedMean(_EightBits):
    """v = float32(sum of (x - x_zero)) * scale, rounded as y.

    Inputs: x, int8 or uint8; x_zero or None; scale, one float32: x_scale / (y_scale * elements summed);
    y_zero or None. The sum is int32.

    Attributes:
        axes: dimensions that are averaged over.
        keepdims: whether they stay, as 1.
    """

    kind: ClassVar[str] = "quantized_mean"
    axes: tuple[int, ...] = ()
    keepdims: bool = True

    def infer(self, inputs):
        need([inputs[i] for i in (0, 2)] if len(inputs) > 2 else inputs, 2)
        x, x_zero, scale, y_zero = padded_inputs(inputs, 4)
        self.check(y_zero, x)
        check_parameter("x_zero", x_zero, x.dtype, (), (1,))
        check_parameter("scale", scale, "float32", (), (1,))
        gone = self._gone(x.shape)
        if math.prod(x.shape[axis] for axis in gone) > 2**23:
            raise InputError("expected means of at most 2^23 elements, found more")
        kept = [
            1 if i in gone else n for i, n in enumerate(x.shape) if self.keepdims or i not in gone
        ]
        return ((tuple(kept), self.dtype),)

    def reference(self, *arrays):
        x, x_zero, scale, y_zero = padded_inputs(arrays, 4)
        total = exact(x, x_zero).sum(axis=self._gone(x.shape), keepdims=self.keepdims)
        with np.errstate(all="ignore"):
            v = total.astype(np.float32) * np.float32(np.reshape(scale, ()))
        return self.rounded(np.asarray(v), y_zero)

    def terms(self, inputs) -> int:
        shape = inputs[0].shape
        return max(1, math.prod(shape[axis] for axis in self._gone(shape)))

    def _gone(self, shape: Shape) -> tuple[int, ...]:
        return tuple(axis_in(axis, len(shape)) for axis in self.axes)
