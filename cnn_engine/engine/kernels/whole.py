"""Kernels that run a whole chain of layers in one call, with activations on the chip."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ...graph.graph import Graph, Node
from .kernel import Bound, Call, Kernel, functions


def _prepare(node: Node, graph: Graph, device: Any) -> Any:
    description = node.op.description(graph.constants)
    with getattr(device, "context", nullcontext()):
        return functions(device).FusedNetwork(*description, node.op.dtype)


def _make(call: Call) -> Bound:
    images = call.inputs[0]
    where = call.device.stream_handle if call.device.kind == "cuda" else call.threads
    pixels = images.dtype == "uint8"
    return call.prepared.run, [call.at[0], pixels, images.shape[0], call.to[0], where]


def _row(device: str, *computes: str) -> Kernel:
    return Kernel(
        "fused", "fused", device, _make, dtypes=("uint8", "float32"), computes=computes,
        prepare=_prepare, summary="the whole network as one kernel, activations on the chip",
    )  # fmt: skip


ROWS = [
    _row("cpu", "float32", "bfloat16"),
    _row("cuda", "float32", "tf32", "float16", "bfloat16"),
]
