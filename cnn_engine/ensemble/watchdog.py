"""Ends all ranks when one has died, hangs or failed, in a few seconds, with one line that names it.

A thread in every rank. Ranks on one host watch each other's process, which tells of a death at once; besides,
every rank sends a beat to the next one, so that a rank which was stopped, or whose host is gone, is missed. A
rank whose own work does not go on tells so itself. Who finds something prints the line (one rank a host
does), tells the others, gives them a moment to keep what they have, and aborts.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import socket
import sys
import threading
import uuid
from time import monotonic, sleep
from typing import Any

from ..locks import ForkSafeLock
from ..report.units import printable
from .transport import Mpi, Transport

#: Seconds between two rounds, between two beats, and without a beat after which a stopped rank is given up.
ROUND_S, BEAT_S, MISSED_S = 0.1, 0.5, 5.0
#: Seconds without progress after which a rank that does not wait for others is taken to hang; without a
#: beat, after which it is taken to be gone.
STALL_S = 7.0
#: The same until the first batch is done: weights are read, libraries start and choose their kernels.
START_S = 120.0
#: Seconds that ranks have to keep what they did before all are ended.
GRACE_S = 1.0

LOST = 1  # the exit code where a rank died, hangs or is gone
_BEAT, _FAULT = 1, 2


class Watchdog:
    """Watches this rank and, by MPI, others; begins at once.

    Args:
        transport: of the run.
        stall_s: see :data:`STALL_S`.
        start_s: see :data:`START_S`.

    Attributes:
        fault: the line that was printed here or by another rank, or None.
        role: what this rank does, for the line.
    """

    def __init__(self, transport: Transport, stall_s: float = STALL_S, start_s: float = START_S):
        self._transport, self._stall_s, self._start_s = transport, stall_s, start_s
        self.rank, self.size = transport.rank, transport.size
        self.role = ""
        self.fault: str | None = None
        self.code = LOST
        self._ticks, self._seen = 0, 0
        self._since = self._begin = monotonic()
        self._doing: dict[str, str | None] = {"main": "its start"}
        self._started = False
        self._finishing: float | None = None
        self._lock = ForkSafeLock()
        self._stop = threading.Event()
        self._said = threading.Event()
        peers = transport.all((socket.gethostname(), os.getpid(), uuid.uuid4().hex))
        self._job = peers[0][2]
        self._roles = [""] * self.size
        self._peers = [f"process {pid} on {host}" for host, pid, _ in peers]
        self._pids = [pid for _, pid, _ in peers]
        host = peers[self.rank][0]
        self._processes: dict[int, int] = {}  # file descriptor -> rank
        for rank, (name, pid, _) in enumerate(peers):
            if name == host and rank != self.rank:
                with contextlib.suppress(OSError, AttributeError):
                    self._processes[os.pidfd_open(pid)] = rank
        self._poll = select.poll()
        for descriptor in self._processes:
            self._poll.register(descriptor, select.POLLIN)
        self._world: Any = None
        if isinstance(transport, Mpi):
            self._world = transport.world.Dup()
        self._heard, self._heard_started = monotonic(), False
        self._sent = 0.0
        self._requests: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def know(self, roles: list[str]) -> None:
        """Takes the roles of all ranks."""
        self._roles = roles
        self.role = roles[self.rank]

    def tick(self) -> None:
        """Notes progress; called by any thread."""
        self._ticks += 1

    def doing(self, thread: str, what: str | None) -> None:
        """Notes the work of ``thread``, or None: it waits for other ranks or for another thread."""
        if self._doing.get(thread, "") != what:
            self._doing[thread] = what
            self._ticks += 1

    def started(self) -> None:
        """Notes that the first batch is done; on a rank without members, that it begins."""
        self._started = True
        self.tick()

    def failed(self, error: BaseException | str, code: int) -> None:
        """Ends all ranks, because this one failed: does not return where there are others."""
        self._end(f"{self._name(self.rank)}: {error}", code)

    def finish(self) -> None:
        """Waits until all ranks have come here; then none is watched any more."""
        self.doing("main", None)
        self._finishing = monotonic()
        barrier = self._transport.barrier()
        while not barrier.done():
            sleep(0.005)
        self.stop()

    def stop(self) -> None:
        """Watches no more, without a word to others."""
        self._stop.set()
        self._thread.join(5)
        for descriptor in self._processes:
            os.close(descriptor)
        self._processes = {}

    def leave(self, code: int) -> None:
        """Ends this rank and all others, once these have had a moment: for a signal that all were sent."""
        with self._lock:
            if self.fault is None:
                self.fault, self.code = "interrupted", code
        sleep(GRACE_S)
        self._abort()

    def _name(self, rank: int) -> str:
        words = "; ".join(filter(None, [self._roles[rank], self._peers[rank]]))
        return f"rank {rank} ({words})" if self.size > 1 else self._roles[rank] or "ensemble"

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look_at_processes(int(1000 * ROUND_S))
            if self._world is not None:
                self._talk()
            self._look_at_self()

    def _look_at_processes(self, wait_ms: int = 0) -> None:
        if not self._processes:
            if wait_ms:
                self._stop.wait(wait_ms / 1000)
            return
        found = self._poll.poll(wait_ms)
        if not found or self._stop.is_set():
            return
        if self._finishing is not None and monotonic() - self._finishing < MISSED_S:
            self._stop.wait(wait_ms / 1000)  # who has ended may have ended well
            return
        # That rank may have told of a fault and ended while this one had no CPU; messages come bit by bit.
        end = monotonic() + ROUND_S
        while monotonic() < end:
            self._hear_of_fault()
            sleep(ROUND_S / 10)
        rank = self._processes[found[0][0]]
        self._end(f"{self._name(rank)}: expected to go on, found that it died", LOST)

    def _talk(self) -> None:
        now = monotonic()
        following = (self.rank + 1) % self.size
        self._requests = [request for request in self._requests if not request.Test()]
        if now - self._sent >= BEAT_S:
            self._sent = now
            self._requests.append(self._world.isend(self._started, following, _BEAT))
        while self._world.iprobe(tag=_BEAT):
            self._heard_started = self._world.recv(tag=_BEAT)
            self._heard = now
        self._hear_of_fault()
        silent = now - self._heard
        if silent <= MISSED_S or self.size < 2:
            return
        before = (self.rank - 1) % self.size
        # Python's lock is held while large libraries are loaded, so that a rank may be silent as it starts.
        limit = self._stall_s if self._heard_started else self._start_s
        if self._is_stopped(before):
            limit = MISSED_S
        if silent > limit:
            self._end(
                f"{self._name(before)}: expected a sign of life within {limit:g} s, found none",
                LOST,
            )

    def _hear_of_fault(self) -> None:
        """Ends this rank where another has told of a fault."""
        if self._world is not None and self._world.iprobe(tag=_FAULT):
            self.fault, self.code = self._world.recv(tag=_FAULT)
            _thread.interrupt_main()
            self._stop.wait(2 * GRACE_S)
            self._abort()

    def _is_stopped(self, rank: int) -> bool:
        """Whether a process of this host was stopped by a signal, and is not just short of CPU time."""
        if rank not in self._processes.values():
            return False
        try:
            with open(f"/proc/{self._pids[rank]}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return False

    def _look_at_self(self) -> None:
        now = monotonic()
        busy = [what for what in tuple(self._doing.values()) if what is not None]
        if self._ticks != self._seen or not busy:
            self._seen, self._since = self._ticks, now
            return
        limit, option = (
            (self._stall_s, "--stall") if self._started else (self._start_s, "--start-timeout")
        )
        if now - self._since > limit:
            self._end(
                f"{self._name(self.rank)}: hangs in {busy[0]}: expected progress within {limit:g} s, "
                f"found none ({option} S waits longer)",
                LOST,
            )

    def _end(self, line: str, code: int) -> None:
        """Prints the line, tells the others and ends all; once."""
        with self._lock:
            if self.fault is not None:
                return
            self.fault, self.code = line, code
        if _claimed(self._job):
            sys.stderr.write(f"error: {printable(' '.join(line.split()))}\n")
            sys.stderr.flush()
        if self._world is not None:
            for rank in range(self.size):
                if rank != self.rank:
                    self._requests.append(self._world.isend((line, code), rank, _FAULT))
        end = monotonic() + GRACE_S
        if threading.current_thread() is not threading.main_thread():
            _thread.interrupt_main()
        while monotonic() < end:
            for request in self._requests:
                request.Test()
            sleep(0.02)
        self._abort()

    def _abort(self) -> None:
        if self._world is not None:
            self._world.Abort(self.code)
        os._exit(self.code)


_claims: list[socket.socket] = []


def _claimed(job: str) -> bool:
    """Whether this process is the first on its host that asks: it then speaks for the job."""
    try:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        one.bind(f"\0cnn_engine-ensemble-{job}")
    except OSError:
        return False
    _claims.append(one)  # held until the process ends
    return True
