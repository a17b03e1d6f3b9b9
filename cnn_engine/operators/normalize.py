"""normalize: y = x * scale + offset, from uint8 pixels to float32."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, need, record


@record
class Normalize(Operator):
    """Input: x [N, C, ...], uint8 or any other type of numbers; output float32.

    Attributes:
        scale, offset: for every channel in turn; one number stands for all.
    """

    kind: ClassVar[str] = "normalize"
    scale: tuple[float, ...] = (1.0,)
    offset: tuple[float, ...] = (0.0,)

    def infer(self, inputs):
        need(inputs, 1)
        shape = inputs[0].shape
        for name, values in (("scale", self.scale), ("offset", self.offset)):
            if len(values) != 1 and (len(shape) < 2 or len(values) != shape[1]):
                raise InputError(
                    f"{name}: expected one number or one per channel of {list(shape)}, "
                    f"found {len(values)}"
                )
        return ((shape, "float32"),)

    def reference(self, x):
        scale, offset = (
            np.asarray(values, np.float64).reshape(-1, *[1] * max(x.ndim - 2, 0))
            if len(values) > 1
            else np.float64(values[0])
            for values in (self.scale, self.offset)
        )
        return np.asarray(x, np.float64) * scale + offset
