"""Networks as data: a chain of layers with shape inference, parameters, FLOPs and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from ..errors import InputError, UnsupportedError

Pair = tuple[int, int]


def pair(name: str, value: int | Pair) -> Pair:
    """Returns ``value`` as (rows, columns); one number stands for both.

    Raises:
        InputError: it is neither a whole number nor two of them.
    """
    values = value if isinstance(value, (tuple, list)) else (value, value)
    if len(values) != 2 or not all(
        isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in values
    ):
        raise InputError(f"{name}: expected a whole number or two of them, found {value!r}")
    return int(values[0]), int(values[1])


@dataclass(frozen=True)
class Conv2d:
    """``conv2d`` with ``out_channels`` filters; parameters ``<name>.weight`` and ``<name>.bias``."""

    kind: ClassVar[str] = "conv"
    name: str
    out_channels: int
    kernel: int | Pair
    stride: int | Pair = 1
    padding: int | Pair = 0
    bias: bool = True

    def operator_shape(self, batch: int, shape: tuple[int, ...]):
        from .. import _cpu

        channels, height, width = _image(self.name, shape)
        return _cpu.Conv2dShape(
            batch, channels, height, width, self.out_channels, *pair("kernel", self.kernel),
            *pair("stride", self.stride), *pair("padding", self.padding),
        )  # fmt: skip

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        operator = self.operator_shape(1, shape)
        return (self.out_channels, operator.out_h, operator.out_w)

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        weight = (self.out_channels, shape[0], *pair("kernel", self.kernel))
        return _with_bias(self.name, weight, self.bias)


@dataclass(frozen=True)
class Relu:
    """``relu`` of every element."""

    kind: ClassVar[str] = "relu"
    name: str

    def operator_shape(self, batch: int, shape: tuple[int, ...]):
        from .. import _cpu

        return _cpu.ElementwiseShape(batch * math.prod(shape), 4)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}


@dataclass(frozen=True)
class Tanh(Relu):
    """``tanh`` of every element."""

    kind: ClassVar[str] = "tanh"


@dataclass(frozen=True)
class MaxPool2d:
    """``max_pool2d``; ``stride`` None means windows side by side."""

    kind: ClassVar[str] = "pool"
    name: str
    kernel: int | Pair
    stride: int | Pair | None = None
    padding: int | Pair = 0

    @property
    def strides(self) -> Pair:
        return pair("stride", self.kernel if self.stride is None else self.stride)

    def operator_shape(self, batch: int, shape: tuple[int, ...]):
        from .. import _cpu

        return _cpu.MaxPool2dShape(
            batch, *_image(self.name, shape), *pair("kernel", self.kernel), *self.strides,
            *pair("padding", self.padding),
        )  # fmt: skip

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        operator = self.operator_shape(1, shape)
        return (shape[0], operator.out_h, operator.out_w)

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}


@dataclass(frozen=True)
class Linear:
    """``linear`` over the input flattened as channel, row, column."""

    kind: ClassVar[str] = "fc"
    name: str
    out_features: int
    bias: bool = True

    def operator_shape(self, batch: int, shape: tuple[int, ...]):
        from .. import _cpu

        return _cpu.LinearShape(batch, math.prod(shape), self.out_features)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.out_features,)

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return _with_bias(self.name, (self.out_features, math.prod(shape)), self.bias)


@dataclass(frozen=True)
class Softmax:
    """``softmax`` over the features; the last layer of a network."""

    kind: ClassVar[str] = "softmax"
    name: str

    def operator_shape(self, batch: int, shape: tuple[int, ...]):
        from .. import _cpu

        return _cpu.SoftmaxShape(batch, math.prod(shape))

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (math.prod(shape),)

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}


Layer = Conv2d | Relu | Tanh | MaxPool2d | Linear | Softmax

_OPERATORS = {
    Conv2d: "conv2d",
    Relu: "relu",
    Tanh: "tanh",
    MaxPool2d: "max_pool2d",
    Linear: "linear",
    Softmax: "softmax",
}


def operator_of(layer: Layer) -> str:
    """Returns the operator that computes ``layer``, by its exact type: a subclass may mean another.

    Raises:
        UnsupportedError: there is none.
    """
    operator = _OPERATORS.get(type(layer))
    if operator is None:
        known = ", ".join(kind.__name__ for kind in _OPERATORS)
        name = getattr(layer, "name", "?")
        raise UnsupportedError(
            f"layer {name}: expected one of {known}, found the type {type(layer).__name__}"
        )
    return operator


def _image(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != 3:
        raise InputError(f"{name}: expected an input of channels, rows and columns, found {shape}")
    return shape


def _with_bias(name: str, weight: tuple[int, ...], bias: bool) -> dict[str, tuple[int, ...]]:
    parameters = {f"{name}.weight": weight}
    if bias:
        parameters[f"{name}.bias"] = weight[:1]
    return parameters


@dataclass(frozen=True)
class LayerInfo:
    """One layer where it stands in its network: shapes without the batch, and its costs for a batch.

    Attributes:
        layer: the layer.
        input_shape, output_shape: of one image.
        parameters: name -> shape.
    """

    layer: Layer
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    parameters: dict[str, tuple[int, ...]]

    def flops(self, batch: int) -> int:
        """FLOPs of one pass: two a multiply-add, none for comparisons, moves and exponentials."""
        return self.layer.operator_shape(batch, self.input_shape).flops

    def bytes(self, batch: int) -> int:
        """Bytes that one pass must at least move: every tensor once."""
        return self.layer.operator_shape(batch, self.input_shape).bytes


@dataclass(frozen=True)
class Network:
    """A chain of layers over one image.

    Attributes:
        name: the network's name on the command line.
        input_shape: (channels, rows, columns) of one image.
        layers: in order; names are unique; the last one's output is one row of class probabilities.
        scale, offset: a pixel (uint8) enters the first layer as ``pixel * scale + offset``.
    """

    name: str
    input_shape: tuple[int, int, int]
    layers: tuple[Layer, ...]
    scale: float = 1 / 255
    offset: float = 0.0

    @cached_property
    def infos(self) -> tuple[LayerInfo, ...]:
        """Every layer with its shapes.

        Raises:
            InputError: the layers do not fit each other; names the layer.
        """
        names = [layer.name for layer in self.layers]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{self.name}: expected unique layer names, found {name!r} twice")
        if not names:
            raise InputError(f"{self.name}: expected at least one layer, found none")
        infos = []
        shape: tuple[int, ...] = self.input_shape
        for layer in self.layers:
            try:
                output = layer.output_shape(shape)
                layer.operator_shape(1, shape)
            except ValueError as error:
                raise InputError(f"{self.name}, layer {layer.name}: {error}") from None
            infos.append(LayerInfo(layer, shape, output, layer.parameters(shape)))
            shape = output
        return tuple(infos)

    @property
    def classes(self) -> int:
        """The number of probabilities that come out for one image."""
        return math.prod(self.infos[-1].output_shape)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """All parameters in the order of the layers: name -> shape."""
        return {name: shape for info in self.infos for name, shape in info.parameters.items()}

    def flops(self, batch: int = 1) -> int:
        """FLOPs of one pass over ``batch`` images."""
        return sum(info.flops(batch) for info in self.infos)

    def check_weights(self, weights: dict[str, np.ndarray], source: str) -> dict[str, np.ndarray]:
        """Returns the network's parameters from ``weights`` as contiguous float32 arrays.

        Raises:
            InputError: one is missing, unknown, of another shape or type, or not finite; the message
                begins with ``source``.
        """
        missing = [name for name in self.parameters if name not in weights]
        unknown = [name for name in weights if name not in self.parameters]
        if missing or unknown:
            wanted = f"expected the parameters of {self.name} ({', '.join(self.parameters)})"
            found = ", ".join(
                [f"no {name}" for name in missing] + [f"an unknown {name}" for name in unknown]
            )
            raise InputError(f"{source}: {wanted}, found {found}")
        checked = {}
        for name, shape in self.parameters.items():
            value = np.asarray(weights[name])
            if value.shape != shape:
                raise InputError(
                    f"{source}: {name}: expected shape {list(shape)} for {self.name}, "
                    f"found {list(value.shape)}"
                )
            if value.dtype.kind != "f":
                raise InputError(f"{source}: {name}: expected floating point, found {value.dtype}")
            with np.errstate(over="ignore"):
                value = np.ascontiguousarray(value, dtype=np.float32)
            finite = np.isfinite(value)
            if not finite.all():
                place = tuple(int(i) for i in np.argwhere(~finite)[0])
                raise InputError(
                    f"{source}: {name}: expected finite numbers, found {value[place]} at {list(place)}"
                )
            checked[name] = value
        return checked

    def random_weights(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Returns weights drawn as He et al. (2015) do, the same for the same ``seed``."""
        generator = np.random.default_rng(seed)
        weights = {}
        for name, shape in self.parameters.items():
            deviation = math.sqrt(2 / math.prod(shape[1:])) if len(shape) > 1 else 0.1
            weights[name] = generator.normal(0, deviation, shape).astype(np.float32)
        return weights
