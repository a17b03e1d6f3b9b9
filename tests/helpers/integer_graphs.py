"""Random quantized networks, as ONNX files of both formats, and exact arithmetic of lowered graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_models import model, tensor

from cnn_engine.graph.graph import Node
from cnn_engine.operators.windows import windows

F32 = np.float32
CODES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}
OPSETS = [helper.make_opsetid("com.microsoft", 1)]
FUNCTIONS = {
    "LeakyRelu": {"alpha": 0.1}, "Sigmoid": {}, "Tanh": {}, "HardSigmoid": {}, "HardSwish": {}, "Elu": {},
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor of 8-bit integers: its name, [C, H, W] or [F], and what the integers stand for."""

    name: str
    sizes: tuple[int, ...]
    dtype: str
    scale: float
    zero: int


class Generator:
    """Writes one network node by node; every choice follows from ``seed``.

    Args:
        operators: whether layers are QLinearConv and the like; else float operators between
            DequantizeLinear and QuantizeLinear.
        dyadic: whether all scales are powers of 2, and no function rounds: float arithmetic is exact then.
    """

    def __init__(self, seed: int, operators: bool | None = None, dyadic: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.operators = bool(self.pick(0, 1)) if operators is None else operators
        self.dyadic = dyadic
        kinds = [("int8", "int8"), ("uint8", "int8"), ("uint8", "uint8")]
        self.x_type, self.w_type = self.pick(*kinds, *[("int8", "uint8")] * (not self.operators))
        self.per_channel, self.symmetric = bool(self.pick(0, 1)), bool(self.pick(0, 1))
        self.nodes, self.constants, self.tensors = [], {}, []
        self.used: set[str] = set()

    def pick(self, *values):
        return values[self.rng.integers(len(values))]

    def number(self, low: float, high: float) -> float:
        """Returns a scale between two numbers."""
        found = math.exp(self.rng.uniform(math.log(low), math.log(high)))
        return 2.0 ** round(math.log2(found)) if self.dyadic else float(F32(found))

    def constant(self, array) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def node(self, operator: str, *inputs: str, domain: str = "", **attributes) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(operator, inputs, [name], f"n{name}", domain=domain, **attributes)
        )
        return name

    # -- tensors -------------------------------------------------------------------------------------

    def kind(self) -> str:
        """Returns the type of a new activation: now and then another than the network's."""
        if self.operators or self.rng.random() < 0.85:
            return self.x_type
        return self.pick("int8", "uint8")

    def zero(self, dtype: str) -> int:
        if self.symmetric:
            return 0 if dtype == "int8" else 128
        low = np.iinfo(dtype).min
        return int(low + self.pick(0, 255, *self.rng.integers(0, 256, 6)))

    def numbers(self, name: Tensor) -> list[str]:
        """Returns the names of a tensor, its scale and its zero point."""
        zero = np.array(name.zero, name.dtype)
        return [name.name, self.constant(F32(name.scale)), self.constant(zero)]

    def made(self, sizes, scale: float, dtype: str | None = None) -> Tensor:
        """Returns a tensor that the next node makes, whose numbers' deviation is near ``scale``."""
        dtype = self.kind() if dtype is None else dtype
        step = self.number(scale / 90, scale / 20)
        return Tensor("", tuple(sizes), dtype, step, self.zero(dtype))

    def named(self, name: str, of: Tensor) -> Tensor:
        found = Tensor(name, of.sizes, of.dtype, of.scale, of.zero)
        self.tensors.append(found)
        return found

    def read(self, x: Tensor) -> Tensor:
        self.used.add(x.name)
        return x

    def real(self, x: Tensor) -> str:
        return self.node("DequantizeLinear", *self.numbers(self.read(x)))

    def quantized(self, real: str, sizes, deviation: float, dtype: str | None = None) -> Tensor:
        found = self.made(sizes, deviation, dtype)
        name = self.node("QuantizeLinear", real, *self.numbers(found)[1:])
        return self.named(name, found)

    def linear(
        self, operator: str, parts: list[Tensor], found: Tensor, first=False, **more
    ) -> Tensor:
        """Adds an operator of ONNX Runtime on 8-bit tensors."""
        inputs = [name for part in parts for name in self.numbers(self.read(part))]
        own = self.numbers(found)[1:]
        inputs = [*own, *inputs] if first else [*inputs, *own]
        return self.named(self.node(operator, *inputs, domain="com.microsoft", **more), found)

    def moved(self, operator: str, x: Tensor, sizes, *inputs: str, **attributes) -> Tensor:
        """Adds an operator that moves numbers: of integers, or of what they stand for."""
        found = Tensor("", tuple(sizes), x.dtype, x.scale, x.zero)
        if self.operators:
            return self.named(self.node(operator, self.read(x).name, *inputs, **attributes), found)
        real = self.node(operator, self.real(x), *inputs, **attributes)
        if self.pick(0, 1):
            return self.quantized(real, sizes, 50 * x.scale)
        return self.named(self.node("QuantizeLinear", real, *self.numbers(x)[1:]), found)

    # -- layers --------------------------------------------------------------------------------------

    def weight(self, shape: tuple[int, ...], axis: int):
        """Returns (integers, scales, zero points)."""
        info, many = np.iinfo(self.w_type), shape[axis]
        integers = self.rng.integers(info.min, info.max + 1, shape).astype(self.w_type)
        count = many if self.per_channel else 1
        scales = F32([self.number(0.002, 0.02) for _ in range(count)])
        zero = (
            0
            if self.w_type == "int8" and (self.operators or self.symmetric)
            else self.zero(self.w_type)
        )
        zeros = np.full(count, zero, self.w_type)
        return (integers, *((scales, zeros) if self.per_channel else (scales[0], zeros[0])))

    def deviation(self, terms: int, x: Tensor, scales) -> float:
        return math.sqrt(terms) * 74 * x.scale * 74 * float(np.mean(scales))

    def bias(self, filters: int, x: Tensor, scales, deviation: float):
        steps = np.broadcast_to(np.float64(F32(x.scale) * scales), (filters,))
        limits = np.maximum(deviation / steps, 1)
        return np.rint(self.rng.normal(0, 1, filters) * limits).astype(np.int32), steps.astype(F32)

    def layer(
        self, x: Tensor, operator: str, shape, axis: int, sizes, terms: int, **more
    ) -> Tensor:
        """Adds a convolution or a linear layer, with what follows it."""
        integers, scales, zeros = self.weight(shape, axis)
        filters, deviation = shape[axis], self.deviation(terms, x, scales)
        found = self.made(sizes, deviation)
        biased = self.pick(0, 1, 1)
        bias, steps = self.bias(filters, x, scales, deviation)
        weight = [self.constant(a) for a in (integers, scales, zeros)]
        if self.operators:
            own = [*self.numbers(self.read(x)), *weight]
            if operator == "Conv":
                last = [self.constant(bias)] * biased
                name = self.node("QLinearConv", *own, *self.numbers(found)[1:], *last, **more)
            else:
                last = self.constant(bias) if biased else ""
                ends = *own, last, *self.numbers(found)[1:]
                name = self.node("QGemm", *ends, domain="com.microsoft", **more)
            return self.named(name, found)
        inputs = [self.real(x), self.node("DequantizeLinear", *weight, axis=axis)]
        if biased and self.pick(0, 1):
            inputs.append(self.constant((bias * steps).astype(F32)))
        elif biased:
            inputs.append(
                self.node("DequantizeLinear", self.constant(bias), self.constant(steps), axis=0)
            )
        y = self.node(operator, *inputs, **more)
        alike = [t for t in self.tensors if t.sizes == tuple(sizes)]
        if alike and operator == "Conv" and self.pick(0, 1):
            y = self.node("Add", *([y, self.real(self.pick(*alike))][:: self.pick(1, -1)]))
        limits = {"Relu": (), "Clip": self.pick((0, 6), (-1, 2), (0.25, 4))}
        clip = self.pick("", "Relu", "Clip")
        if clip:
            y = self.node(clip, y, *(self.constant(F32(limit)) for limit in limits[clip]))
        return self.quantized(y, sizes, deviation, found.dtype)

    def conv(self, x: Tensor) -> Tensor | None:
        channels, *image = x.sizes
        groups = self.pick(1, 1, channels, *(g for g in (2, 3) if channels % g == 0))
        filters = groups * self.pick(1, 1, 2, 3, 5) if groups > 1 else int(self.rng.integers(1, 20))
        kernel = self.pick((1, 1), (3, 3), (3, 3), (2, 5), (5, 4), (7, 1))
        stride = self.pick((1, 1), (1, 1), (2, 2), (3, 1))
        dilation = self.pick((1, 1), (1, 1), (2, 1), (1, 3))
        some = [int(n) for n in self.rng.integers(0, 4, 4)]
        pads = self.pick([0] * 4, [k // 2 for k in kernel] * 2, some)
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        room = [n + a + b - s for n, a, b, s in zip(image, pads[:2], pads[2:], spans, strict=True)]
        if min(room) < 0:
            return None
        sizes = filters, *(n // s + 1 for n, s in zip(room, stride, strict=True))
        shape = filters, channels // groups, *kernel
        more = {"group": groups, "strides": stride, "dilations": dilation, "pads": pads}
        if dilation == (1, 1) and self.pick(0, 0, 0, 1):
            del more["pads"]
            more["auto_pad"] = self.pick("SAME_UPPER", "SAME_LOWER")
            sizes = filters, *(-(-n // s) for n, s in zip(image, stride, strict=True))
        terms = math.prod(shape[1:])
        return self.layer(x, "Conv", shape, 0, sizes, terms, kernel_shape=kernel, **more)

    def rows(self, x: Tensor) -> Tensor:
        """Adds a flattening and a linear layer."""
        features, many = math.prod(x.sizes), int(self.rng.integers(1, 12))
        flat = x if len(x.sizes) == 1 else self.moved("Flatten", x, [features])
        turned = self.pick(0, 1)
        shape = (many, features) if turned else (features, many)
        if not self.operators and not turned and self.pick(0, 1):
            return self.product(flat, many)
        return self.layer(flat, "Gemm", shape, 1 - turned, [many], features, transB=turned)

    def product(self, x: Tensor, columns: int) -> Tensor:
        """Adds a product with a constant matrix, and the addition of a row."""
        integers, scales, zeros = self.weight((x.sizes[0], columns), 1)
        deviation = self.deviation(x.sizes[0], x, scales)
        weight = self.node(
            "DequantizeLinear", *(self.constant(a) for a in (integers, scales, zeros)), axis=1
        )
        y = self.node("MatMul", self.real(x), weight)
        if self.pick(0, 1):
            bias, steps = self.bias(columns, x, scales, deviation)
            y = self.node("Add", y, self.constant((bias * steps).astype(F32)))
        return self.quantized(y, [columns], deviation)

    # -- between layers --------------------------------------------------------------------------------

    def function(self, x: Tensor) -> Tensor:
        name = self.pick(*FUNCTIONS) if not self.dyadic else "Relu"
        if self.operators and name in ("Sigmoid", "LeakyRelu"):
            found = self.made(x.sizes, 50 * x.scale)
            return self.linear(f"QLinear{name}", [x], found, **FUNCTIONS[name])
        y = self.node(name, self.real(x), **FUNCTIONS.get(name, {}))
        return self.quantized(y, x.sizes, 50 * x.scale, x.dtype)

    def silu(self, x: Tensor) -> Tensor:
        gate = self.node("Sigmoid", self.real(x))
        gate = self.quantized(gate, x.sizes, 0.2)
        return self.arithmetic(x, gate, "Mul")

    def arithmetic(self, x: Tensor, other: Tensor | None = None, operator: str = "") -> Tensor:
        """Adds a sum or a product of two tensors; the second may be broadcast."""
        operator = operator or self.pick("Add", "Mul")
        if other is None:
            fits = [
                t for t in self.tensors
                if t is not x and len(t.sizes) == len(x.sizes)
                and all(a in (b, 1) for a, b in zip(t.sizes, x.sizes, strict=True))
            ]  # fmt: skip
            other = self.pick(*fits or [x])
            if self.pick(0, 0, 1):
                array = self.rng.integers(0, 128, (x.sizes[0], *[1] * (len(x.sizes) - 1)))
                name = self.constant(array.astype(self.x_type))
                other = Tensor(name, array.shape, self.x_type, self.number(0.01, 0.1), 20)
        both = [x, other][:: self.pick(1, -1)]
        if operator == "Mul":
            deviation = 74 * x.scale * 74 * other.scale
        else:
            deviation = 74 * math.hypot(x.scale, other.scale)
        if self.operators:
            found = self.made(x.sizes, deviation)
            return self.linear(f"QLinear{operator}", both, found)
        y = self.node(operator, *(self.real(t) for t in both))
        y = self.node("Relu", y) if self.pick(0, 0, 1) else y
        return self.quantized(y, x.sizes, deviation)

    def gated(self, x: Tensor) -> Tensor | None:
        """Adds what a gate of each channel is multiplied with, as in squeeze and excite."""
        gate = self.mean(x)
        return gate and self.arithmetic(x, gate, "Mul")

    def pool(self, x: Tensor) -> Tensor | None:
        channels, *image = x.sizes
        kernel, stride = (
            self.pick((2, 2), (3, 3), (2, 3), (1, 4)),
            self.pick((1, 1), (2, 2), (1, 2)),
        )
        most = self.pick(0, 1)
        pads = [int(self.rng.integers(0, k)) for k in (*kernel, *kernel)] if most else [0] * 4
        room = [n + a + b - k for n, a, b, k in zip(image, pads[:2], pads[2:], kernel, strict=True)]
        if min(room) < 0:
            return None
        sizes = channels, *(n // s + 1 for n, s in zip(room, stride, strict=True))
        more = {"kernel_shape": kernel, "strides": stride, "pads": pads}
        if most:
            return self.moved("MaxPool", x, sizes, **more)
        if self.dyadic and math.prod(kernel) not in (1, 2, 4, 8):
            return None
        deviation = 74 * x.scale / math.sqrt(math.prod(kernel))
        if self.operators:
            return self.linear("QLinearAveragePool", [x], self.made(sizes, deviation), **more)
        return self.quantized(self.node("AveragePool", self.real(x), **more), sizes, deviation)

    def mean(self, x: Tensor) -> Tensor | None:
        count = math.prod(x.sizes[1:])
        if self.dyadic and count & (count - 1):
            return None
        deviation, sizes = 74 * x.scale / math.sqrt(count), (x.sizes[0], 1, 1)
        if self.operators:
            found = self.made(sizes, deviation)
            return self.linear("QLinearGlobalAveragePool", [x], found, channels_last=0)
        if self.pick(0, 1):
            y = self.node("ReduceMean", self.real(x), self.constant(np.array([2, 3])), keepdims=1)
        else:
            y = self.node("GlobalAveragePool", self.real(x))
        return self.quantized(y, sizes, deviation)

    def concat(self, x: Tensor) -> Tensor:
        fits = [
            t for t in self.tensors if t.sizes[1:] == x.sizes[1:] and len(t.sizes) == len(x.sizes)
        ]
        parts = [x, *(self.pick(*fits) for _ in range(self.pick(1, 2)))]
        sizes = sum(part.sizes[0] for part in parts), *x.sizes[1:]
        deviation = max(50 * part.scale for part in parts)
        if self.operators:
            found = self.made(sizes, deviation)
            return self.linear("QLinearConcat", parts, found, first=True, axis=1)
        y = self.node("Concat", *(self.real(part) for part in parts), axis=1)
        return self.quantized(y, sizes, deviation)

    def resize(self, x: Tensor) -> Tensor:
        scales = self.pick((2, 2), (1, 2), (2, 0.5), (1.5, 1))
        sizes = x.sizes[0], *(math.floor(n * s) for n, s in zip(x.sizes[1:], scales, strict=True))
        more = {
            "coordinate_transformation_mode": self.pick("asymmetric", "half_pixel"),
            "nearest_mode": self.pick("floor", "round_prefer_floor"), "mode": "nearest",
        }  # fmt: skip
        if min(sizes) < 1:
            return x
        return self.moved("Resize", x, sizes, "", self.constant(F32([1, 1, *scales])), **more)

    def pad(self, x: Tensor) -> Tensor:
        amounts = [int(n) for n in self.rng.integers(0, 3, 4)]
        sizes = (
            x.sizes[0],
            x.sizes[1] + amounts[0] + amounts[2],
            x.sizes[2] + amounts[1] + amounts[3],
        )
        pads = self.constant(np.int64([0, 0, *amounts[:2], 0, 0, *amounts[2:]]))
        value = [self.constant(np.array(x.zero, x.dtype))] * self.operators
        return self.moved("Pad", x, sizes, pads, *value)

    def transpose(self, x: Tensor) -> Tensor:
        return self.moved("Transpose", x, (x.sizes[0], *x.sizes[:0:-1]), perm=[0, 1, 3, 2])

    def network(self, steps: int) -> onnx.ModelProto:
        """Returns a network of so many layers or a few more; the batch is open, all ends are outputs."""
        channels = int(self.pick(1, 3, 4, 5, 8, 13, 16, 17, 24))
        sizes = channels, int(self.rng.integers(3, 14)), int(self.rng.integers(3, 14))
        x = Tensor("x", sizes, self.x_type, self.number(0.01, 0.1), self.zero(self.x_type))
        self.tensors.append(x)
        choices = (
            self.conv, self.conv, self.conv, self.conv, self.function, self.arithmetic, self.pool, self.mean,
            self.concat, self.resize, self.pad, self.transpose, self.arithmetic, self.gated, self.silu,
        )  # fmt: skip
        choices = choices[:-1] if self.dyadic else choices
        done = 0
        while done < steps:
            images = [t for t in self.tensors if len(t.sizes) == 3 and max(t.sizes) < 70]
            done += self.pick(*choices)(self.pick(*images[-2:])) is not None
        if self.pick(0, 1):
            self.rows(self.tensors[-1])
        ends = [t for t in self.tensors if t.name not in self.used]
        outputs = [tensor(t.name, ["N", *t.sizes], CODES[t.dtype]) for t in ends]
        inputs = [tensor("x", ["N", *sizes], CODES[self.x_type])]
        return model(self.nodes, inputs, outputs, self.constants, opset=20, opsets=OPSETS)

    def input(self, batch: int) -> np.ndarray:
        """Returns numbers for the network's input."""
        x, info = self.tensors[0], np.iinfo(self.x_type)
        return self.rng.integers(info.min, info.max + 1, (batch, *x.sizes)).astype(self.x_type)


# -- exact arithmetic ----------------------------------------------------------------------------------


def _whole(array, zero) -> np.ndarray:
    """Returns q - zero in int64."""
    found = np.asarray(array).astype(np.int64)
    return found if zero is None else found - np.asarray(zero).astype(np.int64)


def _stored(op, v: np.ndarray, zero) -> np.ndarray:
    """Returns float32 numbers as the output's integers: half to even, the zero point, the range."""
    if op.dtype == "float32":
        return v.astype(np.float64)
    info = np.iinfo(op.dtype)
    low, high = (info.min if op.low is None else op.low), (info.max if op.high is None else op.high)
    whole = np.rint(v.astype(np.float64)) + (0 if zero is None else int(np.reshape(zero, ())))
    return np.clip(whole, low, high).astype(op.dtype)


def exact(node: Node, graph, *arrays):
    """Returns what a node of a lowered graph makes: sums in int64, by the records' contracts.

    For ``cnn_engine.graph.reference.reference``; what has no sums is computed by its own reference.
    """
    op, given = node.op, [*arrays, *[None] * (12 - len(arrays))]
    if op.kind == "quantized_conv2d":
        x, w, scale, bias, x_zero, w_zero, y_zero, residual, r_scale, r_zero, table, inner_scale = (
            given
        )
        w = _whole(w, None if w_zero is None else w_zero.reshape(-1, 1, 1, 1))
        top, left, bottom, right = op.padding
        x = np.pad(_whole(x, x_zero), ((0, 0), (0, 0), (top, bottom), (left, right)))
        view = windows(x, w.shape[2:], op.stride, op.dilation)
        n, c, *image = view.shape[:4]
        view = view.reshape(n, op.groups, c // op.groups, *image, *w.shape[2:])
        total = np.einsum("ngcijrs,gkcrs->ngkij", view, w.reshape(op.groups, -1, *w.shape[1:]))
        total = total.reshape(n, -1, *image) + (
            0 if bias is None else _whole(bias, None)[:, None, None]
        )
        v = total.astype(np.int32).astype(F32) * scale.reshape(-1, 1, 1)
        if inner_scale is not None:
            v = np.clip(np.rint(v.astype(np.float64)), *op.inner).astype(F32) * F32(inner_scale)
        if residual is not None:
            v = v + _whole(residual, r_zero).astype(F32) * F32(r_scale)
        y = _stored(op, v, y_zero)
        return y if table is None else table[y.view(np.uint8)]
    if op.kind == "quantized_linear":
        x, w, scale, bias, x_zero, w_zero, y_zero = given[:7]
        w = _whole(w, None if w_zero is None else w_zero.reshape(-1, 1))
        total = _whole(x, x_zero).reshape(len(x), -1) @ w.T + (
            0 if bias is None else _whole(bias, None)
        )
        return _stored(op, total.astype(np.int32).astype(F32) * scale, y_zero)
    if op.kind == "quantized_add":
        a, a_scale, a_zero, b, b_scale, b_zero, y_zero = given[:7]
        parts = _whole(a, a_zero).astype(F32) * a_scale, _whole(b, b_zero).astype(F32) * b_scale
        return _stored(op, parts[0] + parts[1], y_zero)
    if op.kind == "quantized_mul":
        a, a_zero, b, b_zero, scale, y_zero = given[:6]
        return _stored(op, (_whole(a, a_zero) * _whole(b, b_zero)).astype(F32) * scale, y_zero)
    if op.kind == "quantized_mean":
        x, x_zero, scale, y_zero = given[:4]
        total = _whole(x, x_zero).sum(axis=op.axes, keepdims=op.keepdims)
        return _stored(op, total.astype(F32) * scale, y_zero)
    return op.reference(*arrays)
