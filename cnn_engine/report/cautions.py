"""Warnings about intervals that are less certain than they look, shared by all reports."""

from __future__ import annotations

from collections.abc import Sequence

from ..measure import statistics
from ..measure.statistics import Estimate
from . import units


def of_dependence(found: Estimate, what: str, enough: int = statistics.ENOUGH) -> str:
    """Returns why an interval may be too narrow; empty where nothing says so.

    Args:
        found: the estimate that has the interval.
        what: its samples are, such as ``passes``.
        enough: samples that show their correlation.
    """
    count, independent = found.samples, found.independent
    if statistics.FEWEST <= count < enough:
        return (
            f"{count} {what} are too few to estimate their correlation: intervals and verdicts assume "
            f"independent {what}; measure at least {enough}"
        )
    if count >= statistics.DEPENDENT * independent and 0 < independent < statistics.ENOUGH:
        return (
            f"{units.count(count)} {what} are correlated and count as {units.number(independent)} "
            f"independent ones: intervals may be too narrow; measure more {what}"
        )
    return ""


def of_passes(samples: Sequence[float]) -> list[str]:
    """Returns warnings about the median of passes, given in the order of time."""
    if not len(samples):
        return []
    found = [of_dependence(statistics.quantile(samples), "passes")]
    speeds = statistics.two_speeds(samples)
    if speeds is not None:
        share, ratio = speeds
        found.append(
            f"two speeds: {units.percent(share)} of its passes are slow, {units.number(ratio)} x the time of "
            "the others, as where a clock is throttled or another program comes and goes"
        )
    return list(filter(None, found))
