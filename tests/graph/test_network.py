from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
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
    UnsupportedError,
    workload,
)
from cnn_engine.workload import Workload

SCALES, OFFSETS = (1 / 58, 1 / 57, 1 / 59), (-2.1, -2.0, -1.8)


def per_channel() -> Network:
    layers = (Conv2d("conv1", 8, 3, padding=1), Relu("relu1"), Linear("fc", 5), Softmax("softmax"))
    return Network("per_channel", (3, 6, 7), layers, SCALES, OFFSETS)


@pytest.mark.parametrize("variant", ["if", "pad", "blocked", "auto"])
def test_scale_and_offset_of_each_channel(variant):
    """The same as one scale and offset over images that were normalised outside."""
    network = per_channel()
    weights = network.random_weights()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 6, 7), np.uint8)
    scale, offset = (np.float32(values).reshape(3, 1, 1) for values in (SCALES, OFFSETS))
    floats = pixels.astype(np.float32) * scale + offset
    engine = Engine(network, weights=weights, device="cpu", variant=variant)
    assert engine.check(pixels).passed
    found, wanted = engine.predict(pixels), engine.predict(floats)
    assert np.abs(found - wanted).max() <= engine.check(pixels).tolerance
    plain = Engine(
        replace(network, scale=SCALES[0], offset=OFFSETS[0]), weights=weights, device="cpu"
    )
    assert np.abs(plain.predict(pixels) - wanted).max() > 1e-3


def test_fused_says_that_it_has_one_scale():
    with pytest.raises(UnsupportedError, match="expected one scale and offset for all channels"):
        Engine(per_channel(), weights="random", device="cpu", variant="fused")


def test_scales_that_do_not_fit_are_refused():
    layers = (Linear("fc", 2), Softmax("softmax"))
    for scale in ((1.0, 2.0), (1.0, float("nan"), 1.0), "1", [[1.0] * 3]):
        with pytest.raises(
            InputError, match="n: scale: expected a finite number, or 3, one per channel"
        ):
            Network("n", (3, 4, 4), layers, scale)
    network = Network("n", (3, 4, 4), layers, [1, 2, 3], np.float32([0, 0, 1]))
    assert (network.scale, network.offset) == ((1.0, 2.0, 3.0), (0.0, 0.0, 1.0))
    assert hash(network) == hash(replace(network))


def test_cifar10_is_the_thesis_network():
    network = WORKLOAD.network
    shapes = {info.layer.name: info.output_shape for info in network.infos}
    assert shapes["conv1"] == (16, 32, 32)
    assert shapes["pool1"] == (16, 16, 16)
    assert shapes["conv3"] == (20, 8, 8)
    assert shapes["fc"] == shapes["softmax"] == (10,)
    assert sum(np.prod(shape) for shape in network.parameters.values()) == 22_466
    flops = {info.layer.name: info.flops(1) for info in network.infos}
    assert flops["conv1"] == 2_457_600
    assert flops["conv2"] == 4_096_000
    assert flops["conv3"] == 1_280_000
    assert flops["fc"] == 6_400
    assert network.flops() == 7_840_000
    assert network.flops(7) == 7 * 7_840_000


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "expected at least one layer, found none"),
        ((Relu("a"), Softmax("a")), "expected unique layer names, found 'a' twice"),
        (
            (Conv2d("big", 4, kernel=40),),
            "layer big: expected a window of at most the padded input",
        ),
        (
            (Linear("fc", 10), Conv2d("conv", 4, kernel=1)),
            "layer conv: expected an input and a weight of 4",
        ),
        ((MaxPool2d("pool", kernel=2, padding=2),), "layer pool: padding: expected at most half"),
        ((Conv2d("none", 0, kernel=1),), "layer none: out_channels: expected at least 1"),
    ],
)
def test_layers_that_do_not_fit(layers, message):
    with pytest.raises(InputError, match=message):
        _ = Network("n", (3, 8, 8), layers).infos


def test_check_weights():
    network = WORKLOAD.network
    weights = network.random_weights(3)
    assert network.check_weights(weights, "here").keys() == network.parameters.keys()
    for name, change, message in (
        ("conv2.bias", None, r"here: .*found no conv2.bias"),
        ("conv9.bias", np.zeros(2), r"here: .*found an unknown conv9.bias"),
        (
            "fc.weight",
            np.zeros((10, 321)),
            r"here: fc.weight: expected shape \[10, 320\] .* \[10, 321\]",
        ),
        ("fc.bias", np.zeros(10, np.int64), r"here: fc.bias: expected floating point, found int64"),
        (
            "fc.bias",
            np.full(10, np.nan),
            r"here: fc.bias: expected finite numbers, found nan at \[0\]",
        ),
        (
            "fc.bias",
            np.full(10, 1e300),
            r"here: fc.bias: expected finite numbers, found inf at \[0\]",
        ),
    ):
        changed = {k: v for k, v in {**weights, name: change}.items() if v is not None}
        with pytest.raises(InputError, match=message):
            network.check_weights(changed, "here")


def test_random_weights_depend_on_the_seed_alone():
    network = WORKLOAD.network
    one, same, other = (network.random_weights(seed) for seed in (1, 1, 2))
    assert all((one[name] == same[name]).all() for name in one)
    assert not (one["conv1.weight"] == other["conv1.weight"]).any()


def test_registry():
    assert "cifar10" in workload.names()
    assert workload.get("cifar10") is WORKLOAD
    with pytest.raises(InputError, match="expected one of .*cifar10.*, found 'mnist'"):
        workload.get("mnist")
    tiny = Network("taken", (1, 2, 2), (Linear("fc", 2), Softmax("softmax")))
    workload.register(Workload(tiny, WORKLOAD.load_data))
    with pytest.raises(InputError, match="registered already"):
        workload.register(Workload(tiny, WORKLOAD.load_data))
    workload._registered.pop("taken")


def test_layers_may_be_called_what_a_graph_calls_its_own_nodes():
    layers = Conv2d("normalize", 4, 3), Relu("s rows"), Softmax("s")
    network = Network("named", (3, 6, 6), layers)
    for pixels in (False, True):
        graph = network.graph(2, pixels)
        assert [node.op.kind for node in graph.nodes][pixels:] == [
            "conv2d",
            "relu",
            "reshape",
            "softmax",
        ]
        assert graph.values["probabilities"].shape == (2, 64)
