"""Verdicts on simulated noise, and what is compared with what."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from comparisons import CHECK, made
from noise import noise

from cnn_engine import InputError
from cnn_engine.compare import command as compare
from cnn_engine.compare import comparison
from cnn_engine.compare.comparison import CANNOT_TELL, FASTER, SAME, SLOWER
from cnn_engine.measure.result import Accuracy, Result

OPPOSITE = {FASTER: SLOWER, SLOWER: FASTER, SAME: SAME, CANNOT_TELL: CANNOT_TELL}


def whole(a: Result, b: Result, **options) -> str:
    return comparison.compare(a, b, **options).whole.verdict


# Verdicts on simulated noise: seeded, so that what is counted is the same on every run.


def trials(draw, count=200, **options) -> list[str]:
    return [whole(made(draw()), made(draw()), **options) for _ in range(count)]


def test_independent_noise_is_hardly_ever_a_difference(rng):
    verdicts = trials(lambda: 1e-3 * (1 + 0.02 * rng.standard_normal(100)), threshold=0.01)
    assert sum(verdict in (FASTER, SLOWER) for verdict in verdicts) <= 2


def test_with_many_samples_the_same_is_the_same(rng):
    verdicts = trials(lambda: 1e-3 * (1 + 0.02 * rng.standard_normal(1000)), threshold=0.01)
    assert verdicts.count(SAME) >= 190


@pytest.mark.parametrize("count", [20, 100, 1000])
def test_a_shift_of_ten_percent_is_slower_and_back_faster(count, rng):
    draw = lambda: made(1e-3 * (1 + 0.02 * rng.standard_normal(count)))  # noqa: E731
    found = [
        (whole(a, b), whole(b, a))
        for a, b in (
            (draw(), made(1.1e-3 * (1 + 0.02 * rng.standard_normal(count)))) for _ in range(50)
        )
    ]
    assert found.count((SLOWER, FASTER)) >= 48


@pytest.mark.parametrize("count", [50, 200, 1000])
def test_noise_that_drifts_is_seldom_a_difference(count, rng):
    """AR(1) on a slope that differs from run to run, of twice the noise's size."""

    def draw():
        slope = 0.04 * rng.standard_normal() * np.linspace(-0.5, 0.5, count)
        return 1e-3 * (1 + 0.02 * noise(count, 0.9, rng) + slope)

    verdicts = trials(draw, threshold=0.01)
    assert sum(verdict in (FASTER, SLOWER) for verdict in verdicts) <= 8  # 4 %


def test_a_random_walk_is_seldom_a_difference(rng):
    draw = lambda: 1e-3 * (1 + 0.02 * np.cumsum(rng.standard_normal(100)) / 10)  # noqa: E731
    verdicts = trials(draw, threshold=0.01)
    assert sum(verdict in (FASTER, SLOWER) for verdict in verdicts) <= 10  # 5 %


@pytest.mark.parametrize("count", [1, 5])
def test_few_samples_cannot_tell_not_even_a_large_difference(count):
    found = comparison.compare(made([1e-3] * count), made([9e-3] * count))
    assert {row.verdict for row in found.rows} == {CANNOT_TELL}
    assert {row.reason for row in found.rows} == {"fewer than 6 samples"}
    assert found.whole.ratio.value == pytest.approx(9)


def test_to_exchange_the_results_exchanges_the_verdicts(rng):
    for size in (1.0, 1.005, 1.02, 1.035, 1.2):
        a = made(1e-3 * (1 + 0.01 * rng.standard_normal(80)))
        b = made(size * 1e-3 * (1 + 0.01 * rng.standard_normal(80)))
        there, back = comparison.compare(a, b), comparison.compare(b, a)
        for one, other in zip(there.rows, back.rows, strict=True):
            assert OPPOSITE[one.verdict] == other.verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.98, 1.02, SAME),
        (1.04, 1.2, SLOWER),
        (0.8, 0.96, FASTER),
        (1.01, 1.2, CANNOT_TELL),
        (0.9, 1.02, CANNOT_TELL),
        (0.5, 2.0, CANNOT_TELL),
    ],
)
def test_the_verdict_is_on_the_whole_interval(low, high, verdict):
    ratio = comparison.Estimate(math.sqrt(low * high), low, high, 50, 50.0)
    assert comparison.judge(ratio, 0.03, more_is_faster=False)[0] == verdict
    assert comparison.judge(ratio, 0.03, more_is_faster=True)[0] == OPPOSITE[verdict]


# What is compared.


def test_layers_copies_and_their_sum():
    slower = made(seed=1)
    slower.layers[0].samples_s = [2 * value for value in slower.layers[0].samples_s]
    found = {(row.section, row.name): row for row in comparison.compare(made(), slower).rows}
    assert found["layer", "conv1"].verdict == SLOWER
    assert found["layer", "conv1"].ratio.value == pytest.approx(2, rel=0.01)
    assert found["layer", "fc"].verdict == SAME
    assert found["copy", "images h2d"].verdict == SAME
    assert found["sum", "sum"].ratio.value == pytest.approx(1.5 / 0.9, rel=0.01)
    assert found["throughput", "throughput"].verdict == SAME
    assert found["throughput", "throughput"].baseline.value == pytest.approx(1e4, rel=0.01)
    assert found["pass", "p50"].baseline.value == pytest.approx(1e-3, rel=0.01)


def test_the_throughput_is_what_the_report_says():
    """It counts passes that are not full too; the interval is that of the full ones."""
    row = next(
        row
        for row in comparison.compare(made(), made(throughput_images_per_s=9e3)).rows
        if row.section == "throughput"
    )
    assert row.other.value == 9e3
    assert row.other.low < 9e3 < row.other.high
    assert row.verdict == SLOWER


def test_what_only_one_of_them_has_is_listed():
    other = made()
    other.layers[1].name, other.copies = "fc2", []
    found = comparison.compare(made(), other, ("a", "b"))
    assert set(found.only) == {
        ("layer", "fc", "a"),
        ("copy", "images h2d", "a"),
        ("layer", "fc2", "b"),
    }
    assert {row.name for row in found.steps} == {"conv1"}
    text = compare.render([found], [made(), other])
    assert "Only in A                    : fc, images h2d" in text
    assert "Only in B                    : fc2" in text


def test_other_batches_are_compared_by_the_image():
    found = comparison.compare(made(batch=10), made(2e-3 * np.ones(20), batch=40))
    assert found.per == "image"
    assert found.whole.baseline.value == pytest.approx(1e-4, rel=0.01)
    assert found.whole.ratio.value == pytest.approx(0.5, rel=0.01)
    throughput = next(row for row in found.rows if row.section == "throughput")
    assert throughput.ratio.value == pytest.approx(2, rel=0.01)
    assert throughput.verdict == FASTER
    assert any("batches differ" in warning for warning in found.warnings)
    assert "pass p50, an image" in compare.render([found], [made(), made()])


def test_what_differs_is_listed_and_what_is_of_the_moment_is_not():
    first = made(accuracy=Accuracy(80, 100))
    second = made(variant="if", reduction=True, threads=2, accuracy=Accuracy(10, 100))
    state = {"sm_clock_mhz": 1980, "power_limit_w": 700.0, "temperature_c": 40}
    first.environment |= {"gpu_state": state, "cpu_state": {"governor": "performance"}}
    second.environment |= {
        "versions": {"numpy": "2.1"},
        "commit": None,
        "gpu_state": {**state, "sm_clock_mhz": 1200, "temperature_c": 80},
        "cpu_state": {"governor": "powersave"},
    }
    found = comparison.compare(first, second).differences
    assert found == [
        ("variant", "pad", "if"),
        ("reduction", "no", "yes"),
        ("threads", "1", "2"),
        ("accuracy", "80.00 %", "10.00 %"),
        ("numpy", "2.0", "2.1"),
        ("commit", "abc", "none"),
        ("sm clock mhz", "1,980", "1,200"),
        ("governor", "performance", "powersave"),
    ]
    second.environment["gpu_state"]["sm_clock_mhz"] = 1965  # a boost clock's usual wandering
    assert "sm clock mhz" not in dict(x[:2] for x in comparison.compare(first, second).differences)


def test_warnings():
    other = made(network="large", check=None, interrupted=True)
    other.environment["warnings"] = ["GPU: shared with other processes: 1"]
    other.latency.samples_ms[3] = math.nan
    warnings = "\n".join(comparison.compare(made(), other, ("a", "b")).warnings)
    for text in (
        "the networks differ",
        "b: its outputs were not checked",
        "b: interrupted",
        "b: GPU: shared with other processes: 1",
        "b: 1 sample null",
    ):
        assert text in warnings
    assert comparison.compare(made(), made()).warnings == []


def test_layers_that_ran_elsewhere_are_told():
    other = made()
    other.layers[1].place = "cuda"
    warning = comparison.compare(made(), other, ("a", "b")).warnings[0]
    assert warning.startswith("on cpu in a, on cuda in b: fc; ")


def test_null_samples_are_left_out():
    other = made()
    other.layers[0].samples_s[::2] = [math.nan] * 30
    other.layers[1].samples_s = [math.nan] * 60
    rows = {row.name: row for row in comparison.compare(made(), other).rows}
    assert rows["conv1"].ratio.samples == 30
    assert rows["conv1"].verdict == SAME
    assert rows["fc"].reason == "no raw samples"
    nothing = made(throughput_images_per_s=math.nan)
    nothing.latency.samples_ms = [math.nan] * 60
    assert comparison.compare(made(), nothing).whole is None


def test_a_layer_that_took_no_time():
    other = made()
    other.layers[0].samples_s, other.layers[0].host_s = [0.0] * 60, 0.0
    row = next(row for row in comparison.compare(made(), other).rows if row.name == "conv1")
    assert (row.ratio, row.verdict) == (None, CANNOT_TELL)
    assert "0 s" in compare.render([comparison.compare(made(), other)], [made(), other])


def test_further_runs_of_the_baseline_are_the_noise():
    """5 % slower is a difference; not where runs of the baseline differ by 8 %."""
    samples = np.asarray(made().latency.samples_ms) / 1e3
    base, slower, again = made(samples), made(1.05 * samples), made(0.926 * samples)
    assert whole(base, slower) == SLOWER
    found = comparison.compare(base, slower, repeats=[again])
    assert found.whole.noise == pytest.approx(0.08, abs=0.001)
    assert found.whole.verdict == SAME
    assert not found.whole.exceeds(0.03)
    assert comparison.compare(base, slower).whole.exceeds(0.03)
    assert "7.99 %" in compare.render([found], [base, slower])


@pytest.mark.parametrize(
    ("value", "low", "noise_share", "is_one"),
    [
        (1.06, 1.01, 0.0, True),
        (1.06, 0.99, 0.0, False),  # perhaps faster
        (1.04, 1.03, 0.0, False),  # slower, but allowed
        (1.06, 1.01, 0.08, False),  # as runs of the baseline differ
        (1.09, 1.01, 0.08, True),
        (1.5, None, 0.0, False),
    ],
)
def test_what_a_regression_is(value, low, noise_share, is_one):
    time = comparison.Estimate(1.0, 0.99, 1.01, 50, 50.0)
    ratio = comparison.Estimate(value, low, low and 2 * value - low, 50, 50.0)
    row = comparison.Row("pass", "p50", "s", time, time, ratio, noise_share, CANNOT_TELL, "")
    assert row.exceeds(0.05) is is_one
    assert not replace(row, ratio=None).exceeds(0.05)


def test_the_functions_refuse_what_the_command_refuses():
    failed = made(check=replace(CHECK, max_abs_diff=1.0))
    with pytest.raises(InputError, match="nothing was timed"):
        comparison.compare(made(), failed)
    with pytest.raises(InputError, match="variant"):
        comparison.check_repeat(("a", "b"), made(), made(variant="if"))
