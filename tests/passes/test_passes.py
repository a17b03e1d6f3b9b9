"""Rewrites: the reference's outputs are the same before and after, and what should go is gone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import fuse, lay_channels_last
from tolerances import assert_same_function

from cnn_engine.graph import passes
from cnn_engine.graph.dims import Sizes
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.graph.passes.fuse.patterns import CONV2D_SUM
from cnn_engine.graph.reference import reference
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.binary import Add, Div, Mul, Prelu, Sub
from cnn_engine.operators.cast import Cast
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.conv_transpose2d import ConvTranspose2d
from cnn_engine.operators.copy import Copy
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.norm import BatchNorm
from cnn_engine.operators.pad import Pad
from cnn_engine.operators.pad2d import Pad2d
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.shaping import Concat, DepthToSpace, Reshape, Slice, Transpose
from cnn_engine.operators.unary import (
    Clip,
    Erf,
    Gelu,
    HardSigmoid,
    HardSwish,
    LeakyRelu,
    Relu,
    Sigmoid,
    Swish,
)


class Builder:
    """Writes a graph down in order, in float64, so that a rewrite's own rounding is all that can differ."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.inputs = (Value("x", shape, "float64"),)
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}

    def constant(self, *shape: int, low: float = -1.0, high: float = 1.0) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = self.rng.uniform(low, high, shape)
        return name

    def number(self, value: float) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def add(self, op, *inputs: str) -> str:
        name = f"{op.kind}{len(self.nodes)}"
        self.nodes.append(Node(name, op, inputs, (f"{name}.out",)))
        return f"{name}.out"

    def conv(self, x: str, channels: int, filters: int, side: int = 3, **attributes) -> str:
        groups = attributes.get("groups", 1)
        weight = self.constant(filters, channels // groups, side, side)
        return self.add(Conv2d(**attributes), x, weight, self.constant(filters))

    def norm(self, x: str, channels: int) -> str:
        variance = self.constant(channels, low=0.5, high=2.0)
        parameters = [self.constant(channels) for _ in range(3)]
        return self.add(BatchNorm(), x, *parameters, variance)

    def graph(self, *outputs: str) -> Graph:
        return Graph("test", self.inputs, outputs, tuple(self.nodes), self.constants)

    def network(self, output: str, scale: float = 1.0) -> Graph:
        """Returns what was written for any batch of ``images``, in float32, its constants times ``scale``."""
        nodes = tuple(
            replace(node, inputs=tuple("images" if name == "x" else name for name in node.inputs))
            for node in self.nodes
        )
        constants = {
            name: array.astype(np.float32) * np.float32(scale)
            for name, array in self.constants.items()
        }
        inputs = (Value("images", self.inputs[0].shape),)
        return Graph("small", inputs, (output,), nodes, constants, batched=("images",))


def same(before: Graph, rewrite) -> Graph:
    """Returns the graph after ``rewrite``, which computes the same and says what it did."""
    after = rewrite(before)
    x = before.inputs[0]
    fed = {"x": np.random.default_rng(1).uniform(-2, 2, x.shape)}
    wanted, found = reference(before, fed), reference(after, fed)
    assert after.outputs == before.outputs
    for name in before.outputs:
        assert after.values[name].shape == before.values[name].shape
        assert_same_function(found[name], wanted[name])
    gone = {node.name for node in before.nodes} - {node.name for node in after.nodes}
    assert {note.what for note in after.notes} >= gone
    return after


def kinds(graph: Graph) -> list[str]:
    return [node.op.kind for node in graph.nodes]


# -- batch norm and its like -------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_after_a_convolution(groups):
    b = Builder(2, 4, 6, 6)
    y = b.norm(b.conv("x", 4, 6, groups=groups, padding=(1, 0, 2, 1)), 6)
    after = same(b.graph(y), passes.fold_affine_after)
    assert kinds(after) == ["conv2d"]
    assert after.nodes[0].covers == ("conv2d0", "batch_norm1")
    assert after.notes[0].into == "conv2d0"


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_after_a_transposed_convolution(groups):
    b = Builder(2, 4, 5, 5)
    weight = b.constant(4, 3, 3, 3)
    y = b.norm(b.add(ConvTranspose2d((2, 2), groups=groups), "x", weight), 3 * groups)
    assert kinds(same(b.graph(y), passes.fold_affine_after)) == ["conv_transpose2d"]


def test_batch_norm_after_a_linear_layer():
    b = Builder(3, 4)
    y = b.norm(b.add(Linear(), "x", b.constant(5, 4)), 5)
    assert kinds(same(b.graph(y), passes.fold_affine_after)) == ["linear"]


def parts(b: Builder, *channels: int, axis: int = 1) -> str:
    return b.add(Concat(axis), *(b.conv("x", 4, count) for count in channels))


def test_batch_norm_and_a_function_after_convolutions_together():
    """Each gets its channels' numbers: the concatenation gives back what the others made."""
    b = Builder(2, 4, 6, 6)
    y = b.add(Relu(), b.add(Mul(), b.norm(parts(b, 2, 5, 1), 8), b.constant(8, 1, 1)))
    before = b.graph(y)
    after = same(before, lambda graph: fuse(passes.simplify(graph)))
    assert kinds(after) == ["conv2d"] * 3 + ["concat"]
    assert [node.op.activation for node in after.nodes[:3]] == [Relu()] * 3
    covered = [name for node in after.nodes for name in node.covers or (node.name,)]
    assert sorted(covered) == sorted(node.name for node in before.nodes)
    assert {note.into for note in after.notes} == {after.nodes[3].name}


def test_what_is_not_a_convolutions_alone_stays_behind_the_concatenation():
    graphs = []
    b = Builder(2, 4, 6, 6)
    graphs.append(b.graph(b.add(Relu(), b.norm(b.add(Concat(1), b.conv("x", 4, 4, 1), "x"), 8))))
    b = Builder(2, 4, 6, 6)
    conv = b.conv("x", 4, 4)
    graphs.append(b.graph(b.add(Relu(), b.norm(b.add(Concat(1), conv, conv), 8))))
    b = Builder(2, 4, 6, 6)
    conv = b.conv("x", 4, 4)
    y = b.add(Concat(1), conv, b.conv("x", 4, 4))
    graphs.append(b.graph(b.add(Relu(), b.norm(y, 8)), conv))
    b = Builder(2, 4, 6, 6)
    y = parts(b, 4, 4)
    graphs.append(b.graph(b.add(Relu(), b.norm(y, 8)), y))
    for graph in graphs:
        after = same(graph, lambda graph: fuse(passes.simplify(graph)))
        assert kinds(after)[-3:] == ["concat", "batch_norm", "relu"]


def test_rows_of_convolutions_are_not_channels():
    """A function is the same anywhere, numbers a channel are not those of a concatenation's parts."""
    b = Builder(2, 4, 6, 6)
    after = same(
        b.graph(b.add(Relu(), b.norm(parts(b, 3, 3, axis=2), 3))),
        lambda graph: fuse(passes.simplify(graph)),
    )
    assert kinds(after) == ["conv2d", "conv2d", "concat", "batch_norm", "relu"]
    b = Builder(2, 4, 6, 6)
    after = same(b.graph(b.add(Relu(), parts(b, 3, 3, axis=2))), fuse)
    assert kinds(after) == ["conv2d", "conv2d", "concat"]


@pytest.mark.parametrize("op", [Add(), Sub(), Mul()])
@pytest.mark.parametrize("shape", [(), (6, 1, 1), (1, 6, 1, 1)])
def test_numbers_a_channel_after_a_convolution(op, shape):
    b = Builder(2, 4, 6, 6)
    y = b.add(op, b.conv("x", 4, 6), b.constant(*shape))
    assert kinds(same(b.graph(y), passes.fold_affine_after)) == ["conv2d"]


@pytest.mark.parametrize("shape", [(6, 4, 1), (2, 1, 1, 1), (4,)])
def test_numbers_that_are_not_a_channels_stay(shape):
    b = Builder(2, 4, 6, 6)
    y = b.add(Mul(), b.conv("x", 4, 6), b.constant(*shape))
    assert kinds(same(b.graph(y), passes.fold_affine_after)) == ["conv2d", "mul"]


def test_a_constant_less_the_convolution_stays():
    b = Builder(2, 4, 6, 6)
    y = b.add(Sub(), b.constant(6, 1, 1), b.conv("x", 4, 6))
    assert kinds(same(b.graph(y), passes.fold_affine_after)) == ["conv2d", "sub"]


def test_a_convolution_that_others_read_keeps_its_weights():
    b = Builder(2, 4, 6, 6)
    conv = b.conv("x", 4, 6)
    before = b.graph(b.norm(conv, 6), conv)
    assert passes.fold_affine_after(before) is before
    assert passes.simplify(before).nodes == before.nodes


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_before_a_convolution_without_padding(groups):
    b = Builder(2, 4, 6, 6)
    y = b.conv(b.norm("x", 4), 4, 6, groups=groups)
    assert kinds(same(b.graph(y), passes.fold_affine_before)) == ["conv2d"]


def test_a_shift_before_a_convolution_with_padding_stays():
    b = Builder(2, 4, 6, 6)
    y = b.conv(b.norm("x", 4), 4, 6, padding=(1, 1, 1, 1))
    assert kinds(same(b.graph(y), passes.fold_affine_before)) == ["batch_norm", "conv2d"]


def test_a_scale_before_a_convolution_with_padding_folds():
    b = Builder(2, 4, 6, 6)
    y = b.conv(b.add(Mul(), "x", b.constant(4, 1, 1)), 4, 6, padding=(1, 1, 1, 1))
    assert kinds(same(b.graph(y), passes.fold_affine_before)) == ["conv2d"]


# -- constants and identities ------------------------------------------------------------------------


def test_constants_fold_and_what_nothing_needs_goes():
    b = Builder(2, 4)
    c = b.add(Add(), b.constant(4), b.constant(4))
    b.add(Mul(), "x", c)
    y = b.add(Add(), "x", b.add(Mul(), c, c))
    after = same(b.graph(y), passes.simplify)
    assert kinds(after) == ["add"]
    assert len(after.constants) == 1


def test_large_results_are_not_folded():
    b = Builder(1, 1)
    wide = b.add(Add(), b.constant(2**13, 1), b.constant(1, 2**13))
    before = b.graph(b.add(Add(), "x", wide))
    assert passes.fold_constants(before) is before


@pytest.mark.parametrize(
    "op",
    [
        Copy(), Reshape((2, 4, 6, 6)), Reshape((0, 0, -1, 6)), Transpose((0, 1, 2, 3)), Cast("float64"),
        Pad((0,) * 8), Pad2d((0, 0, 0, 0)), Slice((0,), (99,), (1,), (1,)), Concat(1),
    ],
    ids=lambda op: op.kind,
)  # fmt: skip
def test_identities_go(op):
    b = Builder(2, 4, 6, 6)
    y = b.add(Relu(), b.add(op, b.add(Relu(), "x")))
    assert kinds(same(b.graph(y), passes.drop_identities)) == ["relu", "relu"]


@pytest.mark.parametrize(("op", "shape", "value", "goes"), [
    (Mul(), (1,), 1, True), (Div(), (4, 1, 1), 1, True), (Mul(), (1,), 2, False),
    (Mul(), (3, 1, 1, 1, 1), 1, False),
])  # fmt: skip
def test_products_with_ones_go(op, shape, value, goes):
    b = Builder(2, 4, 6, 6)
    b.constants["c"] = np.full(shape, float(value))
    before = b.graph(b.add(Relu(), b.add(op, "x", "c")))
    wanted = ["relu"] if goes else [op.kind, "relu"]
    assert kinds(same(before, passes.drop_identities)) == wanted


@pytest.mark.parametrize(
    ("shape", "perm", "kind"),
    [((2, 6, 1, 1), (0, 2, 3, 1), "reshape"), ((1, 4, 1, 6), (1, 0, 3, 2), "reshape"),
     ((2, 6, 1, 1), (1, 0, 2, 3), "transpose"), ((1, 4, 5, 6), (0, 2, 3, 1), "transpose")],
)  # fmt: skip
def test_transposes_of_ones_are_reshapes(shape, perm, kind):
    b = Builder(*shape)
    y = b.add(Transpose(perm), b.add(Relu(), "x"))
    assert kinds(same(b.graph(y), passes.reshape_ones)) == ["relu", kind]


def test_a_slice_that_turns_round_stays():
    b = Builder(2, 4)
    before = b.graph(b.add(Slice((-1,), (-9,), (1,), (-1,)), "x"))
    assert passes.drop_identities(before) is before


def test_identities_at_the_ends_keep_the_names():
    b = Builder(2, 4)
    first = b.add(Copy(), "x")
    y = b.add(Copy(), b.add(Copy(), b.add(Relu(), first)))
    after = same(b.graph(y), passes.simplify)
    assert kinds(after) == ["relu"]
    assert after.nodes[0].outputs == (y,)


def test_an_input_that_is_an_output_is_copied():
    b = Builder(2, 4)
    assert kinds(same(b.graph(b.add(Copy(), "x")), passes.simplify)) == ["copy"]


def test_two_outputs_of_one_tensor_stay_two():
    b = Builder(2, 4)
    y = b.add(Relu(), "x")
    assert kinds(same(b.graph(b.add(Copy(), y), b.add(Copy(), y)), passes.simplify)) == [
        "relu",
        "copy",
    ]


def test_shapes_in_a_row_merge():
    b = Builder(2, 3, 4)
    y = b.add(Reshape((2, 12)), b.add(Reshape((6, 4)), "x"))
    z = b.add(Transpose((1, 0)), b.add(Transpose((1, 0)), y))
    assert kinds(same(b.graph(z), passes.simplify)) == ["reshape"]


# -- padding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [Pad2d((1, 2, 0, 1)), Pad((0, 0, 1, 2, 0, 0, 0, 1))])
@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (1, 0, 1, 2)])
def test_zeros_become_a_convolutions_padding(pad, padding):
    b = Builder(2, 4, 6, 6)
    y = b.conv(b.add(pad, "x"), 4, 6, padding=padding)
    assert kinds(same(b.graph(y), passes.fold_padding)) == ["conv2d"]


@pytest.mark.parametrize(
    ("padding", "counts", "left"),
    [((0, 0, 0, 0), False, 1), ((1, 1, 1, 1), True, 1), ((1, 1, 1, 1), False, 2)],
)
def test_zeros_become_an_average_pools_padding_where_they_count(padding, counts, left):
    b = Builder(2, 4, 6, 6)
    pool = AveragePool2d((3, 3), (2, 2), padding, extra=(1, 0), count_include_pad=counts)
    y = b.add(pool, b.add(Pad2d((1, 1, 0, 2)), "x"))
    assert len(same(b.graph(y), passes.fold_padding).nodes) == left


@pytest.mark.parametrize(
    "pad",
    [
        Pad((0, 0, 1, 1, 0, 0, 1, 1), value=1.0), Pad((0, 0, 1, 1, 0, 0, 1, 1), "reflect"),
        Pad((0, 0, -1, 0, 0, 0, 0, 0)), Pad((0, 1, 0, 0, 0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_other_pads_stay(pad):
    b = Builder(2, 3, 6, 6)
    channels = 3 + pad.pads[1]
    before = b.graph(b.conv(b.add(pad, "x"), channels, 6))
    assert passes.fold_padding(before) is before


def test_zeros_before_a_max_pool_stay():
    b = Builder(2, 4, 6, 6)
    before = b.graph(b.add(MaxPool2d((3, 3), (2, 2)), b.add(Pad2d((1, 1, 1, 1)), "x")))
    assert passes.fold_padding(before) is before


# -- functions ---------------------------------------------------------------------------------------


def test_swish_and_hard_swish():
    b = Builder(2, 4)
    y = b.add(Mul(), "x", b.add(Sigmoid(), "x"))
    z = b.add(Mul(), b.add(HardSigmoid(1 / 6, 0.5), y), y)
    after = same(b.graph(z), passes.recognise_activations)
    assert [node.op for node in after.nodes] == [Swish(), HardSwish()]


@pytest.mark.parametrize("shape", [(1,), (4, 1, 1), ()])
def test_a_prelu_of_one_slope_is_a_leaky_relu(shape):
    b = Builder(2, 4, 3, 3)
    before = b.graph(b.add(Prelu(), "x", b.number(np.full(shape, 0.25))))
    after = same(before, passes.recognise_activations)
    assert [node.op for node in after.nodes] == [LeakyRelu(0.25)]


@pytest.mark.parametrize(
    "slopes", [[0.25, 0.25, 0.25, 0.5], [np.nan] * 4, [0.25, 0.25, np.nan, 0.25]]
)
def test_a_prelu_of_several_slopes_stays(slopes):
    b = Builder(2, 4, 3, 3)
    before = b.graph(b.add(Prelu(), "x", b.number(np.reshape(slopes, (4, 1, 1)))))
    assert passes.recognise_activations(before) is before


def test_a_sixth_may_be_float32s():
    b = Builder(2, 4)
    sixth = float(np.float32(1 / 6))
    before = b.graph(b.add(Mul(), b.add(HardSigmoid(sixth, 0.5), "x"), "x"))
    assert kinds(passes.recognise_activations(before)) == ["hard_swish"]


def test_other_gates_stay():
    b = Builder(2, 4)
    y = b.add(Mul(), "x", b.add(HardSigmoid(0.2, 0.5), "x"))
    z = b.add(Mul(), y, b.add(Sigmoid(), "x"))
    before = b.graph(z)
    assert passes.recognise_activations(before) is before


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("divide", [True, False])
def test_gelu_in_the_orders_it_is_written_in(order, divide):
    b = Builder(2, 4)
    root = b.number(2**0.5 if divide else 2**-0.5)
    error = b.add(Erf(), b.add(Div() if divide else Mul(), "x", root))
    one_more = b.add(Add(), error, b.number(1.0))
    half = b.number(0.5)
    if order == 0:
        y = b.add(Mul(), b.add(Mul(), "x", one_more), half)
    elif order == 1:
        y = b.add(Mul(), b.add(Mul(), half, "x"), one_more)
    else:
        y = b.add(Mul(), "x", b.add(Mul(), half, one_more))
    after = same(b.graph(y), passes.recognise_activations)
    assert [node.op for node in after.nodes] == [Gelu()]
    assert len(after.nodes[0].covers) == 5


def test_a_gelu_whose_parts_are_read_stays():
    b = Builder(2, 4)
    error = b.add(Erf(), b.add(Div(), "x", b.number(2**0.5)))
    y = b.add(Mul(), b.add(Mul(), "x", b.add(Add(), error, b.number(1.0))), b.number(0.5))
    before = b.graph(y, error)
    assert passes.recognise_activations(before) is before


# -- epilogues ---------------------------------------------------------------------------------------


def block(b: Builder, x: str) -> str:
    """A residual block with a convolution on its shortcut too."""
    a = b.add(Relu(), b.norm(b.conv(x, 4, 4, padding=(1, 1, 1, 1)), 4))
    a = b.norm(b.conv(a, 4, 4, padding=(1, 1, 1, 1)), 4)
    shortcut = b.norm(b.conv(x, 4, 4, padding=(1, 1, 1, 1)), 4)
    return b.add(Relu(), b.add(Add(), a, shortcut))


def test_a_residual_block_is_its_convolutions():
    b = Builder(2, 4, 6, 6)
    before = b.graph(b.add(Clip(0.0, 6.0), block(b, block(b, "x"))))
    after = same(before, lambda graph: fuse(passes.simplify(graph)))
    assert kinds(after) == ["conv2d"] * 6 + ["clip"]
    assert [node.op.activation for node in after.nodes[:3]] == [Relu(), None, Relu()]
    assert [len(node.inputs) for node in after.nodes[:3]] == [3, 3, 4]
    covered = [name for node in after.nodes for name in node.covers or (node.name,)]
    assert sorted(covered) == sorted(node.name for node in before.nodes)


def test_what_no_kernel_applies_stays():
    b = Builder(2, 4, 6, 6)
    before = b.graph(b.add(Sigmoid(), b.conv("x", 4, 4)))
    assert passes.fuse_activations(before) is before
    after = same(before, lambda g: passes.fuse_activations(g, {"conv2d": ("sigmoid",)}))
    assert after.nodes[0].op.activation == Sigmoid()


def test_functions_are_applied_before_elements_move():
    """Pixel shuffles, crops and orders of dimensions: a convolution stores what the function makes."""
    b = Builder(2, 8, 6, 6)
    y = b.add(DepthToSpace(2), b.conv("x", 8, 8))
    y = b.add(Slice((1,), (6,), (2,), (1,)), b.add(Transpose((0, 2, 3, 1)), y))
    before = b.graph(b.add(Relu(), y))
    after = same(before, passes.fuse_activations)
    assert kinds(after) == ["conv2d", "depth_to_space", "transpose", "slice"]
    shared = replace(before, outputs=(*before.outputs, y))
    assert passes.fuse_activations(shared) is shared, "what is read elsewhere stays as it is"


def test_additions_that_broadcast_stay():
    b = Builder(2, 4, 6, 6)
    gate = b.add(AveragePool2d((4, 4), (4, 4)), b.conv("x", 4, 4))
    before = b.graph(b.add(Add(), b.conv("x", 4, 4), gate))
    assert passes.fuse_residuals(before) is before


def test_a_tensor_twice_is_no_residual():
    b = Builder(2, 4, 6, 6)
    y = b.conv("x", 4, 4)
    before = b.graph(b.add(Add(), y, y))
    assert passes.fuse_residuals(before) is before


# -- what all rewrites have in common ----------------------------------------------------------------


@pytest.mark.parametrize("order", ["aba", "abb", "abab", "aab"])
def test_a_concatenation_that_repeats_a_convolution(order):
    """What it reads twice has another reader than the pair that it would be part of."""
    b = Builder(1, 8, 4, 4)
    made = {letter: b.conv("x", 8, 8, side=1) for letter in "ab"}
    before = lay_channels_last(b.graph(b.add(Concat(1), *map(made.get, order))), "cuda", 8)
    same(before, passes.fuse_conv_pairs)


@pytest.mark.parametrize("shift", [True, False])
def test_convolutions_whose_bias_is_computed_are_no_pair(shift):
    b = Builder(1, 8, 4, 4)
    bias = b.add(ReduceMean((0, 2, 3), keepdims=False), "x")
    made = [b.add(Conv2d(), "x", b.constant(8, 8, 1, 1), bias) for _ in "ab"]
    graph = b.graph(b.add(Add() if shift else Concat(1), *made))
    before = lay_channels_last(graph, "cuda", 8)
    assert passes.fuse_conv_pairs(before) is before
    assert passes.fuse_regions(before, (CONV2D_SUM,)) is before


def test_new_names_are_taken_by_no_node_and_no_tensor():
    """A node is called what the rewrites of another's prologue, padding and rows are called."""
    for word in ("scale", "weight", "bias", "weight.aligned", "back", "rows", "pad"):
        b = Builder(1, 8, 5, 5)
        x = b.conv("x", 8, 8)
        gated = b.add(Mul(), x, b.add(Sigmoid(), b.add(ReduceMean((2, 3)), x)))
        y = b.norm(b.conv(gated, 8, 8, side=1), 8)
        name = f"{b.nodes[-2].name}.{word}"
        b.nodes.append(Node(name, Relu(), (y,), (f"{b.nodes[-1].name}.{word}",)))
        before = b.graph(*b.nodes[-1].outputs)
        for device in ("cpu", "cuda"):
            same(before, lambda g, to=device: lay_channels_last(passes.simplify(g), to))


# -- constants that must not be lost -----------------------------------------------------------------


def float32(graph: Graph) -> Graph:
    constants = {name: array.astype(np.float32) for name, array in graph.constants.items()}
    inputs = tuple(replace(value, dtype="float32") for value in graph.inputs)
    return replace(graph, inputs=inputs, constants=constants)


@pytest.mark.parametrize("number", [1e38, -1e38, 1e-38, 1e-45, np.inf, np.nan])
@pytest.mark.parametrize("place", ["after", "after on tensor cores", "before"])
def test_factors_that_the_weights_have_no_room_for_stay(number, place):
    b = Builder(1, 4, 4, 4)
    factor = b.number(number)
    x = b.add(Mul(), "x", factor) if place == "before" else "x"
    x = b.add(Conv2d(), x, b.constant(4, 4, 1, 1))
    y = x if place == "before" else b.add(Mul(), x, factor)
    size = 1e-3 if abs(number) < 1 else 1e3
    weights = next(name for name in b.constants if name != factor)
    b.constants[weights] *= size
    before = float32(b.graph(y))
    if place == "after on tensor cores":
        after = lay_channels_last(before)
        assert "mul" in kinds(after)
    else:
        assert passes.simplify(before).nodes == before.nodes


@pytest.mark.parametrize("wide", [True, False])
def test_a_batch_norm_that_weights_have_no_room_for_stays(wide):
    """One channel of a network whose training has let it die: 1e-20 times 1e-20."""
    b = Builder(1, 4, 4, 4)
    y = b.norm(b.conv("x", 4, 4), 4)
    weight, bias = b.nodes[0].inputs[1:]
    scale, shift, mean = b.nodes[1].inputs[1:4]
    b.constants[weight][1] *= 1e-20
    b.constants[bias][1] = 0
    b.constants[scale][1] = 1e-20
    if wide:  # beside the shift nothing is lost
        b.constants[shift][1] = 0.5
    else:
        b.constants[shift][1] = b.constants[mean][1] = 0
    before = float32(b.graph(y))
    assert kinds(passes.simplify(before)) == (["conv2d"] if wide else ["conv2d", "batch_norm"])


@pytest.mark.parametrize(("scale", "variance"), [(1e-30, 1e30), (3e38, 1e-3)])
def test_a_batch_norm_that_a_prologue_has_no_room_for_stays(scale, variance):
    b = Builder(1, 8, 4, 4)
    y = b.conv(b.add(Relu(), b.norm(b.conv("x", 8, 8), 8)), 8, 8, side=1)
    # A relu before it, so that it is no part of the convolution before.
    conv, norm = b.nodes[:2]
    b.nodes[1:2] = [
        Node("r", Relu(), conv.outputs, ("r",)),
        replace(norm, inputs=("r", *norm.inputs[1:])),
    ]
    before = fuse(float32(b.graph(y)))
    assert kinds(lay_channels_last(before)).count("batch_norm") == 0
    constants = dict(before.constants)
    constants[norm.inputs[1]] = np.full(8, scale, np.float32)
    constants[norm.inputs[4]] = np.full(8, variance, np.float32)
    constants[norm.inputs[2]] = constants[norm.inputs[3]] = np.zeros(8, np.float32)
    after = lay_channels_last(replace(before, constants=constants))
    assert kinds(after).count("batch_norm") == 1


# -- convolutions of one image that are added --------------------------------------------------------


def branches(b: Builder, op, *others: str, groups: int = 1, stride: int = 1) -> str:
    """Adds ``others`` to a convolution of 5x3 with a border of its own."""
    weight = b.constant(4, 4 // groups, 5, 3)
    wider = Conv2d((stride, stride), (4, 1, 4, 1), (2, 1), groups)
    y = b.add(wider, "x", weight, b.constant(4))
    for other in others:
        y = b.add(op, y, other)
    return y


@pytest.mark.parametrize("op", [Add(), Sub()])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_branches_of_a_block_are_one_convolution(groups, op):
    b = Builder(2, 4, 7, 6)
    inner = b.add(
        Conv2d((1, 1), (2, 0, 2, 0), (2, 1), groups), "x", b.constant(4, 4 // groups, 3, 1)
    )
    y = branches(
        b, op, b.conv("x", 4, 4, side=1, groups=groups), inner, b.norm("x", 4), groups=groups
    )
    # The smaller ones first, so that what is wider is subtracted.
    z = b.conv("x", 4, 4, side=1, groups=groups)
    y = b.add(Sub(), z, y)
    after = same(b.graph(y), passes.simplify)
    assert kinds(after) == ["conv2d"]
    assert len(after.nodes[0].covers) == 9


def test_branches_with_strides_and_constants_between_are_one_convolution():
    b = Builder(1, 4, 9, 9)
    small = b.add(Mul(), b.conv("x", 4, 4, side=1, stride=(2, 2)), b.constant(4, 1, 1))
    assert kinds(same(b.graph(branches(b, Add(), small, stride=2)), passes.simplify)) == ["conv2d"]
    b = Builder(1, 4, 9, 9)
    norm = b.add(Add(), b.number(0.5), b.norm("x", 4))
    assert kinds(same(b.graph(branches(b, Add(), norm)), passes.simplify)) == ["conv2d"]


@pytest.mark.parametrize(
    "case", ["outside", "between taps", "stride", "groups", "sum", "read", "image"]
)
def test_other_branches_stay(case):
    """Windows that are no part of the other, and results that something else reads."""
    b = Builder(1, 4, 9, 9)
    match case:
        case "outside":
            other = b.add(Conv2d((1, 1), (0, 2, 0, 2)), "x", b.constant(4, 4, 1, 5))
        case "between taps":
            other = b.add(Conv2d((1, 1), (1, 0, 1, 0)), "x", b.constant(4, 4, 3, 1))
        case "stride":
            b.inputs = (Value("x", (1, 4, 1, 1), "float64"),)
            other = b.conv("x", 4, 4, side=1, stride=(2, 2))
        case "groups":
            other = b.conv("x", 4, 4, side=1, groups=4)
        case "sum":
            other = b.add(Add(), b.norm("x", 4), b.constant(4, 1, 1))
        case _:
            other = b.conv(b.add(Relu(), "x") if case == "image" else "x", 4, 4, side=1)
    y = branches(b, Add(), other)
    graph = b.graph(*([y, other] if case == "read" else [y]))
    assert same(graph, passes.merge_parallel) is graph


def test_branches_whose_sum_the_weights_have_no_room_for_stay():
    b = Builder(1, 4, 9, 9)
    y = branches(b, Add(), b.conv("x", 4, 4, side=1))
    for name in b.constants:
        b.constants[name] = np.full_like(b.constants[name], 3e38)
    graph = float32(b.graph(y))
    assert passes.merge_parallel(graph) is graph


# -- all together ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_random_graphs(data):
    """Every operator here keeps [2, 4, 8, 8], so that any tensor may be read by any later node."""
    b = Builder(2, 4, 8, 8, seed=data.draw(st.integers(0, 99)))
    tensors = ["x"]
    steps = (
        "conv",
        "pad",
        "norm",
        "scale",
        "relu",
        "clip",
        "copy",
        "add",
        "swish",
        "reshape",
        "turn",
    )
    for step in data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=12)):
        x = data.draw(st.sampled_from(tensors[-3:]))
        match step:
            case "conv":
                y = b.conv(x, 4, 4, padding=(1, 1, 1, 1), groups=data.draw(st.sampled_from([1, 2])))
            case "pad":
                y = b.conv(b.add(Pad2d((1, 1, 1, 1)), x), 4, 4)
            case "norm":
                y = b.norm(x, 4)
            case "scale":
                op = data.draw(st.sampled_from([Add(), Sub(), Mul()]))
                pair = [x, b.constant(*data.draw(st.sampled_from([(), (4, 1, 1), (8,)])))]
                y = b.add(op, *data.draw(st.permutations(pair)))
            case "relu":
                y = b.add(Relu(), x)
            case "clip":
                y = b.add(Clip(-0.5, 1.0), x)
            case "copy":
                y = b.add(Copy(), x)
            case "add":
                y = b.add(Add(), x, data.draw(st.sampled_from(tensors)))
            case "swish":
                y = b.add(Mul(), x, b.add(Sigmoid(), x))
            case "reshape":
                y = b.add(Reshape((2, 4, 8, 8)), b.add(Reshape((0, -1)), x))
            case _:
                y = b.add(Transpose((0, 1, 3, 2)), b.add(Transpose((0, 1, 3, 2)), x))
        tensors.append(y)
    outputs = data.draw(st.lists(st.sampled_from(tensors[1:]), min_size=1, max_size=3, unique=True))
    before = b.graph(*outputs)
    after = same(before, lambda graph: fuse(passes.simplify(graph)))
    assert len(after.nodes) <= len(before.nodes)


def test_another_batch_is_rewritten_too():
    b = Builder(2, 4, 6, 6)
    before = b.graph(b.add(Reshape((2, -1)), b.norm(b.conv("x", 4, 6), 6)))

    def rebuild(sizes: Sizes) -> Graph:
        batch = sizes.images
        inputs = (Value("x", (batch, 4, 6, 6), "float64"),)
        nodes = (*before.nodes[:-1], Node("r", Reshape((batch, -1)), *_ends(before.nodes[-1])))
        return Graph("test", inputs, before.outputs, nodes, before.constants, ("x",), rebuild)

    after = passes.simplify(rebuild(Sizes.of({"batch": 2}, "batch")))
    five = after.with_batch(5)
    assert kinds(five) == ["conv2d", "reshape"]
    assert five.values[five.outputs[0]].shape == (5, 96)
    assert all(five.constants[name] is after.constants[name] for name in after.constants)


def _ends(node: Node):
    return node.inputs, node.outputs


# -- orders of dimensions ----------------------------------------------------------------------------


def moves(b: Builder, *steps: tuple[int, ...] | Transpose) -> Graph:
    """Returns reshapes, each by its shape, and transposes, one behind another."""
    y = "x"
    for step in steps:
        y = b.add(step if isinstance(step, Transpose) else Reshape(step), y)
    return b.graph(b.add(Relu(), y))


def test_windows_of_tokens_are_one_transpose():
    """As MobileViT has them, from images whose channels lie side by side and back."""
    steps = (
        Transpose((0, 3, 1, 2)), (2 * 8 * 3, 2, 5, 2), Transpose((0, 2, 1, 3)), (2, 8, 15, 4),
        Transpose((0, 3, 2, 1)), (8, 15, 8),
    )  # fmt: skip
    after = same(moves(Builder(2, 6, 10, 8), *steps), passes.compose_transposes)
    assert kinds(after) == ["reshape", "transpose", "reshape", "relu"]
    assert after.values[after.nodes[0].outputs[0]].shape == (2, 3, 2, 5, 2, 8)
    back = (
        (2, 4, 15, 8), Transpose((0, 3, 2, 1)), (48, 5, 2, 2), Transpose((0, 2, 1, 3)), (2, 8, 6, 10),
        Transpose((0, 2, 3, 1)),
    )  # fmt: skip
    after = same(moves(Builder(8, 15, 8), *back), passes.compose_transposes)
    assert kinds(after) == ["reshape", "transpose", "reshape", "relu"]


def test_transposes_that_undo_each_other_are_a_reshape():
    steps = (Transpose((1, 0, 2)), (6, 2, 10), Transpose((1, 0, 2)))
    after = same(moves(Builder(2, 6, 10), *steps), passes.compose_transposes)
    assert kinds(after) == ["reshape", "relu"]


@pytest.mark.parametrize(
    "steps",
    [
        ((2, 12, 4, 5), Transpose((0, 2, 1, 3)), (2, 4, 60)),  # one
        (Transpose((0, 2, 1)), (2, 20, 3, 4), Transpose((0, 2, 1, 3))),  # elements, not runs
        (Transpose((1, 0, 2)), (16, 30), (30, 16), Transpose((1, 0))),
        (Transpose((1, 0, 2)), (8, 3, 20), Transpose((1, 0, 2))),  # 8 is no product of 12 and 2
    ],
)
def test_other_moves_stay(steps):
    before = moves(Builder(2, 12, 20), *steps)
    assert passes.compose_transposes(before) is before


def test_what_is_read_between_two_transposes_stays():
    b = Builder(2, 6, 10)
    y = b.add(Transpose((1, 0, 2)), "x")
    before = b.graph(b.add(Transpose((0, 2, 1)), b.add(Transpose((1, 0, 2)), y)), y)
    assert kinds(same(before, passes.compose_transposes)).count("transpose") == 3


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_moves_are_what_they_were(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    b, y = Builder(*shape), "x"
    for _ in range(data.draw(st.integers(2, 6))):
        if data.draw(st.booleans()):
            perm = tuple(data.draw(st.permutations(range(len(shape)))))
            y, shape = b.add(Transpose(perm), y), tuple(shape[axis] for axis in perm)
            continue
        flat, cut = [], data.draw(st.integers(0, 3))
        for size in shape:
            part = data.draw(st.sampled_from([k for k in (1, 2, 3) if size % k == 0]))
            flat += [size // part, part]
        while len(flat) > 5 or (cut > 0 and len(flat) > 1):
            at = data.draw(st.integers(0, len(flat) - 2))
            flat[at : at + 2] = [flat[at] * flat[at + 1]]
            cut -= 1
        shape = tuple(flat)
        y = b.add(Reshape(shape, allow_zero=True), y)
    same(b.graph(b.add(Relu(), y)), passes.compose_transposes)
