"""A kernel on trial: run in a process of its own, and judged in this one.

The other process (:mod:`.job`) has the kernel and the memory that it works in, and nothing to judge by. This
one makes the inputs, knows the reference, sets the limits, and ends the other with all that it started.
"""

from __future__ import annotations

import itertools
import math
import pickle
import secrets
from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..report import units
from .cases import Case
from .expected import Series, Wanted, judge_output
from .memory import PAGE, POISON, layout
from .process import FORGED, START_S, Fault, Limits, Process
from .witness import OVERHEAD_S

#: Calls before the timed ones, on inputs of their own.
WARM_CALLS = 2

#: Buffers of each tensor, at least, among which timed calls rotate.
ROTATED = 4

#: Seconds that a request's calls take together, at least; calls of a request, and bytes of buffers, at most.
REQUEST_S = 10 * OVERHEAD_S
MOST_CALLS = 256
MOST_SETS_BYTES = 384 << 20

#: Requests of a series, at least: the median of so many has an interval.
FEWEST = 6


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


def _far(nbytes: int) -> str:
    """Returns what to say of an address beyond a buffer's guard page, where another may have been meant."""
    return ", the nearest buffer" if nbytes > PAGE else ""


class Trial:
    """A kernel in a process of its own, its cases and its timed calls.

    Args:
        subject, device, threads, limits, sanitize: as :class:`.process.Process` takes them.

    Raises:
        Fault: the kernel does not compile, or its process ended.
    """

    def __init__(
        self, subject: str, device: str, threads: int, limits: Limits | None = None, sanitize: bool = False
    ) -> None:  # fmt: skip
        self.limits = limits or Limits()
        self._process = Process(subject, device, threads, self.limits, sanitize, self._stray)
        self._threads = threads
        self._generator = np.random.default_rng(secrets.randbits(128))
        self._at_end = True

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.close()

    @property
    def layers(self) -> list[str]:
        """Mechanisms that confine the process: see :mod:`cnn_engine.io.sandbox`."""
        return self._process.layers

    def _ask(self, what: str, **content: Any) -> dict[str, Any]:
        return self._process.ask(what, self.limits.seconds, **content)

    def _stray(self, tensor: str, offset: int, behind: bool) -> str:
        """Returns what an access at ``offset`` bytes from a tensor's first page was."""
        if offset < 0:
            return f"out of bounds: it touched {-offset} bytes before {tensor}{_far(-offset)}"
        if not behind:
            return f"it wrote to its input {tensor}, which is not its to change"
        region = next(r for r in self.plan.regions if r.name == tensor)
        end = region.start(self._at_end) + region.nbytes
        touched = f"out of bounds: it touched {offset - end} bytes behind the end of {tensor}"
        return f"{touched}{_far(offset - end)}"

    def resources(self) -> list[dict[str, Any]]:
        """Returns the GPU resources of each launch of a CUDA file, for the case that was called last."""
        return self._ask("resources")["launches"]

    def prepare(self, case: Case, sets: int) -> str | None:
        """Makes memory for a case; returns why it is not taken, or None."""
        found = self._ask("case", case=_packed(case))
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
        self.memory = self._process.shared.resize(self.plan.nbytes)
        self._process.ask("map", self.limits.seconds + START_S, plan=_packed(self.plan))
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

    def judge(self, number: int, given: Wanted, at_end: bool) -> float:
        """Compares the outputs of a call with the reference; returns the largest difference.

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
        return judge_output(self.output_of(number, at_end), given, self.case)

    def output_of(self, number: int, at_end: bool) -> np.ndarray:
        """Returns the output of a call."""
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
            self._ask("call", at_end=at_end)
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
            seen = self.output_of(0, at_end).copy()
        return Outcome(case, None, error, float(given.allowed.max(initial=0.0)))

    def _maybe_race(self, fault: Fault, given: Wanted) -> Fault:
        """Returns a fault with the remark that the same inputs gave something else, where they do."""
        first = self.output_of(0, True).copy()
        for _ in range(3):
            self.fill(0, given, True)
            try:
                self._ask("call", at_end=True)
            except Fault:
                return fault
            if not np.array_equal(first, self.output_of(0, True), equal_nan=True):
                return Fault(
                    f"{fault}; other calls on the same inputs give something else: {_CAUSES}"
                )
        return fault

    def time(self, series: Series, calls: int, budget_s: float = 60.0) -> list[float]:
        """Returns seconds of a call, ``calls`` times at most, each on fresh inputs; checks their outputs.

        Short calls are timed several to a request, and their mean counts. Fewer requests, though at least
        six, where they would take longer than ``budget_s``.

        Raises:
            Fault: the kernel is wrong in one of the calls, or its timer was tampered with.
        """
        self._at_end = True
        numbers = itertools.count(1)
        self._prepare_timed(series.case, WARM_CALLS)
        call_s = max(self._timed(series, list(itertools.islice(numbers, WARM_CALLS))), 1e-7)
        size = self._calls_of_a_request(series.case, call_s)
        requests = min(calls, max(FEWEST, -(-calls // size)))
        requests = min(requests, max(int(budget_s / (call_s * size)), FEWEST))
        self._prepare_timed(series.case, max(size, ROTATED))
        return [self._timed(series, list(itertools.islice(numbers, size))) for _ in range(requests)]

    def _prepare_timed(self, case: Case, sets: int) -> None:
        if reason := self.prepare(case, sets):
            raise Fault(f"{case.label}: {reason}")

    def _calls_of_a_request(self, case: Case, call_s: float) -> int:
        """Returns how many calls a request times, so that what it costs itself is a tenth at most."""
        if self._process.account is None:  # the GPU's own clock is read around each call
            return 1
        most = MOST_SETS_BYTES // max(self.plan.nbytes // self.plan.sets, 1)
        return max(min(math.ceil(REQUEST_S / call_s), MOST_CALLS, most), 1)

    def _timed(self, series: Series, numbers: list[int]) -> float:
        """Returns the mean seconds of calls in one request, each on the inputs of one of ``numbers``.

        Which buffers they use changes from request to request.
        """
        given = [series[number] for number in numbers]
        sets = self._generator.permutation(self.plan.sets)[: len(given)].tolist()
        if self._process.untrusted:  # bound before the inputs are there
            self._bind(sets)
        for number, inputs in zip(sets, given, strict=True):
            self.fill(number, inputs, True)
        if not self._process.untrusted:  # the engine's own kernels pack the weights now
            self._bind(sets)
        seconds = self._ask("time", sets=sets)["seconds"]
        if len(seconds) != len(sets):
            raise Fault(FORGED)
        for number, inputs in zip(sets, given, strict=True):
            try:
                self.judge(number, inputs, True)
            except Fault as fault:
                raise Fault(f"in a timed call on fresh inputs: {fault}") from None
            if not self._written(number):
                raise Fault("in a timed call: some of y was never written")
        return self._believed(sum(seconds), len(sets)) / len(sets)

    def _bind(self, sets: list[int]) -> None:
        if self._process.account is not None:
            self._process.ask("bind_all", self.limits.seconds + START_S, sets=sets)

    def _believed(self, seconds: float, calls: int) -> float:
        """Returns the seconds of a request's calls: the process's own, or the judge's where they are more.

        Raises:
            Fault: the process's own cannot be.
        """
        account = self._process.account
        if account is None or not self._process.untrusted:
            return seconds
        if account.contradicts(seconds):
            raise Fault(
                f"cheating: its process says that {calls} calls took {units.seconds(seconds)}; "
                f"the system counts {units.seconds(account.main)} of CPU time"
            )
        return max(seconds, account.least(self._threads, calls))

    def _written(self, number: int) -> bool:
        return not bool((self.output_of(number, True).view(np.uint32) == POISON).any())


_CAUSES = "a race, memory read before it is written, or state kept between calls"


def _packed(value: Any) -> str:
    return b64encode(pickle.dumps(value)).decode()
