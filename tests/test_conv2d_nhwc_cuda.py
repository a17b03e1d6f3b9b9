"""conv2d over images whose channels lie side by side, on CUDA: against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tolerances
from conftest import Device
from native import call
from test_conv2d_nhwc import CASES, DIRECT, NONE, arrays, bound, ids, record

from cnn_engine import _cpu
from cnn_engine.operators.unary import HardSwish, Relu

pytestmark = pytest.mark.gpu

#: Beside those of the CPU: sizes at which a thread makes four columns, and at which it makes one.
LARGE = [
    (1, 64, 112, 112, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 64),
    (2, 72, 113, 111, 72, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 72),
    (3, 120, 55, 57, 120, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 120),
    (3, 96, 113, 90, 96, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1), 96),
    (3, 96, 56, 56, 96, (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 96),
    (1, 960, 7, 7, 960, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 960),
]
DEPTHWISE = [case for case in CASES if case[-1] == case[1] == case[4] > 1] + LARGE


def depthwise(case, x, weight, bias, *, residual=None, activation=NONE, more=(0, 0)):
    """Calls the kernel with pitches of ``more`` floats than channels; what lies between must stay."""
    device = Device("cuda")
    n, c, h, w, k, kernel, stride, padding, dilation, groups = case
    shape = _cpu.Conv2dShape(n, c, h, w, k, *kernel, *stride, *padding, *dilation, groups)
    images = np.full((n, h, w, c + more[0]), np.nan, np.float32)
    images[..., :c] = x.transpose(0, 2, 3, 1)
    packed = device.put(np.full(weight.size, np.nan, np.float32))
    call(device, "conv2d_nhwc_depthwise_pack", device.put(weight), packed, shape)
    out = device.put(np.full((n, shape.out_h, shape.out_w, k + more[1]), 7, np.float32))
    added = None if residual is None else device.put(residual.transpose(0, 2, 3, 1))
    call(
        device, "conv2d_nhwc_depthwise", device.put(images), packed,
        None if bias is None else device.put(bias), added, out, shape,
        _cpu.Conv2dPitches(c + more[0], k + more[1], k), *activation,
    )  # fmt: skip
    found = device.get(out)
    assert (found[..., k:] == 7).all()
    return np.ascontiguousarray(found[..., :k].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("more", [(0, 0), (5, 3), (4, 8)])
@pytest.mark.parametrize("case", DEPTHWISE, ids=ids)
def test_depthwise(rng, case, more):
    x, weight, bias = arrays(rng, case)
    wanted = record(case).reference(x, weight, bias)
    limit = bound(case, DIRECT, x, weight, bias)
    tolerances.assert_close(depthwise(case, x, weight, bias, more=more), wanted, limit)
    residual = rng.standard_normal(wanted.shape).astype(np.float32)
    for activation, op in (
        ((_cpu.UnaryFunction.relu, 0, 0), Relu()),
        ((_cpu.UnaryFunction.hard_swish, 0, 0), HardSwish()),
    ):
        found = depthwise(
            case, x, weight, bias, residual=residual, activation=activation, more=more
        )
        sums = wanted + residual
        tolerances.assert_close(found, op.reference(sums), 1.5 * limit + tolerances.functions(sums))


def test_depthwise_has_the_same_bits_with_any_batch(rng):
    case = (9, 64, 40, 40, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 64)
    x, weight, bias = arrays(rng, case)
    together = depthwise(case, x, weight, bias)
    for n in (0, 8):
        alone = depthwise((1, *case[1:]), np.ascontiguousarray(x[n : n + 1]), weight, bias)
        assert np.array_equal(alone[0], together[n])


def test_depthwise_keeps_nan(rng):
    case = (1, 8, 12, 12, 8, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 8)
    x, weight, bias = arrays(rng, case)
    x[0, 2, 5, 6] = np.nan
    found = depthwise(case, x, weight, bias, activation=(_cpu.UnaryFunction.relu, 0, 0))
    assert np.isnan(found).sum() == 9
    assert math.isfinite(found[0, 1].sum())
