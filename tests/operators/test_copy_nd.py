"""The kernels that move elements: copy_nd, gather and fill."""

from __future__ import annotations

import numpy as np
import pytest
from native import address, call, check_guards, dims, guarded, strides

from cnn_engine import _cpu

DTYPES = ["uint8", "float16", "float32", "int64"]


def numbers(rng, shape, dtype):
    return rng.integers(0, 100, shape).astype(dtype)


def copy(device, source, view, out, target, **options):
    """Copies ``view``, a view of ``source``, into ``target``, a view of ``out`` [NumPy's strides]."""
    item = source.itemsize
    shape = _cpu.CopyShape(
        item, *dims(view.shape), *strides(view, view.shape), *strides(target, target.shape),
        (address(view) - address(source)) // item, (address(target) - address(out)) // item,
    )  # fmt: skip
    arrays = (source, out) if device is None else (device.put(source, source.dtype), None)
    if device is None:
        _cpu.copy_nd(address(arrays[0]), address(out), shape, options.get("threads", 2))
        return None
    found, memory = guarded(device, out.shape, out.dtype)
    found[...] = device.put(out, out.dtype)
    call(device, "copy_nd", arrays[0], found, shape)
    check_guards(device, memory, out.dtype)
    return device.get(found)


def check(device, rng, make_view, shape, dtype, make_target=None):
    source = numbers(rng, shape, dtype)
    view = make_view(source)
    out = np.full(view.shape if make_target is None else make_target[0], 101, dtype)
    target = out if make_target is None else make_target[1](out)
    found = copy(device, source, view, out, target)
    target[...] = view
    np.testing.assert_array_equal(found, out)


VIEWS = {
    "whole": ((3, 5, 7), lambda x: x),
    "transposed": ((37, 53), lambda x: x.T),
    "to channels last": ((2, 19, 13, 11), lambda x: x.transpose(0, 2, 3, 1)),
    "to channels first": ((2, 9, 10, 24), lambda x: x.transpose(0, 3, 1, 2)),
    "three channels last": ((2, 3, 33, 31), lambda x: x.transpose(0, 2, 3, 1)),
    "three channels first": ((2, 33, 31, 3), lambda x: x.transpose(0, 3, 1, 2)),
    "batches of transposes": ((3, 4, 40, 33), lambda x: x.swapaxes(2, 3)),
    "runs in another order": ((4, 5, 6, 16), lambda x: x.transpose(2, 0, 1, 3)),
    "reversed": ((5, 6, 7, 8), lambda x: x[::-1, ::-1, ::-1, ::-1]),
    "backwards steps": ((20, 30), lambda x: x[15:2:-3, 25::-2]),
    "a slice": ((4, 9, 32), lambda x: x[1:3, 2:7, 4:28]),
    "an odd slice": ((4, 9, 32), lambda x: x[1:3, 2:7, 3:22]),
    "every second": ((4, 9, 33), lambda x: x[:, ::2, ::2]),
    "expanded": ((4, 1, 5), lambda x: np.broadcast_to(x, (3, 4, 6, 5))),
    "expanded last": ((4, 5, 1), lambda x: np.broadcast_to(x, (4, 5, 9))),
    "a number expanded": ((), lambda x: np.broadcast_to(x, (4, 5, 9))),
    "eight dimensions": ((2, 3, 2, 2, 3, 2, 2, 3), lambda x: x.transpose(7, 1, 5, 3, 0, 6, 2, 4)),
    "depth to space": (
        (2, 12, 5, 6),
        lambda x: x.reshape(2, 2, 2, 3, 5, 6).transpose(0, 3, 4, 1, 5, 2),
    ),
    "empty": ((3, 0, 4), lambda x: x),
    "one": ((1, 1), lambda x: x),
    "a number": ((), lambda x: x),
    "many rows": ((70_001, 2), lambda x: x.T),
    "long": ((1 << 18,), lambda x: x),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VIEWS)
def test_reading_views(device, rng, name, dtype):
    shape, make_view = VIEWS[name]
    check(device, rng, make_view, shape, dtype)


TARGETS = {
    "second half of channels": ((2, 6, 5, 4), lambda y: y[:, 3:], (2, 3, 5, 4)),
    "odd columns": ((5, 20), lambda y: y[:, 1::2], (5, 10)),
    "inside of a border": ((3, 10, 11), lambda y: y[:, 2:7, 3:10], (3, 5, 7)),
    "backwards": ((6, 8), lambda y: y[::-1, ::-1], (6, 8)),
    "transposed": ((40, 33), lambda y: y.T, (33, 40)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_writing_views(device, rng, name, dtype):
    whole, make_target, shape = TARGETS[name]
    check(device, rng, lambda x: x, shape, dtype, (whole, make_target))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_share_all_of_it(rng, threads):
    x = numbers(rng, (5, 130, 77), "float32")
    for view in (x, x.transpose(0, 2, 1), x[:, ::-1, 3:70]):
        out = np.full(view.shape, 101, np.float32)
        copy(None, x, view, out, out, threads=threads)
        np.testing.assert_array_equal(out, view)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    """Reversed, so that no wider items are copied."""
    import cupy

    from cnn_engine.devices import cuda_module

    size = 2**31 + 5
    if cupy.cuda.runtime.memGetInfo()[0] < 4 * size:
        pytest.skip(f"needs {4 * size / 1e9:.0f} GB of free GPU memory")
    x = cupy.tile(cupy.arange(251, dtype=cupy.uint8), size // 251 + 1)[:size]
    y = cupy.zeros(size, cupy.uint8)
    shape = _cpu.CopyShape(1, *dims((size,)), *dims((-1,)), *dims((1,)), size - 1, 0)
    cuda_module.load().copy_nd(x.data.ptr, y.data.ptr, shape, 0)
    for begin in range(0, size, 1 << 28):
        part = slice(begin, min(begin + (1 << 28), size))
        assert bool((y[part] == x[::-1][part]).all()), begin


def test_errors():
    with pytest.raises(ValueError, match="itemsize: expected 1, 2, 4 or 8, found 3"):
        _cpu.CopyShape(3, *dims((2,)), *[0] * 8, *[0] * 7, 1, 0, 0)
    with pytest.raises(ValueError, match="output strides: expected none to be 0"):
        _cpu.CopyShape(4, *dims((2,)), *[0] * 8, *[0] * 8, 0, 0)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 1023, 70_001])
@pytest.mark.parametrize("value", [0.0, -2.5, np.inf])
def test_fill(device, size, value):
    out, memory = device.guarded((size,))
    call(device, "fill", out, size, value)
    device.check_guards(memory)
    np.testing.assert_array_equal(device.get(out), np.full(size, value, np.float32))


def gather(device, x, tables, run, fill=0, **options):
    """Returns what the kernel gather makes of ``x`` [any] by tables of offsets."""
    shape = (*map(len, tables), run)
    sizes = list(shape[:-1]) + [1] * (8 - len(tables))
    kernel_shape = _cpu.GatherShape(x.itemsize, len(tables), *sizes, run, fill)
    out, memory = guarded(device, shape, x.dtype)
    table = device.put(np.concatenate([np.asarray(t, np.int64) for t in tables]), np.int64)
    call(device, "gather", device.put(x, x.dtype), table, out, kernel_shape, **options)
    check_guards(device, memory, x.dtype)
    return device.get(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outer", "axis", "inner"), [(1, 5, 1), (3, 7, 1), (2, 4, 9), (1, 70_000, 2), (4, 3, 64)]
)
def test_gather_along_an_axis(device, rng, outer, axis, inner, dtype):
    x = numbers(rng, (outer, axis, inner), dtype)
    positions = rng.integers(0, axis, 11)
    found = gather(device, x, [np.arange(outer) * axis * inner, positions * inner], inner)
    np.testing.assert_array_equal(found, x[:, positions])


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_pads(device, rng, mode, dtype):
    x = numbers(rng, (2, 5, 6), dtype)
    pads = ((1, 0), (2, 3), (4, 2))
    tables = []
    for axis, pad in enumerate(pads):
        step = x.strides[axis] // x.itemsize
        options = {"constant_values": -1} if mode == "constant" else {}
        tables.append(np.pad(np.arange(x.shape[axis]), pad, mode=mode, **options))
        tables[-1] = np.where(tables[-1] < 0, -1, tables[-1] * step)
    value = np.array(7, dtype)
    bits = int.from_bytes(value.tobytes(), "little")
    options = {"constant_values": value} if mode == "constant" else {}
    found = gather(device, x, tables, 1, bits)[..., 0]
    np.testing.assert_array_equal(found, np.pad(x, pads, mode=mode, **options))


def test_gather_nothing(device):
    x = np.ones((3, 4), np.float32)
    assert gather(device, x, [[0, 4], []], 1).shape == (2, 0, 1)
    assert gather(device, x, [[0, 4]], 0).shape == (2, 0)


def test_gather_errors():
    with pytest.raises(ValueError, match="rank: expected 1 to 8, found 0"):
        _cpu.GatherShape(4, 0, *[1] * 8, 1, 0)
    with pytest.raises(ValueError, match="expected 1 past the rank"):
        _cpu.GatherShape(4, 1, *[2] * 8, 1, 0)
