"""Reads, decodes, computes and writes at once, each stage waiting for the next where that is behind."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
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
from . import readers
from .decoding import Decoder
from .output import OutputError, Record, ShardFile
from .readers import Chunk
from .shards import Shard, pieces_of
from .slots import STORED, DeviceSlot, Slot, Slots
from .sources import Wanted

#: Chunks of encoded images that are read ahead, and chunks of pixels and rows that there are at all.
READ_AHEAD, SLOTS = 3, 6

#: Files that are written at a time: writing one is the work of one thread, and less than a GPU computes.
WRITERS = 8

#: Bytes of rows that may wait for each writer: those of a file come all at once, and then the next file's.
WAITING_BYTES = 32 << 20

STAGES = ("read", "decode", "compute", "write")


@dataclass(frozen=True)
class Settings:
    """What the rows depend on, and where they go.

    Attributes:
        folder: the output folder.
        temporary: where files are written before they have their names.
        run: what tells this run's files from another's.
        batch: images a pass, and a chunk.
        top: classes that are kept of an image; None: all probabilities.
    """

    folder: Path
    temporary: Path
    run: str
    batch: int
    top: int | None
    wanted: Wanted


@dataclass
class Stage:
    """What one stage has done: seconds at work (not waiting; of several threads the mean), images, bytes."""

    seconds: float = 0.0
    images: int = 0
    bytes: int = 0


@dataclass
class Job:
    """A shard on its way, at the end of which one of the writers takes it."""

    shard: Shard
    attempt: str
    computed: queue.Queue
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
        computed: called with a shard of which nothing is left but to write its rows.
        done: called with (shard, record or None, (kind, message) or None, seconds) when a shard ends.
    """

    def __init__(
        self,
        engine: Any,
        decoder: Decoder,
        settings: Settings,
        slots: dict[type[Slot], list[Slot]],
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
        self._finished: queue.Queue = queue.Queue(1)
        rows_bytes = 4 * settings.batch * engine.network.classes
        waiting = max(WAITING_BYTES // rows_bytes, SLOTS)
        self._computed: list[queue.Queue] = [queue.Queue(waiting) for _ in range(WRITERS)]
        self._next_writer = itertools.cycle(self._computed)
        self._counting = threading.Lock()  # what several writers count
        model = engine.network
        self._fixed = isinstance(model, Model) and not model.any_batch
        loops = (
            self._read_loop, self._begin_loop, self._decode_loop, self._compute_loop, self._keep_loop,
        )  # fmt: skip
        for loop in (*loops, *(partial(self._write_loop, jobs) for jobs in self._computed)):
            threading.Thread(target=loop, daemon=True).start()

    def submit(self, shard: Shard, attempt: str) -> None:
        """Lets a shard follow those before it; ``attempt`` names its temporary file."""
        self._jobs.put(Job(shard, attempt, next(self._next_writer)))

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
        while True:
            job, chunk = self._decoded.get()
            if chunk is not _END and not job.failed:
                begin = perf_counter()
                try:
                    self.compute(chunk)
                    stage.images += len(chunk)
                except Exception as error:
                    job.failed = job.failed or _failure(error)
                stage.seconds += perf_counter() - begin
            self._finished.put((job, chunk))

    def _keep_loop(self) -> None:
        """Lets others have a chunk's memory: a writer takes longer than a GPU, which goes on meanwhile."""
        while True:
            job, chunk = self._finished.get()
            rows = None
            if chunk is _END:
                self._on_computed(job.shard)
            else:
                try:
                    rows = None if job.failed else chunk.slot.rows[: len(chunk)].copy()
                except MemoryError as error:
                    job.failed = _failure(error)
                if chunk.slot is not None:
                    self._give_back(chunk.slot)
                    chunk.slot = None
            job.computed.put((job, chunk, rows))

    def _give_back(self, slot: Slot) -> None:
        self._slots[type(slot)].put(slot)

    def compute(self, chunk: Chunk) -> None:
        """Fills the rows of a chunk's slot."""
        slot, count = chunk.slot, len(chunk)
        images = slot.images(chunk.dtype)
        if self._fixed and count < len(images):  # the model is for so many images alone
            images[count:] = 0
            count = len(images)
        for at in chunk.errors:
            images[at] = 0
        slot.predict(chunk.dtype, count, self._settings.batch)

    def _write_loop(self, computed: queue.Queue) -> None:
        stage = self.stages["write"]
        file: ShardFile | None = None
        while True:
            job, chunk, rows = computed.get()
            begin = perf_counter()
            record = None
            images = errors = nbytes = 0
            try:
                if not job.failed and file is None:
                    file = self.open(job)
                if not job.failed and chunk is _END:
                    record = file.commit()
                    nbytes = record.bytes
                elif not job.failed:
                    ids, labels = chunk.columns()
                    file.add(ids, rows, labels, chunk.errors)
                    images, errors = len(chunk), len(chunk.errors)
            except Exception as error:
                job.failed = job.failed or _failure(error)
            if chunk is _END:
                if file is not None and record is None:
                    file.discard()
                file = None
            with self._counting:
                stage.seconds += (perf_counter() - begin) / WRITERS
                stage.images += images
                stage.bytes += nbytes
                self.images += images
                self.errors += errors
            if chunk is _END:
                self._on_done(job.shard, record, job.failed, perf_counter() - job.begin)

    @contextmanager
    def slots(self, shard: Shard) -> Iterator[list[Slot]]:
        """Lends all slots for a shard's chunks, while none is under way."""
        slots = self.slots_of(shard)
        lent = [slots.take() for _ in range(slots.most)]
        try:
            yield lent
        finally:
            for slot in lent:
                slots.put(slot)

    def open(self, job: Job) -> ShardFile:
        """Begins a shard's file."""
        settings = self._settings
        temporary = settings.temporary / f"{job.shard.name}.{job.attempt}"
        return ShardFile(
            settings.folder, temporary, job.shard.name, settings.run,
            self._engine.network.classes, settings.top,
        )  # fmt: skip


def slot_type(engine: Any, decoder: Decoder, batch: int, kind: str) -> type[Slot]:
    """Returns what chunks of a kind of input need: a GPU's own memory where files are read into it."""
    if kind not in STORED or decoder.normalises:
        return Slot
    return DeviceSlot if engine.takes_files(batch, readers.dtype_of(kind)) else Slot


def chunk_bytes(chunk: Chunk) -> int:
    """Returns the bytes of input in a chunk."""
    if chunk.encoded is not None:
        return sum(map(len, chunk.encoded))
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
