"""Copies between positions and within one."""

from __future__ import annotations

from typing import Any

from .kernel import Bound, Call, Kernel
from .native import _cpu
from .strided import copy_shape

_ANY = ()


def _host(call: Call) -> Bound:
    return _cpu.copy, [
        *call.input_addresses,
        *call.output_addresses,
        call.inputs[0].nbytes,
        call.threads,
    ]


def _device(call: Call) -> Bound:
    direction = getattr(call.node.op, "direction", "d2d")
    x = call.inputs[0]
    if direction == "d2d":
        shape = copy_shape(x, (x.size,), (1,), (1,))
        return call.native("copy_nd", *call.input_addresses, *call.output_addresses, shape)
    function: Any = getattr(call.device, f"copy_{direction}")
    return function, [*call.output_addresses, *call.input_addresses, x.nbytes]


ROWS = [
    Kernel("copy", "copy", "cpu", _host, dtypes=_ANY),
    Kernel("copy", "copy", "cuda", _device, dtypes=_ANY),
]
