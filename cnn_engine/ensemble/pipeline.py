"""Reads and decodes parts of batches ahead of who needs them: threads that read, threads that decode."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CnnEngineError, InputError
from ..locks import ForkSafeLock
from .source import CORRUPT, Source

SKIP, FAIL = "skip", "fail"

#: Of samples that could not be decoded, those whose reason is kept.
MOST_REASONS = 20


class Buffer:
    """Pixels and labels of some samples in one piece of memory, so that one message carries both.

    Attributes:
        bytes: uint8 [N * C * H * W + 4 * N].
        images: uint8 [N, C, H, W], a view.
        labels: int32 [N], a view.
    """

    def __init__(self, count: int, shape: tuple[int, ...], empty: Callable[..., Any] = np.empty):
        pixels = count * int(np.prod(shape))
        room = -pixels % 4  # labels are aligned
        self.bytes = empty(pixels + room + 4 * count, np.uint8)
        self.images = self.bytes[:pixels].reshape(count, *shape)
        self.labels = self.bytes[pixels + room :].view(np.int32)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Work:
    """Counts of a pipeline's work.

    Attributes:
        images: decoded, those that could not be included.
        read_s, decode_s: CPU time of the threads, in seconds.
        corrupt: samples that could not be decoded.
        reasons: why, of the first of them.
        fill: how many parts of batches were ready, each time one was taken.
    """

    images: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    corrupt: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    fill: list[int] = field(default_factory=list)

    @property
    def core_s(self) -> float:
        return self.read_s + self.decode_s


class Pipeline:
    """Makes :class:`Buffer` objects of lists of samples, in order.

    Args:
        source: of the samples.
        parts: the samples of each buffer.
        queue: buffers that are read, decoded or ready at a time; at least one for each decoder.
        readers, decoders: threads.
        corrupt: ``"skip"`` gives a sample that cannot be read or decoded zeros and the label
            :data:`CORRUPT`; ``"fail"`` raises.
        tick: called after each sample, by any thread.
    """

    def __init__(
        self,
        source: Source,
        parts: Iterable[np.ndarray],
        *,
        queue: int = 4,
        readers: int = 1,
        decoders: int = 1,
        corrupt: str = FAIL,
        tick: Callable[[], None] = lambda: None,
    ):
        self._source, self._parts = source, iter(parts)
        self._queue = max(queue, decoders)
        self._corrupt, self._tick = corrupt, tick
        self._images = getattr(source, "images", None)  # where there is nothing to decode
        self._readers = ThreadPoolExecutor(readers, "reader")
        self._decoders = ThreadPoolExecutor(decoders, "decoder")
        self._running: deque[Future[Buffer]] = deque()
        self._lock = ForkSafeLock()
        self._closed = False
        self.work = Work()
        self._fill()

    def _fill(self) -> None:
        while len(self._running) < self._queue:
            part = next(self._parts, None)
            if part is None:
                return
            if self._images is not None:
                self._running.append(self._decoders.submit(self._copy, part))
                continue
            encoded = self._readers.submit(self._read, part)
            self._running.append(self._decoders.submit(self._decode, part, encoded))

    def ready(self) -> bool:
        """Whether :meth:`take` would not wait."""
        return bool(self._running) and self._running[0].done()

    def take(self) -> Buffer:
        """Returns the next buffer, once it is ready.

        Raises:
            InputError: a sample cannot be read or decoded, and that is to fail.
            StopIteration: there is none left.
        """
        if not self._running:
            raise StopIteration
        self.work.fill.append(sum(future.done() for future in self._running))
        found = self._running.popleft().result()
        self._fill()
        return found

    def __iter__(self) -> Iterator[Buffer]:
        while self._running:
            yield self.take()

    def close(self) -> None:
        """Ends the threads, without waiting for images that are being decoded."""
        self._closed = True
        for pool in (self._readers, self._decoders):
            pool.shutdown(wait=False, cancel_futures=True)

    def _copy(self, part: np.ndarray) -> Buffer:
        """Makes a buffer of images that are in memory: all at once, for one by one costs Python more."""
        begin = time.thread_time()
        buffer = Buffer(len(part), self._source.shape)
        np.take(self._images, part, axis=0, out=buffer.images, mode="clip")
        buffer.labels[...] = self._source.labels[part]
        self._tick()
        with self._lock:
            self.work.images += len(part)
            self.work.read_s += time.thread_time() - begin
        return buffer

    def _read(self, part: np.ndarray) -> list[Any]:
        begin = time.thread_time()
        found: list[Any] = []
        for sample in part.tolist():
            try:
                found.append(self._source.read(sample))
            except CnnEngineError as error:
                found.append(self._failed(sample, error))
            if self._closed:
                break
        with self._lock:
            self.work.read_s += time.thread_time() - begin
        return found

    def _decode(self, part: np.ndarray, reading: Future[list[Any]]) -> Buffer:
        encoded = reading.result()
        begin = time.thread_time()
        buffer = Buffer(len(part), self._source.shape)
        for place, (sample, data) in enumerate(zip(part.tolist(), encoded, strict=False)):
            label = self._source.labels[sample]
            if not isinstance(data, _Corrupt):
                try:
                    self._source.decode(sample, data, buffer.images[place])
                except CnnEngineError as error:
                    data = self._failed(sample, error)
            if isinstance(data, _Corrupt):
                buffer.images[place], label = 0, CORRUPT
            buffer.labels[place] = label
            self._tick()
            if self._closed:
                break
        with self._lock:
            self.work.images += len(part)
            self.work.decode_s += time.thread_time() - begin
        return buffer

    def _failed(self, sample: int, error: Exception) -> _Corrupt:
        if self._corrupt == FAIL:
            raise InputError(f"{error} (--corrupt skip goes on without it)") from error
        with self._lock:
            self.work.corrupt.append(sample)
            if len(self.work.reasons) < MOST_REASONS:
                self.work.reasons.append(str(error))
        return _Corrupt()


class _Corrupt:
    """In the place of a sample that could not be read."""
