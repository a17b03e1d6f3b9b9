"""What several nodes read is packed once, for all of them and for every batch."""

from __future__ import annotations

from dataclasses import replace

import fake_cuda
import numpy as np
import pytest
from tolerances import FEW_LAYERS, assert_close

from cnn_engine import Engine
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.graph.model import Model
from cnn_engine.graph.reference import reference
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.matmul import Matmul
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.shaping import Reshape, Transpose
from cnn_engine.operators.unary import Relu, Tanh

WIDE = 64


def rows(steps: int, product: str, equal_arrays: bool = False) -> Graph:
    """A recurrent network of tanh, written out step by step over one weight."""
    rng = np.random.default_rng(3)
    weight = rng.normal(0, WIDE**-0.5, (WIDE, WIDE)).astype(np.float32)
    constants, nodes, x = {"w": weight}, [], "images"
    for step in range(steps):
        name = f"w{step}" if equal_arrays else "w"
        constants[name] = weight.copy() if equal_arrays else weight
        if product == "turned":
            nodes.append(Node(f"t{step}", Transpose((1, 0)), (name,), (f"t{step}",)))
            name = f"t{step}"
        constants[f"b{step}"] = rng.normal(0, 1, WIDE).astype(np.float32)
        op, more = (Matmul(), ()) if product == "matmul" else (Linear(), (f"b{step}",))
        nodes.append(Node(f"g{step}", op, (x, name, *more), (f"g{step}",)))
        nodes.append(Node(f"h{step}", Tanh(), (f"g{step}",), (f"h{step}",)))
        x = f"h{step}"
    shape = (1, 4, WIDE) if product == "matmul" else (1, WIDE)
    return Graph("rows", (Value("images", shape),), (x,), tuple(nodes), constants, ("images",))


def prepared(engine: Engine) -> list:
    return [made for _, made in engine._plans.open()._prepared.values()]


def run_and_compare(engine: Engine, graph: Graph, batch: int) -> None:
    graph = graph.with_batch(batch)
    images = np.random.default_rng(0).uniform(-1, 1, graph.inputs[0].shape).astype(np.float32)
    (wanted,), (found,) = (
        one.values() for one in (reference(graph, {"images": images}), engine.run({"images": images}))
    )  # fmt: skip
    assert_close(found, wanted, FEW_LAYERS["float32"] * np.abs(wanted).max())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("equal_arrays", [False, True])
@pytest.mark.parametrize("product", ["linear", "turned", "matmul"])
def test_rows_share_what_is_packed(monkeypatch, device, equal_arrays, product):
    fake_cuda.install(monkeypatch, tensor_cores=True)
    graph = rows(6, product, equal_arrays)
    with Engine(graph, device=device, threads=1) as engine:
        for batch in (1, 3):
            run_and_compare(engine, graph, batch)
        assert len(prepared(engine)) == (product != "matmul" or device == "cpu")
        uploaded = [array for array, _ in engine._plans.open()._uploaded.values()]
        assert sum(array.size == WIDE * WIDE for array in uploaded) <= 1


@pytest.mark.parametrize("variant", ["auto", "blocked"])
def test_convolutions_share_what_is_packed_alike(variant):
    """Of images of another size, or before a tanh, a convolution may have its weights in another form."""
    rng = np.random.default_rng(4)
    constants = {"w": rng.normal(0, 0.1, (32, 32, 3, 3)).astype(np.float32)}
    nodes, x = [], "images"
    for step, function in enumerate([Relu(), Relu(), Tanh(), Relu(), None, Relu()]):
        constants[f"b{step}"] = rng.normal(0, 1, 32).astype(np.float32)
        op = Conv2d((1, 1), (1, 1, 1, 1))
        nodes.append(Node(f"c{step}", op, (x, "w", f"b{step}"), (f"c{step}",)))
        x = f"c{step}"
        if function is None:
            nodes.append(Node("pool", MaxPool2d((4, 4), (4, 4)), (x,), ("pooled",)))
            x = "pooled"
        else:
            nodes.append(Node(f"f{step}", function, (x,), (f"f{step}",)))
            x = f"f{step}"
    nodes.append(Node("rows", Reshape((0, -1)), (x,), ("y",)))
    images = Value("images", (1, 32, 16, 16))
    graph = Graph("shared", (images,), ("y",), tuple(nodes), constants, ("images",))
    with Engine(graph, device="cpu", threads=1, variant=variant) as engine:
        for batch in (2, 1):
            run_and_compare(engine, graph, batch)
        assert len(prepared(engine)) < 6


def test_the_function_after_a_sum_is_no_part_of_its_weights(monkeypatch):
    fake_cuda.install(monkeypatch, tensor_cores=True)
    graph = rows(4, "linear")
    nodes = [replace(n, op=Relu()) if n.name in ("h1", "h3") else n for n in graph.nodes]
    graph = replace(graph, nodes=tuple(nodes))
    with Engine(graph, device="cuda", threads=1) as engine:
        run_and_compare(engine, graph, 1)
        assert len(prepared(engine)) == 1


def test_convolutions_with_one_batch_norm_share_what_is_folded():
    from test_passes import Builder

    b = Builder(1, 32, 6, 6)
    weight, parameters = b.constant(32, 32, 3, 3), None
    x = "x"
    for _ in range(3):
        x = b.add(Conv2d((1, 1), (1, 1, 1, 1)), x, weight)
        if parameters is None:
            x = b.norm(x, 32)
            parameters = b.nodes[-1].inputs[1:]
        else:
            x = b.add(b.nodes[1].op, x, *parameters)
        x = b.add(Relu(), x)
    graph = b.network(x, scale=0.1)
    base = Model(graph).base
    folded = {id(a) for a in base.constants.values() if a.ndim == 4}
    assert [node.op.kind for node in base.nodes].count("batch_norm") == 0
    assert len(folded) == 1


def test_arrays_that_differ_in_one_bit_stay_two():
    graph = rows(3, "linear", equal_arrays=True)
    constants = dict(graph.constants)
    constants["w1"] = constants["w1"].copy()
    constants["w1"][3, 5] = np.nextafter(constants["w1"][3, 5], 1)
    shared = passes.share_constants(replace(graph, constants=constants)).constants
    assert shared["w0"] is shared["w2"]
    assert shared["w1"] is constants["w1"]


def test_constants_that_one_number_stands_for_are_looked_at_without_a_copy():
    graph = rows(2, "linear")
    constants = {
        name: np.broadcast_to(np.float32(0), array.shape) for name, array in graph.constants.items()
    }
    shared = passes.share_constants(replace(graph, constants=constants)).constants
    assert all(shared[name] is constants[name] for name in constants)
