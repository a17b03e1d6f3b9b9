"""The CPU: memory that starts at a cache line, and nothing to wait for."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
from contextlib import nullcontext, suppress

import numpy as np

from .. import _cpu
from ..locks import ForkSafeLock
from ..target import INSTRUCTION_SETS, Target
from . import Buffer

ALIGNMENT = 64
#: A large page. Buffers of SHARED bytes or more are parts of a mapped piece, of which the rest is for those
#: that follow: what is not touched takes no memory. Buffers that are freed alone are mapped from MAPPED on.
PAGE, SHARED, MAPPED, PIECE = 2 << 20, 32 << 10, 1 << 20, 128 << 20


def _map(nbytes: int) -> np.ndarray:
    """Returns zeros that begin at a large page, in large pages where the system has them.

    Weights that are read once a pass miss the address translation of small pages at every other line.
    """
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    try:
        memory = mmap.mmap(-1, nbytes + PAGE, **({"flags": private} if private else {}))
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes: {error}") from None
    array = np.frombuffer(memory, np.uint8)
    start, whole = -array.__array_interface__["data"][0] % PAGE, nbytes // PAGE * PAGE
    with suppress(AttributeError, OSError, ValueError):  # other systems, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)  # a part of one would take all of it
    return array[start : start + nbytes]


def _aligned(nbytes: int) -> np.ndarray:
    """Returns bytes of the heap at a multiple of :data:`ALIGNMENT`."""
    array = np.empty(nbytes + ALIGNMENT, np.uint8)
    return array[-array.__array_interface__["data"][0] % ALIGNMENT :][:nbytes]


def release_free_memory() -> None:
    """Returns free memory of the C library to the system: megabytes, once weights are packed."""
    with suppress(AttributeError, OSError, TypeError):  # other libraries
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _target(instruction_set: str) -> Target:
    """Returns what this CPU can do where kernels use an instruction set of those that it has."""
    features = INSTRUCTION_SETS[instruction_set]
    if not _cpu.bfloat16_why_not():
        features |= {"avx512_bf16"} | ({"avx512_bf16_fast"} if _cpu.bfloat16_pays() else set())
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        features |= {"neon"}
    return Target(
        CpuDevice().model, "cpu", "x86_64" if machine in ("x86_64", "AMD64") else machine, features,
        cores=len(os.sched_getaffinity(0)),
        l2_bytes=1024 * _number("/sys/devices/system/cpu/cpu0/cache/index2/size"),
        clock=1e3 * _number("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"),
    )  # fmt: skip


def _number(path: str) -> int:
    """Returns the number that a file of the system begins with; 0 where it says none."""
    with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return int(file.read().strip().removesuffix("K"))
    return 0


class CpuDevice:
    """The host's processor and memory."""

    kind = "cpu"
    name = "cpu"
    context = nullcontext()  # the CPU is always current

    def __init__(self, note: str | None = None) -> None:
        self.note = note  # why it was chosen, for the report
        self._lock = ForkSafeLock()
        self._left = np.empty(0, np.uint8)  # of the piece that was mapped last

    @property
    def target(self) -> Target:
        """The processor's capabilities, by which kernels are chosen."""
        return _target(_cpu.selected_instruction_set())

    @property
    def model(self) -> str:
        """The processor's name."""
        try:
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                for line in file:
                    if line.startswith("model name"):
                        return line.partition(":")[2].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine()

    def free_memory(self) -> int:
        """Bytes that can be allocated without swapping."""
        with open("/proc/meminfo", encoding="ascii") as file:
            values = dict(line.split(":") for line in file)
        return int(values["MemAvailable"].split()[0]) * 1024

    def allocate(self, nbytes: int) -> Buffer:
        """Returns ``nbytes`` of a shared piece of memory, which is freed when all of it is released."""
        if nbytes < SHARED:
            array = _aligned(nbytes)
        else:
            size = -(-nbytes // ALIGNMENT) * ALIGNMENT
            with self._lock:
                if size > self._left.size:
                    self._left = _map(max(PIECE, -(-size // PAGE) * PAGE))
                array, self._left = self._left[:nbytes], self._left[size:]
        return Buffer(array.__array_interface__["data"][0], nbytes, array)

    def allocate_alone(self, nbytes: int) -> Buffer:
        """Returns ``nbytes`` of memory of its own, which is freed when it is released."""
        array = _aligned(nbytes) if nbytes < MAPPED else _map(nbytes)
        return Buffer(array.__array_interface__["data"][0], nbytes, array)

    def upload(self, array: np.ndarray) -> Buffer:
        """Returns a copy of ``array``."""
        buffer = self.allocate(array.nbytes)
        buffer.owner[:] = array.reshape(-1).view(np.uint8)
        return buffer

    def synchronize(self) -> None:
        """Returns at once: the CPU's operators have ended when they return."""
