"""Average pools before the convolutions that they follow, and max pools as parts of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ....operators.channels_last import AveragePool2dNhwc, Conv2dNhwc, MaxPool2dNhwc
from ....operators.conv2d_pool import Conv2dPool
from ....operators.stem_pair import StemPair
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, covering, only_user
from .squeeze_excite import is_convolution


def pool_first(graph: Graph) -> Graph:
    """Averages the input of a 1x1 convolution in the place of its output: sums and means change places.

    The convolution then has fewer places, a quarter of them in the transitions of a DenseNet.
    """
    rewrites = Rewrites(graph)
    for pool in graph.nodes:
        conv = graph.producers.get(pool.inputs[0]) if _averages_evenly(pool) else None
        if conv is None or not _is_pointwise(graph, conv) or not rewrites.free(pool, conv):
            continue
        if only_user(graph, conv.outputs[0]) is not pool:
            continue
        pooled = rewrites.fresh(f"{conv.inputs[0]} pooled for {conv.name}")
        first = replace(pool, inputs=conv.inputs[:1], outputs=(pooled,))
        then = replace(conv, inputs=(pooled, *conv.inputs[1:]), outputs=pool.outputs)
        rewrites.replace([conv, pool], [then, first], "")
    return rewrites.apply()


def fuse_pools(graph: Graph, takes: Callable[[Graph, Node, Node], bool]) -> Graph:
    """Makes one node of a convolution and of the max pool that alone reads what it makes.

    A quarter of it is then written, in most networks, and none of it read.

    Args:
        takes: whether a kernel makes both sooner.
    """
    rewrites = Rewrites(graph)
    for pool in graph.nodes:
        if type(pool.op) is not MaxPool2dNhwc:
            continue
        conv = graph.producers.get(pool.inputs[0])
        if conv is None or not is_convolution(graph, conv, planar=None):
            continue
        if only_user(graph, conv.outputs[0]) is not pool or not takes(graph, conv, pool):
            continue
        op = conv.op
        merged = Node(
            pool.name,
            Conv2dPool(replace(op, activation=None), pool.op, op.activation, op.compute_dtype),
            conv.inputs[:3], pool.outputs, covering(conv, pool),
        )  # fmt: skip
        rewrites.replace([conv, pool], [merged], "together they are conv2d_pool")
    return rewrites.apply()


def fuse_stem_pairs(graph: Graph, takes: Callable[[Graph, Node, Node], bool]) -> Graph:
    """Makes one node of a convolution that reads [N, C, H, W] and of the pooled one that alone follows it.

    Args:
        takes: whether a kernel makes both sooner than two do.
    """
    rewrites = Rewrites(graph)
    for first in graph.nodes:
        if not is_convolution(graph, first, planar=True):
            continue
        second = only_user(graph, first.outputs[0])
        if second is None or type(second.op) is not Conv2dPool:
            continue
        if first.op.compute_dtype != second.op.compute_dtype or not takes(graph, first, second):
            continue
        x, weight, *bias = first.inputs[:3]
        _, second_weight, *second_bias = second.inputs
        merged = Node(
            second.name, StemPair(first.op, second.op, first.op.compute_dtype),
            (x, weight, second_weight, *(bias or (None,)), *second_bias), second.outputs,
            covering(first, second),
        )  # fmt: skip
        rewrites.replace([first, second], [merged], "together they are stem_pair")
    return rewrites.apply()


def _averages_evenly(node: Node) -> bool:
    """Whether ``node`` is a pool over fewer places than it reads whose windows are all inside the image."""
    op = node.op
    return (
        isinstance(op, AveragePool2dNhwc)
        and not any((*op.padding, *op.extra))
        and math.prod(op.stride) > 1
    )


def _is_pointwise(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a 1x1 convolution with nothing before or after it."""
    op = node.op
    return (
        isinstance(op, Conv2dNhwc)
        and graph.values[node.inputs[1]].shape[2:] == (1, 1)
        and op.stride == (1, 1)
        and not (op.planar or any(op.padding))
        and op.activation is None
        and op.floor is None
        and all(absent(node, place) for place in (3, 4, 5))
    )
