"""``where``: y = a if the condition holds, else b; the three shapes broadcast by NumPy's rules."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, broadcast, float64, need, record, same_dtype


@record
class Where(Operator):
    """Inputs: condition (bool), a, b of one type."""

    kind: ClassVar[str] = "where"

    def infer(self, inputs):
        need(inputs, 3)
        if inputs[0].dtype != "bool":
            raise InputError(f"condition: expected bool, found {inputs[0].dtype}")
        return ((broadcast(*(value.shape for value in inputs)), same_dtype(inputs[1:])),)

    def reference(self, condition, a, b):
        return np.where(condition, float64(a), float64(b))
