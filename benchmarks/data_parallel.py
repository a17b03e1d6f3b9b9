"""Compares training on two GPUs with one: ``python -m benchmarks.data_parallel --data DIR --output DIR``.

Trains CIFAR-10's network with each of two seeds on one GPU and on two, with the same batches in the same
order, and compares the loss curves: between one GPU and two they may differ as seeds do. Then images/s with
large batches. Writes data_parallel.json, README.md and a chart; what was done is in the JSON as runs end, and
the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cnn_engine import cli
from cnn_engine.report.plotting import unavailable

from . import result_file
from .ensemble_faults import environment as mpi_environment
from .ensemble_faults import mpirun

SEEDS = (0, 1)

#: What tells runs apart.
JOB = ("ranks", "seed", "batch", "epochs")


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs all; returns the exit code."""
    parser = result_file.parser("data_parallel", __doc__)
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="images of CIFAR-10 with labels"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", default="rank", help="default: rank, a GPU a process")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument(
        "--fast", type=int, nargs="*", default=[4096, 16384], help="batches to time"
    )
    parser.add_argument("--fast-epochs", type=int, default=40)
    parser.add_argument(
        "--lanes",
        type=int,
        default=1,
        help="runs side by side; then rates are no measure, losses are",
    )
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "data_parallel.json"
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []
    done = {tuple(row[key] for key in JOB) for row in rows}
    jobs = [(ranks, seed, options.batch, options.epochs) for seed in SEEDS for ranks in (1, 2)]
    jobs += [(ranks, 0, batch, options.fast_epochs) for batch in options.fast for ranks in (1, 2)]
    missing = [job for job in jobs if job not in done]
    with ThreadPoolExecutor(options.lanes) as pool:
        for row in pool.map(lambda job: run(options, *job), missing):
            rows.append(row)
            shown = {key: value for key, value in row.items() if key not in ("log", "environment")}
            print(shown, flush=True)
            path.write_text(json.dumps({"rows": rows}, indent=1) + "\n", "utf-8")
    (options.output / "README.md").write_text(page(rows), "utf-8")
    if unavailable() is None:
        draw(rows, options.output / "loss.png")
    return 0


def run(
    options: argparse.Namespace, ranks: int, seed: int, batch: int, epochs: int
) -> dict[str, Any]:
    """Trains once; returns the log and the rates."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            mpirun(), "-n", str(ranks), sys.executable, "-m", "cnn_engine.ensemble", "--work", "train",
            "--data-parallel", "--device", options.device, "--data", options.data, "--batch", str(batch),
            "--epochs", str(epochs), "--seed", str(seed), "--no-ceilings", "--quiet", "--stall", "60",
            "--output", folder,
        ]  # fmt: skip
        subprocess.run(words, check=True, env=mpi_environment(), timeout=300)
        report = json.loads(Path(folder, "report.json").read_text("utf-8"))
        log = [json.loads(line) for line in Path(folder, "member-0.jsonl").read_text().splitlines()]
    steps = [rank["steps"] for rank in report["rank_reports"]]
    each = report["steps"]
    return {
        "cpus": os.cpu_count(),
        "ranks": ranks,
        "seed": seed,
        "batch": batch,
        "epochs": epochs,
        "images_per_s": report["throughput_images_per_s"],
        "last_epochs_images_per_s": late_rate(log, report),
        "ms_a_step": {
            key: 1e3 * sum(one[f"{key}_s"] for one in steps) / len(steps) / each
            for key in ("compute", "waiting", "augment", "extra", "total")
        },
        "core_s": report["core_s"]["processes"],
        "environment": {
            key: value for key, value in report["environment"].items() if key != "host"
        },
        "command": report["command"].replace(folder, "OUTPUT").replace(options.data, "DATA"),
        "log": [
            {key: entry[key] for key in ("epoch", "loss", "train_accuracy", "seconds")}
            for entry in log
        ],
    }


def late_rate(log: list[dict[str, Any]], report: dict[str, Any]) -> float | None:
    """Returns images/s of the second half of the epochs, in which nothing is set up any more."""
    half = len(log) // 2
    passed = log[-1]["seconds"] - log[half - 1]["seconds"] if half else 0
    images = report["images"] / len(log) * (len(log) - half)
    return images / passed if passed else None


def curves(rows: list[dict[str, Any]]) -> dict[tuple[int, int], np.ndarray]:
    """Returns the losses of every epoch by (ranks, seed), of the runs that are compared."""
    batch = rows[0]["batch"]
    found = {}
    for row in rows:
        if row["batch"] == batch and len(found) < 2 * len(SEEDS):
            found[row["ranks"], row["seed"]] = np.array([entry["loss"] for entry in row["log"]])
    return found


def page(rows: list[dict[str, Any]]) -> str:
    """Returns the record as Markdown."""
    about, found = rows[0]["environment"], curves(rows)
    one, two = ([found[ranks, seed] for seed in SEEDS] for ranks in (1, 2))
    lines = [
        "# One model over two GPUs",
        "",
        f"`python -m benchmarks.data_parallel`, {about.get('gpu')}, {about.get('cpu')}, {rows[0]['cpus']} "
        f"CPUs; commit {about.get('commit')}; CIFAR-10's network, batch {rows[0]['batch']} of all GPUs.",
        "",
        "Loss of an epoch (mean over its images, as the weights change); both seeds on one GPU and on two:",
        "",
        "| epoch | 1 GPU, seed 0 | 1 GPU, seed 1 | 2 GPUs, seed 0 | 2 GPUs, seed 1 |",
        "|---|---|---|---|---|",
    ]
    count = len(one[0])
    for epoch in sorted({0, 1, 3, *range(7, count, 4), count - 1} & {*range(count)}):
        values = " | ".join(f"{curve[epoch]:.4f}" for curve in (*one, *two))
        lines.append(f"| {epoch + 1} | {values} |")
    lines += [
        "",
        "Mean over the epochs of the difference between two curves:",
        "",
        "| curves | mean of the absolute difference | mean of the difference |",
        "|---|---|---|",
    ]
    for name, a, b in (
        ("2 GPUs and 1, seed 0", two[0], one[0]),
        ("2 GPUs and 1, seed 1", two[1], one[1]),
        ("seed 1 and 0, 1 GPU", one[1], one[0]),
        ("seed 1 and 0, 2 GPUs", two[1], two[0]),
    ):
        lines.append(f"| {name} | {np.abs(a - b).mean():.4f} | {(a - b).mean():+.4f} |")
    lines += [
        "",
        "| batch | GPUs | images/s | of one | second half of the epochs, images/s | of one | "
        "a step, ms | in the member | waiting for images | augmentation and copies |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    alone: dict[int, dict[str, Any]] = {}
    for row in rows:
        base = alone.setdefault(row["batch"], row)
        late, parts = row["last_epochs_images_per_s"], row["ms_a_step"]
        lines.append(
            f"| {row['batch']} | {row['ranks']} | {row['images_per_s']:,.0f} | "
            f"{row['images_per_s'] / base['images_per_s']:.2f} | {late or 0:,.0f} | "
            f"{(late or 0) / (base['last_epochs_images_per_s'] or 1):.2f} | {parts['total']:.2f} | "
            f"{parts['compute']:.2f} | {parts['waiting']:.2f} | {parts['augment']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (ranks, seed), losses in curves(rows).items():
        style = {"color": f"C{ranks - 1}", "linestyle": ("-", "--")[seed]}
        axes.plot(range(1, len(losses) + 1), losses, label=f"{ranks} GPU, seed {seed}", **style)
    axes.set(xlabel="epoch", ylabel="loss", title="One model on one GPU and on two")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
