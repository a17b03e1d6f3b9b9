"""squeeze_excite: y = gate(second @ h + its bias), h = activation(first @ (mean of x's places) + its bias)

The factors by which a squeeze-and-excite block multiplies the channels of images [N, H, W, C], or the images
that it has multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import InputError
from .operator import Operator, float64, need, same_dtype
from .unary import Unary


@dataclass(frozen=True)
class SqueezeExcite(Operator):
    """Inputs: x [N, H, W, C], first [M, C, 1, 1], second [C, M, 1, 1]; None or: their biases, [M] and [C];
    parts of the mean of x's places, which add up to it, [N, parts, 1, C].

    The output is [N, 1, 1, C], or as x.

    Attributes:
        activation: what is applied to the first sums, or None.
        gate: what is applied to the second ones, or None.
        compute_dtype: what the weights may be rounded to; the reference rounds nothing.
        scales: whether the output is x times y.
        clamp: what is applied to that product, or None: relu or clip.
    """

    kind: ClassVar[str] = "squeeze_excite"
    activation: Unary | None = None
    gate: Unary | None = None
    compute_dtype: str = "float32"
    scales: bool = False
    clamp: Unary | None = None

    def infer(self, inputs):
        need(inputs, 3, 6)
        dtype = same_dtype(inputs)
        x, first, second, first_bias, second_bias, means = (*inputs, *[None] * 3)[:6]
        if len(x.shape) != 4 or not math.prod(x.shape[1:3]):
            raise InputError(f"expected images of 4 dimensions with places, found {list(x.shape)}")
        hidden, channels = first.shape[0], x.shape[3]
        for name, value, shape in (
            ("first", first, (hidden, channels, 1, 1)), ("second", second, (channels, hidden, 1, 1)),
            ("first bias", first_bias, (hidden,)), ("second bias", second_bias, (channels,)),
        ):  # fmt: skip
            if value is not None and value.shape != shape:
                raise InputError(f"{name}: expected {list(shape)}, found {list(value.shape)}")
        images = x.shape[0]
        if means is not None and (
            len(means.shape) != 4 or means.shape != (images, means.shape[1], 1, channels)
        ):
            raise InputError(
                f"means: expected [{images}, parts, 1, {channels}], found {list(means.shape)}"
            )
        return ((x.shape if self.scales else (x.shape[0], 1, 1, channels), dtype),)

    def reference(self, x, first, second, first_bias=None, second_bias=None, means=None):
        y = float64(x).mean((1, 2)) if means is None else float64(means).sum((1, 2))
        for weight, bias, function in (
            (first, first_bias, self.activation), (second, second_bias, self.gate),
        ):  # fmt: skip
            y = y @ float64(weight)[:, :, 0, 0].T
            if bias is not None:
                y = y + float64(bias)
            if function is not None:
                y = function.reference(y)
        y = y[:, None, None, :]
        if not self.scales:
            return y
        y = float64(x) * y
        return y if self.clamp is None else self.clamp.reference(y)

    def flops(self, inputs, outputs) -> int:
        x, first = inputs[:2]
        return 4 * x.shape[0] * math.prod(first.shape[:2])

    def terms(self, inputs) -> int:
        return max(inputs[1].shape[:2])
