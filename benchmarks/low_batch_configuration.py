"""One cell of :mod:`benchmarks.low_batch`: a network, a data type and a batch, made ready and measured."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from cnn_engine import Engine
from cnn_engine.graph.graph import Graph

from . import low_batch_contestants as who
from .low_batch_cudnn import NAME as CUDNN
from .low_batch_cudnn import CudnnGraphs
from .low_batch_jax import NAME as JAX
from .low_batch_jax import Jax
from .low_batch_onnx import PROVIDERS, TENSORRT, OnnxRuntime, TensorRT
from .models_worker import error_of

#: Peers besides PyTorch -> their names in tables, and what makes one for a group.
OTHERS: dict[str, tuple[str, Callable[[Group], Any]]] = {
    "cudnn": (CUDNN, lambda group: CudnnGraphs(group.torch, group.network)),
    "jax": (JAX, lambda group: Jax(group.own.engine.network, group.dtype)),
    **{
        peer: (name, lambda group, peer=peer: OnnxRuntime(group.model, group.dtype, peer))
        for peer, (name, _) in PROVIDERS.items()
    },
    "tensorrt": (TENSORRT, lambda group: TensorRT(group.model, group.dtype)),
}
PEERS = ("torch", *who.COMPILE_MODES, *OTHERS)

#: What binds a pass at best on an H200: bytes per second; products a second of a data type, as far as tensor
#: cores reach them; and seconds from one multiprocessor to another (docs/explanation/performance.md).
BYTES_PER_S, WAIT_S = 4.3e12, 0.43e-6
FLOPS_PER_S = {
    "float16": 600e12, "bfloat16": 600e12, "tf32": 300e12, "float32": 200e12, "int8": 1200e12
}  # fmt: skip
ITEM = {"float16": 2, "bfloat16": 2, "tf32": 4, "float32": 4, "int8": 1}

#: Peers that compute in int8 here; PyTorch has no int8 convolution on GPUs.
INT8_PEERS = ("cudnn",)

SUMS = ("conv2d", "conv_transpose2d", "linear", "matmul")

#: Of the passes that must give the same bits, so many run beside another engine's.
BESIDE = 10


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


#: What is said of what was not done in time; compilers make other errors of it.
LATE = "not done in the time that there was"


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends what takes longer with TimeoutError; in the main thread alone."""

    def late(*_: object) -> None:
        raise TimeoutError(LATE)

    if seconds <= 0:
        late()
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, 1e6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Group:
    """The cells of one network and data type: a model, an engine, and peers that serve all batches.

    Args:
        options: of the command: ``dtype`` and ``network`` are not read.
    """

    def __init__(self, model: who.Model, dtype: str, options: Any) -> None:
        self.model, self.dtype, self.options = model, dtype, options
        self.own = who.Ours(model, dtype, options.tune)
        self.network = self.own.engine.network
        if dtype == "int8":  # peers and the floor are of the file in float
            self.network = Engine(str(model.path), device="cpu").network
        self.torch = who.PyTorch(model, dtype)
        self.others: dict[str, Any] = {}
        self.wanted: dict[int, np.ndarray] = {}
        self.bits: dict[int, dict[str, Any]] = {}
        self.left_out: dict[int, dict[str, str]] = {}

    def prepare(self, batch: int, until: float = float("inf")) -> None:
        """Does what may be done beside others: the exact logits, and what peers compile.

        Args:
            until: by ``perf_counter``, when compiling ends, done or not.
        """
        images = self.model.images(batch)
        self.wanted[batch] = self.model.exact(images)
        self.own.contestant(images).run()  # its plan is built
        missing = self.left_out[batch] = {}
        for peer in self.options.peers:
            if self.dtype == "int8" and peer not in INT8_PEERS:
                names = [OTHERS[peer][0]] if peer in OTHERS else self.torch.names(peer)
                missing |= dict.fromkeys(names, "it has no int8 here")
                continue
            if peer == "torch":
                continue
            try:
                with at_most(until - perf_counter()):
                    if peer in OTHERS:
                        if peer not in self.others:
                            self.others[peer] = OTHERS[peer][1](self)
                        self.others[peer].compile(images)
                    else:
                        self.torch.compile(peer, images)
            except Exception as error:  # it has no common base
                name = OTHERS[peer][0] if peer in OTHERS else next(iter(self.torch.names(peer)))
                missing[name] = LATE if LATE in str(error) else who.reason(error)

    def same_bits(self, batch: int) -> None:
        """Sees whether passes give the same bits, alone and beside another engine's."""
        runs = self.options.bits
        if not runs or batch in self.bits:
            return
        images = self.model.images(batch)
        found = {"bits": runs, "same_bits": self.own.same_bits(images, runs)}
        if self.model.device == "cuda" and batch == min(self.options.batch):
            found["beside_another"] = self.own.beside_another(images, max(1, runs // BESIDE))
        self.bits[batch] = found

    def measure(self, batch: int, clock: who.Clock) -> dict[str, Any]:
        """Returns the rows of a prepared cell, ours first, and who is left out and why."""
        images, wanted = self.model.images(batch), self.wanted[batch]
        contestants, left_out = [self.own.contestant(images)], dict(self.left_out[batch])
        ready = [
            peer
            for peer in self.options.peers
            if peer not in OTHERS and not left_out.keys() & self.torch.names(peer).keys()
        ]
        found = [*self.torch.contestants(images, ready)]
        for peer, other in self.others.items():
            if (name := OTHERS[peer][0]) in left_out:
                continue
            try:
                found.append(other.contestant(images))
            except Exception as error:  # it has no common base
                left_out[name] = who.reason(error)
        for one in found:
            if isinstance(one, tuple):
                left_out[one[0]] = one[1]
            else:
                contestants.append(one)
        for one in contestants:
            one.run()
            if one.wait is not None:
                one.wait()
        errors = [_error(one, wanted) for one in contestants]
        clock.take_turns(contestants, self.options.rounds, self.options.milliseconds)
        rows = [
            {
                "network": self.model.name, "size": list(self.model.shape[1:]), "dtype": self.dtype,
                "batch": batch, "name": one.name, "ours": one.ours,
                "clock": "wall" if one.wait is not None or self.model.device == "cpu" else "events",
                "device_ms": statistics.median(one.samples), "lowest_ms": min(one.samples),
                "highest_ms": max(one.samples), "flushed_ms": statistics.median(one.flushed),
                "wall_ms": statistics.median(one.walls), **error,
                **({"note": one.note} if one.note else {}),
            }
            for one, error in zip(contestants, errors, strict=True)
        ]  # fmt: skip
        self.same_bits(batch)
        first, *peers = rows
        first["floor_ms"] = floor_s(self.network.graph(batch), self.dtype) * 1e3
        first |= self.bits.get(batch, {})
        if peers:
            best = min(peers, key=lambda row: row["device_ms"])
            first |= {
                "best_peer": best["name"], "ratio": best["device_ms"] / first["device_ms"],
                "flushed_ratio": min(row["flushed_ms"] for row in peers) / first["flushed_ms"],
                "wall_ratio": min(row["wall_ms"] for row in peers) / first["wall_ms"],
                "ahead": best["device_ms"] > first["device_ms"],
            }  # fmt: skip
        _compare(rows)
        found = {"rows": rows, "left_out": left_out, "steps": []}
        if self.options.steps and self.model.device == "cuda":
            found["steps"] = steps_of(self.own.engine, batch)
        return found

    def check(self, batch: int) -> dict[str, Any]:
        """Returns the rows of a cell whose logits alone are compared."""
        images = self.model.images(batch)
        wanted = self.model.exact(images)
        about = {
            "network": self.model.name, "size": list(self.model.shape[1:]), "dtype": self.dtype,
            "batch": batch,
        }  # fmt: skip
        ours = {"name": "cnn_engine", "ours": True} | _difference(
            lambda: self.own.engine.predict(images), wanted
        )
        rows = [ours]
        for name, layout in self.torch.names("torch").items():
            row = _difference(lambda layout=layout: self.torch.logits(images, layout), wanted)
            rows.append({"name": name.replace(" graph", ""), "ours": False} | row)
        _compare(rows)
        return {"rows": [about | row for row in rows], "left_out": {}, "steps": []}

    def close(self) -> None:
        """Frees the engine's memory."""
        self.own.engine.close()


def _error(one: who.Contestant, wanted: np.ndarray) -> dict[str, Any]:
    return _difference(lambda: who.on_host(one.logits()), wanted)


def _difference(logits: Any, wanted: np.ndarray) -> dict[str, Any]:
    """Returns a row's ``error``, as a part of the largest logit, or what is ``wrong``."""
    try:
        return {"error": error_of(logits().astype(np.float64), wanted), "wrong": None}
    except Exception as error:  # a peer's have no common base, and others go on
        return {"error": None, "wrong": who.reason(error)}


def _compare(rows: list[dict[str, Any]]) -> None:
    """Gives our row the smallest of PyTorch's errors, and how many times that its own is."""
    (first, *peers), names = rows, [name for name, _ in OTHERS.values()]
    known = [row["error"] for row in peers if row["error"] and row["name"] not in names]
    if known and first["error"] is not None:
        first["error_ratio"] = first["error"] / min(known)


def steps_of(engine: Engine, batch: int) -> list[dict[str, Any]]:
    """Returns the steps of a pass with their kernels and the device's time by events, in us."""
    from cnn_engine.devices.cuda import CudaDevice

    device = engine.device
    assert isinstance(device, CudaDevice)
    images = np.zeros((batch, *engine.network.input_shape), np.float32)
    out = np.empty_like(engine.predict(images))
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
