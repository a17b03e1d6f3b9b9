"""The kernels of conv2d and its transpose, and of the padded copy that the variant ``pad`` reads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..graph.graph import Graph, Node, Value
from ..operators.pad2d import Pad2d
from ..operators.unary import Unary
from ..target import Target
from ..types import ITEM_BYTES
from .kernel import Bound, Call, Kernel, functions, on_both, packed, upload, workspace_for
from .native import _cpu
from .strided import unused

#: The name of a variant -> the compiled functions' name for it.
NATIVE = {
    "if": _cpu.Conv2dVariant.direct,
    "pad": _cpu.Conv2dVariant.pad,
    "tiled": _cpu.Conv2dVariant.tiled,
}


def nothing_to_read(node: Node, graph: Graph) -> str | None:
    """Returns why no kernel can run a convolution of images without a pixel or a channel, or of no filters.

    No images at all are no work, which kernels do.
    """
    for name in (node.inputs[0], *node.outputs):
        sizes = graph.values[name].shape
        if 0 in sizes[1:]:
            return f"expected images with elements, found {list(sizes)}"
    return None


def why_not(node: Node, graph: Graph) -> str | None:
    """Returns why the plain kernels cannot run a convolution: something comes after its sum."""
    if node.op.activation is not None or len(node.inputs) > 3:
        return "expected a convolution alone, found something after its sum"
    return nothing_to_read(node, graph)


def _not_tiled(node: Node, graph: Graph) -> str | None:
    if node.op.groups != 1:
        return f"expected one group, found {node.op.groups}"
    if reason := why_not(node, graph):
        return reason
    shape = shape_of(node, *graph.inputs_of(node)[:2])
    if not _cpu.fits_conv2d_tiled(shape):
        rows, columns = graph.values[node.inputs[1]].shape[2:]
        strides = "x".join(map(str, node.op.stride))
        return (
            f"expected a kernel whose tile fits into {_cpu.tiled_shared_bytes:,} bytes of shared memory, "
            f"found {rows}x{columns} with stride {strides}"
        )
    return None


def _is_small(node: Node, graph: Graph, target: Target) -> bool:
    """Whether filters are so few that ``tiled`` is as fast as ``blocked``: benchmarks.conv2d_variants."""
    return graph.values[node.inputs[1]].shape[0] <= 8


def shape_of(node: Node, x: Value, weight: Value) -> Any:
    """Returns the compiled functions' shape of a convolution."""
    op, (filters, _, *kernel) = node.op, weight.shape
    return _cpu.Conv2dShape(
        *x.shape, filters, *kernel, *op.stride, *op.padding, *op.dilation, op.groups
    )


def _make(variant: str, reduction: bool):
    def make(call: Call) -> Bound:
        shape = shape_of(call.node, *call.inputs[:2])
        bias = call.input_addresses[2] if len(call.input_addresses) > 2 else 0
        return call.native(
            "conv2d",
            *call.input_addresses[:2],
            bias,
            call.output_addresses[0],
            shape,
            NATIVE[variant],
            reduction,
        )

    return make


def limits(activation: Unary | None) -> tuple[float, float] | None:
    """Returns the limits of a clamp, none for no function, or None where the function is no clamp."""
    if activation is None:
        return -math.inf, math.inf
    if activation.kind == "relu":
        return 0.0, math.inf
    if activation.kind == "clip":
        return activation.alpha, activation.beta
    return None


def _not_blocked(node: Node, graph: Graph) -> str | None:
    if limits(node.op.activation) is None:
        return f"expected relu or clip after the sum, found {node.op.activation.kind}"
    if node.inputs[1] not in graph.constants:
        return "expected constant weights, which are packed once"
    return nothing_to_read(node, graph)


def _pack(node: Node, graph: Graph, device: Any) -> Any:
    """Returns the packed weights, in memory of the device."""
    x, weight = graph.inputs_of(node)[:2]
    shape = shape_of(node, x, weight)
    where = device.stream_handle if device.kind == "cuda" else 1

    def fill(address: int) -> Any:
        source = upload(graph.constants[node.inputs[1]], device)
        functions(device).conv2d_pack(source.address, address, shape, where)
        return source

    return packed(device, ITEM_BYTES["float32"] * shape.packed_size, fill)


def _blocked_workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    shape = shape_of(node, *graph.inputs_of(node)[:2])
    return functions(device).conv2d_blocked_workspace(shape, workspace_for(device, threads))


def _make_blocked(call: Call) -> Bound:
    shape = shape_of(call.node, *call.inputs[:2])
    bias, residual = (*call.input_addresses[2:], 0, 0)[:2]
    return call.native(
        "conv2d_blocked",
        call.input_addresses[0],
        call.prepared.address,
        bias,
        residual,
        call.output_addresses[0],
        call.workspace,
        shape,
        *limits(call.node.op.activation),
    )


def padded_apart(node: Node, graph: Graph) -> list[Node] | None:
    """Returns a copy with a border of zeros, and the convolution without padding that reads it."""
    if not any(node.op.padding):
        return None
    number = node.name.removeprefix("conv")
    name = f"pad{number}" if node.name == f"conv{number}" and number.isdecimal() else ""
    if not name or graph.has(name):
        name = unused(graph, f"{node.name}.pad")
    value = unused(graph, f"{node.outputs[0]} padded")
    pad = Node(name, Pad2d(node.op.padding), node.inputs[:1], (value,))
    op = replace(node.op, padding=(0, 0, 0, 0))
    return [pad, replace(node, op=op, inputs=(value, *node.inputs[1:]))]


def _make_pad(call: Call) -> Bound:
    shape = _cpu.Pad2dShape(*call.inputs[0].shape, *call.node.op.padding)
    return call.native("pad2d", call.input_addresses[0], call.output_addresses[0], shape)


def _rows(variant: str, summary: str, rewrite=None) -> list[Kernel]:
    options = {"why_not": why_not, "summary": summary}
    if rewrite is not None:
        options["rewrite"] = rewrite
    return [
        row
        for reduction in (True, False)
        for row in on_both(
            "conv2d", variant, _make(variant, reduction), reduction=reduction, **options
        )
    ]


def _transposed_why_not(node: Node, graph: Graph) -> str | None:
    if node.op.activation is not None:
        return "expected a sum alone, found something after it"
    return nothing_to_read(node, graph)


def _make_transposed(call: Call) -> Bound:
    op, (_, filters, *kernel) = call.node.op, call.inputs[1].shape
    shape = _cpu.ConvTranspose2dShape(
        *call.inputs[0].shape, filters * op.groups, *kernel, *op.stride, *op.padding, *op.dilation,
        op.groups, *op.output_padding,
    )  # fmt: skip
    bias = call.input_addresses[2] if len(call.input_addresses) > 2 else 0
    return call.native(
        "conv_transpose2d", *call.input_addresses[:2], bias, call.output_addresses[0], shape
    )


ROWS = [
    Kernel(
        "conv2d", "tiled", "cuda", _make("tiled", False), why_not=_not_tiled, reduction=False,
        automatic=_is_small,
        summary="sums in registers over tiles of the input in shared memory (CUDA)",
    ),
    *on_both(
        "conv2d", "blocked", _make_blocked, why_not=_not_blocked, reduction=False,
        workspace=_blocked_workspace, prepare=_pack, packs=(1,),
        summary="a matrix product in blocks that fit caches and registers, weights packed once",
    ),
    *_rows(
        "pad", "first writes a zero-padded copy of its input, then runs branch-free", padded_apart
    ),
    *_rows("if", "tests the image's bounds inside the innermost loop"),
    *on_both("pad2d", "pad2d", _make_pad),
    *on_both(
        "conv_transpose2d", "conv_transpose2d", _make_transposed, why_not=_transposed_why_not
    ),
]  # fmt: skip
