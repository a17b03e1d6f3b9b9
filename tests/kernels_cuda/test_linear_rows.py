"""linear_rows: linear layers of a few rows on CUDA, with weights kept in each type."""

from __future__ import annotations

import math

import halves
import numpy as np
import pytest
import tolerances
from conftest import Device
from native import call, check_guards, epilogue, guarded, rounded, values

from cnn_engine import _cpu
from cnn_engine.engine.check import ROUNDING
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.unary import Relu, Sigmoid

pytestmark = pytest.mark.gpu

Function = _cpu.UnaryFunction
NONE = Function.clip, -math.inf, math.inf

# rows, features, outputs
SHAPES = [
    (1, 2048, 1000),
    (1, 25088, 40),
    (2, 960, 240),
    (5, 8, 33),
    (8, 72, 24),
    (13, 1280, 100),
    (1, 1, 1),
    (3, 7, 5),
    (4, 515, 130),
    (0, 16, 4),
    # Weights that come by bulk copies: few outputs of many pieces; several turns, whose rows end in a piece.
    (1, 25088, 200),
    (1, 1032, 4500),
    # So many that no cache keeps them: rows of more than rings and registers hold, of as much, of less.
    (1, 13000, 2600),
    (1, 12544, 2680),
    (1, 4096, 8200),
]


def run(
    x, weight, bias, compute_dtype="float32", activation=NONE, storage_dtype=("float32", "float32")
):
    device = Device("cuda")
    shape = _cpu.LinearShape(len(x), weight.shape[1], len(weight))
    kind = getattr(_cpu.ElementType, compute_dtype)
    size = device_function("linear_rows_packed")(shape, kind, 0)
    packed = device.library.zeros(size, np.uint8)
    call(device, "linear_rows_pack", device.put(weight), packed, shape, kind)
    dtype = np.float32 if storage_dtype[1] == "float32" else np.uint16
    out, memory = guarded(device, (len(x), len(weight)), dtype)
    call(
        device, "linear_rows", *values(halves.put(device, x, storage_dtype[0]), storage_dtype[0]), packed,
        *values(out, storage_dtype[1]), shape, kind, *epilogue(device.put(bias), activation),
    )  # fmt: skip
    check_guards(device, memory, dtype)
    found = device.get(out)
    return halves.wide(
        found.view(np.float16) if storage_dtype[1] == "float16" else found, storage_dtype[1]
    )


def device_function(name):
    from cnn_engine.devices import cuda_module

    return getattr(cuda_module.load(), name)


@pytest.mark.parametrize("compute_dtype", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_reference(rng, shape, compute_dtype):
    n, f, m = shape
    x, weight, bias = (rng.standard_normal(s).astype(np.float32) for s in ((n, f), (m, f), (m,)))
    size = np.abs(x).astype(np.float64) @ np.abs(weight).T
    limit = tolerances.sum_of_products(f, size + np.abs(bias))
    if compute_dtype in ("float16", "bfloat16"):
        limit = limit + ROUNDING[compute_dtype] * size
    wanted = Linear().reference(x, weight, bias)
    tolerances.assert_close(run(x, weight, bias, compute_dtype), wanted, limit)
    bare = Linear().reference(x, weight)
    tolerances.assert_close(run(x, weight, None, compute_dtype), bare, limit)
    for activation, op in (((Function.relu, 0, 0), Relu()), ((Function.sigmoid, 0, 0), Sigmoid())):
        found = run(x, weight, bias, compute_dtype, activation)
        wide = limit + tolerances.functions(wanted)
        tolerances.assert_close(found, rounded(op.reference(wanted)), wide)


@pytest.mark.parametrize("compute_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_in_16_bits(rng, shape, compute_dtype):
    n, f, m = shape
    x, weight, bias = (rng.integers(-2, 3, s).astype(np.float32) for s in ((n, f), (m, f), (m,)))
    wanted = Linear().reference(x, weight, bias)
    for storage_dtype in (
        (compute_dtype, compute_dtype),
        (compute_dtype, "float32"),
        ("float32", compute_dtype),
    ):
        found = run(x, weight, bias, compute_dtype, storage_dtype=storage_dtype)
        assert np.array_equal(found, halves.rounded(wanted, storage_dtype[1]))


@pytest.mark.parametrize("compute_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(8, 600, 50), (3, 4104, 1100), (3, 13000, 2600)], ids=str)
def test_each_row_has_the_same_bits_among_others(rng, shape, compute_dtype):
    n, f, m = shape
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((n, f), (m, f)))
    together = run(x, weight, None, compute_dtype)
    alone = run(x[2:3], weight, None, compute_dtype)
    assert np.array_equal(alone[0], together[2])
    assert np.array_equal(run(x[2:3], weight, None, compute_dtype), alone)


def test_what_is_not_finite_stays_where_it_is_read(rng):
    """Of many weights: an infinity of one output alone, and NaN of the features in all."""
    x, weight = (rng.standard_normal(s).astype(np.float32) for s in ((1, 4096), (1100, 4096)))
    expected = run(x, weight, None, "float16")
    weight[7, 4095] = math.inf
    found = run(x, weight, None, "float16")
    assert found[0, 7] == math.copysign(math.inf, x[0, 4095])
    assert np.array_equal(np.delete(found, 7, 1), np.delete(expected, 7, 1))
    x[0, 2049] = math.nan
    assert np.isnan(run(x, weight, None, "float16")).all()
