"""Places on a board: equal kernels share one, kernels that differ do not, over laws of noise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from cnn_engine.kernel import rank

BOARDS = 400

#: Boards of equal kernels of which some get different positions: 5 %, and four standard errors.
MOST_FALSE = 0.05 + 4 * np.sqrt(0.05 * 0.95 / BOARDS)


def independent(rng, kernels, rounds):
    return 0.01 * rng.standard_normal((kernels, rounds))


def heavy(rng, kernels, rounds):
    return 0.01 * rng.standard_t(3, (kernels, rounds))


def wide(rng, kernels, rounds):
    return 0.3 * rng.standard_normal((kernels, rounds))


def slow_rounds(rng, kernels, rounds):
    return independent(rng, kernels, rounds) + 0.05 * rng.standard_normal((1, rounds))


def two_speeds(rng, kernels, rounds):
    return independent(rng, kernels, rounds) / 3 + 0.1 * (rng.random((kernels, rounds)) < 0.5)


LAWS = [independent, heavy, wide, slow_rounds, two_speeds]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kernels", [2, 4, 10])
def test_equal_kernels_share_a_place(law, kernels):
    rng = np.random.default_rng(kernels)
    boards = (np.exp(law(rng, kernels, rank.ROUNDS)) for _ in range(BOARDS))
    wrong = sum(bool((rank.standings(board) != 1).any()) for board in boards)
    assert wrong / BOARDS <= MOST_FALSE


def test_noisy_equal_kernels_among_steady_ones():
    """A variance that all share would part the noisy ones in a sixth to a third of boards."""
    rng = np.random.default_rng(0)
    spread = np.where(np.arange(20) < 2, 0.05, 0.005)[:, None]
    speed = np.where(np.arange(20) < 2, 1.0, 2.0)[:, None]
    wrong = 0
    for _ in range(BOARDS):
        board = speed * np.exp(spread * rng.standard_normal((20, rank.ROUNDS)))
        found = rank.standings(board)
        wrong += found[0] != found[1]
    assert wrong / BOARDS <= MOST_FALSE


def test_five_pairs_of_equal_kernels():
    rng = np.random.default_rng(1)
    speed = 1.3 ** (np.arange(10) // 2)[:, None]
    boards = (
        rank.standings(speed * np.exp(independent(rng, 10, rank.ROUNDS))) for _ in range(BOARDS)
    )
    wrong = sum(bool((found[::2] != found[1::2]).any()) for found in boards)
    assert wrong / BOARDS <= MOST_FALSE


@pytest.mark.parametrize(("slower", "kernels", "least"), [(1.05, 2, 0.95), (1.05, 4, 0.9),
                                                          (1.2, 2, 0.99), (1.2, 10, 0.99)])  # fmt: skip
def test_kernels_that_differ_have_places_of_their_own(slower, kernels, least):
    """Half of the kernels are slower: every one of them is placed behind all faster ones."""
    rng = np.random.default_rng(2)
    speed = np.where(np.arange(kernels) < kernels // 2, 1.0, slower)[:, None]
    found = 0
    for _ in range(BOARDS):
        place = rank.standings(speed * np.exp(slow_rounds(rng, kernels, rank.ROUNDS)))
        found += place[: kernels // 2].max() < place[kernels // 2 :].min()
    assert found / BOARDS >= least


def test_places_are_shared_down_to_a_gap():
    steady = 1 + 1e-6 * np.random.default_rng(3).standard_normal((5, 5))
    speed = np.array([3.0, 1.0, 2.0, 1.0, 3.0])[:, None]
    assert rank.standings(speed * steady).tolist() == [4, 1, 3, 1, 4]


def test_one_round_parts_nothing():
    assert rank.standings(np.array([[1.0], [2.0]])).tolist() == [1, 1]
    assert rank.standings(np.array([[1.0, 1.0]])).tolist() == [1]
    assert rank.over_processes([2.0]).known is False


def test_the_interval_is_students_over_processes():
    seconds = np.exp(np.random.default_rng(4).standard_normal(5))
    found = rank.over_processes(seconds.tolist())
    logarithms = np.log(seconds)
    low, high = stats.t.interval(0.95, 4, logarithms.mean(), stats.sem(logarithms))
    assert (found.low, found.high) == pytest.approx((np.exp(low), np.exp(high)))
    assert (found.samples, found.value) == (5, pytest.approx(stats.gmean(seconds)))


def test_the_test_is_students_of_pairs():
    board = np.exp(0.01 * np.random.default_rng(5).standard_normal((6, 5)))
    apart = rank.differ(board)
    for i in range(6):
        for j in range(6):
            expected = i != j and stats.ttest_rel(*np.log(board[[i, j]])).pvalue < 0.05 / 3
            assert apart[i, j] == expected


def test_a_total_is_of_one_process():
    """Calls of a process count once, however many there are: equal kernels in processes that differ."""
    rng = np.random.default_rng(6)
    wrong = 0
    for _ in range(100):
        entries = [rank.Entry(name, name) for name in "ab"]
        for entry in entries:
            for _ in range(rank.ROUNDS):
                speed = np.exp(0.01 * rng.standard_normal())
                calls = speed * (1 + 1e-4 * rng.standard_normal(12))
                entry.processes.append({"conv1": list(calls), "conv2": list(2 * calls)})
        found = rank.placed(entries)
        wrong += found[1].place != 1
        assert (found[1].ties == []) == (found[1].place == 2)
    assert wrong <= 15
