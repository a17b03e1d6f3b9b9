"""Reductions, softmax and products of matrices."""

from __future__ import annotations

import math

import numpy as np

from ....errors import InputError
from ....operators import reduce
from ....operators.binary import Add, Mul, Pow
from ....operators.linear import Linear
from ....operators.mathematics import Abs, Log
from ....operators.matmul import Matmul
from ....operators.operator import axis_in, is_float
from ....operators.order import Hardmax
from ....operators.shaping import Reshape, Transpose
from ....operators.softmax import LogSoftmax, Softmax
from . import converts
from .shaping import integers_of

_REDUCTIONS = {
    "ReduceSum": (reduce.ReduceSum, 13), "ReduceMean": (reduce.ReduceMean, 18),
    "ReduceMax": (reduce.ReduceMax, 18), "ReduceMin": (reduce.ReduceMin, 18),
    "ReduceProd": (reduce.ReduceProd, 18), "ReduceL1": (reduce.ReduceL1, 18),
    "ReduceL2": (reduce.ReduceL2, 18), "ReduceSumSquare": (reduce.ReduceSumSquare, 18),
    "ReduceLogSum": (reduce.ReduceLogSum, 18), "ReduceLogSumExp": (reduce.ReduceLogSumExp, 18),
}  # fmt: skip
#: What is left of a reduction over no dimension at all; nothing where None.
_OF_ONE = {
    "ReduceL1": Abs, "ReduceL2": Abs, "ReduceLogSum": Log,
}  # fmt: skip


@converts(*_REDUCTIONS)
def reduction(call) -> None:
    record, since = _REDUCTIONS[call.operator]
    axes = integers_of(call, "axes", 1, since)
    keep = bool(call.number("keepdims", 1))
    noop = bool(call.number("noop_with_empty_axes", 0))
    call.refuse_others()
    rank = len(call.value(0).shape)
    if not axes and noop:
        if call.operator == "ReduceSumSquare":
            call.finish(Mul(), [call.input(0), call.input(0)])
        elif call.operator in _OF_ONE:
            call.finish(_OF_ONE[call.operator](), [call.input(0)])
        else:
            call.alias(call.input(0))
        return
    axes = tuple(range(rank)) if not axes else tuple(axis_in(axis, rank) for axis in axes)
    call.finish(record(axes, keep), [call.input(0)])


def _image_axes(call) -> tuple[int, ...]:
    rank = len(call.value(0).shape)
    if rank < 3:
        raise InputError(f"expected at least 3 dimensions, found {list(call.value(0).shape)}")
    return tuple(range(2, rank))


@converts("GlobalAveragePool")
def global_average_pool(call) -> None:
    call.finish(reduce.ReduceMean(_image_axes(call)), call.inputs)


@converts("GlobalMaxPool")
def global_max_pool(call) -> None:
    call.finish(reduce.ReduceMax(_image_axes(call)), call.inputs)


@converts("GlobalLpPool")
def global_lp_pool(call) -> None:
    p, axes = call.number("p", 2), _image_axes(call)
    if p < 1:
        raise InputError(f"p: expected at least 1, found {p}")
    if p <= 2:
        record = reduce.ReduceL1 if p == 1 else reduce.ReduceL2
        call.finish(record(axes), call.inputs)
        return
    dtype = call.value(0).dtype
    power, root = (call.set_constant(np.asarray(number, dtype)) for number in (p, 1 / p))
    powers = call.emit(Pow(), [call.emit(Abs(), call.inputs), power])
    call.finish(Pow(), [call.emit(reduce.ReduceSum(axes), [powers]), root])


@converts("ArgMax", "ArgMin")
def arg_best(call) -> None:
    rank = len(call.value(0).shape)
    axis = axis_in(call.number("axis", 0), rank)
    record = reduce.ArgMax if call.operator == "ArgMax" else reduce.ArgMin
    last = bool(call.number("select_last_index", 0))
    op = record(axis, bool(call.number("keepdims", 1)), last)
    call.refuse_others()
    call.finish(op, call.inputs)


_ROWS = {"Softmax": Softmax, "LogSoftmax": LogSoftmax, "Hardmax": Hardmax}


@converts(*_ROWS)
def rows(call) -> None:
    """Before opset 13 these took everything from the axis on as one row."""
    shape = call.value(0).shape
    record = _ROWS[call.operator]
    if call.opset >= 13:
        axis = axis_in(call.number("axis", -1), len(shape))
        call.refuse_others()
        call.finish(record(axis), call.inputs)
        return
    axis = call.number("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        raise InputError(f"axis: expected a place in {list(shape)}, found {axis}")
    axis += len(shape) if axis < 0 else 0
    call.refuse_others()
    if shape and axis == len(shape) - 1:
        call.finish(record(axis), call.inputs)
        return
    matrix = (math.prod(shape[:axis]), math.prod(shape[axis:]))
    flat = call.emit(Reshape(matrix, allow_zero=True), [call.input(0)])
    flat = call.emit(record(1), [flat])
    call.finish(Reshape(shape, allow_zero=True), [flat])


@converts("MatMul")
def matmul(call) -> None:
    call.finish(Matmul(), call.inputs)


@converts("Gemm")
def gemm(call) -> None:
    """alpha * a' @ b' + beta * c: linear where it is one, else its parts."""
    alpha, beta = call.number("alpha", 1.0), call.number("beta", 1.0)
    turn_a, turn_b = call.number("transA", 0), call.number("transB", 0)
    call.number("broadcast", 0)
    call.refuse_others()
    a, b = call.value(0), call.value(1)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise InputError(f"expected matrices, found {list(a.shape)} and {list(b.shape)}")
    names = [call.input(0), call.input(1)]
    if turn_a:
        names[0] = call.emit(Transpose((1, 0)), [names[0]])
    columns = b.shape[0] if turn_b else b.shape[1]
    row = not call.has(2) or call.value(2).shape in ((columns,), (1, columns))
    if alpha == 1 and (beta == 1 or not call.has(2)) and row and is_float(a.dtype):
        weight = names[1] if turn_b else call.emit(Transpose((1, 0)), [names[1]])
        bias = call.inputs[2] if call.has(2) else None
        if bias is not None and len(call.value(2).shape) == 2:
            bias = call.emit(Reshape((columns,)), [bias])
        call.finish(Linear(), [names[0], weight, bias])
        return
    if turn_b:
        names[1] = call.emit(Transpose((1, 0)), [names[1]])
    steps = []
    if alpha != 1:
        steps.append((Mul(), call.set_constant(np.asarray(alpha, a.dtype))))
    if call.has(2) and beta != 0:
        added = call.input(2)
        if beta != 1:
            added = call.emit(Mul(), [added, call.set_constant(np.asarray(beta, a.dtype))])
        steps.append((Add(), added))
    if not steps:
        call.finish(Matmul(), names)
        return
    product = call.emit(Matmul(), names)
    for op, other in steps[:-1]:
        product = call.emit(op, [product, other])
    op, other = steps[-1]
    call.finish(op, [product, other])
