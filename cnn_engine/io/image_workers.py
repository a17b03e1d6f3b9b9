"""Decodes many image files in worker processes, in order and a few ahead; :mod:`.images` decodes one.

Workers make pixels, uint8 [C, H, W], which the caller normalises: a quarter of the bytes goes between
processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import wait

import numpy as np

from ..devices import threads
from ..errors import InputError, expected
from .images import File, decode, require_pillow
from .preprocess import Preprocess

#: Images that a worker decodes at a time; more would keep the consumer waiting for the first.
CHUNK = 8

#: Chunks that are decoded or waiting to be taken, for each worker.
AHEAD = 2

#: Fewer files than these are decoded in the calling process: a worker takes about half a second to start.
FEW = 32


def decoded(
    files: Iterable[File],
    preprocess: Preprocess,
    shape: tuple[int, ...],
    *,
    workers: int | None = None,
) -> Iterator[np.ndarray | InputError]:
    """Yields the pixels of every file in order, decoded in other threads.

    At most ``(AHEAD * workers + 1) * CHUNK`` images are held at a time. The iterator ends the workers when it
    ends, is closed (:func:`contextlib.closing`), or is dropped; Ctrl-C reaches the calling process alone, and
    workers of one that was killed end by themselves. A script that decodes in worker processes needs
    ``if __name__ == "__main__":``, since each imports it anew.

    Args:
        files: taken as they are needed, so they may be a generator.
        preprocess, shape: as for :func:`decode`.
        workers: processes; 0: none, decoded when asked for; None: as many as CPUs are granted, but 0 for
            fewer than :data:`FEW` files.

    Yields:
        uint8 ``shape``, or in the place of a file that is at fault the :class:`InputError` that says why.

    Raises:
        UnsupportedError: Pillow is not installed.
        InputError: ``workers`` is at fault, or a worker ended, as when the system has no memory left.
    """
    require_pillow()
    if workers is not None and (not isinstance(workers, int) or not 0 <= workers <= threads.MOST):
        raise expected("workers", f"a whole number from 0 to {threads.MOST}", workers)
    return _decoded(iter(files), preprocess, tuple(shape), workers)


def _decoded(
    files: Iterator[File], preprocess: Preprocess, shape: tuple[int, ...], workers: int | None
) -> Iterator[np.ndarray | InputError]:
    first = list(islice(files, FEW)) if workers is None else []
    if workers == 0 or (workers is None and len(first) < FEW):
        for file in (*first, *files):
            yield _attempt(file, preprocess, shape)
        return
    files = _chain(first, files)
    workers = threads.default() if workers is None else workers
    # Not forked: this process has threads, whose locks a fork would copy as they are held.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    running: deque[Future[list[np.ndarray | InputError]]] = deque()
    try:
        _submit(pool, running, files, preprocess, shape, AHEAD * workers)
        while running:
            chunk = running.popleft().result()
            _submit(pool, running, files, preprocess, shape, 1)
            yield from chunk
    except BrokenProcessPool as error:
        raise InputError(
            "images: expected the worker processes to decode, found that one ended (is there memory left; "
            'is a script\'s work under if __name__ == "__main__"?)'
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _chain(first: list[File], rest: Iterator[File]) -> Iterator[File]:
    yield from first
    yield from rest


def _submit(
    pool: ProcessPoolExecutor,
    running: deque[Future[list[np.ndarray | InputError]]],
    files: Iterator[File],
    preprocess: Preprocess,
    shape: tuple[int, ...],
    chunks: int,
) -> None:
    for _ in range(chunks):
        if part := list(islice(files, CHUNK)):
            with _without_interrupts():  # workers inherit it; Ctrl-C waits until they are started
                running.append(pool.submit(_decode_chunk, part, preprocess, shape))


def _decode_chunk(
    files: list[File], preprocess: Preprocess, shape: tuple[int, ...]
) -> list[np.ndarray | InputError]:
    return [_attempt(file, preprocess, shape) for file in files]


def _attempt(file: File, preprocess: Preprocess, shape: tuple[int, ...]) -> np.ndarray | InputError:
    try:
        return decode(file, preprocess, shape)
    except InputError as error:
        return InputError(str(error))  # without its cause, which may not travel between processes


def _start_worker() -> None:
    """Leaves Ctrl-C to the parent, and ends with it, also when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # Pillow's, of odd files: what cannot be decoded is an error
    parent = multiprocessing.parent_process()

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    if parent is not None:
        threading.Thread(target=follow, daemon=True).start()


class _without_interrupts:
    """Holds SIGINT back in this thread and in the processes that it starts."""

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def __exit__(self, *exception: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
