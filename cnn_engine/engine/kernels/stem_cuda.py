"""CUDA's kernel that runs a network's first convolution and the max pool behind it."""

from __future__ import annotations

from typing import Any

from ... import _cpu
from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from .channels_last import function_of, not_compiled
from .channels_last_cuda import operands_of, pack_on
from .kernel import Bound, Call, Kernel, storing


def _shapes(x: Value, weight: Value, convolution: Any, pool: Any) -> tuple[Any, Any]:
    """Returns the compiled functions' shapes, of strides and padding, and of a pool's window with both."""
    (n, *_), (filters, _, *kernel) = x.shape, weight.shape
    shape = _cpu.Conv2dShape(*x.shape, filters, *kernel, *convolution)
    return shape, _cpu.MaxPool2dShape(n, filters, shape.out_h, shape.out_w, *pool)


def pools_stem(device: Any, graph: Graph, first: Node, second: Node) -> bool:
    """Whether a device makes a first convolution and the max pool behind it sooner as one."""
    function, pool = first.op.activation, second.op
    if function is not None and function.function not in ("relu", "clip"):
        return False
    x, weight = graph.inputs_of(first)[:2]
    between, y = graph.values[first.outputs[0]], graph.values[second.outputs[0]]
    if x.stored or {between.stored, y.stored} != {first.op.operands}:
        return False
    window = *pool.kernel, *pool.stride, *pool.padding
    shapes = _shapes(x, weight, (*first.op.stride, *first.op.padding), window)
    return bool(device.kernels.stem_pool_takes(*shapes, operands_of(first), device.index))


def _shapes_of(node: Node, x: Value, weight: Value) -> tuple[Any, Any]:
    op = node.op
    window = *op.kernel, *op.pool_stride, *op.pool_padding
    return _shapes(x, weight, (*op.stride, *op.padding), window)


def _why_not(node: Node, graph: Graph) -> str | None:
    if graph.values[node.outputs[0]].stored != node.op.operands:
        return "expected results in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, node.op.activation)


def _pack(node: Node, graph: Graph, device: Any) -> Buffer:
    how = _shapes_of(node, *graph.inputs_of(node)[:2])[0], operands_of(node)
    nbytes = device.kernels.conv2d_nhwc_wgmma_planar_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "conv2d_nhwc_wgmma_planar_pack", *how)


def _make(call: Call) -> Bound:
    bias, (y,) = (*call.at[2:], 0)[0], call.outputs
    return call.native(
        "stem_pool", call.at[0], call.prepared.address, bias, call.to[0],
        *_shapes_of(call.node, *call.inputs[:2]), call.pitch(y), call.overflow,
        operands_of(call.node), *function_of(call.node.op.activation),
    )  # fmt: skip


ROWS = [
    Kernel(
        "stem_pool", "stem_pool", "cuda", _make, why_not=_why_not, prepare=_pack, packs=(1,),
        pitched=(None,), stores=storing(None),
    ),
]  # fmt: skip
