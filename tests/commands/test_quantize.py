"""``cnn-engine quantize``: trained networks beside ONNX Runtime's quantizer, planted faults, the command."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import model, onnxruntime_outputs, tensor
from onnxruntime import quantization

import cnn_engine
from cnn_engine import workload
from cnn_engine.errors import InputError, UnsupportedError
from cnn_engine.graph import network as layers
from cnn_engine.graph import passes
from cnn_engine.graph.model import Model
from cnn_engine.io import weights as weight_files
from cnn_engine.quantize import command, quantizing

F32 = np.float32


def trained(name: str, path: Path) -> onnx.ModelProto:
    """One of the project's networks with trained weights, as an ONNX model of what its images become."""
    network = workload.get(name).network
    parameters = weight_files.read(path, network)
    nodes, x = [], "x"

    def add(operator: str, inputs: list[str], **attributes) -> str:
        name = f"t{len(nodes)}"
        nodes.append(
            helper.make_node(operator, inputs, [name], f"{operator}{len(nodes)}", **attributes)
        )
        return name

    for layer in network.layers:
        own = [f"{layer.name}.{what}" for what in ("weight", "bias")]
        own = [name for name in own if name in parameters]
        if isinstance(layer, layers.Conv2d):
            pads = layer.padding if isinstance(layer.padding, tuple) else (layer.padding,) * 2
            x = add("Conv", [x, *own], pads=[*pads, *pads])
        elif isinstance(layer, layers.MaxPool2d):
            x = add("MaxPool", [x], kernel_shape=[2, 2], strides=[2, 2])
        elif isinstance(layer, layers.Linear):
            x = add("Gemm", [add("Flatten", [x]), *own], transB=1)
        else:
            x = add(type(layer).__name__, [x])
    shape = ["N", *network.input_shape]
    return model(nodes, [tensor("x", shape)], [tensor(x, ["N", 10])], parameters, opset=17)


def data(test_data, name: str) -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    """Returns a trained network, its images as it reads them, and their labels."""
    folder, images = {
        "cifar10": ("convnetjs-cifar10", "cifar-10-batches-bin"),
        "ece408": ("ece408/ece408-0002.params", "fashion-mnist"),
    }[name]
    loaded = workload.get(name).load_data(str(test_data(images)), None)
    pixels = loaded.images.astype(F32)
    read = pixels / F32(255) - F32(0.5) if name == "cifar10" else pixels
    return trained(name, test_data(folder)), read, loaded.labels


class Reader(quantization.CalibrationDataReader):
    def __init__(self, images):
        self._left = iter([{"x": images[i : i + 8]} for i in range(0, len(images), 8)])

    def get_next(self):
        return next(self._left, None)


def top1(proto: onnx.ModelProto, images, labels) -> float:
    return float(np.mean(onnxruntime_outputs(proto, {"x": images})[0].argmax(1) == labels))


def onnx_runtimes(tmp_path, proto, images, method: str) -> onnx.ModelProto:
    source, target = str(tmp_path / "float.onnx"), str(tmp_path / "runtime.onnx")
    onnx.save(proto, source)
    logging.disable(logging.WARNING)
    try:
        quantization.quantize_static(
            source, target, Reader(images), per_channel=True,
            activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
            calibrate_method=getattr(quantization.CalibrationMethod, method),
        )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(target)


@pytest.mark.parametrize("name", ["cifar10", "ece408"])
def test_trained_networks_lose_no_more_than_by_onnx_runtimes_methods(tmp_path, test_data, name):
    proto, images, labels = data(test_data, name)
    calibrating = images[:64]
    own = {
        method: top1(cnn_engine.quantize(proto, calibrating, method=method).model, images, labels)
        for method in ("mse", "minmax")
    }
    others = [
        top1(onnx_runtimes(tmp_path, proto, calibrating, method), images, labels)
        for method in ("MinMax", "Entropy", "Percentile")
    ]
    assert top1(proto, images, labels) - own["mse"] <= 0.003
    assert max(own.values()) >= max(others)


def planted(seed: int, kind: str) -> tuple[onnx.ModelProto, str, np.ndarray]:
    """Returns a network of six convolutions, one of them with a fault, its name, and images."""
    rng = np.random.default_rng(seed)
    nodes, constants, x, channels, depthwise = [], {}, "x", 3, (2, 4)
    bad = int(rng.choice(depthwise if kind == "depthwise channel" else (1, 3, 5)))
    for i in range(6):
        groups = channels if i in depthwise else 1
        filters = channels if i in depthwise else 16
        shape = (filters, channels // groups, 3, 3)
        w = rng.normal(0, np.sqrt(2 / (9 * shape[1])), shape)
        if i == bad and kind == "outlier weight":
            w[tuple(rng.integers(0, size) for size in shape)] = 60 * np.abs(w).max()
        elif i == bad:
            w[rng.integers(filters)] *= 200 if kind == "depthwise channel" else 80
        constants |= {f"w{i}": w.astype(F32), f"b{i}": rng.normal(0, 0.1, filters).astype(F32)}
        inputs = [x, f"w{i}", f"b{i}"]
        options = {"pads": [1] * 4, "group": groups}
        nodes.append(helper.make_node("Conv", inputs, [f"c{i}"], f"conv{i}", **options))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"]))
        x, channels = f"r{i}", filters
    nodes += [
        helper.make_node("GlobalAveragePool", [x], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["row"]),
        helper.make_node("Gemm", ["row", "wf"], ["y"], "fc", transB=1),
    ]
    constants["wf"] = rng.normal(0, 0.3, (10, channels)).astype(F32)
    inputs, outputs = [tensor("x", ["N", 3, 12, 12])], [tensor("y", ["N", 10])]
    images = rng.normal(size=(8, 3, 12, 12)).astype(F32)
    return model(nodes, inputs, outputs, constants, opset=17), f"conv{bad}", images


@pytest.mark.parametrize("seed", [6, 10, 17])
@pytest.mark.parametrize("kind", ["outlier weight", "depthwise channel", "range of one channel"])
def test_a_planted_fault_is_named_first(seed, kind):
    proto, bad, images = planted(seed, kind)
    found = cnn_engine.quantize(proto, images, equalise=False)
    assert found.layers[0].name == bad


def test_channels_around_depthwise_layers_are_equalised_where_that_helps():
    proto, _, images = planted(3, "depthwise channel")
    plain = cnn_engine.quantize(proto, images, equalise=False)
    found = cnn_engine.quantize(proto, images)
    assert found.equalised == 4
    assert found.accuracy.noise < 0.7 * plain.accuracy.noise
    assert not plain.equalised


def test_as_few_layers_stay_float_as_the_loss_needs():
    proto, bad, images = planted(11, "range of one channel")
    proto.graph.node.pop()  # images are compared by the noise of what comes out
    proto.graph.node[-1].CopyFrom(helper.make_node("Identity", ["mean"], ["y"]))
    proto.graph.output[0].CopyFrom(tensor("y", ["N", 16, 1, 1]))
    plain = cnn_engine.quantize(proto, images, equalise=False)
    found = cnn_engine.quantize(proto, images, equalise=False, max_loss=plain.loss / 2)
    kept = [layer.name for layer in found.layers if layer.kept]
    assert found.loss <= plain.loss / 2
    assert 1 <= len(kept) < 6
    for name in kept:
        fewer = cnn_engine.quantize(proto, images, equalise=False, keep=set(kept) - {name})
        assert fewer.loss > plain.loss / 2
    named = cnn_engine.quantize(proto, images, equalise=False, keep=[bad])
    assert [layer.name for layer in named.layers if layer.kept] == [bad]
    convolutions = [
        n.op.kind for n in passes.lower_qdq(Model(cnn_engine.load(named.model)).base).nodes
    ]
    assert Counter(convolutions)["conv2d"] == 1
    assert Counter(convolutions)["quantized_conv2d"] == 5


@pytest.fixture
def files(tmp_path):
    proto, _, images = planted(2, "none")
    onnx.save(proto, tmp_path / "net.onnx")
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(8) % 10)
    return tmp_path


def run(files: Path, *more: str) -> int:
    words = [str(files / "net.onnx"), "--data", str(files / "images.npz")]
    return command.main([*words, "--output", str(files / "int8.onnx"), *more])


def test_the_file_runs_alike_in_other_runtimes(files, capsys):
    page, report = files / "report.html", files / "report.json"
    assert run(files, "--html", str(page), "--json", str(report)) == 0
    assert "layers in 8 bits: 7 of 7" in capsys.readouterr().out
    content = json.loads(report.read_text())
    assert content["images"] == 8
    assert len(content["layers"]) == 7
    assert all(name in page.read_text() for name in ("conv0", "conv5", "fc"))
    proto = onnx.load(files / "int8.onnx")
    onnx.checker.check_model(proto, full_check=True)
    images = np.load(files / "images.npz")["images"]
    found = cnn_engine.Engine(proto, device="cpu").run({"x": images})["y"]
    step = np.abs(found).max() / 100
    other = onnxruntime_outputs(proto, {"x": images})[0]
    assert np.abs(found - other).max() <= step
    openvino = pytest.importorskip("openvino")
    compiled = openvino.Core().compile_model(str(files / "int8.onnx"), "CPU")
    assert np.abs(found - compiled({"x": images})[0]).max() <= 2 * step


def two_inputs(batch) -> onnx.ModelProto:
    """A network of images of any size and of rows, with two outputs; ``scale`` is a setting."""
    rng = np.random.default_rng(4)
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "w1"], ["c1"], "first", pads=[1] * 4),
        node("Mul", ["c1", "scale"], ["scaled"]),
        node("Relu", ["scaled"], ["r1"]),
        node("Conv", ["r1", "w2"], ["map"], "second"),
        node("GlobalAveragePool", ["r1"], ["mean"]),
        node("Flatten", ["mean"], ["row"]),
        node("Concat", ["row", "more"], ["both"], axis=1),
        node("Gemm", ["both", "w3"], ["y"], "last", transB=1),
    ]
    constants = {
        "w1": rng.normal(0, 0.4, (8, 3, 3, 3)), "w2": rng.normal(0, 0.4, (2, 8, 1, 1)),
        "w3": rng.normal(0, 0.4, (4, 13)),
    }  # fmt: skip
    inputs = tensor("image", [batch, 3, "H", "W"]), tensor("more", [batch, 5]), tensor("scale", [])
    outputs = tensor("map", None), tensor("y", [batch, 4])
    return model(nodes, inputs, outputs, {n: a.astype(F32) for n, a in constants.items()}, opset=17)


@pytest.mark.parametrize("batch", ["N", 2])
def test_inputs_of_any_kind(tmp_path, capsys, rng, batch):
    source, target, given = (tmp_path / name for name in ("net.onnx", "int8.onnx", "given.npz"))
    onnx.save(two_inputs(batch), source)
    arrays = {"image": rng.normal(size=(12, 3, 9, 7)), "more": rng.normal(size=(12, 5))}
    arrays = {name: array.astype(F32) for name, array in arrays.items()}
    np.savez(given, **arrays)
    words = [str(source), "--output", str(target), "--constant", "scale=0.5"]
    assert command.main([*words, "--inputs", str(given), "--images", "7"]) == 0
    assert f"images: {7 if batch == 'N' else 6}" in capsys.readouterr().out
    some = {name: array[:2] for name, array in arrays.items()} | {"scale": np.array(0.5, F32)}
    found = cnn_engine.Engine(target, device="cpu").run(some)
    for name, other in zip(("map", "y"), onnxruntime_outputs(two_inputs(batch), some), strict=True):
        noise = np.square(found[name] - other).mean() / np.square(other).mean()
        assert 0 < noise < 1e-3
    odd = {name: array[:11] for name, array in arrays.items()}
    if batch == "N":
        assert cnn_engine.quantize(source, odd | {"scale": F32(0.5)}).images == 11
    else:  # whole passes
        assert cnn_engine.quantize(source, odd, constants={"scale": 0.5}).images == 10
    with pytest.raises(
        InputError, match=r"'more': .*expected a shape for \[(N|2), 5\], found \[\]"
    ):
        cnn_engine.quantize(source, odd | {"more": F32(0)}, constants={"scale": 0.5})
    np.savez(given, image=arrays["image"])
    assert command.main([*words, "--inputs", str(given)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.endswith("given.npz: expected the arrays image, more, found image")


def test_copies_of_constants_are_constants(rng):
    """PyTorch exports biases that are equal, such as zeros, as copies of one."""
    node = helper.make_node
    nodes = [
        node("Identity", ["zeros"], ["b0"]), node("Identity", ["b0"], ["b1"]),
        node("Identity", ["v"], ["v0"]), node("Conv", ["x", "w", "b0"], ["c"], "first", pads=[1] * 4),
        node("Relu", ["c"], ["r"]), node("Conv", ["r", "v0", "b1"], ["d"], "second", group=4),
        node("Conv", ["d", "u", "zeros"], ["y"], "third"), node("Identity", ["zeros"], ["z"]),
    ]  # fmt: skip
    shapes = {"w": (4, 3, 3, 3), "v": (4, 1, 3, 3), "u": (4, 4, 1, 1)}
    constants = {name: rng.normal(size=shape).astype(F32) for name, shape in shapes.items()}
    constants["zeros"] = np.zeros(4, F32)
    inputs, outputs = [tensor("x", ["N", 3, 6, 6])], [tensor("y", None), tensor("z", [4])]
    proto = model(nodes, inputs, outputs, constants, opset=17)
    x = rng.normal(size=(8, 3, 6, 6)).astype(F32)
    found = cnn_engine.quantize(proto, x)  # which scales the depthwise one's channels, and its bias
    assert {layer.name for layer in found.layers} == {"first", "second", "third"}
    assert found.others == ()
    assert [one.op_type for one in proto.graph.node].count("Identity") == 4, "the caller's own"
    made, exact = (onnxruntime_outputs(one, {"x": x}) for one in (found.model, proto))
    assert np.square(made[0] - exact[0]).mean() < 1e-3 * np.square(exact[0]).mean()
    np.testing.assert_array_equal(made[1], exact[1])


def test_layers_that_cannot_be_quantized_are_named(rng):
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w"], ["c"], "plain"), node("Mul", ["w2", "scale"], ["made"]),
        node("Conv", ["c", "made"], ["d"], "computed"),
        node("ConvTranspose", ["d", "w2"], ["y"], "transposed"),
    ]  # fmt: skip
    constants = {"w": rng.normal(size=(4, 3, 3, 3)), "w2": rng.normal(size=(4, 4, 1, 1))}
    constants = {name: array.astype(F32) for name, array in constants.items()}
    inputs = tensor("x", ["N", 3, 6, 6]), tensor("scale", [])
    proto = model(nodes, inputs, [tensor("y", None)], constants, opset=17)
    x = rng.normal(size=(4, 3, 6, 6)).astype(F32)
    found = cnn_engine.quantize(proto, x, constants={"scale": F32(0.5)})
    assert [layer.name for layer in found.layers] == ["plain"]
    assert found.others == ("computed", "transposed") == tuple(found.to_dict()["others"])
    assert dict(command.summary(found))["float in any case"] == (
        "2 layers, transposed, or with computed weights or biases: computed, transposed"
    )


def test_what_branches_read_stays(rng):
    """An If reads a convolution's output before its batch norm, and a constant that nothing else reads."""
    node = helper.make_node
    branches = {
        f"{name}_branch": helper.make_graph(
            [node("Mul", ["c", factor], [f"{name}.y"])], name, [], [tensor(f"{name}.y", None)]
        )
        for name, factor in (("then", "two"), ("else", "three"))
    }
    nodes = [
        node("Conv", ["x", "w"], ["c"], "first"),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["b"]),
        node("If", ["flag"], ["i"], **branches),
        node("Conv", ["b", "v"], ["y"], "second"),
    ]
    constants = {"w": rng.normal(size=(4, 3, 3, 3)), "v": rng.normal(size=(2, 4, 1, 1))}
    constants |= {name: rng.uniform(0.5, 2, 4) for name in ("scale", "shift", "mean", "variance")}
    constants = {n: a.astype(F32) for n, a in constants.items()} | {"two": F32(2), "three": F32(3)}
    inputs = tensor("x", ["N", 3, 6, 6]), tensor("flag", [], onnx.TensorProto.BOOL)
    proto = model(nodes, inputs, [tensor("y", None), tensor("i", None)], constants, opset=17)
    x = rng.normal(size=(2, 3, 6, 6)).astype(F32)
    found = cnn_engine.quantize(proto, x, constants={"flag": True})
    given = {"x": x, "flag": np.array(True)}
    both = [onnxruntime_outputs(one, given) for one in (found.model, proto)]
    for made, exact in zip(*both, strict=True):
        assert np.square(made - exact).mean() < 1e-3 * np.square(exact).mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "conv9"], "keep: expected the name of a layer, found 'conv9'; did you mean"),
        (["--max-loss", "-1"], "--max-loss: expected 0 to 100 points, found -1"),
        (["--method", "best"], "--method"),
        (["--data", "auto"], "--data: expected a path, or synthetic, found auto"),
        (["--inputs", "x.npz"], "--inputs: expected no --data with it, found"),
    ],
)
def test_faults_are_said_in_one_line(files, capsys, options, message):
    assert run(files, *options) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert not (files / "int8.onnx").exists()


def test_a_file_stays_whole_when_writing_it_is_interrupted(files, capsys, monkeypatch):
    class Interrupted:
        def SerializeToString(self):
            raise KeyboardInterrupt

    def quantize(*arguments, **options):
        return replace(quantizing.quantize(*arguments, **options), model=Interrupted())

    monkeypatch.setattr(command, "quantize", quantize)
    (files / "int8.onnx").write_bytes(b"before")
    before = sorted(files.iterdir())
    assert run(files, "--quiet") == 130
    assert sorted(files.iterdir()) == before
    assert (files / "int8.onnx").read_bytes() == b"before"
    assert run(files, "--output", str(files / "net.onnx")) == 2
    assert "--output: expected a path of its own" in capsys.readouterr().err


def test_what_cannot_be_quantized_is_said(files):
    images = np.load(files / "images.npz")["images"]
    quantized = cnn_engine.quantize(str(files / "net.onnx"), images).model
    with pytest.raises(InputError, match="expected a model of floats, found one that is quantized"):
        cnn_engine.quantize(quantized, images)
    with pytest.raises(InputError, match="images: expected images of type float32, found float64"):
        cnn_engine.quantize(str(files / "net.onnx"), images.astype(float))
    relu = model(
        [helper.make_node("Relu", ["x"], ["y"])], [tensor("x", [1, 3])], [tensor("y", [1, 3])]
    )
    with pytest.raises(UnsupportedError, match="expected convolutions or linear layers"):
        cnn_engine.quantize(relu, np.zeros((1, 3), F32))
