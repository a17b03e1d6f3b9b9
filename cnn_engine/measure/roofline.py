"""The roofline of a machine and where layers stand under it (Williams, Waterman, Patterson, 2009).

A layer cannot run faster than the cores compute, nor faster than memory delivers its bytes:
``min(peak, intensity x bandwidth)`` FLOP/s, where intensity is FLOP per byte. Ceilings are measured in the
process of the run, with its threads. Data that stays in caches is not bound by memory: a layer above that
ceiling is shown under the ceiling of the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from .. import _cpu
from ..errors import UnsupportedError
from .result import LayerTime

#: Bytes that each thread copies: beyond any cache, and well inside of a core's second level.
MEMORY_BYTES, CACHE_BYTES = 64 << 20, 256 << 10

#: Seconds for which each ceiling is measured.
SECONDS = 0.3


@dataclass
class Ceiling:
    """A limit of the machine.

    Attributes:
        name: such as ``float32`` or ``memory``.
        kind: ``compute`` or ``bandwidth``.
        rate: FLOP/s, or bytes/s, of all threads together.
        how: it was measured.
        one_core: the rate of one thread alone; None where that was not measured.
    """

    name: str
    kind: str
    rate: float
    how: str
    one_core: float | None = None


@dataclass
class Point:
    """A layer under the roofline.

    Attributes:
        name, kind, kernel: of the layer.
        seconds: of one call.
        intensity: FLOP per byte; bytes count each tensor once.
        flops_per_s, bytes_per_s: attained.
        bound: the ceiling that is nearest above: ``float32``, ``memory`` or ``cache``.
        share: of that ceiling. More than 1 where the kernel needs fewer operations than a layer counts, as
            Winograd's does, or where the ceiling was measured while others used the machine.
        computes: the type that it multiplies in; only float32 has a ceiling of arithmetic.
    """

    name: str
    kind: str
    kernel: str
    seconds: float
    intensity: float
    flops_per_s: float
    bytes_per_s: float
    bound: str
    share: float
    computes: str = "float32"


@dataclass
class Roofline:
    """The ceilings of a machine, and the layers of a run."""

    ceilings: list[Ceiling] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)


def check_device(device: Any) -> None:
    """Refuses devices whose ceilings are not measured here.

    Raises:
        UnsupportedError: the device is not the CPU.
    """
    if device.kind != "cpu":
        raise UnsupportedError(f"roofline: expected the device cpu, found {device.name}")


def measure(threads: int, layers: Sequence[LayerTime], dtype: str = "float32") -> Roofline:
    """Returns the roofline of a run on the CPU.

    Args:
        threads: of the run: so many cores are measured together.
        layers: that were timed.
        dtype: that they multiply in, those of quantized operators excepted.
    """
    found = ceilings(threads)
    return Roofline(found, points(layers, found, dtype))


def ceilings(threads: int) -> list[Ceiling]:
    """Measures the CPU's ceilings with so many threads, and with one."""
    cores = "1 thread" if threads == 1 else f"{threads} threads"
    found = []
    for name, kind, work, how in (
        ("float32", "compute", _multiply_adds, "fused multiply-adds"),
        ("memory", "bandwidth", _copies(MEMORY_BYTES),
         f"copies of {MEMORY_BYTES >> 20} MiB, read and written"),
        ("cache", "bandwidth", _copies(CACHE_BYTES),
         f"copies of {CACHE_BYTES >> 10} KiB, read and written"),
    ):  # fmt: skip
        rate = _together(threads, work)
        one = rate if threads == 1 else _together(1, work)
        found.append(Ceiling(name, kind, rate, f"{how}, {cores}", one))
    return found


def points(
    layers: Sequence[LayerTime], found: Sequence[Ceiling], dtype: str = "float32"
) -> list[Point]:
    """Returns each layer that was timed under the ceilings; see :func:`measure`."""
    rates = {ceiling.name: ceiling.rate for ceiling in found}
    placed = []
    for layer in layers:
        if layer.calls == 0 or layer.seconds <= 0 or layer.bytes <= 0:
            continue
        compute, moved = layer.flops / layer.seconds, layer.bytes / layer.seconds
        computes = "int8" if layer.kind.startswith("quantized_") else dtype
        shares = {"memory": moved / rates["memory"]}
        if computes == "float32":
            shares["float32"] = compute / rates["float32"]
        if shares["memory"] > 1:  # its bytes did not come from memory
            shares["cache"] = moved / rates["cache"]
            del shares["memory"]
        bound = max(shares, key=lambda name: shares[name])
        placed.append(
            Point(
                layer.name, layer.kind, layer.kernel, layer.seconds / layer.calls,
                layer.flops / layer.bytes, compute, moved, bound, shares[bound],
                computes,
            )
        )  # fmt: skip
    return placed


def _together(threads: int, work: Callable[[], tuple[float, float]]) -> float:
    """Returns the rate of threads that do the same at once; ``work`` returns its amount and seconds."""
    rates = [0.0] * threads
    barrier = threading.Barrier(threads)

    def run(number: int) -> None:
        barrier.wait()
        amount, seconds = work()
        rates[number] = amount / seconds

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(rates)


def _multiply_adds() -> tuple[float, float]:
    return _cpu.measure_fma_peak(SECONDS), 1.0


def _copies(nbytes: int) -> Callable[[], tuple[float, float]]:
    def work() -> tuple[float, float]:
        source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        target[...] = source  # its pages are there
        best, end = np.inf, perf_counter() + SECONDS
        repeats = max(1, (4 << 20) // nbytes)
        while (start := perf_counter()) < end:
            for _ in range(repeats):
                np.copyto(target, source)
            best = min(best, (perf_counter() - start) / repeats)
        return 2.0 * nbytes, best

    return work
