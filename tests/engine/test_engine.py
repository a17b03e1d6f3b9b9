from __future__ import annotations

import dataclasses
import json
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import tolerances
from cnn_engine.workloads.cifar10 import WORKLOAD

from cnn_engine import (
    Conv2d,
    Engine,
    InputError,
    Linear,
    MaxPool2d,
    Network,
    Relu,
    Softmax,
    Tanh,
    UnsupportedError,
)
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.graph import reference
from cnn_engine.kernels import select
from cnn_engine.lower import fused_network
from cnn_engine.operators import softmax
from cnn_engine.plan.schedule import GPU_PART

NETWORK = WORKLOAD.network
VARIANTS = [
    (row.name, reduction)
    for row in select.VARIANTS.values()
    if "cpu" in row.devices
    for reduction in ((False, True) if row.reduction else (False,))
]

#: Layers in unusual positions: the input read by each kind first, odd sizes, no padding, tanh, two fc.
ODD_NETWORKS = [
    Network("relu_first", (2, 5, 7), (Relu("relu"), Conv2d("conv1", 3, 3, padding=1), Linear("fc", 4),
                                      Softmax("softmax"))),
    Network("pool_before_convolutions", (1, 6, 6), (MaxPool2d("pool", 2), Tanh("tanh"), Linear("fc", 3))),
    Network("fc_only", (3, 4, 4), (Linear("fc1", 8, bias=False), Tanh("tanh"), Linear("fc2", 5),
                                   Softmax("softmax"))),
    Network("convs", (2, 9, 9), (Conv2d("conv1", 3, 3, stride=2, padding=1, bias=False),
                                 Conv2d("conv2", 4, 5, padding=(2, 0)), Relu("relu"),
                                 MaxPool2d("pool", 3, stride=2, padding=1), Linear("fc", 6),
                                 Softmax("softmax"))),
    Network("last_is_relu", (1, 4, 4), (Conv2d("conv1", 2, 3), Linear("fc", 3), Relu("relu"))),
]  # fmt: skip


def engine(network=NETWORK, **options) -> Engine:
    options.setdefault("weights", "random")
    options.setdefault("device", "cpu")
    return Engine(network, **options)


def pixels(rng, count, shape=(3, 32, 32)):
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8)


PLACEMENTS = [
    pytest.param(
        device, mode, marks=[pytest.mark.gpu] if device == "cuda" else [], id=f"{device}-{mode}"
    )
    for device, modes in select.DATA_MODES.items()
    if device != "openacc"  # test_openacc.py has it
    for mode in modes
]

#: Every device, data mode, variant and reduction that go together.
CELLS = [
    pytest.param(*placement.values, row.name, reduction, marks=placement.marks)
    for placement in PLACEMENTS
    for row in select.VARIANTS.values()
    if placement.values[0] in row.devices and placement.values[1] in row.data_modes
    for reduction in ((False, True) if row.reduction else (False,))
]


@pytest.mark.parametrize(("device", "data_mode", "variant", "reduction"), CELLS)
@pytest.mark.parametrize("network", [NETWORK, *ODD_NETWORKS], ids=lambda n: n.name)
@pytest.mark.parametrize("as_pixels", [True, False])
def test_against_reference(rng, device, data_mode, variant, reduction, network, as_pixels):
    images = pixels(rng, 5, network.input_shape)
    if not as_pixels:
        images = rng.standard_normal(images.shape).astype(np.float32)
    options = {"device": device, "data_mode": data_mode, "reduction": reduction}
    try:
        e = engine(network, variant=variant, **options)
    except UnsupportedError as error:
        assert variant == "fused", error  # no layered variant may refuse a network
        auto = engine(network, variant="auto", **options)
        assert auto.choice.layered
        assert str(error).removeprefix("variant: fused: ") in auto.choice.reason
        return
    with e:
        wanted = reference.forward(network, e.weights, images)
        bound = tolerances.PROBABILITY * np.maximum(1, np.abs(wanted))
        for batch in (1, 2, 5):
            tolerances.assert_close(e.predict(images, batch), wanted, bound, batch=batch)


@pytest.mark.parametrize(("device", "data_mode", "variant", "reduction"), CELLS)
@pytest.mark.parametrize(("batch", "threads"), [(1, 1), (100, 2), (1102, 1)])
def test_real_images_and_weights(test_data, device, data_mode, variant, reduction, batch, threads):
    """865 of 1,102, as the thesis' weights get; on the CPU in batches of 100, else and of `if` a share."""
    weights = test_data("convnetjs-cifar10")
    dataset = WORKLOAD.load_data(str(test_data("cifar-10-batches-bin")), 1102)
    count = 1102 if device == "cuda" or (batch == 100 and variant != "if") else 53
    with engine(
        weights=weights, device=device, data_mode=data_mode, variant=variant, reduction=reduction,
        threads=threads,
    ) as e:  # fmt: skip
        found = e.predict(dataset.images[:count], batch)
    assert count < 1102 or np.sum(found.argmax(1) == dataset.labels) == 865
    wanted = real_reference(weights, dataset.images)[:count]
    tolerances.assert_close(found, wanted, tolerances.PROBABILITY, batch=batch)


_references: dict = {}


def real_reference(weights, images):
    if "probabilities" not in _references:
        from cnn_engine.io import weights as readers

        loaded = readers.read(weights, NETWORK)
        _references["probabilities"] = reference.forward(NETWORK, loaded, images)
    return _references["probabilities"]


def test_zero_images():
    with engine() as e:
        found = e.predict(np.empty((0, 3, 32, 32), np.uint8))
        assert found.shape == (0, 10)
        assert found.dtype == np.float32
        result = e.profile(np.empty((0, 3, 32, 32), np.float32))
        assert result.layers == []
        assert result.accuracy is None


def test_nan_images_give_nan_and_only_there(rng):
    images = rng.standard_normal((3, 3, 32, 32)).astype(np.float32)
    images[1, 0, 5, 5] = np.nan
    for variant, reduction in VARIANTS:
        with engine(variant=variant, reduction=reduction) as e:
            found = e.predict(images, batch=3)
        assert np.isnan(found[1]).all()
        assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            np.zeros((2, 3, 32, 31), np.uint8),
            r"expected shape \[N, 3, 32, 32\], found \[2, 3, 32, 31\]",
        ),
        (np.zeros((3, 32, 32), np.uint8), r"images: expected 4 dimensions, found 3"),
        (np.zeros((2, 3, 32, 32), bool), r"images: expected float32, found bool"),
        (
            np.full((2, 3, 32, 32), -1, np.int8),
            r"images: expected whole numbers from 0 to 255, found -1",
        ),
        (
            np.full((2, 3, 32, 32), 1e39),
            r"images: expected numbers in the range of float32, found 1e\+39",
        ),
        ([[1, 2], [3]], r"images: expected lists of equal lengths"),
        ([[["a"]]], r"images: expected float32, found"),
        (object(), r"images: expected a NumPy array .*, found object"),
        (np.zeros((2, 3, 64, 32), np.uint8)[:, :, ::2], r"images: expected a C-contiguous array"),
        ([[1, 2]], r"images: expected 4 dimensions, found 2"),
    ],
)
def test_bad_images(images, message):
    with engine() as e, pytest.raises(InputError, match=message):
        e.predict(images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "lenet"}, "network: expected one of"),
        (
            {"device": "tpu"},
            "device: expected auto, cpu, cuda, cuda:N, openacc or openacc:host, found 'tpu'",
        ),
        (
            {"device": "cuda:x"},
            "device: expected auto, cpu, cuda, cuda:N, openacc or openacc:host",
        ),
        ({"device": "cuda:99"}, "expected"),
        (
            {"variant": "fast"},
            "variant: expected one of auto, if, pad, blocked, tiled, fused, found 'fast'",
        ),
        (
            {"dtype": "float64"},
            "dtype: expected one of float32, bfloat16, tf32, float16, found 'float64'",
        ),
        ({"dtype": "float16"}, "dtype: float16 needs the variant fused, which cannot run"),
        ({"dtype": "bfloat16", "variant": "pad"}, "one of float32 for pad on cpu, found bfloat16"),
        ({"variant": "tiled"}, "variant: tiled: expected a device of kind cuda, found cpu"),
        ({"variant": "fused", "reduction": True}, "reduction: expected a variant that has one"),
        ({"chunk": 5}, "chunk: expected the data mode stream, found auto"),
        (
            {"data_mode": "transfer"},
            "data_mode: expected resident on the device cpu, found transfer",
        ),
        (
            {"data_mode": "cloud"},
            "data_mode: expected one of auto, managed, resident, stream, transfer",
        ),
        (
            {"network": 5},
            "network: expected a workload's name, a Workload, .* or an ONNX model, found 5",
        ),
        (
            {"device": 0},
            "device: expected auto, cpu, cuda, cuda:N, openacc or openacc:host, or a torch.device",
        ),
        (
            {"weights": 5},
            "weights: expected default, random, a path or a mapping of arrays, found 5",
        ),
        (
            {"network": Network("n", (3, 8, 8), (Conv2d("c", 8.0, 3), Linear("fc", 2)))},
            "n, layer c: out_channels: expected a whole number, found 8.0",
        ),
        (
            {"network": Network("n", (3, 8, 8), (Linear("fc", "2"),))},
            "n, layer fc: out_features: expected a whole number, found '2'",
        ),
        ({"threads": 0}, "threads: expected a whole number from 1 to 1024, found 0"),
        ({"threads": True}, "threads: expected a whole number"),
        ({"threads": "2"}, "threads: expected a whole number from 1 to 1024, found '2'"),
        ({"reduction": "warp"}, "reduction: expected True, False or None, found 'warp'"),
        ({"kernels": None}, "kernels: expected files or kernels, or a mapping to them, found None"),
        ({"kernels": [3]}, "kernels: expected files or kernels, or a mapping to them, found 3"),
        (
            {"weights": "/nonexistent"},
            "weights: expected a file or folder, found none at /nonexistent",
        ),
        ({"weights": {}}, "found no conv1.weight"),
        ({"network": ODD_NETWORKS[0], "weights": "default"}, "relu_first comes without weights"),
        (
            {"network": Network("image", (1, 2, 2), (Relu("relu"),))},
            "expected a last layer with one row",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        engine(**options)


class Sigmoid(Relu):
    """A layer that no operator computes, though it has all that a layer has."""

    kind = "sigmoid"


@pytest.mark.parametrize("variant", ["if", "pad", "fused", "auto"])
def test_a_layer_of_an_unknown_type_is_refused(rng, variant):
    network = Network("odd", (1, 4, 4), (Sigmoid("gate"), Linear("fc", 3), Softmax("softmax")))
    message = "layer gate: expected one of Conv2d, .*, found the type Sigmoid"
    with pytest.raises(UnsupportedError, match=message):
        engine(network, variant=variant)
    with pytest.raises(UnsupportedError, match=message):
        reference.forward(network, {}, pixels(rng, 1, (1, 4, 4)))
    with pytest.raises(UnsupportedError, match=message):
        fused_network.description(network, {})


@pytest.mark.parametrize("batch", [0, -1, True, 2.0, "2", np.int64(0)])
def test_bad_batch(rng, batch):
    with (
        engine() as e,
        pytest.raises(InputError, match=r"batch: expected a whole number of at least 1"),
    ):
        e.predict(pixels(rng, 5), batch)


@pytest.mark.parametrize("batch", [6, 10**12, np.int64(2), np.uint8(5)])
def test_a_batch_is_any_integer_and_no_more_than_the_images(rng, batch):
    images = pixels(rng, 5)
    with engine() as e:
        np.testing.assert_array_equal(e.predict(images, batch), e.predict(images))
        assert e.batch_size(batch, 5) == min(batch, 5)
        assert type(e.batch_size(batch, 5)) is int
        assert e.profile(images, batch=batch, iterations=1).batch == min(batch, 5)


def test_a_batch_that_cannot_fit_is_refused_before_anything_is_taken(monkeypatch, rng):
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: 1 << 20)
    with (
        engine(variant="if") as e,
        pytest.raises(InputError, match=r"batch: 50 images need .* GiB on cpu"),
    ):
        e.predict(pixels(rng, 50), 50)


def test_a_torch_device_names_a_device():
    torch = pytest.importorskip("torch")
    with engine(device=torch.device("cpu")) as e:
        assert e.device.name == "cpu"
    with pytest.raises(
        InputError,
        match=r"device: expected auto, cpu, cuda, cuda:N, openacc or openacc:host, found 'meta'",
    ):
        engine(device=torch.device("meta"))


@pytest.mark.parametrize("network", ["cifar10", ODD_NETWORKS[3]], ids=["workload", "network"])
def test_an_engine_can_be_pickled_and_works_in_another_process(rng, network):
    e = engine(network, variant="pad", reduction=True, threads=1)
    images = pixels(rng, 3, e.network.input_shape)
    copy = pickle.loads(pickle.dumps(e))
    assert (copy.choice, copy.threads, copy.weights_source) == (e.choice, 1, "random")
    np.testing.assert_array_equal(copy.predict(images), e.predict(images))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        found = executor.submit(e.predict, images).result()
    np.testing.assert_array_equal(found, e.predict(images))
    assert repr(e) == (
        f"<Engine of {e.network.name} on cpu: pad with reduction, float32, data mode resident, 1 threads>"
    )
    e.close()
    assert repr(e).endswith(", closed>")
    with pytest.raises(InputError, match="expected an open engine"):
        pickle.dumps(e)


def test_closed_engine(rng):
    e = engine()
    e.close()
    with pytest.raises(InputError, match="expected an open engine"):
        e.predict(pixels(rng, 1))


@pytest.mark.parametrize(("device", "data_mode"), PLACEMENTS)
def test_profile(rng, device, data_mode):
    images, labels = pixels(rng, 7), np.arange(7, dtype=np.uint8)
    chunk = 2 if data_mode == "stream" else None  # batches of 3, 3 and 1: chunks of 2 and 1
    with engine(device=device, data_mode=data_mode, variant="pad", chunk=chunk) as e:
        result = e.profile(images, labels, batch=3, iterations=2, percentiles=(50, 95))
        probabilities = e.predict(images)
    layers = {layer.name: layer for layer in result.layers}
    order = ["normalize", *(f"{n}{i}" for i in (1, 2, 3) for n in ("pad", "conv", "relu", "pool"))]
    assert list(layers) == [*order, "fc", "softmax"]
    calls = 5 if chunk else 3
    assert all(layer.calls == calls for layer in layers.values())
    assert sum(layer.flops for layer in layers.values()) == 7 * 7_840_000
    assert all(layer.host_s > 0 and layer.bytes > 0 for layer in layers.values())
    for layer in layers.values():
        whole = data_mode in ("resident", "stream")
        on_gpu = device == "cuda" and (whole or layer.kind == "conv")
        assert (layer.device_s is not None) == on_gpu
        assert layer.place == ("cuda" if on_gpu else "cpu")
    copies = {(copy.what, copy.direction): copy for copy in result.copies}
    if device == "cpu" or data_mode == "managed":
        assert copies == {}
    elif data_mode == "resident":
        assert set(copies) == {("images", "h2d"), ("probabilities", "d2h")}
        assert copies["images", "h2d"].bytes == images.nbytes
        assert copies["probabilities", "d2h"].bytes == probabilities.nbytes
    elif (
        data_mode == "stream"
    ):  # images are staged: their memory is not page-locked, as the results' is
        staged = {("images", "h2h"), ("images", "h2d")}
        assert set(copies) == staged | {("probabilities", "d2h")}
        assert all(copy.bytes == images.nbytes for key, copy in copies.items() if "images" in key)
        assert "chunks of 2 images: copies take" in result.notes[-1]
    else:
        names = {(f"conv{i} {what}", way) for i in (1, 2, 3) for what, way in
                 (("input", "h2d"), ("output", "d2h"))}  # fmt: skip
        assert set(copies) == names
        assert copies["conv1 input", "h2d"].bytes == 7 * 3 * 36 * 36 * 4
    assert all(copy.seconds > 0 and copy.calls == calls for copy in result.copies)
    assert result.accuracy.total == 7
    assert result.accuracy.correct == np.sum(probabilities.argmax(1) == labels)
    assert result.check.passed
    assert result.iterations == 2
    assert result.images_done == 7
    assert len(result.latency.samples_ms) == 4  # two full batches in each iteration
    assert result.phases.forward_s > 0
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["schema"] == 1
    assert set(document["latency_ms"]) >= {"min", "p50", "p90", "p95", "p99", "max", "mean"}


@pytest.mark.parametrize("batch", [1, 3, 4, 7])
def test_probabilities_are_those_of_predict(rng, batch):
    """Whatever is run again for samples, with a last batch that is smaller too."""
    images = pixels(rng, 7)
    labels = rng.integers(0, 10, 7)
    probabilities = np.full((7, 10), -1, np.float32)
    with engine(variant="if") as e:
        result = e.profile(
            images, labels, batch=batch, iterations=1, check=False, probabilities=probabilities
        )
        wanted = e.predict(images)
    np.testing.assert_array_equal(probabilities, wanted)
    assert result.accuracy.correct == np.sum(wanted.argmax(1) == labels)


def test_nothing_is_timed_when_the_check_fails(monkeypatch, rng):
    monkeypatch.setattr(softmax.Softmax, "reference", lambda self, x: np.full(x.shape, 0.1))
    with engine() as e:
        result = e.profile(pixels(rng, 3))
    assert not result.check.passed
    assert result.layers == []
    assert result.latency is None


def test_duration_repeats(rng):
    with engine() as e:
        result = e.profile(pixels(rng, 2), check=False, duration_s=0.2)
    assert result.iterations > 1
    assert 0.15 < result.iterations * result.phases.forward_s < 2


def test_interrupt_keeps_what_was_measured(rng):
    class Interrupter:
        done = 0

        def start(self, what, images): ...
        def stop(self): ...

        def advance(self, images):
            self.done += images
            if self.done >= 4:
                raise KeyboardInterrupt

    with engine() as e:
        result = e.profile(
            pixels(rng, 10), np.zeros(10), batch=2, check=False, progress=Interrupter()
        )
    assert result.interrupted
    assert result.images_done == 4
    assert result.accuracy.total == 4
    assert len(result.latency.samples_ms) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": -1}, "^warmup: "), ({"iterations": 0}, "^iterations: "),
        ({"duration_s": 0}, "^duration_s: "), ({"percentiles": (101,)}, "^percentiles: "),
        ({"labels": np.zeros(3)}, r"labels: expected shape \[2\]"),
        ({"probabilities": np.zeros((2, 9), np.float32)}, "probabilities: expected shape"),
    ],
)  # fmt: skip
def test_bad_profile_options(rng, options, message):
    with engine() as e, pytest.raises(InputError, match=message):
        e.profile(pixels(rng, 2), **options)


@pytest.mark.gpu
def test_managed_memory_above_a_quarter_of_the_free_is_refused(monkeypatch, rng):
    from cnn_engine.devices.cuda import CudaDevice

    monkeypatch.setattr(CudaDevice, "free_memory", lambda self: 1 << 20)
    with engine(device="cuda", data_mode="managed") as e:  # noqa: SIM117
        with pytest.raises(InputError, match="at most a quarter of the card's free memory"):
            e.predict(pixels(rng, 8), 8)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["fused", "tiled", "if"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64, None])
@pytest.mark.parametrize("pinned", [False, True])
def test_stream_in_chunks(rng, variant, chunk, pinned):
    images = pixels(rng, 23)
    with engine(device="cuda", data_mode="stream", variant=variant, chunk=chunk) as e:
        if pinned:
            source = e.empty_images(23)
            source[...] = images
            assert e.device.is_pinned(source.__array_interface__["data"][0])
        else:
            source = images
        wanted = reference.forward(NETWORK, e.weights, images)
        for batch in (23, 10):
            tolerances.assert_close(e.predict(source, batch), wanted, tolerances.PROBABILITY)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["tf32", "float16", "bfloat16"])
def test_fused_half_precision(test_data, dtype):
    weights = test_data("convnetjs-cifar10")
    dataset = WORKLOAD.load_data(str(test_data("cifar-10-batches-bin")), 1102)
    with engine(weights=weights, device="cuda", dtype=dtype) as e:
        assert e.choice.variant == "fused"
        result = e.profile(dataset, batch=1102)
    assert result.check.passed
    assert result.check.top1_agreement >= 0.995
    assert abs(result.accuracy.correct - 865) <= 5


@pytest.mark.gpu
@pytest.mark.parametrize("data", ["synthetic", "noise"])
@pytest.mark.parametrize("dtype", ["tf32", "float16", "bfloat16"])
def test_fused_half_precision_with_the_networks_own_weights(rng, data, dtype):
    images = (
        WORKLOAD.load_data("synthetic", 256).images if data == "synthetic" else pixels(rng, 256)
    )
    with Engine("cifar10", device="cuda", dtype=dtype) as e:
        result = e.profile(images, batch=256, iterations=1)
    assert result.check.passed
    assert result.check.max_abs_diff > 1e-5  # it does round
    assert result.check.top1_agreement >= 0.97


def test_plans_of_several_sizes_have_a_part_of_a_gpus_memory():
    with Engine("cifar10", device="cpu") as engine:
        pool = engine._plans.pool
        before = pool.kept_bytes
        engine.keep_sizes()
        assert pool.kept_bytes == before  # there is no GPU
        engine._schedule = dataclasses.replace(engine._schedule, memory=GPU_PART << 30)
        engine.keep_sizes()
        assert pool.kept_bytes == 1 << 30
