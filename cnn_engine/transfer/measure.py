"""Copies on a CUDA device, timed: batches, a network's weights, and the peak of the bus.

A copy is timed twice, never at once. Its *wall* time goes from the call to the completed copy on a monotonic
clock, with no event in between: what whoever waits for the batch sees. Its *device* time lies between two
events on the copy's stream, with a short delay queued ahead so that the GPU is behind the host: what the GPU
was busy for. Out of pageable memory the host moves the bytes too, through page-locked buffers of the driver,
and the two differ the most there.

Batch sizes and modes are gone through in a random order, several times, so that a drift of clocks or a burst
of other work does not look like a slope. Every group of copies moves contents of its own, and what has
arrived is compared with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import DeviceError, expected
from ..report import units
from .files import RawNetwork, Samples
from .subjects import Mode, Subject

PEAK_BYTES = 256 * 2**20
PEAK_COPIES = 20

#: Times that all batch sizes are gone through, each with its share of the samples.
ROUNDS = 4

#: Wall samples for each device sample.
WALL_PER_DEVICE = 4

#: Delay queued ahead of a copy that is timed by events: more than its launch and both events take.
DELAY_S = 50e-6

#: Seconds between two writes of raw files: what a kill may cost. Ctrl-C costs nothing.
FLUSH_S = 5.0

#: Random bytes from which contents are made; a prime, so that rows of an image do not repeat.
BLOCK_BYTES = 1_048_573


class TransferMismatch(DeviceError):
    """What arrived is not what was sent."""


@dataclass(frozen=True)
class Settings:
    """How a network is measured.

    Attributes:
        modes: in which its batches are moved.
        batches: sizes.
        repeats: wall samples of each size and mode, those on disk included.
        warmup: copies before each group of samples that do not count.
        seed: of the order and the contents.
    """

    modes: tuple[Mode, ...]
    batches: tuple[int, ...]
    repeats: int = 100
    warmup: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Group:
    """Copies that are timed one after another."""

    mode: Mode
    batch: int
    copies: int


class Bench:
    """The memory that copies of up to ``largest`` bytes go between, and the clocks around them.

    Args:
        device: a :class:`cnn_engine.devices.cuda.CudaDevice`.
        largest: bytes of the largest copy.
        pinned: whether page-locked memory is needed.

    Raises:
        InputError: the host or the device has too little memory.
    """

    def __init__(self, device: Any, largest: int, pinned: bool, seed: int) -> None:
        check_memory(device, largest)
        self.device = device
        self.generator = np.random.default_rng(seed)
        self._block = self.generator.integers(0, 256, BLOCK_BYTES, np.uint8)
        self._remote = device.allocate(largest)
        # One allocation: page-locking costs far more than the copies, and a part of it is like any other.
        self._pinned = device.empty_pinned((largest,), np.uint8) if pinned else None

    def host_array(self, nbytes: int, memory: str) -> np.ndarray:
        """Returns host memory with contents that no array had before, every page touched."""
        # Pageable memory is NumPy's, as a caller's: small from the heap, large from fresh pages.
        array = self._pinned[:nbytes] if memory == "pinned" else np.empty(nbytes, np.uint8)
        start = int(self.generator.integers(BLOCK_BYTES))
        rolled = np.roll(self._block, start)
        for first in range(0, nbytes, BLOCK_BYTES):
            part = array[first : first + BLOCK_BYTES]
            part[:] = rolled[: len(part)]
        return array

    def time(self, mode: Mode, nbytes: int, copies: int, warmup: int, into: Samples) -> None:
        """Times ``copies`` copies and adds to ``into``; on Ctrl-C what is there is kept.

        Raises:
            TransferMismatch: what arrived is not what was sent.
            DeviceError: a copy failed.
        """
        device, remote = self.device, self._remote.address
        local = self.host_array(nbytes, mode.memory)
        address = local.__array_interface__["data"][0]
        if mode.direction == "h2d":
            sent = local

            def copy() -> None:
                device.copy_h2d(remote, address, nbytes)
        else:
            sent = self.host_array(nbytes, "pageable")
            device.copy_h2d(remote, sent.__array_interface__["data"][0], nbytes)
            device.synchronize()

            def copy() -> None:
                device.copy_d2h(address, remote, nbytes)

        try:
            for _ in range(warmup):
                copy()
                device.synchronize()
            wall_times(device, copy, copies, into.wall)
            device_times(device, copy, -(-copies // WALL_PER_DEVICE), into.device)
            arrived = local
            if mode.direction == "h2d":
                arrived = np.zeros(nbytes, np.uint8)
                device.copy_d2h(arrived.__array_interface__["data"][0], remote, nbytes)
        finally:
            device.synchronize()  # before memory that a copy still uses is given back
        if not np.array_equal(sent, arrived):
            wrong = int(np.count_nonzero(sent != arrived))
            raise TransferMismatch(
                f"check of a copy ({mode}, {units.size(nbytes)}): expected the bytes that were sent, found "
                f"{units.counted(wrong, 'byte')} that differ"
            )


def wall_times(device: Any, copy: Callable[[], None], copies: int, into: list[float]) -> None:
    """Adds the seconds of host time of each of ``copies`` calls, each complete before the next."""
    for _ in range(copies):
        begin = perf_counter()
        copy()
        device.synchronize()
        into.append(round(perf_counter() - begin, 9))


def device_times(device: Any, copy: Callable[[], None], copies: int, into: list[float]) -> None:
    """Adds the seconds between events around each of ``copies`` calls on the device's stream."""
    start, end = device.event(), device.event()
    for _ in range(copies):
        device.delay(DELAY_S)
        start.record(device.stream)
        copy()
        end.record(device.stream)
        device.synchronize()
        into.append(round(device.elapsed_s(start, end), 9))


def measure(
    device: Any,
    subject: Subject,
    raw: RawNetwork,
    settings: Settings,
    progress: Callable[[int], None] = lambda images: None,
) -> None:
    """Measures what of ``settings`` is not on disk yet, and writes it to ``raw`` as it goes.

    Interrupted or failed, it writes what it has and lets the exception pass.

    Args:
        progress: called with the number of images moved since the last call, outside what is timed.
    """
    groups = plan(raw, settings)
    if not groups:
        return
    largest = max(group.batch * subject.image_bytes(group.mode.dtype) for group in groups)
    pinned = any(group.mode.memory == "pinned" for group in groups)
    bench = Bench(device, largest, pinned, settings.seed)
    written = perf_counter()
    try:
        for group in groups:
            new = Samples()
            try:
                nbytes = group.batch * subject.image_bytes(group.mode.dtype)
                bench.time(group.mode, nbytes, group.copies, settings.warmup, new)
            except TransferMismatch:
                new = Samples()  # times of wrong copies are no times
                raise
            finally:
                if new.wall:
                    raw.add(group.mode, group.batch, new)
            progress(group.batch * group.copies)
            if perf_counter() - written > FLUSH_S:
                raw.flush()
                written = perf_counter()
    finally:
        raw.flush()


def plan(raw: RawNetwork, settings: Settings) -> list[Group]:
    """Returns the groups of copies that are missing, in the order in which they are timed."""
    generator = np.random.default_rng(settings.seed)
    missing = {
        (mode, batch): settings.repeats - len(raw.samples(mode, batch).wall)
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
        wall_times(device, copy, copies, times)
    finally:
        device.synchronize()
    return times


def peak_times(device: Any, direction: str) -> list[float]:
    """Returns the device times of copies of :data:`PEAK_BYTES` in page-locked memory, warmed up."""
    bench = Bench(device, PEAK_BYTES, pinned=True, seed=0)
    samples = Samples()
    bench.time(
        Mode(direction, "pinned"), PEAK_BYTES, WALL_PER_DEVICE * PEAK_COPIES, PEAK_COPIES, samples
    )
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
