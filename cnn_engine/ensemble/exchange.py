"""Sends every batch to every rank that has members, in order: one thread per rank sends and receives.

A stream is a sequence of batches on a group of ranks of its own; within it all ranks post messages in the
same order. ``all-shared`` and ``single-bcast`` have one stream, ``multi-bcast`` has one for each rank that
preprocesses, so that these need not wait for each other.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from .order import Order, split
from .pipeline import Buffer, Pipeline
from .roles import ALL_SHARED, DATA_PARALLEL, MULTI, SINGLE, Roles
from .transport import Group, Request, Transport

#: Seconds between two looks at messages that are not done, from the first to the longest.
SHORTEST_S, LONGEST_S = 5e-5, 2e-3

#: Yields while a message is not done; returns the batch, or None where this rank does not need it.
Operation = Generator[None, None, Any]


@dataclass
class Waits:
    """Why the sending thread had nothing to do, in seconds.

    Attributes:
        preprocessing: for this rank's own readers and decoders.
        peers: for other ranks, or for bytes under way.
        members: for this rank's own members, whose queue was full.
    """

    preprocessing: float = 0.0
    peers: float = 0.0
    members: float = 0.0


@dataclass
class Stream:
    """Batches ``numbers`` of one stream, in order.

    Attributes:
        needs_own: whether this rank gives something to each of them, which its pipeline makes.
        start: takes a batch's number and this rank's own part; returns the operation.
    """

    numbers: deque[int]
    needs_own: bool
    start: Callable[[int, Buffer | None], Operation]
    running: deque[tuple[int, Operation]] = field(default_factory=deque)


def _until(*requests: Request) -> Operation:
    waiting = list(requests)
    while waiting := [request for request in waiting if not request.done()]:
        yield


class Groups:
    """Groups of ranks of a design, made by all ranks at the same time."""

    def __init__(
        self, roles: Roles, transport: Transport, wrap: Callable[[Any], Group] = lambda group: group
    ):
        def group(ranks: list[int]) -> Group | None:
            made = transport.group(ranks)
            return None if made is None else wrap(made)

        self.gathers = self.broadcasts = None
        self.streams: list[Group | None] = []
        if roles.design == ALL_SHARED:
            self.gathers = group(list(range(roles.ranks)))
        elif roles.design == SINGLE:
            self.gathers = group(list(roles.preprocessors))
            self.broadcasts = group(_with(roles.receivers, roles.preprocessors[0]))
        elif roles.design == MULTI:
            self.streams = [group(_with(roles.receivers, root)) for root in roles.preprocessors]


def _with(receivers: tuple[int, ...], root: int) -> list[int]:
    """Returns ``receivers`` and ``root``, which comes first and so is the group's rank 0."""
    return [root, *(rank for rank in receivers if rank != root)]


def own_parts(roles: Roles, rank: int, order: Order) -> Iterator[np.ndarray] | None:
    """Returns the samples of each buffer that ``rank`` decodes, in order; None: it decodes none."""
    if rank not in roles.preprocessors:
        return None
    index, many = roles.preprocessors.index(rank), len(roles.preprocessors)
    if roles.design in (ALL_SHARED, SINGLE, DATA_PARALLEL):
        return (order[number].part(index, many).samples for number in order.numbers)
    if roles.design == MULTI:
        return (order[number].samples for number in order.numbers[index::many])
    return (order[number].samples for number in order.numbers)


class Exchange:
    """Delivers the batches of ``order`` on this rank: iterate over it. It begins at once.

    Args:
        pipeline: of :func:`own_parts`, or None.
        prefetch: batches that are under way or wait for the members at a time.
        shape: of an image.
        empty: allocates memory of batches, where that is not the host's.
        busy: called with a word when the thread begins to do or to wait for something of this rank's own,
            and with None when it waits for others.
    """

    def __init__(
        self,
        roles: Roles,
        rank: int,
        order: Order,
        pipeline: Pipeline | None,
        groups: Groups,
        shape: tuple[int, ...],
        *,
        prefetch: int = 4,
        empty: Callable[..., Any] = np.empty,
        busy: Callable[[str | None], None] = lambda what: None,
    ):
        self._roles, self._rank, self._order, self._pipeline = roles, rank, order, pipeline
        self._groups, self._shape, self._empty, self._busy = groups, shape, empty, busy
        self._prefetch = prefetch
        self._receives = bool(roles.members[rank])
        self._ready: queue.Queue[Any] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._gathering = order.start  # number of the next batch that the merger broadcasts
        self.waits = Waits()
        self.fill: list[int] = []
        self._streams = self._make_streams()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _make_streams(self) -> list[Stream]:
        groups, order = self._groups, self._order
        if groups.streams:
            streams = []
            roots = self._roles.preprocessors
            for index, (root, group) in enumerate(zip(roots, groups.streams, strict=True)):
                if group is not None:
                    numbers = deque(order.numbers[index :: len(roots)])
                    streams.append(Stream(numbers, root == self._rank, self._from_root(group)))
            return streams
        if groups.gathers is None and groups.broadcasts is None:
            return []
        start = self._all_shared if self._roles.design == ALL_SHARED else self._single
        return [Stream(deque(order.numbers), groups.gathers is not None, start)]

    def _buffer(self, number: int) -> Buffer:
        return Buffer(len(self._order[number]), self._shape, self._empty)

    def _counts(self, number: int, parts: int) -> list[int]:
        return [end - begin for begin, end in split(len(self._order[number]), parts)]

    def _to_device(self, own: Buffer) -> Buffer:
        if self._empty is np.empty:
            return own
        moved = Buffer(len(own), self._shape, self._empty)
        with moved.bytes.device:
            moved.bytes.set(own.bytes)
        return moved

    def _gathered(self, number: int, own: Buffer, whole: Buffer | None, to_all: bool) -> list:
        group = self._groups.gathers
        counts = self._counts(number, group.size)
        size = int(np.prod(self._shape))
        requests = []
        for unit, name in ((size, "images"), (4, "labels")):
            part = getattr(own, name).reshape(-1).view(np.uint8)
            into = None if whole is None else getattr(whole, name).reshape(-1).view(np.uint8)
            in_bytes = [count * unit for count in counts]
            requests.append(
                group.allgather(part, into, in_bytes)
                if to_all
                else group.gather(part, into, in_bytes, 0)
            )
        return requests

    def _all_shared(self, number: int, own: Buffer | None) -> Operation:
        whole = self._buffer(number)
        yield from _until(*self._gathered(number, self._to_device(own), whole, True))
        return whole if self._receives else None

    def _single(self, number: int, own: Buffer | None) -> Operation:
        broadcasts = self._groups.broadcasts
        merges = self._rank == self._roles.merger
        whole = self._buffer(number) if broadcasts is not None else None
        gathering = []
        if own is not None:
            gathering = self._gathered(
                number, self._to_device(own), whole if merges else None, False
            )
        if merges:  # the parts must be there, and the batches before this one sent
            yield from _until(*gathering)
            while number != self._gathering:
                yield
            self._gathering += 1
        if broadcasts is not None:
            gathering.append(broadcasts.broadcast(whole.bytes, 0))
        yield from _until(*gathering)
        return whole if self._receives else None

    def _from_root(self, group: Group) -> Callable[[int, Buffer | None], Operation]:
        def start(number: int, own: Buffer | None) -> Operation:
            whole = self._buffer(number) if own is None else self._to_device(own)
            yield from _until(group.broadcast(whole.bytes, 0))
            return whole if self._receives else None

        return start

    def _run(self) -> None:
        try:
            self._deliver()
        except BaseException as error:  # of the pipeline or a message: for who iterates
            self._put(error)
        else:
            self._put(None)

    def _deliver(self) -> None:
        finished: dict[int, Any] = {}
        following = self._order.start
        end = self._order.numbers.stop
        sleep = SHORTEST_S
        while following < end and not self._stop.is_set():
            moved = False
            blocked = None
            for stream in self._streams:
                while stream.numbers and stream.numbers[0] < following + self._prefetch:
                    if stream.needs_own and not self._pipeline.ready():
                        if stream.numbers[0] == following:
                            blocked = "preprocessing"
                        break
                    number = stream.numbers.popleft()
                    own = self._pipeline.take() if stream.needs_own else None
                    stream.running.append((number, stream.start(number, own)))
                    moved = True
                # In order, so that a message that depends on the one before is posted after it.
                for entry in tuple(stream.running):
                    try:
                        next(entry[1])
                    except StopIteration as stop:
                        stream.running.remove(entry)
                        finished[entry[0]] = stop.value
                        moved = True
            while self._has(finished, following):
                batch = finished.pop(following, None)
                if batch is not None and not self._offer((following, batch)):
                    finished[following] = batch
                    blocked = "members"
                    break
                following += 1
                moved = True
            if moved:
                sleep = SHORTEST_S
                self._busy("its preprocessing")
                continue
            begin = perf_counter()
            self._busy("its preprocessing" if blocked == "preprocessing" else None)
            self._stop.wait(sleep)
            cause = blocked or "peers"
            setattr(self.waits, cause, getattr(self.waits, cause) + perf_counter() - begin)
            sleep = min(2 * sleep, LONGEST_S)

    def _has(self, finished: dict[int, Any], number: int) -> bool:
        """Whether the batch has come, or is none of this rank's business."""
        if number >= self._order.numbers.stop:
            return False
        if number in finished or self._receives:
            return number in finished
        return not any(
            (stream.numbers and stream.numbers[0] <= number)
            or any(number == some for some, _ in stream.running)
            for stream in self._streams
        )

    def _offer(self, item: Any) -> bool:
        try:
            self._ready.put_nowait(item)
        except queue.Full:
            return False
        return True

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return
            except queue.Full:
                self._busy(None)

    def __iter__(self) -> Iterator[tuple[int, Buffer]]:
        """Yields number and batch, in order; on a rank without members nothing, once all is sent."""
        while True:
            self.fill.append(self._ready.qsize())
            item = self._ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Ends the thread. Messages under way are left, so this is for the end or for a failure."""
        self._stop.set()
        self._thread.join(5)


class OwnBatches:
    """Batches of this rank's own pipeline, with the interface of :class:`Exchange` and nothing sent."""

    def __init__(self, order: Order, pipeline: Pipeline):
        self._order, self._pipeline = order, pipeline
        self.waits = Waits()

    @property
    def fill(self) -> list[int]:
        return self._pipeline.work.fill

    def __iter__(self) -> Iterator[tuple[int, Buffer]]:
        yield from zip(self._order.numbers, self._pipeline, strict=True)

    def close(self) -> None:
        pass
