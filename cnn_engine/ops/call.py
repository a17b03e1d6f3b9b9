"""Shared by all operator functions: shapes, outputs, overlaps, the device and its stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .. import _cpu
from ..devices import arrays, cuda_module
from ..devices import threads as thread_counts
from ..devices.arrays import CPU, View, view
from ..errors import InputError, UnsupportedError
from ..graph.network import pair


def make_shape(name: str, make: Callable, *numbers: int) -> Any:
    try:
        return make(*numbers)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None
    except TypeError:  # what pybind11 raises for a number past 32 bits
        raise InputError(
            f"{name}: expected dimensions and options below 2^31, found {list(numbers)}"
        ) from None


def four_paddings(name: str, value: int | tuple[int, ...]) -> tuple[int, int, int, int]:
    """Returns ``value`` as (above, left, below, right)."""
    if isinstance(value, (tuple, list)) and len(value) == 4:
        return (*pair(name, value[:2]), *pair(name, value[2:]))
    rows, columns = pair(name, value)
    return rows, columns, rows, columns


def make_workspace(x: View, query: str, shape: Any, threads: int | None) -> View | None:
    """Returns memory on the device of ``x``, of as many bytes as its ``query`` asks for."""
    count = thread_counts.check(threads, f"{query}: threads")
    if x.device == CPU:
        nbytes = getattr(_cpu, query)(shape, count)
    else:
        nbytes = getattr(cuda_module.load(), query)(shape, cuda_module.target(x.device).native)
    return arrays.empty_beside(x, (-(-nbytes // 4),)) if nbytes else None


def make_output(name: str, out: Any, x: View, shape: tuple[int, ...]) -> View:
    if out is None:
        return arrays.empty_beside(x, shape)
    return view(f"{name}: out", out, shape=shape, writable=True)


def refuse_overlap(name: str, y: View, *inputs: View | None) -> None:
    if any(x is not None and y.overlaps(x) for x in inputs):
        raise InputError(f"{name}: out: expected memory of its own, found it overlaps an input")


def call_kernel(
    name: str,
    tensors: tuple[View | None, ...],
    options: tuple,
    threads: int | None,
    stream: Any,
) -> None:
    """Calls the kernels of the device that holds all of ``tensors``."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        positions = sorted("the CPU" if d == CPU else f"cuda:{d}" for d in devices)
        raise InputError(
            f"{name}: expected all arrays on one device, found {' and '.join(positions)}"
        )
    addresses = [0 if tensor is None else tensor.address for tensor in tensors]
    device = devices.pop()
    count = thread_counts.check(threads, f"{name}: threads")
    if device == CPU:
        getattr(_cpu, name)(*addresses, *options, count)
        return
    handle = arrays.current_stream(tensors[0]) if stream is None else arrays.stream_handle(stream)
    _cuda = cuda_module.load()
    with nullcontext() if device == _cuda.get_device() else cuda_module.Current(device):
        try:
            getattr(_cuda, name)(*addresses, *options, handle)
        except ValueError as error:  # the kernel cannot take this shape, and says why
            raise UnsupportedError(f"{name}: {error}") from None
