"""dense_layer: the convolution of 3x3 that ends a layer of a dense block, and the next layer's of 1x1:

y = inner(conv2d(e, window) + its bias)
z = activation(conv2d(max([x, y] * scale + shift, floor), next) + its bias)

over images [N, H, W, C]; [x, y] are the channels of the block so far, and those of y
(Huang et al., Densely Connected Convolutional Networks, 2017).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .channels_last import Conv2dNhwc
from .operator import Operator, need
from .unary import Unary


@dataclass(frozen=True)
class DenseLayer(Operator):
    """What is between two convolutions of 1x1 of a dense block, and the second of them.

    Inputs: x [N, H, W, C], next [L, C + K, 1, 1], window [K, M, R, S], e [N, H, W, M], scale and shift
    [C + K]; None or: the biases of window [K] and of next [L]. The outputs are y [N, H, W, K] and
    z [N, H, W, L].

    Attributes:
        padding: of the convolution of e: see Conv2d.
        inner: what is applied to its sums, or None.
        activation: what is applied to those of the one of 1x1, or None.
        floor: the least that this one reads, or None.
        compute_dtype: what the weights may be rounded to; the reference rounds nothing.
    """

    kind: ClassVar[str] = "dense_layer"
    padding: tuple[int, int, int, int] = (1, 1, 1, 1)
    inner: Unary | None = None
    activation: Unary | None = None
    floor: float | None = None
    compute_dtype: str = "float32"

    @property
    def first(self) -> Conv2dNhwc:
        return Conv2dNhwc(padding=self.padding, activation=self.inner)

    @property
    def next(self) -> Conv2dNhwc:
        return Conv2dNhwc(activation=self.activation, floor=self.floor)

    def _values(self, inputs):
        """Returns both convolutions with their inputs and what they make, as values."""
        x, weight, window, e, scale, shift, first_bias, bias = (*inputs, None, None)[:8]
        given = [e, window, first_bias]
        ((shape, dtype),) = self.first.infer(given)
        if len(x.shape) != 4 or x.shape[:3] != shape[:3]:
            raise InputError(f"x: expected {[*shape[:3], 'C']}, found {list(x.shape)}")
        if weight.shape[2:] != (1, 1):
            raise InputError(f"next: expected a kernel of 1x1, found {list(weight.shape)}")
        y = replace(e, name="", shape=shape, dtype=dtype)
        both = replace(x, name="", shape=(*x.shape[:3], x.shape[3] + shape[3]))
        after = [both, weight, bias, None, scale, shift]
        ((shape, dtype),) = self.next.infer(after)
        z = replace(e, name="", shape=shape, dtype=dtype)
        return (self.first, given, y), (self.next, after, z)

    def infer(self, inputs):
        need(inputs, 6, 8)
        return tuple((y.shape, y.dtype) for _, _, y in self._values(inputs))

    def reference(self, x, weight, window, e, scale, shift, first_bias=None, bias=None):
        y = self.first.reference(e, window, first_bias)
        both = np.concatenate((x, y), axis=-1)
        return y, self.next.reference(both, weight, bias, None, scale, shift)

    def flops(self, inputs, outputs) -> int:
        return sum(op.flops(given, [y]) for op, given, y in self._values(inputs))

    def terms(self, inputs) -> int:
        return max(op.terms(given) for op, given, _ in self._values(inputs))
