"""Two convolutions over images [N, H, W, C], of as many places, as one operator:

conv2d_sum:    y = activation(conv2d(x, weight) + conv2d(other, its weight) + both biases)
conv2d_beside: y = activation([conv2d(x, weight) + bias, conv2d(other, its weight) + its bias])

The first is the last convolution of a residual block and the one that brings the block's input to its
result's shape; the second are neighbours in a concatenation of channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .channels_last import Conv2dNhwc
from .operator import Operator, Shape, need, same_dtype
from .unary import Unary


@dataclass(frozen=True)
class _Pair(Operator):
    """Inputs: x [N, H, W, C], other [N, H', W', C'], weights [K, C, R, S], [K', C', R', S']; None or: their
    biases, [K] and [K'].

    Attributes:
        first, second: of x and of other, with nothing before or after them.
        activation: what is applied to the result, or None.
        compute_dtype: what images and weights may be rounded to; the reference rounds nothing.
    """

    first: Conv2dNhwc
    second: Conv2dNhwc
    activation: Unary | None = None
    compute_dtype: str = "float32"

    def _results(self, inputs) -> tuple[Shape, Shape]:
        """Returns the shapes of what both make."""
        need(inputs, 4, 6)
        same_dtype(inputs)
        x, other, weight, other_weight, bias, other_bias = (*inputs, None, None)[:6]
        ((shape, _),) = self.first.infer([x, weight, bias])
        ((added, _),) = self.second.infer([other, other_weight, other_bias])
        return shape, added

    def flops(self, inputs, outputs) -> int:
        places = 2 * outputs[0].size // outputs[0].shape[3]
        filters = (value.shape[0] for value in inputs[2:4])
        return places * sum(k * n for k, n in zip(filters, self._terms(inputs), strict=True))

    def _terms(self, inputs) -> tuple[int, int]:
        return self.first.terms(inputs[0:3:2]), self.second.terms(inputs[1:4:2])


@dataclass(frozen=True)
class Conv2dSum(_Pair):
    """The sum of two convolutions, which have as many filters. y is [N, OH, OW, K]."""

    kind: ClassVar[str] = "conv2d_sum"

    def infer(self, inputs):
        shape, added = self._results(inputs)
        if shape != added:
            raise InputError(f"expected results of one shape, found {list(shape)}, {list(added)}")
        return ((shape, inputs[0].dtype),)

    def reference(self, x, other, weight, other_weight, bias=None, other_bias=None):
        added = self.first.reference(x, weight, bias)
        last = replace(self.second, activation=self.activation)
        return last.reference(other, other_weight, other_bias, added)

    def terms(self, inputs) -> int:
        return sum(self._terms(inputs))


@dataclass(frozen=True)
class Conv2dBeside(_Pair):
    """The filters of one convolution behind those of another. y is [N, OH, OW, K + K']."""

    kind: ClassVar[str] = "conv2d_beside"

    def infer(self, inputs):
        shape, added = self._results(inputs)
        if shape[:3] != added[:3]:
            raise InputError(
                f"expected results of as many places, found {list(shape)}, {list(added)}"
            )
        return (((*shape[:3], shape[3] + added[3]), inputs[0].dtype),)

    def reference(self, x, other, weight, other_weight, bias=None, other_bias=None):
        records = (replace(op, activation=self.activation) for op in (self.first, self.second))
        arrays = (x, weight, bias), (other, other_weight, other_bias)
        made = [op.reference(*given) for op, given in zip(records, arrays, strict=True)]
        return np.concatenate(made, axis=3)

    def terms(self, inputs) -> int:
        return max(self._terms(inputs))
