"""``cnn-engine loadgen``: the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from .. import cli, shared_options
from ..devices import cpu, threads
from ..errors import UnsupportedError, expected
from ..graph.model import Model
from ..io.files import write_text
from ..kernels import select
from ..measure import environment
from ..report import units
from . import contestants, harness, logs, rules

#: Images of --data synthetic.
IMAGES = 128

#: Queries per second of Server where none are asked for: this share of what one image at a time allows.
SHARE = 0.5


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine loadgen",
        description="Measures a network with LoadGen, the load generator of MLPerf Inference: it issues the "
        "queries, keeps the times and judges the run. Other libraries run the same file in the same process. "
        "LoadGen's own logs are kept.",
        epilog="exit codes: 0 done; 1 LoadGen found a run INVALID; 2 an option or a file is at fault",
    )
    shared_options.add_network(p)
    shared_options.add_images(p)
    p.add_argument(
        "--data",
        default="auto",
        metavar="PATH",
        help="images (default: random ones, or the network's)",
    )
    p.add_argument(
        "--images", type=cli.whole_number(1, rules.HELD), metavar="N",
        help=f"of the data (default: all up to {rules.HELD}; {IMAGES} where they are random)",
    )  # fmt: skip
    p.add_argument(
        "--scenario", action="append", choices=rules.SCENARIOS,
        help="SingleStream: one image after another; MultiStream: eight at a time; Server: at random times "
        "under a bound on latency; Offline: all at once. Repeated for more (default: SingleStream)",
    )  # fmt: skip
    p.add_argument(
        "--mode", choices=("performance", "accuracy"), default="performance",
        help="accuracy asks for every image once, and counts what is right",
    )  # fmt: skip
    p.add_argument(
        "--contestant", action="append", choices=list(contestants.MAKERS),
        help="who answers; repeated for more (default: cnn_engine)",
    )  # fmt: skip
    p.add_argument(
        "--torch-model", metavar="MODULE:CALLABLE",
        help="what torch runs, with random weights, such as torchvision.models:resnet50",
    )  # fmt: skip
    p.add_argument(
        "--address",
        metavar="HOST:PORT/MODEL",
        help="what server asks: gRPC of cnn-engine serve, or of Triton",
    )
    p.add_argument(
        "--clients", type=cli.whole_number(1, 4096), default=1, metavar="N",
        help="connections to the server, each with one request under way, in Server (default: 1)",
    )  # fmt: skip
    length = p.add_mutually_exclusive_group()
    length.add_argument(
        "--duration", type=cli.number(0.1, 86400), default=60.0, metavar="S",
        help="seconds of queries at least (default: 60; the report says that it is not official)",
    )  # fmt: skip
    length.add_argument(
        "--official",
        action="store_true",
        help=f"the rules' {rules.OFFICIAL_S} s and counts of images",
    )
    p.add_argument(
        "--batch", type=cli.whole_number(1, 4096), default=32, metavar="N",
        help="images of a pass at most, in Server and Offline (default: 32)",
    )  # fmt: skip
    p.add_argument(
        "--target-qps", type=cli.number(0, 1e9), metavar="N",
        help=f"queries per second in Server (default: {SHARE:g} of what one image at a time allows)",
    )  # fmt: skip
    p.add_argument(
        "--latency", type=cli.number(0, 1e6), default=15.0, metavar="MS",
        help="bound of the 99th percentile in Server (default: 15, ResNet-50's)",
    )  # fmt: skip
    p.add_argument("--device", default="cpu", help="of cnn_engine: cpu (default), cuda, cuda:N")
    p.add_argument(
        "--dtype",
        default="float32",
        help=f"of cnn_engine: one of {', '.join(select.DTYPES)} (default: float32)",
    )
    p.add_argument(
        "--threads", type=cli.whole_number(1, threads.MOST),
        help="of every contestant's CPU work (default: the CPUs granted)",
    )  # fmt: skip
    p.add_argument(
        "--output", default="loadgen", metavar="FOLDER",
        help="LoadGen's logs, in SCENARIO/CONTESTANT (default: loadgen)",
    )  # fmt: skip
    p.add_argument(
        "--json", metavar="PATH", help="write the results as JSON; - for standard output"
    )
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    options.threads = threads.check(options.threads, "--threads")
    options.scenario = list(dict.fromkeys(options.scenario or ["SingleStream"]))
    options.contestant = list(dict.fromkeys(options.contestant or ["cnn_engine"]))
    cli.check_outputs({"--json": options.json}, shared_options.files_read(options))
    purpose, extra = "that issues the queries", "cnn-engine[loadgen]"
    loadgen = cli.need("loadgen", "mlperf_loadgen", "mlcommons-loadgen", purpose, extra)
    run = Run(options, loadgen)
    try:
        for scenario in options.scenario:
            for name in options.contestant:
                run.test(scenario, name)
    except KeyboardInterrupt:
        run.write()
        cli.print_error("what was measured is written", "interrupted")
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(cli.INTERRUPTED)  # LoadGen cannot be stopped, and its thread would outlive Python
    finally:
        run.close()
    run.write()
    valid = all(row["validity"] == "VALID" for row in run.rows if row["mode"] == "performance")
    return cli.DONE if valid else cli.CHECK_FAILED


class Run:
    """The tests of one command.

    Attributes:
        rows: what each test found, as JSON has it.
    """

    def __init__(self, options: argparse.Namespace, loadgen: Any) -> None:
        self._options, self._loadgen = options, loadgen
        found = shared_options.workload_of(options)
        self._network = found.network
        network = self._network
        is_model = isinstance(network, Model)
        if is_model and (reason := network.why_not_images):
            raise UnsupportedError(f"--model: {network.name}: {reason}")
        #: Images of every pass, where the file is for so many.
        self._only = network.batch if is_model and not network.any_batch else None
        random = options.data == "synthetic" or (options.data == "auto" and options.model)
        count = options.images or (IMAGES if random else None)
        dataset = shared_options.dataset_of(options, found, count)
        self._images = np.ascontiguousarray(dataset.images[: rules.HELD])
        self._labels = None if dataset.labels is None else np.asarray(dataset.labels)[: rules.HELD]
        self._shows = not options.quiet and options.json != "-"
        if self._only is not None and self._only > 1:
            raise expected("--model", "a network for any number of images, or one", self._only)
        self._contestants: dict[str, contestants.Contestant] = {}
        self._held: dict[str, np.ndarray] = {}
        source = options.model or found
        for name in options.contestant:
            self._contestants[name] = contestants.MAKERS[name](source, options)
        self._result = {
            "schema": 1, "command": "loadgen", "network": found.name, "dataset": dataset.name,
            "images": len(self._images), "device": options.device, "dtype": options.dtype,
            "threads": options.threads, "official": options.official,
            "environment": environment.describe(cpu.CpuDevice()),
        }  # fmt: skip
        self.rows: list[dict[str, Any]] = []
        if self._shows:
            official = (
                ""
                if options.official
                else f"; not official: {options.duration:g} s, not {rules.OFFICIAL_S}"
            )
            cli.show(
                f"LoadGen: {found.name}, {units.counted(len(self._images), 'image')}, "
                f"{units.counted(options.threads, 'thread')}{official}"
            )
            if options.mode == "performance":
                cli.show(_line("scenario", "library", "verdict", "p50", "p90", "p99", "images/s"))

    def test(self, scenario: str, name: str) -> None:
        """Runs one scenario of one contestant, and shows its row."""
        options, contestant = self._options, self._contestants[name]
        images = self._images_of(name)
        rule = rules.RULES[scenario]
        batch = {"SingleStream": 1, "MultiStream": rule.samples}.get(scenario, options.batch)
        batch = min(batch, self._only or batch, len(images))
        rate = self._rate(contestant.run, images[: 1 if scenario == "Server" else batch])
        accuracy = options.mode == "accuracy"
        duration = rules.OFFICIAL_S if options.official else options.duration
        target = options.target_qps or SHARE * rate
        settings = rules.settings(
            self._loadgen, scenario, accuracy, duration, rate, target, options.latency / 1e3
        )
        folder = Path(options.output) / scenario / name
        clients = options.clients if name == "server" else 1
        workers = clients if scenario == "Server" else 0
        found = harness.test(
            self._loadgen,
            contestant.run,
            images,
            settings,
            batch,
            workers,
            folder,
            contestant.empty,
        )
        row = {
            "scenario": scenario, "contestant": contestant.name, "version": contestant.version,
            "mode": options.mode, "batch": batch, "logs": str(folder), **found,
        }  # fmt: skip
        if scenario == "Server":
            row |= {
                "target_qps": target, "latency_bound_s": options.latency / 1e3, "clients": clients,
            }  # fmt: skip
        if accuracy:
            row["accuracy"] = self._accuracy(folder)
        self.rows.append(row)
        if self._shows:
            cli.show(_shown(row))
            if row.get("reason"):
                cli.show(f"  LoadGen: {' '.join(row['reason'].split())}")

    def _images_of(self, name: str) -> np.ndarray:
        """Returns the images in memory from which a contestant reads them fastest, the same at each call."""
        if name not in self._held:
            images = self._images
            self._held[name] = self._contestants[name].empty(images.shape, images.dtype)
            self._held[name][...] = images
        return self._held[name]

    def _rate(self, run: contestants.Run, images: np.ndarray) -> float:
        """Returns images per second of a few passes, the first one apart: it plans and compiles."""
        run(images)
        start, passes = perf_counter(), 0
        while passes < 3 or perf_counter() - start < 0.3:
            run(images)
            passes += 1
        return passes * len(images) / (perf_counter() - start)

    def _accuracy(self, folder: Path) -> dict[str, Any] | None:
        """Returns what LoadGen's log of answers says of top-1 accuracy; None: the images have no labels."""
        indices, rows = logs.answers(folder / "mlperf_log_accuracy.json", self._network.classes)
        if self._labels is None:
            return None
        correct = int((rows.argmax(axis=1) == self._labels[indices]).sum())
        return {"correct": correct, "total": len(rows), "top1": correct / len(rows)}

    def write(self) -> None:
        """Writes the results where --json says."""
        if self._options.json is not None:
            content = {**self._result, "runs": self.rows}
            write_text(self._options.json, json.dumps(content, indent=1) + "\n")

    def close(self) -> None:
        """Frees the contestants."""
        for contestant in self._contestants.values():
            contestant.close()


def _line(*cells: str) -> str:
    widths = (13, 22, 8, 9, 9, 9, 10)
    return "  ".join(
        f"{cell:<{w}}" if n < 3 else f"{cell:>{w}}"
        for n, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )


def _shown(row: dict[str, Any]) -> str:
    if row["mode"] == "accuracy":
        accuracy = row["accuracy"]
        found = (
            "no labels" if accuracy is None else f"{accuracy['top1']:.2%} of {accuracy['total']}"
        )
        return f"{row['scenario']}  {row['contestant']} {row['version']}  accuracy {found}"
    rate = row.get("completed_images_per_s") or row.get("images_per_s")
    rate = rate or (
        1 / row["mean_s"] * rules.RULES[row["scenario"]].samples if row.get("mean_s") else 0
    )
    times = [
        units.seconds(row[key]) if row.get(key) is not None else ""
        for key in ("p50_s", "p90_s", "p99_s")
    ]
    name = f"{row['contestant']} {row['version']}".strip()
    return _line(row["scenario"], name, row.get("validity", "?"), *times, f"{rate:,.1f}")
