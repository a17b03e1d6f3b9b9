"""Compares our CPU variants with OpenVINO, ONNX Runtime and PyTorch in one run that also measures FMA peak.

    python -m benchmarks.cpu_peers --json cpu_peers.json --markdown cpu_peers.md

Every contestant has the same images and the same weights and is compared with float64 before it is timed.
For a batch and a number of threads all take turns, one sample each a round (A B C A B C), so that what
changes over the run (clocks, other work on the machine) changes for all; a number is the median of its
samples. Before a sample comes a pause, in which the threads of the one before go to sleep, and passes that
do not count. Libraries that are not installed are left out with a line that says so
(``pip install cnn-engine[peers]``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from cnn_engine import cli, workload
from cnn_engine.devices import threads as thread_counts
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.engine.check import LIMITS
from cnn_engine.errors import InputError, UnsupportedError
from cnn_engine.graph import reference
from cnn_engine.io import weights as weight_files
from cnn_engine.measure import environment
from cnn_engine.report import units

from . import result_file
from .cpu_contestants import MAKERS, Contestant, Task

#: Times the limit of ours: the largest |probability - float64's| with which a library is timed.
LIBRARIES = 10
SAMPLE_S = 0.03
SLOW_BATCH = 32  # the largest of the layered variants and the reference, whose rates hardly change
LONG_S = 0.3  # a pass that takes so long warms up by itself
#: Longer than the threads of the libraries here spin for work: ONNX Runtime's do for 33 ms, OpenVINO's for 5.
PAUSE_S = 0.06
PACKAGES = ("openvino", "onnxruntime", "onnx", "torch")


@dataclass
class Row:
    """One contestant at one batch size and number of threads; seconds are of one batch."""

    name: str
    ours: bool
    dtype: str
    batch: int
    threads: int
    seconds: float
    lowest_s: float
    highest_s: float
    samples: int
    images_per_s: float
    max_abs_diff: float
    top1_agreement: float
    share_of_peak: float | None = None
    ratio_to_best_peer: float | None = None
    best_peer: str | None = None


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("cpu_peers", __doc__, "json", "markdown")
    p.add_argument("--network", default="cifar10", help="cifar10 (default) or ece408")
    p.add_argument("--weights", default="default", help="default, random or a path")
    p.add_argument("--data", default="synthetic", help="synthetic (default), auto or a path")
    p.add_argument("--batch", type=_counts, default=(1, 5, 20, 32, 256, 1024))
    p.add_argument("--threads", type=_counts, default=(1, 2))
    p.add_argument(
        "--repeats", type=cli.whole_number(1, 1_000), default=9, help="samples (default: 9)"
    )
    p.add_argument(
        "--only", help="contestants whose names hold one of these words, with commas between"
    )
    return p


def _counts(text: str) -> tuple[int, ...]:
    return tuple(cli.whole_number(1, 1_000_000)(part) for part in text.split(","))


def contestants(task: Task, only: str | None, missing: dict[str, str]) -> list[Contestant]:
    """Returns who is installed and wanted; ``missing`` collects who is not, with the reason."""
    found = []
    for maker in MAKERS:
        if maker.__name__ in missing:
            continue
        try:
            found += maker(task)
        except ImportError as error:
            missing[maker.__name__] = str(error)
            print(f"left out: {maker.__name__}: {error}", flush=True)
    found = [c for c in found if not c.slow or task.batch <= SLOW_BATCH]
    words = only.lower().split(",") if only else [""]
    return [c for c in found if any(word in f"{c.name} {c.dtype}".lower() for word in words)]


def check(contestant: Contestant, wanted: np.ndarray) -> tuple[float, float]:
    """Returns the largest difference from float64 and the share of equal best classes, after one run.

    Raises:
        UnsupportedError: the difference is above the limit.
    """
    contestant.run()
    found = np.array(contestant.probabilities(), np.float64)
    difference = float(np.abs(found - wanted).max())
    limit = LIMITS["cpu"][contestant.dtype] * (1 if contestant.ours else LIBRARIES)
    if not difference <= limit:  # NaN too
        raise UnsupportedError(
            f"{contestant.name}, {contestant.dtype}, batch {len(wanted)}: expected outputs within "
            f"{limit:g} of float64, found {difference:.3g}: not timed"
        )
    return difference, float((found.argmax(1) == wanted.argmax(1)).mean())


def sample(contestant: Contestant, passes: int, warm_up: bool = True) -> float:
    """Returns seconds per pass, after a pause and as many passes that do not count.

    The first passes after a pause are up to twice as slow, for some 20 ms: threads wake, caches are refilled.
    """
    time.sleep(PAUSE_S)
    for _ in range((1 if contestant.slow else passes) if warm_up else 0):
        contestant.run()
    start = time.perf_counter()
    for _ in range(passes):
        contestant.run()
    return (time.perf_counter() - start) / passes


def take_turns(contestants: Sequence[Contestant], repeats: int) -> tuple[list[list[float]], float]:
    """Times the contestants interleaved; returns the samples of each, and the FMA peak of one core."""
    from cnn_engine import _cpu

    passes, short = [], []
    for contestant in contestants:
        once = sample(contestant, 1)
        short.append(once < LONG_S)
        if short[-1] and not contestant.slow:
            once = min(once, *(sample(contestant, 1) for _ in range(2)))
        passes.append(max(1, round(SAMPLE_S / max(once, 1e-7))))
    samples: list[list[float]] = [[] for _ in contestants]
    peaks = []
    for turn in range(repeats):
        time.sleep(PAUSE_S)
        peaks.append(_cpu.measure_fma_peak(SAMPLE_S))
        for contestant, count, warm_up, found in zip(
            contestants, passes, short, samples, strict=True
        ):
            if not contestant.slow or turn < 3:
                found.append(sample(contestant, count, warm_up))
    return samples, statistics.median(peaks)


def compete(
    task: Task, repeats: int, only: str | None, missing: dict[str, str]
) -> tuple[list[Row], float]:
    """Checks the contestants, then times them interleaved; returns also the FMA peak of one core."""
    wanted = reference.forward(task.network, task.weights, task.pixels)
    fit = []
    for contestant in contestants(task, only, missing):
        try:
            accuracy = check(contestant, wanted)
        except UnsupportedError as error:
            if contestant.ours:
                raise
            print(f"left out: {error}", flush=True)
            continue
        fit.append((contestant, accuracy))
    samples, peak = take_turns([contestant for contestant, _ in fit], repeats)
    rows = []
    for (contestant, (difference, agreement)), times in zip(fit, samples, strict=True):
        median = statistics.median(times)
        rows.append(
            Row(contestant.name, contestant.ours, contestant.dtype, task.batch, task.threads, median,
                min(times), max(times), len(times), task.batch / median, difference, agreement)
        )  # fmt: skip
    compare(rows, peak, task)
    return rows, peak


def compare(rows: list[Row], peak: float, task: Task) -> None:
    """Fills in shares of the peak and, for ours, the ratio to the best library of the same precision."""
    cores = min(task.threads, thread_counts.default())
    for row in rows:
        if row.dtype == "float32":
            row.share_of_peak = row.images_per_s * task.network.flops(1) / (peak * cores)
        peers = [r for r in rows if not r.ours and r.dtype == row.dtype]
        if row.ours and peers:
            best = max(peers, key=lambda r: r.images_per_s)
            row.ratio_to_best_peer = row.images_per_s / best.images_per_s
            row.best_peer = best.name


def markdown(document: dict) -> str:
    """The results as tables."""
    about = document["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items() if value)
    lines = [
        f"# CPU peers: {document['network']}",
        "",
        f"- Machine: {about['cpus']} x {about['cpu']}, {about['os']}; {about['cpu_instruction_set']} kernels",
        f"- Versions: {versions}",
        f"- Commit: {about['commit'] or 'not known'}",
        f"- Command: `{document['command']}`, {document['started']}, took "
        f"{units.seconds(document['duration_s'])}"
        + (f"; load {document['load']:.1f} at the start" if document["load"] is not None else ""),
        f"- Images: {document['data']}; weights: {document['weights']}",
        f"- FMA peak of one core, measured in this run: {document['fma_peak_flops'] / 1e9:.1f} GFLOP/s",
        "- Numbers are medians; the range is that of all samples. The share of the peak counts the network's "
        "own multiply-adds: Winograd's convolution does fewer, so it may pass 100 %.",
    ]
    lines += [f"- Left out: {name}: {reason}" for name, reason in document["left_out"].items()]
    for threads in sorted({row["threads"] for row in document["rows"]}):
        for batch in sorted({row["batch"] for row in document["rows"]}):
            rows = [r for r in document["rows"] if (r["threads"], r["batch"]) == (threads, batch)]
            if not rows:
                continue
            lines += ["", f"## Batch {batch}, threads {threads}", ""]
            lines += ["| | precision | images/s | range | max error | of peak | to best peer |"]
            lines += ["|---|---|---:|---:|---:|---:|---:|"]
            for r in rows:
                low, high = batch / r["highest_s"], batch / r["lowest_s"]
                name = f"**{r['name']}**" if r["ours"] else r["name"]
                share = "" if r["share_of_peak"] is None else f"{r['share_of_peak']:.0%}"
                ratio = (
                    f"{r['ratio_to_best_peer']:.2f} ({r['best_peer']})" if r["best_peer"] else ""
                )
                lines.append(
                    f"| {name} | {r['dtype']} | {r['images_per_s']:,.0f} | {low:,.0f} to {high:,.0f} "
                    f"| {r['max_abs_diff']:.1e} | {share} | {ratio} |"
                )
    return "\n".join(lines) + "\n"


def describe_machine() -> dict:
    """Returns the environment of the results, with the libraries' versions."""
    about = environment.describe(CpuDevice())
    about["cpus"] = thread_counts.default()
    for name in PACKAGES:
        about["versions"][name] = environment.package_version(name)
    return about


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = parser().parse_args(arguments)
    chosen = workload.get(options.network)
    network = chosen.network
    if options.weights == "random":
        weights = network.random_weights()
    else:
        path = chosen.default_weights if options.weights == "default" else options.weights
        if path is None:
            raise InputError(
                f"--weights: expected random or a path: {network.name} comes without weights"
            )
        weights = weight_files.read(path, network)
    images = chosen.load_data(
        options.data, None if options.data != "synthetic" else max(options.batch)
    )
    records = np.ascontiguousarray(images.images)
    found = result_file.ResultFile(
        "cpu_peers", options, arguments, load=environment.host_load(), environment=describe_machine(),
        network=network.name, flops_per_image=network.flops(1), data=f"{images.name}, {images.source}",
        weights=str(options.weights), left_out={}, rows=[],
    )  # fmt: skip
    document = found.document
    peaks = []
    for threads in options.threads:
        for batch in options.batch:
            pixels = np.ascontiguousarray(records[np.arange(batch) % len(records)])
            task = Task(network, weights, pixels, threads)
            rows, peak = compete(task, options.repeats, options.only, document["left_out"])
            peaks.append(peak)
            document["rows"] += [asdict(row) for row in rows]
            for row in rows:
                ratio = f"{row.ratio_to_best_peer:.2f}x {row.best_peer}" if row.best_peer else ""
                print(
                    f"threads {threads} batch {batch:>5}  {row.name:<28} {row.dtype:<9} "
                    f"{row.images_per_s:>10,.0f} images/s  error {row.max_abs_diff:.1e}  {ratio}",
                    flush=True,
                )
    document["fma_peak_flops"] = statistics.median(peaks)
    found.write(markdown)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
