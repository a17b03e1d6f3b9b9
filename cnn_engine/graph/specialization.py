"""One network for all sizes: made once with symbols for its open dimensions, then by putting numbers in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from ..errors import CnnEngineError
from ..locks import ForkSafeLock
from .compiled import decisions_of
from .dims import Dim, Sizes, holds_dims, substituted
from .folding import fold, worth_folding
from .graph import Graph, Node, Value
from .guards import TYPICAL_BATCH, Guard, record, recorded
from .terms import Evaluator

#: Graphs with symbols that are kept, each with decisions of its own.
MOST_VARIANTS = 16


#: Sizes that are remembered at which a graph finds numbers while it runs.
MOST_FINDING = 512

#: Sizes that guards are looked at for before they are compiled.
WORTH_COMPILING = 8


class FoundError(CnnEngineError):
    """A graph depends on a number that is found while it runs, and was not said to.

    Attributes:
        graph: returns the graph of these sizes that finds it: see :mod:`.stages`.
    """

    def __init__(self, message: str, graph: Callable[[], Graph] | None = None) -> None:
        super().__init__(message)
        self.graph = graph


class NotSymbolicError(Exception):
    """A graph that cannot be made with symbols for its dimensions."""


class SymbolicGraph:
    """A graph with :class:`~cnn_engine.graph.dims.Dim` in its shapes and records.

    Attributes:
        graph: with expressions in the place of integers.
        guards: what was decided while it was made.
    """

    def __init__(self, graph: Graph, guards: tuple[Guard, ...]) -> None:
        self.graph = graph
        self.guards = guards
        self._values = [value for value in graph.values.values() if holds_dims(value.shape)]
        self._positions = [place for place, node in enumerate(graph.nodes) if holds_dims(node.op)]
        self._foldable = _foldable(graph)
        self._asked = 0
        self._compiled: dict[tuple[str, ...], Callable[..., tuple[bool, ...]]] = {}

    def __reduce__(self) -> tuple:
        # With its values: to infer them again asks for decisions, which are made for no sizes here.
        _, made_of = self.graph.__reduce__()
        return _unpickled, (made_of, dict(self.graph.values), self.guards)

    def stands_for(self, sizes: Sizes) -> bool:
        """Whether the same decisions would have been made for these sizes."""
        if sizes.is_below_lowest:
            return False
        try:
            return self._holds(sizes)
        except (ZeroDivisionError, KeyError):
            return False

    def _holds(self, sizes: Sizes) -> bool:
        """Whether all guards hold, which are compiled once they were asked often."""
        if self._asked < WORTH_COMPILING:
            self._asked += 1
            at = Evaluator(sizes.numbers)
            return all(guard.holds(at) for guard in self.guards)
        symbols = tuple(symbol for symbol, _ in sizes.numbers)
        if symbols not in self._compiled:
            self._compiled[symbols] = decisions_of(symbols, self.guards)
        return all(self._compiled[symbols](*(number for _, number in sizes.numbers)))

    def at(self, sizes: Sizes, rebuild: Callable[[Sizes], Graph]) -> Graph:
        """Returns the graph for these sizes: no pass runs, and no shape is inferred.

        Nodes of constants that depend on a size, such as positions, become constants.

        Args:
            rebuild: returns it for others.
        """
        evaluate, known = Evaluator(sizes.numbers), {}

        def number_of(dim: Dim) -> int:
            found = known.get(dim.terms)
            if found is None:
                found = known[dim.terms] = evaluate(dim)
            return found

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
        made = {
            name: graph.__dict__[name] for name in Graph.__dataclass_fields__
        } | {"rebuild": rebuild, "symbolic": graph}  # fmt: skip
        if graph.at is not None:
            made["at"] = sizes
        if self._foldable:
            nodes, made["constants"], made["sized"] = self._folded(nodes, values)
        found = object.__new__(Graph)
        found.__dict__.update(
            made,
            nodes=tuple(nodes),
            inputs=tuple(values[value.name] for value in graph.inputs),
            values=MappingProxyType(values),
            is_substituted=True,
        )
        return found

    def _folded(
        self, nodes: list[Node], values: dict[str, Value]
    ) -> tuple[list[Node], Mapping[str, np.ndarray], frozenset[str]]:
        """Returns the nodes that are left, all constants, and the names of those of this size alone."""
        constants, computed = dict(self.graph.constants), []
        gone = set()
        for place in self._foldable:
            node = nodes[place]
            if any(name is not None and name not in constants for name in node.inputs):
                continue
            given = [None if name is None else constants[name] for name in node.inputs]
            inputs = [None if name is None else values[name] for name in node.inputs]
            outputs = [values[name] for name in node.outputs]
            if not worth_folding(node.op, inputs, outputs, given):
                continue
            for value, array in zip(outputs, fold(node.op, outputs, given), strict=True):
                constants[value.name] = np.ascontiguousarray(array).reshape(array.shape)
                computed.append(value.name)
            gone.add(place)
        left = [node for place, node in enumerate(nodes) if place not in gone]
        used = {name for node in left for name in node.inputs} | set(self.graph.outputs)
        for name in computed:
            if name not in used:
                del constants[name], values[name]
        kept = {name: array for name, array in constants.items() if name in used}
        for name in constants.keys() - kept.keys():
            values.pop(name, None)
        return left, MappingProxyType(kept), frozenset(computed) & used


def _unpickled(
    made_of: tuple, values: dict[str, Value], guards: tuple[Guard, ...]
) -> SymbolicGraph:
    """Returns the graph with symbols that a pickle holds."""
    fields = dict(zip(Graph.__dataclass_fields__, made_of, strict=True), values=values)
    graph = object.__new__(Graph)
    graph.__dict__.update(
        {n: MappingProxyType(f) if isinstance(f, dict) else f for n, f in fields.items()}
    )
    return SymbolicGraph(graph, guards)


def traced(make: Callable[[Sizes], Graph], sizes: Sizes) -> SymbolicGraph:
    """Returns the result of ``make`` on symbols, with everything decided as for these numbers.

    Raises:
        NotSymbolicError: it makes a graph of numbers all the same.
    """
    with recorded(sizes.numbers) as guards:
        graph = make(sizes.as_symbols())
    if not any(holds_dims(value.shape) for value in graph.inputs):
        raise NotSymbolicError("its inputs have numbers in their shapes")
    return SymbolicGraph(replace(graph, rebuild=None, like=graph), tuple(guards.values()))


def _foldable(graph: Graph) -> list[int]:
    """Returns the places of nodes that read constants alone, those that others of them make among these."""
    known, found = set(graph.constants), []
    outside = set(graph.outputs)
    for place, node in enumerate(graph.nodes):
        if known.issuperset(name for name in node.inputs if name is not None) and not (
            outside & set(node.outputs)
        ):
            known.update(node.outputs)
            found.append(place)
    return found


class Specializations:
    """Makes a graph for one size after another; called by :attr:`Graph.rebuild`.

    A graph with symbols stands for all sizes for which the same is decided. Where something else is, as for
    odd heights, another is made, up to :data:`MOST_VARIANTS` of them.

    Args:
        make: returns the graph for sizes, symbolic ones too. It may raise anything for the latter; the graph
            is then made anew for each size.
        first: a graph of one size; the others have its arrays where constants are equal.
        variants: graphs with symbols that are known already.
    """

    def __init__(
        self,
        make: Callable[[Sizes], Graph],
        first: Graph | None = None,
        variants: tuple[SymbolicGraph, ...] = (),
    ) -> None:
        self._make = make
        self._first = first
        self._lock = ForkSafeLock()
        self._variants = list(variants)
        self._finding: dict[Sizes, FoundError] = {}  # sizes at which the graph finds numbers
        self._tried: set[Sizes] = set()  # no graph with symbols comes of these
        self.refusal = "none was made yet"  # why no graph with symbols could be made, the last time

    def __reduce__(self) -> tuple:
        # Arrays that graphs share are so again, as long as they are in one pickle.
        return Specializations, (self._make, self._first, tuple(self._variants))

    def symbolic(self, sizes: Sizes) -> SymbolicGraph | None:
        """Returns a graph with symbols that stands for these sizes, or None: there is none."""
        with self._lock:
            for variant in self._variants:
                if variant.stands_for(sizes):
                    return variant
            return self._made_symbolic(sizes)

    @property
    def variants(self) -> tuple[SymbolicGraph, ...]:
        """The graphs with symbols that were made so far, that of the first size first."""
        return tuple(self._variants)

    def _made_symbolic(self, sizes: Sizes) -> SymbolicGraph | None:
        """Makes a graph by a typical batch, or else by these very sizes; None: no more are kept."""
        if not sizes.numbers or sizes.is_below_lowest:
            return None
        for wanted in dict.fromkeys((sizes.with_batch(TYPICAL_BATCH), sizes)):
            if wanted in self._tried or len(self._tried) >= 2 * MOST_VARIANTS:
                continue
            self._tried.add(wanted)
            try:
                found = traced(self._make, wanted)
            except Exception as error:  # of numbers the same may be raised again, or not
                self.refusal = str(error)
                continue
            if self._first is not None:
                found = SymbolicGraph(found.graph.sharing(self._first), found.guards)
            self._variants.append(found)
            if found.stands_for(sizes):
                return found
        return None

    def __call__(self, sizes: Sizes) -> Graph:
        """Returns the graph for sizes; of symbolic ones the graph's guards count where it is used.

        Raises:
            NotSymbolicError: there is no graph with symbols for these sizes.
            FoundError: at these sizes the graph finds numbers while it runs.
        """
        numbers = replace(sizes, symbolic=False)
        if numbers in self._finding:
            known = self._finding[numbers]
            raise FoundError(str(known), known.graph)
        symbolic = self.symbolic(numbers)
        if sizes.symbolic:
            if symbolic is None:
                raise NotSymbolicError(f"expected a graph for any size, found: {self.refusal}")
            record(symbolic.guards)
            return symbolic.graph
        if symbolic is not None:
            return symbolic.at(sizes, self)
        try:
            graph = self._make(sizes)
        except FoundError as error:
            if len(self._finding) >= MOST_FINDING:
                self._finding.clear()
            self._finding[numbers] = FoundError(str(error), error.graph)
            raise
        graph = replace(graph, rebuild=None, like=graph)
        known = self._first or (self._variants[0].graph if self._variants else None)
        if known is None:
            self._first = known = graph
        return replace(graph.sharing(known), rebuild=self, like=graph)
