"""resize: x at other sizes. Along every dimension an output element is a weighted sum of a few of x's.

:meth:`Resize.tables` gives these positions and weights; kernels take them as they are, one dimension at a
time.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, check_types, float64, need, record

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

#: The rule of ONNX's Resize before opset 11: ``ceil`` where the output is smaller, else ``floor``.
SIMPLE = "simple"

#: ONNX Runtime takes a float32 so near to the middle of two positions for a tie.
TIE = 1e-6


@record
class Resize(Operator):
    """Input: x of any shape.

    Attributes:
        sizes: the output's, one a dimension.
        scales: output over input, one a dimension, as the network's author gave them (they need not be the
            sizes' quotients). Places follow from a Fraction exactly; from a float, and in
            ``tf_crop_and_resize``, in float32 and in ONNX Runtime's order of operations.
        mode: ``nearest``, ``linear`` or ``cubic``.
        coordinates: which place of x an output element stands on; one of :data:`COORDINATES`.
        nearest: which neighbour, one of :data:`NEAREST`, or :data:`SIMPLE`.
        cubic_a: the cubic's coefficient.
        exclude_outside: whether positions outside x get no weight (the others more), else the border's value.
        antialias: whether the weights widen where the output is smaller.
        roi: start then end of the crop, as parts of x, for ``tf_crop_and_resize``.
        extrapolation: the value of what stands outside x there.
    """

    kind: ClassVar[str] = "resize"
    sizes: tuple[int, ...]
    scales: tuple[float | Fraction, ...]
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
        if self.nearest not in (*NEAREST, SIMPLE):
            raise InputError(f"nearest: expected {NEAREST}, found {self.nearest}")
        negative = any(size < 0 for size in self.sizes)
        if len(self.sizes) != rank or len(self.scales) != rank or negative:
            raise InputError(f"sizes: expected {rank} sizes and scales, found {list(self.sizes)}")
        known = (scale for scale in self.scales if isinstance(scale, (int, float, Fraction)))
        if not all(0 < scale < math.inf for scale in known):
            raise InputError(f"scales: expected numbers above 0, found {list(self.scales)}")
        if self.coordinates == "tf_crop_and_resize" and len(self.roi) != 2 * rank:
            raise InputError(f"roi: expected {2 * rank} numbers, found {len(self.roi)}")
        if math.prod(x.shape) == 0 and math.prod(self.sizes) != 0:
            raise InputError(f"expected something to resize, found {list(x.shape)}")
        return ((self.sizes, x.dtype),)

    def positions(self, axis: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the coordinate on x of each output element along ``axis``, in elements of x's ``size``.

        That is the place below, int64, and the part of a place from there on, float64 from 0 to below 1.
        """
        if isinstance(self.scales[axis], Fraction) and self.coordinates != "tf_crop_and_resize":
            above, below = self._quotients(axis, size)
            return above // below, above % below / below
        at = self._rounded(axis, size)
        whole = np.floor(at)
        part = at.astype(np.float64) - whole
        if self.mode == "nearest":
            part[np.abs(part - 0.5) <= TIE] = 0.5
        return whole.astype(np.int64), part

    def _quotients(self, axis: int, size: int) -> tuple[np.ndarray, int]:
        """Returns the positions as quotients: a numerator each, and the denominator of all."""
        out, scale = self.sizes[axis], self.scales[axis]
        i, p, q = np.arange(out, dtype=np.int64), scale.numerator, scale.denominator
        match self.coordinates:
            case "align_corners":
                last = self._last(axis, size)
                if last == 0:
                    return 0 * i, 1
                return i * (size - 1) * last.denominator, last.numerator
            case "asymmetric":
                return i * q, p
            case "tf_half_pixel_for_nn":
                return (2 * i + 1) * q, 2 * p
            case "pytorch_half_pixel" if out == 1:
                return 0 * i, 1
            case "half_pixel_symmetric":
                # Both middles stand on each other.
                return (2 * i + 1 - out) * q + (size - 1) * p, 2 * p
            case _:
                return (2 * i + 1) * q - p, 2 * p

    def _rounded(self, axis: int, size: int) -> np.ndarray:
        """Returns the positions as ONNX Runtime computes them from a scale of float32."""
        out, scale = self.sizes[axis], np.float32(self.scales[axis])
        i, size, half = np.arange(out).astype(np.float32), np.float32(size), np.float32(0.5)
        match self.coordinates:
            case "align_corners":
                last = np.float32(self._last(axis, int(size)))
                return i * (size - 1) / last if last else 0 * i
            case "asymmetric":
                return i / scale
            case "tf_half_pixel_for_nn":
                return (i + half) / scale
            case "pytorch_half_pixel" if out == 1:
                return 0 * i
            case "tf_crop_and_resize":
                start, end = map(np.float32, self.roi[axis :: len(self.sizes)])
                if out > 1:
                    return start * (size - 1) + i * (end - start) * (size - 1) / np.float32(out - 1)
                return half * (start + end) * (size - 1) + 0 * i
            case "half_pixel_symmetric":
                offset = float(size / 2 * (1 - np.float32(out) / (scale * size)))
                at = offset + (i.astype(np.float64) + 0.5) / scale - 0.5
                return at.astype(np.float32)
            case _:
                return (i + half) / scale - half

    def _last(self, axis: int, size: int) -> Fraction:
        """Returns the last place of the output, on which ``align_corners`` puts the last one of x.

        ``linear`` and ``cubic`` take it from the scale, as ONNX's tests do; ``nearest`` from the whole size
        that came of it, as PyTorch and ONNX Runtime do.
        """
        if self.mode == "nearest":
            return Fraction(self.sizes[axis] - 1)
        return Fraction(self.scales[axis]) * size - 1

    def tables(self, shape: tuple[int, ...]) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Returns (axis, positions, weights) for every dimension that changes.

        An output element is the sum over t of weights[i, t] * x[positions[i, t]] along the axis; positions
        are int64 [out, taps] and within x, weights float64 [out, taps].
        """
        return [
            (axis, *self._table(axis, size))
            for axis, size in enumerate(shape)
            if (size, 1.0) != (self.sizes[axis], self.scales[axis])
            or self.coordinates == "tf_crop_and_resize"
        ]

    def _table(self, axis: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        whole, part = self.positions(axis, size)
        if self.mode == "nearest":
            nearest = self.nearest
            if nearest == SIMPLE:
                nearest = "ceil" if self.scales[axis] < 1 else "floor"
            up = {
                "floor": 0,
                "ceil": part > 0,
                "round_prefer_ceil": part >= 0.5,
                "round_prefer_floor": part > 0.5,
            }
            indices = (whole + up[nearest]).clip(0, size - 1)[:, None]
            return indices, np.ones(indices.shape)
        reach = 1.0 if self.mode == "linear" else 2.0
        stretch = min(float(self.scales[axis]), 1.0) if self.antialias else 1.0
        half = math.ceil(reach / stretch)
        steps = np.arange(1 - half, 1 + half)
        indices = whole[:, None] + steps
        weights = self._weight((steps - part[:, None]) * stretch)
        if self.antialias or self.exclude_outside:
            inside = (indices >= 0) & (indices < size)
            if self.exclude_outside:
                weights = np.where(inside, weights, 0.0)
            sums = weights.sum(axis=1, keepdims=True)
            weights = np.divide(weights, sums, out=np.zeros_like(weights), where=sums != 0)
        return indices.clip(0, size - 1), weights

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
        for axis, indices, weights in self.tables(shape):
            if self.mode == "nearest":
                y = np.take(y, indices[:, 0], axis=axis)
                continue
            rows = np.moveaxis(y, axis, -1)
            rows = sum(rows[..., indices[:, t]] * weights[:, t] for t in range(indices.shape[1]))
            y = np.moveaxis(rows, -1, axis)
        if self.coordinates == "tf_crop_and_resize":
            outside = np.zeros((1,) * y.ndim, bool)
            for axis, size in enumerate(shape):
                whole, part = self.positions(axis, size)
                missing = (whole < 0) | (whole + part > size - 1)
                outside = outside | missing.reshape([-1 if i == axis else 1 for i in range(y.ndim)])
            y = np.where(outside, np.asarray(self.extrapolation, y.dtype), y)
        return y if dtype.kind == "f" else y.astype(dtype)

    def terms(self, inputs) -> int:
        if self.mode == "nearest":
            return 1
        tables = self.tables(inputs[0].shape)
        return math.prod(indices.shape[1] for _, indices, _ in tables)
