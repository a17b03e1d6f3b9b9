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
        enough: samples that show whether they depend on each other.
    """
    count, independent = found.samples, found.independent
    if statistics.FEWEST <= count < enough:
        return (
            f"{count} {what} do not show whether they depend on each other: intervals, and what is judged by "
            f"them, hold only if they do not; {enough} and more show it"
        )
    if count >= statistics.DEPENDENT * independent and 0 < independent < statistics.ENOUGH:
        return (
            f"{units.count(count)} {what} depend on each other and know as much as "
            f"{units.number(independent)} that do not: intervals may be too narrow; more {what} tell more"
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
