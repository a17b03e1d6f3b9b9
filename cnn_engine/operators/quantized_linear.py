"""quantized_linear and quantized_matmul: products of integer matrices, rounded to 8 bits as they are stored.

    total[n,m] = bias[m] + sum over f of (x[n,f] - x_zero) * (w[m,f] - w_zero[m])   int32
    y = clip(round_half_even(float32(total) * scale[m]) + y_zero, low, high)

``scale[m]`` is x_scale * w_scale[m] / y_scale. What :mod:`.quantized_conv2d` says of exactness holds here.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .matmul import Matmul
from .operator import Value, broadcast, need, record
from .quantized import EIGHT_BITS, Integers, check_parameter, exact
from .quantized_conv2d import padded_inputs


@record
class QuantizedLinear(Integers):
    """Inputs, of which those from scale on may be None:

    0. x [N, ...] taken as [N, F], int8 or uint8
    1. weight [M, F], int8 or uint8; of lowered graphs always int8
    2. scale float32, [M] or, where it is computed, one number; None where the output is int32
    3. bias [M] int32, in steps of x_scale * w_scale[m]
    4. x_zero, one number of x's type
    5. w_zero, one number or [M], of the weight's type
    6. y_zero, one number of the output's type

    Numbers that are absent are 0. Output [N, M] of ``dtype``.
    """

    kind: ClassVar[str] = "quantized_linear"

    def infer(self, inputs):
        need(inputs, 2, 7)
        x, weight, scale, bias, x_zero, w_zero, y_zero = padded_inputs(inputs, 7)
        for name, value in (("input", x), ("weight", weight)):
            if value.dtype not in EIGHT_BITS:
                raise InputError(f"{name}: expected int8 or uint8, found {value.dtype}")
        if len(x.shape) < 2 or len(weight.shape) != 2:
            raise InputError(
                f"expected rows of features and a weight of 2 dimensions, "
                f"found {list(x.shape)} and {list(weight.shape)}"
            )
        if math.prod(x.shape[1:]) != weight.shape[1]:
            raise InputError(
                f"expected a weight of {math.prod(x.shape[1:])} columns, found {list(weight.shape)}"
            )
        rows = weight.shape[:1]
        check_parameter("scale", scale, "float32", rows, (), (1,))
        check_parameter("bias", bias, "int32", rows)
        check_parameter("x_zero", x_zero, x.dtype, (), (1,))
        check_parameter("w_zero", w_zero, weight.dtype, (), (1,), rows)
        self.check_output(scale, y_zero)
        return (((x.shape[0], weight.shape[0]), self.dtype),)

    def reference(self, *arrays):
        x, weight, scale, bias, x_zero, w_zero, y_zero = padded_inputs(arrays, 7)
        weight = exact(weight, None if w_zero is None else w_zero.reshape(-1, 1))
        total = exact(x, x_zero).reshape(len(x), weight.shape[1]) @ weight.T
        total = total if bias is None else total + bias
        return self.finished(total, scale, y_zero)

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.terms(inputs)

    def terms(self, inputs) -> int:
        return inputs[1].shape[1]


@record
class QuantizedMatmul(Integers):
    """The product of a [..., I, F] and b [..., F, J] by NumPy's rules, both computed.

    Inputs: a and b, int8 or uint8; scale float32 that broadcasts with the output (None where that is int32);
    a_zero and b_zero that broadcast with a and b, such as [I, 1] and [J]; y_zero, one number. Zero points may
    be None.
    """

    kind: ClassVar[str] = "quantized_matmul"

    def infer(self, inputs):
        need(inputs, 2, 6)
        a, b, scale, a_zero, b_zero, y_zero = padded_inputs(inputs, 6)
        for name, value in (("a", a), ("b", b)):
            if value.dtype not in EIGHT_BITS:
                raise InputError(f"{name}: expected int8 or uint8, found {value.dtype}")
        ((shape, _),) = Matmul().infer([Value("a", a.shape), Value("b", b.shape)])
        for name, value, dtype, whole in (
            ("scale", scale, "float32", shape),
            ("a_zero", a_zero, a.dtype, a.shape),
            ("b_zero", b_zero, b.dtype, b.shape),
        ):
            if value is None:
                continue
            if value.dtype != dtype:
                raise InputError(f"{name}: expected {dtype}, found {value.dtype}")
            if broadcast(value.shape, whole) != whole:
                raise InputError(
                    f"{name}: expected a shape that broadcasts with {list(whole)}, "
                    f"found {list(value.shape)}"
                )
        self.check_output(scale, y_zero)
        return ((shape, self.dtype),)

    def reference(self, *arrays):
        a, b, scale, a_zero, b_zero, y_zero = padded_inputs(arrays, 6)
        total = np.asarray(np.matmul(exact(a, a_zero), exact(b, b_zero)))
        return self.finished(total, scale, y_zero)

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.terms(inputs)

    def terms(self, inputs) -> int:
        return inputs[0].shape[-1]
