"""The CPU: memory that starts at a cache line, and nothing to wait for."""

from __future__ import annotations

import numpy as np

from . import Buffer

ALIGNMENT = 64


class CpuDevice:
    """The host's processor and memory."""

    kind = "cpu"
    name = "cpu"

    def __init__(self, note: str | None = None) -> None:
        self.note = note  # why it was chosen, for the report

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
        import platform

        return platform.processor() or platform.machine()

    def free_memory(self) -> int:
        """Bytes that can be allocated without swapping."""
        with open("/proc/meminfo", encoding="ascii") as file:
            values = dict(line.split(":") for line in file)
        return int(values["MemAvailable"].split()[0]) * 1024

    def allocate(self, nbytes: int) -> Buffer:
        """Returns ``nbytes`` of memory."""
        array = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = array.__array_interface__["data"][0]
        address = (start + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return Buffer(address, nbytes, array)

    def upload(self, array: np.ndarray) -> Buffer:
        """Returns a copy of ``array``."""
        buffer = self.allocate(array.nbytes)
        start = buffer.address - buffer.owner.__array_interface__["data"][0]
        buffer.owner[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        return buffer

    def synchronize(self) -> None:
        """Returns at once: the CPU's operators have ended when they return."""
