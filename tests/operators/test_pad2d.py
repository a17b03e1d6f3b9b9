from __future__ import annotations

import numpy as np
import pytest

from cnn_engine import InputError, ops
from cnn_engine.graph import reference


@pytest.mark.parametrize(
    ("shape", "padding"),
    [
        ((2, 3, 32, 32), 2), ((1, 1, 1, 1), 3), ((0, 2, 3, 3), 1), ((3, 2, 5, 7), 0),
        ((2, 3, 4, 5), (1, 0, 2, 3)), ((2, 3, 4, 5), (1, 0)), ((2, 3, 4, 5), (0, 2)), ((1, 33, 9, 2), (3, 1)),
    ],
)  # fmt: skip
def test_against_reference(device, rng, shape, padding):
    x = rng.standard_normal(shape).astype(np.float32)
    if isinstance(padding, tuple) and len(padding) == 4:
        top, left, bottom, right = padding
        wanted = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    else:
        wanted = reference.pad2d(x, padding)
    out, memory = device.guarded(wanted.shape)
    assert ops.pad2d(device.put(x), padding, out=out) is out
    device.check_guards(memory)
    np.testing.assert_array_equal(device.get(out), wanted.astype(np.float32))


def test_errors():
    with pytest.raises(InputError, match="pad2d: padding height: expected 0 to"):
        ops.pad2d(np.zeros((1, 1, 2, 2), np.float32), -1)
    with pytest.raises(InputError, match="expected 4 dimensions"):
        ops.pad2d(np.zeros((1, 2, 2), np.float32), 1)
    with pytest.raises(InputError, match="elements an image"):
        ops.pad2d(np.zeros((1, 1, 2, 2), np.float32), 1_000_000)
