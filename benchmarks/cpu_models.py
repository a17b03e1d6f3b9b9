"""Compares imported networks on the CPU with OpenVINO and ONNX Runtime, interleaved in one run.

    python -m benchmarks.cpu_models --json models.json --markdown models.md --chart models.png

Each network gets random weights, is exported to ONNX by PyTorch, and every contestant reads that file and the
same images. Logits are compared with PyTorch's in float64. For a batch and a number of threads all are
interleaved, one sample each per round, as in :mod:`benchmarks.cpu_peers`; a number is the median of its
samples.
A network may be the path of an ONNX file too: then its logits are compared with our reference in float64.
``--networks strangers`` are 40 of timm, and ``--networks dense`` twelve for pixels and boxes. ``--models``
keeps what PyTorch exported for these batches, so that a later run only measures:

    python -m benchmarks.cpu_models --networks strangers --batch 1 --models DIR --export-only
    python -m benchmarks.cpu_models --networks strangers --batch 1 --models DIR --threads 1 --dtype float32

With ``--dtype int8`` ONNX Runtime quantizes the file (Q/DQ nodes, uint8 activations by int8 weights per
channel), and all contestants read that one. Rates are compared with the peaks of 8-bit multiply-adds, of the
instructions that we use and of VNNI, which are measured in the same run. For each cell it says whether the
goal is met (:mod:`benchmarks.cpu_models_int8`). Ours is timed in float32 too where a goal compares the two.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cnn_engine import Engine, _cpu, cli
from cnn_engine.devices import threads as thread_counts
from cnn_engine.errors import InputError, UnsupportedError
from cnn_engine.graph import reference
from cnn_engine.graph.model import Model
from cnn_engine.graph.onnx import load
from cnn_engine.io.files import write_text
from cnn_engine.measure import environment
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.matmul import Matmul

from . import models, result_file
from .cpu_contestants import DTYPES, Contestant, onnxruntime_on, openvino_on
from .cpu_models_int8 import INT8, TO_FLOAT32, cell, openvino_crashes, peak, verdict, vnni
from .cpu_models_page import SHOWN, TARGETS, contestant_name, draw, markdown, memory_text
from .cpu_peers import describe_machine, take_turns
from .models_worker import error_of, images_name, logits_name


@dataclass
class Row:
    """One contestant on one network, batch and number of threads; seconds are of one batch.

    Attributes:
        error: the largest difference from float64's logits, as a part of the largest logit.
        ratio: of a row of ours, how many times as fast as the better library of its type.
        error_ratio: of a row of ours in float32, its error as a multiple of ONNX Runtime's.
        share_of_peak: of a row in int8, its multiply-adds as a part of what the cores' peak is.
    """

    network: str
    batch: int
    threads: int
    name: str
    ours: bool
    dtype: str
    seconds: float
    lowest_s: float
    highest_s: float
    samples: int
    images_per_s: float
    error: float
    ratio: float | None = None
    best_peer: str | None = None
    error_ratio: float | None = None
    share_of_peak: float | None = None


@dataclass
class Exported:
    """A network's file, and images with the logits that float64 gives, by batch.

    Attributes:
        quantized: the path of its quantized file, or None.
        converts: whether OpenVINO's converter reads that, as its plug-in would crash.
    """

    name: str
    path: str
    images: dict[int, np.ndarray]
    logits: dict[int, np.ndarray]
    quantized: str | None = None
    converts: bool = False


def quantize(path: str, images: np.ndarray, folder: Path) -> str:
    """Quantizes a file by ONNX Runtime's tool as is fastest on CPUs; returns the path of the result."""
    from onnxruntime import quantization

    prepared, made = (str(folder / name) for name in ("prepared.onnx", "quantized.onnx"))
    quantization.quant_pre_process(path, prepared, skip_symbolic_shape=True)
    (value,) = load(path, batch=1).inputs

    class Images(quantization.CalibrationDataReader):
        left = iter([{value.name: images[:1]}])

        def get_next(self):
            return next(self.left, None)

    quantization.quantize_static(
        prepared, made, Images(), quant_format=quantization.QuantFormat.QDQ, per_channel=True,
        activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip
    return made


def multiply_adds(path: str, batch: int) -> int:
    """Returns the multiply-adds of a network's convolutions and matrix products."""
    graph = Model(load(path, batch=batch)).base
    layers = [node for node in graph.nodes if isinstance(node.op, Conv2d | Linear | Matmul)]
    return sum(graph.cost_of(node).flops for node in layers) // 2


def make(name: str, options: Any, folder: Path) -> Exported:
    """Exports a network by its name, or reads the ONNX file at that path; quantizes it for int8.

    Raises:
        InputError: PyTorch could not export it.
    """
    exported = _exported(name, options, folder)
    if INT8 in options.dtype:
        images = exported.images[options.batch[0]]
        exported.quantized = quantize(exported.path, images, folder)
        exported.converts = openvino_crashes(exported.quantized, images.shape)
    return exported


def _exported(name: str, options: Any, folder: Path) -> Exported:
    batches = options.batch
    if name.endswith(".onnx"):
        rng, images, logits = np.random.default_rng(0), {}, {}
        for batch in batches:
            graph = load(name, batch=batch)
            (value,) = graph.inputs
            images[batch] = rng.normal(size=(batch, *value.shape[1:])).astype(np.float32)
            (logits[batch],) = reference.reference(graph, {value.name: images[batch]}).values()
        return Exported(Path(name).stem, name, images, logits)
    task = {
        "spec": models.spec_of(name), "size": None, "exporters": ["torchscript"], "batches": batches,
        "folder": str(folder), "threads": thread_counts.default(),
    }  # fmt: skip
    kept = folder / "exported.json"
    found = json.loads(kept.read_text()) if kept.exists() else {"files": {}}
    if not {*map(str, batches)} <= {*found["files"]}:
        made = models.child("make", task, options.limit)
        found = made if "reason" in made else made["exports"]["torchscript"]
        if "reason" in found:
            raise InputError(f"{name}: {found['reason']}")
        write_text(str(kept), json.dumps(found))
    with np.load(folder / "logits.npz") as arrays:
        images = {batch: arrays[images_name(batch)] for batch in batches}
        logits = {batch: arrays[logits_name(batch)] for batch in batches}
    return Exported(name, found["files"][str(batches[0])], images, logits)


def ours(
    exported: Exported, batch: int, threads: int, dtypes: Sequence[str]
) -> Iterator[Contestant]:
    """Our engine, without its checks of arguments: its plans on arrays that stay."""
    images, shape = exported.images[batch], exported.logits[batch].shape
    for dtype in dtypes:
        path, computes = (
            (exported.path, dtype) if dtype != INT8 else (exported.quantized, "float32")
        )
        try:
            engine = Engine(path, device="cpu", threads=threads, dtype=computes)
        except UnsupportedError as error:
            print(f"left out: cnn_engine {dtype}: {error}", flush=True)
            continue
        plan = engine.plan(len(images), images.dtype)
        out = np.empty(shape, np.float32)
        plan.bind(images.ctypes.data, out.ctypes.data)

        def run(plan=plan, engine=engine, images=images):
            plan.run()

        yield Contestant("cnn_engine", True, dtype, run, lambda out=out: out)


def contestants(
    exported: Exported, batch: int, threads: int, dtypes: Sequence[str], missing: dict[str, str]
) -> list[Contestant]:
    """Returns who is installed; ``missing`` collects who is not, with the reason."""
    images, path = exported.images[batch], exported.path
    shape = exported.logits[batch].shape
    compared = ["float32"] if exported.name in TO_FLOAT32 and INT8 in dtypes else []
    found = [*ours(exported, batch, threads, list(dict.fromkeys([*dtypes, *compared])))]
    floats, integers = [dtype for dtype in dtypes if dtype != INT8], exported.quantized
    for name, make_them in (
        ("OpenVINO", lambda: openvino_on(path, images, threads, floats)),
        ("ONNX Runtime", lambda: onnxruntime_on(path, images, shape, threads) if floats else ()),
        (
            "OpenVINO",
            lambda: in_int8(openvino_on(integers, images, threads, ["float32"], exported.converts)),
        ),
        ("ONNX Runtime", lambda: in_int8(onnxruntime_on(integers, images, shape, threads))),
    )[: 4 if integers else 2]:
        if name in missing:
            continue
        try:
            found += make_them()
        except ImportError as error:
            missing[name] = str(error)
            print(f"left out: {name}: {error}", flush=True)
    return found


def in_int8(contestants: Iterable[Contestant]) -> list[Contestant]:
    """Returns the contestants as those of a quantized file."""
    return [replace(contestant, dtype=INT8) for contestant in contestants]


def compete(
    exported: Exported,
    batch: int,
    threads: int,
    dtypes: Sequence[str],
    repeats: int,
    missing: dict[str, str],
) -> tuple[list[Row], dict[str, Any] | None, tuple[float, float, float]]:
    """Compares the contestants' logits, then times them interleaved.

    Returns:
        rows, the :class:`~benchmarks.cpu_models_int8.Cell` of int8, and a core's peaks: FLOP/s of float32,
        multiply-adds a second of 8-bit integers by the instructions that are selected, and by VNNI.
    """
    competing = contestants(exported, batch, threads, dtypes, missing)
    errors = []
    for contestant in competing:
        contestant.run()
        found = np.array(contestant.probabilities(), np.float64)
        errors.append(error_of(found, exported.logits[batch]))
    samples, floats = take_turns(competing, repeats)
    rows = []
    for contestant, error, times in zip(competing, errors, samples, strict=True):
        median = statistics.median(times)
        rows.append(
            Row(exported.name, batch, threads, contestant.name, contestant.ours, contestant.dtype, median,
                min(times), max(times), len(times), batch / median, error)
        )  # fmt: skip
    compare(rows)
    integers, of_vnni = peak(_cpu.selected_integer_instructions()), peak(vnni())
    work = multiply_adds(exported.path, batch)
    for row in rows:
        if row.dtype == INT8:
            row.share_of_peak = work / row.seconds / (integers * threads)
    return rows, cell(rows, work, of_vnni), (floats, integers, of_vnni)


def compare(rows: Sequence[Row]) -> None:
    """Fills in our ratios to the better library, and to ONNX Runtime's error."""
    for row in rows:
        if not row.ours:
            continue
        peers = [other for other in rows if not other.ours and other.dtype == row.dtype]
        if peers:
            best = min(peers, key=lambda other: other.seconds)
            row.ratio, row.best_peer = best.seconds / row.seconds, best.name
        for other in peers:
            if other.name == "ONNX Runtime" and other.error:
                row.error_ratio = row.error / other.error


def layers(exported: Exported, threads: int) -> list[dict[str, Any]]:
    """Returns what each layer of a pass of one image takes, in order."""
    with Engine(exported.path, device="cpu", threads=threads) as engine:
        images = next(iter(exported.images.values()))[:1]
        result = engine.profile(images, batch=1, duration_s=2.0, check=False)
    return [
        {
            "name": layer.name, "kind": layer.kind, "kernel": layer.kernel,
            "seconds": statistics.median(layer.samples_s), "flops": layer.flops // layer.calls,
        }
        for layer in result.layers
    ]  # fmt: skip


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("cpu_models", __doc__, "json", "markdown", "chart")
    p.add_argument(
        "--networks", type=networks, default=list(TARGETS), metavar="A,B",
        help="names and groups as benchmarks.models has them, dense (those of dense_networks), or paths of "
        ".onnx files; default: those with a target",
    )  # fmt: skip
    p.add_argument(
        "--batch", nargs="+", type=cli.whole_number(1, 1024), default=[1, 8], metavar="N"
    )
    p.add_argument(
        "--threads", nargs="+", type=cli.whole_number(1, 1024), default=[1, 2], metavar="N"
    )
    p.add_argument(
        "--dtype", nargs="+", choices=(*DTYPES, INT8), default=list(DTYPES),
        help=f"default: {' '.join(DTYPES)}",
    )  # fmt: skip
    p.add_argument(
        "--repeats", type=cli.whole_number(1, 1000), default=7, help="samples (default: 7)"
    )
    p.add_argument("--models", metavar="FOLDER", help="keeps the exported networks there")
    p.add_argument(
        "--export-only", action="store_true", help="fills --models, and measures nothing"
    )
    p.add_argument(
        "--limit", type=float, default=900, metavar="SECONDS", help="of an export; default: 900"
    )
    return p


def networks(text: str) -> list[str]:
    """Returns the networks that a comma-separated list of names, groups and files names."""
    if "dense" not in text.split(","):
        return models.networks(text)
    from . import dense_networks  # which needs PyTorch

    names = ",".join(dense_networks.NAMES)
    return models.networks(",".join(names if n == "dense" else n for n in text.split(",")))


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    if options.export_only and not options.models:
        raise InputError(
            "--export-only: expected --models, where the networks are kept, found none"
        )
    found = result_file.ResultFile(
        "cpu_models", options, arguments, environment=describe_machine(), load=environment.host_load(),
        integer_instructions=_cpu.selected_integer_instructions(), vnni=vnni(), left_out={}, rows=[],
        int8_cells=[], layers=[], memory=None,
    )  # fmt: skip
    document, peaks = found.document, []
    with tempfile.TemporaryDirectory() as top:
        for name in options.networks:
            folder = Path(options.models or top) / name.rpartition(":")[2].replace("/", "-")
            folder.mkdir(parents=True, exist_ok=True)
            try:
                exported = make(name, options, folder)
            except InputError as error:
                if len(options.networks) == 1:
                    raise
                document["left_out"][name] = str(error)
                print(f"left out: {error}", flush=True)
                continue
            if options.export_only:
                print(f"exported: {name}", flush=True)
                continue
            for threads in options.threads:
                for batch in options.batch:
                    rows, of_int8, found_peaks = compete(
                        exported, batch, threads, options.dtype, options.repeats, document["left_out"],
                    )  # fmt: skip
                    peaks.append(found_peaks)
                    document["rows"] += [asdict(row) for row in rows]
                    document |= {
                        name: statistics.median(column)
                        for name, column in zip(
                            ("fma_peak_flops", "integer_peak_macs", "vnni_peak_macs"),
                            zip(*peaks, strict=True), strict=True,
                        )
                    }  # fmt: skip
                    _show(rows)
                    if of_int8:
                        document["int8_cells"].append(of_int8)
                        print(f"  {verdict(of_int8)}", flush=True)
            if exported.name == SHOWN:
                document["layers"] = layers(exported, 1)
                task = {"file": exported.path, "threads": 1, "batch": 1}
                document["memory"] = models.child("resident", task, options.limit, "resident")
                print(memory_text(document))
            found.write(markdown, draw)
            if not options.models:
                shutil.rmtree(folder)
    return cli.DONE if not set(options.networks) & set(document["left_out"]) else cli.CHECK_FAILED


def _show(rows: Sequence[Row]) -> None:
    first = rows[0]
    times = "  ".join(f"{contestant_name(asdict(row))} {row.seconds * 1e3:.2f} ms" for row in rows)
    ratio = "" if first.ratio is None else f"  {first.ratio:.2f}x {first.best_peer}"
    if first.share_of_peak is not None:
        ratio += f"  {first.share_of_peak:.0%} of the peak"
    worse = "" if first.error_ratio is None else f", {first.error_ratio:.2f} of ONNX Runtime's"
    print(
        f"{first.network}  threads {first.threads} batch {first.batch}  {times}{ratio}  "
        f"error {first.error:.1e}{worse}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
