"""Copies between places and within one."""

from __future__ import annotations

from typing import Any

from ... import _cpu
from .kernel import Bound, Call, Kernel

_ANY = ()


def _host(call: Call) -> Bound:
    return _cpu.copy, [*call.at, *call.to, call.inputs[0].nbytes, call.threads]


def _device(call: Call) -> Bound:
    function: Any = getattr(call.device, f"copy_{call.node.op.direction}")
    return function, [*call.to, *call.at, call.inputs[0].nbytes]


ROWS = [
    Kernel("copy", "copy", "cpu", _host, dtypes=_ANY),
    Kernel("copy", "copy", "cuda", _device, dtypes=_ANY),
]
