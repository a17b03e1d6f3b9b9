"""Two convolutions as one kernel on Hopper GPUs, added or beside each other: against float64."""

from __future__ import annotations

import halves
import numpy as np
import pytest
import targets
from conftest import Device
from engines import on_gpu
from halves import HALVES
from native import NONE, RELU, call, channels_first, channels_last, epilogue, images, launch, packed
from test_conv2d_nhwc import record
from test_conv2d_nhwc_cuda import ERRORS
from test_conv2d_nhwc_wgmma import OPERANDS, shape_of, storage_dtypes
from test_conv2d_pair import beside, biased, block, fire, sums

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.kernels.cuda.requirements import WGMMA

pytestmark = pytest.mark.gpu

ONE, NO_PAD, PAD = (1, 1), (0, 0, 0, 0), (1, 1, 1, 1)


def pair(n, k, *both):
    """Returns the two cases of a sum, each as test_conv2d_nhwc has them."""
    return [(n, c, h, w, k, *window, 1) for c, h, w, *window in both]


def ends(one_place, many):
    """Returns cases of one place and of many tiles, of so many filters, and of no image."""
    return {
        "one place": pair(
            5, one_place, (512, 1, 1, (1, 1), ONE, NO_PAD, ONE), (64, 3, 3, (3, 3), ONE, NO_PAD, ONE)
        ),
        "none": pair(
            0, 64, (64, 3, 3, (1, 1), ONE, NO_PAD, ONE), (64, 3, 3, (3, 3), ONE, PAD, ONE)
        ),
        "many tiles": pair(
            5, many, (72, 61, 47, (1, 1), ONE, NO_PAD, ONE), (64, 61, 47, (3, 3), ONE, PAD, ONE)
        ),
    }  # fmt: skip


#: First blocks of ResNet-50, -18 and others; odd sizes, even kernels, windows that reach far beyond the image
#: and such as read few of its places, channels that fill no step, one place, many filters, no image.
CASES = {
    "bottleneck": pair(
        1, 256, (64, 28, 28, (1, 1), ONE, NO_PAD, ONE), (64, 28, 28, (1, 1), ONE, NO_PAD, ONE)
    ),
    "bottleneck 2 apart": pair(
        3, 264, (256, 15, 13, (1, 1), (2, 2), NO_PAD, ONE), (128, 8, 7, (1, 1), ONE, NO_PAD, ONE)
    ),
    "basic": pair(
        1, 128, (64, 56, 56, (1, 1), (2, 2), NO_PAD, ONE), (128, 28, 28, (3, 3), ONE, PAD, ONE)
    ),
    "basic, odd": pair(
        3, 136, (72, 33, 47, (1, 1), (2, 2), NO_PAD, ONE), (136, 17, 24, (3, 3), ONE, PAD, ONE)
    ),
    "windows": pair(
        2, 72, (8, 19, 22, (3, 4), (2, 3), (2, 1, 0, 5), (1, 2)),
        (200, 10, 8, (5, 3), ONE, (4, 2, 4, 0), (2, 1)),
    ),
    "far": pair(
        2, 40, (16, 3, 2, (3, 3), (4, 4), (6, 6, 6, 6), ONE),
        (136, 7, 9, (1, 1), (2, 3), NO_PAD, ONE),
    ),
    **ends(1000, 200),
}  # fmt: skip

#: Whose filters follow each other: of SqueezeNet, of other sizes, with more steps before or behind.
BESIDE = {
    "fire": pair(1, 64, (16, 55, 55, (1, 1), ONE, NO_PAD, ONE), (16, 55, 55, (3, 3), ONE, PAD, ONE)),
    "odd": pair(3, 128, (64, 13, 17, (3, 3), ONE, PAD, ONE), (200, 13, 17, (1, 1), ONE, NO_PAD, ONE)),
    "windows": pair(
        2, 192, (8, 19, 22, (3, 4), (2, 3), (2, 1, 0, 5), (1, 2)),
        (200, 10, 8, (5, 3), ONE, (4, 2, 4, 0), (2, 1)),
    ),
    **ends(256, 128),
}  # fmt: skip


def filtered(cases, filters):
    """Returns cases whose second convolution has other filters than the first."""
    return [cases[0], (*cases[1][:4], filters, *cases[1][5:])]


BESIDE = {
    f"{name}, {filters}": filtered(cases, filters)
    for (name, cases), filters in zip(BESIDE.items(), (64, 72, 200, 40, 64, 136), strict=True)
}
ALL = [
    *(pytest.param(cases, False, id=name) for name, cases in CASES.items()),
    *(pytest.param(cases, True, id=f"beside {name}") for name, cases in BESIDE.items()),
]


def drawn(rng, cases, whole=True):
    """Returns x, weights and bias of each of two convolutions."""
    for n, c, h, w, k, kernel, *_ in cases:
        shapes = (n, c, h, w), (k, c, *kernel), (k,)
        if whole:
            yield [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
        else:
            yield [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def total(cases, both, beside, absolute=False):
    made = [
        record(case).reference(*map(np.abs, arrays) if absolute else arrays)
        for case, arrays in zip(cases, both, strict=True)
    ]
    return np.concatenate(made, 1) if beside else sum(made)


def run(
    cases,
    compute_dtype,
    both,
    beside,
    *,
    activation=NONE,
    more=(0, 0, 0),
    storage_dtype=None,
    overflow=halves.NO_FLAG,
    rank=0,
    ready=0,
    holds=False,
    bias=True,
):
    """Calls the kernel. ``more``: of the pitches of x, of the other and of y; ``stored``: x, y."""
    device, shapes = Device("cuda"), [shape_of(case) for case in cases]
    kind, storage_dtype = (
        getattr(_cpu.ElementType, compute_dtype),
        storage_dtype or (storage_dtypes(compute_dtype),) * 2,
    )
    read = [
        halves.put(device, channels_last(x, extra), storage_dtype[0])
        for (x, *_), extra in zip(both, more, strict=False)
    ]
    weights = [weight for _, weight, _ in both]
    n, first = cases[0][0], shapes[0]
    k = cases[0][4] + (cases[1][4] if beside else 0)
    biases = [bias for *_, bias in both]
    out = halves.put(
        device, np.full((n, first.out_h, first.out_w, k + more[2]), 7), storage_dtype[1]
    )
    call(
        device, "conv2d_nhwc_wgmma_pair",
        *(part for one in read for part in images(one, storage_dtype=storage_dtype[0])),
        packed(device, "conv2d_nhwc_wgmma_pair", weights, *shapes, beside, kind),
        *images(out, storage_dtype=storage_dtype[1]), *shapes, beside, kind,
        *epilogue(
            device.put(np.concatenate(biases) if beside else sum(biases)) if bias else None,
            activation, overflow
        ),
        *launch(ready=ready, holds=holds, rank=rank),
    )  # fmt: skip
    return channels_first(halves.get(device, out, storage_dtype[1]), k)


@pytest.fixture(autouse=True)
def hopper():
    targets.need(WGMMA)


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize(("cases", "beside"), ALL)
def test_whole_numbers_are_exact(rng, cases, beside, compute_dtype):
    own = storage_dtypes(compute_dtype)
    both = list(drawn(rng, cases))
    wanted = total(cases, both, beside)
    assert np.array_equal(run(cases, compute_dtype, both, beside), halves.rounded(wanted, own))
    for more, storage_dtype in (
        ((8, 16, 8), (own, own)), ((16, 8, 3), (own, own)), ((0, 8, 4), (own, "float32")),
    ):  # fmt: skip
        found = run(
            cases,
            compute_dtype,
            both,
            beside,
            activation=RELU,
            more=more,
            storage_dtype=storage_dtype,
        )
        assert np.array_equal(found, halves.rounded(np.maximum(wanted, 0), storage_dtype[1])), more
    for _, _, bias in both:
        bias[:] = 0
    found = run(cases, compute_dtype, both, beside, bias=False)
    assert np.array_equal(found, halves.rounded(total(cases, both, beside), own))


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize(("cases", "beside"), ALL)
def test_every_tile_and_split_is_exact(rng, cases, beside, compute_dtype):
    """Ranks are more than there are tiles and splits; what is known is all of the first, some and nothing."""
    both = list(drawn(rng, cases))
    wanted = halves.rounded(
        np.maximum(total(cases, both, beside), 0), storage_dtypes(compute_dtype)
    )
    for rank in range(40):
        known = (0, 0, 64, 10000)[rank % 4]
        found = run(
            cases, compute_dtype, both, beside, activation=RELU, rank=rank, ready=known, holds=rank % 3 == 0
        )  # fmt: skip
        assert np.array_equal(found, wanted), rank


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize(("cases", "beside"), [ALL[1], *ALL[3:5], ALL[8], ALL[10], ALL[14]])
def test_errors_are_those_of_the_operands(rng, cases, beside, compute_dtype):
    both = list(drawn(rng, cases, whole=False))
    storage_dtype = storage_dtypes(compute_dtype), "float32"
    found = run(cases, compute_dtype, both, beside, storage_dtype=storage_dtype)
    limit = 1.01 * ERRORS[compute_dtype] * total(cases, both, beside, absolute=True)
    assert (abs(found - total(cases, both, beside)) <= limit).all()
    for _ in range(5):
        assert np.array_equal(
            found, run(cases, compute_dtype, both, beside, storage_dtype=storage_dtype)
        )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("beside", [False, True])
def test_blocks_that_stay(rng, beside, dtype):
    """Tiles enough for blocks to take several, of one step of each source."""
    cases = pair(
        1, 64, (64, 230, 224, (1, 1), ONE, NO_PAD, ONE), (64, 230, 224, (1, 1), ONE, NO_PAD, ONE)
    )
    both = list(drawn(rng, cases))
    wanted = halves.rounded(np.maximum(total(cases, both, beside), 0), dtype)
    for rank in range(10):
        found = run(cases, dtype, both, beside, activation=RELU, rank=rank)
        assert np.array_equal(found, wanted), rank


def test_special_values_stay_where_they_are_read(rng):
    cases = CASES["basic, odd"]
    both = list(drawn(rng, cases))
    both[0][0][1, 3, 4, 6] = np.nan  # of the place (2, 3)
    both[0][1][:] = abs(both[0][1]) + 1
    both[0][0][2, 5, 0, 0] = np.inf
    found = run(cases, "float16", both, False, activation=RELU)
    assert np.isnan(found).sum() == np.isnan(found[1, :, 2, 3]).sum() == 136
    assert np.isposinf(found).sum() == np.isposinf(found[2, :, 0, 0]).sum() == 136


def test_who_asks_is_told_of_sums_past_float16():
    """Of both together, which may fit where one does not."""
    cases = CASES["bottleneck"]
    both = [[0 * array for array in one] for one in drawn(np.random.default_rng(0), cases)]
    flag = halves.OverflowFlag()
    for values, wanted in (((40000, 40000), 1), ((40000, -40000), 0), ((80000, -20000), 0)):
        for (x, weight, _), value in zip(both, values, strict=True):
            x[:, 0], weight[:, 0] = 200, value / 200
        run(cases, "float16", both, False, overflow=flag.overflow)
        assert flag.is_set() == wanted


@pytest.mark.parametrize(
    ("changed", "beside", "said"),
    [
        (
            {"k": 72},
            False,
            r"as many filters, found results of \[3, 8, 7, 264\] and \[3, 8, 7, 72\]",
        ),
        ({"h": 9}, False, r"as many places, found .* \[3, 8, 7, 264\] and \[3, 9, 7, 264\]"),
        ({"h": 9}, True, "as many places"),
        ({"n": 4}, True, "as many places"),
        ({}, True, "filters of the first in sixty-fours"),
        ({"c": 60}, True, "channels in eights"),
        ({"stride": (9, 1)}, False, "strides up to 8"),
        ({"groups": 2}, False, "one group"),
    ],
)
def test_what_it_does_not_take_is_refused(changed, beside, said):
    module, kind = cuda_module.load(), _cpu.ElementType.float16
    cases = CASES["bottleneck 2 apart"]
    names = "n", "c", "h", "w", "k", "kernel", "stride", "padding", "dilation", "groups"
    other = tuple((dict(zip(names, cases[1], strict=True)) | changed).values())
    shapes = shape_of(cases[0]), shape_of(other)
    assert not module.conv2d_nhwc_wgmma_pair_takes(*shapes, beside, kind, targets.native())
    with pytest.raises(ValueError, match=said):
        module.conv2d_nhwc_wgmma_pair_packed(*shapes, beside, kind, 0)


def test_addresses_and_types_are_checked(rng):
    cases = CASES["bottleneck"]
    both = list(drawn(rng, cases))
    for change, said in (
        ({"more": (0, 4, 0)}, "expected x in float16, its pitch and all addresses"),
        ({"more": (4, 0, 0)}, "expected x in float16, its pitch and all addresses"),
        ({"storage_dtype": ("float32", "float32")}, "found float32 with a pitch of 64"),
        ({"storage_dtype": ("float16", "bfloat16")}, "y: expected float32 or float16"),
    ):
        with pytest.raises(ValueError, match=said):
            run(cases, "float16", both, False, **change)


def test_what_gains_is_taken():
    for compute_dtype in HALVES:
        kind = getattr(_cpu.ElementType, compute_dtype)
        for name in ("bottleneck", "bottleneck 2 apart", "basic"):
            shapes = map(shape_of, CASES[name])
            assert cuda_module.load().conv2d_nhwc_wgmma_pair_takes(
                *shapes, False, kind, targets.native()
            )


@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_engine_of_neighbours(dtype, batch):
    graph = fire(4, batch, size=33)
    placed, steps = on_gpu(graph, dtype)
    assert steps.count("wgmma_beside") == len(beside(placed))
    if dtype in HALVES and batch == 1:
        assert beside(placed)


@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
@pytest.mark.parametrize(("kernel", "batch"), [(1, 1), (3, 3), (3, 20)])
def test_engine(dtype, kernel, batch):
    graph = block(kernel, batch=batch, size=33, last=biased)
    placed, steps = on_gpu(graph, dtype)
    assert steps.count("wgmma_sum") == len(sums(placed))
    if dtype in HALVES:
        assert sums(placed)
