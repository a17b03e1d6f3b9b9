"""mean_linear: a linear layer of the means over images' places, of x as it is or with f before:

y[n,m] = activation(b[m] + sum over c of w[m,c] * mean over p of f(x[n,p,c]))
f(x) = max(floor, x * scale[c] + shift[c])
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .linear import Linear
from .operator import Operator, float64, need, same_dtype
from .unary import Unary


@dataclass(frozen=True)
class MeanLinear(Operator):
    """What most networks end in.

    Inputs: x [N, H, W, C], weight [M, C]; None or: bias [M], scale [C], shift [C]. Output: [N, M].

    Attributes:
        floor: the least of what is averaged, or None.
        activation: what is applied to the sum, or None.
        compute_dtype: what the weights may be rounded to; the reference rounds nothing.
    """

    kind: ClassVar[str] = "mean_linear"
    floor: float | None = None
    activation: Unary | None = None
    compute_dtype: str = "float32"

    def infer(self, inputs):
        need(inputs, 2, 5)
        dtype = same_dtype(inputs)
        x, weight, bias, scale, shift = (*inputs, *[None] * 3)[:5]
        if len(x.shape) != 4 or not math.prod(x.shape[1:3]):
            raise InputError(f"expected images of 4 dimensions with places, found {list(x.shape)}")
        channels = x.shape[3]
        if len(weight.shape) != 2 or weight.shape[1] != channels:
            raise InputError(f"weight: expected [M, {channels}], found {list(weight.shape)}")
        for name, value, size in (
            ("bias", bias, weight.shape[0]), ("scale", scale, channels), ("shift", shift, channels),
        ):  # fmt: skip
            if value is not None and value.shape != (size,):
                raise InputError(f"{name}: expected [{size}], found {list(value.shape)}")
        return (((x.shape[0], weight.shape[0]), dtype),)

    def reference(self, x, weight, bias=None, scale=None, shift=None):
        x = float64(x)
        if scale is not None:
            x = x * float64(scale)
        if shift is not None:
            x = x + float64(shift)
        if self.floor is not None:
            x = np.maximum(x, self.floor)
        given = (weight,) if bias is None else (weight, bias)
        return Linear(self.activation).reference(x.mean((1, 2)), *given)

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.terms(inputs)

    def terms(self, inputs) -> int:
        return inputs[1].shape[1]
