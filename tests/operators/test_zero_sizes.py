"""Inputs of no elements: a batch of 0 where any batch is taken, and dimensions that are 0."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import model, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.operators.shaping import Reshape


def weight(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


CONV = ("Conv", {"pads": [1] * 4}, weight(4, 3, 3, 3))
SIZES = np.array([1, 1, 2, 2], np.float32)

#: Chains of (operator, attributes, constants).
CHAINS = {
    "classifier": [CONV, ("Relu", {}), ("GlobalAveragePool", {}), ("Flatten", {})],
    "maxima": [CONV, ("Relu", {}), ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]})],
    "means": [("AveragePool", {"kernel_shape": [3, 3], "pads": [1] * 4})],
    "depthwise": [("Conv", {"group": 3}, weight(3, 1, 3, 3)), ("Sigmoid", {})],
    "transposed": [("ConvTranspose", {"strides": [2, 2]}, weight(3, 4, 2, 2))],
    "linear": [
        ("Flatten", {}), ("Gemm", {"transB": 1}, weight(5, 192)), ("Softmax", {"axis": -1})
    ],
    "view": [("Reshape", {}, np.array([-1, 192])), ("MatMul", {}, weight(192, 7))],
    "moved": [("Transpose", {"perm": [0, 2, 3, 1]}), ("LayerNormalization", {}, weight(3))],
    "resized": [("Resize", {"mode": "linear"}, np.zeros(0, np.float32), SIZES)],
    "padded": [("Pad", {}, np.array([0, 0, 1, 1, 0, 0, 1, 1])), ("LRN", {"size": 3})],
    "summed": [("ReduceSum", {"keepdims": 0}), ("Neg", {})],
    "normalised": [("InstanceNormalization", {}, weight(3), weight(3)), ("Add", {}, weight(3, 1, 1))],
}  # fmt: skip


def chain(name: str, shape):
    nodes, constants, x = [], {}, "x"
    for i, (operator, attributes, *arrays) in enumerate(CHAINS[name]):
        names = [f"c{i}.{j}" for j in range(len(arrays))]
        constants |= dict(zip(names, arrays, strict=True))
        nodes.append(helper.make_node(operator, [x, *names], [f"y{i}"], **attributes))
        x = f"y{i}"
    return model(nodes, [tensor("x", shape)], [tensor(x, None)], constants, 17)


@pytest.mark.parametrize("name", CHAINS)
def test_a_batch_of_0(name, rng):
    """And the engine goes on with images afterwards."""
    proto = chain(name, ["N", 3, 8, 8])
    with Engine(proto, device="cpu", threads=1) as engine:
        for batch in (0, 2, 0):
            x = rng.standard_normal((batch, 3, 8, 8)).astype(np.float32)
            (found,) = engine.run({"x": x}).values()
            (wanted,) = onnxruntime_outputs(proto, {"x": x})
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("classifier", (0, 3, 8, 8)), ("resized", (1, 2, 0, 4)), ("moved", (2, 3, 0, 4)),
     ("summed", (2, 0, 4, 4)), ("transposed", (0, 3, 2, 2)), ("view", (0, 192))],
)  # fmt: skip
def test_dimensions_that_are_0(name, shape):
    x, proto = np.zeros(shape, np.float32), chain(name, shape)
    with Engine(proto, device="cpu", threads=1) as engine:
        (found,) = engine.run({"x": x}).values()
    (wanted,) = onnxruntime_outputs(proto, {"x": x})
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(found, wanted)


def test_a_workload_runs_no_images():
    with Engine("cifar10", device="cpu", threads=1) as engine:
        (found,) = engine.run({"images": np.zeros((0, 3, 32, 32), np.uint8)}).values()
    assert found.shape == (0, 10)


@pytest.mark.parametrize(
    ("shape", "wanted", "resolved"),
    [
        ((0, 3, 8, 8), (0, -1), (0, 192)),
        ((0, 3, 8, 8), (0, -1, 8), (0, 24, 8)),
        ((0, 3, 8, 8), (-1, 192), (0, 192)),
        ((2, 0, 4), (0, 0, -1), (2, 0, 4)),
        ((2, 3, 4), (0, -1), (2, 12)),
    ],
)
def test_a_shape_that_is_left_is_of_what_is_not_taken_over(shape, wanted, resolved):
    """``x.view(x.size(0), -1)`` of 0 images: ONNX's 0 takes the batch, and what is left is an image."""
    assert Reshape(wanted).resolved(shape) == resolved


@pytest.mark.parametrize("quantized", [False, True])
def test_a_convolution_of_no_filters(quantized):
    node, constants = helper.make_node("Conv", ["x", "w"], ["y"]), {"w": weight(0, 3, 3, 3)}
    x, dtype = np.ones((2, 3, 8, 8), np.float32), onnx.TensorProto.FLOAT
    if quantized:
        x, dtype = x.astype(np.uint8), onnx.TensorProto.UINT8
        constants = {"w": weight(0, 3, 3, 3).astype(np.int8), "one": np.float32(1)}
        constants |= {"zero": np.uint8(0), "w_zero": np.int8(0)}
        names = ["x", "one", "zero", "w", "one", "w_zero", "one", "zero"]
        node = helper.make_node("QLinearConv", names, ["y"])
    proto = model([node], [tensor("x", x.shape, dtype)], [tensor("y", None, dtype)], constants)
    with Engine(proto, device="cpu") as engine:
        found = engine.run({"x": x})["y"]
    assert (found.shape, found.dtype) == ((2, 0, 6, 6), x.dtype)
