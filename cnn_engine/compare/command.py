"""``cnn-engine compare``: results of ``run --json`` against the first of them, with verdicts."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shlex
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from .. import cli, report
from ..errors import InputError, expected
from ..io.files import MOST_JSON_BYTES, describe_os_error, write_text
from ..measure import statistics
from ..measure.result import Result
from ..measure.statistics import Estimate
from ..report import layout, plot, units
from . import checks, comparison, verdicts
from .comparison import CANNOT_TELL, COPY, LAYER, SUM, Comparison, Row

SCHEMA = 1

#: What stands before the options in the command of a run, and options that name files to be written.
RUNS = ("cnn_engine.run", "run")
OUTPUTS = ("--json", "--csv", "--trace", "--html", "--plot", "--save-probabilities")
LETTERS = string.ascii_uppercase
MOST_NAMES = 5  # that the report names in a row: files of JSON and CSV have all

#: Column of ``--csv`` -> its meaning.
COLUMNS = {
    "baseline": "file of the baseline",
    "other": "file that is compared with it",
    "section": "`pass`, `throughput`, `layer`, `copy` or `sum`",
    "name": "such as `p50`, `conv1` or `images h2d`",
    "unit": "`s` or `images/s`",
    "baseline_value": "value of the baseline",
    "other_value": "value of the other file",
    "ratio": "`other_value / baseline_value`",
    "ratio_low": "lower end of the ratio's 95 % interval",
    "ratio_high": "upper end of the ratio's 95 % interval",
    "noise": "how far runs of the baseline differ, as a ratio less 1",
    "verdict": "`faster`, `slower`, `same` or `cannot tell`",
    "reason": "why it cannot be told",
    "baseline_samples": "samples of the baseline",
    "baseline_independent": "independent samples that would know as much",
    "other_samples": "samples of the other file",
    "other_independent": "independent samples that would know as much",
}


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine compare",
        description="Compares results that `cnn-engine run --json` wrote with the first of them: "
        "whole passes, throughput, every layer and every copy, as ratios with 95 % intervals from the raw "
        "samples. Faster or slower: the whole interval lies beyond the threshold; same: within it; else "
        "cannot tell.",
        epilog="exit codes: 0 done; 1 a regression, with --fail-on or --fail-on-layers; 2 the input is at "
        "fault, or --fail-on cannot judge by it; 130 interrupted",
    )
    p.add_argument(
        "baseline", metavar="A.json", help="what the others are compared with; - for standard input"
    )
    p.add_argument(
        "others", metavar="B.json", nargs="*", help="one result or more; - for standard input"
    )
    p.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="FILE",
        help="run A.json's command once more with a kernel of your own, as another result: my.cu, or "
        "conv2:my.cu for one node; may be given again for more results",
    )
    p.add_argument(
        "--tune", action="store_true",
        help="run A.json's command once more with --tune, as another result",
    )  # fmt: skip
    p.add_argument(
        "--threshold",
        type=fraction(1),
        default=comparison.THRESHOLD,
        metavar="SHARE",
        help="the smallest difference that counts, such as 1%% or 0.01 (default: "
        f"{100 * comparison.THRESHOLD:g}%%)",
    )
    p.add_argument(
        "--noise",
        action="append",
        default=[],
        metavar="A2.json",
        help="another run of A.json; four and more of them let runs be judged by how runs differ, and layers "
        "and copies be judged at all",
    )
    p.add_argument(
        "--fail-on",
        type=fraction(100),
        metavar="SHARE",
        help="exit with 1 if the median pass takes more than so much longer, such as 5%% or 0.05, and the "
        "interval of its ratio lies above 1; with 0 if the whole interval is within; else with 2",
    )
    p.add_argument(
        "--fail-on-layers",
        type=fraction(100),
        metavar="SHARE",
        help="the same for each layer and copy that both results have; needs --noise",
    )
    for option, what in (
        ("json", "the comparison as JSON"),
        ("csv", "one row for each time and file"),
        ("html", "the results side by side as one page"),
    ):
        p.add_argument(f"--{option}", metavar="PATH", help=f"write {what}; - for standard output")
    p.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw the ratios and their intervals as a picture (.png, .svg or .pdf); needs matplotlib",
    )
    p.add_argument("--quiet", action="store_true", help="print no report")
    return p


def fraction(below: float):
    """Returns a converter for argparse: ``5%`` or ``0.05``, above 0 and below ``below``.

    A bare number of 1 and more is refused: 5 may mean 5 % or five times as long.
    """

    def convert(found: str) -> float:
        number, percent, rest = found.strip().partition("%")
        try:
            value = float(number) / (100 if percent else 1)
        except ValueError:
            value = math.nan
        if rest or not 0 < value < (below if percent else 1):
            raise argparse.ArgumentTypeError(
                f"expected a share above 0 such as 5% or 0.05, below {100 * below:g}%, found {found!r}"
            )
        return value

    return convert


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    paths = [options.baseline, *options.others, *options.noise]
    outputs = {name: getattr(options, name) for name in ("json", "csv", "html")}
    plot.check("--plot", options.plot)
    _check_paths(paths, {**outputs, "plot": options.plot})
    if not (options.others or options.kernel or options.tune):
        raise expected("B.json", "a result to compare with, --kernel or --tune", "none")

    names = ["standard input" if path == "-" else path for path in paths]
    loaded = [_load(path, name) for path, name in zip(paths, names, strict=True)]
    count = 1 + len(options.others)
    more = [["--kernel", kernel] for kernel in options.kernel] + [["--tune"]] * options.tune
    loaded[count:count] = [_again(loaded[0], words) for words in more]
    names[count:count] = [words[-1] for words in more]
    count += len(more)
    results, repeats = loaded[:count], loaded[count:]
    for name, repeat in zip(names[count:], repeats, strict=True):
        checks.check_repeat((names[0], f"--noise: {name}"), results[0], repeat)
    found = [
        comparison.compare(results[0], other, (names[0], name), options.threshold, repeats)
        for other, name in zip(results[1:], names[1:count], strict=True)
    ]
    documents = {
        "json": lambda: to_json(found),
        "csv": lambda: to_csv(found),
        "html": lambda: report.html.render(results, found),
    }
    texts = {name: documents[name]() for name, path in outputs.items() if path is not None}
    if not options.quiet and "-" not in outputs.values():
        cli.show(render(found, results))
    for name, document in texts.items():
        write_text(outputs[name], document)
    if options.plot is not None:
        plot.draw_comparisons(results, found, options.plot)
    return _gate(found, options.fail_on, options.fail_on_layers)


def _again(baseline: Result, more: list[str]) -> Result:
    """Returns the result of the baseline's command with an option more, such as a kernel of the user's own.

    Raises:
        InputError: the command was no run, or fails.
    """
    said = " ".join(more)
    try:
        words = shlex.split(baseline.command)
    except ValueError:  # a quotation without an end, in a document that was edited
        words = []
    at = next((i for i, word in enumerate(words) if word in RUNS or word.endswith("/run.py")), None)
    if at is None:
        raise expected(more[0], "a baseline that cnn-engine run wrote", baseline.command)
    kept, skip = [], False
    for word in words[at + 1 :]:
        if not skip and word.split("=")[0] not in OUTPUTS:
            kept.append(word)
        skip = word in OUTPUTS and not skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-m", "cnn_engine.run", *kept, *more, "--quiet", "--json", str(path)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode or not path.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise InputError(f"{said}: {last.removeprefix('error: ')}")
        return _load(str(path), said)


def _check_paths(paths: list[str], outputs: dict[str, str | None]) -> None:
    """Refuses what cannot be read or written before any work is done."""
    if len(paths) > len(LETTERS):
        raise expected("A.json B.json ...", f"at most {len(LETTERS)} files", len(paths))
    if paths.count("-") > 1:
        raise InputError("standard input: expected one file that is -, found several")
    cli.check_outputs({f"--{name}": path for name, path in outputs.items()}, paths)


def _load(path: str, name: str) -> Result:
    result = _read_standard_input(name) if path == "-" else report.json.load(path)
    comparison.check_comparable(name, result)
    return result


def _read_standard_input(name: str) -> Result:
    if sys.stdin is None:
        raise expected(name, "the JSON document of a run", "it closed")
    try:
        content = getattr(sys.stdin, "buffer", sys.stdin).read(MOST_JSON_BYTES + 1)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {describe_os_error(error)}") from error
    if len(content) > MOST_JSON_BYTES:
        raise expected(name, f"at most {MOST_JSON_BYTES} bytes", "more")
    return report.json.loads(content, name)


def _gate(found: Sequence[Comparison], limit: float | None, layer_limit: float | None) -> int:
    """Says what is a regression; returns the exit code.

    Raises:
        InputError: nothing is a regression, but not everything is shown to be none.
    """
    regressions: list[str] = []
    untold: list[InputError] = []
    for option, most in (("--fail-on", limit), ("--fail-on-layers", layer_limit)):
        for compared in found if most is not None else ():
            whole = [] if compared.whole is None else [compared.whole]
            rows = whole if option == "--fail-on" else compared.steps
            regressions += [
                f"{compared.other}: {row.title}: expected at most {units.number(1 + most)} x the time in "
                f"{compared.baseline}, found {units.number(row.ratio.value)} "
                f"(95 % interval {comparison.interval(row.ratio)})"
                for row in rows
                if row.exceeds(most)
            ]
            if not rows or not all(row.within(most) or row.exceeds(most) for row in rows):
                untold.append(_untold(compared, option, rows, most))
    for regression in regressions:
        cli.print_error(regression)
    if untold and not regressions:
        raise untold[0]
    return cli.CHECK_FAILED if regressions else cli.DONE


def _untold(compared: Comparison, option: str, rows: Sequence[Row], most: float) -> InputError:
    """Returns why a gate cannot judge ``rows``."""
    left = [row for row in rows if not row.within(most) and not row.exceeds(most)]
    name = f"{compared.other}: {option}"
    samples = min((row.ratio.samples if row.ratio else 0 for row in left), default=0)
    if not rows or any(row.ratio is None or not row.ratio.known for row in left):
        return expected(
            name,
            f"at least {statistics.FEWEST} samples in it and in {compared.baseline}",
            samples,
        )
    if any(row.judged == verdicts.ANYWHERE for row in left):
        return expected(
            name,
            f"{comparison.FEWEST_RUNS} runs of {compared.baseline} to judge layers by, further ones with "
            "--noise",
            compared.runs,
        )
    short = next((row for row in left if row.short and row.ratio.high <= 1 + most), None)
    if short is not None:
        return expected(
            f"{name}: {short.title}",
            f"{comparison.SAME_SAMPLES} passes and {units.seconds(comparison.SAME_S)} of them at least, to "
            "pass; measure longer, such as with --duration 5",
            short.short,
        )
    worst = max(left, key=lambda row: row.ratio.high)
    return expected(
        f"{name}: {worst.title}",
        f"an interval up to {units.number(1 + most)} x the time in {compared.baseline}, to pass; measure "
        "longer, such as with --duration 5",
        comparison.interval(worst.ratio)
        + (f", and {len(left) - 1} more that cannot be told" if len(left) > 1 else ""),
    )


def render(found: Sequence[Comparison], results: Sequence[Result]) -> str:
    """Returns the report on comparisons of ``results[1:]`` with ``results[0]``, 100 columns wide."""
    names = [found[0].baseline, *(compared.other for compared in found)]
    parts = [
        layout.fields(
            [
                (f"{letter}{' (baseline)' if index == 0 else ''}", _what(name, result))
                for index, (letter, name, result) in enumerate(
                    zip(LETTERS, names, results, strict=False)
                )
            ]
        )
    ]
    for letter, compared in zip(LETTERS[1:], found, strict=False):
        parts += _compared(compared, letter)
    parts.append(
        [f"Summary: {compared.summary(LETTERS[i])}" for i, compared in enumerate(found, 1)]
    )
    return "\n\n".join("\n".join(part) for part in parts if part)


def _what(name: str, result: Result) -> str:
    """Returns a file and what it is a result of."""
    words = [
        result.network, result.variant + (" with reduction" if result.reduction else ""), result.dtype,
        result.data_mode, f"on {result.device}", f"batch {units.count(result.batch)}",
    ]  # fmt: skip
    return units.printable(f"{name}: {', '.join(words)}")


def _compared(compared: Comparison, letter: str) -> list[list[str]]:
    """Returns the parts of the report on one comparison."""
    differs = [f"{what}: {first} -> {second}" for what, first, second in compared.differences]
    parts = [
        _labelled("Differs", differs or ["nothing that was recorded"]),
        _labelled("Warning", compared.warnings),
    ]
    rows = []
    for title, sections in (
        ("Whole passes", (comparison.PASS, comparison.THROUGHPUT)),
        ("Layers", (LAYER,)),
        ("Copies", (COPY,)),
        ("Layers and copies", (SUM,)),
    ):
        chosen = [row for row in compared.rows if row.section in sections]
        if chosen:
            rows += [[""]] if rows else []
            rows += [[title], *(_cells(row, compared) for row in chosen)]
    header = ["", "A", letter, f"{letter}/A", "95 % interval", "verdict"]
    if compared.noise_known:
        header.insert(5, "noise")
    width = len(header)
    parts.append(layout.table(header, [row + [""] * (width - len(row)) for row in rows]))
    only = [
        (f"Only in {'A' if name == compared.baseline else letter}", units.printable(what))
        for _, what, name in compared.only
    ]
    untold = [
        (row.reason, units.printable(row.title))
        for row in compared.rows
        if row.verdict == CANNOT_TELL
    ]
    parts.append(layout.fields(_grouped(only)))
    parts.append(_labelled("Cannot tell", [f"{a}: {b}" for a, b in _grouped(untold)]))
    return parts


def _labelled(label: str, values: Sequence[str]) -> list[str]:
    """Returns lines of ``values``, the first of them after ``label``."""
    return layout.fields(
        [(label if index == 0 else "", units.printable(v)) for index, v in enumerate(values)]
    )


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for label, value in pairs:
        groups.setdefault(label, []).append(value)
    return [(label, _some(values)) for label, values in groups.items()]


def _some(names: Sequence[str]) -> str:
    """Returns names with commas between them: of many the first ones, and how many more there are."""
    if len(names) <= MOST_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} more"


def _cells(row: Row, compared: Comparison) -> list[str]:
    an_image = row.section == comparison.PASS and compared.per == "image"
    cells = [units.printable(f"{row.title}, per image" if an_image else row.title)]
    for estimate in (row.baseline, row.other):
        value = None if math.isnan(estimate.value) else estimate.value
        cells.append(
            units.seconds(value) if row.unit == "s" else f"{units.number(value)} {row.unit}"
        )
    cells += [
        units.number(None if row.ratio is None else row.ratio.value),
        comparison.interval(row.ratio),
    ]
    if compared.noise_known:
        cells.append(units.percent(row.noise))
    return [*cells, row.verdict]


def to_json(found: Sequence[Comparison]) -> str:
    """Returns the comparisons as a JSON document; unknown values are null."""
    document = {
        "schema": SCHEMA,
        "kind": "comparison",
        "baseline": found[0].baseline,
        "confidence": statistics.CONFIDENCE,
        "threshold": found[0].threshold,
        "comparisons": [
            {
                "other": compared.other,
                "per": compared.per,
                "runs": compared.runs,
                "verdict": CANNOT_TELL if compared.whole is None else compared.whole.verdict,
                "differences": [
                    {"what": what, "baseline": first, "other": second}
                    for what, first, second in compared.differences
                ],
                "warnings": compared.warnings,
                "rows": [asdict(row) for row in compared.rows],
                "only": [
                    {"section": section, "name": name, "file": file}
                    for section, name, file in compared.only
                ],
            }
            for compared in found
        ],
    }
    return json.dumps(report.json.finite(document), indent=2, allow_nan=False) + "\n"


def to_csv(found: Sequence[Comparison]) -> str:
    """Returns one row for each time of each comparison, with the columns :data:`COLUMNS` (RFC 4180)."""
    document = io.StringIO()
    writer = csv.DictWriter(document, COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    for compared in found:
        for row in compared.rows:
            ratio = row.ratio or Estimate(math.nan)
            cells = {
                "baseline": compared.baseline, "other": compared.other, "section": row.section,
                "name": row.name, "unit": row.unit, "baseline_value": row.baseline.value,
                "other_value": row.other.value, "ratio": ratio.value, "ratio_low": ratio.low,
                "ratio_high": ratio.high, "noise": row.noise, "verdict": row.verdict, "reason": row.reason,
                "baseline_samples": row.baseline.samples,
                "baseline_independent": row.baseline.independent, "other_samples": row.other.samples,
                "other_independent": row.other.independent,
            }  # fmt: skip
            writer.writerow({key: report.csv.cell(value) for key, value in cells.items()})
    return document.getvalue()


if __name__ == "__main__":
    sys.exit(main())
