"""Kernels of elementwise functions."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np

from ..graph.graph import Graph, Node
from ..graph.passes.fuse.pointwise import MOST_INPUTS, POINTWISE
from ..operators import KINDS
from ..operators.binary import Binary
from ..operators.operator import Operator
from ..operators.region import Region
from ..operators.unary import Unary
from .arguments import input_values, output_values
from .kernel import Bound, Call, Kernel, on_both, storing
from .native import _cpu
from .strided import MOST, keeping, repeated, row_major, together, walk


def _make(name: str):
    def make(call: Call) -> Bound:
        if call.uses_storage_dtype:
            return _unary_in_storage_dtype(
                call, _cpu.Activation(getattr(_cpu.UnaryFunction, name), 0.0, 0.0)
            )
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
    images, channels, *positions = x.shape
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
        _cpu.ChannelShape(images, channels, math.prod(positions)),
    )
    return keeping(together([wide, by_channel]), table)


def _make_unary(call: Call) -> Bound:
    op = call.node.op
    function = getattr(_cpu.UnaryFunction, op.function)
    size, numbers = call.inputs[0].size, (float(op.alpha), float(op.beta))
    if call.uses_storage_dtype:
        return _unary_in_storage_dtype(call, _cpu.Activation(function, *numbers))
    return call.native(
        "unary", call.input_addresses[0], call.output_addresses[0], size, function, *numbers
    )


def _unary_in_storage_dtype(call: Call, activation: Any) -> Bound:
    (x,) = call.inputs
    return call.native(
        "unary_stored",
        *input_values(call),
        *output_values(call),
        x.size,
        activation,
        call.overflow,
    )


def _make_binary(call: Call) -> Bound:
    (x, y), (out,) = call.inputs, call.outputs
    steps = [repeated(v.shape, out.shape, call.pitches.get(v.name)) for v in (x, y)]
    found = walk(out.shape, *steps, row_major(out.shape, call.pitches.get(out.name)))
    shape = _cpu.BinaryShape(*chain(*found))
    function = getattr(_cpu.BinaryFunction, call.node.op.function)
    if call.uses_storage_dtype:
        read = *input_values(call, 0), *input_values(call, 1)
        written = output_values(call)
        return call.native("binary_stored", *read, *written, shape, function, call.overflow)
    return call.native("binary", *call.input_addresses, call.output_addresses[0], shape, function)


#: Types of elements that are compared, and that become floats.
_COMPARED = "float32", "int32", "int64"
_CONVERTED = "bool", "uint8", "int8", "int32", "int64"


def _make_compare(call: Call) -> Bound:
    kind, (x, y), (out,) = call.node.op.kind, call.inputs, call.outputs
    at = call.input_addresses
    if kind.startswith("greater"):
        x, y, at = y, x, at[::-1]
    steps = [repeated(value.shape, out.shape) for value in (x, y)]
    shape = _cpu.BinaryShape(*chain(*walk(out.shape, *steps, row_major(out.shape))))
    number = getattr(_cpu.NumberType, x.dtype)
    less, or_equal = kind != "equal", kind.endswith("equal")
    return call.native("compare", *at, call.output_addresses[0], shape, number, less, or_equal)


def _make_to_float32(call: Call) -> Bound:
    x, number = call.inputs[0], getattr(_cpu.NumberType, call.inputs[0].dtype)
    return call.native(
        "to_float32", call.input_addresses[0], call.output_addresses[0], x.size, number
    )


def _to_float32_why_not(node: Node, graph: Graph) -> str | None:
    op = node.op
    return None if op.dtype == "float32" else f"expected a cast to float32, found {op.dtype}"


def _broadcast_why_not(node: Node, graph: Graph) -> str | None:
    for value in graph.inputs_of(node)[-2:]:
        if value.dtype != "float32":
            return f"expected float32, found {value.dtype}"
    return _dimensions_why_not(node, graph)


def _dimensions_why_not(node: Node, graph: Graph) -> str | None:
    inputs, (out,) = graph.inputs_of(node), graph.outputs_of(node)
    if len(out.shape) <= MOST:
        return None
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


#: csrc/ops/pointwise.h's PointwiseStep.
_STEP = np.dtype(
    [("is_binary", "i4"), ("function", "i4"), ("x", "i4"), ("y", "i4"), ("alpha", "f4"), ("beta", "f4")]
)  # fmt: skip


def steps_of(region: Region) -> np.ndarray:
    """Returns the functions of a region of ``fuse_pointwise``, as kernels number them."""
    positions = {name: index for index, name in enumerate(region.inputs)}
    steps = np.zeros(len(region.nodes), _STEP)
    for index, (part, step) in enumerate(zip(region.nodes, steps, strict=True)):
        op, binary = part.op, isinstance(part.op, Binary)
        functions = _cpu.BinaryFunction if binary else _cpu.UnaryFunction
        step["is_binary"] = binary
        step["function"] = list(functions.__members__).index(op.function)
        step["x"], step["y"] = (positions[name] for name in (*part.inputs, part.inputs[0])[:2])
        if not binary:
            step["alpha"], step["beta"] = op.alpha, op.beta
        positions[part.role] = MOST_INPUTS + index
    return steps


def walk_of(call: Call) -> list[list[int]]:
    """Returns the dimensions of a region's output, each input's strides through them, and the output's."""
    (out,) = call.outputs
    steps = [repeated(x.shape, out.shape, call.pitches.get(x.name)) for x in call.inputs]
    steps += [(0,) * len(out.shape)] * (MOST_INPUTS - len(steps))
    return walk(out.shape, *steps, row_major(out.shape, call.pitches.get(out.name)))


def _make_region(call: Call) -> Bound:
    steps = call.prepared
    shape = _cpu.PointwiseShape(*chain(*walk_of(call)), len(steps))
    inputs = [*call.input_addresses, *[call.input_addresses[0]] * MOST_INPUTS][:MOST_INPUTS]
    bound = call.native(
        "pointwise", *inputs, call.output_addresses[0], shape, _cpu.address_of(steps)
    )
    return keeping(bound, steps)


def region_why_not(node: Node, graph: Graph) -> str | None:
    """Returns why kernels of regions cannot run one, or None."""
    for part in node.op.nodes:
        functions = _cpu.BinaryFunction if isinstance(part.op, Binary) else _cpu.UnaryFunction
        if not hasattr(functions, part.op.function):
            return f"expected functions that kernels have, found {part.op.function}"
    return _broadcast_why_not(node, graph)


def _kinds(record: type[Operator], functions: type) -> list[str]:
    """Returns the kinds of records whose function, by their own name or another, a kernel has."""
    return [
        kind
        for kind, other in KINDS.items()
        if issubclass(other, record) and hasattr(functions, kind)
    ]


_ONE = {"in_place": True, "stores": storing(None, 0)}
_TWO = {"in_place": True, "pitched": (None, 0, 1), "stores": storing(None, 0, 1)}

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
    Kernel(
        POINTWISE,
        "pointwise",
        "cpu",
        _make_region,
        why_not=region_why_not,
        prepare=lambda node, graph, device: steps_of(node.op),
        packs=(),
        in_place=True,
        pitched=(None, *range(MOST_INPUTS)),
    ),
    *on_both("where", "where", _make_where, dtypes=("bool",), why_not=_broadcast_why_not),
    *(
        Kernel(kind, "compare", "cpu", _make_compare, dtypes=_COMPARED, why_not=_dimensions_why_not)
        for kind in ("equal", "less", "less_or_equal", "greater", "greater_or_equal")
    ),
    Kernel(
        "cast",
        "to_float32",
        "cpu",
        _make_to_float32,
        dtypes=_CONVERTED,
        why_not=_to_float32_why_not,
    ),
]
