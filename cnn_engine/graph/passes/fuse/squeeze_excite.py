"""Fuses squeeze-and-excite blocks: the means before the gates, and the products after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ....operators.binary import Mul
from ....operators.channels_last import Conv2dNhwc
from ....operators.operator import Operator
from ....operators.partial_means import PartialMeans
from ....operators.reduce import ReduceSum
from ....operators.region import Part, Region
from ....operators.shaping import Reshape
from ....operators.unary import Clip, Relu
from ...graph import Graph, Node
from ..rewriting import Rewrites, covering, only_user
from .patterns import EXPAND_DEPTHWISE, SQUEEZE_EXCITE, is_depthwise
from .regions import WhyNot, region_of

#: Where a gate reads parts of means, which add up to them.
TOTAL = SQUEEZE_EXCITE.inputs.index("total.0")


def fuse_squeeze_excite(
    graph: Graph, tile_of: Callable[[Graph, Node], tuple[int, int] | None]
) -> Graph:
    """Has convolutions of each channel, or expansions that end in one, make the means that gates read.

    Gates that read the image for them are for the most part that.

    Args:
        tile_of: returns the rows and columns of the boxes of which a kernel makes parts of the means of what
            a node makes, or None: none does.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        gates = [
            reader
            for reader in graph.consumers[node.outputs[0]]
            if is_gate(reader.op)
            and reader.inputs[0] == node.outputs[0]
            and reader.inputs[TOTAL] is None
        ]
        makes = node.op.kind == EXPAND_DEPTHWISE.name or is_depthwise(graph, node)
        tile = tile_of(graph, node) if gates and makes else None
        if tile is None:
            continue
        parts = f"{node.outputs[0]}.means"
        outputs = *node.outputs, rewrites.fresh(parts)
        merged = _with_means(node, PartialMeans(tile), outputs)
        scaled_gates = [
            replace(gate, op=_of_means(gate.op), inputs=(*gate.inputs[:TOTAL], outputs[1]))
            for gate in gates
        ]
        why = f"together they are {merged.op.kind}"
        rewrites.replace([node, *gates], [merged, *scaled_gates], why)
    return rewrites.apply()


def is_gate(op: Operator) -> bool:
    """Whether a record makes the factors of a squeeze-and-excite block, and no more."""
    return op.kind == SQUEEZE_EXCITE.name and op["scale"] is None


def _with_means(node: Node, op: PartialMeans, outputs: tuple[str, str]) -> Node:
    """Returns a node that makes parts of means besides what it makes."""
    if isinstance(node.op, Region):
        (made,) = node.op.outputs
        region = replace(
            node.op, nodes=(*node.op.nodes, Part("mean", op, (made,), ("mean",))),
            outputs=(made, "mean"),
        )  # fmt: skip
        return replace(node, op=region, outputs=outputs)
    nodes = {"convolution": node, "mean": Node("", op, node.outputs, outputs[1:])}
    inputs = "convolution.0", "convolution.1", "convolution.2"
    made = region_of("depthwise_means", nodes, inputs, ("convolution", "mean"))
    return replace(made, name=node.name, covers=node.covers)


def _of_means(op: Region) -> Region:
    """Returns a gate that adds up parts of means, where it made the mean of an image."""
    total = Part("total", ReduceSum((1, 2), True), ("total.0",), ("mean",))
    return replace(op, nodes=(total, *op.nodes[1:]))


def fuse_excite_scales(graph: Graph, why_not: WhyNot | None = None) -> Graph:
    """Fuses the multiplication of images by gates, and its clamp, into the gates.

    Convolutions that alone read the product, and made it as they read, have nothing before them then: what
    is done to each step of a product on its way costs more than writing the image once more, by a kernel that
    has just read it.
    """
    rewrites, readers, storage = Rewrites(graph), graph.consumers, dict(graph.storage_dtype)

    def can_fuse(node: Node) -> bool:
        return why_not is None or not why_not(graph, node)

    for gate in graph.nodes:
        if not is_gate(gate.op):
            continue
        x, (factors,) = gate.inputs[0], gate.outputs
        reader = only_user(graph, factors)
        if reader is None:
            continue
        if type(reader.op) is Mul and sorted(reader.inputs) == sorted((x, factors)):
            clamp = only_user(graph, reader.outputs[0])
            if clamp is not None and type(clamp.op) not in (Relu, Clip):
                clamp = None
            gone = [reader] if clamp is None else [reader, clamp]
            (scaled,) = gone[-1].outputs
            made = _scaled(gate, scaled, {"clamp": clamp.op} if clamp else {})
            made = replace(made, covers=covering(gate, *gone))
            if storage.get(scaled) == storage.get(x) and can_fuse(made):
                rewrites.replace([gate, *gone], [made], "it multiplies the images itself")
            continue
        if type(reader.op) is not Reshape or reader.outputs[0] in graph.outputs:
            continue
        users = readers[reader.outputs[0]]
        made = _scaled(gate, rewrites.fresh(f"{gate.name}.scaled"))
        if any(_factors_of(node, x) != reader.outputs[0] for node in users) or not can_fuse(made):
            continue
        (scaled,) = made.outputs
        if x in storage:
            storage[scaled] = storage[x]
        bare = [replace(n, inputs=(scaled, *n.inputs[1:4], None, *n.inputs[5:])) for n in users]
        rewrites.replace([gate, reader, *users], [made, *bare], "it multiplies the images itself")
    after = rewrites.apply()
    return after if after.storage_dtype == storage else replace(after, storage_dtype=storage)


def _scaled(gate: Node, output: str, after: Mapping[str, Operator] | None = None) -> Node:
    """Returns a gate that multiplies the images, and what is done to the product."""
    x, (factors,) = gate.op.inputs[0], gate.op.outputs
    parts, last = [Part("scale", Mul(), (x, factors), ("scale",))], "scale"
    for role, op in (after or {}).items():
        parts.append(Part(role, op, (last,), (role,)))
        last = role
    op = replace(gate.op, nodes=(*gate.op.nodes, *parts), outputs=(last,))
    return replace(gate, op=op, outputs=(output,))


def _factors_of(node: Node, x: str) -> str | None:
    """Returns what alone is done to ``x`` as a convolution reads it, times factors, and read nowhere else."""
    inputs = (*node.inputs, *[None] * 6)[:6]
    alone = inputs.count(x) == inputs.count(inputs[4]) == 1 and inputs[0] == x
    return inputs[4] if type(node.op) is Conv2dNhwc and alone and node.op.floor is None else None
