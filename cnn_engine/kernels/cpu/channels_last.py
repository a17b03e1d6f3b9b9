"""CPU kernels for channels-last (NHWC) images."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ...operators.channels_last import TO_FIRST
from ...operators.unary import Unary
from ...target import Requires
from ...types import ITEM_BYTES
from .. import pooling
from ..convolution import nothing_to_read
from ..kernel import Bound, Call, Kernel, packed, upload
from ..native import _cpu

#: Outputs from which Winograd's tiles of 4x4 are used, and of 2x2; filters that fill its lanes, and channels
#: from which it is faster: of fewer, sums are so short that many are outside its bound.
TILES_OF_4, TILES_OF_2, LANES, CHANNELS = 14, 4, 16, 32
#: Outputs from which tiles of 4x4 are used where so large a part of them is outputs: 3 of 4.
FULL_TILES_OF_4, FULL = 7, (3, 4)

#: Channels of groups, and terms of a sum, up to which vectors hold several groups of as many filters.
GROUP, GROUP_TERMS = 8, 160

WINOGRAD = (_cpu.Conv2dMethod.winograd2, _cpu.Conv2dMethod.winograd4)


def shape_of(node: Node, x: Value, weight: Value) -> Any:
    """Returns the compiled functions' shape of a convolution.

    A column of positions is a row: kernels compute several positions of a row at once.
    """
    op, (filters, _, *kernel) = node.op, weight.shape
    images, channels, *sizes = x.shape if op.planar else _sizes(x)
    top, left, bottom, right = op.padding
    ends, across = ((top, left), (bottom, right)), slice(None)
    if kernel[0] > 1 and kernel[1] == 1 and left == right == 0 and sizes[1] == 1:
        across = slice(None, None, -1)
    padding = (size for end in ends for size in end[across])
    return _cpu.Conv2dShape(
        images, channels, *sizes[across], filters, *kernel[across], *op.stride[across], *padding,
        *op.dilation[across], op.groups,
    )  # fmt: skip


def method(node: Node, graph: Graph) -> Any:
    """Returns how a convolution is computed, by its shape and position alone: the same for every batch.

    Winograd's tiles of 4x4 take 2.25 multiplications for 9, and those of 2x2 take 4, but both move more data,
    and need enough positions and channels to fill tiles and vectors. With their points and short sums, and
    small tiles in a stem, logits are within twice ONNX Runtime's error (docs/explanation/numerics.md). What a
    tanh passes on is the small sums of large products: before one tiles are small, too.
    """
    op, methods = node.op, _cpu.Conv2dMethod
    filters, channels, *kernel = graph.values[node.inputs[1]].shape
    if op.planar:
        return methods.planar
    if op.groups > 1 and not has_prologue(node):
        narrow = channels * op.groups == filters and channels <= GROUP
        if channels == 1 or (narrow and channels * math.prod(kernel) <= GROUP_TERMS):
            return methods.depthwise
    rows, columns = graph.values[node.outputs[0]].shape[1:3]
    plain = op.groups == 1 and op.stride == (1, 1) and op.dilation == (1, 1)
    if (
        not plain
        or kernel != [3, 3]
        or has_prologue(node)
        or channels < CHANNELS
        or filters < LANES
    ):
        return methods.direct
    tanh = op.activation is not None and op.activation.function == "tanh"
    if _has_tiles_of_4(rows, columns) and not (op.stem or tanh):
        return methods.winograd4
    return methods.winograd2 if min(rows, columns) >= TILES_OF_2 else methods.direct


def _packing(node: Node, graph: Graph, device: Any, how: Any = None) -> tuple[Any, int]:
    """Returns what the layout of packed weights depends on: few positions need another one than many."""
    how, shape = how or method(node, graph), shape_of(node, *graph.inputs_of(node)[:2])
    return how, _cpu.conv2d_nhwc_packed(shape, how)


def _has_tiles_of_4(rows: int, columns: int) -> bool:
    least = min(rows, columns)
    if not FULL_TILES_OF_4 <= least < TILES_OF_4:
        return least >= TILES_OF_4
    tiles = -(-rows // 4) * -(-columns // 4)
    return FULL[1] * rows * columns >= FULL[0] * 16 * tiles


def has_prologue(node: Node) -> bool:
    """Whether a convolution's input is scaled, shifted or clamped as it is read."""
    return node.op.floor is not None or any(name is not None for name in node.inputs[4:])


def not_constant(node: Node, graph: Graph) -> str | None:
    """Returns why no kernel here can run a convolution: computed weights, or its epilogue."""
    if node.inputs[1] not in graph.constants:
        return "expected constant weights, which are packed once"
    activation = node.op.activation
    if activation is not None and not hasattr(_cpu.UnaryFunction, activation.function):
        return f"expected a function that kernels have after the sum, found {activation.kind}"
    return nothing_to_read(node, graph)


def not_compiled(node: Node, graph: Graph, *functions: Unary | None) -> str | None:
    """Returns why no kernel can run a node of several products: computed weights, or other functions."""
    if any(name is not None and name not in graph.constants for name in node.inputs[1:]):
        return "expected constant weights, which are packed once"
    for function in functions:
        if function is not None and not hasattr(_cpu.UnaryFunction, function.function):
            return f"expected functions that kernels have after the sum, found {function.kind}"
    return None


def _not_winograd(node: Node, graph: Graph) -> str | None:
    if method(node, graph) not in WINOGRAD:
        return "expected a kernel of 3x3 with a stride of 1 over enough positions and channels"
    return not_constant(node, graph)


def _not_bfloat16(node: Node, graph: Graph) -> str | None:
    if node.op.compute_dtype != "bfloat16":
        return "expected operands that may be rounded to bfloat16"
    channels = graph.values[node.inputs[1]].shape[1]
    how = method(node, graph)
    if how in WINOGRAD or node.op.planar or (node.op.groups > 1 and channels == 1):
        return "expected a convolution that is computed directly"
    if node.op.groups > 1 and channels % 2:
        return "expected groups of an even number of channels"
    return not_constant(node, graph)


def _pack_bfloat16(node: Node, graph: Graph, device: Any) -> Buffer:
    shape = shape_of(node, *graph.inputs_of(node)[:2])

    def fill(address: int) -> None:
        weight = upload(graph.constants[node.inputs[1]], device)
        _cpu.conv2d_nhwc_bfloat16_pack(weight.address, address, shape)

    return packed(device, ITEM_BYTES["float32"] * _cpu.conv2d_nhwc_bfloat16_packed(shape), fill)


def _workspace_bfloat16(node: Node, graph: Graph, device: Any, threads: int) -> int:
    shape = shape_of(node, *graph.inputs_of(node)[:2])
    return _cpu.conv2d_nhwc_bfloat16_workspace(shape, threads)


@dataclass(frozen=True)
class _Packed:
    """The weights of a convolution as its method reads them."""

    method: Any
    buffer: Buffer


def _pack(node: Node, graph: Graph, device: Any, how: Any = None) -> _Packed:
    how, shape = how or method(node, graph), shape_of(node, *graph.inputs_of(node)[:2])
    return _Packed(how, _packed(graph.constants[node.inputs[1]], shape, how, device))


def _packed(array: np.ndarray, shape: Any, how: Any, device: Any) -> Buffer:
    def fill(address: int) -> None:
        weight = upload(array, device)
        _cpu.conv2d_nhwc_pack(weight.address, address, shape, how, 1)

    return packed(device, ITEM_BYTES["float32"] * _cpu.conv2d_nhwc_packed(shape, how), fill)


def _workspace(node: Node, graph: Graph, device: Any, threads: int, how: Any = None) -> int:
    shape = shape_of(node, *graph.inputs_of(node)[:2])
    return _cpu.conv2d_nhwc_workspace(shape, how or method(node, graph), threads)


def _forms(node: Node, graph: Graph, device: Any) -> list[Kernel]:
    """Returns a convolution in the ways that are not the one which its shape says."""
    own = method(node, graph)
    if own not in WINOGRAD:
        return []
    return [_FORMS[how] for how in (*WINOGRAD, _cpu.Conv2dMethod.direct) if how != own]


def _make(call: Call) -> Bound:
    return _bound(call, "conv2d_nhwc", call.prepared.buffer, call.prepared.method)


def _make_bfloat16(call: Call) -> Bound:
    return _bound(call, "conv2d_nhwc_bfloat16", call.prepared)


def _bound(call: Call, function: str, packed: Buffer, *method: Any) -> Bound:
    op, (x, weight, _, _, scale, _) = call.node.op, (*call.inputs, *[None] * 4)[:6]
    bias, added, factors, shift = (*call.input_addresses[2:], 0, 0, 0, 0)[:4]
    floor = -math.inf if op.floor is None else op.floor
    by_image = scale is not None and len(scale.shape) == 2
    return call.native(
        function,
        call.input_addresses[0],
        packed.address,
        bias,
        added,
        factors,
        shift,
        call.output_addresses[0],
        call.workspace,
        shape_of(call.node, x, weight),
        pitches_of(call),
        *method,
        by_image,
        floor,
        *activation_of(op),
    )


def pitches_of(call: Call) -> Any:
    """Returns the pitches of a convolution's images."""
    op, (x, weight, _, residual) = call.node.op, (*call.inputs, None, None)[:4]
    own = weight.shape[1] * op.groups if op.planar else call.pitch(x)
    return _cpu.Conv2dPitches(own, call.pitch(call.outputs[0]), call.pitch(residual))


def activation_of(op: Any) -> tuple[Any, float, float]:
    """Returns the function that follows a sum, with its two numbers: clip that clips nothing is none."""
    return function_of(op.activation)


def function_of(record: Any) -> tuple[Any, float, float]:
    """Returns a function of the kernels, with its two numbers, for a record or None."""
    if record is None:
        return _cpu.UnaryFunction.clip, -math.inf, math.inf
    function = getattr(_cpu.UnaryFunction, record.function)
    return function, float(record.alpha), float(record.beta)


def _conv2d(name: str, why_not: Any) -> Kernel:
    return Kernel(
        "conv2d_nhwc", name, "cpu", _make, why_not=why_not, prepare=_pack, packed_for=_packing, packs=(1,),
        workspace=_workspace, pitched=(None, 0, 3), forms=_forms,
    )  # fmt: skip


# ---- expansions ----


def expansion_of(region: Any, x: Value, first: Value, second: Value) -> tuple[Any, Any]:
    """Returns the compiled functions' shapes of both convolutions of an expansion."""
    op, channels, (n, c, h, w) = region["second"], first.shape[0], _sizes(x)
    return (
        _cpu.Conv2dShape(n, c, h, w, channels, 1, 1, 1, 1, 0, 0),
        _cpu.Conv2dShape(
            n, channels, h, w, channels, *second.shape[2:], *op.stride, *op.padding, *op.dilation,
            channels,
        ),
    )  # fmt: skip


def _no_expansion(node: Node, graph: Graph) -> str | None:
    functions = map(node.op.activation, ("first", "second"))
    return not_compiled(node, graph, *functions) or nothing_to_read(node, graph)


def _pack_expansion(node: Node, graph: Graph, device: Any) -> tuple[Buffer, Buffer]:
    methods = _cpu.Conv2dMethod.direct, _cpu.Conv2dMethod.depthwise
    first, second = (
        _packed(graph.constants[name], shape, how, device)
        for name, shape, how in zip(
            node.inputs[1:3],
            expansion_of(node.op, *graph.inputs_of(node)[:3]),
            methods,
            strict=True,
        )
    )
    return first, second


def _expansion_workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    _, shape = expansion_of(node.op, *graph.inputs_of(node)[:3])
    return _cpu.expand_depthwise_workspace(shape, threads)


def _make_expansion(call: Call) -> Bound:
    op, x, (y, *mean) = call.node.op, call.inputs[0], call.outputs
    _, shape = expansion_of(op, *call.inputs[:3])
    packed = (buffer.address for buffer in call.prepared)
    return call.native(
        "expand_depthwise",
        call.input_addresses[0],
        *packed,
        *call.input_addresses[3:],
        *(*call.output_addresses, 0)[:2],
        call.workspace,
        shape,
        x.shape[3],
        _cpu.Conv2dPitches(call.pitch(x), call.pitch(y)),
        call.pitch(mean[0]) if mean else 0,
        *function_of(op.activation("first")),
        *function_of(op.activation("second")),
    )


def _sizes(x: Value) -> tuple[int, ...]:
    """Returns the images' N, C, H and W."""
    return tuple(x.shape[axis] for axis in TO_FIRST)


def make_pool(call: Call) -> Bound:
    """Returns the call of a pool."""
    op, (x,), (y,) = call.node.op, call.inputs, call.outputs
    window = (*op.kernel, *op.stride, *op.padding, *op.dilation)
    pitches = call.pitch(x), call.pitch(y)
    if op.kind == "max_pool2d_nhwc":
        shape = _cpu.MaxPool2dShape(*_sizes(x), *window)
        return call.native(
            op.kind, call.input_addresses[0], call.output_addresses[0], shape, *pitches
        )
    shape = _cpu.AveragePool2dShape(*_sizes(x), *window, *op.extra)
    return call.native(
        op.kind,
        call.input_addresses[0],
        call.output_addresses[0],
        shape,
        *pitches,
        op.count_include_pad,
    )


_WINOGRAD = _conv2d("winograd", _not_winograd)

ROWS = [
    Kernel(
        "expand_depthwise",
        "expand_depthwise",
        "cpu",
        _make_expansion,
        why_not=_no_expansion,
        prepare=_pack_expansion,
        packs=(1, 2),
        workspace=_expansion_workspace,
        pitched=(None, 0),
    ),
    _WINOGRAD,
    Kernel(
        "conv2d_nhwc",
        "bfloat16",
        "cpu",
        _make_bfloat16,
        requires=Requires(frozenset({"avx512_bf16_fast"})),
        why_not=_not_bfloat16,
        prepare=_pack_bfloat16,
        packs=(1,),
        workspace=_workspace_bfloat16,
        pitched=(None, 0, 3),
    ),
    _conv2d("channels_last", not_constant),
    Kernel(
        "max_pool2d_nhwc",
        "channels_last",
        "cpu",
        make_pool,
        why_not=pooling.why_not,
        pitched=(None, 0),
    ),
    Kernel("average_pool2d_nhwc", "channels_last", "cpu", make_pool, pitched=(None, 0)),
]

_FORMS = {
    how: replace(
        _WINOGRAD,
        form=how.name,
        prepare=partial(_pack, how=how),
        packed_for=partial(_packing, how=how),
        workspace=partial(_workspace, how=how),
    )
    for how in (*WINOGRAD, _cpu.Conv2dMethod.direct)
}
