"""``python -m benchmarks.truth``: how often the measuring tools are wrong, on made-up data of known truth.

Each tool's own functions judge simulated samples: of ``compare`` verdicts, gates and further runs
(``--noise``), of ``run`` the rule by which it stops, of ``transfer`` breaks and slopes, of ``kernel rank``
places, of ``infer`` the rate's interval. A row is one tool under one law of noise: how often it says what is
not so, how often its 95 % intervals hold the truth, how often it says itself that they may not, and how often
it finds what is so. All draws are seeded. The exit code is 1 where a row breaks what the pages promise
(:func:`broken`).
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cnn_engine import cli
from cnn_engine.compare import comparison
from cnn_engine.compare.comparison import FASTER, SAME, SLOWER, Row
from cnn_engine.compare.verdicts import judge
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.infer import summary
from cnn_engine.kernel import rank
from cnn_engine.measure import environment, statistics, timing
from cnn_engine.measure.statistics import Estimate
from cnn_engine.report import cautions, units
from cnn_engine.transfer import regression
from cnn_engine.transfer.analysis import doubt_of

from . import result_file
from .truth_noise import NOISE, Draw, correlated, two_speeds

TRIALS, SEED, SIZES = 1000, 11, (6, 30, 300)

#: What the pages promise: false verdicts, and how often intervals hold, where no warning says otherwise.
MOST_FALSE, LEAST_HELD = 0.05, 0.93

#: A share of trials may be off by so many of its standard errors by chance.
BY_CHANCE = 3.0

#: What no gate may do.
PASSES_SLOWER = "gate exits 0, 20 % slower"

#: The limit of the gates, and what a slower run takes beside the baseline.
LIMIT, SLOWER_BY = 0.05, (0.05, 0.2)


@dataclass
class Found:
    """A row of the table: shares of trials.

    Attributes:
        tool, noise, samples: what was tried.
        trials: how many.
        false: say what is not so.
        held: have an interval that holds the truth, of those that have an interval.
        warned: have a warning that the interval may be too narrow, or nothing said at all.
        held_unwarned: ``held`` of those without a warning; None where there are too few of them.
        false_unwarned, missed_unwarned: of all trials, say what is not so, or have an interval that does not
            hold the truth, without a warning.
        found: name -> share that finds it.
    """

    tool: str
    noise: str
    samples: str
    trials: int
    false: float | None = None
    held: float | None = None
    warned: float = 0.0
    held_unwarned: float | None = None
    false_unwarned: float | None = None
    missed_unwarned: float | None = None
    found: dict[str, float] = field(default_factory=dict)


def broken(row: Found) -> list[str]:
    """Returns the promises that ``row`` breaks, beyond what chance does to so many trials."""
    faults = []

    def off(share: float) -> float:
        return BY_CHANCE * math.sqrt(share * (1 - share) / row.trials)

    false = row.false if row.false_unwarned is None else row.false_unwarned
    if false is not None and false > MOST_FALSE + off(MOST_FALSE):
        faults.append(f"false without a warning in {units.percent(false)}")
    for name, share in row.found.items():
        if name == PASSES_SLOWER and share > MOST_FALSE + off(MOST_FALSE):
            faults.append(f"{name} in {units.percent(share)}")
    missed = row.missed_unwarned
    if missed is not None and missed > 1 - LEAST_HELD + off(0.05):
        faults.append(f"intervals miss without a warning in {units.percent(missed)}")
    return faults


def compare_rows(trials: int, sizes: tuple[int, ...] = SIZES) -> Iterator[Found]:
    """Two runs: verdicts on the median pass, its ratio's interval, and the gate at :data:`LIMIT`."""
    for name, draw in NOISE.items():
        for count in sizes:
            rng = np.random.default_rng(SEED)
            row = Found("compare", name, f"{count:,}", trials)
            held, warned, false = (np.zeros(trials, bool) for _ in range(3))
            found = dict.fromkeys(
                [f"{100 * by:g} % slower found" for by in SLOWER_BY]
                + ["same found", *(f"gate exits {code}, {which}" for which in ("equal", "20 % slower")
                                   for code in (0, 1, 2))], 0,
            )  # fmt: skip
            for trial in range(trials):
                # Passes of 10 ms, so that time is never what is missing.
                a, b = (1e-2 * draw(rng, count) for _ in range(2))
                warned[trial] = any(cautions.of_passes(samples) for samples in (a, b))
                of, to = statistics.quantile(b), statistics.quantile(a)
                short = "" if count >= comparison.SAME_SAMPLES else "too few"
                verdicts = {}
                for by in (0.0, *SLOWER_BY):
                    ratio = statistics.ratio(of.scaled(1 + by), to)
                    verdict, _ = judge(ratio, comparison.THRESHOLD, False, short=short)
                    whole = Row("pass", "p50", "s", to, of, ratio, 0.0, verdict, "", None, short)
                    verdicts[by] = verdict, whole
                held[trial] = verdicts[0][1].ratio.low <= 1 <= verdicts[0][1].ratio.high
                # `same` of a run that is 20 % slower is as false as `slower` of an equal one.
                false[trial] = verdicts[0][0] in (FASTER, SLOWER) or verdicts[0.2][0] in (
                    SAME,
                    FASTER,
                )
                for by in SLOWER_BY:
                    found[f"{100 * by:g} % slower found"] += verdicts[by][0] == SLOWER
                found["same found"] += verdicts[0][0] == SAME
                for by, which in ((0, "equal"), (0.2, "20 % slower")):
                    whole = verdicts[by][1]
                    code = 1 if whole.exceeds(LIMIT) else 0 if whole.within(LIMIT) else 2
                    found[f"gate exits {code}, {which}"] += 1
            row.found = {key: value / trials for key, value in found.items()}
            yield _held(row, held, warned, false)


def _held(
    row: Found, held: np.ndarray, warned: np.ndarray, false: np.ndarray | None = None
) -> Found:
    """Fills in the shares of trials that hold, warn and are ``false``; returns the row."""
    row.held, row.warned = float(held.mean()), float(warned.mean())
    row.missed_unwarned = float((~held & ~warned).mean())
    if false is not None:
        row.false, row.false_unwarned = float(false.mean()), float((false & ~warned).mean())
    if (~warned).sum() >= 30:
        row.held_unwarned = float(held[~warned].mean())
    return row


# ---- noise from run to run ----

BETWEEN: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "runs 3 % apart": lambda rng, count: np.exp(0.03 * rng.standard_normal(count)),
    "runs 10 % apart": lambda rng, count: np.exp(0.1 * rng.standard_normal(count)),
    "runs equal": lambda rng, count: np.ones(count),
    "heavy tails from run to run": lambda rng, count: np.exp(0.02 * rng.standard_t(3, count)),
}


def noise_rows(trials: int, runs: tuple[int, ...] = (3, 5, 10)) -> Iterator[Found]:
    """One new run beside several of the baseline: the prediction interval and verdicts by it."""
    for name, between in BETWEEN.items():
        for count in runs:
            rng = np.random.default_rng(SEED)
            row = Found("compare --noise", name, f"{count} runs", trials)
            held, false, found = np.zeros(trials, bool), np.zeros(trials, bool), [0, 0]
            for trial in range(trials):
                *baseline, new = (
                    statistics.quantile(factor * np.exp(0.01 * rng.standard_normal(30)))
                    for factor in between(rng, count + 1)
                )
                ratios = [_predicted(new.scaled(1 + by), baseline) for by in (0, *SLOWER_BY)]
                verdicts = [judge(ratio, comparison.THRESHOLD, False)[0] for ratio in ratios]
                held[trial] = ratios[0].low <= 1 <= ratios[0].high
                false[trial] = verdicts[0] in (FASTER, SLOWER) or verdicts[2] in (SAME, FASTER)
                found = [n + (v == SLOWER) for n, v in zip(found, verdicts[1:], strict=True)]
            row.found = {
                f"{100 * by:g} % slower found": n / trials
                for by, n in zip(SLOWER_BY, found, strict=True)
            }
            yield _held(row, held, np.zeros(trials, bool), false)


def _predicted(new: Estimate, baseline: list[Estimate]) -> Estimate:
    prediction = statistics.predict([run.value for run in baseline])
    return prediction.ratio(new, statistics.ratio(new, baseline[0]))


def layer_rows(trials: int) -> Iterator[Found]:
    """50 layers that differ from run to run: whether any of them is called faster or slower."""
    for name in ("runs 3 % apart", "heavy tails from run to run"):
        for count in (5, 10):
            rng = np.random.default_rng(SEED)
            row = Found("compare --noise, 50 layers", name, f"{count} runs", trials)
            false = found = 0
            for _ in range(trials):
                factors = BETWEEN[name](rng, (count + 1) * 50).reshape(count + 1, 50)
                factors[-1, 0] *= 2
                false_here, found_here = _kernel_names(factors)
                false += false_here
                found += found_here
            row.false, row.found = false / trials, {"twice as slow found": found / trials}
            yield row


def _kernel_names(factors: np.ndarray) -> tuple[bool, bool]:
    """Returns whether an equal layer is told apart, and whether the first one is; by runs and layers."""
    count = len(factors) - 1
    pairs = []
    for layer in factors.T:
        runs = [Estimate(value, 0.99 * value, 1.01 * value, 60, 60.0) for value in layer]
        ratio = _predicted(runs[-1], runs[:-1])
        row = Row("layer", "conv", "s", runs[0], runs[-1], ratio, 0.0, "", "")
        pairs.append((row, statistics.predict(layer[:-1])))
    comparison.judge_family(pairs, comparison.THRESHOLD, count)
    different = [row.verdict in (FASTER, SLOWER) for row, _ in pairs]
    return any(different[1:]), different[0]


# ---- the other tools ----


def stop_rows(trials: int) -> Iterator[Found]:
    """A run of 5 s that stops once its median is known: whether it is within a percent of the truth then."""
    laws = {
        "independent, 10 %": lambda rng, count: 1 + 0.1 * rng.standard_normal(count),
        "correlated 0.9, 2 %": lambda rng, count: 1 + 0.02 * correlated(rng, count),
        "correlated 0.9, 5 %": lambda rng, count: 1 + 0.05 * correlated(rng, count),
        "heavy tails": NOISE["heavy tails"],
        "two speeds": two_speeds,
    }
    for name, draw in laws.items():
        for pass_s in (1e-3, 2e-2):
            rng = np.random.default_rng(SEED)
            count = round(timing.CAP_S / pass_s)
            row = Found("run, when it stops", name, f"passes of {units.seconds(pass_s)}", trials)
            held, warned, wrong = (np.zeros(trials, bool) for _ in range(3))
            known = 0
            for trial in range(trials):
                samples = draw(rng, count)
                looks, done, stopped = timing.Looks(), max(round(timing.LEAST_S / pass_s), 1), False
                while not stopped and done < count:
                    done = max(done, looks.next)
                    stopped = looks.see(samples[:done])
                looks.count += not stopped
                taken = samples[: min(done, count)]
                interval = timing.median_interval(taken, looks.count)
                warned[trial] = interval is None or bool(cautions.of_passes(taken))
                held[trial] = interval is not None and interval[0] <= 1 <= interval[1]
                known += stopped
                wrong[trial] = stopped and abs(np.median(taken) - 1) > timing.MEDIAN_WITHIN
            row.found = {"stops before 5 s": known / trials}
            yield _held(row, held, warned, wrong)


OFFS: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "absolute": lambda rng, line: 0.03 * np.median(line) * rng.standard_normal(len(line)),
    "relative": lambda rng, line: 0.03 * line * rng.standard_normal(len(line)),
    "mixed": lambda rng, line: np.hypot(0.01 * np.median(line), 0.02 * line)
    * rng.standard_normal(len(line)),
    "heavy tails": lambda rng, line: 0.02 * line * rng.standard_t(3, len(line)),
    "neighbours correlate 0.9": lambda rng, line: 0.03 * line * correlated(rng, len(line)),
}
DESIGNS = {"1-256:5": np.arange(1.0, 257, 5), "1, 2, 4 ... 256": 2.0 ** np.arange(9)}


def transfer_rows(trials: int) -> Iterator[Found]:
    """Straight lines and lines with a jump: breaks, and the intervals of the single line's coefficients."""
    intercept, slope = 2e-5, 4e-7
    for name, noise in OFFS.items():
        for sizes, batches in DESIGNS.items():
            rng = np.random.default_rng(SEED)
            line = intercept + slope * batches
            row = Found("transfer", name, f"{len(batches)} sizes, {sizes}", trials)
            held, warned, false = (np.zeros(trials, bool) for _ in range(3))
            found, at = [0, 0], [0, 0]
            middle = len(batches) // 2
            for trial in range(trials):
                off = noise(rng, line)
                pieces = regression.fit_pieces(batches, np.maximum(line + off, 1e-9))
                fitted = regression.fit_line(batches, np.maximum(line + off, 1e-9))
                low, high = fitted.slope_interval_s_per_image
                held[trial] = low <= slope <= high
                warned[trial] = bool(doubt_of(pieces, len(batches)))
                false[trial] = pieces.break_batch is not None
                for index, jump in enumerate((0.05, 0.2)):
                    times = line * np.where(np.arange(len(batches)) < middle, 1, 1 - jump)
                    broken_in_two = regression.fit_pieces(batches, np.maximum(times + off, 1e-9))
                    if broken_in_two.break_interval is not None:
                        found[index] += 1
                        low, high = broken_in_two.break_interval
                        at[index] += low <= batches[middle] <= high
            row.found = {
                "jump of 5 % found": found[0] / trials, "of 20 %": found[1] / trials,
                "break in its interval": at[1] / max(found[1], 1),
            }  # fmt: skip
            yield _held(row, held, warned, false)


def rank_rows(trials: int) -> Iterator[Found]:
    """Kernels that are equally fast, and one that is 20 % faster: their places."""
    for name in ("runs 3 % apart", "heavy tails from run to run"):
        for kernels in (2, 6):
            for rounds in (5, 12):
                rng = np.random.default_rng(SEED)
                row = Found("kernel rank", name, f"{kernels} kernels, {rounds} rounds", trials)
                false = found = 0
                for _ in range(trials):
                    totals = BETWEEN[name](rng, kernels * rounds).reshape(kernels, rounds)
                    false += len(set(rank.standings(totals))) > 1
                    totals[0] /= 1.2
                    standings = rank.standings(totals)
                    found += standings[0] == 1 and (standings[1:] > 1).all()
                row.false, row.found = false / trials, {"20 % faster found": found / trials}
                yield row


def infer_rows(trials: int) -> Iterator[Found]:
    """Shards one after another: the interval of the rate."""
    laws: dict[str, Draw] = {
        "independent": NOISE["independent"],
        **{
            name: NOISE[name]
            for name in ("lognormal, 20 %", "correlated 0.6, 20 %", "correlated 0.9")
        },
    }
    for name, draw in laws.items():
        for count in SIZES:
            rng = np.random.default_rng(SEED)
            row = Found("infer, its rate", name, f"{count:,} shards", trials)
            mean = math.exp(0.2**2 / 2) if "20 %" in name else math.exp(0.03**2 / 2)
            held, warned = np.zeros(trials, bool), np.zeros(trials, bool)
            for trial in range(trials):
                seconds = draw(rng, count)
                rate, paces = 100 * count / seconds.sum(), [(float(each), 100) for each in seconds]
                found = summary.rate_interval(rate, paces)
                warned[trial] = summary.rate_warning(rate, paces) is not None
                held[trial] = found is not None and found[0] <= 100 / mean <= found[1]
            yield _held(row, held, warned)


TOOLS: dict[str, Callable[[int], Iterator[Found]]] = {
    "compare": compare_rows, "noise": noise_rows, "layers": layer_rows, "stop": stop_rows,
    "transfer": transfer_rows, "rank": rank_rows, "infer": infer_rows,
}  # fmt: skip


def rows(trials: int, tools: list[str] | None = None) -> Iterator[Found]:
    """Yields the table's rows; ``tools``: some of :data:`TOOLS`, None for all."""
    for tool in tools or TOOLS:
        yield from TOOLS[tool](trials)


def tables(found: list[Found]) -> list[str]:
    """Returns a Markdown table for each tool."""
    lines = []
    for tool in dict.fromkeys(row.tool for row in found):
        chosen = [row for row in found if row.tool == tool]
        more = list(chosen[0].found)
        head = [
            "noise",
            "of",
            "false",
            "false without a warning",
            "interval holds",
            "warned",
            "misses without a warning",
            "holds, of those without a warning",
            *more,
        ]
        lines += [f"## {tool}", "", f"| {' | '.join(head)} |", f"|---{'|---:' * (len(head) - 1)}|"]
        for row in chosen:
            shares = [row.false, row.false_unwarned, row.held,
                      row.warned if row.held is not None else None, row.missed_unwarned,
                      row.held_unwarned, *(row.found[key] for key in more)]  # fmt: skip
            cells = [row.noise, row.samples, *(_share(share) for share in shares)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines


def _share(share: float | None) -> str:
    return units.UNKNOWN if share is None else f"{100 * share:.1f} %"


def page(document: dict[str, Any]) -> str:
    """Returns the page of a record."""
    where = document["environment"]
    found = [Found(**row) for row in document["rows"]]
    faults = [f"- {row.tool}, {row.noise}, {row.samples}: {fault}" for row in found
              for fault in broken(row)]  # fmt: skip
    return "\n".join(
        [
            "# What the measuring tools say, beside the truth",
            "",
            f"- Machine: {where['cpu']} (the draws are seeded: another gives the same)",
            *result_file.run_lines(document),
            f"- {document['trials']:,} trials a row. `false`: says what is not so. `warned`: says itself "
            "that an interval may be too narrow, or has none, which counts as one that does not hold.",
            f"- Promised, within chance: at most {_share(MOST_FALSE)} of all trials are false without a "
            f"warning, and intervals miss without one in at most {_share(1 - LEAST_HELD)}.",
            "",
            *(["Broken:", "", *faults] if faults else ["All rows keep it."]),
            "",
            *tables(found),
        ]
    )


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    parser = result_file.parser("truth", __doc__, "json", "markdown")
    parser.add_argument(
        "--trials", type=cli.whole_number(10, 1_000_000), default=TRIALS, metavar="N",
        help=f"of each row (default: {TRIALS:,})",
    )  # fmt: skip
    parser.add_argument(
        "--tool", choices=TOOLS, action="append", help="one of the tools; may be given again"
    )
    options: Namespace = parser.parse_args(arguments)
    where = environment.describe(CpuDevice())
    whole = result_file.ResultFile(
        "truth", options, arguments,
        environment={key: where[key] for key in ("cpu", "versions", "commit")},
        trials=options.trials, rows=[],
    )  # fmt: skip
    found = []
    for row in rows(options.trials, options.tool):
        found.append(row)
        faults = broken(row)
        print(
            f"{row.tool}, {row.noise}, {row.samples}: false {_share(row.false)}, holds {_share(row.held)}"
            f" (warned {_share(row.warned)}, else {_share(row.held_unwarned)})"
            + "".join(f", {name} {_share(share)}" for name, share in row.found.items())
            + "".join(f"; BROKEN: {fault}" for fault in faults),
            flush=True,
        )
        whole.document["rows"].append(asdict(row))
        whole.write(page)
    return cli.CHECK_FAILED if any(map(broken, found)) else cli.DONE


if __name__ == "__main__":
    sys.exit(main())
