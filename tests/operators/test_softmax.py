from __future__ import annotations

import numpy as np
import pytest
import tolerances

from cnn_engine import InputError, ops
from cnn_engine.graph import reference

INF, NAN = np.inf, np.nan


def check(device, x, reduction):
    wanted = reference.softmax(x)
    out, memory = device.guarded(x.shape)
    assert ops.softmax(device.put(x), reduction=reduction, out=out) is out
    device.check_guards(memory)
    tolerances.assert_close(device.get(out), wanted, tolerances.softmax(x), x=x)


@pytest.mark.parametrize("reduction", [False, True])
@pytest.mark.parametrize("shape", [(3, 10), (1, 1), (0, 5), (2, 33), (300, 7), (1, 1000)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 50.0, 1e30])
def test_against_reference(device, rng, shape, scale, reduction):
    check(device, (rng.standard_normal(shape) * scale).astype(np.float32), reduction)


@pytest.mark.parametrize("reduction", [False, True])
def test_sums_of_many_classes_are_as_exact_as_their_terms(rng, reduction):
    x = np.maximum(rng.standard_normal((2, 100_000)) * 1.5, 0).astype(np.float32)
    wanted = reference.softmax(x)
    found = ops.softmax(x, reduction=reduction)
    tolerances.assert_close(found, wanted, tolerances.softmax(x) * wanted)


@pytest.mark.parametrize("reduction", [False, True])
def test_nan_and_infinities_as_in_pytorch(device, reduction):
    x = np.array(
        [[1, NAN, 2], [INF, 1, 2], [-INF, 1, 2], [-INF, -INF, -INF], [INF, -INF, 0], [NAN, INF, -INF],
         [3.4e38, -3.4e38, 0], [INF, INF, 0]],
        np.float32,
    )  # fmt: skip
    found = device.get(ops.softmax(device.put(x), reduction=reduction))
    # The rows as torch.softmax(dim=1) gives them.
    e = np.exp(-1.0)
    wanted = np.full(x.shape, NAN)
    wanted[2] = [0, e / (1 + e), 1 / (1 + e)]
    wanted[6] = [1, 0, 0]
    tolerances.assert_close(found, wanted, tolerances.FUNCTION_ULPS * tolerances.EPS)


@pytest.mark.parametrize("reduction", [False, True])
def test_in_place(device, rng, reduction):
    x = rng.standard_normal((5, 10)).astype(np.float32)
    y = device.put(x.copy())
    assert ops.softmax(y, out=y, reduction=reduction) is y
    tolerances.assert_close(device.get(y), reference.softmax(x), tolerances.softmax(x))


def test_errors():
    with pytest.raises(InputError, match="expected 2 dimensions"):
        ops.softmax(np.zeros(3, np.float32))
    with pytest.raises(InputError, match="classes: expected 1 to"):
        ops.softmax(np.zeros((3, 0), np.float32))
