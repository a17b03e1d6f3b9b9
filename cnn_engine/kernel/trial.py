"""A kernel on trial: run in a process of its own, and judged in this one.

The other process (:mod:`.job`) has the kernel and the memory that it works in, and nothing to judge by. This
one makes the inputs, knows the reference, sets the limits, and ends the other with all that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import select
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..engine.check import tolerance
from ..graph import reference
from .cases import Case
from .memory import POISON, Shared, layout

#: Units in the last place that a function of the C library may be off, beside the rounding of sums.
FUNCTION_ULPS = 8 * 2.0**-23

#: Bytes that a kernel may print in all.
MOST_OUTPUT = 1 << 20

#: Bytes of the sets of inputs and outputs of a timed series; fewer sets where they would need more.
MOST_SETS_BYTES = 384 << 20

#: Outputs of a timed series that are compared with the reference; which, the kernel cannot know.
COMPARED = 3

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


@dataclass
class Outcome:
    """A case that a kernel passed, or that it does not take.

    Attributes:
        case: the case.
        refused: why it is not taken, or None.
        error: the largest difference from the reference.
        allowed: the tolerance.
    """

    case: Case
    refused: str | None = None
    error: float = 0.0
    allowed: float = 0.0


@dataclass(frozen=True)
class Wanted:
    """Inputs of a case, and what must come out.

    Attributes:
        inputs: name -> array.
        y: the reference, float64, or None where it is not compared.
        allowed: the tolerance of every element, or None.
    """

    inputs: dict[str, np.ndarray]
    y: np.ndarray | None = None
    allowed: np.ndarray | None = None


def wanted(case: Case, generator: np.random.Generator, compare: bool = True) -> Wanted:
    """Returns fresh inputs, with their reference where they are to be compared."""
    inputs = case.arrays(generator)
    y = None
    if compare:
        (y,) = reference.reference(case.graph, inputs).values()
    return Wanted(inputs, y)


def slack(given: Wanted, case: Case, computes: str) -> float:
    """Returns how far rounding may take an output, where products are rounded to ``computes``."""
    (found,) = tolerance(case.graph, given.inputs, {"y": given.y}, computes).values()
    return found


def room(allowed: float, y: np.ndarray) -> np.ndarray:
    """Returns the tolerance of every element."""
    with np.errstate(invalid="ignore"):
        return allowed + FUNCTION_ULPS * np.abs(np.where(np.isfinite(y), y, 0.0))


def judged(case: Case, generator: np.random.Generator, computes: str) -> Wanted:
    """Returns fresh inputs with their reference and its tolerance."""
    given = wanted(case, generator)
    return replace(given, allowed=room(slack(given, case, computes), given.y))


@dataclass
class Series:
    """Fresh inputs for a series of timed calls, the same for all kernels that are ranked.

    Attributes:
        case: the case.
        sets: as many as there are calls, or fewer where memory is short; some with their reference.
    """

    case: Case
    sets: list[Wanted] = field(default_factory=list)

    @property
    def first(self) -> Wanted:
        """A set that has its reference."""
        return next(given for given in self.sets if given.y is not None)

    def within(self, allowed: float) -> Series:
        """Returns the same inputs with another tolerance."""
        return Series(
            self.case,
            [g if g.y is None else replace(g, allowed=room(allowed, g.y)) for g in self.sets],
        )

    @staticmethod
    def make(case: Case, calls: int) -> Series:
        """Returns ``calls`` sets where memory allows, from numbers that nobody can know beforehand.

        The tolerance is missing: :meth:`within`.
        """
        generator = np.random.default_rng(secrets.randbits(128))
        nbytes = sum(v.nbytes for v in case.graph.inputs) + 4 * int(np.prod(case.outputs))
        count = max(min(calls, MOST_SETS_BYTES // max(nbytes, 1)), 2)
        compared = set(generator.choice(count, min(COMPARED, count), replace=False).tolist())
        return Series(case, [wanted(case, generator, i in compared) for i in range(count)])


class Trial:
    """A process with one kernel in it; see :class:`Limits` for what it may take.

    Args:
        subject: a kernel file; ``engine:NAME`` for one of the engine's own, ``torch`` for PyTorch's.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        threads: of CPU work.
        sanitize: on the CPU, with the compiler's sanitizers.

    Raises:
        Fault: the kernel does not compile, or its process ended.
    """

    def __init__(
        self, subject: str, device: str, threads: int, limits: Limits | None = None, sanitize: bool = False
    ) -> None:  # fmt: skip
        self.subject, self.device, self.threads = subject, device, threads
        self.limits = limits or Limits()
        self.sanitize = sanitize
        self.shared = Shared()
        self.output = b""
        self._printed = 0
        ask, asked = os.pipe()
        answer, answered = os.pipe()
        memory = 0 if device != "cpu" or sanitize else self.limits.memory
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
            self.ask("open", START_S + self.limits.compile_s, subject=subject, device=device,
                     threads=threads, sanitize=sanitize)  # fmt: skip
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        tensor, offset, behind = place
        if offset >= 0 and not behind:
            return f"it wrote to its input {tensor}, which is not its to change"
        if offset < 0:
            return f"out of bounds: it touched {-offset} bytes before {tensor}"
        region = next(r for r in self.plan.regions if r.name == tensor)
        end = region.start(self._at_end) + region.nbytes
        return f"out of bounds: it touched {offset - end} bytes behind the end of {tensor}"

    def _shortened(self, text: str) -> str:
        text = (
            text.replace(f"{Path(self.subject).parent}{os.sep}", "")
            if os.sep in self.subject
            else text
        )
        return text[:600]

    def prepare(self, case: Case, sets: int) -> str | None:
        """Makes memory for a case; returns why it is not taken, or None."""
        found = self.ask("case", self.limits.seconds, case=_packed(case))
        if "refused" in found:
            return found["refused"]
        inputs = {value.name: value.nbytes for value in case.graph.inputs}
        output = 4 * int(np.prod(case.outputs))
        if found["workspace"] > self.limits.memory:
            raise Fault(
                f"workspace: expected at most {self.limits.memory} bytes, found {found['workspace']}"
            )
        self.case = case
        self.plan = layout(inputs, output, found["workspace"], sets)
        self.memory = self.shared.resize(self.plan.nbytes)
        self.ask("map", self.limits.seconds + START_S, plan=_packed(self.plan))
        return None

    def fill(self, number: int, given: Wanted, at_end: bool) -> None:
        """Writes a set's inputs, and poison everywhere else."""
        for name, region in self.plan.of(number).items():
            pages = self.memory[region.offset : region.offset + region.length]
            pages.view(np.uint32)[:] = POISON
            if name in given.inputs:
                start = region.start(at_end)
                data = given.inputs[name].reshape(-1).view(np.uint8)
                pages[start : start + region.nbytes] = data

    def judge(self, number: int, given: Wanted, at_end: bool, compare: bool = True) -> float:
        """Looks at what a call left behind; returns the largest difference from the reference.

        Raises:
            Fault: inputs changed, memory around a buffer did, or an output is wrong.
        """
        for name, region in self.plan.of(number).items():
            pages = self.memory[region.offset : region.offset + region.length]
            start = region.start(at_end)
            before, behind = pages[:start], pages[start + region.nbytes :]
            for where, part in (("before", before), ("behind", behind)):
                words = part[: len(part) // 4 * 4].view(np.uint32)
                if len(changed := np.flatnonzero(words != POISON)):
                    away = (
                        4 * int(changed[0])
                        if where == "behind"
                        else len(before) - 4 * int(changed[-1])
                    )
                    raise Fault(f"out of bounds: it wrote {away} bytes {where} {name}")
            if name in given.inputs:
                data = pages[start : start + region.nbytes]
                if not np.array_equal(data, given.inputs[name].reshape(-1).view(np.uint8)):
                    raise Fault(f"it wrote to its input {name}, which is not its to change")
        if not compare or given.y is None:
            return 0.0
        return judge_output(self.output_of(number, at_end), given, self.case)

    def output_of(self, number: int, at_end: bool) -> np.ndarray:
        """Returns what a call wrote."""
        region = self.plan.of(number)["y"]
        start = region.offset + region.start(at_end)
        data = self.memory[start : start + region.nbytes]
        return data.view(np.float32).reshape(self.case.outputs)

    def check(self, case: Case, given: Wanted) -> Outcome:
        """Runs a case three times: at the end of its pages twice, at their start, inputs the same.

        Raises:
            Fault: the kernel is wrong.
        """
        if reason := self.prepare(case, 1):
            return Outcome(case, reason)
        seen = None
        error = 0.0
        for at_end in (True, True, False):
            self._at_end = at_end
            self.fill(0, given, at_end)
            self.ask("call", self.limits.seconds, at_end=at_end)
            try:
                error = max(error, self.judge(0, given, at_end))
            except Fault as fault:
                if seen is not None and np.array_equal(
                    seen, self.output_of(0, at_end), equal_nan=True
                ):
                    raise
                if seen is None:
                    raise self._maybe_race(fault, given) from None
                raise Fault(
                    f"{fault}; the call before, on the same inputs, was right: {_CAUSES}"
                ) from None
            found = self.output_of(0, at_end).copy()
            if seen is not None and not np.array_equal(seen, found, equal_nan=True):
                pass  # within the tolerance: sums in another order
            seen = found
        return Outcome(case, None, error, float(given.allowed.max(initial=0.0)))

    def _maybe_race(self, fault: Fault, given: Wanted) -> Fault:
        """Returns a fault with the remark that the same inputs gave something else, where they do."""
        first = self.output_of(0, True).copy()
        for _ in range(3):
            self.fill(0, given, True)
            try:
                self.ask("call", self.limits.seconds, at_end=True)
            except Fault:
                return fault
            if not np.array_equal(first, self.output_of(0, True), equal_nan=True):
                return Fault(
                    f"{fault}; other calls on the same inputs give something else: {_CAUSES}"
                )
        return fault

    def time(self, series: Series, calls: int, budget_s: float = 60.0) -> list[float]:
        """Returns the seconds of ``calls`` calls, each on fresh inputs, and looks at what they wrote.

        Fewer calls, though at least six, where they would take longer than ``budget_s``.

        Raises:
            Fault: the kernel is wrong in one of the calls.
        """
        case, sets = series.case, series.sets
        if reason := self.prepare(case, len(sets)):
            raise Fault(f"{case.label}: {reason}")
        self._at_end = True
        seconds: list[float] = []
        generator = np.random.default_rng(secrets.randbits(64))
        warm = True
        while len(seconds) < calls or warm:
            order = generator.permutation(len(sets))[: max(calls - len(seconds), 1)].tolist()
            if warm:
                order = order[:2]
            for number in order:
                self.fill(number, sets[number], True)
            found = [
                second
                for number in order
                for second in self.ask("time", self.limits.seconds, sets=[number])["seconds"]
            ]
            if len(found) != len(order) or not all(s > 0 for s in found):
                raise Fault(FORGED)
            for number in order:
                try:
                    self.judge(number, sets[number], True)
                except Fault as fault:
                    raise Fault(f"in a timed call on fresh inputs: {fault}") from None
                if not self._written(number):
                    raise Fault("in a timed call: some of y was never written")
            if not warm:
                seconds += found
            elif sum(found) > 0:
                calls = min(calls, max(int(budget_s * len(found) / sum(found)), 6))
            warm = False
        return seconds

    def _written(self, number: int) -> bool:
        return not bool((self.output_of(number, True).view(np.uint32) == POISON).any())


_CAUSES = "a race, memory read before it is written, or state kept between calls"


def judge_output(found: np.ndarray, given: Wanted, case: Case) -> float:
    """Returns the largest difference of an output from its reference.

    Raises:
        Fault: it is beyond the tolerance; names the first wrong element with both values.
    """
    exact = given.y
    with np.errstate(invalid="ignore"):
        same = (found == exact) | (np.isnan(found) & np.isnan(exact))
        difference = np.where(same, 0.0, np.abs(found - exact))
    wrong = ~(difference <= given.allowed)  # NaN is wrong
    if not wrong.any():
        return float(difference.max(initial=0.0))
    places = np.argwhere(wrong)
    first = tuple(int(i) for i in places[0])
    unwritten = found.view(np.uint32) == POISON
    value = "nothing written" if unwritten[first] else f"{found[first]:.6g}"
    text = (
        f"wrong: {case.label}: y{list(first)}: expected {exact[first]:.6g}, found {value} "
        f"({len(places):,} of {found.size:,} elements differ"
    )
    if found.ndim == 4 and len(places) < found.size:
        rows, columns = found.shape[2:]
        i, j = places[:, 2], places[:, 3]
        border = (i == 0) | (i == rows - 1) | (j == 0) | (j == columns - 1)
        if border.all() and rows > 2 and columns > 2:
            text += ", all of them at the image's border"
    return _raise(text + ")")


def _raise(text: str) -> float:
    raise Fault(text)


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


def _packed(value: Any) -> str:
    return b64encode(pickle.dumps(value)).decode()
