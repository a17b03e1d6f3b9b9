"""The fits of transfer times: known lines and breaks come back, and straight data stay straight."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from noise import noise as noise_of
from transfers import (
    BREAK,
    INTERCEPT,
    LATE_INTERCEPT,
    LATE_SLOPE,
    SLOPE,
    two_pieces,
)

from cnn_engine.errors import InputError
from cnn_engine.transfer import regression

BATCHES = np.arange(1, 257)


def test_single_line_is_the_one_that_scipy_fits(rng):
    times = two_pieces(BATCHES) * (1 + 0.03 * rng.standard_normal(256))
    line = regression.fit_line(BATCHES, times)
    peer = scipy.stats.linregress(BATCHES, times)
    assert line.intercept_s == pytest.approx(peer.intercept)
    assert line.slope_s_per_image == pytest.approx(peer.slope)
    assert line.r2 == pytest.approx(peer.rvalue**2)
    # HC3 by matrices: each residual is divided by one less its leverage.
    design = np.stack([np.ones(256), BATCHES], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    leverages = np.einsum("ij,jk,ik->i", design, inverse, design)
    unseen = (times - line.at(BATCHES)) / (1 - leverages)
    errors = np.sqrt(np.diag(inverse @ (design.T * unseen**2) @ design @ inverse))
    reach = scipy.stats.t.ppf(0.975, 254)
    for (low, high), error, value in (
        (line.intercept_interval_s, errors[0], peer.intercept),
        (line.slope_interval_s_per_image, errors[1], peer.slope),
    ):
        assert high - value >= 0.999 * reach * error
        assert high - value < 2 * reach * error
        assert value - low == pytest.approx(high - value)


@pytest.mark.parametrize("noise", ["constant", "relative"])
def test_weights_are_those_of_the_noise(rng, noise):
    line = INTERCEPT + SLOPE * BATCHES
    size = {"constant": np.full(256, 1e-6), "relative": 0.03 * line}[noise]
    times = line + size * rng.standard_normal(256)
    variances = regression.noise_variances(BATCHES, times)
    found = variances[200] / variances[20]
    assert abs(math.log(found) - 2 * math.log(size[200] / size[20])) < 0.7
    fitted = regression.fit_line(BATCHES, times, weighted=True)
    slope, intercept = np.polyfit(BATCHES, times, 1, w=1 / np.sqrt(variances))
    assert (fitted.intercept_s, fitted.slope_s_per_image) == pytest.approx((intercept, slope))


SIZES = {"all": np.arange(1, 257, 5), "powers of two": 2.0 ** np.arange(9)}
NOISE = {
    "constant": lambda line: np.full(len(line), 0.03 * np.median(line)),
    "relative": lambda line: 0.03 * line,
    "both": lambda line: np.hypot(0.01 * np.median(line), 0.02 * line),
}


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_single_lines_intervals_hold_under_any_noise(rng, noise, sizes):
    """Under noise that grows with the time, those of equal variances held in 4 of 10."""
    batches = SIZES[sizes]
    truth = 2e-5 + SLOPE * batches
    held = np.zeros(2)
    for _ in range(300):
        times = truth + NOISE[noise](truth) * rng.standard_normal(len(batches))
        line = regression.fit_line(batches, times)
        for part, (value, (low, high)) in enumerate(
            [(2e-5, line.intercept_interval_s), (SLOPE, line.slope_interval_s_per_image)]
        ):
            held[part] += low <= value <= high
    assert held.min() >= 0.9 * 300


@pytest.mark.parametrize("noise", NOISE)
def test_a_straight_line_has_no_break_under_any_noise(rng, noise):
    """Under constant noise, weights of one over the time squared found one in 16 of 20."""
    batches = SIZES["all"]
    straight = 2e-5 + SLOPE * batches
    broken = straight * np.where(batches < 120, 1.0, 0.85)
    false = found = 0
    for _ in range(60):
        off = NOISE[noise](straight) * rng.standard_normal(len(batches))
        false += regression.fit_pieces(batches, straight + off).break_batch is not None
        pieces = regression.fit_pieces(batches, broken + off)
        found += pieces.break_batch is not None and 90 <= pieces.break_batch <= 150
    assert false <= 3
    assert found >= 50


def test_neighbours_that_correlate_are_told(rng):
    line = 2e-5 + SLOPE * BATCHES
    slow = line * (1 + 0.03 * noise_of(256, 0.9, rng))
    correlations = [
        regression.fit_pieces(BATCHES, times).correlation for times in (slow, two_pieces(BATCHES))
    ]
    assert correlations[0] > 0.5
    assert correlations[1] is None
    chance = sum(
        regression.fit_pieces(
            BATCHES[:40], line[:40] * (1 + 0.03 * rng.standard_normal(40))
        ).correlation
        is not None
        for _ in range(100)
    )
    assert chance <= 18  # one in ten


def test_intervals_hold_the_truth_as_often_as_they_say(rng):
    truth = INTERCEPT + SLOPE * BATCHES[:40]
    held = 0
    for _ in range(400):
        line = regression.fit_line(BATCHES[:40], truth + 2e-7 * rng.standard_normal(40))
        low, high = line.slope_interval_s_per_image
        held += low <= SLOPE <= high
    assert 0.91 <= held / 400 <= 0.99


def test_break_and_both_lines_come_back(rng):
    times = two_pieces(BATCHES) * (1 + 0.01 * rng.standard_normal(256))
    pieces = regression.fit_pieces(BATCHES, times)
    assert pieces.break_batch == BREAK
    assert pieces.break_interval == (BREAK, BREAK)
    first, second = pieces.lines
    assert (first.from_batch, first.to_batch) == (1, BREAK - 1)
    assert (second.from_batch, second.to_batch) == (BREAK, 256)
    for line, intercept, slope in (
        (first, INTERCEPT, SLOPE),
        (second, LATE_INTERCEPT, LATE_SLOPE),
    ):
        low, high = line.intercept_interval_s
        assert low <= intercept <= high
        assert line.intercept_s == pytest.approx(intercept, rel=0.05)
        assert line.slope_s_per_image == pytest.approx(slope, rel=0.05)


def test_break_is_where_every_break_tried_says(rng):
    batches = np.sort(rng.choice(np.arange(1, 150), 40, replace=False))
    times = two_pieces(batches) * (1 + 0.02 * rng.standard_normal(40))
    variances = regression.noise_variances(batches, times)

    def squares(part):
        slope, intercept = np.polyfit(batches[part], times[part], 1, w=1 / np.sqrt(variances[part]))
        return np.sum((intercept + slope * batches[part] - times[part]) ** 2 / variances[part])

    tried = {
        first: squares(slice(None, first)) + squares(slice(first, None)) for first in range(3, 38)
    }
    best = min(tried, key=tried.get)
    assert regression.fit_pieces(batches, times).break_batch == batches[best]


@pytest.mark.parametrize(("count", "trials"), [(7, 100), (12, 200), (40, 200), (256, 20)])
def test_straight_data_are_rarely_given_a_break(rng, count, trials):
    batches = np.arange(1, count + 1)
    line = INTERCEPT + SLOPE * batches
    breaks = sum(
        regression.fit_pieces(batches, line * (1 + 0.02 * rng.standard_normal(count))).break_batch
        is not None
        for _ in range(trials)
    )
    assert breaks <= max(0.03 * trials, 2)  # 1 % is expected


@pytest.mark.parametrize(
    "times",
    [INTERCEPT + SLOPE * BATCHES, np.full(256, 1e-5), SLOPE * BATCHES],
    ids=["line", "constant", "no intercept"],
)
def test_exact_lines_have_no_break(times):
    pieces = regression.fit_pieces(BATCHES, times)
    assert pieces.break_batch is None
    assert pieces.at(BATCHES) == pytest.approx(times)


def test_a_bend_without_a_jump_is_found(rng):
    times = np.maximum(2e-5 + 1e-8 * BATCHES, 1e-6 * BATCHES) * (
        1 + 0.005 * rng.standard_normal(256)
    )
    pieces = regression.fit_pieces(BATCHES, times)
    assert abs(pieces.break_batch - 21) <= 2
    assert regression.misfit(BATCHES, times, pieces.at(BATCHES)).max_relative < 0.08


def test_few_sizes_are_not_broken():
    pieces = regression.fit_pieces([1, 2, 4, 8, 16], [1e-5, 2e-5, 9e-5, 9e-5, 9.5e-5])
    assert len(pieces.lines) == 1
    assert pieces.p_value is None
    # Signs of seven sizes are too few to say that one line breaks as clearly in less than 1 %.
    seven = np.arange(1, 8)
    pieces = regression.fit_pieces(seven, np.where(seven < 4, 1e-5, 9e-5) * seven)
    assert (len(pieces.lines), pieces.p_value) == (1, None)
    with pytest.raises(InputError, match="regression: expected at least 3 batch sizes, found 2"):
        regression.fit_line([1, 2], [1e-5, 2e-5])


def test_prediction_changes_piece_at_the_break():
    pieces = regression.fit_pieces(BATCHES[::3], two_pieces(BATCHES[::3]))
    at = pieces.break_batch
    assert at == BREAK
    assert pieces.at(at - 0.5) == pytest.approx(INTERCEPT + SLOPE * (at - 0.5))
    assert pieces.at(at) == pytest.approx(LATE_INTERCEPT + LATE_SLOPE * at)
    assert pieces.at(1000) == pytest.approx(LATE_INTERCEPT + LATE_SLOPE * 1000)


def test_misfit_names_the_worst_batch():
    off = regression.misfit([1, 2, 3], [1.0, 2.0, 4.0], [1.1, 2.0, 2.0])
    assert (off.max_relative, off.at_batch) == (0.5, 3)
    assert off.median_relative == pytest.approx(0.1)


def test_held_out_sizes_are_not_seen_by_the_fit():
    times = two_pieces(BATCHES).copy()
    found = regression.hold_out(BATCHES, times, 20, seed=3)
    assert len(set(found.batch_sizes)) == 20
    assert not {1, 256} & set(found.batch_sizes)
    drawn = np.array(found.batch_sizes) - 1
    times[drawn] *= 7  # a fit that saw these would be far off the others
    spoilt = regression.hold_out(BATCHES, times, 20, seed=3)
    assert spoilt.predicted_s == pytest.approx(found.predicted_s)
    assert spoilt.pieces.max_relative == pytest.approx(6 / 7, abs=0.05)
    assert regression.hold_out(BATCHES, times, 20, seed=4).batch_sizes != found.batch_sizes


def test_two_pieces_predict_unseen_sizes_better_than_one_line(rng):
    times = two_pieces(BATCHES) * (1 + 0.005 * rng.standard_normal(256))
    found = regression.hold_out(BATCHES, times, 60, seed=1)
    assert BREAK not in found.batch_sizes  # unseen, it could be of either piece
    assert found.pieces.max_relative < 0.03
    assert found.line.max_relative > 0.1


@pytest.mark.parametrize("count", [0, 4, 100])
def test_too_many_held_out_are_refused(count):
    with pytest.raises(InputError, match=f"--hold-out: expected 1 to 3 of 6 batch sizes.*{count}"):
        regression.hold_out(BATCHES[:6], two_pieces(BATCHES[:6]), count, seed=0)


def test_prediction_of_rising_noise_favours_small_batches(rng):
    """A small batch is known to a share of its own time, not of the largest one's."""
    truth = 8e-6 + 3e-6 * BATCHES
    errors = {True: [], False: []}
    for _ in range(100):
        times = truth * (1 + 0.03 * rng.standard_normal(256))
        for weighted in errors:
            line = regression.fit_line(BATCHES, times, weighted)
            errors[weighted].append(abs(line.at(1) / truth[0] - 1))
    assert np.median(errors[True]) < 0.5 * np.median(errors[False])


@pytest.mark.parametrize(("sizes", "correlation"), [(52, 0.9), (52, 0.6)])
def test_correlated_neighbours_seldom_make_a_break(rng, sizes, correlation):
    """Taken as independent, nine straight lines in ten with 0.9, and half of those with 0.6, get one."""
    batches = np.arange(1.0, 5 * sizes, 5)
    line = 2e-5 + 4e-7 * batches
    breaks = held = 0
    for _ in range(30):
        times = line * (1 + 0.03 * noise_of(sizes, correlation, rng))
        breaks += regression.fit_pieces(batches, times).break_batch is not None
        low, high = regression.fit_line(batches, times).slope_interval_s_per_image
        held += low <= 4e-7 <= high
    assert breaks <= 7
    assert held >= 20


def test_the_correlation_of_neighbours_is_found(rng):
    batches = np.arange(1.0, 1000, 5)
    line = 2e-5 + 4e-7 * batches
    for correlation in (0.3, 0.6, 0.9):
        found = [
            regression.fit_pieces(
                batches, line * (1 + 0.03 * noise_of(200, correlation, rng))
            ).correlation
            for _ in range(10)
        ]
        assert np.median([each or 0.0 for each in found]) == pytest.approx(correlation, abs=0.12)
    # Fewer than twenty sizes are taken as independent.
    few = line[:19] * (1 + 0.03 * noise_of(19, 0.9, rng))
    assert regression.fit_pieces(batches[:19], few).correlation is None
