"""conv2d over images whose channels lie side by side, as Hopper GPUs have it: against float64."""

from __future__ import annotations

import math

import halves
import numpy as np
import pytest
import targets
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
from test_conv2d_nhwc import CASES, arrays, ids, record
from test_conv2d_nhwc_cuda import ERRORS, PRODUCTS, whole_numbers

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.kernels.cuda.requirements import WGMMA

pytestmark = pytest.mark.gpu

OPERANDS = (*HALVES, "tf32", "float32")

#: Images of every size from 1 to 33, windows that reach far beyond them, and one side that is longer.
SIZES = [
    *(
        (2, 64, size, 34 - size, 72, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
        for size in range(1, 34)
    ),
    (1, 8, 3, 2, 8, (3, 3), (4, 4), (6, 6, 6, 6), (1, 1), 1),
    (2, 72, 11, 9, 40, (2, 4), (3, 3), (1, 0, 2, 3), (1, 2), 1),
    (1, 64, 20, 30, 64, (3, 5), (1, 2), (5, 2, 0, 7), (5, 3), 1),
    (1, 136, 9, 12, 200, (1, 1), (2, 3), (0, 1, 2, 0), (1, 1), 1),
    (1, 8, 160, 9, 16, (3, 3), (8, 7), (100, 3, 50, 3), (60, 1), 1),
    (300, 64, 1, 1, 65, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (20, 256, 14, 14, 256, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (20, 64, 56, 56, 256, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    # More tiles than multiprocessors, the last of them filled in part.
    (20, 64, 57, 55, 72, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (5, 72, 61, 47, 200, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (9, 64, 33, 47, 328, (3, 3), (2, 1), (1, 1, 1, 1), (1, 1), 1),
]

#: More channels than those to whose sums float32 and tf32 add residuals as they are held: kManyChannels.
LONG = (1, 552, 13, 15, 136, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)


def shape_of(case):
    n, c, h, w, k, kernel, stride, padding, dilation, groups = case
    return _cpu.Conv2dShape(n, c, h, w, k, *kernel, *stride, *padding, *dilation, groups)


def storage_dtypes(compute_dtype) -> str:
    return compute_dtype if compute_dtype in HALVES else "float32"


def takes(case, compute_dtype="float16") -> bool:
    kind = getattr(_cpu.ElementType, compute_dtype)
    return bool(cuda_module.load().conv2d_nhwc_wgmma_takes(shape_of(case), kind, targets.native()))


def runs(case, compute_dtype) -> bool:
    """Whether the kernel can, be another better or not."""
    kind = getattr(_cpu.ElementType, compute_dtype)
    try:
        return cuda_module.load().conv2d_nhwc_wgmma_packed(shape_of(case), kind, 0) > 0
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def hopper():
    targets.need(WGMMA)


def product(
    case, compute_dtype, x, weight, bias, *, residual=None, activation=NONE, more=(0, 0), storage_dtype=None,
    overflow=halves.NO_FLAG, before=(None, None, -math.inf), rank=0, ready=0, holds=False,
):  # fmt: skip
    """Calls the kernel.

    ``before``: scale, shift and the least that z can be; ``more``: of the pitches of x and y; ``stored``: how
    x, the residual and y lie in memory; ``rank``: of the tile and split; ``ready``, ``holds``: see the
    operator's header.
    """
    device, shape = Device("cuda"), shape_of(case)
    kind, storage_dtype = (
        getattr(_cpu.ElementType, compute_dtype),
        storage_dtype or (storage_dtypes(compute_dtype),) * 3,
    )
    n, _, _, _, k = case[:5]
    out = halves.put(
        device, np.full((n, shape.out_h, shape.out_w, k + more[1]), 7), storage_dtype[2]
    )
    added = residual
    if residual is not None:
        added = halves.put(device, residual.transpose(0, 2, 3, 1), storage_dtype[1])
    call(
        device, "conv2d_nhwc_wgmma",
        *images(
            halves.put(device, channels_last(x, more[0]), storage_dtype[0]), storage_dtype=storage_dtype[0]
        ),
        packed(device, "conv2d_nhwc_wgmma", [weight], shape, kind),
        *images(out, storage_dtype=storage_dtype[2]), shape, kind,
        *prologue(
            *map(device.put, before[:2]), before[0] is not None and before[0].ndim == 2, before[2]
        ),
        *epilogue(device.put(bias), activation, overflow, images(added, storage_dtype=storage_dtype[1])),
        *launch(ready=ready, holds=holds, rank=rank),
    )  # fmt: skip
    return channels_first(halves.get(device, out, storage_dtype[2]), k)


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("case", [*CASES, *PRODUCTS, *SIZES], ids=ids)
def test_whole_numbers_are_exact(rng, case, compute_dtype):
    own = storage_dtypes(compute_dtype)
    if not runs(case, compute_dtype):
        assert case[-1] > 1 or case[1] % (8 if compute_dtype in HALVES else 4)
        return
    x, weight, bias = whole_numbers(rng, case)
    sums = record(case).reference(x, weight, bias)
    wanted = halves.rounded(sums, own)
    assert np.array_equal(product(case, compute_dtype, x, weight, bias), wanted)
    residual = rng.integers(-9, 9, sums.shape).astype(np.float32)
    added = np.maximum(sums + residual, 0)
    for more, storage_dtype in (
        ((8, 8), (own, own, own)),
        ((0, 4), (own, "float32", "float32")),
        ((16, 3), (own, own, own)),
    ):
        found = product(
            case, compute_dtype, x, weight, bias, residual=residual, activation=RELU, more=more,
            storage_dtype=storage_dtype,
        )  # fmt: skip
        assert np.array_equal(found, halves.rounded(added, storage_dtype[2])), (more, storage_dtype)


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("case", [SIZES[28], SIZES[35], *SIZES[-3:], LONG], ids=ids)
def test_every_tile_and_split_is_exact(rng, case, compute_dtype):
    """Ranks are more than there are tiles and splits: the last of them runs then."""
    x, weight, bias = whole_numbers(rng, case)
    sums = record(case).reference(x, weight, bias)
    residual = rng.integers(-9, 9, sums.shape).astype(np.float32)
    wanted = halves.rounded(np.maximum(sums + residual, 0), storage_dtypes(compute_dtype))
    more = {"residual": residual, "activation": RELU}
    for rank in (-1, *range(52)):
        found = product(case, compute_dtype, x, weight, bias, rank=rank, **more)
        assert np.array_equal(found, wanted), rank


@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize(
    "case",
    [
        (1, 72, 3, 112, 136, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
        (2, 200, 2, 56, 72, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
        (3, 64, 4, 111, 64, (3, 3), (1, 1), (2, 0, 1, 3), (1, 1), 1),
        (1, 8, 3, 223, 136, (3, 3), (1, 1), (0, 3, 0, 0), (1, 1), 1),
        (1, 264, 4, 28, 136, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
        (2, 72, 5, 31, 72, (3, 3), (1, 1), (2, 0, 1, 1), (1, 1), 1),
    ],
    ids=ids,
)
@pytest.mark.parametrize("quarter", range(4))
def test_tiles_that_are_rows_are_exact(rng, quarter, case, compute_dtype):
    """Parts of a row of 56 places, several rows of 28 or 30, and patches are tiles of several ranks.

    In quarters: racecheck ends those alone in which no tile has stages that two pairs of warps use again.
    """
    x, weight, bias = whole_numbers(rng, case)
    wanted = halves.rounded(np.maximum(record(case).reference(x, weight, bias), 0), compute_dtype)
    for rank in range(quarter, 52, 4):
        found = product(
            case,
            compute_dtype,
            x,
            weight,
            bias,
            activation=RELU,
            rank=rank,
            more=(8, 16),
            holds=rank % 8 > 3,
        )
        assert np.array_equal(found, wanted), rank


@pytest.mark.parametrize("compute_dtype", HALVES)
def test_blocks_that_stay_take_one_tile_after_another(rng, compute_dtype):
    """Of two steps, so that stages and slots are used again; few enough for racecheck."""
    case = (1, 128, 230, 224, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, weight, bias = whole_numbers(rng, case)
    sums = record(case).reference(x, weight, bias)
    residual = rng.integers(-9, 9, sums.shape).astype(np.float32)
    for more, wanted in (({}, sums), ({"residual": residual}, sums + residual)):
        for rank in range(10):
            found = product(
                case, compute_dtype, x, weight, bias, activation=RELU, rank=rank, **more
            )
            assert np.array_equal(found, halves.rounded(np.maximum(wanted, 0), compute_dtype)), rank


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("size", [(1, 57, 55), (20, 56, 56)])
@pytest.mark.parametrize("function", ["relu", "swish", "hard_swish", "gelu"])
def test_tiles_whose_sums_one_block_makes_have_the_same_bits(rng, size, function, compute_dtype):
    """128 bytes of channels are a step, which no blocks share; among the tiles are those that stay."""
    n, h, w = size
    c = 64 if compute_dtype in HALVES else 32
    case = (n, c, h, w, 200, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, weight, bias = arrays(rng, case)
    if compute_dtype in HALVES:
        x[0, 5, 7, 7], x[0, 6, 9, 9] = np.nan, np.inf
    residual = rng.standard_normal((n, 200, h, w), np.float32)
    activation = (getattr(_cpu.UnaryFunction, function), 1.0, 0.0)
    found = [
        product(
            case, compute_dtype, x, weight, bias, residual=residual, activation=activation, rank=rank
        )
        for rank in range(14)
    ]  # fmt: skip
    assert np.isnan(found[0][0, :, 7, 7]).all() == (compute_dtype in HALVES)
    assert all(np.array_equal(found[0], other, equal_nan=True) for other in found[1:])


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("case", [PRODUCTS[-14], *SIZES[-5:]], ids=ids)
def test_errors_are_those_of_the_operands(rng, case, compute_dtype):
    x, weight, bias = arrays(rng, case)
    wanted = record(case).reference(x, weight, bias)
    sizes = record(case).reference(abs(x), abs(weight), abs(bias))
    found = product(
        case,
        compute_dtype,
        x,
        weight,
        bias,
        storage_dtype=(storage_dtypes(compute_dtype),) * 2 + ("float32",),
    )
    assert (abs(found - wanted) <= 1.01 * ERRORS[compute_dtype] * sizes).all()
    for _ in range(20):
        again = product(
            case,
            compute_dtype,
            x,
            weight,
            bias,
            storage_dtype=(storage_dtypes(compute_dtype),) * 2 + ("float32",),
        )
        assert np.array_equal(found, again)


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize(
    "case",
    [
        (1, 64, 56, 56, 128, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        (3, 72, 9, 11, 40, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        (5, 1000, 7, 7, 128, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        (20, 256, 28, 28, 128, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        (2, 96, 15, 15, 64, (1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    ],
    ids=ids,
)
@pytest.mark.parametrize("by_image", [False, True])
def test_what_comes_before_the_products(rng, case, by_image, compute_dtype):
    n, c, *_ = case
    x, weight, bias = whole_numbers(rng, case)
    scale = rng.integers(1, 4, (n, c) if by_image else c).astype(np.float32)
    shift = None if by_image else rng.integers(-2, 3, c).astype(np.float32)
    z = x * (scale if by_image else scale[None])[..., None, None]
    floor = -math.inf if by_image else 0.0
    if shift is not None:
        z = np.maximum(z + shift[:, None, None], 0)
    storage_dtype = (storage_dtypes(compute_dtype),) * 2 + ("float32",)
    found = product(
        case,
        compute_dtype,
        x,
        weight,
        bias,
        before=(scale, shift, floor),
        more=(8, 0),
        storage_dtype=storage_dtype,
    )
    assert np.array_equal(found, record(case).reference(z, weight, bias))


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("by_image", [False, True])
def test_what_comes_before_is_exact_in_every_tile_and_split(rng, by_image, compute_dtype):
    """Of fewer steps than a block has stages, and of more."""
    for n, c, size, k in ((2, 1816, 14, 136), (20, 264, 7, 72)):
        case = (n, c, size, size, k, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
        x, weight, bias = whole_numbers(rng, case)
        scale = rng.integers(1, 3, (n, c) if by_image else c).astype(np.float32)
        z = np.maximum(x * np.broadcast_to(scale, (n, c))[..., None, None], 0)
        wanted = record(case).reference(z, weight, bias)
        storage_dtype = (storage_dtypes(compute_dtype),) * 2 + ("float32",)
        for rank in range(20):
            found = product(
                case,
                compute_dtype,
                x,
                weight,
                bias,
                before=(scale, None, 0.0),
                storage_dtype=storage_dtype,
                rank=rank,
            )
            assert np.array_equal(found, wanted), (n, rank)


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("known", [0, 136, 200, 232, 264])
def test_what_is_known_is_multiplied_ahead(rng, known, compute_dtype):
    """Of all steps, of none, and of all but one or two, which each block of a cluster then has."""
    case = (1, 264, 14, 14, 136, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, weight, bias = whole_numbers(rng, case)
    scale = rng.integers(1, 3, 264).astype(np.float32)
    shift = rng.integers(-2, 3, 264).astype(np.float32)
    z = np.maximum(x * scale[:, None, None] + shift[:, None, None], 0)
    residual = rng.integers(-9, 9, (1, 136, 14, 14)).astype(np.float32)
    plain, after = (record(case).reference(given, weight, bias) for given in (x, z))
    for rank in range(24):
        how = {"ready": known, "holds": rank % 2 == 0, "rank": rank, "activation": RELU}
        found = product(case, compute_dtype, x, weight, bias, residual=residual, **how)
        wanted = halves.rounded(np.maximum(plain + residual, 0), storage_dtypes(compute_dtype))
        assert np.array_equal(found, wanted), rank
        for more in ({}, {"residual": residual}):
            found = product(
                case, compute_dtype, x, weight, bias, before=(scale, shift, 0.0), **more, **how
            )
            wanted = np.maximum(after + more.get("residual", 0), 0)
            assert np.array_equal(found, halves.rounded(wanted, storage_dtypes(compute_dtype))), (
                rank
            )


@pytest.mark.parametrize("compute_dtype", ["float16", "tf32", "float32"])
def test_functions_and_special_values(rng, compute_dtype):
    case = (1, 64, 8, 8, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    x, weight, bias = whole_numbers(rng, case)
    sums = record(case).reference(x, weight, bias)
    clip = (_cpu.UnaryFunction.clip, -3, 6)
    found = product(case, compute_dtype, x, weight, bias, activation=clip)
    assert np.array_equal(found, np.clip(sums, -3, 6))
    leaky = (_cpu.UnaryFunction.leaky_relu, 0.5, 0)
    found = product(case, compute_dtype, x, weight, bias, activation=leaky)
    assert np.array_equal(found, np.where(sums < 0, sums / 2, sums))
    weight = abs(weight) + 1
    x[0, 5, 0, 0], x[0, 6, 7, 7] = np.nan, np.inf
    found = product(case, compute_dtype, x, weight, bias, activation=RELU)
    assert np.isnan(found).sum() == 4 * 64
    assert np.isposinf(found[0, :, 6:, 6:]).all()


@pytest.mark.parametrize("compute_dtype", HALVES)
def test_gelu_of_every_number(compute_dtype):
    """Whose errors are below 6.5e-6 before results are rounded: of all finite numbers of 16 bits."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    every = bits.view(np.float16) if compute_dtype == "float16" else bits
    every = halves.wide(every, compute_dtype)
    every = np.where(np.isfinite(every), every, 0).astype(np.float32)
    case = (1, 64, 32, 32, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x = every.reshape(1, 64, 32, 32)
    same = np.eye(64, dtype=np.float32)[:, :, None, None]
    gelu = (_cpu.UnaryFunction.gelu, 0.0, 0.0)
    normal = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in every.tolist()]).reshape(x.shape)
    wanted = x * normal
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[compute_dtype]
    limit = 6.5e-6 + 1.01 * np.maximum(unit * np.abs(wanted), 2.0**-25)
    for rank in range(14):
        found = product(case, compute_dtype, x, same, None, activation=gelu, rank=rank)
        assert (np.abs(found - wanted) <= limit).all(), rank


def test_who_asks_is_told_of_infinities_in_float16():
    case = (1, 64, 8, 8, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, weight = np.ones((1, 64, 8, 8), np.float32), np.ones((64, 64, 1, 1), np.float32)
    flag = halves.OverflowFlag()
    for bias, wanted in ((65440.0, False), (65456.0, True), (np.inf, False)):
        product(case, "float16", x, weight, np.full(64, bias, np.float32), overflow=flag.overflow)
        assert flag.is_set() == wanted


def test_all_types_are_taken_however_little_there_is_to_do():
    for c, size, kernel in ((64, 56, 3), (64, 7, 1), (16, 224, 3)):
        pads = (kernel // 2,) * 4
        case = (1, c, size, size, 64, (kernel, kernel), (1, 1), pads, (1, 1), 1)
        assert all(takes(case, compute_dtype) for compute_dtype in OPERANDS)


#: Of x as a whole, of each image, and of what channels are multiplied by and filters divided by.
MAGNITUDES = [1e-25, 1e-10, 1.0, 1e10, 1e25]


@pytest.mark.parametrize("columns", [9, 30, 60])
def test_float32_has_its_error_whatever_the_magnitudes(rng, columns):
    """A place's and a filter's numbers share a scale, nobody else's do."""
    case = (5, 64, 7, columns, 136, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    x, weight, _ = arrays(rng, case)
    plain = product(case, "float32", x, weight, None)
    sizes = record(case).reference(abs(x), abs(weight), None)
    wanted = record(case).reference(x, weight, None)
    for magnitude in MAGNITUDES:
        scaled = (x * np.float32(magnitude)).astype(np.float32)
        found = product(case, "float32", scaled, weight, None) / np.float64(magnitude)
        assert (abs(found - wanted) <= ERRORS["float32"] / 4 * sizes).all(), magnitude
    each = np.array(MAGNITUDES, np.float32)
    found = product(case, "float32", x * each[:, None, None, None], weight, None)
    for image, magnitude in enumerate(each.tolist()):
        errors = abs(found[image] / magnitude - wanted[image])
        assert (errors <= ERRORS["float32"] / 4 * sizes[image]).all(), magnitude
    powers = 2.0 ** rng.integers(-30, 31, 136).astype(np.float32)
    found = product(case, "float32", x, weight * powers[:, None, None, None], None)
    assert np.array_equal(
        found, plain * powers[:, None, None]
    )  # multiplying by them rounds nothing


@pytest.mark.parametrize("channels", [16, 32, 64, 512])
def test_float32_sums_are_neither_too_small_nor_too_large_on_average(rng, channels):
    """Tensor cores cut off 0.6 to 0.9 of 2^-24 of a sum on average: 15 layers would lose 8e-7."""
    case = (4, channels, 40, 40, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x = np.maximum(rng.standard_normal((4, channels, 40, 40)), 0).astype(np.float32)
    weight = rng.standard_normal((64, channels, 1, 1)).astype(np.float32)
    wanted = record(case).reference(x, weight, None)
    errors = product(case, "float32", x, weight, None) - wanted
    assert abs((errors * wanted).sum() / (wanted**2).sum()) < 0.4 * 2.0**-24


def test_float32_keeps_numbers_that_are_far_from_the_largest_of_their_scale(rng):
    """2^-17 and less of it: with fewer bits, but the error of a sum is that of its largest terms."""
    case = (2, 96, 9, 9, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    x, weight, _ = arrays(rng, case)
    x *= (2.0 ** rng.integers(-40, 1, x.shape)).astype(np.float32)
    weight *= (2.0 ** rng.integers(-40, 1, weight.shape)).astype(np.float32)
    wanted = record(case).reference(x, weight, None)
    largest = np.abs(x).max(1, keepdims=True) * np.abs(weight).max((1, 2, 3))[:, None, None] * 96
    sizes = record(case).reference(abs(x), abs(weight), None)
    found = product(case, "float32", x, weight, None)
    assert (abs(found - wanted) <= ERRORS["float32"] / 4 * sizes + 2.0**-37 * largest).all()
    small = np.where(np.abs(x) < 2.0**-30, x, 0)  # no place has a large number now
    found = product(case, "float32", small.astype(np.float32), weight, None)
    wanted = record(case).reference(small, weight, None)
    sizes = record(case).reference(abs(small), abs(weight), None)
    largest = (
        np.abs(small).max(1, keepdims=True) * np.abs(weight).max((1, 2, 3))[:, None, None] * 96
    )
    assert (abs(found - wanted) <= ERRORS["float32"] / 4 * sizes + 2.0**-37 * largest).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"more": (4, 0)}, "expected x in float16, its pitch and all addresses"),
        ({"storage_dtype": ("float32",) * 3}, "found float32 with a pitch of 64"),
        ({"storage_dtype": ("float16", "float16", "bfloat16")}, "y: expected float32 or float16"),
        (
            {"compute_dtype": "tf32", "more": (2, 0)},
            "expected x in tf32, its pitch and all addresses",
        ),
        ({"case": (1, 64, 8, 8, 64, (3, 3), (1, 1), (1,) * 4, (1, 1), 2)}, "expected one group"),
        ({"case": (1, 60, 8, 8, 64, (3, 3), (1, 1), (1,) * 4, (1, 1), 1)}, "channels in eights"),
        (
            {
                "case": (1, 62, 8, 8, 64, (3, 3), (1, 1), (1,) * 4, (1, 1), 1),
                "compute_dtype": "float32",
            },
            "channels in fours",
        ),
        ({"case": (1, 64, 8, 8, 64, (3, 3), (9, 1), (1,) * 4, (1, 1), 1)}, "strides up to 8"),
        ({"case": (1, 8, 8, 8, 8, (3, 3), (1, 1), (129,) * 4, (1, 1), 1)}, "128 places beyond"),
        ({"before": (None, None, 0.0)}, "expected a kernel of 1x1 without padding"),
    ],
)
def test_what_it_does_not_take_is_refused(rng, change, said):
    case = change.pop("case", (1, 64, 8, 8, 64, (3, 3), (1, 1), (1,) * 4, (1, 1), 1))
    compute_dtype = change.pop("compute_dtype", "float16")
    x, weight, bias = arrays(rng, case)
    with pytest.raises(ValueError, match=said):
        product(case, compute_dtype, x, weight, bias, **change)
