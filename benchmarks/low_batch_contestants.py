"""Who takes part in :mod:`benchmarks.low_batch`: our engine and PyTorch, on the same images on one device."""

from __future__ import annotations

import copy
import fcntl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cnn_engine import Engine, export, quantize

from .models import spec_of
from .models_worker import OPSET, ignore_compiled_operators

#: Bytes written between passes that are to find nothing in the second-level cache: more than any GPU has.
FLUSH_BYTES = 256 << 20
#: Passes before the first that counts.
WARMUP = 3
#: Images that int8 is calibrated with.
CALIBRATION = 4
#: PyTorch's modes of torch.compile whose CUDA graph is ours to capture.
COMPILE_MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass
class Contestant:
    """What is timed.

    Attributes:
        run: queues one pass over images on the device, on the current stream, and returns at once.
        whole: makes one pass over images in host memory; the logits are there on return.
        logits: of the last pass on the device, as an array of the device.
        wait: waits for passes on a stream that only the contestant knows: its device times are the host's.
        keep: what a graph reads and nothing else holds.
        note: what is to be said of it in its row.
    """

    name: str
    ours: bool
    run: Callable[[], object]
    whole: Callable[[], np.ndarray]
    logits: Callable[[], Any]
    wait: Callable[[], object] | None = None
    keep: object = None
    note: str = ""
    samples: list[float] = field(default_factory=list)  # ms per pass, one pass behind another
    flushed: list[float] = field(default_factory=list)  # ms of a pass after the cache was written
    walls: list[float] = field(default_factory=list)  # ms of a pass, host memory to host memory


def on_host(array: Any) -> np.ndarray:
    """Returns an array of a device, or of the host, in host memory."""
    if hasattr(array, "cpu"):
        array = array.cpu()  # PyTorch's
    elif hasattr(array, "__cuda_array_interface__"):
        import cupy

        array = cupy.asnumpy(array)
    return np.asarray(array)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps other processes out of what is done to ``path``."""
    with open(f"{path}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _sixths_in_any_type(torch: Any) -> Iterator[None]:
    """Has hard swish and hard sigmoid divide by 6: on a GPU PyTorch has 1 / 6 in float32, for float64 too."""
    functional = torch.nn.functional
    before = functional.hardswish, functional.hardsigmoid

    def hardsigmoid(x: Any, inplace: bool = False) -> Any:
        return (x + 3).clamp(0, 6) / 6

    functional.hardsigmoid = hardsigmoid
    functional.hardswish = lambda x, inplace=False: x * hardsigmoid(x)
    try:
        yield
    finally:
        functional.hardswish, functional.hardsigmoid = before


class Model:
    """A network of random weights as PyTorch has it, and the ONNX file that we read.

    Args:
        size: rows and columns of an image, or None for the network's own.
        folder: where files are kept; one that is there is not written again, by other processes neither.
        device: ``cpu`` or ``cuda``.

    Raises:
        InputError: there is no such network, or PyTorch cannot export it.
    """

    def __init__(self, name: str, size: tuple[int, int] | None, folder: Path, device: str) -> None:
        ignore_compiled_operators()
        import torch

        self.torch, self.name, self.device = torch, name, device
        torch.manual_seed(0)
        self.module, _ = export.build(spec_of(name), "random")
        self.shape = export.images_shape(self.module, size and (3, *size))
        stem = f"{name}-{self.shape[1]}x{self.shape[2]}".replace(":", ".")
        self.path, state = folder / f"{stem}.onnx", folder / f"{stem}.pt"
        with _alone(self.path):
            if self.path.exists() and state.exists():
                self.module.load_state_dict(torch.load(state, weights_only=True))
            else:
                export.run_statistics(self.module, self.shape)
                export.write(self.module, self.shape, str(self.path), "torchscript", None, OPSET)
                torch.save(self.module.state_dict(), state)
        self.module = self.module.to(device)

    def images(self, batch: int) -> np.ndarray:
        """Returns the images of a batch, the same whenever it is asked for."""
        return np.random.default_rng(batch).normal(size=(batch, *self.shape)).astype(np.float32)

    def quantized(self) -> Path:
        """Returns the network's file in int8, calibrated with a few images."""
        path = self.path.with_suffix(".int8.onnx")
        with _alone(path):
            if not path.exists():
                import onnx

                found = quantize(self.path, self.images(CALIBRATION), method="minmax")
                part = path.with_suffix(".part")
                onnx.save(found.model, part)
                part.replace(path)
        return path

    def exact(self, images: np.ndarray) -> np.ndarray:
        """Returns PyTorch's logits in float64."""
        torch = self.torch
        self.module.double()
        with torch.no_grad(), _sixths_in_any_type(torch):
            there = torch.from_numpy(images).to(self.device).double()
            found = export.first_output(self.module(there)).cpu()
        self.module.float()
        return found.numpy()


class Ours:
    """Our engine of a network in a data type."""

    def __init__(self, model: Model, dtype: str, tune: bool = False) -> None:
        self.device = model.device
        path = model.quantized() if dtype == "int8" else model.path
        of_engine = "float32" if dtype == "int8" else dtype  # of what the file leaves in float
        self._make = lambda: Engine(str(path), device=model.device, dtype=of_engine, tune=tune)
        self.engine = self._make()

    def _there(self, images: np.ndarray) -> tuple[Any, Any]:
        """Returns images on the device and room for their logits."""
        xp = np
        if self.device == "cuda":
            import cupy as xp
        there = xp.asarray(images)
        return there, xp.empty_like(self.engine.predict(there))

    def same_bits(self, images: np.ndarray, runs: int) -> bool:
        """Whether so many passes give the same bits."""
        there, out = self._there(images)
        wanted = self.engine.predict(there, out=out).copy().view(np.uint32)
        differ = (wanted != wanted).sum()
        for _ in range(runs):
            out.fill(np.nan)
            differ += (self.engine.predict(there, out=out).view(np.uint32) != wanted).any()
        return int(differ) == 0

    def beside_another(self, images: np.ndarray, runs: int) -> bool:
        """Whether so many passes give their bits while another engine's passes run on another stream."""
        import cupy

        there, out = self._there(images)
        other, streams = cupy.empty_like(out), [cupy.cuda.Stream(non_blocking=True) for _ in "ab"]
        wanted = cupy.array(self.engine.predict(there, out=out)).view(np.uint32)
        differ = cupy.zeros((), np.int64)
        cupy.cuda.Device().synchronize()
        with self._make() as second:
            for _ in range(runs):
                for engine, stream, rows in zip(
                    (self.engine, second), streams, (out, other), strict=True
                ):
                    with stream:
                        engine.predict(there, out=rows)
                for stream, rows in zip(streams, (out, other), strict=True):
                    stream.synchronize()
                    differ += (rows.view(np.uint32) != wanted).any()
            return int(differ) == 0

    def contestant(self, images: np.ndarray) -> Contestant:
        """Returns the engine with these images."""
        engine, (there, out) = self.engine, self._there(images)
        return Contestant(
            "cnn_engine", True, lambda: engine.predict(there, out=out),
            lambda: engine.predict(images), lambda: out,
        )  # fmt: skip


class PyTorch:
    """A network in a data type as PyTorch runs it; its modules serve all batches.

    Peers are ``torch`` (on a GPU in a CUDA graph), in both layouts of images, and the modes of torch.compile,
    channels last.
    """

    def __init__(self, model: Model, dtype: str) -> None:
        self.model, self.torch, self.dtype = model, model.torch, dtype
        torch = self.torch
        kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.float16}
        self.kind = kinds.get(dtype, torch.float32)
        self._modules: dict[tuple[str, str], Any] = {}
        self._images: dict[tuple[int, str], Any] = {}
        torch._dynamo.config.recompile_limit = 64  # a batch each, of copies of one class

    def names(self, peer: str) -> dict[str, str]:
        """Returns name -> layout of the contestants of a peer."""
        if peer != "torch":
            return {f"torch.compile {peer}, channels last": "channels_last"}
        name = "PyTorch graph" if self.model.device == "cuda" else "PyTorch"
        return {name: "contiguous_format", f"{name}, channels last": "channels_last"}

    def compile(self, peer: str, images: np.ndarray) -> None:
        """Compiles for these images; what was compiled is kept."""
        with self.as_told():
            module = self._module(peer, "channels_last")
            module(self.static(images, "channels_last"))
            self._synchronize()

    def logits(self, images: np.ndarray, layout: str) -> np.ndarray:
        """Returns what the module gives, neither compiled nor in a graph."""
        with self.as_told(search=False):
            module = self._module("torch", layout)
            return on_host(export.first_output(module(self.static(images, layout))).float())

    def contestants(self, images: np.ndarray, peers: Iterable[str]) -> Iterator[Any]:
        """Yields the contestants of peers, or the (name, reason) of those that did not run."""
        for peer in peers:
            for name, layout in self.names(peer).items():
                try:
                    with self.as_told():
                        found = self.contestant(name, self._module(peer, layout), images, layout)
                except Exception as error:  # it has no common base
                    found = name, reason(error)
                yield found
                if self.model.device == "cuda":
                    self.torch.cuda.empty_cache()

    def _module(self, peer: str, layout: str) -> Any:
        key = peer, layout
        if key not in self._modules:
            module = copy.deepcopy(self.model.module).to(self.kind)
            module = module.to(memory_format=getattr(self.torch, layout))
            if peer != "torch":
                module = self.torch.compile(module, mode=COMPILE_MODES[peer], dynamic=False)
            self._modules[key] = module
        return self._modules[key]

    def static(self, images: np.ndarray, layout: str) -> Any:
        """Returns the images on the device, at one address."""
        key = len(images), layout
        if key not in self._images:
            there = self.torch.from_numpy(images).to(self.model.device).to(self.kind)
            self._images[key] = there.contiguous(memory_format=getattr(self.torch, layout))
        return self._images[key]

    @contextmanager
    def as_told(self, search: bool = True) -> Iterator[None]:
        """Computes as the data type says, without gradients, with the fastest kernels that cuDNN has."""
        backends, tf32 = self.torch.backends, self.dtype == "tf32"
        before = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
        backends.cudnn.benchmark = search
        backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = tf32
        try:
            with self.torch.no_grad():
                yield
        finally:
            backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = before

    def _synchronize(self) -> None:
        if self.model.device == "cuda":
            self.torch.cuda.synchronize()

    def contestant(self, name: str, module: Any, images: np.ndarray, layout: str) -> Contestant:
        """Returns a function of images on the device, on a GPU in a CUDA graph."""
        torch, host, box = self.torch, self.torch.from_numpy(images), []
        static = self.static(images, layout)

        def run() -> None:
            with torch.no_grad():
                box[:] = [export.first_output(module(static))]

        replay, keep = run, module
        if self.model.device == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARMUP):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            replay, keep = graph.replay, (module, graph)

        def whole() -> np.ndarray:
            static.copy_(host, non_blocking=True)
            replay()
            return box[0].float().cpu().numpy()

        return Contestant(name, False, replay, whole, lambda: box[0].float(), keep=keep)


def reason(error: Exception) -> str:
    """Returns an error in one line that is not too long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class Clock:
    """Times contestants interleaved: by the device's events on the null stream, or by the host's clock."""

    def __init__(self, device: str) -> None:
        self._cupy = None
        if device == "cuda":
            import cupy

            self._cupy = cupy
        self._scratch = (self._cupy or np).empty(FLUSH_BYTES, np.uint8)

    def _elapsed(self, one: Contestant, queue: Callable[[], object], flush: bool) -> float:
        if flush:
            self._scratch.fill(0)
        if self._cupy is None or one.wait is not None:
            if self._cupy is not None:
                self._cupy.cuda.Device().synchronize()
            begin = time.perf_counter()
            queue()
            if one.wait is not None:
                one.wait()
            return (time.perf_counter() - begin) * 1e3
        event = self._cupy.cuda.Event
        start, stop = event(), event()
        start.record()
        queue()
        stop.record()
        stop.synchronize()
        return self._cupy.cuda.get_elapsed_time(start, stop)

    def passes(self, one: Contestant, count: int) -> float:
        """Returns ms per pass of ``count`` passes one behind another."""

        def queue() -> None:
            for _ in range(count):
                one.run()

        return self._elapsed(one, queue, False) / count

    def flushed(self, one: Contestant) -> float:
        """Returns ms of a pass that finds nothing in the second-level cache."""
        return self._elapsed(one, one.run, True)

    def take_turns(self, contestants: list[Contestant], rounds: int, milliseconds: float) -> None:
        """Fills the samples: in each round every contestant runs for about so long."""
        counts = []
        for one in contestants:
            for _ in range(WARMUP):
                one.run()
                one.whole()
            once = self.passes(one, 2)
            counts.append(max(2, min(int(milliseconds / max(once, 1e-3)), 200)))
        for _ in range(rounds):
            for one, count in zip(contestants, counts, strict=True):
                one.samples.append(self.passes(one, count))
                one.flushed.append(median(self.flushed(one) for _ in range(3)))
                start = time.perf_counter()
                for _ in range(5):
                    one.whole()
                one.walls.append((time.perf_counter() - start) * 1e3 / 5)
