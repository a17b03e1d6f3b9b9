"""Who takes part in :mod:`benchmarks.gpu_peers`: our fused kernels, PyTorch and JAX, on the same images."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from cnn_engine.workloads.cifar10.network import NETWORK

from cnn_engine.devices import cuda_module
from cnn_engine.lower.fused_network import description


@dataclass
class Contestant:
    """What is timed: ``run()`` starts one pass over the batch and returns at once."""

    name: str
    ours: bool
    dtype: str
    run: Callable[[], object]
    probabilities: Callable[[], np.ndarray]  # of the last pass, in host memory
    wait: Callable[[], object] | None = None  # where the device's events cannot see the work
    where: str = "device"
    keep: object = None  # what the device reads and nothing else holds


def sample(contestant: Contestant, passes: int) -> float:
    """Returns milliseconds a pass."""
    import cupy

    if contestant.wait is not None:
        began = time.perf_counter()
        for _ in range(passes):
            contestant.run()
        contestant.wait()
        return (time.perf_counter() - began) * 1e3 / passes
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(passes):
        contestant.run()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) / passes


class Ours:
    """The fused kernels: launched, and replayed as a CUDA graph."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights
        self.module = cuda_module.load()

    def network(self, dtype: str):
        return self.module.FusedNetwork(*description(NETWORK, self.weights), dtype)

    def contestants(self, images, dtypes: list[str]):
        import cupy

        stream = cupy.cuda.get_current_stream()
        for dtype in dtypes:
            network = self.network(dtype)
            out = cupy.full((len(images), NETWORK.classes), -1, np.float32)

            def run(network=network, out=out):
                network.run(images.data.ptr, True, len(images), out.data.ptr, stream.ptr)

            yield Contestant(f"fused {dtype}", True, dtype, run, lambda out=out: cupy.asnumpy(out))
            if len(images) <= 100:
                capture = cupy.cuda.Stream(non_blocking=True)
                with capture:
                    capture.begin_capture()
                    network.run(images.data.ptr, True, len(images), out.data.ptr, capture.ptr)
                    graph = capture.end_capture()

                def replay(graph=graph, network=network):
                    graph.launch(stream)

                yield Contestant(
                    f"fused {dtype}, graph", True, dtype, replay, lambda out=out: cupy.asnumpy(out)
                )


class Torch:
    """PyTorch with cuDNN: eager, channels-last, CUDA graph, torch.compile."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        import torch

        self.torch = torch
        self.weights = {k: torch.from_numpy(v.copy()).cuda() for k, v in weights.items()}
        self.compiled: dict = {}

    def forward(self, dtype: str, channels_last: bool):
        """Returns the network as a function of uint8 images."""
        torch, functional = self.torch, self.torch.nn.functional
        kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(dtype, torch.float32)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        weights = {
            k: v.to(kind).contiguous(memory_format=layout) if v.dim() == 4 else v.to(kind)
            for k, v in self.weights.items()
        }

        def run(images):
            x = (
                images.to(kind)
                .mul(NETWORK.scale)
                .add(NETWORK.offset)
                .contiguous(memory_format=layout)
            )
            for i in (1, 2, 3):
                x = functional.conv2d(
                    x, weights[f"conv{i}.weight"], weights[f"conv{i}.bias"], padding=2
                )
                x = functional.max_pool2d(functional.relu(x), 2)
            x = functional.linear(x.flatten(1), weights["fc.weight"], weights["fc.bias"])
            return functional.softmax(x.float(), 1)

        return run

    def precision(self, dtype: str) -> None:
        self.torch.backends.cudnn.benchmark = True
        self.torch.backends.cudnn.allow_tf32 = dtype == "tf32"
        self.torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"

    def contestants(self, images, dtypes: list[str], compile_batches: set[int]):
        torch = self.torch
        batch = torch.as_tensor(images, device="cuda")
        for dtype in dtypes:
            self.precision(dtype)
            for channels_last in (False, True):
                forward = self.forward(dtype, channels_last)
                with torch.no_grad():
                    for _ in range(3):
                        forward(batch)  # cuDNN chooses its algorithms
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = forward(batch)
                layout = ", channels-last" if channels_last else ""
                if len(images) <= 100:
                    box: list = []

                    def eager(forward=forward, box=box, dtype=dtype):
                        self.precision(dtype)
                        with torch.no_grad():
                            box[:] = [forward(batch)]

                    yield Contestant(
                        f"PyTorch {dtype}{layout}",
                        False,
                        dtype,
                        eager,
                        lambda box=box: box[0].cpu().numpy(),
                    )
                yield Contestant(
                    f"PyTorch {dtype}{layout}, graph", False, dtype, graph.replay,
                    lambda out=out: out.cpu().numpy(), keep=(forward, batch),
                )  # fmt: skip
            if len(images) in compile_batches:
                yield from self.compiled_contestant(batch, dtype)

    def compiled_contestant(self, batch, dtype: str):
        import torch._inductor.config as inductor

        torch = self.torch

        inductor.autotune_num_choices_displayed = 0  # its tables are long
        torch._dynamo.reset()
        forward = self.forward(dtype, True)
        compiled = torch.compile(forward, mode="max-autotune-no-cudagraphs", dynamic=False)
        with torch.no_grad():
            for _ in range(3):
                compiled(batch)
            torch.cuda.synchronize()
            # The graph is what mode max-autotune adds, here without its copies in and out.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = compiled(batch)
        yield Contestant(
            f"torch.compile {dtype}, max-autotune, graph", False, dtype, graph.replay,
            lambda out=out: out.cpu().numpy(), keep=(compiled, forward, batch),
        )  # fmt: skip


class Jax:
    """JAX, compiled by XLA."""

    PRECISION: ClassVar = {
        "float32": "highest",
        "tf32": "default",
        "float16": "default",
        "bfloat16": "default",
    }

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        # Else it takes three quarters of the memory, which the others then lack.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        self.jax, self.weights = jax, weights

    def contestants(self, images, dtypes: list[str]):
        jax = self.jax
        host = np.asarray(images.get())
        for dtype in dtypes:
            kind = {"float16": jax.numpy.float16, "bfloat16": jax.numpy.bfloat16}.get(
                dtype, jax.numpy.float32
            )
            weights = {k: jax.numpy.asarray(v, kind) for k, v in self.weights.items()}
            precision = self.PRECISION[dtype]

            def forward(x, w, kind=kind, precision=precision):
                x = x.astype(kind) * kind(NETWORK.scale) + kind(NETWORK.offset)
                for i in (1, 2, 3):
                    x = (
                        jax.lax.conv_general_dilated(
                            x, w[f"conv{i}.weight"], (1, 1), ((2, 2), (2, 2)), precision=precision
                        )
                        + w[f"conv{i}.bias"][:, None, None]
                    )
                    x = jax.lax.reduce_window(
                        jax.nn.relu(x),
                        -jax.numpy.inf,
                        jax.lax.max,
                        (1, 1, 2, 2),
                        (1, 1, 2, 2),
                        "VALID",
                    )
                x = jax.numpy.matmul(x.reshape(len(x), -1), w["fc.weight"].T, precision=precision)
                return jax.nn.softmax((x + w["fc.bias"]).astype(jax.numpy.float32), axis=1)

            compiled = jax.jit(forward)
            batch, box = jax.device_put(host), []

            def run(compiled=compiled, batch=batch, weights=weights, box=box):
                box[:] = [compiled(batch, weights)]

            run()
            yield Contestant(
                f"JAX {dtype}", False, dtype, run, lambda box=box: np.asarray(box[0]),
                wait=lambda box=box: box[0].block_until_ready(),
            )  # fmt: skip


def streamed(ours: Ours, torch_peer: Torch | None, host: np.ndarray, dtypes: list[str], chunk: int):
    """Contestants from host uint8 to host probabilities: pinned memory, three streams, chunks."""
    import cupy

    count = len(host)
    source = cupy.cuda.alloc_pinned_memory(host.nbytes)
    images = np.frombuffer(source, np.uint8, host.nbytes).reshape(host.shape)
    images[:] = host
    sink = cupy.cuda.alloc_pinned_memory(count * NETWORK.classes * 4)
    out = np.frombuffer(sink, np.float32, count * NETWORK.classes).reshape(count, -1)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    main = cupy.cuda.get_current_stream()
    image_bytes = host[0].nbytes

    torch = None if torch_peer is None else torch_peer.torch

    def pipeline(compute):
        """Chunk i on stream i % 3: copy in, ``compute``, copy out; the main stream waits for all."""
        began = main.record()
        for stream in streams:
            stream.wait_event(began)
        for i, first in enumerate(range(0, count, chunk)):
            size = min(chunk, count - first)
            compute(streams[i % 3], i % 3, first, size)
        for stream in streams:
            main.wait_event(stream.record())

    for dtype in dtypes:
        network = ours.network(dtype)
        stages = [cupy.empty((chunk, *host.shape[1:]), np.uint8) for _ in streams]
        results = [cupy.empty((chunk, NETWORK.classes), np.float32) for _ in streams]

        def fused(stream, turn, first, size, network=network, stages=stages, results=results):
            stage, result = stages[turn], results[turn]
            stage.data.copy_from_host_async(
                source.ptr + first * image_bytes, size * image_bytes, stream
            )
            network.run(stage.data.ptr, True, size, result.data.ptr, stream.ptr)
            result.data.copy_to_host_async(
                sink.ptr + first * NETWORK.classes * 4, size * NETWORK.classes * 4, stream
            )

        yield Contestant(
            f"fused {dtype}, streamed", True, dtype, lambda f=fused: pipeline(f),
            lambda: out.copy(), where="host to host",
        )  # fmt: skip
        if torch_peer is not None:
            torch_peer.precision(dtype)
            forward = torch_peer.forward(dtype, True)
            torch_streams = [torch.cuda.ExternalStream(s.ptr) for s in streams]
            pinned, target = torch.from_numpy(images), torch.from_numpy(out)

            def peer(
                stream, turn, first, size, parts=(forward, torch_streams, dtype, pinned, target)
            ):
                forward, torch_streams, dtype, pinned, target = parts
                torch_peer.precision(dtype)
                with torch.no_grad(), torch.cuda.stream(torch_streams[turn]):
                    batch = pinned[first : first + size].to("cuda", non_blocking=True)
                    target[first : first + size].copy_(forward(batch), non_blocking=True)

            yield Contestant(
                f"PyTorch {dtype}, channels-last, streamed", False, dtype,
                lambda f=peer: pipeline(f), lambda: out.copy(), where="host to host",
            )  # fmt: skip
