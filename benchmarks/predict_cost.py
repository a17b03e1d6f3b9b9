"""``python -m benchmarks.predict_cost``: host time that ``Engine.predict`` adds to a pass.

On a CPU: the wall time of predict on one image, interleaved with the bare pass of the same plan. On a GPU,
for an image that is there already (CuPy's and PyTorch's, with and without ``out=``): the time until predict
returns, interleaved with the bare pass's; neither waits for the GPU, and between samples the GPU runs dry.
Then for images of the host: the time until the result is there, interleaved with a CUDA graph of the same
pass from page-locked memory to page-locked memory. Medians of ``--samples`` calls.
"""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks import result_file
from cnn_engine import Engine, cli
from cnn_engine.measure import environment

BURST = 50  # calls between two waits for the GPU: far fewer than its queue holds


def turns(calls: dict, samples: int, wait) -> dict[str, float]:
    """Returns the median seconds of each of ``calls``, made interleaved."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    done = 0
    while done < samples:
        for name, call in calls.items():
            wait()
            for _ in range(BURST):
                start = perf_counter()
                call()
                times[name].append(perf_counter() - start)
        done += BURST
    wait()
    return {name: median(values) for name, values in times.items()}


def calls_on_cpu(engine: Engine, dtype: str) -> dict:
    images = np.zeros((1, *engine.network.input_shape), dtype)
    out = np.empty((1, engine.network.classes), np.float32)
    plan = engine.plan_at(images.ctypes.data, out.ctypes.data, 1, images.dtype)
    return {
        "bare pass": plan.run,
        "predict(numpy)": lambda: engine.predict(images),
        "predict(numpy, out=)": lambda: engine.predict(images, out=out),
    }


def calls_on_cuda(engine: Engine, dtype: str) -> dict:
    import cupy

    shape, classes = (1, *engine.network.input_shape), engine.network.classes
    images, out = cupy.zeros(shape, dtype), cupy.empty((1, classes), cupy.float32)
    engine.predict(images, out=out)
    # The plan that predict has just made; its next call makes another.
    plan = next(iter(engine._ready.values())).idle.pop()
    plan.bind(images.data.ptr, out.data.ptr)
    calls = {
        "bare pass": plan.run,
        "predict(cupy)": lambda: engine.predict(images),
        "predict(cupy, out=)": lambda: engine.predict(images, out=out),
    }
    try:
        import torch
    except ImportError:
        return calls
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
    into = torch.empty((1, classes), device="cuda")
    calls["predict(torch)"] = lambda: engine.predict(tensor)
    calls["predict(torch, out=)"] = lambda: engine.predict(tensor, out=into)
    return calls


def calls_from_host(engine: Engine, dtype: str, batch: int) -> dict:
    """Calls that return with the result in the host's memory."""
    import cupy

    locked, rows = engine.empty_images(batch, dtype), engine.empty_probabilities(batch)
    locked[:] = 0
    images = cupy.zeros(locked.shape, dtype)
    out = cupy.empty(rows.shape, cupy.float32)
    copy = cupy.cuda.runtime.memcpyAsync
    stream = cupy.cuda.Stream(non_blocking=True)

    def queue() -> None:
        copy(images.data.ptr, locked.ctypes.data, locked.nbytes, 1, stream.ptr)
        engine.predict(images, out=out)
        copy(rows.ctypes.data, out.data.ptr, rows.nbytes, 2, stream.ptr)

    with stream:
        queue()  # what is made for the first call cannot be captured
        stream.synchronize()
        stream.begin_capture()
        queue()
        graph = stream.end_capture()

    def replay() -> None:
        graph.launch(stream)
        stream.synchronize()

    pageable = np.zeros_like(locked)
    return {
        "whole pass": replay,
        "predict(numpy)": lambda: engine.predict(pageable),
        "predict(page-locked)": lambda: engine.predict(locked),
    }


def _wait_for_the_gpu() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def _say(times: dict[str, float]) -> None:
    bare = next(iter(times.values()))
    for name, seconds in times.items():
        print(
            f"{name:<22} {seconds * 1e6:8.2f} us   {(seconds - bare) * 1e6:+8.2f} us beside the pass"
        )


@cli.command
def main(arguments: list[str] | None = None) -> int:
    parser = result_file.parser("predict_cost", __doc__, "json")
    parser.add_argument("--model", help="an ONNX file in the place of the CIFAR-10 network")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--variant", default="auto")
    parser.add_argument(
        "--batch", type=cli.whole_number(1, 4096), default=1, help="of the host's images"
    )
    parser.add_argument("--threads", type=cli.whole_number(1, 4096))
    parser.add_argument("--samples", type=cli.whole_number(1, 10**8), default=20_000)
    options = parser.parse_args(arguments)
    found = result_file.ResultFile("predict_cost", options, arguments)
    with Engine(
        options.model or "cifar10", device=options.device, variant=options.variant,
        dtype=options.dtype, threads=options.threads,
    ) as engine:  # fmt: skip
        on_cuda = engine.device.kind == "cuda"
        dtype = "float32" if options.model else "uint8"
        calls = calls_on_cuda(engine, dtype) if on_cuda else calls_on_cpu(engine, dtype)
        times = turns(calls, options.samples, _wait_for_the_gpu if on_cuda else int)
        whole = {}
        if on_cuda:
            whole = turns(calls_from_host(engine, dtype, options.batch), options.samples, int)
        found.document |= {
            "environment": environment.describe(engine.device), "seconds": times, "whole": whole,
        }  # fmt: skip
        print(f"{engine.device.model}, {engine.choice.variant}, batch 1, {options.samples} calls")
    _say(times)
    if whole:
        print(f"from the host's memory and back, batch {options.batch}")
        _say(whole)
    found.write()
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
