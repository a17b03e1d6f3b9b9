"""Subjects of a transfer: images of a network or of a bare shape, and the modes of a copy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from .. import workload
from ..errors import InputError, UnsupportedError, expected
from ..graph.form import form_of

#: Between host and device, and what memory of the host's takes part.
DIRECTIONS = ("h2d", "d2h")
COPIED = ("pageable", "pinned")
#: Page-locked memory whose copy is a CUDA graph, and memory of host and device whose pages are prefetched.
GRAPH, MANAGED = "graph", "managed"
MEMORIES = (*COPIED, GRAPH, MANAGED)
#: From a device to another, and the ways: past the host, or through its page-locked memory.
BETWEEN = "d2d"
WAYS = ("peer", "pinned")
DTYPES = ("uint8", "float32")

LONGEST_SIDE = 100_000
MOST_BATCHES = 10_000
LARGEST_BATCH = 10_000_000


@dataclass(frozen=True, order=True)
class Mode:
    """One way to move a batch.

    Attributes:
        direction: ``"h2d"``, host to device, ``"d2h"``, or ``"d2d"``, to another device.
        memory: the host's: ``"pageable"`` (what NumPy allocates) or ``"pinned"`` (page-locked); ``"graph"``
            (page-locked, the copy launched as a CUDA graph); ``"managed"`` (of both, its pages prefetched);
            of ``d2d`` ``"pinned"`` or ``"peer"``: none.
        dtype: of the images, ``"uint8"`` or ``"float32"``.
    """

    direction: str = "h2d"
    memory: str = "pageable"
    dtype: str = "uint8"

    def __str__(self) -> str:
        return f"{self.direction}, {self.memory}, {self.dtype}"

    @property
    def suffix(self) -> str:
        """Suffix of the mode's files; empty for the default mode."""
        if self == Mode():
            return ""
        dtype = "" if self.dtype == "uint8" else f"_{self.dtype}"
        return f"_{self.direction}_{self.memory}{dtype}"


#: Every mode, the default one first, by the suffix of its files.
MODES = {
    mode.suffix: mode
    for mode in (
        Mode(*words)
        for words in (*product(DIRECTIONS, MEMORIES, DTYPES), *product((BETWEEN,), WAYS, DTYPES))
    )
}


@dataclass(frozen=True)
class Subject:
    """The images of a network, or of a bare shape, and the network's parameters.

    Attributes:
        name: of the network; of a bare shape, such as ``3x224x224``.
        shape: (channels, rows, columns) of one image.
        parameters: name -> shape, float32; None for a bare shape.
        dtype: that the images have unless said.
        make_weights: returns arrays of these parameters.
        is_bytes: whether the shape counts bytes, which have no other type.
        output_bytes: of all outputs for one image; None where they are not known.
    """

    name: str
    shape: tuple[int, int, int]
    parameters: dict[str, tuple[int, ...]] | None = None
    dtype: str = "uint8"
    make_weights: Callable[[], dict[str, np.ndarray]] | None = field(
        default=None, compare=False, repr=False
    )
    is_bytes: bool = False
    output_bytes: int | None = None

    def image_bytes(self, dtype: str) -> int:
        """Bytes of one image."""
        return math.prod(self.shape) * np.dtype(dtype).itemsize

    @property
    def weights(self) -> dict[str, int] | None:
        """Size of the parameters: ``bytes`` and ``tensors``; None for a bare shape."""
        if self.parameters is None:
            return None
        sizes = [math.prod(shape) * 4 for shape in self.parameters.values()]
        return {"bytes": sum(sizes), "tensors": len(sizes)}

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return path_safe(self.name)


def path_safe(name: str) -> str:
    """Returns ``name`` as the name of a folder: ``NVIDIA H200`` becomes ``NVIDIA_H200``."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", name).strip("_.") or "unnamed"


def find(name: str) -> Subject:
    """Returns the workload called ``name``, or the bare shape that it spells, such as ``3x224x224``.

    Raises:
        InputError: there is no such workload.
    """
    if re.fullmatch(r"[0-9]+x[0-9]+x[0-9]+", name):
        return from_shape(name.replace("x", ","))
    network = workload.get(name).network
    return Subject(
        network.name, network.input_shape, network.parameters, make_weights=network.random_weights,
        output_bytes=4 * network.classes,
    )  # fmt: skip


def of_model(path: str, **given: Any) -> Subject:
    """Returns the inputs of an ONNX model for one image, and its weights.

    Images [N, C, H, W] are moved in their own type. Other inputs, such as audio, ids or several arrays, are
    moved as so many bytes, ``shape`` being (1, 1, bytes): all that has a row for each image, or all inputs of
    a pass where none has. What comes out of the model, and how much, does not matter here.

    Args:
        given: of :func:`cnn_engine.graph.onnx.load`.

    Raises:
        InputError: the model is at fault.
        UnsupportedError: it has no inputs, or leaves sizes open.
    """
    network = workload.of_model(path, **given).network
    form = form_of(network, network.base)
    if form.sizes_of is not None or not form.inputs:
        found = ", ".join(f"{v.name} {v.dtype} {list(v.shape)}" for v in network.inputs) or "none"
        wanted = "inputs"
        if form.inputs:
            name, like = form.inputs[0].name, ",".join(map(str, form.inputs[0].shape))
            wanted = f"inputs of a known size: --input-shape {name}={like}"
        raise UnsupportedError(f"{path}: expected {wanted}, found {found}")
    weights = {n: a for n, a in network.base.constants.items() if a.dtype == np.float32}
    shape, dtype = network.input_shape, form.inputs[0].dtype
    out = sum(value.nbytes for value in form.outputs) // form.batch if form.in_parts else None
    if not form.is_of_images or dtype not in DTYPES:
        batch = form.batch if form.rows else 1
        moved = [v for v in form.inputs if v.name in form.rows] or form.inputs
        shape, dtype = (1, 1, max(sum(v.nbytes for v in moved) // batch, 1)), "uint8"
    return Subject(
        network.name, shape, {name: array.shape for name, array in weights.items()},
        dtype, lambda: weights, dtype == "uint8" and not form.is_of_images, out,
    )  # fmt: skip


def from_shape(text: str) -> Subject:
    """Returns the bare shape ``C,H,W``.

    Raises:
        InputError: ``text`` is not three whole numbers above zero.
    """
    words = text.split(",")
    sizes = tuple(int(w) for w in words if w.isascii() and w.isdecimal() and len(w) <= 9)
    if len(words) != 3 or len(sizes) != 3 or not all(1 <= s <= LONGEST_SIDE for s in sizes):
        raise expected("--shape", f"C,H,W, each from 1 to {LONGEST_SIDE}", repr(text))
    return Subject("x".join(map(str, sizes)), sizes)


def distinct(subjects: list[Subject]) -> list[Subject]:
    """Returns ``subjects``, each once.

    Raises:
        InputError: two of them would share a folder.
    """
    folders: dict[str, Subject] = {}
    for subject in subjects:
        other = folders.setdefault(subject.folder, subject)
        if other != subject:
            raise InputError(
                f"--network: expected names of folders of their own, found {other.name!r} and "
                f"{subject.name!r}"
            )
    return list(folders.values())
