"""conv_transpose2d: y[n, k, i*SH + r*DH - top, j*SW + s*DW - left] += x[n,c,i,j] * w[c,k,r,s], plus b[k]

What conv2d's gradient is: every input element writes a filter. Padding takes rows and columns of the output
away, output padding adds some below and on the right.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, float64, need, record, same_dtype
from .unary import Unary
from .windows import LARGEST, Padding, Pair, check_image


@record
class ConvTranspose2d(Operator):
    """Inputs: x [N, C, H, W], weight [C, K / groups, R, S], bias [K] or None.

    Attributes:
        stride, dilation, output_padding: rows and columns.
        padding: taken away above, on the left, below, on the right; negative ones add zeros.
        groups: channels and filters are in so many groups that do not see each other.
        activation: what is applied to the sum, or None.
    """

    kind: ClassVar[str] = "conv_transpose2d"
    rank: ClassVar[int] = 2
    stride: Pair = (1, 1)
    padding: Padding = (0, 0, 0, 0)
    output_padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: Unary | None = None

    def infer(self, inputs):
        need(inputs, 2, 3)
        dtype = same_dtype(inputs)
        x, weight, bias = (*inputs, None)[:3]
        rank = self.rank
        if len(x.shape) != 2 + rank or len(weight.shape) != 2 + rank:
            raise InputError(
                f"expected an input and a weight of {2 + rank} dimensions, "
                f"found {list(x.shape)} and {list(weight.shape)}"
            )
        if self.groups < 1 or x.shape[1] % self.groups or weight.shape[0] != x.shape[1]:
            raise InputError(
                f"expected a weight of {x.shape[1]} channels in {self.groups} groups, "
                f"found {list(weight.shape)}"
            )
        for name, values, count, lowest in (
            ("stride", self.stride, rank, 1),
            ("dilation", self.dilation, rank, 1),
            ("output_padding", self.output_padding, rank, 0),
            ("padding", self.padding, 2 * rank, -(2**31)),
        ):
            if len(values) != count or min(values) < lowest or max(values) > LARGEST:
                raise InputError(
                    f"{name}: expected {count} whole numbers from {lowest} to {LARGEST}, "
                    f"found {list(values)}"
                )
        filters = weight.shape[1] * self.groups
        if bias is not None and bias.shape != (filters,):
            raise InputError(f"bias: expected shape {[filters]}, found {list(bias.shape)}")
        sizes = self.full_sizes(x.shape[2:], weight.shape[2:])
        shape = tuple(sizes[i] - self.padding[i] - self.padding[rank + i] for i in range(rank))
        if any(size < 1 for size in (*shape, *x.shape[2:])):
            raise InputError(f"expected an output of at least one element, found {list(shape)}")
        check_image("input", x.shape)
        check_image("output", (x.shape[0], filters, *sizes))
        return (((x.shape[0], filters, *shape), dtype),)

    def full_sizes(self, sizes: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the output's sizes before padding takes from them."""
        return tuple(
            (size - 1) * stride + dilation * (taps - 1) + 1 + added
            for size, taps, stride, dilation, added in zip(
                sizes, kernel, self.stride, self.dilation, self.output_padding, strict=True
            )
        )

    def reference(self, x, weight, bias=None):
        x, weight = float64(x), float64(weight)
        rank, groups = self.rank, self.groups
        n, channels, *sizes = x.shape
        filters, *kernel = weight.shape[1:]
        full = self.full_sizes(tuple(sizes), tuple(kernel))
        y = np.zeros((n, groups, filters, *full))
        grouped = x.reshape(n, groups, channels // groups, *sizes)
        grouped_weight = weight.reshape(groups, channels // groups, filters, *kernel)
        for tap in np.ndindex(*kernel):
            positions = tuple(
                slice(t * d, t * d + (size - 1) * s + 1, s)
                for t, d, s, size in zip(tap, self.dilation, self.stride, sizes, strict=True)
            )
            at_tap = grouped_weight[(..., *tap)]
            y[(..., *positions)] += np.einsum("ngc...,gck->ngk...", grouped, at_tap)
        y = y.reshape(n, groups * filters, *full)
        cut = []
        for axis in range(rank):
            before, after = self.padding[axis], self.padding[rank + axis]
            y = np.pad(
                y,
                [(0, 0)] * (2 + axis)
                + [(max(-before, 0), max(-after, 0))]
                + [(0, 0)] * (rank - axis - 1),
            )
            cut.append(slice(max(before, 0), y.shape[2 + axis] - max(after, 0)))
        y = y[(slice(None), slice(None), *cut)]
        if bias is not None:
            y = y + float64(bias).reshape(-1, *[1] * rank)
        return y if self.activation is None else self.activation.reference(y)

    def flops(self, inputs, outputs) -> int:
        return 2 * inputs[0].size * math.prod(inputs[1].shape[1:])

    def terms(self, inputs) -> int:
        channels = inputs[0].shape[1] // self.groups
        taps = (
            -(-taps // stride)
            for taps, stride in zip(inputs[1].shape[2:], self.stride, strict=True)
        )
        return channels * math.prod(taps)


@record
class ConvTranspose3d(ConvTranspose2d):
    """conv_transpose2d over images with depth: x [N, C, D, H, W]."""

    kind: ClassVar[str] = "conv_transpose3d"
    rank: ClassVar[int] = 3
    stride: tuple[int, ...] = (1, 1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    output_padding: tuple[int, ...] = (0, 0, 0)
    dilation: tuple[int, ...] = (1, 1, 1)
