"""Two results side by side: what differs in what was run, and whether each time does.

Everything is a ratio of the other result to the baseline, with a 95 % interval from the raw samples
(:mod:`cnn_engine.measure.statistics`), and a verdict on it. ``docs/explanation/comparing.md`` says what
the verdicts mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import expected
from ..measure import statistics
from ..measure.result import CopyTime, LayerTime, Result
from ..measure.statistics import Estimate, Prediction
from ..report import cautions, units

FASTER, SLOWER, SAME, CANNOT_TELL = "faster", "slower", "same", "cannot tell"

#: The smallest difference that counts: two runs of the same on a quiet machine differ by 1 to 3 %.
THRESHOLD = 0.03

#: Runs of the baseline, itself included, that verdicts on layers and copies need. From one run to the next
#: these differ by more than their samples tell, and where there are many of them, some always do.
FEWEST_RUNS = 5

#: What ``same``, and passing a gate, needs of both results at least: passes, and seconds of them. A shorter
#: stretch may lie in one of two speeds, such as those of a clock that is throttled.
SAME_SAMPLES, SAME_S = statistics.ENOUGH, 0.05

#: Of the latency of a pass; the first is what a regression of the whole pass is judged by.
PERCENTILES = (50, 90, 99)

PASS, THROUGHPUT, LAYER, COPY, SUM = "pass", "throughput", "layer", "copy", "sum"
MEDIAN = (PASS, f"p{PERCENTILES[0]}")

#: What two runs of the same have in common.
SAME_RUN = (
    "network", "weights", "data set images", "device", "device_name", "variant", "reduction", "dtype",
    "data_mode", "batch", "threads",
)  # fmt: skip

#: What of ``cpu_state`` and ``gpu_state`` is a setting, not a reading of the moment.
SETTINGS = ("governor", "turbo", "on_battery", "max_sm_clock_mhz", "power_limit_w")
CLOCKS = ("sm_clock_mhz", "memory_clock_mhz")
CLOCKS_WITHIN = 0.02

#: What a time and a count in a result can be at most: about 30 years, and what 64 bits hold.
LONGEST_S, MOST = 1e9, 2**63 - 1


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
        """What it is called in a message: ``pass p50``, ``conv1``."""
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


@dataclass
class Comparison:
    """What :func:`compare` found.

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
        """The median pass: what the comparison as a whole is judged by; None where there is none."""
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


def check_comparable(name: str, result: Result) -> None:
    """Checks what a comparison relies on.

    Raises:
        InputError: the check against the reference failed, so that nothing was timed; or a number is out
            of its range. ``name`` is the file that the message names.
    """
    if result.check is not None and not result.check.passed:
        raise expected(
            name,
            "a result that passed the check against the reference",
            f"a failed one (max abs diff {result.check.max_abs_diff:g}); nothing was timed",
        )
    for key in ("name", "source"):
        if not isinstance(result.dataset.get(key), str):
            raise expected(f"{name}: dataset: {key}", "a text", repr(result.dataset.get(key))[:60])
    for what, value, least in _counts(result):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            found = repr(value)
            raise expected(
                f"{name}: {what}",
                f"a whole number from {least} to {MOST}",
                found if len(found) <= 60 else f"{found[:57]}...",
            )
    for what, value in _numbers(result):
        if not math.isnan(value) and not 0 <= value <= LONGEST_S:
            raise expected(f"{name}: {what}", f"seconds from 0 to {LONGEST_S:g}", f"{value:g}")


def _counts(result: Result) -> Iterator[tuple[str, Any, int]]:
    """Yields every number of things, the key that has it, and the least that it can be."""
    yield "dataset: images", result.dataset.get("images"), 0
    for key, least in (("batch", 1), ("threads", 1), ("iterations", 0), ("images_done", 0)):
        yield key, getattr(result, key), least
    if result.timed_pass is not None:
        yield "timed_pass: calls", result.timed_pass.calls, 0
    if result.accuracy is not None:
        yield "accuracy: total", result.accuracy.total, 0
        yield "accuracy: correct", result.accuracy.correct, 0
    for layer in result.layers:
        for key in ("calls", "flops", "bytes"):
            yield f"layer {layer.name}: {key}", getattr(layer, key), 0
    for copy in result.copies:
        for key in ("calls", "bytes"):
            yield f"copy {copy.what}: {key}", getattr(copy, key), 0


def _numbers(result: Result) -> Iterator[tuple[str, float]]:
    """Yields every time that a comparison reads, in seconds, with the key that has it."""
    for key, value in vars(result.phases).items():
        yield f"phases: {key}", math.nan if value is None else value
    if result.latency is not None:
        for value in result.latency.samples_ms:
            yield "latency_samples_ms", value / 1e3
        for key, value in (result.latency.written or {}).items():
            yield f"latency_ms: {key}", value / 1e3
    for layer in result.layers:
        yield f"layer {layer.name}: host_s", layer.host_s
        if layer.device_s is not None:
            yield f"layer {layer.name}: device_s", layer.device_s
    for copy in result.copies:
        yield f"copy {copy.what}: seconds", copy.seconds
    for step in (*result.layers, *result.copies):
        for value in step.samples_s:
            yield (
                f"{'layer' if isinstance(step, LayerTime) else 'copy'} {_key(step)}: samples_s",
                value,
            )


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
    found.differences = list(_differences(baseline, other))
    found.warnings = list(_warnings(baseline, other, names))
    runs = _apart([baseline, *repeats])
    found.runs = len(runs)
    found.warnings += _warnings_of_runs(found.runs, len(repeats))
    short = {name: _short(baseline, other, name) for name in (PASS, LAYER)}
    ours, theirs, *again = (_times(result, per) for result in (baseline, other, *runs[1:]))
    family = []
    for key, estimate in ours.items():
        if key not in theirs:
            found.only += [(*key, names[0])] if key[0] in (LAYER, COPY) else []
            continue
        row, prediction = _row(
            key, estimate, theirs[key], [times[key] for times in again if key in times]
        )
        row.short = short[PASS if key[0] in (PASS, THROUGHPUT) else LAYER]
        found.rows.append(row)
        if key[0] in (LAYER, COPY, SUM):
            family.append((row, prediction))
        else:
            _judge(row, threshold)
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
        samples = _finite([] if result.latency is None else result.latency.samples_ms)
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


def _judge(row: Row, threshold: float) -> None:
    """Fills in the verdict."""
    faster_above = row.section == THROUGHPUT
    row.verdict, row.reason = judge(row.ratio, threshold, faster_above, row.judged, row.short)


def judge_family(
    rows: Sequence[tuple[Row, Prediction | None]], threshold: float, runs: int
) -> None:
    """Fills in the verdicts on layers, copies and their sum, of which all are right with 95 % confidence.

    By S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics
    6, 1979: of m rows the clearest needs a confidence of 1 - 5 % / m, the next one 1 - 5 % / (m - 1), and so
    on until one falls short. Where any run of the baseline is further from its other runs than that, on any
    layer and in standard errors, the new run has to be further off than it: the noise has longer tails than a
    normal distribution.
    """
    left = []
    for row, prediction in rows:
        if row.ratio is None or not row.ratio.known:
            _judge(row, threshold)
        elif prediction is None or prediction.freedom + 1 < FEWEST_RUNS:
            row.reason = f"needs {FEWEST_RUNS} runs of the baseline, found {runs}: --noise"
            row.judged = ANYWHERE
        else:
            left.append((row, prediction))
    furthest = max((prediction.furthest for _, prediction in left), default=0.0)
    while left:
        confidence = 1 - (1 - statistics.CONFIDENCE) / len(left)
        told = []
        for row, prediction in left:
            reach = prediction.reach(confidence, furthest) - prediction.reach()
            row.judged = (
                row.ratio.low * math.exp(-reach),
                row.ratio.high * math.exp(min(reach, 700.0)),
            )
            _judge(row, threshold)
            told.append(row.verdict in (FASTER, SLOWER))
        if not any(told):
            break
        left = [pair for pair, done in zip(left, told, strict=True) if not done]


def check_repeat(names: tuple[str, str], baseline: Result, repeat: Result) -> None:
    """Checks that ``repeat`` is another run of what ``baseline`` is.

    Raises:
        InputError: it is not.
    """
    ours, theirs = _facts(baseline), _facts(repeat)
    for what in SAME_RUN:
        if ours[what] != theirs[what]:
            raise expected(
                names[1],
                f"another run of {names[0]}, {_words(what)} {_text(ours[what])}",
                _text(theirs[what]),
            )


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
        return CANNOT_TELL, "the samples depend on each other"
    if ratio.low > 1 or ratio.high < 1:
        return CANNOT_TELL, "a difference, but perhaps a smaller one than counts"
    return CANNOT_TELL, "the interval is too wide"


def _spread(runs: Sequence[Estimate]) -> float:
    """Returns how much the largest of ``runs`` exceeds the smallest, as a ratio less 1."""
    values = [run.value for run in runs if run.value > 0]  # False for NaN
    return max(values) / min(values) - 1 if values else 0.0


def _times(result: Result, per: str) -> dict[tuple[str, str], Estimate]:
    """Returns all that is compared, by (section, name), in the order of the report."""
    found = {}
    samples = _pass_samples(result, per)
    if len(samples):
        for percentile in PERCENTILES:
            estimate = statistics.quantile(samples, percentile / 100)
            written = (result.latency.written or {}).get(f"p{percentile}", 0.0) / 1e3
            if written > 0 < estimate.value:  # of all samples, of which some were kept
                estimate = estimate.scaled(written / _divisor(result, per) / estimate.value)
            found[PASS, f"p{percentile}"] = estimate
    rate = _throughput(result)
    if rate is not None:
        found[THROUGHPUT, "throughput"] = rate
    for step in (*result.layers, *result.copies):
        seconds = _finite(step.samples_s) / _divisor(result, per)
        estimate = statistics.quantile(seconds) if len(seconds) else _point(step, result, per)
        found[LAYER if isinstance(step, LayerTime) else COPY, _key(step)] = estimate
    if result.layers or result.copies:
        found[SUM, "sum"] = _sum(result, per)
    return found


def _pass_samples(result: Result, per: str) -> np.ndarray:
    """Returns the seconds of each pass of a full batch, or of an image of it; null ones left out."""
    samples = _finite([] if result.latency is None else result.latency.samples_ms) / 1e3
    return samples / _divisor(result, per)


def _throughput(result: Result) -> Estimate | None:
    """Returns images a second: what the report says, with the interval of the passes' mean."""
    stated = result.throughput_images_per_s
    stated = stated if stated and 0 < stated < math.inf else None  # NaN fails both
    samples = _pass_samples(result, "image")
    pace = statistics.mean(samples) if len(samples) else Estimate(0.0)
    if pace.value <= 0:
        return None if stated is None else Estimate(stated)
    rate = pace.inverse()
    return rate if stated is None else rate.scaled(stated / rate.value)


def _sum(result: Result, per: str) -> Estimate:
    """Returns what all layers and copies of a pass take together."""
    steps = (*result.layers, *result.copies)
    samples = [_finite(step.samples_s) for step in steps]
    if len({len(values) for values in samples}) == 1 and len(samples[0]):
        return statistics.quantile(np.sum(samples, axis=0) / _divisor(result, per))
    return Estimate(sum(_point(step, result, per).value for step in steps))


def _point(step: LayerTime | CopyTime, result: Result, per: str) -> Estimate:
    """Returns the mean over all images, for a file without samples."""
    images = result.images_done or result.dataset["images"]
    a_batch = step.seconds * result.batch / images if images else math.nan
    return Estimate(a_batch / _divisor(result, per))


def _divisor(result: Result, per: str) -> int:
    return result.batch if per == "image" else 1


def _key(step: LayerTime | CopyTime) -> str:
    return step.name if isinstance(step, LayerTime) else f"{step.what} {step.direction}"


def _finite(samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, float)
    return values[np.isfinite(values)]


def _differences(baseline: Result, other: Result) -> Iterator[tuple[str, str, str]]:
    """Yields what differs of all that both files tell on what was run and where."""
    ours, theirs = _facts(baseline), _facts(other)
    for what in [*ours, *(key for key in theirs if key not in ours)]:
        if what not in ours or what not in theirs:
            continue  # a file from before it was recorded
        first, second = ours[what], theirs[what]
        if what in CLOCKS and first and second:
            if abs(first - second) > CLOCKS_WITHIN * max(first, second):
                yield _words(what), units.number(first), units.number(second)
        elif first != second:
            yield _words(what), _text(first), _text(second)


def _facts(result: Result) -> dict[str, Any]:
    """Returns what describes ``result``, in the order in which it matters."""
    facts = {key: getattr(result, key) for key in ("network", "weights")}
    facts |= {f"data set {key}": result.dataset[key] for key in ("name", "source", "images")}
    for key in ("device", "device_name", "variant", "reduction", "dtype", "data_mode", "batch",
                "threads"):  # fmt: skip
        facts[key] = getattr(result, key)
    if result.accuracy is not None:
        facts["accuracy"] = units.percent(result.accuracy.top1)
    for key, value in result.environment.items():
        if key in ("cpu_state", "gpu_state"):
            known = value if isinstance(value, dict) else {}
            for name in SETTINGS:
                if known.get(name) is not None:
                    facts[name] = known[name]
            for name in CLOCKS:
                if isinstance(known.get(name), (int, float)) and abs(known[name]) < MOST:
                    facts[name] = known[name]
        elif isinstance(value, dict):
            facts |= value
        elif key != "warnings":
            facts[key] = value
    return facts


def _words(key: str) -> str:
    return units.printable(key).replace("_", " ")


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return units.printable(value)


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
    places = {layer.name: layer.place for layer in baseline.layers}
    moves: dict[tuple[str, str], list[str]] = {}
    for layer in other.layers:
        if places.get(layer.name, layer.place) != layer.place:
            moves.setdefault((places[layer.name], layer.place), []).append(layer.name)
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
        passes = _finite([] if result.latency is None else result.latency.samples_ms)
        yield from (f"{name}: {warning}" for warning in cautions.of_passes(passes))
        missing = sum(
            len(values) - len(_finite(values))
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
