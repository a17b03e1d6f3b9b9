"""Branches and loops: which nodes run, and how often, is settled while loading.

Where a condition or a trip count is found while the graph runs, it is for the numbers that were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ....errors import InputError
from ....operators.operator import axis_in
from ....operators.shaping import Concat, Reshape, Split
from .. import model as protobuf
from ..refusal import Refusal
from . import converts


def _flag(call, index: int, what: str) -> bool:
    """Returns an input that must be known while loading and be one bool."""
    found = call.constant(index, what)
    return _one_bool(found, what)


def _one_bool(found: np.ndarray, what: str) -> bool:
    if found.dtype.kind != "b" or found.size != 1:
        raise InputError(f"{what}: expected one bool, found {found.dtype} {list(found.shape)}")
    return bool(found.reshape(()))


@converts("If")
def if_(call) -> None:
    """Takes the branch that the condition names."""
    branches = {True: call.body("then_branch"), False: call.body("else_branch")}
    call.refuse_others()
    body = branches[_flag(call, 0, "condition")]
    if len(body.input) or len(body.output) < len(call.outputs):
        raise InputError(
            f"expected branches without inputs, of {len(call.outputs)} outputs, found "
            f"{len(body.input)} and {len(body.output)}"
        )
    results = call.inline(body, call.initialize(body))
    for index in range(len(call.outputs)):
        call.alias(results[index], index)


class _Body:
    """A loop's body, that becomes one group of nodes after another."""

    def __init__(self, call, inputs: int, outputs: int) -> None:
        self.call, self.proto = call, call.body("body")
        if (len(self.proto.input), len(self.proto.output)) != (inputs, outputs):
            raise InputError(
                f"body: expected {inputs} inputs and {outputs} outputs, found "
                f"{len(self.proto.input)} and {len(self.proto.output)}"
            )
        names = [value.name for value in self.proto.input]
        protobuf.check_text(*names)
        self.names, self.constants = names, call.initialize(self.proto)
        self.count = 0

    def run(self, given: Sequence[str]) -> list[str]:
        """Returns the names of an iteration's outputs, for inputs of these names."""
        self.count += 1
        known: Mapping[str, str] = {**self.constants, **dict(zip(self.names, given, strict=True))}
        return self.call.inline(self.proto, known, f"{self.count}/")

    def empty(self, output: int, axis: int = 0) -> np.ndarray:
        """Returns what no iteration at all stacks of an output: nothing, in the shape that the file states.

        A dimension that the file leaves open is 0, as in ONNX Runtime.
        """
        kind = self.proto.output[output].type.tensor_type
        if not kind.HasField("shape"):
            raise Refusal("body", "a loop without iterations needs the ranks of its outputs")
        dims = [max(d.dim_value, 0) for d in kind.shape.dim]
        dims.insert(axis_in(axis, len(dims) + 1), 0)
        return np.zeros(dims, protobuf.dtype_name(kind.elem_type))


def _stack(call, body: _Body, parts: list[str], output: int, made: int, axis: int = 0) -> None:
    """Makes the node's ``output`` of what the iterations made of the body's output ``made``."""
    if not call.wants(output):
        return
    if lost := [name for name in parts if call.is_unknown(name)]:
        call.lose(output, lost[0])
    elif not parts:
        call.set_constant(body.empty(made, axis), output)
    else:
        wide = []
        for name in parts:
            shape = list(call.value_of(name).shape)
            place = axis_in(axis, len(shape) + 1)
            shape.insert(place, 1)
            wide.append(call.emit(Reshape(tuple(shape), allow_zero=True), [name]))
        call.emit(Concat(place), wide, [call.output(output)])


def _finish(call, states: list[str]) -> None:
    for index, name in enumerate(states):
        if call.wants(index):
            call.alias(name, index)


@converts("Loop")
def loop(call) -> None:
    """Writes out every iteration.

    One whose condition is found while the graph runs is followed by as many more, in the example, as were
    found to run before it: the graph is read a few times, however many there are.
    """
    carried = len(call.inputs) - 2
    stacked = len(call.outputs) - carried
    if carried < 0 or stacked < 0:
        raise InputError(
            f"expected a trip count, a condition and {carried} outputs or more, found "
            f"{len(call.inputs)} inputs and {len(call.outputs)} outputs"
        )
    body = _Body(call, 2 + carried, 1 + carried + stacked)
    call.refuse_others()
    most = call.constant_number(0, "the trip count")
    running = not call.has(1) or _flag(call, 1, "condition")
    states = [call.input(2 + index) for index in range(carried)]
    parts: list[list[str]] = [[] for _ in range(stacked)]
    done = found = 0
    while running and (most is None or done < most):
        number = call.set_constant(np.asarray(done, np.int64))
        condition, *made = body.run([number, call.set_constant(np.asarray(True)), *states])
        states = made[:carried]
        for names, name in zip(parts, made[carried:], strict=True):
            names.append(name)
        done += 1
        found += call.was_found(condition)
        running = _one_bool(
            call.constant_of(condition, "condition", example=done < 2 * found), "condition"
        )
    _finish(call, states)
    for index, names in enumerate(parts):
        _stack(call, body, names, carried + index, 1 + carried + index)


@converts("Scan")
def scan(call) -> None:
    """Writes out an iteration for every slice of the inputs that are scanned."""
    if call.opset < 9:
        raise Refusal(None, "Scan before opset 9 is not supported")
    count = call.number("num_scan_inputs", 0)
    carried = len(call.inputs) - count
    stacked = len(call.outputs) - carried
    if count < 1 or carried < 0 or stacked < 0:
        raise InputError(
            f"num_scan_inputs: expected 1 to {len(call.inputs)}, found {count} with "
            f"{len(call.outputs)} outputs"
        )
    body = _Body(call, len(call.inputs), carried + stacked)
    axes = call.integers("scan_input_axes", (0,) * count)
    backwards = call.integers("scan_input_directions", (0,) * count)
    out_axes = call.integers("scan_output_axes", (0,) * stacked)
    out_backwards = call.integers("scan_output_directions", (0,) * stacked)
    call.refuse_others()
    if (len(axes), len(backwards)) != (count, count) or (len(out_axes), len(out_backwards)) != (
        stacked,
        stacked,
    ):
        raise InputError(f"expected axes and directions of {count} inputs and {stacked} outputs")
    slices = []
    for index, (axis, turned) in enumerate(zip(axes, backwards, strict=True)):
        shape = list(call.value(carried + index).shape)
        axis = axis_in(axis, len(shape))
        steps = shape.pop(axis)
        call.check_written_out(steps * len(body.proto.node))
        parts = [call.temporary() for _ in range(steps)]
        if steps:
            call.emit(Split(axis, (1,) * steps), [call.input(carried + index)], parts)
        parts = [call.emit(Reshape(tuple(shape), allow_zero=True), [part]) for part in parts]
        slices.append(parts[::-1] if turned else parts)
    if len({len(parts) for parts in slices}) != 1:
        raise InputError(f"expected inputs of one length, found {[len(parts) for parts in slices]}")
    states = [call.input(index) for index in range(carried)]
    made: list[list[str]] = [[] for _ in range(stacked)]
    for each in zip(*slices, strict=True):
        results = body.run([*states, *each])
        states = results[:carried]
        for names, name in zip(made, results[carried:], strict=True):
            names.append(name)
    _finish(call, states)
    for index, names in enumerate(made):
        names = names[::-1] if out_backwards[index] else names
        _stack(call, body, names, carried + index, carried + index, out_axes[index])
