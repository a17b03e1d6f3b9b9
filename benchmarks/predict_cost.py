"""``python -m benchmarks.predict_cost``: what ``Engine.predict`` costs the host beside the pass itself.

On a CPU: the wall time of predict on one image, in turns with the bare pass of the same plan. On a GPU, for
an image that is there already (CuPy's and PyTorch's, with and without ``out=``): the time until predict
returns, in turns with the bare pass's; neither waits for the GPU, and between samples the GPU runs dry.
Medians of ``--samples`` calls.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks import record
from cnn_engine import Engine, cli
from cnn_engine.measure import environment

BURST = 50  # calls between two waits for the GPU: far fewer than its queue holds


def turns(calls: dict, samples: int, wait) -> dict[str, float]:
    """Returns the median seconds of each of ``calls``, made in turns."""
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


def calls_on_cpu(engine: Engine) -> dict:
    images = np.zeros((1, *engine.network.input_shape), np.uint8)
    out = np.empty((1, engine.network.classes), np.float32)
    plan = engine.plan_at(images.ctypes.data, out.ctypes.data, 1, images.dtype)
    return {
        "bare pass": plan.run,
        "predict(numpy)": lambda: engine.predict(images),
        "predict(numpy, out=)": lambda: engine.predict(images, out=out),
    }


def calls_on_cuda(engine: Engine) -> dict:
    import cupy

    shape, classes = (1, *engine.network.input_shape), engine.network.classes
    images, out = cupy.zeros(shape, cupy.uint8), cupy.empty((1, classes), cupy.float32)
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
    tensor = torch.zeros(shape, dtype=torch.uint8, device="cuda")
    into = torch.empty((1, classes), device="cuda")
    calls["predict(torch)"] = lambda: engine.predict(tensor)
    calls["predict(torch, out=)"] = lambda: engine.predict(tensor, out=into)
    return calls


def _wait_for_the_gpu() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def main(arguments: list[str] | None = None) -> int:
    return cli.run(_main, arguments)


def _main(arguments: list[str] | None) -> int:
    parser = cli.ArgumentParser(prog="python -m benchmarks.predict_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="auto")
    parser.add_argument("--variant", default="auto")
    parser.add_argument("--threads", type=cli.whole_number(1, 4096))
    parser.add_argument("--samples", type=cli.whole_number(1, 10**8), default=20_000)
    record.add_options(parser, "json")
    options = parser.parse_args(arguments)
    found = record.Record("predict_cost", options, arguments)
    with Engine(device=options.device, variant=options.variant, threads=options.threads) as engine:
        on_cuda = engine.device.kind == "cuda"
        calls = calls_on_cuda(engine) if on_cuda else calls_on_cpu(engine)
        wait = _wait_for_the_gpu if on_cuda else int
        times = turns(calls, options.samples, wait)
        found.document |= {"environment": environment.describe(engine.device), "seconds": times}
        print(f"{engine.device.model}, {engine.choice.variant}, batch 1, {options.samples} calls")
    bare = times["bare pass"]
    for name, seconds in times.items():
        print(
            f"{name:<22} {seconds * 1e6:8.2f} us   {(seconds - bare) * 1e6:+8.2f} us beside the pass"
        )
    found.write()
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
