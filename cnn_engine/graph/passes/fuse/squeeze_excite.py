"""What makes the factors of squeeze-and-excite blocks, as one operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....operators.binary import Mul
from ....operators.channels_last import Conv2dNhwc
from ....operators.reduce import ReduceMean
from ....operators.shaping import Reshape
from ....operators.squeeze_excite import SqueezeExcite
from ....operators.unary import Clip, Relu
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, covering, only_user

#: Channels come in runs of so many, and there are at most so many of them and of hidden sums.
RUN, MOST = 8, 4096


def fuse_gates(graph: Graph) -> Graph:
    """Makes one node of a mean over an image's places and the two 1x1 convolutions that alone follow it.

    Each of the three is over before its work could fill a GPU: what they cost is their starts.
    """
    rewrites = Rewrites(graph)
    for mean in graph.nodes:
        if not is_mean_of_places(graph, mean):
            continue
        first = only_user(graph, mean.outputs[0])
        second = None if first is None else only_user(graph, first.outputs[0])
        if second is None or not (is_product(graph, first) and is_product(graph, second)):
            continue
        (x,), (y,) = mean.inputs, second.outputs
        channels, hidden = (graph.values[node.outputs[0]].shape[3] for node in (mean, first))
        if graph.values[y].shape[3] != channels or channels % RUN or max(channels, hidden) > MOST:
            continue
        biases = tuple(None if absent(node, 2) else node.inputs[2] for node in (first, second))
        merged = Node(
            mean.name, SqueezeExcite(first.op.activation, second.op.activation),
            (x, first.inputs[1], second.inputs[1], *biases), (y,), covering(mean, first, second),
        )  # fmt: skip
        rewrites.replace([mean, first, second], [merged], "together they are squeeze_excite")
    return rewrites.apply()


def scale_by_gates(graph: Graph, takes: Callable[[Graph, Node], bool]) -> Graph:
    """Has gates multiply images themselves, and clamp what they make, in the place of whoever did so.

    Convolutions that alone read the product, and made it as they read, have nothing before them then: what
    is done to each step of a product on its way costs more than writing the image once more, by a kernel that
    has just read it.

    Args:
        takes: whether a kernel multiplies the images of a gate.
    """
    rewrites, readers, storage_dtype = Rewrites(graph), graph.consumers, dict(graph.storage_dtype)
    for gate in graph.nodes:
        if type(gate.op) is not SqueezeExcite or gate.op.scales:
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
            if storage_dtype.get(scaled) != storage_dtype.get(x) or not takes(graph, gate):
                continue
            op = replace(gate.op, scales=True, clamp=None if clamp is None else clamp.op)
            made = replace(gate, op=op, outputs=(scaled,), covers=covering(gate, *gone))
            rewrites.replace([gate, *gone], [made], "it multiplies the images itself")
            continue
        if type(reader.op) is not Reshape or reader.outputs[0] in graph.outputs:
            continue
        users = readers[reader.outputs[0]]
        if any(_factors_of(node, x) != reader.outputs[0] for node in users) or not takes(
            graph, gate
        ):
            continue
        scaled = rewrites.fresh(f"{gate.name}.scaled")
        made = replace(gate, op=replace(gate.op, scales=True), outputs=(scaled,))
        if x in storage_dtype:
            storage_dtype[scaled] = storage_dtype[x]
        bare = [replace(n, inputs=(scaled, *n.inputs[1:4], None, *n.inputs[5:])) for n in users]
        rewrites.replace([gate, reader, *users], [made, *bare], "it multiplies the images itself")
    return replace(rewrites.apply(), storage_dtype=storage_dtype)


def _factors_of(node: Node, x: str) -> str | None:
    """Returns what alone is done to ``x`` as a convolution reads it, times factors, and read nowhere else."""
    inputs = (*node.inputs, *[None] * 6)[:6]
    alone = inputs.count(x) == inputs.count(inputs[4]) == 1 and inputs[0] == x
    return inputs[4] if type(node.op) is Conv2dNhwc and alone and node.op.floor is None else None


def is_mean_of_places(graph: Graph, node: Node) -> bool:
    """Whether ``node`` takes the mean over the places of images [N, H, W, C], and leaves them one."""
    op, images = node.op, graph.values[node.inputs[0]].shape if node.inputs[0] else ()
    return (
        type(op) is ReduceMean
        and op.keepdims
        and len(images) == 4
        and sorted(axis % 4 for axis in op.axes) == [1, 2]
        and images[1] * images[2] > 0
    )


def is_product(graph: Graph, node: Node, *, may_add: bool = False) -> bool:
    """Whether ``node`` is a product over channels by constants (of images of one place: with any stride).

    Args:
        may_add: whether others may be added to it.
    """
    return (
        is_convolution(graph, node, may_add=may_add)
        and not any(node.op.padding)
        and graph.values[node.inputs[1]].shape[2:] == (1, 1)
    )


def is_convolution(
    graph: Graph, node: Node, *, planar: bool | None = False, may_add: bool = False
) -> bool:
    """Whether ``node`` convolves by constants, all channels together, and does nothing before or beside it.

    Args:
        planar: of images [N, C, H, W], not [N, H, W, C]; None: of either.
        may_add: whether others may be added to it.
    """
    op = node.op
    return (
        type(op) is Conv2dNhwc
        and planar in (None, op.planar)
        and op.groups == 1
        and op.floor is None
        and node.inputs[1] in graph.constants
        and (absent(node, 2) or node.inputs[2] in graph.constants)
        and all(absent(node, place) for place in ((4, 5) if may_add else (3, 4, 5)))
    )
