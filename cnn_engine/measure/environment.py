"""The environment of a result: machine, versions, commit, and the state that decides its speed."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from .. import _cpu
from ..devices import nvml
from ..devices.cpu import CpuDevice
from ..errors import UnsupportedError

SYSTEM = Path("/sys")


def now() -> str:
    """Returns the date and time in UTC as ISO 8601 has them, to the second: ``2026-01-31T12:00:00Z``."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Stopwatch:
    """When something began, and how long ago that was."""

    def __init__(self) -> None:
        self.started = now()
        self._begin = perf_counter()

    @property
    def seconds(self) -> float:
        """Since it was made, by a monotonic clock."""
        return perf_counter() - self._begin

    def stamp(self) -> dict[str, Any]:
        """Returns the keys of every document of results: ``started`` and ``duration_s``."""
        return {"started": self.started, "duration_s": self.seconds}


def package_version(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cupy_distribution() -> str | None:
    """Returns the installed CuPy distribution as ``name version``, without importing it."""
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        if found := package_version(name):
            return f"{name} {found}"
    return None


def cuda_version_text(number: int) -> str:
    """Returns CUDA's ``13010`` as ``13.1``."""
    return f"{number // 1000}.{number % 1000 // 10}"


def describe(device: Any) -> dict[str, Any]:
    """Returns the ``environment`` of a result for work on ``device``."""
    described: dict[str, Any] = {
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": CpuDevice().model,
        "cpu_instruction_set": _cpu.selected_instruction_set(),
        "gpu": None,
        "driver": None,
        "versions": {
            "python": sys.version.split()[0],
            "cnn_engine": package_version("cnn-engine"),
            "numpy": package_version("numpy"),
            "compiler": _cpu.compiler,
        },
        "commit": _cpu.commit or None,
    }
    if device.kind == "cuda":
        kernels = device.kernels
        described["gpu"] = device.model
        described["driver"] = f"CUDA {cuda_version_text(kernels.driver_version())}"
        described["versions"]["cuda_runtime"] = cuda_version_text(kernels.runtime_version())
        described["versions"]["cuda_compiler"] = kernels.compiler
        described["versions"]["cupy"] = cupy_distribution()
    return described


def state(device: Any, load_average: float | None = None) -> dict[str, Any]:
    """Returns the state that changes from minute to minute, for the ``environment`` of a result.

    Args:
        device: that the work was on. Ask right after it, while its clocks are still those of the work.
        load_average: of the host before the work; see :func:`host_load`.

    Returns:
        ``cpu_state`` {governor, turbo, on_battery, load_average}, ``gpu_state`` (see
        :meth:`cnn_engine.devices.nvml.Gpu.state`; None without a GPU or NVML), and ``warnings``: sentences
        on what makes times worse or less certain.
    """
    cpu = {
        "governor": _first_line("devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "turbo": _turbo(),
        "on_battery": _on_battery(),
        "load_average": load_average,
    }
    gpu, warnings = None, []
    if device.kind == "cuda":
        try:
            gpu = nvml.Gpu(device.pci_bus_id).state()
        except UnsupportedError as error:
            warnings.append(str(error))
    warnings += cpu_warnings(cpu) + gpu_warnings(gpu or {})
    return {"cpu_state": cpu, "gpu_state": gpu, "warnings": warnings}


def host_load() -> float | None:
    """Returns how many threads wanted a CPU, on average over the last minute."""
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def cpu_warnings(found: dict[str, Any]) -> list[str]:
    """Returns warnings of a ``cpu_state`` that makes times worse or less certain."""
    warnings = []
    if found.get("governor") == "powersave" and found.get("turbo") is None:
        warnings.append("CPU: the frequency governor is powersave")
    if found.get("turbo") is False:
        warnings.append("CPU: turbo frequencies are off")
    if found.get("on_battery"):
        warnings.append("CPU: the machine runs on its battery")
    cpus = len(os.sched_getaffinity(0))
    load = found.get("load_average")
    if load is not None and load > cpus / 2:
        warnings.append(f"CPU: a load average of {load:.1f} on {cpus} CPUs before the run")
    return warnings


def gpu_warnings(found: dict[str, Any]) -> list[str]:
    """Returns warnings of a ``gpu_state`` that makes times worse or less certain."""
    warnings = []
    if found.get("throttled"):
        clock, most = found["sm_clock_mhz"], found["max_sm_clock_mhz"]
        warnings.append(
            f"GPU: clocks held down by {', '.join(found['throttled'])} ({clock} of {most} MHz)"
        )
    others = found.get("other_processes")
    if others:
        warnings.append(f"GPU: shared with other processes: {others}")
    limit, default = found.get("power_limit_w"), found.get("default_power_limit_w")
    if limit is not None and default is not None and limit < default:
        warnings.append(f"GPU: power limited to {limit:g} W of {default:g} W")
    return warnings


def _first_line(path: str) -> str | None:
    with suppress(OSError, ValueError):
        return (SYSTEM / path).read_text("ascii").strip() or None
    return None


def _turbo() -> bool | None:
    """Whether the CPU may exceed its base frequency; None where the system does not say."""
    off = _first_line("devices/system/cpu/intel_pstate/no_turbo")
    if off is not None:
        return off == "0"
    boost = _first_line("devices/system/cpu/cpufreq/boost")
    return None if boost is None else boost == "1"


def _on_battery() -> bool | None:
    """Whether a battery feeds the machine; None where there is no battery."""
    with suppress(OSError):
        kinds = {
            supply.name: _first_line(f"class/power_supply/{supply.name}/type")
            for supply in (SYSTEM / "class/power_supply").iterdir()
        }
        batteries = [name for name, kind in kinds.items() if kind == "Battery"]
        status = [_first_line(f"class/power_supply/{name}/status") for name in batteries]
        return "Discharging" in status if batteries else None
    return None
