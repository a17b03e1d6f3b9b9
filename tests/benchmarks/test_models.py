"""Networks as users bring them, but small: ONNX files of well-known forms, and what PyTorch exports."""

from __future__ import annotations

import json
from time import process_time

import numpy as np
import onnx_models
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tolerances import NETWORK_LOGITS, assert_close

from benchmarks import models, models_worker
from cnn_engine import Engine, export
from cnn_engine.graph.onnx import load

#: Activations at their peak, of the largest set of values alive at once.
PEAK = 1.1

#: Processor seconds of creating an engine; the requirement is of a second by the clock, on a machine at rest.
CREATE_SECONDS = 3.0


class Builder:
    """Adds ONNX nodes one after the other, with random weights and batch norms of random statistics."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list = []
        self.constants: dict[str, np.ndarray] = {}

    def add(self, operator: str, *inputs: str, **attributes) -> str:
        name = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def constant(self, values) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = values
        return name

    def conv(
        self, x, channels, filters, kernel=3, stride=1, groups=1, norm=True, act="Relu"
    ) -> str:
        """Convolution, batch norm and activation; He's weights."""
        shape = (filters, channels // groups, kernel, kernel)
        spread = (2 / np.prod(shape[1:])) ** 0.5
        weight = self.constant(self.rng.normal(0, spread, shape).astype(np.float32))
        more = {"strides": [stride] * 2, "pads": [kernel // 2] * 4, "group": groups}
        x = self.add("Conv", x, weight, **more)
        if norm:
            x = self.norm(x, filters)
        return self.add(act, x) if act else x

    def norm(self, x: str, channels: int) -> str:
        draw = [
            self.rng.uniform(0.5, 1.5, channels), self.rng.normal(0, 0.1, channels),
            self.rng.normal(0, 0.1, channels), self.rng.uniform(0.8, 1.2, channels),
        ]  # fmt: skip
        return self.add(
            "BatchNormalization", x, *(self.constant(a.astype(np.float32)) for a in draw)
        )

    def pool(self, x: str, operator: str = "MaxPool", size: int = 2) -> str:
        return self.add(operator, x, kernel_shape=[size] * 2, strides=[size] * 2)

    def head(self, x: str, channels: int, classes: int = 10) -> str:
        x = self.add("Flatten", self.add("GlobalAveragePool", x))
        weight = self.rng.normal(0, channels**-0.5, (channels, classes)).astype(np.float32)
        bias = self.rng.normal(0, 0.1, classes).astype(np.float32)
        return self.add("Gemm", x, self.constant(weight), self.constant(bias))

    def model(self, output: str, shape: tuple[int, ...]):
        inputs = [onnx_models.tensor("images", ("batch", *shape))]
        made = [helper.make_empty_tensor_value_info(output)]
        return onnx_models.model(self.nodes, inputs, made, self.constants)


def resnet(blocks=(1, 1, 1), width=8, size=32):
    """Bottlenecks with sums around them: (3, 8, 36, 3) of width 64 are ResNet-152's."""
    b = Builder()
    x, channels = b.conv("images", 3, width, 7, 2), width
    x = b.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for stage, count in enumerate(blocks):
        filters = width << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = b.conv(b.conv(x, channels, filters, 1), filters, filters, 3, stride)
            y = b.conv(y, filters, 4 * filters, 1, act=None)
            if not block:
                x = b.conv(x, channels, 4 * filters, 1, stride, act=None)
            x, channels = b.add("Relu", b.add("Add", y, x)), 4 * filters
    return b.model(b.head(x, channels), (3, size, size))


def densenet(blocks=(3, 4, 3), growth=8, size=32):
    """Every layer reads what all before it in its block have made."""
    b = Builder()
    x, channels = b.conv("images", 3, 2 * growth, 3, 2), 2 * growth
    for stage, count in enumerate(blocks):
        features = [x]
        for _ in range(count):
            joined = b.add("Concat", *features, axis=1)
            y = b.add("Relu", b.norm(joined, channels))
            features.append(
                b.conv(b.conv(y, channels, 4 * growth, 1), 4 * growth, growth, norm=False, act=None)
            )
            channels += growth
        x = b.add("Relu", b.norm(b.add("Concat", *features, axis=1), channels))
        if stage + 1 < len(blocks):
            x = b.pool(b.conv(x, channels, channels // 2, 1), "AveragePool")
            channels //= 2
    return b.model(b.head(x, channels), (3, size, size))


def unet(depth=3, width=8, size=32):
    """Features of every size go around what is below them."""
    b = Builder()
    x, channels, skips = "images", 3, []
    for level in range(depth):
        filters = width << level
        x = b.conv(b.conv(x, channels, filters), filters, filters)
        skips.append((x, filters))
        x, channels = b.pool(x), filters
    x, channels = b.conv(x, channels, width << depth), width << depth
    for skip, filters in reversed(skips):
        weight = b.rng.normal(0, (1 / channels) ** 0.5, (channels, filters, 2, 2)).astype(
            np.float32
        )
        x = b.add("ConvTranspose", x, b.constant(weight), strides=[2, 2], kernel_shape=[2, 2])
        x = b.conv(b.add("Concat", skip, x, axis=1), 2 * filters, filters)
        channels = filters
    return b.model(b.conv(x, channels, 2, 1, norm=False, act=None), (3, size, size))


def mobilenet(blocks=((16, 1), (24, 2), (24, 1), (32, 2)), size=32):
    """Inverted residuals of depthwise convolutions, with squeeze and excitation and hard swish."""
    b = Builder()
    x, channels = b.conv("images", 3, 8, 3, 2, act="HardSwish"), 8
    for filters, stride in blocks:
        wide = 4 * channels
        y = b.conv(x, channels, wide, 1, act="HardSwish")
        y = b.conv(y, wide, wide, 3, stride, groups=wide, act="HardSwish")
        gate = b.conv(b.add("GlobalAveragePool", y), wide, 8, 1, norm=False)
        gate = b.conv(gate, 8, wide, 1, norm=False, act="HardSigmoid")
        y = b.conv(b.add("Mul", y, gate), wide, filters, 1, act=None)
        x = b.add("Add", x, y) if (filters, stride) == (channels, 1) else y
        channels = filters
    return b.model(b.head(x, channels), (3, size, size))


NETWORKS = [resnet, densenet, unet, mobilenet]


@pytest.fixture(scope="module")
def wanted():
    """Returns a function from a network's maker and a batch to model, images and ONNX's own outputs."""
    known: dict = {}

    def make(network, batch):
        if (network, batch) not in known:
            model = network()
            images = np.random.default_rng(batch).normal(size=(batch, 3, 32, 32))
            images = images.astype(np.float32)
            (outputs,) = ReferenceEvaluator(model).run(None, {"images": images})
            known[network, batch] = model, images, outputs
        return known[network, batch]

    return make


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_outputs_are_those_of_onnx(wanted, network, batch, device):
    model, images, outputs = wanted(network, batch)
    with Engine(model, device=device) as engine:
        (found,) = engine.run({"images": images}).values()
        (again,) = engine.run({"images": images}).values()
        plan = engine.plan(batch, np.dtype(np.float32))
    assert_close(found, outputs, NETWORK_LOGITS * np.abs(outputs).max(), network=network.__name__)
    assert np.array_equal(found, again)
    assert not plan.fallbacks


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("batch", [1, 3])
def test_memory_is_little_more_than_what_is_alive(network, batch):
    with Engine(network(), device="cpu", threads=1) as engine:
        placed = engine._plans.open().placed(batch, pixels=False)
    alive = models_worker.most_alive(placed.graph)
    assert 0 < models_worker.peak_of(placed) <= PEAK * alive


def test_what_is_alive_is_counted_without_sharing(wanted):
    """A chain holds two values at a time, and a value that is read late is held till then."""
    x = onnx_models.tensor("images", (1, 2, 4, 4))
    words = [("Relu", "images", "a"), ("Neg", "a", "b"), ("Abs", "b", "c"), ("Exp", "c", "d")]
    chain = [helper.make_node(op, [i], [o]) for op, i, o in words]
    late = [*chain, helper.make_node("Add", ["d", "a"], ["y"])]
    output = [helper.make_empty_tensor_value_info(name) for name in "dy"]
    nbytes = 2 * 4 * 4 * 4
    graph = load(onnx_models.model(chain, [x], output[:1]))
    assert models_worker.most_alive(graph) == 2 * nbytes
    graph = load(onnx_models.model(late, [x], output[1:]))
    assert models_worker.most_alive(graph) == 3 * nbytes


def test_engine_of_a_deep_network_is_made_quickly():
    """ResNet-152 in nodes and bytes of weights."""
    model = resnet((3, 8, 36, 3), 64, 224)
    data = model.SerializeToString()
    assert len(model.graph.node) > 500
    assert len(data) > 200e6
    start = process_time()
    with Engine(data, device="cpu", threads=1) as engine:
        engine.plan(1, np.dtype(np.float32))
        seconds = process_time() - start
    assert seconds <= CREATE_SECONDS


@pytest.mark.parametrize("exporter", export.EXPORTERS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_pytorch_exports(tmp_path, monkeypatch, exporter, device):
    """The whole of the benchmark's two stages, on a network that is small."""
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    if exporter == "dynamo":
        pytest.importorskip("onnxscript")
    (tmp_path / "small_networks.py").write_text(SMALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = models_worker.make(
        {
            "spec": "small_networks:small", "size": 16, "exporters": [exporter], "batches": [1, 3],
            "threads": 1, "folder": str(tmp_path),
        }
    )  # fmt: skip
    exported = made["exports"][exporter]
    found = models_worker.run(
        {
            "files": exported["files"], "device": device, "threads": 1,
            "logits": str(tmp_path / "logits.npz"),
        }
    )  # fmt: skip
    for batch in (1, 3):
        row = found[batch] | {"onnxruntime_error": exported["runtime"][batch]}
        assert models.verdict(row) == models.PASSED, row
        assert not row["stand_ins"]


SMALL = """
from torch import nn

def small():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=4), nn.BatchNorm2d(8), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )
"""


def test_a_network_that_fails_is_a_row(tmp_path, capsys):
    """Here for taking longer than it may."""
    page, record = tmp_path / "models.md", tmp_path / "models.json"
    words = ["--device", "cpu", "--networks", "alexnet,resnet18", "--batch", "1", "--limit", "0.01"]
    words += ["--exporter", "torchscript", "--json", str(record), "--markdown", str(page)]
    assert models.main(words) == 1
    assert "0 of 2 passed" in capsys.readouterr().out
    assert page.read_text().count("make: took more than 0.01 s") == 2
    assert [row["verdict"] for row in json.loads(record.read_text())["rows"]] == ["failed"] * 2


@pytest.mark.parametrize(
    ("error", "peer", "same", "verdict"),
    [
        (9e-6, 1e-7, True, models.PASSED),
        (2e-5, 1.1e-5, True, models.PASSED),
        (2e-5, 1e-7, True, models.WRONG),
        (2e-5, "its reason", True, models.WRONG),
        (1e-7, 1e-7, False, models.WRONG),
    ],
)
def test_verdict(error, peer, same, verdict):
    row = {"error": error, "onnxruntime_error": peer, "same_again": same}
    assert models.verdict(row) == verdict


def test_names():
    assert models.networks("timm,alexnet,") == [*models.TIMM, "alexnet"]
    assert models.spec_of("alexnet") == "torchvision.models:alexnet"
    assert models.spec_of("dla34") == "timm.models:dla34"
    assert models.spec_of("a.b:c") == "a.b:c"
    assert len(set(models.TORCHVISION)) == 20
    assert len(set(models.TIMM) - set(models.TORCHVISION)) >= 10


def test_rows_are_added_in_order(tmp_path):
    """Those of another run stay, apart from those that are run again."""
    record = tmp_path / "models.json"
    words = ["--device", "cpu", "--limit", "0.01", "--json", str(record), "--add"]
    words += ["--exporter", "torchscript", "--batch", "1", "--networks"]
    for names in ("dla34,resnet18", "alexnet,resnet18"):
        assert models.main([*words, names]) == 1
    found = json.loads(record.read_text())
    assert [row["network"] for row in found["rows"]] == ["alexnet", "resnet18", "dla34"]
    assert len(found["commands"]) == 2


def test_shards_become_one_record(tmp_path):
    words = ["--device", "cpu", "--limit", "0.01", "--exporter", "torchscript", "--batch", "1"]
    for which in (1, 2):
        record = ["--json", str(tmp_path / f"{which}.json"), "--shard", f"{which}/2"]
        assert models.main([*words, *record, "--networks", "dla34,resnet18,alexnet"]) == 1
    rows = [json.loads((tmp_path / f"{n}.json").read_text())["rows"] for n in (1, 2)]
    assert [[row["network"] for row in part] for part in rows] == [
        ["alexnet", "dla34"],
        ["resnet18"],
    ]
    parts = [str(tmp_path / f"{n}.json") for n in (1, 2)]
    whole = ["--json", str(tmp_path / "all.json"), "--markdown", str(tmp_path / "all.md")]
    assert models.main(["--device", "cpu", "--merge", *parts, *whole]) == 1
    found = json.loads((tmp_path / "all.json").read_text())
    assert [row["network"] for row in found["rows"]] == ["alexnet", "resnet18", "dla34"]
    assert len(found["commands"]) == 2
    assert "0 of 3 passed" in (tmp_path / "all.md").read_text()
