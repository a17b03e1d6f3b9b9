"""Operators that read images between their pixels: GridSample, RoiAlign, DeformConv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, check_types, float64, need, record
from .windows import Padding, Pair, output_sizes

_CUBIC_A = -0.75


def _reflected(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Returns coordinates mirrored at ``low`` and ``high`` until they lie between them."""
    span = high - low
    if span <= 0:
        return np.full_like(x, low)
    turned = np.mod(x - low, 2 * span)
    return low + np.where(turned > span, 2 * span - turned, turned)


def _cubic(t: np.ndarray) -> list[np.ndarray]:
    """Returns the weights of the four pixels around a place, ``t`` after the second."""
    a = _CUBIC_A

    def outer(d):
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    def inner(d):
        return ((a + 2) * d - (a + 3)) * d * d + 1

    return [outer(t + 1), inner(t), inner(1 - t), outer(2 - t)]


@record
class GridSample(Operator):
    """x read at the positions of a grid. Inputs: x [N, C, D1..Dr], grid [N, O1..Or, r] in x's float type.

    The grid's last dimension is a place, its coordinates in the reverse order of x's dimensions; -1 and 1 are
    the ends of an image: the centres of its outermost pixels or their outer edges.

    Attributes:
        mode: ``nearest`` (halves to even), ``linear`` or ``cubic``.
        padding_mode: what is outside: ``zeros``, ``border`` (the nearest pixel) or ``reflection``.
        align_corners: whether -1 and 1 are centres of pixels.
    """

    kind: ClassVar[str] = "grid_sample"
    mode: str = "linear"
    padding_mode: str = "zeros"
    align_corners: bool = False

    def infer(self, inputs):
        need(inputs, 2)
        x, grid = inputs
        check_types("floats", x.dtype)
        check_types("floats", grid.dtype)
        rank = len(x.shape) - 2
        if self.mode not in ("nearest", "linear", "cubic"):
            raise InputError(f"mode: expected nearest, linear or cubic, found {self.mode!r}")
        if self.padding_mode not in ("zeros", "border", "reflection"):
            raise InputError(
                f"padding_mode: expected zeros, border or reflection, found {self.padding_mode!r}"
            )
        if (
            rank < 1
            or len(grid.shape) != len(x.shape)
            or grid.shape[0] != x.shape[0]
            or grid.shape[-1] != rank
        ):
            raise InputError(
                f"expected x [N, C, ...] and a grid [N, ..., {max(rank, 1)}], found {list(x.shape)} and "
                f"{list(grid.shape)}"
            )
        if 0 in x.shape[2:] and 0 not in grid.shape:
            raise InputError(f"expected an image to sample, found {list(x.shape)}")
        return (((*x.shape[:2], *grid.shape[1:-1]), x.dtype),)

    def reference(self, x, grid):
        x, grid = float64(x), float64(grid)
        sizes = x.shape[2:]
        shape = (*x.shape[:2], *grid.shape[1:-1])
        if 0 in shape:
            return np.zeros(shape)
        # Of each dimension the pixels that count at every place, and their weights.
        parts = [
            self._pixels(grid[..., -1 - axis].reshape(len(x), -1), size)
            for axis, size in enumerate(sizes)
        ]
        y = np.zeros((*x.shape[:2], parts[0][0][0].shape[1]))
        images = np.arange(len(x))[:, None]
        for chosen in itertools.product(*(list(zip(*part, strict=True)) for part in parts)):
            positions, weights = zip(*chosen, strict=True)
            inside = np.ones(positions[0].shape, bool)
            for place, size in zip(positions, sizes, strict=True):
                inside &= (place >= 0) & (place < size)
            at = tuple(np.where(inside, place, 0) for place in positions)
            values = np.moveaxis(x[(images, slice(None), *at)], -1, 1)
            weight = math.prod(weights)
            # Nothing is added from outside, not even 0 times an infinity.
            with np.errstate(invalid="ignore"):
                parts_of_y = values * weight[:, None]
            y += np.where((inside & (weight != 0))[:, None], parts_of_y, 0.0)
        return y.reshape(shape)

    def _pixels(self, g: np.ndarray, size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the pixels of one dimension that are read for coordinates ``g``, and their weights."""
        if self.align_corners:
            at, low, high = (g + 1) / 2 * (size - 1), 0.0, size - 1.0
        else:
            at, low, high = ((g + 1) * size - 1) / 2, -0.5, size - 0.5
        # What is not a number is read nowhere, or where the border ends.
        at = np.where(np.isfinite(at), at, -4.0)
        at = np.clip(at, -(2.0**40), 2.0**40)
        if self.mode == "nearest":
            at = np.rint(at)
        # A cubic's pixels are moved to the border one by one, as PyTorch and ONNX Runtime do.
        if self.padding_mode == "border" and self.mode != "cubic":
            at = np.clip(at, 0, size - 1)
        elif self.padding_mode == "reflection":
            at = np.where((at < low) | (at > high), _reflected(at, low, high), at)
        if self.mode == "nearest":
            pixels, weights = [np.rint(at)], [np.ones(at.shape)]
        else:
            first = np.floor(at)
            t = at - first
            if self.mode == "linear":
                pixels, weights = [first, first + 1], [1 - t, t]
            else:
                pixels, weights = [first + k for k in (-1, 0, 1, 2)], _cubic(t)
        if self.padding_mode == "border":
            pixels = [np.clip(pixel, 0, size - 1) for pixel in pixels]
        elif self.padding_mode == "reflection":
            pixels = [
                np.where(
                    (pixel < low) | (pixel > high), np.trunc(_reflected(pixel, low, high)), pixel
                )
                for pixel in pixels
            ]
        return [pixel.astype(np.int64) for pixel in pixels], weights

    def terms(self, inputs) -> int:
        each = {"nearest": 1, "linear": 2, "cubic": 4}[self.mode]
        return each ** (len(inputs[0].shape) - 2)


def _bilinear(
    x: np.ndarray, y_at: np.ndarray, x_at: np.ndarray, inside: np.ndarray
) -> list[np.ndarray]:
    """Returns the four weighted pixels of ``x`` [C, H, W] around positions; 0 where they are not inside."""
    height, width = x.shape[1:]
    rows, columns = np.floor(y_at), np.floor(x_at)
    t, s = y_at - rows, x_at - columns
    parts = []
    for row, v in ((rows, 1 - t), (rows + 1, t)):
        for column, w in ((columns, 1 - s), (columns + 1, s)):
            there = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            there &= v * w != 0
            r = np.where(there, row, 0).astype(np.int64)
            c = np.where(there, column, 0).astype(np.int64)
            with np.errstate(invalid="ignore"):
                parts.append(np.where(there, x[:, r, c] * (v * w), 0.0))
    return parts


@record
class RoiAlign(Operator):
    """Regions of images pooled into a grid, read between the pixels.

    Inputs: x [N, C, H, W], rois [R, 4] (left, top, right, bottom), their images [R] (int64); output
    [R, C, output_height, output_width].

    Attributes:
        output_height, output_width: the bins of a region.
        sampling_ratio: samples of a bin along each side; 0: as many as it has pixels, rounded up.
        spatial_scale: from the regions' coordinates to pixels.
        mode: ``avg`` of the samples; or ``max`` over the four weighted pixels of every sample.
        half_pixel: whether pixels' centres lie at halves; else a region has at least one pixel.
    """

    kind: ClassVar[str] = "roi_align"
    output_height: int = 1
    output_width: int = 1
    sampling_ratio: int = 0
    spatial_scale: float = 1.0
    mode: str = "avg"
    half_pixel: bool = True

    def infer(self, inputs):
        need(inputs, 3)
        x, rois, images = inputs
        check_types("floats", x.dtype)
        if len(x.shape) != 4 or 0 in x.shape[2:]:
            raise InputError(f"expected images [N, C, H, W], found {list(x.shape)}")
        if len(rois.shape) != 2 or rois.shape[1] != 4 or images.shape != rois.shape[:1]:
            raise InputError(
                f"expected regions [R, 4] and their images [R], found {list(rois.shape)} and "
                f"{list(images.shape)}"
            )
        if images.dtype not in ("int32", "int64"):
            raise InputError(f"batch_indices: expected int64, found {images.dtype}")
        if min(self.output_height, self.output_width) < 1 or self.sampling_ratio < 0:
            raise InputError(
                f"expected at least 1 bin and 0 samples, found {self.output_height} x "
                f"{self.output_width} bins and {self.sampling_ratio} samples"
            )
        if self.mode not in ("avg", "max"):
            raise InputError(f"mode: expected avg or max, found {self.mode!r}")
        return (((rois.shape[0], x.shape[1], self.output_height, self.output_width), x.dtype),)

    def reference(self, x, rois, images):
        self.check(rois, images, len(x))
        x, rois = float64(x), float64(rois)
        y = np.zeros((len(rois), x.shape[1], self.output_height, self.output_width))
        for index, (roi, image) in enumerate(zip(rois, images, strict=True)):
            y[index] = self._region(x[image], roi)
        return y

    def check(self, rois: np.ndarray, images: np.ndarray, count: int) -> None:
        """Checks regions and their images, of which there are ``count``.

        Raises:
            InputError: one is none.
        """
        wrong = images[(images < 0) | (images >= count)]
        if wrong.size:
            raise InputError(f"batch_indices: expected images of {count}, found {wrong[0]}")
        sides = (float64(rois[:, 2:]) - rois[:, :2]) * self.spatial_scale
        with np.errstate(invalid="ignore"):
            wrong = rois[~(np.abs(sides) <= 2**13).all(axis=1)]
        if len(wrong):
            raise InputError(
                f"rois: expected regions of up to 8192 pixels a side, found {wrong[0].tolist()}"
            )

    def _region(self, x: np.ndarray, roi: np.ndarray) -> np.ndarray:
        height, width = x.shape[1:]
        left, top, right, bottom = roi * self.spatial_scale - (0.5 if self.half_pixel else 0.0)
        sizes = [bottom - top, right - left]
        if not self.half_pixel:
            sizes = [max(size, 1.0) for size in sizes]
        bins = (self.output_height, self.output_width)
        samples = [
            self.sampling_ratio or max(math.ceil(size / bin_), 0)
            for size, bin_ in zip(sizes, bins, strict=True)
        ]
        if 0 in samples:
            return np.zeros((len(x), *bins))
        rows, columns = (
            start + np.arange(bin_ * n).reshape(bin_, n) * (size / bin_ / n) + 0.5 * size / bin_ / n
            for start, size, bin_, n in zip((top, left), sizes, bins, samples, strict=True)
        )
        y_at, x_at = np.broadcast_arrays(rows[:, None, :, None], columns[None, :, None, :])
        inside = (y_at >= -1) & (y_at <= height) & (x_at >= -1) & (x_at <= width)
        y_at, x_at = np.clip(y_at, 0, height - 1), np.clip(x_at, 0, width - 1)
        parts = _bilinear(x, y_at, x_at, inside)
        if self.mode == "max":
            return np.maximum.reduce(parts).max(axis=(-2, -1))
        return sum(parts).mean(axis=(-2, -1))

    def terms(self, inputs) -> int:
        return 4 * max(self.sampling_ratio, 1) ** 2


@record
class DeformConv(Operator):
    """A convolution whose taps are moved by offsets, and multiplied by a mask, at every output pixel.

    Inputs: x [N, C, H, W], weight [M, C / groups, R, S], offset [N, offset_groups * R * S * 2, OH, OW] (down,
    right), bias [M] or None, mask [N, offset_groups * R * S, OH, OW] or None. Outside the image x is 0.

    Attributes:
        stride, padding, dilation, groups: as a convolution's.
        offset_groups: groups of input channels with offsets of their own.
    """

    kind: ClassVar[str] = "deform_conv"
    stride: Pair = (1, 1)
    padding: Padding = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    offset_groups: int = 1

    def infer(self, inputs):
        need(inputs, 3, 5)
        x, weight, offset, bias, mask = (*inputs, None, None)[:5]
        check_types("floats", x.dtype)
        if len(x.shape) != 4 or len(weight.shape) != 4:
            raise InputError(
                f"expected x and weight of 4 dimensions, found {list(x.shape)} and {list(weight.shape)}"
            )
        filters, depth, *kernel = weight.shape
        channels = x.shape[1]
        if self.groups < 1 or channels != depth * self.groups or filters % self.groups:
            raise InputError(
                f"weight: expected [M, {channels} / {self.groups}, R, S], found {list(weight.shape)}"
            )
        if self.offset_groups < 1 or channels % self.offset_groups:
            raise InputError(
                f"offset_group: expected a divisor of {channels}, found {self.offset_groups}"
            )
        positions = output_sizes(x.shape[2:], kernel, self.stride, self.padding, self.dilation)
        taps = self.offset_groups * math.prod(kernel)
        for name, value, shape in (
            ("offset", offset, (x.shape[0], 2 * taps, *positions)),
            ("bias", bias, (filters,)),
            ("mask", mask, (x.shape[0], taps, *positions)),
        ):
            if value is not None and value.shape != shape:
                raise InputError(f"{name}: expected {list(shape)}, found {list(value.shape)}")
        return (((x.shape[0], filters, *positions), x.dtype),)

    def reference(self, x, weight, offset, bias=None, mask=None):
        x, weight, offset = float64(x), float64(weight), float64(offset)
        images, channels = x.shape[:2]
        filters, depth, *kernel = weight.shape
        positions = offset.shape[2:]
        offset = offset.reshape(images, self.offset_groups, *kernel, 2, *positions)
        masks = np.ones(offset[:, :, :, :, 0].shape)
        if mask is not None:
            masks = float64(mask).reshape(masks.shape)
        rows, columns = (
            np.arange(size) * step - pad
            for size, step, pad in zip(positions, self.stride, self.padding, strict=False)
        )
        per_group = channels // self.offset_groups
        taps = np.zeros((images, channels, *kernel, *positions))
        whole = np.ones(positions, bool)
        for image, group, r, s in np.ndindex(images, self.offset_groups, *kernel):
            moved = np.clip(offset[image, group, r, s], -(2.0**30), 2.0**30)
            y_at = rows[:, None] + r * self.dilation[0] + moved[0]
            x_at = columns[None, :] + s * self.dilation[1] + moved[1]
            some = slice(group * per_group, (group + 1) * per_group)
            found = sum(_bilinear(x[image, some], y_at, x_at, whole))
            taps[image, some, r, s] = found * masks[image, group, r, s]
        taps = taps.reshape(images, self.groups, depth, *kernel, *positions)
        weight = weight.reshape(self.groups, filters // self.groups, depth, *kernel)
        y = np.einsum("ngcrsij,gmcrs->ngmij", taps, weight, optimize=True)
        y = y.reshape(images, filters, *positions)
        return y if bias is None else y + float64(bias)[:, None, None]

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.terms(inputs)

    def terms(self, inputs: Sequence) -> int:
        return math.prod(inputs[1].shape[1:])
