"""Composes transposes, and moves them from images into weights."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ....operators.channels_last import TO_FIRST
from ....operators.conv2d import Conv2d
from ....operators.linear import Linear
from ....operators.shaping import DepthToSpace, Reshape, Transpose
from ...graph import Graph, Node
from ..rewriting import Rewrites, constant, covering, only_user

#: Dimensions of what kernels reorder.
MOST = 8


def order_weights(graph: Graph) -> Graph:
    """Has linear layers read images [N, H, W, C] as they lie: their weights' columns take that order.

    Networks like VGG flatten [N, C, H, W], for which a transpose would run in each pass. Weights in another
    order are no longer a mapped file's memory: worth it on a GPU, which has copies anyway.
    """
    rewrites = Rewrites(graph)
    for linear in graph.nodes:
        weight = constant(graph, linear, 1) if type(linear.op) is Linear else None
        before = None if weight is None else _turned_for(graph, linear)
        if before is None or not rewrites.free(linear, *before):
            continue
        n, channels, *positions = graph.values[before[0].outputs[0]].shape
        columns = weight.reshape(len(weight), channels, math.prod(positions)).transpose(0, 2, 1)
        name, flat = (rewrites.fresh(f"{linear.name}.{word}") for word in ("weight", "rows"))
        x = before[0].inputs[0]
        shaped = replace(
            before[-1],
            op=Reshape((n, weight.shape[1]), allow_zero=True),
            inputs=(x,),
            outputs=(flat,),
        )
        made = replace(
            linear, inputs=(flat, name, *linear.inputs[2:]), covers=covering(*before[:-1], linear)
        )
        rewrites.replace(
            [*before, linear], [made, shaped], "its order is that of the weights",
            {name: np.ascontiguousarray(columns).reshape(weight.shape)},
        )  # fmt: skip
    return rewrites.apply()


def order_filters(graph: Graph) -> Graph:
    """Has convolutions order the channels of a pixel shuffle so that whole vectors of them move.

    ``CRD``, which PyTorch exports, moves each channel by itself; ``DCR`` moves C of them at once.
    """
    rewrites = Rewrites(graph)
    for shuffle in graph.nodes:
        if type(shuffle.op) is not DepthToSpace or shuffle.op.mode != "CRD":
            continue
        conv = graph.producers.get(shuffle.inputs[0])
        if (
            conv is None
            or type(conv.op) is not Conv2d
            or conv.op.groups != 1
            or len(conv.inputs) > 3
        ):
            continue
        arrays = [constant(graph, conv, place) for place in range(1, len(conv.inputs))]
        alone = only_user(graph, conv.outputs[0]) is shuffle and rewrites.free(conv, shuffle)
        if not alone or any(array is None for array in arrays):
            continue
        block = shuffle.op.block**2
        constants = {
            rewrites.fresh(f"{conv.name}.{word}"): np.ascontiguousarray(
                array.reshape(-1, block, *array.shape[1:]).swapaxes(0, 1)
            ).reshape(array.shape)
            for word, array in zip(("weight", "bias"), arrays, strict=False)
        }
        made = replace(conv, inputs=(conv.inputs[0], *constants))
        moved = replace(shuffle, op=replace(shuffle.op, mode="DCR"))
        rewrites.replace([conv, shuffle], [made, moved], "channels move as vectors", constants)
    return rewrites.apply()


def _turned_for(graph: Graph, linear: Node) -> tuple[Node, ...] | None:
    """Returns the transpose from [N, H, W, C] whose rows ``linear`` alone reads, and the reshape between."""
    found: tuple[Node, ...] = ()
    reader = linear
    for kind in (Reshape, Transpose):
        node = graph.producers.get(reader.inputs[0])
        if node is None or only_user(graph, node.outputs[0]) is not reader:
            return None
        if type(node.op) is kind:
            found, reader = (node, *found), node
    if type(reader.op) is not Transpose or reader.op.perm != TO_FIRST:
        return None
    rows = graph.values[linear.inputs[0]].shape
    images = graph.values[reader.outputs[0]].shape
    return found if rows[0] == images[0] else None


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
    positions = [order.index(piece) for piece in last]
    first = [place for i, place in enumerate(positions) if not i or positions[i - 1] != place - 1]
    runs = sorted(first)
    if len(runs) > MOST:
        return None
    ends = [*runs[1:], len(order)]
    wide = tuple(
        math.prod(sizes[piece] for piece in order[a:b]) for a, b in zip(runs, ends, strict=True)
    )
    return wide, tuple(runs.index(place) for place in first)
