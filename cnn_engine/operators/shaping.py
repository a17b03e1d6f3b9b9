"""Operators that move elements and change none: reshape, transpose, expand, tile, slices, joins."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, Shape, axis_in, broadcast, need, record, same_dtype


@record
class Reshape(Operator):
    """The elements of x in row-major order under another shape.

    Attributes:
        shape: of the output; 0 takes x's dimension at the same place, one -1 is what is left.
        allow_zero: whether 0 is a dimension of no elements instead.
    """

    kind: ClassVar[str] = "reshape"
    in_place: ClassVar[bool] = True
    shape: Shape
    allow_zero: bool = False

    def resolved(self, shape: Shape) -> Shape:
        """Returns the shape of the output for an input of ``shape``."""
        wanted, taken = list(self.shape), []
        for place, size in enumerate(wanted):
            if size == 0 and not self.allow_zero:
                if place >= len(shape):
                    raise InputError(
                        f"shape: expected a dimension {place} of {list(shape)} to take for the 0 of "
                        f"{list(self.shape)}, found none"
                    )
                wanted[place] = shape[place]
                taken.append(place)
        elements = math.prod(shape)
        if wanted.count(-1) == 1:
            # Dimensions that are taken over cancel out: one of them may be a batch of 0.
            left = math.prod(size for place, size in enumerate(shape) if place not in taken)
            others = math.prod(
                size for place, size in enumerate(wanted) if size != -1 and place not in taken
            )
            if others > 0 and left % others == 0:
                wanted[wanted.index(-1)] = left // others
            elif others == 0 and left == 0:
                wanted[wanted.index(-1)] = 0
        if any(size < 0 for size in wanted) or math.prod(wanted) != elements:
            raise InputError(
                f"shape: expected one of {elements} elements as {list(shape)} has, found {list(self.shape)}"
            )
        return tuple(wanted)

    def infer(self, inputs):
        need(inputs, 1)
        return ((self.resolved(inputs[0].shape), inputs[0].dtype),)

    def reference(self, x):
        return np.asarray(x).reshape(self.resolved(x.shape))


@record
class Transpose(Operator):
    """x with its dimensions in another order.

    Attributes:
        perm: for every dimension of the output, which of x it is.
    """

    kind: ClassVar[str] = "transpose"
    perm: tuple[int, ...]

    def infer(self, inputs):
        need(inputs, 1)
        shape = inputs[0].shape
        if sorted(self.perm) != list(range(len(shape))):
            raise InputError(
                f"perm: expected an order of {len(shape)} dimensions, found {list(self.perm)}"
            )
        return ((tuple(shape[axis] for axis in self.perm), inputs[0].dtype),)

    def reference(self, x):
        return np.asarray(x).transpose(self.perm)


@record
class Expand(Operator):
    """x repeated along dimensions of size 1, by NumPy's rules of broadcasting.

    Attributes:
        shape: what x's shape is broadcast with.
    """

    kind: ClassVar[str] = "expand"
    shape: Shape

    def infer(self, inputs):
        need(inputs, 1)
        if any(size < 0 for size in self.shape):
            raise InputError(f"shape: expected sizes of at least 0, found {list(self.shape)}")
        return ((broadcast(inputs[0].shape, self.shape), inputs[0].dtype),)

    def reference(self, x):
        return np.broadcast_to(np.asarray(x), broadcast(x.shape, self.shape))


@record
class Range(Operator):
    """Numbers at equal distances, of no input.

    Attributes:
        start, step: the first, and what is added from each to the next.
        count: how many.
        dtype: theirs.
    """

    kind: ClassVar[str] = "range"
    start: int
    count: int
    step: int
    dtype: str = "int64"

    def infer(self, inputs):
        need(inputs, 0)
        if self.count < 0:
            raise InputError(f"count: expected at least 0, found {self.count}")
        return (((self.count,), self.dtype),)

    def reference(self):
        return (self.start + np.arange(self.count) * self.step).astype(self.dtype)


@record
class Tile(Operator):
    """x written several times along each dimension.

    Attributes:
        repeats: how many times, for every dimension.
    """

    kind: ClassVar[str] = "tile"
    repeats: tuple[int, ...]

    def infer(self, inputs):
        need(inputs, 1)
        shape = inputs[0].shape
        if len(self.repeats) != len(shape) or any(count < 0 for count in self.repeats):
            raise InputError(
                f"repeats: expected {len(shape)} numbers of at least 0, found {list(self.repeats)}"
            )
        sizes = tuple(size * times for size, times in zip(shape, self.repeats, strict=True))
        return ((sizes, inputs[0].dtype),)

    def reference(self, x):
        return np.tile(np.asarray(x), self.repeats)


@record
class Concat(Operator):
    """Any number of inputs of one type, one after another.

    Attributes:
        axis: the dimension in which they may differ.
    """

    kind: ClassVar[str] = "concat"
    axis: int

    def infer(self, inputs):
        need(inputs, 1, max(1, len(inputs)))
        need(inputs, len(inputs))
        first = inputs[0].shape
        axis = axis_in(self.axis, len(first))
        for value in inputs:
            same = len(value.shape) == len(first) and all(
                size == other
                for place, (size, other) in enumerate(zip(value.shape, first, strict=True))
                if place != axis
            )
            if not same:
                raise InputError(
                    f"expected shapes that are alike but for dimension {axis}, "
                    f"found {list(first)} and {list(value.shape)}"
                )
        size = sum(value.shape[axis] for value in inputs)
        return (((*first[:axis], size, *first[axis + 1 :]), same_dtype(inputs)),)

    def reference(self, *arrays):
        return np.concatenate(arrays, axis=self.axis)


@record
class Split(Operator):
    """x cut into pieces; one output a piece.

    Attributes:
        axis: the dimension that is cut.
        sizes: of the pieces along it.
    """

    kind: ClassVar[str] = "split"
    axis: int
    sizes: tuple[int, ...]

    def infer(self, inputs):
        need(inputs, 1)
        shape = inputs[0].shape
        axis = axis_in(self.axis, len(shape))
        if not self.sizes or any(size < 0 for size in self.sizes) or sum(self.sizes) != shape[axis]:
            raise InputError(
                f"sizes: expected pieces of {shape[axis]} in all, found {list(self.sizes)}"
            )
        return tuple(
            ((*shape[:axis], size, *shape[axis + 1 :]), inputs[0].dtype) for size in self.sizes
        )

    def reference(self, x):
        ends = np.cumsum(self.sizes)[:-1]
        pieces = tuple(np.split(np.asarray(x), ends, axis=self.axis))
        return pieces if len(pieces) > 1 else pieces[0]


@record
class Slice(Operator):
    """Every step-th element from start to before end, along some dimensions.

    Attributes:
        starts, ends, axes, steps: as in Python: negative positions count from the end, all are cut to what
            there is, steps may be negative but not 0.
    """

    kind: ClassVar[str] = "slice"
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    axes: tuple[int, ...]
    steps: tuple[int, ...]

    def ranges(self, shape: Shape) -> tuple[range, ...]:
        """Returns the positions that are taken along every dimension of an input of ``shape``."""
        taken = self.taken(shape)
        return tuple(taken.get(axis, range(size)) for axis, size in enumerate(shape))

    def taken(self, shape: Shape) -> dict[int, range]:
        """Returns the positions that are taken along every dimension that is named."""
        return {axis: range(*bounds) for axis, bounds in self.bounds(shape).items()}

    def bounds(self, shape: Shape) -> dict[int, tuple[int, int, int]]:
        """Returns the start, end and step of each, which may depend on dimensions that are not known yet."""
        counts = {len(self.starts), len(self.ends), len(self.axes), len(self.steps)}
        if len(counts) != 1:
            raise InputError(
                f"expected as many starts, ends, axes and steps, found {len(self.starts)}, "
                f"{len(self.ends)}, {len(self.axes)} and {len(self.steps)}"
            )
        found: dict[int, tuple[int, int, int]] = {}
        for start, end, axis, step in zip(
            self.starts, self.ends, self.axes, self.steps, strict=True
        ):
            place = axis_in(axis, len(shape))
            if place in found:
                raise InputError(f"axes: expected each dimension once, found {list(self.axes)}")
            if step == 0:
                raise InputError("steps: expected numbers other than 0, found 0")
            size = shape[place]
            start, end = (
                max(v + size, -1 if step < 0 else 0) if v < 0 else v for v in (start, end)
            )
            if step > 0:
                found[place] = min(start, size), min(end, size), step
            else:
                found[place] = min(start, size - 1), min(end, size - 1), step
        return found

    def infer(self, inputs):
        need(inputs, 1)
        sizes = list(inputs[0].shape)
        for axis, (start, end, step) in self.bounds(inputs[0].shape).items():
            sizes[axis] = max(-((start - end) // step), 0)
        return ((tuple(sizes), inputs[0].dtype),)

    def reference(self, x):
        x = np.asarray(x)
        for axis, positions in enumerate(self.ranges(x.shape)):
            x = np.take(x, np.asarray(positions, np.int64), axis=axis)
        return x


@record
class DepthToSpace(Operator):
    """x [N, B * B * C, H, W] -> [N, C, H * B, W * B].

    Attributes:
        block: B.
        mode: ``DCR``: channels are [B, B, C]; ``CRD``: they are [C, B, B].
    """

    kind: ClassVar[str] = "depth_to_space"
    block: int
    mode: str = "DCR"

    def infer(self, inputs):
        need(inputs, 1)
        shape = inputs[0].shape
        if len(shape) != 4 or self.block < 1 or shape[1] % self.block**2:
            raise InputError(
                f"expected 4 dimensions with channels in blocks of {self.block} x {self.block}, "
                f"found {list(shape)}"
            )
        n, c, h, w = shape
        sizes = (n, c // self.block**2, h * self.block, w * self.block)
        return ((sizes, inputs[0].dtype),)

    @property
    def perm(self) -> tuple[int, ...]:
        """The order of the six dimensions that the channels' split makes."""
        return (0, 3, 4, 1, 5, 2) if self.mode == "DCR" else (0, 1, 4, 2, 5, 3)

    def reference(self, x):
        n, c, h, w = x.shape
        b = self.block
        split = (b, b, c // b**2) if self.mode == "DCR" else (c // b**2, b, b)
        blocks = np.asarray(x).reshape(n, *split, h, w).transpose(self.perm)
        return blocks.reshape(n, c // b**2, h * b, w * b)


@record
class SpaceToDepth(Operator):
    """x [N, C, H * B, W * B] -> [N, B * B * C, H, W]; channels come out as [B, B, C].

    Attributes:
        block: B.
    """

    kind: ClassVar[str] = "space_to_depth"
    block: int

    def infer(self, inputs):
        need(inputs, 1)
        shape = inputs[0].shape
        if len(shape) != 4 or self.block < 1 or shape[2] % self.block or shape[3] % self.block:
            raise InputError(
                f"expected 4 dimensions with rows and columns in blocks of {self.block}, "
                f"found {list(shape)}"
            )
        n, c, h, w = shape
        sizes = (n, c * self.block**2, h // self.block, w // self.block)
        return ((sizes, inputs[0].dtype),)

    def reference(self, x):
        n, c, h, w = x.shape
        b = self.block
        blocks = np.asarray(x).reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
        return blocks.reshape(n, c * b**2, h // b, w // b)
