"""What each stage does alone, with nothing beside it: the ceilings that a pipeline is judged by."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from time import perf_counter, process_time
from typing import Any

import numpy as np

from . import readers
from .decoding import Decoder
from .output import ShardFile
from .pipeline import Settings, chunk_bytes
from .readers import Chunk, Slot
from .shards import Shard, pieces_of

STAGES = ("read", "decode", "copy", "compute", "write")

#: Chunks that the stages after reading are measured on.
CHUNKS = 4


def measure(
    engine: Any,
    decoder: Decoder,
    settings: Settings,
    shard: Shard,
    stage: str,
    seconds: float,
    attempt: str,
) -> dict[str, Any]:
    """Runs one stage alone for about ``seconds`` on images of ``shard``.

    Returns:
        ``images``, ``seconds``, ``cpu_seconds`` of the process, and ``bytes``; images 0 where the stage has
        nothing to do here, and ``error`` where it failed.
    """
    try:
        return _MEASURES[stage](engine, decoder, settings, shard, seconds, attempt)
    except Exception as error:  # a ceiling that cannot be had must not end a run that is done
        return {"images": 0, "seconds": 0.0, "cpu_seconds": 0.0, "bytes": 0, "error": str(error)}


def _timed(steps: Iterator[tuple[int, int]], seconds: float) -> dict[str, Any]:
    """Takes steps, each (images, bytes), until the time is over."""
    images = nbytes = 0
    begin, cpu = perf_counter(), process_time()
    for count, size in steps:
        images, nbytes = images + count, nbytes + size
        if perf_counter() - begin >= seconds:
            break
    return {
        "images": images,
        "seconds": perf_counter() - begin,
        "cpu_seconds": process_time() - cpu,
        "bytes": nbytes,
    }


def _chunks(settings: Settings, shard: Shard, slot: Callable[[], Slot]) -> Iterator[Chunk]:
    pieces = pieces_of(settings.folder / "_run", shard)
    return readers.chunks(pieces, settings.batch, settings.wanted, slot)


def _sample(engine: Any, settings: Settings, shard: Shard) -> list[Chunk]:
    return list(islice(_chunks(settings, shard, lambda: Slot(engine, settings.batch)), CHUNKS))


def _forever(chunks: list[Chunk], step: Callable[[Chunk], int]) -> Iterator[tuple[int, int]]:
    while chunks:
        for chunk in chunks:
            yield len(chunk), step(chunk)


def _read(engine, decoder, settings, shard, seconds, attempt):
    slot = Slot(engine, settings.batch)

    def steps() -> Iterator[tuple[int, int]]:
        while True:
            for chunk in _chunks(settings, shard, lambda: slot):
                yield len(chunk), chunk_bytes(chunk)

    return _timed(steps(), seconds)


def _decode(engine, decoder, settings, shard, seconds, attempt):
    slot = Slot(engine, settings.batch)
    sample = _sample(engine, settings, shard)
    if not sample or sample[0].encoded is None:
        return _timed(iter(()), seconds)

    def step(chunk: Chunk) -> int:
        again = Chunk(None, chunk.ids, chunk.labels, chunk.encoded, dict(chunk.errors))
        decoder.decode(again, slot)
        return sum(map(len, chunk.encoded))

    return _timed(_forever(sample, step), seconds)


def _decoded(engine, decoder, settings, shard) -> list[Chunk]:
    sample = _sample(engine, settings, shard)
    for chunk in sample:
        if chunk.encoded is not None:
            decoder.decode(chunk, Slot(engine, settings.batch))
        else:
            decoder.normalise(chunk)
    return sample


def _copy(engine, decoder, settings, shard, seconds, attempt):
    if engine.device.kind != "cuda":
        return _timed(iter(()), seconds)
    import cupy

    sample = _decoded(engine, decoder, settings, shard)
    with engine.device.context:
        target = cupy.empty((settings.batch, *engine.network.input_shape), sample[0].dtype)

        def step(chunk: Chunk) -> int:
            images = chunk.slot.images(chunk.dtype)[: len(chunk)]
            target[: len(chunk)].set(images)
            cupy.cuda.get_current_stream().synchronize()
            return images.nbytes

        return _timed(_forever(sample, step), seconds)


def _compute(engine, decoder, settings, shard, seconds, attempt):
    sample = _decoded(engine, decoder, settings, shard)

    def step(chunk: Chunk) -> int:
        images, rows = chunk.slot.images(chunk.dtype), chunk.slot.rows
        count = len(chunk)
        if getattr(engine.network, "any_batch", True) is False:  # for a full batch alone
            count = settings.batch
        engine.predict(images[:count], batch=settings.batch, out=rows[:count])
        return images[: len(chunk)].nbytes

    for chunk in sample:
        step(chunk)  # plans are built
    return _timed(_forever(sample, step), seconds)


def _write(engine, decoder, settings, shard, seconds, attempt):
    """Writes files as large as the shard's, fsync included, under temporary names that they keep."""
    sample = _sample(engine, settings, shard)
    for chunk in sample:
        slot = chunk.slot or Slot(engine, settings.batch)
        chunk.slot = slot
        slot.rows[...] = np.random.default_rng(0).random(slot.rows.shape, np.float32)
    images = max(shard.images, sum(map(len, sample)))
    classes = engine.network.classes

    def steps() -> Iterator[tuple[int, int]]:
        number = 0
        while sample:
            number += 1
            name = f"measured-{attempt}-{number}"
            temporary = settings.temporary / name
            file = ShardFile(settings.temporary, temporary, name, "measured", classes, settings.top)
            try:
                for chunk, _ in zip(
                    _endless(sample), range(-(-images // settings.batch)), strict=False
                ):
                    file.add(chunk.ids, chunk.slot.rows[: len(chunk)], chunk.labels, {})
                record = file.commit()
                os.unlink(settings.temporary / f"{name}.parquet")
            except BaseException:
                file.discard()
                raise
            yield record.rows, record.bytes

    return _timed(steps(), seconds)


def _endless(chunks: list[Chunk]) -> Iterator[Chunk]:
    while True:
        yield from chunks


_MEASURES = {
    "read": _read,
    "decode": _decode,
    "copy": _copy,
    "compute": _compute,
    "write": _write,
}
