"""The fits of transfer times: known lines and breaks come back, and straight data stay straight."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
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
    reach = scipy.stats.t.ppf(0.975, 254)
    for (low, high), error, value in (
        (line.intercept_interval_s, peer.intercept_stderr, peer.intercept),
        (line.slope_interval_s_per_image, peer.stderr, peer.slope),
    ):
        assert high - value == pytest.approx(reach * error)
        assert value - low == pytest.approx(reach * error)


def test_weighted_line_is_the_one_that_numpy_fits(rng):
    times = two_pieces(BATCHES) * (1 + 0.03 * rng.standard_normal(256))
    line = regression.fit_line(BATCHES, times, relative=True)
    slope, intercept = np.polyfit(BATCHES, times, 1, w=1 / times)
    assert (line.intercept_s, line.slope_s_per_image) == pytest.approx((intercept, slope))


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
    batches = np.sort(rng.choice(np.arange(1, 500), 30, replace=False))
    times = two_pieces(batches) * (1 + 0.02 * rng.standard_normal(30))

    def squares(part):
        line = regression.fit_line(batches[part], times[part], relative=True)
        return np.sum((line.at(batches[part]) / times[part] - 1) ** 2)

    tried = {
        first: squares(slice(None, first)) + squares(slice(first, None)) for first in range(3, 28)
    }
    best = min(tried, key=tried.get)
    assert regression.fit_pieces(batches, times).break_batch == batches[best]


@pytest.mark.parametrize("count", [7, 12, 40, 256])
def test_straight_data_are_rarely_given_a_break(rng, count):
    batches = np.arange(1, count + 1)
    line = INTERCEPT + SLOPE * batches
    breaks = sum(
        regression.fit_pieces(batches, line * (1 + 0.02 * rng.standard_normal(count))).break_batch
        is not None
        for _ in range(500)
    )
    assert breaks <= 15  # about 5 are expected at most


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
    """Relative residuals: a small batch is known to a share of its own time, not of the largest one's."""
    truth = 8e-6 + 3e-6 * BATCHES
    errors = {True: [], False: []}
    for _ in range(100):
        times = truth * (1 + 0.03 * rng.standard_normal(256))
        for relative in errors:
            line = regression.fit_line(BATCHES, times, relative)
            errors[relative].append(abs(line.at(1) / truth[0] - 1))
    assert np.median(errors[True]) < 0.5 * np.median(errors[False])
