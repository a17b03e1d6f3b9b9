"""The kernels of operators that read between pixels."""

from __future__ import annotations

import math
from typing import Any

from ..graph.graph import Graph, Node
from .kernel import Bound, Call, Kernel, on_both
from .native import _cpu
from .numpy import array_at


def _grid_why_not(node: Node, graph: Graph) -> str | None:
    x, grid = graph.inputs_of(node)
    rank = len(x.shape) - 2
    if rank > (2 if node.op.mode == "cubic" else 3):
        return f"expected images of up to 3 dimensions, or 2 for cubic, found {rank}"
    if grid.dtype != "float32":
        return f"expected a grid of float32, found {grid.dtype}"
    if 0 in x.shape[2:]:
        return "expected pixels to read, found none"
    return None


def _grid_shape(node: Node, x: Any, grid: Any) -> Any:
    images, channels, *sizes = x.shape
    op, rank = node.op, len(sizes)
    return _cpu.GridSampleShape(
        images, channels, *[1] * (3 - rank), *sizes, rank, math.prod(grid.shape[1:-1]),
        getattr(_cpu.GridMode, op.mode), getattr(_cpu.GridPadding, op.padding_mode),
        op.align_corners,
    )  # fmt: skip


def _make_grid(call: Call) -> Bound:
    shape = _grid_shape(call.node, *call.inputs)
    return call.native("grid_sample", *call.input_addresses, call.output_addresses[0], shape)


def _regions_why_not(node: Node, graph: Graph) -> str | None:
    _, rois, images = graph.inputs_of(node)
    if (rois.dtype, images.dtype) != ("float32", "int64"):
        return (
            f"expected regions of float32 and images of int64, found {rois.dtype}, {images.dtype}"
        )
    return None


def _make_regions(call: Call) -> Bound:
    op, (x, rois, images) = call.node.op, call.inputs
    shape = _cpu.RoiAlignShape(
        *x.shape, rois.shape[0], op.output_height, op.output_width, op.sampling_ratio, op.spatial_scale,
        op.mode == "max", op.half_pixel,
    )  # fmt: skip
    function, arguments = call.native(
        "roi_align", *call.input_addresses, call.output_addresses[0], shape
    )

    def checked(*given: Any) -> None:
        op.check(array_at(given[1], rois), array_at(given[2], images), x.shape[0])
        function(*given)

    return checked, arguments


ROWS = [
    *on_both("grid_sample", "grid_sample", _make_grid, why_not=_grid_why_not),
    Kernel("roi_align", "roi_align", "cpu", _make_regions, why_not=_regions_why_not),
]
