"""The arithmetic of figures that reports show, against numbers made by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from samples import make, make_profile
from transfers import write_raw

from cnn_engine import Engine, _cpu, workload
from cnn_engine.characterize import measure as characterize
from cnn_engine.characterize.measure import Meters, Settings
from cnn_engine.characterize.points import Point
from cnn_engine.characterize.subjects import EngineSubject, Load
from cnn_engine.graph.network import Conv2d, Linear, Network, Softmax
from cnn_engine.io.files import atomic_write
from cnn_engine.measure import measurement
from cnn_engine.measure.meters import Metered
from cnn_engine.measure.result import Latency
from cnn_engine.measure.step_times import Overlap
from cnn_engine.plan.plan import Plan, Step
from cnn_engine.report import profile as profile_report
from cnn_engine.transfer import analysis, files, regression
from cnn_engine.transfer.files import RawNetwork

#: 1x4x4 -> two filters of 3x3 -> 2x2x2 -> three classes.
SMALL = Network("small", (1, 4, 4), (Conv2d("c", 2, 3), Linear("fc", 3), Softmax("p")))


# ---- the result of a run ----


def test_throughput_is_of_all_iterations():
    images = np.zeros((8, 1, 4, 4), np.uint8)
    with Engine(SMALL, weights="random", device="cpu", variant="if") as engine:
        result = engine.profile(images, batch=4, iterations=5, check=False)
    samples_s = [sample / 1e3 for sample in result.latency.samples_ms]
    assert len(samples_s) == 10
    assert result.throughput_images_per_s == pytest.approx(5 * 8 / sum(samples_s))
    assert result.phases.forward_s == pytest.approx(sum(samples_s) / 5)


def test_the_mean_of_the_latency_is_no_median():
    found = Latency([1.0, 2.0, 3.0, 10.0]).to_dict()
    assert (found["mean"], found["p50"]) == (4.0, 2.5)


@pytest.mark.parametrize(("given", "checked"), [(5, 5), (300, measurement.CHECK_IMAGES)])
def test_the_check_takes_as_many_images_as_it_says(given, checked, monkeypatch):
    images = np.zeros((given, 1, 4, 4), np.uint8)
    with Engine(SMALL, weights="random", device="cpu", variant="if") as engine:
        predict = engine.predict

        def wrong_at_the_last(found, *arguments, **options):
            probabilities = predict(found, *arguments, **options)
            probabilities[checked - 1] += 0.5
            return probabilities

        assert (
            engine.profile(images, batch=5, iterations=1).check.images
            == checked
            == len(images[: measurement.CHECK_IMAGES])
        )
        monkeypatch.setattr(engine, "predict", wrong_at_the_last)
        assert not engine.profile(images, batch=5, iterations=1).check.passed
    assert measurement.CHECK_IMAGES == 256


@pytest.mark.parametrize("pixels", [True, False])
def test_a_fused_step_counts_all_layers_and_moves_weights_once(pixels):
    images = np.zeros((7, 1, 4, 4), np.uint8 if pixels else np.float32)
    with Engine(SMALL, weights="random", device="cpu", variant="fused") as engine:
        (step,) = engine.plan(7, images.dtype).steps
    # Two FLOPs a multiply-add: 8 outputs of 9 products, 3 of 8.
    assert step.flops == 7 * 2 * (8 * 9 + 3 * 8)
    weights = 2 * 9 + 2 + 3 * 8 + 3
    assert step.bytes == 7 * 16 * images.itemsize + 4 * weights + 4 * 7 * 3


def test_a_convolution_moves_its_input_weights_bias_and_output():
    shape = _cpu.Conv2dShape(7, 1, 4, 4, 2, 3, 3, 1, 1, 0, 0)
    assert shape.bytes == 4 * (7 * 16 + (2 * 9 + 2) + 7 * 8)
    assert SMALL.infos[0].bytes(7) == shape.bytes


# ---- what is hidden ----


def test_hidden_is_the_time_of_copies_in_which_a_kernel_runs():
    steps = [Step(name, kind, "cuda", int, []) for name, kind in (
        ("images", "copy"), ("images", "copy"), ("conv1", "conv"), ("fc", "fc"))]  # fmt: skip
    spans = [(0.0, 4.0), (6.0, 10.0), (3.0, 7.0), (5.0, 8.0)]
    found = Overlap(100)
    one = Metered(Plan(1, steps, {}, [], 100), [0.0, 12.0], spans, [4.0, 4.0, 4.0, 3.0])
    for _ in range(2):
        found.add(one)
    # Copies to 4 and from 6, kernels from 3 to 8: hidden from 3 to 4 and from 6 to 8.
    assert (found.wall_s, found.copies_s, found.hidden_s) == (20, 16, 6)
    assert found.describe() == (
        "chunks of 100 images: copies take 80.0 % of the passes with timers, and a kernel runs in 37.5 % of "
        "that time"
    )


# ---- transfers ----


def test_the_constant_of_the_break_s_interval_is_hansen_s():
    """The 95 % point of the limit distribution, whose function is (1 - exp(-x / 2))^2 (Hansen 2000)."""
    assert pytest.approx(-2 * math.log(1 - math.sqrt(0.95)), abs=0.005) == regression.HANSEN_95


def relative_squares(batches: np.ndarray, times: np.ndarray) -> float:
    design = np.stack([1 / times, batches / times], axis=1)
    solution, *_ = np.linalg.lstsq(design, np.ones(len(times)), rcond=None)
    return float(((design @ solution - 1) ** 2).sum())


def test_the_break_s_interval_has_what_the_likelihood_ratio_does_not_refuse():
    batches = np.arange(1.0, 61.0)
    times = np.where(batches < 25, 6e-6 + 3e-7 * batches, 11e-6 + 2e-7 * batches)
    times = times * (1 + 0.05 * np.random.default_rng(47).standard_normal(60))
    firsts = np.arange(regression.FEWEST_IN_PIECE, 60 - regression.FEWEST_IN_PIECE + 1)
    squares = np.array(
        [
            relative_squares(batches[:k], times[:k]) + relative_squares(batches[k:], times[k:])
            for k in firsts
        ]
    )
    ratio = 60 * (squares / squares.min() - 1)

    def interval(most: float) -> tuple[int, int]:
        held = batches[firsts[ratio <= most]]
        return int(held[0]), int(held[-1])

    found = regression.fit_pieces(batches, times).break_interval
    assert found == interval(-2 * math.log(1 - math.sqrt(0.95)))
    assert found not in (interval(6.5), interval(8.5))  # so that another constant shows


def test_the_ends_are_never_held_out():
    batches = np.arange(1, regression.FEWEST + 5)
    times = 1e-6 + 1e-7 * batches
    drawn = [regression.hold_out(batches, times, 4, seed).batch_sizes for seed in range(60)]
    every = {size for sizes in drawn for size in sizes}
    assert every == set(batches[1:-1].tolist())


def test_the_peak_is_the_fastest_copy(tmp_path, monkeypatch):
    raw = write_raw(tmp_path, lambda batch: 1e-6 * batch, np.arange(1, 8), samples=3)
    peak = {"h2d": {"bytes": 10**6, "seconds": [3e-3, 1e-3, 2e-3]}}
    monkeypatch.setattr(files, "read_machine", lambda section: {"peak": peak})
    (one,) = analysis.analyse(RawNetwork(raw))
    assert one.peak_bytes_per_s == pytest.approx(1e9)


# ---- utilisation ----


def characterized(monkeypatch, threads: int = 3, data_bytes: int = 0) -> Point:
    """Times ten passes of 2 s on a clock that is made up, with 30 s of CPU time on 4 CPUs."""
    clock = [0.0]
    monkeypatch.setattr(characterize, "perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += 2.0

    cpu_s = iter([100.0, 130.0])
    process = SimpleNamespace(
        cpus=4, cpu_s=lambda: next(cpu_s), read=lambda: {"rss": 5 * 10**8}, peak=lambda: 10**9,
        reset_peak=lambda: True,
    )  # fmt: skip
    found = Point("s", "engine", "m", None, None, "float32", "cpu", "host", 5)
    settings = Settings(warmup=0, settle_s=0, duration_s=20.0, sample_period_s=60.0)
    load = Load(5, lambda: run, threads, data_bytes=data_bytes)
    characterize.time_point(found, load, Meters(process=process), settings)
    return found


def test_memory_is_without_the_images_that_are_measured_with(monkeypatch):
    found = characterized(monkeypatch, data_bytes=4 * 10**8)
    assert (found.rss_bytes, found.rss_peak_bytes) == (10**8, 6 * 10**8)
    with_images = characterized(monkeypatch)
    assert (with_images.rss_bytes, with_images.rss_peak_bytes) == (5 * 10**8, 10**9)


def test_on_the_cpu_images_are_held_once():
    dataset = workload.get("cifar10").load_data("synthetic", 50)
    subject = EngineSubject(
        workload.get("cifar10"), dataset, variant="auto", dtype="float32", device="cpu"
    )
    with subject.load(20) as load:
        assert load.data_bytes == dataset.images.nbytes + 40 * 10 * 4  # two passes' outputs
        load.next_pass()()


def test_cpu_use_is_of_the_threads_and_of_the_machine(monkeypatch):
    found = characterized(monkeypatch)
    assert found.passes == 10
    assert found.cpu_utilization_threads == pytest.approx(30 / (20 * 3))
    assert found.cpu_utilization_machine == pytest.approx(30 / (20 * 4))
    assert found.throughput_images_per_s == pytest.approx(5 * 10 / 20)


def test_profiled_utilisation_is_kernels_by_the_time_of_all_profiled_passes(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(characterize, "perf_counter", lambda: clock[0])

    def run() -> None:
        clock[0] += 0.01

    def next_pass():
        clock[0] += 0.03  # between two passes: in the denominator as well
        return run

    trace = SimpleNamespace(
        dropped=0, kernels=[SimpleNamespace(name="k", start_s=0.0, end_s=0.12)], copies=[],
        busy_s=lambda: 0.12,
    )  # fmt: skip

    class Record:
        def __enter__(self):
            return trace

        def __exit__(self, *exception):
            return None

    monkeypatch.setattr(characterize.activity, "unavailable", lambda: None)
    monkeypatch.setattr(characterize.activity, "record", Record)
    found = Point("s", "engine", "m", None, None, "float32", "cuda", "host", 5)
    found.latency_mean_s = found.latency_p50_s = 0.016
    characterize.profile_point(found, Load(5, next_pass, 1), Settings(profile_s=0.4), on_gpu=True)
    count = found.profiled_passes
    assert count == 10
    assert found.gpu_utilization_profiled == pytest.approx(0.12 / ((0.01 + 0.03) * count))
    assert found.gpu_utilization == pytest.approx(0.12 / count / 0.016)


def test_a_share_of_the_wall_time_is_of_the_wall_time():
    report = profile_report.render(make_profile(kernel_s=6e-5, wall_s=4e-3, api_s=1e-3))
    assert "60.00 us, 1.50 % of the wall time" in report
    assert "1.000 ms, 25.00 % of the wall time" in report
    assert make(profile=make_profile()).profile.wall_s == 4e-3


# ---- files ----


def test_until_a_file_is_whole_its_name_is_that_of_what_was_there(tmp_path):
    path = tmp_path / "result.json"
    with atomic_write(path) as file:
        file.write("new")
        file.flush()
        assert not path.exists()
        (temporary,) = tmp_path.iterdir()
        assert temporary.parent == path.parent  # a rename across file systems would be a copy
    assert path.read_text() == "new"
    with pytest.raises(RuntimeError), atomic_write(path) as file:  # noqa: PT012
        file.write("half")
        file.flush()
        assert path.read_text() == "new"
        raise RuntimeError
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
