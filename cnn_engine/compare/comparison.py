"""Compares two results: differences of the two runs, and a verdict on each time.

Everything is a ratio of the other result to the baseline, with a 95 % interval from the raw samples
(:mod:`cnn_engine.measure.statistics`), and a verdict on it. ``docs/explanation/comparing.md`` says what
the verdicts mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..measure import statistics
from ..measure.result import Result
from ..measure.statistics import Estimate, Prediction
from ..report import cautions, units
from .checks import check_comparable
from .facts import differences
from .times import PERCENTILES, finite, times
from .verdicts import (
    CANNOT_TELL,
    COPY,
    FASTER,
    FEWEST_RUNS,
    LAYER,
    PASS,
    SAME,
    SLOWER,
    SUM,
    THRESHOLD,
    THROUGHPUT,
    Row,
    judge_family,
    judge_row,
)

#: What ``same``, and passing a gate, needs of both results at least: passes, and seconds of them. A shorter
#: stretch may lie in one of two speeds, such as those of a clock that is throttled.
SAME_SAMPLES, SAME_S = statistics.ENOUGH, 0.05

MEDIAN = (PASS, f"p{PERCENTILES[0]}")


@dataclass
class Comparison:
    """Result of :func:`compare`.

    Attributes:
        baseline, other: the names of the results, such as their paths.
        threshold: the smallest ratio that counts as different, less 1.
        per: ``pass``; or ``image`` where the batches differ and times are divided by them.
        differences: (what, in the baseline, in the other) of all that describes what was run and where.
        warnings: sentences on what makes the comparison, or either result, less certain.
        rows: what both results have.
        only: (``layer`` or ``copy``, name, name of the only result that has it).
        runs: of the baseline, itself included.
    """

    baseline: str
    other: str
    threshold: float
    per: str
    differences: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    only: list[tuple[str, str, str]] = field(default_factory=list)
    runs: int = 1

    @property
    def noise_known(self) -> bool:
        """Whether there are further runs of the baseline."""
        return self.runs > 1

    @property
    def whole(self) -> Row | None:
        """The median pass, which decides the comparison as a whole; None where there is none."""
        return next((row for row in self.rows if (row.section, row.name) == MEDIAN), None)

    @property
    def steps(self) -> list[Row]:
        """The layers and copies that both have."""
        return [row for row in self.rows if row.section in (LAYER, COPY)]

    def summary(self, letter: str = "B") -> str:
        """Returns one line: the verdict on the whole pass, and how many layers and copies have which."""
        whole = self.whole
        if whole is None or whole.ratio is None:
            said = f"cannot tell whether {letter} is faster than A: not both have samples of passes"
        else:
            verdict = {
                FASTER: f"{letter} is faster than A",
                SLOWER: f"{letter} is slower than A",
                SAME: f"{letter} is the same as A within {units.percent(self.threshold)}",
                CANNOT_TELL: f"cannot tell whether {letter} is faster than A ({whole.reason})",
            }[whole.verdict]
            said = f"{verdict}: median {self.per} {units.number(whole.ratio.value)} x"
            if whole.ratio.known:
                said += f" ({interval(whole.ratio)})"
            if self.noise_known:
                said += f" of {self.runs} runs of A, which differ by {units.percent(whole.noise)}"
        counts = dict.fromkeys((FASTER, SLOWER, SAME, CANNOT_TELL), 0)
        for row in self.steps:
            counts[row.verdict] += 1
        steps = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        return f"{said}; layers and copies: {steps or 'none in both'}"


def interval(ratio: Estimate | None) -> str:
    """Returns the ends of a ratio's interval as text."""
    if ratio is None or not ratio.known:
        return units.UNKNOWN
    return f"{units.number(ratio.low)} to {units.number(ratio.high)}"


def compare(
    baseline: Result,
    other: Result,
    names: tuple[str, str] = ("the baseline", "the other"),
    threshold: float = THRESHOLD,
    repeats: Sequence[Result] = (),
) -> Comparison:
    """Compares ``other`` with ``baseline``.

    Args:
        names: of the results, for messages.
        threshold: above 0: a ratio from ``1 / (1 + threshold)`` to ``1 + threshold`` counts as the same.
        repeats: further runs of the baseline (see :func:`check_repeat`). How they and the baseline differ is
            noise that one run cannot show: ``other`` is judged by where one more such run would lie.

    Raises:
        InputError: see :func:`check_comparable`.
        UnsupportedError: there are ``repeats``, and SciPy is not installed.
    """
    for name, result in zip(names, (baseline, other), strict=True):
        check_comparable(name, result)
    per = "pass" if baseline.batch == other.batch else "image"
    found = Comparison(*names, threshold, per)
    found.differences = list(differences(baseline, other))
    found.warnings = list(_warnings(baseline, other, names))
    runs = _apart([baseline, *repeats])
    found.runs = len(runs)
    found.warnings += _warnings_of_runs(found.runs, len(repeats))
    short = {name: _short(baseline, other, name) for name in (PASS, LAYER)}
    ours, theirs, *again = (times(result, per) for result in (baseline, other, *runs[1:]))
    family = []
    for key, estimate in ours.items():
        if key not in theirs:
            found.only += [(*key, names[0])] if key[0] in (LAYER, COPY) else []
            continue
        row, prediction = _row(
            key, estimate, theirs[key], [each[key] for each in again if key in each]
        )
        row.short = short[PASS if key[0] in (PASS, THROUGHPUT) else LAYER]
        found.rows.append(row)
        if key[0] in (LAYER, COPY, SUM):
            family.append((row, prediction))
        else:
            judge_row(row, threshold)
    judge_family(family, threshold, found.runs)
    found.only += [
        (*key, names[1]) for key in theirs if key not in ours and key[0] in (LAYER, COPY)
    ]
    return found


def _apart(runs: Sequence[Result]) -> list[Result]:
    """Returns ``runs`` without those whose samples are another's: one run given twice is one run."""
    found: dict[Any, Result] = {}
    for index, run in enumerate(runs):
        samples = run.latency and tuple(run.latency.samples_ms)
        found.setdefault(samples or index, run)
    return list(found.values())


def _warnings_of_runs(runs: int, repeats: int) -> Iterator[str]:
    if runs < repeats + 1:
        yield (
            f"--noise: {units.counted(repeats + 1 - runs, 'result')} with the same samples as another, "
            "which count once"
        )
    if 1 < runs < FEWEST_RUNS:
        yield (
            f"--noise: {runs} runs of the baseline tell little of how runs differ, so intervals are wide; "
            f"{FEWEST_RUNS} and more tell enough, also for layers and copies"
        )


def _short(baseline: Result, other: Result, section: str) -> str:
    """Returns why what both measured is too short for ``same``; empty where it is not."""
    counts, seconds = [], []
    for result in (baseline, other):
        samples = finite([] if result.latency is None else result.latency.samples_ms)
        count = len(samples) if result.latency is None else result.latency.count
        counts.append(count)
        seconds.append(count * float(samples.mean()) / 1e3 if len(samples) else 0.0)
    if section == PASS and min(counts) < SAME_SAMPLES:
        return f"fewer than {SAME_SAMPLES} samples"
    if min(counts) and min(seconds) < SAME_S:
        return f"passes of less than {units.seconds(SAME_S)} in all"
    return ""


def _row(
    key: tuple[str, str], ours: Estimate, theirs: Estimate, again: Sequence[Estimate]
) -> tuple[Row, Prediction | None]:
    """Returns a row without a verdict, and what further runs of the baseline predict."""
    unit = "images/s" if key[0] == THROUGHPUT else "s"
    runs = [run for run in (ours, *again) if run.value > 0]  # False for NaN
    ratio = statistics.ratio(theirs, ours)
    prediction = statistics.predict([run.value for run in runs])
    if prediction is not None and ratio is not None:
        reach = prediction.reach() / math.sqrt(len(runs) + 1)  # of the mean, not of one more run
        ends = (prediction.centre * math.exp(sign * min(reach, 700.0)) for sign in (-1, 1))
        ours = Estimate(prediction.centre, *ends, ours.samples, ours.independent)
        ratio = prediction.ratio(theirs, ratio)
    noise = _spread(runs) if prediction is not None else 0.0
    return Row(*key, unit, ours, theirs, ratio, noise, CANNOT_TELL, ""), prediction


def _spread(runs: Sequence[Estimate]) -> float:
    """Returns how much the largest of ``runs`` exceeds the smallest, as a ratio less 1."""
    values = [run.value for run in runs if run.value > 0]  # False for NaN
    return max(values) / min(values) - 1 if values else 0.0


def _warnings(baseline: Result, other: Result, names: tuple[str, str]) -> Iterator[str]:
    if baseline.network != other.network:
        yield (
            "the networks differ: latency compares different work, and a layer of the same name may be "
            "another"
        )
    if baseline.batch != other.batch:
        yield (
            "the batches differ, so times are of an image (a pass divided by its batch), not the latency "
            "that a user waits for"
        )
    positions = {layer.name: layer.place for layer in baseline.layers}
    moves: dict[tuple[str, str], list[str]] = {}
    for layer in other.layers:
        if positions.get(layer.name, layer.place) != layer.place:
            moves.setdefault((positions[layer.name], layer.place), []).append(layer.name)
    for (before, after), layers in moves.items():
        yield (
            f"on {before} in {names[0]}, on {after} in {names[1]}: {', '.join(layers)}; times on cuda are "
            "the device's, times on cpu the host's"
        )
    for name, result in zip(names, (baseline, other), strict=True):
        if result.check is None:
            yield f"{name}: its outputs were not checked against the reference"
        if result.latency is None:
            yield f"{name}: it has no raw samples, so there are ratios but no verdicts"
        if result.interrupted:
            yield f"{name}: interrupted: it has what was measured until then"
        passes = finite([] if result.latency is None else result.latency.samples_ms)
        yield from (f"{name}: {warning}" for warning in cautions.of_passes(passes))
        missing = sum(
            len(values) - len(finite(values))
            for values in (
                [] if result.latency is None else result.latency.samples_ms,
                *(step.samples_s for step in (*result.layers, *result.copies)),
            )
        )
        if missing:
            yield f"{name}: {units.counted(missing, 'sample')} null, left out"
        found = result.environment.get("warnings")
        for warning in found if isinstance(found, list) else []:
            yield f"{name}: {units.printable(warning)}"
