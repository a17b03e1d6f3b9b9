"""squeeze_excite: the factors of an image's channels, from the means of all of them, by two small layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import InputError
from .operator import Operator, float64, need, same_dtype
from .unary import Unary


@dataclass(frozen=True)
class SqueezeExcite(Operator):
    """y = second(w2 first(w1 mean(x) + b1) + b2), the mean over all places of an image.

    Inputs: x [N, H, W, C], w1 [S, C, 1, 1], b1 [S] or None, w2 [K, S, 1, 1], b2 [K] or None; y [N, 1, 1, K].

    Attributes:
        first, second: what is applied to the layers' sums, or None.
        operands: what the weights may be rounded to; the reference rounds nothing.
    """

    kind: ClassVar[str] = "squeeze_excite"
    first: Unary | None = None
    second: Unary | None = None
    operands: str = "float32"

    def infer(self, inputs):
        need(inputs, 2, 5)
        if len(inputs) < 4 or inputs[3] is None:
            raise InputError("w2: expected weights [K, S, 1, 1], found none")
        dtype = same_dtype(inputs)
        x, w1, b1, w2, b2 = (*inputs, None)[:5]
        if len(x.shape) != 4 or w1.shape[1:] != (x.shape[-1], 1, 1):
            raise InputError(
                f"expected images [N, H, W, C] and weights [S, C, 1, 1], "
                f"found {list(x.shape)} and {list(w1.shape)}"
            )
        if w2.shape[1:] != (w1.shape[0], 1, 1):
            raise InputError(f"expected weights [K, {w1.shape[0]}, 1, 1], found {list(w2.shape)}")
        for bias, weight in ((b1, w1), (b2, w2)):
            if bias is not None and bias.shape != weight.shape[:1]:
                raise InputError(f"bias: expected {[weight.shape[0]]}, found {list(bias.shape)}")
        return (((x.shape[0], 1, 1, w2.shape[0]), dtype),)

    def reference(self, x, w1, b1, w2, b2=None):
        y = float64(x).mean(axis=(1, 2))
        for weight, bias, function in ((w1, b1, self.first), (w2, b2, self.second)):
            y = y @ float64(weight)[:, :, 0, 0].T
            if bias is not None:
                y = y + float64(bias)
            if function is not None:
                y = function.reference(y)
        return y[:, None, None, :]

    def flops(self, inputs, outputs) -> int:
        return 2 * inputs[0].shape[0] * (inputs[1].size + inputs[3].size)

    def terms(self, inputs) -> int:
        return max(math.prod(inputs[0].shape[1:3]), inputs[1].shape[1], inputs[3].shape[1])
