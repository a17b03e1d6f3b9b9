"""The published tables again, from our own runs: ``python -m benchmarks.tables``.

Writes ``tables.md``, ``tables.json`` and charts: the thesis' table (each way of writing the convolution,
each placement of the data, one image a pass), the course's (``Op Time`` and correctness), and every
variant at several batch sizes. Published figures, with their sources, are in ``published.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from cnn_engine import cli, devices, workload
from cnn_engine.devices import threads
from cnn_engine.errors import InputError
from cnn_engine.io.files import describe_os_error
from cnn_engine.kernels import select

from . import markdown, result_file
from .configurations import Cell, CheckFailed, Engines, Interrupted, measure, runner_cost_s, to_dict

THESIS, COURSE, BATCH = "thesis", "course", "batch"
TABLES = (THESIS, COURSE, BATCH)
COURSE_IMAGES = (100, 1_000, 10_000)
BATCHES = (1, 5, 10, 15, 20, 100, 1_000)
#: The variants that the thesis has; the other tables take every one there is.
THESIS_VARIANTS = ("if", "pad")
#: Where data lives, in the thesis' and the batch table.
DATA_MODES = {"cpu": ("resident",), "cuda": ("resident", "transfer", "managed")}
#: Images per pass on the CPU, where the course's own choice (all in one pass) only fills memory.
CPU_COURSE_BATCH = 100
#: Seconds of passes for a cell of the batch table, a repeat.
BATCH_TABLE_SECONDS = 0.3
#: Images of the run that times every layer, in the batch table, when a pass has fewer.
BATCH_TABLE_IMAGES = 200

DATA = {"cifar10": "cifar-10-batches-bin", "ece408": "fashion-mnist"}
WEIGHTS = {"cifar10": "convnetjs-cifar10", "ece408": "ece408/ece408-0002.params"}
ROOT = Path(__file__).resolve().parent.parent


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("tables", __doc__)
    count = cli.whole_number
    folder = "$CNN_ENGINE_TEST_DATA, else ../shared/data beside the project"
    p.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    p.add_argument(
        "--images",
        type=_counts,
        default=(1_200, 50_000),
        help="of the thesis' table, with commas between (default: 1200,50000)",
    )
    p.add_argument("--repeats", type=count(1, 1_000), default=5, help="of each cell (default: 5)")
    p.add_argument(
        "--limit-seconds",
        type=cli.number(0, 10**6),
        metavar="S",
        help="about how long a cell may take a repeat; what is left out is extrapolated, and marked "
        "(default: as long as it takes)",
    )
    p.add_argument(
        "--threads", type=count(1, threads.MOST), help="of CPU work (default: the CPUs granted)"
    )
    p.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"the folder with {' and '.join(DATA.values())} (default: {folder})",
    )
    p.add_argument(
        "--weights",
        type=Path,
        metavar="DIR",
        help=f"the folder with {' and '.join(WEIGHTS.values())} (default: {folder})",
    )
    p.add_argument("--output", type=Path, required=True, metavar="DIR", help="is made if missing")
    p.add_argument("--charts", action=argparse.BooleanOptionalAction, default=True, help="or none")
    for table in TABLES:
        p.add_argument(
            f"--{table}", action="store_true", help=f"the {table} table (default: all three)"
        )
    return p


def _counts(text: str) -> tuple[int, ...]:
    convert = cli.whole_number(1, 1_000_000)
    return tuple(dict.fromkeys(convert(word) for word in text.split(",")))


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    charts = _charts() if options.charts else None
    _make_folder(options.output)
    asked = [table for table in TABLES if getattr(options, table)] or list(TABLES)
    paths = {"json": options.output / "tables.json", "markdown": options.output / "tables.md"}
    found = result_file.ResultFile("tables", argparse.Namespace(**paths), arguments)
    tables = Tables(options, found.document["command"])
    interrupted = False
    try:
        for table in asked:
            getattr(tables, table)()
    except CheckFailed as error:
        cli.print_error(error)
        return cli.CHECK_FAILED
    except Interrupted:
        interrupted = True
    finally:
        tables.engines.close()
    if not tables.environment:  # interrupted before the first complete round
        return cli.INTERRUPTED
    found.document |= tables.document()
    images = charts.draw(tables, options.output) if charts else {}
    found.write(lambda _: markdown.render(tables, images, interrupted))
    print(f"wrote {', '.join(['tables.md', 'tables.json', *images.values()])} to {options.output}")
    return cli.INTERRUPTED if interrupted else cli.DONE


def _charts() -> Any:
    try:
        from . import charts
    except ImportError as error:
        raise InputError(
            "--charts: expected matplotlib (pip install 'cnn-engine[benchmarks]', or --no-charts), "
            f"found: {error}"
        ) from error
    return charts


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: {path}: {describe_os_error(error)}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"--output: expected a writable folder, found {path} without permission")


class Tables:
    """Measures the tables, and holds what the files are written from."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options, self.command = options, command
        default = Path(os.environ.get("CNN_ENGINE_TEST_DATA", ROOT.parent / "shared" / "data"))
        self.data_folder = options.data or default
        weights_folder = options.weights or default
        weights = {name: str(weights_folder / path) for name, path in WEIGHTS.items()}
        self.engines = Engines(options.device, options.threads, weights)
        self.published = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
        self.cells: dict[str, list[Cell]] = {}
        self.records: dict[str, int] = {}  # images that the data sets have
        self.runner_cost_s: float | None = None
        self.console = Console(stderr=True)
        self.kind = devices.select(options.device).kind

    # ---- what there is to measure ----

    def thesis(self) -> None:
        """Each variant of the thesis, in each placement of the data, an image a pass."""
        cells = [
            Cell("cifar10", variant, reduction, mode, images, batch=1)
            for images in self.options.images
            for mode in DATA_MODES[self.kind]
            for variant in THESIS_VARIANTS
            for reduction in (False, True)
        ]
        self._measure(THESIS, cells, self.options.limit_seconds)

    def course(self) -> None:
        """Every variant on the course's network, as many images as the course took."""
        on_cpu = self.kind == "cpu"
        cells = [
            Cell("ece408", variant, reduction, "resident", images, batch)
            for images in COURSE_IMAGES
            for variant, reduction in self._variants()
            for batch in [min(images, CPU_COURSE_BATCH) if on_cpu else images]
        ]
        self._measure(COURSE, cells, self.options.limit_seconds, whole_program=True)

    def batch(self) -> None:
        """Every variant, in each placement of the data, at several batch sizes."""
        seconds = min(self.options.limit_seconds or BATCH_TABLE_SECONDS, BATCH_TABLE_SECONDS)
        cells = [
            Cell("cifar10", variant, reduction, mode, max(size, _whole(size)), size, seconds)
            for size in BATCHES
            for mode in DATA_MODES[self.kind]
            for variant, reduction in self._variants(mode)
        ]
        self._measure(BATCH, cells, None)
        self.runner_cost_s = runner_cost_s()

    def _variants(self, data_mode: str = "resident") -> list[tuple[str, bool]]:
        """Every variant of the registry that runs on the device with ``data_mode``, and its reductions."""
        return [
            (row.name, reduction)
            for row in select.VARIANTS.values()
            if self.kind in row.devices and data_mode in row.data_modes
            for reduction in ((False, True) if row.reduction else (False,))
        ]

    # ---- measuring ----

    def _load(self, name: str, images: int | None = None):
        path = self.data_folder / DATA[name]
        if not path.exists():
            raise InputError(f"--data: expected {DATA[name]} in {self.data_folder}, found none")
        return workload.get(name).load_data(str(path), images)

    def _measure(
        self, table: str, cells: list[Cell], limit_s: float | None, whole_program: bool = False
    ) -> None:
        name = cells[0].workload
        dataset = self._load(name)
        self.records[name] = len(dataset)
        self.cells[table] = cells
        with self.console.status(f"{table} table") as status:
            measure(
                cells,
                self.engines,
                dataset,
                self.options.repeats,
                limit_s,
                lambda what, left: status.update(f"{table} table, {left} to go; last: {what}"),
                (lambda images: self._load(name, images)) if whole_program else None,
            )

    # ---- what was found ----

    @property
    def environment(self) -> dict[str, Any]:
        """Where the first result was measured, without the machine's name; empty before it is."""
        for cells in self.cells.values():
            for cell in cells:
                if cell.results:
                    result = cell.results[0]
                    described = dict(result.environment)
                    described.pop("host", None)
                    return described | {"device": result.device, "threads": result.threads}
        return {}

    def document(self) -> dict[str, Any]:
        """What was found, for the JSON file."""
        return {
            "environment": self.environment,
            "records": self.records,
            "repeats": self.options.repeats,
            "limit_seconds": self.options.limit_seconds,
            "runner_cost_s_per_layer": self.runner_cost_s,
            "published": self.published,
            "tables": {table: list(map(to_dict, cells)) for table, cells in self.cells.items()},
        }

    def published_thesis(self, cell: Cell) -> tuple[float, bool] | None:
        """The thesis' seconds for ``cell``, and whether they are scaled from another number of images.

        On the GPU, its figures are one a variant and reduction, and one for managed memory; on the CPU
        there is one, of serial code.
        """
        thesis = self.published["thesis"]
        if self.kind == "cpu":
            serial = thesis["serial_cpu"]
            return serial["seconds"] * cell.images / serial["images"], cell.images != serial[
                "images"
            ]
        for row in thesis["gpu_s"]:
            managed = row["data_mode"] == "managed"
            same = managed or (row["variant"], row["reduction"]) == (cell.variant, cell.reduction)
            if row["images"] == cell.images and managed == (cell.data_mode == "managed") and same:
                return row["seconds"], False
        return None


def _whole(batch: int) -> int:
    """The images of a whole number of passes that the run of the layers gets in the batch table."""
    return max(1, BATCH_TABLE_IMAGES // batch) * batch


if __name__ == "__main__":
    sys.exit(main())
