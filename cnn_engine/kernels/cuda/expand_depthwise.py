"""CUDA's kernel of a 1x1 convolution and the depthwise one that reads its result."""

from __future__ import annotations

from typing import Any

from ...devices import Buffer
from ...graph.graph import Graph, Node
from ..cpu.channels_last import expansion_of, not_compiled
from ..kernel import Bound, Call, Kernel, storing
from .channels_last import compute_dtype_of, pack_on
from .fusing import NOT_SOONER, epilogues, images_of, not_in_16_bits
from .requirements import CLUSTERS_OF_HOPPER


def _strips(node: Node, graph: Graph, device: Any) -> tuple[Any, int]:
    """Returns the shape of an expansion's second convolution, and in how many strips it is made, or 0."""
    x, first, second = graph.inputs_of(node)[:3]
    _, shape = expansion_of(node.op, x, first, second)
    return shape, device.kernels.expand_depthwise_takes(shape, x.shape[3], device.target.native)


def strips_of(node: Node, graph: Graph, device: Any) -> tuple[int, int] | None:
    """Returns the rows and columns of the strips of which the means of an expansion's result are made."""
    shape, strips = _strips(node, graph, device)
    return (-(-shape.out_h // strips), shape.out_w) if strips else None


def _no_expansion_there(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := not_in_16_bits(node, *images_of(node, graph, 0)):
        return reason
    return None if _strips(node, graph, device)[1] else NOT_SOONER


def _no_expansion(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, *map(node.op.activation, ("first", "second")))


def _pack_expansion(node: Node, graph: Graph, device: Any) -> Buffer:
    x, first, second = graph.inputs_of(node)[:3]
    how = expansion_of(node.op, x, first, second)[1], x.shape[3], compute_dtype_of(node)
    nbytes = device.kernels.expand_depthwise_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "expand_depthwise_pack", *how, positions=(1, 2))


def _make_expansion(call: Call) -> Bound:
    op, x = call.node.op, call.inputs[0]
    return call.native(
        "expand_depthwise",
        call.input_addresses[0],
        call.prepared.address,
        *(*call.output_addresses, 0)[:2],
        expansion_of(op, *call.inputs[:3])[1],
        x.shape[3],
        compute_dtype_of(call.node),
        *epilogues(call, call.input_addresses[3:]),
    )


ROWS = [
    Kernel(
        "expand_depthwise", "expand_depthwise", "cuda", _make_expansion, requires=CLUSTERS_OF_HOPPER,
        why_not=_no_expansion,
        why_not_fuse=_no_expansion_there, prepare=_pack_expansion, packs=(1, 2), early=(3, 4),
        stores=storing(None, 0), same_storage=True,
    ),
]  # fmt: skip
