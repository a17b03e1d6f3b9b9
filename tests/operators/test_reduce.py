"""The kernels along an axis: reduce, arg_extreme, cumulative, softmax_axis and interpolate_axis."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import tolerances
from native import call, check_guards, guarded, rounded
from onnx_models import one_node

from cnn_engine import Engine, _cpu
from cnn_engine.operators.order import CumProd, CumSum


def log_sum_exp(x):
    top = x.max(axis=1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    return np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]


REFERENCES = {
    "sum": lambda x: x.sum(axis=1),
    "mean": lambda x: x.sum(axis=1) / np.float64(x.shape[1]),
    "max": lambda x: x.max(axis=1, initial=-np.inf),
    "min": lambda x: x.min(axis=1, initial=np.inf),
    "prod": lambda x: x.prod(axis=1),
    "l1": lambda x: np.abs(x).sum(axis=1),
    "l2": lambda x: np.sqrt(np.square(x).sum(axis=1)),
    "sum_square": lambda x: np.square(x).sum(axis=1),
    "log_sum": lambda x: np.log(x.sum(axis=1)),
    "log_sum_exp": log_sum_exp,
}

#: [outer, axis, inner]: lines and columns, short and long, many and few, empty and single ones.
SHAPES = [
    (1, 1, 1),
    (3, 49, 1),
    (5, 64, 1),
    (2, 2047, 1),
    (2, 2048, 1),
    (3, 2051, 1),
    (70_001, 3, 1),
    (1, 200_003, 1),
    (4, 7, 5),
    (2, 100, 33),
    (1, 16, 64),
    (3, 15, 40),
    (2, 9, 65_537),
    (1, 5000, 3),
    (1, 12544, 32),
    (2, 784, 72),
    (1, 49, 2048),
    (0, 4, 3),
    (3, 4, 0),
    (3, 0, 1),
    (2, 0, 5),
]

LINES = [
    [1, np.nan, 2, -1],
    [np.inf, 1, 2, 3],
    [-np.inf, 1, 2, -2],
    [-np.inf] * 4,
    [np.inf, -np.inf, 0, 1],
    [np.nan, np.inf, np.nan, -np.inf],
    [3.4e38, 3.4e38, -3.4e38, 3.4e38],
    [-0.0, 0.0, -0.0, 0.0],
    [1, 1, 1, 1],
]


def reduce(device, name, x):
    out, memory = device.guarded((x.shape[0], x.shape[2]))
    shape = _cpu.AxisShape(*x.shape)
    call(device, "reduce", device.put(x), out, shape, getattr(_cpu.Reduction, name))
    device.check_guards(memory)
    return device.get(out)


def check_reduce(device, name, x):
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = REFERENCES[name](wide)
        magnitude = np.abs(wide).sum(axis=1) / (max(1, x.shape[1]) if name == "mean" else 1)
    wanted = rounded(wanted)
    bound = tolerances.reduction(name, wanted, magnitude)
    tolerances.assert_close(reduce(device, name, x), wanted, bound, name=name, shape=x.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "l2", "log_sum_exp"])
def test_reduce(device, rng, name, shape):
    check_reduce(device, name, (rng.standard_normal(shape) + 0.1).astype(np.float32))


@pytest.mark.parametrize("shape", [(3, 49, 1), (2, 3000, 1), (2, 30, 20), (2, 9, 65_537)], ids=str)
@pytest.mark.parametrize("name", REFERENCES)
def test_every_reduction(device, rng, name, shape):
    x = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if name != "log_sum":
        x *= rng.choice([-1, 1], shape).astype(np.float32)
    check_reduce(device, name, x)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_numbers_that_are_not_finite(device, name, columns):
    x = np.array(LINES, np.float32)
    check_reduce(device, name, x.T[None].copy() if columns else x[:, :, None].copy())


def test_sums_of_large_numbers_keep_their_digits(device, rng):
    x = (1e4 + rng.standard_normal((2, 100_000, 1))).astype(np.float32)
    check_reduce(device, "sum", x)
    check_reduce(device, "mean", x)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_exponentials_of_integers(dtype):
    """The logarithm is cut off towards 0; the sum of its exponentials may be beyond any type."""
    x = np.array([[1, 2, 3, 4, -9], [2000, 1999, -5, 0, 1]], dtype)
    model, inputs = one_node("ReduceLogSumExp", [x, np.array([1])], 18, known=[1])
    (found,) = Engine(model, device="cpu").run(inputs).values()
    np.testing.assert_array_equal(found, np.array([[4], [2000]], dtype), strict=True)


@pytest.mark.parametrize("axis", [3, 49, 512, 513, 3001])
@pytest.mark.parametrize("name", ["mean", "prod", "max", "min"])
def test_a_line_is_reduced_as_if_alone(instruction_set, rng, name, axis):
    """By the same bits, however many lines there are: kernels take several at once."""
    x = rng.uniform(0.9, 1.1, (7, axis, 1)).astype(np.float32)
    x[3, axis // 2] = np.nan

    def reduced(lines):
        out = np.empty(len(lines), np.float32)
        shape = _cpu.AxisShape(*lines.shape)
        _cpu.reduce(lines.ctypes.data, out.ctypes.data, shape, getattr(_cpu.Reduction, name), 2)
        return out

    together = reduced(x)
    assert np.isnan(together).nonzero()[0].tolist() == [3]
    alone = [reduced(x[i : i + 1].copy()) for i in range(len(x))]
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1]], ids=str)
def test_arg_extreme(device, rng, shape, last, largest):
    x = rng.integers(-9, 9, shape).astype(np.float32)  # with many equals
    check_arg(device, x, last, largest)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("columns", [False, True])
def test_arg_extreme_of_numbers_that_are_not_finite(device, columns, last, largest):
    x = np.array(LINES, np.float32)
    check_arg(device, x.T[None].copy() if columns else x[:, :, None].copy(), last, largest)


def check_arg(device, x, last, largest):
    out, memory = guarded(device, (x.shape[0], x.shape[2]), np.int64)
    call(device, "arg_extreme", device.put(x), out, _cpu.AxisShape(*x.shape), largest, last)
    check_guards(device, memory, np.int64)
    find = np.argmax if largest else np.argmin
    wanted = x.shape[1] - 1 - find(x[:, ::-1], axis=1) if last else find(x, axis=1)
    np.testing.assert_array_equal(device.get(out), wanted)


@pytest.mark.parametrize("shape", [(3, 70_000, 1), (4, 70, 900)], ids=str)
@pytest.mark.parametrize("name", ["sum", "prod", "log_sum_exp"])
def test_bits_do_not_depend_on_threads(rng, name, shape):
    x = rng.uniform(0.9, 1.1, shape).astype(np.float32)
    found = []
    for threads in (1, 2, 5):
        out = np.empty((shape[0], shape[2]), np.float32)
        _cpu.reduce(
            x.ctypes.data, out.ctypes.data, _cpu.AxisShape(*shape), getattr(_cpu.Reduction, name),
            threads,
        )  # fmt: skip
        found.append(out)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


#: Where the kernels run that only CPUs have.
CPU = SimpleNamespace(kind="cpu", library=np, GUARD=64, get=lambda array: array)


def check_cumulative(x, product):
    """Compares with the reference bit by bit, written elsewhere and in place."""
    for exclusive, reverse, in_place in itertools.product((False, True), repeat=3):
        with np.errstate(all="ignore"):
            wanted = (CumProd if product else CumSum)(1, exclusive, reverse).reference(x)
            wanted = wanted.astype(np.float32)
        y, memory = guarded(CPU, x.shape, np.float32)
        if in_place:
            y[...] = x
        shape = _cpu.AxisShape(*x.shape)
        call(CPU, "cumulative", y if in_place else x, y, shape, product, exclusive, reverse)
        check_guards(CPU, memory, np.float32)
        np.testing.assert_array_equal(y, wanted)
        numbers = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(y[numbers]), np.signbit(wanted[numbers]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("product", [False, True])
def test_cumulative(instruction_set, rng, product, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 0.1] = -0.0
    check_cumulative(x, product)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("product", [False, True])
def test_cumulative_of_numbers_that_are_not_finite(instruction_set, product, columns):
    """Sums are float64's: those past float32 are infinite where they are written, and go on."""
    x = np.array([*LINES, [-0.0] * 4, [1e-45, -1e-45, 1e-45, 3e-39]], np.float32)
    check_cumulative(x.T[None].copy() if columns else x[:, :, None].copy(), product)


def softmax(x, logarithm):
    with np.errstate(all="ignore"):
        below = x - np.fmax.reduce(x, axis=1, keepdims=True, initial=-np.inf)
        sums = np.exp(below).sum(axis=1, keepdims=True)
        return below - np.log(sums) if logarithm else np.exp(below) / sums


def check_softmax(device, x, logarithm):
    out, memory = device.guarded(x.shape)
    call(device, "softmax_axis", device.put(x), out, _cpu.AxisShape(*x.shape), logarithm)
    device.check_guards(memory)
    wanted = rounded(softmax(x.astype(np.float64), logarithm))
    bound = tolerances.softmax(x)
    tolerances.assert_close(device.get(out), wanted, bound, shape=x.shape, logarithm=logarithm)


@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("scale", [1.0, 50.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_axis(device, rng, shape, scale, logarithm):
    check_softmax(device, (rng.standard_normal(shape) * scale).astype(np.float32), logarithm)


@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_softmax_of_numbers_that_are_not_finite(device, columns, logarithm):
    x = np.array(LINES, np.float32)
    check_softmax(device, x.T[None].copy() if columns else x[:, :, None].copy(), logarithm)


@pytest.mark.parametrize("shape", [(5, 100, 1), (2, 3000, 1), (3, 10, 7)], ids=str)
def test_softmax_in_place(device, rng, shape):
    x = rng.standard_normal(shape).astype(np.float32)
    y = device.put(x.copy())
    call(device, "softmax_axis", y, y, _cpu.AxisShape(*shape), False)
    wanted = softmax(x.astype(np.float64), False)
    tolerances.assert_close(device.get(y), wanted, tolerances.softmax(x), shape=shape)


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize(
    ("outer", "axis", "inner", "length"),
    [(1, 1, 1, 3), (6, 10, 1, 23), (3, 9, 14, 5), (2, 7, 64, 7), (70_000, 2, 1, 3), (0, 3, 2, 4)],
)
def test_interpolate_axis(device, rng, outer, axis, inner, length, taps):
    x = rng.standard_normal((outer, axis, inner)).astype(np.float32)
    index = rng.integers(0, axis, (length, taps))
    weight = rng.standard_normal((length, taps)).astype(np.float32)
    weight[rng.random((length, taps)) < 0.2] = 0
    out, memory = device.guarded((outer, length, inner))
    call(
        device, "interpolate_axis", device.put(x), device.put(index, np.int64), device.put(weight),
        out, _cpu.InterpolateShape(outer, axis, inner, length, taps),
    )  # fmt: skip
    device.check_guards(memory)
    taken = x.astype(np.float64)[:, index]  # [outer, length, taps, inner]
    products = taken * weight.astype(np.float64)[None, :, :, None]
    bound = tolerances.sum_of_products(taps, np.abs(products).sum(axis=2))
    tolerances.assert_close(device.get(out), products.sum(axis=2), bound, taps=taps)


def test_interpolation_leaves_out_what_has_no_weight(device):
    x = np.array([1, np.nan, np.inf, 4], np.float32).reshape(1, 4, 1)
    index = np.array([[0, 1], [2, 3]], np.int64)
    weight = np.array([[1, 0], [0, 0.5]], np.float32)
    for inner in (1, 3):
        wide = np.repeat(x, inner, axis=2)
        out, memory = device.guarded((1, 2, inner))
        call(
            device, "interpolate_axis", device.put(wide), device.put(index, np.int64),
            device.put(weight), out, _cpu.InterpolateShape(1, 4, inner, 2, 2),
        )  # fmt: skip
        device.check_guards(memory)
        np.testing.assert_array_equal(device.get(out), np.repeat([[[1.0], [2.0]]], inner, axis=2))
