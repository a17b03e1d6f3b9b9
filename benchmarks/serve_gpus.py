"""``serve`` with an instance a GPU under LoadGen's Server scenario, at one bound of latency.

    python -m benchmarks.serve_gpus --model resnet50.onnx --devices cuda:0 cuda:0,cuda:1 --json gpus.json

Each server is asked at rising rates by several processes of ``cnn-engine loadgen`` at once, each with its
share of the rate: one process of clients would bind sooner than the server. A rate is kept where LoadGen
calls every process's run VALID: its 99th percentile is within ``--latency``. Rates rise by half until one is
not kept, and then halve what is left between the two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from cnn_engine import cli, devices
from cnn_engine.errors import CnnEngineError
from cnn_engine.measure import environment
from cnn_engine.report import units

from . import result_file
from .serve_process import Server

#: How much faster the next rate is, as long as rates are kept.
RISE = 1.5

#: Queries of a process at least: with fewer LoadGen cannot tell that 99 % are within the bound.
QUERIES = 700


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser(
        "serve_gpus",
        __doc__,
        "json",
        "markdown",
        epilog="exit codes: 0 done; 1 a server kept no rate; 2 an option is at fault",
    )
    p.add_argument("--model", required=True, metavar="FILE.onnx")
    p.add_argument(
        "--devices", nargs="+", default=["cuda:0", "cuda:0,cuda:1"], metavar="DEVICE,...",
        help="of a server each, as serve --device has them (default: cuda:0 cuda:0,cuda:1)",
    )  # fmt: skip
    p.add_argument("--dtype", default="float32", help="default: float32")
    p.add_argument(
        "--latency", type=cli.number(0, 1e6), default=15.0, metavar="MS",
        help="bound of the 99th percentile (default: 15, MLPerf's for ResNet-50)",
    )  # fmt: skip
    p.add_argument(
        "--first", type=cli.number(0.1, 1e6), default=200.0, metavar="QPS",
        help="the lowest rate (default: 200)",
    )  # fmt: skip
    p.add_argument(
        "--halvings", type=cli.whole_number(0, 20), default=2, metavar="N", help="default: 2"
    )
    p.add_argument(
        "--processes", type=cli.whole_number(1, 64), default=4, metavar="N",
        help="of LoadGen at once (default: 4)",
    )  # fmt: skip
    p.add_argument(
        "--clients", type=cli.whole_number(1, 4096), default=32, metavar="N",
        help="connections of a process (default: 32)",
    )  # fmt: skip
    p.add_argument(
        "--duration", type=cli.number(0.1, 3600), default=5.0, metavar="S",
        help="of a rate at least (default: 5)",
    )  # fmt: skip
    p.add_argument(
        "--seconds", type=cli.number(1, 86400), default=600.0, metavar="S",
        help="after which a server is asked no other rate (default: 600)",
    )  # fmt: skip
    p.add_argument(
        "--server-cpus", type=cli.whole_number(1, 4096), metavar="N",
        help="the first N CPUs are the server's, others the clients' (default: all are both's)",
    )  # fmt: skip
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    about = environment.describe(devices.select(options.devices[0].split(",")[0]))
    about.pop("host", None)
    found = result_file.ResultFile(
        "serve_gpus", options, arguments, environment=about, latency_ms=options.latency, rows=[],
    )  # fmt: skip
    for name in options.devices:
        row: dict[str, Any] = {"devices": name, "rates": []}
        found.document["rows"].append(row)
        with tempfile.TemporaryDirectory() as folder, _on_cpus(options.server_cpus, first=True):
            server = Server(options.model, f"--device={name}", f"--dtype={options.dtype}")
            try:
                with _on_cpus(options.server_cpus, first=False):
                    _search(options, server, Path(folder), row)
            finally:
                server.end()
        found.write(markdown)
    found.write(markdown)
    cli.show("\n".join(table(found.document)))
    return cli.DONE if all(kept(row) for row in found.document["rows"]) else cli.CHECK_FAILED


@contextmanager
def _on_cpus(count: int | None, first: bool):
    """Lets processes that are started meanwhile have the first ``count`` CPUs, or all others."""
    before = os.sched_getaffinity(0)
    everything = sorted(_granted)
    if count is not None and count < len(everything):
        os.sched_setaffinity(0, everything[:count] if first else everything[count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_granted = os.sched_getaffinity(0)


def _search(options: Any, server: Server, folder: Path, row: dict[str, Any]) -> None:
    """Asks at one rate after another, and adds what came to ``row``."""
    end = monotonic() + options.seconds
    _ask(options, server, folder / "first", options.first)  # plans are made, nothing counts
    good, bad, halved = 0.0, None, 0
    while not row["rates"] or (monotonic() < end and (bad is None or halved < options.halvings)):
        rate = options.first if not good else good * RISE if bad is None else (good + bad) / 2
        halved += bad is not None
        one = _ask(options, server, folder / f"{rate:g}", rate)
        row["rates"].append(one)
        cli.show(f"{row['devices']}, {rate:.0f} queries/s: {_shown(one)}")
        if one["valid"]:
            good = rate
        else:
            bad = rate
            if not good:
                return


def _ask(options: Any, server: Server, folder: Path, rate: float) -> dict[str, Any]:
    """Asks at ``rate`` queries/s in all; returns images/s of all processes and the longest percentiles."""
    address = f"127.0.0.1:{server.grpc_port}/{Path(options.model).stem}"
    duration = max(options.duration, QUERIES * options.processes / rate)
    words = [
        sys.executable, "-m", "cnn_engine.loadgen", f"--model={options.model}", "--scenario=Server",
        "--contestant=server", f"--address={address}", f"--clients={options.clients}", "--batch=1",
        f"--target-qps={rate / options.processes:g}", f"--latency={options.latency:g}",
        f"--duration={duration:g}", "--images=16", "--json=-",
    ]  # fmt: skip
    asking = [
        subprocess.Popen(
            [*words, f"--output={folder / str(number)}"], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for number in range(options.processes)
    ]  # fmt: skip
    runs = []
    for process in asking:
        said, error = process.communicate()
        if process.returncode not in (cli.DONE, cli.CHECK_FAILED):
            last = (error.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise CnnEngineError(f"loadgen: expected a run, found: {last}")
        runs += json.loads(said)["runs"]
    return {
        "target_qps": rate,
        "valid": all(run.get("validity") == "VALID" for run in runs),
        "images_per_s": sum(run.get("completed_images_per_s") or 0.0 for run in runs),
        **{key: max(run.get(key) or 0.0 for run in runs) for key in ("p50_s", "p99_s")},
        "runs": runs,
    }


def kept(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the fastest rate of a server that was kept; None: there is none."""
    good = [one for one in row["rates"] if one["valid"]]
    return max(good, key=lambda one: one["images_per_s"], default=None)


def _shown(one: Mapping[str, Any]) -> str:
    verdict = "VALID" if one["valid"] else "INVALID"
    return (
        f"{verdict}, {one['images_per_s']:.0f} images/s, p50 {units.seconds(one['p50_s'])}, "
        f"p99 {units.seconds(one['p99_s'])}"
    )


def table(document: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the table."""
    lines = [
        "| devices | images/s | of the first | p50 | p99 | lowest rate that was not kept, queries/s |",
        "|---|---|---|---|---|---|",
    ]
    base = kept(document["rows"][0])
    for row in document["rows"]:
        best = kept(row)
        bad = min((one["target_qps"] for one in row["rates"] if not one["valid"]), default=None)
        cells = [row["devices"], "none", "", "", ""]
        if best is not None:
            ratio = f"{best['images_per_s'] / base['images_per_s']:.2f}" if base else ""
            times = [units.seconds(best[key]) for key in ("p50_s", "p99_s")]
            cells = [row["devices"], f"{best['images_per_s']:.0f}", ratio, *times]
        lines.append(f"| {' | '.join(cells)} | {'' if bad is None else f'{bad:.0f}'} |")
    return lines


def markdown(document: dict[str, Any]) -> str:
    """Returns the page of a document."""
    about = document["environment"]
    lines = [
        "# serve with an instance a GPU",
        "",
        f"- Machine: {about.get('gpu') or 'no GPU'}, {about['cpu']}",
        *result_file.run_lines(document),
        f"- Bound of the 99th percentile: {document['latency_ms']:g} ms; percentiles are the longest of all "
        "processes of LoadGen.",
        "",
        *table(document),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
