"""Verdicts on simulated noise, and what is compared with what."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from comparisons import CHECK, made
from noise import noise
from scipy import stats

from cnn_engine import InputError
from cnn_engine.compare import checks, comparison, verdicts
from cnn_engine.compare import command as compare
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
    draw = lambda: made(1e-3 * (1 + 0.02 * rng.standard_normal(1000)))  # noqa: E731
    verdicts = [whole(draw(), draw(), threshold=0.01) for _ in range(60)]
    assert verdicts.count(SAME) >= 57


@pytest.mark.parametrize("count", [20, 100, 1000])
def test_a_shift_of_ten_percent_is_slower_and_back_faster(count, rng):
    draw = lambda: made(1e-3 * (1 + 0.02 * rng.standard_normal(count)))  # noqa: E731
    found = [
        (whole(a, b), whole(b, a))
        for a, b in (
            (draw(), made(1.1e-3 * (1 + 0.02 * rng.standard_normal(count)))) for _ in range(25)
        )
    ]
    assert found.count((SLOWER, FASTER)) >= 24


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
    assert verdicts.judge(ratio, 0.03, more_is_faster=False)[0] == verdict
    assert verdicts.judge(ratio, 0.03, more_is_faster=True)[0] == OPPOSITE[verdict]


# What is compared.


def again(count: int = 4) -> list[Result]:
    """Further runs of ``made()``."""
    return [made(seed=seed) for seed in range(2, 2 + count)]


def test_layers_copies_and_their_sum():
    slower = made(seed=1)
    slower.layers[0].samples_s = [2 * value for value in slower.layers[0].samples_s]
    rows = comparison.compare(made(), slower, repeats=again()).rows
    found = {(row.section, row.name): row for row in rows}
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
    assert "pass p50, per image" in compare.render([found], [made(), made()])


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
    rows = {row.name: row for row in comparison.compare(made(), other, repeats=again()).rows}
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
    """5 % slower is a difference; not where runs of the baseline differ by 8 %, nor is it then the same."""
    samples = np.asarray(made().latency.samples_ms) / 1e3
    base, slower = made(samples), made(1.05 * samples)
    assert whole(base, slower) == SLOWER
    runs = [made(factor * samples) for factor in (0.926, 0.95, 0.98, 0.99)]
    found = comparison.compare(base, slower, repeats=runs)
    assert found.whole.noise == pytest.approx(0.08, abs=0.001)
    assert found.whole.verdict == CANNOT_TELL
    centre = stats.gmean([1, 0.926, 0.95, 0.98, 0.99])
    assert found.whole.ratio.value == pytest.approx(1.05 / centre)
    assert found.whole.baseline.value == pytest.approx(centre * np.median(samples))
    # Hahn and Meeker's interval of one more value: Student's quantile, times s, times sqrt(1 + 1/n).
    spread = np.std(np.log([1, 0.926, 0.95, 0.98, 0.99]), ddof=1)
    reach = stats.t.ppf(0.975, 4) * spread * math.sqrt(1 + 1 / 5)
    assert math.log(found.whole.ratio.high / found.whole.ratio.value) == pytest.approx(reach)
    assert not found.whole.exceeds(0.03)
    assert not found.whole.within(0.03)
    assert found.whole.within(0.5)
    text = compare.render([found], [base, slower])
    assert "7.99 %" in text
    assert text.splitlines()[-1].startswith("Summary: cannot tell whether B is faster than A")
    assert "of 5 runs of A, which differ by 7.99 %" in text.splitlines()[-1]


@pytest.mark.parametrize("runs", [3, 5, 8])
@pytest.mark.parametrize("spread", [0.0, 0.03, 0.1])
def test_runs_that_differ_are_seldom_told_apart(runs, spread, rng):
    """Every run a few percent off: the largest difference of three runs tells a fifth of equal ones apart."""
    found = []
    for _ in range(100):
        base, *repeats, new = (
            made(np.exp(spread * rng.standard_normal() + 0.01 * rng.standard_normal(40)) * 1e-2)
            for _ in range(runs + 1)
        )
        found.append(whole(base, new, repeats=repeats, threshold=0.01))
    assert sum(verdict in (FASTER, SLOWER) for verdict in found) <= 8


def test_a_run_given_twice_is_one_run():
    found = comparison.compare(made(), made(seed=9), repeats=[made(), *[made(seed=1)] * 4])
    assert found.runs == 2
    assert json.loads(compare.to_json([found]))["comparisons"][0]["runs"] == 2
    assert any("4 results with the same samples" in warning for warning in found.warnings)
    assert {row.verdict for row in found.steps} == {CANNOT_TELL}


def layered(rng, count: int, slower: float = 1.0) -> Result:
    """A run of ``count`` layers, each off by 10 % in its own way; the first takes ``slower`` as long."""
    result = made(seed=int(rng.integers(2**31)))
    layer = result.layers[0]
    factors = np.exp(0.1 * rng.standard_normal(count)) * np.where(np.arange(count), 1.0, slower)
    result.layers = [
        replace(
            layer,
            name=f"conv{index}",
            samples_s=list(factor * 1e-4 * np.exp(0.01 * rng.standard_normal(60))),
        )
        for index, factor in enumerate(factors)
    ]
    return result


def test_layers_have_a_verdict_by_five_runs_and_not_before(rng):
    """Equal runs of 50 layers: by their samples alone, tens of layers are slower or faster."""
    base, new = layered(rng, 50), layered(rng, 50)
    for repeats in ([], [layered(rng, 50) for _ in range(3)]):
        found = comparison.compare(base, new, repeats=repeats)
        rows = found.steps
        assert {row.verdict for row in rows} == {CANNOT_TELL}
        assert {row.verdict for row in found.rows if row.section == "sum"} == {CANNOT_TELL}
        assert {row.reason for row in rows[:-1]} == {
            f"needs 5 runs of the baseline, found {len(repeats) + 1}: --noise"
        }
    repeats = [layered(rng, 50) for _ in range(6)]
    wrong = pointwise = right = 0
    for _ in range(40):
        rows = comparison.compare(base, layered(rng, 50, slower=20.0), repeats=repeats).steps
        right += rows[0].verdict == SLOWER
        decided = [row for row in rows[1:] if row.verdict in (FASTER, SLOWER)]
        wrong += bool(decided)
        pointwise += any(row.ratio.low > 1.03 or row.ratio.high < 1 / 1.03 for row in rows[1:])
    assert wrong <= 6
    assert right >= 36
    assert pointwise >= 20  # without Holm's correction


@pytest.mark.parametrize(
    ("value", "low", "is_one", "passes"),
    [
        (1.06, 1.01, True, False),
        (1.06, 0.99, False, False),  # perhaps faster
        (1.04, 1.03, False, True),  # slower, but allowed
        (1.04, 1.02, False, False),  # perhaps slower than allowed
        (1.0, 0.8, False, False),
        (1.5, None, False, False),
    ],
)
def test_what_a_regression_is(value, low, is_one, passes):
    time = comparison.Estimate(1.0, 0.99, 1.01, 50, 50.0)
    ratio = comparison.Estimate(value, low, low and 2 * value - low, 50, 50.0)
    row = comparison.Row("pass", "p50", "s", time, time, ratio, 0.0, CANNOT_TELL, "")
    assert row.exceeds(0.05) is is_one
    assert row.within(0.05) is passes
    assert not replace(row, ratio=None).exceeds(0.05)
    assert not replace(row, ratio=None).within(0.05)
    assert not replace(row, short="too short").within(0.05)


def test_a_short_run_is_never_shown_to_be_the_same():
    """Six passes, or a hundred of 10 us, may all lie in one of two speeds."""
    for samples, reason in (
        (1e-2 * np.ones(6), "fewer than 20 samples"),
        (1e-5 * np.ones(100), "passes of less than 50.00 ms in all"),
    ):
        found = comparison.compare(made(samples), made(samples)).whole
        assert (found.verdict, found.reason) == (CANNOT_TELL, reason)
        assert not found.within(0.05)
        # A faster one is: what is too short to be the same may still be told apart.
        assert comparison.compare(made(samples), made(0.5 * samples)).whole.within(0.05)


def test_two_speeds_are_told(rng):
    slow = rng.random(100) < 0.3
    other = made(np.where(slow, 1.25e-3, 1e-3) * np.exp(0.01 * rng.standard_normal(100)))
    warning = next(w for w in comparison.compare(made(), other, ("a", "b")).warnings)
    assert warning.startswith(
        f"b: two speeds: {slow.mean() * 100:.2f} % of its passes are slow, 1.2"
    )
    few = comparison.compare(made(1e-2 * np.ones(8)), made(), ("a", "b")).warnings
    assert few[0].startswith("a: 8 passes are too few to estimate their correlation")


def test_the_functions_refuse_what_the_command_refuses():
    failed = made(check=replace(CHECK, max_abs_diff=1.0))
    with pytest.raises(InputError, match="nothing was timed"):
        comparison.compare(made(), failed)
    with pytest.raises(InputError, match="variant"):
        checks.check_repeat(("a", "b"), made(), made(variant="if"))
