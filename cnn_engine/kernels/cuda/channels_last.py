"""CUDA's kernels over images whose channels lie side by side, [N, H, W, C], and over rows of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ... import _cpu
from ...devices import Buffer
from ...errors import UnsupportedError
from ...graph.graph import Graph, Node, Value
from .. import pooling
from ..arguments import (
    epilogue,
    input_images,
    input_values,
    launch,
    output_images,
    output_values,
    prologue,
)
from ..cpu.channels_last import (
    has_prologue,
    make_pool,
    not_constant,
    shape_of,
)
from ..gemm import linear_shape
from ..kernel import Bound, Call, Kernel, first_computed, storage_of, storing, upload
from .requirements import TENSOR_CORES, WGMMA

#: Rows up to which a product is bound by how fast its weights are read.
FEW_ROWS = 8

#: Weights in 16 bits from which several rows are products on tensor cores, whose copies keep memory busier;
#: one row has bulk copies too (``linear_rows_stream.cuh``).
MANY_WEIGHTS = 1 << 24

#: Types of 16 bits that values may lie in memory in.
HALVES = ("float16", "bfloat16")

#: The largest number in float16.
FLOAT16 = float(np.finfo(np.float16).max)


def compute_dtype_of(node: Node) -> Any:
    return getattr(_cpu.ElementType, node.op.compute_dtype)


def convolution_of(node: Node) -> Node:
    """Returns the convolution of a region that is one and more."""
    return replace(node, op=node.op["convolution"])


def own_type(node: Node) -> str:
    """Returns the storage type of values that are stored in the type in which a node multiplies."""
    return node.op.compute_dtype if node.op.compute_dtype in HALVES else ""


def pack_on(
    node: Node,
    graph: Graph,
    device: Any,
    nbytes: int,
    function: str,
    *how: Any,
    positions: tuple[int, ...] = (1,),
) -> Buffer:
    """Returns a node's weights as a compiled function packs them, complete, on the device."""
    weights = [
        graph.constants.get(node.inputs[place]) for place in positions
    ]  # None: there are none
    most = max(float(np.abs(one).max(initial=0.0)) for one in weights if one is not None)
    if node.op.compute_dtype == "float16" and most > FLOAT16:
        raise UnsupportedError(
            f"dtype: float16: node {node.name}: expected weights of at most "
            f"{FLOAT16:.0f}, found {most:g}; bfloat16 and tf32 have room for them"
        )
    packed = device.allocate(nbytes)
    sources = [None if weight is None else upload(weight, device) for weight in weights]
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


#: Inputs that wgmma's read before the kernels before them have ended (see Kernel.early): bias and shift.
_EARLY = (2, 5)


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


def may_be_the_callers(value: str, graph: Graph) -> bool:
    """Whether a value may lie in the caller's memory, at any address: in an input or an output."""
    names = [value]
    while (maker := graph.producers.get(names[-1])) is not None and maker.op.kind == "reshape":
        names.append(maker.inputs[0])
    for name in names:
        for user in graph.consumers[name]:
            if user.op.kind in ("reshape", "concat") and user.outputs[0] not in names:
                names += user.outputs
    return not {*graph.outputs, *(given.name for given in graph.inputs)}.isdisjoint(names)


def compiled_for(node: Node, graph: Graph, device: Any) -> str:
    """Returns the compiled function that runs a product: GPUs that have wgmma have their own."""
    shape, planar = _shape(node, *graph.inputs_of(node)[:2])
    if not WGMMA.met_by(device.target):
        return "conv2d_nhwc"
    kernels, how = device.kernels, (shape, compute_dtype_of(node), device.target.native)
    x, residual = graph.values[node.inputs[0]], (*node.inputs[3:4], None)[0]
    wide = node.op.compute_dtype in ("float32", "tf32")
    if first_computed(node, graph, _EARLY) is not None:
        return "conv2d_nhwc"
    if planar:
        alone = residual is None and not has_prologue(node)
        if alone and kernels.conv2d_nhwc_wgmma_planar_takes(*how):
            return "conv2d_nhwc_wgmma_planar"
    elif (
        x.storage_dtype == ("" if wide else node.op.compute_dtype)
        and kernels.conv2d_nhwc_wgmma_takes(*how)
        and not (wide and may_be_the_callers(node.inputs[0], graph))
    ):
        return "conv2d_nhwc_wgmma"
    return "conv2d_nhwc"


def _pack(node: Node, graph: Graph, device: Any) -> _Weights:
    shape, planar = _shape(node, *graph.inputs_of(node)[:2])
    function, compute_dtype = compiled_for(node, graph, device), compute_dtype_of(node)
    how = (shape, planar, compute_dtype) if function == "conv2d_nhwc" else (shape, compute_dtype)
    nbytes = getattr(device.kernels, f"{function}_packed")(*how, 0)
    packed = pack_on(node, graph, device, nbytes, f"{function}_pack", *how)
    return _Weights(packed.address, packed.nbytes, packed.owner, function)


def _reads_early(prepared: _Weights) -> bool:
    return prepared.function == "conv2d_nhwc_wgmma"


def _shows(node: Node, graph: Graph, device: Any) -> str:
    return _FUNCTIONS[compiled_for(node, graph, device)]


def _workspace(node: Node, graph: Graph, device: Any, threads: int) -> int:
    if compiled_for(node, graph, device) != "conv2d_nhwc":
        return 0
    x, weight = graph.inputs_of(node)[:2]
    how = *_shape(node, x, weight), compute_dtype_of(node), storage_of(x)
    return device.kernels.conv2d_nhwc_workspace(*how, 0)


def _make(call: Call, rank: int = 0) -> Bound:
    op, (x, weight, _, _, scale, _) = call.node.op, (*call.inputs, *[None] * 4)[:6]
    bias, _, factors, shift = (*call.input_addresses[2:], 0, 0, 0, 0)[:4]
    (shape, planar), function = _shape(call.node, x, weight), call.prepared.function
    after = epilogue(op.activation, bias, input_images(call, 3), call.overflow)
    how = call.prepared.address, *output_images(call), shape, compute_dtype_of(call.node)
    if function == "conv2d_nhwc_wgmma_planar":
        return call.native(function, call.input_addresses[0], *how, *after)
    read = input_images(call, 0)
    if planar or op.kind == "linear":  # whose x may have any rank: a row is an image of one pixel
        read = read[0], 0 if planar else weight.shape[1], read[2]
    per_image = scale is not None and len(scale.shape) == 2
    floor = None if op.kind == "linear" else op.floor
    before = prologue(factors, shift, per_image, floor)
    return call.native(function, *read, *how, *before, *after, *launch(call, rank))


def _not_depthwise(node: Node, graph: Graph) -> str | None:
    filters, channels = graph.values[node.inputs[1]].shape[:2]
    if node.op.planar or node.op.groups == 1 or channels != 1 or filters != node.op.groups:
        return "expected one channel and one filter a group"
    if has_prologue(node):
        return "expected nothing before the convolution"
    return not_constant(node, graph)


def pack_channels(node: Node, graph: Graph, device: Any) -> Buffer:
    """Returns the weights of a depthwise convolution, complete, on the device."""
    if node.op.kind != "conv2d_nhwc":
        node = convolution_of(node)
    x, weight = graph.inputs_of(node)[:2]
    shape = shape_of(node, x, weight)
    nbytes = x.item_bytes * weight.size
    return pack_on(node, graph, device, nbytes, "conv2d_nhwc_depthwise_pack", shape, storage_of(x))


def _make_depthwise(call: Call) -> Bound:
    bias, residual = (*call.input_addresses[2:], 0)[0], input_images(call, 3)
    return call.native(
        "conv2d_nhwc_depthwise",
        *input_images(call, 0),
        call.prepared.address,
        *output_images(call),
        shape_of(call.node, *call.inputs[:2]),
        *epilogue(call.node.op.activation, bias, residual, call.overflow),
    )


# ---- rows of features, and images of one place ----


def _not_rows(node: Node, graph: Graph) -> str | None:
    x, weight, *_ = graph.inputs_of(node)
    if node.op.compute_dtype is None:
        return "expected what operands may be rounded to, as auto says for models"
    if node.op.kind == "conv2d_nhwc":
        one = x.shape[1:3] == weight.shape[2:] == (1, 1) and not node.op.planar
        if not one or node.op.groups > 1 or any(node.op.padding):
            return "expected images of one place"
        if has_prologue(node) or any(name is not None for name in node.inputs[3:4]):
            return "expected nothing before the product, and nothing added to it"
    if x.shape[0] > FEW_ROWS:
        return f"expected at most {FEW_ROWS} rows, found {x.shape[0]}"
    if x.shape[0] > 1 and weight.size >= MANY_WEIGHTS and node.op.compute_dtype in HALVES:
        return f"expected one row, or fewer than {MANY_WEIGHTS} weights, found {weight.size}"
    return not_constant(node, graph)


def _pack_rows(node: Node, graph: Graph, device: Any) -> Buffer:
    shape, compute_dtype = linear_shape(*graph.inputs_of(node)[:2]), compute_dtype_of(node)
    nbytes = device.kernels.linear_rows_packed(shape, compute_dtype, 0)
    return pack_on(node, graph, device, nbytes, "linear_rows_pack", shape, compute_dtype)


def _make_rows(call: Call) -> Bound:
    bias = (*call.input_addresses[2:], 0)[0]
    return call.native(
        "linear_rows",
        *input_values(call),
        call.prepared.address,
        *output_values(call),
        linear_shape(*call.inputs[:2]),
        compute_dtype_of(call.node),
        *epilogue(call.node.op.activation, bias, overflow=call.overflow),
    )


def _not_product(node: Node, graph: Graph) -> str | None:
    if node.op.compute_dtype is None:
        return "expected what operands may be rounded to, as auto says for models"
    return not_constant(node, graph)


def _make_pool(call: Call) -> Bound:
    function, arguments = make_pool(call)
    return function, [*arguments[:-1], storage_of(call.inputs[0]), arguments[-1]]


def _row(op: str, name: str, make: Any, why_not: Any, prepare: Any, **options: Any) -> Kernel:
    options |= {"requires": TENSOR_CORES, "why_not": why_not, "prepare": prepare, "packs": (1,)}
    return Kernel(op, name, "cuda", make, **options)


#: What a convolution reads and writes that may be columns of wider rows, or lie in memory in 16 bits.
_IMAGES = (None, 0, 3)


def _stored_images(node: Node, graph: Graph) -> tuple[int | None, ...]:
    """Returns the positions of a convolution that may be stored: [N, C, H, W] is read as float32."""
    return _IMAGES[:1] + _IMAGES[2:] if node.op.planar else _IMAGES


#: Of the tiles and splits of a product, those that --tune measures beside the first.
RANKS = (1, 2, 3)


def ranked(row: Kernel) -> Sequence[Kernel]:
    """Returns a product with the tiles and splits that the model of their times says are next."""
    return [replace(row, form=f"rank {rank}", make=partial(row.make, rank=rank)) for rank in RANKS]


def _forms(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    planar = compiled_for(node, graph, device) == "conv2d_nhwc_wgmma_planar"
    return () if planar else _RANKED[node.op.kind]


ROWS = [
    _row(
        "conv2d_nhwc", "rows", _make_rows, _not_rows, _pack_rows, early=(2,), stores=storing(None, 0),
    ),
    _row(
        "conv2d_nhwc", "depthwise", _make_depthwise, _not_depthwise, pack_channels,
        early=(2,), pitched=_IMAGES, stores=storing(*_IMAGES), same_storage=True,
    ),
    _row(
        "conv2d_nhwc", "implicit_gemm", _make, not_constant, _pack, packed_for=compiled_for,
        workspace=_workspace, shows=_shows, pitched=_IMAGES, stores=_stored_images, forms=_forms,
        reads_early=_reads_early,
    ),
    _row(
        "linear", "rows", _make_rows, _not_rows, _pack_rows, early=(2,), stores=storing(None, 0),
    ),
    _row(
        "linear", "implicit_gemm", _make, _not_product, _pack, packed_for=compiled_for,
        workspace=_workspace, shows=_shows, stores=storing(None, 0), forms=_forms,
    ),
    *(
        Kernel(
            op, "channels_last", "cuda", _make_pool, pitched=(None, 0), stores=storing(None, 0),
            same_storage=True, **more,
        )
        for op, more in (
            ("max_pool2d_nhwc", {"why_not": pooling.why_not}), ("average_pool2d_nhwc", {}),
        )
    ),
]  # fmt: skip

_RANKED = {row.op: ranked(row) for row in ROWS if row.forms is _forms}
