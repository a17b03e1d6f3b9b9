"""The kernels of conv2d, and of the padded copy that its variant ``pad`` reads."""

from __future__ import annotations

from dataclasses import replace

from ... import _cpu
from ...graph.graph import Graph, Node
from ...operators.pad2d import Pad2d
from .kernel import Bound, Call, Kernel, on_both

#: The name of a variant -> the compiled functions' name for it.
NATIVE = {
    "if": _cpu.Conv2dVariant.direct,
    "pad": _cpu.Conv2dVariant.pad,
    "tiled": _cpu.Conv2dVariant.tiled,
}


def why_not(node: Node, graph: Graph) -> str | None:
    op = node.op
    if op.groups != 1:
        return f"expected one group, found {op.groups}"
    if op.dilation != (1, 1):
        return f"expected no dilation, found {op.dilation}"
    if op.padding[:2] != op.padding[2:]:
        return f"expected the same padding on both sides, found {op.padding}"
    if op.activation is not None or len(node.inputs) > 3:
        return "expected a convolution alone, found something after its sum"
    return None


def _make(variant: str, reduction: bool):
    def make(call: Call) -> Bound:
        op, (x, weight) = call.node.op, call.inputs[:2]
        filters, _, *kernel = weight.shape
        shape = _cpu.Conv2dShape(*x.shape, filters, *kernel, *op.stride, *op.padding[:2])
        bias = call.at[2] if len(call.at) > 2 else 0
        return call.native(
            "conv2d", *call.at[:2], bias, call.to[0], shape, NATIVE[variant], reduction
        )

    return make


def padded_apart(node: Node, graph: Graph) -> list[Node] | None:
    """Returns a copy with a border of zeros, and the convolution without padding that reads it."""
    if not any(node.op.padding):
        return None
    name = f"pad{node.name.removeprefix('conv')}"
    if name == node.name or any(other.name == name for other in graph.nodes):
        name = f"{node.name}.pad"
    value = f"{node.outputs[0]} padded"
    pad = Node(name, Pad2d(node.op.padding), node.inputs[:1], (value,))
    op = replace(node.op, padding=(0, 0, 0, 0))
    return [pad, replace(node, op=op, inputs=(value, *node.inputs[1:]))]


def _make_pad(call: Call) -> Bound:
    shape = _cpu.Pad2dShape(*call.inputs[0].shape, *call.node.op.padding[:2])
    return call.native("pad2d", call.at[0], call.to[0], shape)


def _pad_why_not(node: Node, graph: Graph) -> str | None:
    padding = node.op.padding
    if padding[:2] != padding[2:]:
        return f"expected the same padding on both sides, found {padding}"
    return None


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


ROWS = [
    Kernel(
        "conv2d", "tiled", "cuda", _make("tiled", False), why_not=why_not, reduction=False,
        summary="sums in registers over tiles of the input in shared memory (CUDA)",
    ),
    *_rows(
        "pad", "first writes a zero-padded copy of its input, then runs branch-free", padded_apart
    ),
    *_rows("if", "tests the image's bounds inside the innermost loop"),
    *on_both("pad2d", "pad2d", _make_pad, why_not=_pad_why_not),
]  # fmt: skip
