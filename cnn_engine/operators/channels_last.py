"""Channels-last convolutions and pools: x and y are [N, H, W, C].

The other operators need no records of their own for that: their attributes name the dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .average_pool2d import AveragePool2d
from .conv2d import Conv2d
from .max_pool2d import MaxPool2d
from .operator import Operator, Shape, Value, float64, need, record, same_dtype

#: The order of [N, C, H, W]'s dimensions in [N, H, W, C], and the other way round.
TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def reordered(value: Value | None, perm: tuple[int, ...]) -> Value | None:
    """Returns ``value`` with its dimensions in the order ``perm``; None stays None."""
    if value is None:
        return None
    if len(value.shape) != len(perm):
        raise InputError(f"expected {len(perm)} dimensions, found {list(value.shape)}")
    return replace(value, shape=tuple(value.shape[axis] for axis in perm))


def _last(outputs: Sequence[tuple[Shape, str]]) -> tuple[tuple[Shape, str], ...]:
    return tuple((tuple(shape[axis] for axis in TO_LAST), dtype) for shape, dtype in outputs)


@record
class Conv2dNhwc(Conv2d):
    """y = activation(conv2d(z) + bias + residual), with z = max(x * scale + shift, floor) in the image.

    Inputs: x [N, H, W, C], weight [K, C / groups, R, S]; None or: bias [K], residual as y, scale [C] or
    [N, C], shift [C]. y is [N, OH, OW, K]. The padding's zeros are z's.

    Attributes:
        planar: whether x is [N, C, H, W], as a first layer's is.
        floor: the least that z can be, or None.
        compute_dtype: what z and the weights may be rounded to before they are multiplied; the reference
            rounds nothing.
        stem: whether all paths of a network with branches go through it, so that its error is in all of them.
    """

    kind: ClassVar[str] = "conv2d_nhwc"
    planar: bool = False
    floor: float | None = None
    compute_dtype: str = "float32"
    stem: bool = False

    def infer(self, inputs):
        need(inputs, 2, 6)
        same_dtype(inputs)
        x, weight, bias, residual, scale, shift = (*inputs, None, None, None, None)[:6]
        if not self.planar:
            x = reordered(x, TO_FIRST)
        outputs = super().infer([x, weight, bias, reordered(residual, TO_FIRST)])
        for name, value, shapes in (
            ("scale", scale, (x.shape[1:2], x.shape[:2])),
            ("shift", shift, (x.shape[1:2],)),
        ):
            if value is not None and value.shape not in shapes:
                wanted = " or ".join(str(list(shape)) for shape in shapes)
                raise InputError(f"{name}: expected {wanted}, found {list(value.shape)}")
        return _last(outputs)

    def reference(self, x, weight, bias=None, residual=None, scale=None, shift=None):
        z = float64(x)
        if not self.planar:
            z = z.transpose(TO_FIRST)
        if scale is not None:
            z = z * float64(scale)[..., None, None]
        if shift is not None:
            z = z + float64(shift)[:, None, None]
        if self.floor is not None:
            z = np.maximum(z, self.floor)
        if residual is not None:
            residual = float64(residual).transpose(TO_FIRST)
        return super().reference(z, weight, bias, residual).transpose(TO_LAST)


class _ChannelsLast(Operator):
    """What makes a record's images [N, H, W, C]."""

    def infer(self, inputs):
        need(inputs, 1)
        return _last(super().infer([reordered(inputs[0], TO_FIRST)]))

    def reference(self, x):
        return super().reference(np.asarray(x).transpose(TO_FIRST)).transpose(TO_LAST)


@record
class MaxPool2dNhwc(_ChannelsLast, MaxPool2d):
    """max_pool2d over x [N, H, W, C]; maxima alone."""

    kind: ClassVar[str] = "max_pool2d_nhwc"

    def infer(self, inputs):
        if self.indices is not None:
            raise InputError(f"indices: expected none, found {self.indices}")
        return super().infer(inputs)


@record
class AveragePool2dNhwc(_ChannelsLast, AveragePool2d):
    """average_pool2d over x [N, H, W, C]."""

    kind: ClassVar[str] = "average_pool2d_nhwc"
