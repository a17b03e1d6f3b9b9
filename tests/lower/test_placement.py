"""Where nodes run and what is copied between, on a GPU that is not there."""

from __future__ import annotations

import fake_cuda
import numpy as np
import pytest

from cnn_engine import Engine
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.lower.placement import Placement, place
from cnn_engine.operators.binary import Add
from cnn_engine.operators.gather import GatherElements
from cnn_engine.operators.unary import Relu


def placed(graph: Graph, mode: str):
    return place(graph, Placement(fake_cuda.FakeCuda(), mode, 1), None, None)


@pytest.mark.parametrize("inputs", [("a", "a@cuda"), ("a@cuda", "a"), ("a", "b")])
@pytest.mark.parametrize("output", ["b@cuda", "a@cuda'", "y@cpu"])
def test_a_copy_has_a_name_of_its_own(inputs, output):
    """Whatever the values of the graph are called."""
    graph = Graph(
        "names", tuple(Value(name, (2, 3)) for name in inputs), (output, "y"),
        (Node("add", Add(), inputs, (output,)), Node("relu", Relu(), (output,), ("y",))), {},
    )  # fmt: skip
    found = placed(graph, "resident")
    made = [name for node in found.graph.nodes for name in node.outputs]
    assert len(made) == len(set(made)) == 2 + 2 + 2  # in, computed, out
    assert not {*made} & {*inputs}
    assert found.outputs == (output, "y")
    assert {found.memory_spaces[name] for name in found.graph.outputs} == {"cpu"}


def test_a_managed_output_that_is_read_on_is_copied_for_the_caller():
    """His memory is written by his side alone, and read by no kernel."""
    graph = Graph(
        "managed", (Value("x", (2, 3)),), ("y", "z"),
        (Node("first", Relu(), ("x",), ("y",)), Node("second", Relu(), ("y",), ("z",))), {},
    )  # fmt: skip
    found = placed(graph, "managed")
    y, z = found.graph.outputs
    assert y != "y"
    assert found.graph.producers[y].inputs == ("y",)
    assert found.graph.producers[y].op.kind == "copy"
    assert z == "z"


def test_an_output_that_the_host_reads_on_is_there_when_it_does(monkeypatch):
    """Its copy does not wait in page-locked memory for the end of the pass."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    indices = np.array([[0, 2], [1, 0]])
    graph = Graph(
        "both", (Value("x", (2, 3)),), ("y", "z"),
        (Node("first", Relu(), ("x",), ("y",)),
         Node("second", GatherElements(1), ("y", "indices"), ("z",))), {"indices": indices},
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
    with Engine(graph, device="cuda") as engine:
        for one in x:  # each into new arrays
            found = engine.run({"x": one})
            y = np.maximum(one, 0)
            np.testing.assert_array_equal(found["y"], y)
            np.testing.assert_array_equal(found["z"], np.take_along_axis(y, indices, 1))
