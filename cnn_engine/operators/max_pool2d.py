"""max_pool2d: y[n,c,i,j] = max over r < R, s < S of x[n, c, i*SH + r*DH - top, j*SW + s*DW - left]

Places outside the image do not take part; NaN wins.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, float64, need, record
from .windows import Padding, Pair, check_image, output_sizes, padded, windows


@record
class MaxPool2d(Operator):
    """Input: x [N, C, H, W].

    Attributes:
        kernel, stride, dilation: rows and columns.
        padding: rows and columns outside the image: above, on the left, below, on the right.
        indices: None, or ``row`` or ``column``: a second output, int64, says where each maximum was: its
            place in the whole tensor, counted with the last or the first image dimension running fastest. Of
            several it is the first in the window, of NaNs the last, as in PyTorch; -1 where a window has no
            place in the image.
    """

    kind: ClassVar[str] = "max_pool2d"
    rank: ClassVar[int] = 2
    kernel: Pair
    stride: Pair
    padding: Padding = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    indices: str | None = None

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        if len(x.shape) != 2 + self.rank:
            raise InputError(f"expected {2 + self.rank} dimensions, found {list(x.shape)}")
        positions = output_sizes(x.shape[2:], self.kernel, self.stride, self.padding, self.dilation)
        check_image("input", x.shape, self.padding)
        shape = (*x.shape[:2], *positions)
        return ((shape, x.dtype), (shape, "int64"))[: 1 if self.indices is None else 2]

    def reference(self, x):
        x = float64(x)
        lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
        view = self._windows(padded(x, self.padding, lowest))
        y = view.max(axis=-1)
        if self.indices is None:
            return y
        sizes = x.shape[2:]
        order = "C" if self.indices == "row" else "F"
        numbers = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes, order=order)
        planes = np.arange(math.prod(x.shape[:2]), dtype=np.int64).reshape(*x.shape[:2])
        positions = planes.reshape(*x.shape[:2], *[1] * self.rank) * math.prod(sizes) + numbers
        at = self._windows(padded(positions, self.padding, -1))
        chosen = ((view == y[..., None]) & (at >= 0)).argmax(axis=-1)  # x may hold the lowest, too
        missing = np.isnan(view)
        last = missing.shape[-1] - 1 - missing[..., ::-1].argmax(axis=-1)
        chosen = np.where(np.isnan(y), last, chosen)
        return y, np.take_along_axis(at, chosen[..., None], axis=-1)[..., 0]

    def _windows(self, x: np.ndarray) -> np.ndarray:
        """Returns [N, C, positions..., taps]."""
        view = windows(x, self.kernel, self.stride, self.dilation)
        return view.reshape(*view.shape[: 2 + self.rank], math.prod(self.kernel))


@record
class MaxPool3d(MaxPool2d):
    """max_pool2d over images with depth: x [N, C, D, H, W]."""

    kind: ClassVar[str] = "max_pool3d"
    rank: ClassVar[int] = 3
    padding: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1, 1)
