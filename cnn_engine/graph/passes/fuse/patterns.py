"""Patterns of blocks that kernels run as one node, for :func:`.regions.fuse_regions`.

Images are [N, H, W, C]. The order of a pattern's inputs is that of its kernels' rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ....operators.binary import Add, Mul
from ....operators.channels_last import Conv2dNhwc, MaxPool2dNhwc
from ....operators.linear import Linear
from ....operators.norm import BatchNorm, LayerNorm
from ....operators.operator import axis_in
from ....operators.reduce import ReduceMean
from ....operators.shaping import Concat, Reshape
from ....operators.softmax import Softmax
from ....operators.unary import Relu
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, constant, covering, folded_affine, only_user
from .regions import Finder, Match, Pattern, Role, region_of

# ---- what nodes are ----


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


def is_product(graph: Graph, node: Node, *, may_add: bool = False) -> bool:
    """Whether ``node`` is a product over channels by constants (of 1x1 images: with any stride).

    Args:
        may_add: whether others may be added to it.
    """
    return (
        is_convolution(graph, node, may_add=may_add)
        and not any(node.op.padding)
        and graph.values[node.inputs[1]].shape[2:] == (1, 1)
    )


def _is_whole_product(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a product over the channels of every place."""
    return is_product(graph, node) and node.op.stride == (1, 1)


def _is_last_product(graph: Graph, node: Node) -> bool:
    """The same, to which others may be added."""
    return is_product(graph, node, may_add=True) and node.op.stride == (1, 1)


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether ``node`` convolves by constants each channel by itself, with nothing before or beside it."""
    op = node.op
    if type(op) is not Conv2dNhwc or op.planar:
        return False
    channels, weight = graph.values[node.inputs[0]].shape[3], node.inputs[1]
    return (
        op.groups == channels > 1
        and op.floor is None
        and weight in graph.constants
        and graph.values[weight].shape[:2] == (channels, 1)
        and (absent(node, 2) or node.inputs[2] in graph.constants)
        and all(absent(node, place) for place in (3, 4, 5))
    )


def is_spatial_mean(graph: Graph, node: Node) -> bool:
    """Whether ``node`` takes the mean over the positions of images [N, H, W, C], and leaves them one."""
    return _is_mean(graph, node) and node.op.keepdims


def _is_mean(graph: Graph, node: Node) -> bool:
    if type(node.op) is not ReduceMean or node.inputs[0] is None:
        return False
    images = graph.values[node.inputs[0]].shape
    axes = sorted(axis % 4 for axis in node.op.axes)
    return len(images) == 4 and axes == [1, 2] and images[1] * images[2] > 0


# ---- convolutions and their max pools ----

#: A quarter of what the convolution makes is then written, in most networks, and none of it read.
CONV2D_POOL = Pattern(
    "conv2d_pool",
    (
        Role("pool", lambda graph, node: type(node.op) is MaxPool2dNhwc),
        Role(
            "convolution",
            lambda graph, node: is_convolution(graph, node, planar=None),
            makes=("pool", 0),
        ),
    ),
    inputs=("convolution.0", "convolution.1", "convolution.2"),
    outputs=("pool",),
    named="pool",
)


# ---- convolutions of each channel, and what is around them ----


def _is_bare_depthwise(graph: Graph, node: Node) -> bool:
    return is_depthwise(graph, node) and node.op.activation is None


def _is_pixelwise_norm(graph: Graph, node: Node) -> bool:
    """Whether ``node`` normalises each place of an image over its channels."""
    if type(node.op) is not LayerNorm or len(node.outputs) > 1:
        return False
    x, *parameters = graph.inputs_of(node)
    return node.op.axis in (-1, len(x.shape) - 1) and all(
        one is None or one.shape == x.shape[-1:] for one in parameters
    )


#: As the blocks of ConvNeXt (Liu et al., 2022) begin.
DEPTHWISE_NORM = Pattern(
    "depthwise_norm",
    (
        Role("convolution", _is_bare_depthwise),
        Role("norm", _is_pixelwise_norm, reads=("convolution", 0)),
    ),
    inputs=("convolution.0", "convolution.1", "norm.1", "convolution.2", "norm.2"),
    outputs=("norm",),
    named="norm",
)


def _adds_what_it_reads(graph: Graph, nodes: Mapping[str, Node]) -> bool:
    first, third = nodes.get("first", nodes["second"]), nodes["third"]
    return absent(third, 3) or third.inputs[3] == first.inputs[0]


#: An inverted residual block without a gate: more channels of each place (or not), each channel by itself,
#: fewer channels, and perhaps what the block reads.
INVERTED_RESIDUAL = Pattern(
    "inverted_residual",
    (
        Role("second", is_depthwise),
        Role("third", _is_last_product, reads=("second", 0)),
        Role("first", _is_whole_product, makes=("second", 0), optional=True),
    ),
    inputs=(
        "first.0|second.0", "first.1", "second.1", "third.1", "first.2", "second.2", "third.2",
    ),
    outputs=("third",),
    named="third",
    fits=_adds_what_it_reads,
)  # fmt: skip

_EXPANSION = (
    Role("first", _is_whole_product),
    Role("second", is_depthwise, reads=("first", 0), shared=True),
)

#: The first two convolutions of an inverted residual block: what is between them, six times as much as what
#: is read in most networks, stays in a core's caches.
EXPAND_DEPTHWISE = Pattern(
    "expand_depthwise",
    _EXPANSION,
    inputs=("first.0", "first.1", "second.1", "first.2", "second.2"),
    outputs=("second", "mean"),
    named="second",
)

#: Taps of a window up to which the CPU's kernel is faster than two: of more, products are nearly all of the
#: time, and are made sooner of rows with a border (csrc/cpu/conv2d_nhwc_depthwise.h).
MOST_EXPANDED_TAPS = 49


def _has_few_taps(graph: Graph, nodes: Mapping[str, Node]) -> bool:
    return math.prod(graph.values[nodes["second"].inputs[1]].shape[2:]) <= MOST_EXPANDED_TAPS


#: The same with a mean over the positions of the result, which the CPU's kernel makes on its way.
EXPAND_DEPTHWISE_MEAN = replace(
    EXPAND_DEPTHWISE,
    fits=_has_few_taps,
    roles=(*_EXPANSION, Role("mean", is_spatial_mean, reads=("second", 0), optional=True)),
)


# ---- bottlenecks, and products with gelu between them ----


def _begins_with_a_window(graph: Graph, nodes: Mapping[str, Node]) -> bool:
    return not is_product(graph, nodes["first"])


#: A residual block's convolution of a window, or of 1x1 as in ConvNeXt, and the one of 1x1 behind it.
BOTTLENECK = Pattern(
    "bottleneck",
    (
        Role("first", is_convolution),
        Role("second", _is_last_product, reads=("first", 0), shared=True),
    ),
    inputs=(
        "first.0", "first.1", "second.1", "first.2", "second.2", "second.3", "third.1", "third.2",
    ),
    outputs=("second", "third"),
    named="second",
)  # fmt: skip

#: The same with the convolution of 1x1 that the next block begins with.
BOTTLENECK_AND_NEXT = replace(
    BOTTLENECK,
    roles=(*BOTTLENECK.roles, Role("third", _is_whole_product, reads=("second", 0))),
    fits=_begins_with_a_window,
)


# ---- dense blocks ----


def _keeps_size(graph: Graph, node: Node) -> bool:
    """Whether ``node`` convolves windows, one place apart."""
    return (
        is_convolution(graph, node)
        and node.op.stride == node.op.dilation == (1, 1)
        and graph.values[node.inputs[0]].shape[:3] == graph.values[node.outputs[0]].shape[:3]
    )


def _appends(graph: Graph, node: Node) -> bool:
    """Whether ``node`` puts channels behind others."""
    if not isinstance(node.op, Concat) or len(node.inputs) != 2:
        return False
    rank = len(graph.values[node.inputs[1]].shape)
    return axis_in(node.op.axis, rank) == rank - 1


def _is_normalised_product(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a product over channels with a batch norm before it, all by constants."""
    op = node.op
    return (
        type(op) is Conv2dNhwc
        and not op.planar
        and op.groups == 1
        and op.stride == (1, 1)
        and not any(op.padding)
        and graph.values[node.inputs[1]].shape[2:] == (1, 1)
        and absent(node, 3)
        and not absent(node, 4)
        and not absent(node, 5)
        and all(name is None or name in graph.constants for name in node.inputs[1:])
        and len(graph.values[node.inputs[4]].shape) == 1
    )


#: The last convolution of a dense block's layer, and the next layer's of 1x1, which reads its channels behind
#: those of the block so far (Huang et al., Densely Connected Convolutional Networks, 2017).
DENSE_LAYER = Pattern(
    "dense_layer",
    (
        Role("first", _keeps_size),
        Role("join", _appends, reads=("first", 1), shared=True, stays=True),
        Role("second", _is_normalised_product, reads=("join", 0)),
    ),
    inputs=(
        "join.0", "second.1", "first.1", "first.0", "second.4", "second.5", "first.2", "second.2",
    ),
    outputs=("first", "second"),
    named="second",
)  # fmt: skip


# ---- squeeze-and-excite blocks ----

#: Channels come in runs of so many, and there are at most so many of them and of hidden sums.
RUN, MOST = 8, 4096


def _is_gate(graph: Graph, nodes: Mapping[str, Node]) -> bool:
    channels, hidden, made = (graph.values[node.outputs[0]].shape[3] for node in nodes.values())
    return made == channels and not channels % RUN and max(channels, hidden) <= MOST


#: The factors of a squeeze-and-excite block: a mean over positions and two products. Each is over before its
#: work could fill a GPU: what they cost is their starts. ``total.0``: see ``squeeze_excite.py``.
SQUEEZE_EXCITE = Pattern(
    "squeeze_excite",
    (
        Role("mean", is_spatial_mean),
        Role("first", is_product, reads=("mean", 0)),
        Role("second", is_product, reads=("first", 0)),
    ),
    inputs=("mean.0", "first.1", "second.1", "first.2", "second.2", "total.0"),
    outputs=("second",),
    named="mean",
    fits=_is_gate,
)


# ---- pairs of convolutions ----

#: The inputs of two convolutions as one.
PAIR = ("first.0", "second.0", "first.1", "second.1", "first.2", "second.2")


def is_bare(graph: Graph, node: Node | None) -> bool:
    """Whether a node convolves by constants, without groups, and does nothing to the images that it reads."""
    return node is not None and is_convolution(graph, node, may_add=True)


class _Sum:
    """A convolution and the one that its result alone is added to, whose sums become one.

    What the first makes is neither written nor read. Input 0 is what was made earlier of what they read.
    """

    name = "conv2d_sum"

    def match(self, rewrites: Rewrites, anchor: Node) -> Match | None:
        graph, last = rewrites.graph, anchor
        added = None if absent(last, 3) else graph.producers.get(last.inputs[3])
        if not (is_bare(graph, added) and is_bare(graph, last)) or not absent(added, 3):
            return None
        if added.op.activation is not None or added.op.compute_dtype != last.op.compute_dtype:
            return None
        alone = only_user(graph, added.outputs[0]) is last and last.inputs[0] != added.outputs[0]
        if not alone or not rewrites.free(added):
            return None
        both = sorted((added, last), key=lambda node: _made_at(graph, node.inputs[0]))
        names = {node.name: name for node, name in zip(both, ("first", "second"), strict=True)}
        nodes = {names[node.name]: node for node in (added, last)}
        ends = names[last.name]
        region = region_of(self.name, nodes, PAIR, (ends,))
        return Match(replace(region, covers=covering(*both)), (last, added))


def _made_at(graph: Graph, name: str) -> int:
    maker = graph.producers.get(name)
    return -1 if maker is None else graph.positions[maker.name]


CONV2D_SUM: Finder = _Sum()


# ---- linear layers ----

#: Layers that one kernel has room for in its parameters.
MOST_LAYERS = 4


class _LinearLayers:
    """Linear layers that alone read each other, and softmax behind them.

    Of few rows each is over before its work could fill a GPU: what they cost is their starts.
    """

    name = "linear_layers"

    def match(self, rewrites: Rewrites, anchor: Node) -> Match | None:
        graph = rewrites.graph
        if not _is_layer(graph, anchor):
            return None
        nodes, after = {"layer0": anchor}, only_user(graph, anchor.outputs[0])
        while after is not None and len(nodes) < MOST_LAYERS and _is_layer(graph, after):
            nodes[f"layer{len(nodes)}"] = after
            after = only_user(graph, after.outputs[0])
        layers = tuple(nodes)
        if after is not None and type(after.op) is Softmax and after.op.axis in (-1, 1):
            nodes["softmax"] = after
        if len(nodes) < 2 or not rewrites.free(*nodes.values()):
            return None
        parameters = (f"{layer}.{place}" for layer in layers for place in (1, 2))
        region = region_of(self.name, nodes, ("layer0.0", *parameters), tuple(nodes)[-1:])
        gone = list(nodes.values())
        return Match(replace(region, name=anchor.name, covers=covering(*gone)), gone)


def _is_layer(graph: Graph, node: Node) -> bool:
    return type(node.op) is Linear and all(
        name is None or name in graph.constants for name in node.inputs[1:]
    )


LINEAR_LAYERS: Finder = _LinearLayers()


class _MeanLinear:
    """A mean over positions and the linear layer that alone reads it: what most networks end in.

    The batch norm and the relu before the mean, which alone reads them, are done to what is averaged: the
    norm as a product and a sum by constants. Reshapes to rows go: a linear layer reads images as rows.
    """

    name = "mean_linear"
    inputs = ("scale.0|relu.0|mean.0", "linear.1", "linear.2", "scale.1", "shift.1")

    def match(self, rewrites: Rewrites, anchor: Node) -> Match | None:
        graph, mean = rewrites.graph, anchor
        linear = _linear_of(graph, mean) if _is_mean(graph, mean) else None
        if linear is None:
            return None
        flat, layer = linear
        gone, before, constants = [mean, *flat, layer], {}, {}
        if (relu := _maker(graph, mean.inputs[0], Relu)) is not None:
            before["relu"], gone = relu, [relu, *gone]
        norm = _maker(graph, gone[0].inputs[0], BatchNorm)
        given = [] if norm is None else [constant(graph, norm, place) for place in range(1, 5)]
        known = norm is not None and norm.op.axis == -1 and all(one is not None for one in given)
        affine = folded_affine(norm, given) if known else None
        if not rewrites.free(*gone, *((norm,) if affine else ())):
            return None
        if affine is not None:
            gone = [norm, *gone]
            scaled, scale, shift = (
                rewrites.fresh(f"{mean.name}.{word}") for word in ("scaled", "scale", "shift")
            )
            constants = dict(zip((scale, shift), affine, strict=True))
            before = {
                "scale": Node(scaled, Mul(), (norm.inputs[0], scale), (scaled,)),
                "shift": Node(shift, Add(), (scaled, shift), norm.outputs),
                **before,
            }
        layer = replace(layer, inputs=(mean.outputs[0], *layer.inputs[1:]))
        nodes = {**before, "mean": mean, "linear": layer}
        region = region_of(self.name, nodes, self.inputs, ("linear",))
        return Match(replace(region, covers=covering(*gone)), [gone[-1], *gone[:-1]], constants)


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


MEAN_LINEAR: Finder = _MeanLinear()
