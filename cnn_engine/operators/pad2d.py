"""pad2d: y[n,c,i,j] = x[n, c, i - top, j - left] inside the image, 0 in a border around it."""

from __future__ import annotations

from typing import ClassVar

from ..errors import InputError
from .operator import Operator, float64, need, record
from .windows import Padding, padded


@record
class Pad2d(Operator):
    """Input: x [N, C, H, W].

    Attributes:
        padding: zeros above, on the left, below, on the right.
    """

    kind: ClassVar[str] = "pad2d"
    padding: Padding

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        if len(x.shape) != 4:
            raise InputError(f"expected 4 dimensions, found {list(x.shape)}")
        if len(self.padding) != 4 or min(self.padding) < 0:
            raise InputError(
                f"padding: expected 4 whole numbers of at least 0, found {list(self.padding)}"
            )
        top, left, bottom, right = self.padding
        n, c, h, w = x.shape
        return (((n, c, h + top + bottom, w + left + right), x.dtype),)

    def reference(self, x):
        return padded(float64(x), self.padding)
