"""The kernels of functions of numbers that stand at the same place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import _cpu
from ..graph.graph import Graph, Node
from ..operators import KINDS
from ..operators.binary import Binary
from ..operators.operator import Operator
from ..operators.unary import Unary
from .kernel import Bound, Call, Kernel, on_both, storage_of, storing
from .strided import MOST, keeping, repeated, row_major, together, walk


def _make(name: str):
    def make(call: Call) -> Bound:
        if call.is_stored:
            return _stored_unary(call, getattr(_cpu.UnaryFunction, name), 0.0, 0.0)
        shape = _cpu.ElementwiseShape(call.inputs[0].size, 4)
        return call.native(name, call.input_addresses[0], call.output_addresses[0], shape)

    return make


def _make_normalize(call: Call) -> Bound:
    op, x = call.node.op, call.inputs[0]
    shape = _cpu.ElementwiseShape(x.size, 1)
    if len(op.scale) == len(op.offset) == 1:
        return call.native(
            "normalize",
            call.input_addresses[0],
            call.output_addresses[0],
            shape,
            op.scale[0],
            op.offset[0],
        )
    images, channels, *places = x.shape
    numbers = np.empty((2, channels), np.float32)
    numbers[0], numbers[1] = op.scale, op.offset
    table = call.device.upload(numbers)
    wide = call.native(
        "normalize", call.input_addresses[0], call.output_addresses[0], shape, 1.0, 0.0
    )
    by_channel = call.native(
        "affine_channel",
        call.output_addresses[0],
        0,
        table.address,
        table.address + 4 * channels,
        call.output_addresses[0],
        _cpu.ChannelShape(images, channels, math.prod(places)),
    )
    return keeping(together([wide, by_channel]), table)


def _make_unary(call: Call) -> Bound:
    op = call.node.op
    function = getattr(_cpu.UnaryFunction, op.function)
    size, numbers = call.inputs[0].size, (float(op.alpha), float(op.beta))
    if call.is_stored:
        return _stored_unary(call, function, *numbers)
    return call.native(
        "unary", call.input_addresses[0], call.output_addresses[0], size, function, *numbers
    )


def _stored_unary(call: Call, *function: Any) -> Bound:
    (x,), (y,) = call.inputs, call.outputs
    types = storage_of(x), storage_of(y)
    return call.native(
        "unary_stored",
        call.input_addresses[0],
        call.output_addresses[0],
        x.size,
        *types,
        call.overflow,
        *function,
    )


def _make_binary(call: Call) -> Bound:
    (x, y), (out,) = call.inputs, call.outputs
    steps = [repeated(v.shape, out.shape, call.pitches.get(v.name)) for v in (x, y)]
    found = walk(out.shape, *steps, row_major(out.shape))
    shape = _cpu.BinaryShape(*found[0], *found[1], *found[2])
    function = getattr(_cpu.BinaryFunction, call.node.op.function)
    if call.is_stored:
        types = map(storage_of, (x, y, out))
        return call.native(
            "binary_stored",
            *call.input_addresses,
            call.output_addresses[0],
            shape,
            *types,
            call.overflow,
            function,
        )
    return call.native("binary", *call.input_addresses, call.output_addresses[0], shape, function)


def _broadcast_why_not(node: Node, graph: Graph) -> str | None:
    inputs, (out,) = graph.inputs_of(node), graph.outputs_of(node)
    for value in inputs[-2:]:
        if value.dtype != "float32":
            return f"expected float32, found {value.dtype}"
    steps = [repeated(value.shape, out.shape) for value in inputs]
    if walk(out.shape, *steps, row_major(out.shape)) is None:
        return f"expected at most {MOST} dimensions that cannot be joined, found more"
    return None


def _make_where(call: Call) -> Bound:
    (out,) = call.outputs
    steps = [repeated(value.shape, out.shape) for value in call.inputs]
    found = walk(out.shape, *steps, row_major(out.shape))
    shape = _cpu.WhereShape(*found[0], *found[1], *found[2], *found[3])
    return call.native("where", *call.input_addresses, call.output_addresses[0], shape)


def _kinds(record: type[Operator], functions: type) -> list[str]:
    """Returns the kinds of records whose function, by their own name or another, a kernel has."""
    return [
        kind
        for kind, other in KINDS.items()
        if issubclass(other, record) and hasattr(functions, kind)
    ]


_ONE = {"in_place": True, "stores": storing(None, 0)}
_TWO = {"in_place": True, "pitched": (0, 1), "stores": storing(None, 0, 1)}

ROWS: list[Kernel] = [
    *on_both("relu", "relu", _make("relu"), **_ONE),
    *on_both("tanh", "tanh", _make("tanh"), **_ONE),
    *on_both("normalize", "normalize", _make_normalize, dtypes=("uint8",)),
    *(
        row
        for kind in _kinds(Unary, _cpu.UnaryFunction)
        for row in on_both(kind, "unary", _make_unary, **_ONE)
    ),
    *(
        row
        for kind in _kinds(Binary, _cpu.BinaryFunction)
        for row in on_both(kind, "binary", _make_binary, why_not=_broadcast_why_not, **_TWO)
    ),
    *on_both("where", "where", _make_where, dtypes=("bool",), why_not=_broadcast_why_not),
]
