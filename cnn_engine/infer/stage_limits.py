"""Measures how fast each stage of the pipeline is alone, and all of them together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from pathlib import Path
from time import perf_counter, process_time, sleep, thread_time
from typing import Any

import numpy as np

from ..locks import ForkSafeLock
from ..workload import Samples
from . import readers
from .buffers import DeviceSlot, Slot
from .chunk import Chunk, dtype_of
from .decoding import Decoder
from .formats import ENCODED
from .pipeline import COMMITTERS, SLOTS, WRITERS, Settings, chunk_bytes
from .shards import Shard, pieces_of

STAGES = ("read", "decode", "copy", "compute", "write")

#: Stages at once, as in a run: the two that share the machine's memory most, and all that a run has.
TOGETHER, ALL = "read and copy", "all at once"

#: Seconds that all stages together are measured for at least, and that one which is ahead sleeps.
ALL_S, AHEAD_S = 0.5, 0.001

#: Images that were worked on, and bytes.
Step = tuple[int, int]


@dataclass(frozen=True)
class Bench:
    """Setting in which stages are measured: a worker's own, and images of ``shards`` in ``slots``.

    Attributes:
        rows: memory for those of a chunk, page-locked on CUDA.
        attempt: what files that are written are named after.
    """

    engine: Any
    decoder: Decoder
    settings: Settings
    slots: list[Slot]
    rows: Samples
    shards: list[Shard]
    attempt: str

    @property
    def dtype(self) -> str:
        return dtype_of(self.shards[0].kind)

    @property
    def in_device(self) -> bool:
        """Whether files are read into a GPU's memory."""
        return isinstance(self.slots[0], DeviceSlot)


def measure(bench: Bench, stage: str, seconds: float) -> dict[str, Any]:
    """Runs one stage alone, or :data:`TOGETHER` or :data:`ALL`, for about ``seconds``.

    Returns:
        ``images``, ``seconds``, ``cpu_seconds`` of the process, and ``bytes``; images 0 where the stage has
        nothing to do here, and ``error`` where it failed.
    """
    try:
        return _MEASURES[stage](bench, seconds)
    except Exception as error:  # a ceiling that cannot be had must not end a run that is done
        return {"images": 0, "seconds": 0.0, "cpu_seconds": 0.0, "bytes": 0, "error": str(error)}


def _timed(
    steps: Iterator[Step], seconds: float, cpu_clock: Callable[[], float] = process_time
) -> dict[str, Any]:
    """Takes steps until the time is over, after a first one that makes memory."""
    images = nbytes = 0
    next(steps, None)
    begin, cpu = perf_counter(), cpu_clock()
    for some, size in steps:
        images, nbytes = images + some, nbytes + size
        if perf_counter() - begin >= seconds:
            break
    return {
        "images": images,
        "seconds": perf_counter() - begin,
        "cpu_seconds": cpu_clock() - cpu,
        "bytes": nbytes,
    }


def _chunks(bench: Bench, shards: Iterable[Shard], slot: Callable[[], Slot]) -> Iterator[Chunk]:
    settings = bench.settings
    for shard in shards:
        pieces = pieces_of(settings.folder / "_run", shard)
        yield from readers.chunks(pieces, settings.batch, settings.wanted, slot)


def _sample(bench: Bench, slots: list[Slot]) -> list[Chunk]:
    """Returns a chunk for each slot: of files to decode, or of images in it."""
    free = iter(slots)
    sample = list(islice(_chunks(bench, bench.shards, lambda: next(free)), len(slots)))
    for chunk in sample:
        chunk.finish_reading()
    return sample


def _forever(chunks: list[Any], step: Callable[[Any], int]) -> Iterator[Step]:
    while chunks:
        for chunk in chunks:
            yield len(chunk), step(chunk)


# ---- what a stage does, again and again ----


def _reads(
    bench: Bench, slots: list[Slot], then: Callable[[Chunk], Any] = lambda chunk: None
) -> Iterator[Step]:
    """Reads into one slot after the other, and does what follows with each chunk while others are read."""
    turn = cycle(slots)  # one alone might stay in a cache
    before: deque[Chunk] = deque()
    try:
        for chunk in _chunks(bench, cycle(bench.shards), lambda: next(turn)):
            before.append(chunk)
            if len(before) == len(slots):  # as in a run, the next have begun
                done = before.popleft()
                done.finish_reading()
                then(done)
                yield len(done), chunk_bytes(done)
    finally:
        for chunk in before:
            chunk.finish_reading()


def _decodes(bench: Bench, slots: list[Slot]) -> Iterator[Step]:
    sample = _sample(bench, slots)
    if not sample or sample[0].encoded is None:
        return
    before: list[tuple[Chunk, Callable[[], None]]] = []  # as in a run, the next has begun
    for chunk, slot in zip(cycle(sample), cycle(slots[:2]), strict=False):
        again = Chunk(slot, chunk.count, chunk.columns, chunk.encoded, dict(chunk.errors))
        before.append((chunk, bench.decoder.begin(again)))
        if len(before) == 2:
            done, finish = before.pop(0)
            finish()
            yield len(done), sum(map(len, done.encoded))


def _computes(bench: Bench, slots: list[Slot]) -> Iterator[Step]:
    batch = bench.settings.batch
    full = getattr(bench.engine.network, "any_batch", True) is False  # for a full batch alone

    def step(chunk: Chunk) -> int:
        chunk.slot.predict(chunk.dtype, bench.rows[: batch if full else len(chunk)], batch)
        return chunk_bytes(chunk)

    sample = _decoded(bench, slots)
    for chunk in sample:
        step(chunk)  # plans are built
    return _forever(sample, step)


def _decoded(bench: Bench, slots: list[Slot]) -> list[Chunk]:
    sample = _sample(bench, slots)
    for chunk, slot in zip(sample, slots, strict=False):
        chunk.slot = slot
        bench.decoder.begin(chunk)()
    return sample


def _writes(bench: Bench, slots: list[Slot]) -> list[Iterator[Step]]:
    """Returns what each writer does: a step is what is added to a file, or bytes where one is on the disk.

    Files are as large as the shards', among the temporary ones until the steps are closed. As in a run, they
    are committed beside their writers; each has its share of those that commit.
    """
    sample, settings = _sample(bench, slots), bench.settings
    if not sample:
        return []
    generator = np.random.default_rng(0)
    rows = Samples({n: _noise(generator, a) for n, a in bench.rows.arrays.items()}, len(bench.rows))
    known = [shard.images for shard in bench.shards if shard.images > 0]
    images = sum(known) // len(known) if known else sum(map(len, sample))
    writers = WRITERS[bench.engine.device.kind]
    share = max(COMMITTERS // writers, 1)

    def steps(writer: int) -> Iterator[Step]:
        made: list[Path] = []
        pool = ThreadPoolExecutor(share)
        try:
            yield from files(writer, made, pool)
        finally:  # to remove them takes time that a run does not take
            pool.shutdown()
            for path in made:
                path.unlink(missing_ok=True)

    def files(writer: int, made: list[Path], pool: ThreadPoolExecutor) -> Iterator[Step]:
        committed: deque[Future] = deque()
        parts = chain.from_iterable(chunk.columns() for chunk in cycle(sample))
        for number in count():
            name = f"measured-{bench.attempt}-{writer}-{number}"
            temporary = settings.temporary / name
            file = settings.file(settings.temporary, temporary, name, "measured")
            # The first files end one after the other, as in a run.
            left = images if number else max(images * (writer + 1) // writers, 1)
            try:
                while left:
                    ids, labels = next(parts)
                    some = min(left, len(ids))
                    part = labels[:some]
                    file.add(ids[:some], rows[:some].arrays, part.numbers, {}, part.texts)
                    left -= some
                    yield some, 0
                file.complete()
            except BaseException:
                file.discard()
                raise
            made.extend(file.paths)
            committed.append(pool.submit(file.commit))
            if len(committed) > share:
                yield 0, committed.popleft().result().bytes

    return [steps(writer) for writer in range(writers)]


def _noise(generator: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Returns what a writer has to write of an array's type and shape."""
    if like.dtype == np.float32:
        return generator.random(like.shape, np.float32)
    return generator.integers(0, 2, like.shape).astype(like.dtype)


def _whole(steps: Iterator[Step]) -> Iterator[Step]:
    """Yields a file at a time."""
    images = 0
    for some, nbytes in steps:
        images += some
        if nbytes:
            yield images, nbytes
            images = 0


# ---- a stage alone ----


@contextmanager
def _without_copies(bench: Bench) -> Iterator[None]:
    images = [slot.images(bench.dtype) for slot in bench.slots] if bench.in_device else []
    try:
        for some in images:
            some.copies = False
        yield
    finally:
        for some in images:
            some.copies = True


def _read(bench: Bench, seconds: float) -> dict[str, Any]:
    with _without_copies(bench), closing(_reads(bench, bench.slots)) as steps:
        return _timed(steps, seconds)


def _read_and_copy(bench: Bench, seconds: float) -> dict[str, Any]:
    if bench.in_device:
        with closing(_reads(bench, bench.slots)) as steps:
            return _timed(steps, seconds)
    sample = next(_chunks(bench, bench.shards, lambda: bench.slots[0]), None)
    if bench.engine.device.kind != "cuda" or sample is None or sample.encoded is not None:
        return _timed(iter(()), seconds)
    sample.finish_reading()
    with bench.engine.device.context:
        copy = _copier(bench.engine, bench.settings.batch, sample.dtype)
        with closing(_reads(bench, bench.slots, lambda chunk: copy(_images(chunk)))) as steps:
            return _timed(steps, seconds)


def _images(chunk: Chunk) -> np.ndarray:
    return chunk.slot.images(chunk.dtype)[: len(chunk)]


def _copier(engine: Any, most: int, dtype: str) -> Callable[[np.ndarray], int]:
    """Returns what copies at most so many images to the GPU, and waits for it; it returns their bytes."""
    import cupy

    target = cupy.empty((most, *engine.network.input_shape), dtype)

    def copy(images: np.ndarray) -> int:
        target[: len(images)].set(images)
        cupy.cuda.get_current_stream().synchronize()
        return images.nbytes

    return copy


def _copy(bench: Bench, seconds: float) -> dict[str, Any]:
    engine = bench.engine
    if engine.device.kind != "cuda":
        return _timed(iter(()), seconds)
    if bench.in_device:
        sample = [engine.empty_images(bench.settings.batch, bench.dtype)]
    else:
        sample = list(map(_images, _decoded(bench, bench.slots)))
    with engine.device.context:
        copy = _copier(engine, max(map(len, sample)), sample[0].dtype)
        return _timed(_forever(sample, copy), seconds)


def _decode(bench: Bench, seconds: float) -> dict[str, Any]:
    return _timed(_decodes(bench, bench.slots), seconds)


def _compute(bench: Bench, seconds: float) -> dict[str, Any]:
    return _timed(_computes(bench, bench.slots), seconds)


def _write(bench: Bench, seconds: float) -> dict[str, Any]:
    writers = _writes(bench, bench.slots)
    if not writers:
        return _timed(iter(()), seconds)
    try:
        with ThreadPoolExecutor(len(writers)) as pool:
            turns = pool.map(lambda steps: _timed(_whole(steps), seconds, thread_time), writers)
            each = list(turns)
    finally:
        for steps in writers:
            steps.close()
    total = {key: sum(one[key] for one in each) for key in each[0]}
    return {
        **total,
        "seconds": total["images"] / sum(one["images"] / one["seconds"] for one in each),
    }


# ---- all stages beside each other ----


class _Beside:
    """Counts what stages have done, and keeps them beside each other until the time is over.

    None gets further before the slowest than a run's chunks do; what all of them have done is what counts,
    from the first time that there is any.

    Args:
        stages: their names.
        ahead: images that a stage may be before the slowest.
    """

    def __init__(self, stages: Iterable[str], ahead: int, seconds: float) -> None:
        self._done = dict.fromkeys(stages, 0)
        self._ahead, self._seconds = ahead, seconds
        self._counting = ForkSafeLock()
        self._begin: tuple[int, float, float] | None = None
        self._end: tuple[int, float, float] | None = None
        self._over = False
        self._errors: list[Exception] = []

    def work(self, stage: str, steps: Iterator[Step]) -> None:
        """Takes a stage's steps until the time is over."""
        try:
            with closing(steps):
                for images, _ in steps:
                    self._count(stage, images)
                    while not self._over and self._before(stage) > self._ahead:
                        sleep(AHEAD_S)
                    if self._over:
                        break
        except Exception as error:
            self._errors.append(error)
        self._over = True

    def _before(self, stage: str) -> int:
        return self._done[stage] - min(self._done.values())

    def _count(self, stage: str, images: int) -> None:
        with self._counting:
            before = min(self._done.values())
            self._done[stage] += images
            slowest = min(self._done.values())
            if slowest == before or self._over:
                return
            now = (slowest, perf_counter(), process_time())
            if self._begin is None:
                self._begin = now
            elif now[1] - self._begin[1] >= self._seconds:
                self._end, self._over = now, True

    def found(self) -> dict[str, Any]:
        """Returns what all stages have done; raises what one of them has raised."""
        if self._errors:
            raise self._errors[0]
        images, seconds, cpu = (b - a for a, b in zip(self._begin, self._end, strict=True))
        return {"images": images, "seconds": seconds, "cpu_seconds": cpu, "bytes": 0}


def _all(bench: Bench, seconds: float) -> dict[str, Any]:
    some, others = bench.slots[:-2], bench.slots[-2:]
    writers = _writes(bench, some)
    if not writers:
        return _timed(iter(()), seconds)
    work = [("compute", _computes(bench, others)), *(("write", steps) for steps in writers)]
    if bench.shards[0].kind in ENCODED:
        work.append(("decode", _decodes(bench, some)))
    work.append(("read", _reads(bench, some)))
    beside = _Beside({name for name, _ in work}, SLOTS * bench.settings.batch, max(seconds, ALL_S))
    threads = [threading.Thread(target=beside.work, args=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return beside.found()


_MEASURES = {
    "read": _read,
    "decode": _decode,
    "copy": _copy,
    "compute": _compute,
    "write": _write,
    TOGETHER: _read_and_copy,
    ALL: _all,
}
