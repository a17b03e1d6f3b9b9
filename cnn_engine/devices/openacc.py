"""A device that runs OpenACC directives: a GPU through offloading, or the host itself."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import numpy as np

from ..errors import UnsupportedError
from ..target import Target
from . import Buffer, openacc_module
from .cpu import CpuDevice

ON_THE_HOST = (
    "openacc:host: directives run on the host in one thread, and those that place data copy nothing there: "
    "times say what the nests cost on one core, not on a GPU"
)


class OpenAccDevice:
    """Work in OpenACC directives, and a data region for each piece of memory.

    An address is the host's, and the runtime finds the device's memory for it (``present``). Calls have
    ended when they return. On the host nothing is copied and one thread works: that is how GCC runs
    OpenACC without a GPU.

    Args:
        host: whether directives run on the host; else on the first GPU.

    Raises:
        UnsupportedError: it cannot be used; says why. The host never stands in for a GPU.
    """

    kind = "openacc"
    context = nullcontext()

    def __init__(self, host: bool) -> None:
        self.kernels = openacc_module.load()
        if not host and (reason := openacc_module.unavailable()):
            raise UnsupportedError(reason)
        self.host = host
        self.name = "openacc:host" if host else "openacc"
        self.number: int = self.kernels.HOST if host else 0
        #: For the report.
        self.note = ON_THE_HOST if host else None
        self._cpu = CpuDevice()

    @property
    def target(self) -> Target:
        """A target without GPU features: OpenACC's directives report none."""
        return Target(self.name, "openacc", "", frozenset())

    @property
    def model(self) -> str:
        """The hardware that runs the directives, and the compiler that compiled them."""
        where = f"the host, one thread, {self._cpu.model}" if self.host else "a GPU by offloading"
        return f"{where} ({self.kernels.compiler})"

    def free_memory(self) -> int:
        """Bytes that can be allocated; of a GPU, the host's where the runtime does not say."""
        return (not self.host and self.kernels.free_memory(self.number)) or self._cpu.free_memory()

    def allocate(self, nbytes: int) -> Buffer:
        """Returns ``nbytes`` of memory with a data region of its own, not initialised."""
        return self._entered(self._cpu.allocate(nbytes), self.kernels.create)

    def upload(self, array: np.ndarray) -> Buffer:
        """Returns a copy of ``array`` that is on the device."""
        return self._entered(self._cpu.upload(array), self.kernels.copyin)

    def _entered(self, buffer: Buffer, enter) -> Buffer:
        enter(buffer.address, buffer.nbytes, self.number)
        owner = _Region(buffer.owner)
        weakref.finalize(
            owner, _leave, self.kernels.remove, buffer.address, buffer.nbytes, self.number, owner.memory
        )  # fmt: skip
        return Buffer(buffer.address, buffer.nbytes, owner)

    def copy_h2d(self, to: int, source: int, nbytes: int) -> None:
        """Copies host memory to memory of the device."""
        self.kernels.copy_h2d(to, source, nbytes, self.number)

    def copy_d2h(self, to: int, source: int, nbytes: int) -> None:
        """Copies memory of the device to host memory."""
        self.kernels.copy_d2h(to, source, nbytes, self.number)

    def synchronize(self) -> None:
        """Returns at once: directives without ``async`` have ended when they return."""

    def check_data_mode(self, data_mode: str) -> None:
        """Raises UnsupportedError for ``managed``, which GCC has not."""
        if data_mode == "managed":
            raise UnsupportedError(
                "data_mode: managed: expected an OpenACC build with managed memory, found one by "
                f"{self.kernels.compiler}, which has none; take transfer or resident"
            )


class _Region:
    """Keeps memory for as long as its data region lasts."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory


def _leave(remove, address: int, nbytes: int, number: int, memory: np.ndarray) -> None:
    remove(address, nbytes, number)  # before ``memory`` goes
