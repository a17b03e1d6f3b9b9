"""Devices: one module each for arrays, copies, timers and synchronisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError, did_you_mean, expected
from . import cuda_module

#: What --device takes.
NAMES = "auto, cpu, cuda, cuda:N, openacc or openacc:host"


@dataclass(frozen=True)
class Buffer:
    """Memory of a device: its first address, its size, and the object that keeps it."""

    address: int
    nbytes: int
    owner: Any


def select(name: str) -> Any:
    """Returns the device called ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``openacc`` or ``openacc:host``.

    PyTorch's devices have names too.

    ``auto`` is the first CUDA device that the kernels run on, where there is one and CuPy, else the CPU; its
    ``note`` says what was passed over and why.

    Raises:
        InputError: no such device.
        UnsupportedError: the device cannot be used; says why and what mends it.
    """
    from .cpu import CpuDevice

    if type(name).__module__ == "torch":
        name = str(name)
    if not isinstance(name, str):
        raise expected("device", f"{NAMES}, or a torch.device", repr(name))
    if name == "cpu":
        return CpuDevice()
    if name == "auto":
        return _first_usable()
    kind, colon, index = name.partition(":")
    if name in ("openacc", "openacc:host"):
        from .openacc import OpenAccDevice

        return OpenAccDevice(name == "openacc:host")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdecimal())):
        hint = did_you_mean(name, ("auto", "cpu", "cuda", "openacc"))
        raise expected("device", NAMES, f"{name!r}{hint}")
    reason = cuda_module.unavailable(int(index or 0))
    if reason is not None:
        raise UnsupportedError(reason)
    from .cuda import CudaDevice

    return CudaDevice(int(index or 0))


def _first_usable() -> Any:
    from .cpu import CpuDevice

    first = None  # reason
    for index in range(max(cuda_module.device_count(), 1)):
        reason = cuda_module.unavailable(index)
        if reason is None:
            from .cuda import CudaDevice

            try:
                device = CudaDevice(index)
            except UnsupportedError as error:
                reason = str(error)
            else:
                device.note = f"auto chose {device.name}: {first}" if first else None
                return device
        first = first or reason
    return CpuDevice(note=f"auto chose the CPU: {first}")
