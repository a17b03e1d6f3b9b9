"""Linear layers that follow each other, as one operator."""

from __future__ import annotations

from collections.abc import Callable

from ....operators.linear import Linear
from ....operators.linear_layers import LinearLayers
from ....operators.softmax import Softmax
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, covering, only_user

#: Layers that one kernel has room for in its parameters.
MOST = 4


def join_linear_layers(graph: Graph, takes: Callable[[Graph, Node], bool]) -> Graph:
    """Makes one node of linear layers that alone read each other, and of softmax behind them.

    Of few rows each is over before its work could fill a GPU: what they cost is their starts.

    Args:
        takes: whether a kernel runs such a node.
    """
    rewrites = Rewrites(graph)
    for first in graph.nodes:
        if not (rewrites.free(first) and _is_layer(graph, first)):
            continue
        layers, ends = [first], first
        while (after := only_user(graph, ends.outputs[0])) is not None:
            if len(layers) == MOST or not _is_layer(graph, after):
                break
            layers.append(after)
            ends = after
        softmax = [after] if after is not None and _is_softmax(graph, after) else []
        nodes = [*layers, *softmax]
        if len(nodes) < 2:
            continue
        parameters = (
            (node.inputs[1], None if absent(node, 2) else node.inputs[2]) for node in layers
        )
        made = Node(
            first.name, LinearLayers(tuple(node.op.activation for node in layers), bool(softmax)),
            (first.inputs[0], *(name for pair in parameters for name in pair)),
            nodes[-1].outputs, covering(*nodes),
        )  # fmt: skip
        if takes(graph, made):
            rewrites.replace(nodes, [made], "together they are linear_layers")
    return rewrites.apply()


def _is_layer(graph: Graph, node: Node) -> bool:
    return type(node.op) is Linear and all(
        name is None or name in graph.constants for name in node.inputs[1:]
    )


def _is_softmax(graph: Graph, node: Node) -> bool:
    return type(node.op) is Softmax and node.op.axis in (-1, 1)
