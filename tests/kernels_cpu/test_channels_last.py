"""Images with their channels side by side: rewrites compute the same, engines of them too."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import fuse, lay_channels_last
from onnx import helper
from onnx_models import model, tensor
from test_passes import Builder, kinds, same

from cnn_engine import Engine, _cpu
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.graph.reference import reference
from cnn_engine.kernels.cpu import channels_last
from cnn_engine.operators import KINDS
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.binary import Add, Mul, Sub
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.norm import BatchNorm
from cnn_engine.operators.pad import Pad
from cnn_engine.operators.reduce import ReduceMax, ReduceMean
from cnn_engine.operators.resize import Resize
from cnn_engine.operators.shaping import Concat, Reshape, Slice, Split, Transpose
from cnn_engine.operators.softmax import Softmax
from cnn_engine.operators.unary import Clip, HardSigmoid, Relu, Sigmoid, Swish, Tanh
from cnn_engine.plan import per_image


def on_cuda(graph: Graph) -> Graph:
    return lay_channels_last(graph, "cuda")


def pointwise(b: Builder, x: str, channels: int, filters: int) -> str:
    return b.add(Conv2d(), x, b.constant(filters, channels, 1, 1))


def test_a_chain_of_convolutions_is_turned_once():
    b = Builder(2, 8, 8, 8)
    y = b.add(MaxPool2d((2, 2), (2, 2)), b.add(Relu(), b.conv(b.conv("x", 8, 4), 4, 4)))
    after = same(b.graph(y), lambda graph: lay_channels_last(fuse(graph)))
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
    after = same(b.graph(y), lay_channels_last)
    assert kinds(after) == ["conv2d_nhwc", "reduce_mean"]
    assert after.nodes[0].op.planar
    assert after.nodes[1].op.axes == (1, 2)


def test_pools_of_one_element_go():
    b = Builder(2, 3, 6, 6)
    x = b.add(AveragePool2d((1, 1), (1, 1)), b.conv("x", 3, 4))
    after = same(b.graph(b.add(MaxPool2d((1, 1), (2, 2)), x)), lay_channels_last)
    assert kinds(after) == ["conv2d_nhwc", "max_pool2d_nhwc", "transpose"]


def test_graphs_without_convolutions_stay():
    b = Builder(2, 3, 6, 6)
    before = b.graph(b.add(MaxPool2d((2, 2), (2, 2)), b.add(Relu(), "x")))
    assert lay_channels_last(before) is before


def test_weights_that_are_computed_stay():
    b = Builder(2, 3, 6, 6)
    weight = b.add(
        Reshape((4, 3, 3, 3)), b.add(Slice((0,), (108,), (0,), (1,)), b.add(Reshape((-1,)), "x"))
    )
    before = b.graph(b.add(Conv2d(), "x", weight))
    assert lay_channels_last(before) is before


@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1), (6,), (6, 1), (2, 1, 1, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_constants_broadcast_as_before(shape, turned):
    b = Builder(2, 3, 6, 6)
    pair = [b.conv("x", 3, 4, padding=(1, 1, 1, 1)), b.constant(*shape)]
    y = b.add(Sub(), *(reversed(pair) if turned else pair))
    after = same(b.graph(b.add(ReduceMax((1,)), y)), lay_channels_last)
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
        (ReduceMean((1, 3), keepdims=False), True),
        (ReduceMean((3,), keepdims=False), False),
        (ReduceMean((-3, 0)), True),
    ],
    ids=str,
)  # fmt: skip
def test_what_follows_a_convolution(op, kept):
    b = Builder(2, 3, 6, 6)
    y = b.conv("x", 3, 4, padding=(1, 1, 1, 1))
    positions = ("places",) if getattr(op, "indices", None) else ()
    b.nodes.append(Node("node", op, (y,), ("made", *positions)))
    after = same(b.graph("made"), lay_channels_last)
    found = kinds(after)
    assert found[0] == "conv2d_nhwc"
    assert ("transpose" in found[1:2]) != kept
    assert len(found) <= 3


def test_parts_and_joins():
    b = Builder(2, 3, 6, 6)
    x = b.conv("x", 3, 6, padding=(1, 1, 1, 1))
    b.nodes.append(Node("split", Split(1, (2, 4)), (x,), ("few", "more")))
    joined = b.add(Concat(1), b.add(Relu(), "more"), "x", "few")
    after = same(b.graph(joined, "few"), lay_channels_last)
    assert [node.op.axis for node in after.nodes if node.op.kind in ("split", "concat")] == [3, 3]
    assert kinds(after).count("transpose") == 3  # x, and the two outputs


def test_orders_that_networks_ask_for_themselves():
    """ConvNeXt turns its images to have their channels last for its layers, and back."""
    b = Builder(2, 3, 6, 6)
    y = b.conv("x", 3, 4, padding=(1, 1, 1, 1))
    z = b.add(Swish(), b.add(Transpose((0, 2, 3, 1)), y))
    z = b.add(Add(), y, b.add(Transpose((0, 3, 1, 2)), z))
    after = same(b.graph(b.conv(z, 4, 4)), lay_channels_last)
    assert kinds(after) == ["conv2d_nhwc", "swish", "add", "conv2d_nhwc", "transpose"]


@pytest.mark.parametrize("groups", [1, 2])
def test_any_function_becomes_an_epilogue(groups):
    b = Builder(2, 4, 8, 8)
    y, functions = "x", [Swish(), HardSigmoid(), Clip(0.0, 6.0)]
    for op in functions:
        y = b.add(op, b.conv(y, 4, 4, groups=groups))
    after = same(b.graph(y), lambda graph: lay_channels_last(fuse(graph)))
    convolutions = [node for node in after.nodes if node.op.kind == "conv2d_nhwc"]
    assert [node.op.activation for node in convolutions] == functions


def test_a_batch_norm_and_a_relu_are_applied_as_they_are_read():
    b = Builder(2, 3, 6, 6)
    x = b.add(Concat(1), *[b.conv("x", 3, 4, padding=(1, 1, 1, 1))] * 2)
    y = pointwise(b, b.add(Relu(), b.norm(x, 8)), 8, 5)
    z = pointwise(b, b.norm(x, 8), 8, 5)
    w = pointwise(b, b.add(Relu(), x), 8, 5)
    after = same(b.graph(b.add(Add(), b.add(Add(), y, z), w)), lay_channels_last)
    assert "batch_norm" not in kinds(after)
    assert "relu" not in kinds(after)
    first = next(node for node in after.nodes if len(node.covers) == 3)
    assert (first.op.floor, first.covers) == (0.0, ("batch_norm2", "relu3", "conv2d4"))


def test_a_batch_norm_that_others_read_stays():
    b = Builder(2, 4, 6, 6)
    x = b.add(Relu(), b.norm(b.conv("x", 4, 4), 4))
    y = pointwise(b, x, 4, 5)
    after = same(b.graph(b.add(MaxPool2d((2, 2), (2, 2)), x), y), lay_channels_last)
    assert kinds(after).count("batch_norm") == 1
    assert all(node.op.floor is None for node in after.nodes if node.op.kind == "conv2d_nhwc")


def test_a_prologue_that_two_read_goes():
    b = Builder(2, 4, 6, 6)
    x = b.add(Relu(), b.norm(b.add(MaxPool2d((3, 3), (1, 1)), b.conv("x", 4, 4)), 4))
    y = b.add(Add(), pointwise(b, x, 4, 5), pointwise(b, x, 4, 5))
    after = same(b.graph(y), lay_channels_last)
    assert "batch_norm" not in kinds(after)


def test_averages_of_a_sum_are_sums_of_averages():
    b = Builder(2, 3, 6, 6)
    x = b.add(Relu(), b.norm(b.conv("x", 3, 8), 8))
    y = b.add(Conv2d(), x, b.constant(4, 8, 1, 1), b.constant(4))
    y = b.add(AveragePool2d((2, 2), (2, 2), count_include_pad=True), y)
    after = same(b.graph(y), lay_channels_last)
    assert kinds(after) == [
        "conv2d_nhwc", "batch_norm", "relu", "average_pool2d_nhwc", "conv2d_nhwc", "transpose",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "pool",
    [
        AveragePool2d((2, 2), (1, 1)),
        AveragePool2d((2, 2), (2, 2), (1, 0, 1, 0)),
        MaxPool2d((2, 2), (2, 2)),
    ],
    ids=str,
)
def test_other_pools_stay_behind(pool):
    b = Builder(2, 3, 6, 6)
    y = b.add(pool, b.add(Conv2d(), b.conv("x", 3, 8), b.constant(4, 8, 1, 1), b.constant(4)))
    after = same(b.graph(y), lay_channels_last)
    assert kinds(after)[:2] == ["conv2d_nhwc", "conv2d_nhwc"]


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_squeeze_and_excite_is_a_scale_of_each_image(images, turned, relu):
    b = Builder(images, 3, 6, 6)
    x = b.add(MaxPool2d((2, 2), (2, 2)), b.conv("x", 3, 4))
    gate = b.add(Sigmoid(), pointwise(b, b.add(ReduceMean((2, 3)), x), 4, 4))
    y = b.add(Mul(), *((gate, x) if turned else (x, gate)))
    y = pointwise(b, b.add(Relu(), y) if relu else y, 4, 5)
    after = same(b.graph(y), lay_channels_last)
    assert "mul" not in kinds(after)
    last = after.nodes[-2]
    assert after.values[last.inputs[4]].shape == ((2, 4) if images == 2 else (4,))


def test_gates_of_places_stay():
    b = Builder(2, 3, 6, 6)
    x = b.conv("x", 3, 4)
    gate = b.add(Sigmoid(), b.add(ReduceMean((1,)), x))
    after = same(b.graph(pointwise(b, b.add(Mul(), x, gate), 4, 5)), lay_channels_last)
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


def random_graph(data, channels: int = 4, size: int = 8) -> Graph | None:
    """Returns a graph of images of ``channels``, or twice as many, ``size`` x ``size`` each."""
    few, border = channels, (1, 1, 1, 1)
    b = Builder(data.draw(st.integers(1, 2)), few, size, size, seed=data.draw(st.integers(0, 99)))
    widths = {"x": few}
    steps = (
        "conv", "conv", "point", "norm", "relu", "swish", "add", "gate", "concat", "half", "pool",
        "mean", "constant", "turn",
    )  # fmt: skip
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=12)):
        names = list(widths)
        x = data.draw(st.sampled_from(names[-4:]))
        made = c = widths[x]
        match step:
            case "conv":
                made = data.draw(st.sampled_from([few, 2 * few]))
                groups = data.draw(st.sampled_from([1, 2, few]))
                y = b.conv(x, c, made, padding=border, groups=groups)
            case "point":
                y, made = pointwise(b, x, c, few), few
            case "norm":
                y = b.norm(x, c)
            case "relu" | "swish":
                y = b.add(Relu() if step == "relu" else Swish(), x)
            case "add":
                alike = [name for name in names if widths[name] == c]
                y = b.add(Add(), x, data.draw(st.sampled_from(alike)))
            case "gate":
                gate = b.add(Sigmoid(), pointwise(b, b.add(ReduceMean((2, 3)), x), c, c))
                y = b.add(Mul(), x, gate)
            case "concat" if c == few:
                other = data.draw(st.sampled_from([name for name in names if widths[name] == few]))
                y, made = b.add(Concat(1), x, other), 2 * few
            case "half":
                y, made = b.add(Slice((0,), (few,), (1,), (1,)), x), few
            case "pool":
                op = data.draw(st.sampled_from([MaxPool2d, AveragePool2d]))
                y = b.add(op((3, 3), (1, 1), border), x)
            case "mean":
                y = b.add(Mul(), x, b.add(ReduceMean((1, 2)), x))
            case "constant":
                y = b.add(Mul(), x, b.constant(c, 1, 1))
            case "turn":
                y = b.add(Transpose((0, 1, 3, 2)), x)
            case _:
                continue
        widths[y] = made
    names = list(widths)[1:]
    if not names:
        return None
    outputs = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    return b.graph(*outputs)


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_random_graphs(data):
    graph = random_graph(data)
    if graph is not None:
        same(fuse(passes.simplify(graph)), lay_channels_last)


def test_every_function_of_an_epilogue_is_a_kernel_s():
    for kind in passes.EPILOGUES["conv2d_nhwc"]:
        assert hasattr(_cpu.UnaryFunction, KINDS[kind]().function), kind


def test_batch_norm_by_its_last_dimension(rng):
    x = rng.standard_normal((2, 3, 4, 5))
    parameters = rng.uniform(0.5, 2, (4, 3))
    wanted = BatchNorm().reference(x, *parameters)
    found = BatchNorm(axis=-1).reference(np.moveaxis(x, 1, -1), *parameters)
    np.testing.assert_array_equal(np.moveaxis(found, -1, 1), wanted)


# -- engines -----------------------------------------------------------------------------------------


def as_float32(graph: Graph) -> Graph:
    constants = {name: array.astype(np.float32) for name, array in graph.constants.items()}
    inputs = tuple(Value(value.name, value.shape) for value in graph.inputs)
    return Graph("test", inputs, graph.outputs, graph.nodes, constants, ("x",))


def check_engine(graph: Graph, threads: int = 2) -> Engine:
    """Asserts that an engine computes what the reference does, for two batches; returns it."""
    engine = Engine(as_float32(graph), device="cpu", threads=threads)
    for batch in (graph.inputs[0].shape[0], 3):
        images = np.random.default_rng(batch).standard_normal((batch, *graph.inputs[0].shape[1:]))
        images = images.astype(np.float32)
        wanted = reference(engine.network.graph(batch), {"x": images})
        for name, array in engine.run({"x": images}).items():
            bound = tolerances.NETWORK_LOGITS * np.abs(wanted[name]).max()
            tolerances.assert_close(array, wanted[name], bound, output=name)
    return engine


def test_a_densely_connected_network(rng):
    b = Builder(1, 3, 24, 24)
    x = b.add(MaxPool2d((3, 3), (2, 2), (1, 1, 1, 1)), b.add(Relu(), b.conv("x", 3, 16)))
    width = 16
    for count in (3, 2):
        features = [x]
        for _ in range(count):
            joined = b.add(Concat(1), *features) if len(features) > 1 else features[0]
            y = pointwise(b, b.add(Relu(), b.norm(joined, width)), width, 32)
            y = b.conv(b.add(Relu(), b.norm(y, 32)), 32, 16, padding=(1, 1, 1, 1))
            features.append(y)
            width += 16
        x = b.add(Relu(), b.norm(b.add(Concat(1), *features), width))
        x, width = (
            b.add(AveragePool2d((2, 2), (2, 2)), pointwise(b, x, width, width // 2)),
            width // 2,
        )
    engine = check_engine(b.graph(b.add(ReduceMean((2, 3), keepdims=False), x)))
    steps = engine.plan(1, np.dtype(np.float32)).steps
    assert {step.kind for step in steps} <= {
        "conv",
        "pool",
        "average_pool2d",
        "concat",
        "reduce_mean",
        "batch_norm",
        "relu",
    }
    kernels = {step.kernel for step in steps if step.kind == "conv"}
    assert kernels == {"channels_last", "winograd"}
    engine.close()


def tiles(side, reads, activation=None):
    """Returns each layer's method in a network of 3x3 convolutions, of which each reads the named one."""
    op = Conv2dNhwc(padding=(1, 1, 1, 1), activation=activation)
    nodes = tuple(Node(name, op, (source, "w"), (name,)) for name, source in reads.items())
    ends = tuple(name for name in reads if name not in reads.values())
    weights = {"w": np.zeros((32, 32, 3, 3), np.float32)}
    graph = Graph("net", (Value("x", (1, side, side, 32), "float32"),), ends, nodes, weights)
    graph = passes.mark_stem(graph)
    return [channels_last.method(node, graph).name for node in graph.nodes]


def test_tiles_of_a_stem_are_small():
    """What all paths of a network with branches go through has tiles of 2x2."""
    assert tiles(40, {"a": "x", "b": "a", "c": "b", "d": "b"}) == [
        "winograd2", "winograd4", "winograd4", "winograd4",
    ]  # fmt: skip
    assert tiles(40, {"a": "x", "b": "a", "c": "b"}) == ["winograd4"] * 3
    assert tiles(7, {"a": "x", "b": "a", "c": "b", "d": "b"})[:2] == ["winograd2", "winograd4"]


@pytest.mark.parametrize(
    ("side", "method"),
    [(3, "direct"), (4, "winograd2"), (6, "winograd2"), (7, "winograd4"), (8, "winograd4"),
     (10, "winograd2"), (12, "winograd4"), (13, "winograd2"), (14, "winograd4"), (17, "winograd4")],
)  # fmt: skip
def test_tiles_of_small_images(side, method):
    """Tiles of 4x4 of which a third would be border have images of 14 rows and more."""
    assert tiles(side, {"a": "x"}) == [method]


def test_tiles_before_a_tanh_are_small():
    """What it passes on is the small sums of large products."""
    assert tiles(28, {"a": "x"}, activation=Tanh()) == ["winograd2"]
    assert tiles(28, {"a": "x"}, activation=Relu()) == ["winograd4"]


def test_tiles_are_the_same_for_every_batch():
    """Also where the images of a pass are taken apart: a part of a network has another first branch."""
    same_size = {"padding": (1, 1, 1, 1)}
    b = Builder(1, 3, 32, 32)
    x = b.add(Relu(), b.conv("x", 3, 16, **same_size))
    for channels, filters, stride in ((16, 16, 1), (16, 16, 1), (16, 128, 2), (128, 128, 1)):
        if stride > 1:
            x = b.add(Relu(), b.conv(x, channels, filters, stride=(2, 2), **same_size))
        y = b.add(Relu(), b.conv(x, filters, filters, **same_size))
        x = b.add(Relu(), b.add(Add(), x, b.conv(y, filters, filters, **same_size)))
    graph = as_float32(b.graph(b.add(ReduceMean((2, 3), keepdims=False), x)))
    with Engine(graph, device="cpu", threads=1) as engine:
        program = engine._plans.open()
        one = program.placed(1, False)
        count = per_image.cut(one.graph, program.placed(8, False).graph)
        assert 0 < count < len(one.graph.nodes)
        for part in per_image.halves(one, count):
            for node in part.graph.nodes:
                if isinstance(node.op, Conv2dNhwc):
                    whole = channels_last.method(node, one.graph)
                    assert channels_last.method(node, part.graph) == whole


@pytest.mark.parametrize("function", [Relu(), Swish()], ids=lambda op: op.kind)
def test_an_inverted_residual_network(function):
    b = Builder(1, 3, 16, 16)
    x = b.add(function, b.conv("x", 3, 16, padding=(1, 1, 1, 1), stride=(2, 2)))
    for _ in range(2):
        y = b.add(function, pointwise(b, x, 16, 24))
        y = b.add(function, b.conv(y, 24, 24, groups=24, padding=(1, 1, 1, 1)))
        pooled = pointwise(b, b.add(ReduceMean((2, 3)), y), 24, 8)
        gate = b.add(HardSigmoid(), pointwise(b, b.add(Relu(), pooled), 8, 24))
        y = pointwise(b, b.add(Mul(), y, gate), 24, 16)
        x = b.add(Add(), y, x)
    engine = check_engine(b.graph(b.add(Reshape((0, -1)), x)))
    steps = engine.plan(1, np.dtype(np.float32)).steps
    assert {step.kind for step in steps} == {"conv", "transpose"}
    assert [step.kernel for step in steps].count("expand_depthwise") == 2
    again = pickle.loads(pickle.dumps(engine))
    images = np.ones((2, 3, 16, 16), np.float32)
    np.testing.assert_array_equal(again.predict(images), engine.predict(images))
    engine.close()


def test_variants_by_name_keep_their_kernels():
    b = Builder(1, 3, 16, 16)
    y = b.add(Reshape((0, -1)), b.conv(b.add(Relu(), b.conv("x", 3, 16)), 16, 16))
    for variant in ("if", "pad", "blocked"):
        with Engine(as_float32(b.graph(y)), device="cpu", variant=variant) as engine:
            steps = engine.plan(1, np.dtype(np.float32)).steps
            assert {step.kernel for step in steps if step.kind == "conv"} == {variant}
    with Engine(as_float32(b.graph(y)), device="cpu") as engine:
        engine.predict(np.zeros((1, 3, 16, 16), np.float32))
        packed = dict(engine._plans.open()._prepared)
        engine.predict(np.zeros((4, 3, 16, 16), np.float32))
        assert dict(engine._plans.open()._prepared) == packed  # once for all batches


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_engines_of_random_graphs(data):
    graph = random_graph(data, channels=16, size=14)
    if graph is not None:
        check_engine(graph, data.draw(st.integers(1, 3))).close()


@pytest.mark.parametrize("flat", [True, False])
def test_linear_layers_read_images_as_they_lie_on_cuda(flat):
    b = Builder(2, 3, 6, 5)
    x = b.add(Relu(), b.conv("x", 3, 4))
    x = b.add(Reshape((2, 48)), x) if flat else x
    y = b.add(Linear(Relu()), x, b.constant(7, 48), b.constant(7))
    graph = b.graph(b.add(Linear(), y, b.constant(3, 7)))
    after = same(graph, on_cuda)
    assert kinds(after) == ["conv2d_nhwc", "reshape", "linear", "linear"]
    assert after.nodes[2].op.activation == Relu()
    assert "transpose" in kinds(same(graph, lay_channels_last))


@pytest.mark.parametrize("rows", [(2, 48), (4, 24)])
def test_images_that_others_read_and_rows_that_are_no_images_are_turned(rows):
    b = Builder(2, 3, 6, 5)
    flat = b.add(Reshape(rows), b.conv("x", 3, 4))
    outputs = [b.add(Linear(), flat, b.constant(7, rows[1]))]
    if rows == (2, 48):
        outputs.append(b.add(Softmax(-1), flat))
    after = same(b.graph(*outputs), on_cuda)
    assert kinds(after)[:3] == ["conv2d_nhwc", "transpose", "reshape"]


def test_images_without_a_place_are_all_padding(rng):
    constants = {
        "w": rng.standard_normal((6, 8, 3, 2)).astype(np.float32),
        "b": rng.standard_normal(6).astype(np.float32),
    }
    nodes = (
        Node("cut", Slice((0,), (0,), (3,), (1,)), ("x",), ("nothing",)),
        Node("conv", Conv2d(padding=(1, 1, 1, 1)), ("nothing", "w", "b"), ("y",)),
    )
    graph = Graph("test", (Value("x", (2, 8, 3, 4)),), ("y",), nodes, constants)
    with Engine(graph, device="cpu", threads=1) as e:
        found = e.run({"x": rng.standard_normal((2, 8, 3, 4)).astype(np.float32)})["y"]
    assert found.shape == (2, 6, 3, 1)
    assert (found == constants["b"].reshape(-1, 1, 1)).all()


@pytest.mark.parametrize(("batch", "side", "kept"), [(1, 3, 2), (3000, 3, 0), (3000, 1, 1)])
def test_in_tf32_short_first_convolutions_keep_float32(batch, side, kept):
    """Of a seventh of all products, those that are short, and a first that mostly moves: see FIRST_PART."""
    b = Builder(batch, 16, 124, 124)
    x = "x"
    for _ in range(24):
        x = b.conv(x, 16, 16, side)
    graph = lay_channels_last(b.graph(x), "cuda")
    for dtype, first in (("tf32", "float32"), ("float16", "float16"), ("float32", "float32")):
        rounded = passes.set_compute_dtype(graph, dtype)
        found = [node.op.compute_dtype for node in rounded.nodes if node.op.kind == "conv2d_nhwc"]
        assert found == [first] * kept + [dtype] * (24 - kept)


def test_a_planar_convolution_reads_no_columns(rng):
    """Its images' last dimension is no channels, so it cannot be that of a part of a concatenation."""
    constants = {
        "w0": rng.standard_normal((8, 4, 1, 1)).astype(np.float32),
        "w1": rng.standard_normal((6, 3, 1, 1)).astype(np.float32),
    }
    nodes = (
        Node("conv", Conv2d(), ("x", "w0"), ("a",)),
        Node("join", Concat(1), ("a", "x"), ("b",)),
        Node("turn", Transpose((0, 2, 3, 1)), ("a",), ("t",)),
        Node("planar", Conv2d(), ("t", "w1"), ("z",)),
        Node("relu", Relu(), ("b",), ("y",)),
    )
    graph = Graph("test", (Value("x", (1, 4, 3, 5)),), ("y", "z"), nodes, constants)
    images = {"x": rng.standard_normal((1, 4, 3, 5)).astype(np.float32)}
    wanted = reference(graph, images)
    with Engine(graph, device="cpu", threads=1) as e:
        found = e.run(images)
    for name in ("y", "z"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["auto", "if"])
@pytest.mark.parametrize(
    ("channels", "groups", "options"),
    [
        (40, 1, {"strides": [2, 1], "pads": [1, 0, 2, 0]}),
        (40, 1, {"dilations": [2, 3]}),
        (24, 24, {"pads": [2, 0, 2, 0]}),
        (3, 1, {"strides": [2, 2]}),
    ],
)
def test_a_column_of_positions_is_a_row(rng, variant, channels, groups, options):
    """A convolution along the height of images of one column has the bits of one along the width."""
    x = rng.standard_normal((2, channels, 61, 1)).astype(np.float32)
    weight = rng.standard_normal((48, channels // groups, 5, 1)).astype(np.float32)
    found = []
    for turn in (False, True):
        axes = (0, 1, 3, 2) if turn else (0, 1, 2, 3)
        own = {key: _turned(value) if turn else value for key, value in options.items()}
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["c"], group=groups, **own),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("Conv", ["r", "w1"], ["y"]),
        ]
        constants = {
            "w": weight.transpose(axes),
            "w1": np.eye(48, dtype=np.float32)[..., None, None],
        }
        given = np.ascontiguousarray(x.transpose(axes))
        shape = ["n", *given.shape[1:]]
        proto = model(nodes, [tensor("x", shape)], [tensor("y", None)], constants)
        with Engine(proto, device="cpu", variant=variant) as engine:
            found.append(engine.predict(given).transpose(axes))
            assert engine.check(given).passed
    np.testing.assert_array_equal(*found)


def test_only_kernels_of_one_column_read_columns_as_rows():
    def outputs(width, kernel, padding):
        op = Conv2dNhwc(stride=(2, 1), padding=padding)
        x, w = Value("x", (2, 61, width, 40)), Value("w", (48, 40, *kernel))
        shape = channels_last.shape_of(Node("c", op, ("x", "w"), ("y",)), x, w)
        return shape.out_h, shape.out_w

    assert outputs(1, (5, 1), (1, 0, 2, 0)) == (1, 30)
    assert outputs(3, (5, 1), (1, 0, 2, 0)) == (30, 3)
    assert outputs(1, (5, 1), (1, 1, 2, 1)) == (30, 3)
    assert outputs(1, (5, 3), (1, 1, 2, 1)) == (30, 1)


def _turned(sizes):
    """Returns strides, dilations or pads with height and width exchanged."""
    return [size for first in range(0, len(sizes), 2) for size in sizes[first : first + 2][::-1]]
