"""Two convolutions that are neighbours in a concatenation of channels, as one region."""

from __future__ import annotations

from dataclasses import replace

from ....operators.operator import axis_in
from ....operators.shaping import Concat
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, covering, only_user
from .patterns import PAIR, is_bare
from .regions import WhyNot, region_of


def fuse_conv_pairs(graph: Graph, why_not: WhyNot | None = None) -> Graph:
    """Makes one node of two convolutions whose results follow each other in a concatenation of channels.

    Small images leave most of a GPU to a second convolution, and a start less is to be waited for.
    """
    rewrites, storage = Rewrites(graph), dict(graph.storage_dtype)
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
            if not _are_neighbours(graph, both):
                continue
            outputs = concat.outputs
            if len(inputs) > 2:
                outputs = (rewrites.fresh(f"{concat.name}.{place}"),)
            made = _merged(both, concat.op, outputs[0])
            if why_not is not None and why_not(graph, made):
                continue
            if len(inputs) > 2 and both[0].outputs[0] in storage:
                storage[outputs[0]] = storage[both[0].outputs[0]]
            pairs.append(both)
            merged.append(made)
            inputs[place : place + 2] = [None, outputs[0]]  # which is in no other pair
        if not pairs:
            continue
        left = tuple(name for name in inputs if name is not None)
        kept = [replace(concat, inputs=left)] if len(left) > 1 else []
        gone = [node for both in pairs for node in both[::-1]]
        rewrites.replace([*gone, concat], [*merged, *kept], "together they are conv2d_beside")
    after = rewrites.apply()
    return after if after.storage_dtype == storage else replace(after, storage_dtype=storage)


def _merged(both: list[Node], op: Concat, output: str) -> Node:
    join = Node("", op, tuple(node.outputs[0] for node in both), (output,))
    nodes = {"first": both[0], "second": both[1], "join": join}
    made = region_of("conv2d_beside", nodes, PAIR, ("join",))
    return replace(made, name=both[1].name, covers=covering(*both))


def _are_neighbours(graph: Graph, both: list[Node | None]) -> bool:
    if len(both) != 2 or both[0] is both[1] or not all(is_bare(graph, node) for node in both):
        return False
    first, second = both
    return (
        absent(first, 3)
        and absent(second, 3)
        and first.op.activation == second.op.activation
        and first.op.compute_dtype == second.op.compute_dtype
        and all(only_user(graph, node.outputs[0]) is not None for node in both)
    )
