"""The kernels of normalisations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..graph.graph import Graph, Node, Value
from ..operators.operator import axis_in
from .arguments import input_values, output_values
from .kernel import Bound, Call, on_both
from .native import _cpu

#: Elements of a row that is normalised where it lies in memory in 16 bits.
LONGEST_ROW = 2048


def _affine(node: Node, graph: Graph, device: Any) -> Any:
    """Returns center, scale and shift [3, C] of a batch norm, in memory of the device."""
    scale, bias, mean, variance = (
        np.asarray(graph.constants[name], np.float64) for name in node.inputs[1:]
    )
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + node.op.epsilon)
        return device.upload(np.stack([mean, factor, bias]).astype(np.float32))


def _batch_why_not(node: Node, graph: Graph) -> str | None:
    if any(name not in graph.constants for name in node.inputs[1:]):
        return "expected constant parameters, found some that are computed"
    return None


def _make_batch(call: Call) -> Bound:
    sizes, axis = call.inputs[0].shape, call.node.op.axis
    channels = sizes[axis]
    outer, inner = (math.prod(sizes[:-1]), 1) if axis == -1 else (sizes[0], math.prod(sizes[2:]))
    shape = _cpu.ChannelShape(outer, channels, inner)
    center, scale, shift = (call.prepared.address + 4 * channels * i for i in range(3))
    if call.uses_storage_dtype:
        return call.native(
            "affine_channel_stored",
            *input_values(call),
            center,
            scale,
            shift,
            *output_values(call),
            shape,
            call.overflow,
        )
    return call.native(
        "affine_channel",
        call.input_addresses[0],
        center,
        scale,
        shift,
        call.output_addresses[0],
        shape,
    )


def _all_float32(node: Node, graph: Graph) -> str | None:
    for value in graph.inputs_of(node):
        if value is not None and value.dtype != "float32":
            return f"expected float32 parameters, found {value.dtype}"
    return None


def _make_groups(call: Call) -> Bound:
    images, channels, *positions = call.inputs[0].shape
    groups = getattr(call.node.op, "groups", channels)  # an instance norm's are the channels
    shape = _cpu.NormalizeRowsShape(
        images * groups,
        groups,
        channels // groups,
        math.prod(positions),
        call.node.op.epsilon,
        True,
    )
    return call.native(
        "normalize_rows", *call.input_addresses[:3], call.output_addresses[0], 0, 0, shape
    )


def _tail(node: Node, x: Value) -> tuple[int, ...]:
    return x.shape[axis_in(node.op.axis, len(x.shape)) :]


def _layer_why_not(node: Node, graph: Graph) -> str | None:
    x, *parameters = graph.inputs_of(node)
    tail = _tail(node, x)
    for value in parameters:
        if value is not None and value.shape != tail:
            return f"expected a parameter for each of {list(tail)}, found {list(value.shape)}"
    return _all_float32(node, graph)


def _make_layer(call: Call) -> Bound:
    x = call.inputs[0]
    row = math.prod(_tail(call.node, x))
    rows = x.size // row if row else 0
    centered = call.node.op.kind == "layer_norm"
    shape = _cpu.NormalizeRowsShape(rows, 1, row, 1, call.node.op.epsilon, centered)
    scale, shift = (*call.input_addresses[1:3], 0)[:2]
    if call.uses_storage_dtype:
        return call.native(
            "normalize_rows_stored",
            *input_values(call),
            scale,
            shift,
            *output_values(call),
            shape,
            call.overflow,
        )
    mean, inverse = call.output_addresses[1:3] if len(call.output_addresses) > 1 else (0, 0)
    return call.native(
        "normalize_rows",
        call.input_addresses[0],
        scale,
        shift,
        call.output_addresses[0],
        mean,
        inverse,
        shape,
    )


def _batch_stores(node: Node, graph: Graph) -> tuple[int | None, ...]:
    channels_last = node.op.axis in (-1, len(graph.values[node.inputs[0]].shape) - 1)
    return (None, 0) if channels_last else ()


def _layer_stores(node: Node, graph: Graph) -> tuple[int | None, ...]:
    row = math.prod(_tail(node, graph.values[node.inputs[0]]))
    return (None, 0) if row <= LONGEST_ROW and len(node.outputs) == 1 else ()


ROWS = [
    *on_both(
        "batch_norm", "affine_channel", _make_batch, why_not=_batch_why_not, prepare=_affine,
        packs=(1, 2, 3, 4), in_place=True, stores=_batch_stores,
    ),
    *on_both("instance_norm", "normalize_rows", _make_groups, why_not=_all_float32, in_place=True),
    *on_both("group_norm", "normalize_rows", _make_groups, why_not=_all_float32, in_place=True),
    *(
        row
        for kind in ("layer_norm", "rms_norm")
        for row in on_both(
            kind, "normalize_rows", _make_layer, why_not=_layer_why_not, in_place=True,
            stores=_layer_stores,
        )
    ),
]  # fmt: skip
