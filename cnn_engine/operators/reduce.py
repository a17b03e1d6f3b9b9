"""Reductions: one number from all elements along some dimensions. One record a function, named for it."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, axis_in, check_types, float64, need, record


@record
class Reduce(Operator):
    """Input: x of any shape.

    Attributes:
        function: the function's name among a kernel's.
        axes: the dimensions that go.
        keepdims: whether they stay, with size 1.
    """

    function: ClassVar[str]
    types: ClassVar[str] = "numbers"
    axes: tuple[int, ...]
    keepdims: bool = True

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types(self.types, x.dtype)
        gone = [axis_in(axis, len(x.shape)) for axis in self.axes]
        if len(set(gone)) != len(gone):
            raise InputError(f"axes: expected each dimension once, found {list(self.axes)}")
        shape = tuple(
            1 if axis in gone else size
            for axis, size in enumerate(x.shape)
            if self.keepdims or axis not in gone
        )
        return ((shape, x.dtype),)

    def reference(self, x):
        x = float64(x)
        axes = tuple(axis_in(axis, x.ndim) for axis in self.axes)
        with np.errstate(all="ignore"):
            y = self.of(x, axes)
        return np.asarray(y if self.keepdims else y.squeeze(axes)).astype(x.dtype, copy=False)

    def of(self, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        """Returns the result with all dimensions kept."""
        raise NotImplementedError

    def terms(self, inputs) -> int:
        return max(1, math.prod(inputs[0].shape[axis] for axis in self.axes))


def _limits(x: np.ndarray) -> tuple[object, object]:
    """Returns the least and the greatest number that ``x``'s type has."""
    if x.dtype.kind == "f":
        return -np.inf, np.inf
    if x.dtype.kind == "b":
        return False, True
    limits = np.iinfo(x.dtype)
    return limits.min, limits.max


@record
class ReduceSum(Reduce):
    """The sum."""

    kind: ClassVar[str] = "reduce_sum"
    function: ClassVar[str] = "sum"

    def of(self, x, axes):
        return x.sum(axis=axes, keepdims=True)


@record
class ReduceMean(Reduce):
    """The mean; of integers, cut off towards 0."""

    kind: ClassVar[str] = "reduce_mean"
    function: ClassVar[str] = "mean"

    def of(self, x, axes):
        count = math.prod(x.shape[axis] for axis in axes)
        return x.sum(axis=axes, keepdims=True) / np.float64(count)


@record
class ReduceMax(Reduce):
    """The maximum; NaN wins; the least number of all where there is nothing. Booleans too."""

    kind: ClassVar[str] = "reduce_max"
    function: ClassVar[str] = "max"

    def infer(self, inputs):
        return _numbers_or_booleans(self, inputs)

    def of(self, x, axes):
        return x.max(axis=axes, keepdims=True, initial=_limits(x)[0])


@record
class ReduceMin(Reduce):
    """The minimum; NaN wins; the greatest number of all where there is nothing. Booleans too."""

    kind: ClassVar[str] = "reduce_min"
    function: ClassVar[str] = "min"

    def infer(self, inputs):
        return _numbers_or_booleans(self, inputs)

    def of(self, x, axes):
        return x.min(axis=axes, keepdims=True, initial=_limits(x)[1])


def _numbers_or_booleans(op: Reduce, inputs):
    need(inputs, 1)
    if inputs[0].dtype != "bool":
        return Reduce.infer(op, inputs)
    ((shape, _),) = ReduceSum(op.axes, op.keepdims).infer(
        [type(inputs[0])(inputs[0].name, inputs[0].shape)]
    )
    return ((shape, "bool"),)


@record
class ReduceProd(Reduce):
    """The product."""

    kind: ClassVar[str] = "reduce_prod"
    function: ClassVar[str] = "prod"

    def of(self, x, axes):
        return x.prod(axis=axes, keepdims=True)


@record
class ReduceL1(Reduce):
    """The sum of absolute values."""

    kind: ClassVar[str] = "reduce_l1"
    function: ClassVar[str] = "l1"

    def of(self, x, axes):
        return np.abs(x).sum(axis=axes, keepdims=True)


@record
class ReduceL2(Reduce):
    """The root of the sum of squares."""

    kind: ClassVar[str] = "reduce_l2"
    function: ClassVar[str] = "l2"

    def of(self, x, axes):
        return np.sqrt(np.square(x).sum(axis=axes, keepdims=True))


@record
class ReduceSumSquare(Reduce):
    """The sum of squares."""

    kind: ClassVar[str] = "reduce_sum_square"
    function: ClassVar[str] = "sum_square"

    def of(self, x, axes):
        return np.square(x).sum(axis=axes, keepdims=True)


@record
class ReduceLogSum(Reduce):
    """The logarithm of the sum."""

    kind: ClassVar[str] = "reduce_log_sum"
    function: ClassVar[str] = "log_sum"

    def of(self, x, axes):
        return np.log(x.sum(axis=axes, keepdims=True))


@record
class ReduceLogSumExp(Reduce):
    """The logarithm of the sum of exponentials, without overflow."""

    kind: ClassVar[str] = "reduce_log_sum_exp"
    function: ClassVar[str] = "log_sum_exp"

    def of(self, x, axes):
        x = np.asarray(x, np.float64)
        top = x.max(axis=axes, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0.0)
        return np.log(np.exp(x - top).sum(axis=axes, keepdims=True)) + top


@record
class ArgMax(Operator):
    """Position of the maximum along one dimension; output int64.

    Attributes:
        axis: the dimension that goes.
        keepdims: whether it stays, with size 1.
        last: whether the last of equals counts; else the first.
    """

    kind: ClassVar[str] = "arg_max"
    axis: int = 0
    keepdims: bool = True
    last: bool = False

    def infer(self, inputs):
        need(inputs, 1)
        shape = inputs[0].shape
        axis = axis_in(self.axis, len(shape))
        if shape[axis] < 1:
            raise InputError(f"expected at least one element to choose from, found {list(shape)}")
        kept = (1,) if self.keepdims else ()
        return (((*shape[:axis], *kept, *shape[axis + 1 :]), "int64"),)

    def reference(self, x):
        x = np.flip(float64(x), self.axis) if self.last else float64(x)
        positions = self.of(x)
        if self.last:
            positions = x.shape[self.axis] - 1 - positions
        return (np.expand_dims(positions, self.axis) if self.keepdims else positions).astype(
            np.int64
        )

    def of(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x.argmax(axis=self.axis))


@record
class ArgMin(ArgMax):
    """Position of the minimum along one dimension; output int64."""

    kind: ClassVar[str] = "arg_min"

    def of(self, x):
        return np.asarray(x.argmin(axis=self.axis))
