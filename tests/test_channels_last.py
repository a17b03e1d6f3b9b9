"""Images with their channels side by side: rewrites compute the same, engines of them too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_passes import Builder, kinds, same

from cnn_engine import _cpu
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Node
from cnn_engine.operators import KINDS
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.binary import Add, Mul, Sub
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.norm import BatchNorm
from cnn_engine.operators.pad import Pad
from cnn_engine.operators.reduce import ReduceMax, ReduceMean
from cnn_engine.operators.resize import Resize
from cnn_engine.operators.shaping import Concat, DepthToSpace, Reshape, Slice, Split, Transpose
from cnn_engine.operators.softmax import Softmax
from cnn_engine.operators.unary import Clip, HardSigmoid, Relu, Sigmoid, Swish


def pointwise(b: Builder, x: str, channels: int, filters: int) -> str:
    return b.add(Conv2d(), x, b.constant(filters, channels, 1, 1))


def test_a_chain_of_convolutions_is_turned_once():
    b = Builder(2, 8, 8, 8)
    y = b.add(MaxPool2d((2, 2), (2, 2)), b.add(Relu(), b.conv(b.conv("x", 8, 4), 4, 4)))
    after = same(b.graph(y), lambda graph: passes.lay_channels_last(passes.fuse(graph)))
    assert kinds(after) == [
        "transpose",
        "conv2d_nhwc",
        "conv2d_nhwc",
        "max_pool2d_nhwc",
        "transpose",
    ]


def test_a_first_layer_of_few_channels_reads_its_input_as_it_is():
    b = Builder(2, 3, 6, 6)
    y = b.add(ReduceMean((2, 3), keepdims=False), b.conv("x", 3, 4))
    after = same(b.graph(y), passes.lay_channels_last)
    assert kinds(after) == ["conv2d_nhwc", "reduce_mean"]
    assert after.nodes[0].op.planar
    assert after.nodes[1].op.axes == (1, 2)


def test_pools_of_one_element_go():
    b = Builder(2, 3, 6, 6)
    x = b.add(AveragePool2d((1, 1), (1, 1)), b.conv("x", 3, 4))
    after = same(b.graph(b.add(MaxPool2d((1, 1), (2, 2)), x)), passes.lay_channels_last)
    assert kinds(after) == ["conv2d_nhwc", "max_pool2d_nhwc", "transpose"]


def test_graphs_without_convolutions_stay():
    b = Builder(2, 3, 6, 6)
    before = b.graph(b.add(MaxPool2d((2, 2), (2, 2)), b.add(Relu(), "x")))
    assert passes.lay_channels_last(before) is before


def test_weights_that_are_computed_stay():
    b = Builder(2, 3, 6, 6)
    weight = b.add(
        Reshape((4, 3, 3, 3)), b.add(Slice((0,), (108,), (0,), (1,)), b.add(Reshape((-1,)), "x"))
    )
    before = b.graph(b.add(Conv2d(), "x", weight))
    assert passes.lay_channels_last(before) is before


@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1), (6,), (6, 1), (2, 1, 1, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_constants_broadcast_as_before(shape, turned):
    b = Builder(2, 3, 6, 6)
    pair = [b.conv("x", 3, 4, padding=(1, 1, 1, 1)), b.constant(*shape)]
    y = b.add(Sub(), *(reversed(pair) if turned else pair))
    after = same(b.graph(b.add(ReduceMax((1,)), y)), passes.lay_channels_last)
    assert kinds(after) == ["conv2d_nhwc", "sub", "reduce_max", "reshape"]


@pytest.mark.parametrize(
    ("op", "kept"),
    [
        (AveragePool2d((3, 2), (2, 1), (1, 0, 1, 1), extra=(1, 0)), True),
        (MaxPool2d((3, 3), (1, 2), (1, 1, 0, 0)), True),
        (MaxPool2d((2, 2), (2, 2), indices="row"), False),
        (Softmax(1), True),
        (Softmax(-1), True),
        (Slice((1, 0), (4, 3), (1, -1), (2, 1)), True),
        (Pad((0, 1, 2, 0, 0, 0, 1, 3), "constant", 1.5), True),
        (Resize((2, 4, 12, 9), (1.0, 1.0, 2.0, 1.5), "linear"), True),
        (Reshape((2, -1, 3, 3)), False),
        (Transpose((0, 1, 3, 2)), False),
        (Transpose((0, 2, 3, 1)), True),
        (DepthToSpace(2), False),
        (ReduceMean((1, 3), keepdims=False), True),
        (ReduceMean((3,), keepdims=False), False),
        (ReduceMean((-3, 0)), True),
    ],
    ids=str,
)  # fmt: skip
def test_what_follows_a_convolution(op, kept):
    b = Builder(2, 3, 6, 6)
    y = b.conv("x", 3, 4, padding=(1, 1, 1, 1))
    places = ("places",) if getattr(op, "indices", None) else ()
    b.nodes.append(Node("node", op, (y,), ("made", *places)))
    after = same(b.graph("made"), passes.lay_channels_last)
    found = kinds(after)
    assert found[0] == "conv2d_nhwc"
    assert ("transpose" in found[1:2]) != kept
    assert len(found) <= 3


def test_parts_and_joins():
    b = Builder(2, 3, 6, 6)
    x = b.conv("x", 3, 6, padding=(1, 1, 1, 1))
    b.nodes.append(Node("split", Split(1, (2, 4)), (x,), ("few", "more")))
    joined = b.add(Concat(1), b.add(Relu(), "more"), "x", "few")
    after = same(b.graph(joined, "few"), passes.lay_channels_last)
    assert [node.op.axis for node in after.nodes if node.op.kind in ("split", "concat")] == [3, 3]
    assert kinds(after).count("transpose") == 3  # x, and the two outputs


def test_orders_that_networks_ask_for_themselves():
    """ConvNeXt turns its images to have their channels last for its layers, and back."""
    b = Builder(2, 3, 6, 6)
    y = b.conv("x", 3, 4, padding=(1, 1, 1, 1))
    z = b.add(Swish(), b.add(Transpose((0, 2, 3, 1)), y))
    z = b.add(Add(), y, b.add(Transpose((0, 3, 1, 2)), z))
    after = same(b.graph(b.conv(z, 4, 4)), passes.lay_channels_last)
    assert kinds(after) == ["conv2d_nhwc", "swish", "add", "conv2d_nhwc", "transpose"]


@pytest.mark.parametrize("groups", [1, 2])
def test_any_function_becomes_an_epilogue(groups):
    b = Builder(2, 4, 8, 8)
    y, functions = "x", [Swish(), HardSigmoid(), Clip(0.0, 6.0)]
    for op in functions:
        y = b.add(op, b.conv(y, 4, 4, groups=groups))
    after = same(b.graph(y), lambda graph: passes.lay_channels_last(passes.fuse(graph)))
    convolutions = [node for node in after.nodes if node.op.kind == "conv2d_nhwc"]
    assert [node.op.activation for node in convolutions] == functions


def test_a_batch_norm_and_a_relu_are_applied_as_they_are_read():
    b = Builder(2, 3, 6, 6)
    x = b.add(Concat(1), *[b.conv("x", 3, 4, padding=(1, 1, 1, 1))] * 2)
    y = pointwise(b, b.add(Relu(), b.norm(x, 8)), 8, 5)
    z = pointwise(b, b.norm(x, 8), 8, 5)
    w = pointwise(b, b.add(Relu(), x), 8, 5)
    after = same(b.graph(b.add(Add(), b.add(Add(), y, z), w)), passes.lay_channels_last)
    assert "batch_norm" not in kinds(after)
    assert "relu" not in kinds(after)
    first = next(node for node in after.nodes if len(node.covers) == 3)
    assert (first.op.floor, first.covers) == (0.0, ("batch_norm2", "relu3", "conv2d4"))


def test_a_batch_norm_that_others_read_stays():
    b = Builder(2, 4, 6, 6)
    x = b.add(Relu(), b.norm(b.conv("x", 4, 4), 4))
    y = pointwise(b, x, 4, 5)
    after = same(b.graph(b.add(MaxPool2d((2, 2), (2, 2)), x), y), passes.lay_channels_last)
    assert kinds(after).count("batch_norm") == 1
    assert all(node.op.floor is None for node in after.nodes if node.op.kind == "conv2d_nhwc")


def test_a_prologue_that_two_read_goes():
    b = Builder(2, 4, 6, 6)
    x = b.add(Relu(), b.norm(b.add(MaxPool2d((3, 3), (1, 1)), b.conv("x", 4, 4)), 4))
    y = b.add(Add(), pointwise(b, x, 4, 5), pointwise(b, x, 4, 5))
    after = same(b.graph(y), passes.lay_channels_last)
    assert "batch_norm" not in kinds(after)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_squeeze_and_excite_is_a_scale_of_each_image(images, turned, relu):
    b = Builder(images, 3, 6, 6)
    x = b.add(MaxPool2d((2, 2), (2, 2)), b.conv("x", 3, 4))
    gate = b.add(Sigmoid(), pointwise(b, b.add(ReduceMean((2, 3)), x), 4, 4))
    y = b.add(Mul(), *((gate, x) if turned else (x, gate)))
    y = pointwise(b, b.add(Relu(), y) if relu else y, 4, 5)
    after = same(b.graph(y), passes.lay_channels_last)
    assert "mul" not in kinds(after)
    last = after.nodes[-2]
    assert after.values[last.inputs[4]].shape == ((2, 4) if images == 2 else (4,))


def test_gates_of_places_stay():
    b = Builder(2, 3, 6, 6)
    x = b.conv("x", 3, 4)
    gate = b.add(Sigmoid(), b.add(ReduceMean((1,)), x))
    after = same(b.graph(pointwise(b, b.add(Mul(), x, gate), 4, 5)), passes.lay_channels_last)
    assert "mul" in kinds(after)


def test_repeated_concatenations_nest():
    b = Builder(2, 3, 6, 6)
    features = [b.conv("x", 3, 4, padding=(1, 1, 1, 1))]
    for _ in range(3):
        joined = b.add(Concat(1), *features) if len(features) > 1 else features[0]
        features.append(b.conv(joined, 4 * len(features), 4, padding=(1, 1, 1, 1)))
    after = same(b.graph(b.add(Concat(-3), *features)), passes.nest_concatenations)
    joins = [node.inputs for node in after.nodes if node.op.kind == "concat"]
    assert [len(inputs) for inputs in joins] == [2, 2, 2]


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_random_graphs(data):
    """Every operator here makes images of 4 or 8 channels, 8 x 8 each."""
    b = Builder(data.draw(st.integers(1, 2)), 4, 8, 8, seed=data.draw(st.integers(0, 99)))
    channels = {"x": 4}
    steps = (
        "conv", "conv", "point", "norm", "relu", "swish", "add", "gate", "concat", "half", "pool",
        "mean", "constant", "turn",
    )  # fmt: skip
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=12)):
        names = list(channels)
        x = data.draw(st.sampled_from(names[-4:]))
        c, filters = channels[x], 4
        border = (1, 1, 1, 1)
        match step:
            case "conv":
                filters = data.draw(st.sampled_from([4, 8]))
                groups = data.draw(st.sampled_from([1, 2, 4]))
                y = b.conv(x, c, filters, padding=border, groups=groups)
            case "point":
                y = pointwise(b, x, c, 4)
            case "norm":
                y, filters = b.norm(x, c), c
            case "relu" | "swish":
                y, filters = b.add(Relu() if step == "relu" else Swish(), x), c
            case "add":
                alike = [name for name in names if channels[name] == c]
                y, filters = b.add(Add(), x, data.draw(st.sampled_from(alike))), c
            case "gate":
                pooled = b.add(ReduceMean((2, 3)), x)
                y, filters = b.add(Mul(), x, b.add(Sigmoid(), pointwise(b, pooled, c, c))), c
            case "concat":
                few = [name for name in names if channels[name] == 4]
                if c == 8:
                    continue
                y, filters = b.add(Concat(1), x, data.draw(st.sampled_from(few))), 8
            case "half":
                y = b.add(Slice((0,), (4,), (1,), (1,)), x)
            case "pool":
                op = data.draw(st.sampled_from([MaxPool2d, AveragePool2d]))
                y, filters = b.add(op((3, 3), (1, 1), border), x), c
            case "mean":
                y, filters = b.add(Mul(), x, b.add(ReduceMean((1, 2)), x)), c
            case "constant":
                y, filters = b.add(Mul(), x, b.constant(c, 1, 1)), c
            case _:
                y, filters = b.add(Transpose((0, 1, 3, 2)), x), c
        channels[y] = filters
    made = list(channels)[1:]
    outputs = (
        data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        if made
        else []
    )
    if outputs:
        before = passes.fuse(passes.simplify(b.graph(*outputs)))
        same(before, passes.lay_channels_last)


def test_every_function_of_an_epilogue_is_a_kernel_s():
    for kind in passes.EPILOGUES["conv2d_nhwc"]:
        assert hasattr(_cpu.UnaryFunction, KINDS[kind]().function), kind


def test_batch_norm_by_its_last_dimension(rng):
    x = rng.standard_normal((2, 3, 4, 5))
    parameters = rng.uniform(0.5, 2, (4, 3))
    wanted = BatchNorm().reference(x, *parameters)
    found = BatchNorm(axis=-1).reference(np.moveaxis(x, 1, -1), *parameters)
    np.testing.assert_array_equal(np.moveaxis(found, -1, 1), wanted)
