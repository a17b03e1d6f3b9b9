"""Single nodes of quantized networks, with inputs of every kind: what kernels of 8-bit integers must make."""

from __future__ import annotations

import numpy as np

from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.channels_last import MaxPool2dNhwc
from cnn_engine.operators.quantized import DequantizeLinear, Lookup, QuantizeLinear
from cnn_engine.operators.quantized_conv2d import QuantizedConv2dNhwc
from cnn_engine.operators.quantized_linear import QuantizedLinear
from cnn_engine.operators.quantized_pointwise import QuantizedAdd, QuantizedMean, QuantizedMul

f32 = np.float32

#: Inputs that are no constants, where there are more than the first.
COMPUTED = {"quantized_conv2d_nhwc": {0, 7}, "quantized_add": {0, 3}, "quantized_mul": {0, 2}}


def numbers(rng, dtype, *shape):
    if dtype == "float32":
        return (rng.standard_normal(shape) * 4).astype(f32)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def scale(rng, *shape):
    return rng.uniform(0.01, 0.7, shape).astype(f32)


def cases(rng, one, other):
    """Yields records with their inputs."""
    zero = numbers(rng, one)
    x = numbers(rng, one, 2, 9, 7, 19)
    weight, bias = numbers(rng, "int8", 24, 19, 3, 3), numbers(rng, "int32", 24) // 2**16
    factors = scale(rng, 24) / 200
    layer = [weight, factors, bias, zero, numbers(rng, "int8", 24), numbers(rng, other)]
    plain = QuantizedConv2dNhwc(other, padding=(1, 1, 1, 1), stride=(2, 2))
    yield plain, [x, *layer]
    y = plain.reference(x, *layer)
    yield plain, [x, *layer, numbers(rng, one, *y.shape), scale(rng)[()], numbers(rng, one)]
    yield plain, [x, *layer, None, None, None, numbers(rng, one, 256)]
    images = numbers(rng, one, 1, 3, 15, 21)
    stem = [numbers(rng, "uint8", 8, 3, 7, 7), None, None, zero, numbers(rng, "uint8")]
    yield QuantizedConv2dNhwc("int32", stride=(2, 2), planar=True), [images, *stem]
    rows = numbers(rng, one, 5, 33)
    weight, factors = numbers(rng, "int8", 18, 33), scale(rng, 18) / 1000
    yield QuantizedLinear("float32"), [rows, weight, factors, None, zero]
    yield QuantizedLinear(other, low=3, high=90), [rows, weight, factors, bias[:18], zero]
    real = numbers(rng, "float32", 3, 41, 7) * 40
    real[0, 0, :4] = np.nan, np.inf, -np.inf, 0
    yield QuantizeLinear(dtype=one), [real, scale(rng)[()], zero]
    yield DequantizeLinear(), [x, scale(rng)[()], zero]
    yield Lookup(), [x, numbers(rng, other, 256)]
    yield Lookup(), [x, numbers(rng, "float32", 256)]
    for shape in (x.shape, (2, 1, 1, 19), (9, 1, 1), (1,)):
        y = numbers(rng, other, *shape)
        factors = scale(rng)[()], scale(rng)[()]
        sums = [x, factors[0], zero, y, factors[1], numbers(rng, other)]
        yield QuantizedAdd(one, low=5), [*sums, zero]
        yield QuantizedMul(one, low=5), [y, sums[5], x, zero, factors[0] / 100, zero]
    for axes in ((1, 2), (3,), (0, 1, 2, 3)):
        factor = f32(scale(rng)[()] / np.prod([x.shape[axis] for axis in axes]))
        yield QuantizedMean(other, axes=axes), [x, zero, factor, numbers(rng, other)]
    yield MaxPool2dNhwc((3, 2), (2, 1), (1, 0, 1, 1)), [x]
    yield MaxPool2dNhwc((2, 2), (2, 2), (0, 0, 0, 0)), [numbers(rng, one, 1, 5, 6, 300)]


def graph_of(record, arrays, computed=None) -> tuple[Graph, dict[str, np.ndarray]]:
    """Returns a graph of one node, and its inputs: those ``computed``, which are no constants."""
    names = [None if a is None else f"x{i}" for i, a in enumerate(arrays)]
    computed = COMPUTED.get(record.kind, {0}) if computed is None else computed
    given = {
        f"x{i}": np.asarray(a) for i, a in enumerate(arrays) if i in computed and a is not None
    }
    constants = {
        f"x{i}": np.asarray(a) for i, a in enumerate(arrays) if a is not None and i not in computed
    }
    inputs = tuple(Value(name, a.shape, a.dtype.name) for name, a in given.items())
    node = Node("layer", record, tuple(names), ("y",))
    return Graph("layer", inputs, ("y",), (node,), constants), given
