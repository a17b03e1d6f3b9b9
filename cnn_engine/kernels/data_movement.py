"""The kernels of operators that move elements and change none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ..graph.graph import Graph, Node, Value
from ..operators.operator import axis_in
from ..operators.quantized import EIGHT_BITS
from .kernel import Bound, Call, Kernel, storing
from .native import _cpu
from .strided import MOST, beyond, copy_shape, keeping, repeated, row_major, together

_ITEMS = (1, 2, 4, 8)

#: The positions of any number of inputs, and the outputs.
_EVERY = (None, *range(1 << 10))

#: (shape, steps in the input, steps in the output, first positions in both) of one copy.
Copied = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]


#: The elements from one row of the last dimension to the next, by the names of values: see Call.pitches.
Pitches = Mapping[str, int]


def _transpose(op: Any, x: Value, y: Value, pitches: Pitches) -> Copied:
    steps = _steps(x, pitches)
    return y.shape, tuple(steps[axis] for axis in op.perm), _steps(y, pitches), 0, 0


def _expand(op: Any, x: Value, y: Value, pitches: Pitches) -> Copied:
    reads = repeated(x.shape, y.shape, pitches.get(x.name))
    return y.shape, reads, _steps(y, pitches), 0, 0


def _tile(op: Any, x: Value, y: Value, pitches: Pitches) -> Copied:
    split = tuple(n for pair in zip(op.repeats, x.shape, strict=True) for n in pair)
    reads = tuple(n for step in row_major(x.shape) for n in (0, step))
    return split, reads, row_major(split), 0, 0


def _slice(op: Any, x: Value, y: Value, pitches: Pitches) -> Copied:
    taken = op.bounds(x.shape)
    steps = _steps(x, pitches)
    start = sum(first * steps[axis] for axis, (first, _, _) in taken.items())
    reads = tuple(
        step * taken[axis][2] if axis in taken else step for axis, step in enumerate(steps)
    )
    return y.shape, reads, _steps(y, pitches), start if y.size else 0, 0


def _depth_to_space(op: Any, x: Value, y: Value, pitches: Pitches) -> Copied:
    n, c, h, w = x.shape
    b, rest = op.block, c // op.block**2
    split = (n, b, b, rest, h, w) if op.mode == "DCR" else (n, rest, b, b, h, w)
    return _permuted(split, op.perm)


def _space_to_depth(op: Any, x: Value, y: Value, pitches: Pitches) -> Copied:
    n, c, h, w = x.shape
    b = op.block
    return _permuted((n, c, h // b, b, w // b, b), (0, 3, 5, 1, 2, 4))


def _permuted(split: tuple[int, ...], perm: tuple[int, ...]) -> Copied:
    steps = row_major(split)
    shape = tuple(split[axis] for axis in perm)
    return shape, tuple(steps[axis] for axis in perm), row_major(shape), 0, 0


def _steps(value: Value, pitches: Pitches) -> tuple[int, ...]:
    """Returns the elements from one position of each dimension of ``value`` to the next."""
    return row_major(value.shape, pitches.get(value.name))


def _pieces(
    node: Node, inputs: list[Value], outputs: list[Value], pitches: Pitches
) -> list[Copied]:
    """Returns a copy for each output of a split, or each input of a concatenation."""
    splits = node.op.kind == "split"
    whole, parts = (inputs[0], outputs) if splits else (outputs[0], inputs)
    axis = axis_in(node.op.axis, len(whole.shape))
    steps = _steps(whole, pitches)
    copies: list[Copied] = []
    first = 0
    for part in parts:
        own = _steps(part, pitches)
        if splits:
            copies.append((part.shape, steps, own, first, 0))
        else:
            copies.append((part.shape, own, steps, 0, first))
        first += part.shape[axis] * steps[axis]
    return copies


_ONE: dict[str, Callable[[Any, Value, Value, Pitches], Copied]] = {
    "transpose": _transpose,
    "expand": _expand,
    "tile": _tile,
    "slice": _slice,
    "depth_to_space": _depth_to_space,
    "space_to_depth": _space_to_depth,
}


#: Of these, what may be columns of wider rows.
_PITCHED: dict[str, tuple[int | None, ...]] = {
    "transpose": (None, 0), "expand": (None, 0), "slice": (None, 0),
}  # fmt: skip


def _copies(
    node: Node, inputs: Any, outputs: Any, pitches: Pitches = MappingProxyType({})
) -> list[Copied]:
    if node.op.kind in _ONE:
        return [_ONE[node.op.kind](node.op, inputs[0], outputs[0], pitches)]
    return _pieces(node, inputs, outputs, pitches)


def _why_not(node: Node, graph: Graph) -> str | None:
    inputs, outputs = graph.inputs_of(node), graph.outputs_of(node)
    if (reason := odd_items(inputs[0])) is not None:
        return reason
    if node.op.kind in ("concat", "split") and len(inputs[0].shape) <= MOST:
        return None  # each part has the dimensions of the whole
    # Columns of wider rows are joined to no dimension before them.
    apart = _PITCHED.get(node.op.kind, ()) and (*inputs, *outputs)
    pitches = {value.name: value.shape[-1] + 1 for value in apart if value.shape}
    for copied in _copies(node, inputs, outputs, pitches):
        if copy_shape(inputs[0], *copied) is None:
            return f"expected at most {MOST} dimensions that cannot be joined, found more"
    return None


def odd_items(value: Value) -> str | None:
    """Returns why elements of a value cannot be moved: their size; or None."""
    size = value.item_bytes
    return None if size in _ITEMS else f"expected elements of 1, 2, 4 or 8 bytes, found {size}"


def _make(call: Call) -> Bound:
    copies = _copies(call.node, call.inputs, call.outputs, call.pitches)
    item = call.inputs[0].item_bytes
    bounds = []
    for index, copied in enumerate(copies):
        source = call.input_addresses[index if len(call.input_addresses) > 1 else 0]
        target = call.output_addresses[index if len(call.output_addresses) > 1 else 0]
        if beyond(source, copied[3] * item) == beyond(target, copied[4] * item):
            continue  # the part lies there already
        shape = copy_shape(call.inputs[0], *copied)
        bounds.append(call.native("copy_nd", source, target, shape))
    return together(bounds)


def gathered(call: Call, tables: list[np.ndarray], run: int, fill: int = 0) -> Bound:
    """Returns the call of gather by tables of offsets, which are uploaded and kept with it."""
    sizes = [len(table) for table in tables] + [1] * (MOST - len(tables))
    item = call.inputs[0].item_bytes
    shape = _cpu.GatherShape(item, len(tables), *sizes, run, fill)
    table = call.device.upload(np.concatenate(tables).astype(np.int64))
    return keeping(
        call.native(
            "gather", call.input_addresses[0], table.address, call.output_addresses[0], shape
        ),
        table,
    )


def offsets(positions: list[np.ndarray | None], shape: tuple[int, ...]) -> tuple[list, int]:
    """Returns tables of offsets for the positions that are taken along every dimension, and the run.

    Args:
        positions: None where all of a dimension is taken in order; -1 where there is nothing to take.
    """
    tables: list[np.ndarray] = []
    run = 1
    whole = 1  # elements of dimensions that are taken whole, seen so far from the end
    step = 1
    for axis in reversed(range(len(shape))):
        taken = positions[axis]
        if taken is None:
            whole *= shape[axis]
        else:
            if not tables:
                run = whole
            elif whole != 1:
                tables.insert(0, _whole(whole, step))
            tables.insert(0, np.where(taken < 0, -1, taken * step))
            whole = 1
        step *= shape[axis]
    if not tables:
        return [np.zeros(1, np.int64)], whole
    if whole != 1:
        tables.insert(0, _whole(whole, step))
    return tables, run


def _whole(count: int, size: int) -> np.ndarray:
    """Returns the offsets of ``count`` pieces of ``size`` elements in all."""
    return np.arange(count) * (size // max(count, 1))


def _pad_positions(node: Node, x: Value) -> list[np.ndarray | None]:
    rank = len(x.shape)
    return [
        node.op.positions(size, axis) if node.op.pads[axis] or node.op.pads[rank + axis] else None
        for axis, size in enumerate(x.shape)
    ]


def _make_pad(call: Call) -> Bound:
    x = call.inputs[0]
    value = np.asarray(call.node.op.value).astype(x.dtype)
    fill = int.from_bytes(value.tobytes(), "little", signed=True)
    return gathered(call, *offsets(_pad_positions(call.node, x), x.shape), fill)


def _pad_why_not(node: Node, graph: Graph) -> str | None:
    (x,) = graph.inputs_of(node)[:1]
    if len(x.shape) > MOST:
        return f"expected at most {MOST} dimensions, found {len(x.shape)}"
    return odd_items(x)


def _pad_stores(node: Node, graph: Graph) -> tuple[int | None, ...]:
    """What fills is given as the bits of float32: those of 0 are the same in 16 bits."""
    zero = not np.float32(node.op.value).view(np.uint32)
    return (None, 0) if zero else ()


def _indices(node: Node, graph: Graph, device: Any = None) -> np.ndarray:
    """Returns the constant indices of a gather; negative ones count from the end."""
    return np.asarray(graph.constants[node.inputs[1]]).ravel().astype(np.int64)


def _gather_why_not(node: Node, graph: Graph) -> str | None:
    x = graph.values[node.inputs[0]]
    if node.inputs[1] not in graph.constants:
        return "expected constant indices, found some that are computed"
    size = x.shape[axis_in(node.op.axis, len(x.shape))]
    indices = _indices(node, graph)
    if indices.size and not -size <= indices.min() <= indices.max() < size:
        return f"expected indices of {size} positions, found some outside"
    return odd_items(x)


def _make_gather(call: Call) -> Bound:
    x = call.inputs[0]
    positions: list[np.ndarray | None] = [None] * len(x.shape)
    axis = axis_in(call.node.op.axis, len(x.shape))
    positions[axis] = np.where(call.prepared < 0, call.prepared + x.shape[axis], call.prepared)
    return gathered(call, *offsets(positions, x.shape))


def _on_cuda(
    why_not: Callable[[Node, Graph], str | None],
) -> Callable[[Node, Graph], str | None]:
    """Returns ``why_not``, and why CUDA does not move integers.

    Those of networks of floats, such as pixels that are cast, stay on the host.
    """

    def also(node: Node, graph: Graph) -> str | None:
        found = graph.values[node.inputs[0]].dtype
        if found in EIGHT_BITS and not graph.is_quantized:
            return f"expected float32, or integers of a quantized network, found {found}"
        return why_not(node, graph)

    return also


def rows_of(
    op: str,
    name: str,
    make: Callable[[Call], Bound],
    why_not: Callable[[Node, Graph], str | None],
    **options: Any,
) -> list[Kernel]:
    """Returns a row for any element on the CPU, and one for floats and quantized numbers on CUDA."""
    options = {"stores": storing(*_EVERY), "same_storage": True, **options}
    cuda = {"dtypes": ("float32", *EIGHT_BITS), "why_not": _on_cuda(why_not)}
    return [
        Kernel(op, name, "cpu", make, dtypes=(), why_not=why_not, **options),
        Kernel(op, name, "cuda", make, **cuda, **options),
    ]


ROWS = [
    *(
        row
        for op in _ONE
        for row in rows_of(op, "copy_nd", _make, why_not=_why_not, pitched=_PITCHED.get(op, ()))
    ),
    *(
        row
        for op in ("split", "concat")
        for row in rows_of(op, "copy_nd", _make, why_not=_why_not, pitched=_EVERY)
    ),
    *rows_of("pad", "gather", _make_pad, why_not=_pad_why_not, stores=_pad_stores),
    *rows_of(
        "gather", "gather", _make_gather, why_not=_gather_why_not, packs=(1,),
        prepare=_indices, stores=storing(None, 0),
    ),
]  # fmt: skip
