"""infer on the GPUs of one machine: ``python -m benchmarks.infer_gpu --data DIR --output DIR``.

Ten and forty million images of 32x32 as arrays by CIFAR-10's network, 100,000 JPEGs of 500x375 by
torchvision's ResNet-50, and 8,000 of them by a detector, on one GPU and on two, with 16 CPUs each. Each run's
report is appended to ``runs.jsonl`` as it ends, so that what was done stays; the same command goes on with
what is missing. Needs the extras ``infer`` and ``export``, and torchvision.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cnn_engine.workloads.cifar10 import dataset
from PIL import Image

from cnn_engine import cli
from cnn_engine.report import units

from . import result_file

#: Images in a file of arrays, of which there are more names.
ARRAY_IMAGES = 1_000_000

#: Different JPEGs that are made, in so many tars, which have more names.
JPEGS, TARS = 2_000, 10

CPUS_A_GPU = 16


@dataclass(frozen=True)
class Run:
    """What is run.

    Attributes:
        input: ``arrays``, ``jpegs``, or ``detector``: JPEGs by :func:`detector`.
        images: of arrays a multiple of :data:`ARRAY_IMAGES`, else of :data:`JPEGS`.
        gpus: that it may use, with :data:`CPUS_A_GPU` CPUs each.
        workers: a number or ``auto``.
        shard: bytes of input in a shard, as ``--shard-size`` has them; ``auto`` leaves them to the rule.
    """

    input: str
    images: int
    gpus: int
    workers: str = "auto"
    shard: str = "auto"

    def __str__(self) -> str:
        return f"{self.input}-{self.images}-{self.gpus}-{self.workers}-{self.shard}"


RUNS = [
    Run("arrays", 10_000_000, 1),
    Run("arrays", 10_000_000, 2),
    Run("arrays", 40_000_000, 1),
    Run("arrays", 40_000_000, 2),
    Run("arrays", 40_000_000, 2, "4"),
    Run("jpegs", 100_000, 2),
    Run("jpegs", 100_000, 1),
    Run("detector", 8_000, 1),
    Run("detector", 8_000, 2),
    # For memory, beside ten million.
    Run("arrays", 1_000_000, 1),
]

#: Kind of run -> its ONNX file, what makes the network, its preprocessing, and options of infer.
NETWORKS = {
    "jpegs": ("resnet50.onnx", "torchvision.models:resnet50", "imagenet", ("--top", "5")),
    "detector": (
        "detector.onnx", "benchmarks.infer_gpu:detector", "letterbox=640,fill=114",
        ("--dtype", "float16"),
    ),
}  # fmt: skip


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing; returns 1 if a run failed."""
    parser = result_file.parser("infer_gpu", __doc__)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="what is made goes there"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--cifar", type=Path, metavar="FILE.bin",
        help="CIFAR-10's records: arrays are these images again and again (default: noise)",
    )  # fmt: skip
    parser.add_argument("--runs", nargs="*", default=[str(run) for run in RUNS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so many")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "runs.jsonl"
    rows = (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if path.is_file()
        else []
    )
    done = {row["run"] for row in rows}
    for run in (parsed(name) for name in options.runs):
        if str(run) in done or time.monotonic() > end:
            continue
        make(options.data, run, options.cifar)
        row = measured(options, run)
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(run, row.get("images_per_s") or row.get("error"), row.get("working_s"), flush=True)
    (options.output / "README.md").write_text(page(rows), "utf-8")
    return cli.CHECK_FAILED if any("error" in row for row in rows) else cli.DONE


def parsed(name: str) -> Run:
    """Returns the run of that name."""
    kind, images, gpus, *others = name.split("-")
    return Run(kind, int(images), int(gpus), *others)


def folder_of(data: Path, run: Run) -> Path:
    """Returns the folder of the run's images."""
    return data / f"{'arrays' if run.input == 'arrays' else 'jpegs'}-{run.images}"


def detector() -> Any:
    """Returns a detector of random weights with YOLOv8's outputs, [N, 84, 8400] of images [N, 3, 640, 640].

    Its features are those of torchvision's MobileNetV3: little work, so that decoding is what is looked at.
    """
    import torch
    from torchvision.models import mobilenet_v3_large

    class Detector(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = mobilenet_v3_large(weights=None).features
            self.stages = torch.nn.ModuleList([layers[:7], layers[7:13], layers[13:16]])
            self.heads = torch.nn.ModuleList(torch.nn.Conv2d(n, 84, 1) for n in (40, 112, 160))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            found = []
            for stage, head, stride in zip(self.stages, self.heads, (8, 16, 32), strict=True):
                images = stage(images)
                values = head(images).flatten(2)
                found.append(torch.cat([values[:, :4] * stride, values[:, 4:].sigmoid()], 1))
            return torch.cat(found, 2)

    return Detector()


def make(data: Path, run: Run, cifar: Path | None) -> None:
    """Makes the run's images, under many names, and its model, where they are not there."""
    data.mkdir(parents=True, exist_ok=True)
    if run.input in NETWORKS:
        name, function, preprocess, _ = NETWORKS[run.input]
        model = data / name
        if not model.is_file():
            size = re.search(r"letterbox=(\d+)", preprocess)
            shape = ["--input-shape", f"3,{size[1]},{size[1]}"] if size else []
            subprocess.run([sys.executable, "-m", "cnn_engine.export", function, *shape,
                            "--output", str(model)], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    folder = folder_of(data, run)
    if folder.is_dir():
        return
    if run.input == "arrays":
        first = data / "images.npy"
        if not first.is_file():
            images = np.lib.format.open_memmap(first, "w+", np.uint8, (ARRAY_IMAGES, 3, 32, 32))
            parts = np.array_split(images, os.cpu_count() or 1)
            real = None if cifar is None else dataset.load(cifar).images
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda part, seed: fill(part, seed, real), parts, range(len(parts))))
            images.flush()
        names = [(first, f"part-{number:03d}.npy") for number in range(run.images // ARRAY_IMAGES)]
    else:
        tars = make_tars(data)
        times = run.images // JPEGS
        names = [(path, f"{path.stem}-{n:03d}.tar") for n in range(times) for path in tars]
    folder.mkdir()
    for source, name in names:
        os.link(source, folder / name)


def fill(images: np.ndarray, seed: int, real: np.ndarray | None) -> None:
    """Fills ``images`` with ``real`` ones, again and again, or with random pixels."""
    if real is None:
        flat = images.reshape(-1)
        flat[...] = np.frombuffer(np.random.default_rng(seed).bytes(flat.size), np.uint8)
        return
    for first in range(0, len(images), len(real)):
        part = images[first : first + len(real)]
        part[...] = real[: len(part)]


def make_tars(data: Path) -> list[Path]:
    """Returns tars of JPEGs of 500x375, made where they are not there."""
    paths = [data / f"jpegs-{number}.tar" for number in range(TARS)]
    if not paths[-1].is_file():
        with ProcessPoolExecutor() as pool:
            files = list(pool.map(jpeg, range(JPEGS), chunksize=8))
        for number, path in enumerate(paths):
            with tarfile.open(path, "w") as archive:
                for at in range(number, JPEGS, TARS):
                    member = tarfile.TarInfo(f"{at:06d}.jpg")
                    member.size = len(files[at])
                    archive.addfile(member, io.BytesIO(files[at]))
    return paths


def jpeg(seed: int) -> bytes:
    """Returns a JPEG of 500x375, smooth with noise, of about 86 kB."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8))
    fine = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
    noise = generator.integers(-12, 13, fine.shape, np.int16)
    stream = io.BytesIO()
    Image.fromarray(np.clip(fine + noise, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def measured(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Returns the run's row: its report, or what went wrong."""
    words = [
        sys.executable, "-m", "cnn_engine.infer", str(folder_of(options.data, run)), "--device",
        options.device, "--workers", run.workers, "--quiet",
    ]  # fmt: skip
    if run.shard != "auto":
        words += ["--shard-size", run.shard]
    if run.input in NETWORKS:
        model, _, preprocess, more = NETWORKS[run.input]
        words += ["--model", str(options.data / model), "--preprocess", preprocess, *more]
    cpus = sorted(os.sched_getaffinity(0))[: run.gpus * CPUS_A_GPU]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[: run.gpus]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(visible))
    with tempfile.TemporaryDirectory(dir=options.data) as name:
        report = Path(name, "report.json")
        words += ["--output", str(Path(name, "rows")), "--json", str(report)]
        words = ["taskset", "-c", ",".join(map(str, cpus)), *words]
        about = {"run": str(run), **asdict(run), "cpus": len(cpus)}
        try:
            done = subprocess.run(
                words, env=environment, capture_output=True, text=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            return {**about, "error": "not done after 300 s"}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-3:]
            return {**about, "error": f"exit code {done.returncode}: {' / '.join(last)}"}
        text = report.read_text("utf-8").replace(name, "OUTPUT").replace(str(options.data), "DATA")
        document = json.loads(text)
        shutil.rmtree(Path(name, "rows"))
    document["environment"].pop("host", None)
    document["hosts"] = ["a machine"] * len(document["hosts"])
    return {**about, **{key: document[key] for key in KEPT}}


#: Of a run's report.
KEPT = (
    "schema", "kind", "command", "started", "environment", "settings", "workers", "threads", "hosts",
    "device_name", "decoder", "cores", "images", "errors", "input_bytes", "output_bytes", "shards", "retries",
    "restarts", "planning_s", "working_s", "duration_s", "images_per_s", "late_s", "cpu_s",
    "peak_bytes_a_worker", "stages",
    "ceilings", "bound_by", "efficiency",
)  # fmt: skip


#: Ceilings, in the order of the table.
COLUMNS = (
    "read", "decode", "copy", "read and copy", "compute", "write", "all at once", "cores",
)  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """Returns the table as Markdown."""
    lines = [
        "| input | GPUs | workers | images/s | of as many times one GPU | working, s | read | decode | "
        "copy | read and copy | compute | write | all at once | all on the CPUs | bound by | "
        "of its ceiling | CPU time per image, us | of the CPUs | peak per worker, GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    good = [row for row in rows if "error" not in row]

    def compared(row: dict[str, Any]) -> tuple:
        return row["run"].partition("-")[0], row["images"], row.get("shard")

    alone = {compared(row): row["images_per_s"] for row in good if row["gpus"] == 1}
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['run']} | failed: {row['error'][:200]} |")
            continue
        one = alone.get(compared(row))
        share = units.percent(row["images_per_s"] / (row["gpus"] * one)) if one else ""
        ceilings = " | ".join(
            units.number(row["ceilings"][name]["images_per_s"]) if name in row["ceilings"] else ""
            for name in COLUMNS
        )
        kind = row["run"].partition("-")[0]
        kind = {"jpegs": "JPEGs", "detector": "JPEGs, a detector"}.get(kind, kind)
        lines.append(
            f"| {row['images']:,} {kind} | {row['gpus']} | {row['workers']} | "
            f"{units.number(row['images_per_s'])} | {share} | {row['working_s']:.1f} of "
            f"{row['duration_s']:.1f} | {ceilings} | {row['bound_by']} | "
            f"{units.percent(row['efficiency'])} | {1e6 * row['cpu_s'] / row['images']:.2f} | "
            f"{units.percent(row['cpu_s'] / (row['cpus'] * row['working_s']))} | "
            f"{row['peak_bytes_a_worker'] / 1e9:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
