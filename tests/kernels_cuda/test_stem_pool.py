"""stem_pool: conv2d_pool's kernel for first layers on CUDA, against those that it joins."""

from __future__ import annotations

from dataclasses import replace

import halves
import numpy as np
import pytest
import targets
from conftest import Device
from engines import on_gpu
from halves import HALVES
from native import NONE, RELU, call, epilogue, images, packed
from regions import conv2d_pool
from test_conv2d_pool import network
from test_expand_depthwise import ids

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.kernels.cuda.requirements import WGMMA
from cnn_engine.operators.channels_last import Conv2dNhwc, MaxPool2dNhwc
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.unary import Relu

Function = _cpu.UnaryFunction
AROUND = (1, 1, 1, 1)

# n, c, h, w, filters, (rows, columns) of them, strides, padding of the convolution, of the pool:
# above, left, below, right
CASES = [
    (1, 3, 224, 224, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (1, 3, 224, 224, 64, (3, 3), (2, 2), (0,) * 4, (0,) * 4),
    (3, 3, 33, 47, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (2, 3, 225, 225, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (5, 3, 192, 160, 96, (7, 7), (2, 2), (3,) * 4, AROUND),
    (33, 1, 30, 31, 32, (3, 3), (2, 2), AROUND, (0, 0, 1, 1)),
    (2, 4, 40, 70, 70, (5, 8), (3, 2), (2, 4, 2, 4), (1, 0, 0, 1)),
    (1, 2, 19, 20, 130, (4, 2), (1, 2), (0, 1, 1, 0), (0, 1, 2, 2)),
    (1, 3, 7, 7, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (1, 3, 5, 300, 8, (1, 1), (1, 2), (0,) * 4, AROUND),
    (20, 3, 64, 64, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (90, 1, 64, 64, 8, (7, 7), (2, 2), (3,) * 4, AROUND),  # blocks stay
    (0, 3, 8, 8, 8, (3, 3), (2, 2), AROUND, AROUND),
]  # fmt: skip


def shapes_of(case, **changed):
    n, c, h, w, k, kernel, strides, pads, around = case
    window = {"kernel": (3, 3), "stride": (2, 2), "around": around, "apart": (1, 1), **changed}
    dilation = window.pop("dilation", (1, 1))
    shape = _cpu.Conv2dShape(n, c, h, w, k, *kernel, *strides, *pads, *dilation)
    sizes = n, k, shape.out_h, shape.out_w
    pool = _cpu.MaxPool2dShape(*sizes, *(number for two in window.values() for number in two))
    return shape, pool


def arrays(rng, case):
    n, c, h, w, k, kernel, *_ = case
    made = (n, c, h, w), (k, c, *kernel), (k,)
    return [rng.standard_normal(one).astype(np.float32) for one in made]


def run(case, given, compute_dtype, function=RELU, more=0, overflow=halves.NO_FLAG):
    device, (x, weight, bias) = Device("cuda"), given
    shape, pool = shapes_of(case)
    kind, k = getattr(_cpu.ElementType, compute_dtype), case[4]
    out = halves.Output(device, (len(x), pool.out_h, pool.out_w, k + more), compute_dtype)
    untouched = out.array[..., k:].copy()
    call(
        device, "stem_pool", device.put(x),
        packed(device, "conv2d_nhwc_wgmma_planar", [weight], shape, kind),
        *images(out.array, storage_dtype=compute_dtype), shape, pool, kind,
        *epilogue(device.put(bias), function, overflow),
    )  # fmt: skip
    assert bool((out.array[..., k:] == untouched).all())
    return out.get()[..., :k]


def run_both(case, given, compute_dtype, function=RELU):
    """The convolution's kernel and the pool's, one behind the other."""
    device, (x, weight, bias) = Device("cuda"), given
    shape, pool = shapes_of(case)
    k, kind, storage_dtype = (
        case[4],
        getattr(_cpu.ElementType, compute_dtype),
        halves.kind(compute_dtype),
    )
    between = halves.put(device, np.zeros((len(x), shape.out_h, shape.out_w, k)), compute_dtype)
    out = halves.put(device, np.zeros((len(x), pool.out_h, pool.out_w, k)), compute_dtype)
    call(
        device, "conv2d_nhwc_wgmma_planar", device.put(x),
        packed(device, "conv2d_nhwc_wgmma_planar", [weight], shape, kind),
        *images(between, storage_dtype=compute_dtype), shape, kind, *epilogue(device.put(bias), function),
    )  # fmt: skip
    call(device, "max_pool2d_nhwc", between, out, pool, k, k, storage_dtype)
    return halves.get(device, out, compute_dtype)


@pytest.fixture
def hopper():
    targets.need(WGMMA)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_whole_numbers_are_exact(rng, hopper, case, compute_dtype):
    x, weight, bias = (
        rng.integers(-1, 2, one.shape).astype(np.float32) for one in arrays(rng, case)
    )
    x *= rng.random(x.shape) < 0.5  # so that bfloat16 holds every sum
    *_, strides, pads, around = case
    first, pool = Conv2dNhwc(strides, pads, planar=True), MaxPool2dNhwc((3, 3), (2, 2), around)
    for function, with_bias, op in ((RELU, bias, Relu()), (NONE, None, None)):
        record = conv2d_pool(replace(first, activation=op), pool)
        wanted = record.reference(x, weight, *([] if with_bias is None else [with_bias]))
        assert np.abs(wanted).max(initial=0) <= 256
        assert np.array_equal(run(case, [x, weight, with_bias], compute_dtype, function), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("function", [RELU, NONE, (Function.clip, -0.5, 1.5)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_bits_of_a_convolution_and_then_a_pool(rng, hopper, case, function, compute_dtype):
    given = arrays(rng, case)
    wanted = run_both(case, given, compute_dtype, function)
    for more in (0, 8, 3):
        found = run(case, given, compute_dtype, function, more)
        assert np.array_equal(found, wanted)
        if function is RELU:
            assert np.array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=ids)
def test_the_same_bits_again(rng, hopper, case):
    given = arrays(rng, case)
    found = run(case, given, "float16")
    for _ in range(3):
        assert np.array_equal(run(case, given, "float16"), found)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
def test_what_is_not_finite_is_pooled_likewise(rng, hopper, compute_dtype):
    """In windows that it is in, and in no others."""
    values = np.nan, np.inf, -np.inf
    for case in (CASES[2], CASES[4], CASES[6], CASES[11]):
        given = arrays(rng, case)
        n, c, h, w = given[0].shape
        for at, value in zip(rng.integers(0, (n, c, h, w), (3, 4)), values, strict=True):
            given[0][tuple(at)] = value
        given[0][0, 0, 0, 0] = np.inf
        for function in (RELU, NONE):
            found, wanted = (of(case, given, compute_dtype, function) for of in (run, run_both))
            halves.assert_same_and_infinite_alike(found, wanted, compute_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["image", "result", "nowhere"])
def test_what_is_past_float16_is_told(rng, hopper, where):
    case = (2, 3, 33, 47, 40, (7, 7), (2, 2), (3,) * 4, AROUND)
    x, weight, bias = (0 * one for one in arrays(rng, case))
    if where == "image":
        x[1, 2, 20, 30] = 70000.0
    bias[39] = 70000.0 if where == "result" else 60000.0
    flag = halves.OverflowFlag()
    run(case, [x, weight, bias], "float16", overflow=flag.overflow)
    assert flag.is_set() == (where != "nowhere")
    run(case, [x, weight, bias], "bfloat16", overflow=flag.overflow)
    assert not flag.is_set()


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(hopper):
    module, fine = cuda_module.load(), CASES[0]
    float16 = _cpu.ElementType.float16

    def changed(place, value):
        return (*fine[:place], value, *fine[place + 1 :])

    assert module.stem_pool_takes(*shapes_of(fine), float16, targets.native())
    other = shapes_of(changed(2, 222))[1]
    for how, expected in (
        (shapes_of(changed(1, 5)), "at most 4 channels"),
        (shapes_of(changed(6, (2, 1))), "2 columns apart"),
        (shapes_of(changed(5, (7, 9))), "at most 8 columns"),
        (shapes_of(changed(5, (150, 7))), "rows that fit into shared memory"),
        (shapes_of(fine, kernel=(2, 2)), "a pool of 3x3"),
        (shapes_of(fine, stride=(2, 1)), "two places apart"),
        (shapes_of(fine, apart=(1, 2)), "a pool of 3x3"),
        (shapes_of(fine, dilation=(2, 1)), "without dilation"),
        ((shapes_of(fine)[0], other), "a pool over what the convolution makes"),
    ):
        assert not module.stem_pool_takes(*how, float16, targets.native())
        with pytest.raises(ValueError, match=expected):
            module.stem_pool(256, 512, 1024, 64, float16, *how, float16, *epilogue(0, RELU), 0)
    for compute_dtype, weights, function, expected in (
        ("tf32", 512, RELU, "float16 or bfloat16"),
        ("float16", 8, RELU, "a multiple of 16"),
        ("float16", 512, (Function.swish, 1, 0), "relu, clip or no function"),
    ):
        kind = getattr(_cpu.ElementType, compute_dtype)
        with pytest.raises(ValueError, match=expected):
            module.stem_pool(
                256, weights, 1024, 64, kind, *shapes_of(fine), kind, *epilogue(0, function), 0
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_engine(hopper, dtype, batch):
    pool = MaxPool2d((3, 3), (2, 2), AROUND)
    _, kernels = on_gpu(network((batch, 3, 65, 96), pool, first=(7, 2)), dtype)
    assert "stem_pool" in kernels
