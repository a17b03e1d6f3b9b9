"""Networks on a GPU each of whose operands a node of the pass computes, beside float64.

Kernels start while those before them still run. One that reads an operand too early finds what an earlier
pass left there: each pass has another input, since the same one twice would find its own, and look right.
"""

from __future__ import annotations

from collections.abc import Callable

import fake_cuda
import numpy as np
import pytest
import tolerances
from onnx import helper
from onnx_models import model, tensor

from cnn_engine import Engine
from cnn_engine.graph.reference import reference
from cnn_engine.kernels.kernel import first_computed

DTYPES = ("float32", "tf32", "float16", "bfloat16")

#: How the inputs of the passes differ, one after another.
SIZES = (1.0, 8.0, 0.25, 3.0, 0.5)

CHANNELS, SIDE = 64, 10


class Network:
    """A convolution ``b`` of the images ``x``, and vectors of its own means, of which nodes are made."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.constants: dict[str, np.ndarray] = {}
        self.nodes: list[object] = []
        first = self.constant(CHANNELS, 16, 3, 3)
        self.b = self.add("Relu", self.add("Conv", "x", first, pads=[1] * 4))

    def add(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def constant(self, *shape: int) -> str:
        scale = (2 / max(np.prod(shape[1:]), 1)) ** 0.5
        return self.given(self.rng.normal(0, scale, shape).astype(np.float32))

    def given(self, values: object, dtype: type = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(values, dtype)
        return name

    def vector(self, count: int, wide: bool = False) -> str:
        """``count`` numbers that the pass computes, [count] or [1, count, 1, 1]."""
        means = self.add("ReduceMean", self.b, self.given([0, 2, 3], np.int64), keepdims=0)
        means = self.add("Reshape", means, self.given([1, CHANNELS], np.int64))
        made = self.add("MatMul", means, self.constant(CHANNELS, count))
        shape = [1, count, 1, 1] if wide else [count]
        return self.add("Reshape", made, self.given(shape, np.int64))

    def weights(self, *shape: int) -> str:
        """Weights that the pass computes."""
        return self.add("Mul", self.constant(*shape), self.vector(1))

    def model(self, batch: int) -> bytes:
        inputs = [tensor("x", [batch, 16, SIDE, SIDE])]
        outputs = [helper.make_empty_tensor_value_info(self.nodes[-1].output[0])]
        return model(self.nodes, inputs, outputs, self.constants).SerializeToString()


def conv(kernel: int, groups: int = 1, filters: int = CHANNELS, **how: object) -> Callable:
    """A convolution whose bias is computed."""

    def build(n: Network) -> None:
        weight = n.constant(filters, CHANNELS // groups, kernel, kernel)
        how.setdefault("pads", [kernel // 2] * 4)
        n.add("Conv", n.b, weight, n.vector(filters), group=groups, **how)

    return build


def first_conv(n: Network) -> None:
    """One that reads the images themselves, [N, C, H, W]."""
    three = n.add(
        "Slice", "x", n.given([0], np.int64), n.given([3], np.int64), n.given([1], np.int64)
    )
    n.add("Conv", three, n.constant(32, 3, 3, 3), n.vector(32), pads=[1] * 4)


def residual(n: Network) -> None:
    made = n.add(
        "Conv", n.b, n.constant(CHANNELS, CHANNELS, 3, 3), n.vector(CHANNELS), pads=[1] * 4
    )
    n.add("Relu", n.add("Add", made, n.b))


def conv_weights(n: Network) -> None:
    n.add("Conv", n.b, n.weights(32, CHANNELS, 3, 3), pads=[1] * 4)


def depthwise_weights(n: Network) -> None:
    n.add("Conv", n.b, n.weights(CHANNELS, 1, 3, 3), group=CHANNELS, pads=[1] * 4)


def transposed(n: Network) -> None:
    n.add("ConvTranspose", n.b, n.weights(CHANNELS, 8, 2, 2), n.vector(8), strides=[2, 2])


def prologue(*kinds: str) -> Callable:
    """What is computed for each channel, multiplied or added before a product."""

    def build(n: Network) -> None:
        x = n.b
        for kind in kinds:
            x = n.add(kind, x, n.vector(CHANNELS, wide=True))
        n.add("Conv", n.add("Relu", x), n.constant(CHANNELS, CHANNELS, 1, 1))

    return build


def gate(n: Network) -> None:
    """Squeeze and excite, with computed biases."""
    means = n.add("GlobalAveragePool", n.b)
    hidden = n.add("Relu", n.add("Conv", means, n.constant(16, CHANNELS, 1, 1), n.vector(16)))
    factors = n.add("Conv", hidden, n.constant(CHANNELS, 16, 1, 1), n.vector(CHANNELS))
    scaled = n.add("Mul", n.b, n.add("Sigmoid", factors))
    n.add("Conv", scaled, n.constant(CHANNELS, CHANNELS, 1, 1), n.vector(CHANNELS))


def linear(rows: int, weights: bool) -> Callable:
    """A linear layer of the images' rows (one per image) or positions."""

    def build(n: Network) -> None:
        x = n.add("GlobalAveragePool", n.b) if rows == 1 else n.b
        x = n.add("Transpose", x, perm=[0, 2, 3, 1])
        x = n.add("Reshape", x, n.given([-1, CHANNELS], np.int64))
        weight = (n.weights if weights else n.constant)(40, CHANNELS)
        n.add("Gemm", x, weight, n.vector(40), transB=1)

    return build


def norm(kind: str) -> Callable:
    def build(n: Network) -> None:
        x = n.b
        if kind == "LayerNormalization":
            x = n.add("Transpose", x, perm=[0, 2, 3, 1])
        n.add(kind, x, n.vector(CHANNELS), n.vector(CHANNELS))

    return build


def batch_norm(n: Network) -> None:
    variance = n.add("Abs", n.vector(CHANNELS))
    more = [n.vector(CHANNELS) for _ in range(3)]
    n.add("BatchNormalization", n.b, *more, n.add("Add", variance, n.given([0.5])))


def binary(kind: str) -> Callable:
    def build(n: Network) -> None:
        n.add(kind, n.b, n.vector(CHANNELS, wide=True))

    return build


def slope(n: Network) -> None:
    made = n.add("Conv", n.b, n.constant(CHANNELS, CHANNELS, 1, 1), n.vector(CHANNELS))
    n.add("PRelu", made, n.vector(CHANNELS, wide=True))


def where(n: Network) -> None:
    first, second = (n.vector(CHANNELS, wide=True) for _ in range(2))
    some = n.add(
        "Slice", "x", n.given([0], np.int64), n.given([1], np.int64), n.given([1], np.int64)
    )
    n.add("Where", n.add("Greater", some, n.given([0])), first, second)


NETWORKS = {
    "bias 3x3": conv(3), "bias 1x1": conv(1), "bias in groups": conv(3, 4), "first": first_conv,
    "bias of few filters": conv(3, filters=12), "depthwise 3": conv(3, CHANNELS),
    "depthwise 3 s2": conv(3, CHANNELS, strides=[2, 2]), "depthwise 5": conv(5, CHANNELS),
    "depthwise 7": conv(7, CHANNELS), "depthwise 4": conv(4, CHANNELS, pads=[1, 1, 2, 2]),
    "residual": residual, "weights": conv_weights, "depthwise weights": depthwise_weights,
    "transposed": transposed, "scale": prologue("Mul"), "shift": prologue("Add"),
    "scale and shift": prologue("Mul", "Add"), "gate": gate, "one row": linear(1, False),
    "one row, weights": linear(1, True), "many rows": linear(100, False),
    "many rows, weights": linear(100, True), "layer norm": norm("LayerNormalization"),
    "instance norm": norm("InstanceNormalization"), "batch norm": batch_norm, "slope": slope,
    "where": where, **{kind: binary(kind) for kind in ("Add", "Mul", "Sub", "Max")},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_read_early_is_constant(monkeypatch, name, dtype):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    network = Network()
    NETWORKS[name](network)
    with Engine(network.model(1), device="cuda", dtype=dtype) as engine:
        placed = engine._plans.open().placed(1, False)
    graph, ran = placed.graph, {}
    for node in graph.nodes:
        if kernel := placed.kernels.get(node.name):
            assert first_computed(node, graph, kernel.early) is None, node.name
            ran[node.name] = kernel.name
    if name.startswith(("bias", "depthwise")) and "weights" not in name:
        assert ran[network.nodes[-1].name] == "implicit_gemm"


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NETWORKS)
def test_operands_that_the_pass_computes(name, dtype, batch):
    network = Network()
    NETWORKS[name](network)
    images = network.rng.standard_normal((batch, 16, SIDE, SIDE)).astype(np.float32)
    with Engine(network.model(batch), device="cuda", dtype=dtype) as engine:
        for size in SIZES:
            x = {"x": images * np.float32(size)}
            ((_, wanted),) = reference(engine._base, x).items()
            ((_, found),) = engine.run(x).items()
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert error <= tolerances.FEW_LAYERS[dtype], size
