"""Merges convolutions of the same image that are added: branches of networks as they are trained.

RepVGG, MobileOne and FastViT add a 3x3 or 7x7 convolution, a smaller one and a batch norm of their input, or
subtract it. A sum of convolutions is one convolution by the sum of their filters, at the cost of the largest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....operators.binary import Add, Sub
from ....operators.conv2d import Conv2d
from ....operators.norm import BatchNorm
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, constant, covering, folded, only_user, wide


def merge_parallel(graph: Graph) -> Graph:
    """Makes two convolutions of one image whose results are added or subtracted one convolution.

    Filters are added where one's window is part of the other's. A batch norm is a convolution of 1x1.
    """
    rewrites = Rewrites(graph)
    for add in graph.nodes:
        if type(add.op) not in (Add, Sub) or add.inputs[0] == add.inputs[1]:
            continue
        branches = [graph.producers.get(name) for name in add.inputs]
        if any(node is None or only_user(graph, node.outputs[0]) is not add for node in branches):
            continue
        if branches[0].inputs[0] != branches[1].inputs[0] or not rewrites.free(add, *branches):
            continue
        for wider, other in (branches, branches[::-1]):
            if _merge(rewrites, add, wider, other):
                break
    return rewrites.apply()


def _merge(rewrites: Rewrites, add: Node, wider: Node, other: Node) -> bool:
    """Puts a convolution by both nodes' filters in the place of ``add``; returns whether it can be."""
    graph = rewrites.graph
    filters = _filters(graph, wider)
    if filters is None:
        return False
    added = _filters(graph, other, like=(wider, filters[0]))
    if added is None:
        return False
    corner = _corner(wider, other, filters[0].shape[2:], added[0].shape[2:])
    if corner is None:
        return False
    (row, column), (rows, columns) = corner, added[0].shape[2:]
    signs = [
        -1 if type(add.op) is Sub and add.inputs[1] == node.outputs[0] else 1
        for node in (wider, other)
    ]
    (weight, bias), added = (
        [part * sign for part in parts] for parts, sign in zip((filters, added), signs, strict=True)
    )
    dtype = graph.constants[wider.inputs[1]].dtype
    with np.errstate(all="ignore"):
        weight[:, :, row : row + rows, column : column + columns] += added[0]
        made, shift = folded(weight, dtype), folded(bias + added[1], dtype)
    if made is None or shift is None:
        return False
    names = [rewrites.fresh(f"{wider.name}.{part}") for part in ("weight", "bias")]
    merged = replace(
        wider, inputs=(wider.inputs[0], *names), outputs=add.outputs,
        covers=covering(wider, other, add),
    )  # fmt: skip
    constants = dict(zip(names, (made, shift), strict=True))
    why = "convolutions of one image that are added are one"
    rewrites.replace([wider, other, add], [merged], why, constants)
    return True


def _filters(
    graph: Graph, node: Node, like: tuple[Node, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the filters [K, C / groups, R, S] and the bias [K] of a convolution by constants; else None.

    Args:
        like: a convolution and its filters, for a batch norm's.
    """
    if type(node.op) is Conv2d and node.op.activation is None and absent(node, 3):
        weight, bias = constant(graph, node, 1), constant(graph, node, 2)
        if weight is None or (bias is None and not absent(node, 2)):
            return None
        return wide(weight), np.zeros(len(weight)) if bias is None else wide(bias)
    if type(node.op) is not BatchNorm or like is None:
        return None
    parameters = [constant(graph, node, place) for place in range(1, 5)]
    conv, (count, members) = like[0], like[1].shape[:2]
    if any(one is None for one in parameters) or count != members * conv.op.groups:
        return None
    scale, shift = node.op.affine(*parameters)
    weight = np.zeros((count, members, 1, 1), like[1].dtype)
    weight[np.arange(count), np.arange(count) % members, 0, 0] = scale
    return weight, shift


def _corner(
    wider: Node, other: Node, window: tuple[int, int], part: tuple[int, int]
) -> tuple[int, int] | None:
    """Returns the tap of ``wider`` where the first of ``other`` is, or None where it does not have all."""
    is_norm = type(other.op) is BatchNorm
    stride, padding, dilation = (
        ((1, 1), (0, 0), (1, 1))
        if is_norm
        else (other.op.stride, other.op.padding, other.op.dilation)
    )
    if wider.op.stride != stride or (not is_norm and wider.op.groups != other.op.groups):
        return None
    found = []
    for axis in range(2):
        step = wider.op.dilation[axis]
        first, rest = divmod(wider.op.padding[axis] - padding[axis], step)
        spread = part[axis] > 1 and dilation[axis] != step
        if rest or spread or first < 0 or first + part[axis] > window[axis]:
            return None
        found.append(first)
    return found[0], found[1]
