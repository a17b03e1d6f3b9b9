"""A float ONNX model that is to be quantized: its layers, and which of its tensors become 8 bits.

Tensors are quantized where a layer reads them, and where operators between layers can compute with integers.
A sum that a relu or an addition follows is not rounded twice: what runtimes fuse is quantized at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import InputError, UnsupportedError
from ..graph.onnx import model as protobuf

#: The opset from which scales may differ along an axis.
OPSET = 13

#: Operators that move numbers: what they make has the scale of what they read.
_MOVES = frozenset({
    "DepthToSpace", "Dropout", "Flatten", "GlobalMaxPool", "Identity", "MaxPool", "Reshape", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
#: Functions whose results are a range of integers.
CLIPS = frozenset({"Relu", "Clip"})
#: Functions of one number, which are tables of integers.
FUNCTIONS = frozenset({
    "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Selu", "Sigmoid", "Softplus",
    "Tanh",
})  # fmt: skip
#: Operators of several numbers that have integer forms.
ARITHMETIC = frozenset({"Add", "AveragePool", "Concat", "GlobalAveragePool", "Mul", "ReduceMean"})
LAYERS = frozenset({"Conv", "Gemm", "MatMul"})
#: A product of matrices need not be a layer.
WITH_WEIGHTS = frozenset({"Conv", "ConvTranspose", "Gemm"})


@dataclass(frozen=True)
class Layer:
    """A layer with a constant weight.

    Attributes:
        name, operator: the node's; the name is unique.
        x, weight, y: names of tensors; ``bias`` is one, or empty.
        axis: the dimension of the weight along which outputs lie.
        depthwise: whether each output reads one channel.
    """

    name: str
    operator: str
    x: str
    weight: str
    bias: str
    y: str
    axis: int
    depthwise: bool


class FloatModel:
    """A model whose batch norms are part of its convolutions.

    Attributes:
        proto: the model, this object's own.
        constants: initializer -> array.
        layers: those that can be quantized, by name, in order.
        others: names of layers with weights that cannot.
    """

    def __init__(self, source) -> None:
        onnx = protobuf.package()
        given, self.source, _ = protobuf.read(source)
        if isinstance(given, onnx.ModelProto) and given is source:
            proto = onnx.ModelProto()
            proto.CopyFrom(given)
        elif self.source == "model":
            proto = given
        else:
            proto = onnx.load(str(source))  # external data, too
        self.proto = _upgraded(onnx, proto, self.source)
        _constants_as_initializers(self.proto.graph)
        _name_nodes(self.proto.graph)
        self.constants = {
            tensor.name: onnx.numpy_helper.to_array(tensor)
            for tensor in self.proto.graph.initializer
        }
        if any(
            node.op_type.startswith(("Quantize", "Dequantize", "QLinear")) for node in self.nodes
        ):
            raise InputError(
                f"{self.source}: expected a model of floats, found one that is quantized"
            )
        self._fold_batch_norms()
        self.layers = {layer.name: layer for layer in self._find_layers()}
        self.others = tuple(
            node.name
            for node in self.nodes
            if node.op_type in WITH_WEIGHTS and node.name not in self.layers
        )
        if not self.layers:
            raise UnsupportedError(
                f"{self.source}: expected convolutions or linear layers with constant float32 "
                "weights, found none"
            )

    @property
    def nodes(self):
        return self.proto.graph.node

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.proto.graph.output)

    def set_constant(self, name: str, array: np.ndarray) -> None:
        """Makes ``name`` an initializer of these numbers."""
        onnx = protobuf.package()
        made = onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)
        self.constants[name] = array
        for tensor in self.proto.graph.initializer:
            if tensor.name == name:
                tensor.CopyFrom(made)
                return
        self.proto.graph.initializer.append(made)

    def readers(self) -> dict[str, list]:
        """Returns the nodes that read each tensor; the graph's outputs are read by None."""
        found: dict[str, list] = {}
        for node in self.nodes:
            for name in dict.fromkeys(names_read(node)):
                found.setdefault(name, []).append(node)
        for name in self.outputs:
            found.setdefault(name, []).append(None)
        return found

    def makers(self) -> dict:
        """Returns the node that makes each tensor."""
        return {name: node for node in self.nodes for name in node.output if name}

    # -- preparation ---------------------------------------------------------------------------------

    def _fold_batch_norms(self) -> None:
        """Makes batch norms after convolutions part of their weights and biases."""
        readers, makers = self.readers(), self.makers()
        for node in list(self.nodes):
            conv = makers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
            known = conv is not None and conv.op_type == "Conv" and len(node.output) == 1
            names = (*node.input[1:5], *(conv.input[1:] if known else ()))
            if not known or readers[conv.output[0]] != [node]:
                continue
            if not all(name in self.constants for name in names if name):
                continue
            epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
            scale, shift, mean, variance = (
                self.constants[name].astype(np.float64) for name in node.input[1:5]
            )
            factor = scale / np.sqrt(variance + epsilon)
            weight = self.constants[conv.input[1]]
            bias = self.constants[conv.input[2]] if len(conv.input) > 2 and conv.input[2] else 0.0
            spread = factor.reshape(-1, *[1] * (weight.ndim - 1))
            parts = {
                f"{conv.name}/weight": (weight * spread).astype(np.float32),
                f"{conv.name}/bias": ((bias - mean) * factor + shift).astype(np.float32),
            }
            for name, array in parts.items():
                self.set_constant(name, array)
            del conv.input[1:]
            conv.input.extend(parts)
            conv.output[0] = node.output[0]
            self.nodes.remove(node)
            makers[conv.output[0]] = conv

    def _find_layers(self) -> Iterator[Layer]:
        for node in self.nodes:
            if (
                node.op_type not in LAYERS
                or len(node.input) < 2
                or node.domain not in ("", "ai.onnx")
            ):
                continue
            weight = self.constants.get(node.input[1])
            if weight is None or weight.dtype != np.float32 or node.input[0] in self.constants:
                continue
            bias = node.input[2] if len(node.input) > 2 else ""
            if bias and (bias not in self.constants or self.constants[bias].ndim != 1):
                continue
            numbers = {a.name: (a.f if a.type == 1 else a.i) for a in node.attribute}
            axis, depthwise = 0, False
            if node.op_type == "Conv":
                depthwise = weight.shape[1] == 1 and numbers.get("group", 1) > 1
            elif weight.ndim != 2:
                continue
            elif node.op_type == "MatMul":
                axis = 1
            else:
                axis = 0 if numbers.get("transB", 0) else 1
                plain = numbers.get("alpha", 1.0) == numbers.get("beta", 1.0) == 1.0
                if not plain or numbers.get("transA", 0):
                    continue
            yield Layer(
                node.name, node.op_type, node.input[0], node.input[1], bias, node.output[0], axis,
                depthwise,
            )  # fmt: skip


def names_read(node) -> Iterator[str]:
    """Yields the names of a node's inputs, and of tensors that subgraphs of If, Loop and Scan read."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from names_read(inner)


def moves(node) -> bool:
    """Whether a node only copies numbers, and at most pads them with zeros."""
    words = {a.name: a.s for a in node.attribute if a.type == 3}
    if node.op_type == "Resize":
        return words.get("mode", b"nearest") == b"nearest"
    if node.op_type == "Pad":
        return words.get("mode", b"constant") == b"constant" and len(node.input) < 3
    return node.op_type in _MOVES


@dataclass(frozen=True)
class Plan:
    """Which tensors of a model become 8 bits.

    Attributes:
        tensors: tensor -> the tensor whose scale it has, itself or one that it is moved from.
        layers: names of the layers that become integers.
        readers: names of the nodes that read integers.
    """

    tensors: Mapping[str, str]
    layers: frozenset[str]
    readers: frozenset[str]

    @property
    def scales(self) -> tuple[str, ...]:
        """The tensors that have scales of their own."""
        return tuple(dict.fromkeys(self.tensors.values()))


def plan(model: FloatModel, keep: Collection[str] = ()) -> Plan:
    """Returns the tensors and layers to quantize.

    Args:
        keep: names of layers that stay float.
    """
    readers, makers = model.readers(), model.makers()
    layers = {name: layer for name, layer in model.layers.items() if name not in keep}
    wanted: set[str] = {layer.x for layer in layers.values()}
    between = CLIPS | FUNCTIONS | ARITHMETIC
    reading: set[str] = set(layers)
    for node in reversed(model.nodes):
        if (node.op_type in between or moves(node)) and any(name in wanted for name in node.output):
            reading.add(node.name)
            several = ARITHMETIC - {"AveragePool", "GlobalAveragePool", "ReduceMean"}
            names = node.input if node.op_type in several else node.input[:1]
            wanted.update(name for name in names if name and name not in model.constants)
    made_by_layers = {layer.y for layer in model.layers.values()}
    left: set[str] = set()  # sums whose end is quantized, and not they themselves
    tensors: dict[str, str] = {}
    graph_inputs = [v.name for v in model.proto.graph.input if v.name not in model.constants]
    for name in (*graph_inputs, *(o for node in model.nodes for o in node.output)):
        if name not in wanted:
            continue
        maker, (first, *others) = makers.get(name), readers[name]
        only = first if not others else None
        if only is not None and only.name in reading:
            if only.op_type in CLIPS:
                left.add(name)
                continue
            if only.op_type == "Add" and name in made_by_layers:
                other = next((n for n in only.input if n != name), name)
                if maker.op_type == "MatMul" and other in model.constants:
                    left.add(name)
                    continue
                if other not in left and other not in model.constants and other != name:
                    left.add(name)
                    continue
            gate = maker is not None and maker.op_type in FUNCTIONS and only.op_type == "Mul"
            if gate and maker.input[0] in only.input:
                left.add(name)
                continue
        moved = maker is not None and moves(maker) and maker.input[0] in tensors
        tensors[name] = tensors[maker.input[0]] if moved else name
    return Plan(tensors, frozenset(layers), frozenset(reading))


def _upgraded(onnx, proto, source: str):
    """Returns a model whose opset has scales along an axis."""
    opset = next((e.version for e in proto.opset_import if e.domain in ("", "ai.onnx")), 1)
    if opset >= OPSET:
        return proto
    try:
        return onnx.version_converter.convert_version(proto, OPSET)
    except Exception as error:  # what ONNX's own C++ says of models that it cannot convert
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedError(
            f"{source}: expected an opset from {OPSET}, found {opset}, which cannot be converted: {reason}"
        ) from None


def _constants_as_initializers(graph) -> None:
    """Makes initializers of constants, and of their copies: PyTorch exports equal biases as copies of one."""
    for node in [node for node in graph.node if node.op_type == "Constant"]:
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if value is not None:
            graph.initializer.append(value)
            graph.initializer[-1].name = node.output[0]
            graph.node.remove(node)
    known = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    for node in [
        node for node in graph.node if node.op_type == "Identity"
    ]:  # in order, each after its input
        tensor, name = known.get(node.input[0]), node.output[0]
        if tensor is None or name in outputs:
            continue
        graph.initializer.append(tensor)
        known[name] = graph.initializer[-1]
        known[name].name = name
        graph.node.remove(node)


def _name_nodes(graph) -> None:
    """Gives every node a name of its own."""
    taken: set[str] = set()
    for place, node in enumerate(graph.node):
        name = node.name or f"{node.op_type}_{place}"
        while name in taken:
            name += "'"
        node.name = name
        taken.add(name)
