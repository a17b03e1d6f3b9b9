"""CUDA's kernels of a convolution and the max pool over its result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ... import _cpu
from ...devices import Buffer
from ...graph.graph import Graph, Node, Value
from ...operators.channels_last import MaxPool2dNhwc
from ..arguments import epilogue, input_images, launch, output_images
from ..cpu.channels_last import not_compiled, shape_of
from ..kernel import Bound, Call, Kernel, storing
from .channels_last import compute_dtype_of, convolution_of, pack_on, ranked
from .fusing import NOT_SOONER, ONLY_CLAMPS, images_of, is_clamp, not_in_16_bits
from .requirements import WGMMA


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
    images = images_of(node, graph, *() if planar else (0,))
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


def _forms(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    return _RANKED


ROWS = [
    Kernel(
        "conv2d_pool", "wgmma_pool", "cuda", _make_pooled, requires=WGMMA,
        why_not=_no_pooled,
        why_not_fuse=_no_pool_there, prepare=_pack_pooled, packs=(1,), early=(2,), pitched=(0,),
        stores=storing(None, 0), same_storage=True, forms=_forms,
    ),
    Kernel(
        "conv2d_pool", "stem_pool", "cuda", _make_pooled_stem, requires=WGMMA,
        why_not=partial(_no_pooled, planar=True), why_not_fuse=partial(_no_pool_there, planar=True),
        prepare=_pack_pooled, packs=(1,), early=(2,),
        pitched=(None,), stores=storing(None),
    ),
]  # fmt: skip

_RANKED = ranked(ROWS[0])
