"""Writes a quantized model: ``QuantizeLinear`` and ``DequantizeLinear`` nodes around each operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..graph.onnx import model as protobuf
from ..types import Quantization
from .network import CLIPS, FloatModel, Layer, Plan, names_read
from .ranges import Numbers, weight_scales

#: What a bias may be in steps of input times weight: a fourth of int32, for the products beside it.
LARGEST_BIAS = 2**29


@dataclass(frozen=True)
class Settings:
    """Settings of quantization.

    Attributes:
        method: of :data:`.ranges.METHODS`.
        symmetric: whether activations are int8 around 0, as TensorRT wants them; else uint8.
        correct_bias: whether biases make up for what rounding the weights shifts on average.
    """

    method: str = "mse"
    symmetric: bool = False
    correct_bias: bool = True

    @property
    def dtype(self) -> type[np.integer]:
        return np.int8 if self.symmetric else np.uint8


@dataclass(frozen=True)
class QuantizedLayer:
    """Weights and bias of a layer as integers, with their scales.

    Attributes:
        weight: int8; ``scales`` along the layer's axis.
        bias: int32 in steps of input times weight, or None.
    """

    weight: np.ndarray
    scales: np.ndarray
    bias: np.ndarray | None


@dataclass(frozen=True)
class Probe:
    """Tensors that show the loss of a layer alone.

    Attributes:
        end, made: what the layer makes, after a relu; and the same with weights and a result of 8 bits. Its
            input is in 8 bits only where no layer before answers for that.
        y, read: the layer's sums; and the same with an input and weights of 8 bits: what float would regain.
        passed: the same with an input of 8 bits alone: what layers before answer for.
    """

    end: str
    made: str
    y: str
    read: str
    passed: str


@dataclass
class Writer:
    """Makes quantized models from a float model.

    Attributes:
        scales: tensor -> what its integers stand for.
        seen: tensor -> what calibration saw of it.
    """

    model: FloatModel
    settings: Settings
    scales: Mapping[str, Quantization]
    seen: Mapping[str, Numbers]
    _layers: dict[str, QuantizedLayer] = field(default_factory=dict)

    def layer(self, layer: Layer, x: str) -> QuantizedLayer:
        """Returns the weights and bias of a layer as integers.

        Args:
            x: the tensor whose scale its input has.
        """
        if layer.name in self._layers:
            return self._layers[layer.name]
        constants, weight = self.model.constants, self.model.constants[layer.weight]
        bias = constants[layer.bias].astype(np.float64) if layer.bias else None
        step = float(self.scales[x].scale[0])
        least = 0.0 if bias is None else np.abs(bias) / (step * LARGEST_BIAS)
        scales = weight_scales(weight, layer.axis, least)
        spread = scales.reshape([-1 if i == layer.axis else 1 for i in range(weight.ndim)])
        integers = np.clip(np.rint(weight / spread), -127, 127).astype(np.int8)
        if self.settings.correct_bias:
            shift = self._shift(layer, integers * spread.astype(np.float64) - weight)
            if shift is not None and (bias is not None or layer.operator != "MatMul"):
                bias = (0.0 if bias is None else bias) - shift
        whole = None
        if bias is not None:
            whole = np.clip(np.rint(bias / (step * scales.astype(np.float64))), -(2**31), 2**31 - 1)
            whole = whole.astype(np.int32)
        made = self._layers[layer.name] = QuantizedLayer(integers, scales, whole)
        return made

    def _shift(self, layer: Layer, changed: np.ndarray) -> np.ndarray | None:
        """Returns what a change of the weights adds to each output on average."""
        numbers = self.seen.get(layer.x)
        if numbers is None or not numbers.channel_count:
            return None
        means = numbers.means
        if layer.operator != "Conv":
            rows = changed if layer.axis == 0 else changed.T
            return rows @ means if rows.shape[1] == len(means) else None
        taps = changed.sum(axis=tuple(range(2, changed.ndim)))  # [K, C / groups]
        groups = len(means) // taps.shape[1]
        own = means.reshape(groups, -1).repeat(taps.shape[0] // groups, axis=0)
        return (taps * own).sum(axis=1)

    # -- models ------------------------------------------------------------------------------------

    def quantized(self, plan: Plan):
        """Returns the model with quantized tensors and layers as a plan says."""
        onnx = protobuf.package()
        proto = onnx.ModelProto()
        proto.CopyFrom(self.model.proto)
        graph = proto.graph
        nodes, dequantized = [], {}
        inputs = [v.name for v in graph.input if v.name in plan.tensors]
        for name in inputs:
            dequantized[name] = self.around(graph, nodes, name, plan.tensors[name])
        for node in graph.node:
            made = node
            if node.name in plan.readers:
                made = onnx.NodeProto()
                made.CopyFrom(node)
                for place, name in enumerate(node.input):
                    if name in dequantized:
                        made.input[place] = dequantized[name]
                if node.name in plan.layers:
                    layer = self.model.layers[node.name]
                    self.parameters(graph, nodes, made, layer, plan.tensors[layer.x])
            nodes.append(made)
            for name in node.output:
                if name in plan.tensors:
                    dequantized[name] = self.around(graph, nodes, name, plan.tensors[name])
        del graph.node[:]
        graph.node.extend(nodes)
        self._without_unused(graph)
        return proto

    def probes(self, plan: Plan):
        """Returns (model, layer -> its :class:`Probe`): the float model, and each layer in 8 bits too."""
        onnx = protobuf.package()
        proto = onnx.ModelProto()
        proto.CopyFrom(self.model.proto)
        graph, nodes = proto.graph, []
        by_name = {node.name: node for node in graph.node}
        readers = self.model.readers()
        clips = {name: _clip_after(readers, layer.y) for name, layer in self.model.layers.items()}
        ends = {
            name: layer.y if clips[name] is None else clips[name].output[0]
            for name, layer in self.model.layers.items()
        }
        dequantized: dict[str, str] = {}
        found: dict[str, Probe] = {}

        def copied(node, name: str, x: str, output: str):
            made = onnx.NodeProto()
            made.CopyFrom(node)
            made.name, made.input[0], made.output[0] = name, x, output
            nodes.append(made)
            return made

        for name in (name for name in self.model.layers if name in plan.layers):
            layer, end = self.model.layers[name], ends[name]
            scale = plan.tensors[layer.x]
            if layer.x not in dequantized:
                dequantized[layer.x] = self.around(graph, nodes, layer.x, scale, "probed")
            own = layer.x if scale in ends.values() else dequantized[layer.x]
            made, reads, passes = (f"{name}/{what}" for what in ("made", "reads", "passes"))
            copied(by_name[name], f"{passes}/layer", dequantized[layer.x], passes)
            for x, output in ((own, made), (dequantized[layer.x], reads)):
                node = copied(by_name[name], f"{output}/layer", x, output)
                nodes.pop()  # after its parameters
                self.parameters(graph, nodes, node, layer, scale)
                nodes.append(node)
            if clips[name] is not None:
                copied(clips[name], f"{made}/clip", made, f"{made}/clipped")
                made = f"{made}/clipped"
            if end in plan.tensors:
                made = self.around(graph, nodes, made, plan.tensors[end])
            found[name] = Probe(end, made, layer.y, reads, passes)
        graph.node.extend(nodes)
        return proto, found

    def around(self, graph, nodes: list, name: str, scale: str, what: str = "") -> str:
        """Adds nodes that quantize and dequantize a tensor; returns the name of the result."""
        helper = protobuf.package().helper
        quantization = self.scales[scale]
        prefix = f"{name}/{what}" if what else name
        parameters = self._parameters(graph, scale, quantization)
        integers, real = f"{prefix}/quantized", f"{prefix}/dequantized"
        nodes.append(
            helper.make_node(
                "QuantizeLinear", [name, *parameters], [integers], f"{prefix}/quantize"
            )
        )
        nodes.append(
            helper.make_node(
                "DequantizeLinear", [integers, *parameters], [real], f"{prefix}/dequantize"
            )
        )
        return real

    def _parameters(self, graph, name: str, quantization: Quantization) -> tuple[str, str]:
        zero = np.array(quantization.zero_point[0], self.settings.dtype)
        return (
            _initializer(graph, f"{name}/scale", np.array(quantization.scale[0], np.float32)),
            _initializer(graph, f"{name}/zero_point", zero),
        )

    def parameters(self, graph, nodes: list, node, layer: Layer, x: str) -> None:
        """Makes ``node``, a copy of a layer's, read its weight and bias as integers."""
        helper = protobuf.package().helper
        made = self.layer(layer, x)
        step = np.float32(self.scales[x].scale[0])
        parts = [("weight", made.weight, made.scales, layer.axis)]
        if made.bias is not None:
            parts.append(("bias", made.bias, step * made.scales, 0))
        names = []
        for what, integers, scales, axis in parts:
            prefix = f"{layer.name}/{what}"
            inputs = [
                _initializer(graph, f"{prefix}/integers", integers),
                _initializer(graph, f"{prefix}/scale", scales.astype(np.float32)),
                _initializer(graph, f"{prefix}/zero_point", np.zeros(len(scales), integers.dtype)),
            ]
            names.append(f"{prefix}/{node.name}/dequantized")
            nodes.append(
                helper.make_node(
                    "DequantizeLinear",
                    inputs,
                    [names[-1]],
                    f"{prefix}/{node.name}/dequantize",
                    axis=axis,
                )
            )
        del node.input[1:]
        node.input.extend(names)

    def _without_unused(self, graph) -> None:
        used = {name for node in graph.node for name in names_read(node)}
        used |= {value.name for value in graph.output}
        for tensor in [t for t in graph.initializer if t.name not in used]:
            graph.initializer.remove(tensor)
        for value in [
            v for v in graph.input if v.name in self.model.constants and v.name not in used
        ]:
            graph.input.remove(value)


def _initializer(graph, name: str, array: np.ndarray) -> str:
    if not any(tensor.name == name for tensor in graph.initializer):
        onnx = protobuf.package()
        graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return name


def _clip_after(readers: Mapping[str, list], name: str):
    """Returns the one node that reads a tensor, where that is a function which clips; else None."""
    first, *others = readers[name]
    return first if not others and first is not None and first.op_type in CLIPS else None
