"""Scales and offsets a channel - batch norm, and additions and products of constants - into convolutions."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ....operators.binary import Add, Mul, Sub
from ....operators.conv2d import Conv2d
from ....operators.conv_transpose2d import ConvTranspose2d
from ....operators.linear import Linear
from ....operators.norm import BatchNorm
from ....operators.operator import axis_in
from ...graph import Graph, Node
from ..rewriting import (
    Rewrites,
    absent,
    constant,
    covering,
    folded,
    makers_of,
    merge_after,
    only_user,
    wide,
)


def _affine(graph: Graph, node: Node, x: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (a, b), float64 [C], where ``node`` makes a[c] * x + b[c] with constants; else None."""
    shape = graph.values[x].shape
    channels = shape[1]
    if isinstance(node.op, BatchNorm):
        parameters = [constant(graph, node, index) for index in range(1, 5)]
        if node.inputs[0] != x or any(p is None for p in parameters):
            return None
        return node.op.affine(*parameters)
    if not isinstance(node.op, (Add, Sub, Mul)) or graph.values[node.outputs[0]].shape != shape:
        return None
    index = 1 if node.inputs[0] == x else 0
    if index == 0 and isinstance(node.op, Sub):
        return None
    c = constant(graph, node, index)
    if c is None or node.inputs[1 - index] != x:
        return None
    # One number, or one per channel: every other dimension is 1.
    wide = (1,) * (len(shape) - c.ndim) + c.shape
    if any(size != 1 for axis, size in enumerate(wide) if axis != 1):
        return None
    values = np.broadcast_to(c.astype(np.float64).reshape(-1), (channels,))
    if isinstance(node.op, Mul):
        return values, np.zeros(channels)
    return np.ones(channels), -values if isinstance(node.op, Sub) else values


def _plain(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a sum of products with constant weights, or a batch norm, and nothing after it."""
    if isinstance(node.op, BatchNorm):
        known = (constant(graph, node, index) is not None for index in range(1, 5))
        return node.op.axis == 1 and all(known)
    return (
        isinstance(node.op, (Conv2d, ConvTranspose2d, Linear))
        and node.op.activation is None
        and absent(node, 3)
        and constant(graph, node, 1) is not None
        and (absent(node, 2) or constant(graph, node, 2) is not None)
    )


def fold_affine_after(graph: Graph) -> Graph:
    """Folds scales and shifts after a convolution, linear layer or batch norm into its weights.

    The channels may be those of several, one after another.
    """
    rewrites = Rewrites(graph)
    for after in graph.nodes:
        for x in dict.fromkeys(after.inputs):
            nodes, joined = makers_of(graph, x, after)
            if not nodes or not all(_plain(graph, node) for node in nodes):
                continue
            rank = len(graph.values[x].shape)
            if any(axis_in(concat.op.axis, rank) != 1 for concat in joined):
                continue
            found = _affine(graph, after, x) if rewrites.free(after, *nodes, *joined) else None
            if found is None:
                continue
            # A row of them is folded at once, each into the weights that the one before has left.
            row, merged, constants = [], list(nodes), ChainMap({}, graph.constants)
            each: Node | None = after
            while found is not None:
                scaled = _all_scaled(rewrites, merged, found, constants)
                if scaled is None:
                    break
                merged = scaled
                row.append(each)
                x = each.outputs[0]
                each = only_user(graph, x)
                if each is None or not rewrites.free(each):
                    break
                found = _affine(graph, each, x)
            if not row:
                continue
            kind = nodes[0].op.kind
            why = [
                f"{one.op.kind} with constants scales and shifts the channels of {kind}"
                for one in row
            ]
            merge_after(rewrites, merged, joined, row, why, constants.maps[0])
            break
    return rewrites.apply()


def _all_scaled(
    rewrites: Rewrites,
    nodes: list[Node],
    by: tuple[np.ndarray, np.ndarray],
    constants: ChainMap[str, np.ndarray],
) -> list[Node] | None:
    """Returns ``nodes`` with scales and shifts of all their channels, or None.

    The first map of ``constants`` has what these nodes read of new ones, and nothing else.
    """
    made, first = [], 0
    for node in nodes:
        end = first + rewrites.graph.values[node.outputs[0]].shape[1]
        scaled = _scaled(rewrites, node, *(part[first:end] for part in by), constants)
        if scaled is None:
            return None
        made.append(scaled)
        first = end
    found = [node for node, _ in made]
    new = constants.maps[0]
    for _, more in made:
        new.update(more)
    read = {name for node in found for name in node.inputs}
    for name in new.keys() - read:
        del new[name]
    return found


def _scaled(
    rewrites: Rewrites,
    node: Node,
    a: np.ndarray,
    b: np.ndarray,
    constants: Mapping[str, np.ndarray],
) -> tuple[Node, dict[str, np.ndarray]] | None:
    """Returns ``node`` with a[c] times its channel c and b[c] more, and the constants of that; or None."""
    weight = constants[node.inputs[1]]
    bias = None if absent(node, 2) else constants[node.inputs[2]]
    with np.errstate(all="ignore"):
        exact = b if bias is None else bias * a + b
    shift = folded(exact, weight.dtype)
    if shift is None:
        return None
    name, more = node.inputs[1], {}
    if not (a == 1).all():
        filters = _filters(node, weight)
        with np.errstate(all="ignore"):
            scaled = wide(filters) * a.reshape(-1, *[1] * (filters.ndim - 1))
        made = folded(scaled, weight.dtype, apart=1, beside=exact)
        if made is None:
            return None
        name = rewrites.fresh(f"{node.name}.weight")
        more[name] = _as_weights(node, made, weight.shape)
    bias_name = rewrites.fresh(f"{node.name}.bias")
    more[bias_name] = shift
    return replace(node, inputs=(node.inputs[0], name, bias_name, *node.inputs[3:])), more


def _filters(node: Node, weight: np.ndarray) -> np.ndarray:
    """Returns ``weight`` as [K, ...] for K channels of what ``node`` makes."""
    if not isinstance(node.op, ConvTranspose2d):
        return weight
    groups, (channels, filters, *kernel) = node.op.groups, weight.shape
    grouped = weight.reshape(groups, channels // groups, filters, *kernel)
    return grouped.swapaxes(1, 2).reshape(groups * filters, -1, *kernel)


def _as_weights(node: Node, filters: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns filters [K, ...] in the order of ``node``'s weights."""
    if not isinstance(node.op, ConvTranspose2d):
        return filters
    grouped = filters.reshape(node.op.groups, shape[1], -1, *shape[2:])
    return np.ascontiguousarray(grouped.swapaxes(1, 2)).reshape(shape)


def fold_affine_before(graph: Graph) -> Graph:
    """Folds scales and shifts of a convolution's input channels into its weights.

    A shift does so only where the convolution pads by nothing: its zeros would have to be shifted too.
    """
    rewrites = Rewrites(graph)
    for after in graph.nodes:
        if not (isinstance(after.op, Conv2d) and _plain(graph, after)):
            continue
        # A row of them is folded at once, the last first.
        merged, row, constants, why = after, [], {}, {}
        reader = after
        while (node := graph.producers.get(merged.inputs[0])) is not None:
            if only_user(graph, node.outputs[0]) is not reader or not rewrites.free(node, after):
                break
            found = _scaled_before(rewrites, node, merged, constants)
            if found is None:
                break
            merged, constants = found
            why[node.name] = (
                f"{node.op.kind} with constants scales and shifts the channels that it reads"
            )
            row.insert(0, node)
            reader = node
        if row:
            merged = replace(merged, covers=covering(*row, after))
            rewrites.replace([*row, after], [merged], why, constants)
    return rewrites.apply()


def _scaled_before(
    rewrites: Rewrites, node: Node, conv: Node, constants: Mapping[str, np.ndarray]
) -> tuple[Node, dict[str, np.ndarray]] | None:
    """Returns ``conv`` with what ``node`` does to its input in its weights, and these; or None.

    Args:
        constants: that the graph does not have yet.
    """
    graph = rewrites.graph
    for x in dict.fromkeys(node.inputs):
        found = None
        if x is not None and x not in graph.constants and len(graph.values[x].shape) > 1:
            found = _affine(graph, node, x)
        if found is None:
            continue
        a, b = found
        if any(conv.op.padding) and (b != 0).any():
            return None
        known = ChainMap(constants, graph.constants)
        weight = known[conv.inputs[1]]
        bias = None if absent(conv, 2) else known[conv.inputs[2]]
        groups = conv.op.groups
        by_group = wide(weight).reshape(groups, -1, *weight.shape[1:])
        ones = [1] * (weight.ndim - 2)
        with np.errstate(all="ignore"):
            scaled = by_group * a.reshape(groups, 1, -1, *ones)
            shifts = by_group * b.reshape(groups, 1, -1, *ones)
            shift = shifts.reshape(len(weight), -1).sum(axis=1) + (0 if bias is None else bias)
        scaled = folded(scaled.reshape(weight.shape), weight.dtype, apart=2, beside=shift)
        shift = folded(shift, weight.dtype)
        if scaled is None or shift is None:
            return None
        name = rewrites.fresh(f"{conv.name}.weight")
        bias_name = rewrites.fresh(f"{conv.name}.bias")
        return replace(conv, inputs=(x, name, bias_name)), {name: scaled, bias_name: shift}
    return None
