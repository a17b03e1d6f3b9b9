"""CUDA's kernel of the mean over an image's places and the linear layer behind it."""

from __future__ import annotations

import math
from typing import Any

from ... import _cpu
from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ..cpu.channels_last import activation_of, not_compiled
from ..kernel import Bound, Call, Kernel, storage_of, storing
from .channels_last import compute_dtype_of, may_be_the_callers, own_type, pack_on


def _shape_of(x: Value, weight: Value) -> tuple[Any, int]:
    """Returns the shape of the images, and the outputs of the layer."""
    n, h, w, c = x.shape
    return _cpu.AxisShape(n, h * w, c), weight.shape[0]


def averages(device: Any, graph: Graph, node: Node) -> bool:
    """Whether a device makes the means and the layer of a node that ``graph`` has not yet sooner as one."""
    x, weight = (graph.values[name] for name in node.inputs[:2])
    if x.storage_dtype != own_type(node) or may_be_the_callers(x.name, graph):  # at any address
        return False
    if not hasattr(_cpu.UnaryFunction, getattr(node.op.activation, "function", "clip")):
        return False
    how = *_shape_of(x, weight), compute_dtype_of(node)
    return bool(device.kernels.mean_linear_takes(*how, device.index))


def _why_not(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype != own_type(node):
        return "expected images that are stored as what is multiplied"
    return not_compiled(node, graph, node.op.activation)


def _prepare(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_shape_of(*graph.inputs_of(node)[:2]), compute_dtype_of(node)
    nbytes = device.kernels.mean_linear_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "mean_linear_pack", *how)


def _make(call: Call) -> Bound:
    op, (x, weight) = call.node.op, call.inputs[:2]
    bias, scale, shift = (*call.at[2:], 0, 0, 0)[:3]
    floor = -math.inf if op.floor is None else op.floor
    return call.native(
        "mean_linear", call.at[0], call.prepared.address, bias, scale, shift, call.to[0],
        *_shape_of(x, weight), floor, storage_of(call.outputs[0]), call.overflow,
        compute_dtype_of(call.node), *activation_of(op),
    )  # fmt: skip


ROWS = [
    Kernel(
        "mean_linear", "mean_linear", "cuda", _make, why_not=_why_not, prepare=_prepare, packs=(1,),
        early=(2, 3, 4), stores=storing(None, 0),
    ),
]  # fmt: skip
