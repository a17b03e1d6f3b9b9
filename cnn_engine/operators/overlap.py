"""Operators that put windows or maxima back into an image: Col2Im and MaxUnpool."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, check_types, float64, need, record


@record
class Col2im(Operator):
    """Windows added up where they overlap. Input: x [N, C * taps, windows]; output [N, C, image...].

    Attributes:
        image, kernel, stride, dilation: sizes of each image dimension.
        padding: pixels outside the image, all at the beginnings and then all at the ends.
    """

    kind: ClassVar[str] = "col2im"
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def _windows(self) -> tuple[int, ...]:
        rank = len(self.image)
        return tuple(
            (size + self.padding[d] + self.padding[rank + d] - step * (taps - 1) - 1) // stride + 1
            for d, (size, taps, stride, step) in enumerate(
                zip(self.image, self.kernel, self.stride, self.dilation, strict=True)
            )
        )

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("numbers", x.dtype)
        rank = len(self.image)
        lists = (self.kernel, self.stride, self.dilation)
        if rank < 1 or any(len(each) != rank or min(each) < 1 for each in lists):
            raise InputError(
                f"expected {rank} numbers from 1 for block_shape, strides and dilations, found {lists}"
            )
        if len(self.padding) != 2 * rank or min(*self.padding, *self.image) < 0:
            raise InputError(f"pads: expected {2 * rank} numbers from 0, found {self.padding}")
        taps, windows = math.prod(self.kernel), self._windows()
        wanted = math.prod(windows) if min(windows) > 0 else 0
        if len(x.shape) != 3 or x.shape[1] % taps or x.shape[2] != wanted:
            raise InputError(
                f"expected x [N, C * {taps}, {wanted}] for an image of {list(self.image)}, "
                f"found {list(x.shape)}"
            )
        return (((x.shape[0], x.shape[1] // taps, *self.image), x.dtype),)

    def reference(self, x):
        x = float64(x)
        rank, windows = len(self.image), self._windows()
        channels = x.shape[1] // math.prod(self.kernel)
        x = x.reshape(len(x), channels, *self.kernel, *windows)
        sizes = [
            size + self.padding[d] + self.padding[rank + d] for d, size in enumerate(self.image)
        ]
        y = np.zeros((len(x), channels, *sizes), x.dtype)
        for taps in np.ndindex(*self.kernel):
            positions = tuple(
                slice(tap * step, tap * step + stride * (count - 1) + 1, stride)
                for tap, step, stride, count in zip(
                    taps, self.dilation, self.stride, windows, strict=True
                )
            )
            y[(slice(None), slice(None), *positions)] += x[(slice(None), slice(None), *taps)]
        inner = tuple(
            slice(self.padding[d], self.padding[d] + size) for d, size in enumerate(self.image)
        )
        return y[(slice(None), slice(None), *inner)]

    def terms(self, inputs) -> int:
        return math.prod(self.kernel)


@record
class MaxUnpool(Operator):
    """Maxima put back where a pooling found them, 0 elsewhere.

    Inputs: x [N, C, ...], indices (int64, positions in the whole pooled tensor) of its shape.

    Attributes:
        pooled: the image that was pooled.
        image: the output's, at least as large; ``pooled`` lies at its beginning.
    """

    kind: ClassVar[str] = "max_unpool"
    pooled: tuple[int, ...]
    image: tuple[int, ...]

    def infer(self, inputs):
        need(inputs, 2)
        x, indices = inputs
        check_types("numbers", x.dtype)
        if len(x.shape) != 2 + len(self.pooled) or indices.shape != x.shape:
            raise InputError(
                f"expected x and indices of {2 + len(self.pooled)} dimensions, found {list(x.shape)} and "
                f"{list(indices.shape)}"
            )
        if indices.dtype != "int64":
            raise InputError(f"indices: expected int64, found {indices.dtype}")
        if (
            min(self.pooled) < 0
            or len(self.image) != len(self.pooled)
            or any(size < least for size, least in zip(self.image, self.pooled, strict=True))
        ):
            raise InputError(
                f"output_shape: expected at least {list(self.pooled)}, found {list(self.image)}"
            )
        return (((*x.shape[:2], *self.image), x.dtype),)

    def reference(self, x, indices):
        x = float64(x)
        y = np.zeros((*x.shape[:2], *self.pooled), x.dtype)
        wrong = indices[(indices < 0) | (indices >= y.size)]
        if wrong.size:
            raise InputError(f"indices: expected positions of {y.size}, found {wrong[0]}")
        y.reshape(-1)[indices.reshape(-1)] = x.reshape(-1)
        wide = np.zeros((*x.shape[:2], *self.image), x.dtype)
        wide[tuple(slice(size) for size in y.shape)] = y
        return wide
