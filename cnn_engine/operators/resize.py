"""resize: x at other sizes. Along every dimension an output element is a weighted sum of a few of x's.

:meth:`Resize.tables` gives these places and weights; kernels take them as they are, one dimension at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, check_types, float64, need

COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True)
class Resize(Operator):
    """Input: x of any shape.

    Attributes:
        sizes: the output's, one a dimension.
        scales: output over input, one a dimension, as the network's author gave them (they need not be the
            sizes' quotients).
        mode: ``nearest``, ``linear`` or ``cubic``.
        coordinates: which place of x an output element stands on; one of :data:`COORDINATES`.
        nearest: which neighbour, one of :data:`NEAREST`.
        cubic_a: the cubic's coefficient.
        exclude_outside: whether places outside x get no weight (the others more), else the border's value.
        antialias: whether the weights widen where the output is smaller.
        roi: start then end of the crop, as parts of x, for ``tf_crop_and_resize``.
        extrapolation: the value of what stands outside x there.
    """

    kind: ClassVar[str] = "resize"
    sizes: tuple[int, ...]
    scales: tuple[float, ...]
    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    roi: tuple[float, ...] = ()
    extrapolation: float = 0.0

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("numbers", x.dtype)
        rank = len(x.shape)
        if self.mode not in ("nearest", "linear", "cubic"):
            raise InputError(f"mode: expected nearest, linear or cubic, found {self.mode}")
        if self.coordinates not in COORDINATES:
            raise InputError(f"coordinates: expected {COORDINATES}, found {self.coordinates}")
        if self.nearest not in NEAREST:
            raise InputError(f"nearest: expected {NEAREST}, found {self.nearest}")
        if len(self.sizes) != rank or len(self.scales) != rank or min(self.sizes, default=1) < 0:
            raise InputError(f"sizes: expected {rank} sizes and scales, found {list(self.sizes)}")
        if not all(0 < scale < math.inf for scale in self.scales):
            raise InputError(f"scales: expected numbers above 0, found {list(self.scales)}")
        if self.coordinates == "tf_crop_and_resize" and len(self.roi) != 2 * rank:
            raise InputError(f"roi: expected {2 * rank} numbers, found {len(self.roi)}")
        if math.prod(x.shape) == 0 and math.prod(self.sizes) != 0:
            raise InputError(f"expected something to resize, found {list(x.shape)}")
        return ((self.sizes, x.dtype),)

    def positions(self, axis: int, size: int) -> np.ndarray:
        """Returns where on x each output element along ``axis`` stands, in places of x's ``size``."""
        out, scale = self.sizes[axis], self.scales[axis]
        i = np.arange(out, dtype=np.float64)
        match self.coordinates:
            case "align_corners":
                # The last stands on the last of what the scale says, not of what was cut to a whole size.
                wide = scale * size
                return i * (size - 1) / (wide - 1) if wide != 1 else np.zeros(out)
            case "asymmetric":
                return i / scale
            case "tf_half_pixel_for_nn":
                return (i + 0.5) / scale
            case "pytorch_half_pixel" if scale * size <= 1:
                return np.full(out, -0.5) if out > 1 else np.zeros(out)
            case "tf_crop_and_resize":
                start, end = self.roi[axis], self.roi[len(self.sizes) + axis]
                wide = scale * size
                if wide > 1:
                    return start * (size - 1) + i * (end - start) * (size - 1) / (wide - 1)
                return np.full(out, 0.5 * (start + end) * (size - 1))
            case "half_pixel_symmetric":
                # Both middles stand on each other; written so that places at whole numbers stay there.
                return (size - out / scale) / 2 + (i + 0.5) / scale - 0.5
            case _:
                return (i + 0.5) / scale - 0.5

    def tables(self, shape: tuple[int, ...]) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Returns (axis, places, weights) for every dimension that changes.

        An output element is the sum over t of weights[i, t] * x[places[i, t]] along the axis; places are
        int64 [out, taps] and within x, weights float64 [out, taps].
        """
        return [
            (axis, *self._table(axis, size))
            for axis, size in enumerate(shape)
            if (size, 1.0) != (self.sizes[axis], self.scales[axis])
            or self.coordinates == "tf_crop_and_resize"
        ]

    def _table(self, axis: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        at = self.positions(axis, size)
        if self.mode == "nearest":
            match self.nearest:
                case "floor":
                    places = np.floor(at)
                case "ceil":
                    places = np.ceil(at)
                case "round_prefer_ceil":
                    places = np.floor(at + 0.5)
                case _:
                    places = np.ceil(at - 0.5)
            places = places.clip(0, size - 1).astype(np.int64)[:, None]
            return places, np.ones(places.shape)
        reach = 1.0 if self.mode == "linear" else 2.0
        stretch = min(self.scales[axis], 1.0) if self.antialias else 1.0
        half = math.ceil(reach / stretch)
        first = np.floor(at).astype(np.int64) - half + 1
        places = first[:, None] + np.arange(2 * half)
        weights = self._weight((places - at[:, None]) * stretch)
        if self.antialias or self.exclude_outside:
            inside = (places >= 0) & (places < size)
            if self.exclude_outside:
                weights = np.where(inside, weights, 0.0)
            sums = weights.sum(axis=1, keepdims=True)
            weights = np.divide(weights, sums, out=np.zeros_like(weights), where=sums != 0)
        return places.clip(0, size - 1), weights

    def _weight(self, distance: np.ndarray) -> np.ndarray:
        d = np.abs(distance)
        if self.mode == "linear":
            return np.maximum(1 - d, 0.0)
        a = self.cubic_a
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0.0))

    def reference(self, x):
        dtype = np.asarray(x).dtype
        y = float64(x)
        if self.mode != "nearest":
            y = y.astype(np.float64)
        shape = y.shape
        for axis, places, weights in self.tables(shape):
            if self.mode == "nearest":
                y = np.take(y, places[:, 0], axis=axis)
                continue
            rows = np.moveaxis(y, axis, -1)
            rows = sum(rows[..., places[:, t]] * weights[:, t] for t in range(places.shape[1]))
            y = np.moveaxis(rows, -1, axis)
        if self.coordinates == "tf_crop_and_resize":
            outside = np.zeros((1,) * y.ndim, bool)
            for axis, size in enumerate(shape):
                at = self.positions(axis, size)
                missing = (at < 0) | (at > size - 1)
                outside = outside | missing.reshape([-1 if i == axis else 1 for i in range(y.ndim)])
            y = np.where(outside, np.asarray(self.extrapolation, y.dtype), y)
        return y if dtype.kind == "f" else y.astype(dtype)

    def terms(self, inputs) -> int:
        if self.mode == "nearest":
            return 1
        tables = self.tables(inputs[0].shape)
        return math.prod(places.shape[1] for _, places, _ in tables)
