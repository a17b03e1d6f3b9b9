"""Arguments of strided kernels: dimensions, strides, offsets; and calls merged into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ..graph.graph import Graph, Value
from .kernel import Bound
from .native import _cpu

#: Dimensions that a kernel walks over (csrc/ops/strided.h).
MOST = 8

Shape = Sequence[int]


def row_major(shape: Shape, pitch: int | None = None) -> tuple[int, ...]:
    """Returns the steps, in elements, of a contiguous tensor.

    Args:
        pitch: from one row of the last dimension to the next, where that is more than the row.
    """
    steps, step = [], 1
    row = shape[-1:] if pitch is None else (pitch,)
    for size in reversed((*shape[:-1], *row) if shape else ()):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


def repeated(shape: Shape, wide: Shape, pitch: int | None = None) -> tuple[int, ...]:
    """Returns the steps of a tensor of ``shape`` broadcast to ``wide``; ``pitch``: see :func:`row_major`."""
    steps = tuple(
        0 if size == 1 else step for size, step in zip(shape, row_major(shape, pitch), strict=True)
    )
    return (0,) * (len(wide) - len(shape)) + steps


def walk(shape: Shape, *steps: Shape) -> list[list[int]] | None:
    """Returns ``shape`` and each operand's ``steps`` in exactly :data:`MOST` dimensions.

    Dimensions of 1 go, and neighbours that one step describes are joined. None: they are still too many.
    """
    if 0 in shape:
        return [[0] * MOST, *([1] * MOST for _ in steps)]
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in steps]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        adjoining = len(sizes) > 0 and all(
            k[-1] == s[axis] * size for k, s in zip(kept, steps, strict=True)
        )
        if adjoining:
            sizes[-1] *= size
        else:
            sizes.append(size)
        for k, s in zip(kept, steps, strict=True):
            if adjoining:
                k[-1] = s[axis]
            else:
                k.append(s[axis])
    if len(sizes) > MOST:
        return None
    front = MOST - len(sizes)
    return [[1] * front + sizes, *([0] * front + k for k in kept)]


def copy_shape(
    value: Value, shape: Shape, reads: Shape, writes: Shape, start: int = 0, target: int = 0
) -> Any | None:
    """Returns the shape of copy_nd for elements of ``value``'s type, or None for too many dimensions.

    Args:
        reads, writes: steps of the input and of the output.
        start, target: their first elements' positions.
    """
    found = walk(shape, reads, writes)
    if found is None:
        return None
    return _cpu.CopyShape(value.item_bytes, *chain(*found), start, target)


def unused(graph: Graph, name: str) -> str:
    """Returns ``name``, with a suffix until no node and no value of ``graph`` has it."""
    while graph.has(name):
        name += "'"
    return name


def together(bounds: Sequence[Bound]) -> Bound:
    """Returns the calls, one after another, as one."""
    if len(bounds) == 1:
        return bounds[0]
    calls = []
    arguments: list[Any] = []
    for function, own in bounds:
        calls.append((function, len(arguments), len(arguments) + len(own)))
        arguments += own

    def run(*given: Any) -> None:
        for function, begin, end in calls:
            function(*given[begin:end])

    run.functions = [function for function, _, _ in calls]  # type: ignore[attr-defined]
    return run, arguments


def keeping(bound: Bound, *owners: Any) -> Bound:
    """Returns the same call, which keeps ``owners`` alive: tables that were uploaded for it."""
    function, arguments = bound

    def run(*given: Any) -> None:
        function(*given)

    run.owners = owners  # type: ignore[attr-defined]
    run.functions = [function]  # type: ignore[attr-defined]
    return run, arguments


def beyond(address: Any, nbytes: int) -> Any:
    """Returns the place ``nbytes`` after ``address``, which may stand for one that is known later."""
    if hasattr(address, "offset"):
        return replace(address, offset=address.offset + nbytes)
    return address + nbytes
