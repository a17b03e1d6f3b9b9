"""Fourier transforms, cumulative operations, caches and bits: beside NumPy and ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from onnx import TensorProto
from onnx_models import one_node, onnxruntime_outputs

from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.graph.onnx import UnsupportedNodesError, load
from cnn_engine.operators.det import Det
from cnn_engine.operators.gather import TensorScatter
from cnn_engine.operators.operator import Value
from cnn_engine.operators.order import CumProd, CumSum
from cnn_engine.operators.signal import Dft, Stft


def parts(x):
    return np.stack([x.real, x.imag], axis=-1)


@pytest.mark.parametrize("length", [0, 5, 12])
@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("inverse", [False, True])
def test_transforms_of_complex_numbers(rng, length, axis, inverse):
    x = rng.standard_normal((2, 7, 9)) + 1j * rng.standard_normal((2, 7, 9))
    found = Dft(length, axis, inverse).reference(parts(x))
    transform = np.fft.ifft if inverse else np.fft.fft
    wanted = transform(x, length or None, axis if axis > 0 else 2)
    np.testing.assert_allclose(found, parts(wanted), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [8, 9])
def test_halves_of_transforms_tell_all(rng, length):
    x = rng.standard_normal((3, length, 1))
    half = Dft(0, 1, onesided=True).reference(x)
    assert half.shape == (3, length // 2 + 1, 2)
    back = Dft(length, 1, inverse=True, onesided=True).reference(half)
    np.testing.assert_allclose(back, x, atol=1e-12)


def test_what_transforms_take():
    with pytest.raises(InputError, match=r"real or complex numbers \[..., 1 or 2\]"):
        Dft().infer([Value("x", (4, 3))])
    with pytest.raises(InputError, match="another dimension than the last"):
        Dft(axis=-1).infer([Value("x", (4, 1))])
    with pytest.raises(InputError, match="onesided: expected real numbers"):
        Dft(onesided=True).infer([Value("x", (4, 2))])
    with pytest.raises(InputError, match="frames of up to L"):
        Stft(2, 9).infer([Value("x", (1, 8, 1))])


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [False, True])
def test_frames(rng, onesided, windowed):
    x = rng.standard_normal((2, 60, 1)).astype(np.float32)
    window = np.hanning(16).astype(np.float32) if windowed else None
    arrays = [x, np.int64(7), window, np.int64(16)]
    proto, inputs = one_node("STFT", arrays, 17, known=(1, 3), onesided=onesided)
    (wanted,) = onnxruntime_outputs(proto, inputs)
    found = Engine(proto, device="cpu").run(inputs)["y0"]
    assert found.shape == wanted.shape
    tolerances.assert_close(found, wanted, tolerances.sum_of_products(16, np.full(found.shape, 16)))


@pytest.mark.parametrize(("bins", "length", "rate"), [(8, 16, 8192), (40, 512, 16000)])
def test_mel_weights(bins, length, rate):
    arrays = [
        np.int64(bins),
        np.int64(length),
        np.int64(rate),
        np.float32(20),
        np.float32(rate / 2),
    ]
    proto, _ = one_node("MelWeightMatrix", arrays, 17, known=range(5))
    (wanted,) = onnxruntime_outputs(proto, {})
    np.testing.assert_allclose(load(proto).constants["y0"], wanted, rtol=1e-6)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_sums_and_products_up_to_each_element(exclusive, reverse):
    x = np.float64([[1, 2, 3, 4], [5, np.inf, 7, 8]])
    for record, of in ((CumSum, np.sum), (CumProd, np.prod)):
        y = record(1, exclusive, reverse).reference(x)
        for row, i in np.ndindex(x.shape):
            line = x[row, ::-1] if reverse else x[row]
            at = 3 - i if reverse else i
            assert y[row, i] == of(line[: at + (not exclusive)])
    assert CumProd(0, True).reference(np.zeros((0, 2))).shape == (0, 2)
    assert CumSum(0).reference(np.int32([2, 3])).dtype == np.int32


def test_rows_into_caches():
    cache, update = np.zeros((2, 1, 4, 1)), np.float64([[[[1], [2]]], [[[3], [4]]]])
    y = TensorScatter().reference(cache, update, np.int64([0, 2]))
    np.testing.assert_array_equal(y[:, 0, :, 0], [[1, 2, 0, 0], [0, 0, 3, 4]])
    y = TensorScatter("circular").reference(cache, update, np.int64([3, 1]))
    np.testing.assert_array_equal(y[:, 0, :, 0], [[2, 0, 0, 1], [0, 3, 4, 0]])
    with pytest.raises(InputError, match="write_indices: expected 0 to 2, found 3"):
        TensorScatter().reference(cache, update, np.int64([3, 1]))


def test_determinants(rng):
    x = rng.standard_normal((2, 3, 4, 4))
    y = Det().reference(x)
    assert y.shape == (2, 3)
    np.testing.assert_allclose(y[1, 2], np.prod(np.linalg.eigvals(x[1, 2])).real, rtol=1e-10)


def test_bits(rng):
    x = rng.standard_normal((2, 3)).astype(np.float32)
    proto, inputs = one_node("BitCast", [x], 26, to=TensorProto.INT32)
    np.testing.assert_array_equal(Engine(proto, device="cpu").run(inputs)["y0"], x.view(np.int32))
    proto, _ = one_node("BitCast", [x], 26, to=TensorProto.INT64)
    with pytest.raises(InputError, match="to: expected a type of float32's size, found int64"):
        load(proto)
    proto, _ = one_node("BitCast", [x.astype(np.float16)], 26, to=TensorProto.INT16)
    with pytest.raises(UnsupportedNodesError, match="the bits of float16 are not supported"):
        load(proto)
