"""The thesis' table in OpenACC: every variant and data mode, with CUDA's and the published times.

Cells are one image a pass. Each is kept in a file of its own as soon as it is done, and one that is there is
not measured again, so that a table can be made in several runs on a machine that is lent for minutes:

    python -m benchmarks.openacc_table --output results/openacc
    python -m benchmarks.openacc_table --device openacc:host --beside cpu --images 60 --output /tmp/openacc

Up to 1,200 images a cell is looked into: layers, copies, OpenACC's events. More are run once and timed
alone, for at most ``--cell`` seconds; where these end before the images do, their time is scaled, and the
table says so.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from cnn_engine import Engine, cli, workload
from cnn_engine.errors import CnnEngineError, expected
from cnn_engine.io.files import write_text
from cnn_engine.measure import environment, measurement, profile, timing

from . import result_file

PUBLISHED = Path(__file__).with_name("published.json")
MODES = ("managed", "transfer", "resident")
#: Images of the run that counts regions and launches; the known numbers are of 1,200.
COUNTED = 1200
#: Images between two looks at the clock, in cells of more.
BLOCK = 1000
#: Passes before the first that counts.
WARMUP = 20
#: Seconds of a cell beside its passes: an engine, its check, the last block.
AROUND_S = 3.0


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


def measure(cell: Cell, weights: str, data: str, threads: int, most_s: float) -> dict:
    """Returns what was found: seconds and the check; up to 1,200 images also parts, and OpenACC's events."""
    dataset = workload.get("cifar10").load_data(data, cell.images)
    try:
        engine = Engine(
            "cifar10", weights=weights, device=cell.device, data_mode=cell.data_mode,
            variant=cell.variant, reduction=cell.reduction, threads=threads,
        )  # fmt: skip
    except CnnEngineError as error:
        return {"cell": asdict(cell), "unsupported": str(error)}
    with engine:
        found = {"cell": asdict(cell), "unsupported": None}
        look = _once if cell.images > COUNTED else _looked_into
        return found | look(engine, cell, dataset, most_s)


def _once(engine: Engine, cell: Cell, dataset: workload.Dataset, most_s: float) -> dict:
    """Returns the seconds of one run over all images, or over those that ``most_s`` allows, scaled."""
    check = engine.check(dataset.images[: measurement.CHECK_IMAGES])
    described = environment.describe(engine.device)
    if not check.passed:
        return {
            "environment": described,
            "check": asdict(check),
            "unsupported": f"wrong: {check.max_abs_diff:.3g} away",
        }
    ran, blocks = 0, []
    while ran < cell.images and sum(blocks) < most_s:
        images = dataset.images[ran : ran + BLOCK]
        probabilities = np.empty((len(images), engine.network.classes), np.float32)
        passes = timing.time_passes(
            engine, images, probabilities, 1, warmup=0 if blocks else WARMUP, iterations=1,
            duration_s=None, progress=lambda count: None,
        )  # fmt: skip
        if passes.interrupted:
            raise KeyboardInterrupt
        blocks.append(passes.forward_s)
        ran += len(images)
    return {
        "environment": described | environment.state(engine.device, environment.host_load()),
        "check": asdict(check),
        "seconds": sum(blocks) * cell.images / ran,
        "images": ran,
        "blocks_s": blocks,
    }


def _looked_into(engine: Engine, cell: Cell, dataset: workload.Dataset, most_s: float) -> dict:
    """Returns seconds, their parts, and the counts of OpenACC's events."""
    result = engine.profile(dataset, batch=1, warmup=WARMUP, iterations=1)
    if result.interrupted:
        raise KeyboardInterrupt
    found = {
        "environment": result.environment,
        "check": asdict(result.check) if result.check else None,
        "correct": result.accuracy and [result.accuracy.correct, result.accuracy.total],
        "seconds": result.phases.forward_s,
        "images": result.images_done,
        "parts": parts(result),
    }
    if engine.device.kind == "openacc":
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


def expected_s(cell: Cell, found: dict[Cell, dict], most_s: float) -> float:
    """Returns about how long a cell takes, by the same one on fewer images; 0 where there is none."""
    return max(
        (
            min(one["seconds"] * cell.images / other.images, most_s) + AROUND_S
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
        "Seconds for all images, one per pass, copies included. Published: NVIDIA V100, nvc. Above",
        f"{COUNTED:,} images passes are not looked into.",
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
        beside_it = timed(twin)
        form = "yes" if cell.reduction else "no"
        head = (
            f"| {cell.images:,} | {cell.data_mode} | {cell.variant} | {form} | {number(known)} | "
        )
        if own is None:
            lines.append(f"{head}{one['unsupported']} | | | | | | {beside_it} | |")
            continue
        kinds = dict(one.get("parts", {}))
        split = [kinds.pop(kind, 0.0) for kind in ("conv", "pad", "copies")]
        split = [*split, sum(kinds.values())] if "parts" in one else [None] * 4
        counts = (
            f"{one['conv_regions']:,}, {one['conv_launches']:,}" if "conv_regions" in one else "-"
        )
        ratio = number(own / other) if other else "-"
        lines.append(
            f"{head}{timed(one)} | {' | '.join(map(number, split))} | {counts} | {beside_it} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def timed(found: dict) -> str:
    """Returns a cell's seconds, and from how many images they were scaled."""
    text, ran = number(found.get("seconds")), found.get("images")
    return f"{text}, scaled from {ran:,}" if ran and ran < found["cell"]["images"] else text


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Measures the cells that are missing and writes the table; returns the exit code."""
    p = result_file.parser("openacc_table", __doc__)
    p.add_argument("--device", default="openacc", help="openacc (default) or openacc:host")
    p.add_argument("--beside", default="cuda", help="another device (default: cuda); none")
    p.add_argument(
        "--images", default="1200,50000", help="with commas between (default: 1200,50000)"
    )
    p.add_argument(
        "--modes", default=",".join(MODES), help=f"with commas between (default: {','.join(MODES)})"
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
    p.add_argument(
        "--cell",
        type=float,
        default=40.0,
        metavar="S",
        help="of a cell of more than 1,200 images; what is left of them is scaled (default: 40)",
    )
    p.add_argument("--threads", type=int, default=1, help="of what runs on the CPU (default: 1)")
    p.add_argument("--output", required=True, metavar="FOLDER", help="for cells and the table")
    options = p.parse_args(arguments)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    if not options.cell > 0:
        raise expected("--cell", "a positive number of seconds", options.cell)
    beside = None if options.beside == "none" else options.beside
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise expected("--modes", f"some of {', '.join(MODES)}", unknown[0])
    start = perf_counter()
    found: dict[Cell, dict] = {}
    left = 0
    for cell in (
        Cell(device, mode, variant, reduction, int(images))
        for images in options.images.split(",")
        for device in (options.device, beside)
        if device
        for mode in modes
        for variant in ("if", "pad")
        for reduction in (False, True)
    ):
        path = folder / f"{cell.name}.json"
        if not path.exists():
            if perf_counter() - start + expected_s(cell, found, options.cell) > options.limit:
                left += 1
                continue
            one = measure(cell, options.weights, options.data, options.threads, options.cell)
            write_text(path, json.dumps(one, indent=1) + "\n")
            print(f"{cell.name}: {one['unsupported'] or number(one['seconds']) + ' s'}", flush=True)
        found[cell] = json.loads(path.read_text())
    write_text(folder / "openacc.md", markdown(found, options.device, beside))
    print(f"{folder / 'openacc.md'}: {len(found)} cells, {left} left to be measured")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
