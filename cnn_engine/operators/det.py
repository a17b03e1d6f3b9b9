"""det: the determinants of square matrices."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, check_types, float64, need, record


@record
class Det(Operator):
    """Input: x [..., M, M]; output [...]."""

    kind: ClassVar[str] = "det"

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("floats", x.dtype)
        if len(x.shape) < 2 or x.shape[-1] != x.shape[-2]:
            raise InputError(f"expected square matrices, found {list(x.shape)}")
        return ((x.shape[:-2], x.dtype),)

    def reference(self, x):
        return np.asarray(np.linalg.det(float64(x)))

    def terms(self, inputs) -> int:
        return max(1, inputs[0].shape[-1])
