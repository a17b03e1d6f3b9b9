"""Functions of one 8-bit number: whatever computes them, a table of 256 results does the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ....operators.binary import Binary
from ....operators.copy import Copy
from ....operators.quantized import EIGHT_BITS, DequantizeLinear, Lookup
from ....operators.quantized_conv2d import INNER_SCALE, TABLE, QuantizedConv2d, padded_inputs
from ....operators.unary import Unary
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, constant, covering, only_user
from .tensors import dequantized, quantizes

#: Nodes that are followed on the way from a result to what it is a function of.
MOST_NODES = 64


def tabulate(graph: Graph) -> Graph:
    """Makes a table of the nodes between one 8-bit tensor and a tensor that is quantized to 8 bits."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        found = quantizes(graph, node)
        if found is None or not found.is_8_bit or not rewrites.free(node):
            continue
        source = dequantized(graph, node.inputs[0])
        if source is not None and source.axis is None and source.same_as(found):
            same = Node(node.name, Copy(), (source.integers.name,), node.outputs, node.covers)
            rewrites.replace([node], [same], "its integers are there already")
            continue
        cone = _cone(graph, node)
        if cone is not None:
            name, nodes = cone
            made = rewrites.fresh(f"{node.name}/table")
            covers = covering(*private(graph, nodes))
            lookup = Node(node.name, Lookup(), (name, made), node.outputs, covers)
            table = _table(graph, name, nodes)
            rewrites.replace([node], [lookup], "a function of one 8-bit number", {made: table})
    return rewrites.apply()


def fuse_tables(graph: Graph) -> Graph:
    """Has convolutions look their outputs up, where nothing else reads these."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        table = constant(graph, node, 1) if isinstance(node.op, Lookup) else None
        if table is None or table.dtype.name not in EIGHT_BITS:
            continue
        conv = graph.producers.get(node.inputs[0])
        if conv is None or type(conv.op) is not QuantizedConv2d or not absent(conv, TABLE):
            continue
        if only_user(graph, conv.outputs[0]) is node and rewrites.free(conv, node):
            inputs = (
                *padded_inputs(conv.inputs, TABLE)[:TABLE], node.inputs[1], *conv.inputs[INNER_SCALE:]
            )  # fmt: skip
            covers = covering(conv, node)
            fused = replace(conv, inputs=inputs, outputs=node.outputs, covers=covers)
            rewrites.replace([conv, node], [fused], "its outputs are looked up as they are stored")
    return rewrites.apply()


def private(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Returns those of ``nodes``, in order and the last among them, that nothing outside reads."""
    kept = {nodes[-1].name}
    for node in reversed(nodes[:-1]):
        users = [user.name for name in node.outputs for user in graph.consumers[name]]
        if users and kept.issuperset(users) and not set(node.outputs) & set(graph.outputs):
            kept.add(node.name)
    return [node for node in nodes if node.name in kept]


def _cone(graph: Graph, last: Node) -> tuple[str, list[Node]] | None:
    """Returns the one 8-bit tensor that ``last`` makes a function of, and the nodes of that, in order."""
    shape = graph.values[last.outputs[0]].shape
    inside, waiting = {last.name: last}, [last.inputs[0]]
    sources: list[list[str]] = []  # each with the tensors that it is a table of, the nearest first
    while waiting and len(inside) <= MOST_NODES:
        name = waiting.pop()
        if name in graph.constants and graph.values[name].size == 1:
            continue
        maker = graph.producers.get(name)
        if maker is None or graph.values[name].shape != shape:
            return None
        if maker.name in inside:
            continue
        inside[maker.name] = maker
        if isinstance(maker.op, DequantizeLinear):
            found = dequantized(graph, name)
            if found is None or found.axis is not None:
                return None
            sources.append(_ancestors(graph, found.integers.name))
        elif isinstance(maker.op, Unary | Binary):
            waiting += maker.inputs
        else:
            return None
    common = [name for name in sources[0] if all(name in names for names in sources)]
    if waiting or not common or graph.values[common[0]].dtype not in EIGHT_BITS:
        return None
    for names in sources:
        for name in names[: names.index(common[0])]:
            inside[graph.producers[name].name] = graph.producers[name]
    return common[0], sorted(inside.values(), key=lambda node: graph.positions[node.name])


def _ancestors(graph: Graph, name: str) -> list[str]:
    """Returns ``name`` and, one before the other, the tensors of which it is a table."""
    found = [name]
    while (maker := graph.producers.get(found[-1])) is not None and isinstance(maker.op, Lookup):
        found.append(maker.inputs[0])
    return found


def _table(graph: Graph, source: str, nodes: Sequence[Node]) -> np.ndarray:
    """Returns what ``nodes`` make of every number of ``source``, by its bits; floats are float32 between."""
    dtype = np.dtype(graph.values[source].dtype)
    values = {**graph.constants, source: np.arange(256, dtype=np.uint8).view(dtype)}
    for node in nodes:
        arrays = (None if name is None else values[name] for name in node.inputs)
        with np.errstate(all="ignore"):
            made = np.asarray(node.op.reference(*arrays))
        name = node.outputs[0]
        values[name] = made.astype(graph.values[name].dtype).reshape(256)
    return values[nodes[-1].outputs[0]]
