"""The kernels of functions of one number."""

from __future__ import annotations

from ... import _cpu
from ...graph.graph import Graph, Node
from .kernel import Bound, Call, on_both


def _make(name: str):
    def make(call: Call) -> Bound:
        shape = _cpu.ElementwiseShape(call.inputs[0].size, 4)
        return call.native(name, call.at[0], call.to[0], shape)

    return make


def _make_normalize(call: Call) -> Bound:
    shape = _cpu.ElementwiseShape(call.inputs[0].size, 1)
    op = call.node.op
    return call.native("normalize", call.at[0], call.to[0], shape, op.scale[0], op.offset[0])


def _one_for_all(node: Node, graph: Graph) -> str | None:
    if len(node.op.scale) > 1 or len(node.op.offset) > 1:
        return "expected one scale and offset for all channels"
    return None


ROWS = [
    *on_both("relu", "relu", _make("relu"), in_place=True),
    *on_both("tanh", "tanh", _make("tanh"), in_place=True),
    *on_both("normalize", "normalize", _make_normalize, dtypes=("uint8",), why_not=_one_for_all),
]
