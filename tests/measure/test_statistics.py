"""Intervals from raw samples: what they cover, seeded, for the noise that timings have."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from noise import noise
from scipy import stats

from cnn_engine.measure import statistics

TRIALS = 300


def coverage(estimator, draw, truth: float) -> float:
    """The share of intervals that hold ``truth``."""
    found = [estimator(draw()) for _ in range(TRIALS)]
    return sum(e.low <= truth <= e.high for e in found) / TRIALS


# Runs much shorter than the noise remembers are left out: nothing in them tells how far it goes.
@pytest.mark.parametrize(
    ("count", "correlation"),
    [(6, 0.0), (6, 0.5), (20, 0.0), (20, 0.5), (100, 0.0), (100, 0.5), (400, 0.9), (2000, 0.9)],
)
def test_the_medians_interval_holds_the_median(count, correlation, rng):
    held = coverage(
        statistics.quantile, lambda: 100 + noise(count, correlation, rng), truth=100.0
    )  # fmt: skip
    assert held >= 0.9  # 95 %, less what 300 trials leave open


@pytest.mark.parametrize(("count", "correlation"), [(20, 0.0), (1000, 0.0), (1000, 0.9)])
def test_the_means_interval_holds_the_mean(count, correlation, rng):
    skewed = lambda: 100 + np.exp(noise(count, correlation, rng))  # noqa: E731
    assert coverage(statistics.mean, skewed, 100 + math.exp(0.5)) >= 0.9


@pytest.mark.parametrize("count", [6, 7, 30])
def test_the_means_interval_is_students(count):
    """Of the logarithm, with the variance that so many independent samples have."""
    samples = 10 + np.random.default_rng(1).permutation(count)
    found = statistics.mean(samples)
    freedom = max(found.independent, statistics.FEWEST) - 1
    error = np.std(samples) / math.sqrt(freedom) / samples.mean()
    error *= stats.t.ppf(0.975, freedom) * max(statistics.FEWEST / found.independent, 1) ** 1.5
    assert math.log(found.high / found.value) == pytest.approx(error, rel=5e-3)
    assert math.log(found.value / found.low) == pytest.approx(error, rel=5e-3)


def test_a_high_percentile(rng):
    draw = lambda: 1 + rng.exponential(size=2000)  # noqa: E731
    truth = 1 + math.log(100)
    held = coverage(lambda samples: statistics.quantile(samples, 0.99), draw, truth)
    assert held >= 0.92


def test_independent_samples_count_in_full_and_dependent_ones_do_not(rng):
    assert statistics.autocorrelation_time(noise(5000, 0.0, rng)) < 1.3
    # The sum over all lags of 0.9**|lag| is (1 + 0.9) / (1 - 0.9) = 19.
    assert 12 < statistics.autocorrelation_time(noise(20_000, 0.9, rng)) < 28
    drift = np.linspace(0, 1, 100)
    assert 100 / statistics.autocorrelation_time(drift) < 3


def test_a_random_walk_knows_next_to_nothing_of_where_it_goes(rng):
    """Without the correction for the samples' own mean, nearly half of such series look independent."""
    walks = [np.cumsum(rng.standard_normal(20)) for _ in range(TRIALS)]
    known = [len(walk) / statistics.autocorrelation_time(walk <= np.median(walk)) for walk in walks]
    assert np.mean(np.array(known) < statistics.FEWEST) > 0.64


def test_the_interval_is_the_binomial_one():
    """Ranks 2 and 9 of 10, 40 and 61 of 100: the table of order statistics in textbooks."""
    assert statistics._ranks(6, 0.5) == (1, 6)
    assert statistics._ranks(10, 0.5) == (2, 9)
    assert statistics._ranks(100, 0.5) == (40, 61)
    assert statistics._ranks(5, 0.5)[0] == 0
    for share, fewest in ((0.9, 36), (0.99, 368)):  # whose largest is above the quantile, mostly
        assert statistics._ranks(fewest, share)[1] == fewest
        assert statistics._ranks(fewest - 1, share)[1] == fewest
    assert statistics._ranks(10_000, 0.5) == (4902, 5099)


def test_students_quantile():
    for freedom, tabulated in ((5, 2.5706), (10, 2.2281), (30, 2.0423), (1e9, 1.95996)):
        assert statistics._student(freedom) == pytest.approx(tabulated, rel=2e-3)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("estimator", [statistics.quantile, statistics.mean])
def test_few_samples_have_a_value_and_no_interval(estimator, count):
    found = estimator([2.0, 3.0, 2.0, 4.0, 3.0][:count])
    assert found.samples == count
    assert not found.known
    assert found.value > 0


def test_far_percentiles_need_more_samples_than_the_median(rng):
    samples = rng.random(100) + 1
    assert statistics.quantile(samples, 0.5).known
    assert not statistics.quantile(samples, 0.99).known


def test_samples_of_a_drift_know_less_than_their_range():
    drift = np.linspace(1.0, 1.2, 50)
    found = statistics.quantile(drift)
    assert found.independent < statistics.FEWEST
    assert found.low < drift[1]
    assert found.high > drift[-2]


def test_one_stall_does_not_widen_the_interval_of_a_drift(rng):
    """A run that drifts by 5 %, and one pass in it that takes 50 times as long."""
    drift = np.linspace(1.0, 1.05, 200) + 0.001 * rng.standard_normal(200)
    drift[77] = 50.0
    found = statistics.quantile(drift)
    assert found.independent < statistics.FEWEST
    assert found.high < 1.3


def test_a_clock_of_low_resolution_widens_the_interval(rng):
    """Events resolve 32 ns: medians of 2.016 and 2.048 us may be of the same time."""
    tick = 0.032
    samples = np.round((2.03 + 0.01 * rng.standard_normal(200)) / tick) * tick
    found = statistics.quantile(samples)
    assert found.low <= found.value - tick
    assert found.high >= found.value + tick
    constant = statistics.quantile(np.full(100, 2.016))
    assert (constant.low, constant.high) == (2.016, 2.016)


def test_the_ratio_of_estimates():
    of, to = (
        statistics.Estimate(2.0, 1.8, 2.2, 10, 8.0),
        statistics.Estimate(1.0, 0.9, 1.1, 20, 9.0),
    )
    found = statistics.ratio(of, to)
    assert found.value == 2.0
    assert (found.samples, found.independent) == (10, 8.0)
    # Errors add in quadrature: wider than each, narrower than both together.
    assert 1.8 / 1.1 < found.low < 1.8
    assert 2.2 < found.high < 2.2 / 0.9
    back = statistics.ratio(to, of)
    assert (back.low, back.high) == pytest.approx((1 / found.high, 1 / found.low))
    assert statistics.ratio(of, statistics.Estimate(0.0)) is None
    assert statistics.ratio(statistics.Estimate(math.nan), of) is None
    assert not statistics.ratio(of, statistics.Estimate(1.0, 0.0, 1.1, 20, 9.0)).known


def test_scaled_and_inverse():
    found = statistics.Estimate(2.0, 1.0, 4.0, 10, 8.0)
    assert found.scaled(0.5) == statistics.Estimate(1.0, 0.5, 2.0, 10, 8.0)
    assert found.inverse() == statistics.Estimate(0.5, 0.25, 1.0, 10, 8.0)
    assert not statistics.Estimate(2.0).inverse().known


@given(st.lists(st.floats(min_value=0, max_value=1e12), min_size=1, max_size=60))
def test_any_samples_have_an_estimate(samples):
    for estimate in (statistics.quantile(samples), statistics.quantile(samples, 0.99),
                     statistics.mean(samples)):  # fmt: skip
        assert math.isfinite(estimate.value)
        if estimate.known:
            assert estimate.low <= estimate.value * (1 + 1e-9)
            assert estimate.high >= estimate.value * (1 - 1e-9)
        found = statistics.ratio(estimate, estimate)
        assert found is None or found.value == 1


def two_speeds(rng, count, fast=28, slow=12, by=1.25):
    """Passes that a clock slows by ``by``, for ``slow`` of them in a row on average, and not for ``fast``."""
    state, states = rng.random() < slow / (fast + slow), []
    for _ in range(count):
        states.append(state)
        state = not state if rng.random() < 1 / (slow if state else fast) else state
    return np.where(states, by, 1.0) * np.exp(0.01 * rng.standard_normal(count))


def test_a_run_of_few_stretches_may_be_of_either_speed(rng):
    """One that was fast and then slow knows as much as two samples, however many there are."""
    for fast, slow in ((27, 3), (200, 100), (3, 27)):
        samples = np.repeat([1.0, 1.25], [fast, slow]) * np.exp(
            0.01 * rng.standard_normal(fast + slow)
        )
        for run in (samples, samples[::-1]):
            found = statistics.quantile(run)
            assert found.low < 1.02
            assert found.high > 1.23
            assert found.independent <= 2
            assert statistics.mean(run).independent <= 2
            assert not statistics.quantile(run, 0.9).known


def test_single_slow_passes_are_no_stretch(rng):
    """Stalls anywhere, or speeds that change all the time, leave the interval of the median as it is."""
    stalls = np.exp(0.02 * rng.standard_normal(100))
    stalls[[7, 30, 31, 66, 90]] *= 3
    assert statistics.quantile(stalls).high < 1.02
    assert statistics.quantile(stalls).independent > 20
    found = statistics.quantile(two_speeds(rng, 2000, fast=14, slow=6))
    assert found.high < 1.05
    for constant in (np.ones(50), np.zeros(50)):
        assert statistics.quantile(constant).low == constant[0]


@pytest.mark.parametrize(("fast", "slow"), [(28, 12), (15, 15)])
def test_two_runs_of_two_speeds_are_seldom_told_apart(fast, slow, rng):
    """Of thirty passes; taken to be of one speed, one ratio in eight does not hold 1."""
    held = 0
    for _ in range(TRIALS):
        found = statistics.ratio(
            *(statistics.quantile(two_speeds(rng, 30, fast, slow)) for _ in range(2))
        )
        held += found.low <= 1 <= found.high
    assert held >= 0.92 * TRIALS


@pytest.mark.parametrize("outliers", [0, 1])
def test_an_outlier_does_not_hide_two_speeds(outliers, rng):
    samples = two_speeds(rng, 400)
    samples[5 : 5 + outliers] = 80.0
    share, ratio = statistics.two_speeds(samples)
    assert 0.1 < share < 0.5
    assert 1.23 < ratio < 1.27
    assert statistics.two_speeds(np.exp(0.01 * rng.standard_normal(400))) is None
