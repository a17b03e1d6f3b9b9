"""The CPU's kernels of 8-bit integers: convolutions over images [N, H, W, C], matrix products, arithmetic.

CUDA's rows (cuda/quantized.py) are made of those in SHARED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ...operators.channels_last import TO_FIRST
from ...operators.quantized import EIGHT_BITS
from ...types import INTEGER_RANGES
from .. import pooling
from ..convolution import nothing_to_read
from ..kernel import Bound, Call, Kernel, functions, packed
from ..native import _cpu
from ..strided import MOST, repeated, row_major, walk

#: Places of the inputs of quantized_conv2d; those of quantized_linear are the first seven.
(
    X, WEIGHT, SCALE, BIAS, X_ZERO, W_ZERO, Y_ZERO, RESIDUAL, RESIDUAL_SCALE, RESIDUAL_ZERO, TABLE,
    INNER_SCALE,
) = range(12)  # fmt: skip

#: What is packed with the weights, or is a number of the call: constants.
PACKED = (
    WEIGHT, SCALE, BIAS, X_ZERO, W_ZERO, Y_ZERO, RESIDUAL_SCALE, RESIDUAL_ZERO, INNER_SCALE
)  # fmt: skip

#: The same of layers whose scale, bias and zero point of the input are computed.
PACKED_ALONE = (WEIGHT, W_ZERO)


@dataclass(frozen=True)
class _Packed:
    """The weights as a compiled function reads them, what the integers stand for, and its name."""

    buffer: Buffer
    types: Any
    function: str = "quantized_conv2d"


def _not_constant(node: Node, graph: Graph, places: Sequence[int] = PACKED) -> str | None:
    for place in places:
        name = _name(node, place)
        if name is not None and name not in graph.constants:
            return f"expected constant weights, scales and zero points, found {name} computed"
    return nothing_to_read(node, graph)


def _name(node: Node, place: int) -> str | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _constant(node: Node, graph: Graph, place: int) -> np.ndarray | None:
    name = _name(node, place)
    return None if name is None else graph.constants[name]


def _number(node: Node, graph: Graph, place: int) -> Any:
    array = _constant(node, graph, place)
    return 0 if array is None else array.reshape(()).item()


def _type(dtype: str) -> Any:
    return getattr(_cpu.ElementType, dtype)


def types_of(node: Node, graph: Graph) -> Any:
    op, x, residual = node.op, graph.values[node.inputs[X]], _name(node, RESIDUAL)
    low, high = INTEGER_RANGES.get(op.dtype, (0, 0))
    return _cpu.QuantizedTypes(
        _type(x.dtype), _number(node, graph, X_ZERO),
        _type(op.dtype), _number(node, graph, Y_ZERO),
        low if op.low is None else op.low, high if op.high is None else op.high,
        _type("int8" if residual is None else graph.values[residual].dtype),
        _number(node, graph, RESIDUAL_ZERO), float(_number(node, graph, RESIDUAL_SCALE)),
        float(_number(node, graph, INNER_SCALE)), *(getattr(op, "inner", None) or (0, 0)),
    )  # fmt: skip


def shape_of(node: Node, inputs: Sequence[Value | None]) -> Any:
    """Returns a layer's shape as a convolution's: a matrix product's images have one place."""
    op, x, weight = node.op, inputs[X], inputs[WEIGHT]
    if op.kind == "quantized_linear":
        return _cpu.Conv2dShape(
            x.shape[0], weight.shape[1], 1, 1, weight.shape[0], 1, 1, 1, 1, 0, 0
        )
    filters, _, *kernel = weight.shape
    sizes = x.shape if op.planar else tuple(x.shape[axis] for axis in TO_FIRST)
    return _cpu.Conv2dShape(
        *sizes, filters, *kernel, *op.stride, *op.padding, *op.dilation, op.groups
    )


def _is_planar(node: Node) -> bool:
    return getattr(node.op, "planar", False)


def pack(node: Node, graph: Graph, device: Any) -> _Packed:
    return packed_by("quantized_conv2d", node, graph, device, types_of(node, graph), (BIAS, SCALE))


def _weight(node: Node, graph: Graph) -> np.ndarray:
    """Returns a layer's weights less their zero points."""
    weight = _constant(node, graph, WEIGHT).astype(np.int16)
    if (zero := _constant(node, graph, W_ZERO)) is not None:
        weight -= zero.astype(np.int16).reshape(-1, *[1] * (weight.ndim - 1))
    return weight


def _largest(weight: np.ndarray) -> int:
    return max(int(weight.max()), -1 - int(weight.min()), 0)


def largest_weight(node: Node, graph: Graph) -> int:
    """Returns the largest size of a layer's weights less their zero points, or 127 where none is larger."""
    weight, zero = _constant(node, graph, WEIGHT), _constant(node, graph, W_ZERO)
    if weight.dtype == np.int8 and (zero is None or not zero.any()):
        return 127
    return _largest(_weight(node, graph))


def packed_by(
    function: str,
    node: Node,
    graph: Graph,
    device: Any,
    types: Any,
    parameters: Sequence[int | None],
) -> _Packed:
    """Returns packed weights.

    Args:
        function: of the compiled ones, that they are for.
        parameters: the places of bias and scale, which are packed with them, or None.
    """
    weight = _weight(node, graph)
    largest = _largest(weight)
    shape, native = shape_of(node, graph.inputs_of(node)), functions(device)

    def fill(address: int) -> Any:
        arrays = (None if p is None else _constant(node, graph, p) for p in parameters)
        wide = (None if a is None else np.resize(a, weight.shape[:1]) for a in arrays)
        kept = [
            None if a is None else np.require(a, requirements=("C", "A")) for a in (weight, *wide)
        ]
        sources = (0 if array is None else _cpu.address_of(array) for array in kept)
        where = (device.stream_handle,) if device.kind == "cuda" else ()
        getattr(native, f"{function}_pack")(*sources, address, shape, types, largest, *where)
        return kept

    nbytes = getattr(native, f"{function}_packed")(shape, largest)
    return _Packed(packed(device, nbytes, fill), types, function)


def _packed_for(node: Node, graph: Graph, device: Any) -> str:
    return _cpu.selected_integer_instructions()


def _workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    shape = shape_of(node, graph.inputs_of(node))
    return _cpu.quantized_conv2d_workspace(shape, _is_planar(node), threads)


def arguments_of(call: Call) -> tuple[list[Any], list[Any]]:
    """Returns the addresses that a layer's function takes, from its input to its output, and its sizes."""
    x, (y,) = call.inputs[X], call.outputs
    residual, table = (
        call.inputs[place] if len(call.inputs) > place else None for place in (RESIDUAL, TABLE)
    )
    columns = math.prod(x.shape[1:]) if len(y.shape) == 2 else call.pitch(x)
    own = x.shape[1] if _is_planar(call.node) else columns
    addresses = [
        call.input_addresses[X],
        call.prepared.buffer.address,
        0 if residual is None else call.input_addresses[RESIDUAL],
        0 if table is None else call.input_addresses[TABLE],
        call.output_addresses[0],
    ]
    pitches = _cpu.Conv2dPitches(own, call.pitch(y), call.pitch(residual))
    return addresses, [shape_of(call.node, call.inputs), pitches, call.prepared.types]


def make(call: Call) -> Bound:
    addresses, sizes = arguments_of(call)
    planar = _is_planar(call.node)
    return call.native("quantized_conv2d", *addresses, call.workspace, *sizes, planar)


def _not_computed(node: Node, graph: Graph) -> str | None:
    """Why the kernel for computed scales cannot run a layer."""
    x = graph.values[node.inputs[X]]
    if x.dtype != "uint8" or node.op.dtype not in ("float32", "int32"):
        return f"expected uint8 to float32 or int32, found {x.dtype} to {node.op.dtype}"
    return _not_constant(node, graph, PACKED_ALONE)


def _pack_alone(node: Node, graph: Graph, device: Any) -> _Packed:
    unsigned, y = _type("uint8"), _type(node.op.dtype)
    types = _cpu.QuantizedTypes(unsigned, 1, y, 0, 0, 0, unsigned, 0, 0.0)
    return packed_by("quantized_conv2d", node, graph, device, types, (None, None))


def _computed_workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    shape = shape_of(node, graph.inputs_of(node))
    return _cpu.quantized_conv2d_computed_workspace(shape, _is_planar(node), threads)


def _make_computed(call: Call) -> Bound:
    x, (y,) = call.inputs[X], call.outputs
    addresses = (*call.input_addresses, *[0] * 5)
    scale = call.inputs[SCALE] if len(call.inputs) > SCALE else None
    columns = math.prod(x.shape[1:]) if len(y.shape) == 2 else call.pitch(x)
    own = x.shape[1] if _is_planar(call.node) else columns
    return call.native(
        "quantized_conv2d_computed",
        addresses[X],
        call.prepared.buffer.address,
        addresses[X_ZERO],
        addresses[BIAS],
        addresses[SCALE],
        call.output_addresses[0],
        call.workspace,
        shape_of(call.node, call.inputs),
        _cpu.Conv2dPitches(own, call.pitch(y), 0),
        _type(call.node.op.dtype),
        1 if scale is None else scale.size,
        _is_planar(call.node),
    )


def _computed_row(op: str, pitched: tuple[int | None, ...]) -> Kernel:
    return Kernel(
        op, "int8_computed", "cpu", _make_computed, dtypes=("uint8",), why_not=_not_computed,
        prepare=_pack_alone, packed_for=_packed_for, packs=PACKED_ALONE,
        workspace=_computed_workspace, pitched=pitched,
    )  # fmt: skip


def _row(op: str, pitched: tuple[int | None, ...]) -> Kernel:
    return Kernel(
        op, "int8", "cpu", make, dtypes=EIGHT_BITS, why_not=_not_constant, prepare=pack,
        packed_for=_packed_for, packs=PACKED, workspace=_workspace, pitched=pitched,
    )  # fmt: skip


# ---- arithmetic ----


def _steps(node: Node, graph: Graph, dtype: str, zero: int, scale: int | None = None) -> Any:
    """Returns what integers of a type stand for, by the places of zero point and scale among the inputs."""
    factor = 1.0 if scale is None else float(_number(node, graph, scale))
    return _cpu.Steps(_type(dtype), _number(node, graph, zero), factor)


def _output_steps(node: Node, graph: Graph, zero: int, scale: int | None = None) -> Any:
    op = node.op
    low, high = INTEGER_RANGES[op.dtype]
    low = low if getattr(op, "low", None) is None else op.low
    high = high if getattr(op, "high", None) is None else op.high
    factor = 1.0 if scale is None else float(_number(node, graph, scale))
    return _cpu.Steps(_type(op.dtype), _number(node, graph, zero), factor, low, high)


def _dtype(node: Node, graph: Graph, place: int = 0) -> str:
    return graph.values[node.inputs[place]].dtype


def _not_one_scale(node: Node, graph: Graph) -> str | None:
    """Why a kernel cannot quantize or dequantize: several scales, or another type than 8 bits."""
    integers = node.op.dtype if node.op.kind == "quantize_linear" else _dtype(node, graph)
    if integers not in EIGHT_BITS:
        return f"expected int8 or uint8, found {integers}"
    if graph.values[node.inputs[1]].size != 1:
        return "expected one scale, found several"
    if graph.values[node.outputs[0]].dtype not in ("float32", *EIGHT_BITS):
        return f"expected float32, found {graph.values[node.outputs[0]].dtype}"
    return _not_constant(node, graph, (1, 2))


def _prepare_quantize(node: Node, graph: Graph, device: Any) -> tuple[Any, ...]:
    return (_output_steps(node, graph, zero=2, scale=1),)


def _prepare_dequantize(node: Node, graph: Graph, device: Any) -> tuple[Any, ...]:
    return (_steps(node, graph, _dtype(node, graph), zero=2, scale=1),)


@dataclass(frozen=True)
class _Pair:
    """Where the inputs of a sum or a product of two tensors stand; None: there is none."""

    a: int
    a_zero: int
    a_scale: int | None
    b: int
    b_zero: int
    b_scale: int | None
    y_zero: int
    y_scale: int | None

    @property
    def constants(self) -> tuple[int, ...]:
        places = self.a_zero, self.a_scale, self.b_zero, self.b_scale, self.y_zero, self.y_scale
        return tuple(place for place in places if place is not None)


_PAIRS = {
    "quantized_add": _Pair(0, 2, 1, 3, 5, 4, 6, None),
    "quantized_mul": _Pair(0, 1, None, 2, 3, None, 5, 4),
}


def _not_pair(node: Node, graph: Graph) -> str | None:
    places = _PAIRS[node.op.kind]
    out = graph.values[node.outputs[0]].shape
    shapes = [graph.values[node.inputs[place]].shape for place in (places.a, places.b)]
    if walk(out, *(repeated(shape, out) for shape in shapes), row_major(out)) is None:
        return f"expected at most {MOST} dimensions that cannot be joined, found more"
    return _not_constant(node, graph, places.constants)


def _prepare_pair(node: Node, graph: Graph, device: Any) -> tuple[Any, ...]:
    places = _PAIRS[node.op.kind]
    return (
        _steps(node, graph, _dtype(node, graph, places.a), places.a_zero, places.a_scale),
        _steps(node, graph, _dtype(node, graph, places.b), places.b_zero, places.b_scale),
        _output_steps(node, graph, places.y_zero, places.y_scale),
    )


def _make_pair(call: Call) -> Bound:
    kind, (out,) = call.node.op.kind, call.outputs
    operands = _PAIRS[kind].a, _PAIRS[kind].b
    steps = [repeated(call.inputs[place].shape, out.shape) for place in operands]
    shape = _cpu.BinaryShape(*chain(*walk(out.shape, *steps, row_major(out.shape))))
    sources = (call.input_addresses[place] for place in operands)
    return call.native(kind, *sources, call.output_addresses[0], shape, *call.prepared)


def _mean_shape(node: Node, x: Value) -> Any:
    """Returns what lies before, among and behind the dimensions of a mean, or None where they are apart."""
    gone = sorted(axis % len(x.shape) for axis in node.op.axes)
    if not gone or gone != list(range(gone[0], gone[-1] + 1)):
        return None
    sizes = x.shape[: gone[0]], x.shape[gone[0] : gone[-1] + 1], x.shape[gone[-1] + 1 :]
    return _cpu.MeanShape(*map(math.prod, sizes))


def _not_mean(node: Node, graph: Graph) -> str | None:
    x = graph.values[node.inputs[0]]
    if _mean_shape(node, x) is None:
        return f"expected dimensions side by side, found {list(node.op.axes)}"
    return _not_constant(node, graph, (1, 2, 3))


def _prepare_mean(node: Node, graph: Graph, device: Any) -> tuple[Any, ...]:
    return (
        _steps(node, graph, _dtype(node, graph), zero=1, scale=2),
        _output_steps(node, graph, zero=3),
    )


def _make_elements(call: Call) -> Bound:
    """Returns the call of a function of each element."""
    addresses = call.input_addresses[0], call.output_addresses[0]
    return call.native(call.node.op.kind, *addresses, call.outputs[0].size, *call.prepared)


def _make_dynamic(call: Call) -> Bound:
    return call.native(
        "dynamic_quantize_linear",
        call.input_addresses[0],
        *call.output_addresses,
        call.workspace,
        call.inputs[0].size,
    )


def _dynamic_workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    size = graph.values[node.inputs[0]].size
    return _cpu.dynamic_quantize_linear_workspace(size, threads)


def _make_lookup(call: Call) -> Bound:
    y = call.outputs[0]
    addresses = *call.input_addresses, call.output_addresses[0]
    return call.native("lookup", *addresses, y.size, y.item_bytes)


def _not_table(node: Node, graph: Graph) -> str | None:
    found = graph.values[node.outputs[0]]
    return None if found.item_bytes in (1, 4) else f"expected 1 or 4 bytes, found {found.dtype}"


def _make_mean(call: Call) -> Bound:
    shape = _mean_shape(call.node, call.inputs[0])
    return call.native(
        "quantized_mean",
        call.input_addresses[0],
        call.output_addresses[0],
        shape,
        *call.prepared,
    )


def _make_max_pool(call: Call) -> Bound:
    op, x = call.node.op, call.inputs[0]
    sizes = (x.shape[axis] for axis in TO_FIRST)
    shape = _cpu.MaxPool2dShape(*sizes, *op.kernel, *op.stride, *op.padding, *op.dilation)
    addresses = call.input_addresses[0], call.output_addresses[0]
    return call.native("quantized_max_pool2d", *addresses, shape, _type(x.dtype))


def _arithmetic(op: str, make: Any, why_not: Any, prepare: Any, packs: tuple[int, ...]) -> Kernel:
    dtypes = ("float32",) if op == "quantize_linear" else EIGHT_BITS
    return Kernel(
        op, "int8", "cpu", make, dtypes=dtypes, why_not=why_not, prepare=prepare, packs=packs
    )


#: Operators with weights that are packed -> the inputs, and None for the outputs, that may have a pitch.
LAYERS = {"quantized_conv2d_nhwc": (None, X, RESIDUAL), "quantized_linear": ()}

#: Rows whose functions CUDA has, too.
SHARED = [
    *(_row(op, pitched) for op, pitched in LAYERS.items()),
    _arithmetic("quantize_linear", _make_elements, _not_one_scale, _prepare_quantize, (1, 2)),
    _arithmetic("dequantize_linear", _make_elements, _not_one_scale, _prepare_dequantize, (1, 2)),
    *(
        _arithmetic(op, _make_pair, _not_pair, _prepare_pair, places.constants)
        for op, places in _PAIRS.items()
    ),
    _arithmetic("quantized_mean", _make_mean, _not_mean, _prepare_mean, (1, 2, 3)),
    Kernel("lookup", "int8", "cpu", _make_lookup, dtypes=EIGHT_BITS, why_not=_not_table),
    Kernel(
        "max_pool2d_nhwc", "int8", "cpu", _make_max_pool, dtypes=EIGHT_BITS, why_not=pooling.why_not
    ),
]

ROWS = [
    *SHARED,
    _computed_row("quantized_conv2d_nhwc", (None, X)),
    _computed_row("quantized_linear", ()),
    Kernel(
        "dynamic_quantize_linear",
        "int8",
        "cpu",
        _make_dynamic,
        dtypes=("float32",),
        workspace=_dynamic_workspace,
    ),
]
