from __future__ import annotations

import numpy as np
import pytest
import tolerances

from cnn_engine import InputError, ops
from cnn_engine.operators.norm import Lrn


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "shape", [(2, 7, 5, 3), (1, 64, 56, 56), (3, 2, 4), (0, 4, 2, 2), (2, 5), (1, 1, 1, 1)], ids=str
)
def test_against_reference(device, rng, shape, size):
    x = rng.standard_normal(shape).astype(np.float32)
    constants = {"alpha": 2.0, "beta": 0.75, "k": 1.5}
    wanted = Lrn(size, **constants).reference(x)
    out, memory = device.guarded(wanted.shape)
    assert ops.lrn(device.put(x), size, **constants, out=out) is out
    device.check_guards(memory)
    bound = tolerances.power_of_sum(wanted, size, constants["beta"])
    tolerances.assert_close(device.get(out), wanted, bound, shape=shape, size=size)


def test_errors():
    with pytest.raises(InputError, match="size: expected 1 to"):
        ops.lrn(np.zeros((1, 2, 3), np.float32), 0)
    with pytest.raises(InputError, match="expected at least 2 dimensions, found 1"):
        ops.lrn(np.zeros(3, np.float32), 1)
