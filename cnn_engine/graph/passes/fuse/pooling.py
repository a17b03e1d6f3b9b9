"""Average pools before the convolutions that they follow."""

from __future__ import annotations

import math
from dataclasses import replace

from ....operators.channels_last import AveragePool2dNhwc, Conv2dNhwc
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, only_user


def pool_before_convolutions(graph: Graph) -> Graph:
    """Averages the input of a 1x1 convolution in the place of its output: sums and means swap.

    The convolution then has fewer positions, a quarter of them in the transitions of a DenseNet.
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


def _averages_evenly(node: Node) -> bool:
    """Whether ``node`` is a pool over fewer positions than it reads with all windows inside the image."""
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
