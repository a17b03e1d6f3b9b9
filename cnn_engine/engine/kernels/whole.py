"""Kernels that run a chain of layers in one call, with activations on the chip."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ...graph.graph import Graph, Node
from .kernel import Bound, Call, Kernel, functions


def _prepare(node: Node, graph: Graph, device: Any) -> Any:
    arguments = (*node.op.description(graph.constants), node.op.dtype)
    if device.kind == "cpu":
        return functions(device).FusedNetwork(*arguments, _by_layers(node, graph))
    with device.context:
        return functions(device).FusedNetwork(*arguments)


def _by_layers(node: Node, graph: Graph) -> Callable[[int, int], None]:
    """Returns what computes an image that the chain leaves out, with NaN or infinity: layer by layer.

    It takes the addresses of the image and of its outputs.
    """
    layers = node.op.layered(graph.constants)
    plans: list[Any] = []  # one image at a time is enough for what should not be there
    lock = threading.Lock()

    def run(image: int, outputs: int) -> None:
        from ..builder import build_layers  # which stands on the table of kernels

        with lock:
            if not plans:
                plans.append(build_layers(layers))
            plans[0].bind(image, outputs)
            plans[0].run()

    return run


def _make(call: Call) -> Bound:
    images = call.inputs[0]
    where = call.threads
    if call.device.kind == "cuda":
        where = call.device.stream_handle if call.stream is None else call.stream
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
