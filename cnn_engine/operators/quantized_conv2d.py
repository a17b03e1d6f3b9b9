"""quantized_conv2d: a convolution of integers, which rounds its sums to 8 bits as it stores them.

    total[n,k,i,j] = bias[k] + sum over c,r,s of (x[n,c,...] - x_zero) * (w[k,c,r,s] - w_zero[k])   int32
    v = float32(total) * scale[k]                                                                    float32
    v = float32(clip(round_half_even(v), *inner)) * inner_scale    where it is rounded before the residual
    v = v + float32(residual - residual_zero) * residual_scale     where there is a residual
    y = clip(round_half_even(v) + y_zero, low, high)
    y = table[y]                                                   where there is a table, by y's bits

The sum is exact (int32, modulo 2^32), and the float32 product and sum are rounded one by one: no fused
multiply-add. So every device, batch and number of threads makes equal bits. ``scale[k]`` is
x_scale * w_scale[k] / y_scale, and ``residual_scale`` is the residual's scale / y_scale. Padding is x_zero,
which stands for 0.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .channels_last import TO_FIRST, TO_LAST, reordered
from .conv2d import Conv2d
from .operator import Value, need, record
from .quantized import EIGHT_BITS, Integers, Lookup, check_parameter, exact, saturated
from .windows import Padding, Pair, padded, windows

#: Where a convolution's table and inner scale stand among its inputs.
TABLE, INNER_SCALE = 10, 11


@record
class QuantizedConv2d(Integers):
    """Inputs, of which those from scale on may be None:

    0. x [N, C, H, W], int8 or uint8
    1. weight [K, C / groups, R, S], int8 or uint8; of lowered graphs always int8
    2. scale float32, [K] or, where it is computed, one number; None where the output is int32
    3. bias [K] int32, in steps of x_scale * w_scale[k]
    4. x_zero, one number of x's type
    5. w_zero, one number or [K], of the weight's type
    6. y_zero, one number of the output's type
    7. residual like the output, int8 or uint8
    8. residual_scale, one float32
    9. residual_zero, one number of the residual's type
    10. table [256], int8 or uint8, as of :class:`.quantized.Lookup`: a function of y
    11. inner_scale, one float32; with a residual, where there is ``inner``

    Numbers that are absent are 0. Output [N, K, OH, OW] of ``dtype``, with a table of the table's type:
    :class:`.quantized.Integers` has what int32 and float32 are. A residual or a table needs 8 bits.

    Attributes:
        stride, dilation: rows and columns.
        padding: x_zero above, on the left, below, on the right.
        groups: channels and filters are in so many groups that do not see each other.
        inner: the least and the largest integer to which a sum is rounded before a residual is added.
    """

    kind: ClassVar[str] = "quantized_conv2d"
    stride: Pair = (1, 1)
    padding: Padding = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    inner: tuple[int, int] | None = None

    def infer(self, inputs):
        need(inputs, 2, 12)
        x, weight, scale, bias, x_zero, w_zero, y_zero, *residual, table, inner = padded_inputs(
            inputs, 12
        )
        for name, value in (("input", x), ("weight", weight)):
            if value.dtype not in EIGHT_BITS:
                raise InputError(f"{name}: expected int8 or uint8, found {value.dtype}")
        plain = Conv2d(self.stride, self.padding, self.dilation, self.groups)
        floats = [Value(value.name, value.shape) for value in (x, weight)]
        ((shape, _),) = plain.infer(floats)
        filters = weight.shape[:1]
        check_parameter("scale", scale, "float32", filters, (), (1,))
        check_parameter("bias", bias, "int32", filters)
        check_parameter("x_zero", x_zero, x.dtype, (), (1,))
        check_parameter("w_zero", w_zero, weight.dtype, (), (1,), filters)
        self.check_output(scale, y_zero)
        check_residual(residual, shape, self.dtype)
        self._check_inner(inner, residual[0])
        if table is None:
            return ((shape, self.dtype),)
        if self.dtype not in EIGHT_BITS or table.dtype not in EIGHT_BITS or table.shape != (256,):
            found = f"{table.dtype} {list(table.shape)} after {self.dtype}"
            raise InputError(f"table: expected [256] of 8 bits after 8 bits, found {found}")
        return ((shape, table.dtype),)

    def reference(self, *arrays):
        x, weight, scale, bias, x_zero, w_zero, y_zero, *residual, table, inner = padded_inputs(
            arrays, 12
        )
        if w_zero is not None:
            w_zero = w_zero.reshape(-1, 1, 1, 1)
        weight = exact(weight, w_zero)
        view = windows(
            padded(exact(x, x_zero), self.padding), weight.shape[2:], self.stride, self.dilation
        )
        parts = [
            np.moveaxis(np.tensordot(part, filters, axes=((1, 4, 5), (1, 2, 3))), -1, 1)
            for part, filters in zip(
                np.split(view, self.groups, axis=1), np.split(weight, self.groups), strict=True
            )
        ]
        total = parts[0] if self.groups == 1 else np.concatenate(parts, axis=1)
        if bias is not None:
            total = total + bias.reshape(-1, 1, 1)
        scale = None if scale is None else scale.reshape(-1, 1, 1)
        if inner is None:
            y = self.finished(total, scale, y_zero, scaled(*residual))
        else:
            rounded = Integers("float32").finished(total, scale, None)
            rounded = saturated(rounded.astype(np.float32), None, "int16", *self.inner)
            v = scaled(rounded, inner, None) + scaled(*residual)
            zero = None if y_zero is None else y_zero.reshape(())
            y = saturated(v, zero, self.dtype, self.low, self.high)
        return y if table is None else Lookup().reference(y, table)

    def _check_inner(self, scale: Value | None, residual: Value | None) -> None:
        if self.inner is None and scale is None:
            return
        if self.inner is None or scale is None or residual is None:
            raise InputError(
                "inner: expected a range, its scale and a residual, found some of them"
            )
        check_parameter("inner_scale", scale, "float32", (), (1,))
        if not -255 <= self.inner[0] <= self.inner[1] <= 255:
            raise InputError(f"inner: expected a range in -255 to 255, found {list(self.inner)}")

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.terms(inputs)

    def terms(self, inputs) -> int:
        return math.prod(inputs[1].shape[1:])


@record
class QuantizedConv2dNhwc(QuantizedConv2d):
    """The same over x [N, H, W, C]; the output and the residual are [N, OH, OW, K], the weight stays.

    Attributes:
        planar: whether x is [N, C, H, W], as a first layer's is.
    """

    kind: ClassVar[str] = "quantized_conv2d_nhwc"
    planar: bool = False

    def infer(self, inputs):
        need(inputs, 2, 12)
        given = list(padded_inputs(inputs, 12))
        given[0] = given[0] if self.planar else reordered(given[0], TO_FIRST)
        given[7] = reordered(given[7], TO_FIRST)
        ((shape, dtype),) = super().infer(given)
        return ((tuple(shape[axis] for axis in TO_LAST), dtype),)

    def reference(self, *arrays):
        given = list(padded_inputs(arrays, 12))
        for place in (7,) if self.planar else (0, 7):
            if given[place] is not None:
                given[place] = np.asarray(given[place]).transpose(TO_FIRST)
        return super().reference(*given).transpose(TO_LAST)


def padded_inputs(given: tuple | list, count: int) -> tuple:
    """Returns ``given`` with None for absent inputs at the end."""
    return (*given, *[None] * (count - len(given)))


def check_residual(residual: list[Value | None], shape: tuple[int, ...], dtype: str) -> None:
    """Raises InputError unless (residual, its scale, its zero point) fit an output, or are all absent."""
    value, scale, zero = residual
    if value is None:
        if scale is not None or zero is not None:
            raise InputError("residual: expected one where there is a scale of it, found none")
        return
    if dtype not in EIGHT_BITS:
        raise InputError(f"residual: expected an output of 8 bits, found {dtype}")
    if value.dtype not in EIGHT_BITS or value.shape != shape:
        raise InputError(
            f"residual: expected int8 or uint8 {list(shape)}, found {value.dtype} {list(value.shape)}"
        )
    if scale is None:
        raise InputError("residual_scale: expected one beside the residual, found none")
    check_parameter("residual_scale", scale, "float32", (), (1,))
    check_parameter("residual_zero", zero, value.dtype, (), (1,))


def scaled(
    residual: np.ndarray | None, scale: np.ndarray | None, zero: np.ndarray | None
) -> np.ndarray | None:
    """Returns float32(residual - zero) * scale in float32, or None where there is none."""
    if residual is None:
        return None
    with np.errstate(all="ignore"):
        return exact(residual, zero).astype(np.float32) * np.float32(np.reshape(scale, ()))
