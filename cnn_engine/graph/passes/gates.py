"""The gates of squeeze-and-excite over images [N, H, W, C], as one node each."""

from __future__ import annotations

from ...operators.channels_last import Conv2dNhwc
from ...operators.operator import axis_in
from ...operators.reduce import ReduceMean
from ...operators.squeeze_excite import SqueezeExcite
from ..graph import Graph, Node
from .rewriting import Rewrites, absent, constant, covering, only_user

#: The channels and the outputs of the first layer that kernels have room for.
MOST_CHANNELS, MOST_HIDDEN = 2560, 1024


def fuse_gates(graph: Graph) -> Graph:
    """Makes a mean over all places and the two 1x1 convolutions that follow it one node."""
    rewrites = Rewrites(graph)
    for mean in graph.nodes:
        if type(mean.op) is not ReduceMean or not mean.op.keepdims:
            continue
        shape = graph.values[mean.inputs[0]].shape
        if len(shape) != 4 or {axis_in(axis, 4) for axis in mean.op.axes} != {1, 2}:
            continue
        first = only_user(graph, mean.outputs[0])
        second = None if first is None else only_user(graph, first.outputs[0])
        if second is None or not (_is_layer(graph, first) and _is_layer(graph, second)):
            continue
        hidden, channels = graph.values[first.inputs[1]].shape[:2]
        if (
            channels > MOST_CHANNELS
            or hidden > MOST_HIDDEN
            or first.op.operands != second.op.operands
        ):
            continue
        if not rewrites.free(mean, first, second):
            continue
        biases = [None if absent(node, 2) else node.inputs[2] for node in (first, second)]
        op = SqueezeExcite(first.op.activation, second.op.activation, first.op.operands)
        inputs = (mean.inputs[0], first.inputs[1], biases[0], second.inputs[1], biases[1])
        merged = Node(second.name, op, inputs, second.outputs, covers=covering(mean, first, second))
        rewrites.replace([mean, first, second], [merged], "they are one kernel")
    return rewrites.apply()


def _is_layer(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a 1x1 convolution with constants alone, that reads its input as it is."""
    op = node.op
    return (
        type(op) is Conv2dNhwc
        and not (op.planar or any(op.padding))
        and (op.groups, op.stride, op.floor) == (1, (1, 1), None)
        and all(absent(node, place) for place in (3, 4, 5))
        and constant(graph, node, 1) is not None
        and graph.values[node.inputs[1]].shape[2:] == (1, 1)
        and (absent(node, 2) or constant(graph, node, 2) is not None)
    )
