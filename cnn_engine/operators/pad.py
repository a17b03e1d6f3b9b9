"""pad: x with elements added around it, or taken away where a pad is negative."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, need, record

_MODES = {"constant": "constant", "edge": "edge", "reflect": "reflect", "wrap": "wrap"}


@record
class Pad(Operator):
    """Input: x of any shape and type.

    Attributes:
        pads: before every dimension, then after every dimension; negative ones crop.
        mode: what is added: ``constant``; ``edge`` repeats the border; ``reflect`` mirrors at it without
            repeating it; ``wrap`` goes on at the other side.
        value: the constant.
    """

    kind: ClassVar[str] = "pad"
    pads: tuple[int, ...]
    mode: str = "constant"
    value: float = 0.0

    def infer(self, inputs):
        need(inputs, 1)
        shape = inputs[0].shape
        rank = len(shape)
        if self.mode not in _MODES:
            raise InputError(f"mode: expected one of {', '.join(_MODES)}, found {self.mode}")
        if len(self.pads) != 2 * rank:
            raise InputError(f"pads: expected {2 * rank} numbers, found {len(self.pads)}")
        sizes = []
        for axis, size in enumerate(shape):
            before, after = self.pads[axis], self.pads[rank + axis]
            left = size + min(before, 0) + min(after, 0)
            longest = max(before, after, 0)
            if left < 0 or (longest > 0 and self.mode != "constant" and left < 1):
                raise InputError(f"pads: expected some of {list(shape)} left, found {self.pads}")
            sizes.append(size + before + after)
        return ((tuple(sizes), inputs[0].dtype),)

    def positions(self, size: int, axis: int) -> np.ndarray:
        """Returns the position in x of each position along ``axis`` of the output; -1 is the constant.

        Args:
            size: x's along ``axis``.
        """
        rank = len(self.pads) // 2
        before, after = self.pads[axis], self.pads[rank + axis]
        kept = np.arange(max(0, -before), size + min(after, 0), dtype=np.int64)
        width = (max(before, 0), max(after, 0))
        if self.mode == "constant":
            return np.pad(kept, width, constant_values=-1)
        return np.pad(kept, width, mode=_MODES[self.mode])

    def reference(self, x):
        x = np.asarray(x)
        outside = np.zeros((1,) * x.ndim, bool)
        for axis, size in enumerate(x.shape):
            positions = self.positions(size, axis)
            missing = (positions < 0).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            if size:
                x = np.take(x, np.maximum(positions, 0), axis=axis)
            else:
                x = np.zeros([*x.shape[:axis], len(positions), *x.shape[axis + 1 :]], x.dtype)
            outside = outside | missing
        return np.where(outside, np.asarray(self.value).astype(x.dtype), x)
