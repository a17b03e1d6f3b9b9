"""Regions: they are what their nodes are, patterns find them, and a device says why it takes none."""

from __future__ import annotations

import pickle
from dataclasses import replace

import fake_cuda
import numpy as np
import pytest
import regions
from engines import single
from lowered import fuse, lay_channels_last
from random_networks import network
from test_passes import Builder, same

from cnn_engine import Engine, kernels
from cnn_engine.errors import InputError
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Node, Value
from cnn_engine.graph.model import Model
from cnn_engine.graph.passes.fuse import patterns
from cnn_engine.graph.passes.fuse.regions import Pattern, Role, region_of
from cnn_engine.graph.reference import reference
from cnn_engine.operators.binary import Add
from cnn_engine.operators.channels_last import Conv2dNhwc, MaxPool2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.norm import LayerNorm
from cnn_engine.operators.partial_means import PartialMeans
from cnn_engine.operators.unary import Clip, Relu, Sigmoid, Tanh

BLOCK = regions.bottleneck(
    Conv2dNhwc((2, 2), (1,) * 4, activation=Relu()), Clip(0, 6), Conv2dNhwc()
)
#: x, first and second weight, their biases, residual, third weight and bias.
SHAPES = [
    (2, 9, 7, 8), (16, 8, 3, 3), (24, 16, 1, 1), (16,), (24,), (2, 5, 4, 24), (8, 24, 1, 1), (8,),
]  # fmt: skip


def values(shapes):
    return [None if shape is None else Value("", shape) for shape in shapes]


# ---- the record ----


@pytest.mark.parametrize("absent", [(), (3, 4), (5,), (3, 5, 7)], ids=str)
def test_a_region_is_what_its_nodes_are(rng, absent):
    shapes = [None if place in absent else shape for place, shape in enumerate(SHAPES)]
    x, w1, w2, b1, b2, r, w3, b3 = arrays = [
        None if shape is None else rng.normal(size=shape) for shape in shapes
    ]
    first, second, third = (part.op for part in BLOCK.nodes)
    e = first.reference(x, w1, b1)
    y = second.reference(e, w2, b2, r)
    z = third.reference(y, w3, b3)
    for found, wanted in zip(BLOCK.reference(*arrays), (y, z), strict=True):
        assert np.array_equal(found, wanted)
    outputs = BLOCK.infer(values(shapes))
    assert outputs == ((y.shape, "float32"), (z.shape, "float32"))
    made = [Value("", shape) for shape, _ in outputs]
    products = 16 * 8 * 9 + 24 * 16 + 8 * 24
    assert BLOCK.flops(values(shapes), made) == 2 * 2 * 5 * 4 * products
    assert BLOCK.terms(values(shapes)) == 8 * 9
    read = sum(4 * array.size for array in (*arrays, y, z) if array is not None)
    assert BLOCK.cost(values(shapes), made).bytes == read  # and not what is between


@pytest.mark.parametrize(
    ("place", "shape", "said"),
    [
        (0, (2, 9, 7, 4), "first: expected a weight of 4 channels"),
        (1, None, "first: expected 2 to 6 inputs"),
        (3, (8,), "first: bias: expected"),
        (5, (2, 9, 7, 24), "second: residual: expected"),
        (6, (8, 16, 1, 1), "third: expected a weight of 24 channels"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_the_part_that_reads_them(place, shape, said):
    shapes = [shape if i == place else other for i, other in enumerate(SHAPES)]
    with pytest.raises(InputError, match=said):
        BLOCK.infer(values(shapes))


def test_more_inputs_than_there_are_are_refused():
    with pytest.raises(InputError, match="expected at most 8 inputs, found 9"):
        BLOCK.infer(values([*SHAPES, (8,)]))


def test_trailing_inputs_may_be_left_out():
    two = regions.bottleneck(Conv2dNhwc(), Relu())
    shapes = [(1, 2, 2, 8), (16, 8, 1, 1), (24, 16, 1, 1)]
    assert two.infer(values(shapes)) == (((1, 2, 2, 24), "float32"),)


def test_equal_blocks_have_equal_regions():
    other = pickle.loads(pickle.dumps(BLOCK))
    assert other == BLOCK
    assert hash(other) == hash(BLOCK)
    assert BLOCK["second"] == Conv2dNhwc(activation=Clip(0, 6))
    assert BLOCK["fourth"] is BLOCK.activation("fourth") is BLOCK.activation("third") is None
    bare = BLOCK.without_activation
    assert bare != BLOCK
    assert bare == regions.bottleneck(Conv2dNhwc((2, 2), (1,) * 4), None, Conv2dNhwc())


def test_operands_are_those_that_all_parts_may_be_rounded_to():
    assert BLOCK.compute_dtype == "float32"
    rounded = BLOCK.with_compute_dtype("bfloat16")
    assert rounded.compute_dtype == "bfloat16"
    part = replace(rounded.nodes[1], op=replace(rounded.nodes[1].op, compute_dtype="float32"))
    mixed = replace(rounded, nodes=(rounded.nodes[0], part, rounded.nodes[2]))
    assert mixed.compute_dtype == "float32"
    norm = regions.depthwise_norm(Conv2dNhwc(groups=8, compute_dtype="float16"), LayerNorm(-1))
    assert norm.compute_dtype == "float16"  # a norm multiplies nothing


def test_parts_with_the_names_of_what_they_read():
    names = ["x", "w1", "w2", None, "b2", "r", "w3", None]
    assert [found for _, found in BLOCK.bound(names)] == [
        ("x", "w1", None), (None, "w2", "b2", "r"), (None, "w3", None),
    ]  # fmt: skip


@pytest.mark.parametrize("box", [(7, 7), (2, 3), (1, 9), (20, 20)])
def test_partial_means_add_up_to_the_mean(rng, box):
    x = rng.normal(size=(2, 9, 8, 3))
    op = PartialMeans(box)
    found = op.reference(x)
    parts = -(-9 // box[0]) * -(-8 // box[1])
    assert found.shape == op.infer([Value("", x.shape)])[0][0] == (2, parts, 1, 3)
    np.testing.assert_allclose(found.sum((1, 2)), x.mean((1, 2)), atol=1e-14)
    np.testing.assert_allclose(
        found[:, 0, 0], x[:, : box[0], : box[1]].sum((1, 2)) / 72, atol=1e-14
    )
    with pytest.raises(InputError, match="expected images of 4 dimensions"):
        op.infer([Value("", (2, 3))])


# ---- patterns ----

FINDERS = (
    patterns.CONV2D_SUM, patterns.MEAN_LINEAR, patterns.DEPTHWISE_NORM, patterns.INVERTED_RESIDUAL,
    patterns.EXPAND_DEPTHWISE, patterns.EXPAND_DEPTHWISE_MEAN, patterns.BOTTLENECK_AND_NEXT,
    patterns.BOTTLENECK, patterns.DENSE_LAYER, patterns.CONV2D_POOL, patterns.LINEAR_LAYERS,
    patterns.SQUEEZE_EXCITE,
)  # fmt: skip


def test_every_pattern_has_a_kernel_and_costs_what_its_nodes_cost():
    """Of random networks: products stay, and what is between nodes is no longer moved."""
    seen = set()
    for seed in range(60):
        graph, inputs = network(seed, "float64")
        before = lay_channels_last(fuse(Model(graph).base), "cuda")
        flops = sum(before.cost_of(node).flops for node in before.nodes)
        for finder in FINDERS:
            after = passes.fuse_regions(before, (finder,))
            if after is before:
                continue
            seen.add(finder.name)
            assert sum(after.cost_of(node).flops for node in after.nodes) == flops
            found, wanted = reference(after, inputs), reference(before, inputs)
            for name, array in wanted.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-9)
    assert len(seen) >= 6
    kinds = {row.op for row in kernels.TABLE}
    assert {finder.name for finder in FINDERS} <= kinds


def chain(*functions):
    """A convolution of 3x3 and products, with functions between them."""
    b = Builder(1, 8, 6, 6)
    y = b.conv("x", 8, 8, padding=(1,) * 4)
    for function in functions:
        y = b.conv(b.add(function, y), 8, 8, side=1)
    return b.graph(y)


def test_the_first_pattern_that_is_not_refused_is_taken():
    graph = chain(Relu(), Relu())
    both = patterns.BOTTLENECK_AND_NEXT, patterns.BOTTLENECK
    for takes, roles in (
        (lambda graph, node: True, ["first", "second", "third"]),
        (lambda graph, node: node.op["third"] is None, ["first", "second"]),
    ):
        laid = lay_channels_last(fuse(graph), "cuda", 8)
        (node,) = regions.found(regions.fused(laid, *both, takes=takes), "bottleneck")
        assert [part.role for part in node.op.nodes] == roles
    assert regions.fused(laid, *both, takes=lambda *_: False) is laid


def test_what_others_read_is_no_inner_node():
    for seen in (True, False):
        b = Builder(1, 8, 6, 6)
        y = b.add(Relu(), b.conv("x", 8, 8))
        graph = b.graph(b.conv(y, 8, 8), *([y] if seen else []))
        after = same(
            graph, lambda graph: regions.fused(lay_channels_last(fuse(graph), "cuda", 8), PAIR)
        )
        assert len(regions.found(after, "pair")) == (not seen)


def _is_convolution(graph, node):
    return type(node.op) is Conv2dNhwc


#: Two convolutions, the last anchored, and perhaps one before both.
PAIR = Pattern(
    "pair",
    (
        Role("last", _is_convolution),
        Role("middle", _is_convolution, makes=("last", 0)),
        Role("first", _is_convolution, makes=("middle", 0), optional=True),
    ),
    inputs=("first.0|middle.0", "first.1", "middle.1", "last.1", "first.2", "middle.2", "last.2"),
    outputs=("last",),
    named="last",
)


def test_roles_before_the_anchor_run_first():
    graph = chain(Relu(), Relu())
    laid = lay_channels_last(fuse(graph), "cuda", 8)
    # Nodes are looked at in order: the second convolution is the first that has one before it.
    (node,) = regions.found(regions.fused(laid, PAIR), "pair")
    assert [part.role for part in node.op.nodes] == ["middle", "last"]
    assert node.op.inputs[0] == "first.0"
    assert node.inputs[1] is None
    assert node.inputs[4] is None
    last = regions.fused(laid, PAIR, takes=lambda graph, node: node.op["first"] is not None)
    (node,) = regions.found(last, "pair")
    assert [part.role for part in node.op.nodes] == ["first", "middle", "last"]
    assert None not in node.inputs


def test_an_operand_that_no_input_has_is_the_patterns_fault():
    nodes = {"only": Node("n", Add(), ("x", "y"), ("z",))}
    with pytest.raises(KeyError, match="y"):
        region_of("sum", nodes, ("only.0",), ("only",))


# ---- why a device takes none ----


def pooled(function):
    b = Builder(2, 16, 12, 12)
    y = b.add(function, b.conv(b.conv("x", 16, 16), 16, 16, padding=(1,) * 4))
    y = b.add(MaxPool2d((2, 2), (2, 2)), y)
    return single(b.graph(b.conv(b.add(Sigmoid(), b.conv(y, 16, 16)), 16, 16)))


@pytest.mark.parametrize(
    ("dtype", "function", "reason"),
    [("float16", Tanh(), "relu, clip or nothing"), ("float16", Relu(), "sooner there, or it takes no")],
)  # fmt: skip
def test_a_lowering_says_why_regions_are_refused(monkeypatch, dtype, function, reason):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    with Engine(pooled(function), device="cuda", dtype=dtype) as engine:
        lowered = engine._plans.open().lowered(2, False)
    refused = [note for note in lowered.refused if note.into == "conv2d_pool"]
    assert refused
    assert all("wgmma_pool: expected" in note.why or reason in note.why for note in refused)
    assert any(reason in note.why for note in refused)
    # Every reason is said by a kernel of the table.
    for note in lowered.refused:
        names = {row.name for row in kernels.of(note.into, "cuda")}
        assert {part.split(": ")[0] for part in note.why.split("; ")} <= names


def test_a_region_that_has_no_kernel_is_refused():
    node = Node("n", regions.conv2d_pool(Conv2dNhwc(), MaxPool2dNhwc((2, 2), (2, 2))), (), ())
    device = type("Device", (), {"kind": "cpu"})()
    assert kernels.why_not_fuse(device, None, node) == "no kernel on cpu"


def test_a_node_of_a_region_keeps_a_name_that_reports_know():
    b = Builder(1, 8, 6, 6)
    y = b.add(Conv2d(padding=(1,) * 4), "x", b.constant(8, 8, 3, 3))
    y = b.add(Conv2d(), b.add(Relu(), y), b.constant(8, 8, 1, 1))
    graph = b.graph(y)
    laid = lay_channels_last(fuse(graph), "cuda", 8)
    (node,) = regions.found(regions.fused(laid, patterns.BOTTLENECK), "bottleneck")
    assert node.name in {one.name for one in graph.nodes}
    assert set(node.covers) == {one.name for one in graph.nodes}
