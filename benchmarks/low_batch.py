"""Imported CNNs at low batch on a GPU beside PyTorch, in one run, in turns.

    python -m benchmarks.low_batch --json low.json --markdown low.md --chart low.png

Each network gets random weights, is exported to ONNX by PyTorch and read by the engine; PyTorch runs the
module itself, in a CUDA graph and compiled. JAX takes no part: it has no form of these networks that it
could read. For a batch and a data type all take turns, a sample each a
round: passes one behind another, a pass after the second-level cache was overwritten (device time by events),
and a pass from host memory to host memory. A number is the median of its samples. Logits are compared with
PyTorch's in float64. What was found is written after every cell, so that a run may be ended at any time;
with ``--keep`` the next one leaves out the cells that are in ``--json`` already.

    python -m benchmarks.low_batch --check --network resnet18 --size 33x47 --batch 1 2 3 33 --json odd.json

compares logits alone.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from cnn_engine import Engine, cli, devices
from cnn_engine.errors import expected
from cnn_engine.graph.graph import Graph
from cnn_engine.io.files import atomic_write, check_writable, write_text
from cnn_engine.measure import environment

from . import low_batch_contestants as who
from .models_worker import error_of

NETWORKS = (
    "resnet18", "resnet50", "resnet152", "densenet121", "densenet201", "mobilenet_v3_large",
    "efficientnet_b0", "vgg16", "convnext_tiny", "squeezenet1_1",
)  # fmt: skip
BATCHES, DTYPES = (1, 5, 10, 15, 20), ("float16", "tf32", "float32")
PEERS = ("torch", "default", "max-autotune")

#: What binds a pass at best on an H200: bytes a second; products a second of a data type, as far as tensor
#: cores reach them; and seconds from one multiprocessor to another (docs/performance.md).
BYTES_PER_S, WAIT_S = 4.3e12, 0.43e-6
FLOPS_PER_S = {"float16": 600e12, "bfloat16": 600e12, "tf32": 300e12, "float32": 100e12}
ITEM = {"float16": 2, "bfloat16": 2, "tf32": 4, "float32": 4}

#: A logit's error may be so many times PyTorch's own in that data type.
MOST_ERROR = 1.5

SUMS = ("conv2d", "conv_transpose2d", "linear", "matmul")


def floor_s(graph: Graph, dtype: str) -> float:
    """Returns seconds below which no pass can be: weights or products, and a wait a layer."""
    depth: dict[str, int] = {}
    flops = 0
    for node in graph.nodes:
        own = max((depth.get(name, 0) for name in node.inputs if name is not None), default=0)
        if node.op.kind in SUMS:
            own += 1
            flops += graph.cost_of(node).flops
        depth.update(dict.fromkeys(node.outputs, own))
    weights = sum(array.size for array in graph.constants.values() if array.dtype.kind == "f")
    deepest = max((depth.get(name, 0) for name in graph.outputs), default=0)
    return max(weights * ITEM[dtype] / BYTES_PER_S, flops / FLOPS_PER_S[dtype]) + deepest * WAIT_S


def measure_cell(
    model: who.Model, dtype: str, batch: int, own: who.Ours, clock: who.Clock, options: Any
) -> dict[str, Any]:
    """Returns the rows of one network, data type and batch, and who is left out and why."""
    images = model.images(batch)
    wanted = model.exact(images)
    contestants, left_out = [own.contestant(images)], {}
    for found in who.pytorch(model, dtype, images, options.peers):
        if isinstance(found, tuple):
            left_out[found[0]] = found[1]
        else:
            contestants.append(found)
    import cupy

    errors = {}
    for one in contestants:
        for _ in range(who.WARMUP):
            one.run()
        try:
            errors[one.name] = error_of(
                cupy.asnumpy(cupy.asarray(one.logits())).astype(np.float64), wanted
            )
        except ValueError as error:
            errors[one.name] = str(error)
    clock.take_turns(contestants, options.rounds, options.milliseconds)
    rows = [
        {
            "network": model.name, "size": list(model.shape[1:]), "dtype": dtype, "batch": batch,
            "name": one.name, "ours": one.ours, "device_ms": statistics.median(one.samples),
            "lowest_ms": min(one.samples), "highest_ms": max(one.samples),
            "flushed_ms": statistics.median(one.flushed), "wall_ms": statistics.median(one.walls),
            "error": errors[one.name] if isinstance(errors[one.name], float) else None,
            "wrong": None if isinstance(errors[one.name], float) else errors[one.name],
        }
        for one in contestants
    ]  # fmt: skip
    first, *peers = rows
    first["floor_ms"] = floor_s(own.engine.network.graph(batch), dtype) * 1e3
    if options.bits:
        first["bits"] = options.bits
        first["same_bits"] = clock.same_bits(contestants[0], options.bits)
        first["beside_another"] = own.beside_another(images, options.bits // 10)
    if peers:
        best = min(peers, key=lambda row: row["device_ms"])
        first |= {
            "best_peer": best["name"], "ratio": best["device_ms"] / first["device_ms"],
            "flushed_ratio": min(row["flushed_ms"] for row in peers) / first["flushed_ms"],
            "wall_ratio": min(row["wall_ms"] for row in peers) / first["wall_ms"],
        }  # fmt: skip
        own = [row["error"] for row in peers if row["error"]]
        if own and first["error"] is not None:
            first["error_ratio"] = first["error"] / min(own)
    return {"rows": rows, "left_out": left_out}


def check_cell(
    model: who.Model, dtype: str, batch: int, own: who.Ours, options: Any
) -> dict[str, Any]:
    """Returns the rows of a cell whose logits alone are compared."""
    images = model.images(batch)
    wanted = model.exact(images)
    rows = []
    contestants = [own.contestant(images), *who.pytorch(model, dtype, images, options.peers)]
    left_out = {one[0]: one[1] for one in contestants if isinstance(one, tuple)}
    for one in contestants:
        if isinstance(one, tuple):
            continue
        one.run()
        error = error_of(one.whole().astype(np.float64), wanted)
        rows.append(
            {"network": model.name, "size": list(model.shape[1:]), "dtype": dtype, "batch": batch,
             "name": one.name, "ours": one.ours, "error": error, "wrong": None}
        )  # fmt: skip
    peers = [row["error"] for row in rows if not row["ours"]]
    if peers:
        rows[0]["error_ratio"] = rows[0]["error"] / max(min(peers), 1e-30)
    return {"rows": rows, "left_out": left_out}


def steps_of(engine: Engine, batch: int) -> list[dict[str, Any]]:
    """Returns the steps of a pass with their kernels and the device's time by events, in us."""
    from cnn_engine.devices.cuda import CudaDevice

    device = engine.device
    assert isinstance(device, CudaDevice)
    images = np.zeros((batch, *engine.network.input_shape), np.float32)
    out = np.empty((batch, engine.network.classes), np.float32)
    plan = engine.plan_at(images.ctypes.data, out.ctypes.data, batch, images.dtype)
    found: list[list[float]] = [[] for _ in plan.steps]
    for _ in range(9):
        marks = []
        device.delay(2e-3)  # the host is ahead: what is timed is not the launch
        for step in plan.steps:
            begin, end = device.event(), device.event()
            begin.record(device.stream)
            step.function(*step.args)
            end.record(device.stream)
            marks.append((begin, end))
        device.synchronize()
        for times, (begin, end) in zip(found, marks, strict=True):
            times.append(device.elapsed_s(begin, end) * 1e6)
    return [
        {"name": step.name, "kind": step.kind, "kernel": step.kernel,
         "us": statistics.median(times), "flops": step.flops, "bytes": step.bytes}
        for step, times in zip(plan.steps, found, strict=True)
    ]  # fmt: skip


def ms(value: float | None) -> str:
    """Such as 0.142."""
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def markdown(document: Mapping[str, Any]) -> str:
    """Returns the tables."""
    about = document["environment"]
    checked = [row for row in document["rows"] if row["ours"] and "device_ms" not in row]
    document = {**document, "rows": [row for row in document["rows"] if "device_ms" in row]}
    ours = [row for row in document["rows"] if row["ours"]]
    ahead = [row for row in ours if row.get("ratio", 0) > 1]
    lines = [
        "# Imported CNNs at low batch",
        "",
        f"{about['gpu'] or 'no GPU'}, driver {about['driver']}, commit {about['commit'] or 'not known'}, "
        f"{document['started']}; `{document['command']}`.",
        "",
        "ms of a batch: device time by events, passes one behind another; flushed: after the second-level "
        "cache was overwritten; wall: from host memory to host memory. The peer is the fastest of those that "
        "took part in that cell. The floor is that of docs/performance.md; error: of the logits, as a part "
        "of the largest, from PyTorch's in float64.",
        "",
        f"Ahead in {len(ahead)} of {len(ours)} cells.",
        "",
        "| network | dtype | batch | ours | best peer | times | flushed, times | wall, times | of the floor "
        "| error (PyTorch's) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ours:
        cell = [
            other
            for other in document["rows"]
            if not other["ours"]
            and all(other[key] == row[key] for key in ("network", "dtype", "batch"))
        ]
        best = min(cell, key=lambda other: other["device_ms"], default=None)
        peer = f"{ms(best['device_ms'])} {best['name']}" if best else ""
        own = min((other["error"] for other in cell if other["error"]), default=None)
        error = row["wrong"] or f"{row['error']:.1e}" + (f" ({own:.1e})" if own else "")
        floor = f"{row['floor_ms'] / row['device_ms']:.0%}" if row.get("floor_ms") else ""

        def times(key: str, row: Mapping[str, Any] = row) -> str:
            return f"{row[key]:.2f}" if row.get(key) else ""

        lines.append(
            f"| {row['network']} | {row['dtype']} | {row['batch']} | {ms(row['device_ms'])} | {peer} "
            f"| {times('ratio')} | {ms(row['flushed_ms'])}, {times('flushed_ratio')} "
            f"| {ms(row['wall_ms'])}, {times('wall_ratio')} | {floor} | {error} |"
        )
    if checked:
        within = sum(row.get("error_ratio", 0) <= MOST_ERROR for row in checked)
        worst = max(checked, key=lambda row: row.get("error_ratio", 0))
        sizes = dict.fromkeys("x".join(map(str, row["size"])) for row in checked)
        lines += [
            "",
            f"Logits alone, images of {', '.join(sizes)}: the error is at most {MOST_ERROR} times "
            f"PyTorch's own in {within} of {len(checked)} cells; the worst is {worst['network']} "
            f"{worst['dtype']}, batch {worst['batch']}, {worst.get('error_ratio', 0):.2f} times.",
        ]
    bits = [row for row in ours if "same_bits" in row]
    if bits:
        same = sum(row["same_bits"] for row in bits)
        runs = sorted({row["bits"] for row in bits})
        lines += [
            "",
            f"{' and '.join(map(str, runs))} passes gave the same bits in {same} of {len(bits)} cells.",
        ]
    beside = [row["beside_another"] for row in ours if "beside_another" in row]
    if beside:
        lines.append(
            f"Beside another engine's on another stream passes gave theirs in {sum(beside)} of "
            f"{len(beside)}."
        )
    lines += [
        f"\nLeft out: {name}, {reason}" for name, reason in document["left_out"].items()
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def draw(document: Mapping[str, Any], file: Any) -> None:
    """Draws how many times as fast as the best peer each cell is, a panel a data type, as PNG."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row.get("ratio")]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows)) or ["float16"]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    batches = sorted({row["batch"] for row in rows})
    figure = Figure(
        figsize=(2 + 1.3 * max(len(networks), 3), 3 * len(dtypes)), layout="constrained"
    )
    panels = figure.subplots(len(dtypes), 1, squeeze=False)[:, 0]
    width = 0.8 / max(len(batches), 1)
    shades = ("#9dc3f0", "#5d97dd", "#2f6db8", "#f2bf8d", "#e08a3c")
    for axes, dtype in zip(panels, dtypes, strict=True):
        for index, batch in enumerate(batches):
            found = {
                row["network"]: row["ratio"]
                for row in rows
                if (row["dtype"], row["batch"]) == (dtype, batch)
            }
            axes.bar(
                [i + (index - (len(batches) - 1) / 2) * width for i in range(len(networks))],
                [found.get(network, 0.0) for network in networks], width,
                color=shades[index % len(shades)], label=f"batch {batch}",
            )  # fmt: skip
        axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(networks)), networks, rotation=15)
        axes.set_ylabel(f"{dtype}: times as fast\nas the best peer")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8, ncols=len(batches))
    about = document["environment"]
    panels[0].set_title(f"{about['gpu']}, commit {about['commit'] or 'not known'}", fontsize=10)
    figure.savefig(file, format="png", dpi=120)


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="python -m benchmarks.low_batch",
        description="Times imported networks at low batch on a GPU beside PyTorch, in turns.",
    )
    p.add_argument(
        "--network", nargs="+", default=list(NETWORKS), metavar="NAME",
        help="names as benchmarks.models has them, or module:function",
    )  # fmt: skip
    p.add_argument(
        "--batch", nargs="+", type=cli.whole_number(1, 1024), default=list(BATCHES), metavar="N"
    )
    p.add_argument("--dtype", nargs="+", choices=list(ITEM), default=list(DTYPES))
    p.add_argument(
        "--peers", nargs="*", choices=PEERS, default=["torch", "default"],
        help="PyTorch in a CUDA graph, and modes of torch.compile, which take up to a minute a cell",
    )  # fmt: skip
    p.add_argument(
        "--size",
        type=_size,
        metavar="ROWS[xCOLUMNS]",
        help="of an image; default: the network's own",
    )
    p.add_argument("--check", action="store_true", help="compares logits, and times nothing")
    p.add_argument(
        "--keep",
        action="store_true",
        help="adds to what is in --json, without the cells that it has",
    )
    p.add_argument("--rounds", type=cli.whole_number(1, 1000), default=7, help="default: 7")
    p.add_argument(
        "--milliseconds", type=float, default=20.0, metavar="MS", help="of a sample; default: 20"
    )
    p.add_argument(
        "--bits", type=cli.whole_number(0, 10**6), default=1000, metavar="RUNS",
        help="passes that must give the same bits; default: 1000",
    )  # fmt: skip
    p.add_argument("--steps", action="store_true", help="keeps the time of each step, too")
    p.add_argument("--models", metavar="FOLDER", help="keeps the exported networks there")
    p.add_argument(
        "--limit", type=float, default=float("inf"), metavar="SECONDS",
        help="after so long no other cell is begun",
    )  # fmt: skip
    p.add_argument("--json", metavar="PATH", help="writes what was found, after every cell")
    p.add_argument("--markdown", metavar="PATH", help="writes tables")
    p.add_argument("--chart", metavar="PATH", help="writes a chart, as PNG")
    return p


def _size(text: str) -> tuple[int, int]:
    """Returns rows and columns, such as of 224 or 192x160."""
    number = cli.whole_number(8, 4096)
    rows, _, columns = text.partition("x")
    return number(rows), number(columns or rows)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    return cli.run(_main, arguments)


def _main(arguments: list[str] | None) -> int:
    options = parser().parse_args(arguments)
    for name in ("json", "markdown", "chart"):
        if getattr(options, name):
            check_writable(getattr(options, name), f"--{name}")
    began, watch = perf_counter(), environment.Stopwatch()
    device = devices.select("cuda")
    document: dict[str, Any] = {
        "schema": "cnn_engine.low_batch/1",
        "command": shlex.join(["python", "-m", "benchmarks.low_batch", *(arguments or sys.argv[1:])]),
        "environment": environment.describe(device),
        "rows": [], "left_out": {}, "steps": [],
    }  # fmt: skip
    document["environment"]["versions"]["torch"] = environment.package_version("torch")
    if options.keep and options.json and Path(options.json).exists():
        before = json.loads(Path(options.json).read_text())
        if before.get("schema") != document["schema"]:
            raise expected("--json", f"a file of {document['schema']}", before.get("schema"))
        commits = [about["environment"]["commit"] for about in (before, document)]
        if commits[0] != commits[1]:
            raise expected("--keep", f"cells of commit {commits[1]}", str(commits[0]))
        document |= {key: before[key] for key in ("rows", "steps")}
        document["left_out"] = {
            name: why for name, why in before["left_out"].items() if "not begun" not in why
        }
        document["command"] = "; ".join(
            dict.fromkeys([*before["command"].split("; "), document["command"]])
        )
    there = {_cell(row) for row in document["rows"]}

    def write(last: bool) -> None:
        stamped = document | watch.stamp()
        if options.json:
            write_text(options.json, json.dumps(stamped, indent=1) + "\n")
        if options.markdown:
            write_text(options.markdown, markdown(stamped))
        if options.chart and last:
            with atomic_write(options.chart, "wb") as file:
                draw(stamped, file)

    def late(what: str) -> bool:
        if perf_counter() - began < options.limit:
            return False
        document["left_out"][what] = f"--limit {options.limit:g}: not begun"
        return True

    clock = who.Clock()
    with tempfile.TemporaryDirectory() as top:
        folder = Path(options.models or top)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.network:
            if late(name):
                continue
            model = who.Model(name, options.size, folder)
            for dtype in options.dtype:
                if late(f"{name} {dtype}"):
                    continue
                left = [b for b in options.batch if (name, dtype, b, model.shape[1:]) not in there]
                if not left:
                    continue
                own = who.Ours(model, dtype)
                for batch in left:
                    cell = f"{name} {dtype} batch {batch}"
                    if late(cell):
                        continue
                    if options.check:
                        found = check_cell(model, dtype, batch, own, options)
                    else:
                        found = measure_cell(model, dtype, batch, own, clock, options)
                    document["rows"] += found["rows"]
                    document["left_out"] |= {
                        f"{key} of {cell}": reason for key, reason in found["left_out"].items()
                    }
                    if options.steps and not options.check:
                        steps = steps_of(own.engine, batch)
                        document["steps"].append({"cell": cell, "steps": steps})
                    _show(found["rows"])
                    write(last=False)
                own.engine.close()
            del model
    write(last=True)
    return cli.DONE


def _cell(row: Mapping[str, Any]) -> tuple:
    """Returns what a row is of: network, data type, batch, and the size of an image."""
    return row["network"], row["dtype"], row["batch"], tuple(row["size"])


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    first = rows[0]
    times = "  ".join(
        f"{row['name']} {ms(row['device_ms'])} ({ms(row['flushed_ms'])}, {ms(row['wall_ms'])})"
        if "device_ms" in row
        else row["name"]
        for row in rows
    )
    said = f"{first['network']} {first['dtype']} batch {first['batch']}: {times}"
    if first.get("ratio"):
        said += f"  {first['ratio']:.2f}x"
    error = first["wrong"] or f"{first['error']:.1e}"
    said += f"  error {error} ({first.get('error_ratio', 0):.2f} of PyTorch's)"
    print(said + f"  same bits: {first.get('same_bits')}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
