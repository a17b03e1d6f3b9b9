"""Trees of functions of numbers at the same position, which one kernel evaluates in one pass over memory.

What a network does between its convolutions (a gate's product, a norm by global response, a scale and a
residual) is often such a tree: node by node each function reads and writes all of memory once.
"""

from __future__ import annotations

from dataclasses import replace

from ....operators.binary import Binary
from ....operators.region import Part, Region
from ....operators.unary import Unary
from ...graph import Graph, Node
from ..rewriting import Rewrites, covering
from .regions import WhyNot

#: Of regions: the kernels' name for them.
POINTWISE = "pointwise"

#: What kernels take (csrc/ops/pointwise.h).
MOST_INPUTS, MOST_STEPS, MOST_DIMENSIONS = 4, 16, 8

_INPUTS = ("a", "b", "c", "d")


def fuse_pointwise(graph: Graph, why_not: WhyNot | None = None) -> Graph:
    """Makes regions of trees of functions, from the last node of each backwards.

    Args:
        why_not: None: nothing is refused.
    """
    rewrites = Rewrites(graph)
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    for root in reversed(graph.nodes):
        if not rewrites.free(root) or not _is_function(graph, root, root):
            continue
        nodes = sorted(_tree(rewrites, root), key=lambda node: order[node.name])
        if len(nodes) < 2:
            continue
        region = _region(graph, nodes)
        if why_not is None or why_not(graph, region) is None:
            rewrites.replace(nodes, [region], "one kernel evaluates these functions")
    return rewrites.apply()


def _is_function(graph: Graph, node: Node, root: Node) -> bool:
    """Whether ``node`` makes as many numbers as ``root``, each of numbers at its own position."""
    values = [graph.values[name] for name in (*node.inputs, *node.outputs) if name is not None]
    return (
        isinstance(node.op, Unary | Binary)
        and len(node.outputs) == 1
        and len(values[-1].shape) <= MOST_DIMENSIONS
        and all(value.dtype == "float32" for value in values)
        and values[-1].shape == graph.values[root.outputs[0]].shape
    )


def _tree(rewrites: Rewrites, root: Node) -> list[Node]:
    """Returns ``root`` and the nodes before it that only it and they read, as many as a kernel takes."""
    graph = rewrites.graph
    found, reads = {root.name: root}, {root.name: list(root.inputs)}
    waiting = list(root.inputs)
    while waiting:
        name = waiting.pop(0)
        maker = graph.producers.get(name)
        if maker is None or maker.name in found or len(found) == MOST_STEPS:
            continue
        inside = sum(inputs.count(name) for inputs in reads.values())
        made = {node.outputs[0] for node in (*found.values(), maker)}
        outside = {x for inputs in (*reads.values(), maker.inputs) for x in inputs} - made
        if (
            inside == graph.reads[name]
            and name not in graph.outputs
            and len(outside) <= MOST_INPUTS
            and rewrites.free(maker)
            and _is_function(graph, maker, root)
        ):
            found[maker.name], reads[maker.name] = maker, list(maker.inputs)
            waiting += maker.inputs
    return list(found.values())


def _region(graph: Graph, nodes: list[Node]) -> Node:
    """Returns the region's node; its first input is one of the output's shape, where there is one."""
    last = nodes[-1]
    made = {node.outputs[0]: f"f{index}" for index, node in enumerate(nodes)}
    outer = list(dict.fromkeys(x for node in nodes for x in node.inputs if x not in made))
    shape = graph.values[last.outputs[0]].shape
    outer.sort(key=lambda name: graph.values[name].shape != shape)
    local = {**dict(zip(outer, _INPUTS, strict=False)), **made}
    parts = tuple(
        Part(made[node.outputs[0]], node.op, tuple(local[x] for x in node.inputs), (made[node.outputs[0]],))
        for node in nodes
    )  # fmt: skip
    op = Region(POINTWISE, parts, _INPUTS[: len(outer)], (made[last.outputs[0]],))
    return replace(last, op=op, inputs=tuple(outer), covers=covering(*nodes))
