"""Worker process of ``benchmarks.models``: exports a network, or runs it in an engine.

``python -m benchmarks.models_worker STAGE TASK``: the task and, on the last line of standard output, what
was found are JSON. One network is in memory at a time, and one that ends its process ends no other.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from cnn_engine import Engine, devices, export
from cnn_engine.errors import CnnEngineError
from cnn_engine.graph.graph import Graph, Node
from cnn_engine.graph.onnx import UnsupportedNodesError
from cnn_engine.lower.placement import Placed
from cnn_engine.plan import memory
from cnn_engine.plan.per_image import build

OPSET = 18

#: A pass is repeated for about so long, at least twice and at most so often.
PASS_SECONDS, MOST_PASSES = 0.5, 10


def images_name(batch: int) -> str:
    """Returns the key of the images in the arrays that :func:`make` keeps."""
    return f"images {batch}"


def logits_name(batch: int) -> str:
    """Returns the key of PyTorch's float64 logits."""
    return f"logits {batch}"


def make(task: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a network of random weights, exports it, and runs it in PyTorch and ONNX Runtime.

    Args:
        task: ``spec`` (``module:function``), ``size`` (rows and columns, or None), ``exporters``,
            ``batches``, ``threads``, and ``folder``, where ``logits.npz`` and the files are written.

    Returns:
        ``shape`` of an image; ``float32``: batch -> PyTorch's error in float32; ``exports``: exporter ->
        ``files`` (batch -> path), ``fixed`` (why the batch could not be left open) and ``runtime`` (batch ->
        ONNX Runtime's error), or the ``reason`` why there is none.
    """
    ignore_compiled_operators()
    import torch

    torch.set_num_threads(task["threads"])
    folder = Path(task["folder"])
    module, _ = export.build(task["spec"], "random")
    size = task["size"]
    shape = export.images_shape(module, size and (3, size, size))
    export.run_statistics(module, shape)
    rng = np.random.default_rng(0)
    images = {
        batch: rng.normal(size=(batch, *shape)).astype(np.float32) for batch in task["batches"]
    }

    def logits(dtype: Any) -> dict[int, np.ndarray]:
        with torch.no_grad():
            return {
                batch: export.first_output(module(torch.from_numpy(x).to(dtype))).numpy()
                for batch, x in images.items()
            }

    single = logits(torch.float32)
    exports = {
        exporter: _export(module, shape, folder, exporter, task["batches"])
        for exporter in task["exporters"]
    }
    module.double()
    wanted = logits(torch.float64)
    for found in exports.values():
        if "files" in found:
            found["runtime"] = {
                batch: _or_reason(
                    lambda path=path, batch=batch: error_of(
                        _onnxruntime(path, images[batch], task["threads"]), wanted[batch]
                    )
                )
                for batch, path in found["files"].items()
            }
    arrays = {images_name(batch): x for batch, x in images.items()}
    arrays |= {logits_name(batch): x for batch, x in wanted.items()}
    np.savez(folder / "logits.npz", **arrays)
    errors = {b: _or_reason(lambda b=b: error_of(single[b], wanted[b])) for b in images}
    return {"shape": list(shape), "float32": errors, "exports": exports}


def ignore_compiled_operators() -> None:
    """Lets torchvision be imported where its compiled operators (boxes, not needed here) are missing."""
    import torch

    register = torch.library.register_fake

    def register_fake(op: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *arguments, **named)

    torch.library.register_fake = register_fake


def _export(
    module: Any, shape: tuple[int, ...], folder: Path, exporter: str, batches: list[int]
) -> dict[str, Any]:
    """Exports for any batch, or where PyTorch cannot, for each of ``batches``."""
    start = perf_counter()
    path = folder / f"{exporter}.onnx"
    found: dict[str, Any] = {}
    try:
        export.write(module, shape, str(path), exporter, None, OPSET)
        found["files"] = dict.fromkeys(batches, str(path))
    except CnnEngineError as error:
        found["fixed"] = str(error)
        found["files"] = {}
        for batch in batches:
            path = folder / f"{exporter}-{batch}.onnx"
            try:
                export.write(module, shape, str(path), exporter, batch, OPSET)
            except CnnEngineError as inner:
                return {"reason": str(inner)}
            found["files"][batch] = str(path)
    return found | {"seconds": perf_counter() - start}


def _onnxruntime(path: str, images: np.ndarray, threads: int) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def _or_reason(function: Callable[[], Any]) -> Any:
    """Returns what ``function`` returns, or the reason as text: a peer's exceptions have no common base."""
    try:
        return function()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def error_of(found: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the largest difference of two arrays of logits, as a part of the largest of ``wanted``.

    Raises:
        ValueError: the shapes differ, or a number is not finite.
    """
    if found.shape != wanted.shape or not np.isfinite(found).all():
        what = "numbers that are not finite" if found.shape == wanted.shape else found.shape
        raise ValueError(f"logits: expected finite {wanted.shape}, found {what}")
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-300))


def most_alive(graph: Graph) -> int:
    """Returns the bytes of the largest set of values of ``graph`` alive at once, where none shares memory.

    Its inputs and outputs, which are the caller's, are not among them.
    """
    outside = {value.name for value in graph.inputs} | set(graph.outputs) | set(graph.constants)
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last |= dict.fromkeys((name for name in node.inputs if name), index)
    ends: dict[int, int] = {}
    alive = most = 0
    for index, node in enumerate(graph.nodes):
        for name in node.outputs:
            if name not in outside:
                nbytes = graph.values[name].nbytes
                alive += nbytes
                end = last.get(name, index)
                ends[end] = ends.get(end, 0) + nbytes
        most = max(most, alive)
        alive -= ends.pop(index, 0)
    return most


def peak_of(placed: Placed) -> int:
    """Returns the bytes that the values of a pass take as they are planned, without kernels' scratch."""

    def in_place(node: Node) -> bool:
        kernel = placed.kernels.get(node.name)
        return kernel is not None and kernel.in_place

    planned = memory.plan(
        placed.graph,
        placed.memory_spaces.__getitem__,
        in_place=in_place,
        is_alias=lambda node: node.name not in placed.kernels,
    )
    return sum(planned.sizes.values())


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """Runs an exported network in engines on one device.

    Args:
        task: ``device``, ``threads`` (None: all), ``files`` (batch -> path; one engine a path) and
            ``logits``, the path of :func:`make`'s arrays.

    Returns:
        batch -> a row's part of the engine, or ``reason`` with ``unsupported`` nodes.
    """
    with np.load(task["logits"]) as arrays:
        known = dict(arrays)
    device = devices.select(task["device"])
    start = perf_counter()
    device.upload(np.zeros(1, np.float32))  # the driver's own start is no part of an engine's
    device_s = perf_counter() - start
    found: dict[str, Any] = {}
    engine, path, timed = None, None, {}
    for batch, file in task["files"].items():
        images, wanted = known[images_name(batch)], known[logits_name(batch)]
        try:
            if file != path:
                if engine is not None:
                    engine.close()
                engine = path = None
                start, start_cpu = perf_counter(), process_time()
                engine = Engine(file, device=task["device"], threads=task["threads"])
                timed = {
                    "create_s": perf_counter() - start,
                    "create_cpu_s": process_time() - start_cpu,
                    "device_start_s": device_s,
                }
                path = file
            found[batch] = timed | _measure(engine, images, wanted)
        except UnsupportedNodesError as error:
            nodes = [str(node) for node in error.nodes]
            found[batch] = {"reason": f"{len(nodes)} nodes not supported", "unsupported": nodes}
        except Exception as error:  # a row says what failed, the others go on
            text = " ".join(f"{type(error).__name__}: {error}".split())
            found[batch] = {"reason": text[:300]}
    return found


def _measure(engine: Engine, images: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    name = engine.network.base.inputs[0].name
    start = perf_counter()
    (logits, *_) = engine.run({name: images}).values()
    first_s = perf_counter() - start
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 2 or (perf_counter() - begin < PASS_SECONDS and len(times) < MOST_PASSES):
        start = perf_counter()
        (again, *_) = engine.run({name: images}).values()
        times.append(perf_counter() - start)
    placed = engine._plans.open().placed(len(images), pixels=False)
    plan = build(engine._plans.open(), len(images), pixels=False)
    operators = {node.name: node.op.kind for node in placed.graph.nodes}
    alone: dict[str, int] = {}
    for node, why in plan.fallbacks.items():
        where = "NumPy" if why.startswith("NumPy") else "CPU"
        key = f"{operators[node]} ({where}: {why.partition(': ')[2]})"
        alone[key] = alone.get(key, 0) + 1
    peak, alive = peak_of(placed), most_alive(placed.graph)
    return {
        "error": error_of(logits, wanted),
        "same_again": bool(np.array_equal(logits, again)),
        "first_pass_s": first_s,
        "pass_s": median(times),
        "passes": len(times),
        "nodes": len(placed.graph.nodes),
        "memory_bytes": sum(plan.nbytes.values()),
        "peak_bytes": peak,
        "alive_bytes": alive,
        "peak_ratio": peak / alive if alive else None,
        "stand_ins": alone,
    }


def main() -> int:
    """Runs one stage; prints what it found."""
    parser = argparse.ArgumentParser(description="One stage of python -m benchmarks.models.")
    parser.add_argument("stage", help="what is done")
    parser.add_argument("task", type=json.loads, help="with what, as JSON")
    options = parser.parse_args()
    stage, task = options.stage, options.task
    if "files" in task:
        task["files"] = {int(batch): path for batch, path in task["files"].items()}
    print(json.dumps({"make": make, "run": run}[stage](task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
