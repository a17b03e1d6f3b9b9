"""Concatenations that repeat each other."""

from __future__ import annotations

from dataclasses import replace

from ....operators.operator import axis_in
from ....operators.shaping import Concat
from ...graph import Graph
from ..rewriting import Rewrites


def nest_concatenations(graph: Graph) -> Graph:
    """Has concatenations read earlier ones whose inputs they begin with, as the layers of a DenseNet do.

    The longer one's memory may then hold the shorter one's, and nothing is written twice.
    """
    rewrites = Rewrites(graph)
    # The first inputs of concatenations, each by a number: of what it is one longer than, and by what.
    longer: dict[tuple[object, str], int] = {}
    made: dict[int, str] = {}
    for node in graph.nodes:
        if not isinstance(node.op, Concat):
            continue
        (output,) = node.outputs
        first: object = "axis", axis_in(node.op.axis, len(graph.values[output].shape))
        earlier, count = None, 0
        for place, name in enumerate(node.inputs, 1):
            first = longer.setdefault((first, name), len(longer))
            if 1 < place < len(node.inputs) and first in made:
                earlier, count = made[first], place
        made.setdefault(first, output)
        if earlier is not None:
            inputs = (earlier, *node.inputs[count:])
            rewrites.replace([node], [replace(node, inputs=inputs)], "")
    return rewrites.apply()
