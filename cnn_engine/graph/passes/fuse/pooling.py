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
    for last in graph.nodes:
        run = _run_before(graph, last)
        pools = [node for node in run if _averages_evenly(node)]
        convs = [node for node in run if not _averages_evenly(node)]
        order = [*pools, *convs]
        if order == run or not rewrites.free(*run):
            continue
        x, moved = run[0].inputs[0], []
        for node in order:
            name = f"{run[0].inputs[0]} pooled for {convs[0].name}"
            outputs = last.outputs if node is order[-1] else (rewrites.fresh(name),)
            moved.append(replace(node, inputs=(x, *node.inputs[1:]), outputs=outputs))
            (x,) = outputs
        rewrites.replace(run, moved[::-1], "")
    return rewrites.apply()


def _run_before(graph: Graph, last: Node) -> list[Node]:
    """Returns the nodes in a row that end with ``last`` and may change places, where no more follow."""
    if not _may_move(graph, last):
        return []
    after = only_user(graph, last.outputs[0])
    if after is not None and _may_move(graph, after) and after.inputs[0] == last.outputs[0]:
        return []
    run = [last]
    while (before := graph.producers.get(run[-1].inputs[0])) is not None:
        if not _may_move(graph, before) or only_user(graph, before.outputs[0]) is not run[-1]:
            break
        run.append(before)
    return run[::-1]


def _may_move(graph: Graph, node: Node) -> bool:
    return _averages_evenly(node) or _is_pointwise(graph, node)


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
