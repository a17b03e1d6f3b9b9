"""Transposed convolutions, and those of volumes, as devices run them: as convolutions of images."""

from __future__ import annotations

from itertools import product

import fake_cuda
import numpy as np
import pytest
import tolerances
from engines import built, plan_of, steps_of
from graphs import Builder
from onnx import helper
from onnx_models import model, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.graph.passes import convolve_phases, lower_convolutions
from cnn_engine.graph.passes.canonical.convolutions import LEAST_FLOPS_ON_CUDA, MOST_ON_CUDA
from cnn_engine.graph.reference import reference
from cnn_engine.operators.conv2d import Conv3d
from cnn_engine.operators.conv_transpose2d import ConvTranspose2d
from cnn_engine.operators.shaping import Concat
from cnn_engine.operators.unary import Sigmoid


def graph_of(op, x, weight, bias=None) -> Graph:
    constants = {"w": weight} | ({} if bias is None else {"b": bias})
    node = Node("c", op, ("x", *constants), ("y",))
    return Graph("one", (Value("x", x.shape),), ("y",), (node,), constants)


def compare(graph: Graph, x: np.ndarray, lower=lower_convolutions) -> None:
    """Both in float64: the same sums."""
    plain = lower(graph)
    assert {node.op.kind for node in plain.nodes}.isdisjoint({"conv_transpose2d", "conv3d"})
    (wanted,), (found,) = (reference(g, {"x": x}).values() for g in (graph, plain))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", [(2, 2), (3, 2), (4, 5), (1, 4)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 3), (1, 4)])
def test_transposed_convolutions(kernel, stride, rng):
    """Also where a stride is larger than the kernel, so that some phases are the bias alone."""
    x = rng.standard_normal((2, 4, 5, 3)).astype(np.float32)
    weight = rng.standard_normal((4, 3, *kernel)).astype(np.float32)
    checked = 0
    for padding, added, groups, is_biased in product(
        ((0, 0, 0, 0), (1, 0, 1, 1), (0, 1, 0, 0)), ((0, 0), (1, 0)), (1, 2), (False, True)
    ):
        phases = [-(-k // s) * s for k, s in zip(kernel, stride, strict=True)]
        if np.prod(phases) > 4 * np.prod(kernel):
            continue  # too thin: left as it is
        bias = rng.standard_normal(3 * groups).astype(np.float32) if is_biased else None
        op = ConvTranspose2d(stride, padding, added, groups=groups)
        compare(graph_of(op, x, weight, bias), x)
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_dilated_transposed_convolutions(stride, rng):
    x = rng.standard_normal((1, 2, 6, 5)).astype(np.float32)
    weight = rng.standard_normal((2, 3, 3, 2)).astype(np.float32)
    compare(graph_of(ConvTranspose2d(stride, (1, 1, 0, 2), dilation=(2, 1)), x, weight), x)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e6])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"),
    [((3, 3), (2, 2), (1, 1)), ((5, 4), (2, 3), (1, 1)), ((3, 2), (1, 3), (2, 1)),
     ((3, 3), (2, 2), (3, 1)), ((4, 4), (2, 2), (1, 1))],
)  # fmt: skip
def test_a_value_acts_on_the_windows_that_hold_it(
    instruction_set, kernel, stride, dilation, value, rng
):
    """A phase has the taps that it has, and no zeros in the place of others: 0 times infinity is NaN."""
    x = rng.standard_normal((2, 6, 9, 11)).astype(np.float32)
    x[0, 2, 4, 5] = x[1, 0, 0, 10] = value
    weight = rng.standard_normal((6, 5, *kernel)).astype(np.float32)
    bias = rng.standard_normal(5).astype(np.float32)
    op = ConvTranspose2d(stride, (1, 0, 1, 1), dilation=dilation)
    graph = graph_of(op, x, weight, bias)
    assert "conv_transpose2d" not in {node.op.kind for node in lower_convolutions(graph).nodes}
    with Engine(graph, device="cpu", threads=1) as engine:
        found = engine.run({"x": x})["y"]
    sums = np.abs(np.where(np.isfinite(x), x, 0))
    magnitude = op.reference(sums, np.abs(weight), np.abs(bias))
    with np.errstate(invalid="ignore"):
        wanted = op.reference(x, weight, bias)
    tolerances.assert_close(found, wanted, (16 + weight[:, 0].size / 8) * 2.0**-24 * magnitude)


def test_what_is_not_known_beforehand_or_too_thin_stays(rng):
    x = rng.standard_normal((1, 2, 6, 5)).astype(np.float32)
    thin = graph_of(ConvTranspose2d((9, 9)), x, np.ones((2, 3, 1, 1), np.float32))
    assert lower_convolutions(thin) is thin
    depthwise = ConvTranspose2d((2, 2), groups=2)
    alone = graph_of(depthwise, x, np.ones((2, 1, 4, 4), np.float32))
    assert lower_convolutions(alone) is alone
    node = Node("c", ConvTranspose2d((2, 2)), ("x", "w"), ("y",))
    given = Graph("given", (Value("x", x.shape), Value("w", (2, 3, 2, 2))), ("y",), (node,), {})
    assert lower_convolutions(given) is given


def test_transposed_convolutions_for_tensor_cores(rng):
    """Any kernel, stride, padding, output padding, dilation and groups, as far as zeros are worth it."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return tuple(int(n) for n in rng.integers(low, high, 2))

    checked = 0
    for _ in range(150):
        kernel, stride, dilation = pair(1, 6), pair(1, 5), pair(1, 4)
        groups, filters = (int(n) for n in rng.integers(1, 4, 2))
        channels = groups * int(rng.integers(2, 4))
        padding = (*pair(0, 3), *pair(0, 3))
        added = tuple(
            int(rng.integers(0, max(s, d))) for s, d in zip(stride, dilation, strict=True)
        )
        op = ConvTranspose2d(stride, padding, added, dilation, groups)
        x = rng.standard_normal((2, channels, *pair(2, 7))).astype(np.float32)
        weight = rng.standard_normal((channels, filters, *kernel)).astype(np.float32)
        sizes = op.full_sizes(x.shape[2:], kernel)
        if any(size - padding[i] - padding[2 + i] < 1 for i, size in enumerate(sizes)):
            continue
        graph = graph_of(op, x, weight, rng.standard_normal(filters * groups).astype(np.float32))
        phases = [
            -(-(d * (k - 1) + 1) // s) * s for k, s, d in zip(kernel, stride, dilation, strict=True)
        ]
        if all(s > 1 for s in stride) and np.prod(phases) > MOST_ON_CUDA * np.prod(kernel):
            assert convolve_phases(graph, MOST_ON_CUDA) is graph
            continue
        for zeros in (False, True):
            compare(graph, x, lambda g, z=zeros: convolve_phases(g, MOST_ON_CUDA, zeros=z))
        checked += 1
    assert checked > 100


def decoder(kernel: int, padding: int) -> Graph:
    """A level of a decoder: an image is made twice as large, and joined to a skip."""
    b = Builder((1, 16, 16, 12))
    skip = b.relu(b.conv("images", 24))
    low = b.conv(skip, 96, stride=2)
    op = ConvTranspose2d((2, 2), (padding,) * 4)
    up = b.add(Sigmoid(), b.add(op, low, b.constant((96, 24, kernel, kernel))))
    return b.graph(b.conv(b.relu(b.conv(b.add(Concat(1), skip, up), 128)), 8))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("kernel", "padding"), [(2, 0), (4, 1)])
def test_a_decoder_runs_convolutions_and_copies_nothing_twice(
    device, kernel, padding, monkeypatch, rng
):
    """Phases are stored as parts of the concatenation, after the function of the sums."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    graph = decoder(kernel, padding)
    x = rng.uniform(-1, 1, graph.inputs[0].shape).astype(np.float32)
    with Engine(graph, device=device, threads=1) as engine:
        steps = steps_of(engine, 1)
        assert {"sigmoid", "conv_transpose2d"}.isdisjoint(step.kernel for step in steps.values())
        (concat,) = (step for name, step in steps.items() if name.startswith("concat"))
        assert not concat.args, "its parts lie there already"
        (found,) = engine.run({"images": x}).values()
    (wanted,) = reference(graph, {"images": x}).values()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_a_gpu_keeps_small_transposed_convolutions_and_those_without_tensor_cores(monkeypatch):
    b = Builder((64, 8, 6, 6))
    weight = b.constant((8, 8, 2, 2))
    small = b.graph(b.add(ConvTranspose2d((2, 2)), "images", weight))
    assert small.cost_of(small.nodes[-1]).flops > LEAST_FLOPS_ON_CUDA, "of all images"
    for tensor_cores, graph in ((False, decoder(2, 0)), (True, small)):
        with monkeypatch.context() as patch:
            fake_cuda.install(patch, tensor_cores)
            placed, _ = built(graph, "float32", graph.inputs[0].shape[0])
        assert "conv_transpose2d" in {node.op.kind for node in placed.nodes}


@pytest.mark.parametrize("kernel", [(1, 1, 1), (3, 2, 2), (2, 3, 3)])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_volumes(kernel, groups, rng):
    x = rng.standard_normal((2, 4, 5, 4, 6)).astype(np.float32)
    weight = rng.standard_normal((6, 4 // groups, *kernel)).astype(np.float32)
    bias = rng.standard_normal(6).astype(np.float32)
    for stride, dilation, padding in product(
        ((1, 1, 1), (2, 1, 2)), ((1, 1, 1), (2, 1, 1)), ((0,) * 6, (1, 0, 1, 0, 1, 2))
    ):
        compare(graph_of(Conv3d(stride, padding, dilation, groups), x, weight, bias), x)


@pytest.mark.parametrize(
    ("operator", "shape", "weight", "attributes"),
    [
        ("ConvTranspose", (2, 16, 7, 9), (16, 8, 2, 2), {"strides": [2, 2]}),
        ("ConvTranspose", (1, 16, 7, 9), (16, 8, 4, 4), {"strides": [2, 2], "pads": [1] * 4}),
        ("ConvTranspose", (1, 16, 7, 9), (16, 8, 3, 3),
         {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]}),
        ("ConvTranspose", (1, 16, 33), (16, 8, 4), {"strides": [4]}),
        ("Conv", (2, 3, 5, 8, 9), (8, 3, 3, 3, 3), {"pads": [1] * 6}),
    ],
    ids=str,
)  # fmt: skip
def test_in_an_engine(operator, shape, weight, attributes, rng):
    """Between others, for several batches, on both of a dense layer's layouts."""
    filters = weight[1] if operator == "ConvTranspose" else weight[0]
    arrays = {
        "w": rng.standard_normal(weight).astype(np.float32),
        "b": rng.standard_normal(filters).astype(np.float32),
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node(operator, ["r", "w", "b"], ["c"], **attributes),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    proto = model(nodes, [tensor("x", ["N", *shape[1:]])], [tensor("y", None)], arrays, 17)
    with Engine(proto, device="cpu", threads=1) as engine:
        for batch in (shape[0], 3, 0):
            x = rng.standard_normal((batch, *shape[1:])).astype(np.float32)
            (found,) = engine.run({"x": x}).values()
            (wanted,) = onnxruntime_outputs(proto, {"x": x})
            assert found.shape == wanted.shape
            bound = tolerances.sum_of_products(int(np.prod(weight[1:])), 5.0**2)
            assert np.abs(found - wanted).max(initial=0) <= bound
        kernels = {step.kernel for step in plan_of(engine, 1).steps}
    assert "conv_transpose2d" not in kernels
    assert all(kernels), "no node is left to NumPy"
