"""Runs LoadGen's scenarios for models, numbers of threads and libraries, each cell in a process of its own.

    python -m benchmarks.loadgen_matrix --model resnet50.onnx --model mobilenet_v3_large.onnx \\
      --json loadgen.json --markdown loadgen.md

A cell is one run of ``cnn-engine loadgen``, and the libraries of a scenario run one after the other. What was
found is written after every cell; with ``--keep`` the next run leaves out the cells that are in ``--json``.
A library that is not installed has a row that says so, and no other is called faster than it.

On a machine with many cores ``--cpus 0,2,4-7`` runs cells side by side, each pinned to as many of these CPUs
as it has threads, the longest first. Name one CPU of each core; memory and the last-level cache are shared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from cnn_engine import cli
from cnn_engine.devices import threads
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.errors import expected
from cnn_engine.loadgen import rules
from cnn_engine.loadgen.command import SHARE
from cnn_engine.measure import environment
from cnn_engine.report import units

from . import result_file

#: Libraries that need nothing but the file.
CONTESTANTS = ("cnn_engine", "onnxruntime", "openvino")

#: Scenarios, the longest first: MultiStream's 662 queries of 8 images, then more than the time of Offline.
LONGEST = ("MultiStream", "Offline", "Server", "SingleStream")


#: What a row says that --limit has ended.
LATE = "--limit: not done within"


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser(
        "loadgen_matrix",
        __doc__,
        "json",
        "markdown",
        epilog="exit codes: 0 done; 1 a run is INVALID or has failed; 2 an option is at fault",
    )
    p.add_argument("--model", action="append", required=True, metavar="FILE.onnx")
    p.add_argument(
        "--scenario", nargs="+", choices=rules.SCENARIOS, default=list(rules.SCENARIOS),
        help="default: all four",
    )  # fmt: skip
    p.add_argument("--contestant", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    p.add_argument(
        "--threads", nargs="+", type=cli.whole_number(1, threads.MOST), default=[1, 2], metavar="N",
        help="default: 1 2",
    )  # fmt: skip
    p.add_argument(
        "--duration", type=cli.number(0.1, 86400), default=60.0, metavar="S",
        help="seconds of each run at least (default: 60)",
    )  # fmt: skip
    p.add_argument(
        "--latency", type=cli.number(0, 1e6), default=100.0, metavar="MS",
        help="bound of the 99th percentile in Server (default: 100; MLPerf's 15 are for accelerators)",
    )  # fmt: skip
    p.add_argument(
        "--keep", action="store_true",
        help="adds to what is in --json, without the cells that it has",
    )  # fmt: skip
    p.add_argument(
        "--cpus", type=cpus, metavar="LIST",
        help="runs cells side by side on these CPUs, such as 0,2,4-7 (default: one after another, on any)",
    )  # fmt: skip
    p.add_argument(
        "--limit", type=cli.number(0, 1e6), default=float("inf"), metavar="S",
        help="after so long runs are ended and no other is begun: rows say so, and --keep runs them again",
    )  # fmt: skip
    p.add_argument(
        "--logs", default="loadgen", metavar="FOLDER",
        help="LoadGen's logs, in NETWORK-THREADS/SCENARIO/LIBRARY (default: loadgen)",
    )  # fmt: skip
    return p


def cpus(text: str) -> list[int]:
    """Returns the CPUs of a list such as 0,2,4-7, those that this process may run on."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        number = cli.whole_number(0, 65535)
        found += range(number(first), number(last or first) + 1)
    missing = sorted({*found} - os.sched_getaffinity(0))
    if missing or len({*found}) != len(found):
        raise expected("--cpus", "CPUs of this process, each once", text)
    return found


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    found = result_file.ResultFile(
        "loadgen_matrix", options, arguments, environment=environment.describe(CpuDevice()),
        duration=options.duration, rows=[],
    )  # fmt: skip
    document = found.document
    found.begin(document["environment"]["commit"])
    if options.keep and options.json and Path(options.json).exists():
        found.take_in(options.json, "--keep", _key, _same)
    document["rows"] = [row for row in document["rows"] if LATE not in row.get("error", "")]
    there = {_key(row) for row in document["rows"]}
    wanted = product(options.model, options.threads, options.scenario, options.contestant)
    cells = [
        {
            "model": model, "network": Path(model).stem, "threads": count, "scenario": scenario,
            "library": library,
        }
        for model, count, scenario, library in wanted
    ]  # fmt: skip
    for row in _rows([cell for cell in cells if _key(cell) not in there], options):
        document["rows"].append(row)
        cli.show(_line(row))
        found.write(markdown)
    order = {_key(cell): number for number, cell in enumerate(cells)}
    document["rows"].sort(key=lambda row: order.get(_key(row), len(order)))
    found.write(markdown)
    return cli.DONE if all(_is_valid(row) for row in document["rows"]) else cli.CHECK_FAILED


def _rows(cells: list[dict[str, Any]], options: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of cells, one after another or, on ``--cpus``, side by side."""
    end = perf_counter() + options.limit
    if options.cpus is None:
        for cell in cells:
            yield _row(cell, None, end, options)
        return
    if (most := max(options.threads)) > len(options.cpus):
        raise expected("--cpus", f"{most} CPUs or more, as --threads has", len(options.cpus))
    waiting = sorted(
        cells,
        key=lambda cell: (
            LONGEST.index(cell["scenario"]), -Path(cell["model"]).stat().st_size, -cell["threads"]
        ),
    )  # fmt: skip
    free, running = list(options.cpus), dict[Future[dict[str, Any]], list[int]]()
    with ThreadPoolExecutor(len(free)) as pool:
        while waiting or running:
            for cell in [*waiting]:
                if (count := cell["threads"]) <= len(free):
                    own, free = free[:count], free[count:]
                    waiting.remove(cell)
                    running[pool.submit(_row, cell, own, end, options)] = own
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                free += running.pop(ended)
                yield ended.result()


def _key(row: Mapping[str, Any]) -> tuple:
    return row["network"], row["threads"], row["scenario"], row["library"]


def _same(document: Mapping[str, Any]) -> str:
    """Returns what the parts of one table have in common."""
    about = document["environment"]
    return f"commit {about['commit']} on {about['cpu']}, runs of {document['duration']:g} s"


def _row(
    cell: Mapping[str, Any], own: list[int] | None, end: float, options: Any
) -> dict[str, Any]:
    """Returns LoadGen's row of one cell, with ``error`` where there is none: why.

    Args:
        own: the CPUs that it may run on, or None: any.
        end: of all cells, by ``perf_counter``.
    """
    model, count = cell["model"], cell["threads"]
    logs = Path(options.logs) / f"{cell['network']}-{count}"
    command = [
        sys.executable, "-m", "cnn_engine.loadgen", f"--model={model}", f"--threads={count}",
        f"--scenario={cell['scenario']}", f"--contestant={cell['library']}",
        f"--duration={options.duration:g}", f"--latency={options.latency:g}", f"--output={logs}", "--json=-",
    ]  # fmt: skip
    about = {name: value for name, value in cell.items() if name != "model"}
    if own is not None:
        os.sched_setaffinity(0, own)  # of this thread alone, and of what it starts
        about["cpus"] = own
    left = end - perf_counter()
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=min(max(left, 0.001), 1e6)
        )
    except subprocess.TimeoutExpired:
        return about | {"error": f"{LATE} {options.limit:g} s"}
    if ended.returncode in (cli.DONE, cli.CHECK_FAILED):
        (row,) = json.loads(ended.stdout)["runs"]
        return about | row
    said = ended.stderr.strip().splitlines() or [f"ended with {ended.returncode}"]
    return about | {"error": said[-1].removeprefix("error: ")}


def _is_valid(row: Mapping[str, Any]) -> bool:
    return row.get("validity") == "VALID"


def result(row: Mapping[str, Any]) -> float | None:
    """Returns what a scenario is judged by: seconds of its percentile, or images per second."""
    scenario = row["scenario"]
    if not _is_valid(row):
        return None
    if scenario in ("SingleStream", "MultiStream"):
        return row[f"p{100 * rules.RULES[scenario].percentile:.0f}_s"]
    return row.get("completed_images_per_s") or row["images_per_s"]


def _line(row: Mapping[str, Any]) -> str:
    found = result(row)
    name = f"{row['network']}, {row['threads']} threads, {row['scenario']}, {row['library']}"
    if found is None:
        return f"{name}: {row.get('error') or row.get('validity')}"
    return f"{name}: {_shown(row, found)}"


def _shown(row: Mapping[str, Any], found: float) -> str:
    is_time = row["scenario"] in ("SingleStream", "MultiStream")
    return units.seconds(found) if is_time else f"{found:,.1f} images/s"


def markdown(document: dict[str, Any]) -> str:
    """Returns the page of a document."""
    about = document["environment"]
    lines = [
        "# LoadGen's scenarios", "", f"- Machine: {about['cpu']}",
        *(f"- Command: `{ran['command']}`, commit {ran['commit'] or 'not known'}, {ran['started']}"
          for ran in document["commands"]),
        f"- {document['duration']:g} s a run, and not MLPerf's {rules.OFFICIAL_S} s: not official.",
        *(["- Cells ran side by side, each on CPUs of its own; memory and caches are shared."]
          if any("cpus" in row for row in document["rows"]) else []),
        "- Result: 90th percentile of SingleStream, 99th of MultiStream, images/s of Server and Offline.",
        f"- Server asks each library at {SHARE:g} of its own rate: these images/s are no maximum.",
        "",
        "| network | threads | scenario | library | verdict | p50 | p90 | p99 | result |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in document["rows"]:
        times = [
            units.seconds(row[key]) if row.get(key) is not None else ""
            for key in ("p50_s", "p90_s", "p99_s")
        ]
        found = result(row)
        cells = [
            row["network"], str(row["threads"]), row["scenario"],
            f"{row.get('contestant', row['library'])} {row.get('version', '')}".strip(),
            row.get("validity") or f"did not run: {row['error']}", *times,
            "" if found is None else _shown(row, found),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
