"""Normalisations: (x - mean) / sqrt(variance + eps) * scale + bias, over different parts of a tensor."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, axis_in, check_types, float64, need, record, same_dtype


def _per_channel(name: str, shape: tuple[int, ...], channels: int) -> None:
    if shape != (channels,):
        raise InputError(f"{name}: expected shape {[channels]}, found {list(shape)}")


def _channels(values: np.ndarray, rank: int) -> np.ndarray:
    """Returns ``values`` [C] shaped to stand beside x [N, C, ...] of ``rank`` dimensions."""
    return float64(values).reshape(-1, *[1] * (rank - 2))


@record
class BatchNorm(Operator):
    """With a mean and variance that are given. Inputs: x [N, C, ...], scale, bias, mean, variance [C].

    Attributes:
        epsilon: added to the variance.
        axis: the dimension of the channels: 1, or -1 for x [N, ..., C].
    """

    kind: ClassVar[str] = "batch_norm"
    in_place: ClassVar[bool] = True
    epsilon: float = 1e-5
    axis: int = 1

    def infer(self, inputs):
        need(inputs, 5)
        x = inputs[0]
        check_types("floats", x.dtype)
        if len(x.shape) < 2:
            raise InputError(f"expected at least 2 dimensions, found {list(x.shape)}")
        names = ("scale", "bias", "mean", "variance")
        for name, value in zip(names, inputs[1:], strict=True):
            _per_channel(name, value.shape, x.shape[self.axis])
        return ((x.shape, x.dtype),)

    def affine(self, scale, bias, mean, variance) -> tuple[np.ndarray, np.ndarray]:
        """Returns (a, b) in float64, [C] each: the output is a * x + b."""
        scale, bias, mean, variance = (float64(v) for v in (scale, bias, mean, variance))
        with np.errstate(all="ignore"):
            factor = scale / np.sqrt(variance + self.epsilon)
            return factor, bias - mean * factor

    def reference(self, x, scale, bias, mean, variance):
        factor, offset = self.affine(scale, bias, mean, variance)
        rank = 2 if self.axis == -1 else x.ndim
        return float64(x) * _channels(factor, rank) + _channels(offset, rank)


@record
class InstanceNorm(Operator):
    """Over every channel of every image by itself. Inputs: x [N, C, ...], scale [C], bias [C].

    Attributes:
        epsilon: added to the variance.
    """

    kind: ClassVar[str] = "instance_norm"
    epsilon: float = 1e-5

    def infer(self, inputs):
        need(inputs, 3)
        x = inputs[0]
        check_types("floats", same_dtype(inputs))
        if len(x.shape) < 3:
            raise InputError(f"expected at least 3 dimensions, found {list(x.shape)}")
        _per_channel("scale", inputs[1].shape, x.shape[1])
        _per_channel("bias", inputs[2].shape, x.shape[1])
        return ((x.shape, x.dtype),)

    def reference(self, x, scale, bias):
        normal = _normal(float64(x), tuple(range(2, x.ndim)), self.epsilon)
        return normal * _channels(scale, x.ndim) + _channels(bias, x.ndim)

    def terms(self, inputs) -> int:
        return max(1, math.prod(inputs[0].shape[2:]))


def _normal(x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        deviation = x - x.mean(axis=axes, keepdims=True)
        variance = np.square(deviation).mean(axis=axes, keepdims=True)
        return deviation / np.sqrt(variance + epsilon)


@record
class GroupNorm(Operator):
    """Over groups of channels of every image. Inputs: x [N, C, ...], scale [C], bias [C].

    Attributes:
        groups: how many; of equal size.
        epsilon: added to the variance.
    """

    kind: ClassVar[str] = "group_norm"
    groups: int
    epsilon: float = 1e-5

    def infer(self, inputs):
        need(inputs, 3)
        x = inputs[0]
        check_types("floats", same_dtype(inputs))
        if len(x.shape) < 2 or self.groups < 1 or x.shape[1] % self.groups:
            raise InputError(f"expected channels in {self.groups} groups, found {list(x.shape)}")
        _per_channel("scale", inputs[1].shape, x.shape[1])
        _per_channel("bias", inputs[2].shape, x.shape[1])
        return ((x.shape, x.dtype),)

    def reference(self, x, scale, bias):
        grouped = float64(x).reshape(x.shape[0], self.groups, -1)
        normal = _normal(grouped, (2,), self.epsilon).reshape(x.shape)
        return normal * _channels(scale, x.ndim) + _channels(bias, x.ndim)

    def terms(self, inputs) -> int:
        return max(1, math.prod(inputs[0].shape[1:]) // self.groups)


@record
class LayerNorm(Operator):
    """Over the dimensions from ``axis`` on. Inputs: x, scale, bias or None, which broadcast to x's shape.

    Attributes:
        axis: the first dimension that is normalised over.
        epsilon: added to the variance.
        statistics: whether the mean and 1 / sqrt(variance + eps) come out too.
    """

    kind: ClassVar[str] = "layer_norm"
    axis: int = -1
    epsilon: float = 1e-5
    statistics: bool = False

    def infer(self, inputs):
        need(inputs, 2, 3)
        x = inputs[0]
        check_types("floats", x.dtype)
        axis = axis_in(self.axis, len(x.shape))
        _broadcasts(x, inputs[1:])
        shape = (*x.shape[:axis], *[1] * (len(x.shape) - axis))
        outputs = ((x.shape, x.dtype), (shape, "float32"), (shape, "float32"))
        return outputs if self.statistics else outputs[:1]

    def reference(self, x, scale, bias=None):
        x = float64(x)
        axes = tuple(range(axis_in(self.axis, x.ndim), x.ndim))
        mean = x.mean(axis=axes, keepdims=True)
        inverse = 1 / np.sqrt(np.square(x - mean).mean(axis=axes, keepdims=True) + self.epsilon)
        y = (x - mean) * inverse * float64(scale)
        if bias is not None:
            y = y + float64(bias)
        return (y, mean, inverse) if self.statistics else y

    def terms(self, inputs) -> int:
        return max(1, math.prod(inputs[0].shape[self.axis :]))


@record
class RmsNorm(Operator):
    """x / sqrt(mean of squares + eps) * scale, over the dimensions from ``axis`` on.

    Attributes:
        axis: the first dimension that is normalised over.
        epsilon: added to the mean of squares.
    """

    kind: ClassVar[str] = "rms_norm"
    axis: int = -1
    epsilon: float = 1e-5

    def infer(self, inputs):
        need(inputs, 2)
        x = inputs[0]
        check_types("floats", x.dtype)
        axis_in(self.axis, len(x.shape))
        _broadcasts(x, inputs[1:])
        return ((x.shape, x.dtype),)

    def reference(self, x, scale):
        x = float64(x)
        axes = tuple(range(axis_in(self.axis, x.ndim), x.ndim))
        squares = np.square(x).mean(axis=axes, keepdims=True)
        return x / np.sqrt(squares + self.epsilon) * float64(scale)

    def terms(self, inputs) -> int:
        return max(1, math.prod(inputs[0].shape[self.axis :]))


def _broadcasts(x, others) -> None:
    for value in others:
        if value is None:
            continue
        fits = len(value.shape) <= len(x.shape) and all(
            size in (1, whole)
            for size, whole in zip(value.shape[::-1], x.shape[::-1], strict=False)
        )
        if not fits:
            raise InputError(
                f"expected a shape that broadcasts to {list(x.shape)}, found {list(value.shape)}"
            )


@record
class Lrn(Operator):
    """x / (k + alpha / size * sum of squares over ``size`` neighbouring channels) to the beta.

    Attributes:
        size: channels that are summed over, the element's own in the middle.
        alpha, beta, k: as above; k is what ONNX calls bias.
    """

    kind: ClassVar[str] = "lrn"
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0

    def infer(self, inputs):
        need(inputs, 1)
        x = inputs[0]
        check_types("floats", x.dtype)
        if len(x.shape) < 2 or self.size < 1:
            raise InputError(f"expected channels and a size of at least 1, found {list(x.shape)}")
        return ((x.shape, x.dtype),)

    def reference(self, x):
        x = float64(x)
        squares = np.square(x)
        channels = x.shape[1]
        sums = np.zeros_like(x)
        for offset in range(-((self.size - 1) // 2), self.size // 2 + 1):
            first, last = max(0, -offset), min(channels, channels - offset)
            if first < last:
                sums[:, first:last] += squares[:, first + offset : last + offset]
        return x / (self.k + self.alpha / self.size * sums) ** self.beta

    def terms(self, inputs) -> int:
        return self.size
