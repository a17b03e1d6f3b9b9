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
        through: ``"float16"`` or ``"bfloat16"``: floats are rounded to that type, half to even, before they
            become ``dtype``; empty: they are not.
    """

    kind: ClassVar[str] = "cast"
    dtype: str
    through: str = ""

    def infer(self, inputs):
        need(inputs, 1)
        return ((inputs[0].shape, self.dtype),)

    def reference(self, x):
        x = np.asarray(x)
        with np.errstate(all="ignore"):  # what does not fit has no defined value
            if self.through == "bfloat16":
                x = _bfloat16(x)
            elif self.through:
                x = x.astype(self.through)
            return float64(x.astype(self.dtype))


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Returns ``x`` rounded to bfloat16, half to even, as float32."""
    x = x.astype(np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))
