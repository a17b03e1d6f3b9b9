"""CUDA's kernel of the mean over an image's positions and the linear layer after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ... import _cpu
from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ..arguments import epilogue, output_values, prologue
from ..cpu.channels_last import not_compiled
from ..kernel import Bound, Call, Kernel, storing
from .channels_last import compute_dtype_of, may_be_the_callers, own_type, pack_on
from .fusing import AT_ANY_ADDRESS, NOT_SOONER
from .requirements import CLUSTERS


def _shape_of(x: Value, weight: Value) -> tuple[Any, int]:
    """Returns the shape of the images, and the outputs of the layer."""
    n, h, w, c = x.shape
    return _cpu.AxisShape(n, h * w, c), weight.shape[0]


def _why_not_fuse(node: Node, graph: Graph, device: Any) -> str | None:
    bare = replace(
        node, inputs=node.inputs[:3]
    )  # the others are constants that the graph has not yet
    if reason := _why_not(bare, graph):
        return reason
    x, weight = graph.inputs_of(bare)[:2]
    if may_be_the_callers(x.name, graph):
        return AT_ANY_ADDRESS
    how = *_shape_of(x, weight), compute_dtype_of(node)
    return None if device.kernels.mean_linear_takes(*how, device.target.native) else NOT_SOONER


def _why_not(node: Node, graph: Graph) -> str | None:
    if graph.values[node.inputs[0]].storage_dtype != own_type(node):
        return "expected images that are stored as what is multiplied"
    return not_compiled(node, graph, node.op.activation("linear"))


def _prepare(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_shape_of(*graph.inputs_of(node)[:2]), compute_dtype_of(node)
    nbytes = device.kernels.mean_linear_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "mean_linear_pack", *how)


def _make(call: Call) -> Bound:
    op, (x, weight) = call.node.op, call.inputs[:2]
    bias, scale, shift = call.input_addresses[2:]
    return call.native(
        "mean_linear",
        call.input_addresses[0],
        call.prepared.address,
        *output_values(call),
        *_shape_of(x, weight),
        compute_dtype_of(call.node),
        *prologue(scale, shift, floor=0.0 if op["relu"] else None),
        *epilogue(op.activation("linear"), bias, overflow=call.overflow),
    )


ROWS = [
    Kernel(
        "mean_linear", "mean_linear", "cuda", _make, requires=CLUSTERS,
        why_not=_why_not, why_not_fuse=_why_not_fuse,
        prepare=_prepare, packs=(1,), early=(2, 3, 4), stores=storing(None, 0),
    ),
]  # fmt: skip
