"""Residual blocks: a convolution adds another tensor to its integers as it stores them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ....operators.quantized import EIGHT_BITS
from ....operators.quantized_conv2d import INNER_SCALE, QuantizedConv2d, padded_inputs
from ....operators.quantized_pointwise import QuantizedAdd
from ....types import INTEGER_RANGES
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, constant, covering, only_user

#: Inputs of a convolution: the zero point of its output, and the residual.
Y_ZERO, RESIDUAL = 6, 7


def fuse_sums(graph: Graph) -> Graph:
    """Has convolutions add residuals, where nothing else reads their outputs: the same integers."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        if type(node.op) is not QuantizedAdd:
            continue
        a, b, y_zero = node.inputs[:3], node.inputs[3:6], node.inputs[6:7]
        for own, other in ((a, padded_inputs(b, 3)), (padded_inputs(b, 3), a)):
            conv = graph.producers.get(own[0])
            if conv is None or not rewrites.free(conv, node):
                continue
            if only_user(graph, own[0]) is node and _adds(graph, conv, own, other):
                parts = (*other, None, own[1])
                inputs = [
                    *padded_inputs(conv.inputs, Y_ZERO)[:Y_ZERO],
                    *(y_zero or (None,)),
                    *parts,
                ]
                fused = replace(
                    conv, op=_with_sum(graph, conv, node.op), inputs=tuple(inputs), outputs=node.outputs,
                    covers=covering(conv, node),
                )  # fmt: skip
                rewrites.replace([conv, node], [fused], "a residual is added to its integers")
                break
    return rewrites.apply()


def _adds(graph: Graph, conv: Node, own: tuple, other: tuple) -> bool:
    """Whether a convolution can add (tensor, scale, zero point) ``other`` to what it makes, ``own``."""
    if type(conv.op) is not QuantizedConv2d or conv.op.dtype not in EIGHT_BITS:
        return False
    if any(not absent(conv, place) for place in range(RESIDUAL, INNER_SCALE + 1)):
        return False
    shapes = {graph.values[name].shape for name in (own[0], other[0])}
    names = own[1], other[1], own[2], other[2]
    known = all(name is None or name in graph.constants for name in names)
    if own[0] == other[0] or len(shapes) > 1 or not known:
        return False
    scale = float(graph.constants[own[1]].reshape(()))
    return 0 < scale < math.inf and _number(graph, own[2]) == _zero(graph, conv)


def _number(graph: Graph, name: str | None) -> int:
    return 0 if name is None else int(np.reshape(graph.constants[name], ()))


def _zero(graph: Graph, conv: Node) -> int | None:
    """Returns the zero point of a convolution's output, or None: it is computed."""
    if absent(conv, Y_ZERO):
        return 0
    found = constant(graph, conv, Y_ZERO)
    return None if found is None else int(found.reshape(()))


def _with_sum(graph: Graph, conv: Node, op: QuantizedAdd) -> QuantizedConv2d:
    """Returns the convolution's record, with the sum's output and its own range as the inner one."""
    zero, limits = _zero(graph, conv), INTEGER_RANGES[conv.op.dtype]
    given = conv.op.low, conv.op.high
    inner = (
        (limit if end is None else end) - zero for end, limit in zip(given, limits, strict=True)
    )
    return replace(conv.op, dtype=op.dtype, low=op.low, high=op.high, inner=tuple(inner))
