"""The kernels binary and where: functions of elements that broadcast."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from native import SPECIAL, call, dims, rounded, strides

from cnn_engine import _cpu

REFERENCES = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
    "mod": np.mod,
    "fmod": np.fmod,
    "prelu": lambda x, y: np.where(x < 0, x * y, x),
}

#: Shapes of x and y: equal, scalars, channels, rows, columns, both repeated, odd and empty ones.
SHAPES = [
    ((), ()),
    ((1,), (7,)),
    ((1001,), (1001,)),
    ((1024,), ()),
    ((), (1023,)),
    ((2, 3, 8, 8), (2, 3, 8, 8)),
    ((2, 3, 8, 8), (3, 1, 1)),
    ((2, 3, 7, 7), (1, 3, 1, 1)),
    ((2, 3, 1, 1), (2, 3, 4, 4)),
    ((2, 1, 4, 5), (2, 3, 1, 5)),
    ((5, 1), (1, 6)),
    ((4, 12), (12,)),
    ((3, 33), (3, 1)),
    ((1, 2, 1, 3, 1, 2, 1, 4), (2, 1, 3, 1, 2, 1, 3, 1)),
    ((0, 3), (3,)),
    ((70_000, 2), (70_000, 1)),
    ((16, 4, 64), (1, 4, 64)),
]


def binary(device, name, x, y, out, shape, **options):
    sizes = _cpu.BinaryShape(
        *dims(shape), *strides(x, shape), *strides(y, shape), *strides(np.empty(shape), shape)
    )
    function = getattr(_cpu.BinaryFunction, name)
    call(device, "binary", device.put(x), device.put(y), out, sizes, function, **options)


def check(device, name, x, y):
    shape = np.broadcast_shapes(x.shape, y.shape)
    out, memory = device.guarded(shape)
    binary(device, name, x, y, out, shape)
    device.check_guards(memory)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64), y.astype(np.float64)
        # NumPy takes the root, of which pow(-inf, 1/2) is none, where the exponent is one number.
        wanted = rounded(REFERENCES[name](*(np.broadcast_to(a, shape).copy() for a in wide)))
    bound = tolerances.functions(wanted)
    tolerances.assert_close(device.get(out), wanted, bound, name=name, shapes=(x.shape, y.shape))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["add", "div", "prelu"])
def test_broadcasting(device, rng, name, shapes):
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    check(device, name, x, y)


@pytest.mark.parametrize("name", REFERENCES)
def test_every_pair_of_special_numbers(device, rng, name):
    numbers = np.concatenate([SPECIAL, rng.standard_normal(50).astype(np.float32) * 5])
    x, y = np.meshgrid(numbers, numbers)
    check(device, name, x.copy(), y.copy())


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, -1.0, 0.0, 1.0, 1.7])
def test_powers_of_one_exponent(device, rng, exponent):
    x = np.concatenate([SPECIAL, rng.standard_normal(1000).astype(np.float32) * 3])
    check(device, "pow", x, np.float32(exponent).reshape(()))


@pytest.mark.parametrize("name", ["add", "max"])
def test_in_place(device, rng, name):
    x, y = (rng.standard_normal((3, 5, 4)).astype(np.float32) for _ in range(2))
    shape = _cpu.BinaryShape(
        *dims(x.shape), *strides(x, x.shape), *strides(y, y.shape), *strides(x, x.shape)
    )
    function = getattr(_cpu.BinaryFunction, name)
    for first in (True, False):
        a, b = device.put(x.copy()), device.put(y.copy())
        call(device, "binary", a, b, a if first else b, shape, function)
        found = device.get(a if first else b)
        np.testing.assert_array_equal(found, REFERENCES[name](x, y))


def test_bits_do_not_depend_on_threads(rng):
    x = rng.standard_normal((6, 37, 501)).astype(np.float32)
    y = rng.standard_normal((37, 1)).astype(np.float32)
    found = []
    for threads in (1, 2, 5):
        out = np.empty_like(x)
        shape = _cpu.BinaryShape(
            *dims(x.shape), *strides(x, x.shape), *strides(y, x.shape), *strides(x, x.shape)
        )
        _cpu.binary(
            x.ctypes.data, y.ctypes.data, out.ctypes.data, shape, _cpu.BinaryFunction.div, threads
        )
        found.append(out)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 7), (5, 7), (5, 7)),
        ((5, 1), (5, 7), ()),
        ((), (3, 4), (4,)),
        ((3, 1, 4), (1, 2, 4), (3, 2, 1)),
        ((1,), (0, 3), (3,)),
        ((300, 301), (301,), (300, 1)),
    ],
    ids=str,
)
def test_where(device, rng, shapes):
    condition = rng.integers(0, 2, shapes[0]).astype(np.uint8)
    condition = condition * rng.integers(1, 256, shapes[0]).astype(np.uint8)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes[1:])
    shape = np.broadcast_shapes(*shapes)
    out, memory = device.guarded(shape)
    sizes = _cpu.WhereShape(
        *dims(shape), *strides(condition, shape), *strides(x, shape), *strides(y, shape)
    )
    arrays = device.put(condition, np.uint8), device.put(x), device.put(y)
    call(device, "where", *arrays, out, sizes)
    device.check_guards(memory)
    np.testing.assert_array_equal(device.get(out), np.where(condition, x, y))


def test_errors():
    with pytest.raises(ValueError, match="dimensions: expected at least 0, found -1"):
        _cpu.BinaryShape(*dims((-1, 2)), *[0] * 24)
    with pytest.raises(ValueError, match="elements, found more"):
        _cpu.BinaryShape(*dims((2**40, 2**40)), *[0] * 24)
