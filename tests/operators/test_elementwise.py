from __future__ import annotations

import numpy as np
import pytest
import tolerances

from cnn_engine import InputError, ops
from cnn_engine.graph import reference

SPECIAL = np.array(
    [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 9.1, -9.1], np.float32
)
SHAPES = [(0,), (1,), (7,), (3, 5), (2, 3, 32, 32), (1023,), (100_003,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_against_reference(device, rng, name, shape, in_place):
    x = rng.standard_normal(shape).astype(np.float32) * 3
    flat = x.reshape(-1)
    flat[: min(len(flat), len(SPECIAL))] = SPECIAL[: len(flat)]
    wanted = getattr(reference, name)(x)
    out, memory = device.guarded(shape)
    if in_place:
        out[...] = device.put(x)
        returned = getattr(ops, name)(out, out=out)
    else:
        returned = getattr(ops, name)(device.put(x), out=out)
    assert returned is out
    device.check_guards(memory)
    bound = 0 if name == "relu" else tolerances.FUNCTION_ULPS * tolerances.EPS * np.abs(wanted)
    bound = np.where(np.isfinite(bound), bound + np.finfo(np.float32).tiny * (name == "tanh"), 0)
    tolerances.assert_close(device.get(out), wanted, bound, name=name, shape=shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normalize(device, rng, shape):
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    out, memory = device.guarded(shape)
    assert ops.normalize(device.put(pixels, np.uint8), 1 / 255, -0.5, out=out) is out
    device.check_guards(memory)
    wanted = reference.normalize(pixels, 1 / 255, -0.5)
    tolerances.assert_close(device.get(out), wanted, 2 * tolerances.EPS, shape=shape)


def test_errors():
    pixels = np.zeros(4, np.uint8)
    with pytest.raises(InputError, match="expected float32, found uint8"):
        ops.relu(pixels)
    with pytest.raises(InputError, match="expected uint8, found float32"):
        ops.normalize(np.zeros(4, np.float32), 1.0, 0.0)
    with pytest.raises(InputError, match="finite scale and offset"):
        ops.normalize(pixels, float("nan"), 0.0)
    memory = np.zeros(9, np.float32)
    with pytest.raises(InputError, match="overlaps an input"):
        ops.relu(memory[:8], out=memory[1:])
