"""CUDA's kernels that run several nodes at once over images whose channels lie side by side, [N, H, W, C]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ... import _cpu
from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ...operators.channels_last import MaxPool2dNhwc
from ..convolution import limits
from ..cpu.channels_last import activation_of, expansion_of, function_of, not_compiled, shape_of
from ..kernel import Bound, Call, Kernel, storage_of, storing, upload
from .channels_last import (
    compiled_for,
    compute_dtype_of,
    convolution_of,
    may_be_the_callers,
    own_type,
    pack_on,
    ranked,
)

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
    if any(compiled_for(node, graph, device) != "conv2d_nhwc_wgmma" for node in both):
        return False
    shapes = (shape_of(node, *graph.inputs_of(node)[:2]) for node in both)
    how = *shapes, beside, compute_dtype_of(first), device.index
    return bool(device.kernels.conv2d_nhwc_wgmma_pair_takes(*how))


def _no_pair(node: Node, graph: Graph) -> str | None:
    if any(value.storage_dtype != own_type(node) for value in graph.inputs_of(node)[:2]):
        return "expected images that are stored as what is multiplied"
    return not_compiled(replace(node, inputs=node.inputs[1:]), graph, node.op.activation)


def _pack_pair(node: Node, graph: Graph, device: Any) -> _Pair:
    how = *_pair_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.conv2d_nhwc_wgmma_pair_packed(*how, 0)
    function = "conv2d_nhwc_wgmma_pair_pack"
    weights = pack_on(node, graph, device, nbytes, function, *how, places=(2, 3))
    if all(name is None for name in node.inputs[4:]):
        return _Pair(weights, None)
    filters = (graph.values[name].shape[0] for name in node.inputs[2:4])
    biases = [
        np.zeros(count) if name is None else graph.constants[name].astype(np.float64)
        for name, count in zip(node.inputs[4:], filters, strict=True)
    ]
    bias = np.concatenate(biases) if node.op.kind == "conv2d_beside" else sum(biases)
    return _Pair(weights, upload(bias.astype(np.float32), device))


def _make_pair(call: Call, rank: int = 0) -> Bound:
    (x, other), out = call.inputs[:2], call.outputs[0]
    weights, bias = call.prepared.weights, call.prepared.bias
    pitches = _cpu.Conv2dPitches(call.pitch(x), call.pitch(out)), call.pitch(other)
    return call.native(
        "conv2d_nhwc_wgmma_pair",
        *call.at[:2],
        weights.address,
        bias.address if bias else 0,
        call.to[0],
        *_pair_of(call.node, call.inputs),
        *pitches,
        _cpu.Conv2dStored(storage_of(x), storage_of(None), storage_of(out)),
        call.overflow,
        compute_dtype_of(call.node),
        *activation_of(call.node.op),
        call.known,
        call.holds,
        rank,
    )


def _forms_of_pairs(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    return _RANKED[node.op.kind]


# ---- expansions ----


def expands(device: Any, graph: Graph, first: Node, second: Node) -> int:
    """Returns in how many parts a device makes a product and a convolution of each channel at once, or 0."""
    x, y = graph.values[first.inputs[0]], graph.values[second.outputs[0]]
    storage_dtypes = {
        x.storage_dtype,
        y.storage_dtype,
        first.op.compute_dtype,
        second.op.compute_dtype,
    }
    if len(storage_dtypes) != 1 or "" in storage_dtypes:
        return 0
    shape = shape_of(second, *graph.inputs_of(second)[:2])
    return int(device.kernels.expand_depthwise_takes(shape, x.shape[3], device.index))


def _no_expansion(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, node.op.inner, node.op.activation)


def _pack_expansion(node: Node, graph: Graph, device: Any) -> Buffer:
    x, first, second = graph.inputs_of(node)[:3]
    how = expansion_of(node.op, x, first, second)[1], x.shape[3], compute_dtype_of(node)
    nbytes = device.kernels.expand_depthwise_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "expand_depthwise_pack", *how, places=(1, 2))


def _make_expansion(call: Call) -> Bound:
    op, x, biases = call.node.op, call.inputs[0], (*call.at[3:], 0, 0)[:2]
    return call.native(
        "expand_depthwise", call.at[0], call.prepared.address, *biases, *(*call.to, 0)[:2],
        expansion_of(op, *call.inputs[:3])[1], x.shape[3], call.overflow, compute_dtype_of(call.node),
        *function_of(op.inner), *function_of(op.activation),
    )  # fmt: skip


# ---- bottlenecks, and products with gelu between them ----


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
    own, compute_dtype = own_type(first), {node.op.compute_dtype for node in nodes}
    if {value.storage_dtype for value in (x, y, *z, *residual)} != {own}:
        return False
    if len(compute_dtype) > 1 or None in compute_dtype:
        return False
    if not own and any(may_be_the_callers(value.name, graph) for value in (x, y, *residual)):
        return False
    if _is_mlp(first.op, graph.values[first.inputs[1]]):
        if not _is_gelu(first.op.activation) or not is_clamp(second.op.activation):
            return False
        shape = _window_of(first.op, *graph.inputs_of(first)[:2])
        return bool(
            device.kernels.mlp_takes(shape, y.shape[3], compute_dtype_of(first), device.index)
        )
    if not own or not all(is_clamp(node.op.activation) for node in nodes):
        return False
    how = _window_of(first.op, *graph.inputs_of(first)[:2]), y.shape[3], z[0].shape[3] if z else 0
    return bool(device.kernels.bottleneck_takes(*how, device.index))


def is_clamp(function: Any) -> bool:
    """Whether a function, or none, is one that limits values alone."""
    return limits(function) is not None


def _is_gelu(function: Any) -> bool:
    return function is not None and function.function == "gelu"


def _is_mlp(op: Any, window: Value) -> bool:
    """Whether a first convolution, or a bottleneck that begins with it, is a product over channels."""
    return window.shape[2:] == (1, 1) and op.stride == (1, 1) and not any(op.padding)


def _no_mlp(node: Node, graph: Graph) -> str | None:
    op = node.op
    if not _is_mlp(op, graph.inputs_of(node)[1]) or not _is_gelu(op.inner):
        return "expected a product over channels and gelu first"
    if graph.inputs_of(node)[0].storage_dtype != own_type(node):
        return "expected images as what is multiplied is stored"
    weights = replace(node, inputs=node.inputs[:5])
    return not_compiled(weights, graph, op.inner, op.activation)


def _mlp_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, int]:
    """Returns the first product's shape and the second one's filters."""
    return _bottleneck_of(node, values)[:2]


def _pack_mlp(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_mlp_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.mlp_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "mlp_pack", *how, places=(1, 2))


def _make_mlp(call: Call) -> Bound:
    op, (first, second, residual) = call.node.op, (*call.at[3:], 0, 0, 0)[:3]
    return call.native(
        "mlp", call.at[0], call.prepared.address, first, second, residual, call.to[0],
        *_mlp_of(call.node, call.inputs), call.overflow, compute_dtype_of(call.node),
        *function_of(op.activation),
    )  # fmt: skip


def _no_bottleneck(node: Node, graph: Graph) -> str | None:
    op = node.op
    if _is_mlp(op, graph.inputs_of(node)[1]):
        return "expected a window"
    if graph.inputs_of(node)[0].storage_dtype != op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    weights = replace(node, inputs=node.inputs[:5] + node.inputs[6:])
    return not_compiled(weights, graph, op.inner, op.activation, op.after)


def _bottleneck_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, int, int]:
    """Returns the first convolution's shape and the filters of those behind it."""
    x, window, last = values[:3]
    reduced = values[6].shape[0] if node.op.reduces else 0
    return _window_of(node.op, x, window), last.shape[0], reduced


def _pack_bottleneck(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_bottleneck_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.bottleneck_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "bottleneck_pack", *how, places=(1, 2, 6))


def _make_bottleneck(call: Call) -> Bound:
    op, (first, second, residual, _, third) = call.node.op, (*call.at[3:], *[0] * 5)[:5]
    return call.native(
        "bottleneck", call.at[0], call.prepared.address, first, second, third, residual,
        *(*call.to, 0)[:2], *_bottleneck_of(call.node, call.inputs), call.overflow,
        compute_dtype_of(call.node), *function_of(op.inner), *function_of(op.activation),
        *function_of(op.after),
    )  # fmt: skip


# ---- convolutions and their max pools ----


def pools(device: Any, graph: Graph, conv: Node, pool: Node) -> bool:
    """Whether a device makes a convolution and the max pool behind it sooner as one."""
    op, kernels, given = conv.op, device.kernels, graph.inputs_of(conv)[:2]
    storage_dtypes = given[0].storage_dtype, graph.values[pool.outputs[0]].storage_dtype
    if storage_dtypes != ("" if op.planar else op.compute_dtype, op.compute_dtype):
        return False
    if not is_clamp(op.activation):
        return False
    how = compute_dtype_of(conv), device.index
    if op.planar:
        return bool(kernels.stem_pool_takes(*_stem_and_pool(conv, pool.op, *given), *how))
    two_by_two = pool.op == MaxPool2dNhwc((2, 2), (2, 2))
    return two_by_two and bool(kernels.conv2d_nhwc_wgmma_pool_takes(shape_of(conv, *given), *how))


def _stem_and_pool(conv: Node, pool: MaxPool2dNhwc, x: Value, weight: Value) -> tuple[Any, Any]:
    """Returns the compiled functions' shapes of a convolution, and of a pool over what it makes."""
    shape, window = shape_of(conv, x, weight), (*pool.kernel, *pool.stride, *pool.padding)
    sizes = x.shape[0], weight.shape[0], shape.out_h, shape.out_w
    return shape, _cpu.MaxPool2dShape(*sizes, *window, *pool.dilation)


def _no_pooled(node: Node, graph: Graph, planar: bool = False) -> str | None:
    if node.op.convolution.planar != planar:
        return f"expected images {'[N, C, H, W]' if planar else '[N, H, W, C]'}"
    images = node.outputs if planar else (node.inputs[0], *node.outputs)
    if any(graph.values[name].storage_dtype != node.op.compute_dtype for name in images):
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, node.op.activation)


def _pack_pooled(node: Node, graph: Graph, device: Any) -> Buffer:
    function = "conv2d_nhwc_wgmma_planar" if node.op.convolution.planar else "conv2d_nhwc_wgmma"
    how = shape_of(convolution_of(node), *graph.inputs_of(node)[:2]), compute_dtype_of(node)
    nbytes = getattr(device.kernels, f"{function}_packed")(*how, 0)
    return pack_on(node, graph, device, nbytes, f"{function}_pack", *how)


def _make_pooled(call: Call, rank: int = 0) -> Bound:
    x, out, bias = call.inputs[0], call.outputs[0], (*call.at[2:], 0)[0]
    return call.native(
        "conv2d_nhwc_wgmma_pool", call.at[0], call.prepared.address, bias, call.to[0],
        shape_of(convolution_of(call.node), *call.inputs[:2]),
        _cpu.Conv2dPitches(call.pitch(x), call.pitch(out)),
        call.overflow, compute_dtype_of(call.node), *activation_of(call.node.op), rank,
    )  # fmt: skip


def _make_pooled_stem(call: Call) -> Bound:
    op, out, bias = call.node.op, call.outputs[0], (*call.at[2:], 0)[0]
    return call.native(
        "stem_pool", call.at[0], call.prepared.address, bias, call.to[0],
        *_stem_and_pool(convolution_of(call.node), op.pool, *call.inputs[:2]), call.pitch(out),
        call.overflow, compute_dtype_of(call.node), *activation_of(op),
    )  # fmt: skip


# ---- two first convolutions and their max pool ----


def joins_stem(device: Any, graph: Graph, first: Node, second: Node) -> bool:
    """Whether a device makes a first convolution, and the one behind it with its max pool, sooner as one."""
    (x, weight), y = graph.inputs_of(first)[:2], graph.values[second.outputs[0]]
    second_weight, behind = graph.values[second.inputs[1]], second.op.convolution
    if (
        x.storage_dtype
        or y.storage_dtype != first.op.compute_dtype
        or second.op.pool.kernel != (2, 2)
    ):
        return False
    if not (is_clamp(first.op.activation) and is_clamp(second.op.activation)):
        return False
    if behind.planar or weight.shape[2:] != second_weight.shape[2:]:
        return False
    if any(
        getattr(first.op, name) != getattr(behind, name)
        for name in ("stride", "padding", "dilation")
    ):
        return False
    how = shape_of(first, x, weight), second_weight.shape[0], compute_dtype_of(first), device.index
    return bool(device.kernels.stem_pair_takes(*how))


def _stem_pair_of(node: Node, values: Sequence[Value]) -> tuple[Any, int]:
    """Returns the compiled functions' shape of the first convolution, and the second one's filters."""
    x, weight, second = values[:3]
    return shape_of(replace(node, op=node.op.first), x, weight), second.shape[0]


def _no_stem_pair(node: Node, graph: Graph) -> str | None:
    if graph.values[node.outputs[0]].storage_dtype != node.op.compute_dtype:
        return "expected results in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, node.op.inner, node.op.activation)


def _pack_stem_pair(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_stem_pair_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.stem_pair_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "stem_pair_pack", *how, places=(1, 2))


def _make_stem_pair(call: Call) -> Bound:
    op, biases, (y,) = call.node.op, (*call.at[3:], 0, 0)[:2], call.outputs
    return call.native(
        "stem_pair", call.at[0], call.prepared.address, *biases, call.to[0],
        *_stem_pair_of(call.node, call.inputs), call.pitch(y), call.overflow,
        compute_dtype_of(call.node), *function_of(op.inner), *function_of(op.activation),
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
    storage_dtypes = {x.storage_dtype, y.storage_dtype, *(node.op.compute_dtype for node in nodes)}
    if len(storage_dtypes) != 1 or "" in storage_dtypes or second.op.dilation != (1, 1):
        return False
    weights = (graph.values[node.inputs[1]] for node in (second, third))
    how = _block_of(second, x, *weights, first is not None)
    adds = any(name is not None for name in third.inputs[3:4])
    return bool(device.kernels.inverted_residual_takes(*how, adds, device.index))


def _no_block(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, node.op.inner, node.op.middle, node.op.activation)


def _pack_block(node: Node, graph: Graph, device: Any) -> Buffer:
    x, first, second, third = graph.inputs_of(node)[:4]
    how = *_block_of(node, x, second, third, first is not None), compute_dtype_of(node)
    nbytes = device.kernels.inverted_residual_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "inverted_residual_pack", *how, places=(1, 2, 3))


def _make_block(call: Call) -> Bound:
    op, (x, first, second, third) = call.node.op, call.inputs[:4]
    biases = (*call.at[4:], 0, 0, 0)[:3]
    return call.native(
        "inverted_residual", call.at[0], call.prepared.address, *biases, call.to[0],
        *_block_of(call.node, x, second, third, first is not None), op.adds, call.overflow,
        compute_dtype_of(call.node), *function_of(op.inner), *function_of(op.middle),
        *function_of(op.activation),
    )  # fmt: skip


# ---- gates ----


def _gates_of(node: Node, images: Value, first: Value) -> tuple[Any, int, Any]:
    """Returns the shape of the images, the hidden sums and what weights are kept as."""
    n, h, w, c = images.shape
    return _cpu.AxisShape(n, h * w, c), first.shape[0], compute_dtype_of(node)


def scales(device: Any, graph: Graph, node: Node) -> bool:
    """Whether a device multiplies images by their gates' factors as it makes them."""
    x, first = graph.inputs_of(node)[:2]
    shape, hidden, _ = _gates_of(node, x, first)
    # In tf32, and where others made the means, it takes longer than what it saves.
    if (
        x.storage_dtype != node.op.compute_dtype
        or len(node.inputs) > 5
        or _no_gates(node, graph) is not None
    ):
        return False
    return bool(device.kernels.squeeze_excite_scales(shape, hidden, device.index))


def _is_given(value: str, graph: Graph) -> bool:
    """Whether a value is an input of the caller's, at any address, in another shape perhaps."""
    while (maker := graph.producers.get(value)) is not None and maker.op.kind == "reshape":
        value = maker.inputs[0]
    return maker is None


def _no_gates(node: Node, graph: Graph, scaled: bool = False) -> str | None:
    if node.op.scales != scaled:
        return "expected images to be multiplied" if scaled else "expected factors alone"
    if scaled and len(node.inputs) > 5:
        return "expected no means: images are read for them"
    if limits(node.op.clamp) is None:
        return f"expected relu or clip after the product, found {node.op.clamp.kind}"
    if _is_given(node.inputs[0], graph):
        return "expected images that lie in the engine's memory, at a multiple of 16 bytes"
    weights = replace(node, inputs=node.inputs[:5])
    return not_compiled(weights, graph, node.op.activation, node.op.gate)


def _pack_gates(node: Node, graph: Graph, device: Any) -> Buffer:
    how = _gates_of(node, *graph.inputs_of(node)[:2])
    nbytes = device.kernels.squeeze_excite_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "squeeze_excite_pack", *how, places=(1, 2))


def _make_gates(call: Call) -> Bound:
    op, (x, first) = call.node.op, call.inputs[:2]
    shape, hidden, compute_dtype = _gates_of(call.node, x, first)
    *biases, means = (*call.at[3:], 0, 0, 0)[:3]
    given = call.at[0], call.prepared.address, *biases
    functions = *function_of(op.activation), *function_of(op.gate)
    if op.scales:
        how = shape, hidden, storage_of(x), call.overflow, compute_dtype
        last = limits(op.clamp)
        return call.native("squeeze_excite_scale", *given, call.to[0], *how, *functions, *last)
    how = call.inputs[5].shape[1] if means else 0, shape, hidden, storage_of(x), compute_dtype
    return call.native("squeeze_excite", *given, means, call.to[0], *how, *functions)


ROWS = [
    *(
        Kernel(
            op,
            name,
            "cuda",
            _make_pair,
            why_not=_no_pair,
            prepare=_pack_pair,
            packs=(2, 3, 4, 5),
            pitched=(None, 0, 1),
            stores=storing(None, 0, 1),
            forms=_forms_of_pairs,
            reads_ahead=lambda _: True,
        )
        for op, name in (("conv2d_sum", "wgmma_sum"), ("conv2d_beside", "wgmma_beside"))
    ),
    Kernel(
        "expand_depthwise",
        "expand_depthwise",
        "cuda",
        _make_expansion,
        why_not=_no_expansion,
        prepare=_pack_expansion,
        packs=(1, 2),
        early=(3, 4),
        stores=storing(None, 0),
        same_storage=True,
    ),
    Kernel(
        "bottleneck",
        "bottleneck",
        "cuda",
        _make_bottleneck,
        why_not=_no_bottleneck,
        prepare=_pack_bottleneck,
        packs=(1, 2, 6),
        early=(3, 4, 7),
        stores=storing(None, 0, 5),
        same_storage=True,
    ),
    Kernel(
        "bottleneck",
        "mlp",
        "cuda",
        _make_mlp,
        why_not=_no_mlp,
        prepare=_pack_mlp,
        packs=(1, 2),
        early=(3, 4),
        stores=storing(None, 0, 5),
        same_storage=True,
    ),
    Kernel(
        "conv2d_pool",
        "wgmma_pool",
        "cuda",
        _make_pooled,
        why_not=_no_pooled,
        prepare=_pack_pooled,
        packs=(1,),
        early=(2,),
        pitched=(0,),
        stores=storing(None, 0),
        same_storage=True,
        forms=_forms_of_pairs,
    ),
    Kernel(
        "conv2d_pool",
        "stem_pool",
        "cuda",
        _make_pooled_stem,
        why_not=partial(_no_pooled, planar=True),
        prepare=_pack_pooled,
        packs=(1,),
        early=(2,),
        pitched=(None,),
        stores=storing(None),
    ),
    Kernel(
        "stem_pair",
        "stem_pair",
        "cuda",
        _make_stem_pair,
        why_not=_no_stem_pair,
        prepare=_pack_stem_pair,
        packs=(1, 2),
        early=(3, 4),
        stores=storing(None),
    ),
    Kernel(
        "inverted_residual",
        "inverted_residual",
        "cuda",
        _make_block,
        why_not=_no_block,
        prepare=_pack_block,
        packs=(1, 2, 3),
        early=(4, 5, 6),
        stores=storing(None, 0),
        same_storage=True,
    ),
    Kernel(
        "squeeze_excite",
        "squeeze_excite",
        "cuda",
        _make_gates,
        why_not=_no_gates,
        prepare=_pack_gates,
        packs=(1, 2),
        early=(3, 4),
        stores=storing(0),
    ),
    Kernel(
        "squeeze_excite",
        "squeeze_excite_scale",
        "cuda",
        _make_gates,
        why_not=partial(_no_gates, scaled=True),
        prepare=_pack_gates,
        packs=(1, 2),
        early=(3, 4),
        stores=storing(None, 0),
        same_storage=True,
    ),
]

_RANKED = {row.op: ranked(row) for row in ROWS if row.forms is _forms_of_pairs}
