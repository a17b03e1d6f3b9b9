"""The kernels of pools."""

from __future__ import annotations

from ... import _cpu
from ...graph.graph import Graph, Node
from .kernel import Bound, Call, on_both


def _make(call: Call) -> Bound:
    op = call.node.op
    shape = _cpu.MaxPool2dShape(
        *call.inputs[0].shape, *op.kernel, *op.stride, *op.padding, *op.dilation
    )
    return call.native("max_pool2d", call.at[0], call.to[0], shape)


def _why_not(node: Node, graph: Graph) -> str | None:
    op = node.op
    for i in (0, 1):
        if max(op.padding[i], op.padding[2 + i]) > op.dilation[i] * (op.kernel[i] - 1):
            return f"expected padding of less than the window, found {op.padding}"
    if op.indices is not None:
        return "expected maxima alone, found their places asked for"
    return None


ROWS = on_both("max_pool2d", "max_pool2d", _make, why_not=_why_not)
