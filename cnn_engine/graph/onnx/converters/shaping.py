"""Converters of operators that move elements, whose inputs or attributes depend on the opset."""

from __future__ import annotations

import math

import numpy as np

from ....errors import InputError
from ....operators.operator import axis_in
from ....operators.pad import Pad
from ....operators.shaping import (
    Concat,
    DepthToSpace,
    Expand,
    Reshape,
    Slice,
    SpaceToDepth,
    Split,
    Tile,
    Transpose,
)
from ...dims import least, most
from ..refusal import Refusal
from . import converts


def reshape_to(call, shape: tuple[int, ...]) -> None:
    call.finish(Reshape(shape, allow_zero=True), [call.input(0)])


def integers_of(call, name: str, index: int, since: int) -> tuple[int, ...] | None:
    """Returns an attribute that became input ``index`` in opset ``since``, or None where it is absent."""
    if call.opset < since:
        return call.integers(name)
    return call.constant_integers(index, name)


@converts("Reshape")
def reshape(call) -> None:
    shape = integers_of(call, "shape", 1, 5)
    if shape is None:
        raise InputError("expected a shape, found none")
    zero = bool(call.number("allowzero", 0))
    call.refuse_others("consumed_inputs")
    reshape_to(call, Reshape(shape, zero).resolved(call.value(0).shape))


@converts("Flatten")
def flatten(call) -> None:
    shape = call.value(0).shape
    axis = call.number("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        raise InputError(f"axis: expected a place in {list(shape)}, found {axis}")
    axis += len(shape) if axis < 0 else 0
    call.refuse_others()
    reshape_to(call, (math.prod(shape[:axis]), math.prod(shape[axis:])))


@converts("Squeeze")
def squeeze(call) -> None:
    shape = call.value(0).shape
    axes = integers_of(call, "axes", 1, 13)
    call.refuse_others()
    if axes is None:
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    axes = {axis_in(axis, len(shape)) for axis in axes}
    if any(shape[axis] != 1 for axis in axes):
        raise InputError(f"axes: expected dimensions of 1 in {list(shape)}, found {sorted(axes)}")
    reshape_to(call, tuple(size for axis, size in enumerate(shape) if axis not in axes))


@converts("Unsqueeze")
def unsqueeze(call) -> None:
    shape = call.value(0).shape
    axes = integers_of(call, "axes", 1, 13)
    call.refuse_others()
    if axes is None:
        raise InputError("expected axes, found none")
    rank = len(shape) + len(axes)
    positions = {axis_in(axis, rank) for axis in axes}
    if len(positions) != len(axes):
        raise InputError(f"axes: expected each once, found {list(axes)}")
    sizes = iter(shape)
    reshape_to(call, tuple(1 if axis in positions else next(sizes) for axis in range(rank)))


@converts("Transpose")
def transpose(call) -> None:
    rank = len(call.value(0).shape)
    perm = call.integers("perm", tuple(range(rank))[::-1])
    call.refuse_others()
    call.finish(Transpose(perm), call.inputs)


@converts("Identity")
def identity(call) -> None:
    call.alias(call.input(0))


@converts("Dropout")
def dropout(call) -> None:
    training = call.opset >= 12 and bool(call.constant_number(2, "training_mode", False))
    ratio = call.constant_number(1, "ratio", 0.5) if call.opset >= 12 and training else 0.0
    if training and ratio != 0:
        raise Refusal("training_mode", "training is not supported")
    call.alias(call.input(0))
    if call.wants(1):
        x = call.value(0)
        kept = np.ones((), bool if call.opset >= 10 else x.dtype)
        call.set_constant(np.broadcast_to(kept, x.shape), output=1)  # takes no memory yet


@converts("Concat")
def concat(call) -> None:
    if not call.has_attribute("axis") and call.opset >= 4:
        raise InputError("axis: expected one, found none")
    axis = call.number("axis", 1)
    call.refuse_others()
    names = [call.input(index) for index in range(len(call.inputs))]
    rank = len(call.value(0).shape)
    call.finish(Concat(axis_in(axis, rank)), names)


@converts("Split")
def split(call) -> None:
    shape = call.value(0).shape
    axis = axis_in(call.number("axis", 0), len(shape))
    sizes = integers_of(call, "split", 1, 13)
    count = call.number("num_outputs", len(call.outputs))
    call.refuse_others()
    if sizes is None:
        if count != len(call.outputs):
            raise InputError(f"num_outputs: expected {len(call.outputs)} as named, found {count}")
        size = -(-shape[axis] // count)
        if call.opset < 18 and size * count != shape[axis]:
            raise InputError(f"expected {shape[axis]} elements in {count} equal pieces")
        sizes = [most(0, least(size, shape[axis] - size * index)) for index in range(count)]
    if len(sizes) < len(call.outputs):
        raise InputError(f"split: expected {len(call.outputs)} sizes, found {len(sizes)}")
    call.finish(Split(axis, tuple(sizes)), [call.input(0)], len(sizes))


@converts("Slice")
def slices(call) -> None:
    rank = len(call.value(0).shape)
    if call.opset < 10:
        starts, ends = call.integers("starts"), call.integers("ends")
        axes, steps = call.integers("axes"), None
    else:
        starts, ends = call.constant_integers(1, "starts"), call.constant_integers(2, "ends")
        axes, steps = call.constant_integers(3, "axes"), call.constant_integers(4, "steps")
    call.refuse_others()
    if starts is None or ends is None:
        raise InputError("expected starts and ends, found none")
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    axes = tuple(axis_in(axis, rank) for axis in axes)
    call.finish(Slice(starts, ends, axes, steps), [call.input(0)])


@converts("Pad")
def pad(call) -> None:
    rank = len(call.value(0).shape)
    mode = call.text("mode", "constant")
    axes = None
    if call.opset < 11:
        pads, value = call.integers("pads"), call.number("value", 0.0)
    else:
        pads = call.constant_integers(1, "pads")
        value = call.constant_number(2, "constant_value", 0.0)
        axes = call.constant_integers(3, "axes")
    call.refuse_others()
    if pads is None:
        raise InputError("expected pads, found none")
    if axes is not None:
        if len(pads) != 2 * len(axes):
            raise InputError(f"pads: expected {2 * len(axes)} numbers, found {len(pads)}")
        whole = [0] * (2 * rank)
        for index, axis in enumerate(axes):
            whole[axis_in(axis, rank)] = pads[index]
            whole[rank + axis_in(axis, rank)] = pads[len(axes) + index]
        pads = tuple(whole)
    call.finish(Pad(pads, mode, value), [call.input(0)])


@converts("Expand")
def expand(call) -> None:
    shape = call.constant_integers(1, "shape")
    if shape is None:
        raise InputError("expected a shape, found none")
    call.finish(Expand(shape), [call.input(0)])


@converts("Tile")
def tile(call) -> None:
    repeats = call.constant_integers(1, "repeats")
    if call.opset < 6 or repeats is None:
        raise InputError("expected repeats, found none")
    call.finish(Tile(repeats), [call.input(0)])


@converts("DepthToSpace")
def depth_to_space(call) -> None:
    op = DepthToSpace(call.number("blocksize", 0), call.text("mode", "DCR"))
    if op.mode not in ("DCR", "CRD"):
        raise Refusal("mode", f"{op.mode!r} is not known")
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("SpaceToDepth")
def space_to_depth(call) -> None:
    op = SpaceToDepth(call.number("blocksize", 0))
    mode = call.text("mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise Refusal("mode", f"{mode!r} is not known")
    call.refuse_others()
    if mode == "DCR":
        call.finish(op, call.inputs)
        return
    ((shape, _),) = op.infer([call.value(0)])
    n, c, h, w = call.value(0).shape
    b = op.block
    split = Reshape((n, c, h // b, b, w // b, b), allow_zero=True)
    turned = call.emit(Transpose((0, 1, 3, 5, 2, 4)), [call.emit(split, [call.input(0)])])
    call.finish(Reshape(shape, allow_zero=True), [turned])
