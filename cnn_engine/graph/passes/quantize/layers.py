"""Layers between DequantizeLinear and QuantizeLinear, as one operator of integers each.

What follows a layer's sum becomes part of it: a residual that is dequantized and added, then a range (relu,
clip), then the quantization. Where the sum is not quantized again the layer makes float32 of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ....operators.average_pool2d import AveragePool2d
from ....operators.binary import Add, Mul
from ....operators.conv2d import Conv2d, Conv3d
from ....operators.conv_transpose2d import ConvTranspose2d
from ....operators.linear import Linear
from ....operators.matmul import Matmul
from ....operators.operator import Operator, axis_in
from ....operators.quantized import saturated
from ....operators.quantized_conv2d import QuantizedConv2d
from ....operators.quantized_linear import QuantizedLinear, QuantizedMatmul
from ....operators.quantized_pointwise import QuantizedAdd, QuantizedMean, QuantizedMul
from ....operators.reduce import ReduceMean
from ....operators.shaping import Reshape
from ....operators.unary import Clip, Relu
from ....types import INTEGER_RANGES
from ...graph import Graph, Node, Note
from ...mapped import read
from ..rewriting import Rewrites, absent, covering, only_user
from .tensors import Quantized, dequantized, quantizes

#: What a bias may be in steps of the sum, so that it and the products fit int32 together.
LARGEST_BIAS = 2**30

#: How far a bias' own scale may be from the products': beyond, it is rounded to theirs.
SAME_SCALE = 1e-6


@dataclass
class Ending:
    """Nodes after a layer's sum.

    Attributes:
        nodes: in order.
        name: what the last makes.
        residual: what is added first, or None.
        output: what it is quantized to, or None: it stays float32.
        low, high: the range in integers, None: the type's.
    """

    nodes: list[Node]
    name: str
    residual: Quantized | None = None
    output: Quantized | None = None
    low: int | None = None
    high: int | None = None

    @property
    def dtype(self) -> str:
        return "float32" if self.output is None else self.output.integers.dtype

    @property
    def range(self) -> dict[str, int | None]:
        return {"low": self.low, "high": self.high}


def ending(graph: Graph, node: Node, adds: bool = False) -> Ending:
    """Returns the nodes after the sum of ``node`` that can be part of it.

    Args:
        adds: whether a residual can be.
    """
    nodes, name, residual = [], node.outputs[0], None
    low, high = -math.inf, math.inf
    user = only_user(graph, name)
    if adds and user is not None and type(user.op) is Add:
        other = user.inputs[0] if user.inputs[1] == name else user.inputs[1]
        found = dequantized(graph, other)
        same = graph.values[other].shape == graph.values[name].shape
        if found is not None and found.is_8_bit and found.axis is None and same:
            residual, nodes, name = found, [user], user.outputs[0]
            user = only_user(graph, name)
    while user is not None and isinstance(user.op, Relu | Clip):
        least, most = (
            (0.0, math.inf) if isinstance(user.op, Relu) else (user.op.alpha, user.op.beta)
        )
        low, high = (min(max(limit, least), most) for limit in (low, high))
        nodes, name = [*nodes, user], user.outputs[0]
        user = only_user(graph, name)
    found = quantizes(graph, user)
    if found is None or not found.is_8_bit:
        return Ending([], node.outputs[0])
    dtype = found.integers.dtype
    with np.errstate(all="ignore"):
        steps = np.float32((low, high)) / found.step
    numbers = saturated(steps, found.offset, dtype, None, None).tolist()
    limits = (
        None if number == own else number
        for number, own in zip(numbers, INTEGER_RANGES[dtype], strict=True)
    )
    return Ending([*nodes, user], user.outputs[0], residual, found, *limits)


class Lowering:
    """One round of replacements."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.rewrites = graph, Rewrites(graph)
        self._constants: dict[str, np.ndarray] = {}

    def constant(self, name: str, array: np.ndarray) -> str:
        """Returns the name of a new constant."""
        name = self.rewrites.fresh(name)
        self._constants[name] = np.ascontiguousarray(array)
        return name

    def number(self, node: Node, name: str, number: float, dtype: str) -> str:
        """Returns the name of a new constant of one number."""
        return self.constant(f"{node.name}/{name}", np.array(number, dtype))

    def zero(self, node: Node, name: str, of: Quantized | None) -> str | None:
        """Returns the name of a tensor's zero point, or None for 0."""
        if of is None or not of.offset:
            return None
        return self.number(node, name, of.offset, of.integers.dtype)

    def put(self, nodes: Sequence[Node], by: Sequence[Node], why: str) -> str | None:
        """Replaces ``nodes``; nodes that only they read go later. Returns the reason against it, or None."""
        constants, self._constants = self._constants, {}
        scales = (array for array in constants.values() if array.dtype == np.float32)
        if not all(((scale > 0) & (scale < math.inf)).all() for scale in scales):
            return "its scales over the output's are no positive float32"
        self.rewrites.replace(nodes, by, why, constants)
        return None

    # -- sums of products --------------------------------------------------------------------------

    def weight(self, node: Node, found: Quantized, turned: bool) -> tuple[str, str | None]:
        """Returns the names of a weight in int8 and of its zero points, or None for 0.

        Args:
            turned: whether it is the transpose of a constant matrix.
        """
        name, offsets = found.integers.name, found.offsets
        array = read(self.graph.constants[name])
        if array.dtype == np.uint8:  # the same numbers, at the same distances
            array, offsets = (array ^ 128).view(np.int8), offsets - 128
        if turned or offsets is not found.offsets:
            name = self.constant(f"{node.name}/weight", array.T if turned else array)
        if not offsets.any():
            return name, None
        return name, self.constant(f"{node.name}/w_zero", offsets.astype(np.int8))

    def bias(self, name: str | None, steps: np.ndarray) -> np.ndarray | None | str:
        """Returns a bias in steps of the sum, None where there is none, or why it cannot be one.

        Args:
            steps: of the sum, [K] in float64.
        """
        if name is None:
            return None
        found, array = dequantized(self.graph, name), self.graph.constants.get(name)
        if found is not None and found.integers.name in self.graph.constants:
            whole = read(self.graph.constants[found.integers.name]).astype(np.float64)
            whole = whole.reshape(-1) - found.offsets
            own = np.broadcast_to(found.steps.reshape(-1).astype(np.float64), steps.shape)
            if not np.allclose(own, steps, rtol=SAME_SCALE, atol=0):
                whole = np.rint(whole * own / steps)
        elif array is not None:
            with np.errstate(all="ignore"):
                whole = np.rint(read(array).reshape(-1).astype(np.float64) / steps)
        else:
            return "its bias is computed"
        if not (np.abs(whole) <= LARGEST_BIAS).all():
            return "its bias is too large for int32 in steps of input times weight"
        return np.broadcast_to(whole, steps.shape).astype(np.int32)

    def parameters(
        self,
        node: Node,
        x: Quantized,
        w: Quantized,
        bias: str | None,
        end: Ending,
        turned: bool = False,
    ) -> tuple[str, tuple[str | None, ...]] | str:
        """Returns (weight, the record's inputs from scale to y_zero), or why there are none."""
        filters = w.integers.shape[1 if turned else 0]
        w_steps = np.broadcast_to(w.steps.reshape(-1), (filters,))
        steps = x.step * w_steps  # float32
        if not ((steps > 0) & (steps < math.inf)).all():
            return "the product of its scales is no positive float32"
        whole = self.bias(bias, steps.astype(np.float64))
        if isinstance(whole, str):
            return whole
        scale = steps if end.output is None else steps / end.output.step
        weight, w_zero = self.weight(node, w, turned)
        return weight, (
            self.constant(f"{node.name}/scale", scale),
            None if whole is None else self.constant(f"{node.name}/bias", whole),
            self.zero(node, "x_zero", x), w_zero, self.zero(node, "y_zero", end.output),
        )  # fmt: skip

    def operands(self, node: Node, axis: int) -> tuple[Quantized, Quantized] | str:
        """Returns the input and the weight of a layer, whose scales may differ along ``axis``, or why not."""
        x, w = (dequantized(self.graph, name) for name in node.inputs[:2])
        if x is None or x.axis is not None or not x.is_8_bit:
            return "its input is not quantized to 8 bits by one scale"
        if w is None or not w.is_8_bit or w.integers.name not in self.graph.constants:
            return "its weight is no constant of 8 bits"
        if w.axis not in (None, axis):
            return f"its weight's scales lie along dimension {w.axis}, not {axis}"
        return x, w

    def finish(
        self,
        node: Node,
        make: Callable[[Ending], tuple[Operator, tuple[str | None, ...]] | str],
        end: Ending,
    ) -> str | None:
        """Replaces ``node`` and the nodes after it by a layer; returns a reason against it, or None."""
        if not self.rewrites.free(node, *end.nodes):
            return None
        made = make(end)
        if isinstance(made, str):
            self._constants = {}
            return made
        op, inputs = made
        while inputs[-1] is None:
            inputs = inputs[:-1]
        layer = Node(node.name, op, inputs, (end.name,), covering(node, *end.nodes))
        return self.put([node, *end.nodes], [layer], "its sums are integers")

    def conv(self, node: Node) -> str | None:
        """Lowers a convolution; returns why it cannot be, or None."""
        op = node.op
        record = partial(
            QuantizedConv2d,
            stride=op.stride,
            padding=op.padding,
            dilation=op.dilation,
            groups=op.groups,
        )
        return self.layer(node, record, adds=True)

    def linear(self, node: Node) -> str | None:
        """Lowers a linear layer; returns why it cannot be, or None."""
        return self.layer(node, QuantizedLinear, adds=False)

    def layer(self, node: Node, record: Callable[..., Operator], adds: bool) -> str | None:
        """Lowers a layer of weights; returns why it cannot be, or None.

        Args:
            record: makes the layer's record of the type and range of what it makes.
            adds: whether the record takes a residual.
        """
        if node.op.activation is not None or not absent(node, 3):
            return "it has an epilogue of floats"
        found = self.operands(node, 0)
        if isinstance(found, str):
            return found
        x, w = found

        def make(end: Ending):
            bias = None if absent(node, 2) else node.inputs[2]
            given = self.parameters(node, x, w, bias, end)
            if isinstance(given, str):
                return given
            weight, rest = given
            more: tuple[str | None, ...] = ()
            if end.residual is not None:
                step = end.residual.step / end.output.step
                more = (
                    end.residual.integers.name,
                    self.number(node, "residual_scale", step, "float32"),
                    self.zero(node, "residual_zero", end.residual),
                )
            return record(end.dtype, **end.range), (x.integers.name, weight, *rest, *more)

        return self.finish(node, make, ending(self.graph, node, adds=adds))

    def matmul(self, node: Node) -> str | None:
        """Lowers a product of matrices, by a constant to a linear layer; returns why not, or None."""
        a, b = (dequantized(self.graph, name) for name in node.inputs)
        rank = len(self.graph.values[node.inputs[1]].shape)
        if a is None or a.axis is not None or not a.is_8_bit:
            return "its input is not quantized to 8 bits by one scale"
        if b is None or not b.is_8_bit or b.axis not in (None, rank - 1):
            return (
                "its second input is not quantized to 8 bits, by one scale or one for each column"
            )
        if b.integers.name in self.graph.constants and rank == 2:
            return self._rows(node, a, b)
        if b.axis is not None:
            return "its second input has several scales and is computed"

        def make(end: Ending):
            step = a.step * b.step
            step = step if end.output is None else step / end.output.step
            zeros = (
                self.zero(node, name, of)
                for name, of in (("a_zero", a), ("b_zero", b), ("y_zero", end.output))
            )
            scale = self.number(node, "scale", step, "float32")
            op = QuantizedMatmul(end.dtype, **end.range)
            return op, (a.integers.name, b.integers.name, scale, *zeros)

        return self.finish(node, make, ending(self.graph, node))

    def _rows(self, node: Node, a: Quantized, b: Quantized) -> str | None:
        """Lowers a [..., F] times a constant [F, M] to reshapes around a linear layer."""
        graph, shape = self.graph, a.integers.shape
        if len(shape) < 2:
            return "its input is a vector"
        added = only_user(graph, node.outputs[0])
        bias, nodes, last = None, [], node
        columns = b.integers.shape[1]
        if added is not None and type(added.op) is Add:
            other = added.inputs[0] if added.inputs[1] == node.outputs[0] else added.inputs[1]
            kept = dequantized(graph, other)
            known = other in graph.constants or (
                kept is not None and kept.integers.name in graph.constants
            )
            if known and graph.values[other].shape in ((columns,), (1, columns), (1, 1, columns)):
                bias, nodes, last = other, [added], added
        end = ending(graph, last)
        if not self.rewrites.free(node, *nodes, *end.nodes):
            return None
        given = self.parameters(node, a, b, bias, end, turned=True)
        if isinstance(given, str):
            self._constants = {}
            return given
        weight, rest = given
        flat = math.prod(shape[:-1])
        x, y = a.integers.name, end.name
        before, after = [], []
        if len(shape) > 2:
            x, y = (self.rewrites.fresh(f"{node.name}/{part}") for part in ("x", "y"))
            op = Reshape((flat, shape[-1]), allow_zero=True)
            before = [Node(self.rewrites.fresh(f"{x}.reshape"), op, (a.integers.name,), (x,))]
            op = Reshape((*shape[:-1], columns), allow_zero=True)
            after = [Node(self.rewrites.fresh(f"{y}.reshape"), op, (y,), (end.name,))]
        inputs = (x, weight, *rest)
        while inputs[-1] is None:
            inputs = inputs[:-1]
        covers = covering(node, *nodes, *end.nodes)
        layer = Node(node.name, QuantizedLinear(end.dtype, **end.range), inputs, (y,), covers)
        replaced = [node, *nodes, *end.nodes]
        return self.put(replaced, [layer, *before, *after], "its sums are integers")

    # -- pointwise operators and means ----------------------------------------------------------------

    def pair(self, node: Node) -> str | None:
        """Lowers a sum or a product of two 8-bit tensors; returns why it cannot be, or None."""
        a, b = (dequantized(self.graph, name) for name in node.inputs)
        if a is None or b is None or a.axis is not None or b.axis is not None:
            return "its inputs are not both quantized by one scale"
        if not a.is_8_bit or not b.is_8_bit:
            return "its inputs are not both of 8 bits"
        end = ending(self.graph, node)
        if end.output is None:
            return "its output is not quantized to 8 bits"

        def make(end: Ending):
            zeros = [self.zero(node, n, of) for n, of in (("a_zero", a), ("b_zero", b))]
            last = self.zero(node, "y_zero", end.output)
            names = a.integers.name, b.integers.name
            if type(node.op) is Mul:
                scale = self.number(node, "scale", a.step * b.step / end.output.step, "float32")
                op = QuantizedMul(end.dtype, **end.range)
                return op, (names[0], zeros[0], names[1], zeros[1], scale, last)
            scales = [
                self.number(node, f"{n}_scale", of.step / end.output.step, "float32")
                for n, of in (("a", a), ("b", b))
            ]
            op = QuantizedAdd(end.dtype, **end.range)
            return op, (names[0], scales[0], zeros[0], names[1], scales[1], zeros[1], last)

        return self.finish(node, make, end)

    def mean(self, node: Node) -> str | None:
        """Lowers a mean; returns why it cannot be, or None."""
        graph, op = self.graph, node.op
        x = dequantized(graph, node.inputs[0])
        if x is None or x.axis is not None or not x.is_8_bit:
            return "its input is not quantized to 8 bits by one scale"
        end, shape = ending(graph, node), x.integers.shape
        if isinstance(op, ReduceMean):
            if end.output is None:
                return "its output is not quantized to 8 bits"
            count = math.prod(shape[axis_in(axis, len(shape))] for axis in op.axes)
        else:
            count = math.prod(op.kernel)
            whole = op.count_include_pad or not any(op.padding)
            if type(op) is not AveragePool2d or any(op.extra) or not whole:
                return "its windows hold different numbers of elements"
        if not isinstance(count, int) or not 0 < count < 2**23:
            return "it is over too many elements"

        def make(end: Ending):
            step = np.float32(float(x.step) / count)
            step = step if end.output is None else np.float32(step / end.output.step)
            zeros = self.zero(node, "x_zero", x), self.zero(node, "y_zero", end.output)
            name = x.integers.name
            if isinstance(op, ReduceMean):
                made = QuantizedMean(end.dtype, **end.range, axes=op.axes, keepdims=op.keepdims)
                return made, (name, zeros[0], self.number(node, "scale", step, "float32"), zeros[1])
            channels = shape[1]
            ones = self.constant(f"{node.name}/ones", np.ones((channels, 1, *op.kernel), np.int8))
            scale = self.constant(f"{node.name}/scale", np.full(channels, step, np.float32))
            made = QuantizedConv2d(
                end.dtype, **end.range, stride=op.stride, padding=op.padding, dilation=op.dilation,
                groups=channels,
            )  # fmt: skip
            return made, (name, ones, scale, None, zeros[0], None, zeros[1])

        return self.finish(node, make, end)


_LAYERS: dict[type[Operator], Callable[[Lowering, Node], str | None]] = {
    Conv2d: Lowering.conv, Linear: Lowering.linear, Matmul: Lowering.matmul, Add: Lowering.pair,
    Mul: Lowering.pair, ReduceMean: Lowering.mean, AveragePool2d: Lowering.mean,
    Conv3d: lambda lowering, node: "there is no quantized convolution of images with depth",
    ConvTranspose2d: lambda lowering, node: "there is no quantized transposed convolution",
}  # fmt: skip


def lower_layers(graph: Graph) -> tuple[Graph, list[Note]]:
    """Returns the graph with layers of integers, and why others that read integers stay float."""
    lowering, refused = Lowering(graph), []
    for node in graph.nodes:
        lower = _LAYERS.get(type(node.op))
        reads = [
            found
            for name in node.inputs
            if (found := dequantized(graph, name)) is not None
            and found.integers.name not in graph.constants
        ]
        if lower is None or not reads:
            continue
        with np.errstate(all="ignore"):  # ratios of scales that are no float32 are refused
            why = lower(lowering, node)
        if why is not None:
            refused.append(Note(node.name, f"quantized_{node.op.kind}", why))
    return lowering.rewrites.apply(), refused
