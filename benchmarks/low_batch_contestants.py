"""Who takes part in :mod:`benchmarks.low_batch`: our engine and PyTorch, on the same images on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cnn_engine import Engine, export

from .models import spec_of
from .models_worker import OPSET, ignore_compiled_operators

#: Bytes written between passes that are to find nothing in the second-level cache: more than any GPU has.
FLUSH_BYTES = 256 << 20
#: Passes before the first that counts, and those that see whether bits stay the same.
WARMUP = 3
#: PyTorch's modes of torch.compile whose CUDA graph is ours to capture.
COMPILE_MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass
class Contestant:
    """What is timed.

    Attributes:
        run: queues one pass over images on the device, on the current stream, and returns at once.
        whole: makes one pass over images in host memory; the logits are there on return.
        logits: of the last pass on the device, as an array of the device.
        keep: what a graph reads and nothing else holds.
    """

    name: str
    ours: bool
    run: Callable[[], object]
    whole: Callable[[], np.ndarray]
    logits: Callable[[], Any]
    keep: object = None
    samples: list[float] = field(default_factory=list)  # ms a pass, one pass behind another
    flushed: list[float] = field(
        default_factory=list
    )  # ms of a pass after the cache was overwritten
    walls: list[float] = field(default_factory=list)  # ms of a pass, host memory to host memory


class Model:
    """A network of random weights as PyTorch has it, and the ONNX file that we read.

    Args:
        size: rows and columns of an image, or None for the network's own.
        folder: where files are kept; one that is there is not written again.
    """

    def __init__(self, name: str, size: tuple[int, int] | None, folder: Path) -> None:
        ignore_compiled_operators()
        import torch

        self.torch, self.name = torch, name
        torch.manual_seed(0)
        self.module, _ = export.build(spec_of(name), "random")
        self.shape = export.images_shape(self.module, size and (3, *size))
        stem = f"{name}-{self.shape[1]}x{self.shape[2]}".replace(":", ".")
        self.path, state = folder / f"{stem}.onnx", folder / f"{stem}.pt"
        if self.path.exists() and state.exists():
            self.module.load_state_dict(torch.load(state, weights_only=True))
        else:
            export.run_statistics(self.module, self.shape)
            export.write(self.module, self.shape, str(self.path), "torchscript", None, OPSET)
            torch.save(self.module.state_dict(), state)
        self.module = self.module.cuda()

    def images(self, batch: int) -> np.ndarray:
        """Returns the images of a batch, the same whenever it is asked for."""
        return np.random.default_rng(batch).normal(size=(batch, *self.shape)).astype(np.float32)

    def exact(self, images: np.ndarray) -> np.ndarray:
        """Returns PyTorch's logits in float64."""
        torch = self.torch
        self.module.double()
        with torch.no_grad():
            found = export.first_output(self.module(torch.from_numpy(images).cuda().double())).cpu()
        self.module.float()
        return found.numpy()


class Ours:
    """Our engine of a network in a data type."""

    def __init__(self, model: Model, dtype: str) -> None:
        self._make = lambda: Engine(str(model.path), device="cuda", dtype=dtype)
        self.engine = self._make()

    def beside_another(self, images: np.ndarray, runs: int) -> bool:
        """Whether so many passes give their bits while another engine's passes run on another stream."""
        import cupy

        there, out = (
            cupy.asarray(images),
            cupy.empty((len(images), self.engine.network.classes), np.float32),
        )
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
        import cupy

        engine, there = self.engine, cupy.asarray(images)
        out = cupy.empty((len(images), engine.network.classes), np.float32)
        return Contestant(
            "cnn_engine", True, lambda: engine.predict(there, out=out),
            lambda: engine.predict(images), lambda: out,
        )  # fmt: skip


@contextmanager
def _precision(torch: Any, dtype: str) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def pytorch(model: Model, dtype: str, images: np.ndarray, peers: list[str]) -> Iterator[Any]:
    """Yields PyTorch's contestants, or the (name, reason) of those that did not run.

    Args:
        peers: of ``torch`` (a CUDA graph, in both layouts of images) and the modes of torch.compile.
    """
    import copy

    torch = model.torch
    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(dtype, torch.float32)
    layouts = {"": torch.contiguous_format, ", channels last": torch.channels_last}
    for peer in peers:
        for words, layout in layouts.items():
            if peer != "torch" and layout is torch.contiguous_format:
                continue
            name = ("PyTorch graph" if peer == "torch" else f"torch.compile {peer}") + words
            try:
                with _precision(torch, dtype):
                    module = copy.deepcopy(model.module).to(kind).to(memory_format=layout)
                    if peer != "torch":
                        torch._dynamo.reset()
                        module = torch.compile(module, mode=COMPILE_MODES[peer])
                    yield _captured(torch, name, module, images, kind, layout)
            except Exception as error:  # it has no common base
                yield name, " ".join(f"{type(error).__name__}: {error}".split())[:300]
            torch.cuda.empty_cache()


def _captured(
    torch: Any, name: str, module: Any, images: np.ndarray, kind: Any, layout: Any
) -> Contestant:
    host = torch.from_numpy(images)
    static = host.cuda().to(kind).contiguous(memory_format=layout)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                module(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = export.first_output(module(static))

    def whole() -> np.ndarray:
        static.copy_(host, non_blocking=True)
        graph.replay()
        return logits.float().cpu().numpy()

    return Contestant(name, False, graph.replay, whole, lambda: logits.float(), module)


class Clock:
    """Times contestants by the device's events on the null stream, in turns."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self._scratch = cupy.empty(FLUSH_BYTES, np.uint8)

    def _elapsed(self, queue: Callable[[], object], before: Callable[[], object] | None) -> float:
        event = self.cupy.cuda.Event
        start, stop = event(), event()
        if before is not None:
            before()
        start.record()
        queue()
        stop.record()
        stop.synchronize()
        return self.cupy.cuda.get_elapsed_time(start, stop)

    def passes(self, run: Callable[[], object], count: int) -> float:
        """Returns ms a pass of ``count`` passes one behind another."""

        def queue() -> None:
            for _ in range(count):
                run()

        return self._elapsed(queue, None) / count

    def flushed(self, run: Callable[[], object]) -> float:
        """Returns ms of a pass that finds nothing in the second-level cache."""
        return self._elapsed(run, lambda: self._scratch.fill(0))

    def take_turns(self, contestants: list[Contestant], rounds: int, milliseconds: float) -> None:
        """Fills the samples: in each round every contestant runs for about so long."""
        counts = []
        for one in contestants:
            for _ in range(WARMUP):
                one.run()
                one.whole()
            once = self.passes(one.run, 2)
            counts.append(max(2, min(int(milliseconds / max(once, 1e-3)), 200)))
        for _ in range(rounds):
            for one, count in zip(contestants, counts, strict=True):
                one.samples.append(self.passes(one.run, count))
                one.flushed.append(median(self.flushed(one.run) for _ in range(3)))
                start = time.perf_counter()
                for _ in range(5):
                    one.whole()
                one.walls.append((time.perf_counter() - start) * 1e3 / 5)

    def same_bits(self, contestant: Contestant, runs: int) -> bool:
        """Whether so many passes give the same bits."""
        cupy = self.cupy
        contestant.run()
        first = cupy.array(contestant.logits()).view(np.uint32)
        differ = cupy.zeros((), np.int64)
        for _ in range(runs):
            contestant.run()
            differ += (cupy.asarray(contestant.logits()).view(np.uint32) != first).any()
        return int(differ) == 0
