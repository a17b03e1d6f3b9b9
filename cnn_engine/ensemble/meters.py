"""Utilisation over time: each core by psutil or an mpstat log, and GPUs."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..characterize.sampler import GpuMeters, Sampler
from ..devices.nvml import Gpu
from ..errors import InputError, UnsupportedError, expected
from ..io.files import describe_os_error
from ..measure import environment

PERIOD_S = 0.25


@dataclass
class Usage:
    """CPU utilisation of one host.

    Attributes:
        host: its name.
        source: what it was read with.
        times_s: since the beginning.
        cores: of each time, the busy share of each core since the time before.
        core_s: the integral: core-seconds in which a core was busy, whoever kept it so.
        begin: when sampling began, ISO 8601.
    """

    host: str
    source: str
    times_s: list[float] = field(default_factory=list)
    cores: list[list[float]] = field(default_factory=list)
    core_s: float | None = None
    begin: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class CpuSampler(Sampler):
    """Reads the utilisation of every core by psutil while its ``with`` block runs.

    Raises:
        UnsupportedError: psutil is not installed.
    """

    def __init__(self, period_s: float = PERIOD_S):
        try:
            import psutil
        except ImportError as error:
            raise UnsupportedError(
                "CPU utilisation: expected the package psutil, found none; "
                "pip install 'cnn-engine[ensemble]'"
            ) from error
        psutil.cpu_percent(percpu=True)  # the first call begins the first interval
        self._begin = environment.now()
        super().__init__(
            lambda: {"cores": [busy / 100 for busy in psutil.cpu_percent(percpu=True)]}, period_s
        )

    def usage(self) -> Usage:
        cores = [sample["cores"] for sample in self.samples]
        return Usage(
            socket.gethostname(), "psutil", list(self.times_s), cores,
            integral(self.times_s, cores), self._begin,
        )  # fmt: skip


def integral(times_s: Sequence[float], cores: Sequence[Sequence[float]]) -> float | None:
    """Returns core-seconds of utilisations, each of which holds for the time since the one before."""
    if len(times_s) < 2:
        return None
    pairs = zip(times_s[:-1], times_s[1:], cores[1:], strict=True)
    return sum((now - before) * sum(busy) for before, now, busy in pairs)


_MPSTAT_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(?: (AM|PM))?\s+(.*)")


def read_mpstat(path: str | os.PathLike[str]) -> Usage:
    """Reads the log of ``mpstat -P ALL SECONDS``: a core is busy when it is not idle.

    Raises:
        InputError: the file cannot be read, or holds no such log.
    """
    path = Path(path)
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"--mpstat: {path}: cannot be read: {describe_os_error(error)}") from error
    host = re.search(r"\(([^)]+)\)", lines[0]) if lines else None
    usage = Usage(host[1] if host else "", f"mpstat log {path.name}")
    idle: int | None = None
    now: float | None = None
    first = day = 0.0
    for line in lines:
        match = _MPSTAT_TIME.match(line)
        if match is None:
            continue
        words = match[5].split()
        if words[:1] == ["CPU"]:
            idle = words.index("%idle") if "%idle" in words else None
            continue
        if idle is None or len(words) <= idle or not words[0].isdecimal():
            continue  # the row "all", or something else
        hour = int(match[1]) % 12 + 12 * (match[4] == "PM") if match[4] else int(match[1])
        at = day + 3600 * hour + 60 * int(match[2]) + int(match[3])
        if now is not None and at < now:  # past midnight
            day += 86400
            at += 86400
        if at != now:
            first = at if now is None else first
            now = at
            usage.times_s.append(at - first)
            usage.cores.append([])
        usage.cores[-1].append(1 - float(words[idle].replace(",", ".")) / 100)
    if not usage.times_s:
        raise expected(f"--mpstat {path}", "the log of mpstat -P ALL SECONDS", "no row of a core")
    usage.core_s = integral(usage.times_s, usage.cores)
    return usage


class GpuSampler(Sampler):
    """Reads utilisation, memory and power of one GPU by NVML while its ``with`` block runs."""

    def __init__(self, device: Any, period_s: float = PERIOD_S):
        gpu = Gpu(device.pci_bus_id)
        self._name, self._begin = device.pci_bus_id, environment.now()
        super().__init__(GpuMeters(gpu).read, period_s)

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpu": self._name,
            "begin": self._begin,
            "times_s": list(self.times_s),
            "samples": list(self.samples),
            "note": self.failure,
        }
