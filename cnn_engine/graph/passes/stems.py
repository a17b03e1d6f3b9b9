"""A network's first convolution and the max pool behind it as one operator."""

from __future__ import annotations

from collections.abc import Callable

from ...operators.channels_last import Conv2dNhwc, MaxPool2dNhwc
from ...operators.stem_pool import StemPool
from ..graph import Graph, Node
from .rewriting import Rewrites, absent, covering, only_user


def fuse_stem_pools(graph: Graph, takes: Callable[[Graph, Node, Node], bool]) -> Graph:
    """Makes one node of a convolution that reads [N, C, H, W] and of the max pool that alone follows it.

    Args:
        takes: whether a kernel makes both sooner than two do.
    """
    rewrites = Rewrites(graph)
    for first in graph.nodes:
        if not _is_stem(graph, first):
            continue
        second = only_user(graph, first.outputs[0])
        if second is None or type(second.op) is not MaxPool2dNhwc or second.op.indices is not None:
            continue
        if second.op.dilation != (1, 1) or not takes(graph, first, second):
            continue
        op, pool = first.op, second.op
        merged = Node(
            second.name,
            StemPool(
                pool.kernel, pool.stride, pool.padding, op.stride, op.padding, op.activation,
                op.operands,
            ),
            first.inputs[:3], second.outputs, covering(first, second),
        )  # fmt: skip
        rewrites.replace([first, second], [merged], "together they are stem_pool")
    return rewrites.apply()


def _is_stem(graph: Graph, node: Node) -> bool:
    """Whether ``node`` convolves [N, C, H, W] by constants, and does nothing before or beside it."""
    op = node.op
    return (
        type(op) is Conv2dNhwc
        and op.planar
        and op.groups == 1
        and op.dilation == (1, 1)
        and op.floor is None
        and node.inputs[1] in graph.constants
        and (absent(node, 2) or node.inputs[2] in graph.constants)
        and all(absent(node, place) for place in (3, 4, 5))
    )
