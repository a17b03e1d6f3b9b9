"""Channels in whole runs: the same outputs, from images that kernels can read at once, or the same graph."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import fuse, lay_channels_last
from test_passes import Builder, kinds, same

from cnn_engine import Engine
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Node
from cnn_engine.graph.passes.layout.alignment import align_channels
from cnn_engine.graph.reference import reference
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.binary import Add, Div, Mul, Sub
from cnn_engine.operators.mathematics import Log
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.norm import BatchNorm
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.resize import Resize
from cnn_engine.operators.shaping import Concat, Slice, Split
from cnn_engine.operators.unary import Clip, Relu, Sigmoid, Swish


def aligned(graph, run: int = 8):
    """Returns the graph aligned; what it computes is the same, and aligning it again changes nothing."""
    after = same(graph, lambda before: align_channels(before, run))
    assert align_channels(after, run) is after
    return after


def channels(graph) -> list[int]:
    """Returns those of what convolutions make, in order."""
    return [
        graph.values[node.outputs[0]].shape[1] for node in graph.nodes if node.op.kind == "conv2d"
    ]


def depthwise(b: Builder, x: str, count: int) -> str:
    return b.conv(x, count, count, groups=count, padding=(1, 1, 1, 1))


def partial_sum(b: Builder, whole: str, first: str, count: int, *, turned: bool = False) -> str:
    """Writes ReXNet's: the sum of ``first`` and of as many channels of ``whole``, then its other channels."""
    cut = b.add(Slice((0,), (count,), (1,), (1,)), whole)
    added = b.add(Add(), *((first, cut) if turned else (cut, first)))
    return b.add(Concat(1), added, b.add(Slice((count,), (1 << 62,), (1,), (1,)), whole))


def block(b: Builder, x: str, count: int, more: int) -> str:
    """Writes an inverted residual block with a gate, from ``count`` channels to ``more``."""
    wide = 6 * count
    y = b.add(Swish(), b.conv(x, count, wide, side=1))
    y = depthwise(b, y, wide)
    gate = b.add(Relu(), b.conv(b.add(ReduceMean((2, 3)), y), wide, count // 2, side=1))
    gate = b.add(Sigmoid(), b.conv(gate, count // 2, wide, side=1))
    y = b.add(Clip(0.0, 6.0), b.add(Mul(), y, gate))
    return b.conv(y, wide, more, side=1)


def rexnet() -> tuple[Builder, str]:
    b = Builder(2, 3, 9, 8)
    x = b.conv("x", 3, 27, padding=(1, 1, 1, 1))
    for count, more, turned in ((27, 38, False), (38, 45, True)):
        x = partial_sum(b, block(b, x, count, more), x, count, turned=turned)
    return b, b.conv(x, 45, 16, side=1)


def test_partial_sums_and_gates():
    b, y = rexnet()
    after = aligned(b.graph(y))
    assert not {"slice", "concat"} & set(kinds(after))
    assert kinds(after).count("add") == 2
    assert channels(after) == [48, 168, 168, 13, 168, 48, 232, 232, 19, 232, 48, 16]


def test_channels_that_are_read_at_once_stay():
    b = Builder(1, 3, 6, 6)
    x = b.conv("x", 3, 12)
    graph = b.graph(b.conv(b.add(Relu(), x), 12, 5))
    assert align_channels(graph, 4) is graph
    assert channels(aligned(graph)) == [16, 5]  # outputs keep theirs


def test_what_gates_add_up_stays():
    """EfficientNet's blocks: 10 sums within the gates of images whose channels are read at once."""
    b = Builder(1, 3, 6, 6)
    graph = b.graph(b.conv(block(b, b.conv("x", 3, 20), 20, 16), 16, 8))
    assert align_channels(graph, 4) is graph
    assert channels(aligned(graph)) == [24, 120, 120, 10, 120, 16, 8]


def test_what_knows_channels_one_by_one():
    b = Builder(2, 6, 8, 8)
    x = b.conv("x", 6, 14, padding=(1, 1, 1, 1))
    y = b.add(MaxPool2d((2, 2), (2, 2)), x)
    y = b.add(Resize((2, 14, 8, 8), (1.0, 1.0, 2.0, 2.0), mode="linear"), y)
    y = b.add(Sub(), b.add(Mul(), y, b.constant(14, 1, 1)), b.number(0.25))
    y = b.add(Add(), b.constant(1, 14, 1, 1), b.add(Add(), depthwise(b, x, 14), y))
    graph = b.graph(b.conv(b.add(AveragePool2d((2, 2), (2, 2)), y), 14, 7))
    after = aligned(graph)
    assert channels(after) == [16, 16, 7]
    assert [node.name for node in after.nodes] == [node.name for node in graph.nodes]


@pytest.mark.parametrize(
    "why", ["output", "infinite", "quotient", "joined output", "groups", "much"]
)
def test_what_does_not_allow_more_channels(why):
    b = Builder(1, 8, 6, 6)
    count = 5 if why == "much" else 12
    x = b.conv("x", 8, count)
    y, outputs = x, []
    if why == "output":
        outputs = [x]
    elif why == "infinite":
        y = b.add(Log(), b.add(Clip(0.5, math.inf), x))
    elif why == "quotient":
        y = b.add(Div(), b.number(1.0), b.add(Clip(1.0, 2.0), x))
    elif why == "joined output":
        y, count = b.add(Concat(1), x, x), 24
        outputs = [y]
    elif why == "groups":
        y = b.conv(x, count, count, side=1, groups=2)
    graph = b.graph(b.conv(y, count, 8), *outputs)
    assert align_channels(graph, 8) is graph


@pytest.mark.parametrize("why", ["number", "sigmoid", "order", "places", "two readers"])
def test_sums_that_are_no_sums_of_both(why):
    """What would be added to the other channels is not zero, or the parts are not those of one image."""
    b = Builder(1, 3, 6, 6)
    first = b.conv("x", 3, 11)
    if why == "number":
        first = b.add(Add(), first, b.number(0.5))
    elif why == "sigmoid":
        first = b.add(Sigmoid(), first)
    whole = b.conv(first, 11, 14, padding=(1, 1, 1, 1))
    if why == "order":
        cut = b.add(Slice((3,), (14,), (1,), (1,)), whole)
        y = b.add(Concat(1), b.add(Add(), cut, first), b.add(Slice((0,), (3,), (1,), (1,)), whole))
    elif why == "places":
        turned = b.add(Slice((3,), (-9,), (2,), (-1,)), whole)
        cut = b.add(Slice((0,), (11,), (1,), (1,)), turned)
        y = b.add(
            Concat(1), b.add(Add(), cut, first), b.add(Slice((11,), (14,), (1,), (1,)), whole)
        )
    else:
        y = partial_sum(b, whole, first, 11)
    outputs = [b.nodes[-3].outputs[0]] if why == "two readers" else []
    after = aligned(b.graph(b.conv(y, 14, 8), *outputs))
    assert {"slice", "concat"} <= set(kinds(after))


def test_a_sum_of_first_channels_with_themselves():
    """It is no sum of two images: the slice stays, and is read twice."""
    b = Builder(1, 3, 6, 6)
    x = b.conv("x", 3, 20)
    first = b.add(Slice((0,), (6,), (1,), (1,)), x)
    rest = b.add(Slice((6,), (20,), (1,), (1,)), x)
    joined = b.add(Concat(1), b.add(Add(), first, first), rest)
    for run in (4, 8):
        aligned(b.graph(b.conv(joined, 20, 8, side=1)), run)


def test_a_batch_norm_with_one_constant_for_several_parameters():
    """What is filled up of a mean and of a variance differs."""
    b = Builder(1, 3, 6, 6)
    x = b.conv("x", 3, 20)
    scale, shift, shared = b.constant(20), b.constant(20), b.constant(20, low=0.5, high=2.0)
    normed = b.add(BatchNorm(), x, scale, shift, shared, shared)
    y = b.conv(b.add(Add(), normed, b.conv("x", 3, 20)), 20, 8, side=1)
    after = aligned(b.graph(y), 8)
    mean, variance = next(n.inputs[3:] for n in after.nodes if n.op.kind == "batch_norm")
    assert after.constants[mean][20:].tolist() == [0] * 4
    assert after.constants[variance][20:].tolist() == [1] * 4


def test_parts_are_filled_up_by_themselves():
    """What Res2Net, MixNet and GhostNet have: parts of 12 and 20 channels, in two places of two images."""
    b = Builder(2, 3, 6, 6)
    x = b.norm(b.conv("x", 3, 32), 32)
    node = Node("split", Split(1, (12, 20)), (x,), ("first", "second"))
    b.nodes.append(node)
    first, second = node.outputs
    more = depthwise(b, second, 20)
    y = b.add(Concat(1), b.conv(first, 12, 20, side=1), b.add(Relu(), more), first)
    y = b.add(Add(), y, b.constant(52, 1, 1))
    cut = b.add(Slice((20,), (40,), (-3,), (1,)), y)
    graph = b.graph(b.conv(y, 52, 8, side=1), b.conv(cut, 20, 8, side=1))
    after = aligned(graph)
    assert channels(after) == [40, 24, 24, 8, 8]
    assert after.values[y].shape[1] == 64
    assert [node.op.kind for node in after.nodes] == [node.op.kind for node in graph.nodes]
    assert align_channels(graph, 4) is graph


def test_a_sum_of_some_channels_that_is_a_part_of_itself():
    """Its class has values of more channels than the part, whose ends go no further for that."""
    b = Builder(1, 3, 4, 4)
    first = b.conv("x", 3, 27)
    whole = partial_sum(b, b.conv(first, 27, 38, padding=(1, 1, 1, 1)), first, 27)
    part = b.add(Add(), b.add(Slice((5,), (32,), (1,), (1,)), whole), first)
    graph = b.graph(b.conv(whole, 38, 8, side=1), b.conv(part, 27, 8, side=1))
    assert align_channels(graph, 8) is graph


KINDS = (
    "conv", "conv", "depthwise", "gate", "relu", "sigmoid", "add", "partial sum", "concat", "split", "slice",
    "norm",
)  # fmt: skip


@st.composite
def networks(draw):
    """Any of what may be filled up, one after another, with what may not between; an output of a few."""
    b = Builder(1, 3, 5, 4, seed=draw(st.integers(0, 99)))
    values = [("x", 3)]

    def one() -> tuple[str, int]:
        return values[draw(st.integers(0, len(values) - 1))]

    for number in range(draw(st.integers(3, 12))):
        x, count = one()
        kind = draw(st.sampled_from(KINDS))
        if kind == "conv":
            more = draw(st.integers(1, 30))
            values.append((b.conv(x, count, more, side=1), more))
        elif kind == "depthwise":
            values.append((depthwise(b, x, count), count))
        elif kind == "gate":
            gate = b.add(Sigmoid(), b.add(ReduceMean((2, 3)), x))
            values.append((b.add(Mul(), x, gate), count))
        elif kind in ("relu", "sigmoid"):
            values.append((b.add({"relu": Relu(), "sigmoid": Sigmoid()}[kind], x), count))
        elif kind == "add":
            same_count = [value for value, other in values if other == count]
            values.append((b.add(Add(), x, draw(st.sampled_from(same_count))), count))
        elif kind == "partial sum" and (less := [one for one in values if one[1] < count]):
            first, fewer = draw(st.sampled_from(less))
            values.append((partial_sum(b, x, first, fewer, turned=draw(st.booleans())), count))
        elif kind == "concat":
            others = [one() for _ in range(draw(st.integers(1, 2)))]
            joined = b.add(Concat(1), x, *(value for value, _ in others))
            values.append((joined, count + sum(more for _, more in others)))
        elif kind == "split" and count > 1:
            size = draw(st.integers(1, count - 1))
            names = (f"{number}.first", f"{number}.rest")
            b.nodes.append(Node(f"split{number}", Split(1, (size, count - size)), (x,), names))
            values += zip(names, (size, count - size), strict=True)
        elif kind == "slice" and count > 1:
            end = draw(st.integers(1, count))
            start = draw(st.integers(0, end - 1))
            values.append((b.add(Slice((start,), (end,), (1,), (1,)), x), end - start))
        elif kind == "norm":
            values.append((b.norm(x, count), count))
    x, count = values[-1]
    return b.graph(b.conv(x, count, 2, side=1))


@settings(deadline=None, max_examples=150)
@given(graph=networks(), run=st.sampled_from((4, 8)))
def test_any_network_computes_the_same(graph, run):
    graph = passes.drop_unused(graph)
    after = aligned(graph, run)
    for node in after.nodes:
        if node not in graph.nodes and node.op.kind == "conv2d" and node.inputs[0] != "x":
            x, y = (after.values[name].shape[1] for name in (node.inputs[0], node.outputs[0]))
            assert x % 8 == 0 or y % 8 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_on_a_gpu(dtype):
    b, y = rexnet()
    graph = b.network(y)
    images = np.random.default_rng(2).uniform(-1, 1, (2, 3, 9, 8)).astype(np.float32)
    (wanted,) = reference(graph, {"images": images}).values()
    with Engine(graph, device="cuda", dtype=dtype) as e:
        (found,) = e.run({"images": images}).values()
    limit = {"float16": 1e-2, "float32": 1e-5}[dtype]
    assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()


def test_laid_for_a_gpu():
    """Gates of 162 channels are no node of their own; of 168 they are."""
    b, y = rexnet()
    after = same(fuse(b.graph(y)), lambda graph: lay_channels_last(graph, "cuda", 8))
    assert kinds(after).count("squeeze_excite") == 2
    assert not {"slice", "concat", "add"} & set(kinds(after))
