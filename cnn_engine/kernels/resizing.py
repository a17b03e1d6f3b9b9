"""The kernels of resize: nearest neighbours by one gather, the other methods one dimension at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..graph.graph import Graph, Node
from .data_movement import gathered, odd_items, offsets, rows_of
from .kernel import Bound, Call, on_both, storing
from .native import _cpu
from .strided import MOST, keeping, unused


def _nearest_why_not(node: Node, graph: Graph) -> str | None:
    if node.op.mode != "nearest":
        return f"expected nearest neighbours, found {node.op.mode}"
    x = graph.values[node.inputs[0]]
    if len(x.shape) > MOST:
        return f"expected at most {MOST} dimensions, found {len(x.shape)}"
    return _crop_why_not(node, graph) or odd_items(x)


def _crop_why_not(node: Node, graph: Graph) -> str | None:
    if node.op.coordinates == "tf_crop_and_resize":
        return "expected coordinates within the input, found a crop"
    return None


def _make_nearest(call: Call) -> Bound:
    x = call.inputs[0]
    positions: list[np.ndarray | None] = [None] * len(x.shape)
    for axis, taken, _ in call.node.op.tables(x.shape):
        positions[axis] = taken[:, 0]
    return gathered(call, *offsets(positions, x.shape))


def _one_axis_each(node: Node, graph: Graph) -> list[Node] | None:
    """Returns a node for each dimension that changes, the last dimension first: its output is short yet."""
    shape = graph.values[node.inputs[0]].shape
    axes = [axis for axis, _, _ in node.op.tables(shape)]
    if len(axes) < 2:
        return None
    nodes: list[Node] = []
    sizes, value = list(shape), node.inputs[0]
    for axis in reversed(axes):
        sizes[axis] = node.op.sizes[axis]
        scales = tuple(
            scale if place == axis else 1.0 for place, scale in enumerate(node.op.scales)
        )
        ends = axis == axes[0]
        made = node.outputs[0] if ends else unused(graph, f"{node.outputs[0]} axis {axis}")
        op = replace(node.op, sizes=tuple(sizes), scales=scales)
        name = node.name if ends else unused(graph, f"{node.name}.axis{axis}")
        nodes.append(replace(node, name=name, op=op, inputs=(value,), outputs=(made,)))
        value = made
    return nodes


def _make_axis(call: Call) -> Bound:
    x = call.inputs[0]
    tables = call.node.op.tables(x.shape)
    # Nothing changes: every element is taken with the weight 1.
    axis, positions, weights = tables[0] if tables else (0, np.zeros((1, 1)), np.ones((1, 1)))
    line = x.shape if tables else (1, x.size)
    axis = axis if tables else 0
    outer, inner = math.prod(line[:axis]), math.prod(line[axis + 1 :])
    index = call.device.upload(np.ascontiguousarray(positions, np.int64))
    weight = call.device.upload(np.ascontiguousarray(weights, np.float32))
    shape = _cpu.InterpolateShape(outer, line[axis], inner, *positions.shape)
    bound = call.native(
        "interpolate_axis",
        call.input_addresses[0],
        index.address,
        weight.address,
        call.output_addresses[0],
        shape,
    )
    return keeping(bound, index, weight)


ROWS = [
    *rows_of(
        "resize", "gather", _make_nearest, why_not=_nearest_why_not, stores=storing(None, 0)
    ),
    *on_both(
        "resize", "interpolate_axis", _make_axis, why_not=_crop_why_not, rewrite=_one_axis_each
    ),
]  # fmt: skip
