"""The last convolution of a dense block's layer and the first one of the next as one operator."""

from __future__ import annotations

from collections.abc import Callable

from ....operators.channels_last import Conv2dNhwc
from ....operators.dense_layer import DenseLayer
from ....operators.operator import axis_in
from ....operators.shaping import Concat
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, covering, only_user
from .squeeze_excite import is_convolution


def fuse_dense_layers(graph: Graph, takes: Callable[[Graph, Node, Node], bool]) -> Graph:
    """Makes one node of a convolution and of the one of 1x1 that reads its channels behind others.

    The concatenation of both, which others read, too, stays.

    Args:
        takes: returns whether a kernel makes both sooner than two do.
    """
    rewrites = Rewrites(graph)
    for first in graph.nodes:
        if not _keeps_size(graph, first):
            continue
        concat = only_user(graph, first.outputs[0])
        if concat is None or not _appends(graph, concat, first.outputs[0]):
            continue
        (joined,) = concat.outputs
        second = next(
            (node for node in graph.consumers[joined] if _reads(graph, joined, node)), None
        )
        if second is None or not rewrites.free(first, second) or not takes(graph, first, second):
            continue
        e, window, bias = (*first.inputs, None)[:3]
        _, last, last_bias, _, scale, shift = second.inputs
        op = DenseLayer(
            first.op.padding, first.op.activation, second.op.activation, second.op.floor,
            second.op.compute_dtype,
        )  # fmt: skip
        inputs = concat.inputs[0], last, window, e, scale, shift, bias, last_bias
        outputs = first.outputs[0], second.outputs[0]
        merged = Node(second.name, op, inputs, outputs, covering(first, second))
        rewrites.replace([first, second], [merged], "together they are dense_layer")
    return rewrites.apply()


def _keeps_size(graph: Graph, node: Node) -> bool:
    """Whether ``node`` convolves windows, one place apart."""
    return (
        is_convolution(graph, node)
        and node.op.stride == node.op.dilation == (1, 1)
        and graph.values[node.inputs[0]].shape[:3] == graph.values[node.outputs[0]].shape[:3]
    )


def _appends(graph: Graph, node: Node, channels: str) -> bool:
    """Whether ``node`` puts ``channels`` behind others."""
    if not isinstance(node.op, Concat) or len(node.inputs) != 2 or node.inputs[1] != channels:
        return False
    rank = len(graph.values[channels].shape)
    return node.inputs[0] != channels and axis_in(node.op.axis, rank) == rank - 1


def _reads(graph: Graph, channels: str, node: Node) -> bool:
    """Whether ``node`` is a product over ``channels`` with a batch norm before it, all by constants."""
    op = node.op
    return (
        type(op) is Conv2dNhwc
        and not op.planar
        and op.groups == 1
        and op.stride == (1, 1)
        and not any(op.padding)
        and node.inputs[0] == channels
        and graph.values[node.inputs[1]].shape[2:] == (1, 1)
        and absent(node, 3)
        and not absent(node, 4)
        and not absent(node, 5)
        and all(name is None or name in graph.constants for name in node.inputs[1:])
        and len(graph.values[node.inputs[4]].shape) == 1
    )
