"""conv2d over images whose channels lie side by side: every method, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tolerances
from native import NONE, channels_first, channels_last

from cnn_engine import _cpu
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.unary import HardSwish, Relu

Method = _cpu.Conv2dMethod
DIRECT, PLANAR, DEPTHWISE, WINOGRAD2, WINOGRAD4 = (
    Method.direct, Method.planar, Method.depthwise, Method.winograd2, Method.winograd4,
)  # fmt: skip

# n, c, h, w, k, kernel, stride, (above, left, below, right), dilation, groups
CASES = [
    (2, 16, 9, 7, 24, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (1, 600, 5, 6, 70, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (3, 16, 1, 1, 10, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (1, 40, 8, 9, 33, (1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    (1, 20, 13, 11, 40, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (2, 130, 7, 7, 130, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (1, 64, 30, 31, 72, (3, 3), (1, 1), (1, 0, 2, 1), (1, 1), 1),
    (1, 24, 14, 14, 24, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    (2, 3, 17, 15, 20, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1),
    (2, 3, 53, 40, 70, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1),
    (1, 4, 26, 25, 40, (8, 7), (2, 2), (2, 3, 1, 0), (1, 1), 1),
    (1, 1, 25, 60, 16, (7, 8), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    (1, 2, 18, 16, 16, (7, 7), (2, 2), (9, 8, 7, 6), (1, 1), 1),
    (2, 40, 8, 8, 16, (5, 3), (1, 2), (2, 1, 0, 1), (1, 1), 1),
    (2, 32, 10, 9, 48, (3, 3), (1, 1), (1, 1, 1, 1), (2, 2), 4),
    (1, 12, 5, 4, 20, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 2),
    (1, 1, 3, 3, 1, (3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    (0, 8, 3, 3, 8, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (1, 2, 40, 41, 5, (35, 37), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (2, 16, 9, 22, 16, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 16),
    (1, 200, 7, 7, 200, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 200),
    (1, 72, 15, 29, 72, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 72),
    (2, 24, 16, 16, 24, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1), 24),
    (1, 19, 6, 9, 19, (3, 3), (1, 1), (0, 2, 2, 0), (1, 1), 19),
    (1, 37, 5, 5, 37, (5, 5), (1, 2), (4, 4, 4, 4), (1, 1), 37),
    (2, 5, 4, 2, 5, (3, 3), (2, 1), (1, 1, 1, 1), (1, 1), 5),
    (1, 13, 9, 8, 13, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2), 13),
    (1, 40, 8, 10, 40, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 40),
    (1, 24, 11, 9, 24, (2, 4), (3, 3), (1, 0, 2, 3), (1, 2), 24),
    (1, 8, 3, 2, 8, (3, 3), (4, 4), (6, 6, 6, 6), (1, 1), 8),
    (2, 16, 1, 1, 16, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 16),
    (1, 24, 2, 1, 24, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1), 24),
    (1, 130, 2, 2, 130, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 130),
    (1, 100, 5, 3, 180, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (3, 196, 7, 8, 132, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    # Weights that are read once for several images.
    (3, 130, 6, 13, 260, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (5, 130, 5, 9, 260, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    # Large windows, steps and dilations of one channel, and several filters for each.
    (1, 33, 18, 17, 33, (31, 9), (1, 1), (15, 4, 15, 4), (1, 1), 33),
    (2, 20, 20, 23, 20, (3, 3), (1, 1), (6, 6, 6, 6), (6, 6), 20),
    (1, 24, 15, 34, 24, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 24),
    (2, 6, 9, 11, 18, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 6),
    (1, 65, 12, 61, 130, (7, 7), (1, 2), (3, 3, 3, 3), (1, 1), 65),
    (1, 5, 8, 9, 35, (2, 3), (3, 1), (0, 4, 1, 2), (2, 4), 5),
    # Groups of as many filters as channels: of those that vectors hold, and others.
    (2, 20, 9, 22, 20, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 5),
    (1, 34, 15, 29, 34, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 17),
    (2, 24, 11, 17, 24, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2), 3),
    (1, 136, 7, 33, 136, (5, 3), (1, 2), (4, 0, 1, 2), (1, 1), 34),
    (1, 40, 8, 19, 40, (2, 6), (1, 1), (0, 3, 1, 2), (1, 1), 5),
    (1, 48, 8, 5, 48, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 3),
    (1, 6, 5, 5, 6, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 3),
    (1, 27, 6, 16, 27, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 3),
    # Taps that lie outside for most outputs.
    (2, 20, 9, 10, 36, (3, 3), (1, 1), (6, 6, 6, 6), (6, 6), 1),
    (1, 54, 8, 13, 54, (3, 3), (1, 1), (12, 12, 12, 12), (12, 12), 6),
    (1, 140, 11, 10, 70, (3, 3), (2, 1), (7, 9, 8, 2), (7, 5), 1),
]


def methods(case):
    _, c, _, _, k, kernel, stride, _, dilation, groups = case
    yield DIRECT
    if groups > 1 and c in (groups, k):
        yield DEPTHWISE
    if groups == 1:
        yield PLANAR
    if groups == 1 and kernel == (3, 3) and stride == dilation == (1, 1):
        yield WINOGRAD2
        yield WINOGRAD4


def ids(case):
    return "-".join(str(part).replace(" ", "") for part in case)


ALL = [pytest.param(case, method, id=f"{ids(case)}-{method.name}")
       for case in CASES for method in methods(case)]  # fmt: skip


def address(array):
    return 0 if array is None else array.ctypes.data


def arrays(rng, case):
    n, c, h, w, k, kernel, *_, groups = case
    shapes = (n, c, h, w), (k, c // groups, *kernel), (k,)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def record(case, activation=None):
    *_, stride, padding, dilation, groups = case
    return Conv2d(stride, padding, dilation, groups, activation)


def run(case, method, x, weight, bias, *, residual=None, scale=None, shift=None, per_image=False,
        floor=-math.inf, activation=NONE, threads=1, more=(0, 0)):  # fmt: skip
    """Calls the kernel with pitches of ``more`` floats than channels; what lies between must stay."""
    n, c, h, w, k, kernel, stride, padding, dilation, groups = case
    shape = _cpu.Conv2dShape(n, c, h, w, k, *kernel, *stride, *padding, *dilation, groups)
    pitches = _cpu.Conv2dPitches(c + more[0], k + more[1], k)
    images = x if method == PLANAR else channels_last(x, more[0])
    packed = np.empty(_cpu.conv2d_nhwc_packed(shape, method), np.float32)
    _cpu.conv2d_nhwc_pack(address(weight), address(packed), shape, method, threads)
    size = _cpu.conv2d_nhwc_workspace(shape, method, threads) // 4
    workspace = np.full(size + 64, np.nan, np.float32)
    workspace[size:] = 5
    out = np.full((n, shape.out_h, shape.out_w, k + more[1]), 7, np.float32)
    if residual is not None:
        residual = np.ascontiguousarray(residual.transpose(0, 2, 3, 1))
    _cpu.conv2d_nhwc(
        *map(address, (images, packed, bias, residual, scale, shift, out, workspace)), shape,
        pitches, method, per_image, floor, *activation, threads,
    )  # fmt: skip
    assert (workspace[size:] == 5).all()
    return channels_first(out, k)


def is_phased(case):
    """Whether the planar method is Winograd's along rows, of pairs of columns."""
    _, _, _, w, k, (_, taps), stride, (_, left, _, right), dilation, _ = case
    columns = (w + left + right - taps) // 2 + 1
    return stride == (2, 2) and dilation == (1, 1) and taps in (7, 8) and columns >= 8 and k >= 16


def pairs(array):
    """Returns the pairs of columns as positions of twice the channels; one more column is zero."""
    padded = np.pad(array, ((0, 0),) * 3 + ((0, array.shape[3] % 2),))
    *shape, columns = padded.shape
    halves = padded.reshape(*shape, columns // 2, 2).transpose(0, 1, 4, 2, 3)
    return halves.reshape(shape[0], 2 * shape[1], shape[2], columns // 2)


def bound(case, method, x, weight, bias):
    """How far sums may be from float64's."""
    terms = math.prod(weight.shape[1:])
    magnitude = record(case).reference(*map(np.abs, (x, weight, bias)))
    if method in (WINOGRAD2, WINOGRAD4):
        m = 4 if method == WINOGRAD4 else 2
        padding = case[7]
        magnitude = magnitude + tolerances.winograd_magnitude(x, weight, padding, m)
        terms = x.shape[1] * (m + 2) ** 2
    if method == PLANAR and is_phased(case):
        top, left, bottom, right = case[7]
        padded = pairs(np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right + 8))))
        kernel = pairs(weight)
        size = tolerances.winograd_row_magnitude(padded, kernel, 3)
        magnitude = magnitude + size[:, :, : magnitude.shape[2], : magnitude.shape[3]]
        terms = kernel[0].size * 6
    return tolerances.sum_of_products(terms, magnitude)


@pytest.mark.parametrize(("case", "method"), ALL)
def test_against_reference(rng, instruction_set, case, method):
    x, weight, bias = arrays(rng, case)
    wanted = record(case).reference(x, weight, bias)
    found = run(case, method, x, weight, bias, more=(5, 3))
    tolerances.assert_close(found, wanted, bound(case, method, x, weight, bias))


@pytest.mark.parametrize(("case", "method"), ALL)
def test_same_bits_with_any_threads_and_batch(rng, instruction_set, case, method):
    x, weight, bias = arrays(rng, case)
    one = run(case, method, x, weight, bias)
    for threads in (2, 3, 8):
        assert np.array_equal(run(case, method, x, weight, bias, threads=threads), one)
    for n in range(case[0]):
        alone = run((1, *case[1:]), method, np.ascontiguousarray(x[n : n + 1]), weight, bias)
        assert np.array_equal(alone[0], one[n])


@pytest.mark.parametrize(("case", "method"), ALL)
def test_residual_and_activation(rng, case, method):
    x, weight, bias = arrays(rng, case)
    wanted = record(case).reference(x, weight, bias)
    residual = rng.standard_normal(wanted.shape).astype(np.float32)
    limit = bound(case, method, x, weight, bias)
    functions = _cpu.UnaryFunction
    for activation, op in (
        ((functions.relu, 0, 0), Relu()),
        ((functions.hard_swish, 0, 0), HardSwish()),
    ):
        found = run(case, method, x, weight, bias, residual=residual, activation=activation)
        sums = wanted + residual
        # hard_swish's slope is at most 1.5.
        tolerances.assert_close(found, op.reference(sums), 1.5 * limit + tolerances.functions(sums))


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("per_image", [False, True])
def test_prologue(rng, case, per_image):
    """Borders are zeros of what the prologue gives, not of what it reads."""
    x, weight, bias = arrays(rng, case)
    n, c = case[:2]
    scale = rng.standard_normal((n, c) if per_image else c).astype(np.float32)
    shift = None if per_image else rng.standard_normal(c).astype(np.float32)
    wide = scale.astype(np.float64).reshape(-1, c, 1, 1)
    z, size = x * wide, np.abs(x * wide)
    if shift is not None:
        z, size = z + shift.reshape(c, 1, 1), size + np.abs(shift).reshape(c, 1, 1)
    floor = -math.inf if per_image else 0.0
    wanted = record(case).reference(np.maximum(z, floor), weight, bias)
    found = run(
        case, DIRECT, x, weight, bias, scale=scale, shift=shift, per_image=per_image, floor=floor
    )
    tolerances.assert_close(found, wanted, bound(case, DIRECT, size, weight, bias))


@pytest.mark.parametrize("method", [DIRECT, PLANAR, WINOGRAD2, WINOGRAD4], ids=lambda m: m.name)
def test_nan_stays(rng, method):
    case = (1, 4, 12, 12, 8, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    x, weight, bias = arrays(rng, case)
    x[0, 2, 5, 6] = np.nan
    found = run(case, method, x, weight, bias, activation=(_cpu.UnaryFunction.relu, 0, 0))
    assert np.isnan(found[0, :, 4:7, 5:8]).all()
    if method in (DIRECT, PLANAR):
        assert np.isnan(found).sum() == 8 * 9


def to_bfloat16(array):
    """Rounds to the nearest, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.skipif(bool(_cpu.bfloat16_why_not()), reason=_cpu.bfloat16_why_not())
@pytest.mark.parametrize(
    "case", [c for c in CASES if c[-1] == 1 or c[1] // c[-1] % 2 == 0], ids=ids
)
def test_bfloat16(rng, case):
    """Sums of what is rounded to bfloat16 are as those of float32, with any number of threads."""
    x, weight, bias = arrays(rng, case)
    n, c, h, w, k, kernel, stride, padding, dilation, groups = case
    shape = _cpu.Conv2dShape(n, c, h, w, k, *kernel, *stride, *padding, *dilation, groups)
    images = channels_last(x, 3)
    packed = np.empty(_cpu.conv2d_nhwc_bfloat16_packed(shape), np.float32)
    _cpu.conv2d_nhwc_bfloat16_pack(address(weight), address(packed), shape)
    found = []
    for threads in (1, 2, 8):
        size = _cpu.conv2d_nhwc_bfloat16_workspace(shape, threads) // 4
        workspace = np.full(size + 64, np.nan, np.float32)
        workspace[size:] = 5
        out = np.empty((n, shape.out_h, shape.out_w, k), np.float32)
        _cpu.conv2d_nhwc_bfloat16(
            *map(address, (images, packed, bias, None, None, None, out, workspace)), shape,
            _cpu.Conv2dPitches(c + 3, k), False, -math.inf, *NONE, threads,
        )  # fmt: skip
        assert (workspace[size:] == 5).all()
        found.append(out.transpose(0, 3, 1, 2))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    near = to_bfloat16(x), to_bfloat16(weight), bias
    tolerances.assert_close(found[0], record(case).reference(*near), bound(case, DIRECT, *near))
