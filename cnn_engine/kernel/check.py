"""``kernel check``: a kernel over a grid of shapes, then timed on the largest; one finding, or none."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .. import devices
from ..devices import cuda_module
from ..errors import UnsupportedError
from ..kernels.user import cpp, nvcc, nvrtc, source
from ..measure import statistics
from ..measure.statistics import Estimate
from ..operators.operator import Cost
from ..target import Target
from .cases import Case, grid
from .expected import Series, judged
from .process import Fault, Limits
from .sandbox import Outcome, Trial

#: Timed calls of the largest case.
CALLS = 30

#: Seconds that they may take.
BUDGET_S = 5.0

#: The GPU that files are compiled for where there is none.
WITHOUT_GPU = "h100"

#: What compute-sanitizer is run with, in turn.
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass
class Checked:
    """Result of a check of a kernel.

    Attributes:
        file, operator, device, computes: of the kernel.
        outcomes: the cases that it passed or does not take.
        fault: what is wrong, in one line, or None; cases after it were not tried.
        time: seconds of one call of the largest case that it takes, or None.
        timed: that case's label.
        cost: of that case.
        launches: what each kernel of a CUDA file needs of the GPU.
        peak: FLOP/s that stand for all of the device, and what they are, or None.
        sanitized: what was run with which sanitizer.
        sandbox: what confined its process: see :mod:`cnn_engine.io.sandbox`.
        compiled: where there is no GPU, by what and for what the file was compiled, and why it was not run.
    """

    file: str
    operator: str
    device: str
    computes: str
    outcomes: list[Outcome] = field(default_factory=list)
    fault: str | None = None
    time: Estimate | None = None
    timed: str | None = None
    cost: Cost | None = None
    launches: list[dict[str, Any]] = field(default_factory=list)
    peak: tuple[float, str] | None = None
    sanitized: list[str] = field(default_factory=list)
    sandbox: list[str] = field(default_factory=list)
    compiled: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``--json``."""
        return {
            "schema": 1, "file": self.file, "operator": self.operator, "device": self.device,
            "computes": self.computes, "passed": self.fault is None if self.compiled is None else None,
            "fault": self.fault, "compiled": self.compiled,
            "cases": [
                {"case": o.case.label, "refused": o.refused, "max_abs_diff": o.error,
                 "tolerance": o.allowed} for o in self.outcomes
            ],
            "timed": self.timed, "seconds": self.time and asdict(self.time),
            "flops": self.cost and self.cost.flops, "bytes": self.cost and self.cost.bytes,
            "peak_flops_per_s": self.peak and self.peak[0], "peak": self.peak and self.peak[1],
            "launches": self.launches, "sanitized": self.sanitized, "sandbox": self.sandbox,
        }  # fmt: skip


def check(
    path: str,
    device: str | None = None,
    threads: int = 1,
    limits: Limits | None = None,
    sanitize: bool = False,
    cases: Sequence[Case] | None = None,
    time: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Checked:
    """Runs a kernel file on its test cases; faults are in the result.

    Args:
        device: None: the one that the file is for.
        sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer, or compute-sanitizer.
        cases: None: the operator's grid.
        time: whether to time the last case that it takes.
        progress: called with each case's label before it is tried.

    Raises:
        InputError: the file cannot be read, or its directives are at fault.
        UnsupportedError: there is no such device, compiler or sanitizer.
    """
    read = source.read(path)
    device = device or read.device
    if device.partition(":")[0] != read.device:
        raise UnsupportedError(
            f"--device: expected {read.device}, for which {path} is, found {device}"
        )
    if read.device == "cuda" and (reason := cuda_module.unavailable()):
        return _compiled_alone(read, path, reason)
    place = devices.select(device)
    if read.device == "cpu":
        cpp.compiler()  # its lack is no fault of the file
    found = Checked(str(path), read.contract.op, place.name, read.computes)
    cases = grid(read.contract.op) if cases is None else list(cases)
    generator = np.random.default_rng(secrets.randbits(128))
    try:
        with Trial(str(path), device, threads, limits, sanitize and read.device == "cpu") as trial:
            found.sandbox = trial.layers
            taken = None
            for case in cases:
                progress(case.label)
                outcome = trial.check(case, judged(case, generator, read.computes))
                found.outcomes.append(outcome)
                taken = taken if outcome.refused else case
            if taken is None:
                reasons = "; ".join(dict.fromkeys(o.refused for o in found.outcomes if o.refused))
                raise Fault(f"expected a case that it takes, found none: {reasons}")
            if sanitize and read.device == "cpu":
                found.sanitized.append("AddressSanitizer and UndefinedBehaviorSanitizer")
            elif time:
                progress(f"{taken.label}, timed")
                series = Series(taken, CALLS).within(read.computes)
                found.time = statistics.quantile(trial.time(series, CALLS, BUDGET_S))
                found.timed = taken.label
                found.cost = taken.graph.cost_of(taken.node)
                found.launches = trial.resources()
        if sanitize and read.device == "cuda":
            _compute_sanitizer(found, str(path), device, progress)
    except Fault as fault:
        found.fault = str(fault)
    if found.time is not None and found.cost.flops:
        found.peak = peak(place, threads)
    return found


def _compiled_alone(read: source.Source, path: str, reason: str) -> Checked:
    """Compiles a file for a GPU that is not here; its numbers stay unchecked.

    Raises:
        InputError: it does not compile; names the file, the line and the compiler's message.
        UnsupportedError: there is no compiler either.
    """
    target = Target.named(WITHOUT_GPU, "--device")
    if nvrtc.why_not() is None:
        nvrtc.compile(read, target)
        by = "NVRTC"
    else:
        by = nvcc.compile(read, target, reason)
    found = Checked(str(path), read.contract.op, "cuda", read.computes)
    found.compiled = f"compiled by {by} for {target.native_architecture}; not run: {reason}"
    return found


def peak(device: Any, threads: int) -> tuple[float, str]:
    """Returns a device's peak float32 FLOP/s, and how it was found."""
    if device.kind == "cuda":
        target = device.target
        number = 2.0 * target.float32_lanes * target.multiprocessors * target.clock
        return number, f"float32 at {target.clock / 1e9:.2f} GHz, without tensor cores"
    from time import perf_counter

    size = 1024
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    seconds = []
    for _ in range(7):
        start = perf_counter()
        a @ a
        seconds.append(perf_counter() - start)
    return 2.0 * size**3 / min(seconds), "NumPy's matrix product of 1024 x 1024"


def _compute_sanitizer(
    found: Checked, path: str, device: str, progress: Callable[[str], None]
) -> None:
    """Runs the smaller cases once more under each of compute-sanitizer's tools.

    Raises:
        Fault: one found something.
        UnsupportedError: it is not installed.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise UnsupportedError(
            "--sanitize: expected compute-sanitizer (of the CUDA toolkit) on PATH, found none"
        )
    labels = [o.case.label for o in found.outcomes if not o.refused and o.case.label != "large"]
    for tool in SANITIZERS:
        progress(f"compute-sanitizer --tool {tool}")
        done = subprocess.run(
            [program, "--tool", tool, "--error-exitcode", "99", "--print-limit", "1",
             "--kernel-name-exclude", "kernel_substring=delay", sys.executable, "-m",
             "cnn_engine.kernel.run_cases", path, device, json.dumps(labels[:6])],
            capture_output=True, text=True, errors="replace", timeout=600, check=False,
        )  # fmt: skip
        if done.returncode:
            lines = [line.strip("= ").strip() for line in done.stdout.splitlines()]
            first = next((line for line in lines if line.startswith(_FINDINGS)), "")
            place = next((line for line in lines if ".cu:" in line), "")
            last = next((line for line in reversed(lines) if line), "no message")
            raise Fault(f"compute-sanitizer {tool}: {first or last} {place}".strip())
        found.sanitized.append(f"compute-sanitizer {tool}")


_FINDINGS = (
    "Invalid",
    "Error:",
    "Warning:",
    "Uninitialized",
    "Barrier",
    "Misaligned",
    "Program hit",
)
