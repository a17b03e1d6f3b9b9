"""Transposed convolutions, and those of volumes, as the CPU runs them: as convolutions of images."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import tolerances
from engines import plan_of
from onnx import helper
from onnx_models import model, onnxruntime_outputs, tensor

from cnn_engine import Engine
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.graph.passes import lower_convolutions
from cnn_engine.graph.reference import reference
from cnn_engine.operators.conv2d import Conv3d
from cnn_engine.operators.conv_transpose2d import ConvTranspose2d


def graph_of(op, x, weight, bias=None) -> Graph:
    constants = {"w": weight} | ({} if bias is None else {"b": bias})
    node = Node("c", op, ("x", *constants), ("y",))
    return Graph("one", (Value("x", x.shape),), ("y",), (node,), constants)


def compare(graph: Graph, x: np.ndarray) -> None:
    """Both in float64: the same sums."""
    plain = lower_convolutions(graph)
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
