"""CUDA's kernel of a dense block's convolution of 3x3 and the next layer's of 1x1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ..arguments import epilogue, input_images, launch, output_images, prologue
from ..cpu.channels_last import not_compiled, shape_of
from ..kernel import Bound, Call, Kernel, storing
from .channels_last import compute_dtype_of, pack_on
from .fusing import NOT_SOONER, ONLY_CLAMPS, is_clamp, not_in_16_bits
from .requirements import CLUSTERS


def _sizes_of(node: Node, values: Sequence[Value]) -> tuple[Any, int, int]:
    """Returns the shape of the convolution of windows, the channels so far and the product's filters."""
    x, last, window, e = values[:4]
    return shape_of(replace(node, op=node.op["first"]), e, window), x.shape[3], last.shape[0]


def _why_not_fuse(node: Node, graph: Graph, device: Any) -> str | None:
    images = (graph.values[name] for name in (node.inputs[0], node.inputs[3], *node.outputs))
    if reason := not_in_16_bits(node, *images):
        return reason
    if not all(is_clamp(node.op.activation(role)) for role in ("first", "second")):
        return ONLY_CLAMPS
    how = _sizes_of(node, graph.inputs_of(node))
    return None if device.kernels.dense_layer_takes(*how, device.target.native) else NOT_SOONER


def _why_not(node: Node, graph: Graph) -> str | None:
    values = graph.inputs_of(node)
    if any(values[place].storage_dtype != node.op.compute_dtype for place in (0, 3)):
        return "expected images in 16 bits, in the type that weights are rounded to"
    weights = replace(node, inputs=node.inputs[:3] + node.inputs[4:])
    return not_compiled(weights, graph, *map(node.op.activation, ("first", "second")))


def _prepare(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_sizes_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.dense_layer_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "dense_layer_pack", *how, positions=(2, 1))


def _make(call: Call) -> Bound:
    op = call.node.op
    _, _, _, e, scale, shift, first_bias, bias = call.input_addresses
    return call.native(
        "dense_layer",
        *input_images(call, 0),
        e,
        *output_images(call, 0),
        *output_images(call, 1),
        call.prepared.address,
        *_sizes_of(call.node, call.inputs),
        compute_dtype_of(call.node),
        *prologue(scale, shift, floor=op["second"].floor),
        *epilogue(op.activation("first"), first_bias),
        *epilogue(op.activation("second"), bias, overflow=call.overflow),
        *launch(call),
    )


ROWS = [
    Kernel(
        "dense_layer", "dense_layer", "cuda", _make, requires=CLUSTERS,
        why_not=_why_not, why_not_fuse=_why_not_fuse,
        prepare=_prepare, packs=(1, 2), early=(4, 5, 6, 7), pitched=(None, 0),
        stores=storing(None, 0, 3), same_storage=True,
        reads_early=lambda _: True, holds=True,
    ),
]  # fmt: skip
