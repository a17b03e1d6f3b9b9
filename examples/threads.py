"""How to call one engine from several Python threads: ``python examples/threads.py``.

Every call has memory of its own, and Python's lock is free while kernels run, so weights are in memory once.
Prints images/s and the time of a call for each split: callers times threads should be the cores. One caller
with all threads has the shortest call, many callers with one thread each usually have the most images/s.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import cnn_engine
from cnn_engine.devices import threads as cpus


def measure(
    callers: int, threads: int, batches: list[np.ndarray]
) -> tuple[float, float, np.ndarray]:
    """Returns images/s, the median seconds of a call, and the classes of all images, in order."""
    with (
        cnn_engine.Engine("cifar10", device="cpu", threads=threads) as engine,
        ThreadPoolExecutor(callers) as pool,
    ):

        def classify(images: np.ndarray) -> tuple[float, np.ndarray]:
            began = time.perf_counter()
            classes = engine.predict(images).argmax(axis=1)
            return time.perf_counter() - began, classes

        list(pool.map(classify, batches[:1] * callers))  # each caller's memory is made
        began = time.perf_counter()
        calls = list(pool.map(classify, batches))
        seconds = time.perf_counter() - began
    classes = np.concatenate([found for _, found in calls])
    return len(classes) / seconds, float(np.median([lasted for lasted, _ in calls])), classes


def main(count: int = 64, batch: int = 64) -> None:
    cores = cpus.default()  # a container's quota counts
    pixels = np.random.default_rng(0).integers(0, 256, (count, batch, 3, 32, 32), np.uint8)
    for callers in sorted({1, 2, cores}):
        threads = max(1, cores // callers)
        rate, call, _ = measure(callers, threads, list(pixels))
        print(
            f"callers {callers}, threads of each {threads}: {rate:,.0f} images/s, "
            f"{call * 1e3:.2f} ms per call"
        )


if __name__ == "__main__":
    main()
