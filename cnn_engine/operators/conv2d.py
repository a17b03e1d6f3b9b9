"""conv2d: y[n,k,i,j] = b[k] + sum over c,r,s of x[n, c, i*SH + r*DH - top, j*SW + s*DW - left] * w[k,c,r,s]

A cross-correlation. With groups, filter k sees only the channels of its group. After the sum comes the
epilogue that rewrites put there: a residual tensor is added, then an activation is applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, Shape, Value, float64, need, record, same_dtype
from .unary import Unary
from .windows import Padding, Pair, check_image, output_sizes, padded, windows


@record
class Conv2d(Operator):
    """Inputs: x [N, C, H, W], weight [K, C / groups, R, S], bias [K] or None, residual as y or None.

    Attributes:
        stride, dilation: rows and columns.
        padding: zeros above, on the left, below, on the right.
        groups: channels and filters are in so many groups that do not see each other.
        activation: what is applied to the sum, or None.
    """

    kind: ClassVar[str] = "conv2d"
    rank: ClassVar[int] = 2
    stride: Pair = (1, 1)
    padding: Padding = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: Unary | None = None

    def infer(self, inputs: Sequence[Value | None]) -> tuple[tuple[Shape, str], ...]:
        need(inputs, 2, 4)
        dtype = same_dtype(inputs)
        x, weight, bias, residual = (*inputs, None, None)[:4]
        if len(x.shape) != 2 + self.rank or len(weight.shape) != 2 + self.rank:
            raise InputError(
                f"expected an input and a weight of {2 + self.rank} dimensions, "
                f"found {list(x.shape)} and {list(weight.shape)}"
            )
        filters, channels = weight.shape[:2]
        if self.groups < 1 or filters % self.groups or x.shape[1] != channels * self.groups:
            raise InputError(
                f"expected a weight of {x.shape[1]} channels / {self.groups} groups and filters in "
                f"{self.groups} groups, found {list(weight.shape)}"
            )
        positions = output_sizes(
            x.shape[2:], weight.shape[2:], self.stride, self.padding, self.dilation
        )
        shape = (x.shape[0], filters, *positions)
        check_image("input", x.shape, self.padding)
        check_image("output", shape)
        if bias is not None and bias.shape != (filters,):
            raise InputError(f"bias: expected shape {[filters]}, found {list(bias.shape)}")
        if residual is not None and residual.shape != shape:
            raise InputError(f"residual: expected {list(shape)}, found {list(residual.shape)}")
        return ((shape, dtype),)

    def reference(self, x, weight, bias=None, residual=None):
        x, weight = float64(x), float64(weight)
        rank, groups = self.rank, self.groups
        view = windows(padded(x, self.padding), weight.shape[2:], self.stride, self.dilation)
        taps = tuple(range(2 + rank, 2 + 2 * rank))
        parts = [
            np.moveaxis(
                np.tensordot(part, filters, axes=((1, *taps), tuple(range(1, 2 + rank)))), -1, 1
            )
            for part, filters in zip(
                np.split(view, groups, axis=1), np.split(weight, groups), strict=True
            )
        ]
        y = np.concatenate(parts, axis=1)
        if bias is not None:
            y = y + float64(bias).reshape(-1, *[1] * rank)
        if residual is not None:
            y = y + float64(residual)
        return y if self.activation is None else self.activation.reference(y)

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.terms(inputs)

    def terms(self, inputs) -> int:
        return math.prod(inputs[1].shape[1:])


@record
class Conv3d(Conv2d):
    """conv2d over images with depth, x [N, C, D, H, W]: attributes have one number more, padding two."""

    kind: ClassVar[str] = "conv3d"
    rank: ClassVar[int] = 3
    stride: tuple[int, ...] = (1, 1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1, 1)
