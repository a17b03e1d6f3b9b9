"""The thesis' table in OpenACC: every variant and data mode, beside CUDA's and the published times.

Cells are one image a pass. Each is kept in a file of its own as soon as it is done, and one that is there is
not measured again, so that a table can be made in several runs on a machine that is lent for minutes:

    python -m benchmarks.openacc_table --output results/openacc
    python -m benchmarks.openacc_table --device openacc:host --beside cpu --images 60 --output /tmp/openacc
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from cnn_engine import Engine, cli, workload
from cnn_engine.errors import CnnEngineError
from cnn_engine.io.files import write_text
from cnn_engine.measure import profile

PUBLISHED = Path(__file__).with_name("published.json")
MODES = ("managed", "transfer", "resident")
#: How often a cell's images are run: timed, looked into, and with whatever comes before and after.
RUNS = 2.5
#: Images of the run that counts regions and launches; the known numbers are of 1,200.
COUNTED = 1200


@dataclass(frozen=True)
class Cell:
    """One way of computing the network, on ``images`` images one at a time."""

    device: str
    data_mode: str
    variant: str
    reduction: bool
    images: int

    @property
    def name(self) -> str:
        form = "reduction" if self.reduction else "in-order"
        return f"{self.device}-{self.data_mode}-{self.variant}-{form}-{self.images}".replace(
            ":", "-"
        )


def measure(cell: Cell, weights: str, data: str, threads: int) -> dict:
    """Returns what was found: seconds, their parts, the check, and counts of OpenACC's events."""
    dataset = workload.get("cifar10").load_data(data, cell.images)
    try:
        engine = Engine(
            "cifar10", weights=weights, device=cell.device, data_mode=cell.data_mode,
            variant=cell.variant, reduction=cell.reduction, threads=threads,
        )  # fmt: skip
    except CnnEngineError as error:
        return {"cell": asdict(cell), "unsupported": str(error)}
    with engine:
        result = engine.profile(dataset, batch=1, warmup=20, iterations=1)
        found = {
            "cell": asdict(cell),
            "unsupported": None,
            "environment": result.environment,
            "check": asdict(result.check) if result.check else None,
            "correct": result.accuracy and [result.accuracy.correct, result.accuracy.total],
            "seconds": result.phases.forward_s,
            "images": result.images_done,
            "parts": parts(result),
        }
        if engine.device.kind == "openacc" and cell.images <= COUNTED:
            probabilities = np.zeros((len(dataset), 10), np.float32)
            seen = profile.collect(engine, dataset.images, probabilities, 1, result).openacc
            found["counts"] = {
                kind: seen.count(kind) for kind in ("region", "kernel", "data", "copyin", "copyout")
            }
            found["conv_regions"] = seen.count("region", "conv2d")
            found["conv_launches"] = seen.count("kernel", "conv2d")
            found["profile"] = asdict(seen)
    return found


def parts(result) -> dict[str, float]:
    """Returns seconds by kind of layer, and of copies, of the run that looks into passes."""
    found: dict[str, float] = {}
    for layer in result.layers:
        seconds = layer.host_s if layer.device_s is None else layer.device_s
        found[layer.kind] = found.get(layer.kind, 0.0) + seconds
    found["copies"] = sum(copy.seconds for copy in result.copies)
    return found


def expected_s(cell: Cell, found: dict[Cell, dict]) -> float:
    """Returns about how long a cell takes, by the same one on fewer images; 0 where there is none."""
    return max(
        (
            RUNS * one["seconds"] * cell.images / other.images
            for other, one in found.items()
            if other.images < cell.images
            and replace(other, images=cell.images) == cell
            and one.get("seconds")
        ),
        default=0.0,
    )


def published(cell: Cell) -> float | None:
    """Returns the thesis' seconds for a cell, or None; it does not say which explicit data mode it was."""
    for row in json.loads(PUBLISHED.read_text())["thesis"]["gpu_s"]:
        managed = row["data_mode"] == "managed"
        same = managed or (row["variant"], row["reduction"]) == (cell.variant, cell.reduction)
        if row["images"] == cell.images and managed == (cell.data_mode == "managed") and same:
            return row["seconds"]
    return None


def markdown(found: dict[Cell, dict], device: str, beside: str | None) -> str:
    """Returns the table."""
    lines = [
        "# The thesis' table in OpenACC",
        "",
        "Seconds for all images, one a pass, copies included. Published: NVIDIA V100, nvc.",
        "",
        f"| images | data mode | variant | reduction | published | {device} | conv | pad | copies | other | "
        f"regions, launches of convolutions | {beside or 'beside'} | {device} / {beside or 'beside'} |",
        "|" + "---|" * 13,
    ]
    for cell, one in sorted(
        found.items(), key=lambda item: (item[0].images, MODES.index(item[0].data_mode))
    ):
        if cell.device != device:
            continue
        twin = found.get(Cell(beside or "", *list(asdict(cell).values())[1:]), {})
        known, own, other = published(cell), one.get("seconds"), twin.get("seconds")
        form = "yes" if cell.reduction else "no"
        head = (
            f"| {cell.images:,} | {cell.data_mode} | {cell.variant} | {form} | {number(known)} | "
        )
        if own is None:
            lines.append(f"{head}{one['unsupported']} | | | | | | {number(other)} | |")
            continue
        kinds = dict(one["parts"])
        split = [kinds.pop(kind, 0.0) for kind in ("conv", "pad", "copies")]
        split.append(sum(kinds.values()))
        counts = (
            f"{one['conv_regions']:,}, {one['conv_launches']:,}" if "conv_regions" in one else "-"
        )
        ratio = number(own / other) if other else "-"
        lines.append(
            f"{head}{number(own)} | {' | '.join(map(number, split))} | {counts} | {number(other)} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def main(arguments: list[str] | None = None) -> int:
    """Measures the cells that are missing and writes the table; returns the exit code."""
    return cli.run(_main, arguments)


def _main(arguments: list[str] | None) -> int:
    p: argparse.ArgumentParser = cli.ArgumentParser(
        prog="python -m benchmarks.openacc_table", description=__doc__.splitlines()[0]
    )
    p.add_argument("--device", default="openacc", help="openacc (default) or openacc:host")
    p.add_argument("--beside", default="cuda", help="another device (default: cuda); none")
    p.add_argument(
        "--images", default="1200,50000", help="with commas between (default: 1200,50000)"
    )
    p.add_argument("--weights", default="default", help="as run has it")
    p.add_argument("--data", default="synthetic", help="as run has it (default: synthetic)")
    p.add_argument(
        "--limit",
        type=float,
        default=1e9,
        metavar="S",
        help="no cell begins after so many seconds, or that would take longer by what fewer images took",
    )
    p.add_argument("--threads", type=int, default=1, help="of what runs on the CPU (default: 1)")
    p.add_argument("--output", required=True, metavar="FOLDER", help="for cells and the table")
    options = p.parse_args(arguments)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    beside = None if options.beside == "none" else options.beside
    start = perf_counter()
    found: dict[Cell, dict] = {}
    left = 0
    for cell in (
        Cell(device, mode, variant, reduction, int(images))
        for images in options.images.split(",")
        for device in (options.device, beside)
        if device
        for mode in MODES
        for variant in ("if", "pad")
        for reduction in (False, True)
    ):
        path = folder / f"{cell.name}.json"
        if not path.exists():
            if perf_counter() - start + expected_s(cell, found) > options.limit:
                left += 1
                continue
            one = measure(cell, options.weights, options.data, options.threads)
            write_text(path, json.dumps(one, indent=1) + "\n")
            print(f"{cell.name}: {one['unsupported'] or number(one['seconds']) + ' s'}", flush=True)
        found[cell] = json.loads(path.read_text())
    write_text(folder / "openacc.md", markdown(found, options.device, beside))
    print(f"{folder / 'openacc.md'}: {len(found)} cells, {left} left to be measured")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
