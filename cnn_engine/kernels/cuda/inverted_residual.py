"""CUDA's kernel of a whole inverted residual block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import _cpu
from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ..cpu.channels_last import not_compiled
from ..kernel import Bound, Call, Kernel, storing
from .channels_last import compute_dtype_of, pack_on
from .fusing import NOT_SOONER, ROLES, epilogues, images_of, not_in_16_bits
from .requirements import CLUSTERS_OF_HOPPER


def _block_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, ...]:
    """Returns the shape of a block's second convolution, channels, filters and whether there is a first."""
    (x, first, second, third), op = values[:4], node.op["second"]
    (n, h, w, channels), wide = x.shape, second.shape[0]
    how = *second.shape[2:], *op.stride, *op.padding, *op.dilation, wide
    shape = _cpu.Conv2dShape(n, wide, h, w, wide, *how)
    return shape, channels, third.shape[0], first is not None


def _adds(op: Any) -> bool:
    """Whether what a block reads is added to what it makes."""
    third = next(part for part in op.nodes if part.role == "third")
    return len(third.inputs) > 3


def _no_block_there(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := not_in_16_bits(node, *images_of(node, graph, 0)):
        return reason
    if node.op["second"].dilation != (1, 1):
        return "expected no dilation"
    how = *_block_of(node, graph.inputs_of(node)), _adds(node.op), device.target.native
    return None if device.kernels.inverted_residual_takes(*how) else NOT_SOONER


def _no_block(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, *map(node.op.activation, ROLES))


def _pack_block(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_block_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.inverted_residual_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "inverted_residual_pack", *how, positions=(1, 2, 3))


def _make_block(call: Call) -> Bound:
    return call.native(
        "inverted_residual",
        call.input_addresses[0],
        call.prepared.address,
        call.output_addresses[0],
        *_block_of(call.node, call.inputs),
        _adds(call.node.op),
        compute_dtype_of(call.node),
        *epilogues(call, call.input_addresses[4:]),
    )


ROWS = [
    Kernel(
        "inverted_residual", "inverted_residual", "cuda", _make_block, requires=CLUSTERS_OF_HOPPER,
        why_not=_no_block,
        why_not_fuse=_no_block_there, prepare=_pack_block, packs=(1, 2, 3), early=(4, 5, 6),
        stores=storing(None, 0), same_storage=True,
    ),
]  # fmt: skip
