"""The kernels of operators that read or write where computed indices say, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import InputError
from ..graph.graph import Graph, Node, Value
from ..operators.operator import axis_in
from .kernel import Bound, Call, Kernel
from .native import _cpu
from .strided import MOST, row_major

#: (dimensions of the rows, x's steps for each, the indices' steps for each, sizes and steps that a row's
#: columns count, elements of a run).
Rows = tuple[list[int], list[int], list[int], list[int], list[int], int]


def _rows(node: Node, x: Value, indices: Value) -> Rows:
    op, steps = node.op, row_major(x.shape)
    if op.kind in ("gather_elements", "scatter_elements"):
        axis = axis_in(op.axis, len(x.shape))
        starts = [0 if d == axis else step for d, step in enumerate(steps)]
        dims = list(indices.shape)
        return dims, starts, list(row_major(indices.shape)), [x.shape[axis]], [steps[axis]], 1
    if op.kind == "gather":
        axis = axis_in(op.axis, len(x.shape))
        inner = math.prod(x.shape[axis + 1 :])
        dims = [math.prod(x.shape[:axis]), indices.size]
        return dims, [x.shape[axis] * inner, 0], [0, 1], [x.shape[axis]], [inner], inner
    shared, columns = getattr(op, "batch_dims", 0), indices.shape[-1]
    rows = math.prod(indices.shape[shared:-1])
    return (
        [math.prod(x.shape[:shared]), rows], [math.prod(x.shape[shared:]), 0],
        [rows * columns, columns], list(x.shape[shared : shared + columns]),
        list(steps[shared : shared + columns]), math.prod(x.shape[shared + columns :]),
    )  # fmt: skip


def _why_not(node: Node, graph: Graph) -> str | None:
    x, indices, *updates = graph.inputs_of(node)
    if indices.dtype not in ("int32", "int64"):
        return f"expected indices of int32 or int64, found {indices.dtype}"
    if x.item_bytes not in (1, 2, 4, 8):
        return f"expected elements of 1, 2, 4 or 8 bytes, found {x.item_bytes}"
    dims, _, _, columns, *_ = _rows(node, x, indices)
    if max(len(dims), len(columns)) > MOST:
        return f"expected at most {MOST} dimensions, found {max(len(dims), len(columns))}"
    if updates and node.op.reduction != "none" and x.dtype != "float32":
        return f"expected float32 to join, found {x.dtype}"
    return None


def _make(call: Call) -> Bound:
    x, indices, *updates = call.inputs
    dims, starts, steps, sizes, strides, run = _rows(call.node, x, indices)

    def wide(row: list[int], rest: int) -> list[int]:
        return [*row, *[rest] * (MOST - len(row))]

    shape = _cpu.IndexedShape(
        x.item_bytes, np.dtype(indices.dtype).itemsize, len(sizes), x.size, run, *wide(dims, 1),
        *wide(starts, 0), *wide(steps, 0), *wide(sizes, 1), *wide(strides, 0),
    )  # fmt: skip
    if updates:
        join = getattr(_cpu.ScatterJoin, call.node.op.reduction)
        function, arguments = call.native(
            "scatter_at", *call.input_addresses, call.output_addresses[0], shape, join
        )
    else:
        function, arguments = call.native(
            "gather_at", *call.input_addresses, call.output_addresses[0], shape
        )

    def checked(*given: Any) -> None:
        try:
            function(*given)
        except ValueError as error:  # an index, which only running shows
            raise InputError(str(error)) from None

    return checked, arguments


ROWS = [
    *(
        Kernel(op, "gather_at", "cpu", _make, dtypes=(), why_not=_why_not)
        for op in ("gather", "gather_elements", "gather_nd")
    ),
    *(
        Kernel(op, "scatter_at", "cpu", _make, dtypes=(), why_not=_why_not, in_place=True)
        for op in ("scatter_elements", "scatter_nd")
    ),
]
