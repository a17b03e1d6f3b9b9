"""CUDA's kernels of 8-bit integers: the CPU's rows, whose functions take a stream in place of threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...graph.graph import Graph, Node
from ..cpu import quantized
from ..kernel import Bound, Call, Kernel
from .channels_last import RANKS, may_be_the_callers
from .requirements import MMA_INT8, WGMMA

#: The compiled functions of layers, and how reports name them.
_MMA, _WGMMA = "quantized_conv2d", "quantized_conv2d_wgmma"
_NAMES = {_MMA: "int8", _WGMMA: "int8_wgmma"}

#: Bytes at whose multiples TMA reads.
_TMA_BYTES = 16


def _may_be_unaligned(name: str, graph: Graph) -> bool:
    """Whether a value of 8 bits may lie at any address, or in rows of any pitch."""
    names = [name]
    for one in names:
        maker = graph.producers.get(one)
        for node in (*graph.consumers[one], *([] if maker is None else [maker])):
            if node.op.kind not in ("concat", "split", "reshape"):
                continue
            values = [value for value in (*node.inputs, *node.outputs) if value is not None]
            if node.op.kind != "reshape" and any(
                graph.values[value].shape[-1] % _TMA_BYTES for value in values
            ):
                return True
            names += [value for value in values if value not in names]
    return may_be_the_callers(name, graph)


def _compiled_for(node: Node, graph: Graph, device: Any) -> str:
    """Returns the compiled function that runs a layer."""
    x = node.inputs[quantized.X]
    if not WGMMA.met_by(device.target) or getattr(node.op, "planar", False):
        return _MMA
    shape = quantized.shape_of(node, graph.inputs_of(node))
    largest = quantized.largest_weight(node, graph)
    takes = device.kernels.quantized_conv2d_wgmma_takes(shape, largest, device.target.native)
    return _WGMMA if takes and not _may_be_unaligned(x, graph) else _MMA


def _pack(node: Node, graph: Graph, device: Any) -> Any:
    types, parameters = quantized.types_of(node, graph), (quantized.BIAS, quantized.SCALE)
    function = _compiled_for(node, graph, device)
    return quantized.packed_by(function, node, graph, device, types, parameters)


def _workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    if _compiled_for(node, graph, device) != _MMA:
        return 0
    shape = quantized.shape_of(node, graph.inputs_of(node))
    return device.kernels.quantized_conv2d_workspace(shape)


def _make(call: Call, rank: int = 0) -> Bound:
    if call.prepared.function == _MMA:
        return quantized.make(call)
    addresses, sizes = quantized.arguments_of(call)
    return call.native(_WGMMA, *addresses, *sizes, rank)


def _shows(node: Node, graph: Graph, device: Any) -> str:
    return _NAMES[_compiled_for(node, graph, device)]


def _forms(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    return _RANKED[node.op.kind] if _compiled_for(node, graph, device) == _WGMMA else ()


def _row(row: Kernel) -> Kernel:
    if row.op not in quantized.LAYERS:
        return replace(row, device="cuda")
    return replace(
        row,
        device="cuda",
        make=_make,
        prepare=_pack,
        requires=MMA_INT8,
        packed_for=_compiled_for,
        workspace=_workspace,
        shows=_shows,
        forms=_forms,
    )


ROWS = [_row(row) for row in quantized.SHARED]

#: The same with the tiles that the model of their times says are next.
_RANKED = {
    row.op: [replace(row, form=f"rank {rank}", make=partial(_make, rank=rank)) for rank in RANKS]
    for row in ROWS
    if row.forms is _forms
}
