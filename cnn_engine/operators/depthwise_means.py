"""depthwise_means: y = activation(conv2d(x, weight) + bias), each channel by itself, and y's means

Of images [N, H, W, C], where the gate of a squeeze-and-excite block reads the means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .channels_last import Conv2dNhwc
from .operator import Operator, need


@dataclass(frozen=True)
class DepthwiseMeans(Operator):
    """Inputs: x [N, H, W, C], weight [C, 1, R, S]; None or: bias [C].

    The outputs are y [N, OH, OW, C] and parts of its means, which add up to them, [N, parts, 1, C]: of boxes
    of ``side`` by ``side`` places, row after row of boxes.

    Attributes:
        convolution: the convolution, with nothing before it and nothing added.
        side: rows and columns of a box.
    """

    kind: ClassVar[str] = "depthwise_means"
    convolution: Conv2dNhwc
    side: int

    def _boxes(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.side), -(-columns // self.side)

    def infer(self, inputs):
        need(inputs, 2, 3)
        ((shape, dtype),) = self.convolution.infer(inputs)
        images, rows, columns, channels = shape
        down, across = self._boxes(rows, columns)
        return (shape, dtype), ((images, down * across, 1, channels), dtype)

    def reference(self, x, weight, bias=None):
        y = self.convolution.reference(x, weight, bias)
        images, rows, columns, channels = y.shape
        down, across = self._boxes(rows, columns)
        full = np.zeros((images, down * self.side, across * self.side, channels), y.dtype)
        full[:, :rows, :columns] = y
        boxes = full.reshape(images, down, self.side, across, self.side, channels).sum((2, 4))
        return y, boxes.reshape(images, down * across, 1, channels) / (rows * columns)

    def flops(self, inputs, outputs) -> int:
        return self.convolution.flops(inputs, outputs[:1])

    def terms(self, inputs) -> int:
        return self.convolution.terms(inputs)
