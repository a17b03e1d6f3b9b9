"""Constants, shapes, and operators that choose by tables of integers."""

from __future__ import annotations

import math

import numpy as np

from ....errors import InputError, UnsupportedError
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


@converts("NonZero")
def non_zero(call) -> None:
    found = call.sizing(0)
    bounded((np.count_nonzero(found), found.ndim), 8)
    call.set_constant(np.array(np.nonzero(found), np.int64).reshape(found.ndim, -1), output=0)


@converts("Unique")
def unique(call) -> None:
    x = call.sizing(0)
    ordered = bool(call.number("sorted", 1))
    axis = axis_in(call.number("axis", 0), x.ndim) if call.has_attribute("axis") else None
    call.refuse_others()
    rows = x.reshape(-1) if axis is None else x
    found, first, inverse, counts = np.unique(
        rows, return_index=True, return_inverse=True, return_counts=True, axis=axis or 0
    )
    inverse = inverse.reshape(-1)
    if not ordered:
        order = np.argsort(first, kind="stable")
        found, first, counts = np.take(found, order, axis or 0), first[order], counts[order]
        inverse = np.argsort(order, kind="stable")[inverse]
    for index, array in enumerate((found, first, inverse, counts)):
        if call.wants(index):
            kind = x.dtype if index == 0 else np.int64
            call.set_constant(np.ascontiguousarray(array, kind), output=index)


@converts("NonMaxSuppression")
def non_max_suppression(call) -> None:
    """Boxes of each class that overlap none that scores higher; how many there are, their values say."""
    boxes, scores = call.sizing(0), call.sizing(1)
    most = call.constant_number(2, "max_output_boxes_per_class", 0)
    overlap = call.constant_number(3, "iou_threshold", 0.0)
    least = call.constant_number(4, "score_threshold", -math.inf)
    centred = call.number("center_point_box", 0)
    call.refuse_others()
    if (
        boxes.ndim != 3
        or boxes.shape[2] != 4
        or scores.ndim != 3
        or (scores.shape[0], scores.shape[2]) != boxes.shape[:2]
    ):
        raise InputError(
            f"expected boxes [N, B, 4] and scores [N, C, B], found {list(boxes.shape)} and "
            f"{list(scores.shape)}"
        )
    boxes = boxes.astype(np.float64)
    if centred:
        middle, half = boxes[..., :2], np.abs(boxes[..., 2:]) / 2
        low, high = middle - half, middle + half
    else:
        low = np.minimum(boxes[..., :2], boxes[..., 2:])
        high = np.maximum(boxes[..., :2], boxes[..., 2:])
    areas = np.prod(high - low, axis=-1)
    chosen: list[tuple[int, int, int]] = []
    for image, kind in np.ndindex(*scores.shape[:2]):
        line = scores[image, kind]
        order = np.argsort(-line, kind="stable")
        left = order[line[order] > least]
        for _ in range(max(most, 0)):
            if not len(left):
                break
            best, left = left[0], left[1:]
            chosen.append((image, kind, int(best)))
            sides = np.minimum(high[image, left], high[image, best]) - np.maximum(
                low[image, left], low[image, best]
            )
            shared = np.prod(np.maximum(sides, 0.0), axis=-1)
            whole = areas[image, left] + areas[image, best] - shared
            with np.errstate(all="ignore"):
                same = np.where(whole > 0, shared / whole, 0.0)
            left = left[same <= overlap]
    call.set_constant(np.array(chosen, np.int64).reshape(-1, 3), output=0)


@converts("Gather")
def gather(call) -> None:
    rank = len(call.value(0).shape)
    op = Gather(axis_in(call.number("axis", 0), rank))
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("Compress")
def compress(call) -> None:
    x = call.value(0)
    condition = call.sizing(1)
    bounded((np.count_nonzero(condition),), 8)
    name = call.input(0)
    axis = 0
    if call.has_attribute("axis"):
        axis = axis_in(call.number("axis", 0), len(x.shape))
    else:
        name = call.emit(Reshape((x.size,), allow_zero=True), [name])
    positions = np.nonzero(condition.reshape(-1))[0].astype(np.int64)
    call.finish(Gather(axis), [name, call.set_constant(positions)])


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
    k = call.number("k", 0) if call.opset < 10 else call.constant_number(1, "k")
    if not isinstance(k, int):
        raise InputError(f"k: expected a whole number, found {k}")
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
