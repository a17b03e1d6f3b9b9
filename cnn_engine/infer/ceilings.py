"""What each stage does alone, with nothing beside it: the ceilings that a pipeline is judged by."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count, cycle, islice
from time import perf_counter, process_time, thread_time
from typing import Any

import numpy as np

from . import readers
from .decoding import Decoder
from .output import ShardFile
from .pipeline import WRITERS, Settings, chunk_bytes
from .readers import Chunk
from .shards import Shard, pieces_of
from .slots import DeviceSlot, Slot

STAGES = ("read", "decode", "copy", "compute", "write")

#: Stages at once, as in a run, since they share the machine's memory.
TOGETHER = "read and copy"


def measure(
    engine: Any,
    decoder: Decoder,
    settings: Settings,
    slots: list[Slot],
    shards: list[Shard],
    stage: str,
    seconds: float,
    attempt: str,
) -> dict[str, Any]:
    """Runs one stage alone for about ``seconds`` on images of ``shards``, in the memory of ``slots``.

    Returns:
        ``images``, ``seconds``, ``cpu_seconds`` of the process, and ``bytes``; images 0 where the stage has
        nothing to do here, and ``error`` where it failed.
    """
    try:
        return _MEASURES[stage](engine, decoder, settings, slots, shards, seconds, attempt)
    except Exception as error:  # a ceiling that cannot be had must not end a run that is done
        return {"images": 0, "seconds": 0.0, "cpu_seconds": 0.0, "bytes": 0, "error": str(error)}


def _timed(
    steps: Iterator[tuple[int, int]],
    seconds: float,
    cpu_clock: Callable[[], float] = process_time,
) -> dict[str, Any]:
    """Takes steps, each (images, bytes), until the time is over, after a first one that makes memory."""
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


def _chunks(
    settings: Settings, shards: Iterable[Shard], slot: Callable[[], Slot]
) -> Iterator[Chunk]:
    for shard in shards:
        pieces = pieces_of(settings.folder / "_run", shard)
        yield from readers.chunks(pieces, settings.batch, settings.wanted, slot)


def _sample(settings: Settings, slots: list[Slot], shards: list[Shard]) -> list[Chunk]:
    """Returns a chunk for each slot: of files to decode, or of images in it."""
    free = iter(slots)
    sample = list(islice(_chunks(settings, shards, lambda: next(free)), len(slots)))
    for chunk in sample:
        chunk.finish_reading()
    return sample


def _forever(chunks: list[Any], step: Callable[[Any], int]) -> Iterator[tuple[int, int]]:
    while chunks:
        for chunk in chunks:
            yield len(chunk), step(chunk)


def _read(engine, decoder, settings, slots, shards, seconds, attempt):
    if not isinstance(slots[0], DeviceSlot):
        return _reading(settings, slots, shards, seconds, lambda chunk: None)
    images = [slot.images(readers.dtype_of(shards[0].kind)) for slot in slots]
    try:
        for some in images:
            some.copies = False
        return _reading(settings, slots, shards, seconds, lambda chunk: None)
    finally:
        for some in images:
            some.copies = True


def _reading(settings, slots, shards, seconds, then: Callable[[Chunk], None]) -> dict[str, Any]:
    """Reads into one slot after the other, and does what follows with each chunk while others are read."""

    def steps() -> Iterator[tuple[int, int]]:
        turn = cycle(slots)  # one alone might stay in a cache
        before: deque[Chunk] = deque()
        try:
            for chunk in _chunks(settings, cycle(shards), lambda: next(turn)):
                before.append(chunk)
                if len(before) == len(slots):  # as in a run, the next have begun
                    done = before.popleft()
                    done.finish_reading()
                    then(done)
                    yield len(done), chunk_bytes(done)
        finally:
            for chunk in before:
                chunk.finish_reading()

    with closing(steps()) as reading:
        return _timed(reading, seconds)


def _read_and_copy(engine, decoder, settings, slots, shards, seconds, attempt):
    if isinstance(slots[0], DeviceSlot):
        return _reading(settings, slots, shards, seconds, lambda chunk: None)
    sample = next(_chunks(settings, shards, lambda: slots[0]), None)
    if engine.device.kind != "cuda" or sample is None or sample.encoded is not None:
        return _timed(iter(()), seconds)
    sample.finish_reading()
    with engine.device.context:
        copy = _copier(engine, settings.batch, sample.dtype)
        return _reading(settings, slots, shards, seconds, lambda chunk: copy(_images(chunk)))


def _decode(engine, decoder, settings, slots, shards, seconds, attempt):
    sample = _sample(settings, slots, shards)
    if not sample or sample[0].encoded is None:
        return _timed(iter(()), seconds)

    def steps() -> Iterator[tuple[int, int]]:
        two = slots[:2]
        before: list[tuple[Chunk, Callable[[], None]]] = []  # as in a run, the next has begun
        for chunk, slot in zip(cycle(sample), cycle(two), strict=False):
            again = Chunk(slot, chunk.count, chunk.columns, chunk.encoded, dict(chunk.errors))
            before.append((chunk, decoder.begin(again)))
            if len(before) == len(two):
                done, finish = before.pop(0)
                finish()
                yield len(done), sum(map(len, done.encoded))

    return _timed(steps(), seconds)


def _decoded(decoder, settings, slots, shards) -> list[Chunk]:
    sample = _sample(settings, slots, shards)
    for chunk, slot in zip(sample, slots, strict=False):
        chunk.slot = slot
        decoder.begin(chunk)()
    return sample


def _images(chunk: Chunk) -> np.ndarray:
    return chunk.slot.images(chunk.dtype)[: len(chunk)]


def _copier(engine, most: int, dtype: str) -> Callable[[np.ndarray], int]:
    """Returns what copies at most so many images to the GPU, and waits for it; it returns their bytes."""
    import cupy

    target = cupy.empty((most, *engine.network.input_shape), dtype)

    def copy(images: np.ndarray) -> int:
        target[: len(images)].set(images)
        cupy.cuda.get_current_stream().synchronize()
        return images.nbytes

    return copy


def _copy(engine, decoder, settings, slots, shards, seconds, attempt):
    if engine.device.kind != "cuda":
        return _timed(iter(()), seconds)
    if isinstance(slots[0], DeviceSlot):
        sample = [engine.empty_images(settings.batch, readers.dtype_of(shards[0].kind))]
    else:
        sample = list(map(_images, _decoded(decoder, settings, slots, shards)))
    with engine.device.context:
        copy = _copier(engine, max(map(len, sample)), sample[0].dtype)
        return _timed(_forever(sample, copy), seconds)


def _compute(engine, decoder, settings, slots, shards, seconds, attempt):
    sample = _decoded(decoder, settings, slots, shards)

    def step(chunk: Chunk) -> int:
        full = getattr(engine.network, "any_batch", True) is False  # for a full batch alone
        chunk.slot.predict(chunk.dtype, settings.batch if full else len(chunk), settings.batch)
        return chunk_bytes(chunk)

    for chunk in sample:
        step(chunk)  # plans are built
    return _timed(_forever(sample, step), seconds)


def _write(engine, decoder, settings, slots, shards, seconds, attempt):
    """Writes files as large as the shards', fsync included, under temporary names that they keep."""
    sample = _sample(settings, slots, shards)
    columns = [chunk.columns() for chunk in sample]
    for slot in slots:
        slot.rows[...] = np.random.default_rng(0).random(slot.rows.shape, np.float32)
    known = [shard.images for shard in shards if shard.images > 0]
    images = sum(known) // len(known) if known else sum(map(len, sample))
    classes = engine.network.classes

    def steps(writer: int) -> Iterator[tuple[int, int]]:
        for number in count():
            name = f"measured-{attempt}-{writer}-{number}"
            temporary = settings.temporary / name
            file = ShardFile(settings.temporary, temporary, name, "measured", classes, settings.top)
            try:
                for (ids, labels), slot in cycle(zip(columns, slots, strict=False)):
                    left = images - file.rows
                    some = min(left, len(ids))
                    file.add(ids[:some], slot.rows[:some], labels[:some], {})
                    if some == left:
                        break
                record = file.commit()
                os.unlink(settings.temporary / f"{name}.parquet")
            except BaseException:
                file.discard()
                raise
            yield record.rows, record.bytes

    if not sample:
        return _timed(iter(()), seconds)
    with ThreadPoolExecutor(WRITERS) as pool:
        each = list(pool.map(lambda n: _timed(steps(n), seconds, thread_time), range(WRITERS)))
    total = {key: sum(one[key] for one in each) for key in each[0]}
    return {
        **total,
        "seconds": total["images"] / sum(one["images"] / one["seconds"] for one in each),
    }


_MEASURES = {
    "read": _read,
    "decode": _decode,
    "copy": _copy,
    "compute": _compute,
    "write": _write,
    TOGETHER: _read_and_copy,
}
