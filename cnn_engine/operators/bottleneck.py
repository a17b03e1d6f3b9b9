"""bottleneck: y = activation(conv2d(e, last) + its bias + residual), e = inner(conv2d(x, window) + its bias)

A residual block's convolution of a window, or of 1x1 as in ConvNeXt, and the one of 1x1 behind it, over
images [N, H, W, C]; and the one of 1x1 that the next block begins with: after(conv2d(y, next) + its bias).
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

    And with ``reduces``: next [L, K, 1, 1]; None or: its bias. The outputs are y [N, OH, OW, K] and then
    [N, OH, OW, L].

    Attributes:
        stride, padding, dilation: of the first convolution: see Conv2d.
        inner: what is applied to its sums, or None.
        activation: what is applied to those of the second one, or None.
        reduces: whether there is a third one.
        after: what is applied to its sums, or None.
        compute_dtype: what the weights may be rounded to; the reference rounds nothing.
    """

    kind: ClassVar[str] = "bottleneck"
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    inner: Unary | None = None
    activation: Unary | None = None
    reduces: bool = False
    after: Unary | None = None
    compute_dtype: str = "float32"

    def _convolutions(self, inputs) -> list[tuple[Conv2dNhwc, list]]:
        """Returns each convolution with its weights, bias and residual."""
        _, window, last, bias, last_bias, residual, *more = (*inputs, None, None, None)[
            : 8 if self.reduces else 6
        ]
        first = Conv2dNhwc(self.stride, self.padding, self.dilation, activation=self.inner)
        found = [
            (first, [window, bias]),
            (Conv2dNhwc(activation=self.activation), [last, last_bias, residual]),
        ]
        if self.reduces:
            found.append((Conv2dNhwc(activation=self.after), more))
        return found

    def _values(self, inputs):
        """Returns each convolution, its inputs and its output, as values."""
        x, found = inputs[0], []
        for op, given in self._convolutions(inputs):
            ((shape, dtype),) = op.infer([x, *given])
            found.append((op, [x, *given], y := type(x)("", shape, dtype)))
            x = y
        return found

    def infer(self, inputs):
        need(inputs, 3, 8)
        if self.reduces != any(inputs[6:7]):
            expected, found = ("one", "none") if self.reduces else ("none", "one")
            raise InputError(f"next: expected {expected}, found {found}")
        _, *products = self._values(inputs)
        for _, (_, weight, *_), _ in products:
            if weight.shape[2:] != (1, 1):
                raise InputError(f"expected a kernel of 1x1, found {list(weight.shape)}")
        return tuple((y.shape, y.dtype) for _, _, y in products)

    def reference(self, x, *inputs):
        found = [x]
        for op, given in self._convolutions((x, *inputs)):
            found.append(op.reference(found[-1], *given))
        return tuple(found[2:]) if self.reduces else found[2]

    def flops(self, inputs, outputs) -> int:
        return sum(op.flops(given, [y]) for op, given, y in self._values(inputs))

    def terms(self, inputs) -> int:
        return max(op.terms(given) for op, given, _ in self._values(inputs))
