"""The sandboxed process that runs a kernel under test, driven over a pipe; it judges nothing."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import sys
from base64 import b64decode
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from .. import devices, environment_variables
from ..errors import CnnEngineError, InputError
from ..io import sandbox
from ..kernels import Call, Kernel, choose
from ..kernels.user import nvrtc, rows, source
from .cases import Case
from .memory import BAND, POISON, Guarded, Layout, on_fault

#: How long the stream is kept busy before a timed launch, so that the launch itself waits for nothing.
DELAY_S = 100e-6


class Job:
    """A kernel and the case that it is bound to."""

    def __init__(self, replies: int, shared: int) -> None:
        self._replies, self._shared = replies, shared
        self.kernel: Kernel | None = None
        self.read: source.Source | None = None
        self.memory: Guarded | None = None
        self.plan: Layout | None = None
        self.number = ""
        self.calls: list[tuple[Any, Any, Call]] = []

    def reply(self, **content: Any) -> None:
        """Answers the request that is under way, with its number: the kernel knows the pipe, not that."""
        os.write(self._replies, json.dumps({"number": self.number, **content}).encode() + b"\n")

    def open(self, subject: str, device: str, threads: int, library: str | None) -> dict[str, Any]:
        """Takes a kernel file, or ``engine:NAME`` or ``torch`` for one to compare with.

        Args:
            library: what a C++ file was compiled to.
        """
        self.threads, self.device = threads, devices.select(device)
        self.subject = subject
        if not subject.startswith("engine:") and subject != "torch":
            self.read = source.read(subject)
            self.kernel = rows.from_file(subject, library)
            # Compiled before any case, so that what is wrong with it is said once.
            self.prepared = self.kernel.prepare(None, None, self.device)
        return {"layers": (environment_variables.get(sandbox.LAYERS) or "").split(",")}

    def case(self, case: str) -> dict[str, Any]:
        """Takes the next case; says how much workspace it needs, or why it is not taken."""
        self.tried: Case = pickle.loads(b64decode(case))
        graph, node = self.tried.graph, self.tried.node
        kernel = self.kernel
        if self.read is None:
            kernel, why = self._other(node, graph)
            if kernel is None:
                return {"refused": why}
        self.bound = kernel
        if self.read is None:
            graph = _known(graph, None)
        if reason := kernel.refuses(node, graph):
            return {"refused": reason}
        return {"workspace": kernel.workspace(node, graph, self.device, self.threads)}

    def _other(self, node: Any, graph: Any) -> tuple[Kernel | None, str]:
        if self.subject == "torch":
            return _torch(node.op, self.device.kind, self.threads), "PyTorch has none"
        name, known = self.subject.removeprefix("engine:"), _known(graph, None)
        kernel, why = choose(node, known, self.device.target, name, False)
        if kernel is not None and kernel.rewrite(node, known) is not None:
            # By itself it would read past its input.
            return (
                None,
                f"{name}: expected one kernel, found one that reads what another node makes",
            )
        return kernel, why

    def map(self, plan: str) -> dict[str, Any]:
        """Takes the layout of the case's buffers, and brings them into being."""
        if self.memory is not None:
            self.memory.close()
        self.plan = pickle.loads(b64decode(plan))
        if self.device.kind == "cpu":
            self.memory = _OnHost(self._shared, self.plan)
        else:
            self.memory = _OnDevice(self._shared, self.plan, self.device)
        return {}

    def bind(self, number: int, at_end: bool) -> None:
        """Binds the kernel to the buffers of a set."""
        graph, node = self.tried.graph, self.tried.node
        regions = self.plan.of(number)
        where = {name: self.memory.address(region, at_end) for name, region in regions.items()}
        prepared = getattr(self, "prepared", None)
        if self.read is None and self.bound.prepare is not None:
            # What the engine's own kernels make of constants: the weights are known to it beforehand.
            prepared = self._prepared(graph, node, regions, at_end)
        at = tuple(0 if name is None else where[name] for name in node.inputs)
        call = Call(
            node, graph.inputs_of(node), graph.outputs_of(node), at, (where["y"],),
            where["workspace"], prepared, self.device, self.threads,
        )  # fmt: skip
        self.kept = call  # and the packed weights, whose address is among the arguments
        self.function, self.arguments = self.bound.make(call)

    def _prepared(self, graph: Any, node: Any, regions: dict, at_end: bool) -> Any:
        weight = None
        if "weight" in regions:
            shape = graph.values["weight"].shape
            weight = self.memory.array(regions["weight"], shape, at_end)
        return self.bound.prepare(node, _known(graph, weight), self.device)

    def call(self, at_end: bool) -> dict[str, Any]:
        """Runs the kernel once on set 0."""
        try:
            self.bind(0, at_end)
        except (ValueError, TypeError) as error:
            raise InputError(str(error)) from None
        self.memory.bring(0, at_end)
        self.function(*self.arguments)
        self.memory.fetch(0, at_end)
        return {}

    def bind_all(self, sets: list[int]) -> dict[str, Any]:
        """Binds the kernel to the buffers of each of ``sets``, for :meth:`time` on the CPU."""
        self.calls = []
        for number in sets:
            self.bind(number, True)
            self.calls.append((self.function, self.arguments, self.kept))
        return {}

    def time(self, sets: list[int]) -> dict[str, Any]:
        """Runs the kernel once on each of ``sets``; returns seconds of each."""
        seconds = []
        if self.device.kind == "cpu":
            for function, arguments, _ in self.calls:
                start = perf_counter()
                function(*arguments)
                seconds.append(perf_counter() - start)
            return {"seconds": seconds}
        for number in sets:
            self.bind(number, True)
            self.memory.bring(number, True)
            seconds.append(self._device_time())
            self.memory.fetch(number, True)
        return {"seconds": seconds}

    def _device_time(self) -> float:
        """Seconds between events around the call; the whole device is idle before and after."""
        runtime = self.memory.runtime
        device = self.device
        with device.context:
            runtime.deviceSynchronize()
            first, last = device.event(), device.event()
            device.delay(DELAY_S)
            first.record(device.stream)
            begin = perf_counter()
            self.function(*self.arguments)
            last.record(device.stream)
            runtime.deviceSynchronize()
            whole = perf_counter() - begin
        found = device.elapsed_s(first, last)
        # Work that another stream did is over by now, and was seen by the host's clock alone.
        return max(found, whole - 2 * DELAY_S) if whole > 2 * (found + DELAY_S) + 1e-3 else found

    def resources(self) -> dict[str, Any]:
        """Returns the GPU resources of each launch of a CUDA file, for the case that was called last."""
        if self.device.kind == "cpu" or self.read is None:
            return {"launches": []}
        found = []
        graph, node = self.tried.graph, self.tried.node
        given = rows.numbers(self.read, node, graph)
        most = self.device.context.attributes["MaxSharedMemoryPerBlockOptin"]
        module: nvrtc.Module = self.prepared
        for launch in self.read.launches:
            function = module.function(launch.function, launch.line)
            needs = module.resources(function)
            grid, block, shared = rows.geometry(self.read, launch, given, most)
            threads = block[0] * block[1] * block[2]
            found.append(
                {
                    "kernel": launch.function, "grid": grid, "block": block, "registers": needs.registers,
                    "shared_bytes": needs.shared + shared, "local_bytes": needs.local,
                    "occupancy": module.occupancy(function, threads, shared, self.device),
                }
            )  # fmt: skip
        return {"launches": found}

    def fault(self, number: int, address: int) -> None:
        place = self.memory.place(address) if isinstance(self.memory, Guarded) else None
        self.reply(fault=number, address=address, place=place)


class _OnDevice:
    """The buffers of a case on a GPU: one for each name, with a band of known bytes on both sides."""

    def __init__(self, descriptor: int, plan: Layout, device: Any) -> None:
        import mmap

        self.plan, self.device = plan, device
        self.runtime = device._runtime
        self._map = mmap.mmap(descriptor, plan.nbytes)
        self.host = np.frombuffer(self._map, np.uint8)
        self.buffers = {
            name: device.allocate(region.length + 2 * BAND) for name, region in plan.of(0).items()
        }
        # The band's bytes behind the buffer that are not in the shared pages.
        self._bands = np.full(BAND // 4, POISON, np.uint32)

    def close(self) -> None:
        self.host = None
        self.buffers = {}

    def address(self, region: Any, at_end: bool) -> int:
        start = region.start(at_end) // 256 * 256
        return self.buffers[region.name].address + BAND + start

    def array(self, region: Any, shape: tuple[int, ...], at_end: bool) -> np.ndarray:
        start = region.offset + region.start(at_end)
        return self.host[start : start + region.nbytes].view(np.float32).reshape(shape)

    def bring(self, number: int, at_end: bool) -> None:
        """Copies a set to the device: inputs, poisoned outputs and workspace, and what lies around them."""
        band = self._bands.ctypes.data
        for name, region in self.plan.of(number).items():
            base = self.buffers[name].address
            data = self.host[region.offset : region.offset + region.length]
            shifted = self._shifted(region, at_end)
            pages = np.full(region.length // 4, POISON, np.uint32).view(np.uint8)
            pages[shifted : shifted + region.nbytes] = data[region.start(at_end) :][: region.nbytes]
            self.device.copy_h2d(base, band, BAND)
            self.device.copy_h2d(base + BAND, pages.ctypes.data, region.length)
            self.device.copy_h2d(base + BAND + region.length, band, BAND)
        self.device.synchronize()

    def _shifted(self, region: Any, at_end: bool) -> int:
        return region.start(at_end) // 256 * 256

    def fetch(self, number: int, at_end: bool) -> None:
        """Copies a set back; raises InputError where a band was written to."""
        with self.device.context:
            self.runtime.deviceSynchronize()
        for name, region in self.plan.of(number).items():
            whole = np.empty(region.length + 2 * BAND, np.uint8)
            self.device.copy_d2h(whole.ctypes.data, self.buffers[name].address, len(whole))
            self.device.synchronize()
            start = BAND + self._shifted(region, at_end)
            around = whole.copy()
            around[start : start + region.nbytes] = np.full(
                -(-region.nbytes // 4), POISON, np.uint32
            ).view(np.uint8)[: region.nbytes]
            changed = np.flatnonzero(around.view(np.uint32) != POISON)
            if len(changed):
                first = 4 * int(changed[0]) - start
                where = (
                    f"{-first} bytes before"
                    if first < 0
                    else f"{first - region.nbytes} bytes behind"
                )
                raise InputError(f"out of bounds: it wrote {where} {name}")
            target = self.host[region.offset : region.offset + region.length]
            target[region.start(at_end) :][: region.nbytes] = whole[start : start + region.nbytes]


def _known(graph: Any, weight: np.ndarray | None) -> Any:
    """Returns a case's graph with its weights as constants, as the engine's own kernels have them."""
    if "weight" not in graph.values:
        return graph
    weight = np.zeros(graph.values["weight"].shape, np.float32) if weight is None else weight
    inputs = tuple(value for value in graph.inputs if value.name != "weight")
    return replace(graph, inputs=inputs, constants={"weight": weight})


def _torch(op: Any, kind: str, threads: int) -> Kernel | None:
    """Returns PyTorch's own form of an operator, to compare with."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(threads)
    if op.kind != "conv2d" or op.padding[:2] != op.padding[2:]:
        return None
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True

    def conv2d(x, weight, bias, y, shape):
        tensors = [None if t is None else torch.as_tensor(t) for t in (x, weight, bias)]
        with torch.inference_mode():
            found = functional.conv2d(*tensors, op.stride, op.padding[:2], op.dilation, op.groups)
            torch.as_tensor(y).copy_(found)

    arrays = {"cpu": "numpy", "cuda": "torch"}[kind]
    return Kernel.from_callable(conv2d, "conv2d", kind, name="torch", arrays=arrays)


class _OnHost(Guarded):
    """Buffers on the CPU: they are the shared memory itself."""

    def bring(self, number: int, at_end: bool) -> None:
        return None

    fetch = bring

    def array(self, region: Any, shape: tuple[int, ...], at_end: bool) -> np.ndarray:
        memory = (ctypes.c_char * region.nbytes).from_address(self.address(region, at_end))
        return np.frombuffer(memory, np.float32).reshape(shape)


def main() -> None:
    """Serves requests, a line each, until there are no more."""
    requests, replies, shared = (int(word) for word in sys.argv[1:4])
    job = Job(replies, shared)
    on_fault(job.fault)
    with os.fdopen(requests) as lines:
        for line in lines:
            request = json.loads(line)
            job.number = request.pop("number")
            try:
                job.reply(**getattr(job, request.pop("do"))(**request))
            except CnnEngineError as error:
                job.reply(error=str(error))
            except MemoryError as error:
                job.reply(error=f"expected memory enough, found: {error or 'none left'}")
            except Exception as error:  # CuPy's and the driver's: the kernel's doing
                job.reply(error=" ".join(f"{type(error).__name__}: {error}".split()))
    with contextlib.suppress(OSError):
        job.reply(end=True)
    os._exit(0)  # what libraries do at exit is not of interest


if __name__ == "__main__":
    main()
