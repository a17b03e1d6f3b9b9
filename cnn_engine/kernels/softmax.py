"""The kernels of softmax."""

from __future__ import annotations

from ..graph.graph import Graph, Node
from .kernel import Bound, Call, on_both
from .native import _cpu


def _make(reduction: bool):
    def make(call: Call) -> Bound:
        shape = _cpu.SoftmaxShape(*call.inputs[0].shape)
        return call.native(
            "softmax", call.input_addresses[0], call.output_addresses[0], shape, reduction
        )

    return make


def _why_not(node: Node, graph: Graph) -> str | None:
    shape = graph.values[node.inputs[0]].shape
    if len(shape) != 2 or node.op.axis not in (1, -1):
        return f"expected rows, found {list(shape)} and axis {node.op.axis}"
    return None


ROWS = [
    row
    for reduction in (True, False)
    for row in on_both(
        "softmax", "softmax", _make(reduction), reduction=reduction, in_place=True, why_not=_why_not
    )
]
