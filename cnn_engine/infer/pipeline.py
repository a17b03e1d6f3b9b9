"""Pipeline of one worker: reads, decodes, computes and writes concurrently."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import CnnEngineError
from ..graph.model import Model
from ..io.files import describe_os_error
from ..locks import ForkSafeLock
from ..workload import Samples
from . import readers
from .buffers import ARRAY_KINDS, INPUTS, DeviceSlot, Slot, Slots
from .chunk import Chunk, dtype_of
from .columns import Column, memory, row_bytes
from .decoding import Decoder
from .formats import Wanted
from .output import Faults, OutputError, Record, ShardFile
from .shards import Shard, pieces_of

#: Chunks of encoded images that are read ahead, and chunks of pixels and rows that there are at all.
READ_AHEAD, SLOTS = 3, 6

#: Files that are written at a time, by the kind of device: writing one is the work of one thread, and less
#: than a GPU computes; beside a worker's CPUs the second goes on while the first waits for the disk.
WRITERS = {"cpu": 2, "cuda": 8}

#: Complete files that are put on the disk at a time, which is to wait: the more wait, the more the disk does
#: at once.
COMMITTERS = 16

#: Bytes of memory for rows, made once, in which they wait for the writers: those of a file come all at once,
#: and then the next file's. It has room for as many chunks, but no fewer or more than these.
WAITING_BYTES, LEAST_WAITING, MOST_WAITING = 64 << 20, 4, 64

STAGES = ("read", "decode", "compute", "write")


@dataclass(frozen=True)
class Settings:
    """Settings that the rows depend on, and their destination.

    Attributes:
        folder: the output folder.
        temporary: where files are written before they have their names.
        run: what tells this run's files from another's.
        batch: images per pass, and a chunk.
        top: classes that are kept of an image; None: all.
        columns, texts, names: see :func:`.output.schema`.
    """

    folder: Path
    temporary: Path
    run: str
    batch: int
    top: int | None
    wanted: Wanted
    columns: tuple[Column, ...]
    texts: bool
    names: tuple[str, ...] | None = None

    def file(self, folder: Path, temporary: Path, name: str, run: str) -> ShardFile:
        """Opens a file for rows."""
        return ShardFile(
            folder, temporary, name, run, self.columns, self.top, self.texts, self.names
        )


@dataclass
class Stage:
    """Work of one stage: busy seconds (the mean over its threads), images, bytes."""

    seconds: float = 0.0
    images: int = 0
    bytes: int = 0


@dataclass
class Job:
    """A shard in the pipeline, written by one of the writers from its first chunk on."""

    shard: Shard
    attempt: str
    computed: queue.Queue = field(default_factory=queue.Queue)  # chunks with their rows
    begin: float = field(default_factory=perf_counter)
    failed: tuple[str, str] | None = None  # kind, message


_END = object()  # of a job


class Failure:
    """Kinds of failures: a shard's own, one that another attempt may mend, and the output folder's."""

    INPUT, RETRY, OUTPUT = "input", "retry", "output"


class Pipeline:
    """The stages of one worker, each in a thread of its own.

    Args:
        engine: that computes.
        decoder: of images that come as files.
        settings: for all shards.
        slots: memory that is there already.
        rows: memory for the rows of chunks that is there already.
        computed: called with a shard of which nothing is left but to write its rows.
        done: called with (shard, record or None, (kind, message) or None, seconds) when a shard ends.
    """

    def __init__(
        self,
        engine: Any,
        decoder: Decoder,
        settings: Settings,
        slots: dict[type[Slot], list[Slot]],
        rows: list[Samples],
        computed: Callable[[Shard], None],
        done: Callable[[Shard, Record | None, tuple[str, str] | None, float], None],
    ) -> None:
        self._engine, self._decoder, self._settings = engine, decoder, settings
        self._on_computed, self._on_done = computed, done
        self.stages = {name: Stage() for name in STAGES}
        self.images = self.errors = 0  # written
        self._slots = {
            kind: Slots(SLOTS, partial(kind, engine, settings.batch), slots.get(kind, []))
            for kind in (Slot, DeviceSlot)
        }
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._read: queue.Queue = queue.Queue(READ_AHEAD)
        self._decoding: queue.Queue = queue.Queue(1)  # the next beside the one that is waited for
        self._decoded: queue.Queue = queue.Queue(SLOTS)
        make_rows = partial(memory, engine, settings.columns, settings.batch)
        self._rows = Slots(waiting_chunks(settings.columns, settings.batch), make_rows, rows)
        self._written: queue.Queue[Job] = queue.Queue()  # begun to be computed, for any writer
        self._complete: queue.Queue[tuple[Job, ShardFile]] = queue.Queue()
        self._counting = ForkSafeLock()  # what several threads count
        self._busy = {"write": 0.0, "commit": 0.0}  # seconds, of all of their threads
        self._writers = WRITERS[engine.device.kind]
        model = engine.network
        self._fixed = isinstance(model, Model) and not model.any_batch
        loops = (self._read_loop, self._begin_loop, self._decode_loop, self._compute_loop)
        many = [self._write_loop] * self._writers + [self._commit_loop] * COMMITTERS
        for loop in (*loops, *many):
            threading.Thread(target=loop, daemon=True).start()

    def submit(self, shard: Shard, attempt: str) -> None:
        """Queues a shard; ``attempt`` is part of its temporary file's name."""
        self._jobs.put(Job(shard, attempt))

    def slots_of(self, shard: Shard) -> Slots:
        """Returns the memory for a shard's chunks."""
        return self._slots[slot_type(self._engine, self._decoder, self._settings.batch, shard.kind)]

    # ---- the stages ----

    def _read_loop(self) -> None:
        while True:
            job = self._jobs.get()
            waited = 0.0
            begin = perf_counter()
            taken: list[Slot] = []  # by a chunk that is still being made

            def slot(job: Job = job, taken: list[Slot] = taken) -> Slot:
                nonlocal waited
                start = perf_counter()
                taken.append(self.slots_of(job.shard).take())
                waited += perf_counter() - start
                return taken[0]

            try:
                pieces = pieces_of(self._settings.folder / "_run", job.shard)
                for chunk in readers.chunks(
                    pieces, self._settings.batch, self._settings.wanted, slot
                ):
                    taken.clear()
                    self._read.put((job, chunk, begin + waited, perf_counter()))
                    begin, waited = perf_counter(), 0.0
                    if job.failed:
                        break
            except Exception as error:
                job.failed = job.failed or _failure(error)
                for found in taken:
                    self._give_back(found)
            self._read.put((job, _END, 0.0, 0.0))

    def _begin_loop(self) -> None:
        """Begins to decode a chunk while the one before it is decoded, so that no thread waits at its end."""
        stage, last = self.stages["read"], 0.0
        while True:
            job, chunk, begin, end = self._read.get()
            finish = None
            if chunk is not _END:
                try:
                    end = chunk.finish_reading() or end
                    stage.images += len(chunk)
                    stage.bytes += chunk_bytes(chunk)
                except Exception as error:
                    job.failed = job.failed or _failure(error)
                    end = perf_counter()
                # The next chunk may have been begun before this one was read.
                stage.seconds += max(end - max(begin, last), 0.0)
                last = max(end, last)
            begin = perf_counter()
            if chunk is not _END and not job.failed:
                if chunk.slot is None:
                    chunk.slot = self.slots_of(job.shard).take()
                    begin = perf_counter()
                try:
                    finish = self._decoder.begin(chunk)
                except Exception as error:
                    job.failed = job.failed or _failure(error)
            self._decoding.put((job, chunk, begin, finish))

    def _decode_loop(self) -> None:
        stage, end = self.stages["decode"], 0.0
        while True:
            job, chunk, begin, finish = self._decoding.get()
            if finish is not None:
                encoded = chunk.encoded is not None
                try:
                    finish()
                    stage.images += len(chunk) if encoded else 0
                except Exception as error:
                    job.failed = job.failed or _failure(error)
                begin, end = max(begin, end), perf_counter()
                if encoded or self._decoder.normalises:  # else it has only waited for its turn
                    stage.seconds += end - begin
            self._decoded.put((job, chunk))

    def _compute_loop(self) -> None:
        stage = self.stages["compute"]
        last: Job | None = None
        while True:
            job, chunk = self._decoded.get()
            if job is not last:
                self._written.put(job)
                last = job
            rows = None
            if chunk is not _END and not job.failed:
                begin = perf_counter()
                try:
                    rows = self._rows.take()
                    begin = perf_counter()
                    self.compute(chunk, rows)
                    stage.images += len(chunk)
                except Exception as error:
                    job.failed = job.failed or _failure(error)
                stage.seconds += perf_counter() - begin
            if chunk is _END:
                self._on_computed(job.shard)
            elif chunk.slot is not None:
                self._give_back(chunk.slot)
                chunk.slot = None
            job.computed.put((chunk, rows))

    def _give_back(self, slot: Slot) -> None:
        self._slots[type(slot)].put(slot)

    def compute(self, chunk: Chunk, rows: Samples) -> None:
        """Fills the first ``rows`` with those of a chunk's images."""
        slot, count = chunk.slot, len(chunk)
        images = slot.images(chunk.dtype)
        if self._fixed and count < len(images):  # the model is for so many images alone
            slot.clear_from(chunk.dtype, count)
            count = len(images)
        if chunk.dtype != INPUTS:
            for at in chunk.errors:
                images[at] = 0
        slot.predict(chunk.dtype, rows[:count], self._settings.batch)

    def _write_loop(self) -> None:
        while True:
            self._write(self._written.get())

    def _write(self, job: Job) -> None:
        """Writes a shard's chunks as they come, and leaves the file to be committed."""
        stage = self.stages["write"]
        file: ShardFile | None = None
        chunk = None
        while chunk is not _END:
            chunk, rows = job.computed.get()
            begin = perf_counter()
            images = errors = 0
            try:
                if not job.failed and file is None:
                    file = self.open(job)
                if not job.failed and chunk is _END:
                    file.complete()
                elif not job.failed:
                    _add(file, chunk, rows)
                    images, errors = len(chunk), len(chunk.errors)
            except Exception as error:
                job.failed = job.failed or _failure(error)
            if rows is not None:
                self._rows.put(rows)
            self._count("write", perf_counter() - begin)
            with self._counting:
                stage.images += images
                self.images += images
                self.errors += errors
        if job.failed:
            self._end(job, file, None)
        else:
            self._complete.put((job, file))

    def _commit_loop(self) -> None:
        while True:
            job, file = self._complete.get()
            begin = perf_counter()
            record = None
            try:
                record = file.commit()
            except Exception as error:
                job.failed = _failure(error)
            self._count("commit", perf_counter() - begin)
            self._end(job, file, record)

    def _count(self, what: str, seconds: float) -> None:
        """Counts time of a thread of those that write or commit: the busier ones are the stage's."""
        with self._counting:
            self._busy[what] += seconds
            self.stages["write"].seconds = max(
                self._busy["write"] / self._writers, self._busy["commit"] / COMMITTERS
            )

    def _end(self, job: Job, file: ShardFile | None, record: Record | None) -> None:
        if record is not None:
            with self._counting:
                self.stages["write"].bytes += record.bytes
        elif file is not None:
            file.discard()
        self._on_done(job.shard, record, job.failed, perf_counter() - job.begin)

    @contextmanager
    def memory(self, shard: Shard) -> Iterator[tuple[list[Slot], Samples]]:
        """Lends all slots for a shard's chunks, and memory for the rows of one, while none is under way."""
        slots, rows = self.slots_of(shard), self._rows.take()
        lent = [slots.take() for _ in range(slots.most)]
        try:
            yield lent, rows
        finally:
            self._rows.put(rows)
            for slot in lent:
                slots.put(slot)

    def open(self, job: Job) -> ShardFile:
        """Begins a shard's file."""
        settings = self._settings
        temporary = settings.temporary / f"{job.shard.name}.{job.attempt}"
        return settings.file(settings.folder, temporary, job.shard.name, settings.run)


#: What is wrong with an image that the network makes NaN of.
NOT_A_NUMBER = "expected numbers of the network, found NaN, as of an image that has NaN in it"


def _add(file: ShardFile, chunk: Chunk, rows: Samples) -> None:
    found = rows[: len(chunk)]
    for array in found.arrays.values():
        # The least takes a fraction of the time of looking at each.
        if array.dtype.kind == "f" and array.size and np.isnan(array.min()):
            inside = np.isnan(array).reshape(len(array), -1).any(axis=1)
            for at in np.flatnonzero(inside).tolist():
                chunk.errors.setdefault(at, NOT_A_NUMBER)
    at = 0
    for ids, labels in chunk.columns():
        end = at + len(ids)
        errors = {k - at: what for k, what in chunk.errors.items() if at <= k < end}
        file.add(ids, found[at:end].arrays, labels.numbers, errors, labels.texts)
        lost = Faults()
        for k, what in labels.lost.items():
            lost.add(str(ids[k]), what)
        file.lose(lost)
        at = end
    file.lose(chunk.orphans)


def waiting_chunks(columns: Sequence[Column], batch: int) -> int:
    """Returns for how many chunks there is memory for rows."""
    chunks = WAITING_BYTES // max(batch * row_bytes(columns), 1)
    return min(max(chunks, LEAST_WAITING), MOST_WAITING)


def slot_type(engine: Any, decoder: Decoder, batch: int, kind: str) -> type[Slot]:
    """Returns the slots of chunks of a kind of input: a GPU's own memory where files are read into it."""
    if kind not in ARRAY_KINDS or decoder.normalises:
        return Slot
    return DeviceSlot if engine.takes_files(batch, dtype_of(kind)) else Slot


def chunk_bytes(chunk: Chunk) -> int:
    """Returns the bytes of input in a chunk."""
    if chunk.encoded is not None:
        return sum(map(len, chunk.encoded))
    if chunk.dtype == INPUTS:
        inputs = chunk.slot.images(INPUTS)
        return inputs.nbytes * len(chunk) // len(inputs)
    return (
        int(np.prod(chunk.slot.images(chunk.dtype).shape[1:]))
        * len(chunk)
        * (4 if chunk.dtype == "float32" else 1)
    )


def _failure(error: Exception) -> tuple[str, str]:
    if isinstance(error, OutputError):
        return Failure.OUTPUT, str(error)
    if isinstance(error, CnnEngineError):
        return Failure.INPUT, str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return Failure.RETRY, f"{where}cannot be read: {describe_os_error(error)}"
    return Failure.RETRY, f"{type(error).__name__}: {error}"
