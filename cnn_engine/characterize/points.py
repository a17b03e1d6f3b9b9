"""The rows of the three reports, as objects; the names of their fields are the columns.

docs/reference/characterize.md explains every column. Times are in seconds, sizes in bytes, shares from 0 to
1. None is what was not measured, or does not apply; its cell is empty.
"""

from __future__ import annotations

from dataclasses import dataclass

#: What a point's ``status`` can be.
OK, FAILED, INTERRUPTED, NOT_RUN = "ok", "failed", "interrupted", "not run"


@dataclass
class Point:
    """A row of the summary: one subject at one batch size."""

    subject: str
    kind: str  # engine, torch
    model: str
    variant: str | None
    reduction: bool | None
    dtype: str
    device: str
    boundary: str  # of a pass: host, device
    batch: int
    status: str = NOT_RUN
    note: str = ""

    passes: int | None = None
    measured_s: float | None = None
    latency_min_s: float | None = None
    latency_p50_s: float | None = None
    latency_p90_s: float | None = None
    latency_p99_s: float | None = None
    latency_max_s: float | None = None
    latency_mean_s: float | None = None
    throughput_images_per_s: float | None = None

    gpu_utilization: float | None = None
    gpu_utilization_profiled: float | None = None
    kernel_source: str | None = None  # activity, events, host
    kernels_per_pass: float | None = None
    kernel_s_per_pass: float | None = None
    copy_s_per_pass: float | None = None
    profiled_passes: int | None = None
    profiled_latency_s: float | None = None
    profiling_cost: float | None = None
    records_dropped: int | None = None

    nvml_gpu_utilization_mean: float | None = None
    nvml_gpu_utilization_max: float | None = None
    nvml_memory_utilization_mean: float | None = None
    nvml_memory_utilization_max: float | None = None
    nvml_utilization_samples: int | None = None
    sm_utilization: float | None = None
    sm_occupancy: float | None = None
    dram_utilization: float | None = None

    allocated_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_bytes: int | None = None
    device_memory_used_bytes: int | None = None

    power_mean_w: float | None = None
    power_max_w: float | None = None
    power_limit_w: float | None = None
    cpu_energy_j_per_image: float | None = None
    gpu_energy_j_per_image: float | None = None
    sm_clock_mean_mhz: float | None = None
    sm_clock_min_mhz: float | None = None
    memory_clock_mean_mhz: float | None = None
    temperature_mean_c: float | None = None
    temperature_max_c: float | None = None
    throttle_reasons: str | None = None

    threads: int | None = None
    cpu_utilization_threads: float | None = None
    cpu_utilization_machine: float | None = None
    rss_bytes: int | None = None
    rss_peak_bytes: int | None = None

    sample_period_s: float | None = None
    sample_period_achieved_s: float | None = None
    samples: int | None = None

    check_max_abs_diff: float | None = None
    correct: int | None = None
    labelled: int | None = None
    accuracy: float | None = None

    def add_note(self, text: str) -> None:
        """Adds a sentence to the note, once."""
        if text not in self.note:
            self.note = f"{self.note}; {text}" if self.note else text


@dataclass
class KernelRow:
    """A row of the kernel report: all calls of one kernel, layer or module at one point."""

    subject: str
    batch: int
    source: str
    name: str
    passes: int
    calls: int
    total_s: float
    average_s: float
    min_s: float
    max_s: float
    share: float


@dataclass
class IterationRow:
    """A row of the iteration report: one pass."""

    subject: str
    batch: int
    window: str  # timed, profiled
    index: int
    start_s: float
    wall_s: float
    kernel_s: float | None = None
    gap_s: float | None = None
