"""Reusable memory for chunks of images and for their outputs."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np

from ..engine.device_images import DeviceImages
from ..errors import expected
from ..locks import ForkSafeLock
from ..workload import Samples
from . import columns

#: Bytes that are worth a thread of their own, and threads that read: a GPU takes more bytes per second than
#: one thread copies from the system's cache.
READ_BYTES, READ_THREADS = 16 << 20, 12

_reading = ThreadPoolExecutor(READ_THREADS, "read-part")

#: Kinds of input whose images lie in a file as the engine takes them.
ARRAY_KINDS = ("npy", "npy-float32")

#: What a chunk has in the place of images where it has all inputs of a network.
INPUTS = "inputs"

Memory = TypeVar("Memory")


class Slot:
    """Memory for a chunk's images, page-locked on CUDA."""

    def __init__(self, engine: Any, size: int) -> None:
        self._engine, self._size = engine, size
        self._images: dict[str, Any] = {}

    def images(self, dtype: str) -> Any:
        """Returns uint8 or float32 [size, C, H, W], or all inputs as samples, the same each time."""
        if dtype not in self._images and dtype == INPUTS:
            self._images[dtype] = columns.inputs_memory(self._engine, self._size)
        elif dtype not in self._images:
            self._images[dtype] = self._make(self._size, np.dtype(dtype))
        return self._images[dtype]

    def clear_from(self, dtype: str, count: int) -> None:
        """Sets all images after the first ``count`` to zeros."""
        images = self.images(dtype)
        for array in images.arrays.values() if dtype == INPUTS else (images,):
            array[count:] = 0

    def _make(self, size: int, dtype: np.dtype) -> Any:
        return self._engine.empty_images(size, dtype)

    def clear(self, dtype: str) -> None:
        """Makes all images black."""
        self.images(dtype)[...] = 0

    def predict(self, dtype: str, rows: Samples, batch: int) -> None:
        """Fills ``rows`` with the outputs for the first N images, in passes over ``batch``.

        On CUDA they are page-locked.
        """
        images = self.images(dtype)[: len(rows)]
        if dtype == INPUTS:
            columns.run(self._engine, images, rows)
            return
        out = rows.arrays if len(rows.arrays) > 1 else next(iter(rows.arrays.values()))
        self._engine.predict(images, batch=batch, out=out)


class DeviceSlot(Slot):
    """Memory of a GPU for a chunk's images, which files are read into."""

    def _make(self, size: int, dtype: np.dtype) -> DeviceImages:
        return self._engine.device_images(size, dtype)

    def clear(self, dtype: str) -> None:
        read_into_device(File("/dev/zero"), self.images(dtype), 0)

    def predict(self, dtype: str, rows: Samples, batch: int) -> None:
        (probabilities,) = rows.arrays.values()
        self.images(dtype)[: len(rows)].predict(probabilities)


class Slots(Generic[Memory]):
    """A pool of at most so many buffers, each made by ``make`` when it is first needed.

    They are taken in turn, so that all of them are in use soon, and memory does not grow later.
    """

    def __init__(self, most: int, make: Callable[[], Memory], there: list[Memory]) -> None:
        self.most = most
        self._make, self._made = make, len(there)
        self._making = ForkSafeLock()
        self._free: queue.Queue[Memory] = queue.Queue()
        for memory in there:
            self._free.put(memory)

    def take(self) -> Memory:
        """Returns a free buffer; waits until one is returned where all are in use."""
        with self._making:
            if self._free.empty() and self._made < self.most:
                self._made += 1
                return self._make()
        return self._free.get()

    def put(self, memory: Memory) -> None:
        """Returns a buffer to the pool."""
        self._free.put(memory)


class File:
    """A file that several threads read, closed by the last one.

    It is opened once: whatever waits for the system gives Python's lock away, and has it back late.
    """

    descriptor = -1

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def begin_reading(file: File, target: Any, offset: int) -> list[Future]:
    """Begins to fill images of a slot from byte ``offset`` of a file on.

    Returns what still reads: each gives when it was done, or raises InputError or OSError.
    """
    if isinstance(target, DeviceImages):  # which has threads of its own
        return [_reading.submit(read_into_device, file, target, offset)]
    view = memoryview(target).cast("B")
    count = -(-len(view) // READ_BYTES)
    bounds = [len(view) * part // count for part in range(count + 1)]
    return [
        _reading.submit(read_at, file, view[begin:end], offset + begin)
        for begin, end in pairwise(bounds)
    ]


def read_at(file: File, view: memoryview, offset: int) -> float:
    """Fills ``view`` from byte ``offset`` of a file on; returns when it was full."""
    done = 0
    while done < len(view):
        count = os.preadv(file.descriptor, [view[done:]], offset + done)
        if not count:
            raise _ended(file, len(view) - done)
        done += count
    return perf_counter()


def read_into_device(file: File, target: DeviceImages, offset: int) -> float:
    """Fills ``target`` from byte ``offset`` of a file on; returns when it was full."""
    there, wanted = target.read(file.descriptor, offset), len(target) * target.image_bytes
    if there < wanted:
        raise _ended(file, wanted - there)
    return perf_counter()


def _ended(file: File, missing: int) -> Exception:
    return expected(file.path, f"{missing:,} bytes more", "its end")
