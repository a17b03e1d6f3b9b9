"""Orders of dimensions that weights can take instead of images."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ...operators.channels_last import TO_FIRST
from ...operators.linear import Linear
from ...operators.shaping import Reshape, Transpose
from ..graph import Graph, Node
from .rewriting import Rewrites, constant, covering, only_user


def order_weights(graph: Graph) -> Graph:
    """Has linear layers read images [N, H, W, C] as they lie: their weights' columns take that order.

    Networks like VGG flatten [N, C, H, W], for which a transpose would run in each pass. Weights in another
    order are no longer a mapped file's memory: worth it on a GPU, which has copies anyway.
    """
    rewrites = Rewrites(graph)
    for linear in graph.nodes:
        weight = constant(graph, linear, 1) if type(linear.op) is Linear else None
        before = None if weight is None else _turned_for(graph, linear)
        if before is None or not rewrites.free(linear, *before):
            continue
        n, channels, *places = graph.values[before[0].outputs[0]].shape
        columns = weight.reshape(len(weight), channels, math.prod(places)).transpose(0, 2, 1)
        name, flat = (rewrites.fresh(f"{linear.name}.{word}") for word in ("weight", "rows"))
        x = before[0].inputs[0]
        shaped = replace(
            before[-1],
            op=Reshape((n, weight.shape[1]), allow_zero=True),
            inputs=(x,),
            outputs=(flat,),
        )
        made = replace(
            linear, inputs=(flat, name, *linear.inputs[2:]), covers=covering(*before[:-1], linear)
        )
        rewrites.replace(
            [*before, linear], [made, shaped], "its order is that of the weights",
            {name: np.ascontiguousarray(columns).reshape(weight.shape)},
        )  # fmt: skip
    return rewrites.apply()


def _turned_for(graph: Graph, linear: Node) -> tuple[Node, ...] | None:
    """Returns the transpose from [N, H, W, C] whose rows ``linear`` alone reads, and the reshape between."""
    found: tuple[Node, ...] = ()
    reader = linear
    for kind in (Reshape, Transpose):
        node = graph.producers.get(reader.inputs[0])
        if node is None or only_user(graph, node.outputs[0]) is not reader:
            return None
        if type(node.op) is kind:
            found, reader = (node, *found), node
    if type(reader.op) is not Transpose or reader.op.perm != TO_FIRST:
        return None
    rows = graph.values[linear.inputs[0]].shape
    images = graph.values[reader.outputs[0]].shape
    return found if rows[0] == images[0] else None
