"""Normalisations, and resizing."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np

from ....errors import InputError
from ....operators.binary import Add, Mul, Sub
from ....operators.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, Lrn, RmsNorm
from ....operators.operator import axis_in
from ....operators.reduce import ReduceMean
from ....operators.resize import COORDINATES, NEAREST, SIMPLE, Resize
from ....operators.shaping import Expand, Reshape
from ...dims import Dim, ratio
from ..refusal import Refusal
from . import converts


@converts("BatchNormalization")
def batch_norm(call) -> None:
    epsilon = call.number("epsilon", 1e-5)
    if call.opset >= 14 and call.number("training_mode", 0):
        _by_own_statistics(call, epsilon)
        return
    if call.number("training_mode", 0) or (call.opset < 7 and not call.number("is_test", 0)):
        raise Refusal("training_mode", "training is not supported")
    if not call.number("spatial", 1):
        raise Refusal("spatial", "statistics for every element are not supported")
    call.refuse_others("momentum", "consumed_inputs", "is_test")
    if any(call.wants(index) for index in range(1, 5)):
        raise Refusal("the outputs for training", "training is not supported")
    call.finish(BatchNorm(epsilon), call.inputs)


def _by_own_statistics(call, epsilon: float) -> None:
    """Batch norm by the mean and variance of x itself, as exported weight standardisation has it.

    The running statistics, which are outputs too, move towards them.
    """
    momentum = call.number("momentum", 0.9)
    call.refuse_others()
    x, rank = call.value(0), len(call.value(0).shape)
    if rank < 2 or x.dtype != "float32":
        raise Refusal("training_mode", f"expected float32 of 2 dimensions or more, found {x.dtype}")
    axes = (0, *range(2, rank))
    centred = call.emit(Sub(), [x.name, call.emit(ReduceMean(axes), [x.name])])
    squares = call.emit(Mul(), [centred, centred])
    mean = call.emit(ReduceMean(axes, keepdims=False), [x.name])
    variance = call.emit(ReduceMean(axes, keepdims=False), [squares])
    call.finish(BatchNorm(epsilon), [*call.inputs[:3], mean, variance])
    old_part, new_part = (
        call.set_constant(np.float32(share)) for share in (momentum, 1 - momentum)
    )
    for index, old, new in ((1, call.input(3), mean), (2, call.input(4), variance)):
        if call.wants(index):
            parts = [call.emit(Mul(), [old, old_part]), call.emit(Mul(), [new, new_part])]
            call.emit(Add(), parts, [call.output(index)])


@converts("InstanceNormalization")
def instance_norm(call) -> None:
    op = InstanceNorm(call.number("epsilon", 1e-5))
    call.refuse_others("consumed_inputs")
    call.finish(op, call.inputs)


@converts("LayerNormalization")
def layer_norm(call) -> None:
    rank = len(call.value(0).shape)
    axis = axis_in(call.number("axis", -1), rank)
    statistics = call.wants(1) or call.wants(2)
    op = LayerNorm(axis, call.number("epsilon", 1e-5), statistics)
    if call.number("stash_type", 1) != 1:
        raise Refusal("stash_type", "statistics of other types than float32 are not supported")
    call.refuse_others()
    call.finish(op, call.inputs, 3 if statistics else 1)


@converts("RMSNormalization")
def rms_norm(call) -> None:
    rank = len(call.value(0).shape)
    op = RmsNorm(axis_in(call.number("axis", -1), rank), call.number("epsilon", 1e-5))
    if call.number("stash_type", 1) != 1:
        raise Refusal("stash_type", "statistics of other types than float32 are not supported")
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("GroupNormalization")
def group_norm(call) -> None:
    groups = call.number("num_groups", 0)
    op = GroupNorm(groups, call.number("epsilon", 1e-5))
    if call.number("stash_type", 1) != 1:
        raise Refusal("stash_type", "statistics of other types than float32 are not supported")
    call.refuse_others()
    names = list(call.inputs)
    channels = call.value(0).shape[1] if len(call.value(0).shape) > 1 else 0
    if call.opset < 21 and groups > 0 and channels % groups == 0:  # scale and bias are one a group
        for index in (1, 2):
            if call.value(index).shape == (groups,):
                column = call.emit(Reshape((groups, 1)), [call.input(index)])
                wide = call.emit(Expand((groups, channels // groups)), [column])
                names[index] = call.emit(Reshape((channels,)), [wide])
    call.finish(op, names)


@converts("LRN")
def lrn(call) -> None:
    op = Lrn(
        call.number("size", 0), call.number("alpha", 1e-4), call.number("beta", 0.75),
        call.number("bias", 1.0),
    )  # fmt: skip
    call.refuse_others()
    call.finish(op, call.inputs)


def _scales(call, index: int) -> tuple[float, ...] | None:
    if not call.has(index):
        return None
    found = call.constant(index, "scales")
    if found.dtype.kind != "f" or found.ndim != 1:
        raise InputError(f"scales: expected a row of floats, found {found.dtype}")
    if found.size == 0:
        return None
    if not all(0 < v < math.inf for v in found):
        raise InputError(f"scales: expected numbers above 0, found {found.tolist()[:8]}")
    return tuple(float(v) for v in found)


def _sizes(shape, scales) -> tuple[int, ...]:
    if len(scales) != len(shape):
        raise InputError(f"scales: expected {len(shape)}, found {len(scales)}")
    return tuple(_scaled(size, scale) for size, scale in zip(shape, scales, strict=True))


#: Dimensions for which a scale is known to be a quotient of small numbers in float32 too.
_KNOWN = 1 << 14


def _scaled(size, scale: float):
    """Returns a dimension times a scale, whose product is made in float32, as scales are."""
    scale = np.float32(scale)
    if isinstance(size, Dim):
        quotient = Fraction(float(scale)).limit_denominator(64)
        above, below = quotient.numerator, quotient.denominator
        if size < _KNOWN and _is_quotient(float(scale), above, below):
            return size * above // below
        size = int(size)
    return math.floor(np.float32(size) * scale)


@cache
def _is_quotient(scale: float, above: int, below: int) -> bool:
    """Whether float32 products of all known dimensions with ``scale`` round down as a quotient's do."""
    sizes = np.arange(_KNOWN)
    products = np.floor(sizes.astype(np.float32) * np.float32(scale)).astype(np.int64)
    return bool(np.array_equal(products, sizes * above // below))


@converts("Upsample")
def upsample(call) -> None:
    shape = call.value(0).shape
    mode = call.text("mode", "nearest")
    scales = call.attribute("scales") if call.opset < 9 else _scales(call, 1)
    scales = tuple(scales or ())
    if mode not in ("nearest", "linear"):
        raise Refusal("mode", f"{mode!r} is not known")
    call.refuse_others()
    sizes = _sizes(shape, scales)
    op = Resize(sizes, tuple(scales), mode, "asymmetric", "floor")
    call.finish(op, [call.input(0)])


@converts("Resize")
def resize(call) -> None:
    shape = call.value(0).shape
    rank = len(shape)
    mode = call.text("mode", "nearest")
    coordinates = call.text("coordinate_transformation_mode", "half_pixel")
    nearest = call.text("nearest_mode", "round_prefer_floor")
    if call.opset < 11:
        scales, sizes, roi = _scales(call, 1), None, ()
        coordinates, nearest = "asymmetric", SIMPLE
    else:
        scales, sizes = _scales(call, 2), call.constant_integers(3, "sizes")
        roi = ()
        if coordinates == "tf_crop_and_resize":
            roi = tuple(float(v) for v in call.constant(1, "roi").reshape(-1))
    if mode not in ("nearest", "linear", "cubic"):
        raise Refusal("mode", f"{mode!r} is not known")
    if coordinates not in COORDINATES:
        raise Refusal("coordinate_transformation_mode", f"{coordinates!r} is not known")
    if call.opset >= 11 and nearest not in NEAREST:
        raise Refusal("nearest_mode", f"{nearest!r} is not known")
    policy = call.text("keep_aspect_ratio_policy", "stretch")
    axes = call.integers("axes")
    axes = tuple(range(rank)) if axes is None else tuple(axis_in(axis, rank) for axis in axes)
    cubic_a = call.number("cubic_coeff_a", -0.75)
    exclude = bool(call.number("exclude_outside", 0))
    antialias = bool(call.number("antialias", 0))
    extrapolation = call.number("extrapolation_value", 0.0)
    call.refuse_others()
    sizes = sizes or None
    if (scales is None) == (sizes is None):
        raise InputError("expected either scales or sizes, found both or none")
    given = scales if sizes is None else sizes
    if len(given) != len(axes) or len(set(axes)) != len(axes):
        raise InputError(f"expected {len(axes)} scales or sizes, found {len(given)}")
    if sizes is not None:
        if any(shape[axis] < 1 for axis in axes):
            raise InputError(f"expected something to resize, found {list(shape)}")
        ratios = [ratio(size, shape[axis]) for size, axis in zip(sizes, axes, strict=True)]
        if policy != "stretch":
            if policy not in ("not_larger", "not_smaller"):
                raise Refusal("keep_aspect_ratio_policy", f"{policy!r} is not known")
            known = [
                Fraction(int(size), int(shape[axis]))
                for size, axis in zip(sizes, axes, strict=True)
            ]
            chosen = min(known) if policy == "not_larger" else max(known)
            ratios = [chosen] * len(axes)
            sizes = [math.floor(int(shape[axis]) * chosen + Fraction(1, 2)) for axis in axes]
        scales = ratios
    whole, final = [1.0] * rank, list(shape)
    for axis, scale in zip(axes, scales, strict=True):
        whole[axis] = scale
    if sizes is None:
        final = list(_sizes(shape, whole))
    else:
        for axis, size in zip(axes, sizes, strict=True):
            final[axis] = size
    if roi:
        if len(roi) != 2 * len(axes):
            raise InputError(f"roi: expected {2 * len(axes)} numbers, found {len(roi)}")
        full = [0.0] * rank + [1.0] * rank
        for index, axis in enumerate(axes):
            full[axis], full[rank + axis] = roi[index], roi[len(axes) + index]
        roi = tuple(full)
    op = Resize(
        tuple(final), tuple(whole), mode, coordinates, nearest, cubic_a, exclude, antialias, roi,
        extrapolation,
    )  # fmt: skip
    call.finish(op, [call.input(0)])
