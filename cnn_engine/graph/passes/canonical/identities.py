"""Nodes that change nothing, and pairs of nodes that one can do."""

from __future__ import annotations

from dataclasses import replace

from ....operators.binary import Div, Mul
from ....operators.cast import Cast
from ....operators.channels_last import AveragePool2dNhwc, MaxPool2dNhwc
from ....operators.copy import Copy
from ....operators.pad import Pad
from ....operators.pad2d import Pad2d
from ....operators.shaping import Concat, Expand, Reshape, Slice, Split, Tile, Transpose
from ...graph import Graph, Node, Value
from ...mapped import read
from ..rewriting import Rewrites, covering, only_user


def drop_identities(graph: Graph) -> Graph:
    """Takes away copies, and shapes, orders, types, pads and slices that leave their input as it is."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        why = _why(graph, node)
        if why is not None:
            rewrites.drop(node, why)
    return rewrites.apply()


def _why(graph: Graph, node: Node) -> str | None:
    """Returns why ``node`` changes nothing, or None where it does."""
    if len(node.outputs) != 1 or not node.inputs or node.inputs[0] is None:
        return None
    x, y = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
    match node.op:
        case Copy():
            return "it copies its input"
        case MaxPool2dNhwc() | AveragePool2dNhwc() if _is_one_pixel_window(node, x, y):
            return "its windows are of one element"
        case Reshape() | Expand() | Tile() | Pad2d() if x.shape == y.shape:
            return "its output has its input's shape"
        case Pad(pads=pads) if not any(pads):
            return "it pads by nothing"
        case Slice() if x.shape == y.shape and all(step > 0 for step in node.op.steps):
            return "it takes everything"
        case Cast(through="") if x.dtype == y.dtype:
            return "its input has its type already"
        case Transpose(perm=perm) if list(perm) == sorted(perm):
            return "it leaves the order of dimensions as it is"
        case Concat() | Split() if len(node.inputs) == 1:
            return "there is one part only"
        case Mul() | Div() if x.inferred == y.inferred and _is_one(graph, node.inputs[1]):
            return "it multiplies by 1"
    return None


def _is_one(graph: Graph, name: str | None) -> bool:
    """Whether a tensor is a constant of ones."""
    array = graph.constants.get(name)
    return array is not None and bool((read(array) == 1).all())


def _is_one_pixel_window(node: Node, x: Value, y: Value) -> bool:
    """Whether a pool's windows are of one element, each its own."""
    op = node.op
    return x.shape == y.shape and set(op.kernel) == set(op.stride) == {1} and not any(op.padding)


def merge_shapes(graph: Graph) -> Graph:
    """Makes one reshape of two in a row, and one transpose of two."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        if not isinstance(node.op, (Reshape, Transpose)):
            continue
        before = graph.producers.get(node.inputs[0])
        if before is None or type(before.op) is not type(node.op):
            continue
        if only_user(graph, before.outputs[0]) is not node or not rewrites.free(node, before):
            continue
        if isinstance(node.op, Reshape):
            op = Reshape(graph.values[node.outputs[0]].shape, allow_zero=True)
        else:
            op = Transpose(tuple(before.op.perm[axis] for axis in node.op.perm))
        merged = replace(node, op=op, inputs=before.inputs, covers=covering(before, node))
        rewrites.replace([before, node], [merged], f"two {node.op.kind}s in a row are one")
    return rewrites.apply()


def reshape_ones(graph: Graph) -> Graph:
    """Makes reshapes, which run nothing, of transposes that move dimensions of one element alone."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        if type(node.op) is not Transpose or node.inputs[0] is None:
            continue
        shape = graph.values[node.inputs[0]].shape
        stays = 1 if node.op.perm[:1] == (0,) else 0  # such as a batch, of any size
        wide = [axis for axis in node.op.perm[stays:] if shape[axis] != 1]
        if wide == sorted(wide):
            op = Reshape(graph.values[node.outputs[0]].shape, allow_zero=True)
            why = "it moves dimensions of one element alone"
            rewrites.replace([node], [replace(node, op=op)], why)
    return rewrites.apply()
