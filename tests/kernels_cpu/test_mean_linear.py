"""mean_linear: the rewrite that makes it, its record, and its kernel on CUDA."""

from __future__ import annotations

import math
from dataclasses import replace

import fake_cuda
import halves
import numpy as np
import pytest
import targets
import tolerances
from conftest import Device
from engines import built, running, single, steps_of
from halves import HALVES
from lowered import fuse, lay_channels_last
from native import NONE, RELU, call, epilogue, packed, prologue, values
from regions import fused, mean_linear
from test_passes import Builder, same

from cnn_engine import Engine, _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import ROUNDING
from cnn_engine.graph.passes.fuse.patterns import MEAN_LINEAR
from cnn_engine.kernels.cuda.requirements import CLUSTERS
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.norm import LayerNorm
from cnn_engine.operators.reduce import ReduceMax, ReduceMean
from cnn_engine.operators.shaping import Reshape, Transpose
from cnn_engine.operators.unary import Erf, HardSwish, Relu


def tail(batch=2, norm=True, relu=True, keepdims=True, after=None, mean=ReduceMean, size=16):
    """A convolution and what many networks end in."""
    b = Builder(batch, 3, 9, 7)
    x = b.conv("x", 3, size)
    x = b.norm(b.add(Relu(), x), size) if norm else x
    averaged = b.add(Relu(), x) if relu else x
    y = b.add(mean((2, 3), keepdims), averaged)
    y = b.add(Reshape((batch, size)), y) if keepdims else y
    y = b.add(Linear(), y, b.constant(10, size), b.constant(10))
    y = b.add(after(), y) if after else y
    return b, averaged, b.graph(y)


def laid(graph):
    return lay_channels_last(fuse(graph), "cuda", run=8)


def joined(graph):
    return fused(laid(graph), MEAN_LINEAR)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "mean_linear"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("keepdims", [True, False])
def test_a_mean_and_a_linear_layer_become_one_node(batch, norm, relu, keepdims):
    *_, graph = tail(batch, norm, relu, keepdims, HardSwish)
    after = same(graph, joined)
    (node,) = found_in(after)
    assert node.op.activation("linear") == HardSwish()
    assert (node.op["relu"] is not None) == (relu and norm)
    assert [name is not None for name in node.inputs] == [True] * 3 + [norm] * 2
    assert [n.op.kind for n in after.nodes if n is not node] == ["conv2d_nhwc"]
    assert "together they are mean_linear" in {note.why for note in after.notes}


def test_what_does_not_fit_stays_as_it_is():
    """Another reduction, a mean with other readers, weights that are computed; where no kernel is faster."""
    b, _, graph = tail()
    graphs = [tail(mean=ReduceMax)[-1], b.graph(*graph.outputs, b.nodes[-3].outputs[0])]
    b, *_ = tail()
    computed = b.add(Relu(), b.constant(10, 16))
    y = b.add(Linear(), b.nodes[-3].outputs[0], computed)
    graphs.append(b.graph(y))
    for graph in graphs:
        assert not found_in(same(graph, joined))
    never = fused(laid(tail()[-1]), MEAN_LINEAR, takes=lambda *_: False)
    assert not found_in(never)


def test_what_others_read_is_not_taken_up():
    """The relu's result is an output, too: the mean reads it."""
    b, averaged, graph = tail()
    (node,) = found_in(same(b.graph(*graph.outputs, averaged), joined))
    assert node.op["relu"] is None
    assert node.inputs[3:] == (None, None)


@pytest.mark.parametrize("after", [HardSwish, Erf])
@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
def test_engines_join_where_a_device_says_so(monkeypatch, dtype, after):
    """The function behind the sum is one that kernels have, or stays."""
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    asked = []
    takes = staticmethod(lambda *how: asked.append(how) or True)
    monkeypatch.setattr(fake_cuda.FakeTensorCores, "mean_linear_takes", takes)
    graph, steps = built(single(tail(after=after)[-1]), dtype)
    nodes = found_in(graph)
    assert [node.name for node in nodes] == running(steps, "mean_linear")
    (node,) = nodes
    assert (node.op.activation("linear") == HardSwish()) == (after is HardSwish)
    x, y = (graph.values[name] for name in (node.inputs[0], node.outputs[0]))
    assert (x.storage_dtype, y.storage_dtype) == (dtype if dtype in HALVES else "", "")
    shape, outputs, compute_dtype, _ = asked[0]
    assert (shape.outer, shape.inner, outputs) == (2, 16, 10)
    assert compute_dtype == getattr(_cpu.ElementType, dtype)


def test_constants_that_a_pass_makes_for_some_batches_are_the_same_arrays_again(monkeypatch):
    """By its array a constant is known on the device: a new one is brought again, in a capture too."""
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    takes = staticmethod(lambda shape, *_: shape.outer == 3)
    monkeypatch.setattr(fake_cuda.FakeTensorCores, "mean_linear_takes", takes)
    graph = replace(single(tail(1, keepdims=False)[-1]), batched=("x",))
    with Engine(graph, device="cuda", dtype="float16") as engine:
        program = engine._plans.open()
        graphs = [program.placed(batch, False).graph for batch in (1, 3, 1, 3)]
    assert [len(found_in(graph)) for graph in graphs] == [0, 1, 0, 1]
    for one, other in (graphs[0::2], graphs[1::2]):
        assert one.constants.keys() == other.constants.keys()
        assert all(one.constants[name] is array for name, array in other.constants.items())


def test_transposes_around_a_norm_of_one_place_run_nothing(monkeypatch, rng):
    """As ConvNeXt ends; by the CPU's kernels on a device that is not there."""
    b = Builder(2, 3, 9, 7)
    y = b.add(ReduceMean((2, 3), True), b.conv("x", 3, 16))
    y = b.add(LayerNorm(), b.add(Transpose((0, 2, 3, 1)), y), b.constant(16), b.constant(16))
    y = b.add(Reshape((2, 16)), b.add(Transpose((0, 3, 1, 2)), y))
    graph = single(b.graph(b.add(Linear(), y, b.constant(10, 16))))
    x = rng.uniform(-1, 1, (2, 3, 9, 7)).astype(np.float32)
    with Engine(graph, device="cpu") as engine:
        (wanted,) = engine.run({"x": x}).values()
    fake_cuda.install(monkeypatch, tensor_cores=True)
    with Engine(graph, device="cuda") as engine:
        (found,) = engine.run({"x": x}).values()
        kinds = [step.kind for step in steps_of(engine, 2).values()]
    assert "transpose" not in kinds
    assert "layer_norm" in kinds
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# ---- the kernel ----

# images, positions, channels, outputs: of ResNets, DenseNet-201, MobileNetV3-L, and odd ones
SHAPES = [
    (1, 49, 2048, 1000), (1, 49, 1920, 1000), (1, 49, 960, 1280), (1, 49, 512, 1000), (1, 49, 2048, 130),
    (1, 64, 1280, 100), (1, 1, 8, 1), (1, 64, 24, 5), (1, 3, 264, 65), (1, 50, 1000, 7), (0, 4, 8, 2),
]  # fmt: skip


def arrays(rng, shape, storage_dtype):
    n, positions, channels, outputs = shape
    x = halves.rounded(rng.standard_normal((n, positions, channels)) + 0.5, storage_dtype)
    weight = rng.standard_normal((outputs, channels)).astype(np.float32) / math.sqrt(channels)
    bias, scale, shift = (
        rng.standard_normal(size).astype(np.float32) for size in (outputs, channels, channels)
    )
    return x, weight, bias, scale, shift


def run(
    x, weight, bias=None, scale=None, shift=None, *, compute_dtype, floor=-math.inf, activation=NONE,
    storage_dtype="float32", overflow=halves.NO_FLAG,
):  # fmt: skip
    device = Device("cuda")
    (n, positions, channels), outputs = x.shape, len(weight)
    shape, kind = _cpu.AxisShape(n, positions, channels), getattr(_cpu.ElementType, compute_dtype)
    out = halves.Output(device, (n, outputs), storage_dtype)
    call(
        device, "mean_linear", halves.put(device, x, compute_dtype),
        packed(device, "mean_linear", [weight], shape, outputs, kind),
        *values(out.array, storage_dtype), shape, outputs, kind,
        *prologue(device.put(scale), device.put(shift), floor=floor),
        *epilogue(device.put(bias), activation, overflow),
    )  # fmt: skip
    return out.get()


@pytest.fixture
def clusters():
    """Skips where no kernel is: on GPUs that have no clusters."""
    targets.need(CLUSTERS)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", halves.STORED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_reference(rng, clusters, shape, compute_dtype):
    x, weight, bias, scale, shift = arrays(rng, shape, compute_dtype)
    for given, floor in (((bias, scale, shift), 0.0), ((bias,), None), ((), None)):
        op = mean_linear(Relu(), floor is not None, len(given) > 1)
        wanted = op.reference(x[:, :, None, :], weight, *given)
        found = run(
            x, weight, *given, compute_dtype=compute_dtype, floor=-math.inf if floor is None else floor,
            activation=RELU,
        )  # fmt: skip
        read = np.abs(x)
        if len(given) > 1:
            read = read * np.abs(scale) + np.abs(shift)
        size = read.sum(1) / shape[1] @ np.abs(weight).T.astype(np.float64)
        size = size + (np.abs(bias) if given else 0)
        limit = (
            tolerances.sum_of_products(shape[1] + shape[2], size) + ROUNDING[compute_dtype] * size
        )
        tolerances.assert_close(found, wanted, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("storage_dtype", halves.STORED)
def test_whole_numbers_are_exact(rng, clusters, storage_dtype):
    """And rounded once where they are kept in 16 bits."""
    x = rng.integers(-2, 3, (1, 64, 256)).astype(np.float32)
    weight = rng.integers(-2, 3, (70, 256)).astype(np.float32)
    wanted = mean_linear().reference(x[:, :, None, :], weight)
    assert np.array_equal(run(x, weight, compute_dtype=storage_dtype), wanted.astype(np.float32))
    found = run(x, weight, compute_dtype=storage_dtype, storage_dtype=storage_dtype)
    assert np.array_equal(found, halves.rounded(wanted, storage_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", ["float16", "float32"])
def test_the_same_bits_again(rng, clusters, compute_dtype):
    given = arrays(rng, (1, 49, 2048, 1000), compute_dtype)
    found = run(*given, compute_dtype=compute_dtype, floor=0.0)
    for _ in range(3):
        assert np.array_equal(run(*given, compute_dtype=compute_dtype, floor=0.0), found)


@pytest.mark.gpu
def test_means_past_float16_are_told_of(clusters):
    """A norm may make them of what is not."""
    x, weight = np.full((1, 4, 8), 60000, np.float32), np.ones((3, 8), np.float32)
    flag, two = halves.OverflowFlag(), np.full(8, 2, np.float32)
    run(x, weight, None, two, 0 * two, compute_dtype="bfloat16", overflow=flag.overflow)
    run(x, weight, None, two / 2, 0 * two, compute_dtype="float16", overflow=flag.overflow)
    assert not flag.is_set()
    run(x, weight, None, two, 0 * two, compute_dtype="float16", overflow=flag.overflow)
    assert flag.is_set()


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", ["float16", "float32"])
def test_nan_reaches_all_outputs(rng, clusters, compute_dtype):
    x, weight, *_ = arrays(rng, (1, 49, 64, 16), compute_dtype)
    assert np.isfinite(run(x, weight, compute_dtype=compute_dtype)).all()
    x[0, 7, 40] = np.nan
    assert np.isnan(run(x, weight, compute_dtype=compute_dtype)).all()


@pytest.mark.gpu
def test_what_it_does_not_take(clusters):
    takes = cuda_module.load().mean_linear_takes
    for name in ("float32", "tf32", "float16", "bfloat16"):
        compute_dtype = getattr(_cpu.ElementType, name)
        assert takes(_cpu.AxisShape(1, 49, 2048), 1000, compute_dtype, targets.native())
    for n, positions, channels, compute_dtype in (
        (2, 49, 512, "float16"), (1, 0, 512, "float16"), (1, 65, 512, "bfloat16"),
        (1, 49, 12, "float16"), (1, 49, 12, "float32"), (1, 49, 4096, "bfloat16"), (1, 49, 4096, "tf32"),
    ):  # fmt: skip
        how = (
            _cpu.AxisShape(n, positions, channels),
            1000,
            getattr(_cpu.ElementType, compute_dtype),
        )
        assert not takes(*how, targets.native())
        with pytest.raises(ValueError, match="mean_linear: expected"):
            cuda_module.load().mean_linear_packed(*how, 0)
