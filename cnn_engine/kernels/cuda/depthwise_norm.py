"""CUDA's kernel of a depthwise convolution and of the normalisation of its positions."""

from __future__ import annotations

from typing import Any

from ...graph.graph import Graph, Node
from ..arguments import epilogue, input_values, output_values
from ..cpu.channels_last import not_compiled, shape_of
from ..kernel import Bound, Call, Kernel, storage_of, storing
from .channels_last import convolution_of, may_be_the_callers, pack_channels
from .fusing import AT_ANY_ADDRESS, NOT_SOONER
from .requirements import CLUSTERS_OF_HOPPER


def _why_not_fuse(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := _why_not(node, graph):
        return reason
    x, weight = graph.inputs_of(node)[:2]
    if may_be_the_callers(x.name, graph):
        return AT_ANY_ADDRESS
    shape = shape_of(convolution_of(node), x, weight)
    return (
        None
        if device.kernels.depthwise_norm_takes(shape, storage_of(x), device.target.native)
        else NOT_SOONER
    )


def _why_not(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype != graph.values[node.outputs[0]].storage_dtype:
        return "expected images in memory as what is made of them"
    return not_compiled(node, graph)


def _make(call: Call) -> Bound:
    node = call.node
    scale, bias, shift = call.input_addresses[2:]
    return call.native(
        "depthwise_norm",
        *input_values(call),
        call.prepared.address,
        *output_values(call),
        shape_of(convolution_of(node), *call.inputs[:2]),
        scale,
        shift,
        node.op["norm"].epsilon,
        *epilogue(None, bias, overflow=call.overflow),
    )


ROWS = [
    Kernel(
        "depthwise_norm", "depthwise_norm", "cuda", _make, requires=CLUSTERS_OF_HOPPER,
        why_not=_why_not, why_not_fuse=_why_not_fuse,
        prepare=pack_channels, packs=(1,), early=(2, 3, 4), stores=storing(None, 0), same_storage=True,
    ),
]  # fmt: skip
