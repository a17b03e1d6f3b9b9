"""System under test: answers LoadGen's queries, and provides their images."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import logs, rules

#: What a response has where no outputs are wanted.
NOTHING = (0, 0)


class System:
    """Answers queries with a contestant's outputs.

    Images of a query go through in passes of ``batch``. In the scenario Server queries come at any time:
    they wait in a queue, from which threads of their own take as many as there are, up to ``batch``.

    Args:
        loadgen: the module ``mlperf_loadgen``.
        run: images -> outputs float32 [N, classes].
        images: float32 or uint8 [N, C, H, W].
        batch: images of a pass at most.
        keeps: whether outputs are handed to LoadGen, for its log of accuracy.
        workers: threads that take from the queue; 0: queries are answered as they are issued.
        empty: returns memory of a shape and type, into which images that are not in a row are copied.
    """

    def __init__(
        self,
        loadgen: Any,
        run: Callable[[np.ndarray], np.ndarray],
        images: np.ndarray,
        batch: int,
        keeps: bool,
        workers: int,
        empty: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty,
    ) -> None:
        self._loadgen, self._run, self._images = loadgen, run, images
        self._empty, self._own = empty, threading.local()
        self._batch, self._keeps = batch, keeps
        self._queue: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self.error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def issue(self, samples: Sequence[Any]) -> None:
        """Takes a query; is called by LoadGen."""
        if not self._threads:
            for first in range(0, len(samples), self._batch):
                self._answer(samples[first : first + self._batch])
            return
        with self._changed:
            self._queue.extend(samples)
            self._changed.notify()

    def flush(self) -> None:
        """Is called by LoadGen when the last query has been issued: nothing is held back here."""

    def close(self) -> None:
        """Ends the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                count = min(len(self._queue), self._batch)
                samples = [self._queue.popleft() for _ in range(count)]
                if self._queue:
                    self._changed.notify()
            self._answer(samples)

    def _answer(self, samples: Sequence[Any]) -> None:
        responses, rows = [], None
        try:
            if self.error is not None:
                time.sleep(
                    0.01
                )  # LoadGen has no way to stop: it goes on, and is answered with nothing
            else:
                images = self._gathered([sample.index for sample in samples])
                rows = np.ascontiguousarray(self._run(images), np.float32)
        except BaseException as error:
            self.error = error
        for number, sample in enumerate(samples):
            keeps = self._keeps and rows is not None
            where = (rows[number].ctypes.data, rows[number].nbytes) if keeps else NOTHING
            responses.append(self._loadgen.QuerySampleResponse(sample.id, *where))
        self._loadgen.QuerySamplesComplete(responses)  # copies what they point to

    def _gathered(self, indices: list[int]) -> np.ndarray:
        """Returns images: those in a row where they are, others copied into this thread's memory."""
        first, count = indices[0], len(indices)
        if indices == [*range(first, first + count)]:
            return self._images[first : first + count]
        if not hasattr(self._own, "memory"):
            shape = (self._batch, *self._images.shape[1:])
            self._own.memory = self._empty(shape, self._images.dtype)
        return np.take(self._images, indices, axis=0, out=self._own.memory[:count], mode="clip")


def test(
    loadgen: Any,
    run: Callable[[np.ndarray], np.ndarray],
    images: np.ndarray,
    settings: Any,
    batch: int,
    workers: int,
    folder: Path,
    empty: Callable[[tuple[int, ...], np.dtype], np.ndarray],
) -> dict[str, Any]:
    """Runs one test of LoadGen's; its logs are written to ``folder``.

    Other arguments are those of :class:`System`.

    Returns:
        what :func:`.logs.details` reads of them.

    Raises:
        Exception: whatever the contestant raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    accuracy = settings.mode == loadgen.TestMode.AccuracyOnly
    system = System(loadgen, run, images, batch, accuracy, workers, empty)
    log = loadgen.LogSettings()
    log.log_output.outdir = str(folder)
    log.log_output.copy_summary_to_stdout = False
    log.enable_trace = False
    held = min(len(images), rules.HELD)
    sut = loadgen.ConstructSUT(system.issue, system.flush)
    qsl = loadgen.ConstructQSL(len(images), held, lambda _: None, lambda _: None)
    # On a thread, for a call that does not return would keep Ctrl-C from this one.
    running = threading.Thread(
        target=loadgen.StartTestWithLogSettings, args=(sut, qsl, settings, log, ""), daemon=True
    )
    running.start()
    while running.is_alive():
        running.join(0.2)
    loadgen.DestroyQSL(qsl)
    loadgen.DestroySUT(sut)
    system.close()
    if system.error is not None:
        raise system.error
    return logs.details(folder / "mlperf_log_detail.txt")
