"""Regions for tests: those that patterns find in a graph, and regions of given records."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cnn_engine.graph import passes
from cnn_engine.graph.graph import Graph, Node
from cnn_engine.graph.passes.fuse import patterns
from cnn_engine.graph.passes.fuse.regions import Finder, Pattern, region_of
from cnn_engine.operators.binary import Add, Mul
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.operator import Operator
from cnn_engine.operators.reduce import ReduceMean, ReduceSum
from cnn_engine.operators.region import Region
from cnn_engine.operators.shaping import Concat
from cnn_engine.operators.softmax import Softmax
from cnn_engine.operators.unary import Relu, Unary

Takes = Callable[[Graph, Node], object]


def why_not(takes: Takes = lambda graph, region: True) -> Callable[[Graph, Node], str | None]:
    """Returns what refuses the regions that ``takes`` does not."""
    return lambda graph, region: None if takes(graph, region) else "not here"


def fused(graph: Graph, *finders: Finder, takes: Takes = lambda graph, region: True) -> Graph:
    """Returns the graph with regions of what the first of ``finders`` that is taken finds."""
    return passes.fuse_regions(graph, finders, why_not(takes))


def found(graph: Graph, kind: str) -> list[Node]:
    """Returns the regions of a kind."""
    return [node for node in graph.nodes if node.op.kind == kind]


def region(
    pattern: Pattern, ops: Mapping[str, Operator], also: Mapping[tuple[str, int], str] | None = None
) -> Region:
    """Returns the region of records by role, with the wires that a pattern says.

    Args:
        also: (role, place) -> the input of the region, or the role, that it reads besides.
    """
    wires: dict[str, dict[int, str]] = {role: {} for role in ops}
    for slot in pattern.inputs:
        positions = [one.split(".") for one in slot.split("|")]
        role, place = next((one for one in positions if one[0] in ops), (None, 0))
        if role is not None:
            wires[role][int(place)] = slot.split("|")[0]
    for role in pattern.roles:
        if role.name in ops and role.reads:
            wires[role.name][role.reads[1]] = role.reads[0]
        if role.name in ops and role.makes:
            wires[role.makes[0]][role.makes[1]] = role.name
    for (role, place), tensor in (also or {}).items():
        wires[role][place] = tensor
    nodes = {
        role.name: _node(role.name, ops[role.name], wires[role.name])
        for role in pattern.ordered
        if role.name in ops
    }
    return region_of(pattern.name, nodes, pattern.inputs, pattern.outputs).op


def _node(role: str, op: Operator, reads: Mapping[int, str]) -> Node:
    inputs = tuple(reads.get(place) for place in range(max(reads) + 1))
    return Node(role, op, inputs, (role,))


def conv2d_pool(convolution: Conv2dNhwc, pool: Operator) -> Region:
    return region(patterns.CONV2D_POOL, {"convolution": convolution, "pool": pool})


def depthwise_norm(convolution: Conv2dNhwc, norm: Operator) -> Region:
    return region(patterns.DEPTHWISE_NORM, {"convolution": convolution, "norm": norm})


def bottleneck(
    first: Conv2dNhwc, activation: Unary | None = None, third: Conv2dNhwc | None = None
) -> Region:
    """A convolution, a product with ``activation`` behind it, and perhaps another one."""
    ops = {"first": first, "second": Conv2dNhwc(activation=activation)}
    pattern = patterns.BOTTLENECK
    if third is not None:
        ops, pattern = {**ops, "third": third}, patterns.BOTTLENECK_AND_NEXT
    return region(pattern, ops)


def inverted_residual(
    first: Conv2dNhwc | None, second: Conv2dNhwc, third: Conv2dNhwc, adds: bool = False
) -> Region:
    ops = {"second": second, "third": third, **({} if first is None else {"first": first})}
    also = {("third", 3): "first.0"} if adds else {}
    return region(patterns.INVERTED_RESIDUAL, ops, also)


def expand_depthwise(first: Conv2dNhwc, second: Conv2dNhwc, mean: Operator | None = None) -> Region:
    ops = {"first": first, "second": second, **({} if mean is None else {"mean": mean})}
    return region(patterns.EXPAND_DEPTHWISE_MEAN, ops)


def dense_layer(first: Conv2dNhwc, second: Conv2dNhwc) -> Region:
    return region(patterns.DENSE_LAYER, {"first": first, "join": Concat(-1), "second": second})


def squeeze_excite(
    activation: Unary | None = None,
    gate: Unary | None = None,
    scales: bool = False,
    means: bool = False,
) -> Region:
    """The factors of images, or images times them; of parts of means where these are given."""
    wires = {
        "mean": (ReduceSum if means else ReduceMean, {0: "total.0" if means else "mean.0"}),
        "first": (Conv2dNhwc(activation=activation), {0: "mean", 1: "first.1", 2: "first.2"}),
        "second": (Conv2dNhwc(activation=gate), {0: "first", 1: "second.1", 2: "second.2"}),
    }  # fmt: skip
    kind, reads = wires.pop("mean")
    nodes = {"total" if means else "mean": Node("mean", kind((1, 2), True), (reads[0],), ("mean",))}
    nodes.update((role, _node(role, op, reads)) for role, (op, reads) in wires.items())
    if scales:
        nodes["scale"] = Node("scale", Mul(), ("mean.0", "second"), ("scale",))
    inputs = patterns.SQUEEZE_EXCITE.inputs
    return region_of("squeeze_excite", nodes, inputs, ("scale" if scales else "second",)).op


def conv2d_sum(first: Conv2dNhwc, second: Conv2dNhwc, activation: Unary | None = None) -> Region:
    """Of which the second one adds."""
    return _pair("conv2d_sum", first, second, activation, {3: "first"}, {})


def conv2d_beside(first: Conv2dNhwc, second: Conv2dNhwc, activation: Unary | None = None) -> Region:
    join = {"join": Node("join", Concat(3), ("first", "second"), ("join",))}
    return _pair("conv2d_beside", first, second, activation, {}, join)


def _pair(kind, first, second, activation, adds, more) -> Region:
    from dataclasses import replace

    ops = {
        "first": first if adds else replace(first, activation=activation),
        "second": replace(second, activation=activation),
    }
    nodes = {
        role: _node(role, op, {place: f"{role}.{place}" for place in range(3)} | wires)
        for (role, op), wires in zip(ops.items(), ({}, adds), strict=True)
    }
    nodes.update(more)
    return region_of(kind, nodes, patterns.PAIR, tuple(nodes)[-1:]).op


def linear_layers(functions: tuple[Unary | None, ...], softmax: bool = False) -> Region:
    nodes, x = {}, "layer0.0"
    for number, function in enumerate(functions):
        role = f"layer{number}"
        reads = {0: x, 1: f"{role}.1", 2: f"{role}.2"}
        nodes[role], x = _node(role, Linear(function), reads), role
    inputs = "layer0.0", *(f"{role}.{place}" for role in nodes for place in (1, 2))
    if softmax:
        nodes["softmax"] = Node("softmax", Softmax(), (x,), ("softmax",))
    return region_of("linear_layers", nodes, inputs, tuple(nodes)[-1:]).op


def mean_linear(
    activation: Unary | None = None, floor: bool = False, affine: bool = False
) -> Region:
    """The mean of images, or of what a scale, a shift and a relu make of them, and a linear layer."""
    x, nodes = patterns.MEAN_LINEAR.inputs[0].split("|")[0], {}
    if affine:
        nodes["scale"] = Node("scale", Mul(), (x, "scale.1"), ("scale",))
        nodes["shift"], x = Node("shift", Add(), ("scale", "shift.1"), ("shift",)), "shift"
    if floor:
        nodes["relu"], x = Node("relu", Relu(), (x,), ("relu",)), "relu"
    nodes["mean"] = Node("mean", ReduceMean((1, 2), False), (x,), ("mean",))
    reads = {0: "mean", 1: "linear.1", 2: "linear.2"}
    nodes["linear"] = _node("linear", Linear(activation), reads)
    return region_of("mean_linear", nodes, patterns.MEAN_LINEAR.inputs, ("linear",)).op
