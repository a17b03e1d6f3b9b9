"""A chain of layers as one node, for the kernels that run it in one call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import UnsupportedError
from ..graph.graph import Graph, Node, Value
from ..graph.network import Network
from ..operators import Operator
from .kernels import functions


@dataclass(frozen=True)
class Chain(Operator):
    """Inputs: images, then the constants of the nodes; output: what the last node makes.

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


def chain(graph: Graph, dtype: str, scale: float = 1.0, offset: float = 0.0) -> Node:
    """Returns ``graph`` as one node.

    Args:
        scale, offset: of pixels, where the graph itself does not normalise them.

    Raises:
        UnsupportedError: it is no chain of layers that any kernel has; says which node is not.
    """
    nodes = list(graph.nodes)
    if len(graph.inputs) != 1 or len(graph.outputs) != 1 or not nodes:
        raise UnsupportedError("expected a chain of layers from one input to one output")
    images = graph.inputs[0]
    value = images.name
    if nodes[0].op.kind == "normalize" and nodes[0].inputs == (value,):
        op = nodes.pop(0).op
        if len(op.scale) > 1 or len(op.offset) > 1:
            raise UnsupportedError("expected one scale and offset for all channels")
        scale, offset = op.scale[0], op.offset[0]
        value = graph.nodes[0].outputs[0]
    if graph.values[value].dtype != "float32":
        raise UnsupportedError(f"expected layers of float32, found {graph.values[value].dtype}")
    for node in nodes:
        reason = None
        if _to_rows(node, graph, value):
            pass
        elif node.op.kind not in _LAYERS:
            reason = f"expected one of {', '.join(_LAYERS)}"
        elif node.inputs[0] != value or any(n not in graph.constants for n in node.inputs[1:]):
            reason = "expected a chain of layers, each reading the one before it"
        elif not _plain(node, graph):
            reason = (
                "expected one group, no dilation, the same padding on both sides, rows in softmax"
            )
        if reason:
            raise UnsupportedError(f"node {node.name} ({node.op.kind}): {reason}")
        value = node.outputs[0]
    if value != graph.outputs[0] or len(images.shape) != 4:
        raise UnsupportedError("expected a chain of layers from images to its last layer")
    constants = [name for node in nodes for name in node.inputs[1:]]
    inputs = (images.name, *dict.fromkeys(constants))
    op = Chain(tuple(nodes), inputs, images.shape[1:], scale, offset, dtype)
    covers = tuple(node.name for node in graph.nodes)
    return Node("network", op, inputs, (value,), covers)


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
        and getattr(op, "activation", None) is None
        and getattr(op, "indices", None) is None
        and len(node.inputs) <= 3
        and (op.kind != "softmax" or (op.axis in (-1, 1) and len(shape) == 2))
    )


def why_not(node: Node, constants: Mapping[str, np.ndarray], device: Any) -> str | None:
    """Returns why ``device`` cannot run a chain in one call, or None if it can."""
    where = (device.index,) if device.kind == "cuda" else ()
    try:
        fused = functions(device).FusedNetwork
        return fused.why_not(*node.op.description(constants), node.op.dtype, *where) or None
    except ValueError as error:
        return str(error)


def description(network: Network, weights: Mapping[str, np.ndarray]) -> tuple:
    """Returns :meth:`Chain.description` of a whole network."""
    graph = network.graph(1, True, weights)
    return chain(graph, "float32").op.description(graph.constants)
