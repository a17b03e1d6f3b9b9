"""Operators that look at the order of elements: the k greatest, running sums, triangles, one winner a row."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, axis_in, check_types, float64, need, record


@record
class TopK(Operator):
    """The k greatest along one dimension, in order, and where they were (int64); the first of equals first.

    Attributes:
        k: how many.
        axis: the dimension.
        largest: whether the greatest are taken; else the least.
    """

    kind: ClassVar[str] = "top_k"
    k: int
    axis: int = -1
    largest: bool = True

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("numbers", x.dtype)
        axis = axis_in(self.axis, len(x.shape))
        if not 0 <= self.k <= x.shape[axis]:
            raise InputError(f"k: expected up to {x.shape[axis]}, found {self.k}")
        shape = (*x.shape[:axis], self.k, *x.shape[axis + 1 :])
        return ((shape, x.dtype), (shape, "int64"))

    def reference(self, x):
        rows = np.moveaxis(np.asarray(x), self.axis, -1)
        lead, size = rows.shape[:-1], rows.shape[-1]
        rows = rows.reshape(math.prod(lead), size)
        if 0 < self.k < size // 2 and rows.size and not np.isnan(rows).any():
            near = self._candidates(rows)
            order = self._order(np.take_along_axis(rows, near, -1))
            positions = np.take_along_axis(near, order, -1)
        else:
            positions = self._order(rows)[:, : self.k]
        values = np.take_along_axis(rows, positions, -1)
        return tuple(
            np.moveaxis(found.reshape(*lead, self.k), -1, self.axis)
            for found in (values, positions.astype(np.int64))
        )

    def _order(self, rows: np.ndarray) -> np.ndarray:
        """Returns the positions of a row's elements in order; NaN is the greatest."""
        if not self.largest:
            return np.argsort(rows, -1, kind="stable")
        # A stable sort of the mirrored keeps the first of equals last there.
        return rows.shape[-1] - 1 - np.argsort(rows[:, ::-1], -1, kind="stable")[:, ::-1]

    def _candidates(self, rows: np.ndarray) -> np.ndarray:
        """Returns the positions of the k that are taken, as they stand in a row: of equals the first ones."""
        k, size = self.k, rows.shape[-1]
        last = size - k if self.largest else k - 1
        least = np.partition(rows, last, -1)[:, last : last + 1]
        found = np.nonzero(rows >= least if self.largest else rows <= least)[1]
        if len(found) > len(rows) * k:  # several are the last of the k
            taken = rows > least if self.largest else rows < least
            equal = rows == least
            equal &= np.cumsum(equal, -1) <= k - taken.sum(-1, keepdims=True)
            found = np.nonzero(taken | equal)[1]
        return found.reshape(-1, k)


@record
class Cumulative(Operator):
    """Base: an operation of all elements up to each one, along one dimension.

    Attributes:
        axis: the dimension.
        exclusive: whether an element itself is left out.
        reverse: whether it runs from the end.
    """

    in_place: ClassVar[bool] = True
    operation: ClassVar[np.ufunc]
    axis: int
    exclusive: bool = False
    reverse: bool = False

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("numbers", x.dtype)
        axis_in(self.axis, len(x.shape))
        return ((x.shape, x.dtype),)

    def reference(self, x):
        wide = float64(x)
        view = np.flip(wide, self.axis) if self.reverse else wide
        out = None if wide is x else view  # a copy is written over
        y = self.operation.accumulate(view, axis=self.axis, dtype=wide.dtype, out=out)
        if self.exclusive:
            y = np.moveaxis(y, self.axis, 0)
            first = np.full_like(y[:1], self.operation.identity)
            y = np.moveaxis(np.concatenate([first, y[:-1]])[: len(y)], 0, self.axis)
        return np.flip(y, self.axis) if self.reverse else y

    def terms(self, inputs) -> int:
        return max(1, inputs[0].shape[self.axis])


@record
class CumSum(Cumulative):
    """Sums of all elements up to each one, along one dimension."""

    kind: ClassVar[str] = "cum_sum"
    operation: ClassVar[np.ufunc] = np.add


@record
class CumProd(Cumulative):
    """Products of all elements up to each one, along one dimension."""

    kind: ClassVar[str] = "cum_prod"
    operation: ClassVar[np.ufunc] = np.multiply


@record
class Trilu(Operator):
    """The upper or lower triangle of the last two dimensions; zeros elsewhere.

    Attributes:
        upper: which triangle.
        k: the diagonal it begins with; above the main one if positive.
    """

    kind: ClassVar[str] = "trilu"
    upper: bool = True
    k: int = 0

    def infer(self, inputs):
        need(inputs, 1)
        if len(inputs[0].shape) < 2:
            raise InputError(f"expected at least 2 dimensions, found {list(inputs[0].shape)}")
        return ((inputs[0].shape, inputs[0].dtype),)

    def reference(self, x):
        rows, columns = x.shape[-2:]
        distance = np.arange(columns)[None, :] - np.arange(rows)[:, None]
        kept = distance >= self.k if self.upper else distance <= self.k
        return np.where(kept, float64(x), np.zeros((), float64(x).dtype))


@record
class Hardmax(Operator):
    """1 at the first maximum along one dimension, 0 elsewhere.

    Attributes:
        axis: the dimension.
    """

    kind: ClassVar[str] = "hardmax"
    axis: int = -1

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types("floats", x.dtype)
        axis_in(self.axis, len(x.shape))
        return ((x.shape, x.dtype),)

    def reference(self, x):
        y = np.zeros(x.shape)
        if x.size:
            best = np.expand_dims(np.argmax(x, axis=self.axis), self.axis)
            np.put_along_axis(y, best, 1.0, self.axis)
        return y
