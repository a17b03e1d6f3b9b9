"""depthwise_means: the rewrite that makes it, its record, and its kernel on CUDA."""

from __future__ import annotations

import fake_cuda
import halves
import numpy as np
import pytest
import targets
import tolerances
from conftest import Device
from engines import assert_as_on_cpu, built, on_gpu, running, single
from lowered import fuse, lay_channels_last
from native import NONE, call, epilogue
from test_expand_depthwise_cuda import gated
from test_passes import Builder, same

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Node
from cnn_engine.graph.passes.fuse.regions import region_of
from cnn_engine.kernels.cuda.depthwise_means import BOX_SIDE
from cnn_engine.kernels.cuda.requirements import CLUSTERS_OF_HOPPER
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.partial_means import PartialMeans
from cnn_engine.operators.unary import HardSwish, Relu, Swish

Function = _cpu.UnaryFunction


def laid(graph):
    return lay_channels_last(fuse(graph), "cuda")


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "depthwise_means"]


def boxes(shape) -> int:
    return -(-shape.out_h // BOX_SIDE) * -(-shape.out_w // BOX_SIDE)


# ---- the rewrite and the record ----


def test_gates_read_the_means_that_were_made():
    asked = []

    def takes(graph, node):
        asked.append(node.name)
        return 7, 7

    after = same(gated(), lambda graph: passes.fuse_squeeze_excite(laid(graph), takes))
    (node,) = found_in(after)
    (gate,) = (one for one in after.nodes if one.op.kind == "squeeze_excite")
    assert set(asked) == {node.name}
    assert gate.inputs[0] == node.outputs[0]
    assert gate.inputs[5] == node.outputs[1]
    assert gate.op["mean"] is None
    assert after.values[node.outputs[1]].shape == (2, 2, 1, 24)
    assert node.op.activation("convolution") == Relu()


def test_where_no_kernel_or_no_gate_is_nothing_changes():
    before = laid(gated())
    assert passes.fuse_squeeze_excite(before, lambda *_: None) is before
    b = Builder(2, 3, 11, 9)
    y = b.conv("x", 3, 24)
    y = b.add(Conv2d(padding=(1, 1, 1, 1), groups=24), y, b.constant(24, 1, 3, 3))
    alone = laid(b.graph(y))
    assert passes.fuse_squeeze_excite(alone, lambda *_: (7, 7)) is alone


@pytest.mark.parametrize("dtype", ["float16", "tf32", "float32"])
def test_engines_make_means_where_a_device_says_so(monkeypatch, dtype):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    monkeypatch.setattr(
        fake_cuda.FakeTensorCores, "depthwise_means_takes", staticmethod(lambda s, _: boxes(s))
    )
    graph, steps = built(single(gated()), dtype)
    found = found_in(graph)
    assert len(found) == (dtype != "float16")  # there it is one with the convolution before it
    assert [node.name for node in found] == running(steps, "depthwise_means")


def test_what_a_device_that_is_not_there_makes_is_what_the_cpu_makes(monkeypatch, rng):
    fake_cuda.install(monkeypatch, tensor_cores=True)
    for answer in (lambda *_: 0, lambda shape, _: boxes(shape)):
        monkeypatch.setattr(
            fake_cuda.FakeTensorCores, "depthwise_means_takes", staticmethod(answer)
        )
        assert_as_on_cpu(single(gated()), rng, atol=1e-5)


# ---- the kernel ----

# images, channels, rows, columns, side, stride: of MobileNetV3-L and EfficientNet-B0, and odd ones
CASES = [
    (1, 72, 56, 56, 5, 2), (1, 120, 28, 28, 5, 1), (2, 480, 14, 14, 3, 1), (5, 672, 14, 14, 5, 2),
    (1, 960, 7, 7, 5, 1), (3, 240, 28, 28, 3, 2), (1, 4, 1, 1, 3, 1), (2, 36, 15, 27, 3, 1),
    (0, 8, 9, 9, 3, 1),
]  # fmt: skip


def run(case, x, weight, bias, activation=NONE, parts=None):
    n, c, h, w, side, stride = case
    device = Device("cuda")
    shape = _cpu.Conv2dShape(n, c, h, w, c, side, side, stride, stride, *[side // 2] * 4, 1, 1, c)
    own = device.put(np.full(weight.size, np.nan, np.float32))
    call(
        device, "conv2d_nhwc_depthwise_pack", device.put(weight), own, shape, halves.kind("float32")
    )
    out, around = device.guarded((n, shape.out_h, shape.out_w, c))
    parts = boxes(shape) if parts is None else parts
    means, also_around = device.guarded((n, parts, c))
    call(
        device, "depthwise_means", device.put(x), own, out, means, shape, parts,
        *epilogue(device.put(bias), activation),
    )  # fmt: skip
    device.check_guards(around)
    device.check_guards(also_around)
    return device.get(out), device.get(means)[:, :, None]


def record(case, activation=None):
    *_, c, _, _, side, stride = (None, *case)
    conv = Conv2dNhwc((stride, stride), (side // 2,) * 4, (1, 1), c, activation)
    nodes = {
        "convolution": Node("", conv, ("x", "w", "b"), ("y",)),
        "mean": Node("", PartialMeans((BOX_SIDE, BOX_SIDE)), ("y",), ("means",)),
    }
    inputs = "convolution.0", "convolution.1", "convolution.2"
    return region_of("depthwise_means", nodes, inputs, ("convolution", "mean")).op


def arrays(rng, case):
    n, c, h, w, side, _ = case
    x = rng.standard_normal((n, h, w, c)) + 0.5
    weight, bias = rng.standard_normal((c, 1, side, side)), rng.standard_normal(c)
    return [array.astype(np.float32) for array in (x, weight, bias)]


@pytest.fixture
def hopper():
    targets.need(CLUSTERS_OF_HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(rng, hopper, case):
    x, weight, bias = arrays(rng, case)
    for op, activation, given in (
        (None, NONE, None), (Relu(), (Function.relu, 0, 0), bias),
        (HardSwish(), (Function.hard_swish, 0, 0), bias), (Swish(), (Function.swish, 1, 0), bias),
    ):  # fmt: skip
        wanted, means = record(case, op).reference(x, weight, given)
        found, made = run(case, x, weight, given, activation)
        size, of_means = record(case).reference(np.abs(x), np.abs(weight), np.abs(bias))
        terms = weight[0].size + 1
        limit = 1.5 * tolerances.sum_of_products(terms, size) + tolerances.functions(size)
        tolerances.assert_close(found, wanted, limit)
        terms += BOX_SIDE**2
        limit = 1.5 * tolerances.sum_of_products(terms, of_means) + tolerances.functions(of_means)
        tolerances.assert_close(made, means, limit)


@pytest.mark.gpu
def test_images_have_the_bits_that_the_convolution_has_alone(rng, hopper):
    """Each by itself, and means the same bits with any batch and again."""
    case = (9, 120, 28, 28, 5, 1)
    x, weight, bias = arrays(rng, case)
    y, means = run(case, x, weight, bias)
    for n in (0, 8):
        one, of_one = run((1, *case[1:]), x[n : n + 1], weight, bias)
        assert np.array_equal(one[0], y[n])
        assert np.array_equal(of_one[0], means[n])
    for _ in range(3):
        again = run(case, x, weight, bias)
        assert np.array_equal(again[0], y)
        assert np.array_equal(again[1], means)


@pytest.mark.gpu
def test_nan_reaches_the_means_of_its_boxes_alone(rng, hopper):
    case = (1, 8, 14, 14, 3, 1)
    x, weight, bias = arrays(rng, case)
    x[0, 2, 3, 5] = np.nan
    y, means = run(case, x, weight, bias)
    assert np.isnan(y).sum() == 9
    assert np.argwhere(np.isnan(means)).tolist() == [[0, 0, 0, 5]]


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(rng, hopper):
    case = (1, 8, 14, 14, 3, 1)
    given = arrays(rng, case)
    takes = cuda_module.load().depthwise_means_takes
    for images, rows, answer in ((1, 14, 0), (2, 14, 4), (20, 28, 16), (2, 29, 0)):
        shape = _cpu.Conv2dShape(images, 8, rows, rows, 8, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 8)
        assert takes(shape, targets.native()) == answer
    with pytest.raises(ValueError, match="depthwise_means: expected 4 parts, found 3"):
        run(case, *given, parts=3)
    for wrong in ((1, 6, 14, 14, 3, 1), (1, 8, 14, 14, 7, 1), (1, 8, 14, 14, 3, 3)):
        with pytest.raises(ValueError, match="depthwise_means: expected a GPU"):
            run(wrong, *arrays(rng, wrong))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "tf32"])
def test_engines_on_a_gpu(hopper, dtype):
    graph, kernels = on_gpu(single(gated()), dtype)
    assert len(found_in(graph)) == kernels.count("depthwise_means") == 1
