"""The engine as ONNX's backend: its interface, and ONNX's own tests through it."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import model, one_node, tensor

from benchmarks import onnx_node_tests as suite
from cnn_engine import onnx_backend
from cnn_engine.errors import InputError, UnsupportedError
from cnn_engine.graph.onnx import UnsupportedNodesError

X = np.arange(6, dtype=np.float32).reshape(2, 3)


Backend = onnx_backend.CnnEngineBackend

#: Names of ONNX's tests of quantized operators.
QUANTIZED = "quantizelinear|qlinear|integer"


def add() -> onnx.ModelProto:
    return model(
        [helper.make_node("Add", ["x", "b"], ["y"])],
        [tensor("x", [2, 3]), tensor("b", [3])],
        [tensor("y", [2, 3])],
        {"b": np.float32([1, 2, 3])},
    )


@pytest.mark.parametrize("inputs", [[X], X, {"x": X}, [X, np.zeros(3, np.float32)]])
def test_inputs_by_order_or_name(inputs):
    (y,) = Backend.run_model(add(), inputs)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, X + np.float32([1, 2, 3]))


def test_outputs_have_names():
    assert Backend.prepare(add()).run([X]).y.shape == (2, 3)


def test_one_node():
    node = helper.make_node("Relu", ["x"], ["y"])
    (y,) = Backend.run_node(node, [X - 3])
    np.testing.assert_array_equal(y, np.maximum(X - 3, 0))


def test_an_input_that_is_a_shape_makes_a_graph_for_each_value():
    proto, _ = one_node("Reshape", [X, np.int64([3, 2])])
    prepared = Backend.prepare(proto)
    for shape in ((3, 2), (6, 1), (3, 2)):
        (y,) = prepared.run([X, np.int64(shape)])
        np.testing.assert_array_equal(y, X.reshape(shape))


def test_shapes_come_with_what_is_given():
    proto = model(
        [helper.make_node("Relu", ["x"], ["y"])], [tensor("x", ["N", "M"])], [tensor("y", None)]
    )
    prepared = Backend.prepare(proto)
    for array in (X, X[:1], X[:, :2]):
        assert prepared.run([array])[0].shape == array.shape


def test_what_is_missing_is_said():
    with pytest.raises(InputError, match=r"expected 1 arrays \(x\), found 3"):
        Backend.run_model(add(), [X, X, X])
    with pytest.raises(InputError, match="expected x, found no x"):
        Backend.run_model(add(), {"z": X})
    with pytest.raises(UnsupportedError, match="expected an array, found list"):
        Backend.run_model(add(), {"x": [X]})
    with pytest.raises(UnsupportedError, match="expected CPU or CUDA"):
        Backend.prepare(add(), "TPU")


def test_what_is_not_supported_is_said_before_anything_runs():
    proto, _ = one_node("NonZero", [X])
    assert Backend.is_compatible(proto)  # a value to be known when it runs
    proto, _ = one_node("ImageDecoder", [X])
    assert not Backend.is_compatible(proto)
    with pytest.raises(UnsupportedNodesError, match="ImageDecoder"):
        Backend.prepare(proto)


def test_devices():
    assert onnx_backend.supports_device("CPU")
    assert not onnx_backend.supports_device("TPU")


@pytest.mark.parametrize("device", ["CPU", pytest.param("CUDA", marks=pytest.mark.gpu)])
def test_onnxs_own_tests_pass_or_say_why_not(device):
    """Every test of every group; ``docs/reference/onnx_node_tests.md`` lists them."""
    found = suite.run(Backend, device)
    states = Counter(state for group in found.values() for state, _ in group.values())
    wrong = [name for group in found.values() for name, (s, _) in group.items() if s == suite.WRONG]
    assert not wrong
    assert Counter(s for s, _ in found["node"].values())[suite.PASSED] >= 1550
    quantized = [s for name, (s, _) in found["node"].items() if re.search(QUANTIZED, name)]
    assert quantized == [suite.PASSED] * len(quantized)
    assert len(quantized) >= 45
    for group in ("pytorch-converted", "pytorch-operator", "light"):
        assert {state for state, _ in found[group].values()} == {suite.PASSED}
    assert states.keys() == {suite.PASSED, suite.NOT_SUPPORTED}
    assert all(why for group in found.values() for s, why in group.values() if s != suite.PASSED)


def test_the_references_pass_too():
    """Of the node tests, some groups: the references behind the same interface."""
    found = suite.run(
        suite.ReferenceBackend,
        "CPU",
        f"^test_(basic_)?(conv|maxpool|averagepool|batchnorm)_|{QUANTIZED}",
    )
    states = Counter(state for state, _ in found["node"].values())
    assert states[suite.PASSED] >= 85
    assert states[suite.WRONG] == 0


def test_a_wrong_output_is_seen():
    proto, _ = one_node("Relu", [X])
    case = ("test_relu", proto, [([X], [X + np.float32(1e-2)])], 1e-3, 1e-7)
    assert suite.status(Backend, "CPU", case)[0] == suite.WRONG
    case = ("test_relu", proto, [([X], [X.astype(np.float64)])], 1e-3, 1e-7)
    assert suite.status(Backend, "CPU", case)[0] == suite.WRONG


def test_the_page_lists_every_test():
    tests = {"node": {"test_a": ["passed", ""], "test_b": ["not supported", "If: no | yes"]}}
    record = {"machine": "some CPU", "onnx": "1", "commit": "c", "tests": tests}
    page = suite.markdown({"CPU": record})
    assert "| node | 2 | 1 | 1 | 1 | 0 |" in page
    assert "| test_b | not supported: If: no \\| yes |" in page


def test_strings_are_refused():
    proto = model(
        [], [tensor("x", [1], TensorProto.STRING)], [tensor("x", [1], TensorProto.STRING)]
    )
    with pytest.raises(UnsupportedError, match="STRING"):
        Backend.prepare(proto)
