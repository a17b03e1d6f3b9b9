"""Time of a kernel's process, counted from outside; the process runs only while it is asked something.

A kernel shares its process with the timer that is read there, so it can change what that timer says. It
cannot change the judge's clock, nor what the system counts. The process is stopped between requests: its
threads see no input before the clock runs, and none works on after the clock was read.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import clock_gettime, perf_counter

#: Seconds of a request that are not the kernel's: to wake its process, to read and to answer.
OVERHEAD_S = 0.5e-3

#: Seconds that a call costs around the kernel, in the loop that times it.
PER_CALL_S = 1e-6

#: CPU time of the calling thread, in seconds, that no honest process uses beside its kernel.
SURPLUS_S = 5e-3


@dataclass(frozen=True)
class Account:
    """Cost of one request, in seconds.

    Attributes:
        wall: from before the process could run until it was stopped, less the time that it or the judge was
            ready and had no CPU.
        unasked: CPU time since the last request, in which the process was stopped: none, if it is honest.
        cpu: of all threads of the process.
        main: CPU time of the thread that calls the kernel.
    """

    wall: float
    cpu: float
    main: float
    unasked: float = 0.0

    def least(self, threads: int, calls: int) -> float:
        """Returns the least seconds that ``calls`` calls took with so many CPUs.

        Work on more CPUs than were granted counts as if it had been shared among those.
        """
        spent = max(self.wall, self.cpu / threads) + self.unasked
        return max(spent - OVERHEAD_S - calls * PER_CALL_S, 0.0)

    def contradicts(self, seconds: float) -> bool:
        """Whether calls cannot have taken ``seconds``: their thread alone had far more CPU time."""
        return self.main > 2 * seconds + SURPLUS_S


class Witness:
    """Processes that are stopped and let run, with an account of their time.

    Args:
        processes: the kernel's, in this process's numbers; the first calls the kernel.
    """

    def __init__(self, processes: list[int]) -> None:
        self._processes = processes
        self._handles: list[int] = []
        self._stopped_at: float | None = None  # CPU time
        for process in processes:
            with contextlib.suppress(OSError):
                self._handles.append(os.pidfd_open(process))

    def close(self) -> None:
        """Lets go of the processes."""
        while self._handles:
            os.close(self._handles.pop())

    def _send(self, number: int) -> None:
        for handle in self._handles:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(handle, number)

    def stop(self) -> None:
        """Stops all threads."""
        self._send(signal.SIGSTOP)
        self._stopped_at = self._cpu()

    @contextlib.contextmanager
    def running(self) -> Iterator[list[Account]]:
        """Lets the processes run for the length of the block; the list has their account after it."""
        found: list[Account] = []
        cpu, main, waited = self._cpu(), *self._scheduled()
        unasked = 0.0 if self._stopped_at is None else cpu - self._stopped_at
        start = perf_counter()
        self._send(signal.SIGCONT)
        try:
            yield found
        finally:
            self._send(signal.SIGSTOP)
            wall = perf_counter() - start
            main_after, waited_after = self._scheduled()
            wall -= waited_after - waited
            self._stopped_at = self._cpu()
            spent = self._stopped_at - cpu
            found.append(Account(wall, spent, main_after - main, max(unasked, 0.0)))

    def _cpu(self) -> float:
        """Returns the CPU time of all processes, that of threads that have ended among it."""
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(OSError):
                total += clock_gettime(~process << 3 | 2)  # clock_getcpuclockid(3)
        return total

    def _scheduled(self) -> tuple[float, float]:
        """Returns the calling thread's CPU time, and how long that thread and this one waited for a CPU."""
        process = self._processes[0]
        main, waited = _schedule(f"/proc/{process}/task/{process}/schedstat")
        return main, waited + _schedule("/proc/thread-self/schedstat")[1]


def _schedule(path: str) -> tuple[float, float]:
    try:
        running, waiting = Path(path).read_bytes().split()[:2]
    except (OSError, ValueError):  # a system that does not count it
        return 0.0, 0.0
    return int(running) * 1e-9, int(waiting) * 1e-9
