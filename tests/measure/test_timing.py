"""The timers themselves: a known delay is seen where it is, and nowhere else."""

from __future__ import annotations

import time

import numpy as np
import pytest
from noise import noise

from benchmarks import add_up
from cnn_engine import Engine, _cpu
from cnn_engine.measure import step_times, timing
from cnn_engine.measure.cupti import activity
from cnn_engine.measure.result import Latency
from cnn_engine.plan.plan import Step

RNG = np.random.default_rng(11)
IMAGES = RNG.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)


def with_extra_step(engine: Engine, monkeypatch, step: Step) -> None:
    """Makes every plan of ``engine`` begin its second layer with ``step``."""
    plan_of = engine.plan

    def plan(*arguments, **options):
        plan = plan_of(*arguments, **options)
        if not any(s is step for s in plan.steps):
            plan.steps.insert(2, step)
            plan.__post_init__()
        return plan

    monkeypatch.setattr(engine, "plan", plan)


def test_a_known_delay_on_the_cpu_is_seen_in_its_own_layer(monkeypatch):
    with Engine(weights="random", device="cpu", variant="if", threads=1) as engine:
        step = Step("nap", "nap", "cpu", time.sleep, [0.1])
        with_extra_step(engine, monkeypatch, step)
        result = engine.profile(IMAGES, batch=1, check=False)
    layers = {layer.name: layer for layer in result.layers}
    # A loaded machine makes all of it longer, but no pass shorter than its nap, which is in no other row.
    assert layers["nap"].host_s >= 4 * 0.1
    assert min(layers["nap"].samples_s) >= 0.1
    for layer in result.layers:
        assert layer.name == "nap" or min(layer.samples_s) < 0.1
    assert result.latency.to_dict()["min"] >= 100
    assert result.phases.forward_s >= 4 * 0.1
    assert result.whole_pass.wall_s >= 4 * 0.1


def look_into(engine: Engine, images: np.ndarray, batch: int, **options) -> step_times.Steps:
    probabilities = np.empty((len(images), engine.network.classes), np.float32)
    return step_times.time_layers(
        engine, images, probabilities, batch, lambda count: None, **options
    )


def sum_of(steps: step_times.Steps) -> float:
    return sum(row.seconds for row in (*steps.layers, *steps.copies, *steps.whole_pass.between))


def assert_adds_up(look, tries: int = 4) -> None:
    """Asserts that the rows that ``look`` returns are within 5 % of the plain passes beside them.

    What else runs on the machine can slow one kind of passes and not the other: it is looked at again, and
    has to agree once, or within what the plain passes themselves differ from look to look.
    """
    found, walls = [], []
    for _ in range(tries):
        steps = look()
        whole = steps.whole_pass
        assert whole.steps_s == pytest.approx(sum_of(steps))
        for row in (*steps.layers, *steps.copies, *whole.between):
            assert row.seconds <= 1.05 * max(whole.wall_s, whole.steps_s), row
        found.append(whole.steps_s / whole.wall_s)
        walls.append(whole.wall_s)
        if abs(found[-1] - 1) <= add_up.SUM_SHARE:
            return
    assert abs(np.median(found) - 1) <= max(walls) / min(walls) - 1, (found, walls)


@pytest.mark.alone
@pytest.mark.parametrize("variant", ["fused", "pad"])
@pytest.mark.parametrize("batch", [1, 7, 100])
def test_steps_add_up_to_the_plain_passes_beside_them(variant, batch):
    images = np.random.default_rng(batch).integers(
        0, 256, (2 * batch + batch // 2, 3, 32, 32), np.uint8
    )
    with Engine(weights="random", device="cpu", variant=variant) as engine:
        assert_adds_up(lambda: look_into(engine, images, batch))


def test_an_overhead_between_steps_does_not_add_up(monkeypatch):
    """That the test above can fail: a clock that costs as much as the steps."""
    wait = time.perf_counter

    def slow() -> float:
        time.sleep(1e-3)
        return wait()

    with Engine(weights="random", device="cpu", variant="fused") as engine:
        monkeypatch.setattr(step_times, "CAP_S", 0.1)
        monkeypatch.setattr(step_times, "perf_counter", slow)
        steps = look_into(engine, IMAGES, 1)
        assert steps.whole_pass.clocked_s > 1.05 * steps.whole_pass.median_s


def test_few_passes_are_sampled_again_and_the_last_batch_by_itself():
    with Engine(weights="random", device="cpu", variant="if") as engine:
        steps = look_into(engine, IMAGES, 3)
    whole = steps.whole_pass
    assert steps.timed_pass.calls == whole.calls == 2  # of three images and of one
    assert 1 <= whole.samples <= step_times.MOST_SAMPLES
    for layer in steps.layers:
        assert layer.calls == 2
        assert len(layer.samples_s) == whole.samples
        assert layer.bytes == sum(step_bytes(engine, layer.name, size) for size in (3, 1))
    # Each pass has an event a layer, and the passes are counted on from one size to the next.
    assert steps.timeline_total % len(steps.layers) == 0
    assert [event.batch for event in steps.timeline] == sorted(e.batch for e in steps.timeline)


def step_bytes(engine: Engine, name: str, batch: int) -> int:
    infos = {info.layer.name: info.bytes(batch) for info in engine.network.infos}
    normalize = _cpu.ElementwiseShape(batch * 3 * 32 * 32, 1).bytes
    return infos.get(name, normalize)


def test_calls_of_one_name_are_one_sample_a_pass(monkeypatch):
    """As the copies of chunks are in ``stream``."""
    with Engine(weights="random", device="cpu", variant="if", threads=1) as engine:
        for _ in range(2):
            with_extra_step(engine, monkeypatch, Step("nap", "copy", "cpu", time.sleep, [0.002]))
        steps = look_into(engine, IMAGES, 2, samples=4)
    nap = steps.copies[0]
    assert nap.calls == 4
    assert len(nap.samples_s) == steps.whole_pass.samples >= 4
    assert min(nap.samples_s) >= 0.004
    assert nap.seconds >= 4 * 0.002


@pytest.mark.alone
def test_the_runner_costs_little_between_layers():
    """The Python between two steps, measured with steps that do nothing."""
    with Engine(weights="random", device="cpu") as engine:
        plan = engine.plan(1, np.dtype(np.uint8))
        plan.steps[:] = [Step("empty", "empty", "cpu", int, [])] * 1000
        plan.__post_init__()
        samples = []
        for _ in range(20):
            start = time.perf_counter()
            plan.run()
            samples.append(time.perf_counter() - start)
    assert min(samples) / 1000 < 5e-6


def test_timeline_is_capped_and_counted(monkeypatch):
    monkeypatch.setattr(step_times, "TIMELINE_EVENTS", 5)
    with Engine(weights="random", device="cpu", variant="if") as engine:
        result = engine.profile(IMAGES, batch=2, check=False)
    assert len(result.timeline) == 5
    assert result.timeline_total == result.whole_pass.samples * 12
    starts = [event.start_s for event in result.timeline]
    assert starts == sorted(starts)


def test_warmup_is_run_and_not_counted(monkeypatch):
    calls = []
    with Engine(weights="random", device="cpu", variant="if") as engine:
        with_extra_step(engine, monkeypatch, Step("count", "count", "cpu", calls.append, [1]))
        probabilities = np.empty((4, 10), np.float32)
        passes = timing.time_passes(
            engine, IMAGES, probabilities, 2, warmup=5, iterations=3, duration_s=None,
            progress=lambda count: None,
        )  # fmt: skip
    assert len(calls) == 5 + 3 * 2
    assert len(passes.full_s) == 6
    assert passes.images_total == 12
    assert passes.images_done == 4


def quick_passes(monkeypatch, seconds, **options):
    """Times passes whose clock says that each took the next of ``seconds``."""
    clock = [0.0]
    times = iter(seconds)

    class Plan:
        def run(self):
            clock[0] += next(times)

    monkeypatch.setattr(timing, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "batches", lambda *a: iter([(Plan(), 1)]))
    options = {"warmup": 0, "iterations": None, "duration_s": None, **options}
    return timing.time_passes(None, None, None, 1, progress=lambda count: None, **options)


def test_passes_stop_once_their_median_is_known(monkeypatch):
    steady = quick_passes(monkeypatch, iter(lambda: 1e-3, None))
    assert sum(steady.full_s) == pytest.approx(timing.LEAST_S, abs=2e-3)
    few = quick_passes(monkeypatch, iter(lambda: 0.02, None))
    assert len(few.full_s) == timing.FEWEST_PASSES
    assert "within 1 %" in steady.stop.reason
    noise = np.random.default_rng(3).normal(1e-3, 5e-5, 10_000)
    noisy = quick_passes(monkeypatch, noise)
    lower, upper = noisy.stop.interval_ms
    assert timing.FEWEST_PASSES < len(noisy.full_s) < 2000
    assert sum(noisy.full_s) >= timing.LEAST_S
    assert upper - lower < 2.02e-2
    assert lower < 1 < upper
    assert noisy.stop.median_ms == pytest.approx(1, rel=0.02)


def test_passes_stop_at_the_cap(monkeypatch):
    restless = quick_passes(monkeypatch, iter([0.1, 0.2] * 1000))
    assert sum(restless.full_s) == pytest.approx(timing.CAP_S, abs=0.2)
    assert "cap" in restless.stop.reason
    slow = quick_passes(monkeypatch, iter([60.0, 60.0]))
    assert len(slow.full_s) == 1
    assert slow.stop.interval_ms is None


@pytest.mark.parametrize(("correlation", "spread"), [(0.0, 0.1), (0.9, 0.02)])
def test_a_median_that_is_called_known_is_within_a_percent(monkeypatch, rng, correlation, spread):
    """Noise that lasts from pass to pass: taken as independent, half of such medians are further off."""
    right = held = known = 0
    for _ in range(30):
        found = quick_passes(
            monkeypatch, iter(1e-3 * (1 + spread * noise(6000, correlation, rng)))
        ).stop
        held += found.interval_ms[0] <= 1 <= found.interval_ms[1]
        if "within 1 %" in found.reason:
            known += 1
            right += abs(found.median_ms - 1) <= 0.01
    assert known >= 15
    assert right >= 0.9 * known
    assert held >= 27


def test_who_interrupts_the_warm_up_gets_nothing(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    found = quick_passes(monkeypatch, (interrupt() for _ in range(1)), warmup=3)
    assert found.interrupted
    assert (found.stop.median_ms, found.stop.interval_ms) == (None, None)


def test_later_looks_have_wider_intervals():
    samples = np.random.default_rng(5).exponential(1.0, 1000)
    widths = [np.diff(timing.median_interval(samples, looks))[0] for looks in (0, 1, 3, 9)]
    assert widths == sorted(widths)
    assert widths[-1] > 1.5 * widths[0]


def test_what_is_asked_for_is_not_second_guessed(monkeypatch):
    assert len(quick_passes(monkeypatch, iter([60.0] * 9), iterations=3).full_s) == 3
    assert len(quick_passes(monkeypatch, iter([1.0] * 99), duration_s=50).full_s) == 50


def test_the_interval_holds_the_median_as_often_as_it_says():
    generator = np.random.default_rng(4)
    for count in (6, 20, 101, 1000):
        held = 0
        for _ in range(1000):
            lower, upper = timing.median_interval(generator.exponential(1.0, count))
            held += lower <= np.log(2) <= upper
        assert held >= 930
    assert timing.median_interval([1.0] * 5) is None
    assert timing.median_interval([]) is None
    # Ranks 40 and 61 of 100: the table of order statistics in textbooks.
    assert timing.median_interval(generator.permutation(100) + 1.0) == (40.0, 61.0)


def test_latency_percentiles():
    latency = Latency([float(i) for i in range(1, 101)], percentiles=(50.0, 95.0))
    found = latency.to_dict()
    assert found["min"] == 1
    assert found["p50"] == 50.5
    assert found["p95"] == pytest.approx(95.05)
    assert found["max"] == 100
    assert found["samples"] == 100


@pytest.mark.alone
@pytest.mark.gpu
class TestOnAGpu:
    def test_a_known_delay_is_seen_in_its_own_step(self, monkeypatch):
        with Engine(weights="random", device="cuda", variant="if") as engine:
            arguments = [5_000_000, engine.device.stream_handle]
            step = Step("nap", "nap", "cuda", engine.device.kernels.delay, arguments)
            with_extra_step(engine, monkeypatch, step)
            result = engine.profile(IMAGES, batch=1, check=False)
        layers = {layer.name: layer for layer in result.layers}
        assert layers["nap"].device_s == pytest.approx(4 * 5e-3, rel=0.05)
        assert layers["nap"].host_s < 5e-3
        others = sum(layer.device_s for name, layer in layers.items() if name != "nap")
        assert others < 5e-3
        assert result.latency.to_dict()["min"] >= 5

    def test_a_delay_on_another_stream_is_not_seen(self):
        import cupy

        from cnn_engine import _cuda

        other = cupy.cuda.Stream(non_blocking=True)
        with Engine(weights="random", device="cuda", variant="if") as engine:
            engine.profile(
                IMAGES, batch=1, check=False
            )  # so that nothing is loaded for the first time
            for _ in range(40):  # longer than all that is timed
                _cuda.delay(300_000_000, other.ptr)
            result = engine.profile(IMAGES, batch=1, check=False, iterations=1)
            busy = not other.done
        assert busy
        assert sum(layer.device_s for layer in result.layers) < 10e-3

    @pytest.mark.parametrize("records", [True, False])
    @pytest.mark.parametrize("memory", ["pageable", "page-locked"])
    @pytest.mark.parametrize("batch", [1, 100, 10_000])
    @pytest.mark.parametrize("variant", ["fused", "pad"])
    def test_steps_agree_with_records_and_add_up_to_the_pass(self, variant, batch, memory, records):
        if reason := activity.unavailable():
            pytest.skip(reason)
        with Engine(weights="random", device="cuda", variant=variant) as engine:
            bench = add_up.Bench(engine, batch, memory)
            bench.time_plain()
            tries = []
            for _ in range(3):  # whatever else the host does in one of them
                cell = bench.compare(records)
                assert cell.source == ("activity records" if records else "events")
                steps = engine.plan(batch, np.dtype(np.uint8)).steps
                on_device = {(s.name, s.direction) for s in steps if s.place == "cuda"}
                assert len(cell.recorded) == len(on_device)
                tries.append((cell.sum_s / cell.plain_s, cell.off, cell.rows))
                # An event costs the GPU microseconds, so only records show single steps.
                if cell.adds_up and (cell.agrees or not records):
                    break
            else:
                raise AssertionError(tries)

    @pytest.mark.parametrize("variant", ["if", "pad", "tiled", "fused"])
    @pytest.mark.parametrize("batch", [1, 4])
    def test_layers_and_copies_never_exceed_the_pass(self, variant, batch):
        images = np.repeat(IMAGES, 25, axis=0)
        with Engine(weights="random", device="cuda", variant=variant) as engine:
            result = engine.profile(images, batch=batch, check=False)
        whole = result.whole_pass
        total = sum(step.seconds for step in (*result.layers, *result.copies))
        # The pass in which nothing is timed: no delay and no event is in it.
        assert total <= whole.wall_s
        assert total / whole.calls <= result.latency.to_dict()["p50"] * 1e-3
        assert min(row.seconds for row in whole.between) >= 0

    def test_parts_inside_of_a_fused_network_add_up_to_it(self):
        with Engine(weights="random", device="cuda", variant="fused") as engine:
            result = engine.profile(IMAGES, batch=4, check=False)
            if not hasattr(engine.plan(4, np.dtype(np.uint8)).steps[1].function.__self__, "parts"):
                pytest.skip("this build's fused kernels do not count their parts")
        (network,) = result.layers
        assert sum(part.seconds for part in network.inside) == pytest.approx(network.seconds)
        names = [name for part in network.inside for name in part.layers]
        assert names == [info.layer.name for info in engine.network.infos]
        assert all(part.seconds > 0 for part in network.inside)

    def test_host_and_device_agree_on_a_long_pass(self):
        """On passes of many milliseconds, device times and copies make up the wall time within 10 %."""
        images = np.repeat(IMAGES, 1000, axis=0)
        with Engine(weights="random", device="cuda", variant="if") as engine:
            result = engine.profile(images, batch=4000, check=False, iterations=5)
        rows = (*result.layers, *result.copies, *result.whole_pass.between)
        device = sum(row.seconds for row in rows if getattr(row, "name", "") != "launch")
        assert device == pytest.approx(result.latency.to_dict()["p50"] * 1e-3, rel=0.10)


def test_a_run_in_one_of_two_speeds_is_not_called_known_at_once(monkeypatch, rng):
    """Fewer than 100 passes of 20 ms may all be slow ones of a clock that is mostly fast."""
    slow = np.concatenate([np.full(40, 0.025), np.full(300, 0.02)])
    found = quick_passes(monkeypatch, iter(slow * np.exp(0.01 * rng.standard_normal(340))))
    assert len(found.full_s) > 40
    assert found.stop.median_ms == pytest.approx(20, rel=0.01)
