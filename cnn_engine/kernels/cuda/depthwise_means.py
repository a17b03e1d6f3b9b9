"""CUDA's kernel of a depthwise convolution and of the means that a gate reads."""

from __future__ import annotations

from typing import Any

from ...graph.graph import Graph, Node
from ..arguments import epilogue
from ..cpu.channels_last import not_compiled, shape_of
from ..kernel import Bound, Call, Kernel
from .channels_last import convolution_of, pack_channels
from .expand_depthwise import strips_of
from .requirements import CLUSTERS_OF_HOPPER

#: Rows and columns of the boxes of which the kernel makes parts of means.
BOX_SIDE = 7


def box_of_means(device: Any, graph: Graph, node: Node) -> tuple[int, int] | None:
    """Returns the rows and columns of the boxes in which a device takes means of a node's output.

    Sooner with it, that is: a convolution of each channel by itself, or an expansion. None: it does not.
    """
    if not CLUSTERS_OF_HOPPER.met_by(device.target):
        return None
    if node.op.kind == "expand_depthwise":
        return strips_of(node, graph, device)
    x, y = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
    if (
        x.storage_dtype
        or y.storage_dtype
        or not_compiled(node, graph, node.op.activation) is not None
    ):
        return None
    shape = shape_of(node, *graph.inputs_of(node)[:2])
    takes = device.kernels.depthwise_means_takes(shape, device.target.native)
    return (BOX_SIDE, BOX_SIDE) if takes else None


def _why_not(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype:
        return "expected images in float32"
    return not_compiled(node, graph, node.op.activation("convolution"))


def _make(call: Call) -> Bound:
    node, bias = convolution_of(call.node), call.input_addresses[2]
    return call.native(
        "depthwise_means", call.input_addresses[0], call.prepared.address, *call.output_addresses,
        shape_of(node, *call.inputs[:2]), call.outputs[1].shape[1], *epilogue(node.op.activation, bias),
    )  # fmt: skip


ROWS = [
    Kernel(
        "depthwise_means", "depthwise_means", "cuda", _make, requires=CLUSTERS_OF_HOPPER,
        why_not=_why_not, prepare=pack_channels,
        packs=(1,), early=(2,),
    ),
]  # fmt: skip
