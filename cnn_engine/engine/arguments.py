"""What is passed to an engine, checked: sizes of batches, and the arrays of any graph."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..devices import arrays
from ..errors import UnsupportedError, expected
from ..graph.graph import Graph
from ..operators import KINDS
from .kernels import Kernel


def place_of(view: arrays.View) -> str:
    """Returns where an array is, in words."""
    return "the CPU" if view.device == arrays.CPU else f"cuda:{view.device}"


def batch_size(batch: Any, images: int) -> int | None:
    """Returns ``batch``, or the number of images where that is less; None for None."""
    if batch is None:
        return None
    try:
        number = -1 if isinstance(batch, bool) else operator.index(batch)
    except TypeError:
        number = -1
    if number < 1:
        raise expected("--batch", "a whole number of at least 1", batch)
    return min(number, max(images, 1))


def of_graph(graph: Graph, inputs: Mapping[str, Any]) -> tuple[list[arrays.View], int]:
    """Returns the arrays of ``graph.inputs``, in their order, and the batch that they are for.

    Raises:
        InputError: they do not fit the graph.
        UnsupportedError: one is in a device's memory.
    """
    wanted = {value.name: value for value in graph.inputs}
    if inputs.keys() != wanted.keys():
        raise expected("inputs", ", ".join(wanted) or "none", ", ".join(map(str, inputs)) or "none")
    batch = graph.batch
    found = []
    for name, value in wanted.items():
        array = arrays.view(
            f"inputs: {name}", inputs[name], dtype=value.dtype, ndim=len(value.shape)
        )
        if array.device != arrays.CPU:
            raise UnsupportedError(f"inputs: {name}: expected a NumPy array, found one of a device")
        if name in graph.batched:
            batch = array.shape[0] if not found or batch == graph.batch else batch
        found.append(array)
    for array, value in zip(found, graph.inputs, strict=True):
        shape = value.shape
        if value.name in graph.batched:
            shape = (batch, *shape[1:])
        if array.shape != shape:
            raise expected(f"inputs: {value.name}", f"shape {list(shape)}", list(array.shape))
    return found, batch


def own_kernels(given: Sequence[str | Kernel] | Mapping[str, str | Kernel]) -> dict[str, Kernel]:
    """Returns node, or operator -> the kernel of a user's own.

    Args:
        given: ``"my.cu"``, ``"conv2:my.cu"`` or kernels; or a mapping from nodes or operators to either.

    Raises:
        InputError: a file is at fault, or two kernels are for the same.
    """
    if isinstance(given, (str, os.PathLike, Kernel)):
        given = [given]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif not isinstance(given, Iterable):
        raise expected("kernels", "files or kernels, or a mapping to them", given)
    else:
        pairs = [target_and_file(one) if isinstance(one, str) else (None, one) for one in given]
    found: dict[str, Kernel] = {}
    for target, one in pairs:
        if not isinstance(one, (str, os.PathLike, Kernel)):
            raise expected("kernels", "files or kernels, or a mapping to them", one)
        kernel = one if isinstance(one, Kernel) else Kernel.from_file(one)
        target = target or kernel.op
        if target in KINDS and target != kernel.op:
            raise expected(
                f"--kernel: {kernel.name}", f"a kernel of {target}", f"one of {kernel.op}"
            )
        if target in found:
            raise expected(
                f"--kernel: {target}", "one kernel", f"{found[target].name} and {kernel.name}"
            )
        found[target] = kernel
    return found


def target_and_file(text: str) -> tuple[str | None, str]:
    """Returns what ``conv2:my.cu`` says: a node or an operator, or None, and a file."""
    target, colon, file = text.partition(":")
    # A path may hold a colon too; a node's name rarely holds a separator, and then the file tells.
    if not colon or os.path.exists(text):
        return None, text
    return target, file
