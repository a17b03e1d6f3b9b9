from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import InputError, UnsupportedError, _cpu, ops
from cnn_engine.graph import reference
from cnn_engine.operators.conv2d import Conv2d

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


# n, c, h, w, k, r, s, stride, (above, left, below, right), dilation, groups: what else a convolution can be.
GENERAL = [
    (2, 4, 9, 11, 6, 3, 3, 1, (1, 2, 0, 3), 1, 1),
    (1, 3, 12, 10, 5, 3, 2, (2, 3), (0, 1, 2, 0), (2, 3), 1),
    (3, 6, 8, 7, 9, 3, 3, 1, (1, 1, 1, 1), 1, 3),
    (2, 8, 10, 10, 8, 3, 3, 2, (0, 0, 1, 1), 1, 8),
    (2, 5, 7, 20, 10, 5, 3, (1, 2), (2, 1, 2, 1), (1, 2), 5),
    (1, 1, 1, 50, 3, 1, 5, (1, 2), (0, 4, 0, 0), (1, 2), 1),
    (1, 12, 1, 1, 20, 1, 1, 1, (0, 0, 0, 0), 1, 2),
    (3, 40, 1, 1, 33, 1, 1, 1, (0, 0, 0, 0), 1, 1),
    (5, 6, 3, 2, 10, 3, 3, 1, (1, 1, 1, 1), 1, 2),
    (0, 4, 6, 6, 4, 3, 3, 1, (1, 1, 1, 1), 1, 4),
    (1, 64, 14, 14, 72, 3, 3, 1, (1, 1, 1, 1), 1, 1),
    (2, 300, 7, 7, 70, 1, 1, 1, (0, 0, 0, 0), 1, 1),
    (1, 32, 15, 17, 48, 1, 1, 2, (0, 0, 0, 0), 1, 1),
    (1, 3, 33, 35, 64, 7, 7, 2, (3, 3, 3, 3), 1, 1),
    (2, 130, 6, 6, 3, 3, 3, 1, (1, 1, 1, 1), 1, 1),
    (1, 128, 12, 12, 128, 3, 3, 1, (1, 1, 1, 1), 1, 32),
    (1, 96, 28, 30, 96, 5, 5, 2, (2, 2, 2, 2), 1, 96),
    (1, 2, 70, 90, 2, 3, 3, 1, (4, 4, 4, 4), 4, 2),
    (1, 3, 4, 6, 2, 2, 2, 5, (3, 4, 5, 6), 3, 1),
]


#: Variants with and without reduction, as far as they have one; `tiled` is CUDA's alone.
CASES = [("if", False), ("if", True), ("pad", False), ("pad", True), ("tiled", False)]
CASES += [("blocked", False)]
ON_CPU = [case for case in CASES if case[0] != "tiled"]


def test_cases_are_all_there_are():
    assert {variant for variant, _ in CASES} == {*ops.CONV2D_VARIANTS, "blocked"}


def check(device, rng, shape, variant, reduction, bias=True, threads=None) -> None:
    if variant == "tiled" and device.kind == "cpu":
        x, weight = np.zeros((1, 1, 3, 3), np.float32), np.zeros((1, 1, 3, 3), np.float32)
        with pytest.raises(UnsupportedError, match="tiled: expected CUDA"):
            ops.conv2d(x, weight, variant=variant)
        return
    n, c, h, w, k, r, s, stride, padding, *more = shape
    dilation, groups = more or (1, 1)
    record = Conv2d(both(stride), four(padding), both(dilation), groups)
    x = rng.standard_normal((n, c, h, w))
    weight = rng.standard_normal((k, c // groups, r, s))
    b = rng.standard_normal(k) if bias else None
    x32, w32 = x.astype(np.float32), weight.astype(np.float32)
    b32 = None if b is None else b.astype(np.float32)
    wanted = record.reference(x32, w32, b32)
    magnitude = record.reference(np.abs(x32), np.abs(w32), None if b is None else np.abs(b32))
    out, memory = device.guarded(wanted.shape)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    arguments = [device.put(x32), device.put(w32), None if b is None else device.put(b32)]
    options.update(variant=variant, reduction=reduction, out=out, threads=threads)
    if variant == "tiled" and groups > 1:
        with pytest.raises(UnsupportedError, match=f"expected 1 group, found {groups}"):
            ops.conv2d(*arguments, **options)
        return
    returned = ops.conv2d(*arguments, **options)
    assert returned is out
    device.check_guards(memory)
    bound = tolerances.sum_of_products(c // groups * r * s + 1, magnitude)
    parameters = {"shape": shape, "variant": variant, "reduction": reduction, "bias": bias}
    tolerances.assert_close(device.get(out), wanted, bound, **parameters)


def both(value):
    return value if isinstance(value, tuple) else (value, value)


def four(padding):
    return padding if isinstance(padding, tuple) and len(padding) == 4 else both(padding) * 2


@pytest.mark.parametrize(("variant", "reduction"), CASES)
@pytest.mark.parametrize("shape", SHAPES + GENERAL, ids=str)
def test_against_reference(device, rng, shape, variant, reduction):
    check(device, rng, shape, variant, reduction)
    check(device, rng, shape, variant, reduction, bias=False)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 3), c=st.integers(1, 5), h=st.integers(1, 14), w=st.integers(1, 14),
    k=st.integers(1, 6), r=st.integers(1, 7), s=st.integers(1, 7), stride=st.integers(1, 3),
    padding=st.tuples(*[st.integers(0, 3)] * 4), dilation=st.integers(1, 3), groups=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_random_shapes(n, c, h, w, k, r, s, stride, padding, dilation, groups, seed):
    from conftest import Device

    shape = (n, c * groups, h, w, k * groups, r, s, stride, padding, dilation, groups)
    for variant, reduction in ON_CPU:
        rows, columns = h + padding[0] + padding[2], w + padding[1] + padding[3]
        if rows < dilation * (r - 1) + 1 or columns < dilation * (s - 1) + 1:
            with pytest.raises(InputError, match="less the kernel"):
                check_refused(shape, variant, reduction)
        else:
            check(Device("cpu"), np.random.default_rng(seed), shape, variant, reduction)


def check_refused(shape, variant, reduction):
    n, c, h, w, k, r, s, stride, padding, dilation, groups = shape
    x, weight = np.zeros((n, c, h, w), np.float32), np.zeros((k, c // groups, r, s), np.float32)
    ops.conv2d(
        x, weight, stride=stride, padding=padding, dilation=dilation, groups=groups,
        variant=variant, reduction=reduction,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_do_not_change_the_result(rng, threads):
    x = rng.standard_normal((5, 16, 16, 16)).astype(np.float32)
    weight = rng.standard_normal((20, 16, 5, 5)).astype(np.float32)
    for variant, reduction in ON_CPU:
        options = {"padding": 2, "variant": variant, "reduction": reduction}
        one = ops.conv2d(x, weight, threads=1, **options)
        many = ops.conv2d(x, weight, threads=threads, **options)
        np.testing.assert_array_equal(one, many)


def test_blocks_do_not_depend_on_threads(rng):
    """Where threads share out one tile's filters, where outputs are few, and with one channel a group."""
    for shape in (
        (1, 70, 9, 9, 200, 3, 3, 1),
        (4, 90, 1, 1, 150, 1, 1, 1),
        (2, 24, 40, 30, 24, 3, 3, 24),
    ):
        n, c, h, w, k, r, s, groups = shape
        x = rng.standard_normal((n, c, h, w)).astype(np.float32)
        weight = rng.standard_normal((k, c // groups, r, s)).astype(np.float32)
        options = {"padding": r // 2, "groups": groups}
        one = ops.conv2d_blocked(x, weight, threads=1, **options)
        for threads in (2, 5, 16):
            many = ops.conv2d_blocked(x, weight, threads=threads, **options)
            np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("shape", [shape for shape in GENERAL if shape[0]], ids=str)
def test_blocks_with_what_follows(device, rng, shape):
    n, c, h, w, k, r, s, stride, padding, dilation, groups = shape
    record = Conv2d(both(stride), padding, both(dilation), groups)
    x = rng.standard_normal((n, c, h, w)).astype(np.float32)
    weight = rng.standard_normal((k, c // groups, r, s)).astype(np.float32)
    bias = rng.standard_normal(k).astype(np.float32)
    residual = rng.standard_normal(record.reference(x, weight).shape).astype(np.float32)
    magnitude = record.reference(*map(np.abs, (x, weight, bias, residual)))
    bound = tolerances.sum_of_products(c // groups * r * s + 2, magnitude)
    wanted = record.reference(x, weight, bias, residual)
    arguments = [device.put(array) for array in (x, weight, bias, residual)]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    for lowest, highest in ((-np.inf, np.inf), (0.0, np.inf), (-0.5, 1.0)):
        out, memory = device.guarded(wanted.shape)
        ops.conv2d_blocked(*arguments, **options, lowest=lowest, highest=highest, out=out)
        device.check_guards(memory)
        clamped = np.clip(wanted, lowest, highest)
        tolerances.assert_close(device.get(out), clamped, bound, shape=shape, lowest=lowest)


@pytest.mark.parametrize("isa", _cpu.instruction_sets())
def test_blocks_on_every_instruction_set(rng, isa):
    from conftest import Device

    selected = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(isa)
    try:
        for shape in GENERAL:
            check(Device("cpu"), rng, shape, "blocked", False)
    finally:
        _cpu.select_instruction_set(selected)


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
        ((image(1, 4, 8, 8), image(4, 4, 3, 3)), {"groups": 2}, r"2 input channels of 4 in 2 groups"),
        ((image(1, 4, 8, 8), image(3, 2, 3, 3)), {"groups": 2}, r"expected filters in 2 groups, found 3"),
        ((image(1, 4, 8, 8), image(4, 4, 3, 3)), {"groups": 0}, r"groups: expected a whole number from 1"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"dilation": 0}, r"dilation height: expected 1 to"),
        ((image(1, 3, 8, 8), image(4, 3, 3, 3)), {"dilation": 4}, r"padded height less the kernel"),
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
