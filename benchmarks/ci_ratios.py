"""``python -m benchmarks.ci_ratios``: checks threads, AVX-512, fusion and the lock by ratios within one run.

Absolute times say little on a machine that one does not know and that others use too. The ratio of two
ways that take turns says whether threads are used and woken, whether AVX-512 is, whether fusion pays, and
whether Python's lock is given back. A limit lies well below what a quiet machine shows and above the 1.0
that is left when the mechanism is gone; it has to be met in one of several attempts, each over longer
calls than the one before it. Where other work has the second CPU, threads cannot show anything: what two
threads of hashlib gain, measured in the same turns, tells, and the ratio is reported as not measured.
Ends with 1 where a limit is not met.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cifar10.network import NETWORK
from cnn_engine import Engine, _cpu, cli

from . import result_file

ATTEMPTS = 3  # each with twice the calls of the one before it
ROUNDS = 9
BATCH = 2048  # some 70 ms: far more than waking a thread; too long for trials without (pace.h)

SECOND_CPU = 1.6  # what the control must gain for a ratio to say something
MEMORY = bytes(8_000_000)  # hashed in some milliseconds, without Python's lock
HASHES = [lambda: hashlib.sha256(MEMORY)] * 2


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as ``slow`` is ``fast``, which does the same work, and the least it may be."""

    name: str
    fast: Callable[[], None]
    slow: Callable[[], None]
    least: float
    reason: str
    threads: bool = False  # whether it needs a second CPU

    def measure(self, calls: int) -> tuple[float, float]:
        """Returns medians of the ratios of neighbours, ``calls`` calls each: of these, and of the control."""
        ratios: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            slow, fast = seconds(self.slow, calls), seconds(self.fast, calls)
            control = math.inf
            if self.threads:
                control = seconds(one_after_the_other(HASHES), 1) / seconds(at_once(HASHES), 1)
            ratios.append((slow / fast, control))
        own, controls = zip(*ratios, strict=True)
        return statistics.median(own), statistics.median(controls)


def seconds(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def predictor(images: np.ndarray, **options: object) -> Callable[[], None]:
    """Returns a pass over ``images`` as a call; memory and weights are ready after a first one."""
    engine = Engine("cifar10", weights="random", device="cpu", **options)
    out = np.empty((len(images), NETWORK.classes), np.float32)

    def call() -> None:
        engine.predict(images, batch=len(images), out=out)

    call()
    return call


def with_instruction_set(name: str, images: np.ndarray) -> Callable[[], None]:
    """Returns a pass by the build for ``name``: fused weights stay packed for the one selected then."""
    before = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(name)
    try:
        return predictor(images, variant="fused", threads=1)
    finally:
        _cpu.select_instruction_set(before)


def at_once(calls: list[Callable[[], None]]) -> Callable[[], None]:
    """Returns a call that makes ``calls`` in a Python thread each."""

    def run() -> None:
        workers = [threading.Thread(target=call) for call in calls]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return run


def one_after_the_other(calls: list[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def ratios() -> list[Ratio]:
    """Returns those that this machine can show; says which it cannot."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (BATCH, *NETWORK.input_shape), np.uint8)
    few = images[:32]
    found = [
        Ratio("fused to layered", predictor(few, variant="fused", threads=1),
              predictor(few, variant="pad", reduction=True, threads=1), 3.0,
              "layered operators have neither Winograd nor caches in mind"),
    ]  # fmt: skip
    if len(os.sched_getaffinity(0)) < 2:
        print("left out, this process has one CPU: threads")
    else:
        callers = [predictor(images, variant="fused", threads=1) for _ in range(2)]
        found += [
            Ratio("2 threads to 1, fused", predictor(images, variant="fused", threads=2),
                  predictor(images, variant="fused", threads=1), 1.3,
                  "2.0 on two cores, 1.3 and more on the two halves of one", True),
            Ratio("2 threads to 1, layered", predictor(few, variant="if", threads=2),
                  predictor(few, variant="if", threads=1), 1.3, "as above", True),
            Ratio("2 Python threads to 1", at_once(callers), one_after_the_other(callers), 1.3,
                  "as above, for two callers that share nothing but the engine's code", True),
        ]  # fmt: skip
    if "avx512" not in _cpu.instruction_sets():
        print("left out, this CPU has no AVX-512: AVX-512 to AVX2")
    else:
        found.append(
            Ratio("AVX-512 to AVX2, fused", with_instruction_set("avx512", images),
                  with_instruction_set("avx2", images), 0.95,
                  "1.05 to 1.2 on Zen 4: not slower, within noise; test_fused_cpu.py says which set runs")
        )  # fmt: skip
    return found


@cli.command
def main(arguments: list[str] | None = None) -> int:
    result_file.parser("ci_ratios", __doc__).parse_args(arguments)
    failed = 0
    for ratio in ratios():
        best, second_cpu = 0.0, 0.0
        for attempt in range(ATTEMPTS):
            found, control = ratio.measure(2**attempt)
            second_cpu = max(second_cpu, control)
            if control >= SECOND_CPU:
                best = max(best, found)
            if best >= ratio.least:
                break
        if best >= ratio.least:
            verdict = f"{best:6.2f}  at least {ratio.least:.2f}  ok"
        elif best == 0.0:
            verdict = (
                f"  not measured: other work has the CPUs (hashlib's two threads: {second_cpu:.2f})"
            )
        else:
            failed += 1
            verdict = f"{best:6.2f}  at least {ratio.least:.2f}  FAILED"
        print(f"{ratio.name:24} {verdict}  ({ratio.reason})", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
