"""Ensembles on the GPUs of one machine: ``python -m benchmarks.ensembles_gpu --data DIR --output DIR``.

Every design, with two, four and eight members, that infer and that train, on JPEGs of 500x375 and on
CIFAR-10's, with all CPUs and with four of them. Each run's figures are appended to ``cells.jsonl`` as it
ends, so that what was done stays; the same command goes on with what is missing. README.md and ensembles.png
are of all. With four CPUs, several runs go on side by side, each on CPUs of its own. Needs the extras
``ensemble`` and ``export``, and torchvision.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cnn_engine import cli
from cnn_engine.ensemble import collect, roles
from cnn_engine.measure import environment
from cnn_engine.report import units
from cnn_engine.report.plotting import unavailable

from . import result_file
from .ensemble_faults import environment as mpi_environment
from .ensemble_faults import mpirun

#: JPEGs of ImageNet's size that are made, and names that they have.
PICTURES, NAMES = 64, 4096

#: CPUs that are few, and ranks on them.
FEW_CPUS, FEW_RANKS = 4, 2


@dataclass(frozen=True)
class Cell:
    """What is run by every design.

    Attributes:
        work: ``infer`` or ``train``.
        images: ``500x375`` or ``32x32``.
        members: how many.
        cpus: that all ranks have together; 0: all.
    """

    work: str
    images: str
    members: int
    cpus: int

    def __str__(self) -> str:
        return f"{self.work}-{self.images}-{self.members}-{self.cpus or 'all'}"


CELLS = [
    Cell(work, images, members, cpus)
    for work in ("infer", "train")
    for images in ("500x375", "32x32")
    for members in (2, 4, 8)
    for cpus in (FEW_CPUS, 0)
]

#: Steps of a run: with few CPUs and images that take long to decode, few.
STEPS = {("500x375", 4): 14, ("500x375", 0): 60, ("32x32", 4): 100, ("32x32", 0): 200}
BATCH = {"500x375": 64, "32x32": 256}


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing; returns 1 if a run failed."""
    parser = result_file.parser("ensembles_gpu", __doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="has train.tar of CIFAR-10's "
                        "JPEG copy; what is made goes there too")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cells", nargs="*", default=[str(cell) for cell in CELLS])
    parser.add_argument("--lanes", type=int, default=3, help="runs with few CPUs side by side")
    parser.add_argument(
        "--device", default="rank", help="of the members (default: rank, the GPUs in turn)"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    path = options.output / "cells.jsonl"
    done = {(row["cell"], row["design"]) for row in read(path)}
    cells = {str(cell): cell for cell in CELLS}
    # Side by side are runs of different cells, which need different things most.
    groups = [
        options.cells[at : at + options.lanes] for at in range(0, len(options.cells), options.lanes)
    ]
    missing = [
        (cells[name], design)
        for group in groups
        for design in roles.DESIGNS
        for name in group
        if (name, design) not in done
    ]
    make_data(options.data)
    writing, free = threading.Lock(), list(range(options.lanes))

    def one(job: tuple[Cell, str]) -> None:
        if time.monotonic() > end:
            return
        cell, design = job
        with writing:
            lane = free.pop()
        row = run(options, cell, design, lane)
        with writing:
            free.append(lane)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(cell, design, row.get("images_per_s") or row.get("error"), flush=True)

    for few in (True, False):
        with ThreadPoolExecutor(options.lanes if few else 1) as pool:
            list(pool.map(one, [job for job in missing if bool(job[0].cpus) == few]))
    rows = read(path)
    (options.output / "README.md").write_text(page(rows), "utf-8")
    if unavailable() is None:
        draw(rows, options.output / "ensembles.png")
    return cli.CHECK_FAILED if any("error" in row for row in rows) else cli.DONE


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of what was run."""
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if path.is_file()
        else []
    )


def make_data(folder: Path) -> None:
    """Makes JPEGs of 500x375 with labels, and ResNet-18 as an ONNX file, where they are not there."""
    from cnn_engine.ensemble.source import SyntheticJpegs
    from cnn_engine.io.preprocess import Preprocess

    made = SyntheticJpegs(PICTURES, (500, 375), Preprocess(resize=(32, 32)), (3, 32, 32))
    large = folder / "large"
    if not large.is_dir():
        large.mkdir(parents=True)
        jpegs = [made.read(number) for number in range(NAMES)]
        with tarfile.open(large / "train.tar", "w") as archive:
            ends = np.cumsum([0, *map(len, jpegs)])
            offsets = np.stack([ends[:-1], np.diff(ends)], 1).astype(np.uint32)
            labels = (np.arange(NAMES) % 10).astype(np.uint8)
            for name, data in (("images.bin", b"".join(jpegs)), ("offsets.npy", as_npy(offsets)),
                               ("labels.npy", as_npy(labels))):  # fmt: skip
                about = tarfile.TarInfo(name)
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
    model = folder / "resnet18.onnx"
    if not model.is_file():
        subprocess.run([sys.executable, "-m", "cnn_engine.export", "torchvision.models:resnet18",
                        "--output", str(model)], check=True, stdout=subprocess.DEVNULL)  # fmt: skip


def as_npy(array: np.ndarray) -> bytes:
    """Returns the bytes of a ``.npy`` file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def words_of(options: argparse.Namespace, cell: Cell, design: str, folder: Path) -> list[str]:
    """Returns the command of one run."""
    data = options.data
    cpus = cell.cpus or len(os.sched_getaffinity(0))
    ranks = FEW_RANKS if cell.cpus else cell.members
    if design == roles.IN_PROCESS:
        ranks = 1
    own = cell.members // ranks if design == roles.NONE else 1  # pipelines a rank
    large = cell.images == "500x375"
    model = (
        f"model={data / 'resnet18.onnx'}" if large and cell.work == "infer" else "network=cifar10"
    )
    words = [] if ranks == 1 else [mpirun(), "-n", str(ranks)]
    words += [sys.executable, "-m", "cnn_engine.ensemble", "--design", design, "--work", cell.work]
    words += ["--member", f"{model},device={options.device}"] * cell.members
    words += ["--data", str(data / "large/train.tar" if large else data / "train.tar")]
    if large:
        words += ["--preprocess", "imagenet" if cell.work == "infer" else "resize=32x32"]
    if design in (roles.SINGLE, roles.MULTI):
        words += ["--preprocessors", str(ranks)]  # else half of them, and of the CPUs
    steps = STEPS[cell.images, cell.cpus]
    if large and cell.cpus and cell.members == 8:
        steps //= 2
    words += [
        "--batch", str(BATCH[cell.images]), "--steps", str(steps), "--epochs", "100", "--ceilings", "0.4",
        "--decoders", str(max(cpus // (ranks * own), 1)), "--queue", "8", "--stall", "60", "--quiet",
        "--threads", "1", "--json", str(folder / "report.json"), "--output", str(folder / "output"),
    ]  # fmt: skip
    return words


def run(options: argparse.Namespace, cell: Cell, design: str, lane: int) -> dict[str, Any]:
    """Runs one design of one cell; returns its row, or what went wrong."""
    about = {"cell": str(cell), "design": design, **asdict(cell), "machine_cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        words = words_of(options, cell, design, Path(name))
        if cell.cpus:
            granted = sorted(os.sched_getaffinity(0))[lane * cell.cpus :][: cell.cpus]
            words = ["taskset", "-c", ",".join(map(str, granted)), *words]
        try:
            done = subprocess.run(
                words, env=mpi_environment(), capture_output=True, text=True, timeout=120
            )
        except subprocess.TimeoutExpired:
            return {**about, "error": "not done after 120 s"}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-3:]
            return {**about, "error": f"exit code {done.returncode}: {' / '.join(last)}"}
        text = Path(name, "report.json").read_text("utf-8")
        for path, called in ((name, "OUTPUT"), (str(options.data), "DATA")):
            text = text.replace(path, called)
        return {**about, **figures(json.loads(text))}


def figures(document: dict[str, Any]) -> dict[str, Any]:
    """Returns what the table has of a run's report."""
    document["environment"].pop("host", None)
    ranks = document["rank_reports"]
    working = [rank for rank in ranks if rank["steps"].get("steps")]
    steps = {
        key: sum(rank["steps"][key] for rank in working) / len(working)
        for key in ("compute_s", "waiting_s", "augment_s", "extra_s", "total_s")
    }
    peers = [rank["waits"]["peers"] for rank in ranks]
    limits = document["ceilings_images_per_s"]
    return {
        "ranks": document["ranks"],
        "images_per_s": document["throughput_images_per_s"],
        "images_done": document["images"],
        "seconds": document["seconds"],
        "core_s": document["core_s"],
        "start_up_s": document["start_up_s"],
        "ceilings": limits,
        "bound_by": document["bound_by"],
        "steps": steps,
        "peers_s": sum(peers) / len(peers),
        "communication_share": document["communication_share"],
        "environment": document["environment"],
        "command": document["command"],
    }


def page(rows: list[dict[str, Any]]) -> str:
    """Returns the tables as Markdown."""
    good = [row for row in rows if "error" not in row]
    if not good:
        return "Nothing was run.\n"
    about = good[0]["environment"]
    lines = [
        "# Ensembles on the GPUs of one machine",
        "",
        f"`python -m benchmarks.ensembles_gpu`, {about.get('gpu')}, {about.get('cpu')}, "
        f"{good[0]['machine_cpus']} CPUs; commit {about.get('commit')}; {environment.now()}.",
    ]
    lines += [
        "",
        "| work, images | cores | members | design | ranks | images/s | of `none` | core-seconds of decoding "
        "1,000 images | of `none` | decoding alone | members alone | sending alone | waits for others | "
        "bound by | commit |",
        "|" + "---|" * 15,
    ]
    for cell in CELLS:
        mine = {row["design"]: row for row in rows if row["cell"] == str(cell)}
        base = mine.get(roles.NONE, {"error": "not run"})
        for design in (design for design in roles.DESIGNS if design in mine):
            row = mine[design]
            begin = f"| {cell.work}, {cell.images} | {cell.cpus or 'all'} | {cell.members} | {design} | "
            if "error" in row:
                lines.append(f"{begin}failed: {row['error'][:200]} |" + " |" * 10)
                continue
            cost, faster, share = core_seconds(row), "", ""
            if "error" not in base:
                faster = f"{row['images_per_s'] / base['images_per_s']:.1f}"
                share = f"{cost / core_seconds(base):.2f}"
            limits = row["ceilings"]
            sending = waiting = ""
            if row["communication_share"] is not None:
                sending = f"{100 * row['communication_share']:.1f} %"
                waiting = f"{100 * row['peers_s'] / row['steps']['total_s']:.0f} %"
            lines.append(
                f"{begin}{row['ranks']} | {units.number(row['images_per_s'])} | {faster} | {cost:.2f} | "
                f"{share} | {units.number(limits['preprocessing'])} | {units.number(limits['members'])} | "
                f"{sending} | {waiting} | {row['bound_by']} | {row['environment'].get('commit')} |"
            )
    return "\n".join(lines) + "\n"


def core_seconds(row: dict[str, Any]) -> float:
    """Returns what decoding 1,000 images for all members took of the CPUs."""
    return 1000 * row["core_s"]["preprocessing"] / row["images_done"]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws images/s, and core-seconds of decoding 1,000 images, against the number of members."""
    order = [(str(cell), design) for design in roles.DESIGNS for cell in CELLS]
    points = [
        {
            "work": row["work"],
            "data": f"images of {row['images']}, {row['cpus'] or 'all'} CPUs",
            "ranks": FEW_RANKS if row["cpus"] else "as many",
            "design": row["design"],
            "members": row["members"],
            "images_per_s": row["images_per_s"],
            "preprocessing_core_s": core_seconds(row),
        }
        for row in sorted(rows, key=lambda row: order.index((row["cell"], row["design"])))
        if "error" not in row
    ]
    if points:
        collect.draw(points, path)


if __name__ == "__main__":
    sys.exit(main())
