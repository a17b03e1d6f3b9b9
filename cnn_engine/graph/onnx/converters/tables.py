"""Constants, shapes, and operators that choose by tables of integers."""

from __future__ import annotations

import math

import numpy as np

from ....errors import InputError, UnsupportedError
from ....operators.data_dependent import NonMaxSuppression, NonZero, Unique
from ....operators.gather import Gather, OneHot, ScatterElements
from ....operators.operator import axis_in
from ....operators.order import CumProd, CumSum, TopK, Trilu
from ....operators.shaping import Expand, Range, Reshape
from ...dims import holds_dims, integers
from ...folding import FOLD_BYTES
from .. import model as protobuf
from ..refusal import FILL_BYTES, Refusal
from . import converts


def bounded(shape, itemsize: int, most: int = FOLD_BYTES) -> tuple[int, ...]:
    """Returns the shape of a constant that loading makes, if it is not too large."""
    shape = tuple(int(size) for size in shape)
    if min(shape, default=0) < 0 or math.prod(shape) * itemsize > most or len(shape) > 32:
        raise InputError(f"expected a constant of up to {most} bytes, found {list(shape)[:33]}")
    return shape


@converts("Constant")
def constant(call) -> None:
    given = [
        name
        for name in ("value", "value_float", "value_floats", "value_int", "value_ints")
        if call.has_attribute(name)
    ]
    if len(given) != 1:
        raise Refusal(None, "constants that are neither tensors nor numbers are not supported")
    value = call.attribute(given[0])
    if given[0] != "value":
        value = np.asarray(value, np.float32 if "float" in given[0] else np.int64)
    elif not isinstance(value, np.ndarray):
        raise InputError("value: expected a tensor, found a number")
    call.set_constant(value, output=0)


@converts("ConstantOfShape")
def constant_of_shape(call) -> None:
    value = call.attribute("value", np.zeros(1, np.float32))
    if not isinstance(value, np.ndarray) or value.size != 1:
        raise InputError("value: expected a tensor of one element")
    shape = call.constant_integers(0, "shape") or ()
    if holds_dims(shape):
        call.finish(Expand(shape), [call.set_constant(value.reshape(()))])
        return
    shape = bounded(shape, value.dtype.itemsize, FILL_BYTES)
    call.set_constant(np.broadcast_to(value.reshape(()), shape), output=0)  # takes no memory yet


@converts("Shape")
def shape_of(call) -> None:
    shape = call.value(0).shape
    start, end = call.number("start", 0), call.number("end", len(shape))
    call.refuse_others()
    call.set_constant(integers(shape)[start:end], output=0)


@converts("Size")
def size_of(call) -> None:
    call.set_constant(integers([call.value(0).size]).reshape(()), output=0)


@converts("Range")
def range_of(call) -> None:
    if found := _open_range(call):
        call.finish(found, [])
        return
    start, limit, step = (call.constant(i, ("start", "limit", "delta")[i]) for i in range(3))
    if start.size != 1 or limit.size != 1 or step.size != 1:
        raise InputError("expected one number each for start, limit and delta")
    start, limit, step = (v.reshape(-1)[0] for v in (start, limit, step))
    count = (float(limit) - float(start)) / float(step) if step else math.nan
    if not math.isfinite(count):
        raise InputError(f"expected a range that ends, found {start} to {limit} by {step}")
    (size,) = bounded((max(0, math.ceil(count)),), 8)
    call.set_constant((start + np.arange(size) * step).astype(start.dtype), output=0)


def _open_range(call) -> Range | None:
    """Returns the range of whole numbers that a dimension ends; None where all is known."""
    if not any(call.is_dimension(index) for index in range(3)):
        return None
    names = ("start", "limit", "delta")
    numbers = [call.constant_integers(index, name) for index, name in enumerate(names)]
    if any(len(found) != 1 for found in numbers):
        raise InputError("expected one number each for start, limit and delta")
    (start,), (limit,), (step,) = numbers
    if step == 0:
        raise InputError(f"expected a range that ends, found {start} to {limit} by {step}")
    return Range(start, max(-((start - limit) // step), 0), step, call.value(1).dtype)


@converts("EyeLike")
def eye_like(call) -> None:
    x = call.value(0)
    number = call.number("dtype", 0)
    try:
        dtype = protobuf.dtype_name(number) if number else x.dtype
    except UnsupportedError as error:
        raise Refusal("dtype", str(error)) from None
    if len(x.shape) != 2:
        raise InputError(f"expected 2 dimensions, found {list(x.shape)}")
    rows, columns = bounded(x.shape, 8)
    k = call.number("k", 0)
    call.refuse_others()
    call.set_constant(
        np.eye(rows, columns, k if abs(k) < 2**31 else rows + columns, dtype), output=0
    )


def _data_dependent(call, make, inputs, axis: int, outputs: int = 1) -> None:
    """Adds an operator whose inputs' values say how much it makes.

    Args:
        make: returns the record for a count of it.
        axis: the dimension of the first output that this is.
        outputs: how many there are.
    """
    if all(name is None or call.is_known(name) for name in inputs):
        arrays = [None if name is None else call.constant_of(name, None) for name in inputs]
        found = make(0).reference(*arrays)
        for index, array in enumerate(found if isinstance(found, tuple) else (found,)):
            if call.wants(index):
                bounded(array.shape, array.dtype.itemsize)
                call.set_constant(np.ascontiguousarray(array), output=index)
        return
    count = call.found_dimension(axis)
    call.finish(make(count), inputs, outputs)


@converts("NonZero")
def non_zero(call) -> None:
    call.refuse_others()
    _data_dependent(call, NonZero, [call.input(0)], 1)


@converts("Unique")
def unique(call) -> None:
    ordered, axis = bool(call.number("sorted", 1)), None
    if call.has_attribute("axis"):
        axis = axis_in(call.number("axis", 0), len(call.value(0).shape))
    call.refuse_others()
    _data_dependent(call, lambda n: Unique(n, axis, ordered), [call.input(0)], axis or 0, 4)


@converts("NonMaxSuppression")
def non_max_suppression(call) -> None:
    centred = bool(call.number("center_point_box", 0))
    call.refuse_others()
    inputs = [call.inputs[i] if call.has(i) else None for i in range(5)]
    _data_dependent(call, lambda n: NonMaxSuppression(n, centred), inputs, 0)


@converts("Gather")
def gather(call) -> None:
    rank = len(call.value(0).shape)
    op = Gather(axis_in(call.number("axis", 0), rank))
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("Compress")
def compress(call) -> None:
    x, name, axis = call.value(0), call.input(0), 0
    if call.has_attribute("axis"):
        axis = axis_in(call.number("axis", 0), len(x.shape))
    else:
        name = call.emit(Reshape((x.size,), allow_zero=True), [name])
    call.refuse_others()
    positions = call.onnx("NonZero", [call.input(1)])
    positions = call.emit(
        Reshape((call.value_of(positions).shape[1],), allow_zero=True), [positions]
    )
    call.finish(Gather(axis), [name, positions])


@converts("ScatterElements", "Scatter")
def scatter_elements(call) -> None:
    reduction = call.text("reduction", "none")
    if reduction not in ("none", "add", "mul", "max", "min"):
        raise Refusal("reduction", f"{reduction!r} is not known")
    op = ScatterElements(axis_in(call.number("axis", 0), len(call.value(0).shape)), reduction)
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("CumSum", "CumProd")
def cumulative(call) -> None:
    axis = call.constant_number(1, "axis")
    if not isinstance(axis, int):
        raise InputError(f"axis: expected a whole number, found {axis}")
    op = (CumSum if call.operator == "CumSum" else CumProd)(
        axis_in(axis, len(call.value(0).shape)),
        bool(call.number("exclusive", 0)),
        bool(call.number("reverse", 0)),
    )
    call.refuse_others()
    call.finish(op, [call.input(0)])


@converts("TopK")
def top_k(call) -> None:
    k = call.number("k", 0) if call.opset < 10 else call.constant_size(1, "k")
    axis = axis_in(call.number("axis", -1), len(call.value(0).shape))
    largest = bool(call.number("largest", 1))
    call.number("sorted", 1)  # in order is one of the orders that "not sorted" allows
    call.refuse_others()
    call.finish(TopK(k, axis, largest), [call.input(0)], 2)


@converts("OneHot")
def one_hot(call) -> None:
    depth = call.constant_number(1, "depth")
    axis = axis_in(call.number("axis", -1), len(call.value(0).shape) + 1)
    call.refuse_others()
    call.finish(OneHot(int(depth), axis), [call.input(0), call.input(2)])


@converts("Trilu")
def trilu(call) -> None:
    k = call.constant_number(1, "k", 0)
    op = Trilu(bool(call.number("upper", 1)), int(k))
    call.refuse_others()
    call.finish(op, [call.input(0)])
