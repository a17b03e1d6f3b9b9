"""Process of a kernel on trial: started, limited, asked, and ended with all that it started.

What it says is not believed further than it can be: an answer without the request's number is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from ..errors import InputError
from ..io import sandbox
from ..io.sandbox import Confinement
from ..kernels.user import cpp, source
from .memory import Shared
from .witness import Account, Witness

#: Bytes that a kernel may print in all.
MOST_OUTPUT = 1 << 20

#: Seconds of the other process between two requests that do not count as the kernel's.
START_S = 60.0

#: Seconds between two looks at the memory of a process that no limit of address space holds.
WATCH_S = 0.1

#: What interpreting an answer fails with that is no answer.
_MISSHAPEN = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, StopIteration,
)  # fmt: skip

#: What is said of a kernel that answers in the place of what runs it.
FORGED = "cheating: it wrote to a pipe that is not its own; it was stopped"


class Fault(Exception):
    """A kernel's fault, in one line."""


@dataclass(frozen=True)
class Limits:
    """Time and memory that a kernel may use.

    Attributes:
        seconds: of one case, and of the timed calls of one request.
        memory: bytes of address space on the CPU; with sanitizers, and of CUDA's process, of resident memory.
        compile_s: seconds of the compiler.
    """

    seconds: float = 10.0
    memory: int = 8 << 30
    compile_s: float = 120.0


class Process:
    """A confined process that runs one kernel; see :class:`Limits`.

    The kernel shares the process's memory, so nothing that the process answers is taken on trust: an answer
    has the request's number and the expected form, or the kernel is at fault.

    Args:
        subject: a kernel file; ``engine:NAME`` for one of the engine's own, ``torch`` for PyTorch's.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads.
        sanitize: on the CPU, with the compiler's sanitizers.
        stray: says what an access was that hit a guard, by the tensor's name, the offset from its first page
            and whether that is behind it.

    Attributes:
        layers: what confines the process: :mod:`cnn_engine.io.sandbox`.
        untrusted: whether it is a kernel file, and none of the engine's or PyTorch's kernels.
        account: what the last request cost by the system's account; None on a GPU.

    Raises:
        Fault: the kernel does not compile, or its process ended.
        UnsupportedError: there is no compiler.
    """

    def __init__(
        self, subject: str, device: str, threads: int, limits: Limits, sanitize: bool,
        stray: Callable[[str, int, bool], str],
    ) -> None:  # fmt: skip
        self.subject, self.sanitize, self.stray, self.limits = subject, sanitize, stray, limits
        self.output = b""
        self._printed = 0
        self._buffer = b""
        self.untrusted = _is_file(subject)
        self._witness: Witness | None = None
        self.account: Account | None = None
        self._unasked = 0.0
        self._closing = contextlib.ExitStack()
        try:
            with self._closing:
                self._start(device, threads)
                self._closing = self._closing.pop_all()
        except InputError as error:
            raise Fault(self._shortened(str(error))) from None

    def _start(self, device: str, threads: int) -> None:
        self._closing.enter_context(sandbox.guarded())
        host = device == "cpu"
        library = None
        if host and self.untrusted:  # by this process, which alone may write to the cache
            made = cpp.compile(source.read(self.subject), self.sanitize, self.limits.compile_s)
            library = cpp.file_of(made, self.sanitize)
        self.shared = Shared()
        self._closing.callback(self.shared.close)
        ask, self._requests = os.pipe()
        self._replies, answered = os.pipe()
        for descriptor in (self._requests, self._replies):
            self._closing.callback(os.close, descriptor)
        os.set_blocking(self._requests, False)
        inherited = [ask, answered, self.shared.descriptor]
        words = [sys.executable, "-m", "cnn_engine.kernel.sandbox_worker", *map(str, inherited)]
        if library is not None and library.startswith(_DESCRIPTORS):
            inherited.append(int(library.removeprefix(_DESCRIPTORS)))
        # A GPU's code runs there and cannot ask anything of the system; its driver asks for a lot.
        limited = host and not self.sanitize
        self._watched = not limited
        confinement = Confinement(memory=self.limits.memory if limited else 0, filtered=host)
        try:
            self.process = sandbox.start(
                words, confinement, inherited, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env=self._environment(threads),
            )  # fmt: skip
        finally:
            os.close(ask)
            os.close(answered)
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        self._closing.callback(self._end)
        answer = self.ask(
            "open", START_S + self.limits.compile_s, subject=self.subject, device=device,
            threads=threads, library=library,
        )  # fmt: skip
        self.layers: list[str] = answer["layers"]
        if host:
            self._witness = Witness(sandbox.members(self.process))
            self._closing.callback(self._witness.close)
            self._witness.stop()

    def _environment(self, threads: int) -> dict[str, str]:
        found = {
            **os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        return {**found, **cpp.sanitizer_environment()} if self.sanitize else found

    def close(self) -> None:
        """Ends the process, and whatever it started."""
        self._closing.close()

    def _end(self) -> None:
        sandbox.end(self.process)
        self._reader.join(timeout=5)

    def _read_output(self) -> None:
        with self.process.stdout as stream:
            while data := os.read(stream.fileno(), 65536):
                self._printed += len(data)
                self.output = (self.output + data)[:65536]
                if self._printed > MOST_OUTPUT:
                    sandbox.end(self.process)

    def ask(self, what: str, seconds: float, **content: Any) -> dict[str, Any]:
        """Returns the process's answer to a request; on the CPU the process runs for that time only.

        Raises:
            Fault: it says what is wrong, ended, or took longer than ``seconds``.
        """
        if self._witness is None:
            return self._ask(what, seconds, content)
        with self._witness.running() as found:
            answer = self._ask(what, seconds, content)
        (self.account,) = found
        self._unasked += self.account.unasked
        if (
            what == "time"
        ):  # it may have begun while inputs were written, or gone on after the last request
            self.account = replace(self.account, unasked=self._unasked)
            self._unasked = 0.0
        return answer

    def _ask(self, what: str, seconds: float, content: dict[str, Any]) -> dict[str, Any]:
        number = secrets.token_hex(8)
        deadline = perf_counter() + seconds
        request = json.dumps({"do": what, "number": number, **content}).encode() + b"\n"
        while request:
            self._wait(deadline, seconds, writing=True)
            try:
                request = request[os.write(self._requests, request) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Fault(self._ended()) from None
        while b"\n" not in self._buffer:
            self._wait(deadline, seconds)
            data = os.read(self._replies, 65536)
            if not data:
                raise Fault(self._ended())
            self._buffer += data
            if len(self._buffer) > MOST_OUTPUT:
                raise self._stopped(FORGED)
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
            if answer.pop("number") != number:
                raise self._stopped(FORGED)
            if "fault" in answer:
                raise Fault(self._fault(**answer))
            if "error" in answer:
                raise Fault(self._shortened(answer["error"]))
            return _ANSWERS[what](**answer)
        except _MISSHAPEN:
            raise self._stopped(FORGED) from None

    def _wait(self, deadline: float, seconds: float, writing: bool = False) -> None:
        """Waits until a pipe is ready.

        Raises:
            Fault: not in time, or more memory was taken than may be; the process was stopped.
        """
        reads, writes = ([], [self._requests]) if writing else ([self._replies], [])
        while True:
            left = deadline - perf_counter()
            if left <= 0:
                raise self._stopped(
                    f"time: expected an end within {seconds:g} s, found none; it was stopped"
                )
            ready = select.select(reads, writes, [], min(left, WATCH_S) if self._watched else left)
            if any(ready):
                return
            if self._watched and sandbox.resident(self.process.pid) > self.limits.memory:
                raise self._stopped(
                    f"memory: expected at most {self.limits.memory >> 20} MiB, found more; it was stopped"
                )

    def _stopped(self, why: str) -> Fault:
        """Ends the process; returns the fault that says why."""
        sandbox.end(self.process)
        return Fault(why)

    def _ended(self) -> str:
        """Returns why there is no process any more."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            sandbox.end(self.process)
            return "it closed the pipe that it answers on; it was stopped"
        self._reader.join(timeout=5)
        if self._printed > MOST_OUTPUT:
            return f"output: expected at most {MOST_OUTPUT >> 20} MiB printed, found more; it was stopped"
        text = self.output.decode(errors="replace")
        if self.sanitize and (line := sanitizer_line(text)):
            return line
        if code < 0:
            name = signal.Signals(-code).name
            return f"crash: it was ended by {name}{_last_line(text)}"
        return f"it ended the process: exit({code}) was called{_last_line(text)}"

    def _fault(self, fault: int, address: int, place: list | None) -> str:
        name = signal.Signals(fault).name
        if place is None:
            if fault in (signal.SIGFPE, signal.SIGILL):
                return f"crash: {name}"
            return f"crash: {name} at address {address:#x}, which is no buffer's"
        tensor, offset, behind = place
        return self.stray(str(tensor), int(offset), bool(behind))

    def _shortened(self, text: str) -> str:
        text = " ".join(text.split())
        if os.sep in self.subject:
            text = text.replace(f"{Path(self.subject).parent}{os.sep}", "")
        return text[:600]


# ---- the form of each answer; a keyword too many or too few is a TypeError ----


def _opened(layers: list[str]) -> dict[str, Any]:
    return {"layers": [str(layer) for layer in layers]}


def _case(refused: str | None = None, workspace: int = 0) -> dict[str, Any]:
    if refused is not None:
        return {"refused": " ".join(str(refused).split())[:600]}
    if type(workspace) is not int or workspace < 0:
        raise ValueError("workspace")
    return {"workspace": workspace}


def _nothing() -> dict[str, Any]:
    return {}


def _times(seconds: list[float]) -> dict[str, Any]:
    if not all(type(s) in (int, float) and 1e-9 <= s <= 1e6 for s in seconds):  # of any clock
        raise ValueError("seconds")
    return {"seconds": seconds}


def _resources(launches: list[dict[str, Any]]) -> dict[str, Any]:
    return {"launches": launches}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "open": _opened, "case": _case, "map": _nothing, "call": _nothing, "bind_all": _nothing,
    "time": _times, "resources": _resources,
}  # fmt: skip

_DESCRIPTORS = "/proc/self/fd/"


def _is_file(subject: str) -> bool:
    return not subject.startswith("engine:") and subject != "torch"


def sanitizer_line(text: str) -> str | None:
    """Returns the line of a sanitizer's report that names the fault and its position, or None."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if "runtime error:" in line or "ERROR: AddressSanitizer" in line:
            what = line.split("ERROR: AddressSanitizer: ")[-1].split(" on address")[0]
            standings = [
                frame.split()[-1] for frame in lines[index + 1 : index + 40]
                if frame.strip().startswith("#") and ":" in frame.split()[-1]
            ]  # fmt: skip
            if "runtime error:" in line:
                return " ".join(what.split())
            own = next(
                (p for p in standings if p.split(":")[0].endswith((".cpp", ".cc", ".cxx"))), ""
            )
            return f"sanitizer: {what} {own}".strip()
    return None


def _last_line(text: str) -> str:
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return f" ({last[:200]})" if last else ""
