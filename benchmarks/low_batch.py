"""Compares imported CNNs at low batch on a GPU with PyTorch, interleaved in one run.

    python -m benchmarks.low_batch --json low.json --markdown low.md --chart low.png

Each network gets random weights, is exported to ONNX by PyTorch and read by the engine; PyTorch runs the
module itself, in a CUDA graph and compiled, and JAX the graph that the engine reads. For a batch and a data
type all take turns, a sample each a round: passes one behind another, a pass after the second-level cache was
overwritten (device time by events; JAX and ONNX Runtime keep their streams to themselves and are timed by the
host's clock), and a pass from host memory to host memory. A number is the median of its samples. Logits are
compared with PyTorch's in float64. What was found is written after every cell, so that a run may be ended at
any time; with ``--keep`` the next one leaves out the cells that are in ``--json`` already. Cells come in the
order of ``--batch``, then ``--dtype``, then ``--network``: what counts most is named first.

On machines with several GPUs each takes a part, and ``--merge`` makes one record of them. Exports and
compilers, which take most of the time, then run in processes (``--jobs``) before anything is timed:

    for i in 1 2 3 4; do CUDA_VISIBLE_DEVICES=$((i - 1)) taskset -c $((16 * i - 16))-$((16 * i - 1)) \\
      python -m benchmarks.low_batch --shard $i/4 --jobs 20 --prepare 250 --limit 500 --models models \\
      --json low-$i.json & done; wait
    python -m benchmarks.low_batch --merge low-?.json --json low.json --markdown low.md --chart low.png

    python -m benchmarks.low_batch --check --network resnet18 --size 33x47 224 --batch 1 3 33 --json odd.json

compares logits alone. ``--device cpu`` runs all of it on the CPU in float32, to look at the benchmark itself.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from cnn_engine import cli, devices
from cnn_engine.errors import CnnEngineError
from cnn_engine.measure import environment

from . import low_batch_contestants as who
from . import low_batch_pages as pages
from . import low_batch_processes as jobs
from . import result_file
from .low_batch_configuration import ITEM, PEERS, Group

NETWORKS = (
    "resnet18", "resnet50", "resnet152", "densenet121", "densenet201", "mobilenet_v3_large",
    "efficientnet_b0", "vgg16", "convnext_tiny", "squeezenet1_1",
)  # fmt: skip
BATCHES, DTYPES = (1, 20, 5, 10, 15), ("float16", "float32", "tf32")


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("low_batch", __doc__, "json", "markdown", "chart")
    p.add_argument(
        "--network", nargs="+", default=list(NETWORKS), metavar="NAME",
        help="names as benchmarks.models has them, module:function, or dense: those of dense_networks",
    )  # fmt: skip
    p.add_argument(
        "--batch", nargs="+", type=cli.whole_number(1, 1024), default=list(BATCHES), metavar="N"
    )
    p.add_argument("--dtype", nargs="+", choices=list(ITEM), default=list(DTYPES))
    p.add_argument(
        "--peers", nargs="*", choices=PEERS, default=["torch", "default"],
        help="PyTorch in a CUDA graph, modes of torch.compile, which take up to minutes a cell, cuDNN's "
        "graphs, JAX, ONNX Runtime's providers and TensorRT; one that is not installed is left out, and the "
        "result says so",
    )  # fmt: skip
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tune", action="store_true", help="our engine measures its kernels: see run")
    p.add_argument(
        "--size", nargs="+", type=_size, default=[None], metavar="ROWS[xCOLUMNS]",
        help="of images, several with --check; default: the network's own",
    )  # fmt: skip
    p.add_argument("--check", action="store_true", help="compares logits, and times nothing")
    p.add_argument(
        "--keep", action="store_true",
        help="adds to what is in --json, without the cells that it has",
    )  # fmt: skip
    result_file.add_shards(p, "cells", "cell")
    p.add_argument(
        "--jobs", type=cli.whole_number(0, 256), default=0, metavar="N",
        help="processes that make cells ready side by side, before any is timed; default: 0, each cell "
        "is made ready before it is timed",
    )  # fmt: skip
    p.add_argument(
        "--prepare", type=float, default=600.0, metavar="SECONDS",
        help="with --jobs: what is not compiled after so long takes no part; default: 600",
    )  # fmt: skip
    p.add_argument("--rounds", type=cli.whole_number(1, 1000), default=7, help="default: 7")
    p.add_argument(
        "--milliseconds", type=float, default=20.0, metavar="MS", help="of a sample; default: 20"
    )
    p.add_argument(
        "--bits", type=cli.whole_number(0, 10**6), default=1000, metavar="RUNS",
        help="passes that must give the same bits, a tenth of them beside another engine's at the "
        "smallest batch; default: 1000",
    )  # fmt: skip
    p.add_argument("--steps", action="store_true", help="keeps the time of each step, too")
    p.add_argument("--models", metavar="FOLDER", help="keeps the exported networks there")
    p.add_argument(
        "--limit", type=float, default=float("inf"), metavar="SECONDS",
        help="after so long no other cell is begun",
    )  # fmt: skip
    return p


def _named(networks: Iterable[str]) -> Iterator[str]:
    for name in networks:
        if name == "dense":
            from . import dense_networks  # which needs PyTorch

            yield from dense_networks.NAMES
        else:
            yield name


def _size(text: str) -> tuple[int, int]:
    """Returns rows and columns, such as of 224 or 192x160."""
    number = cli.whole_number(8, 4096)
    rows, _, columns = text.partition("x")
    return number(rows), number(columns or rows)


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    p = parser()
    options = p.parse_args(arguments)
    options.network = [*_named(options.network)]
    if len(options.size) > 1 and not options.check:
        p.error("--size: expected one size without --check")
    if options.check and "int8" in options.dtype:
        p.error("--check: expected a float --dtype")
    if options.jobs and (options.check or options.size != [None]):
        p.error("--jobs: expected neither --check nor --size")
    found = result_file.ResultFile(
        "low_batch", options, arguments, environment={}, bits=options.bits, rows=[], left_out={},
        steps=[],
    )  # fmt: skip
    if options.merge:
        _merge(found, options.merge)
        return cli.DONE
    found.document["environment"] = environment.describe(devices.select(options.device))
    for package in (
        "torch",
        "torchvision",
        "timm",
        "nvidia-cudnn-frontend",
        "jax",
        "onnxruntime",
        "tensorrt",
    ):
        version = environment.package_version(package)
        found.document["environment"]["versions"][package] = version
    found.begin(found.document["environment"]["commit"])
    if options.keep and options.json and Path(options.json).exists():
        _take_in(found, options.json, "--keep")
        left_out = found.document["left_out"].items()
        found.document["left_out"] = {cell: why for cell, why in left_out if "not begun" not in why}
    with tempfile.TemporaryDirectory() as top:
        folder = Path(options.models or top)
        folder.mkdir(parents=True, exist_ok=True)
        for cell, one in (_in_processes if options.jobs else _here)(found, options, folder):
            document = found.document
            if isinstance(one, str):
                document["left_out"][cell] = one
                print(f"{cell}: left out: {one}", flush=True)
            else:
                document["rows"] += one["rows"]
                document["left_out"] |= {
                    f"{name} of {cell}": why for name, why in one["left_out"].items()
                }
                if one["steps"]:
                    document["steps"].append({"cell": cell, "steps": one["steps"]})
                print(pages.line(one["rows"]), flush=True)
            found.write(pages.markdown)
    found.write(pages.markdown, pages.draw)
    return cli.DONE


def _key(row: Mapping[str, Any]) -> tuple:
    """Returns what a row is of: network, data type, batch, and the size of an image."""
    return row["network"], row["dtype"], row["batch"], tuple(row["size"])


def _take_in(found: result_file.ResultFile, path: str, option: str) -> None:
    """Adds what another run of the same commit found on the same kind of GPU."""

    def same(document: Mapping[str, Any]) -> str:
        about = document["environment"]
        return f"commit {about['commit']} on {about['gpu'] or about['cpu']}"

    known = found.take_in(path, option, _key, same)
    document = found.document
    document["left_out"] = known["left_out"] | document["left_out"]
    there = {one["cell"] for one in document["steps"]}
    document["steps"] += [one for one in known["steps"] if one["cell"] not in there]


def _merge(found: result_file.ResultFile, paths: list[str]) -> None:
    """Makes one record of several: see ``--merge``."""
    document = found.document
    found.begin_merge(paths[0], "environment", "bits")
    for path in paths:
        _take_in(found, path, "--merge")
    order = [*NETWORKS, *sorted({row["network"] for row in document["rows"]} - {*NETWORKS})]

    def place(row: Mapping[str, Any]) -> tuple:
        return order.index(row["network"]), [*ITEM].index(row["dtype"]), row["batch"], row["size"]

    document["rows"].sort(key=place)
    there = {f"{row['network']} {row['dtype']} batch {row['batch']}" for row in document["rows"]}
    document["left_out"] = {
        cell: why for cell, why in document["left_out"].items() if cell not in there
    }
    found.write(pages.markdown, pages.draw)
    print(pages.summary(document))


def _wanted(found: result_file.ResultFile, options: Any) -> list[jobs.Cell]:
    """Returns the cells of this run's part, what counts most first."""
    cells = [
        jobs.Cell(network, dtype, batch)
        for batch in options.batch
        for dtype in options.dtype
        for network in options.network
    ]
    return jobs.part(cells, *options.shard)


def _in_processes(
    found: result_file.ResultFile, options: Any, folder: Path
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yields cells and what was found of them, or why nothing was, made ready in other processes."""
    there = {_key(row)[:3] for row in found.document["rows"]}
    left = [
        cell
        for cell in _wanted(found, options)
        if (cell.network, cell.dtype, cell.batch) not in there
    ]

    def say(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    for cell, one in jobs.measure(left, options, folder, say):
        yield str(cell), one


def _here(
    found: result_file.ResultFile, options: Any, folder: Path
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yields the same, one network after the other in this process."""
    began, there = perf_counter(), {_key(row) for row in found.document["rows"]}
    clock = None if options.check else who.Clock(options.device)
    groups: dict[tuple[str, str], list[jobs.Cell]] = {}
    for cell in _wanted(found, options):
        groups.setdefault((cell.network, cell.dtype), []).append(cell)
    for (network, dtype), cells in sorted(
        groups.items(), key=lambda item: options.network.index(item[0][0])
    ):
        for size in options.size:
            left, at = cells, f" of {size[0]}x{size[1]}" if size else ""
            try:
                late(began, options)
                model = who.Model(network, size, folder, options.device)
                left = [c for c in cells if (network, dtype, c.batch, model.shape[1:]) not in there]
                if not left:
                    continue
                group = Group(model, dtype, options)
            except (CnnEngineError, TimeoutError) as error:
                yield from ((f"{cell}{at}", str(error)) for cell in left)
                continue
            for cell in left:
                try:
                    late(began, options)
                    if options.check:
                        one = group.check(cell.batch)
                    else:
                        group.prepare(cell.batch)
                        one = group.measure(cell.batch, clock)
                except (CnnEngineError, TimeoutError) as error:
                    one = str(error)
                yield f"{cell}{at}", one
            group.close()


def late(began: float, options: Any) -> None:
    """Raises TimeoutError after ``--limit``."""
    if perf_counter() - began >= options.limit:
        raise TimeoutError(f"--limit {options.limit:g}: not begun")


if __name__ == "__main__":
    sys.exit(main())
