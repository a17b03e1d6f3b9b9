"""Passes whose first layers run image by image: where they end, the same bits, threads, memory, times."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from graphs import Builder, resnet

from cnn_engine import Engine, _cpu
from cnn_engine.operators.binary import Mul, Sub
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.unary import Sigmoid
from cnn_engine.plan import per_image

BATCHES = (2, 5, 8)


def network(size: int = 40):
    """Much between few weights, then few positions and many weights."""
    b = Builder((1, 3, size, size))
    x = b.relu(b.conv("images", 16, stride=2))
    x = b.relu(b.conv(x, 16))
    x = b.relu(b.conv(x, 48, stride=4))
    return b.graph(b.head(b.relu(b.conv(x, 160)), 10))


def images(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, *shape)).astype(np.float32)


def alone(monkeypatch) -> None:
    """Has engines made from now on take all images of a pass together."""
    monkeypatch.setattr(per_image, "pays", lambda images, threads: False)


def test_the_first_part_ends_where_weights_begin_to_outweigh():
    with Engine(network(), device="cpu") as engine:
        graph = engine._plans.open().placed(1, False).graph
        count = per_image.cut(graph, engine._plans.open().placed(8, False).graph)
        assert 0 < count < len(graph.nodes)
        (name,) = graph.nodes[count - 1].outputs
        later = {n for node in graph.nodes[count:] for n in node.inputs} & set(graph.producers)
        made = {n for node in graph.nodes[:count] for n in node.outputs}
        assert later & made == {name}

        def gain(nodes):
            gained = 0
            for node in nodes:
                sizes = [graph.values[n].nbytes for n in (*node.inputs, *node.outputs) if n]
                weights = sum(
                    graph.constants[n].nbytes for n in node.inputs if n in graph.constants
                )
                gained += sum(sizes) - 2 * weights
            return gained

        assert gain(graph.nodes[:count]) > 0 > gain(graph.nodes[count:])


def test_residuals_are_not_cut():
    graph = resnet((2, 2), (1, 3, 32, 32))
    with Engine(graph, device="cpu") as engine:
        placed = engine._plans.open().placed(1, False).graph
        count = per_image.cut(placed, engine._plans.open().placed(2, False).graph)
        read = {n for node in placed.nodes[count:] for n in node.inputs if n in placed.producers}
        made = {n for node in placed.nodes[:count] for n in node.outputs}
        assert len(read & made) == 1


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_the_same_bits_as_together(threads, monkeypatch):
    graphs = [network(), gated(), resnet((1, 1), (1, 3, 32, 32))]
    for graph in graphs:
        shape = graph.inputs[0].shape[1:]
        with monkeypatch.context() as patched:
            alone(patched)
            with Engine(graph, device="cpu", threads=1) as engine:
                wanted = {n: engine.predict(images(n, *shape), batch=n) for n in BATCHES}
        with Engine(graph, device="cpu", threads=threads) as engine:
            for n, expected in wanted.items():
                for _ in range(2):
                    np.testing.assert_array_equal(
                        engine.predict(images(n, *shape), batch=n), expected
                    )
                plan = engine.plan(n, np.dtype(np.float32))
                assert (plan.lanes is not None) == (threads > 1 and per_image.pays(n, threads))
                # What is timed are steps one after the other: they compute the same.
                x, out = images(n, *shape), np.full_like(expected, np.nan)
                plan.bind(x.ctypes.data, out.ctypes.data)
                plan.run_steps()
                np.testing.assert_array_equal(out, expected)


def gated():
    """A block with squeeze-and-excite between layers of few weights."""
    b = Builder((1, 3, 64, 64))
    x = b.relu(b.conv("images", 16, stride=2))
    gate = b.add(Sigmoid(), b.conv(b.add(ReduceMean((2, 3)), x), 16, 1))
    x = b.relu(b.conv(b.add(Mul(), x, gate), 16, 1))
    return b.graph(b.head(b.relu(b.conv(x, 16)), 10))


def test_gates_are_of_each_image():
    with Engine(gated(), device="cpu") as engine:
        graph = engine._plans.open().placed(1, False).graph
        count = per_image.cut(graph, engine._plans.open().placed(8, False).graph)
        convolutions = [node.op.kind == "conv2d_nhwc" for node in graph.nodes]
        assert sum(convolutions[:count]) == sum(convolutions) == 4


def test_what_looks_at_other_images_stays_together(monkeypatch):
    b = Builder((1, 3, 40, 40))
    x = b.relu(b.conv("images", 16, stride=2))
    x = b.add(Sub(), x, b.add(ReduceMean((0,)), x))
    x = b.relu(b.conv(x, 16))
    graph = b.graph(b.head(x, 10))
    given = images(4, 3, 40, 40)
    found = []
    for together in (True, False):
        with monkeypatch.context() as patched:
            if together:
                alone(patched)
            with Engine(graph, device="cpu", threads=2) as engine:
                found.append(engine.predict(given, batch=4))
    np.testing.assert_array_equal(found[0], found[1])
    with Engine(graph, device="cpu", threads=2) as engine:
        assert not np.array_equal(engine.predict(given, batch=2)[:2], found[0][:2])


def test_less_memory_than_together(monkeypatch):
    sizes = []
    for together in (True, False):
        with monkeypatch.context() as patched:
            if together:
                alone(patched)
            with Engine(network(160), device="cpu", threads=1) as engine:
                sizes.append(sum(engine.plan(8, np.dtype(np.float32)).nbytes.values()))
    assert sizes[1] < sizes[0] / 2


def test_layers_are_called_for_every_image():
    with Engine(network(), device="cpu", threads=2) as engine:
        result = engine.profile(images(4, 3, 40, 40), batch=4, duration_s=0.05, check=False)
        calls = {layer.calls for layer in result.layers}
        assert sorted(calls) == [min(calls), 4 * min(calls)]


def test_several_callers_at_once():
    x = images(8, 3, 40, 40)
    with Engine(network(), device="cpu", threads=2) as engine:
        expected = engine.predict(x, batch=8)
        wrong = []

        def call():
            for _ in range(20):
                wrong.append(not np.array_equal(engine.predict(x, batch=8), expected))

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert wrong == 80 * [False]


def test_what_is_too_many_or_uneven_stays_together():
    assert all(per_image.pays(*given) for given in ((2, 1), (2, 2), (9, 2), (64, 16)))
    more = per_image.MOST_IMAGES + 1
    assert not any(per_image.pays(*given) for given in ((1, 1), (more, 1), (3, 2), (5, 4)))


def test_python_on_threads_of_the_pool():
    seen = []
    _cpu.on_threads(4, seen.append)
    assert 0 in seen
    assert sorted(set(seen) & set(range(4))) == sorted(seen)
    with pytest.raises(ZeroDivisionError):
        _cpu.on_threads(2, lambda index: 1 // 0)
    _cpu.on_threads(1, seen.append)
    assert seen[-1] == 0
