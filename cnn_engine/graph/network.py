"""Networks as data: a chain of layers with shape inference, parameters, FLOPs and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import operators
from ..errors import InputError, UnsupportedError, expected
from ..locks import cached_property
from ..operators import Cost, Operator, Value
from ..operators.windows import Pair
from .dims import BATCH, Sizes
from .graph import Graph, Node


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

    def operator(self) -> Operator:
        """Returns the layer's record in a graph."""
        _require("out_channels", self.out_channels)
        return operators.conv2d.Conv2d(
            pair("stride", self.stride), 2 * pair("padding", self.padding)
        )

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape, where one input has ``shape``."""
        weight = (self.out_channels, shape[0], *pair("kernel", self.kernel))
        return _with_bias(self.name, weight, self.bias)


@dataclass(frozen=True)
class Relu:
    """``relu`` of every element."""

    kind: ClassVar[str] = "relu"
    name: str

    def operator(self) -> Operator:
        return operators.unary.Relu()

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}


@dataclass(frozen=True)
class Tanh(Relu):
    """``tanh`` of every element."""

    kind: ClassVar[str] = "tanh"

    def operator(self) -> Operator:
        return operators.unary.Tanh()


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

    def operator(self) -> Operator:
        kernel, padding = pair("kernel", self.kernel), pair("padding", self.padding)
        for size, border in zip(kernel, padding, strict=True):
            if border > size // 2:
                raise InputError(f"padding: expected at most half the window, found {border}")
        return operators.max_pool2d.MaxPool2d(kernel, self.strides, 2 * padding)

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}


@dataclass(frozen=True)
class Linear:
    """``linear`` over the input flattened as channel, row, column."""

    kind: ClassVar[str] = "fc"
    name: str
    out_features: int
    bias: bool = True

    def operator(self) -> Operator:
        _require("out_features", self.out_features)
        return operators.linear.Linear()

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return _with_bias(self.name, (self.out_features, math.prod(shape)), self.bias)


@dataclass(frozen=True)
class Softmax:
    """``softmax`` over the features; the last layer of a network."""

    kind: ClassVar[str] = "softmax"
    name: str

    def operator(self) -> Operator:
        return operators.softmax.Softmax()

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {}


Layer = Conv2d | Relu | Tanh | MaxPool2d | Linear | Softmax


def operator_of(layer: Layer) -> Operator:
    """Returns the record that computes ``layer``, by its exact type: a subclass may mean another.

    Raises:
        InputError: the layer's options are at fault.
        UnsupportedError: no operator computes it.
    """
    known = Layer.__args__
    if type(layer) not in known:
        raise UnsupportedError(
            f"layer {getattr(layer, 'name', '?')}: expected one of "
            f"{', '.join(kind.__name__ for kind in known)}, found the type {type(layer).__name__}"
        )
    return layer.operator()


def _require(name: str, value: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise InputError(f"{name}: expected a whole number, found {value!r}")
    if value < 1:
        raise InputError(f"{name}: expected at least 1, found {value}")


def _with_bias(name: str, weight: tuple[int, ...], bias: bool) -> dict[str, tuple[int, ...]]:
    parameters = {f"{name}.weight": weight}
    if bias:
        parameters[f"{name}.bias"] = weight[:1]
    return parameters


@dataclass(frozen=True)
class LayerInfo:
    """One layer within its network: shapes without the batch, and costs for a batch.

    Attributes:
        layer: the layer.
        operator: its record.
        input_shape, output_shape: of one image.
        parameters: name -> shape.
    """

    layer: Layer
    operator: Operator
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    parameters: dict[str, tuple[int, ...]]

    def flops(self, batch: int) -> int:
        """FLOPs of one pass: two per multiply-add, none for comparisons, moves and exponentials."""
        return self.cost(batch).flops

    def bytes(self, batch: int) -> int:
        """Bytes that one pass must at least move: every tensor once."""
        return self.cost(batch).bytes

    def cost(self, batch: int) -> Cost:
        """FLOPs and bytes of one pass."""
        inputs = self.inputs(batch)
        return self.operator.cost(inputs, [Value("", (batch, *self.output_shape))])

    def inputs(self, batch: int) -> list[Value]:
        """Images, then the parameters."""
        return _inputs(batch, self.input_shape, self.parameters)


def _numbers(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _inputs(
    batch: int, shape: tuple[int, ...], parameters: Mapping[str, tuple[int, ...]]
) -> list[Value]:
    values = [Value("", (batch, *shape))]
    return values + [Value(name, size) for name, size in parameters.items()]


@dataclass(frozen=True)
class Network:
    """A chain of layers over one image.

    Attributes:
        name: the network's name on the command line.
        input_shape: (channels, rows, columns) of one image.
        layers: in order; names are unique; the last one's output is one row of class probabilities.
        scale, offset: a pixel (uint8) enters the first layer as ``pixel * scale + offset``: one number for
            all channels, or one for each.

    Raises:
        InputError: ``scale`` or ``offset`` does not fit the channels.
    """

    name: str
    input_shape: tuple[int, int, int]
    layers: tuple[Layer, ...]
    scale: float | tuple[float, ...] = 1 / 255
    offset: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        for name in ("scale", "offset"):
            values = np.asarray(getattr(self, name))
            fits = values.ndim == 0 or values.shape == self.input_shape[:1]
            if not fits or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
                wanted = f"a finite number, or {self.input_shape[0]}, one per channel"
                raise expected(f"{self.name}: {name}", wanted, getattr(self, name))
            if values.ndim:  # a list or an array becomes what can be hashed and compared
                object.__setattr__(self, name, tuple(map(float, values)))

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
                operator = operator_of(layer)
                if isinstance(layer, Softmax):
                    shape = (math.prod(shape),)  # an image counts as one row
                parameters = layer.parameters(shape)
                ((output, _),) = operator.infer(_inputs(1, shape, parameters))
            except UnsupportedError:
                raise
            except InputError as error:
                raise InputError(f"{self.name}, layer {layer.name}: {error}") from None
            infos.append(LayerInfo(layer, operator, shape, output[1:], parameters))
            shape = output[1:]
        return tuple(infos)

    def graph(
        self,
        sizes: int | Sizes = 1,
        pixels: bool = False,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> Graph:
        """Returns the network as a graph from ``images`` to ``probabilities``.

        Args:
            sizes: the batch, or the sizes of all open dimensions, of which ``batch`` is the only one.
            pixels: whether images are uint8 pixels, which a node ``normalize`` turns into the first layer's
                input; else they are that input, float32.
            weights: the parameters; None: zeros that take no memory, where shapes are all that is asked for.

        Raises:
            InputError: the layers do not fit each other.
        """
        value = "images"
        nodes = []
        taken = {info.layer.name for info in self.infos}

        def unused(name: str) -> str:
            return unused(f"{name}'") if name in taken else name

        if pixels:
            normalize = operators.normalize.Normalize(*map(_numbers, (self.scale, self.offset)))
            nodes.append(Node(unused("normalize"), normalize, (value,), ("normalized",)))
            value = "normalized"
        shape = self.input_shape
        for info in self.infos:
            if isinstance(info.layer, Softmax) and len(shape) > 1:
                name = unused(f"{info.layer.name} rows")
                nodes.append(Node(name, operators.shaping.Reshape((0, -1)), (value,), (name,)))
                value = name
            shape = info.output_shape
            last = info is self.infos[-1]
            output = "probabilities" if last else f"{info.layer.name} output"
            inputs = (value, *info.parameters)
            nodes.append(Node(info.layer.name, info.operator, inputs, (output,)))
            value = output
        if weights is None:
            zero = np.float32(0)
            weights = {n: np.broadcast_to(zero, shape) for n, shape in self.parameters.items()}
        (batch,) = sizes.resolve((BATCH,)) if isinstance(sizes, Sizes) else (sizes,)
        images = Value("images", (batch, *self.input_shape), "uint8" if pixels else "float32")
        return Graph(self.name, (images,), (value,), tuple(nodes), weights, batched=("images",))

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The images, as pixels; their number is the open dimension ``batch``."""
        return (Value("images", (BATCH, *self.input_shape), "uint8"),)

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The probabilities of every image, likewise."""
        return (Value("probabilities", (BATCH, *self.infos[-1].output_shape)),)

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
