"""CUDA kernels on the host: what the emulator finds, and kernels that are known to be right on a GPU."""

from __future__ import annotations

import re

import emulated_cuda
import numpy as np
import pytest

from cnn_engine import _cpu
from cnn_engine.operators.conv2d import Conv2d

F32, F16 = np.float32, np.float16

#: tests/native/emulator/faulty.h's faults -> what the emulator says, or None where the result is wrong.
FAULTS = {
    "no_barrier": None, "no_wait": None,
    "divergent_barrier": r"thread \(\d+, 0, 0\).*at barrier 0",
    "divergent_product": "at mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, .* at the end",
    "swapped_fragment": None, "misaligned_copy": "cp.async: expected addresses that are multiples of 8",
}  # fmt: skip


@pytest.fixture(scope="module", params=[80])
def kernels(request):
    return emulated_cuda.module(request.param)


@pytest.fixture(params=range(4), ids=["first", "last", "forwards", "backwards"])
def order(request, kernels):
    kernels.set_order(request.param)
    yield request.param
    kernels.set_order(0)


def product(kernels, fault: int) -> bool:
    """Returns whether a product by two warps is right."""
    rng = np.random.default_rng(fault)
    x, w = (rng.integers(-128, 128, (rows, 32)).astype(np.int8) for rows in (16, 8))
    y = np.zeros((2, 16, 8), np.int32)
    kernels.faulty_product(x.ctypes.data, w.ctypes.data, y.ctypes.data, fault)
    return np.array_equal(y, [x.astype(int) @ w.T.astype(int)] * 2)


def test_a_right_product_is_right(kernels, order):
    assert product(kernels, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(kernels, fault):
    number, said = 1 + list(FAULTS).index(fault), FAULTS[fault]
    right = []
    for order in range(4):
        kernels.set_order(order)
        try:
            right.append(product(kernels, number))
        except RuntimeError as error:
            assert said is not None
            assert re.search(said, str(error)), error
            right.append(False)
    kernels.set_order(0)
    assert not all(right) if said is None else not any(right), right


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


@pytest.mark.parametrize(
    ("x_shape", "filters", "kernel", "padding", "groups"),
    [
        ((2, 16, 9, 7), 20, 3, 1, 1),  # 16 bytes of channels at once, filters in fours
        ((1, 12, 5, 11), 8, 2, 0, 1),  # 8 bytes
        ((3, 10, 6, 6), 5, 3, 1, 5),  # one by one, in groups
        ((1, 256, 3, 3), 40, 1, 0, 1),  # more steps than the ring has stages
    ],
)
def test_float16_convolutions_are_those_of_numpy(
    kernels, order, x_shape, filters, kernel, padding, groups
):
    """conv2d_nhwc of sm80, which GPUs run: its operands by cp.async, its products by m16n8k16."""
    rng = np.random.default_rng(filters)
    n, channels, *image = x_shape
    x = rng.normal(size=x_shape).astype(F16)
    weight = rng.normal(size=(filters, channels // groups, kernel, kernel)).astype(F16).astype(F32)
    bias = rng.normal(size=filters).astype(F32)
    record = Conv2d((1, 1), (padding,) * 4, groups=groups)
    wanted = record.reference(x, weight, bias).transpose(0, 2, 3, 1)
    half, full = _cpu.ElementType.float16, _cpu.ElementType.float32
    pads = (padding,) * 4
    shape = _cpu.Conv2dShape(
        n, channels, *image, filters, kernel, kernel, 1, 1, *pads, 1, 1, groups
    )
    packed = np.zeros(kernels.conv2d_nhwc_packed(shape, False, half, 0) + 16, np.uint8)
    at = address(packed) + -address(packed) % 16
    kernels.conv2d_nhwc_pack(address(weight), at, shape, False, half, 0)
    images = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    y = np.full(wanted.shape, np.nan, F32)
    relu = _cpu.UnaryFunction.relu
    kernels.conv2d_nhwc(
        address(images), channels, half, at, address(y), filters, full, shape, half,
        0, 0, False, -np.inf, address(bias), 0, 0, full, _cpu.Activation(relu, 0.0, 0.0),
        _cpu.Overflow(0, 0), 0, 0, False, 0, 0,
    )  # fmt: skip
    np.testing.assert_allclose(y, np.maximum(wanted, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "features", "outputs"), [(3, 40, 70), (65, 33, 5)])
def test_float16_products_of_turing_are_those_of_numpy(kernels, order, rows, features, outputs):
    """linear_mma of sm75, which GPUs run: its products by m16n8k8."""
    rng = np.random.default_rng(rows)
    x, weight = (
        rng.normal(size=(many, features)).astype(F16).astype(F32) for many in (rows, outputs)
    )
    shape = _cpu.LinearShape(rows, features, outputs)
    packed = np.zeros(kernels.linear_mma_packed(shape, 0) + 16, np.uint8)
    at = address(packed) + -address(packed) % 16
    kernels.linear_mma_pack(address(weight), at, shape, 0)
    y, full = np.full((rows, outputs), np.nan, F32), _cpu.ElementType.float32
    none = _cpu.Activation(_cpu.UnaryFunction.clip, -np.inf, np.inf)
    kernels.linear_mma(
        address(x), at, address(y), shape, 0, 0, 0, full, none, _cpu.Overflow(0, 0), 0
    )
    np.testing.assert_allclose(y, x.astype(float) @ weight.T.astype(float), rtol=1e-5, atol=1e-5)
