"""Layers of integers that are scaled by computed numbers after them: the layer itself makes the floats.

Converters write a layer whose input is quantized while the graph runs as ConvInteger or MatMulInteger,
perhaps an addition of int32, a cast to float32, and a product with the scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ....operators.binary import Add, Mul
from ....operators.cast import Cast
from ....operators.quantized_conv2d import QuantizedConv2d, padded_inputs
from ....operators.quantized_linear import QuantizedLinear, QuantizedMatmul
from ....operators.shaping import Reshape
from ...graph import Graph, Node
from ..rewriting import Rewrites, covering, only_user

#: Inputs of convolutions and linear layers.
SCALE, BIAS = 2, 3


@dataclass
class _Ending:
    """What follows an int32 sum.

    Attributes:
        nodes: in order.
        bias: int32 that is added, or None.
        scale: float32 by which all is multiplied.
    """

    nodes: list[Node] = field(default_factory=list)
    bias: str | None = None
    scale: str | None = None


def fuse_computed_scales(graph: Graph) -> Graph:
    """Has layers of integers add a bias and multiply by a scale, both computed: the same floats."""
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        if type(node.op) not in (QuantizedConv2d, QuantizedLinear, QuantizedMatmul):
            continue
        if node.op.dtype != "int32" or not rewrites.free(node):
            continue
        end = _ending(graph, node)
        if end is not None and rewrites.free(*end.nodes):
            _fuse(rewrites, node, end)
    return rewrites.apply()


def _ending(graph: Graph, node: Node) -> _Ending | None:
    """Returns what follows the sum of ``node`` up to its product with a scale, or None."""
    end, name = _Ending(), node.outputs[0]
    channels = None if type(node.op) is QuantizedMatmul else graph.values[node.inputs[1]].shape[0]
    user = only_user(graph, name)
    biased = padded_inputs(node.inputs, BIAS + 1)[BIAS] is not None
    if channels is not None and not biased and user is not None and type(user.op) is Add:
        end.bias = _other(user, name)
        if not _is_of_channels(graph, node, end.bias, channels):
            return None
        end.nodes, name = [user], user.outputs[0]
        user = only_user(graph, name)
    if user is None or type(user.op) is not Cast or user.op.dtype != "float32":
        return None
    end.nodes, name = [*end.nodes, user], user.outputs[0]
    user = only_user(graph, name)
    if user is None or type(user.op) is not Mul:
        return None
    end.scale = _other(user, name)
    value = graph.values[end.scale]
    one = value.size == 1 and len(value.shape) <= len(graph.values[name].shape)
    of_channels = channels is not None and _is_of_channels(graph, node, end.scale, channels)
    if value.dtype != "float32" or not (one or of_channels):
        return None
    end.nodes = [*end.nodes, user]
    return end


def _other(node: Node, name: str) -> str:
    return node.inputs[1] if node.inputs[0] == name else node.inputs[0]


def _is_of_channels(graph: Graph, node: Node, name: str, channels: int) -> bool:
    """Whether a tensor has one number for each of a layer's channels, along the dimension that they are."""
    shape, rank = graph.values[name].shape, len(graph.values[node.outputs[0]].shape)
    after = rank - 2 if type(node.op) is QuantizedConv2d else 0  # dimensions after the channels
    place = len(shape) - 1 - after
    return (
        len(shape) <= rank
        and place >= 0
        and shape[place] == channels
        and math.prod(shape) == channels
    )


def _fuse(rewrites: Rewrites, node: Node, end: _Ending) -> None:
    graph, before = rewrites.graph, []

    def flat(name: str | None, part: str) -> str | None:
        """Returns the name of a parameter without other dimensions than that of the channels."""
        if name is None or len(graph.values[name].shape) < 2:
            return name
        made = rewrites.fresh(f"{node.name}/{part}")
        op = Reshape((graph.values[name].size,), allow_zero=True)
        before.append(Node(rewrites.fresh(f"{made}.reshape"), op, (name,), (made,)))
        return made

    places = 6 if type(node.op) is QuantizedMatmul else 7
    inputs = [*padded_inputs(node.inputs, places)]
    inputs[SCALE] = flat(end.scale, "scale")
    if end.bias is not None:
        inputs[BIAS] = flat(end.bias, "bias")
    while inputs[-1] is None:
        inputs.pop()
    layer = replace(
        node, op=replace(node.op, dtype="float32"), inputs=tuple(inputs),
        outputs=end.nodes[-1].outputs, covers=covering(node, *end.nodes),
    )  # fmt: skip
    rewrites.replace(
        [node, *end.nodes], [layer, *before], "its sums become floats as it stores them"
    )
