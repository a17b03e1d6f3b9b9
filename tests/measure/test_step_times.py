"""Passes taken apart, on clocks that are made here: what adds up, and what is where."""

from __future__ import annotations

import types

import numpy as np
import pytest
from fake_cupti import FakeCupti, install
from hypothesis import given
from hypothesis import strategies as st

from cnn_engine import _cpu, workload
from cnn_engine.measure import meters, pass_parts, step_times
from cnn_engine.measure.pass_parts import HOST, LAUNCH, OVERLAP, STAGING, WAITING, take_apart
from cnn_engine.plan.plan import INPUT, OUTPUT, Part, Plan, Step


def step(name: str, kind: str, place: str = "cuda", **options) -> Step:
    return Step(name, kind, place, int, [], **options)


COPY = step("images", "copy", direction="h2d")
KERNEL, OTHER = step("conv1", "conv"), step("relu1", "relu")
BACK = step("probabilities", "copy", direction="d2h")
WAIT = step("sync", "sync", "cpu")
ON_CPU = step("pool1", "pool", "cpu")


# ---- one pass ----


def test_what_the_device_does_in_a_wait_is_its_steps_and_the_rest_is_between():
    # Calls of 2, 3 and 2 us, then a wait of 13; work of 4, 5 and 1 us, one after the other.
    parts = take_apart(
        [COPY, KERNEL, BACK, WAIT], [0, 2, 5, 7, 20], 21, [4, 5, 1, None], [False] * 4, False
    )
    assert parts.steps == [4, 5, 1, 0]
    assert parts.host == [2, 3, 2, 13]
    # Nothing runs in the first call; the copy from 2 to 6, the kernel to 11, the copy back to 12.
    assert parts.between == {LAUNCH: 2, WAITING: 8, HOST: 1}
    assert sum(parts.steps) + sum(parts.between.values()) == 21


def test_a_pageable_copy_is_split_into_staging_and_what_the_device_copied():
    parts = take_apart(
        [COPY, KERNEL, BACK, WAIT], [0, 50, 54, 80, 81], 81, [8, 13, 2, None],
        [True, False, True, False], False,
    )  # fmt: skip
    assert parts.steps == [8, 13, 2, 0]
    assert parts.between == {STAGING: 42 + 26 - 13 - 2, LAUNCH: 4, WAITING: 1, HOST: 0}
    assert sum(parts.steps) + sum(parts.between.values()) == 81


def test_layers_on_the_cpu_are_steps_of_the_host():
    parts = take_apart(
        [KERNEL, WAIT, ON_CPU], [0, 3, 10, 30], 30, [5, None, None], [False] * 3, False
    )
    assert parts.steps == [5, 0, 20]
    assert parts.between == {LAUNCH: 3, WAITING: 2, HOST: 0}


def test_work_that_a_wait_has_seen_done_is_put_before_its_end():
    """A kernel that began while its launch had not yet returned."""
    parts = take_apart([KERNEL, WAIT], [0, 6, 8], 8, [5, None], [False] * 2, False)
    assert parts.between == {LAUNCH: 3, HOST: 0}
    assert sum(parts.steps) + sum(parts.between.values()) == 8


def test_more_work_than_the_pass_is_long_shows_in_the_sum():
    """As events that hold a launch would: nothing hides it."""
    parts = take_apart([KERNEL, WAIT], [0, 1, 10], 10, [24, None], [False] * 2, False)
    assert sum(parts.steps) + sum(parts.between.values()) == 24


def test_steps_on_two_streams_are_taken_off_where_they_overlap():
    first, second = types.SimpleNamespace(), types.SimpleNamespace()
    one, two = step("conv1", "conv", lane=first), step("conv1", "conv", lane=second)
    parts = take_apart([one, two, WAIT], [0, 1, 2, 12], 12, [8, 8, None], [False] * 3, True)
    # From 1 to 9 and from 2 to 10.
    assert parts.between == {LAUNCH: 1, WAITING: 2, HOST: 0, OVERLAP: -7}
    assert sum(parts.steps) + sum(parts.between.values()) == 12


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=12))
def test_parts_of_any_pass_whose_work_fits_add_up_to_it(drawn):
    steps = [COPY if pageable else KERNEL for *_, pageable in drawn] + [WAIT]
    device = [work for _, work, _ in drawn]
    marks = np.cumsum([0, *(call for call, *_ in drawn), sum(device) + 1])
    pageable = [*(found for *_, found in drawn), False]
    parts = take_apart(steps, marks, float(marks[-1]), [*device, None], pageable, False)
    assert sum(parts.steps) + sum(parts.between.values()) == pytest.approx(marks[-1])
    assert min(parts.between.values()) >= 0
    assert parts.steps[:-1] == device


def test_a_step_that_varies_keeps_what_it_takes(rng):
    """Passes that are as long as plain ones are those in which it was short: by what readings cost."""
    steps, reading_s = 8, 2e-6
    times = np.full((60, steps), 1e-5)
    times[:, 3] = 1e-5 * rng.uniform(1, 4, 60)
    clocked = [np.cumsum([0.0, *(row + reading_s)]) for row in times]
    lengths = times.sum(axis=1) + (steps + 1) * reading_s
    marks, length = pass_parts.usual(clocked, lengths, reading_s)
    assert length == pytest.approx(np.median(times.sum(axis=1)), rel=0.02)
    found = np.diff(marks)
    assert marks[0] == 0
    assert np.delete(found, 3) == pytest.approx(1e-5)
    assert found[3] == pytest.approx(np.median(times[:, 3]), rel=0.05)
    # A cost that is too large leaves no step below zero, and the steps within the pass.
    marks, length = pass_parts.usual(clocked[:2], lengths[:2], 1e-3)
    assert (np.diff(marks) >= 0).all()
    assert length >= marks[-1]


def test_what_a_reading_costs_is_measured(monkeypatch):
    clock = [0.0]

    def read() -> float:
        clock[0] += 5e-6
        return clock[0]

    monkeypatch.setattr(step_times, "perf_counter", read)
    assert step_times.reading_cost() == pytest.approx(5e-6)
    monkeypatch.undo()
    assert 0 < step_times.reading_cost() < 1e-4


# ---- all passes, on a stand-in for a GPU ----


class FakeDevice:
    """A device whose work moves a clock: the stand-in for CUPTI's, which is the host's as well."""

    kind, name = "cuda", "cuda:0"

    def __init__(self, cupti: FakeCupti, pinned: bool) -> None:
        self.cupti, self.pinned = cupti, pinned
        self.stream = None
        self.copied: list[tuple[int, int]] = []
        self.delays: list[float] = []

    def is_pinned(self, address: int) -> bool:
        return self.pinned

    def empty_pinned(self, shape, dtype):
        return np.zeros(shape, dtype)

    def event(self):
        now = types.SimpleNamespace(at=0)

        def record(stream) -> None:
            self.cupti.now += 100  # what an event costs the device
            now.at = self.cupti.now

        now.record = record
        return now

    def elapsed_s(self, start, end) -> float:
        return (end.at - start.at) * 1e-9

    def delay(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.cupti.now += round(seconds * 1e9)

    def synchronize(self) -> None: ...


class FakeEngine:
    """Three layers, of which one is on the CPU, and two copies."""

    def __init__(self, cupti: FakeCupti, pinned: bool = True, overhead_s: float = 0.0) -> None:
        self.device = FakeDevice(cupti, pinned)
        self.cupti, self.overhead = cupti, round(overhead_s * 1e9)
        self.batches: list[int] = []

    def plan_at(self, images: int, probabilities: int, batch: int, dtype: np.dtype) -> Plan:
        cupti, pinned = self.cupti, self.device.pinned
        self.batches.append(images)

        def cpu() -> None:
            cupti.now += 7_000

        steps = [
            Step("images", "copy", "cuda", lambda to, source, n: cupti.copy(1, 4_000, pinned),
                 [0, INPUT, batch * 4], bytes=batch * 4, direction="h2d"),
            Step("conv1", "conv", "cuda", lambda: cupti.launch(1e-5), [], flops=100, bytes=10),
            Step("relu1", "relu", "cuda", lambda: cupti.launch(2e-6), []),
            Step("sync", "sync", "cpu", cupti.synchronize, []),
            Step("pool1", "pool", "cpu", cpu, []),
            Step("probabilities", "copy", "cuda", lambda to, source, n: cupti.copy(2, 1_000, pinned),
                 [OUTPUT, 0, batch], bytes=batch, direction="d2h"),
            Step("sync", "sync", "cpu", cupti.synchronize, []),
        ]  # fmt: skip
        plan = Plan(batch, steps, {}, [])
        plan.bind(images, probabilities)
        return plan


@pytest.fixture
def look_into(monkeypatch):
    """Returns a function that looks into passes over ``count`` images on a stand-in for a GPU."""

    def look(count: int, batch: int, pinned=True, records=True, **options):
        cupti = install(monkeypatch, **options)
        for module in (step_times, meters):
            monkeypatch.setattr(module, "perf_counter", lambda: cupti.now * 1e-9)
        engine = FakeEngine(cupti, pinned)
        images, probabilities = np.zeros((count, 4), np.uint8), np.zeros((count, 1), np.float32)
        found = step_times.time_layers(
            engine, images, probabilities, batch, lambda count: None, records=records
        )
        assert cupti.enabled == set()
        return found, engine

    return look


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("records", [True, False])
def test_steps_on_a_device_have_its_times_and_add_up(look_into, pinned, records):
    found, _ = look_into(10, 4, pinned, records)
    whole = found.whole_pass
    assert whole.source == ("activity records" if records else "events")
    assert whole.calls == 3
    times = {layer.name: layer.seconds / 3 for layer in found.layers}
    times |= {copy.what: copy.seconds / 3 for copy in found.copies}
    # Here the calls, of 2 us per launch and 1 us per copy, take their turn with the device's work.
    launch, call = (0, 0) if records else (2e-6, 1e-6)
    wanted = {
        "images": 4e-6 + call, "conv1": 1e-5 + launch, "relu1": 2e-6 + launch, "pool1": 7e-6,
        "probabilities": 1e-6 + call,
    }  # fmt: skip
    assert times == pytest.approx(wanted)
    assert [copy.pageable for copy in found.copies] == [not pinned] * 2
    assert [layer.device_s is None for layer in found.layers] == [False, False, True]
    assert found.layers[0].flops == 300
    assert sum(copy.bytes for copy in found.copies) == 10 * 5
    names = [row.name for row in whole.between]
    assert (STAGING in names) == (not pinned)
    assert whole.steps_s == pytest.approx(whole.wall_s, rel=0.05 if records else 0.3)
    tracks = {event.track for event in found.timeline}
    assert tracks == {"host", "cuda:0 stream"}


def test_every_batch_is_looked_into_in_turn(look_into):
    _, engine = look_into(12, 4)
    first = min(engine.batches)
    assert {address - first for address in engine.batches} == {0, 16, 32}


@pytest.mark.parametrize("refuse", ["everything", "flush", "push"])
def test_where_records_are_refused_events_take_their_place_and_it_is_said(look_into, refuse):
    found, _ = look_into(4, 4, refuse=refuse)
    assert found.whole_pass.source == "events"
    assert "events" in found.notes[0]
    assert found.whole_pass.empty_pair_s == pytest.approx(1e-7)


def test_without_records_nothing_is_recorded(look_into, monkeypatch):
    found, _ = look_into(4, 4, records=False, refuse="everything")
    assert found.whole_pass.source == "events"
    assert found.notes == []


def test_records_that_are_lost_are_not_taken_for_work_that_was_not_done(look_into, monkeypatch):
    monkeypatch.setattr(FakeCupti, "_emit", lambda self, item: None)
    found, _ = look_into(4, 4)
    assert found.whole_pass.source == "events"
    assert "not complete" in found.notes[0]


def test_events_wait_behind_a_delay_that_covers_the_launches(look_into):
    """Else the time between two of them holds the launch of what lies there."""
    _, engine = look_into(4, 4, records=False)
    margin = meters.LAUNCH_MARGIN_S
    pairs, passes = (
        [margin] * meters.EMPTY_PAIRS,
        [3 * margin, margin],
    )  # three steps, and one after the wait
    assert engine.device.delays[: len(pairs)] == pairs
    delays = engine.device.delays[len(pairs) :]
    assert delays
    assert delays == passes * (len(delays) // 2)


# ---- the parts of a fused network ----


class CountingNetwork:
    """A fused network that says how long its parts took: one unit, two units, ..."""

    def __init__(self, parts) -> None:
        self.parts = parts

    def run(self, *args) -> None: ...

    def run_timed(self, images, pixels, batch, to, threads, address) -> None:
        counts = np.arange(1.0, len(self.parts) + 1)
        _cpu.copy(counts.ctypes.data, address, counts.nbytes, 1)


def test_parts_inside_of_a_fused_network_add_up_to_its_row():
    cifar10 = workload.get("cifar10").network
    indices = list(range(len(cifar10.layers)))
    parts = [tuple(indices[:3]), *((index,) for index in indices[3:])]
    fused = CountingNetwork(parts)
    device = types.SimpleNamespace(kind="cpu", name="cpu")

    def plan_at(images, probabilities, batch, dtype):
        step = Step("network", "fused", "cpu", fused.run, [INPUT, True, batch, OUTPUT, 1], 7, 9)
        step.parts = tuple(
            Part(info.layer.name, info.layer.kind, info.flops(batch)) for info in cifar10.infos
        )
        plan = Plan(batch, [step], {}, [])
        plan.bind(images, probabilities)
        return plan

    engine = types.SimpleNamespace(device=device, plan_at=plan_at)
    images, probabilities = np.zeros((5, 3), np.uint8), np.zeros((5, 10), np.float32)
    found = step_times.time_layers(engine, images, probabilities, 2, lambda count: None)
    (layer,) = found.layers
    inside = layer.inside
    assert inside[0].layers == ["conv1", "relu1", "pool1"]
    assert (inside[0].name, inside[0].kind) == ("conv1+relu1+pool1", "conv+relu+pool")
    assert inside[-1].name == "softmax"
    assert sum(part.seconds for part in inside) == pytest.approx(layer.seconds)
    whole = len(parts) * (len(parts) + 1) / 2
    assert [part.share for part in inside] == pytest.approx(
        [(k + 1) / whole for k in range(len(parts))]
    )
    assert inside[0].flops == sum(cifar10.infos[k].flops(1) for k in range(3)) * 5
    assert found.whole_pass.inside_s is not None
