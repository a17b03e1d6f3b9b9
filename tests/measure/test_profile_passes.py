"""The profiled passes, on a stand-in for a GPU and on a real one, and ``run --profile``."""

from __future__ import annotations

import json
import types
from functools import partial

import numpy as np
import pytest
from fake_cupti import FakeCupti, install
from samples import make_cuda

from cnn_engine import run
from cnn_engine.engine.engine import Engine
from cnn_engine.measure import profile, profile_tables
from cnn_engine.measure.cupti import activity
from cnn_engine.measure.profile_tables import Profile
from cnn_engine.measure.result import TimelineEvent
from cnn_engine.plan.plan import INPUT, OUTPUT, Plan, Step
from cnn_engine.report import json as json_report
from cnn_engine.report import profile as text

# ---- the profiled passes, on a stand-in for a GPU ----


class FakeEngine:
    """An engine whose steps only leave records in a stand-in for CUPTI."""

    def __init__(self, cupti: FakeCupti, data_mode: str = "resident") -> None:
        self.device = types.SimpleNamespace(kind="cuda", name="cuda:0", index=0)
        self.data_mode = data_mode
        self.cupti = cupti
        self.bound: list[tuple[int, int]] = []

    def plan_at(self, images: int, probabilities: int, batch: int, dtype: np.dtype) -> Plan:
        cupti = self.cupti
        self.bound.append((images, batch))
        steps = [
            Step("images", "copy", "cuda", lambda to, source, n: cupti.copy(1, n),
                 [0, INPUT, batch * 4], bytes=batch * 4, direction="h2d"),
            Step("conv1", "conv", "cuda", lambda: cupti.launch(1e-5), []),
            Step("relu1", "relu", "cpu", lambda: None, []),
            Step("probabilities", "copy", "cuda", lambda to, source, n: cupti.copy(2, n),
                 [OUTPUT, 0, batch], bytes=batch, direction="d2h"),
            Step("sync", "sync", "cpu", cupti.synchronize, []),
        ]  # fmt: skip
        plan = Plan(batch, steps, {}, [])
        plan.bind(images, probabilities)
        return plan


@pytest.fixture
def fake(monkeypatch):
    """Returns a function that puts a stand-in for cupti-python in its place."""
    return partial(install, monkeypatch)


def collect(engine: FakeEngine, count: int, batch: int, **options) -> Profile:
    images, probabilities = np.zeros((count, 4), np.uint8), np.zeros((count, 1), np.float32)
    result = make_cuda(dataset={"name": "n", "source": "s", "images": count})
    return profile.collect(engine, images, probabilities, batch, result, **options)


def test_the_same_batches_are_run_plain_and_profiled(fake):
    cupti = fake()
    engine = FakeEngine(cupti)
    found = collect(engine, 205, 2)
    assert (found.passes, found.images) == (103 + 7, 205 + 14)  # ten rounds of eleven
    assert found.capture.complete
    assert (found.capture.launches, found.capture.kernels) == (110, 110)
    assert (found.capture.steps, found.capture.copies) == (110, 220)
    assert found.capture.bytes == 219 * 5
    assert found.cost.samples == 109  # the last batch is not full
    assert found.cost.ratio == pytest.approx(found.cost.profiled_s / found.cost.plain_s)
    assert [row.layer for row in found.layers] == ["conv1"]
    assert {row.name for row in found.api} == {
        "cudaMemcpyAsync", "cudaLaunchKernel", "cudaStreamSynchronize"
    }  # fmt: skip
    assert [row.name for row in found.cpu] == ["relu1"]
    assert found.cpu[0].calls == 110
    assert cupti.enabled == set()
    # A look at the plan, then in each round every batch twice.
    assert len(engine.bound) == 1 + 2 * 110
    assert engine.bound[1:12] == engine.bound[12:23]


def test_few_batches_are_repeated_until_there_is_a_median(fake):
    found = collect(FakeEngine(fake()), 4, 4)
    assert found.passes == profile.ROUNDS * profile.FEWEST_PASSES
    assert found.cost.samples == found.passes
    assert found.cost.interval is not None


def test_many_passes_are_capped_and_the_report_says_so(fake, monkeypatch):
    monkeypatch.setattr(profile, "MOST_STEPS", 500)
    found = collect(FakeEngine(fake()), 300, 1)
    assert found.passes == 100
    assert "200 of 300 passes" in text.render(found)


def test_time_is_capped_after_a_pass_of_each_kind(fake, monkeypatch):
    monkeypatch.setattr(profile, "CAP_S", 0.0)
    found = collect(FakeEngine(fake()), 30, 10)
    assert found.passes == found.cost.samples == 1
    assert found.cost.interval is None


def test_an_interruption_keeps_what_was_recorded(fake):
    cupti = fake()
    engine = FakeEngine(cupti)
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        FakeCupti.synchronize(cupti)

    cupti.synchronize = interrupt
    found = collect(engine, 205, 2)
    assert found.interrupted
    assert 0 < found.passes < 30
    assert found.gpu
    assert cupti.enabled == set()


def test_managed_memory_is_recorded_in_its_mode_alone(fake, monkeypatch):
    asked = []
    record = activity.record
    monkeypatch.setattr(
        activity, "record", lambda *a, managed_device: (asked.append(managed_device), record(*a))[1]
    )
    collect(FakeEngine(fake()), 4, 4)
    assert set(asked) == {None}
    asked.clear()
    collect(FakeEngine(fake(), "managed"), 4, 4)
    assert set(asked) == {0}


def test_events_follow_the_timeline_of_another_run(fake):
    found = collect(FakeEngine(fake()), 8, 4)
    assert len(found.events) == found.events_total == 50 * (2 + 1 + 4)
    before = [TimelineEvent("x", "conv", "host", 1.0, 0.5, 3)]
    events = profile.timeline_events(found, before)
    assert {event.track for event in events} == {
        "cuda:0 stream 7 (profiled)", "host CUDA API (profiled)"
    }  # fmt: skip
    assert min(event.start_s for event in events) == 1.5
    assert [event.batch for event in events] == sorted(event.batch for event in events)
    assert (events[0].batch, events[-1].batch) == (4, 53)
    assert profile.timeline_events(found)[0].start_s == 0


def test_events_are_capped(fake, monkeypatch):
    monkeypatch.setattr(profile, "TIMELINE_EVENTS", 10)
    found = collect(FakeEngine(fake()), 8, 4)
    assert (len(found.events), found.events_total) == (10, 350)


@pytest.mark.parametrize("refuse", ["everything", "flush", "push"])
def test_where_records_are_refused_the_layers_stand_in(fake, refuse):
    found = collect(FakeEngine(fake(refuse=refuse)), 8, 4)
    assert found.source == profile_tables.EVENTS
    assert "CUPTI" in found.notes[0]
    assert "without activity records" in found.notes[1]
    assert found.gpu[0].name == "conv1"


# ---- the command ----

SMALL = ["--device", "cpu", "--weights", "random", "--data", "synthetic", "--images", "6"]


def test_the_command_profiles_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "result.json"
    options = [
        *SMALL,
        "--variant",
        "pad",
        "--profile",
        "--profile-percent",
        "50",
        "--json",
        str(path),
    ]
    assert run.main([*options, "--batch", "4", "--iterations", "1"]) == 0
    report = capsys.readouterr().out
    assert "Layers on the CPU" in report
    assert "the device is a CPU" in report
    found = json_report.load(path).profile
    assert found.source == profile_tables.HOST_CLOCK
    assert found.top == 50
    assert found.images == 4 * found.passes
    for row in found.cpu:  # one set of samples for all columns
        assert row.calls == found.passes
        assert row.min_s <= row.average_s <= row.max_s
        assert row.total_s == pytest.approx(row.calls * row.average_s)
    assert {"conv1", "softmax"} <= {row.name for row in found.cpu}
    assert found.cpu_s <= found.wall_s
    assert "others)" in report  # below the line


def test_without_the_option_nothing_is_profiled(tmp_path, capsys):
    path = tmp_path / "result.json"
    assert run.main([*SMALL, "--iterations", "1", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["profile"] is None
    assert "What filled the time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top", "2.5"], "--top: expected a whole number from 1"),
        (["--profile", "--top", "most"], "--top: expected a whole number from 1"),
        (["--profile", "--profile-percent", "0"], "--profile-percent: expected a number above 0"),
        (
            ["--profile", "--profile-percent", "101"],
            "--profile-percent: expected a number above 0, up to 100",
        ),
        (["--profile-percent", "50"], "--profile-percent: expected the option --profile with it"),
    ],
)
def test_top_is_checked(options, message, capsys):
    assert run.main([*SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("data_mode", ["resident", "transfer", "managed", "stream"])
def test_a_gpu_run_is_captured_whole(data_mode):
    if reason := activity.unavailable():
        pytest.skip(reason)
    engine = Engine("cifar10", device="cuda", variant="pad", data_mode=data_mode)
    images = np.zeros((60, 3, 32, 32), np.uint8)
    probabilities = np.zeros((60, 10), np.float32)
    result = engine.profile(images, batch=20, iterations=3, probabilities=probabilities)
    found = profile.collect(engine, images, probabilities, 20, result)
    print(text.render(found))
    assert found.source == profile_tables.RECORDS
    assert found.capture.complete, found.capture
    assert 0 < found.kernel_s <= found.gpu_s <= found.wall_s
    assert found.api_s <= found.wall_s
    assert found.cpu_s <= found.wall_s
    layers = {layer.name for layer in result.layers if layer.place == "cuda"}
    assert {row.layer for row in found.layers} == layers
    assert sum(row.share for row in found.layers) == pytest.approx(1)
    assert {"conv1", "conv2", "conv3"} <= layers
    assert found.cost.samples >= profile.FEWEST_PASSES
    if data_mode == "managed" and not found.notes:
        assert found.managed
    assert profile.timeline_events(found)


@pytest.mark.alone
@pytest.mark.gpu
def test_events_and_records_agree_on_a_long_kernel():
    if reason := activity.unavailable():
        pytest.skip(reason)
    engine = Engine("cifar10", device="cuda", variant="if")
    images = np.zeros((2000, 3, 32, 32), np.uint8)
    probabilities = np.zeros((2000, 10), np.float32)
    result = engine.profile(images, batch=2000, iterations=3, probabilities=probabilities)
    found = profile.collect(engine, images, probabilities, 2000, result)
    row = next(row for row in found.layers if row.layer == "conv2")
    layer = next(layer for layer in result.layers if layer.name == "conv2")
    assert row.average_s == pytest.approx(layer.device_s / layer.calls, rel=0.1, abs=3e-6)
