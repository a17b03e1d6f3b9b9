"""reverse_sequence: the first elements of each sequence of a batch in reverse order, the rest as they are."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, need, record


@record
class ReverseSequence(Operator):
    """Inputs: x of two dimensions or more; int64 [batch], how many elements of each sequence are reversed.

    Attributes:
        batch_axis, time_axis: the dimensions of the sequences, and along them: 0 and 1 in either order.
    """

    kind: ClassVar[str] = "reverse_sequence"
    batch_axis: int = 1
    time_axis: int = 0

    def infer(self, inputs):
        need(inputs, 2)
        x, lengths = inputs
        if {self.batch_axis, self.time_axis} != {0, 1}:
            raise InputError(
                "batch_axis, time_axis: expected 0 and 1 in either order, found "
                f"{self.batch_axis} and {self.time_axis}"
            )
        if len(x.shape) < 2 or lengths.shape != x.shape[self.batch_axis : self.batch_axis + 1]:
            raise InputError(
                f"expected x [batch, time, ...] and lengths [batch], found {list(x.shape)} and "
                f"{list(lengths.shape)}"
            )
        return ((x.shape, x.dtype),)

    def reference(self, x, lengths):
        x = np.moveaxis(np.asarray(x), self.batch_axis, 0)
        y = x.copy()
        for row, length in enumerate(lengths):
            y[row, :length] = x[row, :length][::-1]
        return np.ascontiguousarray(np.moveaxis(y, 0, self.batch_axis))
