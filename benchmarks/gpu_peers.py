"""Compares our fused kernels with PyTorch and JAX on one GPU, in one run that also measures its limits.

    python -m benchmarks.gpu_peers --json gpu.json --markdown gpu.md --chart gpu.png

Every contestant turns the same uint8 images into probabilities with the same weights, and is compared with
float64 before it is timed. For a batch, all contestants take turns, one sample each a round, so that what
changes over the run (clocks, temperature) changes for all. A sample is the time between two events on the
contestant's own stream, around enough passes to last a few milliseconds; JAX keeps its streams to itself,
so its samples are wall times around work that is waited for, and are marked so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import IO

import numpy as np
from cnn_engine.workloads.cifar10.network import NETWORK, WORKLOAD

from cnn_engine import InputError, _cpu, cli
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import LIMITS
from cnn_engine.graph import reference

from . import gpu_course, result_file
from .gpu_contestants import Contestant, Jax, Ours, Torch, sample, streamed

DTYPES = ("float32", "tf32", "float16", "bfloat16")
BATCHES = (1, 5, 20, 100, 1000, 10000, 50000)
FLOPS = NETWORK.flops(1)
BYTES = int(np.prod(NETWORK.input_shape)) + 4 * NETWORK.classes
CHECKED = 256  # images compared with float64


@dataclass
class Row:
    """One line of the results; times are medians of one pass over the batch."""

    name: str
    ours: bool
    dtype: str
    batch: int
    where: str
    clock: str
    milliseconds: float
    lowest: float
    highest: float
    images_per_s: float
    max_abs_diff: float
    top1_agreement: float
    ratio_to_best_peer: float | None = None
    limit: str | None = None
    share_of_limit: float | None = None


def measure_limits(quick: bool) -> dict[str, float]:
    """Returns what this GPU and this bus do: bytes/s and multiply-adds/s."""
    import cupy

    size = (64 if quick else 512) << 20
    pinned = cupy.cuda.alloc_pinned_memory(size)
    device, other = cupy.empty(size, np.uint8), cupy.empty(size, np.uint8)
    stream = cupy.cuda.get_current_stream()

    def best(copy) -> float:
        rates = []
        for _ in range(8):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            copy()
            stop.record()
            stop.synchronize()
            rates.append(size / (cupy.cuda.get_elapsed_time(start, stop) * 1e-3))
        return max(rates[2:])

    return {
        "pinned_host_to_device_bytes_per_s": best(
            lambda: device.data.copy_from_host_async(pinned.ptr, size, stream)
        ),
        "pinned_device_to_host_bytes_per_s": best(
            lambda: device.data.copy_to_host_async(pinned.ptr, size, stream)
        ),
        "device_copy_bytes_per_s": 2
        * best(lambda: other.data.copy_from_device_async(device.data, size, stream)),
        "fp32_flops_per_s": 2 * cuda_module.load().measure_fma_peak(),
        "fp16_tensor_flops_per_s": _matrix_rate(2048 if quick else 8192),
    }


def _matrix_rate(size: int) -> float:
    """The rate of a large float16 matrix product (cuBLAS), on random numbers."""
    import cupy

    a, b = (
        cupy.random.standard_normal((size, size), np.float32).astype(np.float16) for _ in range(2)
    )
    rates = []
    for _ in range(8):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        a @ b
        stop.record()
        stop.synchronize()
        rates.append(2 * size**3 / (cupy.cuda.get_elapsed_time(start, stop) * 1e-3))
    return max(rates[2:])


def difference(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Returns the largest absolute difference and the share of rows with the same best class."""
    found = found[: len(wanted)].astype(np.float64)
    worst = np.abs(found - wanted).max()
    return float(worst if worst == worst else np.inf), float(
        (found.argmax(1) == wanted.argmax(1)).mean()
    )


def compete(
    contestants: list[Contestant], batch: int, wanted: np.ndarray, rounds: int
) -> list[Row]:
    """Checks the contestants, then times them interleaved."""
    import cupy

    fit, passes = [], {}
    for contestant in contestants:
        contestant.run()
        if contestant.wait:
            contestant.wait()
        cupy.cuda.Device().synchronize()
        diff = difference(contestant.probabilities(), wanted)
        if diff[0] > LIMITS["cuda"][contestant.dtype]:
            if contestant.ours:
                raise SystemExit(
                    f"{contestant.name}, batch {batch}: {diff[0]:.3g} from float64: not timed"
                )
            print(f"  {contestant.name}: {diff[0]:.3g} from float64: not timed", file=sys.stderr)
            continue
        once = min(sample(contestant, 1) for _ in range(3))
        passes[contestant.name] = max(1, min(200, round(3.0 / max(once, 1e-3))))
        fit.append((contestant, diff))
    samples: dict[str, list[float]] = {c.name: [] for c, _ in fit}
    for _ in range(rounds):
        for contestant, _ in fit:
            samples[contestant.name].append(sample(contestant, passes[contestant.name]))
    rows = []
    for contestant, (worst, agreement) in fit:
        times = sorted(samples[contestant.name])
        median = statistics.median(times)
        clock = "wall" if contestant.wait else "events"
        rows.append(
            Row(contestant.name, contestant.ours, contestant.dtype, batch, contestant.where, clock, median,
                times[0], times[-1], batch / median * 1e3, worst, agreement)
        )  # fmt: skip
    return rows


def add_ratios(rows: list[Row], limits: dict[str, float]) -> None:
    """Fills in, for our rows, the ratio to the best peer of the same precision and the share of the limit."""
    for row in rows:
        arithmetic = (
            limits["fp32_flops_per_s" if row.dtype == "float32" else "fp16_tensor_flops_per_s"]
            / FLOPS
        )
        bus = limits["pinned_host_to_device_bytes_per_s"] / np.prod(NETWORK.input_shape)
        memory = limits["device_copy_bytes_per_s"] / BYTES
        if row.where == "host to host":
            row.limit, best = "bus", bus
        elif memory < arithmetic:
            row.limit, best = "memory", memory
        else:
            row.limit = "fp32 multiply-adds" if row.dtype == "float32" else "fp16 tensor cores"
            best = arithmetic
        row.share_of_limit = row.images_per_s / best
        peers = [
            r.images_per_s for r in rows
            if not r.ours and (r.dtype, r.batch, r.where) == (row.dtype, row.batch, row.where)
        ]  # fmt: skip
        if row.ours and peers:
            row.ratio_to_best_peer = row.images_per_s / max(peers)


def markdown(document: dict) -> str:
    """The results as tables."""
    environment, limits = document["environment"], document["limits"]
    versions = ", ".join(
        f"{name} {value}" for name, value in environment["versions"].items() if value
    )
    lines = [f"# GPU peers: {environment['gpu']}", ""]
    lines += [f"`{document['command']}`, {document['started']}, {versions}", ""]
    lines += ["| limit measured in this run | value |", "|---|---|"]
    for name, value in limits.items():
        lines.append(
            f"| {name.replace('_', ' ').removesuffix(' per s')} | {value / 1e9:,.1f} G/s |"
        )
    lines += [
        "", "More than all of the fp32 multiply-adds is no error: `fused float32` uses tensor cores.",
    ]  # fmt: skip
    titles = ("", "clock", "ms", "lowest to highest", "M images/s", "times best peer", "share of limit",
              "max error", "top-1 agreement")  # fmt: skip
    for where, batch in sorted({(r["where"], r["batch"]) for r in document["rows"]}):
        lines += ["", f"## {where}, batch {batch:,}", ""]
        lines += ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
        chosen = [r for r in document["rows"] if (r["where"], r["batch"]) == (where, batch)]
        for r in sorted(chosen, key=lambda r: r["milliseconds"]):
            cells = (
                f"**{r['name']}**" if r["ours"] else r["name"],
                r["clock"],
                f"{r['milliseconds']:.4g}",
                f"{r['lowest']:.4g} to {r['highest']:.4g}",
                f"{r['images_per_s'] / 1e6:.3f}",
                f"{r['ratio_to_best_peer']:.2f}" if r["ratio_to_best_peer"] else "",
                f"{r['share_of_limit']:.1%} of {r['limit']}",
                f"{r['max_abs_diff']:.1e}",
                f"{r['top1_agreement']:.2%}",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines + gpu_course.markdown(document["course"])) + "\n"


def chart(document: dict, file: IO[bytes]) -> None:
    """Images per second over the batch size: for each data type, ours and the best peer at each batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in document["rows"] if r["where"] == "device"]
    bus = document["limits"]["pinned_host_to_device_bytes_per_s"] / np.prod(NETWORK.input_shape)
    dtypes = [dtype for dtype in DTYPES if any(r["dtype"] == dtype for r in rows)]
    # A panel a data type: ours are so close to each other that one panel's lines would hide each other.
    figure, panels = pyplot.subplots(
        1, len(dtypes), figsize=(3.4 * len(dtypes), 4.2), sharey=True, squeeze=False
    )
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        for ours, style, color in ((True, "o-", "C0"), (False, "s--", "0.4")):
            best: dict[int, float] = {}
            for r in rows:
                if r["dtype"] == dtype and r["ours"] == ours:
                    best[r["batch"]] = max(best.get(r["batch"], 0.0), r["images_per_s"])
            if best:
                points = zip(*sorted(best.items()), strict=True)
                axes.loglog(*points, style, color=color, label="fused" if ours else "best peer")
        axes.axhline(bus, color="black", linewidth=0.8, linestyle=":", label="what the bus brings")
        axes.set(xlabel="batch", title=dtype)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("images/s")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(document["environment"]["gpu"])
    figure.tight_layout()
    figure.savefig(file, format="png")


def environment() -> dict:
    """The machine and the versions beside the numbers."""
    import platform

    import cupy

    from cnn_engine.measure.environment import package_version

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    names = ("torch", "jax", "cupy-cuda13x", "cupy-cuda12x", "numpy")
    return {
        "gpu": properties["name"].decode(),
        "driver": cuda_module.load().driver_version(),
        "host": platform.processor() or platform.machine(),
        "commit": _cpu.commit or None,
        "versions": {name: package_version(name) for name in names},
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""

    def numbers(text):
        return [int(part) for part in text.split(",")]

    parser = result_file.parser("gpu_peers", __doc__, *result_file.FORMS)
    parser.add_argument("--batches", type=numbers, default=list(BATCHES))
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=["torch", "compile", "jax"]
    )
    parser.add_argument(
        "--compile-batches", type=numbers, default=[1, 10000], help="it takes minutes each"
    )
    parser.add_argument("--rounds", type=int, default=15, help="samples a contestant and batch")
    parser.add_argument(
        "--chunk",
        type=int,
        default=3960,  # 15 images for each of the 264 teams of float32's kernel on an H200
        help="images per copy, end to end",
    )
    parser.add_argument(
        "--weights", help="as cnn_engine.run takes them; default: the network's own, else random"
    )
    parser.add_argument(
        "--course-images", type=int, default=10000, help="of the course network; 0: leave it out"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small limits: for trying the script out"
    )
    options = parser.parse_args(arguments)
    for dtype in options.dtypes:
        if dtype not in DTYPES:
            parser.error(f"--dtypes: expected some of {', '.join(DTYPES)}, found {dtype}")
    for name, low in (("rounds", 1), ("chunk", 1), ("course_images", 0)):
        if (value := getattr(options, name)) < low:
            option = name.replace("_", "-")
            parser.error(f"--{option}: expected at least {low}, found {value}")
    if min(options.batches) < 1:
        parser.error(f"--batches: expected at least 1, found {min(options.batches)}")
    return options


def load_weights(path: str | None) -> dict[str, np.ndarray]:
    """Returns float32 weights."""
    from cnn_engine.io import weights

    default = WORKLOAD.default_weights
    if path is None and not default.exists():
        found = NETWORK.random_weights()
    else:
        found = weights.read(path or default, NETWORK)
    return {name: np.ascontiguousarray(value, np.float32) for name, value in found.items()}


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; returns the command's exit code."""
    options = parse(arguments)
    found = result_file.ResultFile("gpu_peers", options, arguments)
    if reason := cuda_module.unavailable():
        raise InputError(reason)
    import cupy

    weights = load_weights(options.weights)
    ours = Ours(weights)
    torch_peer = Torch(weights) if "torch" in options.peers else None
    jax_peer = Jax(weights) if "jax" in options.peers else None
    compile_batches = set(options.compile_batches) if "compile" in options.peers else set()
    limits = measure_limits(options.quick)
    host = np.random.default_rng().integers(
        0, 256, (max(options.batches), *NETWORK.input_shape), np.uint8
    )
    wanted = reference.forward(NETWORK, weights, host[:CHECKED])
    rows: list[Row] = []
    for batch in options.batches:
        print(f"batch {batch}", file=sys.stderr)
        images = cupy.asarray(host[:batch])
        contestants = list(ours.contestants(images, options.dtypes))
        if torch_peer is not None:
            contestants += torch_peer.contestants(images, options.dtypes, compile_batches)
        if jax_peer is not None:
            contestants += jax_peer.contestants(images, options.dtypes)
        rows += compete(contestants, batch, wanted[:batch], options.rounds)
        del contestants
        if batch == max(options.batches) and batch >= 1000:
            chunk = min(options.chunk, batch)
            rows += compete(list(streamed(ours, torch_peer, host[:batch], options.dtypes, chunk)), batch,
                            wanted[:batch], options.rounds)  # fmt: skip
    add_ratios(rows, limits)
    course = gpu_course.measure(torch_peer, options.course_images, options.rounds)
    found.document |= {
        "environment": environment(),
        "limits": limits,
        "flops_an_image": FLOPS,
        "rows": [asdict(row) for row in rows],
        "course": course,
    }
    print(markdown(found.stamped()))
    found.write(markdown, chart)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
