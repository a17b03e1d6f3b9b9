"""depthwise_norm: the rewrite that makes it, its record, and its kernel on CUDA."""

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
from native import NONE, call, epilogue, values
from regions import depthwise_norm, fused
from test_passes import Builder, same

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.graph.passes.fuse.patterns import DEPTHWISE_NORM
from cnn_engine.kernels.cuda.requirements import CLUSTERS_OF_HOPPER
from cnn_engine.operators.channels_last import TO_FIRST, TO_LAST, Conv2dNhwc
from cnn_engine.operators.norm import LayerNorm
from cnn_engine.operators.shaping import Transpose
from cnn_engine.operators.unary import Relu

EPSILON = 1e-6
TYPES = ["float32", "float16", "bfloat16"]


def block(batch=2, channels=64, size=(11, 9), shift=True, between=None, reads=False, own=True):
    """How a block of ConvNeXt begins: 7x7, each channel by itself, each place's channels normalised.

    Of images that a convolution made, or of the caller's, whose channels lie side by side.
    """
    b = Builder(batch, 3, *size) if own else Builder(batch, *size, channels)
    y = b.conv("x", 3, channels, 1) if own else b.add(Transpose(TO_FIRST), "x")
    y = b.conv(y, channels, channels, 7, padding=(3,) * 4, groups=channels)
    if between is not None:
        y = b.add(between, y)
    made = y
    y = b.add(Transpose(TO_LAST), y)
    parameters = [b.constant(channels) for _ in range(1 + shift)]
    y = b.add(Transpose(TO_FIRST), b.add(LayerNorm(-1, EPSILON), y, *parameters))
    y = b.conv(y, channels, 8, 1)
    return b.graph(y, made) if reads else b.graph(y)


def laid(graph):
    return lay_channels_last(fuse(graph), "cuda")


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "depthwise_norm"]


# ---- the rewrite and the record ----


@pytest.mark.parametrize("shift", [True, False])
def test_a_convolution_and_its_norm_become_one(shift):
    asked = []

    def takes(graph, node):
        asked.append([part.op.kind for part in node.op.nodes])
        return True

    after = same(block(shift=shift), lambda g: fused(laid(g), DEPTHWISE_NORM, takes=takes))
    (node,) = found_in(after)
    assert asked == [["conv2d_nhwc", "layer_norm"]]
    assert node.op["norm"].epsilon == EPSILON
    assert (node.inputs[4] is not None) == shift
    assert not [one for one in after.nodes if one.op.kind == "layer_norm"]


def test_where_it_is_not_that_nothing_changes():
    before = laid(block())
    assert fused(before, DEPTHWISE_NORM, takes=lambda *_: False) is before
    for other in (block(between=Relu()), block(reads=True)):
        other = laid(other)
        assert fused(other, DEPTHWISE_NORM) is other


@pytest.mark.parametrize("dtype", ["float16", "tf32", "float32"])
def test_engines_normalise_where_a_device_says_so(monkeypatch, dtype):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    asked = []

    def takes(shape, storage_dtype, device):
        asked.append(storage_dtype)
        return True

    monkeypatch.setattr(fake_cuda.FakeTensorCores, "depthwise_norm_takes", staticmethod(takes))
    graph, steps = built(single(block()), dtype)
    (node,) = found_in(graph)
    assert [node.name] == running(steps, "depthwise_norm")
    assert set(asked) == {halves.kind(dtype if dtype == "float16" else "float32")}


def test_images_of_the_callers_are_normalised_apart(monkeypatch):
    fake_cuda.install(monkeypatch, tensor_cores=True)
    monkeypatch.setattr(
        fake_cuda.FakeTensorCores, "depthwise_norm_takes", staticmethod(lambda *_: True)
    )
    for own in (True, False):
        graph, steps = built(single(block(own=own)), "float32")
        assert len(found_in(graph)) == len(running(steps, "depthwise_norm")) == own


def test_what_a_device_that_is_not_there_makes_is_what_the_cpu_makes(monkeypatch, rng):
    fake_cuda.install(monkeypatch, tensor_cores=True)
    for answer in (False, True):
        monkeypatch.setattr(
            fake_cuda.FakeTensorCores,
            "depthwise_norm_takes",
            staticmethod(lambda *_, answer=answer: answer),
        )
        assert_as_on_cpu(single(block()), rng, atol=1e-4)


# ---- the kernel ----

# images, channels, rows, columns: ConvNeXt's, at low batch; of more than 16 parts; boxes that are not full;
# one place; as many boxes as fit no multiprocessor of their own; none
CASES = [
    (1, 96, 56, 56), (1, 192, 28, 28), (2, 384, 14, 14), (1, 768, 7, 7), (1, 1024, 5, 8),
    (2, 64, 9, 15), (3, 64, 1, 1), (1, 512, 20, 3), (5, 128, 33, 47), (1, 640, 8, 6), (0, 96, 4, 4),
]  # fmt: skip


def shape_of(case, side=7, stride=1):
    n, c, h, w = case
    return _cpu.Conv2dShape(n, c, h, w, c, side, side, stride, stride, *[side // 2] * 4, 1, 1, c)


def run(case, x, weight, bias, scale, shift, kept="float32", overflow=halves.NO_FLAG, **other):
    n, c, _, _ = case
    device, shape = Device("cuda"), shape_of(case, **other)
    own = halves.put(device, np.full(weight.size, np.nan, np.float32), kept)
    call(device, "conv2d_nhwc_depthwise_pack", device.put(weight), own, shape, halves.kind(kept))
    y = halves.Output(device, (n, shape.out_h, shape.out_w, c), kept)
    call(
        device, "depthwise_norm", *values(halves.put(device, x, kept), kept), own, *values(y.array, kept),
        shape, device.put(scale), device.put(shift), EPSILON, *epilogue(device.put(bias), NONE, overflow),
    )  # fmt: skip
    return y.get()


def arrays(rng, case, kept="float32"):
    n, c, h, w = case
    x, weight = rng.standard_normal((n, h, w, c)), rng.standard_normal((c, 1, 7, 7)) / 7
    given = [array.astype(np.float32) for array in (x, weight)]
    return [
        *(halves.rounded(array, kept) for array in given),
        *(rng.standard_normal(c).astype(np.float32) for _ in range(3)),
    ]


def limit_of(case, x, weight, bias, scale, shift, kept):
    """The sums' errors, which a place's deviation divides, and what is rounded in the end."""
    conv = Conv2dNhwc((1, 1), (3,) * 4, (1, 1), case[1])
    c = conv.reference(x, weight, bias)
    size = conv.reference(np.abs(x), np.abs(weight), np.abs(bias))
    deviation = np.sqrt(c.var(-1, keepdims=True) + EPSILON)
    y = np.abs((c - c.mean(-1, keepdims=True)) / deviation * scale)
    terms = tolerances.sum_of_products(49 + case[1], size.max(-1, keepdims=True)) / deviation
    rounding = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[kept]
    return terms * (np.abs(scale) + y) + (rounding + 8 * tolerances.EPS) * (y + np.abs(shift))


def record(channels):
    convolution = Conv2dNhwc((1, 1), (3,) * 4, (1, 1), channels)
    return depthwise_norm(convolution, LayerNorm(-1, EPSILON))


@pytest.fixture
def hopper():
    targets.need(CLUSTERS_OF_HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(rng, hopper, case, kept):
    given = arrays(rng, case, kept)
    x, weight, bias, scale, shift = given
    op = record(case[1])
    limit = limit_of(case, *given, kept)
    wanted = op.reference(x, weight, scale, bias, shift)
    tolerances.assert_close(run(case, *given, kept), wanted, limit)
    wanted = op.reference(x, weight, scale)
    found = run(case, x, weight, None, scale, None, kept)
    tolerances.assert_close(found, wanted, limit_of(case, x, weight, 0 * bias, scale, shift, kept))


@pytest.mark.gpu
def test_a_mean_that_is_large_beside_the_deviation_costs_few_digits(rng, hopper):
    case = (1, 192, 14, 14)
    x, weight, bias, scale, shift = arrays(rng, case)
    bias = bias + np.float32(1000)
    op = record(case[1])
    wanted = op.reference(x, weight, scale, bias, shift)
    found = run(case, x, weight, bias, scale, shift)
    assert np.abs(found - wanted).max() < 8 * 1000 * tolerances.EPS * np.abs(scale).max()


@pytest.mark.gpu
@pytest.mark.parametrize("kept", TYPES)
def test_images_have_the_same_bits_with_any_batch(rng, hopper, kept):
    """Boxes of 7 rows, of 14, with a multiprocessor each and without."""
    case = (9, 96, 28, 28)
    given = arrays(rng, case, kept)
    y = run(case, *given, kept)
    for n in (0, 8):
        one = run((1, *case[1:]), given[0][n : n + 1], *given[1:], kept)
        assert np.array_equal(one[0], y[n])
    for _ in range(3):
        assert np.array_equal(run(case, *given, kept), y)


@pytest.mark.gpu
def test_nan_and_infinities_reach_the_places_whose_windows_they_are_in(rng, hopper):
    case = (1, 96, 15, 16)
    for value in (np.nan, np.inf):
        given = arrays(rng, case)
        given[0][0, 2, 9, 5] = value
        reached = np.isnan(run(case, *given)).any(-1)[0]
        wanted = np.zeros((15, 16), bool)
        wanted[0:6, 6:13] = True
        assert np.array_equal(reached, wanted)


@pytest.mark.gpu
def test_results_past_float16_are_told(rng, hopper):
    case = (1, 64, 3, 7)
    given, flag = arrays(rng, case, "float16"), halves.OverflowFlag()
    run(case, *given, "float16", flag.overflow)
    assert not flag.is_set()
    given[3] *= np.float32(1e6)
    run(case, *given, "float16", flag.overflow)
    assert flag.is_set()


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(rng, hopper):
    takes, kind = cuda_module.load().depthwise_norm_takes, halves.kind
    for case, kept, answer in (
        ((1, 96, 56, 56), "float32", 1), ((5, 96, 56, 56), "float32", 0),
        ((10, 384, 14, 14), "float16", 1), ((20, 384, 14, 14), "float16", 0),
        ((1, 80, 7, 7), "float32", 0), ((1, 32, 7, 7), "float32", 0), ((1, 1056, 7, 7), "float32", 0),
        ((1, 544, 7, 7), "float32", 0),
    ):  # fmt: skip
        assert takes(shape_of(case), kind(kept), targets.native()) == answer
    case = (1, 64, 14, 14)
    x, weight, *given = arrays(rng, case)
    for side, stride in ((5, 1), (7, 2)):
        assert not takes(shape_of(case, side, stride), kind("float32"), targets.native())
        with pytest.raises(ValueError, match="depthwise_norm: expected a GPU"):
            run(case, x, weight[..., :side, :side].copy(), *given, side=side, stride=stride)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("channels", [64, 768])
def test_engines_on_a_gpu(hopper, dtype, channels):
    graph, kernels = on_gpu(single(block(channels=channels)), dtype)
    assert len(found_in(graph)) == kernels.count("depthwise_norm") == 1
