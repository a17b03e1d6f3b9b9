"""cast: y = x as another type; floats become integers by cutting off, anything but 0 becomes true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .operator import Operator, float64, need


@dataclass(frozen=True)
class Cast(Operator):
    """Input: x of any shape and type.

    Attributes:
        dtype: NumPy's name of the type of the output.
    """

    kind: ClassVar[str] = "cast"
    dtype: str

    def infer(self, inputs):
        need(inputs, 1)
        return ((inputs[0].shape, self.dtype),)

    def reference(self, x):
        with np.errstate(all="ignore"):  # what does not fit has no defined value
            return float64(np.asarray(x).astype(self.dtype))
