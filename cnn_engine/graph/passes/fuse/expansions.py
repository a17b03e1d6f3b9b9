"""Convolutions of inverted residual blocks as one operator: all, two or one, with means that gates read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....operators.channels_last import Conv2dNhwc
from ....operators.depthwise_means import DepthwiseMeans
from ....operators.depthwise_norm import DepthwiseNorm
from ....operators.expand_depthwise import ExpandDepthwise
from ....operators.inverted_residual import InvertedResidual
from ....operators.norm import LayerNorm
from ....operators.squeeze_excite import SqueezeExcite
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, covering, only_user
from .squeeze_excite import is_mean_of_places, is_product

#: Rows and columns of the boxes of which depthwise_means makes parts of means.
BOX_SIDE = 7


def fuse_inverted_residuals(
    graph: Graph, takes: Callable[[Graph, Node | None, Node, Node], bool]
) -> Graph:
    """Makes one node of a convolution of each channel and of the 1x1 convolutions before and behind it.

    The first may be missing; the last may have what the block reads added to it.

    Args:
        takes: whether a kernel makes all of them.
    """
    rewrites = Rewrites(graph)
    for second in graph.nodes:
        third = only_user(graph, second.outputs[0]) if _is_depthwise(graph, second) else None
        if third is None:
            continue
        first = graph.producers.get(second.inputs[0])
        if first is not None and not (
            is_product(graph, first)
            and first.op.stride == (1, 1)
            and only_user(graph, first.outputs[0]) is second
            and rewrites.free(first)
        ):
            first = None
        nodes = [node for node in (first, second, third) if node is not None]
        x = nodes[0].inputs[0]
        adds = not absent(third, 3)
        if (
            not is_product(graph, third, may_add=True)
            or third.op.stride != (1, 1)
            or third.inputs[0] != second.outputs[0]
            or (adds and third.inputs[3] != x)
            or not rewrites.free(second, third)
            or not takes(graph, first, second, third)
        ):
            continue
        biases = (None if absent(node, 2) else node.inputs[2] for node in (second, third))
        before = (None, None) if first is None else (*first.inputs[1:], None)[:2]
        merged = Node(
            third.name,
            InvertedResidual(
                second.op.stride, second.op.padding, first and first.op.activation,
                second.op.activation, third.op.activation, adds, third.op.compute_dtype,
            ),
            (x, before[0], second.inputs[1], third.inputs[1], before[1], *biases), third.outputs,
            covering(*nodes),
        )  # fmt: skip
        rewrites.replace(nodes, [merged], "together they are inverted_residual")
    return rewrites.apply()


def fuse_expansions(graph: Graph, takes: Callable[[Graph, Node, Node], int] | None = None) -> Graph:
    """Makes one node of a 1x1 convolution and of one of each channel that alone follows it.

    What is between them, six times as much as what is read in most networks, then stays in a core's caches.
    A mean over the places of the result becomes an output of the node.

    Args:
        takes: returns in how many parts a kernel makes both, with the means that gates read; 0: in
            none. None: the CPU's makes all, with means that are nodes.
    """
    rewrites = Rewrites(graph)
    for first in graph.nodes:
        if not is_product(graph, first) or first.op.stride != (1, 1):
            continue
        second = only_user(graph, first.outputs[0])
        if second is None or second.inputs[0] != first.outputs[0]:
            continue
        if not _is_depthwise(graph, second):
            continue
        parts = 1 if takes is None else takes(graph, first, second)
        if not parts:
            continue
        nodes, outputs = [first, second], second.outputs
        readers = graph.consumers[outputs[0]]
        means = [node for node in readers if is_mean_of_places(graph, node) and rewrites.free(node)]
        gates = [node for node in readers if type(node.op) is SqueezeExcite and takes]
        if means and takes is None:
            nodes, outputs = [*nodes, means[0]], outputs + means[0].outputs
        elif gates:
            outputs = *outputs, rewrites.fresh(f"{outputs[0]}.means")
        op, biases = second.op, (None if absent(n, 2) else n.inputs[2] for n in nodes[:2])
        merged = Node(
            second.name,
            ExpandDepthwise(
                op.stride, op.padding, op.dilation, first.op.activation, op.activation,
                len(outputs) > 1, op.compute_dtype, parts,
            ),
            (first.inputs[0], first.inputs[1], second.inputs[1], *biases), outputs, covering(*nodes),
        )  # fmt: skip
        told = [
            replace(gate, inputs=(*gate.inputs, *[None] * 2)[:5] + outputs[1:]) for gate in gates
        ]
        rewrites.replace([*nodes, *gates], [merged, *told], "together they are expand_depthwise")
    return rewrites.apply()


def fuse_gate_means(graph: Graph, takes: Callable[[Graph, Node], int]) -> Graph:
    """Makes one node of a convolution of each channel and of the means over its places that gates read.

    Gates that read the image for them are for the most part that.

    Args:
        takes: returns of how many parts a kernel makes the means with such a convolution; 0: none does.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        gates = [
            reader
            for reader in graph.consumers[node.outputs[0]]
            if type(reader.op) is SqueezeExcite
            and reader.inputs[0] == node.outputs[0]
            and absent(reader, 5)
        ]
        if not gates or not _is_depthwise(graph, node) or not takes(graph, node):
            continue
        outputs = *node.outputs, rewrites.fresh(f"{node.outputs[0]}.means")
        op = DepthwiseMeans(node.op, BOX_SIDE)
        merged = replace(node, op=op, inputs=node.inputs[:3], outputs=outputs)
        told = [
            replace(gate, inputs=(*gate.inputs, *[None] * 2)[:5] + outputs[1:]) for gate in gates
        ]
        rewrites.replace([node, *gates], [merged, *told], "together they are depthwise_means")
    return rewrites.apply()


def fuse_depthwise_norms(graph: Graph, takes: Callable[[Graph, Node, Node], bool]) -> Graph:
    """Makes one node of a convolution of each channel and of the normalisation of places that alone follows.

    Args:
        takes: returns whether a kernel makes both sooner than two do.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        norm = only_user(graph, node.outputs[0]) if _is_depthwise(graph, node) else None
        if norm is None or not _normalises_places(graph, norm) or node.op.activation is not None:
            continue
        if not takes(graph, node, norm):
            continue
        (x, weight, bias), (_, scale, shift) = ((*n.inputs, None)[:3] for n in (node, norm))
        merged = Node(
            norm.name, DepthwiseNorm(node.op, norm.op.epsilon), (x, weight, scale, bias, shift),
            norm.outputs, covering(node, norm),
        )  # fmt: skip
        rewrites.replace([node, norm], [merged], "together they are depthwise_norm")
    return rewrites.apply()


def _normalises_places(graph: Graph, node: Node) -> bool:
    """Whether ``node`` normalises each place of an image over its channels."""
    if type(node.op) is not LayerNorm or len(node.outputs) > 1:
        return False
    x, *parameters = graph.inputs_of(node)
    return node.op.axis in (-1, len(x.shape) - 1) and all(
        one is None or one.shape == x.shape[-1:] for one in parameters
    )


def _is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether ``node`` convolves by constants each channel by itself."""
    op = node.op
    if type(op) is not Conv2dNhwc or op.planar:
        return False
    channels, weight = graph.values[node.inputs[0]].shape[3], node.inputs[1]
    return (
        op.groups == channels > 1
        and op.floor is None
        and weight in graph.constants
        and graph.values[weight].shape[:2] == (channels, 1)
        and (absent(node, 2) or node.inputs[2] in graph.constants)
        and all(absent(node, place) for place in (3, 4, 5))
    )
