"""The kernels of pools."""

from __future__ import annotations

from ... import _cpu
from ...graph.graph import Graph, Node
from .kernel import Bound, Call, on_both


def _make(call: Call) -> Bound:
    op = call.node.op
    shape = _cpu.MaxPool2dShape(*call.inputs[0].shape, *op.kernel, *op.stride, *op.padding[:2])
    return call.native("max_pool2d", call.at[0], call.to[0], shape)


def _why_not(node: Node, graph: Graph) -> str | None:
    op = node.op
    if op.dilation != (1, 1):
        return f"expected no dilation, found {op.dilation}"
    if op.padding[:2] != op.padding[2:]:
        return f"expected the same padding on both sides, found {op.padding}"
    if op.padding[0] > op.kernel[0] // 2 or op.padding[1] > op.kernel[1] // 2:
        return f"expected padding of at most half the window, found {op.padding}"
    if op.indices is not None:
        return "expected maxima alone, found their places asked for"
    return None


ROWS = on_both("max_pool2d", "max_pool2d", _make, why_not=_why_not)
