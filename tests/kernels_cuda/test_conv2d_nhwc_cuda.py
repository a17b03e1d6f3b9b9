"""conv2d over images whose channels lie side by side, on CUDA: against float64."""

from __future__ import annotations

import math

import halves
import numpy as np
import pytest
import tolerances
from conftest import Device
from halves import HALVES
from native import (
    NONE,
    RELU,
    call,
    channels_first,
    channels_last,
    epilogue,
    images,
    launch,
    packed,
    prologue,
)
from test_conv2d_nhwc import CASES, DIRECT, arrays, bound, ids, record

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.operators.unary import HardSwish, Relu

pytestmark = pytest.mark.gpu

#: Beside those of the CPU: sizes at which a thread makes a strip of rows, and at which it makes one output.
LARGE = [
    (3, 64, 112, 112, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 64),
    (6, 72, 113, 111, 72, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 72),
    (3, 120, 55, 57, 120, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 120),
    (3, 96, 113, 90, 96, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1), 96),
    (4, 96, 57, 54, 96, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 96),
    (17, 40, 7, 7, 40, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 40),
    (97, 200, 7, 7, 200, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 200),
    (1, 44, 20, 9, 44, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 44),
    (2, 96, 5, 33, 96, (7, 7), (1, 1), (0, 6, 5, 1), (1, 1), 96),
    (6, 104, 58, 61, 104, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 104),
    (1, 960, 7, 7, 960, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 960),
]
DEPTHWISE = [case for case in CASES if case[-1] == case[1] == case[4] > 1] + LARGE


def depthwise(
    case, x, weight, bias, *, residual=None, activation=NONE, more=(0, 0), storage_dtype="float32"
):  # fmt: skip
    """Calls the kernel with pitches of ``more`` elements than channels; what lies between must stay."""
    device = Device("cuda")
    n, c, h, w, k, kernel, stride, padding, dilation, groups = case
    shape = _cpu.Conv2dShape(n, c, h, w, k, *kernel, *stride, *padding, *dilation, groups)
    own = device.put(np.full(weight.size, np.nan, np.float32))
    kind = halves.kind(storage_dtype)
    call(device, "conv2d_nhwc_depthwise_pack", device.put(weight), own, shape, kind)
    out = halves.put(device, np.full((n, shape.out_h, shape.out_w, k + more[1]), 7), storage_dtype)
    added = (
        None
        if residual is None
        else halves.put(device, residual.transpose(0, 2, 3, 1), storage_dtype)
    )
    call(
        device, "conv2d_nhwc_depthwise",
        *images(halves.put(device, channels_last(x, more[0]), storage_dtype), storage_dtype=storage_dtype),
        own, *images(out, storage_dtype=storage_dtype), shape,
        *epilogue(device.put(bias), activation, residual=images(added, storage_dtype=storage_dtype)),
    )  # fmt: skip
    return channels_first(halves.get(device, out, storage_dtype), k)


@pytest.mark.parametrize("more", [(0, 0), (5, 3), (4, 8)])
@pytest.mark.parametrize("case", DEPTHWISE, ids=ids)
def test_depthwise(rng, case, more):
    x, weight, bias = arrays(rng, case)
    wanted = record(case).reference(x, weight, bias)
    limit = bound(case, DIRECT, x, weight, bias)
    tolerances.assert_close(depthwise(case, x, weight, bias, more=more), wanted, limit)
    residual = rng.standard_normal(wanted.shape).astype(np.float32)
    for activation, op in (
        (RELU, Relu()),
        ((_cpu.UnaryFunction.hard_swish, 0, 0), HardSwish()),
    ):
        found = depthwise(
            case, x, weight, bias, residual=residual, activation=activation, more=more
        )
        sums = wanted + residual
        tolerances.assert_close(found, op.reference(sums), 1.5 * limit + tolerances.functions(sums))


@pytest.mark.parametrize("storage_dtype", halves.STORED)
@pytest.mark.parametrize("case", DEPTHWISE, ids=ids)
def test_depthwise_in_16_bits(rng, case, storage_dtype):
    x, weight, bias = whole_numbers(rng, case)
    sums = record(case).reference(x, weight, bias)
    for more in ((0, 0), (8, 16), (5, 3)):
        found = depthwise(case, x, weight, bias, more=more, storage_dtype=storage_dtype)
        assert np.array_equal(found, halves.rounded(sums, storage_dtype))
    residual = rng.integers(-9, 9, sums.shape).astype(np.float32)
    wanted = np.maximum(sums + residual, 0)
    for more in ((0, 0), (5, 3), (4, 8)):
        found = depthwise(
            case, x, weight, bias, residual=residual, activation=RELU,
            more=more, storage_dtype=storage_dtype,
        )  # fmt: skip
        assert np.array_equal(found, halves.rounded(wanted, storage_dtype))


@pytest.mark.parametrize("side", [3, 7])
def test_depthwise_has_the_same_bits_with_any_batch(rng, side):
    """By strips, or boxes of 14 rows, among others, and by its windows, or boxes of 7 rows, alone."""
    case = (17, 64, 49, 47, 64, (side, side), (1, 1), (side // 2,) * 4, (1, 1), 64)
    x, weight, bias = arrays(rng, case)
    together = depthwise(case, x, weight, bias)
    for n in (0, 16):
        alone = depthwise((1, *case[1:]), np.ascontiguousarray(x[n : n + 1]), weight, bias)
        assert np.array_equal(alone[0], together[n])


@pytest.mark.parametrize("side", [3, 7])
def test_depthwise_keeps_nan(rng, side):
    case = (1, 8, 12, 12, 8, (side, side), (1, 1), (side // 2,) * 4, (1, 1), 8)
    x, weight, bias = arrays(rng, case)
    x[0, 2, 5, 6] = np.nan
    found = depthwise(case, x, weight, bias, activation=RELU)
    assert np.isnan(found).sum() == side**2
    assert math.isfinite(found[0, 1].sum())


# ---- as an implicit matrix product on tensor cores ----

#: N, C, H, W, K, kernel, stride, padding, dilation, groups: few and many terms, filters and places; every
#: tile, sums shared by 1 to 16 blocks, channels and filters that are no multiples of four, of 16, of a tile.
PRODUCTS = [
    *(case for case in CASES if not case[-1] == case[1] == case[4] > 1),
    *(
        (n, *rest)
        for n in (1, 3, 20)
        for rest in (
            (512, 7, 7, 512, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
            (256, 7, 7, 512, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
            (64, 28, 30, 96, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
            (64, 14, 14, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 4),
            (30, 10, 10, 35, (3, 3), (1, 1), (1, 1, 1, 1), (2, 2), 5),
            (2048, 1, 1, 1000, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
            (24, 56, 56, 72, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        )
    ),
]
OPERANDS = ("float32", "tf32", "float16", "bfloat16")


def product(
    case, compute_dtype, x, weight, bias, *, planar=False, residual=None, before=(), activation=NONE,
    more=(0, 0), storage_dtype=("float32",) * 3, overflow=halves.NO_FLAG, rank=0,
):  # fmt: skip
    """Calls the kernel.

    ``before``: scale, shift and the least that their result can be; ``stored``: how x, the residual and y lie
    in memory; ``rank``: of the tile and split.
    """
    device = Device("cuda")
    n, c, h, w, k, kernel, stride, padding, dilation, groups = case
    shape = _cpu.Conv2dShape(n, c, h, w, k, *kernel, *stride, *padding, *dilation, groups)
    kind = getattr(_cpu.ElementType, compute_dtype)
    read = x if planar else channels_last(x, more[0])
    x_kind = halves.kind(storage_dtype[0])
    workspace = cuda_module.load().conv2d_nhwc_workspace(shape, planar, kind, x_kind, 0)
    out = halves.put(
        device, np.full((n, shape.out_h, shape.out_w, k + more[1]), 7), storage_dtype[2]
    )
    added = (
        None
        if residual is None
        else halves.put(device, residual.transpose(0, 2, 3, 1), storage_dtype[1])
    )
    scale, shift, floor = before or (None, None, -math.inf)
    call(
        device, "conv2d_nhwc",
        *images(halves.put(device, read, storage_dtype[0]), 0 if planar else None, storage_dtype[0]),
        packed(device, "conv2d_nhwc", [weight], shape, planar, kind),
        *images(out, storage_dtype=storage_dtype[2]), shape, kind,
        *prologue(device.put(scale), device.put(shift), scale is not None and scale.ndim == 2, floor),
        *epilogue(device.put(bias), activation, overflow, images(added, storage_dtype=storage_dtype[1])),
        *launch(device.put(np.full(workspace, 255), np.uint8) if workspace else None, rank=rank),
    )  # fmt: skip
    return channels_first(halves.get(device, out, storage_dtype[2]), k)


def whole_numbers(rng, case):
    """Arrays of small whole numbers: every product and sum of them is exact, whatever they are rounded to."""
    return [rng.integers(-2, 3, a.shape).astype(np.float32) for a in arrays(rng, case)]


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("case", PRODUCTS, ids=ids)
def test_products_of_whole_numbers_are_exact(rng, case, compute_dtype):
    x, weight, bias = whole_numbers(rng, case)
    wanted = record(case).reference(x, weight, bias)
    for more in ((0, 0), (4, 8), (5, 3)):
        assert np.array_equal(product(case, compute_dtype, x, weight, bias, more=more), wanted)
    residual = rng.integers(-9, 9, wanted.shape).astype(np.float32)
    found = product(
        case, compute_dtype, x, weight, None, residual=residual, activation=RELU
    )  # fmt: skip
    sums = record(case).reference(x, weight, None) + residual
    assert np.array_equal(found, np.maximum(sums, 0))


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("case", PRODUCTS[::3], ids=ids)
def test_every_tile_and_split_is_exact(rng, case, compute_dtype):
    """Ranks are more than there are tiles and splits: the last runs then."""
    x, weight, bias = whole_numbers(rng, case)
    wanted = record(case).reference(x, weight, bias)
    for rank in (-1, *range(36)):
        assert np.array_equal(product(case, compute_dtype, x, weight, bias, rank=rank), wanted), (
            rank
        )


@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", PRODUCTS, ids=ids)
def test_products_of_images_in_16_bits(rng, case, compute_dtype):
    x, weight, bias = whole_numbers(rng, case)
    sums = record(case).reference(x, weight, bias)
    residual = rng.integers(-9, 9, sums.shape).astype(np.float32)
    wanted = np.maximum(sums + residual, 0)
    for more, storage_dtype in (
        ((0, 0), (compute_dtype, compute_dtype, compute_dtype)),
        ((8, 8), (compute_dtype, compute_dtype, compute_dtype)),
        ((4, 4), (compute_dtype, "float32", compute_dtype)),
        ((5, 3), (compute_dtype, compute_dtype, "float32")),
        ((0, 0), ("float32", compute_dtype, "float32")),
    ):
        found = product(
            case, compute_dtype, x, weight, bias, residual=residual, more=more, storage_dtype=storage_dtype,
            activation=RELU,
        )  # fmt: skip
        assert np.array_equal(found, halves.rounded(wanted, storage_dtype[2])), (
            more,
            storage_dtype,
        )


def test_who_asks_is_told_of_infinities_in_float16(rng):
    """Of finite sums past 65,504 alone, and only where y is float16."""
    case = (1, 64, 8, 8, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, weight = np.ones((1, 64, 8, 8), np.float32), np.ones((64, 64, 1, 1), np.float32)
    flag = halves.OverflowFlag()

    def said(bias, compute_dtype="float16", storage_dtype=("float16",) * 3):
        found = product(
            case,
            compute_dtype,
            x,
            weight,
            np.full(64, bias, np.float32),
            overflow=flag.overflow,
            storage_dtype=storage_dtype,
        )
        return flag.is_set(), found.max()

    assert said(65440.0) == (False, 65504.0)
    assert said(65440.0 + 15.0) == (False, 65504.0)
    assert said(65456.0) == (True, np.inf)
    assert said(np.inf) == (False, np.inf)
    assert not said(1e9, "float16", ("float16", "float16", "float32"))[0]
    assert not said(1e9, "bfloat16", ("bfloat16",) * 3)[0]
    x[0, 3, 4, 5] = np.inf
    assert said(0.0) == (False, np.inf)


def test_images_in_another_type_are_refused(rng):
    case = (1, 8, 4, 4, 8, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, weight, bias = arrays(rng, case)
    with pytest.raises(
        ValueError, match="y: expected float32 or float16, which is multiplied, found"
    ):
        product(case, "float16", x, weight, bias, storage_dtype=("float16", "float16", "bfloat16"))


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_planar_images(rng, channels, compute_dtype):
    case = (3, channels, 33, 47, 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1)
    x, weight, bias = whole_numbers(rng, case)
    found = product(case, compute_dtype, x, weight, bias, planar=True)
    assert np.array_equal(found, record(case).reference(x, weight, bias))


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("by_image", [False, True])
def test_what_comes_before_the_products(rng, by_image, compute_dtype):
    case = (3, 72, 9, 11, 40, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, weight, bias = whole_numbers(rng, case)
    scale = rng.integers(1, 4, (3, 72) if by_image else 72).astype(np.float32)
    shift = None if by_image else rng.integers(-2, 3, 72).astype(np.float32)
    z = x * (scale if by_image else scale[None])[..., None, None]
    if shift is not None:
        z = np.maximum(z + shift[:, None, None], 0)
    floor = -math.inf if by_image else 0.0
    wanted = record(case).reference(z, weight, bias)
    for storage_dtype in {"float32", compute_dtype} & {*halves.STORED}:
        found = product(
            case,
            compute_dtype,
            x,
            weight,
            bias,
            before=(scale, shift, floor),
            storage_dtype=(storage_dtype,) * 3,
        )
        assert np.array_equal(found, halves.rounded(wanted, storage_dtype))


#: The largest error of a product, of its size; float32 keeps 21 bits of it, and sums steps by rounding.
ERRORS = {"float32": 2.0**-19, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("case", PRODUCTS[-7:], ids=ids)
def test_products_are_rounded_as_their_operands(rng, case, compute_dtype):
    x, weight, bias = arrays(rng, case)
    wanted = record(case).reference(x, weight, bias)
    sizes = record(case).reference(abs(x), abs(weight), abs(bias))
    found = product(case, compute_dtype, x, weight, bias)
    assert (abs(found - wanted) <= 1.01 * ERRORS[compute_dtype] * sizes).all()
    again = product(case, compute_dtype, x, weight, bias)
    assert np.array_equal(found, again)


@pytest.mark.parametrize("compute_dtype", OPERANDS)
def test_products_keep_nan_and_infinity(rng, compute_dtype):
    case = (1, 64, 8, 8, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    x, weight, bias = whole_numbers(rng, case)
    weight = abs(weight) + 1
    x[0, 5, 0, 0], x[0, 6, 7, 7] = np.nan, np.inf
    found = product(case, compute_dtype, x, weight, bias, activation=RELU)
    assert np.isnan(found[0, :, :2, :2]).all()
    assert np.isnan(found).sum() == 4 * 64
    assert np.isposinf(found[0, :, 6:, 6:]).all()


def test_what_cannot_come_before_is_refused(rng):
    case = (1, 64, 8, 8, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    x, weight, bias = arrays(rng, case)
    with pytest.raises(ValueError, match="expected a kernel of 1x1 without padding"):
        product(case, "float16", x, weight, bias, before=(np.ones(64, np.float32), None, 0.0))


@pytest.mark.parametrize("rank", [0, 6, 12])
def test_more_groups_than_a_grid_has_layers(rng, rank):
    """Groups times the blocks that share their sums: past 65,535 by either."""
    for groups, terms in ((70_000, 1), (33_000, 2)):
        case = (1, groups * terms, 1, 1, groups, (5, 5), (1, 1), (2,) * 4, (1, 1), groups)
        x = rng.standard_normal((1, groups * terms, 1, 1)).astype(np.float32)
        weight = rng.standard_normal((groups, terms, 5, 5)).astype(np.float32)
        found = product(case, "float32", x, weight, None, rank=rank)
        wanted = (x.reshape(groups, terms).astype(np.float64) * weight[:, :, 2, 2]).sum(1)
        np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-5, atol=1e-5)


def test_fours_of_channels_that_32_bits_do_not_count(rng):
    """A first layer's image of fewer than 2^31 numbers, which is read as four channels."""
    import cupy

    side, stride = 23_200, 4
    if cupy.cuda.Device().mem_info[0] < 16 << 30:
        pytest.skip("needs 16 GiB of a GPU's memory")
    shape = _cpu.Conv2dShape(1, 1, side, side, 4, 9, 9, stride, stride, 0, 0)
    x = cupy.zeros((side, side), np.float32)
    ends = rng.standard_normal((2, 9, 9)).astype(np.float32)
    last = (shape.out_h - 1) * stride
    x[:9, :9], x[last : last + 9, last : last + 9] = cupy.asarray(ends)
    weight = rng.standard_normal((4, 1, 9, 9)).astype(np.float32)
    device, kind = Device("cuda"), _cpu.ElementType.float32
    how = shape, True, kind
    own = packed(device, "conv2d_nhwc", [weight], *how)
    size = cuda_module.load().conv2d_nhwc_workspace(*how, halves.kind("float32"), 0)
    out = cupy.full((shape.out_h, shape.out_w, 4), 7, np.float32)
    call(
        device, "conv2d_nhwc", *images(x, 0), own, *images(out), shape, kind, *prologue(), *epilogue(),
        *launch(cupy.empty(size, np.uint8)),
    )  # fmt: skip
    found = cupy.asnumpy(out[[0, -1], [0, -1]])
    wanted = np.einsum("erc,krc->ek", ends, weight[:, 0])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert float(cupy.abs(out).sum()) < 1e4  # all others are of zeros, or of a part of the ends
