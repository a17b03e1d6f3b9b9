"""squeeze_excite on CUDA, against the operator's reference."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from conftest import Device
from native import call

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import ROUNDING
from cnn_engine.operators.squeeze_excite import SqueezeExcite
from cnn_engine.operators.unary import Relu, Sigmoid

pytestmark = pytest.mark.gpu

Function = _cpu.UnaryFunction

# images, rows, columns, channels, outputs of the first layer, outputs, more floats than channels
CASES = [
    (1, 112, 112, 32, 8, 32, 0),
    (1, 28, 28, 72, 24, 72, 0),
    (3, 14, 14, 672, 168, 672, 0),
    (2, 7, 7, 1152, 48, 1152, 0),
    (1, 7, 7, 2560, 1024, 100, 0),
    (20, 7, 7, 960, 240, 960, 8),
    (2, 5, 3, 7, 3, 9, 0),
    (1, 1, 1, 1, 1, 1, 0),
    (2, 9, 4, 20, 5, 20, 3),
    (0, 4, 4, 8, 4, 8, 0),
]


def run(case, x, w1, b1, w2, b2, operands):
    device, kernels = Device("cuda"), cuda_module.load()
    n, h, w, c, hidden, outputs, more = case
    kind = getattr(_cpu.Conv2dOperands, operands)
    packed = []
    for weight in (w1, w2):
        shape = _cpu.LinearShape(1, weight.shape[1], weight.shape[0])
        packed.append(device.library.zeros(kernels.linear_rows_packed(shape, kind, 0), np.uint8))
        call(device, "linear_rows_pack", device.put(weight), packed[-1], shape, kind)
    images = np.full((n, h, w, c + more), np.nan, np.float32)
    images[..., :c] = x
    y, memory = device.guarded((n, outputs))
    call(
        device, "squeeze_excite", device.put(images), packed[0],
        None if b1 is None else device.put(b1), packed[1], None if b2 is None else device.put(b2),
        y, _cpu.SqueezeExciteShape(n, h, w, c, hidden, outputs, c + more), kind,
        Function.relu, 0, 0, Function.sigmoid, 0, 0,
    )  # fmt: skip
    device.check_guards(memory)
    return device.get(y)


@pytest.mark.parametrize("operands", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(rng, case, operands):
    n, h, w, c, hidden, outputs, _ = case
    x, w1, w2, b1, b2 = (
        rng.standard_normal(shape).astype(np.float32) / np.float32(scale)
        for shape, scale in (
            ((n, h, w, c), 1), ((hidden, c), c**0.5), ((outputs, hidden), hidden**0.5),
            ((hidden,), 1), ((outputs,), 1),
        )
    )  # fmt: skip
    op = SqueezeExcite(Relu(), Sigmoid())
    wide = w1[:, :, None, None], w2[:, :, None, None]
    for biases in ((b1, b2), (None, None)):
        wanted = op.reference(x, wide[0], biases[0], wide[1], biases[1])[:, 0, 0]
        means = np.abs(x).mean(axis=(1, 2))
        first = means @ np.abs(w1).T + np.abs(b1)
        size = first @ np.abs(w2).T + np.abs(b2)
        rounding = 0.0 if operands == "float32" else 2 * ROUNDING[operands]
        limit = tolerances.sum_of_products(c + hidden, size) + rounding * size
        found = run(case, x, w1, biases[0], w2, biases[1], operands)
        # sigmoid's slope is at most 1/4.
        tolerances.assert_close(found, wanted, limit / 4 + tolerances.functions(wanted))
        assert np.array_equal(found, run(case, x, w1, biases[0], w2, biases[1], operands))
