"""CUDA's kernel of linear layers of few rows that follow each other."""

from __future__ import annotations

from typing import Any

from ... import _cpu
from ...devices import Buffer
from ...graph.graph import Graph, Node
from ..cpu.channels_last import function_of, not_compiled
from ..kernel import Bound, Call, Kernel, upload
from .fusing import NOT_SOONER
from .requirements import CLUSTERS


def _functions(op: Any) -> list[Any]:
    """Returns what is applied to the sums of each layer, or None."""
    return [part.op.activation for part in op.nodes if part.role != "softmax"]


def _layers(op: Any, inputs: Any) -> Any:
    """Returns the compiled functions' shape of all layers."""
    rows = [
        _cpu.RowLayer(*reversed(weight.shape), *function_of(function))
        for function, weight in zip(_functions(op), inputs[1::2], strict=True)
    ]
    return _cpu.RowLayers(inputs[0].shape[0], op["softmax"] is not None, *rows)


def _why_not_fuse(node: Node, graph: Graph, device: Any) -> str | None:
    inputs = graph.inputs_of(node)
    if inputs[0].storage_dtype or inputs[0].dtype != "float32":
        return "expected rows of float32"
    if reason := _why_not(node, graph):
        return reason
    takes = device.kernels.linear_layers_takes(_layers(node.op, inputs), device.target.native)
    return None if takes else NOT_SOONER


def _why_not(node: Node, graph: Graph) -> str | None:
    return not_compiled(node, graph, *_functions(node.op))


def _prepare(node: Node, graph: Graph, device: Any) -> Buffer:
    shape = _layers(node.op, graph.inputs_of(node))
    packed = device.allocate(device.kernels.linear_layers_packed(shape, 0))
    arrays = [None if name is None else graph.constants[name] for name in node.inputs[1:]]
    sources = [None if array is None else upload(array, device) for array in arrays]
    addresses = [0 if source is None else source.address for source in sources]
    for layer, pair in enumerate(zip(addresses[::2], addresses[1::2], strict=True)):
        device.kernels.linear_layers_pack(*pair, packed.address, shape, layer, device.stream_handle)
    device.synchronize()
    return packed


def _make(call: Call) -> Bound:
    shape = _layers(call.node.op, call.inputs)
    return call.native(
        "linear_layers",
        call.input_addresses[0],
        call.prepared.address,
        call.output_addresses[0],
        shape,
    )


ROWS = [
    Kernel(
        "linear_layers", "linear_layers", "cuda", _make, requires=CLUSTERS,
        why_not=_why_not, why_not_fuse=_why_not_fuse,
        prepare=_prepare,
    ),
]  # fmt: skip
