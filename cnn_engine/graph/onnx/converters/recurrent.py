"""RNN, GRU and LSTM: one linear layer for the inputs of all steps, and the record of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ....errors import InputError
from ....operators import unary
from ....operators.binary import Add, Mul
from ....operators.linear import Linear
from ....operators.quantized import DynamicQuantizeLinear
from ....operators.quantized_linear import QuantizedLinear
from ....operators.recurrent import DynamicLstm, Gru, Lstm, Recurrent, Rnn
from ....operators.shaping import Concat, Reshape, Slice, Transpose
from ..refusal import Refusal
from . import converts

#: ONNX's names of functions, in small letters -> the record, and how many numbers it takes.
_FUNCTIONS = {
    "affine": (unary.Affine, 2), "elu": (unary.Elu, 1), "hardsigmoid": (unary.HardSigmoid, 2),
    "leakyrelu": (unary.LeakyRelu, 1), "relu": (unary.Relu, 0), "scaledtanh": (unary.ScaledTanh, 2),
    "sigmoid": (unary.Sigmoid, 0), "softplus": (unary.Softplus, 0), "softsign": (unary.Softsign, 0),
    "tanh": (unary.Tanh, 0), "thresholdedrelu": (unary.ThresholdedRelu, 1),
}  # fmt: skip
_DEFAULTS: dict[type[Recurrent], tuple[str, ...]] = {
    Rnn: ("Tanh",), Gru: ("Sigmoid", "Tanh"), Lstm: ("Sigmoid", "Tanh", "Tanh"),
    DynamicLstm: ("Sigmoid", "Tanh", "Tanh"),
}  # fmt: skip


def _numbers(call, name: str) -> Iterator[float]:
    given = call.attribute(name, [])
    if not isinstance(given, list) or not all(isinstance(n, float) for n in given):
        raise Refusal(name, "expected a row of numbers")
    return iter(given)


def _functions(call, record: type[Recurrent], directions: int) -> tuple[tuple, ...]:
    """Returns the functions of every direction; those that take numbers take the next ones given."""
    names = call.attribute("activations") or [n.encode() for n in _DEFAULTS[record]] * directions
    each = len(_DEFAULTS[record])
    if not isinstance(names, list) or len(names) != each * directions:
        raise InputError(f"activations: expected {each * directions} names, found {names!r}"[:200])
    alphas, betas = _numbers(call, "activation_alpha"), _numbers(call, "activation_beta")
    made = []
    for name in names:
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
        if text.lower() not in _FUNCTIONS:
            raise Refusal("activations", f"{text[:40]!r} is not known")
        function, count = _FUNCTIONS[text.lower()]
        op = function()
        if count > 0:
            op = function(next(alphas, op.alpha), *([next(betas, op.beta)] if count > 1 else []))
        made.append(op)
    return tuple(tuple(made[d * each : (d + 1) * each]) for d in range(directions))


def _input_bias(
    call, record: type[Recurrent], hidden: int, after: bool
) -> tuple[str | None, str | None]:
    """Returns the names of the bias [D, G*H] of the input's product, and of the one that stays with R."""
    if not call.has(3):
        return None, None
    directions, size = call.value(3).shape[0], record.gates * hidden
    if call.value(3).shape != (directions, 2 * size):
        raise InputError(
            f"B: expected [{directions}, {2 * size}], found {list(call.value(3).shape)}"
        )

    def part(first: int, end: int) -> str:
        return call.emit(Slice((first,), (end,), (1,), (1,)), [call.input(3)])

    own, state = part(0, size), part(size, 2 * size)
    if not after:
        return call.emit(Add(), [own, state]), None
    both = call.emit(Add(), [part(0, 2 * hidden), part(size, size + 2 * hidden)])
    joined = call.emit(Concat(1), [both, part(2 * hidden, size)])
    return joined, part(size + 2 * hidden, 2 * size)


@converts("RNN", "GRU", "LSTM")
def recurrent(call) -> None:
    convert(call, {"RNN": Rnn, "GRU": Gru, "LSTM": Lstm}[call.operator])


def _float_product(call, rows: str, bias: str | None) -> str:
    """Returns the product of the input's rows [T*N, I] with the weights of all gates, and biases."""
    directions, size, features = call.value(1).shape
    weight = call.emit(Reshape((directions * size, features), allow_zero=True), [call.input(1)])
    return call.emit(Linear(), [rows, weight, bias])


def convert(
    call,
    record: type[Recurrent],
    product: Callable[[Any, str, str | None], str] = _float_product,
) -> None:
    """Converts a layer whose inputs are those of ONNX's operators."""
    direction = call.text("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise InputError(
            f"direction: expected forward, reverse or bidirectional, found {direction[:40]!r}"
        )
    directions = 2 if direction == "bidirectional" else 1
    options = {}
    if record is Gru:
        options["reset_after"] = bool(call.number("linear_before_reset", 0))
    if issubclass(record, Lstm):
        options["coupled"] = bool(call.number("input_forget", 0))
    clip = call.number("clip", float("inf"))
    if not clip > 0:
        raise InputError(f"clip: expected a number above 0, found {clip}")
    batch_first = bool(call.number("layout", 0))
    functions = _functions(call, record, directions)
    op = record(functions, direction == "reverse", clip, **options)
    x, w, r = (call.value(index).shape for index in range(3))
    hidden = call.number("hidden_size", r[-1] if r else 0)
    call.refuse_others("output_sequence")
    size = record.gates * hidden
    if len(x) != 3 or w != (directions, size, x[2]) or r != (directions, size, hidden):
        raise InputError(
            f"expected X [T, N, I], W [{directions}, {size}, I] and R [{directions}, {size}, {hidden}], "
            f"found {list(x)}, {list(w)} and {list(r)}"
        )

    def time_first(name: str | None, perm: tuple[int, ...]) -> str | None:
        return call.emit(Transpose(perm), [name]) if batch_first and name is not None else name

    source = time_first(call.input(0), (1, 0, 2))
    steps, batch, features = call.value_of(source).shape
    rows = call.emit(Reshape((steps * batch, features), allow_zero=True), [source])
    bias, late = _input_bias(call, record, hidden, options.get("reset_after", False))
    if bias is not None:
        bias = call.emit(Reshape((directions * size,), allow_zero=True), [bias])
    gates = product(call, rows, bias)
    gates = call.emit(Reshape((steps, batch, directions, size), allow_zero=True), [gates])
    given = [call.inputs[index] if call.has(index) else None for index in range(4, 8)]
    lengths, state, cell, peepholes = given
    inputs = [gates, call.input(2), late, lengths, time_first(state, (1, 0, 2))]
    if issubclass(record, Lstm):
        inputs += [time_first(cell, (1, 0, 2)), peepholes]
    if not batch_first:
        call.finish(op, inputs, 1 + record.states)
        return
    made = [call.temporary() for _ in range(1 + record.states)]
    call.emit(op, inputs, made)
    for index, name in enumerate(made):
        if call.wants(index):
            perm = (2, 0, 1, 3) if index == 0 else (1, 0, 2)
            call.emit(Transpose(perm), [name], [call.output(index)])


@converts("DynamicQuantizeLSTM", domain="com.microsoft")
def dynamic_quantize_lstm(call) -> None:
    """An LSTM with weights of 8 bits, [D, inputs, gates]; its operands are rounded as it runs.

    Inputs: those of ONNX's LSTM, then scale and zero point of both weights, for each direction or each gate.
    """
    names, parameters = [], []
    for place, first in ((1, 8), (2, 10)):
        weight = call.constant(place, "the weights")
        scale, zero = (call.constant(first + i, "scale and zero point") for i in range(2))
        if weight.ndim != 3 or scale.shape[:1] != weight.shape[:1] or zero.shape != scale.shape:
            raise InputError(
                f"expected weights [D, inputs, gates] with a scale for each D, found {list(weight.shape)} "
                f"and {list(scale.shape)}"
            )
        if not ((scale > 0) & (scale < np.inf)).all():
            raise InputError("scale: expected positive finite numbers, found others")
        shape = weight.shape[0], 1, weight.shape[2]
        scale, zero = (np.broadcast_to(a.reshape(len(a), 1, -1), shape) for a in (scale, zero))
        real = (weight.astype(np.float64) - zero) * scale
        names.append(call.set_constant(np.ascontiguousarray(real.transpose(0, 2, 1), np.float32)))
        parameters.append((weight, scale.astype(np.float32), zero.astype(weight.dtype)))

    def product(call, rows: str, bias: str | None) -> str:
        weight, scale, zero = parameters[0]
        q, x_scale, x_zero = (call.temporary() for _ in range(3))
        call.emit(DynamicQuantizeLinear(), [rows], [q, x_scale, x_zero])
        whole = weight.transpose(0, 2, 1).reshape(-1, weight.shape[1])
        whole, scale, zero = (
            call.set_constant(np.ascontiguousarray(a)) for a in (whole, scale.ravel(), zero.ravel())
        )
        scale = call.emit(Mul(), [x_scale, scale])
        gates = call.emit(QuantizedLinear("float32"), [q, whole, scale, None, x_zero, zero])
        return gates if bias is None else call.emit(Add(), [gates, bias])

    call.inputs[:] = [call.input(0), *names, *call.inputs[3:8]]
    convert(call, DynamicLstm, product)
