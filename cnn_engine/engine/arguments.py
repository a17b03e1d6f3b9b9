"""What is passed to an engine, checked: sizes of batches, images, and the arrays of any graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from ..devices import arrays
from ..errors import InputError, UnsupportedError, expected
from ..graph.graph import Graph


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
        raise expected("batch", "a whole number of at least 1", batch)
    return min(number, max(images, 1))


def images_of(images: Any, shape: tuple[int, ...]) -> arrays.View:
    """Returns images [N, *shape], pixels or float32.

    Raises:
        InputError: they are of another type or shape.
    """
    kind = getattr(images, "dtype", None)
    dtype = "uint8" if str(kind).removeprefix("torch.") == "uint8" else "float32"
    found = arrays.view("images", images, dtype=dtype, ndim=4)
    if found.shape[1:] != tuple(shape):
        wanted = ", ".join(map(str, shape))
        raise InputError(f"images: expected shape [N, {wanted}], found {list(found.shape)}")
    return found


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
