"""The mean over an image's places and the linear layer behind it, as one operator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....operators.linear import Linear
from ....operators.mean_linear import MeanLinear
from ....operators.norm import BatchNorm
from ....operators.reduce import ReduceMean
from ....operators.shaping import Reshape
from ....operators.unary import Relu
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, constant, covering, folded_affine, only_user


def fuse_means(graph: Graph, takes: Callable[[Graph, Node], bool]) -> Graph:
    """Makes one node of a mean over places and of the linear layer that alone reads it.

    The batch norm and the relu before the mean, which alone reads them, are done to what is averaged. Each is
    over before its work could fill a GPU: what they cost is their starts.

    Args:
        takes: whether a kernel makes such a node sooner than several do.
    """
    rewrites = Rewrites(graph)
    for mean in graph.nodes:
        linear = _linear_of(graph, mean) if _is_mean(graph, mean) else None
        if linear is None:
            continue
        flat, layer = linear
        x, nodes, floor = mean.inputs[0], [mean, *flat, layer], None
        if (relu := _maker(graph, x, Relu)) is not None:
            x, nodes, floor = relu.inputs[0], [relu, *nodes], 0.0
        names: tuple[str | None, ...] = ()
        constants: dict[str, np.ndarray] = {}
        norm = _maker(graph, x, BatchNorm)
        given = [] if norm is None else [constant(graph, norm, place) for place in range(1, 5)]
        known = norm is not None and norm.op.axis == -1 and all(one is not None for one in given)
        affine = folded_affine(norm, given) if known else None
        if affine is not None:
            x, nodes = norm.inputs[0], [norm, *nodes]
            names = tuple(rewrites.fresh(f"{mean.name}.{word}") for word in ("scale", "shift"))
            constants = dict(zip(names, affine, strict=True))
        bias = None if absent(layer, 2) else layer.inputs[2]
        inputs = x, layer.inputs[1], bias, *names
        op = MeanLinear(floor, layer.op.activation, layer.op.compute_dtype or "float32")
        merged = Node(layer.name, op, inputs, layer.outputs, covering(*nodes))
        if not rewrites.free(*nodes) or not takes(graph, merged):
            continue
        rewrites.replace([layer, *nodes[:-1]], [merged], "together they are mean_linear", constants)
    return rewrites.apply()


def _is_mean(graph: Graph, node: Node) -> bool:
    """Whether ``node`` takes the mean over the places of images [N, H, W, C]."""
    if type(node.op) is not ReduceMean or node.inputs[0] is None:
        return False
    images = graph.values[node.inputs[0]].shape
    axes = sorted(axis % 4 for axis in node.op.axes)
    return len(images) == 4 and axes == [1, 2] and images[1] * images[2] > 0


def _linear_of(graph: Graph, mean: Node) -> tuple[list[Node], Node] | None:
    """Returns the reshapes to rows behind ``mean``, and the linear layer of constants that reads them."""
    flat: list[Node] = []
    node = only_user(graph, mean.outputs[0])
    while node is not None and type(node.op) is Reshape:
        flat.append(node)
        node = only_user(graph, node.outputs[0])
    if node is None or type(node.op) is not Linear:
        return None
    (images, *_, channels), rows = (graph.values[n.inputs[0]].shape for n in (mean, node))
    weight = graph.values[node.inputs[1]].shape
    plain = rows[0] == images and weight[1] == channels and node.inputs[0] not in node.inputs[1:]
    constants = all(name is None or name in graph.constants for name in node.inputs[1:])
    return (flat, node) if plain and constants else None


def _maker(graph: Graph, name: str, op: type) -> Node | None:
    """Returns what makes ``name`` for one reader, where it is such an operator."""
    node = graph.producers.get(name)
    return node if node and type(node.op) is op and only_user(graph, name) else None
