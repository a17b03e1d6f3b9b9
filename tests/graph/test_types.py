"""The types of tensors: bytes that follow from them, and quantizations that do not fit."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from cnn_engine import _cpu
from cnn_engine.errors import InputError
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.operator import Operator
from cnn_engine.types import INTEGER_RANGES, ITEM_BYTES, Quantization, TensorType


def numpy_type(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def test_bytes_are_those_of_arrays():
    for name, nbytes in ITEM_BYTES.items():
        if name != "tf32":
            assert numpy_type(name).itemsize == nbytes, name
        assert TensorType(name, (3, 5, 7)).nbytes == 105 * nbytes
    for name, (lowest, highest) in INTEGER_RANGES.items():
        kind = ml_dtypes.iinfo(numpy_type(name))
        assert (kind.min, kind.max) == (lowest, highest), name
    stored = TensorType("float32", (2, 3), storage_dtype="bfloat16")
    assert (stored.item_bytes, stored.nbytes, stored.memory_dtype) == (2, 12, "bfloat16")


def test_compiled_kernels_know_the_same_bytes():
    types = _cpu.ElementType.__members__
    assert {"float32", "tf32", "bfloat16", "int8", "uint8", "int32"} <= types.keys()
    for name, native in types.items():
        assert _cpu.bytes_of(native) == ITEM_BYTES[name], name


def test_quantization_is_kept_as_float32_and_integers():
    one = Quantization(np.float64(0.1), np.uint8(128))
    assert one == Quantization((float(np.float32(0.1)),), (128,))
    each = Quantization(np.float32([0.5, 0.25]), 3, axis=1)
    assert each.zero_point == (3, 3)
    assert hash(each) == hash(replace(each))
    kind = TensorType("int8", (4, 2), quantization=each)
    assert pickle.loads(pickle.dumps(kind)) == kind


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Quantization(0.0), "scale: expected positive finite float32 numbers, found 0.0"),
        (lambda: Quantization(-1.0), "found -1.0"),
        (lambda: Quantization(float("nan")), "found nan"),
        (lambda: Quantization(float("inf")), "found inf"),
        (lambda: Quantization(1e-60), "found 0.0"),
        (lambda: Quantization((1.0, 2.0)), "scale: expected one number where there is no axis"),
        (lambda: Quantization((1.0, 2.0), (1, 2, 3), 0), "zero_point: expected 1 or 2 integers, found 3"),
        (lambda: TensorType("uint8", (2,), quantization=Quantization(1.0, -1)), "expected 0 to 255"),
        (lambda: TensorType("int8", (2,), quantization=Quantization(1.0, 128)), "expected -128 to 127"),
        (lambda: TensorType("float32", (2,), quantization=Quantization(1.0)), "found 'float32'"),
        (lambda: TensorType("int8", (2,), quantization=Quantization((1.0,), axis=1)), "axis: expected"),
        (
            lambda: TensorType("int8", (3, 2), quantization=Quantization((1.0, 1.0), axis=0)),
            "expected 3 numbers, one for each index of axis 0, found 2",
        ),
        (lambda: TensorType("int7"), "dtype: expected one of"),
        (lambda: TensorType(storage_dtype="half"), "storage_dtype: expected one of"),
        (lambda: TensorType(shape=(2, -1)), "shape: expected dimensions from 0, found [2, -1]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_one_line(make, said):
    with pytest.raises(InputError) as error:
        make()
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@dataclass(frozen=True)
class Quantize(Operator):
    kind: ClassVar[str] = "quantize"
    quantization: Quantization

    def infer(self, inputs):
        return ((inputs[0].shape, "int8", self.quantization),)


def test_a_graph_keeps_what_its_operators_say():
    quantization = Quantization(0.5, 7)
    nodes = (Node("q", Quantize(quantization), ("x",), ("y",)),)
    x = Value("x", (2, 3))
    graph = Graph("g", (x,), ("y",), nodes, batched=("x",))
    y = graph.with_batch(5).values["y"]
    assert y.type == TensorType("int8", (5, 3), quantization=quantization)
    assert (y.name, y.nbytes) == ("y", 15)
    assert replace(x, name="z").type == x.type
    assert replace(x, name="z") != x
