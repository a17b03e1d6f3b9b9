"""Folds explicit padding nodes into the convolutions and pools that read them."""

from __future__ import annotations

from dataclasses import replace

from ....operators.average_pool2d import AveragePool2d, LpPool2d
from ....operators.conv2d import Conv2d
from ....operators.pad import Pad
from ....operators.pad2d import Pad2d
from ...graph import Graph, Node, Operator
from ..rewriting import Rewrites, covering, only_user


def fold_padding(graph: Graph) -> Graph:
    """Folds zeros around an image into the convolution or average pool that reads it."""
    rewrites = Rewrites(graph)
    for reader in graph.nodes:
        op, x, pads = reader.op, reader.inputs[0] if reader.inputs else None, []
        while x is not None and (pad := graph.producers.get(x)) is not None:
            border = _border(graph, pad)
            alone = only_user(graph, x) is (pads or [reader])[-1] and reader.inputs.count(x) <= 1
            if border is None or not alone or not rewrites.free(pad, reader):
                break
            padded = _padded(op, border)
            if padded is None:
                break
            op, x = padded, pad.inputs[0]
            pads.append(pad)
        if pads:
            merged = replace(
                reader, op=op, inputs=(x, *reader.inputs[1:]), covers=covering(*pads[::-1], reader)
            )
            why = f"{reader.op.kind} reads zeros outside its input anyway"
            rewrites.replace([*pads[::-1], reader], [merged], why)
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


def _padded(op: Operator, border: tuple[int, ...]) -> Operator | None:
    """Returns the record that reads such a border of zeros too, or None where there is none."""
    if not isinstance(op, (Conv2d, AveragePool2d)) or len(op.padding) != len(border):
        return None
    padding = tuple(a + b for a, b in zip(op.padding, border, strict=True))
    if isinstance(op, (Conv2d, LpPool2d)):
        return replace(op, padding=padding)
    if any(op.padding) and not op.count_include_pad:
        return None  # of two kinds of zeros one counts and one does not
    return replace(op, padding=padding, count_include_pad=True)
