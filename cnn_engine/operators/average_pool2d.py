"""average_pool2d and lp_pool2d: the mean, or the p-norm, of every window of an image."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, check_types, float64, need, record
from .windows import Padding, Pair, check_image, output_sizes, padded, windows


@record
class AveragePool2d(Operator):
    """Input: x [N, C, H, W].

    Attributes:
        kernel, stride, dilation: rows and columns.
        padding: rows and columns of zeros: above, on the left, below, on the right.
        extra: rows below and columns on the right beyond the padding, so that a last window fits; they
            never count.
        count_include_pad: whether the divisor counts positions in the padding; else those in the image only.
            A window without a place to count gives 0.
    """

    kind: ClassVar[str] = "average_pool2d"
    rank: ClassVar[int] = 2
    kernel: Pair
    stride: Pair
    padding: Padding = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    extra: Pair = (0, 0)
    count_include_pad: bool = False

    @property
    def border(self) -> tuple[int, ...]:
        """Padding with the extra positions."""
        after = (a + b for a, b in zip(self.padding[self.rank :], self.extra, strict=True))
        return (*self.padding[: self.rank], *after)

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("floats", x.dtype)
        if len(x.shape) != 2 + self.rank:
            raise InputError(f"expected {2 + self.rank} dimensions, found {list(x.shape)}")
        positions = output_sizes(x.shape[2:], self.kernel, self.stride, self.border, self.dilation)
        check_image("input", x.shape, self.border)
        return (((*x.shape[:2], *positions), x.dtype),)

    def _windows(self, x: np.ndarray) -> np.ndarray:
        view = windows(x, self.kernel, self.stride, self.dilation)
        return view.reshape(*view.shape[: 2 + self.rank], math.prod(self.kernel))

    def counts(self, sizes: tuple[int, ...]) -> np.ndarray:
        """Returns the divisor at every position of an image of ``sizes``: at least 1."""
        inside = np.ones((1, 1, *sizes))
        if self.count_include_pad:
            nothing = (0,) * self.rank
            inside = padded(inside, self.padding, 1.0)
            inside = padded(inside, (*nothing, *self.extra))
        else:
            inside = padded(inside, self.border)
        return np.maximum(self._windows(inside).sum(axis=-1), 1)

    def reference(self, x):
        sums = self._windows(padded(float64(x), self.border)).sum(axis=-1)
        with np.errstate(all="ignore"):
            return sums / self.counts(x.shape[2:])

    def terms(self, inputs) -> int:
        return math.prod(self.kernel)


@record
class AveragePool3d(AveragePool2d):
    """average_pool2d over images with depth: x [N, C, D, H, W]."""

    kind: ClassVar[str] = "average_pool3d"
    rank: ClassVar[int] = 3
    padding: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1, 1)
    extra: tuple[int, ...] = (0, 0, 0)


@record
class LpPool2d(AveragePool2d):
    """(sum of |x| to the p) to the 1/p over every window; zeros outside the image."""

    kind: ClassVar[str] = "lp_pool2d"
    p: int = 2

    def infer(self, inputs):
        if self.p < 1:
            raise InputError(f"p: expected at least 1, found {self.p}")
        return super().infer(inputs)

    def reference(self, x):
        view = self._windows(padded(np.abs(float64(x)), self.border))
        return (view**self.p).sum(axis=-1) ** (1 / self.p)


@record
class LpPool3d(LpPool2d):
    """lp_pool2d over images with depth: x [N, C, D, H, W]."""

    kind: ClassVar[str] = "lp_pool3d"
    rank: ClassVar[int] = 3
    padding: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1, 1)
    extra: tuple[int, ...] = (0, 0, 0)
