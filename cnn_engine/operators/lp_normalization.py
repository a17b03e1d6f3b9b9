"""lp_normalization: y = x / (sum over one dimension of |x|^p)^(1/p); 0 where that sum is 0."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, axis_in, check_types, float64, need, record


@record
class LpNormalization(Operator):
    """Input: x of any shape.

    Attributes:
        axis: the dimension that is summed over.
        p: 1 or 2.
    """

    kind: ClassVar[str] = "lp_normalization"
    axis: int = -1
    p: int = 2

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("floats", x.dtype)
        axis_in(self.axis, len(x.shape))
        if self.p not in (1, 2):
            raise InputError(f"p: expected 1 or 2, found {self.p}")
        return ((x.shape, x.dtype),)

    def reference(self, x):
        x = float64(x)
        norm = np.linalg.norm(x, self.p, self.axis, keepdims=True)
        return np.divide(x, norm, out=np.zeros_like(x), where=norm != 0)

    def terms(self, inputs) -> int:
        return inputs[0].shape[self.axis]
