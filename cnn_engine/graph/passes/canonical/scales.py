"""Adds multiples of one image as one product, and few groups of channels part by part.

A response norm (ConvNeXt V2) and a gate with a residual read an image several times. Split attention
(ResNeSt) sums over a dimension that kernels of [N, H, W, C] do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ....operators.binary import Add, Mul, Sub
from ....operators.operator import Operator, axis_in
from ....operators.reduce import ReduceMean, ReduceSum
from ....operators.shaping import Reshape, Split
from ...graph import Graph, Node
from ...mapped import read
from ..rewriting import Rewrites, covering, only_user

#: How many times as large an image is as what multiplies it, at least: a number for each channel, say.
SMALL = 4

#: Numbers that may multiply a scale: with others a product of scales has no room where the image's has.
MOST_FACTOR = 2.0**32

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
    """Makes one product, and one sum, of an image that is added to multiples of itself.

    The image is read twice at least: the order of a row of products alone is what keeps it in range.
    """
    rewrites = Rewrites(graph)
    found: dict[str, _Multiple] = {}  # output -> what it is
    for node in graph.nodes:
        dtype = graph.values[node.outputs[0]].dtype
        if type(node.op) in (Add, Sub, Mul) and dtype in ("float32", "float64"):
            multiple = _multiple(graph, node, found)
            if multiple is not None:
                found[node.outputs[0]] = multiple
    for root in reversed(graph.nodes):
        multiple = found.get(root.outputs[0]) if type(root.op) in (Add, Sub) else None
        if multiple is not None and multiple.reads > 1:
            tree = _taken(graph, root, found)
            if len(tree) > 1:
                _factor(rewrites, tree, multiple.image)
    return rewrites.apply()


@dataclass(frozen=True)
class _Multiple:
    """A sum of multiples of an image, plus what does not depend on it."""

    image: str
    reads: int  # of the image
    inside: tuple[str, ...]  # those of the node's inputs that are such sums, too


def _multiple(graph: Graph, node: Node, found: Mapping[str, _Multiple]) -> _Multiple | None:
    """Returns what ``node`` makes of one image, or None: of several, or of none."""
    made = graph.values[node.outputs[0]]
    wide = [name for name in node.inputs if graph.values[name].shape == made.shape]
    others = [graph.values[name] for name in node.inputs if name not in wide]
    if not wide or any(SMALL * other.size > made.size for other in others):
        return None
    if type(node.op) is Mul and (len(wide) == 2 or not _is_moderate(graph, node)):
        return None
    inside = [name for name in wide if name in found and only_user(graph, name) is node]
    images = {found[name].image if name in inside else name for name in wide}
    if len(images) > 1:
        return None
    reads = sum(found[name].reads if name in inside else 1 for name in wide)
    return _Multiple(images.pop(), reads, tuple(inside))


def _is_moderate(graph: Graph, node: Node) -> bool:
    """Whether no constant that ``node`` multiplies by is very large."""
    factors = [graph.constants[name] for name in node.inputs if name in graph.constants]
    return all(np.abs(read(factor)).max(initial=0) <= MOST_FACTOR for factor in factors)


def _taken(graph: Graph, root: Node, found: dict[str, _Multiple]) -> list[Node]:
    """Takes a sum out of ``found``; returns its nodes, what makes an input before what reads it."""
    nodes, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        inside = found.pop(node.outputs[0]).inside
        waiting += [graph.producers[name] for name in inside]
    return nodes[::-1]


def _factor(rewrites: Rewrites, tree: list[Node], image: str) -> None:
    new = _New(rewrites, tree[-1])
    one = ""  # the scale of the image itself

    def tensor(name: str | None) -> str:
        if name not in (None, one):
            return name
        number = rewrites.fresh(f"{tree[-1].name}.{'zero' if name is None else 'one'}")
        new.constants[number] = np.full((), name == one, rewrites.graph.values[image].dtype)
        return number

    def total(op: Operator, a: str | None, b: str | None) -> str | None:
        if b is None or (a is None and type(op) is Add):
            return a if b is None else b
        return new.add(op, tensor(a), tensor(b))

    def product(a: str | None, b: str) -> str | None:
        return b if a == one else None if a is None else new.add(Mul(), a, b)

    # What multiplies the image, and what is added to it; None: nothing.
    parts: dict[str, tuple[str | None, str | None]] = {image: (one, None)}
    for node in tree:
        (a, b), (c, d) = (parts.get(name, (None, name)) for name in node.inputs)
        if type(node.op) is not Mul:
            made = total(node.op, a, c), total(node.op, b, d)
        elif c is None:
            made = product(a, d), product(b, d)
        else:  # the image is the second
            made = product(c, b), product(d, b)
        parts[node.outputs[0]] = made
    scale, shift = parts[tree[-1].outputs[0]]
    made = new.add(Mul(), image, scale)
    if shift is not None:
        new.add(Add(), made, shift)
    new.replace(tree, "multiples of one image are added as one")


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
