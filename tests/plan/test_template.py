"""Plans of further sizes: numbers put into what plans have in common, with the bits of a fixed engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import fake_cuda
import numpy as np
import pytest
from graphs import Builder
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx_models import model, tensor

from cnn_engine import Engine
from cnn_engine.engine import plan_cache
from cnn_engine.graph.compiled import decisions_of, numbers_of
from cnn_engine.graph.dims import Dim, least, most
from cnn_engine.graph.graph import Graph
from cnn_engine.graph.guards import Guard
from cnn_engine.graph.terms import Evaluator
from cnn_engine.lower.lowering import Program
from cnn_engine.plan.packing import Lifetime, Stack
from cnn_engine.plan.template import Sized
from cnn_engine.plan.template_cache import WORTH_ONE

node = helper.make_node
rng = np.random.default_rng(7)


def network():
    """Convolutions of several kinds, attention over what is split, a gate, and a table that grows by size."""
    constants = {
        "w1": rng.normal(size=(16, 3, 3, 3)), "w2": rng.normal(size=(48, 32, 3, 3)) / 9,
        "w3": rng.normal(size=(48, 1, 3, 3)), "w4": rng.normal(size=(48, 48, 1, 1)) / 7,
        "scales": np.array([1, 1, 2, 1]),
    }  # fmt: skip
    nodes = [
        node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", ["a"], ["a1"]),
        node("HardSwish", ["a"], ["a2"]),
        node("Concat", ["a1", "a2"], ["b"], axis=1),
        node("Conv", ["b", "w2"], ["c"], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["c"], ["m"]),
        node("Sigmoid", ["m"], ["gate"]),
        node("Mul", ["c", "gate"], ["d"]),
        node("Conv", ["d", "w3"], ["e"], group=48, strides=[1, 2], pads=[1, 1, 1, 1]),
        node("MaxPool", ["e"], ["f"], kernel_shape=[2, 2], strides=[2, 1], ceil_mode=1),
        node("Conv", ["f", "w4"], ["g"]),
        node("Resize", ["g", "", "scales"], ["h"], mode="nearest"),
        node("Reshape", ["h", "rows"], ["i"]),
        node("Split", ["i"], ["q", "k", "v"], axis=1, num_outputs=3),
        node("Transpose", ["q"], ["qt"], perm=[0, 2, 1]),
        node("MatMul", ["qt", "k"], ["scores"]),
        node("Softmax", ["scores"], ["p"], axis=-1),
        node("MatMul", ["v", "p"], ["y"]),
    ]
    constants = {name: array.astype(np.float32) for name, array in constants.items()}
    constants["rows"] = np.array([0, 48, -1])
    shape = ["N", 3, "H", "W"]
    return model(nodes, [tensor("x", shape)], [tensor("y", None)], constants, opset=18)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view("u4")


@pytest.fixture(scope="module")
def learned():
    """An engine that has seen sizes enough."""
    proto = network()
    engine = Engine(proto, device="cpu", threads=1)
    for width in range(20, 20 + WORTH_ONE):
        engine.predict(np.zeros((1, 3, 16, width), np.float32))
    return proto, engine


@settings(max_examples=30, deadline=None)
@given(batch=st.integers(1, 3), height=st.integers(5, 40), width=st.integers(5, 60))
def test_every_size_has_the_bits_of_a_fixed_engine(learned, batch, height, width):
    proto, engine = learned
    x = np.random.default_rng(width).normal(size=(batch, 3, height, width)).astype(np.float32)
    with Engine(proto, device="cpu", threads=1, input_shape={"x": x.shape}) as fixed:
        np.testing.assert_array_equal(bits(engine.predict(x)), bits(fixed.predict(x)))


def test_a_new_size_places_no_graph_and_plans_no_memory(learned, monkeypatch):
    proto, engine = learned
    for width in (30, 90):
        engine.predict(np.zeros((1, 3, 16, width), np.float32))
    inferred = []
    monkeypatch.setattr(Program, "placed", lambda *_: pytest.fail("expected a template"))
    monkeypatch.setattr(Graph, "__init__", lambda *_: inferred.append(1))
    images = rng.normal(size=(1, 3, 16, 77)).astype(np.float32)
    found = engine.predict(images)
    assert not inferred
    monkeypatch.undo()
    with Engine(proto, device="cpu", threads=1, input_shape={"x": images.shape}) as fixed:
        np.testing.assert_array_equal(bits(found), bits(fixed.predict(images)))


def test_many_inputs_are_bound_in_their_order():
    """Each has a factor of its own, so that any exchange shows."""
    names = [f"in{i}" for i in range(7)]
    factors = {f"f{i}": np.float32(10**i) for i in range(7)}
    nodes = [node("Mul", [name, f"f{i}"], [f"m{i}"]) for i, name in enumerate(names)]
    nodes += [node("Sum", [f"m{i}" for i in range(7)], ["y"]), node("Relu", ["m3"], ["z"])]
    inputs = [tensor(name, ["N", "W"]) for name in names]
    proto = model(nodes, inputs, [tensor("y", None), tensor("z", None)], factors, opset=17)
    with Engine(proto, device="cpu", threads=1) as engine:
        for width in range(1, WORTH_ONE + 3):
            given = {name: np.full((2, width), i, np.float32) for i, name in enumerate(names)}
            found = engine.run(given)
            np.testing.assert_array_equal(found["y"], np.full((2, width), 6543210, np.float32))
            np.testing.assert_array_equal(found["z"], np.full((2, width), 3000, np.float32))


def test_its_steps_cost_what_a_fixed_plans_do(learned):
    proto, engine = learned
    images = rng.normal(size=(1, 3, 16, 44)).astype(np.float32)
    with Engine(proto, device="cpu", threads=1, input_shape={"x": images.shape}) as fixed:
        sizes = engine.form.sizes_of({"x": images.shape})
        plans = [
            engine._plans.lend(sizes, False, (False, False)),
            fixed._plans.lend(1, False, (False, False)),
        ]
        found, wanted = (
            [(step.name, step.kind, step.kernel, step.flops, step.bytes) for step in plan.steps]
            for plan in plans
        )
        assert found == wanted
        assert plans[0].outputs["y"].shape == plans[1].outputs["y"].shape


@pytest.mark.parametrize("threads", [1, 2])
def test_a_new_batch_of_images_one_by_one_places_no_graph(threads, monkeypatch):
    b = Builder((1, 3, 40, 40))
    x = b.relu(b.conv("images", 16, stride=2))
    x = b.relu(b.conv(b.relu(b.conv(x, 16)), 48, stride=4))
    graph = b.graph(b.head(b.relu(b.conv(x, 160)), 10))
    images = rng.normal(size=(16, 3, 40, 40)).astype(np.float32)
    with Engine(graph, device="cpu", threads=threads) as engine:
        for batch in range(2, 2 + 2 * WORTH_ONE, 2):
            engine.predict(images[:batch])
        monkeypatch.setattr(Program, "placed", lambda *_: pytest.fail("expected a template"))
        found = engine.predict(images[:8])
        again = engine.predict(images[8:])
    monkeypatch.undo()
    with Engine(graph, device="cpu", threads=threads) as other:
        np.testing.assert_array_equal(bits(found), bits(other.predict(images[:8])))
        np.testing.assert_array_equal(bits(again), bits(other.predict(images[8:])))


lives = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 3000)), min_size=1, max_size=12
)


@given(lives, st.data())
def test_what_lies_in_a_stack_never_meets(found, data):
    lifetimes = [Lifetime(i, n, a, a + b) for i, (a, b, n) in enumerate(found)]
    counts = st.lists(st.integers(0, 10**6), min_size=len(found), max_size=len(found))
    heights, sizes = data.draw(counts), data.draw(counts)
    offsets, total = Stack(lifetimes, heights).offsets(sizes)
    for i, one in enumerate(lifetimes):
        assert offsets[i] % 256 == 0
        assert offsets[i] + sizes[i] <= total
        for j in range(i):
            apart = offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
            assert apart or not one.meets(lifetimes[j]) or not (sizes[i] and sizes[j])


@given(st.integers(1, 500), st.integers(1, 500))
def test_compiled_expressions_are_what_they_are_one_by_one(width, height):
    w, h = Dim.symbol("w + 1"), Dim.symbol("h")
    dims = [w * h - 3, (w + 3) // 4 * (h // (w + 1)), least(w // 2, h), -2 * most(w, h // 3) + 7, w]
    symbols = ["h", "w + 1"]
    at = Evaluator({"h": height, "w + 1": width})
    assert numbers_of(symbols, dims)(height, width) == tuple(map(at, dims))
    guards = [
        Guard(kind, dim.terms, outcome)
        for dim in (w - h, w // 7 - 3)
        for kind in ("equal", "negative")
        for outcome in (True, False)
    ]
    wanted = tuple(guard.holds(at) for guard in guards)
    assert decisions_of(symbols, guards)(height, width) == wanted


def test_plans_of_sizes_keep_to_their_bytes_on_several_threads(learned, monkeypatch):
    """The least recently used go first, and what comes out is what one thread gives."""
    proto, _ = learned
    images = [rng.normal(size=(1, 3, 16, width)).astype(np.float32) for width in range(20, 60)]
    with Engine(proto, device="cpu", threads=1) as one:
        wanted = [one.predict(image) for image in images]
    with Engine(proto, device="cpu", threads=1) as engine:
        engine.predict(images[0])
        pool = engine._plans.pool
        (shelf,) = pool._shelves.values()
        monkeypatch.setattr(plan_cache, "LEAST_KEPT_CALL_BYTES", 5 * shelf.nbytes)
        monkeypatch.setattr(plan_cache, "KEPT_CALLS_PART", 0)
        with ThreadPoolExecutor(4) as threads:
            for found, rows in zip(threads.map(engine.predict, images), wanted, strict=True):
                np.testing.assert_array_equal(bits(found), bits(rows))
        kept = sum(shelf.made * shelf.nbytes for shelf in pool._shelves.values())
        assert kept <= 5 * shelf.nbytes
        for image in (*images[:5], images[0], images[9]):
            engine.predict(image)
        widths = {dict(key[1].numbers)["W"] for key in pool._shelves}
        assert {20, 29} <= widths
        assert len(widths) <= 5


def test_many_sizes_take_little_more_memory_than_the_largest(learned):
    """The memory that they share, and an eighth of it for what is kept of each."""
    proto, _ = learned
    options = {"device": "cpu", "threads": 1}
    with Engine(proto, **options) as engine, Engine(proto, **options) as other:
        other.predict(np.zeros((1, 3, 32, 180), np.float32))
        for width in range(30, 181):
            engine.predict(np.zeros((1, 3, 32, width), np.float32))
        alone, pool = other._plans.pool.nbytes, engine._plans.pool
        assert pool.nbytes <= 1.2 * alone
        assert len(pool._shelves) > 2


def test_sizes_that_come_back_are_kept(learned, monkeypatch):
    """More of them than are kept otherwise are planned twice or so, not at each call."""
    proto, _ = learned
    widths, made = range(60, 180, 4), []
    with Engine(proto, device="cpu", threads=1) as engine:
        pool = engine._plans.pool

        def predict(width):
            before = set(pool._shelves)
            engine.predict(np.zeros((1, 3, 32, width), np.float32))
            made.append(not set(pool._shelves) <= before)

        predict(widths[0])
        (shelf,) = pool._shelves.values()
        monkeypatch.setattr(plan_cache, "LEAST_KEPT_CALL_BYTES", 5 * shelf.nbytes)
        monkeypatch.setattr(plan_cache, "KEPT_CALLS_PART", 0)
        for width in 3 * [*widths]:
            predict(width)
        assert sum(made) > len(widths) + plan_cache.LOOKED_BACK // 2
        assert len(pool._shelves) == len(widths)
        made.clear()
        for width in widths:
            predict(width)
        assert not any(made)
        for width in range(181, 260):  # others, which come once
            predict(width)
        assert len(pool._shelves) == 5


def test_numpy_runs_what_has_one_shape_at_all_sizes(monkeypatch):
    """Its call is part of the template: no kernel is asked for it again."""
    nodes = [
        node("GlobalAveragePool", ["x"], ["m"]),
        node("Cast", ["m"], ["whole"], to=6),
        node("Cast", ["whole"], ["mean"], to=1),
        node("Add", ["x", "mean"], ["y"]),
    ]
    proto = model(nodes, [tensor("x", [1, 3, "H", "W"])], [tensor("y", None)], opset=18)
    images = [rng.normal(0, 9, (1, 3, 9, width)).astype(np.float32) for width in range(20, 40)]
    with Engine(proto, device="cpu", threads=1) as engine:
        for image in images[:-1]:
            engine.predict(image)
        monkeypatch.setattr(Sized, "_numeric_call", None)
        whole = np.trunc(images[-1].mean((2, 3), keepdims=True))
        np.testing.assert_array_equal(engine.predict(images[-1]), images[-1] + whole)


def test_steps_of_a_size_are_made_when_they_are_asked_for(learned):
    """They say what the steps of a fixed engine say, and their arguments are those of the calls."""
    proto, engine = learned
    images = np.zeros((1, 3, 16, 71), np.float32)
    engine.predict(images)
    plan = list(engine._plans.pool._shelves.values())[-1].idle[-1]
    assert callable(plan.__dict__["steps"])
    assert [(step.function, step.args) for step in plan.steps] == plan.calls
    assert plan.steps is plan.steps
    with Engine(proto, device="cpu", threads=1, input_shape={"x": images.shape}) as fixed:
        fixed.predict(images)
        (shelf,) = fixed._plans.pool._shelves.values()
        other = shelf.idle[0]

    def said(steps):
        return [(s.name, s.kind, s.place, s.kernel, s.flops, s.bytes) for s in steps]

    assert said(plan.steps) == said(other.steps)


@pytest.mark.parametrize("mode", ["transfer", "managed", "resident"])
def test_plans_of_another_device_are_made_for_every_batch(mode, monkeypatch):
    """In managed memory no copy tells them from the CPU's."""
    fake_cuda.install(monkeypatch)
    images = rng.integers(0, 256, size=(2 * WORTH_ONE, 3, 32, 32), dtype=np.uint8)
    with Engine("cifar10", device="cuda", data_mode=mode, variant="if") as engine:
        whole = engine.predict(images)
        for batch in range(1, 2 * WORTH_ONE):
            np.testing.assert_array_equal(bits(engine.predict(images[:batch])), bits(whole[:batch]))
