"""Has operators that only move numbers move integers, by changing their order with quantizing nodes.

move(dequantize(q)) is dequantize(move(q)), and quantize(move(x)) is move(quantize(x)). The same is true of
maxima, as both functions rise. Integers are a fourth of the bytes, and layers come to stand beside scales.
"""

from __future__ import annotations

from dataclasses import replace

from ....operators.copy import Copy
from ....operators.max_pool2d import MaxPool2d
from ....operators.operator import Operator
from ....operators.pad import Pad
from ....operators.quantized import DequantizeLinear
from ....operators.reduce import ReduceMax
from ....operators.resize import Resize
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
from ...graph import Graph, Node
from ..rewriting import Rewrites, only_user
from .tensors import Quantized, dequantized, quantizes

_MOVES = (
    Copy, DepthToSpace, Expand, MaxPool2d, Pad, ReduceMax, Reshape, Resize, Slice, SpaceToDepth, Split, Tile,
    Transpose,
)  # fmt: skip


def _of_integers(op: Operator, zero: int) -> Operator | None:
    """Returns what moves integers as ``op`` moves the numbers that they stand for, or None."""
    if type(op) not in _MOVES:
        return None
    if isinstance(op, Pad) and op.mode == "constant":
        return replace(op, value=float(zero)) if op.value == 0 else None
    if isinstance(op, Resize) and (op.mode != "nearest" or op.roi):
        return None
    if isinstance(op, MaxPool2d) and op.indices is not None:
        return None
    return op


def sink_dequantizing(graph: Graph) -> Graph:
    """Dequantizes after operators that move numbers, not before."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        if isinstance(node.op, Concat):
            _sink_below_concat(rewrites, graph, node)
            continue
        found = dequantized(graph, node.inputs[0]) if node.inputs else None
        if found is None:
            continue
        op, axis = _of_integers(node.op, found.offset), found.axis
        if axis is not None:
            op, axis = _of_channels(graph, node, axis)
        if op is not None:
            inputs = (found.integers.name, *node.inputs[1:])
            _sink(rewrites, node, replace(node, op=op, inputs=inputs), found, axis)
    return rewrites.apply()


def _of_channels(graph: Graph, node: Node, axis: int) -> tuple[Operator | None, int]:
    """Returns the operator, and where the dimension is afterwards along which scales differ."""
    op = node.op
    if isinstance(op, Transpose):
        return op, op.perm.index(axis)
    if isinstance(op, Copy):
        return op, axis
    if isinstance(op, Reshape):
        before, after = (graph.values[name].shape for name in (node.inputs[0], node.outputs[0]))
        if before[: axis + 1] == after[: axis + 1]:
            return op, axis
    return None, axis


def _sink(
    rewrites: Rewrites, node: Node, moved: Node, found: Quantized, axis: int | None = None
) -> None:
    integers = tuple(rewrites.fresh(f"{name}/integers") for name in node.outputs)
    op = DequantizeLinear(axis=1 if axis is None else axis)
    after = [
        Node(
            rewrites.fresh(f"{name}/dequantize"), op,
            tuple(n for n in (source, found.scale, found.zero) if n is not None), (name,),
        )
        for source, name in zip(integers, node.outputs, strict=True)
    ]  # fmt: skip
    why = "integers are moved in the place of what they stand for"
    rewrites.replace([node], [replace(moved, outputs=integers), *after], why)


def _sink_below_concat(rewrites: Rewrites, graph: Graph, node: Node) -> None:
    parts = [dequantized(graph, name) for name in node.inputs]
    first = parts[0]
    if first is None or any(
        part is None or part.axis is not None or not part.same_as(first) for part in parts
    ):
        return
    moved = replace(node, inputs=tuple(part.integers.name for part in parts))
    _sink(rewrites, node, moved, first)


def hoist_quantizing(graph: Graph) -> Graph:
    """Quantizes before operators that move numbers, where nothing else reads their outputs."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        found = quantizes(graph, node)
        move = None if found is None else graph.producers.get(node.inputs[0])
        if move is None or only_user(graph, node.inputs[0]) is not node:
            continue
        if isinstance(move.op, Concat):
            places = range(len(move.inputs))
            op: Operator | None = move.op
        else:
            op, places = _of_integers(move.op, found.offset), range(1)
            if isinstance(op, Split) or dequantized(graph, move.inputs[0]) is not None:
                continue
            if op is not None and only_user(graph, move.inputs[0]) is not move:
                continue
        if op is None or not rewrites.free(node, move):
            continue
        inputs, before = list(move.inputs), []
        for place in places:
            integers = rewrites.fresh(f"{inputs[place]}/integers")
            name = node.name if place == 0 else rewrites.fresh(f"{node.name}/{place}")
            source = (inputs[place], *node.inputs[1:])
            before.append(replace(node, name=name, inputs=source, outputs=(integers,)))
            inputs[place] = integers
        moved = replace(move, op=op, inputs=tuple(inputs), outputs=node.outputs)
        why = "integers are moved in the place of what they stand for"
        rewrites.replace([node, move], [*before, moved], why)
    return rewrites.apply()
