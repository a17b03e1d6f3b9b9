"""Checks of an engine's arguments: batch sizes, images, and arrays of any graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ..devices import arrays
from ..errors import InputError, UnsupportedError, expected
from ..graph.dims import Sizes
from ..graph.form import Form


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


def images_of(form: Form, images: Any) -> tuple[arrays.View, int, Sizes | None]:
    """Returns the array of a network's only input, its images, and where dimensions are open all sizes.

    Raises:
        InputError: the network has several inputs, or the array is of another type or shape.
    """
    if len(form.inputs) != 1:
        names = ", ".join(value.name for value in form.inputs) or "none"
        raise UnsupportedError(
            f"images: expected a network with one input, found {len(form.inputs)} ({names}); "
            "Engine.run takes arrays by name"
        )
    (value,) = form.inputs
    takes_images = len(value.shape) == 4 and value.dtype in ("float32", "uint8")
    name, dtype = ("images", "float32") if takes_images else (value.name, value.dtype)
    kind = getattr(images, "dtype", None)
    if takes_images and str(kind).removeprefix("torch.") == "uint8":
        dtype = "uint8"
    found = arrays.view(name, images, dtype=dtype, ndim=len(value.shape))
    row = form.rows.get(value.name)
    if form.sizes_of is not None:
        sizes = form.sizes_of({value.name: found.shape})
        return found, 1 if row is None else found.shape[0], sizes
    if row is None and found.shape != value.shape:
        raise expected(name, f"shape {list(value.shape)}", list(found.shape))
    if row is not None and found.shape[1:] != row:
        raise InputError(
            f"{name}: expected shape [{', '.join(map(str, ('N', *row)))}], found {list(found.shape)}"
        )
    return found, 1 if row is None else found.shape[0], None


def of_graph(
    form: Form, inputs: Mapping[str, Any], pixels: bool, in_parts: bool = False
) -> tuple[list[arrays.View], int | Sizes]:
    """Returns the arrays of all inputs, in the network's order, and the images or sizes that they are for.

    Args:
        pixels: whether images are pixels, of a network that takes either.
        in_parts: whether there may be several passes of a network for one batch alone.

    Raises:
        InputError: they do not fit the network, or are not all in one memory.
    """
    wanted = {value.name: value for value in form.inputs}
    if inputs.keys() != wanted.keys():
        raise expected("inputs", ", ".join(wanted) or "none", ", ".join(map(str, inputs)) or "none")
    batch = None
    found: list[arrays.View] = []
    for name, value in wanted.items():
        dtype = value.dtype
        if form.normalises:
            dtype = "uint8" if pixels else "float32"
        array = arrays.view(f"inputs: {name}", inputs[name], dtype=dtype, ndim=len(value.shape))
        if found and array.device != found[0].device:
            raise expected(
                f"inputs: {name}",
                f"memory of {place_of(found[0])}, as {form.inputs[0].name} is",
                place_of(array),
            )
        if (form.any_batch or in_parts) and name in form.rows and batch is None:
            batch = array.shape[0]
        found.append(array)
    if form.sizes_of is not None:
        shapes = {name: array.shape for name, array in zip(wanted, found, strict=True)}
        return found, form.sizes_of(shapes)
    batch = form.batch if batch is None else batch
    for array, value in zip(found, form.inputs, strict=True):
        shape = value.shape
        if value.name in form.rows:
            shape = (batch, *form.rows[value.name])
        if array.shape != shape:
            raise expected(f"inputs: {value.name}", f"shape {list(shape)}", list(array.shape))
    if not form.any_batch and batch % form.batch:
        wanted = f"a multiple of the {form.batch} images that the network is made for"
        raise expected("inputs", wanted, batch)
    return found, batch


def check_mappings(inputs: Any, out: Any) -> None:
    """Raises InputError where ``inputs`` or ``out`` (or None) is no mapping from names to arrays."""
    for name, given in (("inputs", inputs), ("out", {} if out is None else out)):
        if not isinstance(given, Mapping):
            raise expected(name, "a mapping from names to arrays", type(given).__name__)


def wanted_outputs(
    form: Form, outputs: Sequence[str] | None, out: Mapping[str, Any]
) -> frozenset[str] | None:
    """Returns the outputs that are asked for; None: all.

    Raises:
        InputError: one is not the network's, or named twice, or is in ``out`` alone.
    """
    known = [value.name for value in form.outputs]
    if isinstance(outputs, str) or not (outputs is None or isinstance(outputs, Sequence)):
        raise expected("outputs", "a list of names", repr(outputs))
    for what, names in (("outputs", outputs or ()), ("out", out)):
        for name in names:
            if name not in known:
                raise expected(what, f"names of {', '.join(known)}", repr(name))
    if outputs is None:
        return None
    if len(set(outputs)) != len(outputs):
        raise expected("outputs", "each name once", ", ".join(outputs))
    for name in out:
        if name not in outputs:
            raise expected("out", f"names of outputs ({', '.join(outputs)})", repr(name))
    return None if len(outputs) == len(known) else frozenset(outputs)


def room(
    name: str, array: Any, shape: tuple[int, ...], dtype: str, beside: Sequence[arrays.View]
) -> arrays.View:
    """Returns the caller's array for an output, which must fit and overlap none of ``beside``.

    Raises:
        InputError: ``array`` does not fit, overlaps, or lies in the memory of another device.
    """
    found = arrays.view(name, array, dtype=dtype, shape=shape, writable=True)
    if beside and found.device != beside[0].device:
        raise expected(name, f"memory of {place_of(beside[0])}, as the inputs", place_of(found))
    if any(found.overlaps(other) for other in beside):
        raise InputError(f"{name}: expected memory apart from the other arrays, found an overlap")
    return found
