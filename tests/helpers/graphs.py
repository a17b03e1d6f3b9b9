"""Graphs that tests are made of: random ones, and those in the shapes that networks have."""

from __future__ import annotations

import numpy as np

from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.binary import Add, Max, Sub
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.mathematics import Neg
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.shaping import Concat, DepthToSpace, Reshape
from cnn_engine.operators.unary import Relu


class Builder:
    """Adds nodes one after the other, with He's random weights, or with zeros that take no memory."""

    def __init__(
        self, shape: tuple[int, ...], seed: int = 0, batched: bool = True, weights: bool = True
    ) -> None:
        self.weights = weights
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        self.shapes = {"images": shape}
        self.batched = ("images",) if batched else ()

    def add(self, op, *inputs: str) -> str:
        name = f"{op.kind}{len(self.nodes)}"
        given = [
            Value(n, self.constants[n].shape) if n in self.constants else Value(n, self.shapes[n])
            for n in inputs
        ]
        ((shape, _),) = op.infer(given)
        self.nodes.append(Node(name, op, inputs, (name,)))
        self.shapes[name] = shape
        return name

    def conv(self, x: str, filters: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> str:
        channels = self.shapes[x][1] // groups
        weight = self.constant((filters, channels, kernel, kernel))
        border = 4 * (kernel // 2,)
        return self.add(Conv2d((stride, stride), border, groups=groups), x, weight)

    def constant(self, shape: tuple[int, ...]) -> str:
        name = f"w{len(self.constants)}"
        if self.weights:
            values = self.rng.normal(0, (2 / np.prod(shape[1:])) ** 0.5, shape).astype(np.float32)
        else:
            values = np.broadcast_to(np.float32(0), shape)
        self.constants[name] = values
        return name

    def relu(self, x: str) -> str:
        return self.add(Relu(), x)

    def head(self, x: str, classes: int) -> str:
        x = self.add(ReduceMean((2, 3), keepdims=False), x)
        return self.add(Linear(), x, self.constant((classes, self.shapes[x][1])))

    def graph(self, *outputs: str) -> Graph:
        images = Value("images", self.shapes["images"])
        return Graph(
            "built", (images,), outputs or (self.nodes[-1].outputs[0],), tuple(self.nodes),
            self.constants, batched=self.batched,
        )  # fmt: skip


#: An image of :func:`convolution_chain`.
CHAIN_SHAPE = 16, 28, 28


def convolution_chain() -> Graph:
    """Four 3x3 convolutions in a row and ten classes: a pass long enough to overlap with another."""
    b = Builder((1, *CHAIN_SHAPE))
    x = b.relu(b.conv("images", 32))
    for _ in range(3):
        x = b.relu(b.conv(x, 32))
    return b.graph(b.head(x, 10))


def chain_images(count: int, seed: int = 0) -> np.ndarray:
    """Returns random images for :func:`convolution_chain`."""
    return np.random.default_rng(seed).standard_normal((count, *CHAIN_SHAPE)).astype(np.float32)


def resnet(
    blocks: tuple[int, ...],
    shape: tuple[int, ...],
    *,
    width: int = 64,
    bottleneck: bool = True,
    weights: bool = True,
    seed: int = 0,
) -> Graph:
    """A residual network: (3, 4, 6, 3) blocks are those of ResNet-50."""
    b = Builder(shape, seed, weights=weights)
    x = b.relu(b.conv("images", width, 7, 2))
    x = b.add(MaxPool2d((3, 3), (2, 2), (1, 1, 1, 1)), x)
    grow = 4 if bottleneck else 1
    for stage, count in enumerate(blocks):
        filters = width << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = x
            if bottleneck:
                y = b.relu(b.conv(y, filters, 1))
            y = b.relu(b.conv(y, filters, 3, stride))
            y = b.conv(y, filters * grow, 1 if bottleneck else 3)
            if b.shapes[x] != b.shapes[y]:
                x = b.conv(x, filters * grow, 1, stride)
            x = b.relu(b.add(Add(), y, x))
    b.head(x, 10)
    return b.graph()


def densenet(blocks: tuple[int, ...], shape: tuple[int, ...], growth: int = 32) -> Graph:
    """A densely connected network: (6, 12, 48, 32) blocks are those of DenseNet-201."""
    b = Builder(shape, weights=False)
    x = b.relu(b.conv("images", 2 * growth, 7, 2))
    x = b.add(MaxPool2d((3, 3), (2, 2), (1, 1, 1, 1)), x)
    for stage, count in enumerate(blocks):
        features = [x]
        for _ in range(count):
            joined = b.add(Concat(1), *features) if len(features) > 1 else x
            features.append(b.conv(b.relu(b.conv(b.relu(joined), 4 * growth, 1)), growth, 3))
        x = b.relu(b.add(Concat(1), *features))
        if stage + 1 < len(blocks):
            x = b.conv(x, b.shapes[x][1] // 2, 1)
            x = b.add(MaxPool2d((2, 2), (2, 2)), x)
    b.head(x, 10)
    return b.graph()


def unet(depth: int, shape: tuple[int, ...], width: int = 16) -> Graph:
    """An encoder and a decoder with a skip connection at every size."""
    b = Builder(shape, weights=False)
    x, skips = "images", []
    for level in range(depth):
        x = b.relu(b.conv(b.relu(b.conv(x, width << level)), width << level))
        skips.append(x)
        x = b.add(MaxPool2d((2, 2), (2, 2)), x)
    x = b.relu(b.conv(x, width << depth))
    for level in reversed(range(depth)):
        x = b.conv(x, (width << level) * 4, 1)
        x = b.add(DepthToSpace(2), x)
        x = b.add(Concat(1), skips[level], x)
        x = b.relu(b.conv(b.relu(b.conv(x, width << level)), width << level))
    b.conv(x, 2, 1)
    return b.graph()


def random_graph(seed: int, nodes: int, batch: int = 1) -> Graph:
    """A graph of functions that are exact on small whole numbers, over tensors of one to three channels."""
    b = Builder((batch, 2, 3, 4), seed)
    rng = np.random.default_rng(seed)
    values = ["images"]
    for _ in range(nodes):
        x = values[rng.integers(max(0, len(values) - 6), len(values))]
        shape = b.shapes[x]
        alike = [v for v in values if b.shapes[v] == shape]
        other = alike[rng.integers(len(alike))]
        kind = rng.integers(7)
        if kind < 2 and shape[1] * 3 * 4 < 200 and len(shape) == 4:
            near = [v for v in values if len(b.shapes[v]) == 4][-4:]
            parts = [near[rng.integers(len(near))] for _ in range(rng.integers(1, 4))]
            values.append(b.add(Concat(1), x, *parts))
        elif kind == 2:
            flat = (shape[0], -1) if len(shape) == 4 else (shape[0], shape[1] // 12, 3, 4)
            values.append(b.add(Reshape(flat), x))
        elif kind == 3:
            values.append(b.add(Neg(), x))
        elif kind == 4:
            values.append(b.add(Max(), x, other))
        elif kind == 5:
            values.append(b.relu(b.add(Sub(), x, other)))
        else:
            values.append(b.relu(x))
    chosen = {values[-1], *(str(v) for v in rng.choice(values[1:], min(3, nodes), replace=False))}
    return b.graph(*sorted(chosen))
