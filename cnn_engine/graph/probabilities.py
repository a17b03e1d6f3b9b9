"""Whether what a graph gives are probabilities; what reports and columns may call them hangs on it."""

from __future__ import annotations

import math

from ..operators.copy import Copy
from ..operators.shaping import Reshape
from ..operators.softmax import Softmax
from .graph import Graph


def gives_probabilities(graph: Graph, output: str | None = None) -> bool:
    """Whether every row of an output, [N, ...], is a softmax over all that belongs to one image.

    Logits, logarithms of probabilities, gates and masks are none.

    Args:
        output: its name; None: the graph's first.
    """
    name = graph.outputs[0] if output is None else output
    while (node := graph.producers.get(name)) is not None:
        values = graph.values[name]
        if type(node.op) is Softmax:
            shape = values.shape
            axis = node.op.axis % len(shape)
            return axis > 0 and shape[axis] == math.prod(shape[1:])
        source = node.inputs[0]
        reshaped = type(node.op) is Reshape and graph.values[source].shape[:1] == values.shape[:1]
        if not (reshaped or type(node.op) is Copy) or source is None:
            return False
        name = source
    return False
