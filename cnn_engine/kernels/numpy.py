"""NumPy as a fallback kernel: the operator's reference on the CPU, in the tensors' own types."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..floating_point import usual_mode
from ..graph.graph import Value
from .kernel import Bound, Call, Kernel


def array_at(address: int, value: Value) -> np.ndarray:
    """Returns the memory of ``value`` at ``address`` as an array, without copying it."""
    dtype = np.dtype(value.dtype)
    if value.nbytes == 0:
        return np.empty(value.shape, dtype)
    memory = (ctypes.c_char * value.nbytes).from_address(address)
    return np.frombuffer(memory, dtype).reshape(value.shape)


def _make(call: Call) -> Bound:
    op, inputs, outputs = call.node.op, call.inputs, call.outputs
    count = len(inputs)

    @usual_mode()
    def run(*addresses: Any) -> None:
        arrays = [
            None if value is None else array_at(address, value)
            for address, value in zip(addresses, inputs, strict=False)
        ]
        found = op.reference(*arrays)
        found = found if isinstance(found, tuple) else (found,)
        with np.errstate(all="ignore"):
            for address, value, result in zip(addresses[count:], outputs, found, strict=True):
                array_at(address, value)[...] = result

    return run, [*call.input_addresses, *call.output_addresses]


#: Runs every operator.
NUMPY = Kernel("*", "numpy", "cpu", _make, dtypes=())
