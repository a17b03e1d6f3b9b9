"""CUDA's kernel of linear layers on the tensor cores of Turing, which multiply float16 alone."""

from __future__ import annotations

from typing import Any

from ...devices import Buffer
from ...graph.graph import Graph, Node
from ..arguments import epilogue
from ..cpu.channels_last import not_compiled
from ..gemm import linear_shape
from ..kernel import Bound, Call, Kernel
from .channels_last import pack_on
from .requirements import MMA_FLOAT16


def _why_not(node: Node, graph: Graph) -> str | None:
    if node.op.compute_dtype != "float16":
        return "expected operands that may be rounded to float16"
    return not_compiled(node, graph, node.op.activation)


def _pack(node: Node, graph: Graph, device: Any) -> Buffer:
    shape = linear_shape(*graph.inputs_of(node)[:2])
    nbytes = device.kernels.linear_mma_packed(shape, 0)
    return pack_on(node, graph, device, nbytes, "linear_mma_pack", shape)


def _make(call: Call) -> Bound:
    bias = (*call.input_addresses[2:], 0)[0]
    return call.native(
        "linear_mma",
        call.input_addresses[0],
        call.prepared.address,
        call.output_addresses[0],
        linear_shape(*call.inputs[:2]),
        *epilogue(call.node.op.activation, bias, overflow=call.overflow),
    )


ROWS = [
    Kernel(
        "linear", "mma_float16", "cuda", _make, requires=MMA_FLOAT16, why_not=_why_not, prepare=_pack,
        packs=(1,),
    ),
]  # fmt: skip
