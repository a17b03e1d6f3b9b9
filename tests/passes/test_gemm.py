"""Matrix products over channels, of images and of rows of tokens, as 1x1 convolutions."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from lowered import lay_channels_last
from test_channels_last import as_float32, on_cuda
from test_passes import Builder, kinds, same

from cnn_engine import Engine
from cnn_engine.graph.reference import reference
from cnn_engine.operators.binary import Add, Mul
from cnn_engine.operators.matmul import Matmul
from cnn_engine.operators.shaping import Transpose
from cnn_engine.operators.unary import Gelu, Relu, Swish


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products_over_channels_are_convolutions(device):
    """A block of ConvNeXt: two products with biases, a function, a factor a channel, and a sum."""
    b = Builder(2, 3, 6, 6)
    x = b.conv("x", 3, 4, padding=(1, 1, 1, 1))
    y = b.add(Transpose((0, 2, 3, 1)), x)
    y = b.add(Add(), b.constant(8), b.add(Matmul(), y, b.constant(4, 8)))
    y = b.add(Matmul(), b.add(Gelu(), y), b.constant(8, 4))
    y = b.add(Mul(), b.add(Add(), y, b.constant(4)), b.constant(4))
    y = b.add(Add(), b.add(Transpose((0, 3, 1, 2)), y), x)
    graph = b.graph(b.conv(y, 4, 4))
    after = same(graph, lambda graph: lay_channels_last(graph, device))
    assert kinds(after) == ["conv2d_nhwc"] * 4 + ["transpose"]
    assert [node.inputs[3] is not None for node in after.nodes[2:3] if node.inputs[3:]] == [True]


@pytest.mark.parametrize("shape", [(4, 4, 8), (4,), (1, 4, 4, 8)])
def test_other_products_stay(shape):
    b = Builder(2, 3, 4, 4)
    x = b.add(Transpose((0, 2, 3, 1)), b.conv("x", 3, 4, padding=(1, 1, 1, 1)))
    y = b.add(Matmul(), x, b.constant(*shape))
    after = same(b.graph(y), on_cuda)
    assert "matmul" in kinds(after)


def tokens(b: Builder, x: str, channels: int, hidden: int, first: bool) -> str:
    """A transformer's two products of rows, with biases, a function and what they are added to."""
    y = b.add(Add(), b.constant(hidden), b.add(Matmul(), x, b.constant(channels, hidden)))
    y = b.add(Matmul(), b.add(Swish(), y), b.constant(hidden, channels))
    y = b.add(Add(), y, b.constant(1, channels))
    return b.add(Add(), *((x, y) if first else (y, x)))


def test_products_of_rows_are_convolutions():
    b = Builder(2, 7, 4)
    y = tokens(b, tokens(b, "x", 4, 6, True), 4, 5, False)
    before = b.graph(y)
    after = same(before, lay_channels_last)
    assert [kind for kind in kinds(after) if kind != "reshape"] == ["conv2d_nhwc"] * 4
    convs = [node for node in after.nodes if node.op.kind == "conv2d_nhwc"]
    assert [node.op.activation for node in convs] == [Swish(), None] * 2
    assert [len(node.inputs) for node in convs] == [3, 4] * 2
    covered = {name for node in convs for name in node.covers}
    assert covered == {node.name for node in before.nodes}


def test_what_follows_rows_that_others_read_stays():
    b = Builder(2, 7, 4)
    x = b.add(Relu(), "x")
    sums = b.add(Matmul(), x, b.constant(4, 4))
    y = b.add(Add(), sums, x)  # a product without a bias, and what it was made of
    z = b.add(Swish(), b.add(Add(), b.add(Matmul(), y, b.constant(4, 3)), b.constant(7, 3)))
    both = b.add(Add(), y, b.constant(2, 7, 4))
    after = same(b.graph(z, both, y), lay_channels_last)
    found = [kind for kind in kinds(after) if kind != "reshape"]
    assert sorted(found) == ["add", "add", "conv2d_nhwc", "conv2d_nhwc", "relu", "swish"]


@pytest.mark.parametrize(
    ("shape", "weight"), [((2, 3, 4), (2, 4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4,))]
)
def test_products_of_other_ranks_stay(shape, weight):
    b = Builder(*shape)
    after = same(
        b.graph(b.add(Matmul(), "x", b.constant(*weight))), lay_channels_last
    )  # fmt: skip
    assert kinds(after) == ["matmul"]


def test_products_of_one_row_an_image_are_linear_layers():
    b = Builder(3, 5)
    y = b.add(Add(), b.constant(1, 7), b.add(Matmul(), "x", b.constant(5, 7)))
    z = b.add(Matmul(), b.add(Relu(), y), b.constant(7, 4))
    both = b.add(
        Add(), z, b.add(Matmul(), y, b.constant(7, 4))
    )  # y is read twice, and no sum is of constants
    spread = b.add(Add(), both, b.constant(3, 4))  # a row of its own for each image
    after = same(b.graph(spread), lay_channels_last)
    assert sorted(kinds(after)) == ["add", "add", "linear", "linear", "linear", "relu"]
    assert [len(node.inputs) for node in after.nodes if node.op.kind == "linear"] == [3, 2, 2]


@pytest.mark.parametrize("images", [1, 3, 17])
def test_an_engine_runs_products_of_one_row_an_image_as_linear_layers(rng, images):
    b = Builder(images, 33)
    wide = b.add(Add(), b.add(Matmul(), "x", b.constant(33, 51)), b.constant(51))
    graph = as_float32(b.graph(b.add(Matmul(), b.add(Relu(), wide), b.constant(51, 7))))
    x = rng.uniform(-1, 1, (images, 33)).astype(np.float32)
    (wanted,) = reference(graph, {"x": x}).values()
    with Engine(graph, device="cpu") as engine:
        (found,) = engine.run({"x": x}).values()
        ran = [step.kernel for step in engine.plan(images, np.float32).steps]
    assert ran.count("blocked") == 2
    tolerances.assert_close(found, wanted, 1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("shape", [(0, 7, 4), (2, 0, 4), (1, 1, 4), (2, 7, 4)])
def test_an_engine_multiplies_rows(rng, shape):
    b = Builder(*shape)
    graph = as_float32(b.graph(b.add(Relu(), tokens(b, "x", 4, 6, True))))
    x = rng.uniform(-1, 1, shape).astype(np.float32)
    (wanted,) = reference(graph, {"x": x}).values()
    with Engine(graph, device="cpu") as engine:
        (found,) = engine.run({"x": x}).values()
    tolerances.assert_close(found, wanted, 1e-5 * np.abs(wanted).max(initial=1))
