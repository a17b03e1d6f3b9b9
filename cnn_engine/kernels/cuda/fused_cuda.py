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
from ..arguments import NO_IMAGES, epilogue, input_images, input_values, launch, output_images
from ..convolution import limits
from ..cpu.channels_last import expansion_of, not_compiled, shape_of
from ..kernel import Bound, Call, Kernel, storing, upload
from .channels_last import (
    compiled_for,
    compute_dtype_of,
    convolution_of,
    may_be_the_callers,
    own_type,
    pack_on,
    ranked,
)
from .requirements import CLUSTERS_OF_HOPPER, HOPPER, TENSOR_CORES, WGMMA

#: Why regions are left to the kernels of their nodes.
NOT_SOONER = "its nodes one by one are sooner there, or it takes no such sizes"
ONLY_CLAMPS = "expected relu, clip or nothing after its sums"
AT_ANY_ADDRESS = "expected images that lie in the engine's memory, at a multiple of 16 bytes"


def is_clamp(function: Any) -> bool:
    """Whether a function, or none, is one that limits values alone."""
    return limits(function) is not None


def not_in_16_bits(node: Node, *images: Value) -> str | None:
    """Returns why a kernel that multiplies images as they lie, in 16 bits, does not run a region of them."""
    records = {getattr(part.op, "compute_dtype", None) for part in node.op.nodes} - {None}
    if len({value.storage_dtype for value in images} | records) != 1 or not images[0].storage_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return None


def _images(node: Node, graph: Graph, *positions: int) -> list[Value]:
    """Returns what a region reads at ``positions``, as far as it does, and what it makes."""
    read = (node.inputs[place] for place in positions)
    return [graph.values[name] for name in (*read, *node.outputs) if name is not None]


# ---- pairs of convolutions ----


@dataclass(frozen=True)
class _Pair:
    """Packed weights of two convolutions, and their biases."""

    weights: Buffer
    bias: Buffer | None


def _pair_nodes(node: Node) -> list[Node]:
    """Returns both convolutions of a pair."""
    return [
        replace(node, op=node.op[role], inputs=tuple(node.inputs[place::2]))
        for place, role in enumerate(("first", "second"))
    ]


def _pair_of(node: Node, values: Sequence[Value]) -> tuple[Any, Any, bool]:
    """Returns the compiled functions' shapes of both convolutions, and whether they are beside each other."""
    both = _pair_nodes(node)
    first, second = (shape_of(*one) for one in zip(both, values[:2], values[2:4], strict=True))
    return first, second, node.op.kind == "conv2d_beside"


def _no_pair_there(node: Node, graph: Graph, device: Any) -> str | None:
    if any(compiled_for(one, graph, device) != "conv2d_nhwc_wgmma" for one in _pair_nodes(node)):
        return "expected two convolutions that wgmma multiplies"
    how = *_pair_of(node, graph.inputs_of(node)), compute_dtype_of(node), device.target.native
    return None if device.kernels.conv2d_nhwc_wgmma_pair_takes(*how) else NOT_SOONER


def _activation_of(op: Any) -> Any:
    """Returns the activation that follows a pair, or None."""
    last = "second" if op["join"] else op.nodes[-1].role
    return op.activation(last)


def _no_pair(node: Node, graph: Graph) -> str | None:
    if any(value.storage_dtype != own_type(node) for value in graph.inputs_of(node)[:2]):
        return "expected images that are stored as what is multiplied"
    return not_compiled(replace(node, inputs=node.inputs[1:]), graph, _activation_of(node.op))


def _pack_pair(node: Node, graph: Graph, device: Any) -> _Pair:
    how = *_pair_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.conv2d_nhwc_wgmma_pair_packed(*how, 0)
    function = "conv2d_nhwc_wgmma_pair_pack"
    weights = pack_on(node, graph, device, nbytes, function, *how, positions=(2, 3))
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
    weights, bias = call.prepared.weights, call.prepared.bias
    return call.native(
        "conv2d_nhwc_wgmma_pair",
        *input_images(call, 0),
        *input_images(call, 1),
        weights.address,
        *output_images(call),
        *_pair_of(call.node, call.inputs),
        compute_dtype_of(call.node),
        *epilogue(
            _activation_of(call.node.op), bias.address if bias else 0, overflow=call.overflow
        ),
        *launch(call, rank),
    )


def _forms_of_pairs(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    return _RANKED[node.op.kind]


# ---- expansions ----


def _strips(node: Node, graph: Graph, device: Any) -> tuple[Any, int]:
    """Returns the shape of an expansion's second convolution, and in how many strips it is made, or 0."""
    x, first, second = graph.inputs_of(node)[:3]
    _, shape = expansion_of(node.op, x, first, second)
    return shape, device.kernels.expand_depthwise_takes(shape, x.shape[3], device.target.native)


def strips_of(node: Node, graph: Graph, device: Any) -> tuple[int, int] | None:
    """Returns the rows and columns of the strips of which the means of an expansion's result are made."""
    shape, strips = _strips(node, graph, device)
    return (-(-shape.out_h // strips), shape.out_w) if strips else None


def _no_expansion_there(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := not_in_16_bits(node, *_images(node, graph, 0)):
        return reason
    return None if _strips(node, graph, device)[1] else NOT_SOONER


def _no_expansion(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, *map(node.op.activation, ("first", "second")))


def _pack_expansion(node: Node, graph: Graph, device: Any) -> Buffer:
    x, first, second = graph.inputs_of(node)[:3]
    how = expansion_of(node.op, x, first, second)[1], x.shape[3], compute_dtype_of(node)
    nbytes = device.kernels.expand_depthwise_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "expand_depthwise_pack", *how, positions=(1, 2))


def _make_expansion(call: Call) -> Bound:
    op, x = call.node.op, call.inputs[0]
    return call.native(
        "expand_depthwise",
        call.input_addresses[0],
        call.prepared.address,
        *(*call.output_addresses, 0)[:2],
        expansion_of(op, *call.inputs[:3])[1],
        x.shape[3],
        compute_dtype_of(call.node),
        *_epilogues(call, call.input_addresses[3:]),
    )


# ---- bottlenecks, and products with gelu between them ----


def _no_join(node: Node, graph: Graph, device: Any) -> str | None:
    """Returns why no kernel joins the convolutions of a bottleneck, or of two products, that a device has."""
    images, own = _images(node, graph, 0, 5), own_type(node)
    records = {part.op.compute_dtype for part in node.op.nodes}
    if {value.storage_dtype for value in images} != {own} or len(records) > 1:
        return "expected images as what is multiplied is stored"
    if not own and any(may_be_the_callers(value.name, graph) for value in images):
        return AT_ANY_ADDRESS
    return None


def _no_mlp_there(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := _no_join(node, graph, device) or _no_mlp(node, graph):
        return reason
    if node.op["third"] or not is_clamp(node.op.activation("second")):
        return "expected two products, with relu, clip or nothing after the second"
    how = *_mlp_of(node, graph.inputs_of(node)), compute_dtype_of(node), device.target.native
    return None if device.kernels.mlp_takes(*how) else NOT_SOONER


def _no_bottleneck_there(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := _no_join(node, graph, device) or _no_bottleneck(node, graph):
        return reason
    if not all(is_clamp(node.op.activation(role)) for role in _THREE):
        return ONLY_CLAMPS
    how = *_bottleneck_of(node, graph.inputs_of(node)), device.target.native
    return None if device.kernels.bottleneck_takes(*how) else NOT_SOONER


def _is_gelu(function: Any) -> bool:
    return function is not None and function.function == "gelu"


def _is_mlp(node: Node, graph: Graph) -> bool:
    """Whether a bottleneck begins with a product over channels."""
    op, window = node.op["first"], graph.inputs_of(node)[1]
    return window.shape[2:] == (1, 1) and op.stride == (1, 1) and not any(op.padding)


def _no_mlp(node: Node, graph: Graph) -> str | None:
    inner, outer = map(node.op.activation, ("first", "second"))
    if not _is_mlp(node, graph) or not _is_gelu(inner):
        return "expected a product over channels and gelu first"
    if graph.inputs_of(node)[0].storage_dtype != own_type(node):
        return "expected images as what is multiplied is stored"
    weights = replace(node, inputs=node.inputs[:5])
    return not_compiled(weights, graph, inner, outer)


def _mlp_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, int]:
    """Returns the first product's shape and the second one's filters."""
    return _bottleneck_of(node, values)[:2]


def _pack_mlp(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_mlp_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.mlp_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "mlp_pack", *how, positions=(1, 2))


def _make_mlp(call: Call) -> Bound:
    return call.native(
        "mlp",
        call.input_addresses[0],
        call.prepared.address,
        call.output_addresses[0],
        *_mlp_of(call.node, call.inputs),
        compute_dtype_of(call.node),
        *_epilogues(call, call.input_addresses[3:5], residual=5),
    )


#: The convolutions of a block, as far as it has them.
_THREE = ("first", "second", "third")


def _no_bottleneck(node: Node, graph: Graph) -> str | None:
    if _is_mlp(node, graph):
        return "expected a window"
    if graph.inputs_of(node)[0].storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    weights = replace(node, inputs=node.inputs[:5] + node.inputs[6:])
    return not_compiled(weights, graph, *map(node.op.activation, _THREE))


def _bottleneck_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, int, int]:
    """Returns the first convolution's shape and the filters of those behind it."""
    x, window, last = values[:3]
    reduced = values[6].shape[0] if node.op["third"] else 0
    return shape_of(replace(node, op=node.op["first"]), x, window), last.shape[0], reduced


def _pack_bottleneck(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_bottleneck_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.bottleneck_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "bottleneck_pack", *how, positions=(1, 2, 6))


def _make_bottleneck(call: Call) -> Bound:
    first, second, _, _, third = call.input_addresses[3:]
    return call.native(
        "bottleneck",
        call.input_addresses[0],
        call.prepared.address,
        *(*call.output_addresses, 0)[:2],
        *_bottleneck_of(call.node, call.inputs),
        compute_dtype_of(call.node),
        *_epilogues(call, (first, second, third), residual=5),
    )


def _epilogues(call: Call, biases: Sequence[Any], residual: int | None = None) -> list[Any]:
    """Returns the Epilogue of each convolution of a block, which are as many as the biases.

    Args:
        residual: the input that is added to the second one.
    """
    found = []
    for place, (role, bias) in enumerate(zip(_THREE, biases, strict=False)):
        added = NO_IMAGES if residual is None or place != 1 else input_images(call, residual)
        found += epilogue(call.node.op.activation(role), bias, added, call.overflow)
    return found


# ---- convolutions and their max pools ----


def _no_pool_there(node: Node, graph: Graph, device: Any, planar: bool = False) -> str | None:
    if reason := _no_pooled(node, graph, planar):
        return reason
    if not is_clamp(node.op.activation("convolution")):
        return ONLY_CLAMPS
    conv, pool, given = convolution_of(node), node.op["pool"], graph.inputs_of(node)[:2]
    how, kernels = (compute_dtype_of(node), device.target.native), device.kernels
    if planar:
        takes = kernels.stem_pool_takes(*_stem_and_pool(conv, pool, *given), *how)
    elif pool != MaxPool2dNhwc((2, 2), (2, 2)):
        return "expected a pool of 2x2"
    else:
        takes = kernels.conv2d_nhwc_wgmma_pool_takes(shape_of(conv, *given), *how)
    return None if takes else NOT_SOONER


def _stem_and_pool(conv: Node, pool: MaxPool2dNhwc, x: Value, weight: Value) -> tuple[Any, Any]:
    """Returns the compiled functions' shapes of a convolution, and of a pool over what it makes."""
    shape, window = shape_of(conv, x, weight), (*pool.kernel, *pool.stride, *pool.padding)
    sizes = x.shape[0], weight.shape[0], shape.out_h, shape.out_w
    return shape, _cpu.MaxPool2dShape(*sizes, *window, *pool.dilation)


def _no_pooled(node: Node, graph: Graph, planar: bool = False) -> str | None:
    if node.op["convolution"].planar != planar:
        return f"expected images {'[N, C, H, W]' if planar else '[N, H, W, C]'}"
    images = _images(node, graph, *() if planar else (0,))
    if reason := not_in_16_bits(node, *images):
        return reason
    return not_compiled(node, graph, node.op.activation("convolution"))


def _pack_pooled(node: Node, graph: Graph, device: Any) -> Buffer:
    planar = node.op["convolution"].planar
    function = "conv2d_nhwc_wgmma_planar" if planar else "conv2d_nhwc_wgmma"
    how = shape_of(convolution_of(node), *graph.inputs_of(node)[:2]), compute_dtype_of(node)
    nbytes = getattr(device.kernels, f"{function}_packed")(*how, 0)
    return pack_on(node, graph, device, nbytes, f"{function}_pack", *how)


def _make_pooled(call: Call, rank: int = 0) -> Bound:
    return call.native(
        "conv2d_nhwc_wgmma_pool",
        *input_images(call, 0),
        call.prepared.address,
        *output_images(call),
        shape_of(convolution_of(call.node), *call.inputs[:2]),
        compute_dtype_of(call.node),
        *_pooled_epilogue(call),
        *launch(call, rank),
    )


def _pooled_epilogue(call: Call) -> tuple:
    activation = call.node.op.activation("convolution")
    return epilogue(activation, call.input_addresses[2], overflow=call.overflow)


def _make_pooled_stem(call: Call) -> Bound:
    return call.native(
        "stem_pool",
        call.input_addresses[0],
        call.prepared.address,
        *output_images(call),
        *_stem_and_pool(convolution_of(call.node), call.node.op["pool"], *call.inputs[:2]),
        compute_dtype_of(call.node),
        *_pooled_epilogue(call),
    )


# ---- inverted residual blocks ----


def _block_of(node: Node, values: Sequence[Value | None]) -> tuple[Any, ...]:
    """Returns the shape of a block's second convolution, channels, filters and whether there is a first."""
    (x, first, second, third), op = values[:4], node.op["second"]
    (n, h, w, channels), wide = x.shape, second.shape[0]
    how = *second.shape[2:], *op.stride, *op.padding, *op.dilation, wide
    shape = _cpu.Conv2dShape(n, wide, h, w, wide, *how)
    return shape, channels, third.shape[0], first is not None


def _adds(op: Any) -> bool:
    """Whether what a block reads is added to what it makes."""
    third = next(part for part in op.nodes if part.role == "third")
    return len(third.inputs) > 3


def _no_block_there(node: Node, graph: Graph, device: Any) -> str | None:
    if reason := not_in_16_bits(node, *_images(node, graph, 0)):
        return reason
    if node.op["second"].dilation != (1, 1):
        return "expected no dilation"
    how = *_block_of(node, graph.inputs_of(node)), _adds(node.op), device.target.native
    return None if device.kernels.inverted_residual_takes(*how) else NOT_SOONER


def _no_block(node: Node, graph: Graph) -> str | None:
    if graph.inputs_of(node)[0].storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return not_compiled(node, graph, *map(node.op.activation, _THREE))


def _pack_block(node: Node, graph: Graph, device: Any) -> Buffer:
    how = *_block_of(node, graph.inputs_of(node)), compute_dtype_of(node)
    nbytes = device.kernels.inverted_residual_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "inverted_residual_pack", *how, positions=(1, 2, 3))


def _make_block(call: Call) -> Bound:
    return call.native(
        "inverted_residual",
        call.input_addresses[0],
        call.prepared.address,
        call.output_addresses[0],
        *_block_of(call.node, call.inputs),
        _adds(call.node.op),
        compute_dtype_of(call.node),
        *_epilogues(call, call.input_addresses[4:]),
    )


# ---- gates ----


def _gates_of(node: Node, images: Value, first: Value) -> tuple[Any, int, Any]:
    """Returns the shape of the images, the hidden sums and what weights are kept as."""
    n, h, w, c = images.shape
    return _cpu.AxisShape(n, h * w, c), first.shape[0], compute_dtype_of(node)


def _no_scaling_there(node: Node, graph: Graph, device: Any) -> str | None:
    """In tf32, and where others made the means, it takes longer than what it saves."""
    x, first = graph.inputs_of(node)[:2]
    shape, hidden, _ = _gates_of(node, x, first)
    if x.storage_dtype != node.op.compute_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    if reason := _no_gates(node, graph, scaled=True):
        return reason
    takes = device.kernels.squeeze_excite_scales(shape, hidden, device.target.native)
    return None if takes else NOT_SOONER


def _no_gates_there(node: Node, graph: Graph, device: Any) -> str | None:
    return _no_gates(node, graph)


def _is_given(value: str, graph: Graph) -> bool:
    """Whether a value is an input of the caller's, at any address, in another shape perhaps."""
    while (maker := graph.producers.get(value)) is not None and maker.op.kind == "reshape":
        value = maker.inputs[0]
    return maker is None


def _no_gates(node: Node, graph: Graph, scaled: bool = False) -> str | None:
    op = node.op
    if (op["scale"] is not None) != scaled:
        return "expected images to be multiplied" if scaled else "expected factors alone"
    if scaled and node.inputs[5] is not None:
        return "expected no means: images are read for them"
    if not is_clamp(op["clamp"]):
        return f"expected relu or clip after the product, found {op['clamp'].kind}"
    if _is_given(node.inputs[0], graph):
        return AT_ANY_ADDRESS
    weights = replace(node, inputs=node.inputs[:5])
    return not_compiled(weights, graph, *map(op.activation, ("first", "second")))


def _pack_gates(node: Node, graph: Graph, device: Any) -> Buffer:
    how = _gates_of(node, *graph.inputs_of(node)[:2])
    nbytes = device.kernels.squeeze_excite_packed(*how, 0)
    return pack_on(node, graph, device, nbytes, "squeeze_excite_pack", *how, positions=(1, 2))


def _make_gates(call: Call) -> Bound:
    op, gates = call.node.op, _gates_of(call.node, *call.inputs[:2])
    *biases, means = call.input_addresses[3:]
    read, epilogues = (*input_values(call), call.prepared.address), _epilogues(call, biases)
    out = call.output_addresses[0]
    if op["scale"] is not None:
        clip = _cpu.Activation(_cpu.UnaryFunction.clip, *limits(op["clamp"]))
        last = 0, *NO_IMAGES, clip, call.overflow
        return call.native("squeeze_excite_scale", *read, out, *gates, *epilogues, *last)
    parts = call.inputs[5].shape[1] if means else 0
    return call.native("squeeze_excite", *read, means, parts, out, *gates, *epilogues)


ROWS = [
    *(
        Kernel(
            op, name, "cuda", _make_pair, requires=WGMMA,
            why_not=_no_pair, why_not_fuse=_no_pair_there,
            prepare=_pack_pair,
            packs=(2, 3, 4, 5), pitched=(None, 0, 1), stores=storing(None, 0, 1),
            forms=_forms_of_pairs, reads_early=lambda _: True,
        )
        for op, name in (("conv2d_sum", "wgmma_sum"), ("conv2d_beside", "wgmma_beside"))
    ),
    Kernel(
        "expand_depthwise", "expand_depthwise", "cuda", _make_expansion, requires=CLUSTERS_OF_HOPPER,
        why_not=_no_expansion,
        why_not_fuse=_no_expansion_there, prepare=_pack_expansion, packs=(1, 2), early=(3, 4),
        stores=storing(None, 0), same_storage=True,
    ),
    Kernel(
        "bottleneck", "bottleneck", "cuda", _make_bottleneck, requires=WGMMA,
        why_not=_no_bottleneck,
        why_not_fuse=_no_bottleneck_there, prepare=_pack_bottleneck, packs=(1, 2, 6), early=(3, 4, 7),
        stores=storing(None, 0, 5), same_storage=True,
    ),
    Kernel(
        "bottleneck", "mlp", "cuda", _make_mlp, requires=WGMMA,
        why_not=_no_mlp,
        why_not_fuse=_no_mlp_there, prepare=_pack_mlp, packs=(1, 2), early=(3, 4),
        stores=storing(None, 0, 5), same_storage=True,
    ),
    Kernel(
        "conv2d_pool", "wgmma_pool", "cuda", _make_pooled, requires=WGMMA,
        why_not=_no_pooled,
        why_not_fuse=_no_pool_there, prepare=_pack_pooled, packs=(1,), early=(2,), pitched=(0,),
        stores=storing(None, 0), same_storage=True, forms=_forms_of_pairs,
    ),
    Kernel(
        "conv2d_pool", "stem_pool", "cuda", _make_pooled_stem, requires=WGMMA,
        why_not=partial(_no_pooled, planar=True), why_not_fuse=partial(_no_pool_there, planar=True),
        prepare=_pack_pooled, packs=(1,), early=(2,),
        pitched=(None,), stores=storing(None),
    ),
    Kernel(
        "inverted_residual", "inverted_residual", "cuda", _make_block, requires=CLUSTERS_OF_HOPPER,
        why_not=_no_block,
        why_not_fuse=_no_block_there, prepare=_pack_block, packs=(1, 2, 3), early=(4, 5, 6),
        stores=storing(None, 0), same_storage=True,
    ),
    Kernel(
        "squeeze_excite", "squeeze_excite", "cuda", _make_gates, requires=TENSOR_CORES,
        why_not=_no_gates, why_not_fuse=_no_gates_there, prepare=_pack_gates, packs=(1, 2), early=(3, 4),
        stores=storing(0),
    ),
    Kernel(
        "squeeze_excite", "squeeze_excite_scale", "cuda", _make_gates, requires=HOPPER,
        why_not=partial(_no_gates, scaled=True), why_not_fuse=_no_scaling_there, prepare=_pack_gates,
        packs=(1, 2), early=(3, 4), stores=storing(None, 0), same_storage=True,
    ),
]  # fmt: skip

_RANKED = {row.op: ranked(row) for row in ROWS if row.forms is _forms_of_pairs}
