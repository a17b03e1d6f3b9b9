"""Recurrent layers after the product of their input: the steps of an RNN, GRU or LSTM over time.

ONNX's operators are a linear layer for all steps at once and one of these records: see
:mod:`cnn_engine.graph.onnx.converters.recurrent`. A direction is a layer of its own over the same sequence.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, Value, check_types, float64, need, record
from .quantized import DynamicQuantizeLinear
from .unary import Sigmoid, Tanh, Unary


@record
class Recurrent(Operator):
    """Base of the records.

    Inputs: gates [T, N, D, G*H], the products of the input with its weights and biases, of every gate;
    weight [D, G*H, H] of the states; bias [D, H], a GRU's with ``reset_after``; lengths [N] of the
    sequences (int32, 0 to T; None: T); state [D, N, H] (None: 0); an LSTM has cell [D, N, H] and
    peepholes [D, 3*H] too.

    Outputs: y [T, D, N, H], the last state [D, N, H] and, of an LSTM, the last cell.

    Attributes:
        gates: how many there are, G.
        functions: a tuple for each direction.
        reverse: whether the only direction begins at the sequences' ends; the second of two always does.
        clip: what is passed to the gates' functions lies between -clip and clip.
    """

    gates: ClassVar[int]
    functions: tuple[tuple[Unary, ...], ...]
    reverse: bool = False
    clip: float = math.inf

    @property
    def directions(self) -> int:
        """One or two."""
        return len(self.functions)

    def infer(self, inputs):
        need(inputs, 2, 7)
        gates, weight, bias, lengths, *states = (*inputs, *[None] * 7)[:7]
        check_types("floats", gates.dtype)
        directions = self.directions
        if directions not in (1, 2) or (directions == 2 and self.reverse):
            raise InputError(f"expected 1 direction or 2, found {directions}")
        hidden = weight.shape[-1] if len(weight.shape) == 3 else 0
        wanted = (directions, self.gates * hidden, hidden)
        if hidden < 1 or weight.shape != wanted:
            raise InputError(
                f"weight: expected [{directions}, {self.gates} * H, H], found {list(weight.shape)}"
            )
        if len(gates.shape) != 4 or gates.shape[2:] != wanted[:2]:
            raise InputError(
                f"gates: expected [T, N, {directions}, {wanted[1]}], found {list(gates.shape)}"
            )
        steps, batch = gates.shape[:2]
        state = (directions, batch, hidden)
        shapes = {
            "bias": (bias, (directions, hidden)), "state": (states[0], state),
            "cell": (states[1], state), "peepholes": (states[2], (directions, 3 * hidden)),
        }  # fmt: skip
        for name, (value, shape) in shapes.items():
            if value is not None and value.shape != shape:
                raise InputError(f"{name}: expected {list(shape)}, found {list(value.shape)}")
            if value is not None and value.dtype != gates.dtype:
                raise InputError(f"{name}: expected {gates.dtype}, found {value.dtype}")
        if lengths is not None and (lengths.shape, lengths.dtype) != ((batch,), "int32"):
            raise InputError(
                f"sequence_lens: expected int32 [{batch}], found {lengths.dtype} {list(lengths.shape)}"
            )
        outputs = ((steps, directions, batch, hidden), *[state] * self.states)
        return tuple((shape, gates.dtype) for shape in outputs)

    #: How many states pass from step to step: one, or an LSTM's two.
    states: ClassVar[int] = 1

    def reference(
        self, gates, weight, bias=None, lengths=None, state=None, cell=None, peepholes=None
    ):
        gates, weight = float64(gates), float64(weight)
        steps, batch, directions, _ = gates.shape
        hidden = weight.shape[-1]
        ends = checked_lengths(lengths, steps, batch)
        y = np.zeros((steps, directions, batch, hidden))
        first = np.zeros((directions, batch, hidden))
        last = [first.copy() if s is None else float64(s).copy() for s in (state, cell)]
        for d in range(directions):
            extra = tuple(None if v is None else float64(v)[d] for v in (bias, peepholes))
            for step in range(steps):
                rows = np.flatnonzero(step < ends)
                at = ends[rows] - 1 - step if self.reverse or d else np.full(len(rows), step)
                states = [s[d, rows] for s in last]
                made = self.step(gates[at, rows, d], weight[d], d, *extra, *states)
                for s, values in zip(last, made, strict=False):
                    s[d, rows] = values
                y[at, d, rows] = made[0]
        return (y, *last[: self.states])

    def step(
        self, x: np.ndarray, weight: np.ndarray, direction: int, bias: np.ndarray | None,
        peepholes: np.ndarray | None, h: np.ndarray, c: np.ndarray,
    ) -> tuple[np.ndarray, ...]:  # fmt: skip
        """Returns the next states of some rows: gates ``x`` [N, G*H], states ``h`` and ``c`` [N, H]."""
        raise NotImplementedError

    def apply(self, direction: int, function: int, x: np.ndarray) -> np.ndarray:
        """Returns a function of a direction of ``x`` within the clip."""
        held = np.minimum(np.maximum(x, -self.clip), self.clip)
        return self.functions[direction][function].reference(held)

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.gates * self.terms(inputs)

    def terms(self, inputs: tuple[Value | None, ...]) -> int:
        return inputs[1].shape[-1]


def checked_lengths(lengths: np.ndarray | None, steps: int, batch: int) -> np.ndarray:
    """Returns the length of every sequence.

    Raises:
        InputError: one is less than 0 or more than ``steps``.
    """
    if lengths is None:
        return np.full(batch, steps)
    lengths = np.asarray(lengths).astype(np.int64)
    wrong = lengths[(lengths < 0) | (lengths > steps)]
    if wrong.size:
        raise InputError(f"sequence_lens: expected 0 to {steps}, found {wrong[0]}")
    return lengths


@record
class Rnn(Recurrent):
    """h' = f(x + R h)."""

    kind: ClassVar[str] = "rnn"
    gates: ClassVar[int] = 1
    functions: tuple[tuple[Unary, ...], ...] = ((Tanh(),),)

    def step(self, x, weight, direction, bias, peepholes, h, c):
        return (self.apply(direction, 0, x + h @ weight.T),)


@record
class Gru(Recurrent):
    """Gates z, r, n: h' = (1 - z) * n + z * h with n = g(x_n + R_n (r * h)).

    Attributes:
        reset_after: whether n is g(x_n + r * (R_n h + bias)): ONNX's ``linear_before_reset``.
    """

    kind: ClassVar[str] = "gru"
    gates: ClassVar[int] = 3
    functions: tuple[tuple[Unary, ...], ...] = ((Sigmoid(), Tanh()),)
    reset_after: bool = False

    def step(self, x, weight, direction, bias, peepholes, h, c):
        size = h.shape[-1]
        z, r = np.split(
            self.apply(direction, 0, x[:, : 2 * size] + h @ weight[: 2 * size].T), 2, axis=1
        )
        last = weight[2 * size :].T
        after = h @ last + (0.0 if bias is None else bias)
        product = r * after if self.reset_after else (r * h) @ last
        n = self.apply(direction, 1, x[:, 2 * size :] + product)
        return ((1 - z) * n + z * h,)


@record
class Lstm(Recurrent):
    """Gates i, o, f, c: c' = f * c + i * g, h' = o * h(c'); peepholes, in the order i, o, f, add p * c.

    Attributes:
        coupled: whether f is 1 - i: ONNX's ``input_forget``.
    """

    kind: ClassVar[str] = "lstm"
    gates: ClassVar[int] = 4
    states: ClassVar[int] = 2
    functions: tuple[tuple[Unary, ...], ...] = ((Sigmoid(), Tanh(), Tanh()),)
    coupled: bool = False

    def step(self, x, weight, direction, bias, peepholes, h, c):
        i, o, f, g = np.split(x + h @ weight.T, 4, axis=1)
        p = np.zeros((3, c.shape[-1])) if peepholes is None else peepholes.reshape(3, -1)
        i = self.apply(direction, 0, i + p[0] * c)
        f = 1 - i if self.coupled else self.apply(direction, 0, f + p[2] * c)
        c = f * c + i * self.apply(direction, 1, g)
        o = self.apply(direction, 0, o + p[1] * c)
        return o * self.functions[direction][2].reference(c), c


@record
class DynamicLstm(Lstm):
    """An LSTM whose states are rounded to 8 bits, by the range of a step's, before they are multiplied."""

    kind: ClassVar[str] = "dynamic_lstm"

    def step(self, x, weight, direction, bias, peepholes, h, c):
        q, scale, zero = DynamicQuantizeLinear().reference(h)
        with np.errstate(invalid="ignore"):  # the scale of an infinity is one
            held = (q.astype(np.float64) - zero) * scale
        return super().step(x, weight, direction, bias, peepholes, held, c)
