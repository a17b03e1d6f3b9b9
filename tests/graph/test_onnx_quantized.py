"""Quantized operators of files, beside ONNX Runtime, and scales that cannot be."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import model, one_node, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.graph.onnx import load

MICROSOFT = [helper.make_opsetid("com.microsoft", 1)]
F32 = np.float32


def integers(rng, dtype, *shape):
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def both(operator, arrays, domain="com.microsoft", known=None, **attributes):
    """Returns what the engine and ONNX Runtime make of one node; parameters are constants."""
    known = range(1, len(arrays)) if known is None else known
    proto, fed = one_node(operator, arrays, known=known, **attributes)
    proto.graph.node[0].domain = domain
    proto.opset_import.extend(MICROSOFT)
    (name,) = (value.name for value in proto.graph.output)
    return Engine(proto, device="cpu").run(fed)[name], onnxruntime_outputs(proto, fed)[0]


def at_most_one_step(found, other, ties: float = 0.05):
    """ONNX Runtime multiplies where the standard divides: a result near the middle may round otherwise."""
    assert found.dtype == other.dtype
    assert found.shape == other.shape
    apart = np.abs(found.astype(int) - other)
    assert apart.max() <= 1
    assert (apart > 0).mean() <= ties


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_pointwise_operators_of_onnx_runtime(rng, dtype):
    a, b, zero = (
        integers(rng, dtype, 2, 4, 6, 5),
        integers(rng, dtype, 4, 1, 1),
        integers(rng, dtype),
    )
    one, other, out = F32(0.031), F32(0.027), F32(0.055)
    last = integers(rng, dtype)
    for operator in ("QLinearAdd", "QLinearMul"):
        at_most_one_step(*both(operator, [a, one, zero, b, other, last, out, zero]))
    at_most_one_step(*both("QLinearSigmoid", [a, one, zero, F32(1 / 256), last]))
    at_most_one_step(*both("QLinearLeakyRelu", [a, one, zero, other, last], alpha=0.2))
    pooled = [a, one, zero, other, last]
    at_most_one_step(*both("QLinearGlobalAveragePool", pooled, channels_last=0))
    at_most_one_step(*both("QLinearGlobalAveragePool", pooled, channels_last=1))
    window = {"kernel_shape": [2, 3], "strides": [2, 1]}
    at_most_one_step(*both("QLinearAveragePool", pooled, **window))
    more = integers(rng, dtype, 2, 3, 6, 5)
    parts = [out, zero, a, one, zero, more, other, last]
    at_most_one_step(*both("QLinearConcat", parts, known=(0, 1, 3, 4, 6, 7), axis=1))


@pytest.mark.parametrize("kinds", [("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8")])
def test_convolutions_and_products(rng, kinds):
    x, w = integers(rng, kinds[0], 2, 6, 7, 5), integers(rng, kinds[1], 4, 3, 3, 2)
    scales = rng.uniform(0.001, 0.01, 4).astype(F32)
    zero, w_zero = (
        integers(rng, kinds[0]),
        integers(rng, kinds[1]) if "u" in kinds[1] else np.int8(0),
    )
    zeros = np.full(4, w_zero)
    bias = rng.integers(-3000, 3000, 4).astype(np.int32)
    layer = {"group": 2, "strides": [2, 1], "pads": [1, 0, 1, 1]}
    given = [x, F32(0.02), zero, w, scales, zeros, F32(0.03), zero, bias]
    at_most_one_step(*both("QLinearConv", given, "", **layer))
    row = [
        np.ascontiguousarray(x[:, :, 0]),
        *given[1:3],
        np.ascontiguousarray(w[:, :, 0]),
        *given[4:],
    ]
    at_most_one_step(*both("QLinearConv", row, "", group=2, pads=[1, 0]))
    a, b = integers(rng, kinds[0], 5, 8), integers(rng, kinds[1], 8, 4)
    given = [a, F32(0.02), zero, b, F32(0.01), w_zero, F32(0.05), zero]
    at_most_one_step(*both("QLinearMatMul", given, ""))
    given = [a, F32(0.02), zero, b, scales, zeros, bias, F32(0.05), zero]
    at_most_one_step(*both("QGemm", given, transB=0))
    given = [a, F32(0.02), zero, b.T.copy(), scales, zeros, bias]
    found, other = both("QGemm", given, transB=1, alpha=0.5)
    np.testing.assert_allclose(found, other, rtol=1e-5)
    if kinds[0] == "uint8":  # ONNX Runtime has no others
        assert np.array_equal(*both("MatMulInteger", [a, b, zero, w_zero], ""))
        assert np.array_equal(*both("ConvInteger", [x, w, zero, w_zero], "", group=2))


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_an_lstm_that_is_quantized_as_it_runs(rng, direction):
    d, steps, inputs, hidden = 1 + (direction != "forward"), 3, 5, 4
    w, r = (
        integers(rng, "int8", d, inputs, 4 * hidden),
        integers(rng, "int8", d, hidden, 4 * hidden),
    )
    x, b = rng.normal(size=(steps, 1, inputs)).astype(F32), rng.normal(0, 0.1, (d, 8 * hidden))
    scale, zero = (
        rng.uniform(0.002, 0.006, (d, 4 * hidden)).astype(F32),
        np.zeros((d, 4 * hidden), np.int8),
    )
    arrays = [x, w, r, b.astype(F32), None, None, None, None, scale, zero, scale, zero]
    known = (1, 2, 3, 8, 9, 10, 11)
    found, other = both(
        "DynamicQuantizeLSTM", arrays, known=known, hidden_size=hidden, direction=direction
    )
    assert found.shape == other.shape
    np.testing.assert_allclose(found, other, atol=2e-3)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_quantizing_along_an_axis(rng, axis, dtype):
    x = rng.normal(0, 4, (3, 4, 5)).astype(F32)
    scale = rng.uniform(0.01, 0.1, x.shape[axis]).astype(F32)
    zero = integers(rng, dtype, x.shape[axis])
    found, other = both("QuantizeLinear", [x, scale, zero], "", axis=axis, opset=21)
    assert np.array_equal(found, other)
    found, other = both("DequantizeLinear", [found, scale, zero], "", axis=axis, opset=21)
    assert np.array_equal(found, other)


@pytest.mark.parametrize("wrong", [0.0, -0.5, np.nan, np.inf])
@pytest.mark.parametrize("place", ["QuantizeLinear", "DequantizeLinear", "QLinearConv"])
def test_scales_that_are_no_positive_numbers_are_refused(wrong, place):
    x, wrong = np.zeros((1, 1, 2, 2), F32), F32(wrong)
    zero, w = np.uint8(1), np.zeros((1, 1, 1, 1), np.uint8)
    arrays = {
        "QuantizeLinear": [x, wrong, zero],
        "DequantizeLinear": [x.astype(np.uint8), wrong, zero],
        "QLinearConv": [x.astype(np.uint8), F32(1), zero, w, wrong, zero, F32(1), zero],
    }[place]
    proto, _ = one_node(place, arrays, known=range(1, len(arrays)))
    with pytest.raises(
        InputError, match=rf"node {place}_0 .*scale: expected positive finite"
    ) as error:
        load(proto)
    assert "\n" not in str(error.value)


def test_a_zero_point_of_another_type_is_refused():
    x = np.zeros((1, 2), np.uint8)
    proto, _ = one_node("DequantizeLinear", [x, F32(1), np.int32(2**31 - 1)], known=(1, 2))
    with pytest.raises(InputError, match="zero_point: expected uint8, found int32"):
        load(proto)
    proto, fed = one_node(
        "DequantizeLinear", [x.astype(np.int32), F32(1e28), np.int32(-(2**31))], known=(1, 2)
    )
    assert Engine(proto, device="cpu").run(fed)["y0"][0, 0] == np.float32(2.0**31 * 1e28)


@pytest.mark.parametrize("packed", [True, False])
def test_weights_of_four_bits(rng, packed):
    numbers = rng.integers(-8, 8, (3, 5))
    array = numbers.astype(helper.tensor_dtype_to_np_dtype(TensorProto.INT4))
    stored = onnx.numpy_helper.from_array(array, "w")
    if not packed:
        data = np.frombuffer(stored.raw_data, np.uint8)
        stored.ClearField("raw_data")
        stored.int32_data.extend(data.tolist())
    proto = model(
        [helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0),
         helper.make_node("MatMul", ["x", "d"], ["y"])],
        [tensor("x", [2, 3])], [tensor("y", [2, 5])], {"s": F32([0.5, 0.25, 2])}, opset=21,
    )  # fmt: skip
    proto.graph.initializer.append(stored)
    x = rng.normal(size=(2, 3)).astype(F32)
    found = Engine(proto, device="cpu").run({"x": x})["y"]
    wanted = x @ (numbers * np.array([[0.5], [0.25], [2]]))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    proto.graph.initializer[1].dims[:] = [3, 6]
    with pytest.raises(InputError, match="'w': expected 9 bytes for int4"):
        load(proto)
