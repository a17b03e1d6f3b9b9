"""Runs programs that are not trusted: kernels on trial, and compilers on files that are not ours.

Layers, each for itself, since no system offers all:

- **limits**: address space, CPU time, size of files, processes, no core dumps;
- **namespaces** (user, PID, and network for what needs none): other processes cannot be signalled, traced or
  read, and all that was started is killed with the first process;
- **Landlock**: files are written below named folders alone; no signals or tracing beyond;
- **seccomp**: a filter of system calls: no tracing, and no sockets for what needs no network; for a kernel no
  processes either, only threads.

Every process dies with the one that started it. :func:`end` kills the whole tree, whatever layers there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from ..locks import ForkSafeLock

_LAUNCHER = str(Path(__file__).with_name("sandbox_launcher.py"))

#: Where a command reads which layers there are.
LAYERS = "CNN_ENGINE_SANDBOX"

#: Seconds that a killed process may take to end; one that waits for a device may take longer.
END_S = 10.0

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 3, 4, 36, 37


@dataclass(frozen=True)
class Confinement:
    """Limits of a confined program.

    Attributes:
        memory: bytes of address space of each process; 0: no limit.
        cpu_s: seconds of CPU time of each process; 0: no limit.
        file_bytes: of each file that it writes.
        processes: whether it may start some.
        writable: folders and files that it may write to, beside what it inherits open.
        network: whether it needs one, or System V IPC.
        filtered: whether namespaces, Landlock and seccomp are tried; without it there are limits alone.
    """

    memory: int = 0
    cpu_s: int = 0
    file_bytes: int = 64 << 20
    processes: bool = False
    writable: tuple[str, ...] = (os.devnull,)
    network: bool = False
    filtered: bool = True

    def command(self, words: Sequence[str], inherited: Sequence[int] = ()) -> list[str]:
        """Returns a command that runs ``words`` so confined, as a child of this process."""
        limits = {"CORE": 0, "FSIZE": self.file_bytes}
        if self.memory:
            limits["AS"] = self.memory
        if self.cpu_s:
            limits["CPU"] = self.cpu_s
        spec = {
            "parent": os.getpid(), "limits": limits, "processes": self.processes,
            "writable": self.writable, "network": self.network, "filtered": self.filtered,
            "inherited": list(inherited),
        }  # fmt: skip
        return [sys.executable, "-I", "-S", _LAUNCHER, json.dumps(spec), *words]


def start(
    words: Sequence[str], confinement: Confinement, inherited: Sequence[int] = (), **options: Any
) -> subprocess.Popen:
    """Starts a confined program in a session of its own; ``options`` are of ``subprocess.Popen``."""
    return subprocess.Popen(
        confinement.command(words, inherited), pass_fds=tuple(inherited), start_new_session=True,
        **options,
    )  # fmt: skip


def end(process: subprocess.Popen) -> None:
    """Kills a program and all of its descendants, also those in another session; waits for it."""
    # The launchers last: while they live, what loses its parent stays below them. They end by themselves
    # where the command does, once nothing is left.
    killed: set[int] = set()
    deadline = monotonic() + END_S
    while process.poll() is None and monotonic() < deadline:
        table = _processes()
        tree = _tree(process.pid, table)
        below = [pid for pid in tree if not _is_launcher(pid)]
        if not below and not killed:  # it has not begun
            break
        for group in {table[pid].group for pid in tree if pid in table} - {
            process.pid,
            os.getpgrp(),
        }:
            with contextlib.suppress(OSError):  # at once: one alone may be gone before its turn
                os.killpg(group, signal.SIGKILL)
        _kill(below)
        killed.update(below)
        sleep(0.002)
    tree = _tree(process.pid)
    _kill(tree)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in killed.union(tree) - {process.pid}:
        _gone(pid)


def _gone(pid: int) -> None:
    """Waits until a killed process has ended, in :func:`guarded` as its parent."""
    deadline = monotonic() + END_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and monotonic() < deadline:
            sleep(0.002)
        return
    while os.path.exists(f"/proc/{pid}") and monotonic() < deadline:
        sleep(0.002)


def _kill(processes: list[int]) -> None:
    for pid in processes:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _is_launcher(pid: int) -> bool:
    """Whether a process is one that waits, or is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return True
    return state in (b"Z", b"X") or _LAUNCHER.encode() in words


class _Process(NamedTuple):
    parent: int
    group: int
    session: int


def _processes() -> dict[int, _Process]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path("/proc", name, "stat").read_bytes()
                words = stat[stat.rindex(b")") + 2 :].split()
                found[int(name)] = _Process(*map(int, words[1:4]))
    return found


def _tree(root: int, table: dict[int, _Process] | None = None) -> list[int]:
    """Returns the processes below ``root``, and those of its session that lost their parents."""
    table = _processes() if table is None else table
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found = dict.fromkeys([root, *(p for p, process in table.items() if process.session == root)])
    queue = list(found)
    for pid in queue:
        new = [child for child in children.get(pid, ()) if child not in found]
        found.update(dict.fromkeys(new))
        queue += new
    return queue


def members(process: subprocess.Popen) -> list[int]:
    """Returns the processes of a program that was started, without those that only wait for it."""
    return [pid for pid in _tree(process.pid) if not _is_launcher(pid)]


def resident(root: int) -> int:
    """Returns the bytes of memory that a program and all that it started have."""
    pages = 0
    for pid in _tree(root):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Completed:
    """A program's exit status and output."""

    returncode: int
    stdout: bytes
    stderr: bytes


class TooLong(Exception):
    """A program ran longer than it may."""


class TooMuch(Exception):
    """A program wrote more than it may."""


def run(
    words: Sequence[str], confinement: Confinement, seconds: float, most_output: int, **options: Any
) -> Completed:
    """Runs a confined program to its end, without input.

    Args:
        most_output: bytes that it may write to each of its outputs.

    Raises:
        TooLong, TooMuch: it was killed, with all that it started.
        OSError: it cannot be started.
    """
    process = start(
        words, confinement, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    parts: dict[Any, list[bytes]] = {process.stdout: [], process.stderr: []}
    deadline = monotonic() + seconds
    try:
        with selectors.DefaultSelector() as selector:
            for stream in parts:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(deadline - monotonic(), 0))
                if not ready:
                    raise TooLong
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    parts[key.fileobj].append(data)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif sum(map(len, parts[key.fileobj])) > most_output:
                        raise TooMuch
        try:
            process.wait(max(deadline - monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise TooLong from None
    finally:
        end(process)
        for stream in parts:
            stream.close()
    output, errors = (b"".join(found) for found in parts.values())
    return Completed(process.returncode, output, errors)


_lock = ForkSafeLock()
_guarded: list[tuple[int, int]] = []


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Keeps this process out of the reach of those it starts, for the length of the block.

    Its memory cannot be read or traced by others of the same user, and what loses its parent below becomes
    its child, so that :func:`end` finds it.
    """
    libc = ctypes.CDLL(None)
    with _lock:
        if not _guarded:
            reaper = ctypes.c_int()
            libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(reaper), 0, 0, 0)
            before = (libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0), reaper.value)
            libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        else:
            before = _guarded[0]
        _guarded.append(before)
    try:
        yield
    finally:
        with _lock:
            _guarded.pop()
            if not _guarded:
                libc.prctl(_PR_SET_DUMPABLE, before[0], 0, 0, 0)
                libc.prctl(_PR_SET_CHILD_SUBREAPER, before[1], 0, 0, 0)
