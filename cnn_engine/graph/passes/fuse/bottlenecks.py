"""A residual block's convolution of a window, or of 1x1, and the one of 1x1 behind it as one operator."""

from __future__ import annotations

from collections.abc import Callable

from ....operators.bottleneck import Bottleneck
from ...graph import Graph, Node
from ..rewriting import Rewrites, covering, only_user
from .squeeze_excite import is_convolution, is_product


def fuse_bottlenecks(
    graph: Graph, takes: Callable[[Graph, Node, Node, Node | None], bool]
) -> Graph:
    """Makes one node of a convolution and of the one of 1x1 that alone follows it.

    And of one of 1x1 that reads what both make, as the next block begins with.

    Args:
        takes: returns whether a kernel makes two, or all three, sooner than several do.
    """
    rewrites = Rewrites(graph)
    for first in graph.nodes:
        if not is_convolution(graph, first) or not rewrites.free(first):
            continue
        second = only_user(graph, first.outputs[0])
        if second is None or not _follows(graph, first, second):
            continue
        readers = graph.consumers[second.outputs[0]]
        third = next((node for node in readers if _reduces(graph, second, node)), None)
        if is_product(graph, first):
            third = None
        if third is not None and not takes(graph, first, second, third):
            third = None
        if third is None and not takes(graph, first, second, None):
            continue
        nodes = [first, second] if third is None else [first, second, third]
        (x, window, bias), (_, last, last_bias, residual) = (
            (*node.inputs, None, None)[:count] for node, count in ((first, 3), (second, 4))
        )
        more = (None, None) if third is None else (*third.inputs, None)[1:3]
        inputs = x, window, last, bias, last_bias, residual, *more
        op = first.op
        merged = Node(
            second.name,
            Bottleneck(
                op.stride, op.padding, op.dilation, op.activation, second.op.activation,
                third is not None, third and third.op.activation, op.compute_dtype,
            ),
            inputs, tuple(node.outputs[0] for node in nodes[1:]), covering(*nodes),
        )  # fmt: skip
        rewrites.replace(nodes, [merged], "together they are bottleneck")
    return rewrites.apply()


def _follows(graph: Graph, first: Node, node: Node) -> bool:
    """Whether ``node`` is a product over the channels that ``first`` makes, and may add others to it."""
    if node.inputs[0] != first.outputs[0] or first.outputs[0] in node.inputs[1:]:
        return False
    return is_product(graph, node, may_add=True) and node.op.stride == (1, 1)


def _reduces(graph: Graph, second: Node, node: Node) -> bool:
    """Whether ``node`` is a product over the channels that ``second`` makes, and nothing else of it."""
    (made,) = second.outputs
    return (
        is_product(graph, node)
        and node.inputs[0] == made
        and made not in node.inputs[1:]
        and node.op.stride == (1, 1)
    )
