"""Converters of elementwise functions that ONNX defines in another form."""

from __future__ import annotations

import numpy as np

from ....errors import InputError, UnsupportedError
from ....operators import binary, unary
from ....operators.binary import Add, Div, Mul, Pow, Prelu, Sub
from ....operators.cast import BitCast, Cast
from ....operators.logic import And, Equal, Greater, IsInf, Less, Or, Xor
from ....operators.shaping import Reshape
from .. import model as protobuf
from ..refusal import Refusal
from . import converts

_PAIRS = {
    "Add": Add, "Sub": Sub, "Mul": Mul, "Div": Div, "Pow": Pow, "And": And, "Or": Or, "Xor": Xor,
    "Equal": Equal, "Greater": Greater, "Less": Less,
}  # fmt: skip


@converts(*_PAIRS)
def pair(call) -> None:
    """Operators that had an axis to broadcast along before opset 7."""
    axis = call.number("axis", -1)
    call.number("broadcast", 0)
    call.refuse_others("consumed_inputs")
    inputs = [call.input(0), call.input(1)]
    if call.opset < 7 and call.has_attribute("axis"):
        left, right = call.value(0).shape, call.value(1).shape
        behind = len(left) - axis - len(right)
        if axis < 0 or behind < 0:
            raise InputError(f"axis: expected a place in {list(left)}, found {axis}")
        shape = (*right, *[1] * behind)
        inputs[1] = call.emit(Reshape(shape, allow_zero=True), [inputs[1]])
    call.finish(_PAIRS[call.operator](), inputs)


@converts("PRelu")
def prelu(call) -> None:
    call.refuse_others("consumed_inputs")
    slope, x = call.value(1).shape, call.value(0).shape
    inputs = [call.input(0), call.input(1)]
    # A row of slopes was one per channel before opset 7; numbers that cannot broadcast still are.
    if (
        len(slope) == 1
        and len(x) > 2
        and slope[0] == x[1]
        and (call.opset < 7 or slope[0] != x[-1])
    ):
        inputs[1] = call.emit(Reshape((*slope, *[1] * (len(x) - 2)), allow_zero=True), [inputs[1]])
    call.finish(Prelu(), inputs)


@converts("Sum", "Mean", "Min", "Max")
def fold_left(call) -> None:
    """Operators of any number of inputs, taken two by two."""
    call.refuse_others("consumed_inputs")
    names = [call.input(index) for index in range(len(call.inputs))]
    if not names:
        raise InputError("expected at least 1 input, found none")
    op = {"Sum": Add, "Mean": Add, "Min": binary.Min, "Max": binary.Max}[call.operator]()
    if call.operator == "Mean" and len(names) > 1:
        total = names[0]
        for name in names[1:]:
            total = call.emit(op, [total, name])
        count = np.asarray(len(names), call.value(0).dtype)
        call.finish(Div(), [total, call.set_constant(count)])
    elif len(names) == 1:
        call.alias(names[0])
    else:
        total = names[0]
        for name in names[1:-1]:
            total = call.emit(op, [total, name])
        call.finish(op, [total, names[-1]])


@converts("Clip")
def clip(call) -> None:
    inputs = [i for i in (1, 2) if call.has(i)] if call.opset >= 11 else []
    known = {i: call.constant_number(i, "a limit") for i in inputs if call.is_constant(i)}
    if call.opset < 11:
        most = float(np.finfo(np.float32).max) if call.opset >= 6 else np.inf  # as ONNX's defaults
        known = {1: call.number("min", -most), 2: call.number("max", most)}
    call.refuse_others("consumed_inputs")
    if any(limit != limit for limit in known.values()):
        # A limit that is NaN makes NaN of all, as max and min do of one that is an input.
        zero = call.emit(Sub(), [call.input(0), call.input(0)])
        call.finish(Div(), [zero, zero])
    elif all(i in known for i in inputs):
        call.finish(unary.Clip(known.get(1, -np.inf), known.get(2, np.inf)), [call.input(0)])
    else:
        found = call.input(0)
        for i in inputs[:-1]:
            found = call.emit(binary.Max(), [found, call.input(i)])
        last = binary.Max() if inputs[-1] == 1 else binary.Min()
        call.finish(last, [found, call.input(inputs[-1])])


@converts("Selu")
def selu(call) -> None:
    # Opset 1 had other defaults; 6 has these.
    alpha, gamma = call.number("alpha", unary.Selu.alpha), call.number("gamma", unary.Selu.beta)
    call.refuse_others("consumed_inputs")
    call.finish(unary.Selu(alpha, gamma), call.inputs)


@converts("Shrink")
def shrink(call) -> None:
    op = unary.Shrink(call.number("lambd", 0.5), call.number("bias", 0.0))
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("IsInf")
def is_inf(call) -> None:
    op = IsInf(bool(call.number("detect_positive", 1)), bool(call.number("detect_negative", 1)))
    call.refuse_others()
    call.finish(op, call.inputs)


@converts("Gelu")
def gelu(call) -> None:
    approximate = call.text("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise Refusal("approximate", f"{approximate!r} is not known")
    call.refuse_others()
    call.finish(unary.Gelu(approximate), call.inputs)


@converts("BitShift")
def bit_shift(call) -> None:
    direction = call.text("direction", "")
    if direction not in ("LEFT", "RIGHT"):
        raise InputError(f"direction: expected LEFT or RIGHT, found {direction!r}")
    call.finish(binary.BitShift(direction), call.inputs)


@converts("Cast")
def cast(call) -> None:
    number = call.number("to", 0)
    try:
        dtype = protobuf.dtype_name(number)
    except UnsupportedError as error:
        raise Refusal("to", str(error)) from None
    call.refuse_others("saturate", "round_mode")
    call.finish(Cast(dtype), [call.input(0)])


@converts("BitCast")
def bit_cast(call) -> None:
    number = call.number("to", 0)
    try:
        dtype = protobuf.dtype_name(number)
    except UnsupportedError as error:
        raise Refusal("to", str(error)) from None
    for kind in (dtype, call.type_of(0)):
        if kind in protobuf.NARROW:  # they are computed in float32, whose bits are others
            raise Refusal("to", f"the bits of {kind} are not supported")
    call.refuse_others()
    call.finish(BitCast(dtype), [call.input(0)])


@converts("CastLike")
def cast_like(call) -> None:
    call.refuse_others("saturate", "round_mode")
    if call.type_of(1) in protobuf.SMALL.values():
        raise Refusal(None, f"casts to {call.type_of(1)} are not supported")
    call.finish(Cast(call.type_of(1)), [call.input(0)])
