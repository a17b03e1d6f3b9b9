"""NumPy as a fallback kernel: the operator's reference on the CPU, in the tensors' own types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ..floating_point import usual_mode
from ..graph.dims import holds_dims
from ..graph.graph import Value
from .kernel import Bound, Call, Kernel


def array_at(address: int, value: Value) -> np.ndarray:
    """Returns the memory of ``value`` at ``address`` as an array, without copying it."""
    return _viewing(value)(address)


def _viewing(value: Value | None) -> Callable[[int], np.ndarray | None]:
    """Returns a function from an address to the array of ``value`` there."""
    if value is None:
        return lambda address: None
    dtype, shape, nbytes = np.dtype(value.dtype), value.shape, value.nbytes
    if nbytes == 0:
        return lambda address: np.empty(shape, dtype)
    memory = ctypes.c_char * nbytes
    return lambda address: np.frombuffer(memory.from_address(address), dtype).reshape(shape)


def _make(call: Call) -> Bound:
    op, inputs, outputs = call.node.op, call.inputs, call.outputs
    count = len(inputs)
    views: list[Callable[[int], Any]] = []

    @usual_mode()
    def run(*addresses: Any) -> None:
        if not views:  # at the first pass, when all sizes are numbers
            views.extend(map(_viewing, (*inputs, *outputs)))
        arrays = [view(address) for view, address in zip(views, addresses, strict=True)]
        found = op.reference(*arrays[:count])
        found = found if isinstance(found, tuple) else (found,)
        with np.errstate(all="ignore"):
            for array, result in zip(arrays[count:], found, strict=True):
                array[...] = result

    if not holds_dims((op, inputs, outputs)):  # at every size it is the same
        views.extend(map(_viewing, (*inputs, *outputs)))
        run.functions = ()  # type: ignore[attr-defined]
    return run, [*call.input_addresses, *call.output_addresses]


#: Runs every operator.
NUMPY = Kernel("*", "numpy", "cpu", _make, dtypes=())
