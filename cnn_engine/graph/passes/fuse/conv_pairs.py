"""Two convolutions as one operator: those that are added, and neighbours in concatenations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....operators.conv2d_pair import Conv2dBeside, Conv2dSum
from ....operators.operator import axis_in
from ....operators.shaping import Concat
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, covering, only_user
from .squeeze_excite import is_convolution

#: Whether a kernel makes two convolutions faster than one by one, the second beside the first or added to it.
Takes = Callable[[Graph, Node, Node, bool], bool]


def fuse_sums(graph: Graph, takes: Takes) -> Graph:
    """Makes one node of a convolution and of the one that its result alone is added to.

    Their sums are one, over the terms of both: what the first makes is neither written nor read. Input 0 is
    what was made earlier of what they read.
    """
    rewrites = Rewrites(graph)
    for last in graph.nodes:
        added = None if absent(last, 3) else graph.producers.get(last.inputs[3])
        if not (_is_bare(graph, added) and _is_bare(graph, last)) or not absent(added, 3):
            continue
        if added.op.activation is not None or added.op.compute_dtype != last.op.compute_dtype:
            continue
        alone = only_user(graph, added.outputs[0]) is last and last.inputs[0] != added.outputs[0]
        if not alone or not rewrites.free(added, last):
            continue
        both = sorted((added, last), key=lambda node: _made_at(graph, node.inputs[0]))
        if takes(graph, *both, False):
            merged = _merged(Conv2dSum, last, both, last.outputs)
            rewrites.replace([last, added], [merged], "together they are conv2d_sum")
    return rewrites.apply()


def fuse_neighbours(graph: Graph, takes: Takes) -> Graph:
    """Makes one node of two convolutions whose results follow each other in a concatenation of channels.

    Small images leave most of a GPU to a second convolution, and a start less is to be waited for.
    """
    rewrites, storage_dtype = Rewrites(graph), dict(graph.storage_dtype)
    for concat in graph.nodes:
        if type(concat.op) is not Concat:
            continue
        shape, inputs = graph.values[concat.outputs[0]].shape, list(concat.inputs)
        if len(shape) != 4 or axis_in(concat.op.axis, 4) != 3:
            continue
        pairs: list[tuple[Node, Node]] = []
        merged: list[Node] = []
        for place in range(len(inputs) - 1):
            both = [graph.producers.get(name) for name in inputs[place : place + 2] if name]
            if not _are_neighbours(graph, both) or not takes(graph, *both, True):
                continue
            outputs = concat.outputs
            if len(inputs) > 2:
                outputs = (rewrites.fresh(f"{concat.name}.{place}"),)
                if both[0].outputs[0] in storage_dtype:
                    storage_dtype[outputs[0]] = storage_dtype[both[0].outputs[0]]
            pairs.append(both)
            merged.append(_merged(Conv2dBeside, both[1], both, outputs))
            inputs[place : place + 2] = [None, outputs[0]]  # which is in no other pair
        if not pairs:
            continue
        left = tuple(name for name in inputs if name is not None)
        kept = [replace(concat, inputs=left)] if len(left) > 1 else []
        gone = [node for both in pairs for node in both[::-1]]
        rewrites.replace([*gone, concat], [*merged, *kept], "together they are conv2d_beside")
    return replace(rewrites.apply(), storage_dtype=storage_dtype)


def _merged(op: type, named: Node, both: list[Node], outputs: tuple[str, ...]) -> Node:
    records = (replace(node.op, activation=None) for node in both)
    inputs = (
        node.inputs[place] if place < len(node.inputs) else None
        for place in range(3)
        for node in both
    )
    how = named.op.activation, named.op.compute_dtype
    return Node(named.name, op(*records, *how), tuple(inputs), outputs, covering(*both))


def _is_bare(graph: Graph, node: Node | None) -> bool:
    """Whether a node convolves by constants, without groups, and does nothing to the images that it reads."""
    return node is not None and is_convolution(graph, node, may_add=True)


def _are_neighbours(graph: Graph, both: list[Node | None]) -> bool:
    if len(both) != 2 or both[0] is both[1] or not all(_is_bare(graph, node) for node in both):
        return False
    first, second = both
    return (
        absent(first, 3)
        and absent(second, 3)
        and first.op.activation == second.op.activation
        and first.op.compute_dtype == second.op.compute_dtype
        and all(only_user(graph, node.outputs[0]) is not None for node in both)
    )


def _made_at(graph: Graph, name: str) -> int:
    maker = graph.producers.get(name)
    return -1 if maker is None else graph.places[maker.name]
