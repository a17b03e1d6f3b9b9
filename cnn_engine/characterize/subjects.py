"""Subjects to characterise: a network in this engine, or any PyTorch model.

A subject gives, for one batch size at a time, the passes to be timed and what it knows of them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from .. import callables
from ..engine.engine import Engine
from ..errors import InputError, UnsupportedError, expected
from ..kernel import preflight
from ..measure import step_times
from ..measure.measurement import CHECK_IMAGES
from ..measure.result import Check, LayerTime
from ..workload import Dataset, Samples, Workload, addresses

TORCH_DTYPES = ("float32", "float16", "bfloat16")

#: Where a pass begins and ends: in host memory, copies included, or in the device's.
HOST, DEVICE = "host", "device"


@dataclass
class CallTimes:
    """The times of every call of one kernel, layer or module, in seconds."""

    name: str
    samples_s: list[float]


@dataclass
class InsideTimes:
    """Result of :meth:`Load.time_inside`.

    Attributes:
        source: ``events`` (device time between events) or ``host`` (the host's clock).
        calls: a layer or module each.
        passes: how many passes they were of.
        pass_s: the mean time of a pass while its inside was timed.
        copies_s: of all copies between host and device.
    """

    source: str
    calls: list[CallTimes]
    passes: int
    pass_s: float
    copies_s: float | None = None


@dataclass
class Memory:
    """Bytes of device memory of a subject's own allocator: in use, at the peak, and held in reserve."""

    allocated: int
    peak: int
    reserved: int


@dataclass
class Load:
    """A subject that is ready to run passes over ``batch`` images.

    Attributes:
        next_pass: returns the function that runs the next pass and has ended when the pass is complete.
        threads: CPU threads.
        memory: says what is allocated on the device; None on the CPU.
        accuracy: runs what images remain and returns (correct, labelled); None where there are no labels.
        time_inside: times layers or modules over so many passes; None where that cannot be done.
        settings: what else decides the speed, for the JSON document.
        notes: what there is to say of it, such as what was tuned.
        data_bytes: of host memory that holds what is measured with: images, and what comes out for them.
        layers: with their operations and bytes, once :attr:`time_inside` has timed them.
    """

    batch: int
    next_pass: Callable[[], Callable[[], Any]]
    threads: int
    memory: Callable[[], Memory] | None = None
    accuracy: Callable[[], tuple[int, int]] | None = None
    time_inside: Callable[[int], InsideTimes] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    data_bytes: int = 0
    layers: list[LayerTime] = field(default_factory=list)


class EngineSubject:
    """A network of ours in one variant, from images in (page-locked) host memory to probabilities there.

    Args:
        workload: the network, its data and its weights.
        dataset: the images that passes go through, over and over; labels where there are.
        options: of :class:`~cnn_engine.engine.engine.Engine`.
    """

    kind, boundary = "engine", HOST

    def __init__(self, workload: Workload, dataset: Dataset, **options: Any) -> None:
        self.workload, self.dataset, self.options = workload, dataset, options
        words = [workload.name, options["variant"]]
        words += ["reduction"] if options.get("reduction") else []
        words += [os.path.basename(file) for file in options.get("kernels", ())]
        words += [options["dtype"]] if options["dtype"] != "float32" else []
        self.name = " ".join(words)
        self.model, self.dtype = workload.name, options["dtype"]
        self.variant: str | None = options["variant"]
        self.reduction: bool | None = options.get("reduction")
        self.check: Check | None = None

    def prepare(self, check: bool) -> None:
        """Sees that the engine can be made and, with ``check``, compares it with the float64 reference.

        Raises:
            InputError: an option is at fault, or the device or the variant lacks what is asked for.
        """
        with Engine(self.workload, **self.options) as engine:
            if check and (fault := preflight.fault(engine)):
                raise InputError(f"--kernel: {fault}")
            self.variant, self.reduction = engine.choice.variant, engine.choice.reduction
            if check:
                self.check = engine.check(self.dataset.images[:CHECK_IMAGES])
        _collect(engine.device)

    @contextmanager
    def load(self, batch: int) -> Iterator[Load]:
        """Makes an engine of its own for ``batch``, so that memory is of this batch only."""
        engine = Engine(self.workload, **self.options)
        device = engine.device
        try:
            yield _EnginePasses(engine, self.dataset, batch).load
        finally:
            engine.close()
            _collect(device)

    def close(self) -> None:
        """Does nothing: each batch size has an engine of its own."""


class _EnginePasses:
    """Walks through the full batches of the images, pass by pass."""

    def __init__(self, engine: Engine, dataset: Dataset, batch: int) -> None:
        self.engine, self.labels, self.batch = engine, dataset.labels, batch
        self.count = len(dataset) // batch
        self.images = dataset.images[: self.count * batch]
        data_bytes = dataset.images.nbytes
        if not isinstance(self.images, Samples):
            self.images = engine.samples({engine.form.inputs[0].name: self.images})
        if engine.device.kind == "cuda":  # page-locked, as they are copied fastest
            self.images = engine.page_locked(self.images)
            data_bytes += self.images.nbytes
        self.probabilities = engine.empty_outputs(len(self.images), batch)
        for array in self.probabilities.arrays.values():
            array[...] = 0  # pages are there before they are timed
        self.done = 0
        # Engine memory never grows within a pass: what a plan needs is allocated when it is built.
        self._addresses = [
            (
                addresses(self.images[first : first + batch]),
                addresses(self.probabilities[first : first + batch]),
            )
            for first in range(0, len(self.images), batch)
        ]
        cuda = engine.device.kind == "cuda"
        self._peak = 0
        self.next_pass()
        self.done = 0
        self.load = Load(
            batch,
            self.next_pass,
            engine.threads,
            memory=self.memory if cuda else None,
            accuracy=self.accuracy if self.labels is not None and engine.form.is_of_rows else None,
            time_inside=self.time_inside,
            notes=engine.tuned(batch, self.images.dtype)[1],
            data_bytes=data_bytes + self.probabilities.nbytes,
        )

    def next_pass(self) -> Callable[[], None]:
        index = self.done % self.count
        self.done += 1
        plan = self.engine.plan_at(*self._addresses[index], self.batch, self.images.dtype)
        return plan.run

    def memory(self) -> Memory:
        import cupy

        with self.engine.device.context:
            pool = cupy.get_default_memory_pool()
            used = pool.used_bytes()
            self._peak = max(self._peak, used)
            return Memory(used, self._peak, pool.total_bytes())

    def accuracy(self) -> tuple[int, int]:
        while self.done < self.count:
            self.next_pass()()
        (rows,) = self.probabilities.arrays.values()
        found = rows.argmax(1) == self.labels[: len(self.images)]
        return int(np.sum(found)), len(self.images)

    def time_inside(self, passes: int) -> InsideTimes:
        # By events: records would slow down the passes of later points, which are timed in this process.
        steps = step_times.time_layers(
            self.engine, self.images, self.probabilities, self.batch, _ignore, samples=passes,
            records=False,
        )  # fmt: skip
        if steps.interrupted:
            raise KeyboardInterrupt
        self.load.layers = steps.layers
        layers = [CallTimes(layer.name, layer.samples_s) for layer in steps.layers]
        sampled = len(layers[0].samples_s)
        on_device = self.engine.device.kind == "cuda"
        return InsideTimes(
            "events" if on_device else "host",
            layers,
            sampled,
            steps.whole_pass.sampled_s / sampled,
            sum(sum(copy.samples_s) for copy in steps.copies) if on_device else None,
        )


class TorchSubject:
    """A PyTorch model in evaluation mode with random weights; input and output stay on its device.

    Args:
        spec: ``module:callable[,key=value...]``; the callable returns a ``torch.nn.Module``.
        shape: of one image, [C, H, W].
        dtype: one of :data:`TORCH_DTYPES`.
        device: as :mod:`cnn_engine.devices` makes it; ``cpu`` or ``cuda:N`` to PyTorch.
        threads: CPU threads; None: as PyTorch likes.

    Raises:
        InputError: ``spec`` names nothing that can be called so.
        UnsupportedError: PyTorch is not installed, or cannot use the device.
    """

    kind, boundary, variant, reduction, check = "torch", DEVICE, None, None, None

    def __init__(
        self, spec: str, shape: tuple[int, ...], dtype: str, device: Any, threads: int | None
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise UnsupportedError(
                f"--torch: expected the package torch, found none ({error}); "
                "pip install 'cnn-engine[torch]'"
            ) from error
        self.torch = torch
        self.spec, self.shape, self.dtype = spec, shape, dtype
        self._make, self._arguments, self.model = _resolve(spec)
        self.name = self.model + (f" {dtype}" if dtype != "float32" else "")
        self.device = device
        self._where = torch.device(device.name)
        if device.kind == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(
                f"--torch: expected a PyTorch with CUDA for {device.name}, found {torch.__version__} "
                "without"
            )
        self._threads = threads
        self._module: Any = None

    def prepare(self, check: bool) -> None:
        """Sees that the model can be made. It is compared with nothing: it is its own reference.

        Raises:
            InputError: it cannot.
        """
        self._build()

    def _build(self) -> Any:
        """Returns the model on the CPU."""
        self.torch.manual_seed(0)
        try:
            module = self._make(**self._arguments)
        except Exception as error:  # a callable of the user's may fail in any way
            found = f"{type(error).__name__}: {error}"
            raise expected(f"--torch: {self.spec}", "a model", found) from error
        if not isinstance(module, self.torch.nn.Module):
            found = f"an object of type {type(module).__name__}"
            raise expected(f"--torch: {self.spec}", "a torch.nn.Module", found)
        return module.eval()

    @contextmanager
    def load(self, batch: int) -> Iterator[Load]:
        """Puts ``batch`` random images on the device; the model serves all batch sizes."""
        torch = self.torch
        cuda = self._where.type == "cuda"
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._clear()
        if self._module is None:
            self._module = self._build().to(self._where, getattr(torch, self.dtype))
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._where)
        images = torch.randn(
            (batch, *self.shape), device=self._where, dtype=getattr(torch, self.dtype)
        )
        run = self._pass(images)
        yield Load(
            batch,
            lambda: run,
            torch.get_num_threads(),
            memory=self._memory if cuda else None,
            time_inside=None if cuda else lambda passes: self._time_modules(run, passes),
            settings=self._settings(),
        )

    def _pass(self, images: Any) -> Callable[[], None]:
        torch, module = self.torch, self._module
        if self._where.type != "cuda":

            def run() -> None:
                with torch.inference_mode():
                    module(images)

            return run
        stream = torch.cuda.current_stream(self._where)

        def run_and_wait() -> None:
            with torch.inference_mode():
                module(images)
            stream.synchronize()

        return run_and_wait

    def _memory(self) -> Memory:
        cuda, where = self.torch.cuda, self._where
        return Memory(
            cuda.memory_allocated(where),
            cuda.max_memory_allocated(where),
            cuda.memory_reserved(where),
        )

    def _settings(self) -> dict[str, Any]:
        backends = self.torch.backends
        return {
            "cudnn_benchmark": backends.cudnn.benchmark,
            "cudnn_allow_tf32": backends.cudnn.allow_tf32,
            "channels_last": False,
            "version": self.torch.__version__,
        }

    def _time_modules(self, run: Callable[[], None], passes: int) -> InsideTimes:
        """Times every module without children, on the host's clock."""
        found: dict[str, list[float]] = {}
        started: dict[str, float] = {}
        hooks = []
        for name, module in self._module.named_modules():
            if next(module.children(), None) is not None:
                continue

            def before(*_: object, name: str = name) -> None:
                started[name] = perf_counter()

            def after(*_: object, name: str = name) -> None:
                found.setdefault(name, []).append(perf_counter() - started[name])

            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        begin = perf_counter()
        try:
            for _ in range(passes):
                run()
            pass_s = (perf_counter() - begin) / passes
        finally:
            for hook in hooks:
                hook.remove()
        calls = [CallTimes(name or self.model, samples) for name, samples in found.items()]
        return InsideTimes("host", calls, passes, pass_s)

    def _clear(self) -> None:
        _collect(self.device)
        if self._where.type == "cuda":
            self.torch.cuda.empty_cache()

    def close(self) -> None:
        """Frees the model."""
        self._module = None
        self._clear()


def _resolve(spec: str) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """Returns the callable that ``spec`` names, its arguments, and a short name."""
    found, arguments, name = callables.resolve("--torch", spec)
    for key in ("weights", "pretrained"):
        if arguments.get(key):
            raise expected(
                f"--torch: {spec}", "random weights (nothing is downloaded)",
                f"{key}={arguments[key]}",
            )  # fmt: skip
    return found, arguments, name


def check_images(dataset: Dataset, batches: list[int]) -> None:
    """Raises InputError unless there are images for the largest of ``batches``."""
    if max(batches) > len(dataset):
        raise InputError(
            f"--batch: expected at most {len(dataset)} (the images), found {max(batches)}"
        )


def _collect(device: Any) -> None:
    """Frees what nothing holds any more, and what CuPy's pool keeps of it on ``device``."""
    gc.collect()
    if device.kind == "cuda":
        import cupy

        with device.context:
            cupy.get_default_memory_pool().free_all_blocks()


def _ignore(images: int) -> None:
    """Shows no progress."""
