"""The kernels of reductions, and of functions along one dimension that end in one number or as many."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..graph.graph import Graph, Node
from ..operators import KINDS
from ..operators.operator import axis_in
from ..operators.reduce import Reduce
from ..operators.shaping import Reshape, Transpose
from .arguments import input_values, output_values
from .kernel import Bound, Call, Kernel, on_both
from .native import _cpu
from .strided import unused

#: Means of columns that one call makes where they lie in memory in 16 bits.
LONGEST_LINE = 65535


def _line(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Returns [outer, axis, inner] where the dimensions ``axes`` lie side by side, else None.

    Dimensions of 1 lie anywhere.
    """
    gone = {axis_in(axis, len(shape)) for axis in axes}
    wide = [axis for axis in gone if shape[axis] != 1]
    if not wide:
        return math.prod(shape), 1, 1
    first, last = min(wide), max(wide)
    if any(shape[axis] != 1 and axis not in gone for axis in range(first, last)):
        return None
    return (
        math.prod(shape[:first]),
        math.prod(shape[first : last + 1]),
        math.prod(shape[last + 1 :]),
    )


def _make(call: Call) -> Bound:
    op = call.node.op
    shape = _cpu.AxisShape(*_line(call.inputs[0].shape, op.axes))
    if call.uses_storage_dtype:
        return call.native(
            "mean_stored", *input_values(call), *output_values(call), shape, call.overflow
        )
    return call.native(
        "reduce",
        call.input_addresses[0],
        call.output_addresses[0],
        shape,
        getattr(_cpu.Reduction, op.function),
    )


def _stores(node: Node, graph: Graph) -> tuple[int | None, ...]:
    line = _line(graph.values[node.inputs[0]].shape, node.op.axes)
    is_mean = node.op.function == "mean" and line is not None
    return (None, 0) if is_mean and line[0] <= LONGEST_LINE else ()


def _side_by_side(node: Node, graph: Graph) -> list[Node] | None:
    """Returns a transpose that brings the dimensions that go to the end, the reduction, and a reshape."""
    x = graph.values[node.inputs[0]]
    if _line(x.shape, node.op.axes) is not None:
        return None
    rank = len(x.shape)
    gone = sorted(axis_in(axis, rank) for axis in node.op.axes)
    kept = [axis for axis in range(rank) if axis not in gone]
    (output,) = node.outputs
    moved, reduced = (unused(graph, f"{output} {word}") for word in ("moved", "reduced"))
    op = replace(node.op, axes=tuple(range(len(kept), rank)), keepdims=False)
    nodes = [
        Node(
            unused(graph, f"{node.name}.transpose"),
            Transpose((*kept, *gone)),
            node.inputs,
            (moved,),
        ),
        replace(node, op=op, inputs=(moved,), outputs=(reduced if node.op.keepdims else output,)),
    ]
    if node.op.keepdims:
        shape = graph.values[output].shape
        reshape = Reshape(shape, allow_zero=True)
        nodes.append(Node(unused(graph, f"{node.name}.reshape"), reshape, (reduced,), (output,)))
    return nodes


def _make_arg(call: Call) -> Bound:
    op, x = call.node.op, call.inputs[0]
    shape = _cpu.AxisShape(*_axis(x.shape, op.axis))
    largest = op.kind == "arg_max"
    return call.native(
        "arg_extreme",
        call.input_addresses[0],
        call.output_addresses[0],
        shape,
        largest,
        bool(op.last),
    )


def _axis(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    place = axis_in(axis, len(shape))
    return math.prod(shape[:place]), shape[place], math.prod(shape[place + 1 :])


def _make_softmax(call: Call) -> Bound:
    shape = _cpu.AxisShape(*_axis(call.inputs[0].shape, call.node.op.axis))
    logarithm = call.node.op.kind == "log_softmax"
    return call.native(
        "softmax_axis", call.input_addresses[0], call.output_addresses[0], shape, logarithm
    )


def _make_cumulative(call: Call) -> Bound:
    op = call.node.op
    shape = _cpu.AxisShape(*_axis(call.inputs[0].shape, op.axis))
    return call.native(
        "cumulative",
        call.input_addresses[0],
        call.output_addresses[0],
        shape,
        op.kind == "cum_prod",
        bool(op.exclusive),
        bool(op.reverse),
    )


def _reductions() -> list[Any]:
    return [
        row
        for kind, record in KINDS.items()
        if issubclass(record, Reduce)
        for row in on_both(kind, "reduce", _make, rewrite=_side_by_side, stores=_stores)
    ]


ROWS = [
    *_reductions(),
    *on_both("arg_max", "arg_extreme", _make_arg),
    *on_both("arg_min", "arg_extreme", _make_arg),
    *on_both("softmax", "softmax_axis", _make_softmax, in_place=True),
    *on_both("log_softmax", "softmax_axis", _make_softmax, in_place=True),
    Kernel("cum_sum", "cumulative", "cpu", _make_cumulative, in_place=True),
    Kernel("cum_prod", "cumulative", "cpu", _make_cumulative, in_place=True),
]
