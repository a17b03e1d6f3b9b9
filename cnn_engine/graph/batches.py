"""One network for any batch: made once with a symbol for the batch, then by putting numbers in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..locks import ForkSafeLock
from .dims import BATCH, Dim, Guard, holds_dims, record, recorded, substituted
from .graph import Graph, Node, Value


class NotSymbolicError(Exception):
    """A graph that cannot be made with a symbol for its batch."""


class SymbolicGraph:
    """A graph with :data:`~cnn_engine.graph.dims.BATCH` in its shapes and records.

    Attributes:
        graph: with expressions in the place of integers.
        guards: what was decided while it was made.
    """

    def __init__(self, graph: Graph, guards: tuple[Guard, ...]) -> None:
        self.graph = graph
        self.guards = guards
        self._values = [value for value in graph.values.values() if holds_dims(value.shape)]
        self._positions = [place for place, node in enumerate(graph.nodes) if holds_dims(node.op)]

    def __reduce__(self) -> tuple:
        return SymbolicGraph, (self.graph, self.guards)

    def stands_for(self, batch: int) -> bool:
        """Whether the same decisions would have been made for ``batch``."""
        numbers = {"batch": batch}
        try:
            return batch > 0 and all(guard.holds(numbers) for guard in self.guards)
        except ZeroDivisionError:
            return False

    def at(self, batch: int, rebuild: Callable[[int], Graph]) -> Graph:
        """Returns the graph for ``batch``: no pass runs, and no shape is inferred.

        Args:
            rebuild: returns it for others.
        """
        numbers, known = {"batch": batch}, {}

        def number_of(dim: Dim) -> int:
            if dim.terms not in known:
                known[dim.terms] = dim.at(numbers)
            return known[dim.terms]

        graph = self.graph
        values = dict(graph.values)
        for value in self._values:
            shape = tuple(number_of(d) if type(d) is Dim else d for d in value.shape)
            values[value.name] = Value(
                value.name,
                shape,
                value.dtype,
                value.layout,
                value.storage_dtype,
                value.quantization,
            )
        nodes = list(graph.nodes)
        for place in self._positions:
            node = nodes[place]
            op = substituted(node.op, number_of)
            nodes[place] = Node(node.name, op, node.inputs, node.outputs, node.covers)
        found = object.__new__(Graph)
        found.__dict__.update(
            {name: graph.__dict__[name] for name in Graph.__dataclass_fields__},
            nodes=tuple(nodes),
            inputs=tuple(values[value.name] for value in graph.inputs),
            values=MappingProxyType(values),
            rebuild=rebuild,
        )
        return found


class Batches:
    """Makes a graph for one batch after another; what :attr:`Graph.rebuild` calls.

    Args:
        make: returns the graph for a batch: a number, or :data:`~cnn_engine.graph.dims.BATCH`. It may raise
            anything for the latter; the graph is then made anew for each number.
        first: a graph of one batch; the others have its arrays where constants are equal.
    """

    def __init__(
        self,
        make: Callable[[Any], Graph],
        first: Graph | None = None,
        symbolic: SymbolicGraph | None = None,
    ) -> None:
        self._make = make
        self._first = first
        self._lock = ForkSafeLock()
        self._symbolic: SymbolicGraph | NotSymbolicError | None = symbolic

    def __reduce__(self) -> tuple:
        # Arrays that graphs share are so again, as long as they are in one pickle.
        return Batches, (self._make, self._first, self.symbolic)

    @property
    def symbolic(self) -> SymbolicGraph | None:
        """The graph that stands for all batches that are decided alike; None: there is none."""
        with self._lock:
            if self._symbolic is None:
                self._symbolic = self._made_symbolic()
            return self._symbolic if isinstance(self._symbolic, SymbolicGraph) else None

    def _made_symbolic(self) -> SymbolicGraph | NotSymbolicError:
        try:
            with recorded() as guards:
                graph = self._make(BATCH)
        except Exception as error:  # of a number the same may be raised again, or not
            return NotSymbolicError(str(error))
        if any(guard.outcome and guard.kind == "equal" for guard in guards.values()):
            return NotSymbolicError("its batch decides what it is made of")
        if self._first is not None:
            graph = graph.sharing(self._first)
        return SymbolicGraph(replace(graph, rebuild=None, like=graph), tuple(guards.values()))

    def __call__(self, batch: int | Dim) -> Graph:
        """Returns the graph for a batch, or the symbolic one, whose guards then count where it is used."""
        symbolic = self.symbolic
        if isinstance(batch, Dim):
            if symbolic is None:
                raise NotSymbolicError(f"expected a graph for any batch, found {self._symbolic}")
            record(symbolic.guards)
            return symbolic.graph
        if symbolic is not None and symbolic.stands_for(batch):
            return symbolic.at(batch, self)
        graph = self._make(batch)
        graph = replace(graph, rebuild=None, like=graph)
        known = self._first or (symbolic and symbolic.graph)
        if known is None:
            self._first = known = graph
        return replace(graph.sharing(known), rebuild=self, like=graph)
