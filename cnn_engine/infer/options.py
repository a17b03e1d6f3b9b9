"""The options of ``cnn-engine infer``: their parser and checks, and the number of workers."""

from __future__ import annotations

import argparse
import os
import re

from .. import cli, shared_options
from ..devices import cuda_module, threads
from ..errors import expected
from ..io.preprocess import Preprocess
from ..kernels import select
from . import estimate, formats, packages

MOST_WORKERS = 4096


#: CPUs of a worker that decodes for a GPU, where it has more than one worker: threads of one process wait for
#: each other, since Pillow takes Python's lock many times per image.
CPUS_A_WORKER, MOST_A_GPU = 4, 4


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine infer",
        description="Runs a network over data sets of any size and writes exactly one row per image to "
        "Parquet files, even if workers die: repeat the command to complete a run. Shards of "
        "the input are computed by worker processes of this machine, by Ray, or by the tasks of a cluster's "
        "array of jobs.",
        epilog="exit codes: 0 done; 1 some shards were set aside, which are named, and all others are done, "
        "or more images are bad than --max-bad says; 2 the input is at fault; 130 interrupted by Ctrl-C and "
        "143 by SIGTERM, what was done is kept",
    )
    count = cli.whole_number
    p.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="*",
        help="folders, image files, WebDataset tars, Parquet files (of image bytes or of arrays), CIFAR-10's "
        ".bin, IDX, .npy, .npz of all inputs by name; globs of them; or @LIST, a file with one of these per "
        "line",
    )
    p.add_argument("--output", metavar="DIR", help="the folder of the rows, created where missing")
    shared_options.add_network(p)
    p.add_argument(
        "--weights", default="default", help="default (default), random, or a file as for run"
    )
    p.add_argument(
        "--device", default="auto",
        help="auto (default), cpu, cuda: a worker a GPU; or cuda:N: that GPU alone",
    )  # fmt: skip
    p.add_argument("--variant", default="auto", help="as for run (default: auto)")
    p.add_argument("--reduction", action=argparse.BooleanOptionalAction, help="as for run")
    p.add_argument(
        "--dtype", default="float32", help=f"one of {', '.join(select.DTYPES)} (default: float32)"
    )
    p.add_argument("--batch", type=count(1, 10**8), help="images per pass (default: by rule)")
    p.add_argument(
        "--preprocess", metavar="WHAT", help="what is done to images that are not of the network's size, "
        "such as imagenet, or resize=256,crop=224 (default: what the model's file says, else "
        "they must be); all are turned upright as EXIF says, unless orientation=ignore is given",
    )  # fmt: skip
    p.add_argument(
        "--columns", default="", metavar="image=NAME,label=NAME,id=NAME",
        help="columns of Parquet files (default: "
        + "; ".join(f"{role}: the first of {', '.join(names)}" for role, names in formats.COLUMNS.items())
        + ")",
    )  # fmt: skip
    p.add_argument(
        "--top", type=count(1, 10**6), metavar="K",
        help="keep the K largest numbers and their classes (default: all); columns call them probabilities "
        "where the network ends in a softmax, else outputs",
    )  # fmt: skip
    p.add_argument(
        "--max-bad", type=count(0, 10**12), metavar="N",
        help="exit with 1 where more images than N are bad, once all are done (default: no limit)",
    )  # fmt: skip
    p.add_argument(
        "--shard-size", type=_size, metavar="SIZE",
        help="of input in a shard, such as 64MB (default: a 256th of all, from 4 MiB, or a pass over arrays, "
        "to 1 GiB)",
    )  # fmt: skip
    p.add_argument(
        "--workers", type=_workers, default="auto", metavar="N",
        help=f"auto (default): one per GPU, and up to {MOST_A_GPU} where there are files to decode; one per "
        "CPU; each has its share of the CPUs",
    )  # fmt: skip
    p.add_argument(
        "--threads", type=count(1, threads.MOST), help="of each worker (default: its share)"
    )
    p.add_argument(
        "--engine", choices=("local", "ray"), default="local",
        help="what runs the workers (default: local, processes of this machine)",
    )  # fmt: skip
    p.add_argument(
        "--address", help="of a Ray cluster, or auto (default: one that ends with this command)"
    )
    p.add_argument("--shard-index", type=count(0, 10**6), metavar="I", help="of an array of jobs: do every "
                   "N-th shard from the I-th on, I from 0")  # fmt: skip
    p.add_argument("--shard-count", type=count(1, 10**6), metavar="N", help="how many jobs it has")
    p.add_argument(
        "--stall", type=cli.number(0, 10**7), default=600, metavar="S",
        help="end and replace a worker that made no progress for so long (default: 600)",
    )  # fmt: skip
    p.add_argument(
        "--verify", action="store_true", help="read all that is there with its checksums, and do again what "
        "is broken",
    )  # fmt: skip
    p.add_argument(
        "--ceilings", action=argparse.BooleanOptionalAction, default=True,
        help="measure each stage alone at the end, for the report (default: yes)",
    )  # fmt: skip
    p.add_argument(
        "--metrics",
        metavar="PATH",
        help="write progress in Prometheus' text format, again and again",
    )
    p.add_argument("--json", metavar="PATH", help="write the report as JSON; - for standard output")
    p.add_argument(
        "--html", metavar="PATH", help="write the report as one page; - for standard output"
    )
    p.add_argument("--quiet", action="store_true", help="print no report and no progress")
    estimate.add_options(p)
    return p


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?i?)b?", text.strip().lower())
    value = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if not 1 <= value <= 1 << 50:
        raise argparse.ArgumentTypeError(f"expected a size such as 64MB or 1GiB, found {text!r}")
    return int(value)


def _workers(text: str) -> int | str:
    return text if text == "auto" else cli.whole_number(1, MOST_WORKERS)(text)


def check_options(options: argparse.Namespace) -> None:
    """Refuses options that do not go together, before any work is done.

    Raises:
        InputError: names the option.
    """
    if not options.inputs:
        raise expected("INPUT", "a folder or file of images", "none")
    if not options.output:
        raise expected("--output", "a folder for the rows", "none")
    if (options.shard_index is None) != (options.shard_count is None):
        raise expected("--shard-index", "--shard-count with it", "one without the other")
    if options.shard_count is not None and options.shard_index >= options.shard_count:
        raise expected("--shard-index", f"below {options.shard_count}", options.shard_index)
    if options.address is not None and options.engine != "ray":
        raise expected("--address", "the option --engine ray with it", options.engine)
    if options.preprocess is not None:
        Preprocess.parse(options.preprocess)
    packages.arrow()
    outputs = {f"--{name}": getattr(options, name) for name in ("metrics", "json", "html")}
    cli.check_outputs(outputs, shared_options.files_read(options))
    place = os.path.realpath(options.output)
    for path in options.inputs:
        if os.path.isdir(path) and os.path.commonpath([place, os.path.realpath(path)]) == (
            os.path.realpath(path)
        ):
            raise expected("--output", f"a folder outside of the input {path}", options.output)


def columns_of(text: str) -> dict[str, str]:
    """Returns ``--columns``: ``image``, ``label`` and ``id`` -> the name of a column."""
    found = {}
    for word in filter(None, text.split(",")):
        role, equals, name = word.partition("=")
        if role not in formats.COLUMNS or not equals or not name:
            raise expected("--columns", "image=NAME,label=NAME,id=NAME", repr(word))
        found[role] = name
    return found


def is_cuda(device: str) -> bool:
    """Whether a device's name stands for a GPU on this machine."""
    if device == "auto":
        return cuda_module.unavailable() is None
    return device.startswith("cuda")


def worker_count(options: argparse.Namespace, cuda: bool, kind: str | None) -> int:
    """Returns how many workers there are, for inputs of a kind."""
    if options.workers != "auto":
        return options.workers
    if options.engine == "ray":
        from ..ray_cluster import cluster_workers

        return cluster_workers(options.address, cuda)
    if cuda:
        from .local_pool import visible_gpus

        gpus = 1 if ":" in options.device else max(len(visible_gpus()), 1)
        if ":" in options.device or kind not in formats.ENCODED:
            return gpus
        return gpus * min(max(threads.default() // gpus // CPUS_A_WORKER, 1), MOST_A_GPU)
    return threads.default()
