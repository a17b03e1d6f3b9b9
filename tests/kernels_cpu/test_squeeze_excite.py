"""squeeze_excite: the rewrite that makes it, its record, and its kernel on CUDA."""

from __future__ import annotations

import math
from functools import partial

import fake_cuda
import halves
import numpy as np
import pytest
import targets
import tolerances
from conftest import Device
from engines import built, on_gpu, running, single, steps_of
from halves import HALVES
from lowered import fuse, lay_channels_last
from native import NONE, RELU, call, epilogue, packed, values
from regions import squeeze_excite
from test_passes import Builder, same

from cnn_engine import Engine, _cpu, kernels
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import ROUNDING
from cnn_engine.graph import passes
from cnn_engine.kernels.cuda.requirements import HOPPER
from cnn_engine.operators.binary import Mul
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.reduce import ReduceMax, ReduceMean
from cnn_engine.operators.unary import Clip, HardSigmoid, Relu, Sigmoid, Swish
from cnn_engine.target import Target

Function = _cpu.UnaryFunction


def block(batch=2, channels=16, hidden=4, inner=Relu, outer=HardSigmoid, mean=None, bias=True):
    """A convolution, a squeeze-and-excite block and the convolution that reads its product."""
    b = Builder(batch, 3, 9, 7)
    x = b.conv(b.add(Relu(), "x"), 3, channels)
    y = b.add(mean or ReduceMean((2, 3), True), x)
    for filters, function in ((hidden, inner), (channels, outer)):
        read = channels if filters == hidden else hidden
        more = (b.constant(filters),) if bias else ()
        y = b.add(Conv2d(), y, b.constant(filters, read, 1, 1), *more)
        y = b.add(function(), y) if function else y
    gate = y
    y = b.add(Conv2d(), b.add(Mul(), x, gate), b.constant(8, channels, 1, 1))
    return b, x, gate, b.graph(y)


def laid(graph, run=8):
    return lay_channels_last(fuse(graph), "cuda", run)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "squeeze_excite"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("inner", "outer"), [(Relu, HardSigmoid), (Swish, Sigmoid), (None, None)], ids=str
)
def test_a_mean_and_two_products_become_one_node(batch, bias, inner, outer):
    *_, graph = block(batch, inner=inner, outer=outer, bias=bias)
    after = same(graph, laid)
    (node,) = found_in(after)
    assert node.op.activation("first") == (inner and inner())
    assert node.op.activation("second") == (outer and outer())
    assert len(node.covers) == 3 + (inner is not None) + (outer is not None)
    assert not [n for n in after.nodes if n.op.kind in ("reduce_mean", "mul")]
    assert "together they are squeeze_excite" in {note.why for note in after.notes}
    kernel, _ = kernels.choose(
        node, passes.set_compute_dtype(after, "float16"), Target.named("h200")
    )
    # In the rewrites' own float64 there is no kernel.
    assert kernel is None


def test_what_does_not_fit_stays_as_it_is():
    """Another reduction, a mean with other readers, sums that the graph gives back."""
    graphs = [block(mean=ReduceMax((2, 3), True))[-1], block(mean=ReduceMean((3,), True))[-1]]
    b, _, gate, _ = block()
    graphs.append(b.graph(gate, b.nodes[2].outputs[0]))
    for graph in graphs:
        assert not found_in(same(graph, laid))


def test_gates_of_channels_in_fours():
    """In 16 bits they are filled up to eights, which gates read; in float32 others read them as they are."""
    *_, graph = block(channels=12)
    assert not found_in(same(graph, partial(laid, run=4)))
    (node,) = found_in(same(graph, laid))
    assert node.op.activation("first") == Relu()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_gate_multiplies_the_images_itself(batch):
    *_, graph = block(batch)
    asked = []

    def scaled(graph):
        return passes.fuse_excite_scales(laid(graph), lambda graph, node: asked.append(node))

    after = same(graph, scaled)
    (node,) = found_in(after)
    assert [one.op.kind for one in asked] == ["squeeze_excite"]
    assert node.op["scale"]
    (user,) = after.consumers[node.outputs[0]]
    assert not any(user.inputs[4:])
    assert "it multiplies the images itself" in {note.why for note in after.notes}
    assert not found_in(same(graph, lambda g: passes.fuse_excite_scales(laid(g), lambda *_: "no")))[
        0
    ].op["scale"]


@pytest.mark.parametrize("clamp", [None, Clip(0.0, 6.0), Relu(), Sigmoid()], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_a_gate_multiplies_the_images_that_others_read(first, clamp):
    """In the place of a product, and of a clamp behind it, that no convolution makes as it reads."""
    b, x, gate, _ = block()
    y = b.add(Mul(), *((x, gate), (gate, x))[first])
    y = b.add(clamp, y) if clamp else y
    graph = b.graph(b.add(Conv2d(groups=2), y, b.constant(8, 8, 1, 1)))
    after = same(graph, lambda g: passes.fuse_excite_scales(laid(g)))
    (node,) = found_in(after)
    taken = type(clamp) in (Clip, Relu)
    assert node.op["scale"]
    assert node.op["clamp"] == (clamp if taken else None)
    kinds = [other.op.kind for other in after.nodes]
    assert "mul" not in kinds
    assert ("sigmoid" in kinds) == (clamp is not None and not taken)
    assert len(node.covers) == 6 + taken


def test_a_product_with_another_image_stays():
    b, x, gate, _ = block()
    y = b.add(Mul(), b.add(Sigmoid(), x), gate)
    graph = b.graph(b.add(Conv2d(groups=2), y, b.constant(8, 8, 1, 1)))
    after = same(graph, lambda g: passes.fuse_excite_scales(laid(g)))
    assert not found_in(after)[0].op["scale"]


def test_factors_that_others_read_stay():
    """The graph gives them back."""
    b, _, gate, graph = block()
    graph = b.graph(graph.outputs[0], gate)
    after = same(graph, lambda g: passes.fuse_excite_scales(laid(g)))
    assert not any(node.op["scale"] for node in found_in(after))


def test_what_else_is_done_to_the_product_stays_with_who_reads_it():
    b, x, gate, _ = block()
    y = b.norm(b.add(Mul(), x, gate), 16)
    graph = b.graph(b.add(Conv2d(), y, b.constant(8, 16, 1, 1)))
    after = same(graph, lambda g: passes.fuse_excite_scales(laid(g)))
    (node,) = found_in(after)
    assert node.op["scale"]
    (user,) = after.consumers[node.outputs[0]]
    assert len(user.inputs) == 6  # a scale and a shift


def test_the_cpu_has_its_nodes():
    *_, graph = block()
    assert not found_in(lay_channels_last(fuse(graph)))


def test_an_engine_runs_it(monkeypatch):
    """On a device that is not there, whose kernels are the CPU's: every argument is at its place."""
    *_, graph = block()
    wide = np.random.default_rng(3).uniform(-1, 1, (2, 3, 9, 7)).astype(np.float32)
    graph = single(graph)
    with Engine(graph, device="cpu") as engine:
        (wanted,) = engine.run({"x": wide}).values()
    fake_cuda.install(monkeypatch, tensor_cores=True)
    with Engine(graph, device="cuda") as engine:
        (found,) = engine.run({"x": wide}).values()
        kernels_run = [step.kernel for step in steps_of(engine, 2).values()]
    assert "squeeze_excite" in kernels_run
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "scales"), [("float16", True), ("bfloat16", True), ("tf32", False)]
)
def test_gates_multiply_images_in_16_bits(monkeypatch, dtype, scales):
    """Which lie in memory as what they were made of does."""
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    graph, steps = built(single(block()[-1]), dtype)
    (node,) = found_in(graph)
    assert (node.op["scale"] is not None) == scales
    kernel = "squeeze_excite_scale" if scales else "squeeze_excite"
    assert running(steps, kernel) == [node.name]
    if scales:
        x, y = (graph.values[name] for name in (node.inputs[0], node.outputs[0]))
        assert (x.shape, x.storage_dtype) == (y.shape, y.storage_dtype) == (x.shape, dtype)


# ---- the kernel ----

# images, positions, channels, hidden: of EfficientNet and MobileNetV3, odd ones, and one whose weights shared
# memory does not hold
SHAPES = [
    (1, 12544, 32, 8), (2, 3136, 96, 4), (1, 784, 144, 6), (3, 196, 480, 20), (1, 49, 1152, 48),
    (20, 49, 960, 240), (1, 1, 8, 1), (33, 3, 72, 24), (2, 1551, 16, 7), (1, 30, 4096, 3),
    (1, 5, 1536, 1536), (2, 9, 24, 4096), (0, 4, 8, 2),
]  # fmt: skip


def run(x, first, second, biases, compute_dtype, storage_dtype, inner, outer, means=None):
    device = Device("cuda")
    n, positions, channels = x.shape
    shape, hidden = _cpu.AxisShape(n, positions, channels), len(first)
    kind = getattr(_cpu.ElementType, compute_dtype)
    out = halves.Output(device, (n, channels), "float32")
    parts = 0 if means is None else means.shape[1]
    call(
        device, "squeeze_excite", *values(halves.put(device, x, storage_dtype), storage_dtype),
        packed(device, "squeeze_excite", [first, second], shape, hidden, kind),
        device.put(means), parts, out.array, shape, hidden, kind,
        *epilogue(device.put(biases[0]), inner), *epilogue(device.put(biases[1]), outer),
    )  # fmt: skip
    return out.get()


def arrays(rng, shape, storage_dtype="float32"):
    n, positions, channels, hidden = shape
    x = halves.rounded(rng.standard_normal((n, positions, channels)) + 1, storage_dtype)
    first = rng.standard_normal((hidden, channels)).astype(np.float32) / math.sqrt(channels)
    second = rng.standard_normal((channels, hidden)).astype(np.float32) / math.sqrt(hidden)
    biases = [rng.standard_normal(size).astype(np.float32) for size in (hidden, channels)]
    return x, first, second, biases


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("compute_dtype", "storage_dtype"),
    [("float32", "float32"), ("tf32", "float32"), ("float16", "float16"), ("float16", "float32"),
     ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(rng, shape, compute_dtype, storage_dtype):
    x, first, second, biases = arrays(rng, shape, storage_dtype)
    hidden, channels = first.shape
    for given in (biases, (None, None)):
        images, weights = x[:, :, None, :], (first[..., None, None], second[..., None, None])
        wanted = squeeze_excite(Relu()).reference(images, *weights, *given)[:, 0, 0]
        found = run(x, first, second, given, compute_dtype, storage_dtype, RELU, NONE)
        mean = np.abs(x).mean(1) if x.size else np.abs(x).sum(1)
        sums = mean @ np.abs(first).T + (0 if given[0] is None else np.abs(given[0]))
        size = sums @ np.abs(second).T + (0 if given[1] is None else np.abs(given[1]))
        limit = tolerances.sum_of_products(x.shape[1] + channels + hidden, size)
        if compute_dtype in HALVES:
            limit = limit + 2 * ROUNDING[compute_dtype] * size
        tolerances.assert_close(found, wanted, limit)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("inner", "outer"),
    [((Swish(), Function.swish, 1, 0), (Sigmoid(), Function.sigmoid, 1, 0)),
     ((Relu(), Function.relu, 0, 0), (HardSigmoid(1 / 6), Function.hard_sigmoid, 1 / 6, 0.5))],
    ids=["efficientnet", "mobilenet"],
)  # fmt: skip
def test_functions(rng, inner, outer):
    x, first, second, biases = arrays(rng, (3, 49, 96, 24))
    found = run(x, first, second, biases, "float32", "float32", inner[1:], outer[1:])
    op = squeeze_excite(inner[0], outer[0])
    weights = first[..., None, None], second[..., None, None]
    wanted = op.reference(x[:, :, None, :], *weights, *biases)[:, 0, 0]
    tolerances.assert_close(found, wanted, np.full_like(wanted, 1e-5))


#: What run() takes behind the biases, as EfficientNet has gates.
IN_FLOAT16 = "float16", "float16", (Function.swish, 1, 0), (Function.sigmoid, 1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("storage_dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [*SHAPES[:5], SHAPES[7]], ids=str)
def test_means_that_are_given(rng, shape, storage_dtype, parts):
    """As parts that add up to them; the images are not read."""
    x, first, second, biases = arrays(rng, shape)
    how = first, second, biases, storage_dtype, storage_dtype, *IN_FLOAT16[2:]
    means = rng.standard_normal((len(x), parts, x.shape[2])).astype(np.float32)
    weights = first[..., None, None], second[..., None, None]
    op = squeeze_excite(Swish(), Sigmoid(), means=True)
    wanted = op.reference(x[:, :, None], *weights, *biases, means[:, :, None])[:, 0, 0]
    found = run(np.nan * x, *how, means)
    limit = 8 * ROUNDING["float16"] if storage_dtype == "float16" else 4e-6
    tolerances.assert_close(found, wanted, np.full_like(wanted, limit))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(33, 196, 480, 20), (20, 12544, 32, 8)], ids=str)
def test_each_image_has_the_same_bits_among_others_and_again(rng, shape):
    x, first, second, biases = arrays(rng, shape, "float16")
    how = first, second, biases, *IN_FLOAT16
    together = run(x, *how)
    for _ in range(3):
        assert np.array_equal(run(x, *how), together)
    for n in (0, len(x) - 1):
        assert np.array_equal(run(x[n : n + 1], *how)[0], together[n])


@pytest.mark.gpu
def test_nan_reaches_all_factors_of_its_image_alone(rng):
    x, first, second, biases = arrays(rng, (2, 49, 64, 16))
    x[1, 7, 40] = np.nan
    found = run(x, first, second, biases, "float32", "float32", NONE, NONE)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(1, 784, 120, 32), (3, 196, 480, 20), (1, 196, 672, 28), (2, 49, 1152, 48), (20, 49, 960, 240),
     (33, 3, 72, 24), (1, 1, 8, 1), (2, 250, 64, 7), (0, 4, 8, 2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("storage_dtype", HALVES)
@pytest.mark.parametrize("limits", [(-math.inf, math.inf), (-0.25, 0.5)])
def test_images_are_multiplied(rng, shape, storage_dtype, limits):
    """By the factors that it makes by itself, clamped and rounded once."""
    compute_dtype = storage_dtype
    x, first, second, biases = arrays(rng, shape, storage_dtype)
    device, (n, positions, channels) = Device("cuda"), x.shape
    how = (Function.swish, 1, 0), (Function.sigmoid, 1, 0)
    factors = run(x, first, second, biases, compute_dtype, storage_dtype, *how)
    sizes, kind = _cpu.AxisShape(n, positions, channels), getattr(_cpu.ElementType, compute_dtype)
    targets.need(HOPPER)
    if not cuda_module.load().squeeze_excite_scales(sizes, len(first), targets.native()):
        pytest.skip("images that threads cannot keep")
    out = halves.Output(device, x.shape, storage_dtype)
    call(
        device, "squeeze_excite_scale", *values(halves.put(device, x, storage_dtype), storage_dtype),
        packed(device, "squeeze_excite", [first, second], sizes, len(first), kind), out.array,
        sizes, len(first), kind, *epilogue(device.put(biases[0]), how[0]),
        *epilogue(device.put(biases[1]), how[1]), *epilogue(None, (Function.clip, *limits)),
    )  # fmt: skip
    wanted = np.clip(x * factors[:, None, :], *limits)
    assert np.array_equal(out.get(), halves.rounded(wanted, storage_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("large", "clamped"), [(False, False), (True, False), (True, True)])
def test_products_past_float16_are_told(rng, large, clamped):
    x, first, second, _ = arrays(rng, (2, 49, 64, 16), "float16")
    x[1, 7, 40] = 40000.0 if large else 4.0
    device, flag = Device("cuda"), halves.OverflowFlag()
    sizes, kind = _cpu.AxisShape(2, 49, 64), _cpu.ElementType.float16
    z = halves.Output(device, x.shape, "float16")
    call(
        device, "squeeze_excite_scale", *values(halves.put(device, x, "float16"), "float16"),
        packed(device, "squeeze_excite", [0 * first, second], sizes, 16, kind), z.array, sizes, 16, kind,
        *epilogue(), *epilogue(device.put(np.full(64, 3, np.float32))),
        *epilogue(None, (Function.clip, -math.inf, 60000.0 if clamped else math.inf), flag.overflow),
    )  # fmt: skip
    assert flag.is_set() == (large and not clamped)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("positions", "storage_dtype"), [(3136, "float16"), (784, "float16"), (49, "float32")]
)
def test_images_that_threads_cannot_keep_are_not_multiplied(positions, storage_dtype):
    module, shape = cuda_module.load(), _cpu.AxisShape(1, positions, 240)
    assert storage_dtype == "float32" or not module.squeeze_excite_scales(
        shape, 4, targets.native()
    )
    with pytest.raises(ValueError, match="expected 16 bits, and images that threads can keep"):
        module.squeeze_excite_scale(
            *values(256, storage_dtype), 256, 512, shape, 4, _cpu.ElementType.float16,
            *3 * epilogue(), 0,
        )  # fmt: skip


@pytest.mark.gpu
def test_what_does_not_fit_is_refused():
    module, kind = cuda_module.load(), _cpu.ElementType.float16
    for channels, hidden in ((12, 4), (8192, 4), (8, 0), (8, 5000)):
        with pytest.raises(ValueError, match="expected channels in eights"):
            module.squeeze_excite_packed(_cpu.AxisShape(1, 4, channels), hidden, kind, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 2, 9, 20, 33])
def test_engine(dtype, batch):
    *_, graph = block(batch, channels=64, hidden=12)
    _, found = on_gpu(single(graph), dtype)
    shape = _cpu.AxisShape(batch, 63, 64)
    scales = (
        dtype in HALVES
        and HOPPER.met_by(targets.here())
        and cuda_module.load().squeeze_excite_scales(shape, 12, targets.native())
    )
    assert ("squeeze_excite_scale" if scales else "squeeze_excite") in found
