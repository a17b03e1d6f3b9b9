"""The kernels of pools, and of normalisation over neighbouring channels."""

from __future__ import annotations

import math

from ..graph.graph import Graph, Node
from .kernel import Bound, Call, on_both
from .native import _cpu


def _make(call: Call) -> Bound:
    op = call.node.op
    shape = _cpu.MaxPool2dShape(
        *call.inputs[0].shape, *op.kernel, *op.stride, *op.padding, *op.dilation
    )
    return call.native("max_pool2d", call.input_addresses[0], call.output_addresses[0], shape)


def why_not(node: Node, graph: Graph) -> str | None:
    """Returns why the kernels cannot run a max pool: empty windows, or positions asked for."""
    op = node.op
    for i in (0, 1):
        if max(op.padding[i], op.padding[2 + i]) > op.dilation[i] * (op.kernel[i] - 1):
            return f"expected padding of less than the window, found {op.padding}"
    if op.indices is not None:
        return "expected maxima alone, found their positions asked for"
    return None


def _average_shape(call: Call):
    op = call.node.op
    return _cpu.AveragePool2dShape(
        *call.inputs[0].shape, *op.kernel, *op.stride, *op.padding, *op.dilation, *op.extra
    )


def _make_average(call: Call) -> Bound:
    counted = call.node.op.count_include_pad
    return call.native(
        "average_pool2d",
        call.input_addresses[0],
        call.output_addresses[0],
        _average_shape(call),
        counted,
    )


def _make_norm(call: Call) -> Bound:
    return call.native(
        "lp_pool2d",
        call.input_addresses[0],
        call.output_addresses[0],
        _average_shape(call),
        call.node.op.p,
    )


def _make_lrn(call: Call) -> Bound:
    op, (n, c, *rest) = call.node.op, call.inputs[0].shape
    shape = _cpu.LrnShape(n, c, math.prod(rest), op.size, op.alpha, op.beta, op.k)
    return call.native("lrn", call.input_addresses[0], call.output_addresses[0], shape)


ROWS = [
    *on_both("max_pool2d", "max_pool2d", _make, why_not=why_not),
    *on_both("average_pool2d", "average_pool2d", _make_average),
    *on_both("lp_pool2d", "lp_pool2d", _make_norm),
    *on_both("lrn", "lrn", _make_lrn),
]
