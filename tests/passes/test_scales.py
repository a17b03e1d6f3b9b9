"""Multiples of one image that are added, and sums over few groups of channels."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import Builder

from cnn_engine import Engine
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Graph
from cnn_engine.graph.reference import reference
from cnn_engine.operators.binary import Add, Div, Mul, Sub
from cnn_engine.operators.reduce import ReduceL2, ReduceMean, ReduceSum
from cnn_engine.operators.shaping import Reshape, Transpose
from cnn_engine.operators.softmax import Softmax
from cnn_engine.operators.unary import Gelu, Relu


def kinds(graph: Graph) -> list[str]:
    return [node.op.kind for node in graph.nodes]


def same(graph: Graph, rewrite, rng: np.random.Generator, atol: float = 1e-9) -> Graph:
    """Returns the graph after a rewrite, which computes the same in float64 but for folded constants."""
    after = rewrite(graph)
    x = rng.standard_normal(graph.inputs[0].shape)
    wanted, found = (reference(g, {"images": x}) for g in (graph, after))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=atol)
    return after


def constant(b: Builder, *shape: int) -> str:
    return b.constant((*shape,))


def response_norm(b: Builder, x: str) -> str:
    """Global response normalisation with its residual (Woo et al., ConvNeXt V2, 2023)."""
    channels = b.shapes[x][1]
    norm = b.add(ReduceL2((2, 3)), x)
    eps = "eps"
    b.constants[eps] = np.float32(1e-6)
    factor = b.add(Div(), norm, b.add(Add(), b.add(ReduceMean((1,)), norm), eps))
    y = b.add(Mul(), constant(b, 1, channels, 1, 1), b.add(Mul(), x, factor))
    return b.add(Add(), x, b.add(Add(), constant(b, 1, channels, 1, 1), y))


def split_attention(b: Builder, x: str, radix: int) -> str:
    """Sums of groups of channels, weighted by a softmax over them (Zhang et al., ResNeSt, 2020)."""
    n, all_channels, h, w = b.shapes[x]
    channels = all_channels // radix
    apart = b.add(Reshape((n, radix, channels, h, w)), x)
    mean = b.add(ReduceMean((2, 3)), b.add(ReduceSum((1,), keepdims=False), apart))
    each = b.conv(b.relu(b.conv(mean, 8, 1)), all_channels, 1)
    each = b.add(Softmax(1), b.add(Reshape((n, radix, channels)), each))
    factors = b.add(Reshape((n, radix, channels, 1, 1)), each)
    return b.add(ReduceSum((1,), keepdims=False), b.add(Mul(), apart, factors))


def test_random_sums_of_multiples(rng):
    """Trees of sums and products, of one image and of others, in any order of operands."""
    rewritten = 0
    for _ in range(150):
        b = Builder((2, 6, 4, 5), int(rng.integers(1 << 30)))
        x = b.relu("images")
        small = [
            constant(b, 1, 6, 1, 1), constant(b, 6, 1, 1), b.add(ReduceMean((2, 3)), x),
            b.add(ReduceMean((1, 2, 3)), x),
        ]  # fmt: skip
        b.constants["two"] = np.float32(2)
        values = [x]
        for _ in range(int(rng.integers(2, 7))):
            op = rng.choice([Add(), Sub(), Mul()])
            others = [*small, "two"] if type(op) is Mul or rng.integers(2) else [*values, x]
            operands = [str(rng.choice(values[-2:])), str(rng.choice(others))]
            rng.shuffle(operands)
            values.append(b.add(op, *operands))
        graph = b.graph(b.add(Relu(), values[-1]), *([values[-2]] if rng.integers(4) == 0 else []))
        after = same(graph, passes.factor_scales, rng)
        images = [
            sum(graph_.values[node.outputs[0]].shape == (2, 6, 4, 5) for node in graph_.nodes)
            for graph_ in (graph, after)
        ]
        assert images[1] <= images[0]
        rewritten += after is not graph
    assert rewritten > 30


def test_a_response_norm_is_what_a_convolution_reads(rng):
    """One number for each channel of an image: nothing of an image's size is written between both."""
    b = Builder((2, 8, 9, 7))
    graph = b.graph(b.conv(response_norm(b, b.add(Gelu(), b.conv("images", 16))), 8, 1))
    after = same(graph, passes.simplify, rng, 1e-6)
    wide = [node for node in after.nodes if after.values[node.outputs[0]].shape == (2, 16, 9, 7)]
    assert [node.op.kind for node in wide] == ["conv2d", "gelu", "mul"]
    with Engine(graph, device="cpu", threads=1) as engine:
        wide = engine._plans.open().placed(2, False).graph
        sizes = [wide.values[node.outputs[0]].size for node in wide.nodes]
        assert sizes.count(2 * 16 * 9 * 7) == 1, "the first convolution, which applies gelu"
        x = rng.standard_normal(graph.inputs[0].shape).astype(np.float32)
        (found,) = engine.run({"images": x}).values()
    (wanted,) = reference(graph, {"images": x}).values()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("radix", [2, 3])
def test_split_attention_reads_channels_side_by_side(radix, rng):
    b = Builder((2, 8, 6, 5))
    x = b.relu(b.conv("images", radix * 12))
    graph = b.graph(b.conv(split_attention(b, x, radix), 8, 1))
    after = same(graph, passes.simplify, rng, 1e-6)
    assert "reduce_sum" not in kinds(after)
    assert all(len(after.values[name].shape) < 5 or after.values[name].size == 2 * radix * 12
               for node in after.nodes for name in node.outputs)  # fmt: skip
    with Engine(graph, device="cpu", threads=1) as engine:
        turned = [
            node for node in engine._plans.open().placed(2, False).graph.nodes
            if type(node.op) is Transpose and node.op.perm != (0, 2, 1)
        ]  # fmt: skip
        assert len(turned) == 2, "at both ends of the network"
        images = rng.standard_normal(graph.inputs[0].shape).astype(np.float32)
        (found,) = engine.run({"images": images}).values()
    (wanted,) = reference(graph, {"images": images}).values()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_sums_that_are_no_groups_of_channels_stay(rng):
    b = Builder((2, 20, 3, 4))
    many = b.add(ReduceSum((1,), keepdims=False), b.add(Reshape((2, 5, 4, 3, 4)), "images"))
    places = b.add(ReduceSum((1,), keepdims=False), b.add(Reshape((2, 2, 5, 12, 2)), "images"))
    before = b.graph(many, places)
    assert passes.split_sums(before) is before
