"""Decides whether a graph's output is probabilities: names of columns and reports depend on it."""

from __future__ import annotations

import math

from ..operators.copy import Copy
from ..operators.shaping import Reshape
from ..operators.softmax import Softmax
from .graph import Graph, Node


def gives_probabilities(graph: Graph, output: str | None = None) -> bool:
    """Whether every row of an output, [N, ...], is a softmax over all that belongs to one image.

    Logits, logarithms of probabilities, gates and masks are none.

    Args:
        output: its name; None: the graph's first.
    """
    node = _last(graph, output)
    if node is None or type(node.op) is not Softmax:
        return False
    shape = graph.values[node.outputs[0]].shape
    axis = node.op.axis % len(shape)
    return axis > 0 and shape[axis] == math.prod(shape[1:])


def gives_sigmoids(graph: Graph) -> bool:
    """Whether every number of the first output is a sigmoid: the probability of one class for itself."""
    return last_activation(graph, None) == "sigmoid"


def last_activation(graph: Graph, output: str | None) -> str | None:
    """Returns ``sigmoid`` or ``softmax`` (over the last axis) where an output ends in one; else None.

    Args:
        output: its name; None: the graph's first.
    """
    node = _last(graph, output)
    if node is None or node.op.kind not in ("sigmoid", "softmax"):
        return None
    if node.op.kind == "softmax":
        rank = len(graph.values[node.outputs[0]].shape)
        return "softmax" if node.op.axis % rank == rank - 1 else None
    return "sigmoid"


def _last(graph: Graph, output: str | None) -> Node | None:
    """Returns the node that computes an output, behind those that only move its numbers."""
    name = graph.outputs[0] if output is None else output
    while (node := graph.producers.get(name)) is not None:
        source = node.inputs[0]
        reshaped = type(node.op) is Reshape and (
            graph.values[source].shape[:1] == graph.values[name].shape[:1]
        )
        if not (reshaped or type(node.op) is Copy) or source is None:
            return node
        name = source
    return None
