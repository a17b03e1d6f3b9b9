from __future__ import annotations

import numpy as np
import pytest
from cnn_engine.workloads.cifar10 import WORKLOAD

from cnn_engine import Conv2d, InputError, Linear, MaxPool2d, Network, Relu, Softmax, workload
from cnn_engine.workload import Workload


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
