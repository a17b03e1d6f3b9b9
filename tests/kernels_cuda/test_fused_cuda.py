"""The fused CUDA kernels against the float64 reference, at sizes that fit no tile, and what they refuse."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import tolerances

from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import LIMITS
from cnn_engine.graph import reference
from cnn_engine.graph.network import Conv2d, Linear, MaxPool2d, Network, Relu, Softmax, Tanh
from cnn_engine.lower.fused_network import chain

pytestmark = pytest.mark.gpu

CIFAR10 = Network(
    name="cifar10",
    input_shape=(3, 32, 32),
    layers=(
        Conv2d("conv1", out_channels=16, kernel=5, padding=2), Relu("relu1"), MaxPool2d("pool1", 2),
        Conv2d("conv2", out_channels=20, kernel=5, padding=2), Relu("relu2"), MaxPool2d("pool2", 2),
        Conv2d("conv3", out_channels=20, kernel=5, padding=2), Relu("relu3"), MaxPool2d("pool3", 2),
        Linear("fc", out_features=10), Softmax("softmax"),
    ),
    scale=1 / 255,
    offset=-0.5,
)  # fmt: skip
ECE408 = Network(
    name="ece408",
    input_shape=(1, 48, 48),
    layers=(
        Conv2d("conv1", out_channels=6, kernel=5, bias=False), Tanh("tanh1"), MaxPool2d("pool1", 2),
        Conv2d("conv2", out_channels=16, kernel=5, bias=False),
        Linear("fc1", out_features=140), Tanh("tanh2"), Linear("fc2", out_features=10),
        Softmax("softmax"),
    ),
    scale=1.0,
    offset=0.0,
)  # fmt: skip
NETWORKS = {"cifar10": CIFAR10, "ece408": ECE408}

#: Layers that the kernel runs: the course network's end with its convolutions.
LAYERS = {"cifar10": 11, "ece408": 4}

#: One image; less than a tile; around a warp and a multiprocessor's share; every route of the kernels
#: (a cluster an image, a block an image, many images per block).
BATCHES = [1, 2, 3, 16, 17, 31, 33, 127, 133, 1001]

#: Passes over one batch that must all give the same: a race shows in some. A sanitizer needs to see one.
REPEATS = int(os.environ.get("CNN_ENGINE_TEST_REPEATS", "200"))

ERROR = LIMITS["cuda"]


def description(network: Network, weights: dict[str, np.ndarray]) -> tuple:
    """Returns the arguments of ``_cuda.FusedNetwork``; ``weights`` must outlive the call."""
    graph = network.graph(1, True, weights)
    count = LAYERS[network.name] if network in NETWORKS.values() else None
    return chain(graph, "float32", count).op.description(graph.constants)


def fused(network: Network, weights: dict[str, np.ndarray], dtype: str, **options):
    return cuda_module.load().FusedNetwork(*description(network, weights), dtype, **options)


def probabilities(network: Network, weights: dict[str, np.ndarray], found: np.ndarray):
    """Returns what the kernel made, or what the layers after it make of that, in float64."""
    if network is not ECE408:
        return found
    x = reference.linear(found.astype(np.float64), weights["fc1.weight"], weights["fc1.bias"])
    x = reference.linear(reference.tanh(x), weights["fc2.weight"], weights["fc2.bias"])
    return reference.softmax(x)


def random_weights(network: Network, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights that keep activations near 1, so that probabilities are neither alike nor all 0 and 1."""
    weights = {}
    for name, shape in network.parameters.items():
        if name.endswith("weight"):
            value = rng.standard_normal(shape) * 1.5 / np.sqrt(np.prod(shape[1:]))
            if network.scale == 1 and name == "conv1.weight":
                value /= 100  # it reads 0 to 255
        else:
            value = rng.standard_normal(shape) * 0.3
        weights[name] = np.ascontiguousarray(value, np.float32)
    return weights


def run(device, kernels, images: np.ndarray, misaligned: int = 0):
    """Runs ``kernels`` into poisoned memory between guards; ``misaligned`` elements into an allocation."""
    import cupy

    memory_in = cupy.empty(images.size + misaligned, images.dtype)
    memory_in[misaligned:] = cupy.asarray(images.ravel())
    out, memory = device.guarded((len(images), kernels.outputs))
    stream = cupy.cuda.get_current_stream()
    kernels.run(
        memory_in.data.ptr + misaligned * images.itemsize, images.dtype == np.uint8, len(images),
        out.data.ptr, stream.ptr,
    )  # fmt: skip
    stream.synchronize()
    if len(images):
        device.check_guards(memory)
    return device.get(out)


@pytest.fixture
def gpu():
    from conftest import Device

    return Device("cuda")


@pytest.fixture
def two_devices():
    """Returns the second device while the first is current."""
    from cnn_engine.devices.cuda import CudaDevice

    module = cuda_module.load()
    if module.device_count()[0] < 2:
        pytest.skip("needs two CUDA devices")
    module.set_device(0)
    return CudaDevice(1)


def check(found: np.ndarray, wanted: np.ndarray, dtype: str, **parameters) -> None:
    tolerances.assert_close(found, wanted, ERROR[dtype], dtype=dtype, **parameters)
    best = found.argmax(axis=1)
    rows = np.arange(len(wanted))
    near = wanted.max(axis=1) - wanted[rows, best] <= 2 * ERROR[dtype]
    assert near.all(), f"another class: images {np.flatnonzero(~near)}; {dtype}, {parameters}"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("name", list(NETWORKS))
def test_against_reference(gpu, rng, name, dtype, batch):
    network = NETWORKS[name]
    weights = random_weights(network, rng)
    images = rng.integers(0, 256, (batch, *network.input_shape), np.uint8)
    kernels = fused(network, weights, dtype)
    assert kernels.instantiation == name
    wanted = reference.forward(network, weights, images)
    floats = (images * np.float32(network.scale) + np.float32(network.offset)).astype(np.float32)
    for source in (images, floats):
        found = probabilities(network, weights, run(gpu, kernels, source))
        check(found, wanted, dtype, batch=batch, input=source.dtype)


@pytest.mark.parametrize("batch", [34, 61, 96])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_clusters_that_take_several_images(gpu, rng, name, dtype, batch):
    """More images than clusters are launched: a block must not store into one that is an image behind."""
    import cupy

    network = NETWORKS[name]
    weights = random_weights(network, rng)
    images = rng.integers(0, 256, (batch, *network.input_shape), np.uint8)
    floats = (images * np.float32(network.scale) + np.float32(network.offset)).astype(np.float32)
    wanted = reference.forward(network, weights, images)
    kernels = fused(network, weights, dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    for source in (images, floats):
        with stream:
            on_device = cupy.asarray(source)
            out = cupy.full((REPEATS, batch, kernels.outputs), -1, np.float32)
        for index in range(REPEATS):
            kernels.run(
                on_device.data.ptr, source.dtype == np.uint8, batch, out[index].data.ptr, stream.ptr
            )
        stream.synchronize()
        found = probabilities(network, weights, out[0].get())
        check(found, wanted, dtype, batch=batch, input=source.dtype)
        same = (out == out[0]).all(axis=(1, 2)).get()
        assert same.all(), f"other results than the first in {(~same).sum()} of {REPEATS} runs"


#: Shared memory per block on a device of capability 8.6, 8.9 or 12.0, and on one of 8.0.
SMALL, MIDDLE = 99 * 1024, 163 * 1024


@pytest.mark.parametrize("batch", [1, 33, 133, 601])
@pytest.mark.parametrize("limit", [SMALL, MIDDLE])
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("name", list(NETWORKS))
def test_with_the_shared_memory_of_smaller_devices(gpu, rng, name, dtype, limit, batch):
    network = NETWORKS[name]
    weights = random_weights(network, rng)
    images = rng.integers(0, 256, (batch, *network.input_shape), np.uint8)
    kernels = fused(network, weights, dtype, _shared_limit=limit)
    assert 0 < kernels.shared_bytes <= limit
    wanted = reference.forward(network, weights, images)
    floats = (images * np.float32(network.scale) + np.float32(network.offset)).astype(np.float32)
    for source in (images, floats):
        found = probabilities(network, weights, run(gpu, kernels, source))
        check(found, wanted, dtype, batch=batch, limit=limit, input=source.dtype)


def test_a_large_multiprocessor_is_filled(gpu, rng):
    """Nothing takes a device for one with less shared memory than it has."""
    module = cuda_module.load()
    capability = module.device_properties(module.get_device())["compute_capability"]
    if capability not in ((9, 0), (10, 0), (10, 3)):
        pytest.skip("needs a device with 227 KiB of shared memory per block")
    weights = random_weights(CIFAR10, rng)
    for dtype in ERROR:
        assert fused(CIFAR10, weights, dtype).shared_bytes > 200_000


def test_too_little_shared_memory_is_told_in_numbers(gpu, rng):
    weights = random_weights(CIFAR10, rng)
    why_not = cuda_module.load().FusedNetwork.why_not
    for dtype, least in (("float32", 50_000), ("float16", 80_000)):
        arguments = *description(CIFAR10, weights), dtype
        assert why_not(*arguments, _shared_limit=SMALL) == ""
        found = why_not(*arguments, _shared_limit=least)
        wanted = rf"^cifar10 in {dtype}: expected a device with \d+ bytes of shared memory per block, found"
        assert re.match(wanted, found)
        assert found.endswith(f"found {least}")
        with pytest.raises(ValueError, match=f"found {least}"):
            fused(CIFAR10, weights, dtype, _shared_limit=least)


PARTS = {
    "cifar10": [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9,), (10,)],
    "ece408": [(0, 1, 2), (3,)],
}


def run_timed(kernels, images, runs: int):
    """Runs instrumented kernels; returns the last result, the parts' ticks, and seconds per run by events."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        on_device = cupy.asarray(images)
        out = cupy.full((len(images), kernels.outputs), -1, np.float32)
        ticks = cupy.full(len(kernels.parts), FIRST_TICKS, np.uint64)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def once() -> None:
        kernels.run_timed(
            on_device.data.ptr, images.dtype == np.uint8, len(images), out.data.ptr, stream.ptr,
            ticks.data.ptr,
        )  # fmt: skip

    once()
    stream.synchronize()
    first = ticks.get()
    start.record(stream)
    for _ in range(runs):
        once()
    end.record(stream)
    end.synchronize()
    assert (first > FIRST_TICKS).all(), f"not added to: {first}"
    seconds = cupy.cuda.get_elapsed_time(start, end) * 1e-3 / runs
    return out.get(), ticks.get() - first, seconds


#: What the ticks are when the first run begins: they are added to.
FIRST_TICKS = 10**9


@pytest.mark.alone
@pytest.mark.parametrize("limit", [None, SMALL, MIDDLE])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_timed_parts(gpu, rng, name, dtype, limit):
    """On every route: the same bits as without timing, and each part takes some of the time."""
    network = NETWORKS[name]
    kernels = fused(network, random_weights(network, rng), dtype, _shared_limit=limit)
    assert kernels.parts == PARTS[name]
    for batch in (1, 40, 133, 700):
        images = rng.integers(0, 256, (batch, *network.input_shape), np.uint8)
        for source in (images, (images / 255).astype(np.float32)):
            found, ticks, _ = run_timed(kernels, source, runs=min(10, REPEATS))
            np.testing.assert_array_equal(found, run(gpu, kernels, source))
            assert (ticks.astype(np.int64) > 0).all(), f"batch {batch}: {ticks}"
            shares = ticks / ticks.sum()
            assert shares.max() < 0.95, f"batch {batch}: {shares}"


@pytest.mark.alone
def test_timed_parts_are_the_life_of_all_teams(gpu, rng):
    """Ticks of the clock make up the kernel's time, and convolutions take the shares of their products."""
    module = cuda_module.load()
    properties = module.device_properties(module.get_device())
    kernels = fused(CIFAR10, random_weights(CIFAR10, rng), "float32")
    if kernels.shared_bytes < 200_000:
        pytest.skip("needs the shared memory of the kernel with two teams a multiprocessor")
    images = rng.integers(0, 256, (20_000, 3, 32, 32), np.uint8)
    _, ticks, seconds = run_timed(kernels, images, runs=5)
    teams = 2 * properties["multiprocessors"]
    # At less than the highest clock there are fewer ticks a second.
    assert 0.5 < ticks.sum() / 5 / teams / properties["clock_hz"] / seconds < 1.02
    shares = ticks / ticks.sum()
    assert shares[1] == shares.max()  # half of the products
    assert shares[:3].sum() > 0.7
    assert shares[4] < 0.1


@pytest.mark.parametrize("dtype", list(ERROR))
def test_layers_after_the_kernel_are_nodes(rng, dtype):
    """Of the course network in every type, on host memory, in chunks, and on the caller's stream."""
    import cupy

    from cnn_engine import Engine

    weights = random_weights(ECE408, rng)
    options = {"weights": weights, "device": "cuda", "variant": "fused", "dtype": dtype}
    for batch in (1, 2, 33, 700):
        images = rng.integers(0, 256, (batch, 1, 48, 48), np.uint8)
        wanted = reference.forward(ECE408, weights, images)
        for mode in ("resident", "stream"):
            with Engine(ECE408, data_mode=mode, **options) as engine:
                for _ in range(3):  # as steps, then as a graph
                    check(engine.predict(images), wanted, dtype, batch=batch, mode=mode)
        with Engine(ECE408, **options) as engine:
            steps = [
                step for step in engine.plan(batch, images.dtype).steps if step.place == "cuda"
            ]
            names = [step.name for step in steps if step.kind != "copy"]
            layers = ["conv1 to conv2", "fc1", "fc2", "softmax"]
            assert names in (layers, layers[:-1]), names  # softmax of few rows is in fc2's kernel
            on_device, out = cupy.asarray(images), cupy.empty((batch, 10), np.float32)
            for _ in range(3):
                out.fill(-1)
                engine.predict(on_device, out=out)
                check(out.get(), wanted, dtype, batch=batch)


def test_a_pass_times_layers_after_the_kernel_as_nodes(rng):
    """The parts of the kernel are its own; what follows has its rows, and they add up to the pass."""
    from cnn_engine import Engine

    weights = random_weights(ECE408, rng)
    images = rng.integers(0, 256, (9_000, 1, 48, 48), np.uint8)
    options = {"device": "cuda", "variant": "fused", "data_mode": "resident"}
    with Engine(ECE408, weights=weights, **options) as engine:
        result = engine.profile(images, batch=9_000, iterations=3)
    assert result.check.passed
    rows = {layer.name: layer for layer in result.layers}
    assert [part.name for part in rows["conv1 to conv2"].inside] == ["conv1+tanh1+pool1", "conv2"]
    assert rows["fc1"].device_s > 2 * rows["fc2"].device_s  # 5,184 features to 140, 140 to 10


def test_weights_are_there_before_any_stream(gpu, rng):
    """They are copied on one stream and read on another that waits for nothing."""
    import cupy

    images = rng.integers(0, 256, (2, 3, 32, 32), np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        on_device, out = cupy.asarray(images), cupy.zeros((2, 10), np.float32)
    stream.synchronize()
    for _ in range(20):
        weights = random_weights(CIFAR10, rng)
        kernels = fused(CIFAR10, weights, "float32")
        kernels.run(on_device.data.ptr, True, 2, out.data.ptr, stream.ptr)
        stream.synchronize()
        check(cupy.asnumpy(out), reference.forward(CIFAR10, weights, images), "float32")


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("batch", [1, 40, 300])
def test_on_a_device_that_is_not_current(two_devices, rng, name, batch):
    """Memory, streams, kernels and events of the second device, made while the first is current."""
    network = NETWORKS[name]
    weights = random_weights(network, rng)
    images = rng.integers(0, 256, (batch, *network.input_shape), np.uint8)
    wanted = reference.forward(network, weights, images)
    module, device = cuda_module.load(), two_devices
    kernels = module.FusedNetwork(*description(network, weights), "float32", device.index)
    source = device.upload(images)
    found = np.empty((batch, kernels.outputs), np.float32)
    out = device.allocate(found.nbytes)
    assert module.pointer_device(source.address) == module.pointer_device(out.address) == 1
    start, end = device.event(), device.event()
    start.record(device.stream)
    device.delay(1e-3)
    kernels.run(source.address, True, batch, out.address, device.stream_handle)
    end.record(device.stream)
    device.copy_d2h(found.__array_interface__["data"][0], out.address, found.nbytes)
    device.synchronize()
    assert device.elapsed_s(start, end) >= 1e-3
    check(probabilities(network, weights, found), wanted, "float32", batch=batch)
    assert module.get_device() == 0


@pytest.mark.parametrize("variant", ["if", "pad", "tiled", "fused"])
def test_engines_on_a_device_that_is_not_current(two_devices, rng, variant):
    from cnn_engine import Engine

    images = rng.integers(0, 256, (5, 3, 32, 32), np.uint8)
    with Engine(weights="random", device="cuda:1", variant=variant) as engine:
        for _ in range(2):  # the second call takes the plan that is ready
            found = engine.predict(images)
            wanted = reference.forward(engine.network, engine.weights, images)
            check(found, wanted, "float32", variant=variant)
        result = engine.profile(images, batch=2)
    assert result.check.max_abs_diff <= ERROR["float32"]
    assert cuda_module.load().get_device() == 0


def rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """Returns ``values`` with 11 significant bits, to the nearest, ties to even, as TF32 keeps them."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
def test_tf32_is_as_exact_as_tf32(gpu, rng, magnitude):
    """Beside convolutions whose operands are rounded to TF32 and whose products are summed exactly."""
    weights = random_weights(CIFAR10, rng)
    weights["conv1.weight"] = (weights["conv1.weight"] / magnitude).astype(np.float32)
    images = (rng.standard_normal((400, 3, 32, 32)) * magnitude).astype(np.float32)
    x = images.astype(np.float64)
    for index in (1, 2, 3):
        kernel = rounded_to_tf32(weights[f"conv{index}.weight"])
        x = reference.conv2d(rounded_to_tf32(x), kernel, weights[f"conv{index}.bias"], padding=2)
        x = reference.max_pool2d(reference.relu(x), 2)
    x = reference.linear(x.reshape(len(x), -1), weights["fc.weight"], weights["fc.bias"])
    wanted = reference.forward(CIFAR10, weights, images)
    ideal = np.abs(reference.softmax(x) - wanted)
    found = np.abs(run(gpu, fused(CIFAR10, weights, "tf32"), images) - wanted)
    assert 0 < found.mean() <= 1.25 * ideal.mean()
    assert found.max() <= 2 * ideal.max()


def test_real_images_and_weights(gpu, test_data):
    """The published weights: 865 of the 1,102 images, as float64 arithmetic has it."""
    from cnn_engine.io.weights import convnetjs

    records = np.fromfile(test_data("cifar-10-batches-bin/data_batch_1.bin"), np.uint8).reshape(
        -1, 3073
    )
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    weights = convnetjs.read(test_data("convnetjs-cifar10"), CIFAR10)
    weights = {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}
    wanted = reference.forward(CIFAR10, weights, images)
    for dtype in ERROR:
        found = run(gpu, fused(CIFAR10, weights, dtype), images)
        check(found, wanted, dtype, images="data_batch_1")
        agreement = (found.argmax(1) == wanted.argmax(1)).mean()
        assert agreement >= 0.995, f"{dtype}: agreement {agreement}"
        if dtype == "float32":
            assert (found.argmax(1) == records[:, 0]).sum() == 865


@pytest.mark.parametrize("dtype", list(ERROR))
def test_misaligned_images(gpu, rng, dtype):
    weights = random_weights(CIFAR10, rng)
    kernels = fused(CIFAR10, weights, dtype)
    for batch in (2, 40, 200):
        images = rng.integers(0, 256, (batch, 3, 32, 32), np.uint8)
        wanted = reference.forward(CIFAR10, weights, images)
        check(run(gpu, kernels, images, misaligned=3), wanted, dtype, batch=batch)
        floats = (images * np.float32(1 / 255) - np.float32(0.5)).astype(np.float32)
        check(run(gpu, kernels, floats, misaligned=1), wanted, dtype, batch=batch)


@pytest.mark.parametrize("magnitude", [1e-20, 1e-4, 1.0, 1e4, 1e20])
def test_float32_of_any_magnitude(gpu, rng, magnitude):
    """The 16-bit parts are scaled to each image's own range."""
    weights = random_weights(CIFAR10, rng)
    images = (rng.standard_normal((50, 3, 32, 32)) * magnitude).astype(np.float32)
    images[0] = 0
    weights["conv1.weight"] = (weights["conv1.weight"] / magnitude).astype(np.float32)
    wanted = reference.forward(CIFAR10, weights, images)
    check(
        run(gpu, fused(CIFAR10, weights, "float32"), images), wanted, "float32", magnitude=magnitude
    )


@pytest.mark.parametrize(
    ("scale", "offset"), [(1 / 255, 0.0), (0.0171, -1.237), (1e-3, 0.3), (-1 / 128, 1.0)]
)
def test_normalisations(gpu, rng, scale, offset):
    """Those whose pixels fit 16 bits exactly, and those that take two parts."""
    network = Network("cifar10", CIFAR10.input_shape, CIFAR10.layers, scale=scale, offset=offset)
    weights = random_weights(network, rng)
    for batch in (5, 150):
        images = rng.integers(0, 256, (batch, 3, 32, 32), np.uint8)
        wanted = reference.forward(network, weights, images)
        check(run(gpu, fused(network, weights, "float32"), images), wanted, "float32", scale=scale)


def test_not_a_number(gpu, rng):
    """An image with a NaN gives NaN, and its neighbours do not notice."""
    weights = random_weights(CIFAR10, rng)
    for batch in (3, 40, 300):
        images = rng.standard_normal((batch, 3, 32, 32)).astype(np.float32)
        images[1, 2, 15, 15] = np.nan
        for dtype in ERROR:
            found = run(gpu, fused(CIFAR10, weights, dtype), images)
            assert np.isnan(found[1]).all(), dtype
            assert not np.isnan(np.delete(found, 1, axis=0)).any(), dtype


def test_zero_weights_and_zero_images(gpu):
    weights = {name: np.zeros(shape, np.float32) for name, shape in CIFAR10.parameters.items()}
    for dtype in ERROR:
        found = run(gpu, fused(CIFAR10, weights, dtype), np.zeros((4, 3, 32, 32), np.float32))
        np.testing.assert_allclose(found, 0.1, rtol=1e-6)


def test_empty_batch_and_graph(gpu, rng):
    import cupy

    weights = random_weights(CIFAR10, rng)
    kernels = fused(CIFAR10, weights, "float32")
    assert run(gpu, kernels, np.zeros((0, 3, 32, 32), np.uint8)).shape == (0, 10)
    images = rng.integers(0, 256, (3, 3, 32, 32), np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:  # which waits for no other: what it works on is made on it
        on_device, out = cupy.asarray(images), cupy.full((3, 10), -1, np.float32)
        stream.begin_capture()
        kernels.run(on_device.data.ptr, True, 3, out.data.ptr, stream.ptr)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    check(cupy.asnumpy(out), reference.forward(CIFAR10, weights, images), "float32", graph=True)


def test_convolutions_alone(gpu, rng):
    """The kernel of a network that goes on after its convolutions makes what they make."""
    weights = random_weights(ECE408, rng)
    images = rng.integers(0, 256, (37, 1, 48, 48), np.uint8)
    x = np.asarray(images, np.float64)
    x = reference.max_pool2d(reference.tanh(reference.conv2d(x, weights["conv1.weight"])), 2)
    wanted = reference.conv2d(x, weights["conv2.weight"]).reshape(37, -1)
    kernels = fused(ECE408, weights, "float32")
    assert kernels.outputs == 5184
    found = run(gpu, kernels, images)
    tolerances.assert_close(found, wanted, 1e-5 * np.abs(wanted).max(), part="ece408")


def test_says_why_not(gpu, rng):
    module = cuda_module.load()

    def why_not(layers, dtype="float32"):
        return module.FusedNetwork.why_not((3, 32, 32), 1.0, 0.0, layers, dtype)

    described = description(CIFAR10, random_weights(CIFAR10, rng))[3]
    layers = [(*row[:-2], 0, 0) for row in described]  # without the addresses of weights
    assert why_not(layers) == ""
    wrong = [*layers[:3], ("conv", 24, 9, 9, 1, 1, 2, 2, 0, 0), *layers[4:]]
    reason = "layer 4 (conv2d): expected a square kernel of at most 7x7, found 9x9"
    assert why_not(wrong) == reason
    longer = [*layers, ("relu", 0, 0, 0, 1, 1, 0, 0, 0, 0)]
    assert "expected softmax, and then the end" in why_not(longer, "float16")
    with pytest.raises(ValueError, match=re.escape(reason)):
        module.FusedNetwork((3, 32, 32), 1.0, 0.0, wrong, "float32")
    with pytest.raises(
        ValueError, match="expected float32, tf32, float16 or bfloat16, found 'int8'"
    ):
        why_not(layers, "int8")
    with pytest.raises(ValueError, match="layer 1: expected weights, found none"):
        module.FusedNetwork((3, 32, 32), 1.0, 0.0, layers, "float32")


STEPS = [
    (2, 3, 32, 32, 16, 5, 5, 1, 2), (5, 16, 16, 16, 20, 5, 5, 1, 2), (7, 20, 8, 8, 20, 5, 5, 1, 2),
    (2, 1, 48, 48, 6, 5, 5, 1, 0), (1, 5, 13, 11, 3, 3, 3, 1, 1), (2, 2, 9, 9, 33, 7, 7, 1, 3),
    (3, 4, 17, 9, 5, 2, 4, (2, 3), (1, 1)), (2, 70, 6, 6, 70, 1, 1, 1, 0),
]  # fmt: skip


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_conv2d_step(gpu, rng, shape, pool, relu):
    """conv2d, relu and pooling as one kernel, against the three operators."""
    from cnn_engine import _cpu

    n, c, h, w, k, r, s, stride, padding = shape
    strides = stride if isinstance(stride, tuple) else (stride, stride)
    paddings = padding if isinstance(padding, tuple) else (padding, padding)
    x = rng.standard_normal((n, c, h, w)).astype(np.float32)
    weight = rng.standard_normal((k, c, r, s)).astype(np.float32)
    bias = rng.standard_normal(k).astype(np.float32)
    wanted = reference.conv2d(x, weight, bias, stride, padding)
    bound = tolerances.sum_of_products(
        c * r * s + 1, reference.conv2d(np.abs(x), np.abs(weight), np.abs(bias), stride, padding)
    )
    if relu:
        wanted = reference.relu(wanted)
    if pool:
        wanted, bound = (reference.max_pool2d(array, 2) for array in (wanted, bound))
    out, memory = gpu.guarded(wanted.shape)
    arrays = [gpu.put(array) for array in (x, weight, bias)]
    operator = _cpu.Conv2dShape(n, c, h, w, k, r, s, *strides, *paddings)
    cuda_module.load().conv2d_step(
        *(array.data.ptr for array in arrays), out.data.ptr, operator, relu, pool, 0
    )
    gpu.check_guards(memory)
    tolerances.assert_close(gpu.get(out), wanted, bound, shape=shape, relu=relu, pool=pool)


@pytest.mark.alone
def test_fma_peak():
    """Beside what the multiprocessors could do at their highest clock: half of it at least, and no more."""
    module = cuda_module.load()
    properties = module.device_properties(module.get_device())
    lanes = 64 if properties["compute_capability"] == (8, 0) else 128  # float32 a multiprocessor
    peak = properties["multiprocessors"] * lanes * properties["clock_hz"]
    assert 0.5 < module.measure_fma_peak() / peak < 1.05


@pytest.mark.alone
@pytest.mark.parametrize("milliseconds", [0, 5, 20])
def test_a_delay_occupies_its_stream_that_long(milliseconds):
    import cupy

    module = cuda_module.load()
    stream = cupy.cuda.Stream(non_blocking=True)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    module.delay(0, stream.ptr)  # loads the kernel
    stream.synchronize()
    start.record(stream)
    module.delay(milliseconds * 1_000_000, stream.ptr)
    end.record(stream)
    end.synchronize()
    assert milliseconds <= cupy.cuda.get_elapsed_time(start, end) < milliseconds + 2
