"""Memory that values share: as little as can be, and never what another still needs."""

from __future__ import annotations

from dataclasses import replace

import graphs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import Engine, InputError
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.graph import reference
from cnn_engine.graph.graph import Graph
from cnn_engine.operators.mathematics import Neg
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.shaping import Concat, Reshape
from cnn_engine.plan import memory, packing
from cnn_engine.plan.builder import plan_memory
from cnn_engine.plan.packing import Lifetime

#: What a plan may take, of the most that is alive at once.
SLACK = 1.1


def values_alive(graph: Graph) -> int:
    """The largest set of values alive at once where none shares memory: counted step by step."""
    made = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    last = {
        name: max((i for i, node in enumerate(graph.nodes) if name in node.inputs), default=first)
        for name, first in made.items()
    }
    return max(
        sum(graph.values[n].nbytes for n, first in made.items() if first <= step <= last[n])
        for step in range(len(graph.nodes))
    )


def plan_of(graph: Graph) -> memory.MemoryPlan:
    with Engine(graph, device="cpu", threads=1) as e:
        placed = e._plans.open().placed(*e._plans.open().first)
        bare = {
            name: replace(kernel, workspace=lambda *_: 0) for name, kernel in placed.kernels.items()
        }
        return plan_memory(replace(placed, kernels=bare), lambda kind: e.device, 1)


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(
            lambda: graphs.resnet((3, 4, 6, 3), (1, 3, 64, 64), weights=False), id="resnet50"
        ),
        pytest.param(lambda: graphs.densenet((6, 12, 48, 32), (1, 3, 64, 64)), id="densenet201"),
        pytest.param(lambda: graphs.densenet((6, 12, 48, 32), (3, 3, 64, 64)), id="densenet201x3"),
        pytest.param(lambda: graphs.unet(4, (1, 3, 64, 64)), id="unet"),
        pytest.param(lambda: graphs.unet(3, (2, 3, 64, 64)), id="unetx2"),
    ],
)
def test_networks_take_little_more_than_what_is_alive(graph):
    graph = graph()
    found = plan_of(graph)
    assert found.sizes["cpu"] <= SLACK * found.alive["cpu"]
    assert found.sizes["cpu"] <= SLACK * values_alive(graph)


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 40), st.integers(0, 12)),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=100, deadline=None)
def test_lifetimes_that_meet_do_not_overlap(rows):
    lives = [Lifetime(i, 256 * n, first, first + more) for i, (n, first, more) in enumerate(rows)]
    positions, size = packing.pack(lives)
    for a in lives:
        assert 0 <= positions[a.name] <= size - a.nbytes
        for b in lives:
            if a.name < b.name and a.meets(b):
                apart = (
                    positions[a.name] + a.nbytes <= positions[b.name]
                    or positions[b.name] + b.nbytes <= positions[a.name]
                )
                assert apart, (a, b)
    assert size >= packing.most_alive(lives)


def test_what_ends_highest_is_placed_first_in_turn():
    """A chain as mnasnet's, where none of the orders that are tried first packs as tightly as can be."""
    sizes = (3, 8, 8, 4, 12, 3)
    lives = [Lifetime(i, 256 * n, i, i + 1) for i, n in enumerate(sizes)]
    assert packing.pack(lives)[1] == packing.most_alive(lives) == 16 * 256


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_random_graphs_are_exact_and_small(seed, nodes, batch):
    """Outputs in place, seen under another shape, or part of a concatenation: none is written over."""
    graph = graphs.random_graph(seed, nodes, batch)
    images = np.random.default_rng(seed).integers(-3, 4, (batch, 2, 3, 4)).astype(np.float32)
    wanted = reference.reference(graph, {"images": images})
    with Engine(graph, device="cpu", threads=1) as e:
        found = e.run({"images": images})
        assert list(found) == list(graph.outputs)
        for name, array in found.items():
            np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def test_what_is_written_over_a_concatenation_leaves_its_parts_to_later_readers(rng):
    """Also where it is an output under another shape, whose memory is the caller's."""
    b = graphs.Builder((1, 2, 3, 4))
    part = b.relu("images")
    over = b.add(Neg(), b.add(Concat(1), part, b.add(Neg(), "images")))
    shown = b.add(Reshape((1, 48)), over)
    later = b.add(Neg(), part)
    graph = b.graph(shown, later)
    images = rng.standard_normal((1, 2, 3, 4)).astype(np.float32)
    with Engine(graph, device="cpu", threads=1) as e:
        found = e.run({"images": images})
    np.testing.assert_array_equal(found[later], -np.maximum(images, 0))
    np.testing.assert_array_equal(found[shown][0, :24], -np.maximum(images, 0).reshape(-1))


@pytest.mark.parametrize("batch", [1, 2])
def test_parts_of_a_concatenation_are_written_in_place(batch):
    b = graphs.Builder((batch, 3, 8, 8))
    x = b.relu(b.conv("images", 8))
    parts = [b.relu(b.conv(x, 16, kernel)) for kernel in (1, 3, 5)]
    joined = b.relu(b.add(Concat(1), *parts))
    b.head(joined, 4)
    found = plan_of(b.graph())
    inside = [found.storage.get(name, (name, 0)) for name in parts]
    assert [offset for _, offset in inside] == [
        0,
        16 * 4,
        2 * 16 * 4,
    ]  # of the first place's channels
    assert len({root for root, _ in inside}) == 1
    assert [found.pitches[name] for name in parts] == [3 * 16] * 3


def test_parts_that_fit_only_together_are_written_in_place():
    """Beside a larger image, room for all of a concatenation is there once none of its parts is apart."""
    b = graphs.Builder((1, 3, 16, 16))
    x = b.relu(b.conv("images", 64))
    parts = [b.relu(b.conv(x, 16, kernel, stride=2)) for kernel in (1, 3, 5)]
    b.relu(b.add(Concat(1), *parts))
    found = plan_of(b.graph())
    assert len({found.storage.get(name, (name, 0))[0] for name in parts}) == 1


@pytest.mark.parametrize(
    ("width", "arena", "joined"), [(18, "cpu", 1), (18, "cuda", 0), (20, "cuda", 1)]
)
def test_rows_on_a_gpu_begin_at_multiples_of_16_bytes(width, arena, joined):
    b = graphs.Builder((2, 3, 8, 8))
    x = b.relu(b.conv("images", 8))
    parts = [b.relu(b.conv(x, filters)) for filters in (16, width)]
    b.head(b.relu(b.add(Concat(1), *parts)), 4)
    with Engine(b.graph(), device="cpu", threads=1) as e:
        graph = e._plans.open().placed(*e._plans.open().first).graph
    found = memory.plan(
        graph, lambda _: arena, in_place=lambda _: False, is_alias=lambda _: False,
        allows_pitch=lambda *_: True,
    )  # fmt: skip
    assert set(found.pitches.values()) == ({16 + width} if joined else set())


@pytest.mark.parametrize("batch", [1, 2])
def test_parts_of_planes_are_written_in_place_where_they_are_in_one_piece(batch):
    b = graphs.Builder((batch, 3, 8, 8))
    parts = [
        b.add(MaxPool2d((size, size), (1, 1), 4 * (size // 2,)), "images") for size in (1, 3, 5)
    ]
    b.relu(b.add(Concat(1), *parts))
    found = plan_of(b.graph())
    roots = {found.storage.get(name, (name, 0))[0] for name in parts}
    assert len(roots) == (1 if batch == 1 else 3)
    assert not found.pitches


def test_the_concatenations_of_a_densenet_take_one_tensor_a_block():
    graph = graphs.densenet((6, 12), (2, 3, 64, 64))
    found = plan_of(graph)
    joins = [node for node in graph.nodes if node.op.kind == "concat"]
    roots = {found.storage.get(node.outputs[0], node.outputs)[0] for node in joins}
    assert roots <= {joins[5].outputs[0], joins[-1].outputs[0]}


def test_a_batch_that_cannot_fit_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: 1 << 16)
    with (
        Engine(graphs.resnet((1, 1), (1, 3, 64, 64), width=16), device="cpu") as e,
        pytest.raises(
            InputError, match=r"64 images need .* GiB on cpu for activations at their peak"
        ),
    ):
        e.predict(np.zeros((64, 3, 64, 64), np.float32), 64)
