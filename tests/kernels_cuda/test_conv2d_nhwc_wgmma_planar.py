"""First layers, of planar images, as Hopper GPUs have them: against float64."""

from __future__ import annotations

import halves
import numpy as np
import pytest
import targets
from conftest import Device
from native import NONE, RELU, call, channels_first, epilogue, images, packed
from test_conv2d_nhwc import arrays, ids, record
from test_conv2d_nhwc_cuda import ERRORS, whole_numbers
from test_conv2d_nhwc_wgmma import OPERANDS, shape_of, storage_dtypes

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.kernels.cuda.requirements import WGMMA

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper():
    targets.need(WGMMA)


#: One to three tiles of a row, rows that are left over, windows of one to eight columns.
FIRST = [
    (3, 3, 33, 47, 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1),
    (1, 3, 224, 224, 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1),
    (20, 3, 30, 225, 32, (3, 3), (2, 2), (0, 1, 1, 0), (1, 1), 1),
    (2, 1, 19, 300, 70, (5, 8), (1, 1), (2, 4, 2, 4), (1, 1), 1),
    (9, 4, 40, 17, 130, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    (1, 2, 9, 9, 8, (1, 1), (3, 2), (0, 0, 0, 0), (1, 1), 1),
    (1, 3, 5, 4, 35, (8, 2), (1, 2), (9, 9, 9, 9), (1, 1), 1),
]


def first_layer(case, compute_dtype, x, weight, bias, activation=NONE, more=0, storage_dtype=None):
    device, shape = Device("cuda"), shape_of(case)
    kind, storage_dtype = (
        getattr(_cpu.ElementType, compute_dtype),
        storage_dtype or storage_dtypes(compute_dtype),
    )
    n, _, _, _, k = case[:5]
    out = halves.put(device, np.full((n, shape.out_h, shape.out_w, k + more), 7), storage_dtype)
    call(
        device, "conv2d_nhwc_wgmma_planar", device.put(x),
        packed(device, "conv2d_nhwc_wgmma_planar", [weight], shape, kind),
        *images(out, storage_dtype=storage_dtype), shape, kind, *epilogue(device.put(bias), activation),
    )  # fmt: skip
    return channels_first(halves.get(device, out, storage_dtype), k)


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("case", FIRST, ids=ids)
def test_first_layers_of_whole_numbers_are_exact(rng, case, compute_dtype):
    x, weight, bias = whole_numbers(rng, case)
    sums, own = record(case).reference(x, weight, bias), storage_dtypes(compute_dtype)
    found = first_layer(case, compute_dtype, x, weight, bias)
    assert np.array_equal(found, halves.rounded(sums, own))
    for more, storage_dtype in ((8, own), (3, own), (5, "float32")):
        found = first_layer(case, compute_dtype, x, weight, None, RELU, more, storage_dtype)
        wanted = np.maximum(record(case).reference(x, weight, None), 0)
        assert np.array_equal(found, halves.rounded(wanted, storage_dtype))


@pytest.mark.parametrize("compute_dtype", OPERANDS)
@pytest.mark.parametrize("case", [FIRST[0], FIRST[3], FIRST[4]], ids=ids)
def test_first_layers_round_what_they_read(rng, case, compute_dtype):
    x, weight, bias = arrays(rng, case)
    wanted = record(case).reference(x, weight, bias)
    sizes = record(case).reference(abs(x), abs(weight), abs(bias))
    found = first_layer(case, compute_dtype, x, weight, bias, storage_dtype="float32")
    assert (abs(found - wanted) <= 1.01 * ERRORS[compute_dtype] * sizes).all()
    again = first_layer(case, compute_dtype, x, weight, bias, storage_dtype="float32")
    assert np.array_equal(found, again)


def test_first_layers_are_taken_however_little_there_is_to_do():
    for k, stride in ((64, 1), (16, 2)):
        shape = shape_of((1, 3, 224, 224, k, (3, 3), (stride, stride), (1, 1, 1, 1), (1, 1), 1))
        for compute_dtype in OPERANDS:
            kind = getattr(_cpu.ElementType, compute_dtype)
            assert cuda_module.load().conv2d_nhwc_wgmma_planar_takes(shape, kind, targets.native())


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ((1, 5, 8, 8, 64, (3, 3), (1, 1), (1,) * 4, (1, 1), 1), "at most 4 channels"),
        ((1, 3, 8, 9, 64, (3, 9), (1, 1), (1,) * 4, (1, 1), 1), "at most 8 columns"),
        ((1, 3, 8, 8, 64, (3, 3), (1, 4), (1,) * 4, (1, 1), 1), "1 or 2 columns apart"),
        ((1, 3, 99, 8, 64, (90, 3), (1, 1), (1,) * 4, (1, 1), 1), "rows that fit into shared"),
    ],
)
def test_other_first_layers_are_refused(rng, case, said):
    with pytest.raises(ValueError, match=said):
        first_layer(case, "float16", *arrays(rng, case))
