"""Intervals of quantiles, means and their ratios from the raw samples of a run, in the order of time.

Samples of one run are not independent: clocks ramp, neighbours come and go, and what slows one pass slows the
next. n samples whose integrated autocorrelation time is t know as much as n / t independent ones, and every
interval here is as wide as that many would make it.

- Autocorrelation time: the initial monotone sequence estimator (C. J. Geyer, "Practical Markov Chain Monte
  Carlo", Statistical Science 7, 1992, section 3.3), after adding t / n to each autocorrelation: to subtract
  the samples' own mean lowers all of them by that much. Of a quantile it is taken over the series "at most
  the quantile?" (P. Heidelberger and P. A. W. Lewis, "Quantile Estimation in Dependent Sequences",
  Operations Research 32, 1984), which outliers cannot dominate.
- Levels: a run that was fast for one stretch of time and slow for the next shows no more than so many
  samples as there are stretches, and which of the speeds is the usual one is not known before it has changed
  several times. Where samples change between fast and slow more seldom than independent ones (the runs test,
  A. Wald and J. Wolfowitz, "On a test whether two samples are from the same population", Annals of
  Mathematical Statistics 11, 1940), and there are fewer than six stretches, the interval holds all of their
  medians.
- Quantiles: the order statistics of the binomial interval (W. J. Conover, "Practical Nonparametric
  Statistics", 3rd ed., section 3.2), their ranks stretched from n / t samples to n.
- Ratios: the intervals of both logarithms, joined by the method of variance estimates recovery (G. Y. Zou and
  A. Donner, "Construction of confidence limits about effect measures", Statistics in Medicine 27, 2008).
- A new run beside several of the baseline: the prediction interval of one more value from a normal
  distribution, of logarithms (W. Q. Meeker, G. J. Hahn and L. A. Escobar, "Statistical Intervals", 2nd ed.,
  section 4.7).

What no statistic can see in one run is how the next run would differ: ``docs/explanation/comparing.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from types import ModuleType

import numpy as np

from ..errors import UnsupportedError

CONFIDENCE = 0.95

#: Of fewer independent samples than this, not even the smallest and the largest hold the median with 95 %.
FEWEST = 6

#: Fewer samples than this do not show whether they depend on each other.
ENOUGH = 20

#: Samples for each independent one from which on they are said to depend on each other: independent ones
#: look, by chance, as if it were two.
DEPENDENT = 3

#: Stretches of a run whose medians show how far it wandered, where its samples depend on each other.
STRETCHES = 12

#: Standard errors by which the changes between fast and slow are fewer than those of independent samples:
#: once in a hundred times by chance.
FEW_CHANGES = 2.33

#: Share of the smallest and of the largest samples that count as no smaller and no larger than the others
#: where fast and slow ones are distinguished: single outliers would be all the slow ones there are.
OUTLIERS = 0.05

#: Samples around one of which most are fast, or slow, where a stretch of fast or slow ones begins and ends.
AROUND = 5

#: Samples are of two speeds where these explain so much of the variance: of a normal distribution cut in two
#: they explain 0.64, of a uniform one 0.75. Fewer than the share are stalls, not a speed.
#: Speeds that differ by less than the third are not worth telling.
TWO_SPEEDS, LEAST_SHARE, LEAST_BETWEEN = 0.85, 0.1, 0.03

#: Values that differ by less than this, relative to the estimate, count as one reading of the clock.
SAME_READING = 1e-4

#: By less than this, relative to the estimate, only the rounding of floats differs.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A value found from samples, and the interval that holds the true one with 95 % confidence.

    Attributes:
        value: in the samples' unit.
        low, high: the interval's ends; None where the samples cannot give one.
        samples: how many there are.
        independent: how many independent ones would know as much.
    """

    value: float
    low: float | None = None
    high: float | None = None
    samples: int = 0
    independent: float = 0.0

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return self.low is not None and self.high is not None

    def scaled(self, factor: float) -> Estimate:
        """Returns the estimate of ``factor`` (above 0) times the samples."""
        ends = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, *ends, self.samples, self.independent)

    def inverse(self) -> Estimate:
        """Returns the estimate of one over the samples' value, which is above 0; its bounds swap."""
        low, high = (1 / self.high, 1 / self.low) if self.known and self.low > 0 else (None, None)
        return Estimate(1 / self.value, low, high, self.samples, self.independent)


def quantile(
    samples: Sequence[float], share: float = 0.5, confidence: float = CONFIDENCE
) -> Estimate:
    """Returns the value that ``share`` of ``samples`` lie below, with its interval of ``confidence``.

    ``samples`` are finite, at least one, in the order of time. The interval is widened by the clock's
    resolution where that shows. Fewer than :data:`FEWEST` samples have no interval, and other quantiles than
    the median need more. Where samples depend on each other so much that fewer than :data:`FEWEST`
    independent ones would know as much, the median's interval is the range of the medians of
    :data:`STRETCHES` stretches of the run, widened by the factor that they fall short of it. Where a run has
    fewer than :data:`FEWEST` stretches of fast and of slow samples, the median's interval holds the medians
    of all of them, and other quantiles have none.
    """
    samples = np.asarray(samples, float)
    count = len(samples)
    value = float(np.quantile(samples, share))
    independent = count / autocorrelation_time(samples <= value * (1 + ROUNDING))
    levels = _levels(samples)
    ordered = np.sort(samples)
    low = high = None
    if independent >= FEWEST and (share == 0.5 or not levels):
        whole = int(independent)
        first, last = _ranks(whole, share, confidence)
        if first >= 1 and last <= whole:
            stretch = (count + 1) / (whole + 1)
            low = float(ordered[math.floor(first * stretch) - 1])
            high = float(ordered[math.ceil(last * stretch) - 1])
    elif count >= FEWEST and share == 0.5 and value > 0:
        short = FEWEST / independent
        size = max(count // STRETCHES, 1)
        medians = np.median(samples[: count // size * size].reshape(-1, size), axis=1)
        low = value * min(float(medians.min()) / value, 1.0) ** short
        high = value + max(float(medians.max()) - value, 0.0) * short
    if low is not None:
        step = _resolution(ordered, value)
        low, high = max(min([low, *levels]) - step, 0.0), max([high, *levels]) + step
    return Estimate(value, low, high, count, _limited(independent, levels))


def mean(samples: Sequence[float]) -> Estimate:
    """Returns the mean of ``samples`` (finite, at least one, in the order of time), with its interval.

    The interval is Student's, of the logarithm, with the number of independent samples; fewer than
    :data:`FEWEST` samples have none.
    """
    samples = np.asarray(samples, float)
    count = len(samples)
    value = float(samples.mean())
    independent = _limited(count / autocorrelation_time(samples), _levels(samples))
    if count < FEWEST or value <= 0:
        return Estimate(value, None, None, count, independent)
    # n samples that know as much as k independent ones have (n - k) / n of the variance between them.
    freedom = max(independent, FEWEST) - 1
    error = float(samples.std()) / math.sqrt(freedom) / value * _student(freedom)
    error *= max(FEWEST / independent, 1) ** 1.5
    factor = math.exp(min(error, 700.0))  # beyond, a float overflows
    return Estimate(value, value / factor, value * factor, count, independent)


def ratio(of: Estimate, to: Estimate) -> Estimate | None:
    """Returns ``of / to`` with its interval; None where a value is not above zero.

    ``samples`` and ``independent`` are those of the one that has fewer.
    """
    if not (of.value > 0 and to.value > 0):
        return None
    value = of.value / to.value
    samples = min(of.samples, to.samples)
    independent = min(of.independent, to.independent)
    if not (of.known and to.known and of.low > 0 and to.low > 0):
        return Estimate(value, None, None, samples, independent)
    below = math.hypot(math.log(of.value / of.low), math.log(to.high / to.value))
    above = math.hypot(math.log(of.high / of.value), math.log(to.value / to.low))
    return Estimate(value, value * math.exp(-below), value * math.exp(above), samples, independent)


def two_speeds(samples: Sequence[float]) -> tuple[float, float] | None:
    """Returns the share of slow samples, and the slow ones' mean to the fast ones'; None for one speed.

    Either has at least :data:`LEAST_SHARE` of the samples. Fewer than :data:`ENOUGH` samples show none.
    """
    samples = np.asarray(samples, float)
    count = len(samples)
    if count < ENOUGH or samples.min() <= 0:
        return None
    fast, low, high, explained = _cut(samples, math.ceil(LEAST_SHARE * count))
    if not explained > TWO_SPEEDS or high <= low * (1 + LEAST_BETWEEN):
        return None
    return 1 - fast / count, high / low


def _cut(samples: np.ndarray, least: int) -> tuple[int, float, float, float]:
    """Cuts samples in two, fast and slow ones, each at least ``least``.

    The cut is where the two halves explain most of the variance (N. Otsu, "A threshold selection method from
    gray-level histograms", IEEE Transactions on Systems, Man, and Cybernetics 9, 1979).

    Returns:
        How many are fast, the means of the fast and of the slow ones, and the share of the variance that
        they explain.
    """
    count = len(samples)
    ordered = np.sort(np.clip(samples, *np.quantile(samples, (OUTLIERS, 1 - OUTLIERS))))
    fast = np.arange(least, count - least + 1)
    reached = np.cumsum(ordered)
    low, high = reached[fast - 1] / fast, (reached[-1] - reached[fast - 1]) / (count - fast)
    between = fast * (count - fast) / count**2 * (high - low) ** 2
    best = int(between.argmax())
    explained = between[best] / max(ordered.var(), np.finfo(float).tiny)
    return int(fast[best]), float(low[best]), float(high[best]), float(explained)


def _levels(samples: np.ndarray) -> list[float]:
    """Returns the medians of a run's stretches of fast and of slow samples, in the order of time.

    Empty where these are :data:`FEWEST` and more, or samples change between fast and slow as often as
    independent ones do.
    """
    count = len(samples)
    if count < FEWEST or np.ptp(samples) <= ROUNDING * np.abs(samples).max():
        return []
    fast, *_ = _cut(samples, 2)
    slow = samples > np.partition(samples, fast - 1)[fast - 1]
    slows = int(slow.sum())
    pairs = 2 * slows * (count - slows)
    expected = pairs / count + 1
    error = math.sqrt(max(pairs * (pairs - count), 0) / (count**2 * (count - 1)))
    stretches = 1 + np.count_nonzero(slow[1:] != slow[:-1])
    if not stretches + 0.5 < expected - FEW_CHANGES * error:
        return []
    # What is slow amid fast ones for a moment is no stretch.
    sides = np.pad(slow.astype(int), AROUND // 2, mode="reflect")
    slow = np.convolve(sides, np.ones(AROUND, int), "valid") > AROUND // 2
    stretches = np.split(samples, np.flatnonzero(slow[1:] != slow[:-1]) + 1)
    return [float(np.median(s)) for s in stretches] if 2 <= len(stretches) < FEWEST else []


def _limited(independent: float, levels: list[float]) -> float:
    return min(independent, len(levels)) if levels else independent


@dataclass(frozen=True)
class Prediction:
    """Prediction interval of one more run, by the runs that there are.

    Attributes:
        centre: the geometric mean of the runs' values.
        error: the standard error of the logarithm of one more run's value.
        freedom: of Student's distribution.
        furthest: how many standard errors the run that is furthest from the others is from where these
            predict it; 0 for fewer than three runs.
    """

    centre: float
    error: float
    freedom: int
    furthest: float = 0.0

    def reach(self, confidence: float = CONFIDENCE, least: float = 0.0) -> float:
        """Returns how far the logarithm of one more run's value is from the centre's at most.

        Args:
            confidence: that it is no further.
            least: standard errors that it may always be off.

        Raises:
            UnsupportedError: SciPy is not installed.
        """
        return self.error * max(
            float(_special().stdtrit(self.freedom, (1 + confidence) / 2)), least
        )

    def ratio(self, new: Estimate, within: Estimate, confidence: float = CONFIDENCE) -> Estimate:
        """Returns the ratio of ``new`` to the centre.

        Its interval is no narrower than that of ``within``, the ratio to one of the runs by both runs'
        samples; where that has none, neither has this.
        """
        value = new.value / self.centre
        if not within.known:
            return Estimate(value, None, None, within.samples, within.independent)
        reach = min(self.reach(confidence), 700.0)  # beyond, a float overflows
        low = value * min(math.exp(-reach), within.low / within.value)
        high = value * max(math.exp(reach), within.high / within.value)
        return Estimate(value, low, high, within.samples, within.independent)


def predict(runs: Sequence[float]) -> Prediction | None:
    """Returns where one more run lies, by the values of two and more ``runs``; None for fewer.

    Values are above 0, and their logarithms are taken as normal and independent.
    """
    count = len(runs)
    if count < 2:
        return None
    logarithms = np.log(np.asarray(runs, float))
    spread = float(logarithms.std(ddof=1))
    return Prediction(
        math.exp(float(logarithms.mean())),
        spread * math.sqrt(1 + 1 / count),
        count - 1,
        _furthest(logarithms),
    )


def _furthest(values: np.ndarray) -> float:
    """Returns how many standard errors the furthest value is from where the others predict it."""
    count = len(values)
    if count < 3 or not np.ptp(values) > 0:
        return 0.0
    others = np.array([np.delete(values, index) for index in range(count)])
    errors = others.std(axis=1, ddof=1) * math.sqrt(1 + 1 / (count - 1))
    off = np.abs(values - others.mean(axis=1))
    return float((off / np.maximum(errors, ROUNDING)).max())


def autocorrelation_time(series: Sequence[float]) -> float:
    """Returns how many samples of ``series`` count as one independent sample: at least 1."""
    series = np.asarray(series, float)
    count = len(series)
    centred = series - series.mean() if count else series
    spread = np.abs(centred).max(initial=0.0)
    if count < 2 or spread <= 1e-12 * np.abs(series).max():
        return 1.0
    spectrum = np.abs(np.fft.rfft(centred / spread, 2 * count)) ** 2
    correlations = np.fft.irfft(spectrum)[:count]
    correlations /= correlations[0]
    time = _initial_monotone_sum(correlations)
    correlations[1:] += time / count
    return min(_initial_monotone_sum(correlations), float(count))


def _initial_monotone_sum(correlations: np.ndarray) -> float:
    """Returns Geyer's estimate: sums of neighbours, as long as they are positive, made to decrease."""
    even = len(correlations) // 2 * 2
    pairs = correlations[:even:2] + correlations[1:even:2]
    positive = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else len(pairs)
    return max(1.0, 2 * float(np.minimum.accumulate(pairs[:positive]).sum()) - 1)


@lru_cache(maxsize=256)
def _ranks(count: int, share: float, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """Returns the ranks, from 1, of the order statistics that hold a quantile with ``confidence``.

    0 or ``count + 1`` where there is none.
    """
    logarithms = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    below = np.arange(count + 1)  # how many samples are below the quantile: binomial
    terms = logarithms[-1] - logarithms - logarithms[::-1]
    terms += below * math.log(share) + (count - below) * math.log1p(-share)
    cumulative = np.cumsum(np.exp(terms))
    tail = (1 - confidence) / 2
    return int((cumulative <= tail).sum()), int(np.searchsorted(cumulative, 1 - tail) + 1)


def _resolution(ordered: np.ndarray, value: float) -> float:
    """Returns the step between the clock's readings where many samples share one; else 0."""
    gaps = np.diff(ordered)
    gaps = gaps[gaps > SAME_READING * value]
    return float(gaps.min()) if 0 < len(gaps) < len(ordered) / 2 - 1 else 0.0


def _student(freedom: float) -> float:
    """Returns Student's two-sided 95 % quantile, within 0.2 % for five degrees of freedom and more.

    M. Abramowitz and I. A. Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def _special() -> ModuleType:
    try:
        from scipy import special
    except ImportError as error:
        raise UnsupportedError(
            "intervals from several runs: expected the package scipy, found none; pip install scipy"
        ) from error
    return special
