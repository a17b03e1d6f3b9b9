from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import InputError, ops
from cnn_engine.operators.average_pool2d import AveragePool2d, LpPool2d

# n, c, h, w, kernel, stride, (above, left, below, right), dilation, extra rows and columns
CASES = [
    (2, 16, 32, 32, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), (0, 0)),
    (1, 3, 7, 9, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (1, 0)),
    (0, 2, 4, 4, (2, 2), (1, 1), (0, 0, 0, 0), (1, 1), (0, 0)),
    (1, 1, 1, 1, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (0, 0)),
    (3, 2, 9, 8, (3, 2), (1, 3), (2, 0, 1, 1), (2, 3), (0, 2)),
    (1, 4, 1, 30, (1, 5), (1, 2), (0, 4, 0, 3), (1, 1), (0, 0)),
    (2, 2048, 7, 7, (7, 7), (1, 1), (0, 0, 0, 0), (1, 1), (0, 0)),
    (1, 1, 3, 3, (2, 2), (1, 1), (3, 3, 3, 3), (1, 1), (0, 0)),
]


def check_average(device, x, kernel, stride, padding, dilation, extra, counted):
    record = AveragePool2d(kernel, stride, padding, dilation, extra, counted)
    wanted, magnitude = record.reference(x), record.reference(np.abs(x))
    out, memory = device.guarded(wanted.shape)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "extra": extra}
    found = ops.average_pool2d(device.put(x), kernel, **options, count_include_pad=counted, out=out)
    assert found is out
    device.check_guards(memory)
    bound = np.nan_to_num(tolerances.sum_of_products(kernel[0] * kernel[1] + 1, magnitude))
    tolerances.assert_close(device.get(out), wanted, bound, shape=x.shape, kernel=kernel, **options)


def check_norm(device, x, kernel, stride, padding, dilation, extra, p):
    record = LpPool2d(kernel, stride, padding, dilation, extra, p=p)
    wanted = record.reference(x)
    out, memory = device.guarded(wanted.shape)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "extra": extra}
    assert ops.lp_pool2d(device.put(x), kernel, p=p, **options, out=out) is out
    device.check_guards(memory)
    bound = tolerances.power_of_sum(wanted, kernel[0] * kernel[1], 1.0)
    tolerances.assert_close(device.get(out), wanted, bound, shape=x.shape, p=p, **options)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_average_against_reference(device, rng, case, counted):
    x = rng.standard_normal(case[:4]).astype(np.float32)
    check_average(device, x, *case[4:], counted)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_norm_against_reference(device, rng, case, p):
    check_norm(device, rng.standard_normal(case[:4]).astype(np.float32), *case[4:], p)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(low, 9) for low in (0, 1, 1, 1))),
    kernel=st.tuples(*[st.integers(1, 4)] * 2), stride=st.tuples(*[st.integers(1, 3)] * 2),
    padding=st.tuples(*[st.integers(0, 4)] * 4), dilation=st.tuples(*[st.integers(1, 3)] * 2),
    extra=st.tuples(*[st.integers(0, 2)] * 2), counted=st.booleans(), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_random_shapes(shape, kernel, stride, padding, dilation, extra, counted, seed):
    from conftest import Device

    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    sizes = [shape[2 + i] + padding[i] + padding[2 + i] + extra[i] for i in (0, 1)]
    spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    if sizes[0] < spans[0] or sizes[1] < spans[1]:
        with pytest.raises(InputError, match="less the window"):
            ops.average_pool2d(
                x, kernel, stride=stride, padding=padding, dilation=dilation, extra=extra
            )
    else:
        check_average(Device("cpu"), x, kernel, stride, padding, dilation, extra, counted)
        check_norm(Device("cpu"), x, kernel, stride, padding, dilation, extra, 2)


def test_nan_and_infinity_stay_in_their_windows(device, rng):
    x = rng.standard_normal((1, 1, 4, 4)).astype(np.float32)
    x[0, 0, 0, 0], x[0, 0, 3, 3] = np.nan, np.inf
    y = device.get(ops.average_pool2d(device.put(x), 2))[0, 0]
    np.testing.assert_array_equal(np.isnan(y), [[True, False], [False, False]])
    np.testing.assert_array_equal(np.isposinf(y), [[False, False], [False, True]])


def test_errors():
    x = np.zeros((1, 1, 4, 4), np.float32)
    with pytest.raises(InputError, match="p: expected a whole number from 1, found 0"):
        ops.lp_pool2d(x, 2, p=0)
    with pytest.raises(InputError, match="extra rows: expected 0 to"):
        ops.average_pool2d(x, 2, extra=-1)
    with pytest.raises(InputError, match="dilation height: expected 1 to"):
        ops.average_pool2d(x, 2, dilation=0)
