"""Pools over images whose channels lie side by side: against float64, and to the NCHW kernels' bits."""

from __future__ import annotations

import halves
import numpy as np
import pytest
import tolerances
from conftest import Device
from native import call, channels_last

from cnn_engine import _cpu
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.max_pool2d import MaxPool2d

# n, c, h, w, kernel, stride, (above, left, below, right), dilation, extra rows and columns (of averages)
CASES = [
    (2, 16, 12, 10, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), (0, 0)),
    (1, 64, 11, 13, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (1, 0)),
    (1, 72, 9, 9, (3, 3), (2, 2), (0, 0, 0, 0), (1, 1), (0, 1)),
    (2, 100, 5, 7, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (0, 0)),
    (1, 40, 9, 8, (3, 2), (1, 3), (2, 0, 1, 1), (2, 3), (0, 2)),
    (1, 3, 6, 30, (1, 5), (1, 2), (0, 4, 0, 3), (1, 1), (0, 0)),
    (3, 19, 7, 7, (7, 7), (1, 1), (0, 0, 0, 0), (1, 1), (0, 0)),
    (1, 130, 4, 4, (3, 3), (1, 1), (2, 2, 2, 2), (1, 1), (0, 0)),
    (0, 8, 4, 4, (2, 2), (1, 1), (0, 0, 0, 0), (1, 1), (0, 0)),
    (1, 1, 1, 1, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (0, 0)),
]
GUARD = np.float32(-7.25e22)


def shape_of(kind, case):
    n, c, h, w, kernel, stride, padding, dilation, extra = case
    numbers = n, c, h, w, *kernel, *stride, *padding, *dilation
    return (
        _cpu.MaxPool2dShape(*numbers)
        if kind == "max"
        else _cpu.AveragePool2dShape(*numbers, *extra)
    )


def run(kind, case, x, options=(), *, threads=1, more=(0, 0), place="cpu", storage_dtype="float32"):
    """Calls the kernel with pitches of ``more`` elements than channels; what lies between must stay."""
    device = Device(place)
    n, c = x.shape[:2]
    shape = shape_of(kind, case)
    images = channels_last(x, more[0])
    guard = GUARD if storage_dtype == "float32" else np.float32(-72.5)
    size = n * shape.out_h * shape.out_w * (c + more[1]) + 64
    memory = halves.put(device, np.full(size, guard), storage_dtype)
    types = () if place == "cpu" else (halves.kind(storage_dtype),)
    call(
        device, f"{kind}_pool2d_nhwc", halves.put(device, images, storage_dtype), memory[32:], shape,
        c + more[0], c + more[1], *options, *types, threads=threads,
    )  # fmt: skip
    memory = halves.get(device, memory, storage_dtype)
    out = memory[32:-32].reshape(n, shape.out_h, shape.out_w, c + more[1])
    assert (memory[:32] == guard).all()
    assert (memory[-32:] == guard).all()
    assert (out[..., c:] == guard).all()
    return np.ascontiguousarray(out[..., :c].transpose(0, 3, 1, 2))


def numbers(rng, case):
    """Numbers with NaN and both infinities among them."""
    x = rng.standard_normal(case[:4]).astype(np.float32)
    for special in (np.nan, np.inf, -np.inf):
        x[rng.random(x.shape) < 0.01] = special
    return x


@pytest.mark.parametrize("case", CASES, ids=str)
def test_maximum(rng, instruction_set, case):
    x = numbers(rng, case)
    wanted = MaxPool2d(*case[4:8]).reference(x)
    for more in ((0, 0), (5, 3)):
        tolerances.assert_close(run("max", case, x, more=more), wanted, 0, case=case)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_average(rng, instruction_set, case, counted):
    x = rng.standard_normal(case[:4]).astype(np.float32)
    record = AveragePool2d(*case[4:], counted)
    found = run("average", case, x, (counted,), more=(5, 3))
    terms = case[4][0] * case[4][1] + 1
    bound = np.nan_to_num(tolerances.sum_of_products(terms, record.reference(np.abs(x))))
    tolerances.assert_close(found, record.reference(x), bound, case=case)
    with np.errstate(invalid="ignore"):
        x = numbers(rng, case)
        same = np.empty(found.shape, np.float32)
        shape = shape_of("average", case)
        _cpu.average_pool2d(x.ctypes.data, same.ctypes.data, shape, counted, 1)
        np.testing.assert_array_equal(run("average", case, x, (counted,)), same)


@pytest.mark.parametrize(("kind", "options"), [("max", ()), ("average", (True,))])
def test_same_bits_with_any_threads_and_batch(rng, kind, options):
    case = (8, 72, 40, 30, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (0, 0))
    x = numbers(rng, case)
    one = run(kind, case, x, options)
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(run(kind, case, x, options, threads=threads), one)
    alone = run(kind, (1, *case[1:]), x[3:4], options)
    np.testing.assert_array_equal(alone[0], one[3])


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(0, 0), (5, 3), (4, 8)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_cuda_as_on_the_cpu(rng, case, more):
    x = numbers(rng, case)
    wanted = run("max", case, x)
    np.testing.assert_array_equal(run("max", case, x, more=more, place="cuda"), wanted)
    x = rng.standard_normal(case[:4]).astype(np.float32)
    for counted in (False, True):
        wanted = run("average", case, x, (counted,))
        found = run("average", case, x, (counted,), more=more, place="cuda")
        tolerances.assert_close(found, wanted, tolerances.functions(wanted), case=case)


@pytest.mark.gpu
@pytest.mark.parametrize("storage_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_16_bits(rng, case, storage_dtype):
    x = halves.rounded(numbers(rng, case), storage_dtype)
    for more in ((0, 0), (5, 3), (4, 8)):
        found = run("max", case, x, more=more, place="cuda", storage_dtype=storage_dtype)
        np.testing.assert_array_equal(found, run("max", case, x))
        whole = rng.integers(-8, 9, x.shape).astype(np.float32)
        found = run(
            "average", case, whole, (True,), more=more, place="cuda", storage_dtype=storage_dtype
        )
        wanted = run("average", case, whole, (True,), place="cuda")
        np.testing.assert_array_equal(found, halves.rounded(wanted, storage_dtype))
