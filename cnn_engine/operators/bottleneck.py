"""bottleneck: y = activation(conv2d(e, last) + its bias + residual), e = inner(conv2d(x, window) + its bias)

A residual block's convolution of a window and the one of 1x1 behind it, over images [N, H, W, C].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import InputError
from .channels_last import Conv2dNhwc
from .operator import Operator, need
from .unary import Unary


@dataclass(frozen=True)
class Bottleneck(Operator):
    """Inputs: x [N, H, W, C], window [M, C, R, S], last [K, M, 1, 1]; None or: their biases, residual as y.

    Attributes:
        stride, padding, dilation: of the first convolution: see Conv2d.
        inner: what is applied to its sums, or None.
        activation: what is applied to those of the second one, or None.
        operands: what the weights may be rounded to; the reference rounds nothing.
    """

    kind: ClassVar[str] = "bottleneck"
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    inner: Unary | None = None
    activation: Unary | None = None
    operands: str = "float32"

    def _convolutions(self) -> tuple[Conv2dNhwc, Conv2dNhwc]:
        first = Conv2dNhwc(self.stride, self.padding, self.dilation, activation=self.inner)
        return first, Conv2dNhwc(activation=self.activation)

    def _values(self, inputs):
        """Returns the inputs of both convolutions, as values."""
        x, window, last, bias, last_bias, residual = (*inputs, None, None, None)[:6]
        ((shape, dtype),) = self._convolutions()[0].infer([x, window, bias])
        return (x, window, bias), (type(x)("", shape, dtype), last, last_bias, residual)

    def infer(self, inputs):
        need(inputs, 3, 6)
        _, after = self._values(inputs)
        if after[1].shape[2:] != (1, 1):
            raise InputError(f"last: expected a kernel of 1x1, found {list(after[1].shape)}")
        return self._convolutions()[1].infer(after)

    def reference(self, x, window, last, bias=None, last_bias=None, residual=None):
        first, second = self._convolutions()
        return second.reference(first.reference(x, window, bias), last, last_bias, residual)

    def flops(self, inputs, outputs) -> int:
        before, after = self._values(inputs)
        first, second = self._convolutions()
        return first.flops(before, after[:1]) + second.flops(after, outputs)

    def terms(self, inputs) -> int:
        before, after = self._values(inputs)
        first, second = self._convolutions()
        return max(first.terms(before), second.terms(after))
