"""Memory of a kernel on trial: shared by two processes, with guard pages or bands around all.

The process that judges makes inputs and looks at outputs; the one that runs the kernel sees nothing else. On
the CPU that one maps every buffer between two pages that cannot be touched, inputs read-only, so that a stray
access is a fault that names its buffer. On CUDA buffers have bands of known bytes around them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PAGE = mmap.PAGESIZE

#: Every buffer starts at a multiple of this, as the engine's own do.
ALIGNMENT = 64

#: Bytes of a band on CUDA: as the engine's buffers, at a multiple of 256.
BAND = 4096

#: What is around buffers, and in outputs and workspaces before a call: a NaN that no kernel makes.
POISON = 0xFFC0DEAD


@dataclass(frozen=True)
class Region:
    """A buffer in the shared memory: whole pages, with the data at their end or at their start.

    Attributes:
        name: the tensor's.
        offset, length: the pages.
        nbytes: the data's bytes.
        writable: whether the kernel may write to it.
        set: which set of inputs and outputs it is of.
    """

    name: str
    offset: int
    length: int
    nbytes: int
    writable: bool
    set: int

    def start(self, at_end: bool) -> int:
        """Returns where the data starts within the region."""
        slack = self.length - self.nbytes
        return slack // ALIGNMENT * ALIGNMENT if at_end else 0


@dataclass(frozen=True)
class Layout:
    """All buffers of a case.

    Attributes:
        regions: of every set its inputs and ``y``; and ``workspace``.
        nbytes: of all.
        sets: how many.
    """

    regions: tuple[Region, ...]
    nbytes: int
    sets: int

    def of(self, number: int) -> dict[str, Region]:
        """Returns the buffers of a set by name, the workspace among them."""
        return {r.name: r for r in self.regions if r.set in (number, -1)}


def layout(inputs: dict[str, int], output: int, workspace: int, sets: int) -> Layout:
    """Returns where everything lies.

    Args:
        inputs: name -> bytes.
        output, workspace: bytes.
    """
    regions, offset = [], 0

    def add(name: str, nbytes: int, writable: bool, number: int) -> None:
        nonlocal offset
        length = -(-(max(nbytes, 1) + ALIGNMENT) // PAGE) * PAGE
        regions.append(Region(name, offset, length, nbytes, writable, number))
        offset += length

    for number in range(sets):
        for name, nbytes in inputs.items():
            add(name, nbytes, False, number)
        add("y", output, True, number)
    add("workspace", workspace, True, -1)
    return Layout(tuple(regions), offset, sets)


class Shared:
    """Memory without a name in any file system, which a child inherits by its descriptor."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(
            "cnn_engine-kernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        # A child that made it shorter would end this process: reading what is not there is a bus error.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._map: mmap.mmap | None = None
        self._view: np.ndarray | None = None

    def resize(self, nbytes: int) -> np.ndarray:
        """Returns at least ``nbytes``, as bytes."""
        if self._view is None or len(self._view) < nbytes:
            os.ftruncate(self.descriptor, nbytes)
            self._map = mmap.mmap(self.descriptor, nbytes)
            self._view = np.frombuffer(self._map, np.uint8)
        return self._view

    def close(self) -> None:
        self._view = None
        self._map = None
        os.close(self.descriptor)


# In the process that runs the kernel ------------------------------------------------------------------------

#: Bytes from all buffers at which an address is a wild pointer, and no index that went too far.
FAR = 1 << 36

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED, _NORESERVE, _POPULATE = 0x10, 0x4000, 0x8000


class Guarded:
    """The buffers of a case in this process, each between two pages that cannot be touched."""

    def __init__(self, descriptor: int, plan: Layout) -> None:
        self.plan = plan
        self.bases: dict[Region, int] = {}
        self._maps: list[tuple[int, int]] = []
        for region in plan.regions:
            length = region.length + 2 * PAGE
            outer = self._mapped(
                None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0
            )
            self._maps.append((outer, length))
            access = mmap.PROT_READ | (mmap.PROT_WRITE if region.writable else 0)
            self.bases[region] = self._mapped(
                outer + PAGE, region.length, access, mmap.MAP_SHARED | _FIXED | _POPULATE,
                descriptor, region.offset,
            )  # fmt: skip

    @staticmethod
    def _mapped(*arguments) -> int:
        found = _libc.mmap(*arguments)
        if found in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"mmap: {os.strerror(ctypes.get_errno())}")
        return found

    def address(self, region: Region, at_end: bool) -> int:
        return self.bases[region] + region.start(at_end)

    def close(self) -> None:
        for address, length in self._maps:
            _libc.munmap(address, length)

    def place(self, address: int) -> tuple[str, int, bool] | None:
        """Returns the buffer nearest to ``address``, the offset from its pages, and if it is after."""

        def distance(region: Region) -> int:
            base = self.bases[region]
            return max(base - address, address - (base + region.length - 1), 0)

        nearest = min(self.bases, key=distance, default=None)
        if nearest is None or distance(nearest) > FAR:
            return None
        base = self.bases[nearest]
        return nearest.name, address - base, address >= base + nearest.length


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_SIGINFO, _NODEFER = 4, 0x40000000
_kept: list[object] = []


def on_fault(report: Callable[[int, int], None]) -> None:
    """Calls ``report(signal, address)`` on a fault of memory, on glibc's 64-bit Linux; it must not return."""

    def handler(number: int, info: int, context: int) -> None:
        address = ctypes.c_uint64.from_address(info + 16).value
        report(number, address)
        os._exit(1)

    callback = _HANDLER(handler)
    _kept.append(callback)
    action = _Action(ctypes.cast(callback, ctypes.c_void_p).value, b"", _SIGINFO | _NODEFER, None)
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        _libc.sigaction(int(number), ctypes.byref(action), None)
