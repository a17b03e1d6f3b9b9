"""CUDA's kernels over images whose channels lie side by side, [N, H, W, C], and over rows of features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ... import _cpu
from ...devices import Buffer
from ...errors import UnsupportedError
from ...graph.graph import Graph, Node, Value
from . import pooling
from .channels_last import (
    activation_of,
    expansion_of,
    function_of,
    has_prologue,
    make_pool,
    not_compiled,
    not_constant,
    pitches_of,
    shape_of,
)
from .kernel import Bound, Call, Kernel, brought, stored, storing
from .products import linear_shape

#: Rows up to which a product is bound by how fast its weights are read.
FEW_ROWS = 8

#: The largest number in float16.
FLOAT16 = float(np.finfo(np.float16).max)


def _operands(node: Node) -> Any:
    return getattr(_cpu.Conv2dOperands, node.op.operands)


def _packed(
    node: Node,
    graph: Graph,
    device: Any,
    nbytes: int,
    function: str,
    *how: Any,
    places: tuple[int, ...] = (1,),
) -> Buffer:
    """Returns what a compiled function makes of a node's weights, complete, on the device."""
    weights = [graph.constants.get(node.inputs[place]) for place in places]  # None: there are none
    most = max(float(np.abs(one).max(initial=0.0)) for one in weights if one is not None)
    if node.op.operands == "float16" and most > FLOAT16:
        raise UnsupportedError(
            f"--dtype: float16: node {node.name}: expected weights of at most "
            f"{FLOAT16:.0f}, found {most:g}; bfloat16 and tf32 have room for them"
        )
    packed = device.allocate(nbytes)
    sources = [None if weight is None else brought(weight, device) for weight in weights]
    addresses = (0 if source is None else source.address for source in sources)
    getattr(device.kernels, function)(*addresses, packed.address, *how, device.stream_handle)
    device.synchronize()
    return packed


# ---- convolutions, and linear layers as convolutions of images of one place ----

#: The compiled functions that run products, and how reports name them.
_FUNCTIONS = {
    "conv2d_nhwc": "implicit_gemm",
    "conv2d_nhwc_wgmma": "wgmma",
    "conv2d_nhwc_wgmma_planar": "wgmma_planar",
}


@dataclass(frozen=True)
class _Weights(Buffer):
    """Packed weights, and the compiled function that they are for."""

    function: str


def _shape(node: Node, x: Value, weight: Value) -> tuple[Any, bool]:
    """Returns the shape of a convolution or a linear layer, and whether its images are [N, C, H, W]."""
    if node.op.kind == "conv2d_nhwc":
        return shape_of(node, x, weight), node.op.planar
    outputs, features = weight.shape
    return _cpu.Conv2dShape(x.shape[0], features, 1, 1, outputs, 1, 1, 1, 1, 0, 0), False


def _may_be_the_callers(value: str, graph: Graph) -> bool:
    """Whether a value may lie in the caller's memory, at any address: in an input or an output."""
    names = [value]
    while (maker := graph.producers.get(names[-1])) is not None and maker.op.kind == "reshape":
        names.append(maker.inputs[0])
    for name in names:
        for user in graph.consumers[name]:
            if user.op.kind in ("reshape", "concat") and user.outputs[0] not in names:
                names += user.outputs
    return not {*graph.outputs, *(given.name for given in graph.inputs)}.isdisjoint(names)


def _function(node: Node, graph: Graph, device: Any) -> str:
    """Returns the compiled function that runs a product: GPUs that have wgmma have their own."""
    shape, planar = _shape(node, *graph.inputs_of(node)[:2])
    kernels, how = device.kernels, (shape, _operands(node), device.index)
    x, constants = graph.values[node.inputs[0]], graph.constants
    bias, residual = (*node.inputs[2:4], None, None)[:2]
    wide = node.op.operands in ("float32", "tf32")
    if any(name not in (None, *constants) for name in (bias, *node.inputs[5:6])):
        return "conv2d_nhwc"  # what is read before the kernels before it have ended
    if planar:
        alone = residual is None and not has_prologue(node)
        if alone and kernels.conv2d_nhwc_wgmma_planar_takes(*how):
            return "conv2d_nhwc_wgmma_planar"
    elif x.stored == ("" if wide else node.op.operands) and kernels.conv2d_nhwc_wgmma_takes(*how):
        if not (wide and _may_be_the_callers(node.inputs[0], graph)):
            return "conv2d_nhwc_wgmma"
    return "conv2d_nhwc"


def _pack(node: Node, graph: Graph, device: Any) -> _Weights:
    shape, planar = _shape(node, *graph.inputs_of(node)[:2])
    function, operands = _function(node, graph, device), _operands(node)
    how = (shape, planar, operands) if function == "conv2d_nhwc" else (shape, operands)
    nbytes = getattr(device.kernels, f"{function}_packed")(*how, 0)
    packed = _packed(node, graph, device, nbytes, f"{function}_pack", *how)
    return _Weights(packed.address, packed.nbytes, packed.owner, function)


def _reads_ahead(prepared: _Weights) -> bool:
    return prepared.function == "conv2d_nhwc_wgmma"


def _shows(prepared: _Weights) -> str:
    return _FUNCTIONS[prepared.function]


def _workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    if _function(node, graph, device) != "conv2d_nhwc":
        return 0
    x, weight = graph.inputs_of(node)[:2]
    how = *_shape(node, x, weight), _operands(node), stored(x)
    return device.kernels.conv2d_nhwc_workspace(*how, 0)


def _make(call: Call, rank: int = 0) -> Bound:
    op, (x, weight, _, added, scale, _) = call.node.op, (*call.inputs, *[None] * 4)[:6]
    bias, residual, factors, shift = (*call.at[2:], 0, 0, 0, 0)[:4]
    (shape, planar), out = _shape(call.node, x, weight), call.outputs[0]
    function, first = call.prepared.function, (call.at[0], call.prepared.address, bias)
    operands, activation = _operands(call.node), activation_of(op)
    if function == "conv2d_nhwc_wgmma_planar":
        how = call.to[0], shape, call.pitch(out), stored(out), call.overflow
        return call.native(function, *first, *how, operands, *activation)
    if op.kind == "linear":
        pitches, floor = _cpu.Conv2dPitches(*reversed(weight.shape)), None
    else:
        pitches, floor = pitches_of(call), op.floor
    before = scale is not None and len(scale.shape) == 2, -math.inf if floor is None else floor
    first += residual, factors, shift, call.to[0]
    types = _cpu.Conv2dStored(stored(x), stored(added), stored(out))
    if function == "conv2d_nhwc_wgmma":
        how = shape, pitches, types, call.overflow, operands
        ahead = call.known, call.holds
        return call.native(function, *first, *how, *before, *activation, *ahead, rank)
    return call.native(
        function, *first, call.workspace, shape, pitches, types, call.overflow, planar, operands,
        *before, *activation, rank,
    )  # fmt: skip


def _not_depthwise(node: Node, graph: Graph) -> str | None:
    filters, channels = graph.values[node.inputs[1]].shape[:2]
    if node.op.planar or node.op.groups == 1 or channels != 1 or filters != node.op.groups:
        return "expected one channel and one filter a group"
    if has_prologue(node):
        return "expected nothing before the convolution"
    return not_constant(node, graph)


def _pack_depthwise(node: Node, graph: Graph, device: Any) -> Buffer:
    x, weight = graph.inputs_of(node)[:2]
    shape = shape_of(node, x, weight)
    nbytes = x.item_bytes * weight.size
    return _packed(node, graph, device, nbytes, "conv2d_nhwc_depthwise_pack", shape, stored(x))


def _make_depthwise(call: Call) -> Bound:
    bias, residual = (*call.at[2:], 0, 0)[:2]
    return call.native(
        "conv2d_nhwc_depthwise", call.at[0], call.prepared.address, bias, residual, call.to[0],
        shape_of(call.node, *call.inputs[:2]), pitches_of(call), stored(call.outputs[0]),
        call.overflow, *activation_of(call.node.op),
    )  # fmt: skip


# ---- pairs of convolutions ----


@dataclass(frozen=True)
class _Pair:
    """Packed weights of two convolutions, and their biases."""

    weights: Buffer
    bias: Buffer | None


def _pair_of(node: Node, values: Sequence[Value]) -> tuple[Any, Any, bool]:
    """Returns the compiled functions' shapes of both convolutions, and whether they are beside each other."""
    both = (replace(node, op=record) for record in (node.op.first, node.op.second))
    first, second = (shape_of(*one) for one in zip(both, values[:2], values[2:4], strict=True))
    return first, second, node.op.kind == "conv2d_beside"


def pairs(device: Any, graph: Graph, first: Node, second: Node, beside: bool) -> bool:
    """Whether a device makes two convolutions as one kernel, and faster than one by one."""
    both = first, second
    if any(_function(node, graph, device) != "conv2d_nhwc_wgmma" for node in both):
        return False
    shapes = (shape_of(node, *graph.inputs_of(node)[:2]) for node in both)
    how = *shapes, beside, _operands(first), device.index
    return bool(device.kernels.conv2d_nhwc_wgmma_pair_takes(*how))


def _no_pair(node: Node, graph: Graph) -> str | None:
    own = node.op.operands if node.op.operands in ("float16", "bfloat16") else ""
    if any(value.stored != own for value in graph.inputs_of(node)[:2]):
        return "expected images that are stored as what is multiplied"
    return not_compiled(replace(node, inputs=node.inputs[1:]), graph, node.op.activation)


def _pack_pair(node: Node, graph: Graph, device: Any) -> _Pair:
    how = *_pair_of(node, graph.inputs_of(node)), _operands(node)
    nbytes = device.kernels.conv2d_nhwc_wgmma_pair_packed(*how, 0)
    function = "conv2d_nhwc_wgmma_pair_pack"
    weights = _packed(node, graph, device, nbytes, function, *how, places=(2, 3))
    if all(name is None for name in node.inputs[4:]):
        return _Pair(weights, None)
    filters = (graph.values[name].shape[0] for name in node.inputs[2:4])
    biases = [
        np.zeros(count) if name is None else graph.constants[name].astype(np.float64)
        for name, count in zip(node.inputs[4:], filters, strict=True)
    ]
    bias = np.concatenate(biases) if node.op.kind == "conv2d_beside" else sum(biases)
    return _Pair(weights, brought(bias.astype(np.float32), device))


def _make_pair(call: Call, rank: int = 0) -> Bound:
    (x, other), out = call.inputs[:2], call.outputs[0]
    weights, bias = call.prepared.weights, call.prepared.bias
    pitches = _cpu.Conv2dPitches(call.pitch(x), call.pitch(out)), call.pitch(other)
    return call.native(
        "conv2d_nhwc_wgmma_pair", *call.at[:2], weights.address, bias.address if bias else 0, call.to[0],
        *_pair_of(call.node, call.inputs), *pitches,
        _cpu.Conv2dStored(stored(x), stored(None), stored(out)), call.overflow, _operands(call.node),
        *activation_of(call.node.op), call.known, call.holds, rank,
    )  # fmt: skip


# ---- expansions ----


def expands(device: Any, graph: Graph, first: Node, second: Node) -> int:
    """Returns in how many parts a device makes a product and a convolution of each channel at once, or 0."""
    x, y = graph.values[first.inputs[0]], graph.values[second.outputs[0]]
    stored_as = {x.stored, y.stored, first.op.operands, second.op.operands}
    if len(stored_as) != 1 or "" in stored_as:
        return 0
    shape = shape_of(second, *graph.inputs_of(second)[:2])
    return int(device.kernels.expand_depthwise_takes(shape, x.shape[3], device.index))


def _no_expansion(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].stored != node.op.operands:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, node.op.inner, node.op.activation)


def _pack_expansion(node: Node, graph: Graph, device: Any) -> Buffer:
    x, first, second = graph.inputs_of(node)[:3]
    how = expansion_of(node.op, x, first, second)[1], x.shape[3], _operands(node)
    nbytes = device.kernels.expand_depthwise_packed(*how, 0)
    return _packed(node, graph, device, nbytes, "expand_depthwise_pack", *how, places=(1, 2))


def _make_expansion(call: Call) -> Bound:
    op, x, biases = call.node.op, call.inputs[0], (*call.at[3:], 0, 0)[:2]
    return call.native(
        "expand_depthwise", call.at[0], call.prepared.address, *biases, *(*call.to, 0)[:2],
        expansion_of(op, *call.inputs[:3])[1], x.shape[3], call.overflow, _operands(call.node),
        *function_of(op.inner), *function_of(op.activation),
    )  # fmt: skip


# ---- bottlenecks ----


def _window_of(op: Any, x: Value, weight: Value) -> Any:
    """Returns the compiled functions' shape of a bottleneck's first convolution."""
    n, h, w, c = x.shape
    filters, _, *kernel = weight.shape
    return _cpu.Conv2dShape(n, c, h, w, filters, *kernel, *op.stride, *op.padding, *op.dilation)


def joins(device: Any, graph: Graph, first: Node, second: Node, third: Node | None) -> bool:
    """Whether a device makes a convolution and the one or two of 1x1 behind it sooner as one."""
    nodes = [node for node in (first, second, third) if node is not None]
    x, y, *z = (
        graph.values[name] for name in (first.inputs[0], *(n.outputs[0] for n in nodes[1:]))
    )
    residual = [graph.values[name] for name in second.inputs[3:4] if name is not None]
    stored_as = {value.stored for value in (x, y, *z, *residual)} | {n.op.operands for n in nodes}
    if len(stored_as) != 1 or "" in stored_as:
        return False
    if not all(_is_clamp(node.op.activation) for node in nodes):
        return False
    how = _window_of(first.op, *graph.inputs_of(first)[:2]), y.shape[3], z[0].shape[3] if z else 0
    return bool(device.kernels.bottleneck_takes(*how, device.index))


def _is_clamp(function: Any) -> bool:
    return function is None or function.function in ("relu", "clip")


def _no_bottleneck(node: Node, graph: Graph) -> str | None:
    op = node.op
    if graph.inputs_of(node)[0].stored != op.operands:
        return "expected images in 16 bits, in the type that weights are rounded to"
    weights = replace(node, inputs=node.inputs[:5] + node.inputs[6:])
    return not_compiled(weights, graph, op.inner, op.activation, op.after)


def _bottleneck_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, int, int]:
    """Returns the first convolution's shape and the filters of those behind it."""
    x, window, last = values[:3]
    reduced = values[6].shape[0] if node.op.reduces else 0
    return _window_of(node.op, x, window), last.shape[0], reduced


def _pack_bottleneck(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_bottleneck_of(node, graph.inputs_of(node)), _operands(node)
    nbytes = device.kernels.bottleneck_packed(*how, 0)
    return _packed(node, graph, device, nbytes, "bottleneck_pack", *how, places=(1, 2, 6))


def _make_bottleneck(call: Call) -> Bound:
    op, (first, second, residual, _, third) = call.node.op, (*call.at[3:], *[0] * 5)[:5]
    return call.native(
        "bottleneck", call.at[0], call.prepared.address, first, second, third, residual,
        *(*call.to, 0)[:2], *_bottleneck_of(call.node, call.inputs), call.overflow,
        _operands(call.node), *function_of(op.inner), *function_of(op.activation),
        *function_of(op.after),
    )  # fmt: skip


# ---- inverted residual blocks ----


def _block_of(node: Node, x: Value, second: Value, third: Value, expands: bool) -> tuple[Any, ...]:
    """Returns the shape of a block's second convolution, channels, filters and whether there is a first."""
    (n, h, w, channels), wide = x.shape, second.shape[0]
    how = *second.shape[2:], *node.op.stride, *node.op.padding, 1, 1, wide
    shape = _cpu.Conv2dShape(n, wide, h, w, wide, *how)
    return shape, channels, third.shape[0], expands


def makes_block(device: Any, graph: Graph, first: Node | None, second: Node, third: Node) -> bool:
    """Whether a device makes an inverted residual block sooner by one kernel."""
    nodes = [node for node in (first, second, third) if node is not None]
    x, y = graph.values[nodes[0].inputs[0]], graph.values[third.outputs[0]]
    stored_as = {x.stored, y.stored, *(node.op.operands for node in nodes)}
    if len(stored_as) != 1 or "" in stored_as or second.op.dilation != (1, 1):
        return False
    weights = (graph.values[node.inputs[1]] for node in (second, third))
    how = _block_of(second, x, *weights, first is not None)
    adds = any(name is not None for name in third.inputs[3:4])
    return bool(device.kernels.inverted_residual_takes(*how, adds, device.index))


def _no_block(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].stored != node.op.operands:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, node.op.inner, node.op.middle, node.op.activation)


def _pack_block(node: Node, graph: Graph, device: Any) -> Buffer:
    x, first, second, third = graph.inputs_of(node)[:4]
    how = *_block_of(node, x, second, third, first is not None), _operands(node)
    nbytes = device.kernels.inverted_residual_packed(*how, 0)
    return _packed(node, graph, device, nbytes, "inverted_residual_pack", *how, places=(1, 2, 3))


def _make_block(call: Call) -> Bound:
    op, (x, first, second, third) = call.node.op, call.inputs[:4]
    biases = (*call.at[4:], 0, 0, 0)[:3]
    return call.native(
        "inverted_residual", call.at[0], call.prepared.address, *biases, call.to[0],
        *_block_of(call.node, x, second, third, first is not None), op.adds, call.overflow,
        _operands(call.node), *function_of(op.inner), *function_of(op.middle),
        *function_of(op.activation),
    )  # fmt: skip


# ---- gates ----


def _gates_of(node: Node, images: Value, first: Value) -> tuple[Any, int, Any]:
    """Returns the shape of the images, the hidden sums and what weights are kept as."""
    n, h, w, c = images.shape
    return _cpu.AxisShape(n, h * w, c), first.shape[0], _operands(node)


def scales(device: Any, graph: Graph, node: Node) -> bool:
    """Whether a device multiplies images by their gates' factors as it makes them."""
    x, first = graph.inputs_of(node)[:2]
    shape, hidden, _ = _gates_of(node, x, first)
    # In tf32, and where others made the means, it takes longer than what it saves.
    if x.stored != node.op.operands or len(node.inputs) > 5 or _no_gates(node, graph) is not None:
        return False
    return bool(device.kernels.squeeze_excite_scales(shape, hidden, device.index))


def _no_gates(node: Node, graph: Graph, scaled: bool = False) -> str | None:
    if node.op.scales != scaled:
        return "expected images to be multiplied" if scaled else "expected factors alone"
    if scaled and len(node.inputs) > 5:
        return "expected no means: images are read for them"
    weights = replace(node, inputs=node.inputs[:5])
    return not_compiled(weights, graph, node.op.activation, node.op.gate)


def _pack_gates(node: Node, graph: Graph, device: Any) -> Buffer:
    how = _gates_of(node, *graph.inputs_of(node)[:2])
    nbytes = device.kernels.squeeze_excite_packed(*how, 0)
    return _packed(node, graph, device, nbytes, "squeeze_excite_pack", *how, places=(1, 2))


def _make_gates(call: Call) -> Bound:
    op, (x, first) = call.node.op, call.inputs[:2]
    shape, hidden, operands = _gates_of(call.node, x, first)
    *biases, means = (*call.at[3:], 0, 0, 0)[:3]
    given = call.at[0], call.prepared.address, *biases
    functions = *function_of(op.activation), *function_of(op.gate)
    if op.scales:
        how = shape, hidden, stored(x), call.overflow, operands
        return call.native("squeeze_excite_scale", *given, call.to[0], *how, *functions)
    how = call.inputs[5].shape[1] if means else 0, shape, hidden, stored(x), operands
    return call.native("squeeze_excite", *given, means, call.to[0], *how, *functions)


# ---- rows of features, and images of one place ----


def _not_rows(node: Node, graph: Graph) -> str | None:
    x, weight, *_ = graph.inputs_of(node)
    if node.op.operands is None:
        return "expected what operands may be rounded to, as auto says for models"
    if node.op.kind == "conv2d_nhwc":
        one = x.shape[1:3] == weight.shape[2:] == (1, 1) and not node.op.planar
        if not one or node.op.groups > 1 or any(node.op.padding):
            return "expected images of one place"
        if has_prologue(node) or any(name is not None for name in node.inputs[3:4]):
            return "expected nothing before the product, and nothing added to it"
    if x.shape[0] > FEW_ROWS:
        return f"expected at most {FEW_ROWS} rows, found {x.shape[0]}"
    if any(name is not None and name not in graph.constants for name in node.inputs[2:3]):
        return "expected a constant bias, which is read before what is computed"
    return not_constant(node, graph)


def _pack_rows(node: Node, graph: Graph, device: Any) -> Buffer:
    shape, operands = linear_shape(*graph.inputs_of(node)[:2]), _operands(node)
    nbytes = device.kernels.linear_rows_packed(shape, operands, 0)
    return _packed(node, graph, device, nbytes, "linear_rows_pack", shape, operands)


def _make_rows(call: Call) -> Bound:
    bias = (*call.at[2:], 0)[0]
    return call.native(
        "linear_rows", call.at[0], call.prepared.address, bias, call.to[0],
        linear_shape(*call.inputs[:2]), stored(call.inputs[0]), stored(call.outputs[0]),
        call.overflow, _operands(call.node), *activation_of(call.node.op),
    )  # fmt: skip


def _not_product(node: Node, graph: Graph) -> str | None:
    if node.op.operands is None:
        return "expected what operands may be rounded to, as auto says for models"
    return not_constant(node, graph)


def _make_pool(call: Call) -> Bound:
    function, arguments = make_pool(call)
    return function, [*arguments[:-1], stored(call.inputs[0]), arguments[-1]]


def _row(op: str, name: str, make: Any, why_not: Any, prepare: Any, **options: Any) -> Kernel:
    return Kernel(op, name, "cuda", make, why_not=why_not, prepare=prepare, packs=(1,), **options)


#: What a convolution reads and writes that may be columns of wider rows, or lie in memory in 16 bits.
_IMAGES = (None, 0, 3)


def _stored_images(node: Node, graph: Graph) -> tuple[int | None, ...]:
    """Returns the places of a convolution that may be stored: [N, C, H, W] is read as float32."""
    return _IMAGES[:1] + _IMAGES[2:] if node.op.planar else _IMAGES


#: Of the tiles and splits of a product, those that --tune measures beside the first.
RANKS = (1, 2, 3)


def _forms(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    """Returns a product with the tiles and splits that the model of their times says are next."""
    planar = _function(node, graph, device) == "conv2d_nhwc_wgmma_planar"
    return () if planar else _RANKED[node.op.kind]


def _forms_of_pairs(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    return _RANKED[node.op.kind]


ROWS = [
    _row("conv2d_nhwc", "rows", _make_rows, _not_rows, _pack_rows, stores=storing(None, 0)),
    _row(
        "conv2d_nhwc", "depthwise", _make_depthwise, _not_depthwise, _pack_depthwise,
        pitched=_IMAGES, stores=storing(*_IMAGES), alike=True,
    ),
    _row(
        "conv2d_nhwc", "implicit_gemm", _make, not_constant, _pack, workspace=_workspace,
        shows=_shows, pitched=_IMAGES, stores=_stored_images, forms=_forms,
        reads_ahead=_reads_ahead,
    ),
    *(
        Kernel(
            op, name, "cuda", _make_pair, why_not=_no_pair, prepare=_pack_pair,
            packs=(2, 3, 4, 5), pitched=(None, 0, 1), stores=storing(None, 0, 1),
            forms=_forms_of_pairs, reads_ahead=lambda _: True,
        )
        for op, name in (("conv2d_sum", "wgmma_sum"), ("conv2d_beside", "wgmma_beside"))
    ),
    Kernel(
        "expand_depthwise", "expand_depthwise", "cuda", _make_expansion, why_not=_no_expansion,
        prepare=_pack_expansion, packs=(1, 2), stores=storing(None, 0), alike=True,
    ),
    Kernel(
        "bottleneck", "bottleneck", "cuda", _make_bottleneck, why_not=_no_bottleneck,
        prepare=_pack_bottleneck, packs=(1, 2, 6), stores=storing(None, 0, 5), alike=True,
    ),
    Kernel(
        "inverted_residual", "inverted_residual", "cuda", _make_block, why_not=_no_block,
        prepare=_pack_block, packs=(1, 2, 3), stores=storing(None, 0), alike=True,
    ),
    Kernel(
        "squeeze_excite", "squeeze_excite", "cuda", _make_gates, why_not=_no_gates,
        prepare=_pack_gates, packs=(1, 2), stores=storing(0),
    ),
    Kernel(
        "squeeze_excite", "squeeze_excite_scale", "cuda", _make_gates,
        why_not=partial(_no_gates, scaled=True), prepare=_pack_gates, packs=(1, 2),
        stores=storing(None, 0), alike=True,
    ),
    _row("linear", "rows", _make_rows, _not_rows, _pack_rows, stores=storing(None, 0)),
    _row(
        "linear", "implicit_gemm", _make, _not_product, _pack, workspace=_workspace, shows=_shows,
        stores=storing(None, 0), forms=_forms,
    ),
    *(
        Kernel(
            op, "channels_last", "cuda", _make_pool, pitched=(None, 0), stores=storing(None, 0),
            alike=True, **more,
        )
        for op, more in (
            ("max_pool2d_nhwc", {"why_not": pooling.why_not}), ("average_pool2d_nhwc", {}),
        )
    ),
]  # fmt: skip

_RANKED = {
    row.op: [replace(row, form=f"rank {rank}", make=partial(row.make, rank=rank)) for rank in RANKS]
    for row in ROWS
    if row.forms in (_forms, _forms_of_pairs)
}
