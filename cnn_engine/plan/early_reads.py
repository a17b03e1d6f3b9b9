"""Decides which inputs GPU kernels may read before the previous kernel has ended (PDL).

A kernel starts while the one before it still runs, and waits for that one. What it reads may have been made
long before: the input of a residual block, all but the last layer of a DenseNet. One that *holds* lets the
next one start only when it has waited itself: all that came before it has ended when any kernel behind it
starts. So what was made before a holder is known to all that read it behind the holder, without a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .. import kernels
from ..graph.graph import Graph, Node
from ..kernels import Kernel
from ..kernels.kernel import first_computed
from ..lower.placement import Placed
from .memory import MemoryPlan


@dataclass(frozen=True)
class EarlyReads:
    """Which nodes hold, and of the nodes that read ahead, how many columns of input 0 are known."""

    known: Mapping[str, int]
    holders: frozenset[str]


def plan(
    placed: Placed, planned: MemoryPlan, prepared: Callable[[Graph, Node, Kernel], Any]
) -> EarlyReads:
    """Returns which kernels hold the next launch, so that later ones read as early as possible.

    Args:
        prepared: returns what a kernel made of a node's constants.
    """
    graph, positions = placed.graph, placed.graph.positions
    able = [
        positions[node.name]
        for node in graph.nodes
        if (kernel := placed.kernels.get(node.name)) is not None
        and kernel.reads_early is not None
        and kernel.reads_early(prepared(graph, node, kernel))
    ]
    parts = _Parts(graph, planned)
    known: dict[str, int] = {}
    holders = {place for place in able if placed.kernels[graph.nodes[place].name].holds}
    for index, place in enumerate(able):
        node = graph.nodes[place]
        if _is_computed(graph, node):
            continue
        made = parts.of(node.inputs[0])
        for last in sorted({when for _, when in made}, reverse=True):
            # Not the kernel right before: what it holds starts too late to gain anything.
            holder = next((one for one in able[: max(index - 1, 0)] if one > last), None)
            columns = _columns_until(made, last)
            if holder is not None and columns:
                known[node.name] = columns
                holders.add(holder)
                break
    # What the kernel right before holds anyway is known, too.
    for before, place in pairwise(able):
        node = graph.nodes[place]
        if before in holders and not _is_computed(graph, node):
            columns = _columns_until(parts.of(node.inputs[0]), before - 1)
            known[node.name] = max(columns, known.get(node.name, 0))
    known = {name: columns for name, columns in known.items() if columns}
    return EarlyReads(known, frozenset(graph.nodes[place].name for place in holders))


def _is_computed(graph: Graph, node: Node) -> bool:
    """Whether what is applied to what ``node`` reads is itself computed."""
    return first_computed(node, graph, range(4, len(node.inputs))) is not None


def _columns_until(made: list[tuple[int, int]], last: int) -> int:
    """Returns the first columns that are made at the place ``last`` or before."""
    columns = 0
    for count, when in made:
        if when > last:
            break
        columns += count
    return columns


class _Parts:
    """Where the columns of values are made."""

    def __init__(self, graph: Graph, planned: MemoryPlan) -> None:
        self._graph = graph
        self._storage = planned.storage
        self._found: dict[str, list[tuple[int, int]]] = {}

    def of(self, name: str) -> list[tuple[int, int]]:
        """Returns runs of columns of a value, and the place of the node that writes each."""
        if name not in self._found:
            self._found[name] = self._made(name)
        return self._found[name]

    def _made(self, name: str) -> list[tuple[int, int]]:
        graph = self._graph
        columns, maker = graph.values[name].shape[-1], graph.producers.get(name)
        if maker is None:  # the caller's: what writes it is not known
            return [(columns, len(graph.nodes))]
        here = [(columns, graph.positions[maker.name])]
        if maker.op.kind in kernels.ALIASES:
            same = graph.values[maker.inputs[0]].shape[-1] == columns
            return self.of(maker.inputs[0]) if same else here
        if not self._joins_columns(maker):
            return here
        runs: list[tuple[int, int]] = []
        whole, offset = self._storage.get(name, (name, 0))
        for part in maker.inputs:
            value = graph.values[part]
            in_place = self._storage.get(part) == (whole, offset)
            runs += self.of(part) if in_place else [(value.shape[-1], here[0][1])]
            offset += value.shape[-1] * value.item_bytes
        return runs

    def _joins_columns(self, node: Node) -> bool:
        rank = len(self._graph.values[node.outputs[0]].shape)
        return node.op.kind == "concat" and node.op.axis in (-1, rank - 1)
