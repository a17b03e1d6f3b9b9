"""The kernels of linear layers and matrix products."""

from __future__ import annotations

import math
from typing import Any

from ..graph.graph import Graph, Node, Value
from ..target import Target
from ..types import ITEM_BYTES
from .convolution import limits
from .kernel import Bound, Call, Kernel, functions, on_both, packed, upload, workspace_for
from .native import _cpu


def linear_shape(x: Value, weight: Value) -> Any:
    """Returns the compiled functions' shape of a linear layer."""
    return _cpu.LinearShape(x.shape[0], weight.shape[1], weight.shape[0])


def _make_linear(reduction: bool):
    def make(call: Call) -> Bound:
        bias = call.input_addresses[2] if len(call.input_addresses) > 2 else 0
        shape = linear_shape(*call.inputs[:2])
        return call.native(
            "linear", *call.input_addresses[:2], bias, call.output_addresses[0], shape, reduction
        )

    return make


def _not_linear(node: Node, graph: Graph) -> str | None:
    if node.op.activation is not None:
        return "expected a product alone, found something after its sum"
    return None


def _not_blocked(node: Node, graph: Graph) -> str | None:
    if limits(node.op.activation) is None:
        return f"expected relu or clip after the sum, found {node.op.activation.kind}"
    if node.inputs[1] not in graph.constants:
        return "expected constant weights, which are packed once"
    return None


#: Up to so many products a warp for each output is faster than tiles (an H200, 140 to 5,184 features).
WARP_PRODUCTS = 20_000_000

#: Rows and columns of linear_narrow's tiles, and the columns of linear_blocked's.
NARROW_ROWS, NARROW_COLUMNS, BLOCKED_COLUMNS = 64, 48, 128


def _few_products(node: Node, graph: Graph, target: Target) -> bool:
    shape = linear_shape(*graph.inputs_of(node)[:2])
    return shape.flops <= 2 * WARP_PRODUCTS


def _is_narrow(node: Node, graph: Graph, target: Target) -> bool:
    """Whether there are rows enough for narrow tiles, and wide ones would be a third empty."""
    x, weight = graph.inputs_of(node)[:2]
    tiles, wide = (-(-weight.shape[0] // columns) for columns in (NARROW_COLUMNS, BLOCKED_COLUMNS))
    filled = -(-x.shape[0] // NARROW_ROWS) * tiles >= target.multiprocessors
    return filled and 3 * tiles * NARROW_COLUMNS <= 2 * wide * BLOCKED_COLUMNS


def _make_narrow(call: Call) -> Bound:
    bias = call.input_addresses[2] if len(call.input_addresses) > 2 else 0
    shape = linear_shape(*call.inputs[:2])
    return call.native(
        "linear_narrow", *call.input_addresses[:2], bias, call.output_addresses[0], shape
    )


def _pack(node: Node, graph: Graph, device: Any) -> Any:
    """Returns the packed weights, in memory of the device."""
    shape = linear_shape(*graph.inputs_of(node)[:2])
    where = device.stream_handle if device.kind == "cuda" else 1

    def fill(address: int) -> Any:
        source = upload(graph.constants[node.inputs[1]], device)
        functions(device).linear_pack(source.address, address, shape, where)
        return source

    return packed(device, ITEM_BYTES["float32"] * shape.packed_size, fill)


def _linear_workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    shape = linear_shape(*graph.inputs_of(node)[:2])
    return functions(device).linear_blocked_workspace(shape, workspace_for(device, threads))


def _make_blocked_linear(call: Call) -> Bound:
    bias = call.input_addresses[2] if len(call.input_addresses) > 2 else 0
    return call.native(
        "linear_blocked",
        call.input_addresses[0],
        call.prepared.address,
        bias,
        call.output_addresses[0],
        call.workspace,
        linear_shape(*call.inputs[:2]),
        *limits(call.node.op.activation),
    )


def _matmul_shape(node: Node, a: Value, b: Value) -> Any:
    return _cpu.MatmulShape(*node.op.numbers(a.shape, b.shape))


def _not_matmul(node: Node, graph: Graph) -> str | None:
    a, b = graph.inputs_of(node)[:2]
    if node.op.numbers(a.shape, b.shape) is None:
        return "expected at most 4 batch dimensions that cannot be taken together"
    return None


def _matmul_workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    shape = _matmul_shape(node, *graph.inputs_of(node)[:2])
    return functions(device).matmul_blocked_workspace(shape, workspace_for(device, threads))


def _make_blocked_matmul(call: Call) -> Bound:
    shape = _matmul_shape(call.node, *call.inputs[:2])
    return call.native(
        "matmul_blocked",
        *call.input_addresses[:2],
        0,
        call.output_addresses[0],
        call.workspace,
        shape,
        -math.inf,
        math.inf,
    )


def _make_matmul(call: Call) -> Bound:
    shape = _matmul_shape(call.node, *call.inputs[:2])
    return call.native(
        "matmul", *call.input_addresses[:2], 0, call.output_addresses[0], shape, -math.inf, math.inf
    )


ROWS = [
    Kernel(
        "linear", "warp", "cuda", _make_linear(True), reduction=True, why_not=_not_linear,
        automatic=_few_products,
    ),
    Kernel(
        "linear", "narrow", "cuda", _make_narrow, reduction=False, why_not=_not_linear,
        automatic=_is_narrow,
    ),
    *on_both(
        "linear", "blocked", _make_blocked_linear, why_not=_not_blocked, reduction=False,
        workspace=_linear_workspace, prepare=_pack, packs=(1,),
    ),
    *(
        row
        for reduction in (True, False)
        for row in on_both(
            "linear", "linear", _make_linear(reduction), reduction=reduction, why_not=_not_linear
        )
    ),
    *on_both(
        "matmul", "blocked", _make_blocked_matmul, why_not=_not_matmul, reduction=False,
        workspace=_matmul_workspace,
    ),
    *on_both("matmul", "matmul", _make_matmul, why_not=_not_matmul),
]  # fmt: skip
