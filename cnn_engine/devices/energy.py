"""Energy that the CPU's packages and a GPU take, from their own counters.

The CPU's are RAPL's, which Linux shows in ``/sys/class/powercap`` (to root alone, since CVE-2020-8694). They
count whole packages, other processes included. The GPU's is NVML's ``nvmlDeviceGetTotalEnergyConsumption``.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from ..errors import UnsupportedError
from ..io.files import describe_os_error
from . import nvml

POWERCAP = Path("/sys/class/powercap")

#: Watts that no package exceeds: a counter that may have wrapped around since the last reading is not used.
MOST_W = 2000.0


class Energy:
    """Joules by source, ``cpu`` and ``gpu``, since :meth:`start`.

    Args:
        device: on which the work runs; the GPU's counter is read where it is a CUDA device.

    Attributes:
        notes: why a counter that is there cannot be read; what a machine lacks is not mentioned.
    """

    def __init__(self, device: Any) -> None:
        self.notes: list[str] = []
        self._packages = self._open_packages()
        self._gpu: nvml.Gpu | None = None
        if device.kind == "cuda":
            with suppress(UnsupportedError):  # other meters say why there is no NVML
                self._gpu = nvml.Gpu(device.pci_bus_id)
        self.start()

    def _open_packages(self) -> list[_Package]:
        # Others are parts of a package (dram, core), or the whole machine (psys).
        names = sorted(POWERCAP.glob("*-rapl:*/name"))
        try:
            found = [path for path in names if path.read_text("ascii").startswith("package")]
            return [_Package(path.parent) for path in found]
        except (OSError, ValueError) as error:
            reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
            self.notes.append(f"CPU energy: RAPL's counters in {POWERCAP} cannot be read: {reason}")
            return []

    def start(self) -> None:
        """Begins anew with zero joules."""
        for package in self._packages:
            package.start()
        self._gpu_began = self._gpu_joules()

    def _gpu_joules(self) -> float | None:
        millijoules = None if self._gpu is None else self._gpu.query("TotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def read(self) -> dict[str, float]:
        """Returns the joules of each source that is known.

        Counters wrap around within minutes: a longer measurement reads them in between.
        """
        found = {}
        packages = [package.read() for package in self._packages]
        if packages and None not in packages:
            found["cpu"] = sum(packages)
        now = self._gpu_joules()
        if now is not None and self._gpu_began is not None:
            found["gpu"] = now - self._gpu_began
        return found


class _Package:
    """The counter of one package of the CPU, in microjoules up to a limit."""

    def __init__(self, folder: Path) -> None:
        self._counter = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text("ascii"))
        self.start()

    def start(self) -> None:
        self._last, self._at = self._now(), perf_counter()
        self._joules: float | None = 0.0

    def _now(self) -> int:
        return int(self._counter.read_text("ascii"))

    def read(self) -> float | None:
        """Returns the joules since the start; None once the counter may have wrapped more than once."""
        try:
            now, at = self._now(), perf_counter()
        except (OSError, ValueError):  # it could be read before
            self._joules = None
            return None
        if (at - self._at) * MOST_W * 1e6 > self._range:
            self._joules = None
        if self._joules is not None:
            step = now - self._last if now >= self._last else now - self._last + self._range
            self._joules += step / 1e6
        self._last, self._at = now, at
        return self._joules
