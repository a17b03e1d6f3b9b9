"""Adds multiples of one image as one product, and few groups of channels part by part.

A response norm (ConvNeXt V2) and a gate with a residual read an image several times. Split attention
(ResNeSt) sums over a dimension that kernels of [N, H, W, C] do not have.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....operators.binary import Add, Mul, Sub
from ....operators.operator import Operator, axis_in
from ....operators.reduce import ReduceMean, ReduceSum
from ....operators.shaping import Reshape, Split
from ...graph import Graph, Node
from ..rewriting import Rewrites, covering, only_user

#: How many times as large an image is as what multiplies it, at least: a number for each channel, say.
SMALL = 4

#: Groups of channels that are added one by one.
MOST_PARTS = 4


class _New:
    """Nodes that take the place of others."""

    def __init__(self, rewrites: Rewrites, root: Node) -> None:
        self._rewrites, self._root = rewrites, root
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}

    def add(self, op: Operator, *inputs: str, outputs: tuple[str, ...] = ()) -> str:
        """Adds a node; returns its first output."""
        name = self._rewrites.fresh(f"{self._root.name}.{op.kind}")
        self.nodes.append(Node(name, op, inputs, outputs or (name,)))
        return self.nodes[-1].outputs[0]

    def split(self, x: str, parts: int, channels: int) -> tuple[str, ...]:
        """Adds a split of dimension 1; returns its outputs."""
        names = tuple(self._rewrites.fresh(f"{x}.{number + 1}") for number in range(parts))
        self.add(Split(1, (channels,) * parts), x, outputs=names)
        return names

    def replace(self, gone: list[Node], why: str) -> None:
        """Puts the nodes in the place of ``gone``: the last one in that of the last, and covers all."""
        self.nodes[-1] = replace(
            self.nodes[-1], name=gone[-1].name, outputs=gone[-1].outputs, covers=covering(*gone)
        )
        self._rewrites.replace(gone, self.nodes[::-1], why, self.constants)


# ---- multiples of one image ----


def factor_scales(graph: Graph) -> Graph:
    """Makes one product, and one sum, of an image that is added to multiples of itself."""
    rewrites = Rewrites(graph)
    for root in reversed(graph.nodes):
        is_sum = type(root.op) in (Add, Sub) and rewrites.free(root)
        if is_sum and graph.values[root.outputs[0]].dtype == "float32":
            tree = _multiples(rewrites, root)
            if tree is not None:
                _factor(rewrites, root, *tree)
    return rewrites.apply()


def _multiples(rewrites: Rewrites, root: Node) -> tuple[str, dict[str, Node]] | None:
    """Returns an image and, by their outputs, the nodes that make sums of its multiples, or None.

    It is read twice at least: the order of a row of products alone is what keeps it in range.
    """
    graph = rewrites.graph
    shape = graph.values[root.outputs[0]].shape
    tree, images, waiting = {}, [], [root]
    while waiting:
        node = waiting.pop()
        tree[node.outputs[0]] = node
        wide = [name for name in node.inputs if graph.values[name].shape == shape]
        others = [graph.values[name] for name in node.inputs if name not in wide]
        if not wide or any(SMALL * other.size > graph.values[wide[0]].size for other in others):
            return None
        if type(node.op) is Mul and len(wide) == 2:
            return None
        for name in wide:
            maker = graph.producers.get(name)
            inside = (
                maker is not None and type(maker.op) in (Add, Sub, Mul) and rewrites.free(maker)
            )
            if inside and only_user(graph, name) is node and _is_multiple(graph, maker, shape):
                waiting.append(maker)
            else:
                images.append(name)
    return (images[0], tree) if len(images) > 1 == len(set(images)) else None


def _is_multiple(graph: Graph, node: Node, shape: tuple[int, ...]) -> bool:
    """Whether ``node`` adds to an image, or multiplies one by what is smaller."""
    wide = sum(graph.values[name].shape == shape for name in node.inputs)
    return wide == 1 or (wide == 2 and type(node.op) is not Mul)


def _factor(rewrites: Rewrites, root: Node, image: str, tree: dict[str, Node]) -> None:
    new = _New(rewrites, root)
    one = ""  # the scale of the image itself

    def tensor(name: str | None) -> str:
        if name not in (None, one):
            return name
        number = rewrites.fresh(f"{root.name}.{'zero' if name is None else 'one'}")
        new.constants[number] = np.full((), name == one, np.float32)
        return number

    def total(op: Operator, a: str | None, b: str | None) -> str | None:
        if b is None or (a is None and type(op) is Add):
            return a if b is None else b
        return new.add(op, tensor(a), tensor(b))

    def product(a: str | None, b: str) -> str | None:
        return b if a == one else None if a is None else new.add(Mul(), a, b)

    def multiple(name: str) -> tuple[str | None, str | None]:
        """Returns what multiplies the image and what is added to it; None: nothing."""
        if name == image:
            return one, None
        node = tree.get(name)
        if node is None:
            return None, name
        (a, b), (c, d) = map(multiple, node.inputs)
        if type(node.op) is not Mul:
            return total(node.op, a, c), total(node.op, b, d)
        if c is not None:  # the image is the second
            (a, b), d = (c, d), b
        return product(a, d), product(b, d)

    scale, shift = multiple(root.outputs[0])
    if len(tree) < 2 or scale in (None, one):
        return
    if shift is None:
        new.add(Mul(), image, scale)
    else:
        new.add(Add(), new.add(Mul(), image, scale), shift)
    new.replace(list(tree.values())[::-1], "multiples of one image are added as one")


# ---- sums over groups of channels ----


def split_sums(graph: Graph) -> Graph:
    """Makes sums over a few groups of an image's channels additions of its parts, as kernels read them.

    The groups are a dimension of their own, after a reshape. Each may be multiplied before, by one number for
    each of its channels.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        is_sum = type(node.op) is ReduceSum and len(node.op.axes) == 1
        if is_sum and rewrites.free(node) and axis_in(node.op.axes[0], 5) == 1:
            _split_sum(rewrites, node)
    return rewrites.apply()


def _split_sum(rewrites: Rewrites, node: Node) -> None:
    graph, x, factors = rewrites.graph, node.inputs[0], None
    maker, gone = graph.producers.get(x), [node]
    if maker is not None and type(maker.op) is Mul and only_user(graph, x) is node:
        wide = [name for name in maker.inputs if graph.values[name].shape == graph.values[x].shape]
        if len(wide) != 1:
            return
        (x,) = wide
        factors = maker.inputs[1 - maker.inputs.index(x)]
        gone.insert(0, maker)
        maker = graph.producers.get(x)
    shape = graph.values[x].shape
    if (
        maker is None
        or type(maker.op) is not Reshape
        or len(shape) != 5
        or not rewrites.free(*gone)
    ):
        return
    n, parts, channels, *sizes = shape
    image = maker.inputs[0]
    if graph.values[image].shape != (n, parts * channels, *sizes) or not 2 <= parts <= MOST_PARTS:
        return
    new = _New(rewrites, node)
    if factors is not None:
        added = _scaled_parts(new, graph.values[factors].shape, image, factors, shape)
        if added is None:
            return
    else:
        # The mean of a sum is a sum of means, for which nothing of the image's size is written.
        mean = only_user(graph, node.outputs[0])
        if (
            mean is not None
            and _is_mean(graph, mean)
            and not node.op.keepdims
            and rewrites.free(mean)
        ):
            gone.append(mean)
            image = new.add(ReduceMean((2, 3), keepdims=True), image)
        added = new.split(image, parts, channels)
    total = added[0]
    for part in added[1:]:
        total = new.add(Add(), total, part)
    last = gone[-1]
    new.add(Reshape(graph.values[last.outputs[0]].shape, allow_zero=True), total)
    new.replace(gone, "a sum over few groups is one of parts")


def _scaled_parts(
    new: _New, factors_shape: tuple[int, ...], image: str, factors: str, shape: tuple[int, ...]
) -> list[str] | None:
    """Adds the product of each part of an image with its part of the factors, one for each channel."""
    parts, channels = shape[1:3]
    if len(factors_shape) != 5 or factors_shape[1:] != (parts, channels, 1, 1):
        return None
    flat = new.add(Reshape((factors_shape[0], parts * channels, 1, 1), allow_zero=True), factors)
    each = zip(new.split(image, parts, channels), new.split(flat, parts, channels), strict=True)
    return [new.add(Mul(), part, factor) for part, factor in each]


def _is_mean(graph: Graph, node: Node) -> bool:
    """Whether ``node`` takes the mean over the places of an image."""
    rank = len(graph.values[node.inputs[0]].shape)
    axes = sorted(axis_in(axis, rank) for axis in getattr(node.op, "axes", ()))
    return type(node.op) is ReduceMean and rank == 4 and axes == [2, 3]
