"""The floating-point mode of kernels, also for computations in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import _cpu


@contextmanager
def usual_mode() -> Iterator[None]:
    """Has the calling thread round to nearest and keep subnormal numbers, whatever another library set.

    For ``with``, and for functions as ``@usual_mode()``.
    """
    before = _cpu.exchange_floating_point_mode(_cpu.floating_point_mode)
    try:
        yield
    finally:
        _cpu.exchange_floating_point_mode(before)
