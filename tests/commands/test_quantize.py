"""``cnn-engine quantize``: trained networks beside ONNX Runtime's quantizer, planted faults, the command."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import model, onnxruntime_outputs, tensor
from onnxruntime import quantization

import cnn_engine
from cnn_engine import workload
from cnn_engine.graph import network as layers
from cnn_engine.io import weights as weight_files

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
    calibrating = images[:128]
    own = {
        method: top1(cnn_engine.quantize(proto, calibrating, method=method).model, images, labels)
        for method in ("minmax", "percentile", "entropy", "mse")
    }
    others = {
        method: top1(onnx_runtimes(tmp_path, proto, calibrating, method), images, labels)
        for method in ("MinMax", "Entropy", "Percentile")
    }
    whole = top1(proto, images, labels)
    print(name, whole, own, others)
    assert whole - own["minmax"] <= 0.003
    assert max(own.values()) >= max(others.values())
