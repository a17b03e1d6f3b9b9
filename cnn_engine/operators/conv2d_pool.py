"""conv2d_pool: y = max_pool2d(activation(conv2d(x, weight) + bias)), over images [N, H, W, C]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from .channels_last import Conv2dNhwc, MaxPool2dNhwc
from .operator import Operator, need
from .unary import Unary


@dataclass(frozen=True)
class Conv2dPool(Operator):
    """Inputs: x [N, H, W, C], weight [K, C, R, S]; None or: bias [K]. y is [N, OH, OW, K].

    Attributes:
        convolution: with nothing before or after it; where it is planar, x is [N, C, H, W].
        pool: of what is made of its sums; it has OH rows and OW columns.
        activation: what is applied to them, or None.
        compute_dtype: what images and weights may be rounded to; the reference rounds nothing.
    """

    kind: ClassVar[str] = "conv2d_pool"
    convolution: Conv2dNhwc
    pool: MaxPool2dNhwc
    activation: Unary | None = None
    compute_dtype: str = "float32"

    def infer(self, inputs):
        need(inputs, 2, 3)
        return self.pool.infer([self._made(inputs)])

    def _made(self, inputs):
        """Returns what is pooled, as a value."""
        ((shape, dtype),) = self.convolution.infer(inputs)
        return type(inputs[0])("", shape, dtype)

    def reference(self, x, weight, bias=None):
        convolution = replace(self.convolution, activation=self.activation)
        return self.pool.reference(convolution.reference(x, weight, bias))

    def flops(self, inputs, outputs) -> int:
        return self.convolution.flops(inputs, [self._made(inputs)])

    def terms(self, inputs) -> int:
        return self.convolution.terms(inputs)
