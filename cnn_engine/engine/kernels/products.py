"""The kernels of linear layers and matrix products."""

from __future__ import annotations

from ... import _cpu
from ...graph.graph import Graph, Node
from .kernel import Bound, Call, on_both


def _make(reduction: bool):
    def make(call: Call) -> Bound:
        weight = call.inputs[1]
        shape = _cpu.LinearShape(call.inputs[0].shape[0], weight.shape[1], weight.shape[0])
        bias = call.at[2] if len(call.at) > 2 else 0
        return call.native("linear", *call.at[:2], bias, call.to[0], shape, reduction)

    return make


def _why_not(node: Node, graph: Graph) -> str | None:
    if node.op.activation is not None:
        return "expected a product alone, found something after its sum"
    return None


ROWS = [
    row
    for reduction in (True, False)
    for row in on_both("linear", "linear", _make(reduction), reduction=reduction, why_not=_why_not)
]
