"""Nodes that change nothing, and pairs of nodes that one can do."""

from __future__ import annotations

import math
from dataclasses import replace

from ...operators.cast import Cast
from ...operators.channels_last import AveragePool2dNhwc, MaxPool2dNhwc
from ...operators.copy import Copy
from ...operators.pad import Pad
from ...operators.pad2d import Pad2d
from ...operators.shaping import Concat, Expand, Reshape, Slice, Split, Tile, Transpose
from ..graph import Graph, Node, Value
from .rewriting import Rewrites, covering, only_user

#: Dimensions of what kernels reorder.
MOST = 8


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
        case MaxPool2dNhwc() | AveragePool2dNhwc() if _takes_itself(node, x, y):
            return "its windows are of one element"
        case Reshape() | Expand() | Tile() | Pad2d() if x.shape == y.shape:
            return "its output has its input's shape"
        case Pad(pads=pads) if not any(pads):
            return "it pads by nothing"
        case Slice() if x.shape == y.shape and all(step > 0 for step in node.op.steps):
            return "it takes everything"
        case Cast() if x.dtype == y.dtype:
            return "its input has its type already"
        case Transpose(perm=perm) if list(perm) == sorted(perm):
            return "it leaves the order of dimensions as it is"
        case Concat() | Split() if len(node.inputs) == 1:
            return "there is one part only"
    return None


def _takes_itself(node: Node, x: Value, y: Value) -> bool:
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
        wide = [axis for axis in node.op.perm if shape[axis] != 1]
        if wide == sorted(wide):
            op = Reshape(graph.values[node.outputs[0]].shape, allow_zero=True)
            why = "it moves dimensions of one element alone"
            rewrites.replace([node], [replace(node, op=op)], why)
    return rewrites.apply()


def compose_transposes(graph: Graph) -> Graph:
    """Makes one transpose of several in a row with reshapes between them, as tokens of windows have them.

    Where it moves runs of elements: what comes from one order of them and goes to another is exchanged once
    and then copied by runs sooner than it is exchanged in small pieces, as ShuffleNet's shuffles would be.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        chain = _moves_up_to(graph, node)
        if sum(type(one.op) is Transpose for one in chain) < 2 or not rewrites.free(*chain):
            continue
        (x, *_), (output,) = chain[0].inputs, node.outputs
        found = _composed(graph, x, chain)
        if found is None:
            continue
        wide, perm = found
        if perm[-1:] != (len(perm) - 1,):
            continue
        if len(perm) == 1:
            op = Reshape(graph.values[output].shape, allow_zero=True)
            made = replace(node, op=op, inputs=(x,), covers=covering(*chain))
            rewrites.replace(chain, [made], "they leave the order as it is")
            continue
        name = rewrites.fresh(f"{node.name}.wide")
        turned = rewrites.fresh(f"{node.name}.turned")
        by = [
            replace(node, op=Transpose(perm), inputs=(name,), outputs=(turned,), covers=covering(*chain)),
            Node(name, Reshape(wide, allow_zero=True), (x,), (name,)),
            Node(turned, Reshape(graph.values[output].shape, allow_zero=True), (turned,), (output,)),
        ]  # fmt: skip
        rewrites.replace(chain, by, "one transpose does what several did")
    return rewrites.apply()


def _moves_up_to(graph: Graph, node: Node) -> list[Node]:
    """Returns the reshapes and transposes in a row that end with ``node``, or none where the row goes on."""
    after = only_user(graph, node.outputs[0])
    if not _moves(node) or (after is not None and _moves(after)):
        return []
    chain = [node]
    while (before := graph.producers.get(chain[0].inputs[0])) is not None:
        if not _moves(before) or only_user(graph, before.outputs[0]) is not chain[0]:
            break
        chain.insert(0, before)
    return chain


def _moves(node: Node) -> bool:
    return type(node.op) in (Reshape, Transpose)


def _composed(
    graph: Graph, x: str, chain: list[Node]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns a shape of x and an order of its dimensions that together do what ``chain`` does, or None.

    Dimensions are cut where a reshape cuts them, and those that stay beside one another are one in the end.
    """
    sizes = list(graph.values[x].shape)  # of pieces, by number
    order = list(range(len(sizes)))  # of all pieces in x
    dims = [[piece] for piece in order]
    if 0 in sizes:
        return None
    for node in chain:
        if type(node.op) is Transpose:
            dims = [dims[axis] for axis in node.op.perm]
            continue
        left = [piece for dim in dims for piece in dim]
        dims = []
        for size in graph.values[node.outputs[0]].shape:
            dim, need = [], size
            while need > 1:
                piece = left[0]
                if sizes[piece] > need and sizes[piece] % need == 0:
                    rest = len(sizes)
                    sizes.append(sizes[piece] // need)
                    sizes[piece] = need
                    order.insert(order.index(piece) + 1, rest)
                    left.insert(1, rest)
                elif need % sizes[piece]:
                    return None
                need //= sizes[piece]
                dim.append(left.pop(0))
            dims.append(dim)
    last = [piece for dim in dims for piece in dim if sizes[piece] > 1]
    order = [piece for piece in order if sizes[piece] > 1]
    if not order:
        return (1,), (0,)
    places = [order.index(piece) for piece in last]
    first = [place for i, place in enumerate(places) if not i or places[i - 1] != place - 1]
    runs = sorted(first)
    if len(runs) > MOST:
        return None
    ends = [*runs[1:], len(order)]
    wide = tuple(
        math.prod(sizes[piece] for piece in order[a:b]) for a, b in zip(runs, ends, strict=True)
    )
    return wide, tuple(runs.index(place) for place in first)
