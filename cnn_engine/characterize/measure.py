"""Measures one point: a subject at one batch size, first whole passes, then the work inside of them.

The two are kept apart: activity records slow down the launches, and what a process has once switched on for
them it may never lose again (pytorch/pytorch issue 144455). So all points are timed before any is profiled.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from ..devices import nvml
from ..devices.energy import Energy
from ..errors import UnsupportedError
from ..measure.cupti import activity
from ..measure.cupti.activity_records import covered_s
from .points import IterationRow, KernelRow, Point
from .sampler import NVML_WINDOW_S, GpuMeters, ProcessMeters, Sampler, SmCounters
from .subjects import CallTimes, InsideTimes, Load

#: A median of fewer passes than these says little, however long they take.
FEWEST_PASSES = 3

#: Every call of a pass becomes a record in memory; these are enough for any share.
MOST_PROFILED_PASSES = 2000

#: Rows of the iteration report a point and window, evenly thinned.
MOST_ITERATIONS = 2000


@dataclass
class Settings:
    """Settings of a measurement: warm-up passes, duration in seconds, sampling period."""

    warmup: int = 1
    settle_s: float = 1.0
    duration_s: float = 2.0
    profile_s: float = 1.0
    sample_period_s: float = 0.1


@dataclass
class Meters:
    """Meters that this machine has, and why others are missing."""

    gpu: GpuMeters | None = None
    counters: SmCounters | None = None
    process: ProcessMeters | None = None
    energy: Energy | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, device: Any) -> Meters:
        """Opens the meters that there are for work on ``device``; the others become notes."""
        meters = cls(energy=Energy(device))
        meters.notes += meters.energy.notes
        try:
            meters.process = ProcessMeters()
        except UnsupportedError as error:
            meters.notes.append(str(error))
        if device.kind == "cuda":
            try:
                gpu = nvml.Gpu(device.pci_bus_id)
                meters.gpu = GpuMeters(gpu)
                meters.counters = SmCounters(gpu)
            except UnsupportedError as error:
                meters.notes.append(str(error))
        return meters

    def read(self) -> dict[str, Any]:
        found = {} if self.gpu is None else self.gpu.read()
        if self.process is not None:
            found |= self.process.read()
        if self.energy is not None:
            found["energy_j"] = self.energy.read()  # its counters wrap around
        return found

    def close(self) -> None:
        if self.counters is not None:
            self.counters.close()


class Passes:
    """The beginnings (since the first) and wall times of passes, in seconds; 8 bytes each."""

    def __init__(self) -> None:
        self.starts_s = array("d")
        self.seconds = array("d")
        self.interrupted = False

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def span_s(self) -> float:
        """From the beginning of the first to the end of the last."""
        return self.starts_s[-1] + self.seconds[-1] if self.seconds else 0.0

    def run(
        self,
        next_pass: Callable[[], Callable[[], Any]],
        duration_s: float,
        fewest: int = FEWEST_PASSES,
        most: int | None = None,
    ) -> None:
        """Runs passes for ``duration_s``; Ctrl-C ends early and keeps complete ones."""
        try:
            begin = perf_counter()
            while True:
                run = next_pass()
                start = perf_counter()
                run()
                end = perf_counter()
                self.starts_s.append(start - begin)
                self.seconds.append(end - start)
                done = len(self.seconds)
                if done == most or (done >= fewest and end - begin >= duration_s):
                    break
        except KeyboardInterrupt:
            self.interrupted = True
        del self.starts_s[len(self.seconds) :]  # a start without its end


def time_point(point: Point, load: Load, meters: Meters, settings: Settings) -> list[IterationRow]:
    """Times passes of ``load`` while meters are sampled, and fills ``point``.

    Returns:
        The rows of the iteration report.

    Raises:
        KeyboardInterrupt: it came; what was measured until then is in ``point``, whose status says so.
    """
    warmup = Passes()
    if settings.warmup or settings.settle_s > 0:
        warmup.run(load.next_pass, settings.settle_s, fewest=settings.warmup)
    if warmup.interrupted:
        raise KeyboardInterrupt
    process = meters.process
    peak_is_ours = process is not None and process.reset_peak()
    if meters.counters is not None:
        _try(point, meters.counters.begin)
    cpu_s = process.cpu_s() if process is not None else 0.0
    passes, sampler = Passes(), Sampler(meters.read, settings.sample_period_s)
    if meters.energy is not None:
        meters.energy.start()
    begin = perf_counter()
    with sampler:
        passes.run(load.next_pass, settings.duration_s)
        wall_s = perf_counter() - begin
        if process is not None:
            cpu_s = process.cpu_s() - cpu_s
        if meters.counters is not None:
            found = _try(point, meters.counters.end) or {}
            for name, value in found.items():
                setattr(point, name, value)
    joules = meters.energy.read() if meters.energy is not None and passes else {}
    _latency(point, passes)
    for source, spent in joules.items():
        setattr(point, f"{source}_energy_j_per_image", spent / (len(passes) * point.batch))
    _meters(point, meters, sampler, settings)
    if process is not None:
        point.threads = load.threads
        point.cpu_utilization_threads = cpu_s / (wall_s * load.threads)
        point.cpu_utilization_machine = cpu_s / (wall_s * process.cpus)
        rss = sampler.values("rss")
        peaks = [*rss, process.peak() or 0] if peak_is_ours else rss
        # The engine's memory, not that of the images it is measured with, however many these are.
        if rss:
            point.rss_bytes = max(0, round(statistics.fmean(rss)) - load.data_bytes)
        if peaks:
            point.rss_peak_bytes = max(0, *(peak - load.data_bytes for peak in peaks))
    if load.memory is not None:
        memory = load.memory()
        point.allocated_bytes, point.allocated_peak_bytes = memory.allocated, memory.peak
        point.reserved_bytes = memory.reserved
    if passes.interrupted:
        point.status = "interrupted"
    elif load.accuracy is not None:
        point.correct, point.labelled = load.accuracy()
        point.accuracy = point.correct / point.labelled
    return [
        IterationRow(point.subject, point.batch, "timed", index, start, seconds)
        for index, start, seconds in _thinned(passes)
    ]


def _try(point: Point, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except UnsupportedError as error:
        point.add_note(str(error))
        return None


def _latency(point: Point, passes: Passes) -> None:
    point.passes = len(passes)
    if not passes:
        return
    seconds = np.frombuffer(passes.seconds)
    total_s = float(seconds.sum())
    point.measured_s = passes.span_s
    point.latency_min_s, point.latency_max_s = float(seconds.min()), float(seconds.max())
    point.latency_mean_s = total_s / len(passes)
    for percentile in (50, 90, 99):
        value = float(np.percentile(seconds, percentile))
        setattr(point, f"latency_p{percentile}_s", value)
    point.throughput_images_per_s = point.batch * len(passes) / total_s


def _meters(point: Point, meters: Meters, sampler: Sampler, settings: Settings) -> None:
    if meters.gpu is None and meters.process is None:
        return
    point.sample_period_s = settings.sample_period_s
    point.sample_period_achieved_s = sampler.achieved_s
    point.samples = len(sampler.samples)
    if sampler.failure is not None:
        point.add_note(sampler.failure)
    if meters.gpu is None:
        return
    # Before this, NVML's window still reaches back to before the warm-up.
    since_s = max(0.0, NVML_WINDOW_S - settings.settle_s)
    for column, meter in (
        ("nvml_gpu_utilization", "gpu_utilization"),
        ("nvml_memory_utilization", "memory_utilization"),
    ):
        setattr(point, f"{column}_mean", sampler.mean(meter, since_s))
        setattr(point, f"{column}_max", sampler.most(meter, since_s))
    point.nvml_utilization_samples = len(sampler.values("gpu_utilization", since_s))
    if not point.nvml_utilization_samples and since_s:
        point.add_note(
            f"no NVML utilisation: the passes ended within {NVML_WINDOW_S:g} s of the warm-up's "
            "beginning, NVML's averaging window"
        )
    used = sampler.most("device_memory_used")
    point.device_memory_used_bytes = None if used is None else int(used)
    point.power_mean_w, point.power_max_w = sampler.mean("power_w"), sampler.most("power_w")
    point.power_limit_w = meters.gpu.power_limit_w
    point.sm_clock_mean_mhz = sampler.mean("sm_clock_mhz")
    point.sm_clock_min_mhz = sampler.least("sm_clock_mhz")
    point.memory_clock_mean_mhz = sampler.mean("memory_clock_mhz")
    point.temperature_mean_c = sampler.mean("temperature_c")
    point.temperature_max_c = sampler.most("temperature_c")
    point.throttle_reasons = "; ".join(sampler.seen("throttle_reasons"))


def _thinned(passes: Passes) -> list[tuple[int, float, float]]:
    step = -(-len(passes) // MOST_ITERATIONS) or 1
    return [
        (index, passes.starts_s[index], passes.seconds[index])
        for index in range(0, len(passes), step)
    ]


# ---- the inside of passes ----


def profile_point(
    point: Point, load: Load, settings: Settings, on_gpu: bool
) -> tuple[list[KernelRow], list[IterationRow]]:
    """Profiles passes of ``load``, and adds kernels and copies to ``point``, whose times are known.

    On a GPU from activity records; where these cannot be had, from events. On a CPU from the host's clock.

    Returns:
        The rows of the kernel report and of the iteration report.
    """
    reason = activity.unavailable() if on_gpu else None
    plain = Passes()
    plain.run(load.next_pass, settings.profile_s / 4)
    if plain.interrupted:
        raise KeyboardInterrupt
    if on_gpu and reason is None:
        return _from_records(point, load, settings)
    if reason is not None:
        point.add_note(reason)
    if load.time_inside is None:
        point.add_note("kernel times: not known")
        return [], []
    mean_s = statistics.fmean(plain.seconds)
    passes = round(settings.profile_s / mean_s)
    found = load.time_inside(min(max(passes, FEWEST_PASSES), MOST_PROFILED_PASSES))
    # Both windows are of the same second, so that the difference is the timers' and not the machine's.
    point.profiling_cost = found.pass_s / mean_s - 1
    return _from_inside(point, found), []


def _from_records(
    point: Point, load: Load, settings: Settings
) -> tuple[list[KernelRow], list[IterationRow]]:
    passes = Passes()
    with activity.record() as trace:
        passes.run(load.next_pass, settings.profile_s, most=MOST_PROFILED_PASSES)
    if passes.interrupted:
        raise KeyboardInterrupt
    count = len(passes)
    point.kernel_source, point.profiled_passes = "activity", count
    point.records_dropped = trace.dropped
    median_s = statistics.median(passes.seconds)
    point.profiled_latency_s = median_s
    if point.latency_p50_s:
        point.profiling_cost = median_s / point.latency_p50_s - 1
    kernels = trace.kernels
    if not kernels:
        point.add_note("no kernel was recorded in the profiled passes")
        return [], []
    busy_s = trace.busy_s()
    point.kernels_per_pass = len(kernels) / count
    point.kernel_s_per_pass = busy_s / count
    point.copy_s_per_pass = sum(copy.end_s - copy.start_s for copy in trace.copies) / count
    point.gpu_utilization_profiled = busy_s / passes.span_s
    point.gpu_utilization = _share_of_pass(point)
    if trace.dropped:
        point.add_note(f"{trace.dropped} activity records were dropped: kernel times are too low")
    calls: dict[str, list[float]] = {}
    for kernel in kernels:
        calls.setdefault(kernel.name, []).append(kernel.end_s - kernel.start_s)
    rows = _kernel_rows(point, "activity", [CallTimes(*item) for item in calls.items()], count)
    return rows, _profiled_iterations(point, passes, kernels, bool(trace.dropped))


def _share_of_pass(point: Point) -> float | None:
    """Kernel time of a pass as a share of its time when nothing is recorded.

    Under a profiler launches take longer and kernels do not, so that the share of the profiled time is too
    low. Kernel times vary, too: a share above 1 by this is 1.
    """
    if not point.latency_mean_s or point.kernel_s_per_pass is None:
        return None
    return min(point.kernel_s_per_pass / point.latency_mean_s, 1.0)


def _profiled_iterations(
    point: Point, passes: Passes, kernels: Sequence[Any], dropped: bool
) -> list[IterationRow]:
    """Gives every pass its kernels: the same number each, as passes wait for their end."""
    each, left = divmod(len(kernels), len(passes))
    if left or dropped:
        point.add_note("kernel time per pass: not known, as passes do not have the same kernels")
    ordered = sorted(kernels, key=lambda kernel: kernel.start_s)
    rows = []
    for index, start_s, wall_s in _thinned(passes):
        kernel_s = None
        if not left and not dropped:
            kernel_s = covered_s(ordered[index * each : (index + 1) * each])
        gap_s = None if kernel_s is None else max(wall_s - kernel_s, 0.0)
        rows.append(
            IterationRow(
                point.subject, point.batch, "profiled", index, start_s, wall_s, kernel_s, gap_s
            )
        )
    return rows


def _from_inside(point: Point, found: InsideTimes) -> list[KernelRow]:
    point.kernel_source, point.profiled_passes = found.source, found.passes
    point.profiled_latency_s = found.pass_s
    if found.source == "events":
        total_s = sum(sum(call.samples_s) for call in found.calls)
        point.kernel_s_per_pass = total_s / found.passes
        point.copy_s_per_pass = (found.copies_s or 0.0) / found.passes
        # Events take time of their own, by which many short kernels would fill more than the pass.
        if point.latency_mean_s and point.kernel_s_per_pass > point.latency_mean_s:
            point.add_note(
                "kernel runs: not known, as events around kernels add up to more than a pass"
            )
        else:
            point.gpu_utilization = _share_of_pass(point)
    return _kernel_rows(point, found.source, found.calls, found.passes)


def _kernel_rows(point: Point, source: str, calls: list[CallTimes], passes: int) -> list[KernelRow]:
    totals = {call.name: sum(call.samples_s) for call in calls}
    whole = sum(totals.values())
    rows = [
        KernelRow(
            point.subject,
            point.batch,
            source,
            call.name,
            passes,
            len(call.samples_s),
            totals[call.name],
            totals[call.name] / len(call.samples_s),
            min(call.samples_s),
            max(call.samples_s),
            totals[call.name] / whole if whole else 0.0,
        )
        for call in calls
    ]
    return sorted(rows, key=lambda row: -row.total_s)
