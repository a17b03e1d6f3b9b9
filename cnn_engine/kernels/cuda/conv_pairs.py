"""CUDA's kernels of two convolutions at once: added, or next to each other in one result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ..arguments import epilogue, input_images, launch, output_images
from ..cpu.channels_last import not_compiled, shape_of
from ..kernel import Bound, Call, Kernel, storing, upload
from .channels_last import compiled_for, compute_dtype_of, own_type, pack_on, ranked
from .fusing import NOT_SOONER
from .requirements import WGMMA


@dataclass(frozen=True)
class _Pair:
    """Packed weights of two convolutions, and their biases."""

    weights: Buffer
    bias: Buffer | None


def _pair_nodes(node: Node) -> list[Node]:
    """Returns both convolutions of a pair."""
    return [
        replace(node, op=node.op[role], inputs=tuple(node.inputs[place::2]))
        for place, role in enumerate(("first", "second"))
    ]


def _pair_of(node: Node, values: Sequence[Value]) -> tuple[Any, Any, bool]:
    """Returns the compiled functions' shapes of both convolutions, and whether they are beside each other."""
    both = _pair_nodes(node)
    first, second = (shape_of(*one) for one in zip(both, values[:2], values[2:4], strict=True))
    return first, second, node.op.kind == "conv2d_beside"


def _no_pair_there(node: Node, graph: Graph, device: Any) -> str | None:
    if any(compiled_for(one, graph, device) != "conv2d_nhwc_wgmma" for one in _pair_nodes(node)):
        return "expected two convolutions that wgmma multiplies"
    how = *_pair_of(node, graph.inputs_of(node)), compute_dtype_of(node), device.target.native
    return None if device.kernels.conv2d_nhwc_wgmma_pair_takes(*how) else NOT_SOONER


def _activation_of(op: Any) -> Any:
    """Returns the activation that follows a pair, or None."""
    last = "second" if op["join"] else op.nodes[-1].role
    return op.activation(last)


def _no_pair(node: Node, graph: Graph) -> str | None:
    if any(value.storage_dtype != own_type(node) for value in graph.inputs_of(node)[:2]):
        return "expected images that are stored as what is multiplied"
    return not_compiled(replace(node, inputs=node.inputs[1:]), graph, _activation_of(node.op))


def _pack_pair(node: Node, graph: Graph, device: Any) -> _Pair:
    how = *_pair_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.conv2d_nhwc_wgmma_pair_packed(*how, 0)
    function = "conv2d_nhwc_wgmma_pair_pack"
    weights = pack_on(node, graph, device, nbytes, function, *how, positions=(2, 3))
    if all(name is None for name in node.inputs[4:]):
        return _Pair(weights, None)
    filters = (graph.values[name].shape[0] for name in node.inputs[2:4])
    biases = [
        np.zeros(count) if name is None else graph.constants[name].astype(np.float64)
        for name, count in zip(node.inputs[4:], filters, strict=True)
    ]
    bias = np.concatenate(biases) if node.op.kind == "conv2d_beside" else sum(biases)
    return _Pair(weights, upload(bias.astype(np.float32), device))


def _make_pair(call: Call, rank: int = 0) -> Bound:
    weights, bias = call.prepared.weights, call.prepared.bias
    return call.native(
        "conv2d_nhwc_wgmma_pair",
        *input_images(call, 0),
        *input_images(call, 1),
        weights.address,
        *output_images(call),
        *_pair_of(call.node, call.inputs),
        compute_dtype_of(call.node),
        *epilogue(
            _activation_of(call.node.op), bias.address if bias else 0, overflow=call.overflow
        ),
        *launch(call, rank),
    )


def _forms(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    return _RANKED[node.op.kind]


ROWS = [
    *(
        Kernel(
            op, name, "cuda", _make_pair, requires=WGMMA,
            why_not=_no_pair, why_not_fuse=_no_pair_there,
            prepare=_pack_pair,
            packs=(2, 3, 4, 5), pitched=(None, 0, 1), stores=storing(None, 0, 1),
            forms=_forms, reads_early=lambda _: True,
        )
        for op, name in (("conv2d_sum", "wgmma_sum"), ("conv2d_beside", "wgmma_beside"))
    ),
]  # fmt: skip

_RANKED = {row.op: ranked(row) for row in ROWS}
