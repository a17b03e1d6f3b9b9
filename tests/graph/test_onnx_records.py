"""An ONNX operator that is called as a record is read into it: numbers, words and lists of numbers."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import one_node

from cnn_engine.errors import UnsupportedError
from cnn_engine.graph.onnx import call, load
from cnn_engine.operators.operator import Operator, record

X = [np.ones((2, 3), np.float32)]


@record
class Hardmax(Operator):
    """Stands for a record that has lists, under a name that ONNX's checker knows."""

    kind = "hardmax"
    axis: int = -1
    axes: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def infer(self, inputs):
        return ((inputs[0].shape, inputs[0].dtype),)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(call.RECORDS, "Hardmax", Hardmax)
    monkeypatch.delitem(call.CONVERTERS, ("", "Hardmax"), raising=False)


def test_lists_of_numbers_are_tuples():
    made, _ = one_node("Hardmax", X, axis=1, axes=[1, 2], weights=[0.5, 0.25])
    (node,) = load(made).nodes
    assert node.op == Hardmax(1, (1, 2), (0.5, 0.25))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"axis": [1]}, r"axis: expected int, found '\[1\]'"),
        ({"axes": 1}, r"axes: expected tuple\[int, ...\], found '1'"),
        ({"axes": [0.5]}, r"axes: expected tuple\[int, ...\], found '\[0.5\]'"),
        ({"weights": 0.5}, r"weights: expected tuple\[float, ...\], found '0.5'"),
        ({"weights": ["a"]}, r"weights: expected tuple\[float, ...\], found"),
    ],
)
def test_another_kind_is_refused(attributes, words):
    made, _ = one_node("Hardmax", X, **attributes)
    with pytest.raises(UnsupportedError, match=words):
        load(made)
