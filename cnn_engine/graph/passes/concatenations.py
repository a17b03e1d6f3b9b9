"""Concatenations that repeat each other."""

from __future__ import annotations

from dataclasses import replace

from ...operators.operator import axis_in
from ...operators.shaping import Concat
from ..graph import Graph
from .rewriting import Rewrites


def nest_concatenations(graph: Graph) -> Graph:
    """Has concatenations read earlier ones whose inputs they begin with, as the layers of a DenseNet do.

    The longer one's memory may then hold the shorter one's, and nothing is written twice.
    """
    rewrites = Rewrites(graph)
    made: dict[tuple, str] = {}
    for node in graph.nodes:
        if not isinstance(node.op, Concat):
            continue
        (output,) = node.outputs
        axis = axis_in(node.op.axis, len(graph.values[output].shape))
        for count in range(len(node.inputs) - 1, 1, -1):
            earlier = made.get((axis, node.inputs[:count]))
            if earlier is not None:
                inputs = (earlier, *node.inputs[count:])
                rewrites.replace([node], [replace(node, inputs=inputs)], "")
                break
        made.setdefault((axis, node.inputs), output)
    return rewrites.apply()
