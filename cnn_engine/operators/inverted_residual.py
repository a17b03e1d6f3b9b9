"""inverted_residual: y = activation(conv2d(d, third) + its bias [+ x]), d = middle(conv2d(e, second) + its
bias), e = inner(conv2d(x, first) + its bias), or x

An inverted residual block without a gate over images [N, H, W, C]: what is first makes more channels of each
place, second is of each channel by itself, third makes fewer again.
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
class InvertedResidual(Operator):
    """Inputs: x [N, H, W, C], first [K, C, 1, 1] or None, second [K, 1, R, S], third [M, K, 1, 1]; None or:
    the biases of each, [K], [K] and [M].

    The output is y [N, OH, OW, M].

    Attributes:
        stride, padding: of the second convolution: see Conv2d.
        inner, middle, activation: what is applied to the sums of each, or None.
        adds: whether x is added to the third sums.
        compute_dtype: what the weights may be rounded to; the reference rounds nothing.
    """

    kind: ClassVar[str] = "inverted_residual"
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    inner: Unary | None = None
    middle: Unary | None = None
    activation: Unary | None = None
    adds: bool = False
    compute_dtype: str = "float32"

    def _convolutions(self, inputs):
        """Returns each convolution with its weights and bias, in order."""
        _, first, second, third, *biases = (*inputs, None, None, None)[:7]
        if len(second.shape) != 4 or second.shape[1] != 1:
            raise InputError(f"second: expected [K, 1, R, S], found {list(second.shape)}")
        for name, weight in (("first", first), ("third", third)):
            if weight is not None and weight.shape[2:] != (1, 1):
                raise InputError(f"{name}: expected a kernel of 1x1, found {list(weight.shape)}")
        all_of_them = (
            (Conv2dNhwc(activation=self.inner), first, biases[0]),
            (
                Conv2dNhwc(
                    self.stride, self.padding, groups=second.shape[0], activation=self.middle
                ),
                second,
                biases[1],
            ),
            (Conv2dNhwc(activation=self.activation), third, biases[2]),
        )
        return all_of_them[first is None :]

    def _values(self, inputs):
        """Returns each convolution with its inputs, as values, and last what they make."""
        x, found = inputs[0], []
        *before, last = self._convolutions(inputs)
        for op, *weights in before:
            found.append((op, [x, *weights]))
            ((shape, dtype),) = op.infer(found[-1][1])
            x = type(x)("", shape, dtype)
        op, *weights = last
        return [*found, (op, [x, *weights, inputs[0] if self.adds else None])]

    def infer(self, inputs):
        need([inputs[0], *inputs[2:]], 3, 6)
        op, values = self._values(inputs)[-1]
        return op.infer(values)

    def reference(self, x, first, second, third, *biases):
        y = x
        *before, last = self._convolutions((x, first, second, third, *biases))
        for op, *weights in before:
            y = op.reference(y, *weights)
        op, *weights = last
        return op.reference(y, *weights, np.asarray(x) if self.adds else None)

    def flops(self, inputs, outputs) -> int:
        steps = self._values(inputs)
        made = [[values[0]] for _, values in steps[1:]] + [outputs]
        return sum(op.flops(values, after) for (op, values), after in zip(steps, made, strict=True))

    def terms(self, inputs) -> int:
        return max(op.terms(values) for op, values in self._values(inputs))
