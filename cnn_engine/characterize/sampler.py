"""Samples meters of the GPU and the process during passes, in a thread at a fixed period.

Sources: NVML's reference ("Device Queries", "GPM Functions"), Linux' proc(5).
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from ..devices.nvml import Gpu
from ..errors import UnsupportedError

#: NVML averages its utilisation over a window of 1/6 s to 1 s, depending on the GPU (nvmlUtilization_t). A
#: value that is read sooner after the work began also holds time from before it.
NVML_WINDOW_S = 1.0

EXTRA = "pip install 'cnn-engine[lab]'"


class Sampler:
    """Calls ``read`` at once and then every ``period_s`` while its ``with`` block runs.

    Attributes:
        times_s: when each sample was taken, since the beginning.
        samples: what ``read`` returned.
        failure: why sampling ended early, or None.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], period_s: float) -> None:
        self._read = read
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.times_s: list[float] = []
        self.samples: list[dict[str, Any]] = []
        self.failure: str | None = None

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        begin = perf_counter()
        wait_s = 0.0
        while not self._stop.wait(wait_s) or not self.samples:
            now = perf_counter() - begin
            try:
                sample = self._read()
            except Exception as error:  # a meter that fails must not end what is measured
                self.failure = f"sampling ended after {len(self.samples)} samples: {error}"
                return
            self.times_s.append(now)
            self.samples.append(sample)
            # On a grid, so that a slow reading does not shift all that follow.
            elapsed = perf_counter() - begin
            wait_s = self._period_s - elapsed % self._period_s

    @property
    def achieved_s(self) -> float | None:
        """The mean time between two samples; None for fewer than two."""
        if len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)

    def values(self, name: str, since_s: float = 0.0) -> list[float]:
        """Returns the known values of the meter ``name``, of samples not before ``since_s``."""
        found = zip(self.times_s, self.samples, strict=True)
        return [
            sample[name] for at, sample in found if at >= since_s and sample.get(name) is not None
        ]

    def mean(self, name: str, since_s: float = 0.0) -> float | None:
        values = self.values(name, since_s)
        return statistics.fmean(values) if values else None

    def most(self, name: str, since_s: float = 0.0) -> float | None:
        return max(self.values(name, since_s), default=None)

    def least(self, name: str, since_s: float = 0.0) -> float | None:
        return min(self.values(name, since_s), default=None)

    def seen(self, name: str) -> list[str]:
        """Returns every item that the lists of the meter ``name`` held, in order of appearance."""
        return list(dict.fromkeys(item for sample in self.samples for item in sample.get(name, ())))


class GpuMeters:
    """NVML's readings of one GPU, as fractions, bytes, W, MHz and degrees Celsius."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        nvml = gpu.nvml
        memory = gpu.query("MemoryInfo")
        self.memory_total = None if memory is None else memory.total
        self.power_limit_w = gpu.watts("EnforcedPowerLimit")
        self._sm, self._memory = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        self._sensor = nvml.NVML_TEMPERATURE_GPU

    def memory_used(self) -> int | None:
        """Bytes in use on the device, by all processes and the driver."""
        memory = self.gpu.query("MemoryInfo")
        return None if memory is None else memory.used

    def read(self) -> dict[str, Any]:
        gpu = self.gpu
        rates = gpu.query("UtilizationRates")
        return {
            "gpu_utilization": None if rates is None else rates.gpu / 100,
            "memory_utilization": None if rates is None else rates.memory / 100,
            "device_memory_used": self.memory_used(),
            "power_w": gpu.watts("PowerUsage"),
            "sm_clock_mhz": gpu.query("ClockInfo", self._sm),
            "memory_clock_mhz": gpu.query("ClockInfo", self._memory),
            "temperature_c": gpu.query("Temperature", self._sensor),
            "throttle_reasons": gpu.throttles(),
        }


class SmCounters:
    """NVML's GPU performance monitoring (GPM, Hopper and newer): how busy the multiprocessors are.

    Raises:
        UnsupportedError: the GPU or the driver has none, or does not permit them.
    """

    METRICS = (
        ("sm_utilization", "NVML_GPM_METRIC_SM_UTIL"),
        ("sm_occupancy", "NVML_GPM_METRIC_SM_OCCUPANCY"),
        ("dram_utilization", "NVML_GPM_METRIC_DRAM_BW_UTIL"),
    )

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.nvml = gpu, gpu.nvml
        self._samples: list[Any] = []
        with self._refused():
            support = self.nvml.nvmlGpmQueryDeviceSupport(gpu.handle)
            if not support.isSupportedDevice:
                raise UnsupportedError("SM utilisation: expected a Hopper GPU or newer for GPM")
            self._samples = [self.nvml.nvmlGpmSampleAlloc() for _ in range(2)]

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except (self.nvml.NVMLError, AttributeError) as error:  # an nvidia-ml-py from before GPM
            raise UnsupportedError(f"SM utilisation: NVML's GPM cannot be used: {error}") from error

    def begin(self) -> None:
        """Marks the beginning of the time that :meth:`end` speaks of."""
        with self._refused():
            self.nvml.nvmlGpmSampleGet(self.gpu.handle, self._samples[0])

    def end(self) -> dict[str, float | None]:
        """Returns the averages since :meth:`begin`, as fractions."""
        nvml = self.nvml
        with self._refused():
            nvml.nvmlGpmSampleGet(self.gpu.handle, self._samples[1])
            wanted = nvml.c_nvmlGpmMetricsGet_t()
            wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
            wanted.numMetrics = len(self.METRICS)
            wanted.sample1, wanted.sample2 = self._samples
            for index, (_, metric) in enumerate(self.METRICS):
                wanted.metrics[index].metricId = getattr(nvml, metric)
            nvml.nvmlGpmMetricsGet(wanted)
        return {
            name: found.value / 100 if found.nvmlReturn == nvml.NVML_SUCCESS else None
            for (name, _), found in zip(self.METRICS, wanted.metrics, strict=False)
        }

    def close(self) -> None:
        while self._samples:
            with suppress(self.nvml.NVMLError):
                self.nvml.nvmlGpmSampleFree(self._samples.pop())


class ProcessMeters:
    """This process's CPU time and memory.

    Raises:
        UnsupportedError: psutil is not installed.
    """

    STATUS = Path("/proc/self/status")
    CLEAR = Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        try:
            import psutil
        except ImportError as error:
            raise UnsupportedError(
                f"CPU utilisation and memory: expected the package psutil, found none; {EXTRA}"
            ) from error
        self._process = psutil.Process()
        self.cpus = psutil.cpu_count() or os.cpu_count() or 1

    def cpu_s(self) -> float:
        """Seconds of CPU time that all threads of the process have used."""
        times = self._process.cpu_times()
        return times.user + times.system

    def read(self) -> dict[str, Any]:
        return {"rss": self._process.memory_info().rss}

    def reset_peak(self) -> bool:
        """Lets the kernel begin anew with the process's peak memory; returns whether it did."""
        with suppress(OSError):
            self.CLEAR.write_text("5", "ascii")
            return True
        return False

    def peak(self) -> int | None:
        """Bytes of memory at the peak since :meth:`reset_peak`, as the kernel counts them."""
        with suppress(OSError, ValueError, IndexError):
            for line in self.STATUS.read_text("ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return None
