from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import InputError, ops
from cnn_engine.operators.max_pool2d import MaxPool2d

# n, c, h, w, kernel, stride, padding
CASES = [
    (2, 16, 32, 32, 2, 2, 0), (1, 20, 8, 8, 2, None, 0), (0, 2, 4, 4, 2, 2, 0),
    (1, 1, 1, 1, 1, 1, 0), (2, 3, 7, 9, 3, 2, 1), (1, 2, 5, 5, 3, 1, 1),
    (1, 3, 11, 4, (3, 2), (2, 1), (1, 0)),
    (2, 2, 9, 9, 5, 3, 2), (1, 1, 6, 6, 7, 1, 3), (3, 1, 13, 13, 4, 4, 2),
    (2, 3, 9, 8, 3, 2, (0, 1, 2, 0), 2), (1, 4, 1, 30, (1, 5), (1, 2), (0, 4, 0, 3), 1),
    (1, 2, 1, 2, 2, 1, (1, 1, 1, 1), (2, 1)), (1, 1, 10, 12, 3, 3, (2, 2, 2, 2), (1, 3)),
]  # fmt: skip


def both(value):
    return value if isinstance(value, tuple) else (value, value)


def check(device, x, kernel, stride, padding, dilation=1):
    four = padding if isinstance(padding, tuple) and len(padding) == 4 else both(padding) * 2
    record = MaxPool2d(
        both(kernel), both(kernel if stride is None else stride), four, both(dilation)
    )
    wanted = record.reference(x)
    out, memory = device.guarded(wanted.shape)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    assert ops.max_pool2d(device.put(x), kernel, **options, out=out) is out
    device.check_guards(memory)
    parameters = {"shape": x.shape, "kernel": kernel, **options}
    tolerances.assert_close(device.get(out), wanted, 0, **parameters)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(device, rng, case):
    shape, window = case[:4], case[4:]
    check(device, rng.standard_normal(shape).astype(np.float32), *window)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nan_wins_and_infinities_are_numbers(device, rng, case):
    shape, window = case[:4], case[4:]
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 0.2] = -np.inf
    x[rng.random(shape) < 0.1] = np.inf
    x[rng.random(shape) < 0.1] = np.nan
    check(device, x, *window)
    check(device, np.full(shape, -np.inf, np.float32), *window)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(low, 9) for low in (0, 1, 1, 1))), kernel=st.integers(1, 7),
    stride=st.integers(1, 4), padding=st.tuples(*[st.integers(0, 3)] * 4), dilation=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_random_shapes(shape, kernel, stride, padding, dilation, seed):
    from conftest import Device

    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    window = dilation * (kernel - 1) + 1
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    rows, columns = shape[2] + padding[0] + padding[2], shape[3] + padding[1] + padding[3]
    if max(padding) >= window:
        with pytest.raises(InputError, match="less the padding"):
            ops.max_pool2d(x, kernel, **options)
    elif rows < window or columns < window:
        with pytest.raises(InputError, match="less the window"):
            ops.max_pool2d(x, kernel, **options)
    else:
        check(Device("cpu"), x, kernel, **options)
