from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import InputError, UnsupportedError, _cpu, ops
from cnn_engine.operators import reference

# n, c, h, w, k, r, s, stride, padding: the networks' own layers, and what breaks index arithmetic.
SHAPES = [
    (2, 3, 32, 32, 16, 5, 5, 1, 2),
    (3, 16, 16, 16, 20, 5, 5, 1, 2),
    (1, 20, 8, 8, 20, 5, 5, 1, 2),
    (2, 1, 48, 48, 6, 5, 5, 1, 0),
    (1, 6, 22, 22, 16, 5, 5, 1, 0),
    (0, 3, 8, 8, 4, 3, 3, 1, 1),
    (1, 1, 1, 1, 1, 1, 1, 1, 0),
    (2, 1, 7, 5, 3, 1, 1, 1, 0),
    (1, 2, 9, 11, 3, 2, 2, 1, 1),
    (2, 3, 13, 7, 5, 3, 3, 2, 1),
    (1, 5, 10, 9, 2, 4, 4, 2, 3),
    (1, 2, 11, 12, 3, 6, 6, 3, 2),
    (2, 4, 9, 9, 7, 7, 7, 1, 3),
    (1, 33, 6, 6, 33, 3, 3, 1, 1),
    (1, 2, 5, 5, 2, 3, 3, (2, 1), (0, 2)),
    (1, 3, 8, 12, 2, 1, 7, 1, (0, 3)),
    (2, 2, 3, 3, 2, 3, 3, 1, 0),
    (1, 1, 2, 2, 1, 7, 7, 1, 3),
]


#: Variants with and without reduction, as far as they have one; `tiled` is CUDA's alone.
CASES = [("if", False), ("if", True), ("pad", False), ("pad", True), ("tiled", False)]
ON_CPU = [case for case in CASES if case[0] != "tiled"]


def test_cases_are_all_there_are():
    assert {variant for variant, _ in CASES} == set(ops.CONV2D_VARIANTS)


def check(device, rng, shape, variant, reduction, bias=True, threads=None) -> None:
    if variant == "tiled" and device.kind == "cpu":
        x, weight = np.zeros((1, 1, 3, 3), np.float32), np.zeros((1, 1, 3, 3), np.float32)
        with pytest.raises(UnsupportedError, match="tiled: expected CUDA"):
            ops.conv2d(x, weight, variant=variant)
        return
    n, c, h, w, k, r, s, stride, padding = shape
    x = rng.standard_normal((n, c, h, w))
    weight = rng.standard_normal((k, c, r, s))
    b = rng.standard_normal(k) if bias else None
    x32, w32 = x.astype(np.float32), weight.astype(np.float32)
    b32 = None if b is None else b.astype(np.float32)
    wanted = reference.conv2d(x32, w32, b32, stride, padding)
    magnitude = reference.conv2d(
        np.abs(x32), np.abs(w32), None if b is None else np.abs(b32), stride, padding
    )
    out, memory = device.guarded(wanted.shape)
    returned = ops.conv2d(
        device.put(x32), device.put(w32), None if b is None else device.put(b32),
        stride=stride, padding=padding, variant=variant, reduction=reduction, out=out, threads=threads,
    )  # fmt: skip
    assert returned is out
    device.check_guards(memory)
    bound = tolerances.sum_of_products(c * r * s + 1, magnitude)
    parameters = {"shape": shape, "variant": variant, "reduction": reduction, "bias": bias}
    tolerances.assert_close(device.get(out), wanted, bound, **parameters)


@pytest.mark.parametrize(("variant", "reduction"), CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_reference(device, rng, shape, variant, reduction):
    check(device, rng, shape, variant, reduction)
    check(device, rng, shape, variant, reduction, bias=False)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 3), c=st.integers(1, 5), h=st.integers(1, 14), w=st.integers(1, 14),
    k=st.integers(1, 6), r=st.integers(1, 7), s=st.integers(1, 7), stride=st.integers(1, 3),
    padding=st.integers(0, 3), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_random_shapes(n, c, h, w, k, r, s, stride, padding, seed):
    from conftest import Device

    shape = (n, c, h, w, k, r, s, stride, padding)
    for variant, reduction in ON_CPU:
        if h + 2 * padding < r or w + 2 * padding < s:
            with pytest.raises(InputError, match="less the kernel"):
                check_refused(shape, variant, reduction)
        else:
            check(Device("cpu"), np.random.default_rng(seed), shape, variant, reduction)


def check_refused(shape, variant, reduction):
    n, c, h, w, k, r, s, stride, padding = shape
    x, weight = np.zeros((n, c, h, w), np.float32), np.zeros((k, c, r, s), np.float32)
    ops.conv2d(x, weight, stride=stride, padding=padding, variant=variant, reduction=reduction)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_do_not_change_the_result(rng, threads):
    x = rng.standard_normal((5, 16, 16, 16)).astype(np.float32)
    weight = rng.standard_normal((20, 16, 5, 5)).astype(np.float32)
    for variant, reduction in ON_CPU:
        options = {"padding": 2, "variant": variant, "reduction": reduction}
        one = ops.conv2d(x, weight, threads=1, **options)
        many = ops.conv2d(x, weight, threads=threads, **options)
        np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize(("variant", "reduction"), ON_CPU)
def test_nan_and_infinity_stay_in_their_windows(device, rng, variant, reduction):
    x = rng.standard_normal((1, 2, 9, 9)).astype(np.float32)
    x[0, 0, 0, 0] = np.nan
    x[0, 1, 8, 8] = np.inf
    weight = rng.uniform(0.5, 1, (3, 2, 3, 3)).astype(np.float32)
    y = device.get(
        ops.conv2d(
            device.put(x), device.put(weight), padding=1, variant=variant, reduction=reduction
        )
    )
    nan, infinite = np.zeros((9, 9), bool), np.zeros((9, 9), bool)
    nan[:2, :2] = True
    infinite[7:, 7:] = True
    np.testing.assert_array_equal(np.isnan(y), np.broadcast_to(nan, y.shape))
    np.testing.assert_array_equal(np.isposinf(y), np.broadcast_to(infinite, y.shape))


def test_workspace_holds_the_padded_copy(device, rng):
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    weight = device.put(rng.standard_normal((2, 3, 3, 3)))
    workspace, memory = device.guarded((2, 3, 6, 7))
    ops.conv2d(device.put(x), weight, padding=1, variant="pad", workspace=workspace)
    device.check_guards(memory)
    np.testing.assert_array_equal(device.get(workspace), reference.pad2d(x, 1).astype(np.float32))


def image(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((image(3, 8, 8), image(4, 3, 3, 3)), {}, r"conv2d: input: expected 4 dimensions, found 3"),
        ((image(1, 3, 8, 8), image(4, 2, 3, 3)), {}, r"weight: expected 3 input channels, found 2"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3), image(5)), {}, r"bias: expected shape \[4\], found \[5\]"),
        ((image(1, 3, 8, 8).astype(np.float64), image(4, 3, 3, 3)), {}, r"expected float32, found float64"),
        ((image(1, 3, 8, 8)[..., ::2], image(4, 3, 3, 3)), {}, r"expected a C-contiguous array"),
        ((image(1, 3, 2, 8), image(4, 3, 3, 3)), {}, r"padded height less the kernel"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"stride": 0}, r"stride height: expected 1 to"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"padding": -1}, r"padding height: expected 0 to"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"padding": 1.5}, r"padding: expected a whole number"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"stride": 2**31}, r"below 2\^31"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"variant": "fast"}, r"expected one of if, pad, tiled"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"threads": 0}, r"threads: expected a whole number"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"out": image(1, 4, 8, 8)}, r"out: expected shape"),
        (([[1.0]], image(4, 3, 3, 3)), {}, r"expected a NumPy array .* found list"),
        ((image(1, 3, 0, 8), image(4, 3, 3, 3)), {"padding": 2}, r"height: expected 1 to"),
        ((image(1, 1, 8, 8), image(1, 1, 3, 3)), {"padding": 50000}, r"elements an image"),
    ],
)  # fmt: skip
def test_errors(arguments, options, message):
    with pytest.raises(InputError, match=message):
        ops.conv2d(*arguments, **options)


def test_output_may_not_overlap_its_inputs():
    memory = image(2, 1, 8, 8)
    with pytest.raises(InputError, match="overlaps an input"):
        ops.conv2d(memory, image(1, 1, 1, 1), out=memory)
    out = image(2, 1, 8, 8)
    out.flags.writeable = False
    with pytest.raises(InputError, match="read-only"):
        ops.conv2d(memory, image(1, 1, 1, 1), out=out)


@pytest.mark.gpu
def test_arrays_on_two_devices_are_refused():
    import cupy

    with pytest.raises(InputError, match="one device, found cuda:0 and the CPU"):
        ops.conv2d(cupy.zeros((1, 3, 8, 8), cupy.float32), image(4, 3, 3, 3))


def test_the_compiled_function_refuses_what_it_does_not_compute():
    """Its output would be left as it was, without a word."""
    shape = _cpu.Conv2dShape(1, 1, 3, 3, 1, 3, 3, 1, 1, 0, 0)
    x, weight, out = (np.zeros(size, np.float32) for size in (9, 9, 1))
    addresses = x.ctypes.data, weight.ctypes.data, 0, out.ctypes.data
    with pytest.raises(ValueError, match="expected direct or pad on the CPU, found tiled"):
        _cpu.conv2d(*addresses, shape, _cpu.Conv2dVariant.tiled, False, 1)
