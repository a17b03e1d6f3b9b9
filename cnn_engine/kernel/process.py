"""The process that a kernel on trial runs in: started, limited, asked, and ended with all that it started.

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
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from .memory import Shared

#: Bytes that a kernel may print in all.
MOST_OUTPUT = 1 << 20

#: Seconds of the other process between two requests that do not count as the kernel's.
START_S = 60.0

#: What is said of a kernel that answers in the place of what runs it.
FORGED = "cheating: it wrote to a pipe that is not its own; it was stopped"


class Fault(Exception):
    """What is wrong with a kernel, in one line."""


@dataclass(frozen=True)
class Limits:
    """What a kernel may take.

    Attributes:
        seconds: of one case, and of each ten timed calls.
        memory: bytes of address space on the CPU.
        compile_s: seconds of the compiler.
    """

    seconds: float = 10.0
    memory: int = 8 << 30
    compile_s: float = 120.0


class Process:
    """A process with one kernel in it; see :class:`Limits` for what it may take.

    Args:
        subject: a kernel file; ``engine:NAME`` for one of the engine's own, ``torch`` for PyTorch's.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        threads: of CPU work.
        sanitize: on the CPU, with the compiler's sanitizers.
        stray: says what an access was that hit a guard, by the tensor's name, the offset from its first page
            and whether that is behind it.

    Raises:
        Fault: the kernel does not compile, or its process ended.
    """

    def __init__(
        self, subject: str, device: str, threads: int, limits: Limits, sanitize: bool,
        stray: Callable[[str, int, bool], str],
    ) -> None:  # fmt: skip
        self.subject, self.sanitize, self.stray = subject, sanitize, stray
        self.shared = Shared()
        self.output = b""
        self._printed = 0
        ask, asked = os.pipe()
        answer, answered = os.pipe()
        memory = 0 if device != "cpu" or sanitize else limits.memory
        environment = {
            **os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        if sanitize:
            from ..engine.kernels.user import cpp

            environment.update(cpp.sanitizer_environment())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cnn_engine.kernel.job",
             *map(str, (ask, answered, self.shared.descriptor, memory))],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(ask, answered, self.shared.descriptor), start_new_session=True,
            env=environment,
        )  # fmt: skip
        os.close(ask)
        os.close(answered)
        self._requests, self._replies = asked, answer
        self._buffer = b""
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        try:
            self.ask("open", START_S + limits.compile_s, subject=subject, device=device,
                     threads=threads, sanitize=sanitize)  # fmt: skip
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process, and whatever it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(timeout=5)
        for descriptor in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._requests = self._replies = -1
        self.shared.close()

    def _read_output(self) -> None:
        with self.process.stdout as stream:
            while data := os.read(stream.fileno(), 65536):
                self._printed += len(data)
                self.output = (self.output + data)[:65536]
                if self._printed > MOST_OUTPUT:
                    with contextlib.suppress(OSError):
                        os.killpg(self.process.pid, signal.SIGKILL)

    def ask(self, what: str, seconds: float, **content: Any) -> dict[str, Any]:
        """Returns the process's answer to a request.

        Raises:
            Fault: it says what is wrong, ended, or took longer than ``seconds``.
        """
        number = secrets.token_hex(8)
        request = {"do": what, "number": number, **content}
        try:
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        except OSError:
            raise Fault(self._ended()) from None
        deadline = perf_counter() + seconds
        while b"\n" not in self._buffer:
            left = deadline - perf_counter()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                self._kill()
                raise Fault(
                    f"time: expected an end within {seconds:g} s, found none; it was stopped"
                )
            data = os.read(self._replies, 65536)
            if not data:
                raise Fault(self._ended())
            self._buffer += data
            if len(self._buffer) > MOST_OUTPUT:
                self._kill()
                raise Fault(FORGED)
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer = json.loads(line)
            known = answer.pop("number") == number
        except (ValueError, AttributeError, KeyError):
            known = False
        if not known:
            self._kill()
            raise Fault(FORGED)
        if "fault" in answer:
            raise Fault(self._fault(answer))
        if "error" in answer:
            raise Fault(self._shortened(answer["error"]))
        return answer

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _ended(self) -> str:
        """Returns why there is no process any more."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._kill()
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

    def _fault(self, answer: dict[str, Any]) -> str:
        name = signal.Signals(answer["fault"]).name
        place = answer.get("place")
        if place is None:
            if answer["fault"] in (signal.SIGFPE, signal.SIGILL):
                return f"crash: {name}"
            return f"crash: {name} at address {answer['address']:#x}, which is no buffer's"
        return self.stray(*place)

    def _shortened(self, text: str) -> str:
        if os.sep in self.subject:
            text = text.replace(f"{Path(self.subject).parent}{os.sep}", "")
        return text[:600]


def sanitizer_line(text: str) -> str | None:
    """Returns the line of a sanitizer's report that says what is wrong and where, or None."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if "runtime error:" in line or "ERROR: AddressSanitizer" in line:
            what = line.split("ERROR: AddressSanitizer: ")[-1].split(" on address")[0]
            places = [
                frame.split()[-1] for frame in lines[index + 1 : index + 40]
                if frame.strip().startswith("#") and ":" in frame.split()[-1]
            ]  # fmt: skip
            if "runtime error:" in line:
                return " ".join(what.split())
            own = next((p for p in places if p.split(":")[0].endswith((".cpp", ".cc", ".cxx"))), "")
            return f"sanitizer: {what} {own}".strip()
    return None


def _last_line(text: str) -> str:
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return f" ({last[:200]})" if last else ""
