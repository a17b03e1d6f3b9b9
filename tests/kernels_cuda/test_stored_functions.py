"""Functions of tensors that lie in memory in 16 bits, on CUDA: against float64, rounded as stored."""

from __future__ import annotations

from itertools import chain

import halves
import numpy as np
import pytest
from conftest import Device
from native import call, dims, strides, values

from cnn_engine import _cpu

pytestmark = pytest.mark.gpu

#: How an input and the output lie in memory.
TYPES = [
    (a, b)
    for half in ("float16", "bfloat16")
    for a, b in ((half, half), (half, "float32"), ("float32", half))
]
#: Roundings of the result, of what is stored as float32 a few of its own.
CLOSE = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def same(found, wanted, storage_dtype, sizes=None):
    """Asserts that ``found`` is ``wanted`` but for the rounding of what is computed, and stored."""
    sizes = abs(wanted) if sizes is None else sizes
    limit = 1.01 * CLOSE[storage_dtype] * (abs(wanted) + 2.0**-14) + 2.0**-20 * sizes
    assert found.shape == wanted.shape
    assert (abs(found - wanted) <= limit).all(), abs(found - wanted).max()


def run(name, inputs, shape, types, *arguments):
    """Calls ``name`` with (array or None, type) of each input; returns the output, of ``types[-1]``.

    A parameter has no type: it is float32.
    """
    device = Device("cuda")
    placed = []
    for array, storage_dtype in inputs:
        there = None if array is None else halves.put(device, array, storage_dtype or "float32")
        placed += [there] if storage_dtype is None else values(there, storage_dtype)
    out = halves.put(device, np.full(shape, np.nan), types[-1])
    call(device, name, *placed, *values(out, types[-1]), *arguments)
    return halves.get(device, out, types[-1])


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 4100, 100_003])
def test_unary(rng, size, types):
    x = halves.rounded(rng.standard_normal(size), types[0])
    for function, wanted in (
        (_cpu.UnaryFunction.relu, np.maximum(x, 0)),
        (_cpu.UnaryFunction.exp, np.exp(x.astype(np.float64))),
    ):
        found = run(
            "unary_stored",
            [(x, types[0])],
            size,
            types,
            size,
            _cpu.Activation(function, 0, 0),
            halves.NO_FLAG,
        )
        same(found, wanted, types[1])


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(
    "shapes",
    [((2, 5, 5, 24), (2, 5, 5, 24)), ((2, 5, 5, 24), (2, 1, 1, 24)), ((3, 7), (1, 7)), ((4, 9, 8), ()),
     ((2, 6, 8), (6, 1)), ((1,), (1,))],
    ids=str,
)  # fmt: skip
def test_binary(rng, shapes, types):
    x, y = (rng.integers(-9, 10, shape).astype(np.float32) for shape in shapes)
    shape = np.broadcast_shapes(*shapes)
    taken = _cpu.BinaryShape(
        *dims(shape), *chain(*(strides(a, shape) for a in (x, y, np.empty(shape))))
    )
    for order in (types[0], "float32"), ("float32", types[0]):
        if "float16" not in (*order, types[1]) and "bfloat16" not in (*order, types[1]):
            continue
        inputs = list(zip((x, y), order, strict=True))
        for function, of in (
            (_cpu.BinaryFunction.add, np.add),
            (_cpu.BinaryFunction.mul, np.multiply),
        ):
            found = run("binary_stored", inputs, shape, types, taken, function, halves.NO_FLAG)
            assert np.array_equal(found, halves.rounded(of(x, y), types[1]))


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(49, 24), (1, 1), (7, 33), (500, 1024)], ids=str)
def test_affine_channel(rng, shape, types):
    x = halves.rounded(rng.standard_normal(shape), types[0])
    center, scale, shift = rng.standard_normal((3, shape[1])).astype(np.float32)
    parameters = [(a, None) for a in (center, scale, shift)]
    found = run(
        "affine_channel_stored", [(x, types[0]), *parameters], shape, types,
        _cpu.ChannelShape(*shape, 1), halves.NO_FLAG,
    )  # fmt: skip
    sizes = (abs(x) + abs(center)) * abs(scale) + abs(shift)
    same(found, (x.astype(np.float64) - center) * scale + shift, types[1], sizes)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(
    "shape", [(49, 768), (3, 96), (1, 1), (2, 37), (5, 2048), (6, 1999), (9, 384)], ids=str
)
def test_normalize_rows(rng, shape, types, centered):
    x = halves.rounded(rng.standard_normal(shape) + 0.5, types[0]).astype(np.float64)
    scale, shift = rng.standard_normal((2, shape[1])).astype(np.float32)
    mean = x.mean(1, keepdims=True) if centered else 0.0
    wanted = (x - mean) / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + 1e-5)
    for parameters in ((scale, shift), (None, None)):
        found = run(
            "normalize_rows_stored", [(x, types[0]), *((a, None) for a in parameters)], shape, types,
            _cpu.NormalizeRowsShape(shape[0], 1, shape[1], 1, 1e-5, centered), halves.NO_FLAG,
        )  # fmt: skip
        ends = wanted if parameters[0] is None else wanted * scale + shift
        sizes = 8 * (abs(wanted) + 1) * (1 if parameters[0] is None else abs(scale)) + abs(ends)
        same(found, ends, types[1], sizes)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 49, 2048), (3, 49, 960), (2, 12544, 32), (1, 3136, 72), (1, 1, 5), (2, 9, 37), (4, 100, 1),
     (1, 400, 4)],
    ids=str,
)  # fmt: skip
def test_mean(rng, shape, types):
    x = halves.rounded(rng.standard_normal(shape) + 1, types[0])
    wanted = x.astype(np.float64).mean(1)
    outer, _, inner = shape
    arguments = _cpu.AxisShape(*shape), halves.NO_FLAG
    found = run("mean_stored", [(x, types[0])], (outer, inner), types, *arguments)
    same(found, wanted, types[1], 4 * abs(x).mean(1))
    again = run("mean_stored", [(x, types[0])], (outer, inner), types, *arguments)
    assert np.array_equal(found, again)


def test_two_types_of_16_bits_are_refused():
    device = Device("cuda")
    x = device.put(np.zeros(4, np.uint16), np.uint16)
    relu = _cpu.Activation(_cpu.UnaryFunction.relu, 0, 0)
    with pytest.raises(ValueError, match="expected one type beside float32, found float16 and"):
        call(
            device, "unary_stored", *values(x, "float16"), *values(x, "bfloat16"), 4, relu, halves.NO_FLAG
        )  # fmt: skip
