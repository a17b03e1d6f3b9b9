"""The fused CPU network against the float64 reference: every instruction set, layer form and thread count."""

from __future__ import annotations

import itertools
import math
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tolerances
from cnn_engine.workloads.cifar10.network import NETWORK as CIFAR10
from cnn_engine.workloads.fashion_mnist.network import NETWORK as ECE408
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import _cpu, kernels
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.engine.check import LIMITS
from cnn_engine.errors import InputError
from cnn_engine.graph import reference
from cnn_engine.graph.network import Conv2d, Linear, MaxPool2d, Network, Relu, Softmax, Tanh
from cnn_engine.io import weights
from cnn_engine.lower import fused_network as fused_kernels

INSTRUCTION_SETS = _cpu.instruction_sets()
NETWORKS = {network.name: network for network in (CIFAR10, ECE408)}
GUARD = 64
POISON = np.float32(-7.25e22)


def description(
    network: Network, parameters: dict[str, np.ndarray], dtype: str = "float32"
) -> tuple:
    """Returns the arguments of ``_cpu.FusedNetwork``; ``parameters`` must outlive the call."""
    return (*fused_kernels.description(network, parameters), dtype)


def build(network: Network, parameters: dict[str, np.ndarray], dtype: str = "float32"):
    """Returns the network as the engine has it made."""
    graph = network.graph(1, True, parameters)
    (row,) = kernels.of("fused", "cpu")
    return row.prepare(fused_kernels.chain(graph, dtype), graph, CpuDevice())


def run(fused, images: np.ndarray, threads: int = 1) -> np.ndarray:
    """Runs ``images`` in place into a poisoned output between guard bands, and checks both."""
    size = len(images) * fused.outputs
    memory = np.full(size + 2 * GUARD, POISON)
    before = images.copy()
    fused.run(
        images.ctypes.data,
        images.dtype == np.uint8,
        len(images),
        memory[GUARD:].ctypes.data,
        threads,
    )
    assert (memory[:GUARD] == POISON).all(), "written before the output"
    assert (memory[GUARD + size :] == POISON).all(), "written after the output"
    assert not (memory[GUARD : GUARD + size] == POISON).any(), "output left unwritten"
    np.testing.assert_array_equal(images, before)
    return memory[GUARD : GUARD + size].reshape(len(images), fused.outputs).copy()


def pixels(rng, n: int, network: Network) -> np.ndarray:
    return rng.integers(0, 256, (n, *network.input_shape), dtype=np.uint8)


def weights_of(network: Network, seed: int = 0) -> dict[str, np.ndarray]:
    parameters = network.random_weights(seed)
    if (
        network.name == "ece408"
    ):  # raw pixels: keep the first tanh out of saturation, as training does
        parameters["conv1.weight"] /= 256
    return parameters


def needs_bfloat16() -> None:
    parameters = weights_of(CIFAR10)
    if reason := _cpu.FusedNetwork.why_not(*description(CIFAR10, parameters, "bfloat16")):
        pytest.skip(reason)


# ---- the two networks ----


@pytest.mark.parametrize("kind", ["uint8", "float32"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_against_reference(instruction_set, rng, name, kind):
    network = NETWORKS[name]
    parameters = weights_of(network)
    images = pixels(rng, 33, network)
    if kind == "float32":
        images = reference.normalize(images, network.scale, network.offset).astype(np.float32)
    found = run(build(network, parameters), images)
    wanted = reference.forward(network, parameters, images).reshape(len(images), -1)
    tolerances.assert_close(
        found, wanted, tolerances.PROBABILITY, network=name, isa=instruction_set
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_bits_depend_on_neither_threads_nor_batch(instruction_set, rng, name):
    network = NETWORKS[name]
    parameters = weights_of(network)
    images = pixels(rng, 33, network)
    fused = build(network, parameters)
    wanted = run(fused, images)
    for threads in (1, 2, 3, 64):
        for batch in (1, 2, 3, 7, 33):
            np.testing.assert_array_equal(run(fused, images[:batch], threads), wanted[:batch])
    np.testing.assert_array_equal(run(fused, images[32:], 2), wanted[32:])


def test_no_images(rng):
    fused = build(CIFAR10, weights_of(CIFAR10))
    assert run(fused, pixels(rng, 0, CIFAR10), threads=2).shape == (0, 10)


def test_weights_are_copied(rng):
    parameters = weights_of(CIFAR10)
    fused = build(CIFAR10, parameters)
    images = pixels(rng, 2, CIFAR10)
    wanted = run(fused, images)
    for value in parameters.values():
        value.fill(np.nan)
    np.testing.assert_array_equal(run(fused, images), wanted)


_outputs: list[np.ndarray] = []


def real_outputs(parameters, images):
    """Returns the reference's outputs for the real images, computed once."""
    if not _outputs:
        _outputs.append(reference.forward(CIFAR10, parameters, images))
    return _outputs[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_images(instruction_set, test_data, dtype):
    """The thesis' weights on real images: its count of correct answers, and the project's tolerance."""
    parameters = weights.read(test_data("convnetjs-cifar10"), CIFAR10)
    records = np.fromfile(test_data("cifar-10-batches-bin/data_batch_1.bin"), np.uint8)
    records = records.reshape(-1, 3073)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    if dtype == "bfloat16":
        needs_bfloat16()
    fused = build(CIFAR10, parameters, dtype)
    wanted = real_outputs(parameters, images)
    for threads in (1, 3):
        found = run(fused, images, threads)
        bound = LIMITS["cpu"][dtype]
        tolerances.assert_close(found, wanted, bound, isa=instruction_set, dtype=dtype)
        correct = (found.argmax(axis=1) == records[:, 0]).sum()
        assert correct == {"float32": 865, "bfloat16": 864}[dtype]  # as the README has them


# ---- any network ----


@st.composite
def networks(draw) -> Network:
    """Chains of all layers: odd sizes, any stride and padding, activations and pools that may be missing."""
    channels = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 17]))
    image = shape = (channels, draw(st.integers(1, 23)), draw(st.integers(1, 23)))
    layers = []

    def add(layer) -> None:
        nonlocal shape
        try:
            shape = Network("any", image, (*layers, layer)).infos[-1].output_shape
        except InputError:  # does not fit any more
            return
        layers.append(layer)

    def activation() -> None:
        kind = draw(st.sampled_from([None, Relu, Tanh]))
        if kind:
            add(kind(f"activation{len(layers)}"))

    def pool() -> None:
        kernel, stride = draw(st.sampled_from([(2, 2), (2, 2), (2, 1), (3, 2), (3, 3), (1, 2)]))
        padding = draw(st.integers(0, kernel // 2))
        add(MaxPool2d(f"pool{len(layers)}", kernel, stride, padding))

    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            size = draw(st.sampled_from([3, 5]))
            kernel, stride = (size, size), 1
        else:
            kernel = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
            stride = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
        padding = (draw(st.integers(0, 3)), draw(st.integers(0, 3)))
        out = draw(st.sampled_from([1, 3, 4, 6, 16, 20, 33]))
        add(Conv2d(f"conv{len(layers)}", out, kernel, stride, padding, draw(st.booleans())))
        activation()
        if draw(st.booleans()):
            pool()
            activation()
    for _ in range(draw(st.integers(0, 2))):
        add(Linear(f"fc{len(layers)}", draw(st.integers(1, 40)), draw(st.booleans())))
        activation()
    layers.append(Softmax("softmax"))
    return Network("random", image, tuple(layers), 1 / 128, -1.0)


@settings(max_examples=80, deadline=None)
@given(networks(), st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_random_networks(network, seed, threads, batch, is_uint8):
    rng = np.random.default_rng(seed)
    parameters = network.random_weights(seed)
    images = pixels(rng, batch, network)
    if not is_uint8:
        images = reference.normalize(images, network.scale, network.offset).astype(np.float32)
    wanted = reference.forward(network, parameters, images).reshape(len(images), -1)
    before = _cpu.selected_instruction_set()
    try:
        for name in INSTRUCTION_SETS:
            _cpu.select_instruction_set(name)
            found = run(build(network, parameters), images, threads)
            tolerances.assert_close(
                found, wanted, tolerances.PROBABILITY, network=network, isa=name, threads=threads
            )
    finally:
        _cpu.select_instruction_set(before)


#: Winograd's rounding against a plain sum's, from the size of its transforms; of the largest output, since
#: a tile's outputs share their intermediate results.
WINOGRAD = 8.0


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("activation", [None, Relu, Tanh])
@pytest.mark.parametrize(
    "shape",
    [  # channels, rows, columns, filters, kernel, padding
        (3, 32, 32, 16, 5, 2), (16, 16, 16, 20, 5, 2), (20, 8, 8, 20, 5, 2), (1, 48, 48, 6, 5, 0),
        (6, 22, 22, 16, 5, 0), (3, 29, 31, 7, 5, 1), (4, 9, 70, 33, 5, 3), (9, 13, 6, 24, 5, 2),
        (3, 24, 24, 16, 3, 1), (1, 7, 9, 4, 3, 0), (24, 15, 15, 40, 3, 1), (5, 4, 4, 3, 3, 2),
        (8, 11, 13, 68, 3, 1), (12, 9, 6, 17, 5, 2), (4, 5, 3, 19, 3, 1),
    ],
    ids=str,
)  # fmt: skip
def test_one_convolution(instruction_set, rng, shape, activation, pool):
    """Values, not probabilities: a chain may end anywhere, and its output is flattened."""
    channels, rows, columns, filters, kernel, padding = shape
    layers = [Conv2d("conv", filters, kernel, padding=padding)]
    layers += [activation("activation")] if activation else []
    layers += [MaxPool2d("pool", 2)] if pool else []
    network = Network("one", (channels, rows, columns), tuple(layers))
    parameters = network.random_weights(1)
    images = rng.standard_normal((3, *network.input_shape)).astype(np.float32)
    found = run(build(network, parameters), images, threads=2)
    wanted = reference.forward(network, parameters, images).reshape(len(images), -1)
    weight = np.abs(parameters["conv.weight"])
    magnitude = reference.conv2d(
        np.abs(images), weight, np.abs(parameters["conv.bias"]), 1, padding
    )
    terms = channels * kernel * kernel + 1
    bound = WINOGRAD * tolerances.sum_of_products(terms, magnitude.max())
    tolerances.assert_close(found, wanted, bound, shape=shape, isa=instruction_set)


@pytest.mark.parametrize(
    "layers",
    [
        (Linear("fc", 10), Softmax("softmax")),
        (Softmax("softmax"),),
        (Relu("relu"), Tanh("tanh"), MaxPool2d("pool", 3, 2, 1), Linear("fc", 5), Softmax("softmax")),
        (Tanh("tanh"), Conv2d("conv", 8, 5, padding=2), Relu("relu"), Relu("again"), Linear("fc", 3),
         Softmax("softmax"), Tanh("last")),
        (Linear("fc1", 70), Linear("fc2", 9), Relu("relu"), Tanh("tanh"), Softmax("softmax")),
    ],
    ids=lambda layers: "-".join(layer.name for layer in layers),
)  # fmt: skip
def test_chains_without_the_usual_layers(instruction_set, rng, layers):
    network = Network("chain", (3, 11, 9), layers, 1 / 255, -0.5)
    parameters = network.random_weights(2)
    images = pixels(rng, 11, network)
    found = run(build(network, parameters), images, threads=2)
    wanted = reference.forward(network, parameters, images).reshape(len(images), -1)
    tolerances.assert_close(found, wanted, tolerances.PROBABILITY, isa=instruction_set)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_as_in_the_layered_operators(instruction_set, rng, value):
    parameters = weights_of(CIFAR10)
    images = rng.standard_normal((9, 3, 32, 32)).astype(np.float32)
    fused = build(CIFAR10, parameters)
    before = run(fused, images)
    images[4, 1, 7, 30] = value
    with np.errstate(invalid="ignore"):
        wanted = reference.forward(CIFAR10, parameters, images)
    for threads in (1, 2, 3):
        found = run(fused, images, threads)
        tolerances.assert_close(found, wanted, tolerances.PROBABILITY, value=value)
        clean = np.arange(9) != 4
        np.testing.assert_array_equal(found[clean], before[clean])
        np.testing.assert_array_equal(run(fused, images[4:5], threads), found[4:5])


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_pixel_that_is_not_finite_stays_where_it_is(instruction_set, rng, value, place):
    """Positive weights make -inf of -inf in the outputs that read it, and leave all others as they were;
    Winograd's sums would make NaN of a whole tile. In an image of one thread, and in one of several."""
    network = Network("one", (16, 16, 16), (Conv2d("conv", 20, 5, padding=2),))
    parameters = {name: np.abs(array) for name, array in network.random_weights(5).items()}
    fused = build(network, parameters)
    for batch in (1, 3, 9):
        images = rng.standard_normal((batch, *network.input_shape)).astype(np.float32)
        images[place, 3, 8, 9] = value
        wanted = reference.forward(network, parameters, images).reshape(batch, 20, 16, 16)
        assert np.isfinite(wanted).mean() > 0.9 - 0.1 / batch
        magnitude = reference.conv2d(
            np.abs(images), parameters["conv.weight"], parameters["conv.bias"], 1, 2
        )
        finite = magnitude[np.isfinite(magnitude)].max()
        bound = WINOGRAD * tolerances.sum_of_products(16 * 25 + 1, finite)
        for threads in (1, 2, 3):
            found = run(fused, images, threads).reshape(wanted.shape)
            tolerances.assert_close(found, wanted, bound, value=value, batch=batch, threads=threads)


def test_without_layers_to_take_them_images_that_are_not_finite_are_refused(rng):
    parameters = weights_of(CIFAR10)  # alive until they are packed: their addresses are given
    fused = _cpu.FusedNetwork(*description(CIFAR10, parameters))
    images = rng.standard_normal((5, 3, 32, 32)).astype(np.float32)
    run(fused, images, threads=2)
    images[3, 0, 0, 0] = np.inf
    with pytest.raises(
        ValueError, match="expected finite numbers, found NaN or infinity in image 3"
    ):
        run(fused, images, threads=2)


def test_threads_share_what_takes_images_that_are_not_finite(rng):
    """Several callers at once, every image with a NaN."""
    fused = build(CIFAR10, weights_of(CIFAR10))
    images = rng.standard_normal((4, 6, 3, 32, 32)).astype(np.float32)
    images[:, :, 0, 3, 4] = -np.inf
    wanted = [run(fused, part) for part in images]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = pool.map(lambda part: run(fused, part, threads=2), images)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other)


def test_large_and_small_activations(instruction_set):
    """exp and tanh over their whole range, at the ends of it too."""
    values = np.concatenate([np.linspace(-100, 100, 4001), np.geomspace(1e-30, 1, 95)])
    images = values.astype(np.float32).reshape(-1, 64, 1, 1)
    tanh = Network("tanh", (64, 1, 1), (Tanh("tanh"),))
    found = run(build(tanh, {}), images)
    wanted = np.tanh(images.reshape(-1, 64).astype(np.float64))
    bound = tolerances.FUNCTION_ULPS * tolerances.EPS * np.abs(wanted) + np.finfo(np.float32).tiny
    tolerances.assert_close(found, wanted, bound)
    softmax = Network("softmax", (64, 1, 1), (Softmax("softmax"),))
    found = run(build(softmax, {}), images)
    rows = images.reshape(-1, 64)
    tolerances.assert_close(found, reference.softmax(rows), tolerances.softmax(rows))


# ---- its parts, timed ----


def run_timed(fused, images: np.ndarray, threads: int = 1) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the output of a timed pass, the seconds of its parts, and what it took as seen from here."""
    out = np.full((len(images), fused.outputs), POISON)
    seconds = np.zeros(len(fused.parts))
    arguments = (images.ctypes.data, images.dtype == np.uint8, len(images), out.ctypes.data)
    to = seconds.ctypes.data
    start = time.perf_counter()
    fused.run_timed(*arguments, threads, to)
    return out, seconds, time.perf_counter() - start


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("cifar10", [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9,), (10,)]),
        ("ece408", None),
    ],
)
def test_parts_of_the_two_networks(name, parts):
    network = NETWORKS[name]
    found = build(network, weights_of(network)).parts
    assert [index for part in found for index in part] == list(range(len(network.layers)))
    assert parts is None or found == parts


@settings(max_examples=100, deadline=None)
@given(networks(), st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_a_timed_pass_covers_every_layer_once(network, seed, threads, batch, broken):
    """The same bits as an untimed pass, each part with time of its own; none of an image with NaN."""
    rng = np.random.default_rng(seed)
    fused = build(network, network.random_weights(seed))
    assert [layer for part in fused.parts for layer in part] == list(range(len(network.layers)))
    images = rng.standard_normal((batch, *network.input_shape)).astype(np.float32)
    if broken:
        images[-1].flat[0] = np.nan
    out, seconds, _ = run_timed(fused, images, threads)
    np.testing.assert_array_equal(out, run(fused, images, threads))
    assert (seconds > 0).all() if batch > broken else (seconds == 0).all()


@pytest.mark.alone
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 3, 40])
@pytest.mark.parametrize("name", NETWORKS)
def test_parts_add_up_to_their_pass(instruction_set, rng, name, batch, threads):
    """Within 5 % of what the pass takes as seen from Python, with its call: the closest of many.

    A call whose code has left the caches costs up to 15 us, as much as half of a short pass, so that on some
    machines one call in hundreds is as close.
    """
    network = NETWORKS[name]
    fused = build(network, weights_of(network))
    images = pixels(rng, batch, network)
    closest, until = 0.0, time.monotonic() + 10
    for tries in itertools.count(1):
        _, seconds, took = run_timed(fused, images, threads)
        assert seconds.sum() <= took
        closest = max(closest, seconds.sum() / took)
        if (tries >= 200 and closest >= 0.95) or time.monotonic() > until:
            break
    assert closest >= 0.95


@pytest.mark.alone
def test_seconds_are_added_and_the_heavy_part_is_the_heavy_one(rng):
    """One convolution with nearly all of the work: it has nearly all of the time."""
    layers = (Conv2d("conv", 32, 5, padding=2), Relu("relu"), Linear("fc", 2), Softmax("softmax"))
    network = Network("heavy", (16, 32, 32), layers)
    fused = build(network, network.random_weights(0))
    assert fused.parts == [(0, 1), (2,), (3,)]
    images = pixels(rng, 8, network)
    shares = []
    for _ in range(20):
        _, seconds, _ = run_timed(fused, images)
        shares.append(seconds[0] / seconds.sum())
    assert np.median(shares) > 0.5
    before = np.array([1.0, 2.0, 4.0])
    seconds = before.copy()
    out = np.empty((8, 2), np.float32)
    fused.run_timed(images.ctypes.data, True, 8, out.ctypes.data, 1, seconds.ctypes.data)
    assert (seconds > before).all()
    assert (seconds < before + 1).all()
    fused.run_timed(images.ctypes.data, True, 0, out.ctypes.data, 1, before.ctypes.data)
    assert before.tolist() == [1.0, 2.0, 4.0]


# ---- bfloat16 ----


@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16(rng, name):
    needs_bfloat16()
    network = NETWORKS[name]
    parameters = weights_of(network)
    images = pixels(rng, 33, network)
    fused = build(network, parameters, "bfloat16")
    wanted = run(fused, images)
    tolerances.assert_close(
        wanted, reference.forward(network, parameters, images), LIMITS["cpu"]["bfloat16"]
    )
    for threads in (1, 2, 3):
        for batch in (1, 2, 3, 7, 33):
            np.testing.assert_array_equal(run(fused, images[:batch], threads), wanted[:batch])


def rounded(values: np.ndarray) -> np.ndarray:
    """Returns ``values`` rounded to bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


@pytest.mark.parametrize("filters", [1, 20, 48, 64])
@pytest.mark.parametrize("channels", [1, 3, 4, 17])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(1, 1, 0), (2, 2, 1), (7, 2, 3), ((3, 2), (1, 2), 1)]
)
def test_bfloat16_products_are_summed_in_float32(rng, filters, channels, kernel, stride, padding):
    """Against float64 with rounded factors, nothing but the rounding of float32 sums is left."""
    needs_bfloat16()
    network = Network(
        "one", (channels, 13, 10), (Conv2d("conv", filters, kernel, stride, padding),)
    )
    parameters = network.random_weights(3)
    images = rng.standard_normal((2, *network.input_shape)).astype(np.float32)
    weight, bias = rounded(parameters["conv.weight"]), parameters["conv.bias"]
    wanted = reference.conv2d(rounded(images), weight, bias, stride, padding)
    magnitude = reference.conv2d(
        np.abs(rounded(images)), np.abs(weight), np.abs(bias), stride, padding
    )
    bound = tolerances.sum_of_products(math.prod(weight.shape[1:]) + 1, magnitude)
    found = run(build(network, parameters, "bfloat16"), images, threads=2)
    tolerances.assert_close(found, wanted.reshape(2, -1), bound.reshape(2, -1))


@pytest.mark.skipif(len(INSTRUCTION_SETS) < 2, reason="this CPU has one instruction set")
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_bfloat16_over_few_columns(rng, columns):
    """Where tiles of two columns would take the fewest products."""
    needs_bfloat16()
    layers = (Conv2d("a", 24, 3, padding=1), Conv2d("b", 16, 5, padding=2), Linear("fc", 10))
    network = Network("narrow", (16, 16, columns), (*layers, Softmax("s")))
    parameters = network.random_weights(0)
    images = rng.standard_normal((9, *network.input_shape)).astype(np.float32)
    found = run(build(network, parameters, "bfloat16"), images, threads=2)
    wanted = reference.forward(network, parameters, images)
    tolerances.assert_close(found, wanted, LIMITS["cpu"]["bfloat16"], columns=columns)


def test_bfloat16_is_refused_without_its_instructions():
    before = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(INSTRUCTION_SETS[0])
    try:
        parameters = weights_of(CIFAR10)
        arguments = description(CIFAR10, parameters, "bfloat16")
        reason = _cpu.FusedNetwork.why_not(*arguments)
        assert reason.startswith("bfloat16: expected ")
        with pytest.raises(ValueError, match="bfloat16: expected .*, found"):
            _cpu.FusedNetwork(*arguments)
    finally:
        _cpu.select_instruction_set(before)


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "layers: expected at least one, found none"),
        ([("linear", 4, 0, 0, 1, 1, 0, 0, 0, 0)], "layer 1 (linear): weight: expected its address"),
        ([("max_pool2d", 0, 2, 2, 0, 1, 0, 0, 0, 0)], "layer 1 (max_pool2d): stride height: expected 1"),
        ([("conv2d", 4, 9, 9, 1, 1, 0, 0, 0, 0)], "layer 1 (conv2d): padded height less the kernel"),
        ([("softmax", 0, 0, 0, 1, 1, 0, 0, 0, 0), ("max_pool2d", 0, 1, 1, 1, 1, 0, 0, 0, 0)],
         "layer 2 (max_pool2d): expected an input of channels, rows and columns, found 192 features"),
    ],
    ids=["none", "null weight", "stride", "kernel", "after softmax"],
)  # fmt: skip
def test_why_not(layers, reason):
    arguments = ((3, 8, 8), 1.0, 0.0, layers, "float32")
    assert _cpu.FusedNetwork.why_not(*arguments).startswith(reason)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        _cpu.FusedNetwork(*arguments)
    assert str(caught.value).startswith(reason)


def test_weights_that_are_not_finite_are_refused():
    parameters = weights_of(CIFAR10)
    parameters["conv2.weight"][3, 1, 2, 0] = np.inf
    place = np.ravel_multi_index((3, 1, 2, 0), parameters["conv2.weight"].shape)
    reason = _cpu.FusedNetwork.why_not(*description(CIFAR10, parameters))
    assert reason == f"layer 4 (conv2d): weight: expected finite numbers, found inf at {place}"


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="kind: expected conv2d, .* found 'elu'"):
        _cpu.FusedNetwork((1, 1, 1), 1.0, 0.0, [("elu", 0, 0, 0, 1, 1, 0, 0, 0, 0)], "float32")
    with pytest.raises(ValueError, match="dtype: expected float32 or bfloat16, found 'int8'"):
        _cpu.FusedNetwork((1, 1, 1), 1.0, 0.0, [("relu", 0, 0, 0, 1, 1, 0, 0, 0, 0)], "int8")


# ---- instruction sets ----

SHOW = "from cnn_engine import _cpu; print(_cpu.selected_instruction_set())"


def show(name: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CNN_ENGINE_CPU_ISA": name}
    return subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_environment_forces_an_instruction_set(name):
    assert show(name).stdout.strip() == name


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another kind of processor")
def test_the_widest_instruction_set_of_this_cpu_is_used():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = set(next(line for line in file if line.startswith("flags")).split())
    wanted = ["baseline"]
    if {"avx2", "fma"} <= flags:
        wanted.append("avx2")
        if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= flags:
            wanted.append("avx512")
    assert wanted == INSTRUCTION_SETS
    environment = {name: os.environ[name] for name in os.environ if name != "CNN_ENGINE_CPU_ISA"}
    shown = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True)
    assert shown.stdout.decode().strip() == wanted[-1]


@pytest.mark.parametrize("name", ["", "avx1024"])
def test_environment_with_an_unknown_instruction_set(name):
    result = show(name)
    assert result.returncode != 0
    known = ", ".join(INSTRUCTION_SETS)
    message = f"CNN_ENGINE_CPU_ISA: expected one that this CPU has ({known}), found '{name}'"
    assert message in result.stderr


def test_weights_stay_packed_for_the_set_that_was_selected(instruction_set, rng):
    parameters = weights_of(CIFAR10)
    images = pixels(rng, 2, CIFAR10)
    fused = build(CIFAR10, parameters)
    wanted = run(fused, images)
    for name in INSTRUCTION_SETS:
        _cpu.select_instruction_set(name)
        assert fused.instruction_set == instruction_set
        np.testing.assert_array_equal(run(fused, images), wanted)


#: NumPy's library of matrix products, held to one thread, beside the peak; the best of turns of both, which
#: are too short to be interrupted often.
PEAKS = """
import time
import numpy as np
from cnn_engine import _cpu
a = np.random.default_rng(0).standard_normal((384, 384)).astype(np.float32)
b = np.empty_like(a)
def product():
    begin = time.process_time()
    np.matmul(a, a, out=b)
    return 2 * 384**3 / (time.process_time() - begin)
turns = [(_cpu.measure_fma_peak(0.002), product()) for _ in range(150)]
print(*map(max, zip(*turns)))
"""


@pytest.mark.alone
def test_fma_peak_is_what_a_product_of_matrices_comes_near():
    """A good product reaches 70 to 95 % of the peak, which is twice as much if it counts twice."""
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    if "avx512" in INSTRUCTION_SETS:  # OpenBLAS takes newer CPUs for ones of half that width
        one["OPENBLAS_CORETYPE"] = "SkylakeX"
    command = [sys.executable, "-c", PEAKS]
    shown = subprocess.run(command, env={**os.environ, **one}, capture_output=True, check=True)
    peak, product = map(float, shown.stdout.split())
    assert 0.52 < product / peak < 1.05


def test_a_linear_layer_too_wide_to_be_counted_is_refused():
    layers = [("linear", 1, 0, 0, 1, 1, 0, 0, 0, 0)]
    reason = _cpu.FusedNetwork.why_not((1, 16384, 16384), 1.0, 0.0, layers, "float32")
    assert reason == "layer 1 (linear): in_features: expected at most 134217727, found 268435456"
