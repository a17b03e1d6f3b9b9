"""expand_depthwise on CUDA: which pairs become one node, and the kernel against float64."""

from __future__ import annotations

import math

import fake_cuda
import halves
import numpy as np
import pytest
import regions
import targets
import tolerances
from conftest import Device
from engines import built, on_gpu, running, single
from halves import HALVES
from lowered import fuse, lay_channels_last
from native import NONE, call, epilogue, packed
from test_expand_depthwise import CASES, arrays, block, found_in, ids, shapes_of
from test_passes import Builder, kinds, same

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import ROUNDING
from cnn_engine.graph import passes
from cnn_engine.graph.passes.fuse.patterns import EXPAND_DEPTHWISE
from cnn_engine.kernels.cuda.requirements import CLUSTERS_OF_HOPPER
from cnn_engine.operators.binary import Mul
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.unary import HardSwish, Relu, Sigmoid, Swish

Function = _cpu.UnaryFunction

#: Of EfficientNet-B0 and MobileNetV3-L; one and two sixteens of columns before and after, even kernels, parts
#: of an image that have other rows, channels that fill no sixteen, borders of which nothing is read.
IMAGES = [
    (1, 80, 14, 14, 480, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (3, 112, 14, 14, 672, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    (2, 112, 14, 14, 672, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1)),
    (5, 192, 7, 7, 1152, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    (1, 160, 7, 7, 200, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (1, 40, 28, 28, 240, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    (2, 40, 28, 28, 240, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    (2, 16, 17, 32, 24, (3, 4), (1, 1), (1, 2, 1, 1), (1, 1)),
    (1, 8, 33, 16, 8, (4, 2), (2, 1), (3, 0, 2, 1), (1, 1)),
    (1, 24, 9, 13, 40, (1, 1), (1, 2), (0, 0, 0, 0), (1, 1)),
    (2, 8, 3, 2, 16, (3, 3), (2, 2), (9, 7, 9, 7), (1, 1)),
    (1, 200, 19, 5, 56, (2, 5), (1, 1), (0, 4, 1, 4), (1, 1)),
    (0, 16, 4, 4, 48, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
]  # fmt: skip


def laid(graph):
    return lay_channels_last(fuse(graph), "cuda", run=8)


def gated(batch=2, channels=8, wide=24, hidden=4):
    """An inverted residual block with a squeeze-and-excite block of two products."""
    b = Builder(batch, 3, 11, 9)
    y = b.add(Swish(), b.add(Conv2d(), b.conv("x", 3, channels), b.constant(wide, channels, 1, 1)))
    second = b.constant(wide, 1, 3, 3), b.constant(wide)
    y = b.add(Relu(), b.add(Conv2d(padding=(1, 1, 1, 1), groups=wide), y, *second))
    gate = b.add(Conv2d(), b.add(ReduceMean((2, 3), True), y), b.constant(hidden, wide, 1, 1))
    gate = b.add(Conv2d(), b.add(Relu(), gate), b.constant(wide, hidden, 1, 1), b.constant(wide))
    y = b.add(Mul(), y, b.add(Sigmoid(), gate))
    return b.graph(b.add(Conv2d(), y, b.constant(channels, wide, 1, 1)))


# ---- the rewrite ----


def expanded(graph, **how):
    return regions.fused(laid(graph), EXPAND_DEPTHWISE, **how)


def test_a_device_is_asked_for_each_pair():
    b, *_, y = block(mean=None)
    graph, asked = b.graph(y), []

    def takes(answer):
        def asks(graph, node):
            asked.append([part.op.kind for part in node.op.nodes])
            return answer

        return lambda graph: expanded(graph, takes=asks)

    assert not found_in(same(graph, takes(False)))
    (node,) = found_in(same(graph, takes(True)))
    assert asked == [["conv2d_nhwc"] * 2] * 2
    assert len(node.outputs) == 1


def test_means_stay_nodes_of_their_own():
    b, *_, y = block(wide=12)  # no gate: channels that come in no eights
    after = same(b.graph(y), expanded)
    (node,) = found_in(after)
    assert len(node.outputs) == 1
    assert "reduce_mean" in kinds(after)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_gates_read_the_means_that_were_made(parts):
    graph = gated()

    def strips(graph, node):
        _, rows, columns, _ = graph.values[node.outputs[0]].shape
        return -(-rows // parts), columns

    def with_means(graph):
        return passes.fuse_squeeze_excite(expanded(graph), strips)

    after = same(graph, with_means)
    (node,) = found_in(after)
    (gate,) = (node for node in after.nodes if node.op.kind == "squeeze_excite")
    assert gate.inputs[5] == node.outputs[1]
    assert after.values[node.outputs[1]].shape == (2, parts, 1, 24)
    scaled = same(graph, lambda graph: passes.fuse_excite_scales(with_means(graph)))
    (gate,) = (node for node in scaled.nodes if node.op.kind == "squeeze_excite")
    assert [part.role for part in gate.op.nodes] == ["total", "first", "second", "scale"]
    assert gate.inputs[5] is not None


@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
def test_engines_expand_where_images_lie_in_16_bits(monkeypatch, dtype):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    graph, steps = built(single(gated()), dtype)
    found = found_in(graph)
    assert len(found) == (dtype in HALVES)
    assert [node.name for node in found] == running(steps, "expand_depthwise")
    for node in found:
        assert node.op.compute_dtype == dtype
        x, y, means = (graph.values[name] for name in (node.inputs[0], *node.outputs))
        assert (x.storage_dtype, y.storage_dtype, means.storage_dtype) == (dtype, dtype, "")
        (gate,) = (one for one in graph.nodes if one.op.kind == "squeeze_excite")
        assert gate.inputs[5] == means.name


# ---- the kernel ----


def run(
    case, x, first, second, biases, compute_dtype, *, inner=NONE, outer=NONE, overflow=halves.NO_FLAG, parts=0
):  # fmt: skip
    device, (_, shape) = Device("cuda"), shapes_of(case, len(x))
    kind, channels = getattr(_cpu.ElementType, compute_dtype), x.shape[3]
    out = halves.Output(device, (len(x), shape.out_h, shape.out_w, len(first)), compute_dtype)
    means, around = device.guarded((len(x), parts, len(first)))
    call(
        device, "expand_depthwise", halves.put(device, x, compute_dtype),
        packed(device, "expand_depthwise", [first, second], shape, channels, kind),
        out.array, means if parts else None, shape, channels, kind,
        *epilogue(device.put(biases[0]), inner), *epilogue(device.put(biases[1]), outer, overflow),
    )  # fmt: skip
    device.check_guards(around)
    y = out.get()
    return (y, device.get(means)[:, :, None]) if parts else y


def record(case, inner=None, outer=None, mean=None):
    _, _, _, _, k, _, stride, padding, dilation = case
    second = Conv2dNhwc(stride, padding, dilation, k, outer)
    return regions.expand_depthwise(Conv2dNhwc(activation=inner), second, mean)


@pytest.fixture
def hopper():
    targets.need(CLUSTERS_OF_HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", IMAGES, ids=ids)
def test_whole_numbers_are_exact(rng, hopper, case, compute_dtype):
    """As long as all that is rounded has few bits."""
    shapes = [array.shape for array in arrays(rng, case)]
    x, first, second, *biases = (rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes)
    x *= rng.random(x.shape) < 0.1  # so that bfloat16 holds every sum
    first *= rng.random(first.shape) < 0.5
    for given in (biases, (None, None)):
        wanted = record(case, Relu()).reference(x, first, second, *given)
        found = run(case, x, first, second, given, compute_dtype, inner=(Function.relu, 0, 0))
        assert np.array_equal(found, halves.rounded(wanted, compute_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize(
    ("inner", "outer"),
    [((Swish(), Function.swish, 1, 0), (Swish(), Function.swish, 1, 0)),
     ((HardSwish(), Function.hard_swish, 0, 0), (Relu(), Function.relu, 0, 0)),
     ((None, *NONE), (None, *NONE))],
    ids=["swish", "hard_swish", "none"],
)  # fmt: skip
@pytest.mark.parametrize("case", IMAGES, ids=ids)
def test_against_reference(rng, hopper, case, inner, outer, compute_dtype):
    x, first, second, *biases = arrays(rng, case)
    x = halves.rounded(x, compute_dtype)
    first /= math.sqrt(first.shape[1])
    wanted = record(case, inner[0], outer[0]).reference(x, first, second, *biases)
    found = run(case, x, first, second, biases, compute_dtype, inner=inner[1:], outer=outer[1:])
    size = record(case).reference(*map(np.abs, (x, first, second, *biases)))
    terms = first.shape[1] + second[0].size + 1
    # Weights, what is between and the result are rounded; functions are no steeper than 1.1, 1.5.
    limit = tolerances.sum_of_products(terms, size) + 6 * ROUNDING[compute_dtype] * size
    tolerances.assert_close(found, wanted, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", IMAGES, ids=ids)
def test_means(rng, hopper, case, compute_dtype):
    """In parts that add up to them, beside the same results."""
    x, first, second, *biases = arrays(rng, case)
    first /= math.sqrt(first.shape[1])
    how = x, first, second, biases
    parts = -(-shapes_of(case, 1)[1].out_h // 8)
    y, means = run(case, *how, compute_dtype, outer=(Function.relu, 0, 0), parts=parts)
    assert np.array_equal(y, run(case, *how, compute_dtype, outer=(Function.relu, 0, 0)))
    if not x.size:
        return
    rows = -(-y.shape[1] // parts)
    for part in range(parts):
        wanted = np.float64(y[:, part * rows : (part + 1) * rows]).sum((1, 2)) / y[0, ..., 0].size
        limit = ROUNDING[compute_dtype] * (wanted + 1e-3)
        tolerances.assert_close(means[:, part, 0], wanted, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [IMAGES[1], IMAGES[3], IMAGES[6]], ids=ids)
def test_each_image_has_the_same_bits_among_others_and_again(rng, hopper, case):
    case = (33, *case[1:])
    x, first, second, *biases = arrays(rng, case)
    how = first, second, biases, "float16"
    together = run(case, x, *how)
    for _ in range(3):
        assert np.array_equal(run(case, x, *how), together)
    for n in (0, len(x) - 1):
        assert np.array_equal(run(case, x[n : n + 1], *how)[0], together[n])


@pytest.mark.gpu
def test_nan_reaches_its_rows_of_all_channels_alone(rng, hopper):
    """What reads it, and no rows that do not."""
    case = (2, 16, 14, 14, 24, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    x, first, second, *biases = arrays(rng, case)
    x[1, 5, 6, 2] = np.nan
    found = run(case, x, first, second, biases, "float16", inner=(Function.swish, 1, 0))
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1, 4:7, 5:8]).all()
    assert np.isfinite(found[1, [*range(4), *range(7, 14)]]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["between", "after", "nowhere"])
def test_results_past_float16_are_told(rng, hopper, where):
    """Of the first convolution, which no one else sees, and of the second."""
    case = (1, 8, 7, 7, 24, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    x, first, second, *biases = (0 * array for array in arrays(rng, case))
    biases[0][5] = 70000.0 if where == "between" else 40000.0
    second[5, 0, 1, 1] = 2.0 if where == "after" else 1.0
    flag = halves.OverflowFlag()
    run(case, x, first, second, biases, "float16", overflow=flag.overflow)
    assert flag.is_set() == (where != "nowhere")


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(hopper):
    module = cuda_module.load()
    for case, expected in (
        (CASES[4], "channels in eights"), (CASES[6], "channels in eights"),
        ((1, 8, 9, 9, 8, (7, 3), (1, 1), (3, 1, 3, 1), (1, 1)), "a kernel of at most 5x5"),
        ((1, 8, 9, 9, 8, (3, 3), (3, 1), (1, 1, 1, 1), (1, 1)), "strides of at most 2"),
        (CASES[1], "images of at most 32 columns"),
        ((1, 8, 9, 14, 8, (3, 3), (1, 1), (1, 3, 1, 3), (1, 1)), "images of at most 32 columns"),
        ((1, 2048, 14, 14, 8, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)), "shared memory has room"),
    ):  # fmt: skip
        _, shape = shapes_of(case, 1)
        assert not module.expand_depthwise_takes(shape, case[1], targets.native())
        with pytest.raises(ValueError, match=expected):
            module.expand_depthwise_packed(shape, case[1], _cpu.ElementType.float16, 0)
    _, shape = shapes_of(IMAGES[0], 1)
    for compute_dtype, x, expected in (
        ("tf32", 256, "float16 or bfloat16"),
        ("float16", 8, "of 16"),
    ):
        with pytest.raises(ValueError, match=expected):
            module.expand_depthwise(
                x, 256, 512, 0, shape, 80, getattr(_cpu.ElementType, compute_dtype), *2 * epilogue(), 0,
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("batch", [1, 2, 20])
def test_engine(dtype, batch):
    _, kernels = on_gpu(single(gated(batch, wide=48)), dtype)
    _, shape = shapes_of((batch, 8, 11, 9, 48, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)), batch)
    takes = cuda_module.load().expand_depthwise_takes(shape, 8, targets.native())
    assert ("expand_depthwise" in kernels) == bool(takes)
