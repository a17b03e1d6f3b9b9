"""Quantized networks as integers: whole files of ONNX Runtime's quantizer, and each rule by itself."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import model, onnxruntime_outputs, tensor
from onnxruntime import quantization

from cnn_engine import Engine
from cnn_engine.engine import inspection
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.graph.model import Model
from cnn_engine.graph.onnx import load
from cnn_engine.graph.reference import reference
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.binary import Add, Mul
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.copy import Copy
from cnn_engine.operators.matmul import Matmul
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.pad import Pad
from cnn_engine.operators.quantized import DequantizeLinear, QuantizeLinear
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.shaping import Concat, Reshape, Transpose
from cnn_engine.operators.unary import Clip, Relu, Sigmoid

F32 = np.float32
FLOAT_LAYERS = {"conv2d", "linear", "matmul"}


def network() -> onnx.ModelProto:
    """A network with what CNNs have between their convolutions."""
    rng = np.random.default_rng(5)
    constants, nodes = {}, []

    def conv(x: str, y: str, k: int, c: int, size: int, **more) -> None:
        constants[f"{y}.w"] = rng.normal(
            0, 1.4 / np.sqrt(c * size * size), (k, c, size, size)
        ).astype(F32)
        constants[f"{y}.b"] = rng.normal(0, 0.2, k).astype(F32)
        pads = {"pads": [size // 2] * 4}
        nodes.append(helper.make_node("Conv", [x, f"{y}.w", f"{y}.b"], [y], **pads, **more))

    def node(operator: str, inputs: list[str], y: str, **more) -> None:
        nodes.append(helper.make_node(operator, inputs, [y], **more))

    conv("x", "stem", 8, 3, 3, strides=[2, 2])
    node("Relu", ["stem"], "stem.relu")
    node("MaxPool", ["stem.relu"], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    conv("pool", "wide", 16, 8, 1)
    node("Sigmoid", ["wide"], "wide.gate")
    node("Mul", ["wide", "wide.gate"], "wide.silu")
    conv("wide.silu", "depthwise", 16, 1, 3, group=16)
    node("Clip", ["depthwise", "", "six"], "depthwise.relu6")
    constants["six"] = F32(6).reshape(())
    node("GlobalAveragePool", ["depthwise.relu6"], "squeeze")
    conv("squeeze", "excite", 16, 16, 1)
    node("HardSigmoid", ["excite"], "gate")
    node("Mul", ["depthwise.relu6", "gate"], "gated")
    conv("gated", "narrow", 8, 16, 1)
    node("Add", ["narrow", "pool"], "sum")
    node("Concat", ["sum", "wide.silu"], "both", axis=1)
    node("AveragePool", ["both"], "half", kernel_shape=[2, 2], strides=[2, 2])
    constants["scales"] = F32([1, 1, 2, 2])
    node("Resize", ["half", "", "scales"], "large", mode="nearest")
    conv("large", "last", 12, 24, 3)
    node("Relu", ["last"], "last.relu")
    node("GlobalAveragePool", ["last.relu"], "mean")
    node("Flatten", ["mean"], "row")
    constants["fc.w"] = rng.normal(0, 0.4, (5, 12)).astype(F32)
    constants["fc.b"] = rng.normal(0, 0.4, 5).astype(F32)
    node("Gemm", ["row", "fc.w", "fc.b"], "y", transB=1)
    inputs, outputs = [tensor("x", [1, 3, 32, 32])], [tensor("y", [1, 5])]
    return model(nodes, inputs, outputs, constants, opset=17)


class Images(quantization.CalibrationDataReader):
    def __init__(self):
        rng = np.random.default_rng(3)
        self._left = iter([{"x": rng.normal(size=(1, 3, 32, 32)).astype(F32)} for _ in range(4)])

    def get_next(self):
        return next(self._left, None)


INT8, UINT8 = quantization.QuantType.QInt8, quantization.QuantType.QUInt8
QDQ, OPERATORS = quantization.QuantFormat.QDQ, quantization.QuantFormat.QOperator


def quantized(tmp_path, **options) -> onnx.ModelProto:
    """What ONNX Runtime's quantizer makes of the network: without options, quantized as it runs."""
    logging.disable(logging.WARNING)
    try:
        source, target = str(tmp_path / "float.onnx"), str(tmp_path / "quantized.onnx")
        onnx.save(onnx.shape_inference.infer_shapes(network()), source)
        if options:
            quantization.quantize_static(source, target, Images(), **options)
        else:
            quantization.quantize_dynamic(source, target, weight_type=UINT8)
        return onnx.load(target)
    finally:
        logging.disable(logging.NOTSET)


def tensors(proto: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    """All that ONNX Runtime computes without optimizing anything."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    names = list(dict.fromkeys(name for node in proto.graph.node for name in node.output if name))
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    return dict(zip(names, onnxruntime_outputs(proto, {"x": x}, optimized=False), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"quant_format": QDQ, "activation_type": INT8, "weight_type": INT8},
        {"quant_format": QDQ, "activation_type": UINT8, "weight_type": INT8, "per_channel": True},
        {"quant_format": QDQ, "activation_type": UINT8, "weight_type": UINT8},
        {"quant_format": QDQ, "activation_type": INT8, "weight_type": INT8, "per_channel": True,
         "extra_options": {"ActivationSymmetric": True}},
        {"quant_format": OPERATORS, "activation_type": UINT8, "weight_type": UINT8},
    ],
    ids=["s8s8", "u8s8", "u8u8", "symmetric", "operators"],
)  # fmt: skip
def test_files_of_onnx_runtimes_quantizer(tmp_path, rng, options):
    proto = quantized(tmp_path, **options)
    base = Model(load(proto)).base
    refused: list = []
    lowered = passes.lower_qdq(base, refused)
    kinds = Counter(node.op.kind for node in lowered.nodes)
    assert not refused
    assert kinds["quantized_conv2d"] == 7  # six, and the average pool
    assert (
        kinds["quantize_linear"] == kinds["dequantize_linear"] == 1
    )  # of the input and the output
    floats = [
        v
        for v in lowered.values.values()
        if v.dtype == "float32" and v.name not in lowered.constants
    ]
    assert {value.name for value in floats} == {"x", "y"}
    x = rng.normal(size=(1, 3, 32, 32)).astype(F32)
    wanted, apart = tensors(proto, x), []

    def run(node, graph, *arrays):
        """Compares what a node makes of ONNX Runtime's tensors with what ONNX Runtime makes of them."""
        found = node.op.reference(*arrays)
        other = wanted.get(node.outputs[0])
        if other is None or other.dtype != found.dtype:
            return found
        apart.append(np.abs(found.astype(int) - other.reshape(found.shape)))
        return other.reshape(found.shape)

    reference(lowered, {"x": x}, run)
    assert len(apart) >= 12
    assert max(part.max() for part in apart) <= 1
    assert sum((part > 0).sum() for part in apart) <= 0.01 * sum(part.size for part in apart)
    exact = reference(lowered, {"x": x})["y"].astype(F32)
    for threads in (1, 2):
        assert np.array_equal(
            Engine(proto, device="cpu", threads=threads).run({"x": x})["y"], exact
        )


def test_layers_that_are_quantized_as_they_run(tmp_path, rng):
    proto = quantized(tmp_path)
    lowered = passes.lower_qdq(Model(load(proto)).base)
    kinds = Counter(node.op.kind for node in lowered.nodes)
    assert not FLOAT_LAYERS & kinds.keys()
    assert kinds["quantized_conv2d"] == 6
    assert kinds["quantized_linear"] == 1
    assert not kinds["cast"]  # casts and products with the scales are part of the layers
    ran = {node.kernel for node in inspection.inspect(load(proto)).on["cpu"].running}
    assert "NumPy" not in ran
    assert {"int8", "int8_computed"} <= ran
    x = rng.normal(size=(1, 3, 32, 32)).astype(F32)
    other = tensors(proto, x)["y"]
    found = Engine(proto, device="cpu").run({"x": x})["y"]
    assert np.abs(found - other).max() <= 0.02 * np.abs(other).max()


class Built:
    """A graph written node by node, with quantized inputs."""

    def __init__(self) -> None:
        self.inputs, self.nodes, self.constants = [], [], {}

    def parameters(self, name: str, scale, zero, dtype: str) -> tuple[str, str]:
        self.constants[f"{name}.s"] = np.asarray(scale, F32)
        self.constants[f"{name}.z"] = np.asarray(zero, dtype)
        return f"{name}.s", f"{name}.z"

    def input(self, name: str, shape, scale=0.05, zero=3, dtype: str = "int8") -> str:
        """Adds 8-bit numbers that are given; returns the name of what they stand for."""
        self.inputs.append(Value(name, shape, dtype))
        return self.real(name, scale, zero, dtype)

    def real(self, name: str, scale, zero, dtype: str, axis: int = 0) -> str:
        return self(DequantizeLinear(axis=axis), name, *self.parameters(name, scale, zero, dtype))

    def weight(self, array: np.ndarray, scale, zero=0, axis: int = 0) -> str:
        name = f"w{len(self.constants)}"
        self.constants[name] = array
        zeros = np.full(np.shape(scale), zero)
        return self.real(name, scale, zeros, array.dtype.name, axis)

    def constant(self, array) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array, F32)
        return name

    def __call__(self, op, *inputs: str) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(Node(name, op, inputs, (name,)))
        return name

    def quantize(self, x: str, scale=0.07, zero=-5, dtype: str = "int8") -> str:
        parameters = self.parameters(f"q{len(self.nodes)}", scale, zero, dtype)
        return self(QuantizeLinear(dtype=dtype), x, *parameters)

    def lowered(self, *outputs: str) -> tuple[Graph, list]:
        """Returns the graph of integers and what was refused, after comparing both graphs' numbers."""
        inputs = tuple(self.inputs)
        graph = Graph("built", inputs, outputs, tuple(self.nodes), self.constants)
        refused: list = []
        lowered = passes.lower_qdq(graph, refused)
        rng = np.random.default_rng(1)
        given = {
            v.name: rng.integers(np.iinfo(v.dtype).min, np.iinfo(v.dtype).max + 1, v.shape).astype(
                v.dtype
            )
            for v in inputs
        }
        plain, integers = reference(graph, given), reference(lowered, given)
        for name in outputs:
            apart = np.abs(plain[name].astype(float) - integers[name])
            if plain[name].dtype.kind in "iu":
                assert apart.max() <= 1
                assert (apart > 0).mean() <= 0.02
                assert np.unique(integers[name]).size > 3
            else:
                assert apart.max() <= 1e-5 * np.abs(plain[name]).max()
        return lowered, refused


def kinds(graph: Graph) -> list[str]:
    return [node.op.kind for node in graph.nodes]


def int8(rng, *shape: int) -> np.ndarray:
    return rng.integers(-127, 128, shape).astype(np.int8)


@pytest.mark.parametrize(
    ("op", "low", "high"),
    [(Relu(), -5, None), (Clip(0.0, 6.0), -5, 81), (Clip(-1.0, 2.0), -19, 24)],
)
def test_a_function_that_clips_is_the_range_of_its_integers(rng, op, low, high):
    net = Built()
    x, w = (
        net.input("x", (2, 4, 6, 5)),
        net.weight(int8(rng, 6, 4, 3, 3), rng.uniform(0.01, 0.02, 6)),
    )
    graph, refused = net.lowered(net.quantize(net(op, net(Conv2d(), x, w))))
    assert kinds(graph) == ["quantized_conv2d"]
    assert (graph.nodes[0].op.low, graph.nodes[0].op.high) == (low, high)
    assert not refused


def test_a_range_of_one_integer_is_no_whole_type(rng):
    for op, zero in ((Relu(), 127), (Clip(-2.0, 0.0), -128)):
        net = Built()
        x, w = net.input("x", (2, 4, 6, 5)), net.weight(int8(rng, 6, 4, 1, 1), 0.02)
        y = net(op, net(Conv2d(), x, w))
        inputs = tuple(net.inputs)
        graph = Graph("g", inputs, (net.quantize(y, 0.07, zero),), tuple(net.nodes), net.constants)
        lowered = passes.lower_qdq(graph)
        given = {"x": int8(rng, 2, 4, 6, 5)}
        (found,) = reference(lowered, given).values()
        assert kinds(lowered) == ["quantized_conv2d"]
        assert np.array_equal(found, np.full_like(found, zero))


@pytest.mark.parametrize("order", [0, 1])
def test_a_residual_is_added_before_rounding(rng, order):
    net = Built()
    x, w = net.input("x", (2, 4, 6, 5)), net.weight(int8(rng, 6, 4, 1, 1), 0.02)
    residual = net.input("r", (2, 6, 6, 5), 0.09, 130, "uint8")
    both = [net(Conv2d(), x, w), residual]
    total = net(Relu(), net(Add(), *both[:: 1 - 2 * order]))
    graph, _ = net.lowered(net.quantize(total))
    assert kinds(graph) == ["quantized_conv2d"]
    assert graph.nodes[0].inputs[7] == "r"


def test_weights_of_any_kind_and_biases_of_floats(rng):
    for w, scale, zero in (
        (rng.integers(0, 256, (6, 4, 3, 3)).astype(np.uint8), rng.uniform(0.01, 0.02, 6), 120),
        (int8(rng, 6, 4, 3, 3), 0.015, 7),
    ):
        net = Built()
        x, w = net.input("x", (2, 4, 6, 5), dtype="uint8"), net.weight(w, scale, zero)
        bias = net.constant(rng.normal(0, 2, 6))
        y = net(Conv2d((2, 1), (1, 0, 1, 2)), x, w, bias)
        graph, _ = net.lowered(net.quantize(y, 0.9))
        assert kinds(graph) == ["quantized_conv2d"]
        assert graph.values[graph.nodes[0].inputs[1]].dtype == "int8"


def test_sums_that_are_not_quantized_again_are_float32(rng):
    net = Built()
    x, w = net.input("x", (2, 4, 6, 5)), net.weight(int8(rng, 6, 4, 3, 3), 0.02)
    y = net(Conv2d(), x, w)
    gated = net(Mul(), y, net(Sigmoid(), y))
    graph, _ = net.lowered(net.quantize(gated), y)
    assert kinds(graph) == ["quantized_conv2d", "sigmoid", "mul", "quantize_linear"]
    assert graph.nodes[0].op.dtype == "float32"


def test_functions_of_one_number_are_one_table(rng):
    net = Built()
    x = net.input("x", (2, 300))
    gate = net.real(net.quantize(net(Sigmoid(), x), 1 / 256, -128), 1 / 256, -128, "int8")
    last = net.quantize(net(Add(), net(Mul(), x, gate), net.constant([0.25])))
    other = net.quantize(net.real(last, 0.07, -5, "int8"), 0.04, 9, "uint8")
    graph, _ = net.lowered(last, other)
    assert kinds(graph) == ["lookup", "lookup"]
    assert {node.inputs[0] for node in graph.nodes} <= {"x", last}


def test_a_convolution_looks_its_outputs_up(rng):
    net = Built()
    x, w = net.input("x", (2, 4, 6, 5)), net.weight(int8(rng, 6, 4, 1, 1), 0.02)
    q = net.quantize(net(Conv2d(), x, w), 0.03, 7)
    y = net.real(q, 0.03, 7, "int8")
    table = net.quantize(net(Mul(), y, net(Sigmoid(), y)), 0.02, 4, "uint8")
    graph, _ = net.lowered(table)
    assert kinds(graph) == ["quantized_conv2d"]
    assert graph.values[table].dtype == "uint8"
    graph, _ = net.lowered(table, q)  # the integers are an output, too
    assert kinds(graph) == ["quantized_conv2d", "lookup"]


@pytest.mark.parametrize("order", [0, 1])
def test_a_residual_is_added_after_rounding(rng, order):
    """A whole residual block is one layer: scales are powers of 2, so that its integers are the file's."""
    net = Built()
    x, w = net.input("x", (2, 4, 6, 5), 0.0625), net.weight(int8(rng, 6, 4, 1, 1), 0.015625)
    residual = net.input("r", (2, 6, 6, 5), 0.125, 130, "uint8")
    relu = net(Relu(), net(Conv2d(), x, w))
    branch = net.real(net.quantize(relu, 0.25, 7), 0.25, 7, "int8")
    total = net(Clip(0.0, 20.0), net(Add(), *[branch, residual][:: 1 - 2 * order]))
    y = net.real(net.quantize(total, 0.125, -9), 0.125, -9, "int8")
    out = net.quantize(net(Mul(), y, y), 2.0, 4, "uint8")
    graph = Graph("built", tuple(net.inputs), (out,), tuple(net.nodes), net.constants)
    lowered = passes.lower_qdq(graph)
    assert kinds(lowered) == ["quantized_conv2d"]
    assert lowered.nodes[0].op.inner == (0, 120)
    given = {"x": int8(rng, 2, 4, 6, 5), "r": int8(rng, 2, 6, 6, 5).view(np.uint8)}
    wanted = reference(graph, given)[out]
    assert np.unique(wanted).size > 9
    assert np.array_equal(reference(lowered, given)[out], wanted)


def test_what_moves_numbers_moves_integers(rng):
    net = Built()
    x = net.input("x", (2, 4, 6, 6))
    same = net(Transpose((0, 2, 3, 1)), net(MaxPool2d((2, 2), (2, 2)), x))
    padded = net(Pad((0, 1, 0, 0, 0, 0, 2, 0)), same)
    flat = net(Reshape((2, -1)), net(Copy(), padded))
    graph, _ = net.lowered(net.quantize(flat, 0.05, 3), flat)
    assert kinds(graph)[-1] == "dequantize_linear"
    assert "quantize_linear" not in kinds(graph)
    assert all(
        value.dtype == "int8" for name, value in graph.values.items()
        if name not in graph.constants and name != flat
    )  # fmt: skip


def test_parts_of_other_scales_get_the_scale_of_the_whole(rng):
    net = Built()
    a, b = net.input("a", (2, 3, 4, 4)), net.input("b", (2, 2, 4, 4), 0.02, 100, "uint8")
    w = net.weight(int8(rng, 5, 3, 1, 1), 0.02)
    graph, _ = net.lowered(net.quantize(net(Concat(1), a, net(Conv2d(), a, w), b)))
    assert Counter(kinds(graph)) == {"lookup": 2, "quantized_conv2d": 1, "concat": 1}


def test_sums_products_and_means(rng):
    net = Built()
    a, b = net.input("a", (2, 3, 4, 4)), net.input("b", (2, 3, 1, 1), 0.02, 100, "uint8")
    total = net.quantize(net(Relu(), net(Add(), a, b)))
    product = net.quantize(net(Mul(), a, b))
    mean = net.quantize(net(ReduceMean((2, 3)), a), 0.0137)
    pooled = net.quantize(net(AveragePool2d((2, 2), (1, 1)), a), 0.03)
    graph, refused = net.lowered(total, product, mean, pooled)
    wanted = ["quantized_add", "quantized_mean", "quantized_mul", "quantized_conv2d"]
    assert sorted(kinds(graph)) == sorted(wanted)
    assert not refused


def test_products_of_matrices(rng):
    net = Built()
    a = net.input("a", (2, 3, 5))
    w = net.weight(int8(rng, 5, 4), rng.uniform(0.01, 0.03, 4), axis=1)
    y = net(Add(), net(Matmul(), a, w), net.constant(rng.normal(size=4)))
    other = net.input("b", (2, 5, 3))
    graph, _ = net.lowered(net.quantize(y), net.quantize(net(Matmul(), a, other)))
    assert sorted(kinds(graph)) == ["quantized_linear", "quantized_matmul", "reshape", "reshape"]


def test_what_stays_float_is_named(rng):
    net = Built()
    x = net.input("x", (2, 4, 6, 5))
    w = net.weight(int8(rng, 6, 4, 1, 1), np.full(6, 1e-30))
    large = net(Conv2d(), x, w, net.constant(np.full(6, 1.0)))
    computed = net(Conv2d(), x, net.input("v", (6, 4, 1, 1)))
    border = net(AveragePool2d((3, 3), (1, 1), (1, 1, 1, 1)), x)
    names = [net.quantize(y) for y in (computed, border)]
    graph, refused = net.lowered(*names, net(Copy(), large))
    why = {note.what: note.why for note in refused}
    assert why[large] == "its bias is too large for int32 in steps of input times weight"
    assert why[computed] == "its weight is no constant of 8 bits"
    assert why[border] == "its windows hold different numbers of elements"
    assert Counter(kinds(graph))["conv2d"] == 2


@pytest.mark.parametrize("op", [Add(), Mul(), ReduceMean((2, 3))])
def test_ratios_of_scales_that_are_no_float32_are_refused(op):
    net = Built()
    inputs = [net.input(name, (1, 2, 3, 3), 3e38) for name in "ab"[: 1 + isinstance(op, Add | Mul)]]
    y = net.quantize(net(op, *inputs), 1e-45)
    graph, refused = Graph("g", tuple(net.inputs), (y,), tuple(net.nodes), net.constants), []
    lowered = passes.lower_qdq(graph, refused)
    assert [note.why for note in refused] == [
        "its scales over the output's are no positive float32"
    ]
    given = {value.name: np.full((1, 2, 3, 3), 3, np.int8) for value in net.inputs}  # all 0
    for of in (graph, lowered):
        assert (reference(of, given)[y] == -5).all()


def test_weights_alone_become_floats_again(rng):
    net = Built()
    w = net.weight(int8(rng, 6, 4, 1, 1), rng.uniform(0.01, 0.03, 6))
    graph, _ = net.lowered(net(Conv2d(), net.input("x", (1, 4, 2, 2)), w), w)
    assert "dequantize_linear" not in kinds(graph)


def test_another_network_is_left_alone():
    graph = Graph("g", (Value("x", (2,)),), ("y",), (Node("n", Relu(), ("x",), ("y",)),))
    assert passes.lower_qdq(graph) is graph
