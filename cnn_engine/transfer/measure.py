"""Copies on a CUDA device, or from it to another, timed: batches, weights, and the peak of the bus.

A copy is timed twice, never at once. Its *wall* time goes from the call to the completed copy on a monotonic
clock, with no event in between: what whoever waits for the batch sees. Its *device* time is what the GPU
copied for, by CUPTI's activity records. They slow down later calls, so all wall times are taken before any
record is switched on. Without CUPTI it lies between two events on the copy's stream, less what two events
with nothing in between take. Either is taken out of page-locked memory: out of pageable memory the host moves
the bytes too, through page-locked buffers of the driver, from one of its copies to the next, and the span of
a record or between two events holds that as well, on a busy host more of it than the wall times did.

Batch sizes and modes are gone through in a random order, several times, so that a drift of clocks or a burst
of other work does not look like a slope. Every group of copies moves contents of its own, and what has
arrived is compared with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import DeviceError, UnsupportedError, expected
from ..measure.cupti import activity
from ..measure.cupti.activity_records import covered
from ..measure.meters import empty_pair_s
from ..measure.profile_tables import EVENTS, RECORDS
from ..report import units
from . import copies as ways
from .copies import Copy
from .files import RawNetwork, Samples
from .subjects import BETWEEN, GRAPH, MANAGED, Mode, Subject

PEAK_BYTES = 256 * 2**20
PEAK_COPIES = 20

#: Times that all batch sizes are gone through, each with its share of the samples.
ROUNDS = 4

#: Wall samples for each device sample.
WALL_PER_DEVICE = 4

#: Delay queued ahead of a copy that is timed by events: more than its call and both events take.
DELAY_S = 50e-6

#: Seconds between two writes of raw files: what a kill may cost. Ctrl-C costs nothing.
FLUSH_S = 5.0

#: Random bytes from which contents are made; a prime, so that rows of an image do not repeat.
BLOCK_BYTES = 1_048_573


class TransferMismatch(DeviceError):
    """Received data differ from those that were sent."""


@dataclass(frozen=True)
class Settings:
    """Settings of a network's measurement.

    Attributes:
        modes: in which its batches are moved.
        batches: sizes.
        repeats: wall samples of each size and mode, those on disk included.
        warmup: copies before each group of samples that do not count.
        seed: of the order and the contents.
        peer: the device that ``d2d`` copies to.
    """

    modes: tuple[Mode, ...]
    batches: tuple[int, ...]
    repeats: int = 100
    warmup: int = 3
    seed: int = 0
    peer: Any = None


@dataclass(frozen=True)
class Group:
    """Copies that are timed one after another."""

    mode: Mode
    batch: int
    copies: int


class Bench:
    """Buffers of copies of up to ``largest`` bytes, and the clocks around them.

    Args:
        device: a :class:`cnn_engine.devices.cuda.CudaDevice`.
        largest: bytes of the largest copy.
        memories: of the modes in which it copies.
        peer: the device that ``d2d`` copies to.

    Raises:
        InputError: the host or a device has too little memory.
        UnsupportedError: the device has no managed memory that could be prefetched.
    """

    def __init__(
        self, device: Any, largest: int, memories: Collection[str], seed: int, peer: Any = None
    ) -> None:
        check_memory(device, largest)
        self.device = device
        self.peer = peer
        if peer is not None:
            check_memory(peer, largest)
            self._there = peer.allocate(largest)
        self.generator = np.random.default_rng(seed)
        self._block = self.generator.integers(0, 256, BLOCK_BYTES, np.uint8)
        self._remote = device.allocate(largest)
        # One allocation: page-locking costs far more than the copies, and a part of it is like any other.
        self._kept: dict[str, np.ndarray] = {}
        if any(_is_pinned(memory) for memory in memories):
            self._kept["pinned"] = device.empty_pinned((largest,), np.uint8)
        if MANAGED in memories:
            self._kept[MANAGED], self._managed = ways.managed_array(device, largest)

    def host_array(self, nbytes: int, memory: str) -> np.ndarray:
        """Returns host memory with contents that no array had before, every page touched."""
        kept = self._kept.get("pinned" if _is_pinned(memory) else memory)
        # Pageable memory is NumPy's, as a caller's: small from the heap, large from fresh pages.
        array = np.empty(nbytes, np.uint8) if kept is None else kept[:nbytes]
        start = int(self.generator.integers(BLOCK_BYTES))
        rolled = np.roll(self._block, start)
        for first in range(0, nbytes, BLOCK_BYTES):
            part = array[first : first + BLOCK_BYTES]
            part[:] = rolled[: len(part)]
        return array

    def time(self, mode: Mode, nbytes: int, copies: int, warmup: int, into: Samples) -> None:
        """Adds the wall times of ``copies`` copies to ``into``; after Ctrl-C the times so far are kept.

        Raises:
            TransferMismatch: what arrived is not what was sent.
            DeviceError: a copy failed.
        """
        with self._copying(mode, nbytes, warmup) as copy:
            wall_times(self.device, copy, copies, into.wall)

    def time_recorded(
        self, mode: Mode, nbytes: int, copies: int, warmup: int, into: Samples
    ) -> None:
        """Adds the device times of ``copies`` copies to ``into``, by records and out of page-locked memory.

        Raises:
            TransferMismatch: what arrived is not what was sent.
            DeviceError: a copy failed.
            UnsupportedError: records cannot be had.
        """
        with self._copying(_page_locked(mode), nbytes, warmup) as copy:
            recorded_times(self.device, copy, copies, into.device)

    def time_by_events(
        self, mode: Mode, nbytes: int, copies: int, warmup: int, into: Samples
    ) -> None:
        """Adds the device times of ``copies`` copies to ``into``, by events and out of page-locked memory.

        Raises:
            TransferMismatch: what arrived is not what was sent.
            DeviceError: a copy failed.
        """
        with self._copying(_page_locked(mode), nbytes, warmup) as copy:
            event_times(self.device, copy, copies, into.device)

    @contextmanager
    def _copying(self, mode: Mode, nbytes: int, warmup: int) -> Iterator[Copy]:
        """Makes contents, gives a warmed-up copy of them, and compares what has arrived."""
        device, remote = self.device, self._remote.address
        local = self.host_array(nbytes, mode.memory)
        address = local.__array_interface__["data"][0]
        if mode.memory == MANAGED:
            sent, remote = local.copy(), address
            copy = ways.of_pages(device, mode, address, nbytes)
        else:
            sent = local
            if mode.direction != "h2d":
                sent = self.host_array(nbytes, "pageable")
                device.copy_h2d(remote, sent.__array_interface__["data"][0], nbytes)
                device.synchronize()
            if mode.direction == BETWEEN:
                through = address if mode.memory == "pinned" else None
                copy = Copy(partial(self._to_peer, through, nbytes))
            else:
                copy = ways.of_device(device, mode, remote, address, nbytes)

        try:
            for _ in range(warmup):
                copy.before()
                copy.run()
                device.synchronize()
            yield copy
            arrived = local
            if mode.direction != "d2h":
                at, there = device, remote
                if mode.direction == BETWEEN:
                    at, there = self.peer, self._there.address
                arrived = np.zeros(nbytes, np.uint8)
                with at.context:
                    at.copy_d2h(arrived.__array_interface__["data"][0], there, nbytes)
                    at.synchronize()
        finally:
            device.synchronize()  # before memory that a copy still uses is given back
        if not np.array_equal(sent, arrived):
            wrong = int(np.count_nonzero(sent != arrived))
            raise TransferMismatch(
                f"check of a copy ({mode}, {units.size(nbytes)}): expected the bytes that were sent, found "
                f"{units.counted(wrong, 'byte')} that differ"
            )

    def _to_peer(self, through: int | None, nbytes: int) -> None:
        """Copies to the peer: past the host, or complete on return through the host's memory there."""
        device, peer = self.device, self.peer
        if through is None:
            device.copy_to_peer(peer, self._there.address, self._remote.address, nbytes)
            return
        device.copy_d2h(through, self._remote.address, nbytes)
        device.synchronize()
        with peer.context:
            peer.copy_h2d(self._there.address, through, nbytes)
            peer.synchronize()


def _page_locked(mode: Mode) -> Mode:
    return mode if mode.direction == BETWEEN else Mode(mode.direction, "pinned", mode.dtype)


def _is_pinned(memory: str) -> bool:
    return memory in ("pinned", GRAPH)


def wall_times(device: Any, copy: Copy, copies: int, into: list[float]) -> None:
    """Adds the seconds of host time of each of ``copies`` calls, each complete before the next."""
    for _ in range(copies):
        copy.before()
        begin = perf_counter()
        copy.run()
        device.synchronize()
        into.append(round(perf_counter() - begin, 9))


def recorded_times(device: Any, copy: Copy, copies: int, into: list[float]) -> None:
    """Adds the seconds in which the device copied, for each of ``copies`` calls, by activity records.

    Raises:
        UnsupportedError: records cannot be had, or some are missing.
    """
    with activity.record() as trace:
        for index in range(copies):
            trace.push(index)
            copy.run()
            trace.pop()
            device.synchronize()
    spans: list[list[tuple[float, float]]] = [[] for _ in range(copies)]
    for record in trace.copies:
        if (index := trace.marks.get(record.correlation)) is not None:
            spans[index].append((record.start_s, record.end_s))
    if not all(spans):
        raise UnsupportedError("activity records: expected one of each copy, found some missing")
    into += [round(covered(found), 9) for found in spans]


def event_times(device: Any, copy: Copy, copies: int, into: list[float]) -> None:
    """Adds the seconds between events around each of ``copies`` calls, less the time of a pair of events."""
    empty_s = empty_pair_s(device)
    start, end = device.event(), device.event()
    for _ in range(copies):
        device.delay(DELAY_S)
        start.record(device.stream)
        copy.run()
        end.record(device.stream)
        device.synchronize()
        into.append(round(max(device.elapsed_s(start, end) - empty_s, 1e-9), 9))


def measure(
    device: Any,
    subject: Subject,
    raw: RawNetwork,
    settings: Settings,
    progress: Callable[[int], None] = lambda images: None,
) -> None:
    """Measures wall times of ``settings`` that are not on disk yet, and writes them to ``raw`` one by one.

    Interrupted or failed, it writes what it has and lets the exception pass.

    Args:
        progress: called with the number of images moved since the last call, outside what is timed.
    """
    groups = plan(raw, settings)
    if groups:
        bench = Bench(
            device,
            _largest(groups, subject),
            {group.mode.memory for group in groups},
            settings.seed,
            settings.peer,
        )
        _measure(bench.time, groups, subject, raw, settings, progress)


def measure_device(
    device: Any,
    subject: Subject,
    raw: RawNetwork,
    settings: Settings,
    progress: Callable[[int], None] = lambda images: None,
) -> None:
    """Measures device times that are not on disk yet, as :func:`measure` does wall times.

    To be called after all wall times of the process were taken: activity records slow down later calls.
    """
    groups = plan_device(raw, settings)
    if not groups:
        return
    bench = Bench(device, _largest(groups, subject), ("pinned",), settings.seed)
    if activity.unavailable() is None:
        try:
            _measure(bench.time_recorded, groups, subject, raw, settings, progress)
            return
        except UnsupportedError:  # after all
            groups = plan_device(raw, settings)
    _measure(bench.time_by_events, groups, subject, raw, settings, progress)


def device_source() -> str:
    """Returns where device times come from here."""
    return EVENTS if activity.unavailable() else RECORDS


def _largest(groups: list[Group], subject: Subject) -> int:
    return max(group.batch * subject.image_bytes(group.mode.dtype) for group in groups)


def _measure(
    time: Callable[[Mode, int, int, int, Samples], None],
    groups: list[Group],
    subject: Subject,
    raw: RawNetwork,
    settings: Settings,
    progress: Callable[[int], None],
) -> None:
    written = perf_counter()
    try:
        for group in groups:
            new = Samples()
            try:
                nbytes = group.batch * subject.image_bytes(group.mode.dtype)
                time(group.mode, nbytes, group.copies, settings.warmup, new)
            except TransferMismatch:
                new = Samples()  # times of wrong copies are no times
                raise
            finally:
                if new.wall or new.device:
                    raw.add(group.mode, group.batch, new)
            progress(group.batch * group.copies)
            if perf_counter() - written > FLUSH_S:
                raw.flush()
                written = perf_counter()
    finally:
        raw.flush()


def plan(raw: RawNetwork, settings: Settings) -> list[Group]:
    """Returns the groups of copies that are missing, in the order in which they are timed."""
    return _in_rounds(settings, settings.repeats, lambda *key: len(raw.samples(*key).wall))


def plan_device(raw: RawNetwork, settings: Settings) -> list[Group]:
    """Returns the groups of copies whose device times are missing, in the order in which they are timed.

    Copies between devices have none: no clock of one of them spans both. Nor have prefetched pages, which
    no record of a copy tells of.
    """
    wanted = -(-settings.repeats // WALL_PER_DEVICE)
    of_one = tuple(
        mode for mode in settings.modes if mode.direction != BETWEEN and mode.memory != MANAGED
    )
    return _in_rounds(
        replace(settings, modes=of_one), wanted, lambda *key: len(raw.samples(*key).device)
    )


def _in_rounds(settings: Settings, wanted: int, there: Callable[[Mode, int], int]) -> list[Group]:
    """Returns groups of copies that make ``wanted`` of what is ``there``, each mode and size once a round.

    What a group begins with, such as contents that lie in a core's cache, holds for all of its samples.
    """
    generator = np.random.default_rng(settings.seed)
    missing = {
        (mode, batch): wanted - there(mode, batch)
        for mode in settings.modes
        for batch in settings.batches
    }
    groups = []
    for turn in range(ROUNDS):
        this = [
            Group(mode, batch, count * (turn + 1) // ROUNDS - count * turn // ROUNDS)
            for (mode, batch), count in missing.items()
            if count > 0
        ]
        generator.shuffle(this)
        groups += [group for group in this if group.copies]
    return groups


def weights_times(
    device: Any, weights: dict[str, np.ndarray], memory: str, copies: int
) -> list[float]:
    """Returns the wall time of moving all of a network's tensors to the device, ``copies`` times.

    One copy a tensor, as the engine moves them, and one wait at the end; memory on the device is allocated
    before. Nothing is warmed up: the first time is that of weights which were never moved.
    """
    arrays = [np.ascontiguousarray(array) for array in weights.values()]
    check_memory(device, sum(array.nbytes for array in arrays))
    if memory == "pinned":
        pinned = [device.empty_pinned(array.shape, array.dtype) for array in arrays]
        for to, array in zip(pinned, arrays, strict=True):
            to[:] = array
        arrays = pinned
    moves = [
        (device.allocate(array.nbytes), array.__array_interface__["data"][0], array.nbytes)
        for array in arrays
    ]

    def copy() -> None:
        for to, source, nbytes in moves:
            device.copy_h2d(to.address, source, nbytes)

    times: list[float] = []
    try:
        wall_times(device, Copy(copy), copies, times)
    finally:
        device.synchronize()
    return times


def peak_times(device: Any, direction: str, peer: Any = None) -> list[float]:
    """Returns the device times of copies of :data:`PEAK_BYTES`, warmed up.

    They use page-locked memory, between devices none of the host's. By events, as they are taken before the
    wall times; they are long enough.
    """
    bench = Bench(device, PEAK_BYTES, ("pinned",), seed=0, peer=peer)
    samples = Samples()
    mode = Mode(direction, "peer" if direction == BETWEEN else "pinned")
    bench.time_by_events(mode, PEAK_BYTES, PEAK_COPIES, PEAK_COPIES, samples)
    return samples.device


def check_memory(device: Any, nbytes: int) -> None:
    """Refuses copies that would bring the host or the device to their limits.

    Raises:
        InputError: ``nbytes`` are more than an eighth of the host's memory (two or three arrays of that size
            are in use), or more than half of what is free on the device.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
    free = device.free_memory() // 2
    most, whose = min(
        (host, "an eighth of the host's memory"), (free, "half of the GPU's free memory")
    )
    if nbytes > most:
        raise expected(
            "--batch", f"copies of at most {units.size(most)} ({whose})", units.size(nbytes)
        )
