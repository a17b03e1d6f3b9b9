"""stem_pool: y = max_pool2d(activation(conv2d(x, weight) + bias)), of x [N, C, H, W], y [N, OH, OW, K]

A network's first convolution and the max pool behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .channels_last import Conv2dNhwc, MaxPool2dNhwc
from .operator import Operator, need
from .unary import Unary
from .windows import Padding, Pair


@dataclass(frozen=True)
class StemPool(Operator):
    """Inputs: x [N, C, H, W], weight [K, C, R, S]; None or: bias [K].

    The output is y [N, OH, OW, K], of what the pool makes.

    Attributes:
        stride, padding: of the convolution: see Conv2d.
        activation: what is applied to its sums, or None.
        kernel, pool_stride, pool_padding: of the pool: see MaxPool2d.
        operands: what is multiplied may be rounded to it; the reference rounds nothing.
    """

    kind: ClassVar[str] = "stem_pool"
    kernel: Pair
    pool_stride: Pair
    pool_padding: Padding = (0, 0, 0, 0)
    stride: Pair = (1, 1)
    padding: Padding = (0, 0, 0, 0)
    activation: Unary | None = None
    operands: str = "float32"

    def _both(self) -> tuple[Conv2dNhwc, MaxPool2dNhwc]:
        first = Conv2dNhwc(self.stride, self.padding, activation=self.activation, planar=True)
        return first, MaxPool2dNhwc(self.kernel, self.pool_stride, self.pool_padding)

    def _between(self, inputs):
        """Returns what the convolution makes, as a value."""
        ((shape, dtype),) = self._both()[0].infer(inputs)
        return type(inputs[0])("", shape, dtype)

    def infer(self, inputs):
        need(inputs, 2, 3)
        return self._both()[1].infer([self._between(inputs)])

    def reference(self, x, weight, bias=None):
        first, second = self._both()
        return second.reference(first.reference(x, weight, bias))

    def flops(self, inputs, outputs) -> int:
        return self._both()[0].flops(inputs, [self._between(inputs)])

    def terms(self, inputs) -> int:
        return self._both()[0].terms(inputs)
