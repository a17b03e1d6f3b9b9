"""Messages between ranks: in one process, by MPI on the host, or by NCCL between GPUs.

All collectives are non-blocking: they return a request whose ``done()`` makes progress and says whether it is
finished. A thread that waits can so look at other things and sleep, where MPI's own waiting burns a core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import UnsupportedError

EXTRA = "pip install 'cnn-engine[ensemble]'"

#: Set by the launchers of Open MPI, MPICH and others for each process: how many there are, and which it is.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def _number(names: Sequence[str]) -> int | None:
    for name in names:
        if (text := os.environ.get(name, "")).isdecimal():
            return int(text)
    return None


def launched() -> bool:
    """Whether this process was started by ``mpirun`` or its like."""
    return _number(_SIZES) is not None or "PMIX_NAMESPACE" in os.environ


def launched_rank() -> int:
    """Which process this is, as the launcher says; 0 without one."""
    return (_number(_RANKS) or 0) if launched() else 0


class Request(Protocol):
    def done(self) -> bool:
        """Makes progress; returns whether the message has been sent and received."""


class Group(Protocol):
    """Ranks that send to each other; the calling one is ``rank`` of ``size``."""

    rank: int
    size: int

    def broadcast(self, data: Any, root: int) -> Request:
        """Sends ``data``, uint8 [N], of the rank ``root`` to all."""

    def gather(self, part: Any, whole: Any | None, counts: Sequence[int], root: int) -> Request:
        """Puts the parts of all, one after the other, into ``whole`` of the rank ``root``, bytes."""

    def allgather(self, part: Any, whole: Any, counts: Sequence[int]) -> Request:
        """Puts the parts of all, one after the other, into everyone's ``whole``, bytes."""


class Transport(Protocol):
    """All ranks of a run, and groups of them."""

    rank: int
    size: int

    def group(self, ranks: Sequence[int]) -> Group | None:
        """Returns the group of ``ranks``, or None for a rank not among them; all ranks call it at once."""

    def all(self, value: Any) -> list[Any]:
        """Returns every rank's value, to all ranks; for small objects outside of timed parts."""

    def to_first(self, value: Any) -> list[Any] | None:
        """Returns every rank's value, to rank 0 only; None to the others."""

    def barrier(self) -> Request:
        """Returns a handle that is done once all ranks have come here."""

    def close(self) -> None:
        """Ends all messages; every rank calls it."""


class _Done:
    def done(self) -> bool:
        return True


DONE = _Done()


class Alone:
    """One rank: a transport and its only group."""

    rank, size = 0, 1
    name = "one process"

    def group(self, ranks: Sequence[int]) -> Alone | None:
        return self if ranks else None

    def all(self, value: Any) -> list[Any]:
        return [value]

    to_first = all

    def barrier(self) -> Request:
        return DONE

    def broadcast(self, data: Any, root: int) -> Request:
        return DONE

    def gather(self, part: Any, whole: Any, counts: Sequence[int], root: int) -> Request:
        whole[...] = part
        return DONE

    def allgather(self, part: Any, whole: Any, counts: Sequence[int]) -> Request:
        return self.gather(part, whole, counts, 0)

    def close(self) -> None:
        pass


class _MpiRequest:
    def __init__(self, request: Any, *kept: Any):
        self._request, self._kept = request, kept

    def done(self) -> bool:
        return self._request.Test()


class _MpiGroup:
    def __init__(self, mpi: Any, communicator: Any):
        self._mpi, self.communicator = mpi, communicator
        self.rank, self.size = communicator.rank, communicator.size

    def broadcast(self, data: np.ndarray, root: int) -> Request:
        return _MpiRequest(self.communicator.Ibcast([data, self._mpi.BYTE], root), data)

    def gather(
        self, part: np.ndarray, whole: np.ndarray | None, counts: Sequence[int], root: int
    ) -> Request:
        to = [whole, counts, self._mpi.BYTE] if self.rank == root else None
        sent = [part, self._mpi.BYTE]
        return _MpiRequest(self.communicator.Igatherv(sent, to, root), part, whole)

    def allgather(self, part: np.ndarray, whole: np.ndarray, counts: Sequence[int]) -> Request:
        sent, to = [part, self._mpi.BYTE], [whole, counts, self._mpi.BYTE]
        return _MpiRequest(self.communicator.Iallgatherv(sent, to), part, whole)


class Mpi:
    """MPI by mpi4py, used by several threads.

    Raises:
        UnsupportedError: mpi4py or an MPI library is missing, or MPI does not let threads use it.
    """

    def __init__(self) -> None:
        try:
            import mpi4py

            mpi4py.rc.thread_level = "multiple"
            mpi4py.rc.finalize = False  # :meth:`close` does
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no libmpi was found
            raise UnsupportedError(
                f"MPI: expected mpi4py and an MPI library, found: {error}; {EXTRA}"
            ) from error
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UnsupportedError("MPI: expected one that threads may use (MPI_THREAD_MULTIPLE)")
        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.name = " ".join(MPI.Get_library_version().partition(",")[0].split()[:4])

    def group(self, ranks: Sequence[int]) -> _MpiGroup | None:
        made = self.world.Create(self.world.group.Incl(list(ranks)))
        return None if made == self.mpi.COMM_NULL else _MpiGroup(self.mpi, made)

    def all(self, value: Any) -> list[Any]:
        return self.world.allgather(value)

    def to_first(self, value: Any) -> list[Any] | None:
        return self.world.gather(value, 0)

    def barrier(self) -> Request:
        return _MpiRequest(self.world.Ibarrier())

    def close(self) -> None:
        if not self.mpi.Is_finalized():
            self.mpi.Finalize()


def transport() -> Alone | Mpi:
    """Returns MPI where a launcher started this process, else one rank."""
    return Mpi() if launched() else Alone()


class _NcclRequest:
    def __init__(self, event: Any, *kept: Any):
        self._event, self._kept = event, kept

    def done(self) -> bool:
        return self._event.done


class NcclGroup:
    """Broadcasts between GPUs, one a rank, by NCCL through CuPy; data are CuPy arrays of this rank's GPU."""

    def __init__(self, group: _MpiGroup, device: int):
        try:
            import cupy
            from cupy.cuda import nccl
        except ImportError as error:
            raise UnsupportedError(f"NCCL: expected CuPy with NCCL, found: {error}") from error
        self._cupy, self._nccl = cupy, nccl
        self.rank, self.size = group.rank, group.size
        name = group.communicator.bcast(nccl.get_unique_id() if group.rank == 0 else None, 0)
        self._device = cupy.cuda.Device(device)
        with self._device:
            self._communicator = nccl.NcclCommunicator(group.size, name, group.rank)
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def _finish(self, *kept: Any) -> Request:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return _NcclRequest(event, *kept)

    def _one(self, data: Any, count: int, root: int) -> None:
        pointer = data.data.ptr
        self._communicator.broadcast(
            pointer, pointer, count, self._nccl.NCCL_UINT8, root, self._stream.ptr
        )

    def broadcast(self, data: Any, root: int) -> Request:
        with self._device:
            self._wait_for_caller()
            self._one(data, data.size, root)
            return self._finish(data)

    def gather(self, part: Any, whole: Any, counts: Sequence[int], root: int) -> Request:
        if whole is None:  # NCCL has no gather: who does not need the whole receives it too
            with self._device:
                whole = self._cupy.empty(sum(counts), np.uint8)
        return self.allgather(part, whole, counts)

    def allgather(self, part: Any, whole: Any, counts: Sequence[int]) -> Request:
        begins = np.cumsum([0, *counts]).tolist()
        own = begins[self.rank]
        with self._device:
            whole[own : own + counts[self.rank]] = part
            self._wait_for_caller()
            self._nccl.groupStart()
            for root, count in enumerate(counts):  # of any sizes, which ncclAllGather does not take
                if count:
                    self._one(whole[begins[root] : begins[root] + count], count, root)
            self._nccl.groupEnd()
            return self._finish(part, whole)

    def _wait_for_caller(self) -> None:
        self._stream.wait_event(self._cupy.cuda.get_current_stream().record())
