"""The kernels of normalisation: normalize_rows and affine_channel."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from native import call

from cnn_engine import _cpu

#: rows, groups, channels, span: instance, group and layer norms, short and long rows, single elements.
SHAPES = [
    (6, 3, 1, 49),
    (6, 3, 1, 5000),
    (8, 4, 3, 16),
    (4, 2, 8, 400),
    (5, 1, 64, 1),
    (3, 1, 1023, 1),
    (3, 1, 1024, 1),
    (2, 1, 3001, 1),
    (70_000, 1, 7, 1),
    (1, 1, 1, 1),
    (0, 1, 4, 1),
    (3, 1, 6, 11),
]


def reference(x, scale, shift, groups, epsilon, centered):
    """Returns y, mean and inverse in float64 for x [rows, channels, span]."""
    rows = x.astype(np.float64)
    if rows.size == 0:
        return rows, np.zeros(len(x)), np.zeros(len(x))
    with np.errstate(all="ignore"):
        mean = rows.mean(axis=(1, 2), keepdims=True) * centered
        variance = np.square(rows - mean).mean(axis=(1, 2), keepdims=True)
        inverse = 1 / np.sqrt(variance + epsilon)
        normal = (rows - mean) * inverse
    channel = np.arange(len(x))[:, None] % groups * x.shape[1] + np.arange(x.shape[1])
    y = normal
    if scale is not None:
        y = y * scale.astype(np.float64)[channel][..., None]
    if shift is not None:
        y = y + shift.astype(np.float64)[channel][..., None]
    return y, mean.ravel(), inverse.ravel()


def check(
    device, x, scale, shift, groups, epsilon=1e-5, centered=True, in_place=False, statistics=True
):  # fmt: skip
    rows, channels, span = x.shape
    y, memory = device.guarded(x.shape)
    source = device.put(x)
    if in_place:
        y[...] = source
        source = y
    asked = [device.guarded((rows,)) for _ in range(2 * statistics)]
    parameters = [None if p is None else device.put(p) for p in (scale, shift)]
    shape = _cpu.NormalizeRowsShape(rows, groups, channels, span, epsilon, centered)
    found = [numbers for numbers, _ in asked] or [None, None]
    call(device, "normalize_rows", source, *parameters, y, *found, shape)
    for guarded in (memory, *(around for _, around in asked)):
        device.check_guards(guarded)
    wanted = reference(x, scale, shift, groups, np.float32(epsilon), centered)
    bound = tolerances.normalized(x, wanted[0], scale, shift, centered)
    options = {"shape": x.shape, "groups": groups, "centered": centered}
    tolerances.assert_close(device.get(y), wanted[0], bound, **options)
    for (numbers, _), number in zip(asked, wanted[1:], strict=False):
        bound = tolerances.functions(number)
        tolerances.assert_close(device.get(numbers), number, bound, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("parameters", ["both", "scale", "neither"])
def test_normalize_rows(device, rng, shape, parameters):
    rows, groups, channels, span = shape
    x = (rng.standard_normal((rows, channels, span)) * 2 + 1).astype(np.float32)
    scale, shift = rng.standard_normal((2, groups * channels)).astype(np.float32)
    scale = None if parameters == "neither" else scale
    shift = shift if parameters == "both" else None
    check(device, x, scale, shift, groups)


@pytest.mark.parametrize("shape", [(5, 1, 64, 1), (2, 1, 3001, 1), (4, 2, 8, 400)], ids=str)
@pytest.mark.parametrize("centered", [True, False])
def test_in_place(device, rng, shape, centered):
    rows, groups, channels, span = shape
    x = rng.standard_normal((rows, channels, span)).astype(np.float32)
    scale = rng.standard_normal(groups * channels).astype(np.float32)
    check(device, x, scale, None, groups, centered=centered, in_place=True)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "shape", [(67, 96), (5, 4), (3, 1024), (49, 768), (2, 2048), (2, 2056)], ids=str
)
def test_rows_without_statistics(device, rng, shape, in_place, centered):
    x = rng.standard_normal((*shape, 1)).astype(np.float32)
    scale, shift = rng.standard_normal((2, shape[1])).astype(np.float32)
    for more in ((scale, shift), (None, None)):
        check(device, x, *more, 1, centered=centered, in_place=in_place, statistics=False)


@pytest.mark.parametrize("statistics", [True, False])
def test_a_mean_far_from_zero_costs_no_digits(device, rng, statistics):
    x = (1e4 + rng.standard_normal((4, 700, 1))).astype(np.float32)
    check(device, x, None, None, 1, statistics=statistics)


def test_constant_rows_and_numbers_that_are_not_finite(device):
    x = np.ones((4, 8, 1), np.float32) * 3.3
    x[1, 3] = np.nan
    x[2, 0] = np.inf
    x[3, 5] = -np.inf
    out, memory = device.guarded(x.shape)
    shape = _cpu.NormalizeRowsShape(4, 1, 8, 1, 1e-5, True)
    call(device, "normalize_rows", device.put(x), None, None, out, None, None, shape)
    device.check_guards(memory)
    found = device.get(out)
    np.testing.assert_array_equal(found[0], 0)
    assert np.isnan(found[1:]).all()


def test_normalize_rows_bits_do_not_depend_on_threads(rng):
    x = rng.standard_normal((9, 16, 300)).astype(np.float32)
    found = []
    for threads in (1, 2, 5):
        out = np.empty_like(x)
        _cpu.normalize_rows(
            x.ctypes.data, 0, 0, out.ctypes.data, 0, 0,
            _cpu.NormalizeRowsShape(9, 3, 16, 300, 1e-5, True), threads,
        )  # fmt: skip
        found.append(out)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 49), (2, 3, 64), (5, 7, 1), (3, 8, 1), (1, 1, 1), (0, 3, 4), (70_000, 2, 1), (2, 5, 30_001)],
    ids=str,
)  # fmt: skip
def test_affine_channel(device, rng, shape, in_place, centered):
    x = (rng.standard_normal(shape) * 3).astype(np.float32)
    center, scale, shift = rng.standard_normal((3, shape[1])).astype(np.float32)
    y, memory = device.guarded(shape)
    source = device.put(x)
    if in_place:
        y[...] = source
        source = y
    call(
        device, "affine_channel", source, device.put(center) if centered else None,
        device.put(scale), device.put(shift), y, _cpu.ChannelShape(*shape),
    )  # fmt: skip
    device.check_guards(memory)
    wide = [p.astype(np.float64)[None, :, None] for p in (center * centered, scale, shift)]
    product = (x.astype(np.float64) - wide[0]) * wide[1]
    bound = tolerances.functions(np.abs(product) + np.abs(wide[2]))
    tolerances.assert_close(device.get(y), product + wide[2], bound, shape=shape)


def test_errors():
    with pytest.raises(ValueError, match="groups: expected at least 1, found 0"):
        _cpu.NormalizeRowsShape(1, 0, 1, 1, 1e-5, True)
