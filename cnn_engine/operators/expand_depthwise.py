"""expand_depthwise: y = activation(conv2d(e, second) + its bias), e = inner(conv2d(x, first) + its bias)

The first two convolutions of an inverted residual block, of 1x1 and of each channel by itself, over images
[N, H, W, C]; and the mean over y's places, which the gate of its squeeze-and-excite block reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .channels_last import Conv2dNhwc
from .operator import Operator, need
from .unary import Unary


@dataclass(frozen=True)
class ExpandDepthwise(Operator):
    """Inputs: x [N, H, W, C], first [K, C, 1, 1], second [K, 1, R, S]; None or: their biases, [K] each.

    The outputs are y [N, OH, OW, K] and, with ``mean``, [N, parts, 1, K].

    Attributes:
        stride, padding, dilation: of the second convolution: see Conv2d.
        inner: what is applied to the first sums, or None.
        activation: what is applied to the second ones, or None.
        mean: whether the mean over y's places is an output too.
        parts: of it, which add up: of equal numbers of y's rows, but for the last.
        compute_dtype: what the weights may be rounded to; the reference rounds nothing.
    """

    kind: ClassVar[str] = "expand_depthwise"
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    inner: Unary | None = None
    activation: Unary | None = None
    mean: bool = False
    compute_dtype: str = "float32"
    parts: int = 1

    def _convolutions(self, channels: int) -> tuple[Conv2dNhwc, Conv2dNhwc]:
        return (
            Conv2dNhwc(activation=self.inner),
            Conv2dNhwc(self.stride, self.padding, self.dilation, channels, self.activation),
        )

    def _values(self, inputs):
        """Returns the inputs of both convolutions, as values."""
        x, first, second, first_bias, second_bias = (*inputs, None, None)[:5]
        expand, _ = self._convolutions(first.shape[0])
        ((shape, dtype),) = expand.infer([x, first, first_bias])
        return (x, first, first_bias), (type(x)("", shape, dtype), second, second_bias)

    def infer(self, inputs):
        need(inputs, 3, 5)
        first, second = inputs[1:3]
        if first.shape[2:] != (1, 1):
            raise InputError(f"first: expected a kernel of 1x1, found {list(first.shape)}")
        channels = first.shape[0]
        if len(second.shape) != 4 or second.shape[:2] != (channels, 1):
            raise InputError(f"second: expected [{channels}, 1, R, S], found {list(second.shape)}")
        ((shape, dtype),) = self._convolutions(channels)[1].infer(self._values(inputs)[1])
        y = shape, dtype
        return (y, ((shape[0], self.parts, 1, channels), dtype)) if self.mean else (y,)

    def reference(self, x, first, second, first_bias=None, second_bias=None):
        expand, depthwise = self._convolutions(len(first))
        y = depthwise.reference(expand.reference(x, first, first_bias), second, second_bias)
        if not self.mean:
            return y
        rows = -(-y.shape[1] // self.parts)
        sums = [y[:, at : at + rows].sum((1, 2)) for at in range(0, self.parts * rows, rows)]
        return y, np.stack(sums, 1)[:, :, None] / (y.shape[1] * y.shape[2])

    def flops(self, inputs, outputs) -> int:
        expand, depthwise = self._convolutions(inputs[1].shape[0])
        before, after = self._values(inputs)
        return expand.flops(before, after[:1]) + depthwise.flops(after, outputs[:1])

    def terms(self, inputs) -> int:
        return max(inputs[1].shape[1], inputs[2].shape[2] * inputs[2].shape[3])
