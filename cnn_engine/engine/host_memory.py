"""Host memory for images and outputs of many passes: page-locked where a GPU copies from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..devices import arrays
from ..errors import InputError
from ..graph.form import Form
from ..workload import Samples
from . import arguments


class HostMemory:
    """Allocates arrays for one network on one device: page-locked on CUDA, else NumPy's own."""

    def __init__(self, device: Any, form: Form) -> None:
        self._form = form
        self._page_locks = device.empty_pinned if device.kind == "cuda" else None

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an array that is not filled."""
        return (self._page_locks or np.empty)(shape, dtype)

    def page_locked(self, images: Samples) -> Samples:
        """Returns a copy of inputs, from which a GPU copies fastest."""
        copies = {name: self.empty(a.shape, a.dtype) for name, a in images.arrays.items()}
        for name, copy in copies.items():
            copy[...] = images.arrays[name]
        return Samples(copies, len(images), images.shared)

    def outputs(self, count: int, shared: Mapping[str, tuple[int, ...]]) -> Samples:
        """Returns memory for the outputs of ``count`` images.

        Args:
            shared: shapes of all outputs of a pass, which count for those without a row per image.
        """
        rows = self._form.rows
        made = {
            v.name: self.empty(
                (count, *rows[v.name]) if v.name in rows else shared[v.name], v.dtype
            )
            for v in self._form.outputs
        }
        return Samples(made, count, frozenset(made) - rows.keys())


def samples(form: Form, inputs: Mapping[str, Any]) -> Samples:
    """Returns arrays in host memory, by name, as the images of one or several passes.

    Raises:
        InputError: they do not fit the network, or hold what is not finite.
    """
    pixels = str(getattr(next(iter(inputs.values()), None), "dtype", "")) == "uint8"
    found, count = arguments.of_graph(form, inputs, pixels, in_parts=True)
    for view in found:
        if view.device != arrays.CPU:
            raise InputError("images: expected host memory to profile, found a CUDA device's")
    names = [value.name for value in form.inputs]
    shared = frozenset(names) - form.rows.keys()
    return Samples(
        {n: np.asarray(v.array) for n, v in zip(names, found, strict=True)}, count, shared
    )
