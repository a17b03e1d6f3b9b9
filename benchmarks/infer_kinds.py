"""infer on every kind of input: ``python -m benchmarks.infer_kinds --work FOLDER --json PATH``.

The same images as arrays and as JPEGs, in as many shards of each kind; every row is compared with the bits
that ``Engine.predict`` gives, and the throughput is put beside the measured ceilings.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from cnn_engine import Engine, cli
from cnn_engine.measure import environment
from cnn_engine.report import units
from cnn_engine.workload import get

from . import result_file

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("npy", "cifar", "parquet-uint8", "parquet-bytes", "tar", "image")
JPEGS = ("parquet-bytes", "tar", "image")


def real_images(path: str | None, count: int) -> np.ndarray:
    """Returns ``count`` images [count, 3, 32, 32]: those of ``path`` again and again, each time shifted."""
    source = get("cifar10").load_data(path or "synthetic", None).images
    repeats = -(-count // len(source))
    return np.concatenate([np.roll(source, number, 3) for number in range(repeats)])[:count]


def make(kind: str, folder: Path, images: np.ndarray, files: list[bytes], parts: int) -> None:
    """Writes the images as ``kind``, in so many files."""
    folder.mkdir(parents=True)
    bounds = np.linspace(0, len(images), parts + 1).astype(int)
    for part, (first, last) in enumerate(pairwise(bounds)):
        path = folder / f"part-{part:03d}"
        some = images[first:last]
        if kind == "npy":
            np.save(f"{path}.npy", some)
        elif kind == "cifar":
            labels = np.zeros((len(some), 1), np.uint8)
            np.concatenate([labels, some.reshape(len(some), -1)], 1).tofile(f"{path}.bin")
        elif kind == "parquet-uint8":
            values = pa.FixedSizeListArray.from_arrays(pa.array(some.reshape(-1)), some[0].size)
            pq.write_table(pa.table({"image": values}), f"{path}.parquet", compression="none")
        elif kind == "parquet-bytes":
            column = pa.array(files[first:last], pa.binary())
            pq.write_table(pa.table({"image": column}), f"{path}.parquet", compression="none")
        elif kind == "tar":
            with tarfile.open(f"{path}.tar", "w") as archive:
                for at in range(first, last):
                    member = tarfile.TarInfo(f"{at:06d}.jpg")
                    member.size = len(files[at])
                    archive.addfile(member, io.BytesIO(files[at]))
        else:
            path.mkdir()
            for at in range(first, last):
                (path / f"{at:06d}.jpg").write_bytes(files[at])


def shard_bytes(folder: Path, parts: int) -> int:
    """Returns a size of shards that gives about ``parts`` of them."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return max(sizes) if len(sizes) == parts else sum(sizes) // parts


def run(folder: Path, out: Path, parts: int, *more: str) -> dict:
    """Runs the command; returns its report."""
    report = out.with_suffix(".json")
    command = [
        sys.executable, "-m", "cnn_engine.infer", str(folder), "--output", str(out), "--device", "cpu",
        "--shard-size", str(shard_bytes(folder, parts)), "--quiet", "--json", str(report), *more,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    return json.loads(report.read_text())


def equal(out: Path, wanted: np.ndarray) -> bool:
    """Whether the rows, in order, are ``wanted`` to the bit, none missing and none twice."""
    table = pq.read_table(sorted(out.glob("shard-*.parquet")))
    values = table["probabilities"].combine_chunks().flatten().to_numpy()
    ids = table["id"].to_pylist()
    return values.tobytes() == wanted.tobytes() and len(set(ids)) == len(ids) == len(wanted)


def page(document: dict) -> str:
    """Returns the record as Markdown."""
    about = document["environment"]
    loads = [row["load_average"] for row in document["rows"]]
    cores = document["rows"][0]["cores"]
    efficiencies = [row["efficiency"] for row in document["rows"] if row["efficiency"] is not None]
    lines = [
        "# Sharded inference of every kind of input",
        "",
        f"{document['images']:,} images of 32x32 made from real ones, in {document['shards']} shards a kind, "
        f"CIFAR-10's network; {about['cpu']} ({about['cpu_instruction_set']}), {cores} CPUs without a GPU;",
        f"`{document['command']}`,",
        f"commit {about['commit']}, {document['started']} ([all figures](infer_kinds.json)).",
        "",
        "`local-1` is one worker with a thread for each CPU, `local-2` two that share them, `ray-2` two",
        "actors of Ray, which has its own processes beside them. All rows are compared with the bits of",
        "`Engine.predict`. Efficiency is the share of the lowest ceiling that was reached: of a stage alone,",
        "or of what all stages together take of the CPUs (`cores`); it is "
        f"{units.percent(min(efficiencies))} to {units.percent(max(efficiencies))}. The load before",
        f"a run, which the run before it is part of, was {min(loads):.1f} to {max(loads):.1f}.",
        "",
        "| input | workers | shards | equal | images/s | bound by | its ceiling | efficiency | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        bound = row["bound_by"]
        ceiling = row["ceilings"][bound]["images_per_s"] if bound else None
        lines.append(
            f"| {row['kind']} | {row['engine']} | {row['shards']} | {'yes' if row['equal'] else 'NO'} | "
            f"{units.number(row['images_per_s'])} | {bound} | {units.number(ceiling)} | "
            f"{units.percent(row['efficiency'])} | {row['load_average']:.1f} |"
        )
    return "\n".join(lines) + "\n"


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs every kind with every engine; returns 0 if all rows were the engine's."""
    p = result_file.parser("infer_kinds", __doc__, "json", "markdown")
    p.add_argument("--work", required=True, help="a new folder for data and rows")
    p.add_argument("--data", help="CIFAR-10 images, as run --data takes them (default: synthetic)")
    p.add_argument("--images", type=int, default=60_000)
    p.add_argument("--shards", type=int, default=40)
    p.add_argument(
        "--engine", action="append", help="local-1, local-2 or ray-2; may be given again"
    )
    options = p.parse_args(arguments)
    rows: list[dict] = []
    kept = result_file.ResultFile(
        "infer_kinds", options, arguments, images=options.images, shards=options.shards, rows=rows
    )
    work = Path(options.work)
    images = real_images(options.data, options.images)
    files = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    decoded = np.empty_like(images)
    for at, data in enumerate(files):
        decoded[at] = np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)
    with Engine("cifar10", device="cpu") as engine:
        wanted = {False: engine.predict(images), True: engine.predict(decoded)}
    for kind in KINDS:
        make(kind, work / kind, images, files, options.shards)
        for name in options.engine or ("local-1", "local-2", "ray-2"):
            engine_name, _, workers = name.partition("-")
            out = work / f"{kind}-{name}"
            load = environment.host_load()
            found = run(
                work / kind, out, options.shards, "--engine", engine_name, "--workers", workers
            )
            rows.append(
                {
                    "kind": kind,
                    "engine": name,
                    "equal": equal(out, wanted[kind in JPEGS]),
                    "shards": found["shards"]["total"],
                    "load_average": load,
                    **{key: found[key] for key in ("images_per_s", "working_s", "duration_s", "bound_by",
                                                   "efficiency", "ceilings", "busiest_stage", "cores",
                                                   "peak_bytes_a_worker")},
                }
            )  # fmt: skip
            print({key: value for key, value in rows[-1].items() if key != "ceilings"}, flush=True)
            kept.document["environment"] = {
                key: value for key, value in found["environment"].items() if key != "host"
            }
            kept.write(page)
    print(page(kept.stamped()))
    return cli.DONE if all(row["equal"] for row in rows) else cli.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
