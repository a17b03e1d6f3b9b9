"""partial_means: means over the spatial tiles of an image, which add up to the mean of the whole image."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, float64, need, record


@record
class PartialMeans(Operator):
    """Input: x [N, H, W, C]. Output: [N, parts, 1, C], of boxes row after row; those at the ends are cut off.

    Attributes:
        box: rows and columns of a box.
    """

    kind: ClassVar[str] = "partial_means"
    box: tuple[int, int]

    def _tiles(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.box[0]), -(-columns // self.box[1])

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        if len(x.shape) != 4 or min(self.box) < 1:
            raise InputError(
                f"expected images of 4 dimensions and boxes of positions, found {list(x.shape)} and "
                f"{list(self.box)}"
            )
        images, rows, columns, channels = x.shape
        down, across = self._tiles(rows, columns)
        return (((images, down * across, 1, channels), x.dtype),)

    def reference(self, x):
        images, rows, columns, channels = x.shape
        (high, wide), (down, across) = self.box, self._tiles(rows, columns)
        full = np.zeros((images, down * high, across * wide, channels))
        full[:, :rows, :columns] = float64(x)
        boxes = full.reshape(images, down, high, across, wide, channels).sum((2, 4))
        return boxes.reshape(images, down * across, 1, channels) / (rows * columns)
