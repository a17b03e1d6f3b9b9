"""What a result was measured on: machine, versions and commit."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from . import _cpu
from .devices.cpu import CpuDevice


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
