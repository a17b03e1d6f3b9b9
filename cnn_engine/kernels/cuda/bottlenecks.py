"""CUDA's kernels of bottlenecks, and of two products with gelu between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ..cpu.channels_last import not_compiled, shape_of
from ..kernel import Bound, Call, Kernel, storing
from .channels_last import compute_dtype_of, may_be_the_callers, own_type, pack_on
from .fusing import AT_ANY_ADDRESS, NOT_SOONER, ONLY_CLAMPS, ROLES, epilogues, images_of, is_clamp
from .requirements import WGMMA


def _no_join(node: Node, graph: Graph, device: Any) -> str | None:
    """Returns why no kernel joins the convolutions of a bottleneck, or of two products, that a device has."""
    images, own = images_of(node, graph, 0, 5), own_type(node)
    records = {part.op.compute_dtype for part in node.op.nodes}
    if {value.storage_dtype for value in images} != {own} or len(records) > 1:
        return "expected images as what is multiplied is stored"
    if not own and any(may_be_the_callers(value.name, graph) for value in images):
        return AT_ANY_ADDRESS
    return None


def _no_mlp_there(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := _no_join(node, graph, device) or _no_mlp(node, graph):
        return reason
    if node.op["third"] or not is_clamp(node.op.activation("second")):
        return "expected two products, with relu, clip or nothing after the second"
    how = *_mlp_of(node, graph.inputs_of(node)), compute_dtype_of(node), device.target.native
    return None if device.kernels.mlp_takes(*how) else NOT_SOONER


def _no_bottleneck_there(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := _no_join(node, graph, device) or _no_bottleneck(node, graph):
        return reason
    if not all(is_clamp(node.op.activation(role)) for role in ROLES):
        return ONLY_CLAMPS
    how = *_bottleneck_of(node, graph.inputs_of(node)), device.target.native
    return None if device.kernels.bottleneck_takes(*how) else NOT_SOONER


def _is_gelu(function: Any) -> bool:
    return function is not None and function.function == "gelu"


def _is_mlp(node: Node, graph: Graph) -> bool:
    """Whether a bottleneck begins with a product over channels."""
    op, window = node.op["first"], graph.inputs_of(node)[1]
    return window.shape[2:] == (1, 1) and op.stride == (1, 1) and not any(op.padding)


def _no_mlp(node: Node, graph: Graph) -> str | None:
    inner, outer = map(node.op.activation, ("first", "second"))
    if not _is_mlp(node, graph) or not _is_gelu(inner):
        return "expected a product over channels and gelu first"
    if graph.inputs_of(node)[0].storage_dtype != own_type(node):
        return "expected images as what is multiplied is stored"
    weights = replace(node, inputs=node.inputs[:5])
    return not_compiled(weights, graph, inner, outer)


def _mlp_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, int]:
    """Returns the first product's shape and the second one's filters."""
    return _bottleneck_of(node, values)[:2]


def _pack_mlp(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_mlp_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.mlp_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "mlp_pack", *how, positions=(1, 2))


def _make_mlp(call: Call) -> Bound:
    return call.native(
        "mlp",
        call.input_addresses[0],
        call.prepared.address,
        call.output_addresses[0],
        *_mlp_of(call.node, call.inputs),
        compute_dtype_of(call.node),
        *epilogues(call, call.input_addresses[3:5], residual=5),
    )


def _no_bottleneck(node: Node, graph: Graph) -> str | None:
    if _is_mlp(node, graph):
        return "expected a window"
    if graph.inputs_of(node)[0].storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    weights = replace(node, inputs=node.inputs[:5] + node.inputs[6:])
    return not_compiled(weights, graph, *map(node.op.activation, ROLES))


def _bottleneck_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, int, int]:
    """Returns the first convolution's shape and the filters of those behind it."""
    x, window, last = values[:3]
    reduced = values[6].shape[0] if node.op["third"] else 0
    return shape_of(replace(node, op=node.op["first"]), x, window), last.shape[0], reduced


def _pack_bottleneck(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_bottleneck_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.bottleneck_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "bottleneck_pack", *how, positions=(1, 2, 6))


def _make_bottleneck(call: Call) -> Bound:
    first, second, _, _, third = call.input_addresses[3:]
    return call.native(
        "bottleneck",
        call.input_addresses[0],
        call.prepared.address,
        *(*call.output_addresses, 0)[:2],
        *_bottleneck_of(call.node, call.inputs),
        compute_dtype_of(call.node),
        *epilogues(call, (first, second, third), residual=5),
    )


ROWS = [
    Kernel(
        "bottleneck", "bottleneck", "cuda", _make_bottleneck, requires=WGMMA,
        why_not=_no_bottleneck,
        why_not_fuse=_no_bottleneck_there, prepare=_pack_bottleneck, packs=(1, 2, 6), early=(3, 4, 7),
        stores=storing(None, 0, 5), same_storage=True,
    ),
    Kernel(
        "bottleneck", "mlp", "cuda", _make_mlp, requires=WGMMA,
        why_not=_no_mlp,
        why_not_fuse=_no_mlp_there, prepare=_pack_mlp, packs=(1, 2), early=(3, 4),
        stores=storing(None, 0, 5), same_storage=True,
    ),
]  # fmt: skip
