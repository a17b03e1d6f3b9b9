"""stem_pair: two convolutions, their functions and a max pool, of x [N, C, H, W], y [N, OH, OW, K]

A network's first two convolutions and the max pool behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .channels_last import Conv2dNhwc
from .conv2d_pool import Conv2dPool
from .operator import Operator, need
from .unary import Unary


@dataclass(frozen=True)
class StemPair(Operator):
    """Inputs: x [N, C, H, W], weight [K, C, R, S], second weight [L, K, R, S]; None or: bias [K], bias [L].

    The output is y [N, OH, OW, L], of what the pool makes.

    Attributes:
        first: the first convolution, of x as it is.
        second: the second convolution and the pool.
        compute_dtype: what is multiplied may be rounded to it; the reference rounds nothing.
    """

    kind: ClassVar[str] = "stem_pair"
    first: Conv2dNhwc
    second: Conv2dPool
    compute_dtype: str = "float32"

    @property
    def inner(self) -> Unary | None:
        """What is applied to the first convolution's sums."""
        return self.first.activation

    @property
    def activation(self) -> Unary | None:
        """What is applied to the second convolution's sums."""
        return self.second.activation

    def _between(self, inputs):
        """Returns what the first convolution makes, as a value."""
        x, weight, _, *biases = inputs
        ((shape, dtype),) = self.first.infer([x, weight, *biases[:1]])
        return type(x)("", shape, dtype)

    def _behind(self, inputs):
        """Returns the inputs of the second convolution."""
        return [self._between(inputs), inputs[2], *inputs[4:5]]

    def infer(self, inputs):
        need(inputs, 3, 5)
        return self.second.infer(self._behind(inputs))

    def reference(self, x, weight, second, bias=None, second_bias=None):
        between = self.first.reference(x, weight, *([] if bias is None else [bias]))
        return self.second.reference(between, second, second_bias)

    def flops(self, inputs, outputs) -> int:
        first = self.first.flops([*inputs[:2], *inputs[3:4]], [self._between(inputs)])
        return first + self.second.flops(self._behind(inputs), outputs)

    def terms(self, inputs) -> int:
        return self.second.terms(self._behind(inputs))
