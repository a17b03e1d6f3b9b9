"""Kernels that run a chain of layers in one call, with activations on the chip."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from ..errors import UnsupportedError
from ..graph.graph import Graph, Node
from ..locks import ForkSafeLock
from ..progress import teller
from .kernel import Bound, Call, Kernel, functions

_log = logging.getLogger(__name__)


def _prepare(node: Node, graph: Graph, device: Any) -> Any:
    arguments = (*node.op.description(graph.constants), node.op.dtype)
    fused = functions(device).FusedNetwork
    if device.kind == "cpu":
        return fused(*arguments, _by_layers(node, graph))
    with device.context:
        if not (source := fused.source(*arguments, device.index)):
            return fused(*arguments)
        return _at_first_use(fused)(*arguments, device, source)


@cache
def _at_first_use(fused: Any) -> type:
    """Returns the class of CUDA networks that are not compiled in for their device."""

    class Compiled(fused):
        """A network whose kernels NVRTC compiles, the instrumented ones when a pass is first timed."""

        def __init__(self, *arguments: Any) -> None:
            *arguments, self._device, self._source = arguments
            super().__init__(*arguments, program=program(fused, self._source, self._device))

        def run_timed(self, *arguments: Any) -> None:
            """As that of the networks that are compiled in."""
            if not self.is_instrumented:
                self.instrument(program(fused, self._source, self._device, timed=True))
            super().run_timed(*arguments)

    return Compiled


def program(fused: Any, source: str, device: Any, timed: bool = False) -> bytes:
    """Returns the compiled program of ``fused.source(...)``, with a line where that takes seconds.

    Raises:
        UnsupportedError: it cannot be compiled here.
    """
    from .user import nvrtc

    said = []

    def began() -> None:
        said.append(teller())
        said[0]("compiling this network's kernels, once for this machine ...")
        _log.info("compiling a fused network's kernels, once for this machine")

    try:
        return nvrtc.compile_program(
            source, device.kernels.program_headers, device.target,
            *["CNN_ENGINE_FUSED_TIMED"] * timed, began=began,
        )  # fmt: skip
    finally:
        for tell in said:
            tell("")


def why_not(description: tuple, dtype: str, device: Any) -> str | None:
    """Returns why ``device`` does not run the chain of a description in one call, or None if it does."""
    fused = functions(device).FusedNetwork
    if device.kind != "cuda":
        return fused.why_not(*description, dtype) or None
    if reason := fused.why_not(*description, dtype, device.index):
        return reason
    if not (source := fused.source(*description, dtype, device.index)):
        return None
    try:
        made = program(fused, source, device)
    except UnsupportedError as error:
        return str(error)
    return fused.why_not(*description, dtype, device.index, program=made) or None


def _by_layers(node: Node, graph: Graph) -> Callable[[int, int], None]:
    """Returns what computes an image that the chain leaves out, with NaN or infinity: layer by layer.

    It takes the addresses of the image and of its outputs.
    """
    layers = node.op.layered(graph.constants)
    plans: list[Any] = []  # one image at a time is enough for what should not be there
    lock = ForkSafeLock()

    def run(image: int, outputs: int) -> None:
        from ..plan.builder import build_layers  # which stands on the table of kernels

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
    return call.prepared.run, [
        call.input_addresses[0],
        pixels,
        images.shape[0],
        call.output_addresses[0],
        where,
    ]


def _row(device: str, *computes: str) -> Kernel:
    return Kernel(
        "fused", "fused", device, _make, dtypes=("uint8", "float32"), computes=computes,
        prepare=_prepare, summary="the whole network as one kernel, activations on the chip",
    )  # fmt: skip


ROWS = [
    _row("cpu", "float32", "bfloat16"),
    _row("cuda", "float32", "tf32", "float16", "bfloat16"),
]
