"""How to share a machine's cores: one engine with all threads, or worker processes with a part each.

``python examples/processes.py`` prints images/s for each way. Threads times workers should be the cores: more
compete for them, fewer leave some idle. Which split is fastest depends on network and batch: measure yours.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import cnn_engine
from cnn_engine.devices import threads as cpus

_engine: cnn_engine.Engine | None = None


def start(threads: int) -> None:
    """Makes the worker's own engine, once."""
    global _engine
    _engine = cnn_engine.Engine("cifar10", device="cpu", threads=threads)


def classify(images: np.ndarray) -> np.ndarray:
    """Returns the class of every image, int64 [N]."""
    assert _engine is not None
    return _engine.predict(images).argmax(axis=1)


def measure(workers: int, threads: int, batches: list[np.ndarray]) -> tuple[float, np.ndarray]:
    """Returns images/s and the classes of all images, in order."""
    context = multiprocessing.get_context("spawn")  # a fork would copy threads that hold locks
    with ProcessPoolExecutor(workers, context, start, (threads,)) as pool:
        list(pool.map(classify, batches[:1] * workers))  # processes start, engines are made
        began = time.perf_counter()
        classes = np.concatenate(list(pool.map(classify, batches)))
        seconds = time.perf_counter() - began
    return len(classes) / seconds, classes


def main(count: int = 64, batch: int = 64) -> None:
    cores = cpus.default()  # a container's quota counts
    pixels = np.random.default_rng(0).integers(0, 256, (count, batch, 3, 32, 32), np.uint8)
    for workers in sorted({1, 2, cores}):
        threads = max(1, cores // workers)
        rate, _ = measure(workers, threads, list(pixels))
        print(f"workers {workers}, threads of each {threads}: {rate:,.0f} images/s")


if __name__ == "__main__":
    main()
