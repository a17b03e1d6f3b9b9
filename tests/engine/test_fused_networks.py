"""Chains of layers that are not compiled in: which there are, and on a GPU what their kernels make."""

from __future__ import annotations

import re

import fake_cuda
import numpy as np
import pytest
import test_fused_cuda
import tolerances
from test_fused_cuda import CIFAR10, ERROR, random_weights, run

from benchmarks import fused_networks as chains
from benchmarks.fused_networks import layers_of, network
from cnn_engine import Engine
from cnn_engine.devices import cuda_module
from cnn_engine.devices.cuda import CudaDevice
from cnn_engine.graph.network import Softmax
from cnn_engine.kernels import fused_network
from cnn_engine.lower.fused_network import chain
from cnn_engine.target import Target

#: Name -> a network, and how many of its layers are the chain: the benchmark's, and such as differ from
#: the compiled-in ones in other ways.
OTHERS = {
    "odd sizes": (
        (3, 31, 29),
        "conv 12 4 1, relu, conv 7 3, tanh, pool, conv 9 2 1, relu, pool",
        8,
    ),
    "odd output": ((2, 14, 18), "conv 5 3, relu, conv 40 3 2, relu", 4),
    "one position": ((4, 9, 9), "conv 24 5 0 2, relu, conv 16 3, tanh, linear 3, softmax", 4),
    "odd filters by warpgroups": (
        (1, 64, 32),
        "conv 32 3 1 2, relu, conv 64 3 1 2, tanh, conv 9 2 0 2, relu",
        6,
    ),
    "wide": (
        (1, 16, 16),
        "conv 64 3 1, relu, pool, conv 96 3 1, relu, pool, linear 16, softmax",
        8,
    ),
}
COUNTS = {"LeNet-5": 6, "100 classes": 9}  # the others to their end
CHAINS = {name: (network(name, *some), COUNTS.get(name)) for name, some in chains.CHAINS.items()}
CHAINS |= {name: (network(name, *some), count) for name, (*some, count) in OTHERS.items()}

HOPPER = Target.named("h200")


def description(name: str, weights: dict[str, np.ndarray]) -> tuple:
    network, count = CHAINS[name]
    return chain(network.graph(1, True, weights), "float32", count).op.description(weights)


def module():
    try:
        return cuda_module.load()
    except Exception as error:
        pytest.skip(f"needs an installation with the CUDA kernels: {error}")


@pytest.mark.parametrize("name", CHAINS)
def test_source_has_the_layers(name, rng):
    described = description(name, random_weights(CHAINS[name][0], rng))
    fused = module().FusedNetwork
    source = fused.source(*described, "float32")
    assert re.search(
        rf"Network<{described[0][0]}, {described[0][1]}, {described[0][2]}, \d+", source
    )
    assert source.count("Conv<") == sum(row[0] == "conv2d" for row in described[3])
    assert "(Net, Half, 2)" in source
    assert "(Net, Bfloat16, 1)" in fused.source(*described, "bfloat16")
    headers = module().program_headers
    included = set(re.findall(r'#include "([^"]+)"', source + "".join(headers.values())))
    assert included | {"cuda/common/pointwise.cuh"} == set(headers), "they include each other alone"


def test_networks_that_are_compiled_in_have_source_without_a_device(rng):
    arguments = test_fused_cuda.description(CIFAR10, random_weights(CIFAR10, rng))
    source = module().FusedNetwork.source(*arguments, "float16")
    assert re.search(r"Network<3, 32, 32, 10, Conv<16, 5, 2, Activation::relu, true, 1>", source)
    assert "(Net, Half, 1)" in source


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_compiled_in_networks_need_no_program_and_have_one(gpu, dtype, rng):
    """For a device that their kernels are not compiled for; it makes what they make."""
    if module().architectures.startswith("80-virtual"):
        pytest.skip("where there was no GPU to build for, all are compiled at first use")
    weights = random_weights(CIFAR10, rng)
    arguments = *test_fused_cuda.description(CIFAR10, weights), dtype
    fused, device = module().FusedNetwork, CudaDevice(0)
    assert fused.source(*arguments, 0) == ""
    source = fused.source(*arguments)
    assert source.count("Conv<") == 3
    made = fused_network._at_first_use(fused)(*arguments, device, source)
    assert made.instantiation == "at first use"
    compiled_in = fused(*arguments)
    assert compiled_in.instantiation == "cifar10"
    for images in (1, 5, 133, 1001):
        x = rng.integers(0, 256, (images, *CIFAR10.input_shape)).astype(np.uint8)
        wanted = run(gpu, compiled_in, x)
        assert np.abs(run(gpu, made, x) - wanted).max() < ERROR[dtype]


WRONG = [
    ((5, 8, 8), "conv 4 3, conv 4 3", "input: expected at most 4 channels, found 5"),
    ((1, 8, 8), "conv 4 3, relu", "the network's end: expected two convolutions at least, found 1"),
    ((1, 8, 8), "relu", r"layer 1 \(relu\): expected two convolutions at least, found 0"),
    ((1, 40, 40), ", ".join(["conv 4 3"] * 5), r"layer 5 \(conv2d\): expected at most 4 convolutions"),
    ((1, 20, 20), "conv 4 9, conv 4 3", "expected a square kernel of at most 7x7, found 9x9"),
    ((1, 20, 20), "conv 4 3 0 3, conv 4 3", "expected a stride of 1 or 2, found 3x3"),
    ((1, 20, 20), "conv 4 3 3, conv 4 3", "expected the same padding on all sides, less than the kernel"),
    ((1, 20, 20), "conv 4 3 0 2, pool, conv 4 3", "expected it behind a stride of 1, found 2"),
    ((1, 6, 6), "conv 4 3, pool, conv 4 3", "expected a kernel no larger than its input, found 3x3 on 2x2"),
    ((1, 20, 20), "conv 4 3, relu, relu", r"layer 3 \(relu\): expected two convolutions"),
    ((1, 20, 20), "conv 4 3, conv 4 3, pool, linear 17, softmax", "expected at most 16 outputs, behind"),
    ((1, 20, 20), "conv 4 3, conv 4 3, linear 10, softmax", "behind a convolution that is pooled"),
    ((1, 20, 20), "conv 4 3, conv 4 3, pool, linear 10", "the network's end: expected softmax"),
    ((3, 224, 224), "conv 16 3, conv 16 3", "expected what fits into the shared memory of a block, found"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "layers", "reason"), WRONG)
def test_says_what_does_not_fit(shape, layers, reason):
    rows = []
    for kind, outputs, kernel, padding, stride in layers_of(layers):
        if kind == "pool":
            kind, kernel, stride = "max_pool2d", 2, 2
        rows.append((kind, outputs, kernel, kernel, stride, stride, padding, padding, 0, 0))
    with pytest.raises(ValueError, match=reason):
        module().FusedNetwork.source(shape, 1.0, 0.0, rows, "float32")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_compiles_without_a_gpu(dtype, rng, tmp_path, monkeypatch):
    nvrtc = pytest.importorskip("cnn_engine.kernels.user.nvrtc")
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(tmp_path))
    fused = module().FusedNetwork
    source = fused.source(
        *description("one position", random_weights(CHAINS["one position"][0], rng)), dtype
    )
    began = []
    try:
        made = nvrtc.compile_program(
            source, module().program_headers, HOPPER, began=lambda: began.append(1)
        )
    except Exception as error:
        if "NVRTC: needed" in str(error) or "CuPy" in str(error):
            pytest.skip(str(error))
        raise
    again = nvrtc.compile_program(
        source, module().program_headers, HOPPER, began=lambda: began.append(2)
    )
    assert made == again
    assert began == [1]
    timed = nvrtc.compile_program(
        source, module().program_headers, HOPPER, "CNN_ENGINE_FUSED_TIMED"
    )
    assert timed != made
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("batch", "kernels"), [(3, ["linear_layers"]), (40, ["implicit_gemm"] * 3 + ["softmax"])]
)
def test_layers_of_rows_behind_a_chain(batch, kernels, rng, monkeypatch):
    """They have their functions in them, and round what they multiply as a type with float16's bits does."""
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    source = module().FusedNetwork.source

    def refused(*arguments):
        try:
            source(*arguments[:5])
        except ValueError as error:
            return str(error)
        return ""

    monkeypatch.setattr(fake_cuda.FakeFused, "why_not", staticmethod(refused))
    made = CHAINS["LeNet-5"][0]
    weights = random_weights(made, rng)
    images = rng.standard_normal((batch, *made.input_shape)).astype(np.float32)
    out = np.empty((batch, made.classes), np.float32)
    engine = Engine(made, weights=weights, device="cuda", dtype="float16", variant="fused")
    plan = engine.plan_at(images.ctypes.data, out.ctypes.data, batch, images.dtype)
    computed = [step.kernel for step in plan.steps if step.kind not in ("copy", "sync")]
    assert computed == ["fused", *kernels]
    plan.run()
    wanted = Engine(made, weights=weights, device="cpu", variant="if").predict(images)
    assert np.abs(out - wanted).max() < 1e-5
    graph = engine._plans.open().placed(batch, False).graph
    if len(kernels) == 1:
        (op,) = (node.op for node in graph.nodes if node.op.kind == "linear_layers")
        functions = [part.op.activation for part in op.nodes if part.role != "softmax"]
    else:
        rows = [node.op for node in graph.nodes if node.op.kind == "linear"]
        assert [op.compute_dtype for op in rows] == ["tf32"] * 3
        functions = [op.activation for op in rows]
    assert [function is not None for function in functions] == [True, True, False]


def compiled(name: str, weights: dict[str, np.ndarray], dtype: str):
    """Returns the kernels of a chain on the first GPU."""
    described = description(name, weights)
    fused, device = module().FusedNetwork, CudaDevice(0)
    source = fused.source(*described, dtype)
    return fused_network._at_first_use(fused)(*described, dtype, device, source)


def wanted_of(name: str, weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Returns what the chain makes, in float64, a row per image."""
    network, count = CHAINS[name]
    op = chain(network.graph(1, True, weights), "float32", count).op
    rows = op.reference(images, *(weights[each] for each in op.inputs[1:]))
    return rows.reshape(len(images), -1)


@pytest.fixture
def gpu():
    from conftest import Device

    return Device("cuda")


def check(found: np.ndarray, wanted: np.ndarray, dtype: str, name: str) -> None:
    """Probabilities have the devices' limits; what else a chain makes, theirs of its largest number."""
    network, count = CHAINS[name]
    ends = network.layers[(count or len(network.layers)) - 1]
    largest = 1.0 if isinstance(ends, Softmax) else np.abs(wanted).max()
    tolerances.assert_close(found, wanted, ERROR[dtype] * largest, part=name)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3, 40, 133, 301])
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("name", CHAINS)
def test_against_reference(name, dtype, count, gpu, rng):
    weights = random_weights(CHAINS[name][0], rng)
    shape = (count, *CHAINS[name][0].input_shape)
    kernels = compiled(name, weights, dtype)
    for images in (
        rng.integers(0, 256, shape, np.uint8),
        rng.standard_normal(shape).astype(np.float32),
    ):
        found = run(gpu, kernels, images)
        check(found, wanted_of(name, weights, images), dtype, name)
        assert np.array_equal(found, run(gpu, kernels, images)), "other bits"
        assert np.array_equal(found, run(gpu, kernels, images, misaligned=1)), "other bits"
    assert len(run(gpu, kernels, images[:0])) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHAINS)
def test_batches_make_the_same_probabilities(name, gpu, rng):
    """A cluster an image, a block an image, many images per block: sums in other orders, as little apart."""
    weights = random_weights(CHAINS[name][0], rng)
    images = rng.integers(0, 256, (600, *CHAINS[name][0].input_shape), np.uint8)
    kernels = compiled(name, weights, "float32")
    whole_batch = run(gpu, kernels, images)
    for count in (1, 17, 50, 132):
        check(
            run(gpu, kernels, images[:count]),
            whole_batch[:count].astype(np.float64),
            "float32",
            name,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("name", ["LeNet-5", "VGG-like", "strides of 2"])
def test_timed_parts(name, count, gpu, rng):
    import cupy

    weights = random_weights(CHAINS[name][0], rng)
    images = cupy.asarray(rng.integers(0, 256, (count, *CHAINS[name][0].input_shape), np.uint8))
    kernels = compiled(name, weights, "float16")
    out = cupy.empty((count, kernels.outputs), np.float32)
    ticks = cupy.zeros(len(kernels.parts), np.uint64)
    stream = cupy.cuda.get_current_stream()
    arguments = images.data.ptr, True, count, out.data.ptr, stream.ptr
    assert not kernels.is_instrumented
    kernels.run_timed(*arguments, ticks.data.ptr)
    stream.synchronize()
    assert kernels.is_instrumented
    assert (ticks.get() > 0).all()
    network, count = CHAINS[name]
    assert sum(map(len, kernels.parts)) == (count or len(network.layers))
    timed = out.get()
    kernels.run(*arguments)
    stream.synchronize()
    assert np.array_equal(timed, out.get()), "the instrumented kernel makes other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CHAINS if not name.startswith("odd")])
def test_engine(name, rng):
    """The engine runs the chain in one call, and what follows it by kernels of their own."""
    network, _ = CHAINS[name]
    weights = random_weights(network, rng)
    images = rng.integers(0, 256, (37, *network.input_shape), np.uint8)
    wanted = Engine(network, weights=weights, device="cpu", variant="if").predict(images)
    with Engine(network, weights=weights, device="cuda", variant="fused") as engine:
        kinds = (
            [step.kind for step in engine.inspect(37).steps] if hasattr(engine, "inspect") else []
        )
        assert not kinds or kinds.count("fused") == 1
        found = engine.predict(images)
    largest = max(1.0, float(np.abs(wanted).max()))
    tolerances.assert_close(
        found, wanted.astype(np.float64), ERROR["float32"] * largest * 2, part=name
    )


@pytest.mark.gpu
def test_too_little_shared_memory_is_told_in_numbers(gpu, rng):
    weights = random_weights(CHAINS["VGG-like"][0], rng)
    fused = module().FusedNetwork
    arguments = *description("VGG-like", weights), "float32"
    kernels = compiled("VGG-like", weights, "float32")
    assert kernels.shared_bytes > 100_000
    program = fused_network.program(fused, fused.source(*arguments), CudaDevice(0))
    found = fused.why_not(*arguments, _shared_limit=60_000, program=program)
    assert re.match(
        r"^the network in float32: expected a device with \d+ bytes of shared memory", found
    )
    assert fused.why_not(*arguments, program=program) == ""
    with pytest.raises(
        ValueError, match=r"expected the compiled program of source\(\), found none"
    ):
        fused(*arguments)
