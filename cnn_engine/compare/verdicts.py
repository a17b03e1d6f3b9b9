"""Verdicts on ratios: faster, slower, same or cannot tell.

``docs/explanation/comparing.md`` says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..measure import statistics
from ..measure.statistics import Estimate, Prediction

FASTER, SLOWER, SAME, CANNOT_TELL = "faster", "slower", "same", "cannot tell"

#: The smallest difference that counts: two runs of the same on a quiet machine differ by 1 to 3 %.
THRESHOLD = 0.03

#: Runs of the baseline, itself included, that verdicts on layers and copies need. From one run to the next
#: these differ by more than their samples tell, and where there are many of them, some always do.
FEWEST_RUNS = 5

PASS, THROUGHPUT, LAYER, COPY, SUM = "pass", "throughput", "layer", "copy", "sum"

#: What a ratio that cannot be judged may be.
ANYWHERE = (0.0, math.inf)


@dataclass
class Row:
    """One time, or the throughput, in both results.

    Attributes:
        section: ``pass``, ``throughput``, ``layer``, ``copy`` or ``sum`` (of the layers and copies).
        name: such as ``p50``, ``conv1``, ``images h2d``.
        unit: ``s`` or ``images/s``.
        baseline, other: seconds of a pass, or of an image where the batches differ; or images/s.
        ratio: ``other / baseline``; None where one is zero or not known. With further runs of the baseline it
            is that to the geometric mean of all of them, and its interval a prediction interval, which has in
            it how runs differ.
        noise: how much the largest of all runs of the baseline exceeds the smallest, as a ratio less 1; 0
            where there is but one.
        verdict: on ``other``: ``faster``, ``slower``, ``same`` or ``cannot tell``.
        reason: why it cannot be told; else empty.
        judged: the ends that ``faster`` and ``slower`` are judged by; None: those of ``ratio``. Of layers and
            copies wider ones, by Holm's correction, or :data:`ANYWHERE` without enough runs of the baseline.
        short: why ``same`` cannot be told of what is so short; else empty.
    """

    section: str
    name: str
    unit: str
    baseline: Estimate
    other: Estimate
    ratio: Estimate | None
    noise: float
    verdict: str
    reason: str
    judged: tuple[float, float] | None = None
    short: str = ""

    @property
    def title(self) -> str:
        """The row's name in a message: ``pass p50``, ``conv1``."""
        return f"{self.section} {self.name}" if self.section == PASS else self.name

    def exceeds(self, limit: float) -> bool:
        """Whether a time is a regression: its ratio above ``1 + limit``, and the whole interval above 1."""
        ratio = self.ratio
        if ratio is None or not ratio.known:
            return False
        return ratio.value > 1 + limit and (self.judged or (ratio.low, ratio.high))[0] > 1

    def within(self, limit: float) -> bool:
        """Whether a time is shown to be no regression: the whole interval is at most ``1 + limit``.

        That is the test of non-inferiority (D. J. Schuirmann, "A comparison of the two one-sided tests
        procedure and the power approach", Journal of Pharmacokinetics and Biopharmaceutics 15, 1987). Where
        neither this nor :meth:`exceeds` is so, nothing can be said.
        """
        ratio = self.ratio
        if ratio is None or not ratio.known or self.judged == ANYWHERE or ratio.high > 1 + limit:
            return False
        return not self.short or ratio.high < 1 / (1 + THRESHOLD)


def judge(
    ratio: Estimate | None,
    threshold: float,
    more_is_faster: bool,
    judged: tuple[float, float] | None = None,
    short: str = "",
) -> tuple[str, str]:
    """Returns the verdict on ``ratio``, and the reason where it is ``cannot tell``.

    Faster or slower only where the whole interval lies beyond the threshold, the same only where it lies
    within; both sides of 1 alike, so that to exchange the results exchanges the verdicts.

    Args:
        judged: the interval's ends that faster and slower are judged by; None: those of ``ratio``.
        short: why ``same`` cannot be told whatever the interval; else empty.
    """
    if ratio is None:
        return CANNOT_TELL, "a time is zero or missing"
    if not ratio.known:
        if ratio.samples == 0:
            return CANNOT_TELL, "no raw samples"
        if ratio.samples < statistics.FEWEST:
            return CANNOT_TELL, f"fewer than {statistics.FEWEST} samples"
        return CANNOT_TELL, "too few independent samples"
    above, below = 1 + threshold, 1 / (1 + threshold)
    low, high = judged or (ratio.low, ratio.high)
    if ratio.low >= below and ratio.high <= above:
        return (CANNOT_TELL, short) if short else (SAME, "")
    if low > above:
        return (FASTER if more_is_faster else SLOWER), ""
    if high < below:
        return (SLOWER if more_is_faster else FASTER), ""
    if ratio.low > above or ratio.high < below:
        return CANNOT_TELL, "among so many, one differs as much by chance"
    if ratio.independent < statistics.FEWEST:
        return CANNOT_TELL, "the samples are correlated"
    if ratio.low > 1 or ratio.high < 1:
        return CANNOT_TELL, "a difference, but perhaps a smaller one than counts"
    return CANNOT_TELL, "the interval is too wide"


def judge_row(row: Row, threshold: float) -> None:
    """Fills in the verdict."""
    faster_above = row.section == THROUGHPUT
    row.verdict, row.reason = judge(row.ratio, threshold, faster_above, row.judged, row.short)


def judge_family(
    rows: Sequence[tuple[Row, Prediction | None]], threshold: float, runs: int
) -> None:
    """Fills in the verdicts on layers, copies and their sum: all are right together with 95 % confidence.

    By S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics
    6, 1979: of m rows the clearest needs a confidence of 1 - 5 % / m, the next one 1 - 5 % / (m - 1), and so
    on until one falls short. Where any run of the baseline is further from its other runs than that, on any
    layer and in standard errors, the new run has to be further off than it: the noise has longer tails than a
    normal distribution.
    """
    left = []
    for row, prediction in rows:
        if row.ratio is None or not row.ratio.known:
            judge_row(row, threshold)
        elif prediction is None or prediction.freedom + 1 < FEWEST_RUNS:
            row.reason = f"needs {FEWEST_RUNS} runs of the baseline, found {runs}: --noise"
            row.judged = ANYWHERE
        else:
            left.append((row, prediction))
    furthest = max((prediction.furthest for _, prediction in left), default=0.0)
    while left:
        confidence = 1 - (1 - statistics.CONFIDENCE) / len(left)
        decided = []
        for row, prediction in left:
            reach = prediction.reach(confidence, furthest) - prediction.reach()
            row.judged = (
                row.ratio.low * math.exp(-reach),
                row.ratio.high * math.exp(min(reach, 700.0)),
            )
            judge_row(row, threshold)
            decided.append(row.verdict in (FASTER, SLOWER))
        if not any(decided):
            break
        left = [pair for pair, done in zip(left, decided, strict=True) if not done]
