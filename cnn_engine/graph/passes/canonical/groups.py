"""Grouped convolutions as ones that tensor cores run sooner: groups joined, or filters of a channel apart.

Tensor cores multiply tiles. A group of few channels fills little of one, and a channel count that is no
multiple of a vector is read one element at a time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....operators.conv2d import Conv2d
from ....operators.shaping import Concat, Reshape, Transpose
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, constant, covering, only_user

#: Filters of the narrowest tile of csrc/cuda/sm80/conv2d_nhwc.cu.
TILE_FILTERS = 32

#: Filters of a tile of wgmma's, and how much more it multiplies in the same time.
WGMMA_FILTERS, WGMMA_SPEED = 64, 2

#: How many times as much a multiplication costs where channels are read in fours of 16 bits, and one by one;
#: an estimate: 42 GFLOP/s were measured on an H200 of filters of one channel, 0.9 TFLOP/s with all zeros.
FOURS, SINGLE = 2, 16

#: The same of a depthwise kernel, which uses no tensor core: the ratio of both rates on an A100.
DEPTHWISE = 16

#: Weights of a joined convolution, zeros included: more take longer to read than they save.
MOST_WEIGHTS = 1 << 22


def regroup(graph: Graph, vector_width: int, has_wgmma: bool) -> Graph:
    """Joins groups of convolutions by filters with zeros, or makes depthwise ones of several a channel.

    Of each convolution the form is chosen that tensor cores finish first, by the multiplications of the tiles
    that they fill.

    Args:
        vector_width: channels that a kernel reads at once: 8 of 16 bits, 4 of 32.
        has_wgmma: whether convolutions of one group run on wgmma.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        weight = constant(graph, node, 1) if type(node.op) is Conv2d else None
        if weight is None or node.op.groups == 1 or len(weight) == 0:
            continue
        filters, channels = len(weight) // node.op.groups, weight.shape[1]
        if filters == channels == 1:
            continue  # depthwise
        costs = _costs(node.op.groups, weight.shape, vector_width, has_wgmma)
        joined = min(costs, key=lambda factor: (costs[factor], factor))
        by_channel = DEPTHWISE * weight.size
        if channels == 1 and by_channel < costs[joined] and _can_part(graph, node):
            _part(rewrites, node, weight)
        elif joined > 1:
            _join(rewrites, node, weight, joined)
    return rewrites.apply()


def _costs(
    groups: int, shape: tuple[int, ...], vector_width: int, has_wgmma: bool
) -> dict[int, float]:
    """Returns the multiplications for an output pixel, weighted, by how many groups are joined."""
    filters, (channels, rows, columns) = shape[0] // groups, shape[1:]
    step = 8 * vector_width  # terms that a kernel's step multiplies
    costs: dict[int, float] = {}
    for factor in range(1, groups + 1):
        if groups % factor or (
            factor > 1 and factor * filters * channels * groups * rows * columns > MOST_WEIGHTS
        ):
            continue
        wide, deep, tile, weight = factor * filters, factor * channels, TILE_FILTERS, 1.0
        if factor == groups:
            deep = _padded(deep, vector_width)  # by align_channels
            tile, weight = (WGMMA_FILTERS, 1 / WGMMA_SPEED) if has_wgmma else (tile, weight)
        elif deep % 4 or wide % 4:
            weight = SINGLE
        elif deep % vector_width:
            weight = FOURS
        terms = _padded(deep * rows * columns, step)
        costs[factor] = weight * (groups // factor) * _padded(wide, tile) * terms
    return costs


def _padded(count: int, run: int) -> int:
    return -(-count // run) * run


def _join(rewrites: Rewrites, node: Node, weight: np.ndarray, factor: int) -> None:
    """Makes one group of each ``factor``, whose filters are zero for the channels of the others."""
    groups, (count, channels, *window) = node.op.groups, weight.shape
    filters = count // groups
    split = weight.reshape(groups // factor, factor, filters, channels, *window)
    wide = np.zeros((groups // factor, factor, filters, factor, channels, *window), weight.dtype)
    own = np.arange(factor)
    wide[:, own, :, own] = split.swapaxes(0, 1)
    name = rewrites.fresh(f"{node.name}.joined")
    op = replace(node.op, groups=groups // factor)
    made = replace(node, op=op, inputs=(node.inputs[0], name, *node.inputs[2:]))
    array = wide.reshape(count, factor * channels, *window)
    rewrites.replace([node], [made], "", {name: array})


def _can_part(graph: Graph, node: Node) -> bool:
    """Whether nothing but constants would have to be put in another order."""
    return absent(node, 3) and (absent(node, 2) or constant(graph, node, 2) is not None)


def _part(rewrites: Rewrites, node: Node, weight: np.ndarray) -> None:
    """Makes a depthwise convolution of the first filter of each channel, one of the second, and so on.

    Their outputs are joined in this order. Where a convolution alone reads them its weights take it, too.
    """
    graph, groups = rewrites.graph, node.op.groups
    bias, (output,) = constant(graph, node, 2), node.outputs
    count = len(weight) // groups
    reader = only_user(graph, output)
    taken = None if reader is None else _weights_over(graph, reader, output)
    if reader is not None and not rewrites.free(reader):
        taken = None
    constants, made, parts = {}, [], []
    for number in range(count):
        part = node.name if number == 0 else rewrites.fresh(f"{node.name}.{number + 1}")
        own = (weight[number::count], *(() if bias is None else (bias[number::count],)))
        names = [rewrites.fresh(f"{part}.{word}") for word in ("weight", "bias")[: len(own)]]
        constants.update(zip(names, map(np.ascontiguousarray, own), strict=True))
        parts.append(rewrites.fresh(f"{output}.{number + 1}"))
        made.append(
            Node(part, node.op, (node.inputs[0], *names), (parts[-1],), covering(node) if number == 0 else ())
        )  # fmt: skip
    n, channels, *sizes = graph.values[output].shape
    why = "each filter of a channel is a depthwise convolution"
    if taken is not None:
        joined = rewrites.fresh(f"{output}.joined")
        order = np.arange(channels).reshape(groups, count).T.ravel()
        name = rewrites.fresh(f"{reader.name}.ordered")
        constants[name] = np.ascontiguousarray(taken[:, order])
        after = replace(reader, inputs=(joined, name, *reader.inputs[2:]))
        made += [Node(joined, Concat(1), tuple(parts), (joined,)), after]
        rewrites.replace([node, reader], made, why, constants)
        return
    joined, apart, turned = (
        rewrites.fresh(f"{output}.{word}") for word in ("joined", "apart", "turned")
    )
    made += [
        Node(joined, Concat(1), tuple(parts), (joined,)),
        Node(apart, Reshape((n, count, groups, *sizes), allow_zero=True), (joined,), (apart,)),
        Node(turned, Transpose((0, 2, 1, 3, 4)), (apart,), (turned,)),
        Node(
            rewrites.fresh(f"{output}.reshape"), Reshape((n, channels, *sizes), allow_zero=True), (turned,),
            (output,),
        ),
    ]  # fmt: skip
    rewrites.replace([node], made, why, constants)


def _weights_over(graph: Graph, reader: Node, x: str) -> np.ndarray | None:
    """Returns the constant weights of a convolution that sums over all channels of ``x``, or None."""
    if type(reader.op) is not Conv2d or reader.op.groups != 1 or reader.inputs[0] != x:
        return None
    return constant(graph, reader, 1)
