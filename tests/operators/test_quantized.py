"""Quantized records: references against loops over Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine.errors import InputError
from cnn_engine.operators.channels_last import TO_FIRST, TO_LAST
from cnn_engine.operators.operator import Value
from cnn_engine.operators.quantized import (
    DequantizeLinear,
    DynamicQuantizeLinear,
    Lookup,
    QuantizeLinear,
)
from cnn_engine.operators.quantized_conv2d import QuantizedConv2d, QuantizedConv2dNhwc
from cnn_engine.operators.quantized_linear import QuantizedLinear, QuantizedMatmul
from cnn_engine.operators.quantized_pointwise import QuantizedAdd, QuantizedMean, QuantizedMul

f32 = np.float32


def run(op, *arrays):
    """Returns the reference's output after asserting that it is what the record infers."""
    values = [
        None if a is None else Value(f"x{i}", np.shape(a), a.dtype.name)
        for i, a in enumerate(arrays)
    ]
    ((shape, dtype),) = op.infer(values)
    found = op.reference(*arrays)
    assert (found.shape, found.dtype.name) == (shape, dtype.replace("float32", "float64"))
    return found


def integers(rng, dtype: str, *shape: int):
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def stored(v: float, zero: int, low: int, high: int) -> int:
    """Returns what the contract makes of one float32 number: Python rounds half to even, too."""
    return min(max(round(float(v)) + zero, low), high)


@pytest.mark.parametrize("record", [QuantizedConv2d, QuantizedConv2dNhwc])
@pytest.mark.parametrize("kinds", [("int8", "int8"), ("uint8", "int8"), ("uint8", "uint8")])
def test_conv2d_by_hand(rng, record, kinds):
    x, w = integers(rng, kinds[0], 2, 4, 5, 4), integers(rng, kinds[1], 6, 2, 3, 2)
    x_zero, w_zero = integers(rng, kinds[0]), integers(rng, kinds[1], 6)
    bias = rng.integers(-5000, 5000, 6).astype(np.int32)
    scale = rng.uniform(1e-4, 3e-3, 6).astype(f32)
    residual, r_scale, r_zero = integers(rng, "uint8", 2, 6, 3, 5), f32(0.7), np.uint8(3)
    y_zero, low, high = np.int8(-9), -9, 90
    op = record(low=low, high=high, stride=(2, 1), padding=(1, 1, 1, 1), groups=2)
    last = record is QuantizedConv2dNhwc
    turn = (lambda a: np.ascontiguousarray(a.transpose(TO_LAST))) if last else lambda a: a
    inputs = [turn(x), w, scale, bias, x_zero, w_zero, y_zero, turn(residual), r_scale, r_zero]
    y = run(op, *(np.asarray(a) for a in inputs))
    y = y.transpose(TO_FIRST) if last else y
    padded = np.full((2, 4, 7, 6), int(x_zero))
    padded[:, :, 1:6, 1:5] = x
    for n, k, i, j in np.ndindex(y.shape):
        group = padded[n, (k // 3) * 2 : (k // 3) * 2 + 2]
        total = int(bias[k]) + sum(
            (int(group[c, 2 * i + r, j + s]) - int(x_zero)) * (int(w[k, c, r, s]) - int(w_zero[k]))
            for c, r, s in np.ndindex(2, 3, 2)
        )
        v = f32(f32(total) * scale[k]) + f32(f32(int(residual[n, k, i, j]) - 3) * r_scale)
        assert y[n, k, i, j] == stored(f32(v), -9, low, high)


def test_sums_of_integers_are_as_int32_holds_them(rng):
    x, w = np.full((1, 70_000), 255, np.uint8), np.full((1, 70_000), -128, np.int8)
    total = (-255 * 128 * 70_000 + 2**31) % 2**32 - 2**31
    assert run(QuantizedLinear("int32"), x, w)[0, 0] == total
    scale = np.full(1, 1e-3, f32)
    assert run(QuantizedLinear("float32"), x, w, scale)[0, 0] == f32(total) * f32(1e-3)


def test_products_of_matrices_by_hand(rng):
    a, b = integers(rng, "uint8", 2, 3, 5), integers(rng, "int8", 5, 4)
    a_zero, b_zero = integers(rng, "uint8", 3, 1), integers(rng, "int8", 4)
    exact = (a.astype(int) - a_zero) @ (b.astype(int) - b_zero)
    assert np.array_equal(run(QuantizedMatmul("int32"), a, b, None, a_zero, b_zero), exact)
    scale = rng.uniform(1e-3, 4e-3, 4).astype(f32)
    y = run(QuantizedMatmul("uint8"), a, b, scale, a_zero, b_zero, np.uint8(100))
    linear = run(
        QuantizedLinear("uint8"), a[0], b.T.copy(), scale, None, a_zero[0, 0], b_zero, np.uint8(100)
    )
    for place in np.ndindex(exact.shape):
        v = f32(f32(exact[place]) * scale[place[-1]])
        assert y[place] == stored(v, 100, 0, 255)
    total = (a[0].astype(int) - int(a_zero[0, 0])) @ (b.astype(int) - b_zero)
    assert np.array_equal(linear, np.clip(np.rint(total.astype(f32) * scale) + 100, 0, 255))


def test_add_mul_and_mean_by_hand(rng):
    a, b = integers(rng, "uint8", 2, 3, 4), integers(rng, "int8", 3, 1)
    scales = f32(0.3), f32(0.8)
    added = run(
        QuantizedAdd("uint8", low=7),
        a,
        scales[0],
        np.uint8(9),
        b,
        scales[1],
        np.int8(-4),
        np.uint8(7),
    )
    product = run(QuantizedMul("int8"), a, np.uint8(9), b, np.int8(-4), f32(0.01), np.int8(5))
    for place in np.ndindex(a.shape):
        one, other = int(a[place]) - 9, int(b[place[1], 0]) + 4
        v = f32(f32(one) * scales[0]) + f32(f32(other) * scales[1])
        assert added[place] == stored(v, 7, 7, 255)
        assert product[place] == stored(f32(f32(one * other) * f32(0.01)), 5, -128, 127)
    mean = run(QuantizedMean("uint8", axes=(1, -1)), a, np.uint8(9), f32(1 / 12), None)
    for n in range(2):
        total = int(a[n].astype(int).sum()) - 12 * 9
        assert mean[n, 0, 0] == stored(f32(f32(total) * f32(1 / 12)), 0, 0, 255)


def test_ties_are_rounded_to_even_before_the_zero_point_is_added():
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], f32)
    y = run(QuantizeLinear(dtype="int8"), x, np.asarray(f32(1)), np.asarray(np.int8(3)))
    assert y.tolist() == [1, 1, 3, 3, 5, 5]


def test_quantities_past_the_type_saturate():
    x = np.array([-1e30, -np.inf, np.nan, np.inf, 1e30], f32)
    for dtype, low, high in (
        ("uint8", 0, 255),
        ("int8", -128, 127),
        ("int16", -(2**15), 2**15 - 1),
    ):
        y = run(
            QuantizeLinear(dtype=dtype), x, np.asarray(f32(0.5)), np.asarray(np.array(9, dtype))
        )
        assert y.tolist() == [low, low, low, high, high]


@given(st.integers(1, 7), st.integers(1, 4), st.sampled_from(["int8", "uint8", "int16", "uint16"]))
@settings(max_examples=30, deadline=None)
def test_blocks_are_scales_of_runs(size, block, dtype):
    rng = np.random.default_rng(size * 8 + block)
    blocks = -(-size // block)
    x, scale = rng.normal(size=(2, size, 3)), rng.uniform(0.01, 0.1, (2, blocks, 3)).astype(f32)
    zero = rng.integers(0, 9, (2, blocks, 3)).astype(dtype)
    op = QuantizeLinear(axis=1, block_size=block, dtype=dtype)
    q = run(op, x.astype(f32), scale, zero)
    back = run(DequantizeLinear(axis=1, block_size=block), q, scale, zero)
    for n, i, c in np.ndindex(x.shape):
        step, offset = scale[n, i // block, c], int(zero[n, i // block, c])
        info = np.iinfo(dtype)
        wanted = stored(f32(f32(x[n, i, c]) / step), offset, info.min, info.max)
        assert q[n, i, c] == wanted
        assert back[n, i, c] == pytest.approx((wanted - offset) * float(step), rel=1e-12, abs=1e-12)


def test_dynamic_range_holds_0_and_constant_zeros_have_a_scale():
    for x, scale, zero in (([2.0, 5.0], 5 / 255, 0), ([-5.0, -1.0], 5 / 255, 255), ([0.0], 1, 0)):
        found = DynamicQuantizeLinear().reference(np.array(x, f32))
        assert found[1] == f32(scale)
        assert int(found[2]) == zero
        assert np.allclose((found[0].astype(float) - zero) * found[1], x, atol=scale / 2)


def test_a_table_is_read_by_the_bits_of_a_number(rng):
    table = rng.permutation(256).astype(np.uint8)
    q = np.arange(-128, 128, dtype=np.int8).reshape(2, 128)
    y = run(Lookup(), q, table)
    assert all(y[place] == table[int(q[place]) % 256] for place in np.ndindex(q.shape))


@pytest.mark.parametrize(
    ("op", "values", "message"),
    [
        (QuantizedLinear(), {1: Value("w", (2, 3), "int16")}, "weight: expected int8 or uint8"),
        (QuantizedLinear(), {2: None}, "scale: expected one unless"),
        (
            QuantizedLinear(),
            {2: Value("s", (3,))},
            r"scale: expected \[2\] or \[\] or \[1\], found \[3\]",
        ),
        (QuantizedLinear(), {3: Value("b", (2,))}, "bias: expected int32"),
        (QuantizedLinear(), {4: Value("z", (), "int8")}, "x_zero: expected uint8"),
        (QuantizedLinear(low=300), {}, "low, high: expected a range"),
        (QuantizedLinear(dtype="int4"), {}, "dtype: expected int8, uint8"),
    ],
)
def test_what_does_not_fit_is_named(op, values, message):
    inputs = [Value("x", (4, 3), "uint8"), Value("w", (2, 3), "int8"), Value("s", (2,)), None, None]
    for place, value in values.items():
        inputs[place] = value
    with pytest.raises(InputError, match=message):
        op.infer(inputs)
