"""Operators that choose elements by tables of integers, and write by them."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, axis_in, need, record


def _positions(indices: np.ndarray, size: int) -> np.ndarray:
    """Returns ``indices`` counted from 0.

    Raises:
        InputError: one is outside.
    """
    if indices.size and not (-size <= indices.min() and indices.max() < size):
        wrong = indices[(indices < -size) | (indices >= size)].ravel()[0]
        raise InputError(f"indices: expected positions of {size}, found {wrong}")
    return np.where(indices < 0, indices + size, indices).astype(np.int64)


def _need_integers(value) -> None:
    if value.dtype not in ("int32", "int64"):
        raise InputError(f"indices: expected int32 or int64, found {value.dtype}")


@record
class Gather(Operator):
    """Slices of x chosen along one dimension. Inputs: x, indices (int32 or int64, any shape).

    Attributes:
        axis: the dimension that the indices count; the indices' dimensions stand in its place.
    """

    kind: ClassVar[str] = "gather"
    axis: int = 0

    def infer(self, inputs):
        need(inputs, 2)
        x, indices = inputs
        axis = axis_in(self.axis, len(x.shape))
        _need_integers(indices)
        return (((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype),)

    def reference(self, x, indices):
        return np.take(np.asarray(x), _positions(indices, x.shape[self.axis]), axis=self.axis)


@record
class GatherElements(Operator):
    """One element of x for each index, along one dimension. Inputs: x, indices of as many dimensions.

    Attributes:
        axis: the dimension that the indices count.
    """

    kind: ClassVar[str] = "gather_elements"
    axis: int = 0

    def infer(self, inputs):
        need(inputs, 2)
        x, indices = inputs
        axis = axis_in(self.axis, len(x.shape))
        _need_integers(indices)
        if len(indices.shape) != len(x.shape) or any(
            i > s for n, (i, s) in enumerate(zip(indices.shape, x.shape, strict=True)) if n != axis
        ):
            raise InputError(
                f"indices: expected a shape within {list(x.shape)}, found {list(indices.shape)}"
            )
        return ((indices.shape, x.dtype),)

    def reference(self, x, indices):
        return np.asarray(x)[_element_positions(x.shape, indices, self.axis)]


def _element_positions(shape, indices: np.ndarray, axis: int) -> tuple[np.ndarray, ...]:
    """Returns the index arrays with which every index names one element of an array of ``shape``."""
    axis = axis_in(axis, len(shape))
    positions = list(np.ogrid[tuple(slice(size) for size in indices.shape)])
    positions[axis] = _positions(indices, shape[axis])
    return tuple(positions)


@record
class ScatterElements(Operator):
    """x with single elements written. Inputs: x, indices, updates of the indices' shape.

    Attributes:
        axis: the dimension that the indices count.
        reduction: ``none`` (written over), or ``add``, ``mul``, ``max``, ``min``: joined with what is there.
    """

    kind: ClassVar[str] = "scatter_elements"
    axis: int = 0
    reduction: str = "none"

    def infer(self, inputs):
        need(inputs, 3)
        x, indices, updates = inputs
        GatherElements(self.axis).infer(inputs[:2])
        if updates.shape != indices.shape or updates.dtype != x.dtype:
            raise InputError(
                f"updates: expected {x.dtype} {list(indices.shape)}, "
                f"found {updates.dtype} {list(updates.shape)}"
            )
        return ((x.shape, x.dtype),)

    def reference(self, x, indices, updates):
        y = np.array(x)
        _write(
            y, _element_positions(x.shape, indices, self.axis), np.asarray(updates), self.reduction
        )
        return y


def _write(y: np.ndarray, positions: tuple[np.ndarray, ...], updates, reduction: str) -> None:
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    if reduction == "none":
        y[positions] = updates
    else:
        combine[reduction].at(y, positions, updates)


@record
class GatherND(Operator):
    """Slices of x, each named by a row of indices. Inputs: x, indices [..., R].

    Attributes:
        batch_dims: dimensions at the front that x and indices share.
    """

    kind: ClassVar[str] = "gather_nd"
    batch_dims: int = 0

    def infer(self, inputs):
        need(inputs, 2)
        x, indices = inputs
        _need_integers(indices)
        shared = self.batch_dims
        depth = indices.shape[-1] if indices.shape else 0
        if (
            not 0 <= shared < min(len(x.shape), len(indices.shape))
            or x.shape[:shared] != indices.shape[:shared]
            or not 1 <= depth <= len(x.shape) - shared
        ):
            raise InputError(
                f"indices: expected rows for {list(x.shape)} after {shared} shared dimensions, "
                f"found {list(indices.shape)}"
            )
        return (((*indices.shape[:-1], *x.shape[shared + depth :]), x.dtype),)

    def reference(self, x, indices):
        shared = self.batch_dims
        rank = indices.ndim - 1
        positions = [
            np.arange(size).reshape([-1 if i == axis else 1 for i in range(rank)])
            for axis, size in enumerate(x.shape[:shared])
        ]
        for column in range(indices.shape[-1]):
            positions.append(_positions(indices[..., column], x.shape[shared + column]))
        return np.asarray(x)[tuple(positions)]


@record
class ScatterND(Operator):
    """x with slices written, each named by a row of indices. Inputs: x, indices [..., R], updates.

    Attributes:
        reduction: ``none`` (written over), or ``add``, ``mul``, ``max``, ``min``: joined with what is there.
    """

    kind: ClassVar[str] = "scatter_nd"
    reduction: str = "none"

    def infer(self, inputs):
        need(inputs, 3)
        x, _, updates = inputs
        ((shape, dtype),) = GatherND().infer(inputs[:2])
        if updates.shape != shape or updates.dtype != dtype:
            raise InputError(
                f"updates: expected {dtype} {list(shape)}, "
                f"found {updates.dtype} {list(updates.shape)}"
            )
        return ((x.shape, x.dtype),)

    def reference(self, x, indices, updates):
        y = np.array(x)
        positions = tuple(
            _positions(indices[..., column], x.shape[column]) for column in range(indices.shape[-1])
        )
        _write(y, positions, np.asarray(updates), self.reduction)
        return y


@record
class TensorScatter(Operator):
    """A cache with new rows written into every sequence.

    Inputs: cache [N, ...], update of its shape but along ``axis``, first positions [N] (int64) or None: 0.

    Attributes:
        mode: ``linear``: all rows must fit; ``circular``: what passes the end goes on at the beginning.
        axis: the dimension of the rows, not the first.
    """

    kind: ClassVar[str] = "tensor_scatter"
    mode: str = "linear"
    axis: int = -2

    def infer(self, inputs):
        need(inputs, 2, 3)
        cache, update, first = (*inputs, None)[:3]
        axis = axis_in(self.axis, len(cache.shape))
        if self.mode not in ("linear", "circular") or axis == 0:
            raise InputError(
                f"expected the mode linear or circular and an axis above 0, found {self.mode!r}, {axis}"
            )
        rows = update.shape[axis] if len(update.shape) == len(cache.shape) else -1
        wanted = (*cache.shape[:axis], rows, *cache.shape[axis + 1 :])
        if not 0 <= rows <= cache.shape[axis] or (update.shape, update.dtype) != (
            wanted,
            cache.dtype,
        ):
            raise InputError(
                f"update: expected {cache.dtype} rows of {list(cache.shape)} along {axis}, "
                f"found {update.dtype} {list(update.shape)}"
            )
        if first is not None:
            _need_integers(first)
            if first.shape != cache.shape[:1]:
                raise InputError(
                    f"write_indices: expected [{cache.shape[0]}], found {list(first.shape)}"
                )
        return ((cache.shape, cache.dtype),)

    def reference(self, cache, update, first=None):
        axis = axis_in(self.axis, cache.ndim)
        size, rows = cache.shape[axis], update.shape[axis]
        y = np.moveaxis(np.array(cache), axis, 1)
        update = np.moveaxis(np.asarray(update), axis, 1)
        first = np.zeros(len(y), np.int64) if first is None else np.asarray(first).astype(np.int64)
        last = size - rows if self.mode == "linear" else size - 1
        wrong = first[(first < 0) | (first > max(last, 0))]
        if wrong.size and rows:
            raise InputError(f"write_indices: expected 0 to {max(last, 0)}, found {wrong[0]}")
        positions = (first[:, None] + np.arange(rows)) % max(size, 1)
        y[np.arange(len(y))[:, None], positions] = update
        return np.ascontiguousarray(np.moveaxis(y, 1, axis))


@record
class OneHot(Operator):
    """A vector for each index: the on value at its position, the off value elsewhere.

    Inputs: indices (any numbers), values [2]: off, on.

    Attributes:
        depth: the vectors' length.
        axis: the dimension of the output that they lie along.
    """

    kind: ClassVar[str] = "one_hot"
    depth: int
    axis: int = -1

    def infer(self, inputs):
        need(inputs, 2)
        indices, values = inputs
        axis = axis_in(self.axis, len(indices.shape) + 1)
        if values.shape != (2,) or self.depth < 1:
            raise InputError(f"expected two values and a depth of at least 1, found {self.depth}")
        return (((*indices.shape[:axis], self.depth, *indices.shape[axis:]), values.dtype),)

    def reference(self, indices, values):
        indices = np.asarray(indices).astype(np.int64)
        axis = axis_in(self.axis, indices.ndim + 1)
        positions = np.expand_dims(np.where(indices < 0, indices + self.depth, indices), axis)
        counts = np.arange(self.depth).reshape(
            [-1 if i == axis else 1 for i in range(positions.ndim)]
        )
        off, on = values
        return np.where(positions == counts, on, off)
