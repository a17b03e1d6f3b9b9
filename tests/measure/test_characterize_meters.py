"""The meters and the records: a sampler of known values, a GPU that is made up."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from characterize_points import point, rows

from cnn_engine.characterize import command, counters, measure, sampler, subjects
from cnn_engine.characterize.measure import Meters, Passes, Settings
from cnn_engine.characterize.sampler import GpuMeters, ProcessMeters, Sampler, SmCounters
from cnn_engine.characterize.subjects import Load
from cnn_engine.devices import nvml
from cnn_engine.errors import UnsupportedError
from cnn_engine.measure.cupti.activity_records import Copy, Kernel, Trace


class Clock:
    """A clock that only those move who wait or work: no machine is too slow for it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def passes_clock(monkeypatch) -> Clock:
    """The clock of passes."""
    clock = Clock()
    monkeypatch.setattr(measure, "perf_counter", clock)
    return clock


class Waits:
    """In the place of a sampler's event: each wait is ``late``, and they end after ``seconds``."""

    def __init__(self, clock: Clock, seconds: float, late: float = 0.0) -> None:
        self._clock, self._seconds, self._late = clock, seconds, late

    def wait(self, seconds: float) -> bool:
        self._clock.advance(seconds + self._late)
        return self._clock.now >= self._seconds

    def set(self) -> None:
        pass


def sampled(monkeypatch, read, seconds: float, late: float = 0.0) -> Sampler:
    """Returns a sampler of every 10 ms after so many seconds of a clock, which ``read`` may move."""
    clock = Clock()
    monkeypatch.setattr(sampler, "perf_counter", clock)
    found = Sampler(lambda: read(clock), 0.01)
    found._stop = Waits(clock, seconds, late)
    with found:
        pass
    return found


def test_samples_are_taken_at_the_period_that_was_asked_for(monkeypatch):
    """Waits that are late do not add up: the grid keeps the mean."""
    found = sampled(monkeypatch, lambda clock: {"x": 1.0}, 0.5, late=0.003)
    assert len(found.samples) == 50
    assert found.achieved_s == pytest.approx(0.01)
    assert found.times_s == pytest.approx(np.arange(50) * 0.01 + 0.003)


def test_a_meter_slower_than_the_period_is_told(monkeypatch):
    def slow(clock):
        clock.advance(0.033)
        return {}

    found = sampled(monkeypatch, slow, 0.4)
    assert found.achieved_s == pytest.approx(0.04)


def test_even_the_shortest_time_has_one_sample():
    with Sampler(lambda: {"x": 2.0}, 60.0) as sampler:
        pass
    assert sampler.samples == [{"x": 2.0}]
    assert sampler.achieved_s is None


def test_a_meter_that_fails_ends_sampling_and_says_so(monkeypatch):
    readings = iter([{"x": 1.0}])
    found = sampled(monkeypatch, lambda clock: next(readings), 0.1)
    assert found.mean("x") == 1
    assert "ended after 1 samples" in found.failure


def test_what_is_made_of_samples():
    found = Sampler(dict, 1.0)
    found.times_s = [0.0, 1.0, 2.0]
    found.samples = [
        {"x": 10.0, "why": ["power cap"]},
        {"x": None, "why": []},
        {"x": 20.0, "why": ["power cap", "brake"]},
    ]
    assert found.values("x") == [10, 20]
    assert found.mean("x") == 15
    assert found.mean("x", 0.5) == 20
    assert (found.least("x"), found.most("x")) == (10, 20)
    assert found.mean("y") is found.most("y") is None
    assert found.seen("why") == ["power cap", "brake"]


def test_the_process_meters(works):
    meters = ProcessMeters()
    meters.reset_peak()
    outer, cpu_s, inner = time.process_time(), meters.cpu_s(), time.process_time()
    while time.process_time() - inner < 0.3:
        pass
    used = meters.cpu_s() - cpu_s
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert 0.3 - 2 * tick < used < time.process_time() - outer + 2 * tick
    before = meters.read()["rss"]
    block = np.ones(60 * 2**20, np.uint8)
    assert meters.read()["rss"] > before + 50 * 2**20
    del block
    assert meters.peak() > before + 50 * 2**20
    if meters.reset_peak():
        assert meters.peak() < before + 50 * 2**20


# ---- a GPU that is made up ----


class MadeUpNvml:
    """NVML as far as it is asked here, for a GPU whose values are given."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_SUCCESS = 0
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 3, 10

    class NVMLError(Exception):
        pass

    def __init__(self, gpm: bool = True, power: bool = True) -> None:
        self.gpm, self.power, self.freed = gpm, power, 0

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=100, used=40)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=90, memory=5)

    def nvmlDeviceGetPowerUsage(self, handle):
        if not self.power:
            raise self.NVMLError("Not Supported")
        return 250_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 41

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0x05  # idle, and the power cap

    def nvmlGpmQueryDeviceSupport(self, handle):
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self):
        return []

    def nvmlGpmSampleGet(self, handle, sample):
        sample.append(time.perf_counter())

    def nvmlGpmSampleFree(self, sample):
        self.freed += 1

    def c_nvmlGpmMetricsGet_t(self):
        empty = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]
        return SimpleNamespace(sample1=None, sample2=None, metrics=empty)

    def nvmlGpmMetricsGet(self, wanted):
        assert wanted.numMetrics == 3
        assert wanted.sample1 < wanted.sample2
        for metric, (value, status) in zip(
            wanted.metrics, ((75.0, 0), (12.5, 0), (3.0, 3)), strict=False
        ):
            metric.value, metric.nvmlReturn = value, status


def made_up_gpu(**options) -> nvml.Gpu:
    gpu = nvml.Gpu.__new__(nvml.Gpu)
    gpu.nvml, gpu.handle = MadeUpNvml(**options), object()
    return gpu


def meters_of_a_gpu(**options) -> Meters:
    gpu = made_up_gpu(**options)
    return Meters(GpuMeters(gpu), SmCounters(gpu), None)


@pytest.fixture
def works(passes_clock):
    """Returns a function that makes a load of passes of so many seconds of their clock."""

    def load(seconds: float, **options) -> Load:
        return Load(4, lambda: lambda: passes_clock.advance(seconds), 1, **options)

    return load


def sample_by_the_clock_of_passes(monkeypatch, seconds: float) -> None:
    """Has samplers take all samples of so many seconds as they begin."""

    class AtOnce(Sampler):
        def __enter__(self):
            clock = Clock()
            self._stop = Waits(clock, seconds, late=1e-4)
            monkeypatch.setattr(sampler, "perf_counter", clock)
            self._run()
            self._thread.start = self._thread.join = lambda: None
            return self

    monkeypatch.setattr(measure, "Sampler", AtOnce)


def test_what_nvml_says_is_in_the_point(monkeypatch, works):
    sample_by_the_clock_of_passes(monkeypatch, 1.2)
    meters = meters_of_a_gpu()
    found = point()
    memory = subjects.Memory(10, 30, 50)
    load = works(0.005, memory=lambda: memory)
    rows_ = measure.time_point(found, load, meters, Settings(1, 1e-3, 1.2, 1.0, 0.05))
    meters.close()
    assert meters.gpu.gpu.nvml.freed == 2
    assert found.nvml_gpu_utilization_mean == found.nvml_gpu_utilization_max == 0.9
    assert found.nvml_memory_utilization_mean == 0.05
    assert (found.power_mean_w, found.power_max_w, found.power_limit_w) == (250, 250, 700)
    assert (found.sm_clock_mean_mhz, found.sm_clock_min_mhz) == (1980, 1980)
    assert found.memory_clock_mean_mhz == 3201
    assert found.temperature_max_c == 41
    assert found.throttle_reasons == "power cap"  # an idle moment is none
    assert found.device_memory_used_bytes == 40
    assert (found.allocated_bytes, found.allocated_peak_bytes, found.reserved_bytes) == (10, 30, 50)
    assert (found.sm_utilization, found.sm_occupancy, found.dram_utilization) == (0.75, 0.125, None)
    # NVML averages over up to a second, and the warm-up was short: only what comes later counts.
    assert (found.nvml_utilization_samples, found.samples) == (4, 24)
    assert found.status == "not run"  # whoever calls decides
    assert len(rows_) == found.passes


def test_nvml_utilisation_of_a_short_window_is_left_out(monkeypatch, works):
    sample_by_the_clock_of_passes(monkeypatch, 0.02)
    found = point()
    measure.time_point(found, works(0.002), meters_of_a_gpu(), Settings(1, 1e-3, 0.02, 0.02, 0.005))
    assert found.nvml_gpu_utilization_mean is None
    assert found.nvml_utilization_samples == 0
    assert "averaging window" in found.note
    assert found.power_mean_w == 250
    after_a_warmup = point()
    measure.time_point(
        after_a_warmup, works(0.002), meters_of_a_gpu(), Settings(1, 1.0, 0.02, 0.02, 0.005)
    )
    assert after_a_warmup.nvml_gpu_utilization_mean == 0.9


def test_a_gpu_without_performance_monitoring_or_power():
    with pytest.raises(UnsupportedError, match="expected a Hopper GPU or newer"):
        SmCounters(made_up_gpu(gpm=False))
    assert GpuMeters(made_up_gpu(power=False)).read()["power_w"] is None


def test_meters_that_are_missing_are_notes():
    device = SimpleNamespace(kind="cuda", pci_bus_id="0000:00:00.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)
        meters = Meters.open(device)
    assert meters.gpu is meters.counters is None
    assert any("nvidia-ml-py" in note and "cnn-engine[lab]" in note for note in meters.notes)


def recorded(monkeypatch, kernels_of, dropped=0, reason=None):
    """Has :mod:`measure` find these activity records: of each profiled pass, by its number."""
    traces = []

    @contextmanager
    def record():
        trace = Trace()
        traces.append(trace)
        yield trace
        for index in range(trace.passes):
            for name, start, end in kernels_of(index):
                at = float(index) + start
                trace.kernels.append(
                    Kernel(name, at, float(index) + end, 7, 1, (1, 1, 1), (32, 1, 1), 8, 0)
                )
            trace.copies.append(Copy("h2d", 4, float(index), index + 1e-4, 7, 2, True))
        trace.dropped = dropped

    run_ = Passes.run

    def counted(self, *arguments, **options):
        run_(self, *arguments, **options)
        if traces:
            traces[-1].passes = len(self)

    monkeypatch.setattr(Passes, "run", counted)
    monkeypatch.setattr(measure.activity, "record", record)
    monkeypatch.setattr(measure.activity, "unavailable", lambda: reason)


def test_utilisation_is_the_union_of_kernels_over_the_time_of_a_pass(monkeypatch, works):
    # Two kernels that overlap, and one apart: 3 ms of 10 ms that a pass takes when nothing is recorded.
    recorded(monkeypatch, lambda index: [("a", 0, 2e-3), ("b", 1e-3, 2e-3), ("a", 5e-3, 6e-3)])
    found = point(latency_mean_s=10e-3, latency_p50_s=10e-3)
    kernels, iterations = measure.profile_point(found, works(0.012), Settings(profile_s=0.2), True)
    assert found.kernel_source == "activity"
    assert found.kernels_per_pass == 3
    assert found.kernel_s_per_pass == pytest.approx(3e-3)
    assert found.copy_s_per_pass == pytest.approx(1e-4)
    assert found.gpu_utilization == pytest.approx(0.3)
    # While it is recorded a pass takes longer, 12 ms, and the share is less.
    assert found.gpu_utilization_profiled == pytest.approx(0.25)
    assert found.profiling_cost == pytest.approx(0.2)
    assert [(k.name, k.calls) for k in kernels] == [
        ("a", 2 * found.profiled_passes),
        ("b", found.profiled_passes),
    ]
    assert kernels[0].share == pytest.approx(0.75)
    assert kernels[0].average_s == pytest.approx(1.5e-3)
    assert (kernels[0].min_s, kernels[0].max_s) == pytest.approx((1e-3, 2e-3))
    assert len(iterations) == found.profiled_passes
    for row in iterations:
        assert row.window == "profiled"
        assert row.kernel_s == pytest.approx(3e-3)
        assert row.gap_s == pytest.approx(row.wall_s - 3e-3)
    assert found.note == ""


def test_utilisation_is_no_more_than_all_of_the_time(monkeypatch, works):
    recorded(monkeypatch, lambda index: [("a", 0, 2.1e-3)])
    found = point(latency_mean_s=2e-3, latency_p50_s=2e-3)
    measure.profile_point(found, works(0.002), Settings(profile_s=0.05), True)
    assert found.gpu_utilization == 1


def test_passes_with_different_kernels_have_no_kernel_time_each(monkeypatch, works):
    recorded(monkeypatch, lambda index: [("a", 0, 1e-3)] * (2 if index == 0 else 1))
    found = point(latency_mean_s=2e-3, latency_p50_s=2e-3)
    _, iterations = measure.profile_point(found, works(0.002), Settings(profile_s=0.05), True)
    assert {row.kernel_s for row in iterations} == {None}
    assert "do not have the same kernels" in found.note
    assert found.gpu_utilization is not None


def test_dropped_records_are_told(monkeypatch, works):
    recorded(monkeypatch, lambda index: [("a", 0, 1e-3)], dropped=5)
    found = point(latency_mean_s=2e-3, latency_p50_s=2e-3)
    measure.profile_point(found, works(0.002), Settings(profile_s=0.05), True)
    assert found.records_dropped == 5
    assert "5 activity records were dropped" in found.note


def test_no_records_at_all_are_told(monkeypatch, works):
    recorded(monkeypatch, lambda index: [])
    found = point(latency_mean_s=2e-3, latency_p50_s=2e-3)
    kernels, iterations = measure.profile_point(found, works(0.002), Settings(profile_s=0.05), True)
    assert (kernels, iterations) == ([], [])
    assert "no kernel was recorded" in found.note
    assert found.gpu_utilization is None


def test_without_records_events_take_their_place(monkeypatch, works):
    recorded(monkeypatch, lambda index: [], reason="activity records: none here")
    calls = [subjects.CallTimes("conv1", [1e-3] * 6), subjects.CallTimes("fc", [5e-4] * 6)]
    inside = subjects.InsideTimes("events", calls, 6, 4e-3, copies_s=6e-4)
    asked = []

    def time_inside(passes):
        asked.append(passes)
        return inside

    found = point(latency_mean_s=3e-3, latency_p50_s=3e-3)
    load = works(0.002, time_inside=time_inside)
    kernels, _ = measure.profile_point(found, load, Settings(profile_s=0.1), True)
    assert found.note == "activity records: none here"
    assert found.kernel_source == "events"
    assert found.gpu_utilization == pytest.approx(0.5)
    assert found.gpu_utilization_profiled is None
    assert found.copy_s_per_pass == pytest.approx(1e-4)
    assert [k.name for k in kernels] == ["conv1", "fc"]
    assert {k.source for k in kernels} == {"events"}
    assert asked == [50]

    short = point(latency_mean_s=1e-3, latency_p50_s=1e-3)
    measure.profile_point(short, load, Settings(profile_s=0.1), True)
    assert short.kernel_s_per_pass == pytest.approx(1.5e-3)
    assert short.gpu_utilization is None
    assert "events around kernels add up to more than a pass" in short.note

    nothing = point(latency_mean_s=3e-3, latency_p50_s=3e-3)
    assert measure.profile_point(nothing, works(0.002), Settings(profile_s=0.1), True) == ([], [])
    assert "kernel times: not known" in nothing.note


def test_passes_are_timed_around_the_work_alone(passes_clock):
    def prepared():
        passes_clock.advance(0.01)
        return lambda: passes_clock.advance(0.002)

    passes = Passes()
    passes.run(prepared, 0.0)
    assert len(passes) == measure.FEWEST_PASSES
    assert list(passes.seconds) == pytest.approx([0.002] * len(passes))
    assert passes.span_s == pytest.approx(0.012 * len(passes))
    most = Passes()
    most.run(lambda: int, 60.0, most=10)
    assert len(most) == 10


def test_an_interrupted_pass_does_not_count():
    done = []

    def once_then_interrupted():
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt

    passes = Passes()
    passes.run(lambda: once_then_interrupted, 60.0)
    assert passes.interrupted
    assert len(passes) == len(passes.starts_s) == 2


def test_the_command_on_a_gpu_that_is_made_up(tmp_path, monkeypatch, capsys, works):
    device = SimpleNamespace(
        kind="cuda", name="cuda:0", model="Made-up GPU", note=None, pci_bus_id="0000:01:00.0"
    )
    order = []

    class Subject:
        name, kind, model, variant, reduction = "net fused", "engine", "net", "fused", False
        dtype, boundary = "float32", "host"
        check = None

        def prepare(self, check):
            order.append("prepare")

        @contextmanager
        def load(self, batch):
            order.append(batch)
            memory = subjects.Memory(10 * batch, 20 * batch, 2**20)
            yield works(0.001 * batch, memory=lambda: memory)

        def close(self):
            order.append("close")

    recorded(monkeypatch, lambda index: [("conv", 0, 5e-4), ("fc", 5e-4, 6e-4)])
    gpu = made_up_gpu()
    monkeypatch.setattr(nvml, "Gpu", lambda pci_bus_id: gpu)
    monkeypatch.setattr(command.devices, "select", lambda name: device)
    monkeypatch.setattr(command, "subjects_of", lambda *given: ([Subject()], {"batches": [1, 4]}))
    described = {"gpu": device.model, "commit": None, "versions": {}}
    monkeypatch.setattr(command.environment, "describe", lambda device: dict(described))
    monkeypatch.setattr(
        command.environment, "state", lambda device, load: {"warnings": ["GPU: warm"]}
    )
    profiled = []

    def collect(*given):
        profiled.append(given)
        return [counters.CounterRow(given[0], given[1], "conv", 1, 1e-3, sm_throughput=0.5)]

    monkeypatch.setattr(counters, "find", lambda: "ncu")
    monkeypatch.setattr(counters, "collect", collect)
    code = command.main(
        words := ["--batch", "1,4", "--duration", "0.1", "--settle", "0.1", "--sample-period", "0.02",
                  "--output", str(tmp_path), "--ncu"]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    assert [(found[0], found[1], found[2][3:]) for found in profiled] == [
        ("net fused", batch, ["0", str(batch), *words]) for batch in (1, 4)
    ]
    assert [r["name"] for r in rows(tmp_path / "ncu.csv")] == ["conv", "conv"]
    # All points are timed before the first record is taken.
    assert order == ["prepare", 1, 4, "close", 1, 4, "close"]
    one, four = rows(tmp_path / "summary.csv")
    for row in (one, four):
        assert row["status"] == "ok"
        assert row["kernel_source"] == "activity"
        assert row["sm_utilization"] == "0.75"
        assert row["power_mean_w"] == "250.0"
        assert "averaging window" in row["note"]
    assert float(one["gpu_utilization"]) == pytest.approx(0.6)  # 0.6 ms of 1 ms
    assert float(four["gpu_utilization"]) == pytest.approx(0.15)
    assert four["allocated_peak_bytes"] == "80"
    found = [(k["batch"], k["name"], k["source"]) for k in rows(tmp_path / "kernel.csv")]
    assert found == [(batch, name, "activity") for batch in "14" for name in ("conv", "fc")]
    windows = {row["window"] for row in rows(tmp_path / "iteration.csv")}
    assert windows == {"timed", "profiled"}
    document = json.loads((tmp_path / "characterize.json").read_text())
    assert document["device_memory"] == {"total_bytes": 100, "used_before_bytes": 40}
    assert document["notes"] == ["GPU: warm"]
    for words in ("kernel runs", "GPU memory and power", "250.0 W", "1,980 MHz", "power cap",
                  "Nsight Compute: net fused, batch 4", "50.00 %"):  # fmt: skip
        assert words in out
    assert (tmp_path / "characterize.png").read_bytes().startswith(b"\x89PNG")
