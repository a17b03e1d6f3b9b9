"""Reads a GPU's clocks, power, temperature and other processes through NVML.

Source of names and units: NVML's reference, "Device Queries". A value that a GPU does not report is None.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError

#: Bits of nvmlDeviceGetCurrentClocksEventReasons that hold the clocks below what was asked for.
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


class Gpu:
    """One GPU, by the PCI bus id that CUDA gives it, such as ``0000:1B:00.0``.

    Raises:
        UnsupportedError: nvidia-ml-py is not installed, or the driver's library cannot be used.
    """

    def __init__(self, pci_bus_id: str) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise UnsupportedError(
                "clocks and power: expected the package nvidia-ml-py, found none; "
                "pip install 'cnn-engine[lab]'"
            ) from error
        self.nvml = pynvml
        try:
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        except pynvml.NVMLError as error:
            raise UnsupportedError(f"clocks and power: NVML cannot be used: {error}") from error

    def query(self, function: str, *arguments: Any) -> Any:
        """Returns the result of ``nvmlDeviceGet<function>``, or None where it fails."""
        call: Callable[..., Any] | None = getattr(self.nvml, f"nvmlDeviceGet{function}", None)
        try:
            return None if call is None else call(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def watts(self, function: str) -> float | None:
        """Returns the result of :meth:`query` in watts, for functions that return milliwatts."""
        milliwatts = self.query(function)
        return None if milliwatts is None else milliwatts / 1e3

    def throttles(self) -> list[str]:
        """Returns why the clocks are held down at this moment; empty when nothing does."""
        bits = self.query("CurrentClocksEventReasons")
        if bits is None:  # its name before CUDA 12.2
            bits = self.query("CurrentClocksThrottleReasons")
        return [name for bit, name in THROTTLES.items() if (bits or 0) & bit]

    def other_processes(self) -> int | None:
        """Returns how many processes compute on the GPU besides this one, which does."""
        found = self.query("ComputeRunningProcesses")
        if found is None:
            return None
        others = [process for process in found if process.pid != os.getpid()]
        # In a container the driver may know this process by another number.
        return len(others) if len(others) < len(found) else max(len(found) - 1, 0)

    def state(self) -> dict[str, Any]:
        """Returns clocks in MHz, power in W, the temperature in degrees Celsius, and who else is there."""
        nvml = self.nvml
        return {
            "sm_clock_mhz": self.query("ClockInfo", nvml.NVML_CLOCK_SM),
            "max_sm_clock_mhz": self.query("MaxClockInfo", nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self.query("ClockInfo", nvml.NVML_CLOCK_MEM),
            "power_w": self.watts("PowerUsage"),
            "power_limit_w": self.watts("EnforcedPowerLimit"),
            "default_power_limit_w": self.watts("PowerManagementDefaultLimit"),
            "temperature_c": self.query("Temperature", nvml.NVML_TEMPERATURE_GPU),
            "throttled": self.throttles(),
            "other_processes": self.other_processes(),
        }
