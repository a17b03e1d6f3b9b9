"""Folds explicit padding nodes into the convolutions and pools that read them."""

from __future__ import annotations

from dataclasses import replace

from ....operators.average_pool2d import AveragePool2d, LpPool2d
from ....operators.conv2d import Conv2d
from ....operators.pad import Pad
from ....operators.pad2d import Pad2d
from ...graph import Graph, Node
from ..rewriting import Rewrites, covering, only_user


def fold_padding(graph: Graph) -> Graph:
    """Folds zeros around an image into the convolution or average pool that reads it."""
    rewrites = Rewrites(graph)
    for pad in graph.nodes:
        border = _border(graph, pad)
        if border is None:
            continue
        reader = only_user(graph, pad.outputs[0])
        if reader is None or reader.inputs[0] != pad.outputs[0] or not rewrites.free(pad, reader):
            continue
        op = _padded(reader, border)
        if op is not None and reader.inputs.count(pad.outputs[0]) == 1:
            merged = replace(
                reader, op=op, inputs=(pad.inputs[0], *reader.inputs[1:]),
                covers=covering(pad, reader),
            )  # fmt: skip
            why = f"{reader.op.kind} reads zeros outside its input anyway"
            rewrites.replace([pad, reader], [merged], why)
    return rewrites.apply()


def _border(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """Returns the zeros before, then after each image dimension that ``node`` adds; else None."""
    if isinstance(node.op, Pad2d):
        return node.op.padding
    if not isinstance(node.op, Pad) or node.op.mode != "constant" or node.op.value != 0:
        return None
    rank = len(graph.values[node.inputs[0]].shape)
    pads = node.op.pads
    if rank < 3 or min(pads) < 0 or any(pads[:2]) or any(pads[rank : rank + 2]):
        return None
    return (*pads[2:rank], *pads[rank + 2 :])


def _padded(reader: Node, border: tuple[int, ...]):
    op = reader.op
    if not isinstance(op, (Conv2d, AveragePool2d)) or len(op.padding) != len(border):
        return None
    padding = tuple(a + b for a, b in zip(op.padding, border, strict=True))
    if isinstance(op, (Conv2d, LpPool2d)):
        return replace(op, padding=padding)
    if any(op.padding) and not op.count_include_pad:
        return None  # of two kinds of zeros one counts and one does not
    return replace(op, padding=padding, count_include_pad=True)
