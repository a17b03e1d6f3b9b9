"""The reference against onnx.reference, an implementation that is not ours."""

from __future__ import annotations

import numpy as np
import pytest

from cnn_engine.graph import reference

onnx = pytest.importorskip("onnx", reason="needs onnx, in the extra [test]")


def onnx_run(operator: str, inputs: list[np.ndarray], **attributes) -> np.ndarray:
    """Runs one ONNX operator on float64 inputs."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    names = [f"x{i}" for i in range(len(inputs))]
    node = helper.make_node(operator, names, ["y"], **attributes)
    values = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in names]
    result = helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)
    graph = helper.make_graph([node], "one", values, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    feeds = dict(zip(names, inputs, strict=True))
    return ReferenceEvaluator(model).run(None, feeds)[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("n", "c", "size", "k", "kernel", "stride", "padding"),
    [
        (2, 3, (8, 8), 4, (5, 5), (1, 1), (2, 2)), (1, 2, (7, 9), 3, (3, 2), (2, 1), (1, 0)),
        (1, 1, (5, 5), 1, (1, 1), (1, 1), (0, 0)), (1, 4, (11, 10), 2, (7, 6), (3, 2), (3, 1)),
    ],
)  # fmt: skip
def test_conv2d(rng, n, c, size, k, kernel, stride, padding, bias):
    x, w = rng.standard_normal((n, c, *size)), rng.standard_normal((k, c, *kernel))
    b = rng.standard_normal(k)
    inputs = [x, w, b] if bias else [x, w]
    wanted = onnx_run("Conv", inputs, strides=stride, pads=[*padding, *padding])
    found = reference.conv2d(x, w, b if bias else None, stride, padding)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 2), (1, 2), (1, 0))],
)
def test_max_pool2d(rng, kernel, stride, padding):
    x = rng.standard_normal((2, 3, 9, 8))
    wanted = onnx_run(
        "MaxPool", [x], kernel_shape=kernel, strides=stride, pads=[*padding, *padding]
    )
    np.testing.assert_array_equal(reference.max_pool2d(x, kernel, stride, padding), wanted)


def test_the_others(rng):
    x = rng.standard_normal((4, 7))
    w, b = rng.standard_normal((3, 7)), rng.standard_normal(3)
    np.testing.assert_array_equal(reference.relu(x), onnx_run("Relu", [x]))
    np.testing.assert_allclose(reference.tanh(x), onnx_run("Tanh", [x]), rtol=1e-14)
    np.testing.assert_allclose(reference.softmax(x), onnx_run("Softmax", [x], axis=1), rtol=1e-12)
    found = reference.linear(x, w, b)
    np.testing.assert_allclose(found, onnx_run("Gemm", [x, w, b], transB=1), rtol=1e-12)
