from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import InputError, ops
from cnn_engine.operators import reference

# n, c, h, w, kernel, stride, padding
CASES = [
    (2, 16, 32, 32, 2, 2, 0), (1, 20, 8, 8, 2, None, 0), (0, 2, 4, 4, 2, 2, 0),
    (1, 1, 1, 1, 1, 1, 0), (2, 3, 7, 9, 3, 2, 1), (1, 2, 5, 5, 3, 1, 1),
    (1, 3, 11, 4, (3, 2), (2, 1), (1, 0)),
    (2, 2, 9, 9, 5, 3, 2), (1, 1, 6, 6, 7, 1, 3), (3, 1, 13, 13, 4, 4, 2),
]  # fmt: skip


def check(device, x, kernel, stride, padding):
    wanted = reference.max_pool2d(x, kernel, stride, padding)
    out, memory = device.guarded(wanted.shape)
    assert ops.max_pool2d(device.put(x), kernel, stride=stride, padding=padding, out=out) is out
    device.check_guards(memory)
    parameters = {"shape": x.shape, "kernel": kernel, "stride": stride, "padding": padding}
    tolerances.assert_close(device.get(out), wanted, 0, **parameters)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(device, rng, case):
    *shape, kernel, stride, padding = case
    check(device, rng.standard_normal(shape).astype(np.float32), kernel, stride, padding)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nan_wins_and_infinities_are_numbers(device, rng, case):
    *shape, kernel, stride, padding = case
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 0.2] = -np.inf
    x[rng.random(shape) < 0.1] = np.inf
    x[rng.random(shape) < 0.1] = np.nan
    check(device, x, kernel, stride, padding)
    check(device, np.full(shape, -np.inf, np.float32), kernel, stride, padding)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(low, 9) for low in (0, 1, 1, 1))), kernel=st.integers(1, 7),
    stride=st.integers(1, 4), padding=st.integers(0, 3), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_random_shapes(shape, kernel, stride, padding, seed):
    from conftest import Device

    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if padding > kernel // 2:
        with pytest.raises(InputError, match="half the window"):
            ops.max_pool2d(x, kernel, stride=stride, padding=padding)
    elif min(shape[2:]) + 2 * padding < kernel:
        with pytest.raises(InputError, match="less the window"):
            ops.max_pool2d(x, kernel, stride=stride, padding=padding)
    else:
        check(Device("cpu"), x, kernel, stride, padding)
