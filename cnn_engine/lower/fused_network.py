"""A chain of layers as one node, for the kernels that run it in one call: a network, or its first layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..errors import UnsupportedError
from ..graph.graph import Graph, Node, Value
from ..graph.network import Network
from ..kernels import fused_network
from ..operators import Operator
from ..operators.shaping import Reshape
from ..operators.windows import LARGEST


@dataclass(frozen=True)
class FusedNetwork(Operator):
    """Inputs: images, then the constants of the nodes; output: that of the last node.

    Attributes:
        nodes: one after the other, each reading what the one before it makes; from pixels, without the
            node that normalises them.
        inputs: the names of this node's inputs.
        shape: of one image.
        scale, offset: a pixel is read as ``pixel * scale + offset``.
        dtype: what it computes in.
    """

    kind: ClassVar[str] = "fused"
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    scale: float
    offset: float
    dtype: str

    def _walk(
        self, inputs: Sequence[Value | None]
    ) -> tuple[dict[str, Value], list[tuple[str, str, int]]]:
        values = dict(zip(self.inputs, inputs, strict=True))
        first = values[self.inputs[0]]
        values[self.nodes[0].inputs[0]] = Value("", first.shape, "float32")
        layers = []
        for node in self.nodes:
            given = [values[name] for name in node.inputs]
            ((shape, dtype),) = node.op.infer(given)
            values[node.outputs[0]] = made = Value("", shape, dtype)
            if node.op.kind != "reshape":  # the kernels know of no such layer
                layers.append((node.name, node.op.kind, node.op.cost(given, [made]).flops))
        return values, layers

    def infer(self, inputs):
        last = self._walk(inputs)[0][self.nodes[-1].outputs[0]]
        return ((last.shape, last.dtype),)

    def flops(self, inputs, outputs) -> int:
        return sum(flops for _, _, flops in self.layers(inputs))

    def layers(self, inputs: Sequence[Value | None]) -> list[tuple[str, str, int]]:
        """Returns the name, the operator and the FLOPs of every layer."""
        return self._walk(inputs)[1]

    def reference(self, *arrays):
        values = dict(zip(self.inputs, arrays, strict=True))
        images = values[self.inputs[0]]
        if images.dtype == np.uint8:
            images = images * np.float64(self.scale) + self.offset
        values[self.nodes[0].inputs[0]] = images
        for node in self.nodes:
            values[node.outputs[0]] = node.op.reference(*(values[name] for name in node.inputs))
        return values[self.nodes[-1].outputs[0]]

    def layered(self, constants: Mapping[str, np.ndarray]) -> Graph:
        """Returns the layers as a graph of one image, float32."""
        images = self.nodes[0].inputs[0]
        nodes = [
            replace(node, op=Reshape((1, -1))) if node.op.kind == "reshape" else node
            for node in self.nodes
        ]
        return Graph(
            "layers", (Value(images, (1, *self.shape), "float32"),), self.nodes[-1].outputs,
            tuple(nodes), {name: constants[name] for name in self.inputs[1:]},
        )  # fmt: skip

    def description(self, constants: Mapping[str, np.ndarray]) -> tuple:
        """Returns the arguments that both devices' ``FusedNetwork`` take before the data type.

        They hold the addresses of ``constants``, which must live until the constructor has copied them.
        """
        rows = []
        for node in self.nodes:
            if node.op.kind == "reshape":
                continue  # of images to rows: the same memory
            op = node.op
            outputs, kernel, stride, padding, addresses = 0, (0, 0), (1, 1), (0, 0), [0, 0]
            if len(node.inputs) > 1:
                weights = [constants[name] for name in node.inputs[1:]]
                outputs, kernel = weights[0].shape[0], weights[0].shape[2:] or kernel
                found = [array.__array_interface__["data"][0] for array in weights]
                addresses = [*found, 0][:2]
            kernel, stride = getattr(op, "kernel", kernel), getattr(op, "stride", stride)
            padding = getattr(op, "padding", padding)[:2]
            rows.append((op.kind, outputs, *kernel, *stride, *padding, *addresses))
        return self.shape, self.scale, self.offset, rows


#: What the compiled chains are made of, each with nothing after its sum.
_LAYERS = ("conv2d", "max_pool2d", "linear", "relu", "tanh", "softmax")


#: Multiply-adds that moving one value of an image from channels last to [C, H, W] costs a CPU, and one of
#: an image of more than ``_CACHED`` values, which has left the caches by then. Measured in float32 on one
#: thread, with AVX-512: chains of less work a value take 1.0 to 2.0 times as long as their layers do.
_MOVED, _MOVED_FROM_MEMORY, _CACHED = 64, 256, 1 << 20
#: Channels from which a convolution by itself is faster, measured likewise: 64 take 1.1 times as long in a
#: chain, 256 twice, for each image reads all weights again.
_MANY_CHANNELS = 64


def chain(
    graph: Graph, dtype: str, count: int | None = None, scale: float = 1.0, offset: float = 0.0
) -> Node:
    """Returns the first nodes of ``graph`` as one.

    Args:
        count: how many, without one that normalises pixels; None: as many as are a chain of layers.
        scale, offset: of pixels, where the graph itself does not normalise them.

    Raises:
        UnsupportedError: they are no chain of layers that any kernel has; says which node is not.
    """
    nodes, (scale, offset), reason = _fused_nodes(graph, scale, offset)
    if not nodes or (count is not None and count > len(nodes)):
        raise UnsupportedError(reason)
    # Rows of images, whatever their number: one compiled network is for every batch.
    nodes = [
        replace(node, op=Reshape((0, -1))) if node.op.kind == "reshape" else node
        for node in nodes[:count]
    ]
    images = graph.inputs[0]
    inputs = (images.name, *dict.fromkeys(name for node in nodes for name in node.inputs[1:]))
    op = FusedNetwork(tuple(nodes), inputs, images.shape[1:], scale, offset, dtype)
    covers = tuple(node.name for node in graph.nodes[: graph.positions[nodes[-1].name] + 1])
    name = f"{nodes[0].name} to {nodes[-1].name}"
    if len(covers) == len(graph.nodes):
        name = "network"
    return Node(name, op, inputs, nodes[-1].outputs, covers)


def _fused_nodes(
    graph: Graph, scale: float, offset: float
) -> tuple[list[Node], tuple[float, float], str]:
    """Returns the first nodes that are a chain, how it reads pixels, and why the next is no part of it."""
    found: list[Node] = []
    if len(graph.inputs) != 1 or len(graph.inputs[0].shape) != 4:
        return found, (scale, offset), "expected a chain of layers from one input of images"
    images = value = graph.inputs[0].name
    for node in graph.nodes:
        if node.op.kind == "normalize" and node.inputs == (images,) and not found:
            if len(node.op.scale) > 1 or len(node.op.offset) > 1:
                return found, (scale, offset), "expected one scale and offset for all channels"
            (scale,), (offset,) = node.op.scale, node.op.offset
        elif reason := _why_not_next(node, graph, value):
            return found, (scale, offset), f"node {node.name} ({node.op.kind}): {reason}"
        else:
            found.append(node)
        (value,) = node.outputs
    return found, (scale, offset), "expected more layers"


def _why_not_next(node: Node, graph: Graph, value: str) -> str | None:
    """Returns why ``node`` is no layer that follows on ``value``, or None."""
    if graph.values[value].dtype != "float32":
        return f"expected layers of float32, found {graph.values[value].dtype}"
    if value in graph.outputs or len(graph.consumers[value]) > 1:
        return "expected a chain of layers, each reading the one before it"
    if _to_rows(node, graph, value):
        return None
    if node.op.kind not in _LAYERS:
        return f"expected one of {', '.join(_LAYERS)}"
    if node.inputs[0] != value or any(n not in graph.constants for n in node.inputs[1:]):
        return "expected a chain of layers, each reading the one before it"
    if not _plain(node, graph):
        return "expected one group, no dilation, the same padding on both sides, rows in softmax"
    return None


def longest(graph: Graph, dtype: str, device: Any) -> int:
    """Returns how many nodes, from the first on, a kernel of ``device`` runs in one call; the most it can.

    What is left to kernels of their own are layers of rows: no convolution or pooling. Where nothing is
    multiplied with weights, all are: a chain has nothing to gain by keeping it in caches.

    Raises:
        UnsupportedError: there is none; says why.
    """
    nodes, _, reason = _fused_nodes(graph, 1.0, 0.0)
    rows = _first_of_rows(graph)
    count = len(nodes)
    if not any(node.op.kind in ("conv2d", "linear") for node in nodes):
        raise UnsupportedError(reason)
    while count and graph.positions[nodes[count - 1].name] + 1 >= rows:
        node = chain(graph, dtype, count)
        refused = why_not(node, graph.constants, device)
        if refused is None:
            return count
        reason = refused if count == len(nodes) else reason
        count -= 1
    raise UnsupportedError(reason)


def why_slower(graph: Graph, count: int, device: Any) -> str | None:
    """Returns why ``device`` runs the first ``count`` layers faster by kernels of their own, or None.

    On a CPU, a chain is for convolutions of few channels. Its activations are channels last: images that it
    hands on are moved once more, which single kernels save where they compute [C, H, W] as it is.
    """
    if device.kind != "cpu":
        return None
    nodes = _fused_nodes(graph, 1.0, 0.0)[0][:count]
    batch, *made = graph.values[nodes[-1].outputs[0]].shape
    flops = {node.name: graph.cost_of(node).flops for node in nodes}
    wide = sum(
        flops[node.name]
        for node in nodes
        if node.op.kind == "conv2d" and graph.values[node.inputs[0]].shape[1] >= _MANY_CHANNELS
    )
    if 2 * wide > sum(flops.values()):
        return f"most of its work is convolutions of {_MANY_CHANNELS} channels or more"
    if math.prod(made[1:]) == 1:
        return None
    values, multiply_adds = math.prod(made), sum(flops.values()) / (2 * batch)
    moved = _MOVED if values <= _CACHED else _MOVED_FROM_MEMORY
    if multiply_adds >= moved * values:
        return None
    return (
        f"its layers do {multiply_adds / values:.0f} multiply-adds for each value that they hand on, "
        f"and a kernel of all takes less time from {moved}"
    )


def _first_of_rows(graph: Graph) -> int:
    """Returns the place of the first node from which on every one makes rows of numbers of rows.

    What makes rows of images by itself, as a mean over positions does, is none of them: networks that end so
    are up to 1.2 times as fast with kernels of their own for all nodes, on the CPU.
    """
    place = len(graph.nodes)
    for node in reversed(graph.nodes):
        if any(len(graph.values[name].shape) > 2 for name in node.outputs):
            break
        images = any(
            len(graph.values[name].shape) > 2 for name in node.inputs if name in graph.producers
        )
        if images and node.op.kind not in ("linear", "reshape"):
            break
        place -= 1
    return place


def _to_rows(node: Node, graph: Graph, value: str) -> bool:
    """Whether ``node`` makes rows of the images ``value``."""
    shape = graph.values[value].shape
    rows = (shape[0], math.prod(shape[1:]))
    made = graph.values[node.outputs[0]].shape
    return node.op.kind == "reshape" and node.inputs == (value,) and made == rows


def _plain(node: Node, graph: Graph) -> bool:
    op = node.op
    padding = getattr(op, "padding", (0, 0, 0, 0))
    shape = graph.values[node.inputs[0]].shape
    return (
        getattr(op, "groups", 1) == 1
        and getattr(op, "dilation", (1, 1)) == (1, 1)
        and padding[:2] == padding[2:]
        and max(shape, default=0) <= LARGEST
        and getattr(op, "activation", None) is None
        and getattr(op, "indices", None) is None
        and len(node.inputs) <= 3
        and (op.kind != "softmax" or (op.axis in (-1, 1) and len(shape) == 2))
    )


def why_not(node: Node, constants: Mapping[str, np.ndarray], device: Any) -> str | None:
    """Returns why ``device`` cannot run a chain in one call, or None if it can."""
    try:
        return fused_network.why_not(node.op.description(constants), node.op.dtype, device)
    except ValueError as error:
        return str(error)


def description(network: Network, weights: Mapping[str, np.ndarray]) -> tuple:
    """Returns :meth:`FusedNetwork.description` of a whole network."""
    graph = network.graph(1, True, weights)
    return chain(graph, "float32").op.description(graph.constants)
