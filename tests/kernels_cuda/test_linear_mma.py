"""Linear layers on the tensor cores of Turing and later, on any such GPU: float16 products, float32 sums."""

from __future__ import annotations

import halves
import numpy as np
import pytest
import targets
from conftest import Device
from engines import single
from graphs import Builder
from native import NONE, call, check_guards, epilogue, guarded, packed

from cnn_engine import _cpu
from cnn_engine.engine.inspection import inspect
from cnn_engine.kernels.cuda.requirements import MMA_FLOAT16
from cnn_engine.operators.linear import Linear
from cnn_engine.target import Target

# rows, features, outputs: full tiles; one row; odd ones, whose x is not read in fours; none
SHAPES = [(64, 64, 64), (1, 2048, 1000), (100, 77, 65), (7, 3, 1), (130, 1028, 129), (0, 8, 8)]


@pytest.fixture
def tensor_cores():
    targets.need(MMA_FLOAT16)


def run(x, weight, bias=None, activation=NONE, overflow=halves.NO_FLAG):
    device, shape = Device("cuda"), _cpu.LinearShape(len(x), weight.shape[1], len(weight))
    out, memory = guarded(device, (len(x), len(weight)), np.float32)
    call(
        device, "linear_mma", device.put(x), packed(device, "linear_mma", [weight], shape), out, shape,
        *epilogue(device.put(bias), activation, overflow),
    )  # fmt: skip
    check_guards(device, memory, np.float32)
    return device.get(out)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_numbers_are_exact(rng, tensor_cores, shape):
    n, features, outputs = shape
    x = rng.integers(-4, 5, (n, features)).astype(np.float32)
    weight = rng.integers(-4, 5, (outputs, features)).astype(np.float32)
    bias = rng.integers(-9, 10, outputs).astype(np.float32)
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    assert np.array_equal(run(x, weight, bias), wanted)
    relu = _cpu.UnaryFunction.relu, 0, 0
    assert np.array_equal(run(x, weight, None, relu), np.maximum(wanted - bias, 0))


@pytest.mark.gpu
def test_operands_are_rounded_once(rng, tensor_cores):
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((33, 600), (70, 600)))
    rounded = [halves.rounded(array, "float16").astype(np.float64) for array in (x, weight)]
    wanted, sizes = rounded[0] @ rounded[1].T, abs(rounded[0]) @ abs(rounded[1]).T
    assert (abs(run(x, weight) - wanted) <= 2.0**-24 * (16 + 600 / 8) * sizes).all()


@pytest.mark.gpu
def test_what_float16_does_not_hold_is_told(tensor_cores):
    flag, weight = halves.OverflowFlag(), np.ones((4, 40), np.float32)
    for value, past in ((65504.0, False), (70000.0, True), (np.inf, False)):
        x = np.zeros((3, 40), np.float32)
        x[2, 39] = value
        found = run(x, weight, overflow=flag.overflow)
        assert flag.is_set() == past
        assert not found[:2].any()


def head():
    """A linear layer behind a convolution."""
    b = Builder((4, 3, 8, 8))
    x = b.relu(b.conv("images", 8))
    return single(b.graph(b.add(Linear(), x, b.constant((24, 8 * 8 * 8)))))


def test_a_t4_runs_it_in_float16():
    found = {
        dtype: inspect(head(), target=Target.named("t4"), dtype=dtype).on["cuda"].running
        for dtype in ("float32", "float16")
    }
    assert [node.kernel for node in found["float16"]].count("mma_float16") == 1
    assert "mma_float16" not in [node.kernel for node in found["float32"]]
