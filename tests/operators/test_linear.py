from __future__ import annotations

import numpy as np
import pytest
import tolerances

from cnn_engine import InputError, ops
from cnn_engine.graph import reference


@pytest.mark.parametrize("reduction", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("n", "features", "outputs"),
    [(3, 320, 10), (1, 5184, 140), (2, 140, 10), (0, 8, 3), (1, 1, 1), (5, 33, 31), (7, 31, 65), (130, 9, 2)],
)  # fmt: skip
def test_against_reference(device, rng, n, features, outputs, bias, reduction):
    x = rng.standard_normal((n, features)).astype(np.float32)
    w = rng.standard_normal((outputs, features)).astype(np.float32)
    b = rng.standard_normal(outputs).astype(np.float32) if bias else None
    wanted = reference.linear(x, w, b)
    magnitude = reference.linear(np.abs(x), np.abs(w), None if b is None else np.abs(b))
    out, memory = device.guarded(wanted.shape)
    put_bias = None if b is None else device.put(b)
    assert ops.linear(device.put(x), device.put(w), put_bias, reduction=reduction, out=out) is out
    device.check_guards(memory)
    bound = tolerances.sum_of_products(features + 1, magnitude)
    tolerances.assert_close(device.get(out), wanted, bound, n=n, features=features, outputs=outputs)


def test_errors():
    with pytest.raises(InputError, match="weight: expected 8 input features, found 9"):
        ops.linear(np.zeros((2, 8), np.float32), np.zeros((3, 9), np.float32))
    with pytest.raises(InputError, match="input features: expected 1 to"):
        ops.linear(np.zeros((2, 0), np.float32), np.zeros((3, 0), np.float32))
