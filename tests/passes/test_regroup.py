"""Grouped convolutions for tensor cores: groups joined by zeros, filters of one channel apart."""

from __future__ import annotations

import fake_cuda
import numpy as np
import pytest
from engines import built, steps_of
from graphs import Builder

from cnn_engine import Engine
from cnn_engine.graph.graph import Graph
from cnn_engine.graph.passes import regroup
from cnn_engine.graph.reference import reference
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.unary import Relu


def convolution(rng: np.random.Generator, groups: int, channels: int, filters: int) -> Graph:
    """One convolution with a bias and a function, whose readers sum over its filters or do not."""
    kernel, stride, dilation = (int(n) for n in rng.integers(1, 4, 3))
    b = Builder((2, groups * channels, 9, 8), int(rng.integers(1 << 30)))
    weight = b.constant((groups * filters, channels, kernel, kernel))
    b.constants["bias"] = rng.standard_normal(groups * filters).astype(np.float32)
    op = Conv2d((stride,) * 2, (1, 0, 0, 1), (dilation,) * 2, groups, activation=Relu())
    y = b.add(op, "images", weight, "bias")
    kind = rng.choice(["end", "sum", "grouped", "twice"])
    if kind == "end":
        return b.graph(y)
    z = b.conv(y, 6 if kind != "grouped" else groups, 1, groups=groups if kind == "grouped" else 1)
    return b.graph(z, y) if kind == "twice" else b.graph(z)


def test_all_forms_make_the_same_sums(rng):
    """Of float64; every form is chosen for some."""
    chosen = set()
    for _ in range(120):
        groups, channels, filters = int(rng.integers(2, 13)), *map(int, rng.integers(1, 6, 2))
        graph = convolution(rng, groups, channels, filters)
        after = regroup(graph, int(rng.choice([4, 8])), bool(rng.integers(2)))
        x = rng.standard_normal(graph.inputs[0].shape)
        wanted, found = (reference(g, {"images": x}) for g in (graph, after))
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-10)
        left = {node.op.groups for node in after.nodes if type(node.op) is Conv2d}
        parted = any(node.op.kind == "concat" for node in after.nodes)
        chosen.add(
            "parted"
            if parted
            else "whole"
            if left == {1}
            else "as it is"
            if after is graph
            else "joined"
        )
    assert chosen == {"parted", "whole", "joined", "as it is"}


@pytest.mark.parametrize(
    ("groups", "channels", "filters", "kernel", "left"),
    [
        (8, 9, 9, 3, [1]),  # odd channels: one group, in whole vectors
        (2, 64, 64, 3, [2]),  # groups that fill tiles
        (96, 1, 1, 7, [96]),  # depthwise
        (48, 1, 2, 7, [48, 48]),  # two filters a channel
        (2, 1, 32, 3, [1]),  # many filters of few channels
        (32, 4, 4, 3, [4]),  # ResNeXt's first layers: tiles of 32 filters
    ],
)  # fmt: skip
def test_what_a_gpu_runs(groups, channels, filters, kernel, left):
    b = Builder((1, groups * channels, 14, 14))
    graph = b.graph(b.conv("images", groups * filters, kernel, groups=groups))
    after = regroup(graph, 8, True)
    assert [node.op.groups for node in after.nodes if type(node.op) is Conv2d] == left


def test_filters_of_a_channel_are_stored_where_their_reader_reads_them(monkeypatch, rng):
    """A depthwise convolution of two filters a channel moves nothing: weights take its order."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    b = Builder((1, 16, 20, 18))
    x = b.relu(b.conv("images", 48, 3))
    graph = b.graph(b.conv(b.relu(b.conv(x, 96, 7, 2, groups=48)), 10, 1))
    placed, steps = built(graph, "float32", 1)
    kinds = [node.op.kind for node in placed.nodes]
    assert kinds.count("conv2d_nhwc") == 4
    assert kinds.count("transpose") == 2, "at both ends of the network"
    assert [step.kernel for step in steps.values()].count("depthwise") == 2
    with Engine(graph, device="cuda") as engine:
        images = rng.uniform(-1, 1, graph.inputs[0].shape).astype(np.float32)
        (found,) = engine.run({"images": images}).values()
        (concat,) = (step for step in steps_of(engine, 1).values() if step.kind == "concat")
        assert not concat.args, "its parts lie there already"
    (wanted,) = reference(graph, {"images": images}).values()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_an_older_gpu_and_weights_of_a_call_keep_their_groups(monkeypatch):
    fake_cuda.install(monkeypatch, tensor_cores=False)
    b = Builder((1, 72, 8, 8))
    graph = b.graph(b.conv(b.conv("images", 72, 3, groups=8), 8, 1))
    placed, _ = built(graph, "float32", 1)
    assert 8 in {node.op.groups for node in placed.nodes if type(node.op) is Conv2d}
    given = Graph(
        "given", (*graph.inputs, graph.values["w0"]), graph.outputs, graph.nodes,
        {"w1": graph.constants["w1"]},
    )  # fmt: skip
    assert regroup(given, 8, True) is given
