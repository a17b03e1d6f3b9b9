"""A graph for another size, by putting numbers in: the same as one that is made anew for it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fake_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from onnx_models import model, tensor
from random_networks import network
from test_planning_time import calls_of
from tolerances import FEW_LAYERS, assert_close

from cnn_engine import Engine
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.graph import dims
from cnn_engine.graph.dims import BATCH, Dim, Sizes
from cnn_engine.graph.graph import Graph
from cnn_engine.graph.guards import recorded
from cnn_engine.graph.model import Model
from cnn_engine.graph.onnx import load
from cnn_engine.graph.specialization import Specializations
from cnn_engine.lower import pipeline

node = helper.make_node


# -- expressions -------------------------------------------------------------------------------------

EXPRESSIONS = st.recursive(
    st.just("n") | st.integers(1, 12).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "*", "//", "%", "least", "most"]), inner),
    max_leaves=8,
)


def evaluated(expression, n):
    """Returns what an expression of ``n`` is, of a number or of a symbol."""
    if isinstance(expression, str):
        return n if expression == "n" else int(expression)
    first, kind, second = expression
    a, b = evaluated(first, n), evaluated(second, n)
    match kind:
        case "+":
            return a + b
        case "*":
            return a * b
        case "//":
            return a // (b + 1)
        case "%":
            return a % (b + 1)
    return getattr(dims, kind)(a, b)


@given(EXPRESSIONS, EXPRESSIONS, st.integers(1, 40))
def test_expressions_are_what_their_numbers_are(first, second, number):
    a, b = evaluated(first, BATCH), evaluated(second, BATCH)
    numbers = {"batch": number}
    for found, expression in ((a, first), (b, second)):
        value = found.at(numbers) if isinstance(found, Dim) else found
        assert value == evaluated(expression, number)
    with recorded() as guards:
        decided = a == b, a < b, a <= b, a > b, a >= b, bool(a)
    if all(guard.holds(numbers) for guard in guards.values()):
        x, y = evaluated(first, number), evaluated(second, number)
        assert decided == (x == y, x < y, x <= y, x > y, x >= y, bool(x))


@pytest.mark.parametrize(
    "use",
    [
        int, float, range, hash, np.zeros, {13: 1}.get, lambda d: np.array([d], np.int64),
        lambda d: "abc"[d % 3],
    ],
)  # fmt: skip
def test_what_needs_the_number_pins_it(use):
    with recorded() as guards:
        use(BATCH)
    pinned = not all(guard.holds({"batch": 6}) for guard in guards.values())
    assert pinned or ((BATCH - BATCH) == 0 and not guards)


def test_what_is_so_for_every_batch_is_no_guard():
    with recorded() as guards:
        assert BATCH > 0
        assert BATCH * 4 // 2 == 2 * BATCH
        assert (6 * BATCH) % 3 == 0
        assert 3 * BATCH != 0
        assert BATCH + 5 >= 6
    assert not guards


# -- graphs ------------------------------------------------------------------------------------------


def devices() -> dict[str, pipeline.Setting]:
    cuda = FakeCuda(tensor_cores=True)
    return {
        "cpu": pipeline.Setting(CpuDevice()),
        "cuda": pipeline.Setting(cuda),
        "cuda float16": pipeline.Setting(cuda, "float16"),
    }


def lowered(graph: Graph, setting: pipeline.Setting, sizes: Sizes) -> Graph:
    """Returns the graph of a size after all passes that decide alike for every one."""
    first, _ = pipeline.stages(setting)
    return pipeline.lower(Model(graph).graph(sizes), setting, first).graph


def same(found: Graph, wanted: Graph) -> None:
    for name in ("name", "inputs", "outputs", "nodes", "storage_dtype", "batched"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert found.values == wanted.values
    assert list(found.constants) == list(wanted.constants)
    for name, array in wanted.constants.items():
        assert found.constants[name].tobytes() == array.tobytes()
    assert not any(dims.holds_dims(value.shape) for value in found.values.values())
    assert not any(dims.holds_dims(each.op) for each in found.nodes)


def of_any_batch(seed: int) -> Graph | None:
    """Returns a random network whose images may be any number, or None where its records say how many."""
    graph, _ = network(seed, "float32")
    graph = replace(graph, batched=("x",))
    try:
        for batch in (2, 3, 5):
            graph.with_batch(batch)
    except Exception:
        return None
    return graph


@pytest.mark.parametrize("where", devices())
def test_random_networks_are_as_if_made_anew(where):
    setting = devices()[where]
    compared = symbolic = 0
    for seed in range(120):
        graph = of_any_batch(seed)
        if graph is None:
            continue
        substituted = Specializations(partial(lowered, graph, setting))
        for batch in (1, 2, 3, 8):
            sizes = graph.sizes.with_batch(batch)
            same(substituted(sizes), lowered(graph, setting, sizes))
            compared += 1
        symbolic += bool(substituted.variants)
    assert compared >= 100
    assert symbolic >= 20


def shape_arithmetic(wanted: str):
    """A classifier whose reshape is computed from the shape of what it is given, as exporters write it."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["positive"]),
        node("Add", ["positive", "c"], ["r"]),  # no chain of layers, which one kernel would run
        node("Shape", ["r"], ["shape"]),
        node("Gather", ["shape", "zero"], ["n"], axis=0),
    ]
    match wanted:
        case "flatten":
            nodes += [
                node("Unsqueeze", ["n", "axes"], ["n1"]),
                node("Concat", ["n1", "minus"], ["to"], axis=0),
            ]
        case "arithmetic":  # [N * 2, size / 2]
            nodes += [
                node("Mul", ["n", "two"], ["twice"]),
                node("Unsqueeze", ["twice", "axes"], ["n1"]),
                node("Size", ["r"], ["size"]),
                node("Div", ["size", "twice"], ["each"]),
                node("Unsqueeze", ["each", "axes"], ["e1"]),
                node("Concat", ["n1", "e1"], ["to"], axis=0),
            ]
        case "cast":
            nodes += [
                node("Cast", ["n"], ["n32"], to=6),
                node("Cast", ["n32"], ["n64"], to=7),
                node("Unsqueeze", ["n64", "axes"], ["n1"]),
                node("Concat", ["n1", "minus"], ["to"], axis=0),
            ]
        case "slice":
            nodes += [
                node("Slice", ["shape", "start", "end"], ["n1"]),
                node("Concat", ["n1", "minus"], ["to"], axis=0),
            ]
        case "resize":  # as large as what is computed from the shape, the batch among it
            nodes += [
                node("Unsqueeze", ["n", "axes"], ["n1"]),
                node("Concat", ["n1", "twelve"], ["sizes"], axis=0),
                node("Resize", ["r", "", "", "sizes"], ["larger"], mode="nearest"),
                node("Resize", ["larger", "", "scales"], ["scaled"], mode="linear"),
                node("Concat", ["n1", "minus"], ["to"], axis=0),
            ]
        case "min":  # at most four rows: decided by the batch
            nodes += [
                node("Min", ["n", "four"], ["few"]),
                node("Unsqueeze", ["few", "axes"], ["n1"]),
                node("Concat", ["n1", "minus"], ["to"], axis=0),
            ]
        case "float":  # the batch as a number in the graph
            nodes += [
                node("Cast", ["n"], ["number"], to=1),
                node("Mul", ["r", "number"], ["scaled"]),
                node("Unsqueeze", ["n", "axes"], ["n1"]),
                node("Concat", ["n1", "minus"], ["to"], axis=0),
            ]
        case "expand":
            nodes += [
                node("Unsqueeze", ["n", "axes"], ["n1"]),
                node("Concat", ["n1", "ones"], ["wide"], axis=0),
                node("Expand", ["token", "wide"], ["tokens"]),
                node("Add", ["r", "tokens"], ["scaled"]),
                node("Concat", ["n1", "minus"], ["to"], axis=0),
            ]
        case "zeros":
            nodes += [
                node("Unsqueeze", ["n", "axes"], ["n1"]),
                node("Concat", ["n1", "ones"], ["wide"], axis=0),
                node("ConstantOfShape", ["wide"], ["tokens"]),
                node("Add", ["r", "tokens"], ["scaled"]),
                node("Concat", ["n1", "minus"], ["to"], axis=0),
            ]
    source = "scaled" if wanted in ("float", "expand", "zeros", "resize") else "r"
    nodes.append(node("Reshape", [source, "to"], ["y"]))
    constants = {
        "w": np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32),
        "zero": np.array(0), "two": np.array(2), "axes": np.array([0]), "minus": np.array([-1]),
        "start": np.array([0]), "end": np.array([1]), "four": np.array(4), "ones": np.array([4, 1, 1]),
        "twelve": np.array([4, 12, 12]), "scales": np.array([1, 1, 2, 2], np.float32),
        "token": np.ones((1, 4, 1, 1), np.float32),
    }  # fmt: skip
    return model(nodes, [tensor("x", ["N", 3, 6, 6])], [tensor("y", None)], constants, opset=17)


@pytest.mark.parametrize(
    ("wanted", "symbolic"),
    [("flatten", True), ("arithmetic", True), ("cast", True), ("slice", True), ("resize", True),
     ("min", None), ("float", False), ("expand", True), ("zeros", True)],
)  # fmt: skip
def test_shape_arithmetic_of_a_file(wanted, symbolic):
    proto = shape_arithmetic(wanted)
    graph = load(proto)
    stands = graph.rebuild.variants[0].stands_for
    for batch in (1, 2, 3, 4, 5, 13, 16):
        sizes = graph.sizes.with_batch(batch)
        assert symbolic is None or batch == 1 or stands(sizes) == (symbolic or batch == 13)
        made = graph.rebuild._make(sizes)
        # What is made anew for one batch is simplified by its reader: a product with 1 goes.
        same(graph.with_batch(batch), Model(made).base if stands(sizes) else made)
    images = np.random.default_rng(1).normal(size=(12, 3, 6, 6)).astype(np.float32)
    with Engine(graph, device="cpu", threads=1) as engine:
        for batch in (1, 2, 4, 12):
            with Engine(load(proto, batch=batch), device="cpu", threads=1) as other:
                given = {"x": images[:batch]}
                np.testing.assert_array_equal(engine.run(given)["y"], other.run(given)["y"])


@pytest.mark.parametrize("first", [1, 2, 13])
def test_a_factor_that_is_the_batch(first):
    """It is 1 for one image alone, where the product goes: no other batch may take that graph."""
    images = np.random.default_rng(1).normal(size=(13, 3, 6, 6)).astype(np.float32)
    with Engine(load(shape_arithmetic("flatten")), device="cpu", threads=1) as engine:
        features = engine.run({"x": images})["y"]
    proto = shape_arithmetic("float")
    with Engine(load(proto, batch=first), device="cpu", threads=1) as engine:
        for batch in (1, 2, 13, 3, 1):
            found = engine.run({"x": images[:batch]})["y"]
            assert_close(found, batch * features[:batch], FEW_LAYERS["float32"] * 500)


def test_a_new_batch_reads_no_file_and_runs_no_pass(monkeypatch):
    graph = load(shape_arithmetic("flatten"))
    engine = Engine(graph, device="cpu", threads=1)
    engine.run({"x": np.zeros((1, 3, 6, 6), np.float32)})

    def refuse(*_):
        raise AssertionError("made anew")

    monkeypatch.setattr(Specializations, "_make", refuse, raising=False)
    monkeypatch.setattr(Specializations, "_made_symbolic", refuse)
    monkeypatch.setattr(pipeline, "_run", refuse)
    monkeypatch.setattr(Graph, "_infer", refuse)
    for batch in (2, 3, 7, 64):
        graph = engine._plans.open().laid(batch, False)
        assert graph.batch == batch
        assert graph.values[graph.outputs[0]].shape == (batch, 4 * 36)


def test_an_engine_names_what_it_takes_and_gives():
    with Engine(load(shape_arithmetic("arithmetic")), device="cpu", threads=1) as engine:
        (x,), (y,) = engine.inputs, engine.outputs
    assert (x.name, x.dtype, str(list(x.shape))) == ("x", "float32", "[N, 3, 6, 6]")
    assert (y.name, y.dtype, str(list(y.shape))) == ("y", "float32", "[2 * N, 72]")
    assert x.shape == (Dim.symbol("N"), 3, 6, 6)
    with Engine("cifar10", weights="random", device="cpu", threads=1) as engine:
        assert [(v.name, v.dtype, v.shape) for v in engine.inputs + engine.outputs] == [
            ("images", "uint8", (BATCH, 3, 32, 32)), ("probabilities", "float32", (BATCH, 10)),
        ]  # fmt: skip


def test_batch_0_is_made_anew():
    graph = load(shape_arithmetic("flatten"))
    assert not graph.rebuild.variants[0].stands_for(graph.sizes.with_batch(0))


def test_a_pickled_graph_makes_other_batches(monkeypatch):
    graph = pickle.loads(pickle.dumps(Model(load(shape_arithmetic("flatten"))).base))
    assert graph.with_batch(9).values["y"].shape == (9, 144)
    assert isinstance(graph.rebuild, Specializations)


def many_layers(count: int):
    """A DenseNet-like graph of ``4 * count`` nodes: norms, convolutions and concatenations."""
    rng = np.random.default_rng(0)
    nodes, constants, features = [], {"s": np.ones(4, np.float32)}, ["x"]
    for i in range(count):
        joined = f"j{i}"
        nodes += [
            node("Concat", features[-8:], [joined], axis=1),
            node("Conv", [joined, f"w{i}"], [f"c{i}"]),
            node("BatchNormalization", [f"c{i}", *["s"] * 4], [f"n{i}"]),
            node("Relu", [f"n{i}"], [f"r{i}"]),
        ]
        constants[f"w{i}"] = rng.normal(size=(4, 4 * len(features[-8:]), 1, 1)).astype(np.float32)
        features.append(f"r{i}")
    return model(
        nodes, [tensor("x", ["N", 4, 5, 5])], [tensor(f"r{count - 1}", None)], constants, opset=15
    )


def test_a_new_batch_of_400_nodes_takes_few_calls():
    """To make all anew takes a million and more."""
    with Engine(load(many_layers(100)), device="cpu", threads=1) as engine:
        images = np.dtype(np.float32)
        engine.plan(2, images)
        for batch in (3, 96):  # image by image, and all together
            assert calls_of(lambda batch=batch: engine.plan(batch, images)) < 200_000
