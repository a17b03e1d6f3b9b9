"""Graphs: they are sound when made, and rewrites keep them so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from cnn_engine.errors import InputError
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.operator import Operator, broadcast, same_dtype


@dataclass(frozen=True)
class Add(Operator):
    kind: ClassVar[str] = "add"

    def infer(self, inputs):
        return ((broadcast(*(value.shape for value in inputs)), same_dtype(inputs)),)

    def reference(self, a, b):
        return a + b


def add(name: str, left: str, right: str) -> Node:
    return Node(name, Add(), (left, right), (f"{name}.out",))


X = Value("x", (2, 3))


def graph(nodes, outputs=("b.out",), constants=None, batched=("x",)) -> Graph:
    constants = {"one": np.ones(3, np.float32)} if constants is None else constants
    return Graph("test", (X,), outputs, tuple(nodes), constants, batched)


CHAIN = (add("a", "x", "one"), add("b", "a.out", "x"))


def test_values_come_from_inference():
    found = graph(CHAIN)
    assert found.values["b.out"] == Value("b.out", (2, 3), "float32")
    assert found.values["one"].nbytes == 12
    assert [node.name for node in found.consumers["x"]] == ["a", "b"]
    assert found.producers["a.out"].name == "a"
    assert found.batch == 2


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        (
            CHAIN[::-1],
            ("b.out",),
            "test, node b (add): input 'a.out' is not made before it is used",
        ),
        ((*CHAIN, add("a", "x", "x")), ("b.out",), "unique names of nodes, found 'a' twice"),
        (CHAIN, ("c",), "output 'c': no node makes it"),
        (CHAIN, ("b.out", "b.out"), "every output named once"),
        (
            (Node("x", Add(), ("x", "x"), ("x",)),),
            ("x",),
            "every tensor made once, found 'x' twice",
        ),
        ((Node("a", Add(), ("x", "x"), ("y", "z")),), ("y",), "expected 1 outputs, found 2"),
        ((add("a", "x", "two"),), ("a.out",), "shapes that broadcast, found [2, 3] and [2]"),
    ],
)
def test_an_unsound_graph_is_refused(nodes, outputs, message):
    constants = {"one": np.ones(3, np.float32), "two": np.ones(2, np.float32)}
    with pytest.raises(InputError) as raised:
        graph(nodes, outputs, constants)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_replaced_mends_the_order_and_drops_unused_constants():
    before = graph((*CHAIN, add("c", "b.out", "x")), ("c.out",))
    new = (add("e", "d.out", "x"), add("d", "x", "x"))  # in the wrong order
    after = before.replaced((CHAIN[0],), (*new, Node("f", Add(), ("e.out", "x"), ("a.out",))))
    assert [node.name for node in after.nodes] == ["d", "e", "f", "b", "c"]
    assert "one" not in after.constants
    assert before.constants.keys() == {"one"}


def test_a_circle_is_refused():
    with pytest.raises(InputError, match="not made before it is used"):
        graph((), ("x",)).replaced((), (add("a", "b.out", "x"), add("b", "a.out", "x")))


def test_another_batch():
    five = graph(CHAIN).with_batch(5)
    assert (five.batch, five.values["b.out"].shape) == (5, (5, 3))
    assert five.with_batch(5) is five
    with pytest.raises(InputError, match="found its inputs fixed"):
        graph(CHAIN, batched=()).with_batch(5)
    assert five.with_batch(0).values["b.out"].shape == (0, 3)
    with pytest.raises(InputError, match="at least 0, found -1"):
        five.with_batch(-1)


def test_sharing_takes_equal_arrays_only():
    one = graph(CHAIN)
    assert graph(CHAIN).sharing(one).constants["one"] is one.constants["one"]
    other = graph(CHAIN, constants={"one": np.zeros(3, np.float32)})
    assert other.sharing(one).constants["one"] is other.constants["one"]
