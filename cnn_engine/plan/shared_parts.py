"""Values that lie in the memory of others: parts of concatenations, splits and slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..graph.graph import Graph, Node
from .storages import Planner, Region, Storage, aligned


@dataclass(frozen=True)
class _Piece:
    """A part of what a node cuts: the storage that holds it and where, in rows ``pitch`` elements apart.

    A pitch of 0: in one piece.
    """

    name: str
    target: str
    region: Region
    pitch: int


class SharedParts:
    """Values that lie in the memory of others: parts of concatenations, splits and slices.

    Parts are in one piece, or columns of wider rows where all that write and read them take those. A part by
    which more would be alive at once than where no value shares memory is copied instead.
    """

    def __init__(
        self,
        planner: Planner,
        outputs: set[str],
        is_alias: Callable[[Node], bool],
        allows_pitch: Callable[[Node, int | None], bool],
    ) -> None:
        self.planner = planner
        self.is_alias, self.allows_pitch = is_alias, allows_pitch
        graph = planner.graph
        self.inputs = {value.name for value in graph.inputs}
        self.members: dict[str, list[str]] = {}  # storage -> the values that lie there
        self.uses: dict[str, list[tuple[Node, int]]] = {}
        self.views: set[str] = set()  # columns of what is split
        self.wide: dict[str, bool] = {}
        changes: dict[
            str, np.ndarray
        ] = {}  # of the bytes alive at each step, where no value shares
        for node in graph.nodes:
            for place, name in enumerate(node.inputs):
                self.uses.setdefault(name, []).append((node, place))
            for name in node.outputs:
                self.members.setdefault(planner.find(name)[0], []).append(name)
                if name not in outputs:
                    first = planner.steps[node.name]
                    nbytes, arena = aligned(graph.values[name].nbytes), planner.arena_of(name)
                    if arena not in changes:
                        changes[arena] = np.zeros(len(graph.nodes) + 1, np.int64)
                    changes[arena][first] += nbytes
                    changes[arena][max(planner.last_use(name), first) + 1] -= nbytes
        self.limits = {arena: int(np.cumsum(change).max()) for arena, change in changes.items()}
        self.alive = {arena: np.zeros_like(change) for arena, change in changes.items()}
        for held in planner.storages.values():
            if held.arena is not None:
                self.alive[held.arena][held.first : held.last + 1] += aligned(held.nbytes)

    def allows_wider_rows(self, name: str) -> bool:
        """Whether all that write and read a value take its rows among wider ones."""
        if name not in self.wide:
            maker = self.planner.graph.producers[name]
            self.wide[name] = (
                name in self.views or self.is_alias(maker) or self.allows_pitch(maker, None)
            ) and all(
                self.is_alias(user) or self.allows_pitch(user, place) or self._only_views(user)
                for user, place in self.uses.get(name, ())
            )
        return self.wide[name]

    def _only_views(self, node: Node) -> bool:
        """Whether all that ``node`` makes lies in what it reads."""
        return all(name in self.views for name in node.outputs)

    def can_be_columns(self, source: str, columns: int) -> bool:
        """Whether all values of a storage can be rows of ``columns`` elements among wider ones."""
        return all(
            (
                name in self.views
                or (
                    self.planner.graph.values[name].shape[-1:] == (columns,)
                    and self.planner.graph.values[name].nbytes
                    == self.planner.storages[source].nbytes
                )
            )
            and self.allows_wider_rows(name)
            for name in self.members[source]
        )

    def _lengthens(self, held: Storage, *parts: Storage) -> bool:
        """Has parts end and what is to hold them last as long; returns whether there is room."""
        first, last = held.first, held.last
        at, own = self.alive[held.arena], aligned(held.nbytes)
        spans = [(at[part.first : part.last + 1], aligned(part.nbytes)) for part in parts]
        for part, (span, nbytes) in zip(parts, spans, strict=True):
            first, last = min(first, part.first), max(last, part.last)
            span -= nbytes
        longer = at[first : held.first], at[held.last + 1 : last + 1]
        for span in longer:
            if span.max(initial=0) + own > self.limits[held.arena]:
                for taken, nbytes in spans:
                    taken += nbytes
                return False
        for span in longer:
            span += own
        held.first, held.last = first, last
        return True

    def _share(self, source: str, target: str, offset: int, region: Region, pitch: int) -> None:
        """Has a storage lie in another, from byte ``offset`` on.

        Args:
            pitch: from one row of the last dimension to the next, or 0: in one piece.
        """
        planner = self.planner
        part, held = planner.storages.pop(source), planner.storages[target]
        planner.root[source] = (target, offset)
        for other, write in part.written:
            held.written.add(region if pitch else replace(other, start=offset + other.start), write)
        if pitch:
            planner.pitches.update(dict.fromkeys(self.members[source], pitch))
        self.members.setdefault(target, []).extend(self.members.pop(source))

    def _is_aligned(self, arena: str, offset: Any, item: int) -> bool:
        """Whether kernels read elements of ``item`` bytes from byte ``offset`` of a storage on."""
        # A GPU reads 16 bytes at once, by the copy engine without exception.
        return offset % (item if arena == "cpu" else 16) == 0

    def split(self) -> None:
        """Has the outputs of splits and slices stay inside their inputs.

        They are read until the last of them is, and nothing writes there until then.
        """
        planner, graph = self.planner, self.planner.graph
        for node in graph.nodes:
            located = (self._located(node, *cut) for cut in _cuts(node, graph))
            found = [piece for piece in located if piece and self._stays(node, piece)]
            parts = [planner.storages[piece.name] for piece in found]
            held = planner.storages[found[0].target] if found else None
            if held is None or (held.arena is not None and not self._lengthens(held, *parts)):
                continue
            for piece in found:
                if piece.pitch:
                    self.views.update(self.members[piece.name])
                self._share(piece.name, piece.target, piece.region.start, piece.region, piece.pitch)
        self.wide.clear()

    def _located(self, node: Node, name: str, axis: int, start: int) -> _Piece | None:
        """Returns where a part of what ``node`` cuts lies, or None where it lies in no rows."""
        planner, graph = self.planner, self.planner.graph
        x, value = node.inputs[0], graph.values[name]
        shape, item = graph.values[x].shape, value.item_bytes
        target, base = planner.find(x)
        offset = base + start * math.prod(shape[axis + 1 :]) * item
        if math.prod(shape[:axis]) == 1 and x not in planner.pitches:
            return _Piece(name, target, Region.whole(offset, value.nbytes), 0)
        if axis != len(shape) - 1:
            return None
        pitch, width = planner.pitches.get(x, shape[-1]), value.shape[-1] * item
        return _Piece(
            name, target, Region(offset, width, pitch * item, math.prod(shape[:-1])), pitch
        )

    def _stays(self, node: Node, piece: _Piece) -> bool:
        """Whether all that write and read a part of what ``node`` cuts can do so where it is."""
        planner, value = self.planner, self.planner.graph.values[piece.name]
        held, step = planner.storages[piece.target], planner.steps[node.name]
        part = planner.storages.get(piece.name)
        return (
            part is not None
            and part.arena is not None
            # A GPU's kernels take what is the caller's by its name.
            and part.arena == ("cpu" if piece.target in self.inputs else held.arena)
            and value.nbytes > 0
            and self._is_aligned(part.arena, piece.region.start, value.item_bytes)
            and (
                not piece.pitch
                or (
                    self._is_aligned(part.arena, piece.pitch * value.item_bytes, value.item_bytes)
                    and self._reads_columns(piece.name, value.shape[-1])
                )
            )
            # Nothing may be written over what is still to be read through the other.
            and all(write > held.last for _, write in part.written)
            and all(
                write <= step or write > part.last for write in held.written.meeting(piece.region)
            )
        )

    def _reads_columns(self, name: str, columns: int) -> bool:
        """Whether all that read a part, and write over it, take its rows among wider ones."""
        self.views.add(name)  # its maker writes nothing
        found = self.can_be_columns(name, columns)
        self.views.discard(name)
        for member in self.members[name]:
            self.wide.pop(member, None)
        return found and all(
            self.planner.graph.values[member].shape[-1:] == (columns,)
            for member in self.members[name]
        )

    def concatenate(self) -> None:
        """Has the inputs of concatenations written where their parts of the output are.

        The output's memory is taken as soon as the first part is written.
        """
        planner, graph, storages = self.planner, self.planner.graph, self.planner.storages
        for node in reversed(graph.nodes):
            if node.op.kind != "concat":
                continue
            (output,) = node.outputs
            target, base = planner.find(output)
            held = storages[target]
            arena = planner.arena_of(output)
            shape = graph.values[output].shape
            axis = node.op.axis % max(len(shape), 1)
            in_rows = math.prod(shape[:axis]) != 1
            if (in_rows or output in planner.pitches) and axis != len(shape) - 1:
                continue
            pitch = planner.pitches.get(output, shape[-1])
            in_rows = in_rows and pitch != 0
            offset = base
            step = planner.steps[node.name]
            first_place: dict[str, int] = {}
            refused: dict[str, tuple[int, Region]] = {}  # storage -> its first byte, its region
            for place, name in enumerate(node.inputs):
                first_place.setdefault(name, place)
                value = graph.values[name]
                source, inside = planner.find(name)
                part = storages.get(source)
                columns = value.shape[-1] if value.shape else 1
                if in_rows and inside == 0 and name in self.views:
                    columns = self._side_by_side(node.inputs[place:], source)
                item, rows = value.item_bytes, math.prod(shape[:-1])
                region = Region.whole(offset, value.nbytes)
                if in_rows:
                    region = Region(offset, columns * item, pitch * item, rows)
                fits = (
                    part is not None
                    and source != target
                    and source not in refused
                    and part.arena == arena
                    and inside == 0
                    and part.nbytes == (rows * columns * item if in_rows else value.nbytes)
                    and first_place[name] == place
                    and self._is_aligned(arena, offset, item)
                    and (not in_rows or self._is_aligned(arena, pitch * item, item))
                    and (not in_rows or self.can_be_columns(source, columns))
                    # Nothing may be written over what is still to be read through the other.
                    and all(write <= step for _, write in part.written)
                    and all(write > part.last for write in held.written.meeting(region))
                )
                wide = pitch if in_rows else 0
                if fits and not self._put({source: (offset, region)}, target, wide):
                    refused[source] = offset, region
                offset += value.shape[-1] * item if in_rows else value.nbytes
            # Parts that are alive together take no more in one piece, though each by itself does.
            if refused:
                self._put(refused, target, pitch if in_rows else 0)

    def _put(self, parts: dict[str, tuple[int, Region]], target: str, pitch: int) -> bool:
        """Has all of some storages lie in another, if its memory has room; returns whether they do."""
        storages = self.planner.storages
        held = storages[target]
        if held.arena is not None and not self._lengthens(held, *map(storages.get, parts)):
            return False
        for source, (offset, region) in parts.items():
            self._share(source, target, offset, region, pitch)
        return True

    def _side_by_side(self, names: Sequence[str | None], source: str) -> int:
        """Returns the columns of the first of ``names`` that lie in ``source``, one after another."""
        columns = 0
        for name in names:
            value = self.planner.graph.values[name]
            if (
                self.planner.find(name) != (source, columns * value.item_bytes)
                or name not in self.views
            ):
                break
            columns += value.shape[-1]
        return columns


def _cuts(node: Node, graph: Graph) -> Iterator[tuple[str, int, int]]:
    """Yields the outputs of a split or slice that lie in its input side by side.

    Each with the dimension that is cut, and the first position there.
    """
    if node.op.kind == "split":
        axis, start = node.op.axis % len(graph.values[node.inputs[0]].shape), 0
        for name in node.outputs:
            yield name, axis, start
            start += graph.values[name].shape[axis]
    elif node.op.kind == "slice":
        shape = graph.values[node.inputs[0]].shape
        cut = {
            axis: bounds
            for axis, bounds in node.op.bounds(shape).items()
            if bounds != (0, shape[axis], 1)
        }
        if len(cut) == 1:
            ((axis, (start, end, step)),) = cut.items()
            if step == 1 and end > start:
                yield node.outputs[0], axis, start
