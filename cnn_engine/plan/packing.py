"""Packing of lifetimes into an arena: values that are alive at different steps may share addresses."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

#: Every value begins at a multiple of so many bytes: a cache line on the CPU, a memory segment on a GPU.
ALIGNMENT = 256

#: Past so many values that share an arena, fewer ways of packing them are tried.
MANY = 1000

#: Others that a value is alive with, on average, up to which packings look at each: networks have fewer.
MOST_OTHERS = 64

#: Steps whose values are looked at together for those that another meets.
SPAN = 8

#: Packings that are tried from each order, unless one is the best that can be.
TRIES = 8


@dataclass(frozen=True)
class Lifetime:
    """Memory that is needed from step ``first`` to step ``last``, both included."""

    name: Hashable
    nbytes: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


class Stack:
    """Values of an arena, each above all that it meets and that lay below it: for other sizes of the same.

    Args:
        lifetimes: of what lies there.
        offsets: of each, in a packing of one size.
    """

    def __init__(self, lifetimes: Sequence[Lifetime], offsets: Sequence[int]) -> None:
        order = sorted(range(len(lifetimes)), key=offsets.__getitem__)
        self._below = [
            (
                place,
                [other for other in order[:index] if lifetimes[place].meets(lifetimes[other])],
            )
            for index, place in enumerate(order)
        ]

    def offsets(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        """Returns the offsets of all for these bytes of each, and the arena's bytes."""
        ends = [0] * len(sizes)
        found = [0] * len(sizes)
        for place, below in self._below:
            start = 0
            for other in below:
                if ends[other] > start:
                    start = ends[other]
            found[place] = start
            ends[place] = start + -(-sizes[place] // ALIGNMENT) * ALIGNMENT
        return found, max(ends, default=0)


def most_alive(lifetimes: Iterable[Lifetime]) -> int:
    """Returns the most bytes that are needed at any one step."""
    changes: dict[int, int] = {}
    for life in lifetimes:
        changes[life.first] = changes.get(life.first, 0) + life.nbytes
        changes[life.last + 1] = changes.get(life.last + 1, 0) - life.nbytes
    alive = most = 0
    for step in sorted(changes):
        alive += changes[step]
        most = max(most, alive)
    return most


def pack(lifetimes: Sequence[Lifetime]) -> tuple[dict[Hashable, int], int]:
    """Returns an offset for each lifetime, and the bytes of the arena.

    Best fit, the first to be placed being the largest, the longest, or the first that is needed; what then
    ends highest is placed first, a few times. To find the best packing is NP-hard, so the best of these is
    taken.
    """
    lifetimes = [life for life in lifetimes if life.nbytes]
    lower = most_alive(lifetimes)
    orders: tuple[Callable[[Lifetime], tuple], ...] = (
        lambda life: (-life.nbytes, life.first),
        lambda life: (life.first - life.last, -life.nbytes),
        lambda life: (life.first, -life.nbytes),
        lambda life: (-life.last, -life.nbytes),
        lambda life: ((life.first - life.last - 1) * life.nbytes, life.first),
    )
    if not lifetimes:
        return {}, 0
    if _pairs(lifetimes) > MOST_OTHERS * len(lifetimes):
        return _place_in_turn(lifetimes)
    best: tuple[dict[Hashable, int], int] = ({}, 1 << 62)
    many = len(lifetimes) > MANY
    for order in orders[:2] if many else orders:
        turn = sorted(lifetimes, key=order)
        for _ in range(1 if many else TRIES):
            offsets, nbytes = _place(turn)
            if nbytes < best[1]:
                best = offsets, nbytes
            if nbytes <= lower:
                return best
            highest = next(life for life in turn if offsets[life.name] + life.nbytes == nbytes)
            turn.remove(highest)
            turn.insert(0, highest)
    return best


def _place(lifetimes: Sequence[Lifetime]) -> tuple[dict[Hashable, int], int]:
    """Gives each in turn the smallest gap that it fits into, or else the end."""
    # Offset, end, first and last step, by the spans that it is alive in.
    placed: dict[int, list[tuple[int, int, int, int]]] = {}
    offsets: dict[Hashable, int] = {}
    total = 0
    for life in lifetimes:
        first, last = life.first, life.last
        spans = range(first // SPAN, last // SPAN + 1)
        met = {
            (offset, stop)
            for span in spans
            for offset, stop, begin, until in placed.get(span, ())
            if first <= until and begin <= last
        }
        best, best_gap, end = None, None, 0
        for offset, stop in sorted(met):
            gap = offset - end
            if gap >= life.nbytes and (best_gap is None or gap < best_gap):
                best, best_gap = end, gap
            end = max(end, stop)
        start = end if best is None else best
        offsets[life.name] = start
        for span in spans:
            placed.setdefault(span, []).append((start, start + life.nbytes, first, last))
        total = max(total, start + life.nbytes)
    return offsets, total


def _pairs(lifetimes: Sequence[Lifetime]) -> int:
    """Returns how many pairs are alive together."""
    firsts = sorted(life.first for life in lifetimes)
    lasts = sorted(life.last for life in lifetimes)
    return sum(place - bisect_left(lasts, first) for place, first in enumerate(firsts))


def _place_in_turn(lifetimes: Sequence[Lifetime]) -> tuple[dict[Hashable, int], int]:
    """Gives each, in the order in which they are needed, the smallest gap that it fits into, or else the end.

    Only gaps are looked at, of which there are few where thousands of values are alive together.
    """
    offsets: dict[Hashable, int] = {}
    gaps: list[tuple[int, int]] = []  # begin, end, in order; none touch
    ends: list[tuple[int, int, int]] = []  # a heap of: last step, begin, end
    total = 0
    for life in sorted(lifetimes, key=lambda life: (life.first, -life.nbytes)):
        while ends and ends[0][0] < life.first:
            _, begin, end = heapq.heappop(ends)
            place = bisect_left(gaps, (begin, end))
            if place < len(gaps) and gaps[place][0] == end:
                end = gaps.pop(place)[1]
            if place and gaps[place - 1][1] == begin:
                begin = gaps.pop(place - 1)[0]
                place -= 1
            gaps.insert(place, (begin, end))
        sizes = ((end - begin, place) for place, (begin, end) in enumerate(gaps))
        fits = min((found for found in sizes if found[0] >= life.nbytes), default=None)
        if fits is not None:
            begin, end = gaps.pop(fits[1])
            if end - begin > life.nbytes:
                gaps.insert(fits[1], (begin + life.nbytes, end))
        else:
            begin = gaps.pop()[0] if gaps and gaps[-1][1] == total else total
            total = begin + life.nbytes
        offsets[life.name] = begin
        heapq.heappush(ends, (life.last, begin, begin + life.nbytes))
    return offsets, total
