"""Types: x as numbers of another one, or its bits as they are."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, float64, need, record


@record
class Cast(Operator):
    """Floats become integers by cutting off, anything but 0 becomes true. Input: x of any shape and type.

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


@record
class BitCast(Operator):
    """The bits of x as another type of the same size. Input: x of any shape and type.

    Attributes:
        dtype: NumPy's name of that type.
    """

    kind: ClassVar[str] = "bit_cast"
    dtype: str

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        if np.dtype(self.dtype).itemsize != np.dtype(x.dtype).itemsize:
            raise InputError(f"to: expected a type of {x.dtype}'s size, found {self.dtype}")
        return ((x.shape, self.dtype),)

    def reference(self, x):
        return np.array(x, order="C").view(self.dtype)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Returns ``x`` rounded to bfloat16, half to even, as float32."""
    x = x.astype(np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))
