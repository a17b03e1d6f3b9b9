"""Time against batch size: one straight line, two pieces with a break, and how far each is off.

The single line is fitted by ordinary least squares, as every tool does, so that its numbers can be compared.
The pieces are fitted to relative residuals (each point weighted with one over its time squared): the noise of
a copy grows with its length, and who predicts a small batch asks for a share of a small time. An ordinary fit
would know the times of small batches only to the noise of large ones.

The two pieces are free lines that need not meet. Where the driver copies large memory in another way than
small, the time jumps; a fit made to be continuous would bend both lines to hide that. It also makes the
search exact: every break is tried.

- Break: where the sum of squares is smallest, if Chow's test (G. C. Chow, "Tests of equality between sets of
  coefficients in two linear regressions", Econometrica 28, 1960) refuses the single line at 1 %, with
  Bonferroni's correction for having tried every break. Data on one line are so given a break about once
  in a hundred times at most, however few they are; the Bayesian information criterion finds one in up to
  four of ten.
- The break's interval: the likelihood ratio's (B. E. Hansen, "Sample splitting and threshold estimation",
  Econometrica 68, 2000, table I).
- Intervals of coefficients: Student's; those of a piece hold for its break as found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from ..errors import UnsupportedError, expected

CONFIDENCE = 0.95
HANSEN_95 = 7.35

#: How often data on one line may be given a break.
FALSE_BREAKS = 0.01

#: Batch sizes in a piece, at least: a line through two has no residual.
FEWEST_IN_PIECE = 3

#: Batch sizes that a line needs to have intervals.
FEWEST = 3

#: Relative residuals below this are the clock's resolution and rounding, not noise.
ROUNDING = 1e-6

Interval = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """``time = intercept_s + slope_s_per_image * batch``, over some batch sizes.

    Attributes:
        from_batch, to_batch: the smallest and largest batch size that it was fitted to.
        points: how many.
        intercept_interval_s, slope_interval_s_per_image: of 95 %.
        r2: the share of the variance that the line explains, weighted as the fit; None where nothing varies.
    """

    from_batch: int
    to_batch: int
    points: int
    intercept_s: float
    slope_s_per_image: float
    intercept_interval_s: Interval
    slope_interval_s_per_image: Interval
    r2: float | None

    def at(self, batch: np.ndarray | float) -> np.ndarray | float:
        """Returns the time in seconds."""
        return self.intercept_s + self.slope_s_per_image * batch


@dataclass(frozen=True)
class Misfit:
    """How far a fit is from measured times, as shares of them.

    Attributes:
        max_relative: the largest, without its sign, found at ``at_batch``.
        median_relative: the median without signs.
    """

    max_relative: float
    at_batch: int
    median_relative: float


@dataclass(frozen=True)
class Pieces:
    """One or two lines that together cover all batch sizes.

    Attributes:
        lines: by batch size.
        break_batch: the smallest batch size of the second piece; None where one line is as good.
        break_interval: of 95 %, both ends batch sizes that were measured.
        p_value: how often data on one line would break as clearly; None where there are too few batch sizes
            to try.
    """

    lines: tuple[Line, ...]
    break_batch: int | None = None
    break_interval: tuple[int, int] | None = None
    p_value: float | None = None

    def at(self, batch: np.ndarray | float) -> np.ndarray:
        """Returns the time in seconds; beyond what was measured, the nearest piece goes on."""
        batch = np.asarray(batch, float)
        first = self.lines[0].at(batch)
        if self.break_batch is None:
            return first
        return np.where(batch < self.break_batch, first, self.lines[1].at(batch))


@dataclass(frozen=True)
class HoldOut:
    """What fits that have not seen some batch sizes say of them.

    Attributes:
        batch_sizes: that were held out.
        measured_s, predicted_s: of each; predicted by the pieces.
        pieces, line: how far both fits were off.
    """

    batch_sizes: tuple[int, ...]
    measured_s: tuple[float, ...]
    predicted_s: tuple[float, ...]
    pieces: Misfit
    line: Misfit


def fit_line(batches: np.ndarray, times: np.ndarray, relative: bool = False) -> Line:
    """Fits one line by least squares, of residuals or (``relative``) of residuals as shares of the times.

    Args:
        batches: at least :data:`FEWEST` different sizes, rising.
        times: in seconds, above zero.

    Raises:
        InputError: fewer batch sizes.
        UnsupportedError: SciPy is not installed.
    """
    batches, times = np.asarray(batches, float), np.asarray(times, float)
    count = len(batches)
    if count < FEWEST:
        raise expected("regression", f"at least {FEWEST} batch sizes", count)
    weights = 1 / times**2 if relative else np.ones(count)
    weights = weights / weights.sum()
    x_mean, y_mean = weights @ batches, weights @ times
    x, y = batches - x_mean, times - y_mean
    spread = weights @ x**2
    slope = weights @ (x * y) / spread
    intercept = y_mean - slope * x_mean
    left = weights @ (y - slope * x) ** 2
    total = weights @ y**2
    # Weighted residuals have one variance; it is estimated with two degrees of freedom spent.
    variance = left / (count - 2)
    reach = _student(count - 2)
    slope_error = reach * math.sqrt(variance / spread)
    intercept_error = reach * math.sqrt(variance * (1 + x_mean**2 / spread))
    varies = total > (ROUNDING * y_mean) ** 2
    return Line(
        from_batch=int(batches[0]), to_batch=int(batches[-1]), points=count,
        intercept_s=float(intercept), slope_s_per_image=float(slope),
        intercept_interval_s=(float(intercept - intercept_error), float(intercept + intercept_error)),
        slope_interval_s_per_image=(float(slope - slope_error), float(slope + slope_error)),
        r2=float(1 - left / total) if varies else None,
    )  # fmt: skip


def fit_pieces(batches: np.ndarray, times: np.ndarray) -> Pieces:
    """Fits two pieces to relative residuals; one where a break does not pay.

    Arguments and errors are those of :func:`fit_line`.
    """
    batches, times = np.asarray(batches, float), np.asarray(times, float)
    count = len(batches)
    whole = fit_line(batches, times, relative=True)
    firsts = np.arange(FEWEST_IN_PIECE, count - FEWEST_IN_PIECE + 1)  # of the second piece
    if len(firsts) == 0:
        return Pieces((whole,))
    below, above, alone = _squares(batches, times)
    floor = count * ROUNDING**2
    squares = np.maximum(below[firsts] + above[firsts], floor)
    best = int(np.argmin(squares))
    # Two coefficients more explain the difference; four leave the rest its degrees of freedom.
    test = (max(alone, floor) - squares[best]) / 2 / (squares[best] / (count - 4))
    p_value = min(_chance(test, 2, count - 4) * len(firsts), 1.0)
    if p_value > FALSE_BREAKS:
        return Pieces((whole,), p_value=p_value)
    first = firsts[best]
    likely = firsts[count * (squares - squares[best]) <= HANSEN_95 * squares[best]]
    return Pieces(
        lines=(
            fit_line(batches[:first], times[:first], relative=True),
            fit_line(batches[first:], times[first:], relative=True),
        ),
        break_batch=int(batches[first]),
        break_interval=(int(batches[likely[0]]), int(batches[likely[-1]])),
        p_value=p_value,
    )


def misfit(batches: np.ndarray, measured: np.ndarray, fitted: np.ndarray) -> Misfit:
    """Returns how far ``fitted`` is from ``measured``, both in seconds."""
    off = np.abs(np.asarray(fitted) / np.asarray(measured) - 1)
    worst = int(np.argmax(off))
    return Misfit(float(off[worst]), int(batches[worst]), float(np.median(off)))


def hold_out(batches: np.ndarray, times: np.ndarray, count: int, seed: int) -> HoldOut:
    """Fits without ``count`` batch sizes drawn at random, and predicts those.

    The smallest and the largest are never drawn: their prediction would be an extrapolation.

    Raises:
        InputError: fewer than :data:`FEWEST` sizes would be left to fit, or the ends were needed.
    """
    batches, times = np.asarray(batches), np.asarray(times, float)
    check_hold_out(len(batches), count)
    drawn = np.random.default_rng(seed).choice(len(batches) - 2, count, replace=False) + 1
    drawn.sort()
    seen = np.ones(len(batches), bool)
    seen[drawn] = False
    pieces = fit_pieces(batches[seen], times[seen])
    line = fit_line(batches[seen], times[seen])
    sizes, measured = batches[drawn], times[drawn]
    predicted = pieces.at(sizes)
    return HoldOut(
        batch_sizes=tuple(int(size) for size in sizes),
        measured_s=tuple(float(value) for value in measured),
        predicted_s=tuple(float(value) for value in predicted),
        pieces=misfit(sizes, measured, predicted),
        line=misfit(sizes, measured, line.at(sizes)),
    )


def check_hold_out(batches: int, count: int) -> None:
    """Raises InputError where ``count`` of so many batch sizes cannot be held out."""
    most = max(batches - FEWEST, 0)
    if not 1 <= count <= most:
        raise expected(
            "--hold-out",
            f"1 to {most} of {batches} batch sizes, so that {FEWEST} are left to fit",
            count,
        )


def check_available() -> None:
    """Raises UnsupportedError where SciPy is not installed."""
    _special()


def _squares(batches: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the least sums of squared relative residuals of lines over parts of the points.

    The first array's element i is of the points before i, the second's of those from i on; the number is of
    all. Sums that run from either end make each a matter of a few operations.
    """

    def running(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        weights = 1 / y**2
        terms = np.stack([weights, weights * x, weights * x * x, 1 / y, x / y, np.ones(len(x))])
        w, wx, wxx, wy, wxy, wyy = np.cumsum(terms, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):  # one point has no slope
            left = wyy - wy**2 / w - (wxy - wx * wy / w) ** 2 / (wxx - wx**2 / w)
        return np.concatenate([[0.0], np.nan_to_num(left, nan=0.0, posinf=0.0, neginf=0.0)])

    scale = times.mean()
    x, y = (batches - batches.mean()) / max(np.ptp(batches), 1), times / scale
    before = running(x, y)
    after = running(x[::-1], y[::-1])[::-1]
    return before, after, float(before[-1])


def _student(freedom: int) -> float:
    """Returns Student's two-sided 95 % quantile."""
    return float(_special().stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _chance(value: float, numerator: int, denominator: int) -> float:
    """Returns how often a variable of the F distribution is at least ``value``."""
    return float(_special().fdtrc(numerator, denominator, value))


def _special() -> ModuleType:
    try:
        from scipy import special
    except ImportError as error:
        raise UnsupportedError(
            "regression: expected the package scipy, found none; pip install scipy"
        ) from error
    return special
