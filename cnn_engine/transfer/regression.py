"""Time against batch size: one straight line, two pieces with a break, and how far each is off.

The single line is fitted by ordinary least squares, as every tool does, so that its numbers can be compared.
The pieces are fitted to residuals in units of their noise. The noise of a copy has a part that is the same
for all sizes and one that grows with the time: its variance is a^2 + b^2 time^2 (R. J. Carroll and
D. Ruppert, "Transformation and Weighting in Regression", 1988, chapter 3). How large a is beside b is found
from how far each time is from the line through its two neighbours, which no break or bend elsewhere disturbs.

The two pieces are free lines that need not meet. Where the driver copies large memory in another way than
small, the time jumps; a fit made to be continuous would bend both lines to hide that. It also makes the
search exact: every break is tried.

- Break: where the sum of squares is smallest, if so large an F, the largest of all breaks, comes about in at
  most 1 % of the data sets that have one line and the noise that was found: those of the wild bootstrap with
  HC3's residuals (B. E. Hansen, "Testing for structural change in conditional models", Journal of
  Econometrics 97, 2000). It takes equal variances for granted nowhere. Fewer than eight sizes have too few
  signs to be drawn for 1 %.
- Neighbours: what slows one size may slow the next. How their noise correlates is found from the residuals of
  two pieces, which a break does not disturb, less what the fit makes of it: what noise that correlates by so
  much leaves in such residuals is drawn (indirect inference, A. A. Smith, Journal of Applied Econometrics 8,
  1993). The bootstrap then draws data that correlate as much (S. Goncalves and L. Kilian, "Bootstrapping
  autoregressions with conditional heteroskedasticity of unknown form", Journal of Econometrics 123, 2004).
  Fewer than twenty sizes do not show it.
- The break's interval: the likelihood ratio's (B. E. Hansen, "Sample splitting and threshold estimation",
  Econometrica 68, 2000, table I).
- Intervals of coefficients: Student's, with the larger of two standard errors: HC3's (J. G. MacKinnon and
  H. White, "Some heteroskedasticity-consistent covariance matrix estimators", Journal of Econometrics 29,
  1985), which a mistaken variance does not harm, and that of the variance that was found, which one size far
  from the others does not harm. Those of a piece hold for its break as found.

  What neighbours have in common is in the second one.

Noise that outlasts all sizes cannot be seen; :attr:`Pieces.correlation` says what could.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
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

#: Data sets that the bootstrap draws, always the same ones for the same data.
DRAWS = 499

#: Batch sizes that show how the variance grows; of fewer it is taken to grow with the time squared.
FEWEST_OF_VARIANCE = 5

#: Batch sizes that show a break: of fewer, too few signs are drawn for :data:`FALSE_BREAKS`.
FEWEST_OF_BREAK = 8

#: Batch sizes from which on neighbours' correlation is estimated, and those that show it well. Fewer than the
#: first are taken as independent.
FEWEST_OF_CORRELATION, ENOUGH = 20, 40

#: Correlations of neighbours that are tried, and data sets that are drawn with each.
CORRELATIONS, DRAWS_OF_CORRELATION = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95), 200

#: How often sizes that are independent may be told to correlate.
FALSE_CORRELATIONS = 0.1

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
    """Distance of a fit from measured times, as shares of them.

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
        correlation: of neighbouring sizes' noise; None where it is no larger than chance makes it, or there
            are fewer than :data:`FEWEST_OF_CORRELATION` sizes. If larger, intervals may be too narrow, and
            a break may be noise that lasts over several sizes.
    """

    lines: tuple[Line, ...]
    break_batch: int | None = None
    break_interval: tuple[int, int] | None = None
    p_value: float | None = None
    correlation: float | None = None

    def at(self, batch: np.ndarray | float) -> np.ndarray:
        """Returns the time in seconds; beyond the measured sizes, that of the nearest piece."""
        batch = np.asarray(batch, float)
        first = self.lines[0].at(batch)
        if self.break_batch is None:
            return first
        return np.where(batch < self.break_batch, first, self.lines[1].at(batch))


@dataclass(frozen=True)
class HoldOut:
    """Errors of fits on batch sizes that they have not seen.

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


def fit_line(
    batches: np.ndarray,
    times: np.ndarray,
    weighted: bool = False,
    variances: np.ndarray | None = None,
    correlation: float | None = None,
) -> Line:
    """Fits one line by least squares, of residuals or (``weighted``) of residuals in units of their noise.

    Args:
        batches: at least :data:`FEWEST` different sizes, rising.
        times: in seconds, above zero.
        variances: of the times, up to a factor; None: :func:`noise_variances`.
        correlation: of neighbours' noise; None: as :func:`neighbours` finds it.

    Raises:
        InputError: fewer batch sizes.
        UnsupportedError: SciPy is not installed.
    """
    batches, times = np.asarray(batches, float), np.asarray(times, float)
    count = len(batches)
    if count < FEWEST:
        raise expected("regression", f"at least {FEWEST} batch sizes", count)
    if variances is None:
        variances = noise_variances(batches, times)
    if correlation is None:
        correlation = neighbours(batches, times, variances)
    noise = _Fit(batches, times, 1 / variances)
    fit = noise if weighted else _Fit(batches, times, np.ones(count))
    variances = variances * (noise.weights @ noise.residuals**2 / (count - 2))
    reach = _student(count - 2)
    intercept_error, slope_error = (reach * e for e in fit.errors(variances, correlation))
    total = fit.weights @ fit.y**2
    return Line(
        from_batch=int(batches[0]), to_batch=int(batches[-1]), points=count,
        intercept_s=fit.intercept, slope_s_per_image=fit.slope,
        intercept_interval_s=(fit.intercept - intercept_error, fit.intercept + intercept_error),
        slope_interval_s_per_image=(fit.slope - slope_error, fit.slope + slope_error),
        r2=float(1 - fit.weights @ fit.residuals**2 / total)
        if total > fit.weights.sum() * (ROUNDING * fit.y_mean) ** 2
        else None,
    )  # fmt: skip


class _Fit:
    """A weighted least squares line: its coefficients, residuals, and leverages (0 to 1)."""

    def __init__(self, batches: np.ndarray, times: np.ndarray, weights: np.ndarray) -> None:
        self.weights = weights
        self.x_mean, self.y_mean = (weights @ each / weights.sum() for each in (batches, times))
        self.x, self.y = batches - self.x_mean, times - self.y_mean
        self.spread = weights @ self.x**2
        self.slope = float(weights @ (self.x * self.y) / self.spread)
        self.intercept = float(self.y_mean - self.slope * self.x_mean)
        self.residuals = self.y - self.slope * self.x
        self.leverages = weights * (1 / weights.sum() + self.x**2 / self.spread)

    @property
    def unseen(self) -> np.ndarray:
        """Each residual from the line through all other points: HC3's."""
        return self.residuals / np.maximum(1 - self.leverages, ROUNDING)

    def errors(self, variances: np.ndarray, correlation: float) -> tuple[float, float]:
        """Returns the standard errors of intercept and slope; ``correlation`` of neighbours' noise."""
        slope = self.weights * self.x / self.spread  # what each time counts in the slope
        intercept = self.weights / self.weights.sum() - self.x_mean * slope
        squares, sizes = self.unseen**2, np.sqrt(variances)
        return tuple(
            math.sqrt(max(counts**2 @ squares, _together(counts * sizes, correlation)))
            for counts in (intercept, slope)
        )


def _together(terms: np.ndarray, correlation: float) -> float:
    """Returns the variance of the sum of ``terms`` times noise whose neighbours correlate."""
    apart = np.abs(np.subtract.outer(np.arange(len(terms)), np.arange(len(terms))))
    return float(terms @ correlation**apart @ terms)


def noise_variances(batches: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns the variance of each time, up to a factor; arguments are :func:`fit_line`'s."""
    batches, times = np.asarray(batches, float), np.asarray(times, float)
    if len(batches) < FEWEST_OF_VARIANCE:
        return times**2
    # Between two neighbours lies a line; the middle time's distance from it has all three times' noise.
    left = (batches[2:] - batches[1:-1]) / (batches[2:] - batches[:-2])
    right = 1 - left
    between = left * times[:-2] + right * times[2:]
    off = np.maximum(np.abs(times[1:-1] - between), ROUNDING * between)
    # Not each time's own noise: a time that is small by chance would count for more.
    usual = np.concatenate([times[:1], between, times[-1:]]) ** 2
    found: list[tuple[float, np.ndarray]] = []
    for constant in np.geomspace(times.min() / 30, times.max() * 30, 25) ** 2:
        variances = constant + usual
        size = np.sqrt(variances[1:-1] + left**2 * variances[:-2] + right**2 * variances[2:])
        # Laplace's likelihood, which few sizes far off do not rule.
        found.append((len(off) * math.log((off / size).mean()) + np.log(size).sum(), variances))
    variances = min(found, key=lambda pair: pair[0])[1]
    return variances / np.mean(variances / usual)


def fit_pieces(batches: np.ndarray, times: np.ndarray) -> Pieces:
    """Fits two pieces to residuals in units of their noise; one where a break does not pay.

    Arguments and errors are those of :func:`fit_line`.
    """
    batches, times = np.asarray(batches, float), np.asarray(times, float)
    count = len(batches)
    if count < FEWEST:
        raise expected("regression", f"at least {FEWEST} batch sizes", count)
    variances = noise_variances(batches, times)
    correlation = neighbours(batches, times, variances)
    found = {"correlation": correlation or None}
    whole = fit_line(batches, times, True, variances, correlation)
    if count < FEWEST_OF_BREAK:
        return Pieces((whole,), **found)
    firsts = _firsts(count)
    squares, _ = _squares(batches, times, 1 / variances, firsts)
    found["p_value"] = _chance(batches, times, 1 / variances, firsts, correlation)
    if found["p_value"] > FALSE_BREAKS:
        return Pieces((whole,), **found)
    best = int(np.argmin(squares))
    first = firsts[best]
    likely = firsts[count * (squares - squares[best]) <= HANSEN_95 * squares[best]]
    lines = tuple(
        fit_line(batches[part], times[part], True, variances[part], correlation)
        for part in (slice(None, first), slice(first, None))
    )
    return Pieces(
        lines=lines,
        break_batch=int(batches[first]),
        break_interval=(int(batches[likely[0]]), int(batches[likely[-1]])),
        **found,
    )


def _firsts(count: int) -> np.ndarray:
    """Returns the indices at which a second piece may begin."""
    return np.arange(FEWEST_IN_PIECE, count - FEWEST_IN_PIECE + 1)


def neighbours(batches: np.ndarray, times: np.ndarray, variances: np.ndarray) -> float:
    """Returns how neighbouring sizes' noise correlates, up to 0.95; 0 where it may be chance.

    Arguments are those of :func:`fit_line`; of fewer than :data:`FEWEST_OF_CORRELATION` sizes it is 0.
    """
    if len(batches) < FEWEST_OF_CORRELATION:
        return 0.0
    line = _Fit(batches, times, 1 / variances)
    if not np.abs(line.residuals).max() > ROUNDING * times.max():
        return 0.0
    (found,) = _left_of_neighbours(batches, line.residuals[None], 1 / variances)
    drawn = _drawn_neighbours(tuple(batches.tolist()))
    expected = np.maximum.accumulate([each.mean() for each in drawn])
    if np.mean(drawn[0] >= found) > FALSE_CORRELATIONS:
        return 0.0
    return float(np.interp(found, expected, CORRELATIONS))


@lru_cache(maxsize=16)
def _drawn_neighbours(batches: tuple[float, ...]) -> list[np.ndarray]:
    """Returns what is left of each of :data:`CORRELATIONS` in the residuals of data sets that have it."""
    from scipy import signal

    sizes = np.array(batches)
    fresh = np.random.default_rng(0).standard_normal((DRAWS_OF_CORRELATION, len(sizes)))
    found = []
    for by in CORRELATIONS:
        steps = fresh * math.sqrt(1 - by**2)
        steps[:, 0] = fresh[:, 0]
        noise = signal.lfilter([1.0], [1.0, -by], steps)
        found.append(_left_of_neighbours(sizes, noise, np.ones(len(sizes))))
    return found


def _left_of_neighbours(batches: np.ndarray, times: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns how neighbours' residuals from the best two pieces correlate, of each row of ``times``."""
    firsts = _firsts(len(batches))
    squares, _ = _squares(batches, times, weights, firsts)
    best = firsts[np.argmin(squares, axis=-1)]
    sizes = np.sqrt(weights)
    found = np.empty(len(times))
    for first in np.unique(best):
        rows = best == first
        total = common = 0.0
        for part in (slice(None, first), slice(first, None)):
            terms = sizes[part, None] * np.stack([np.ones_like(batches), batches], 1)[part]
            line, _ = np.linalg.qr(terms)
            off = times[rows, part] * sizes[part]
            off = off - off @ line @ line.T
            total += (off**2).sum(axis=1)
            common += (off[:, 1:] * off[:, :-1]).sum(axis=1)
        found[rows] = common / np.maximum(total, np.finfo(float).tiny)
    return found


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


def _squares(
    batches: np.ndarray, times: np.ndarray, weights: np.ndarray, firsts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weighted sums of squares of two lines for each of ``firsts``, and of one line.

    ``times``: [..., points]; the results are [..., breaks] and [..., 1]. Running sums make each
    break a matter of a few operations.
    """

    x = (batches - batches.mean()) / np.ptp(batches)
    sums = [
        np.cumsum(weights * each, axis=-1)
        for each in (np.ones(len(x)), x, x**2, times, x * times, times**2)
    ]

    def left(
        w: np.ndarray,
        wx: np.ndarray,
        wxx: np.ndarray,
        wy: np.ndarray,
        wxy: np.ndarray,
        wyy: np.ndarray,
    ) -> np.ndarray:
        return wyy - wy**2 / w - (wxy - wx * wy / w) ** 2 / (wxx - wx**2 / w)

    before = [each[..., firsts - 1] for each in sums]
    every = [each[..., -1:] for each in sums]
    after = [whole - part for whole, part in zip(every, before, strict=True)]
    floor = len(batches) * ROUNDING**2
    two = np.maximum(left(*before), 0) + np.maximum(left(*after), 0)
    return np.maximum(two, floor), np.maximum(left(*every), floor)


def _chance(
    batches: np.ndarray,
    times: np.ndarray,
    weights: np.ndarray,
    firsts: np.ndarray,
    correlation: float,
) -> float:
    """Returns how often data on one line, with the noise of these, break as clearly."""
    from scipy import signal

    def clearest(values: np.ndarray) -> np.ndarray:
        two, one = _squares(batches, values, weights, firsts)
        return np.max(one / two, axis=-1)  # F rises with it

    one_line = _Fit(batches, times, weights)
    # Residuals lose nothing that the line explains, and less is rounded off.
    found = clearest(one_line.residuals)
    # Those of two lines would find more breaks of a few sizes, and too many in straight lines.
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (DRAWS, len(batches)))
    sizes = np.sqrt(weights)
    steps = one_line.unseen * sizes
    steps[1:] -= correlation * steps[:-1]
    drawn = clearest(signal.lfilter([1.0], [1.0, -correlation], signs * steps) / sizes)
    return float(1 + np.count_nonzero(drawn >= found * (1 - ROUNDING))) / (1 + DRAWS)


def _student(freedom: int) -> float:
    """Returns Student's two-sided 95 % quantile."""
    return float(_special().stdtrit(freedom, (1 + CONFIDENCE) / 2))


def _special() -> ModuleType:
    try:
        from scipy import special
    except ImportError as error:
        raise UnsupportedError(
            "regression: expected the package scipy, found none; pip install scipy"
        ) from error
    return special
