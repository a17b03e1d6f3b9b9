"""Prints ``--list``: the networks, variants and devices that options can name."""

from __future__ import annotations

from . import workload
from .devices import cuda_module
from .devices.cpu import CpuDevice
from .kernels import select


def text() -> str:
    """Returns the networks, the variants with where each runs, and the devices that are here."""
    lines = ["networks"]
    lines += [f"  {name}" for name in workload.names()]
    lines += ["variants", "  auto: the fastest that the network and the device have"]
    for row in select.VARIANTS.values():
        where = "; ".join(f"{device}: {', '.join(dtypes)}" for device, dtypes in row.dtypes.items())
        lines.append(f"  {row.name}: {row.summary} ({where})")
    lines += ["devices", f"  cpu: {CpuDevice().model}"]
    reason = cuda_module.unavailable()
    if reason is not None:
        lines.append(f"  cuda: none ({reason})")
    else:
        for index in range(cuda_module.device_count()):
            lines.append(f"  cuda:{index}: {cuda_module.load().device_properties(index)['name']}")
    return "\n".join(lines)
