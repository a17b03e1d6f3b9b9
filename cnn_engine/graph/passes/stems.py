"""A network's first convolution and the max pool behind it as one operator."""

from __future__ import annotations

from collections.abc import Callable

from ...operators.channels_last import MaxPool2dNhwc
from ...operators.stem_pool import StemPool
from ..graph import Graph, Node
from .gates import is_convolution
from .rewriting import Rewrites, covering, only_user


def fuse_stem_pools(graph: Graph, takes: Callable[[Graph, Node, Node], bool]) -> Graph:
    """Makes one node of a convolution that reads [N, C, H, W] and of the max pool that alone follows it.

    Args:
        takes: whether a kernel makes both sooner than two do.
    """
    rewrites = Rewrites(graph)
    for first in graph.nodes:
        if not is_convolution(graph, first, planar=True) or first.op.dilation != (1, 1):
            continue
        second = only_user(graph, first.outputs[0])
        if second is None or type(second.op) is not MaxPool2dNhwc:
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
