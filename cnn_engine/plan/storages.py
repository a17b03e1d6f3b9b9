"""Storages of a pass, the values that lie in each, and the steps that write them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..graph.dims import estimated
from ..graph.graph import Graph
from .packing import ALIGNMENT


@dataclass(frozen=True)
class Region:
    """Bytes of a storage: ``rows`` rows of ``run`` bytes, the first at ``start``, each ``pitch`` further."""

    start: int
    run: int
    pitch: int
    rows: int

    @staticmethod
    def whole(start: int, nbytes: int) -> Region:
        """Returns ``nbytes`` bytes in one piece."""
        return Region(start, nbytes, nbytes, 1)

    @property
    def end(self) -> int:
        return self.start + (self.rows - 1) * self.pitch + self.run

    def meets(self, other: Region) -> bool:
        """Whether the regions share a byte; where their pitches differ, whether they may."""
        if self.end <= other.start or other.end <= self.start:
            return False
        if self.pitch != other.pitch:
            return True
        apart = (other.start - self.start) % self.pitch
        return apart < self.run or self.pitch - apart < other.run


class Writes:
    """Regions of a storage that are written over another value's, and the steps that write them."""

    def __init__(self) -> None:
        self._found: list[tuple[Region, int]] = []  # by where they start
        self._longest = 0

    def __iter__(self) -> Iterator[tuple[Region, int]]:
        return iter(self._found)

    def add(self, region: Region, step: int) -> None:
        insort(self._found, (region, step), key=_start)
        self._longest = max(self._longest, region.end - region.start)

    def meeting(self, region: Region) -> Iterator[int]:
        """Yields the steps that write a byte of ``region``, or may."""
        first = bisect_right(self._found, region.start - self._longest, key=_start)
        for other, step in islice(self._found, first, None):
            if other.start >= region.end:
                return
            if other.meets(region):
                yield step


def _start(written: tuple[Region, int]) -> int:
    return written[0].start


@dataclass
class Storage:
    """Values that share memory: the first step that writes it, the last that uses it."""

    arena: str | None  # None: the caller's memory, or a constant's
    nbytes: int
    first: int
    last: int
    written: Writes = field(default_factory=Writes)


@dataclass
class Planner:
    """The memory of a graph while it is planned.

    Attributes:
        steps: node -> when it runs.
        root: value -> (the value whose memory holds it, first byte in it).
        storages: by the value that owns each.
        pitches: of :class:`.memory.MemoryPlan`.
    """

    graph: Graph
    arena_of: Callable[[str], str]
    steps: Mapping[str, int] = field(init=False)
    root: dict[str, tuple[str, int]] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    pitches: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = {node.name: index for index, node in enumerate(self.graph.nodes)}

    def find(self, value: str) -> tuple[str, int]:
        """Returns the storage that holds a value, and the first byte in it."""
        offset = 0
        while value in self.root:
            value, inner = self.root[value]
            offset += inner
        return value, offset

    def last_use(self, value: str) -> int:
        """Returns the last step that reads a value, or makes it where none does."""
        uses = self.graph.consumers[value]
        own = self.graph.producers.get(value)
        return self.steps[(uses[-1] if uses else own).name]


def aligned(nbytes: Any) -> int:
    """Returns the bytes that a value takes in an arena; of an open size, those of its estimate."""
    return -(-estimated(nbytes) // ALIGNMENT) * ALIGNMENT
