"""Clip has one rule: min(max(x, lowest), highest), NaN winning, wherever its limits and its kernel are."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import model, one_node, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.graph.graph import Value
from cnn_engine.operators.unary import Clip

NUMBERS = np.float32([-np.inf, -7, -1, -0.0, 0.5, 2, 6.5, np.inf, np.nan] * 5)  # vectors and a rest
LIMITS = [np.nan, -np.inf, -1, 1, 6, np.inf]


def wanted(x, low, high):
    return np.minimum(np.maximum(x, x.dtype.type(low)), x.dtype.type(high))


def run(proto, inputs):
    with Engine(proto, device="cpu", threads=1) as engine:
        return next(iter(engine.run(inputs).values()))


@pytest.mark.parametrize(("low", "high"), list(product(LIMITS, LIMITS)))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_constants_and_inputs_give_the_same(low, high, dtype):
    x = NUMBERS.astype(dtype)
    arrays = [x, dtype(low), dtype(high)]
    for known in ((1, 2), (1,), (2,), ()):
        proto, inputs = one_node("Clip", arrays, 13, known=known)
        np.testing.assert_array_equal(run(proto, inputs), wanted(x, low, high), str(known))


@pytest.mark.parametrize(("low", "high"), list(product(LIMITS, LIMITS)))
@pytest.mark.parametrize("groups", [1, 16])
def test_behind_a_convolution(low, high, groups, rng):
    """As its end, in the kernels of one image's channels and of channels side by side."""
    x = rng.normal(0, 3, (1, 16, 5, 7)).astype(np.float32)
    if groups == 16:  # each place is one product
        x.flat[:: x.size // len(NUMBERS)][: len(NUMBERS)] = NUMBERS
    weight = (
        np.eye(16, dtype=np.float32)[..., None, None] if groups == 1 else np.ones((16, 1, 1, 1))
    )
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], group=groups),
        helper.make_node("Clip", ["c", "low", "high"], ["y"]),
    ]
    constants = {"w": weight.astype(np.float32), "low": np.float32(low), "high": np.float32(high)}
    proto = model(nodes, [tensor("x", x.shape)], [tensor("y", None)], constants, 13)
    np.testing.assert_array_equal(run(proto, {"x": x}), wanted(x, low, high))


@pytest.mark.parametrize("opset", [6, 7, 10])
@pytest.mark.parametrize("limits", [{}, {"min": -1.0}, {"max": 1.0}])
def test_limits_as_attributes_have_finite_defaults(opset, limits):
    x = NUMBERS[~np.isnan(NUMBERS)]
    proto, inputs = one_node("Clip", [x], opset, **limits)
    found = run(proto, inputs)
    np.testing.assert_array_equal(found, onnxruntime_outputs(proto, inputs)[0])
    assert np.isfinite(found).all()


def test_limits_as_attributes_that_are_nan():
    proto, inputs = one_node("Clip", [NUMBERS], 6, min=float("nan"))
    assert np.isnan(run(proto, inputs)).all()


def test_without_limits_from_opset_11_on():
    proto, inputs = one_node("Clip", [NUMBERS], 13)
    np.testing.assert_array_equal(run(proto, inputs), NUMBERS)


def test_integers_whose_highest_is_below_the_lowest():
    x = np.array([-5, 0, 3, 9], np.int32)
    proto, inputs = one_node("Clip", [x, np.int32(4), np.int32(1)], 13, known=(1, 2))
    assert proto.graph.input[0].type.tensor_type.elem_type == TensorProto.INT32
    np.testing.assert_array_equal(run(proto, inputs), np.full(4, 1))


def test_a_record_with_nan_is_refused():
    """Kernels and ends of convolutions would each take it for something else."""
    with pytest.raises(InputError, match="clip: expected numbers as limits, found nan"):
        Clip(np.nan, 1.0).infer([Value("x", (3,))])
    assert Clip(3.0, 1.0) == Clip(1.0, 1.0)
