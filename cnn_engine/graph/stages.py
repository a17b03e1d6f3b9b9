"""Graphs that find numbers while they run: how many boxes stay, which branch is taken.

Such a number is a symbol, as an open dimension is. A graph is cut into stages at what finds them: all nodes
of a stage depend on numbers alone that are known when it begins, so that each stage is planned as any graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from ..errors import InputError
from ..operators.data_dependent import DataDependent
from .dims import Dim, Sizes
from .form import Form
from .graph import Graph, Node, Value
from .guards import Guard, record, recorded
from .specialization import SymbolicGraph
from .terms import Evaluator, found_dimension, symbols_of


@dataclass(frozen=True)
class Found:
    """A graph with symbols, some of which are found while it runs.

    Attributes:
        graph: its inputs are a caller's, then the tensors of ``computed``.
        inputs: the number of the caller's.
        guards: what was decided while it was made.
        numbers: symbol -> its number in the example by which that was decided.
        read: tensor -> a symbol for each of its elements, which are read once it is made.
        computed: tensor -> expressions of symbols, and its type.
        decided_by: node or output -> symbols by which it was decided that it is there, beside those in its
            shapes.
        at: returns the graph as it is decided where some symbols are these numbers.
    """

    graph: Graph
    inputs: int
    guards: tuple[Guard, ...]
    numbers: Mapping[str, int]
    read: Mapping[str, np.ndarray]
    computed: Mapping[str, tuple[np.ndarray, str]]
    decided_by: Mapping[str, frozenset[str]]
    at: Callable[[Mapping[str, int]], Found]

    def __reduce__(self) -> tuple:
        """Pickles where it comes from: what is decided is decided again."""
        return _found_at, (self.at, dict(self.numbers))

    def example(self) -> Graph:
        """Returns the graph in the numbers of the example."""
        graph = self.graph
        names = {value.name for value in graph.inputs[: self.inputs]}
        sizes = Sizes.of(self.numbers, graph.sizes.batch)
        found = SymbolicGraph(graph, self.guards).at(sizes, lambda _: found)
        at = Evaluator(self.numbers)
        constants = {name: evaluated(*each, at) for name, each in self.computed.items()}
        return replace(
            found,
            inputs=found.inputs[: self.inputs],
            constants={**found.constants, **constants},
            open_shapes={name: s for name, s in graph.open_shapes.items() if name in names},
            rebuild=None,
            symbolic=None,
            at=None,
            found=self,
        )


def _found_at(at: Callable[[Mapping[str, int]], Found], numbers: Mapping[str, int]) -> Found:
    return at(numbers)


def evaluated(expressions: np.ndarray, dtype: str, at: Evaluator) -> np.ndarray:
    """Returns an array of whole numbers and expressions in numbers."""
    numbers = [at(item) if isinstance(item, Dim) else item for item in expressions.flat]
    return np.array(numbers, dtype).reshape(expressions.shape)


@dataclass(frozen=True)
class Stage:
    """A part of a graph that is planned as one.

    Attributes:
        graph: with symbols; None: there are no nodes.
        guards: that must hold, by symbols that are known when it begins.
        hosts: nodes that run after it, on the host, and find how much they make.
        is_last: whether the outputs are there when it is done.
        of: the graph that it is a stage of.
    """

    graph: Graph | None
    guards: tuple[Guard, ...]
    hosts: tuple[Node, ...]
    is_last: bool
    of: Found

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols that its plans depend on."""
        if self.graph is None:
            return frozenset()
        found: set[str] = set()
        for value in self.graph.values.values():
            found |= _symbols(value.shape)
        for node in self.graph.nodes:
            found |= _symbols(node.op)
        return frozenset(found)

    @property
    def signature(self) -> tuple:
        """A key that stages have in common which one engine runs."""
        hosts = self.hosts, self.is_last
        if self.graph is None:
            return hosts
        values = *self.graph.inputs, *map(self.graph.values.get, self.graph.outputs)
        return (
            *((value.name, value.dtype, len(value.shape)) for value in values),
            len(self.graph.inputs),
            tuple((node.name, node.op.kind, node.inputs, node.outputs) for node in self.hosts),
            self.is_last,
        )


def _symbols(value: Any) -> frozenset[str]:
    """Returns the symbols among the items and fields of a value."""
    if isinstance(value, Dim):
        return value.symbols
    if isinstance(value, tuple):
        return frozenset().union(*map(_symbols, value))
    if is_dataclass(value):
        return frozenset().union(*(_symbols(getattr(value, f.name)) for f in fields(value)))
    return frozenset()


class _Cut:
    """At which stage each node of a graph can run, by the numbers that are known then."""

    def __init__(self, found: Found, nodes: Sequence[Node], known: Collection[str]) -> None:
        self._found, self._known = found, known
        self._owners = {
            next(iter(symbol.symbols)): name
            for name, symbols in found.read.items()
            for symbol in symbols.flat
        }
        self._counts: dict[str, int] = {}  # symbol -> the stage from which on it is known
        # Tensor -> the first stage that can read it, and the first at whose begin the host can.
        self._levels: dict[str, tuple[int, int]] = {}
        self.stages: dict[str, int] = {}
        for node in nodes:
            self._place(node)

    def moment(self, symbols: Iterable[str]) -> int:
        """Returns the first stage at whose begin these symbols are known."""
        return max(map(self._moment, symbols), default=0)

    def _moment(self, symbol: str) -> int:
        owner = None if symbol in self._known else self._owners.get(symbol)
        return self._counts.get(symbol, 0) if owner is None else self.levels(owner)[1]

    def levels(self, name: str) -> tuple[int, int]:
        """Returns the first stage that can read a tensor, and the first at whose begin the host can."""
        computed = self._found.computed.get(name)
        if computed is None:
            return self._levels.get(name, (0, 0))
        level = self.moment(_symbols(tuple(computed[0].flat)))
        return level, level

    def _place(self, node: Node) -> None:
        graph = self._found.graph
        symbols = set(self._found.decided_by.get(node.name, ()))
        inputs = [self.levels(name) for name in node.inputs if name is not None]
        if isinstance(node.op, DataDependent):
            symbols -= _symbols(node.op)
            stage = max([self.moment(symbols), *(host for _, host in inputs)])
            self._counts.update(dict.fromkeys(_symbols(node.op), stage + 1))
            levels = stage + 1, stage + 1
        else:
            symbols |= _symbols(node.op)
            for value in graph.outputs_of(node):
                symbols |= _symbols(value.shape)
            stage = max([self.moment(symbols), *(level for level, _ in inputs)])
            levels = stage, stage + 1
        self.stages[node.name] = stage
        self._levels.update(dict.fromkeys(node.outputs, levels))

    def last(self) -> int:
        """Returns the last stage: nothing is decided after it."""
        outputs = self._found.graph.outputs
        decided = (self.moment(self._found.decided_by.get(name, ())) for name in outputs)
        return max([*self.stages.values(), *decided, *(self.levels(name)[0] for name in outputs)])


def cut(found: Found, made: Collection[str] = (), known: Collection[str] = ()) -> list[Stage]:
    """Returns the stages of a graph, in order.

    Args:
        made: tensors that there are already, from earlier stages.
        known: symbols that were found there.
    """
    graph = found.graph
    needed = {*graph.outputs}
    needed |= {
        name for name, row in found.read.items() if not all(s.symbols <= {*known} for s in row.flat)
    }
    # What was decided by how much a node makes is decided again, also where nothing reads that.
    deciding = frozenset().union(
        *(symbols_of(guard.terms) for guard in found.guards),
        *(_symbols(tuple(expressions.flat)) for expressions, _ in found.computed.values()),
        *found.decided_by.values(),
    ) - {*known}
    for node in graph.nodes:
        if isinstance(node.op, DataDependent) and not deciding.isdisjoint(_symbols(node.op)):
            needed |= {*node.outputs}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint({*node.outputs} - {*made}):
            nodes.append(node)
            needed.update(name for name in node.inputs if name is not None)
    nodes.reverse()
    places = _Cut(found, nodes, known)
    last = places.last()
    moments = [places.moment(symbols_of(guard.terms)) for guard in found.guards]
    every = nodes
    stages = []
    for index in range(last + 1):
        nodes = [node for node in every if places.stages[node.name] == index]
        hosts = tuple(node for node in nodes if isinstance(node.op, DataDependent))
        nodes = [node for node in nodes if not isinstance(node.op, DataDependent)]
        guards = tuple(
            guard for guard, moment in zip(found.guards, moments, strict=True) if moment <= index
        )
        with recorded(found.numbers):
            part = _part(found, nodes, every, index) if nodes else None
        stages.append(Stage(part, guards, hosts, index == last, found))
    return stages


def _part(found: Found, nodes: Sequence[Node], every: Sequence[Node], index: int) -> Graph:
    """Returns the graph of some of the nodes: what others read, or the host, it has as outputs."""
    graph = found.graph
    own = {node.name for node in nodes}
    made = {name for node in nodes for name in node.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name is not None)
    wanted = {name for node in every if node.name not in own for name in node.inputs}
    wanted |= {*graph.outputs, *found.read}
    inputs = tuple(graph.values[n] for n in read if n not in made and n not in graph.constants)
    return replace(
        graph,
        name=f"{graph.name}, stage {index + 1}",
        inputs=inputs,
        outputs=tuple(name for node in nodes for name in node.outputs if name in wanted),
        nodes=tuple(nodes),
        constants={name: graph.constants[name] for name in read if name in graph.constants},
        batched=(),
        open_shapes={v.name: v.shape for v in inputs if _symbols(v.shape)},
        notes=(),
        like=graph,
    )


class StageGraphs:
    """The graphs of a stage: called for its numbers, as :attr:`Graph.rebuild` is."""

    def __init__(self, stage: Stage) -> None:
        self.symbols = stage.symbols
        self._batch = stage.of.graph.sizes.batch
        self._variants: list[tuple[SymbolicGraph, Stage]] = []
        self.add(stage)

    def add(self, stage: Stage) -> None:
        """Takes a stage of the same form, for which other things were decided."""
        graph = stage.graph
        if self._variants:
            with recorded(stage.of.numbers):
                graph = graph.sharing(self._variants[0][0].graph)
        guards = tuple(g for g in stage.guards if symbols_of(g.terms) <= self.symbols)
        self._variants.append((SymbolicGraph(graph, guards), stage))

    def sizes(self, numbers: Mapping[str, int]) -> Sizes:
        """Returns the sizes of a pass."""
        batch = self._batch if self._batch in self.symbols else None
        return Sizes.of({symbol: numbers[symbol] for symbol in self.symbols}, batch)

    def stage(self, numbers: Mapping[str, int]) -> Stage | None:
        """Returns the stage as it is decided for these numbers, where that is known."""
        sizes = self.sizes(numbers)
        return next((stage for graph, stage in self._variants if graph.stands_for(sizes)), None)

    def __call__(self, sizes: Sizes) -> Graph:
        numbers = replace(sizes, symbolic=False)
        for variant, _ in self._variants:
            if variant.stands_for(numbers):
                if sizes.symbolic:
                    record(variant.guards)
                    return variant.graph
                return variant.at(sizes, self)
        raise InputError(f"{self._variants[0][0].graph.name}: expected other sizes, found {sizes}")


def rest_of(guards: Iterable[Guard], symbols: frozenset[str]) -> tuple[Guard, ...]:
    """Returns the guards that depend on others than these symbols."""
    return tuple(guard for guard in guards if not symbols_of(guard.terms) <= symbols)


def bound(found: Found, value: Value, array: np.ndarray) -> dict[str, int]:
    """Returns the numbers of symbols that an array of the host says: of its shape, and its elements."""
    numbers = {
        dim.own_symbol: size
        for dim, size in zip(value.shape, array.shape, strict=True)
        if isinstance(dim, Dim) and dim.own_symbol is not None
    }
    if value.name in found.read:
        bits = array
        if array.dtype.kind == "f":
            bits = array.view(f"i{array.dtype.itemsize}")
        for symbol, number in zip(found.read[value.name].flat, bits.reshape(-1), strict=True):
            numbers[next(iter(symbol.symbols))] = int(number)
    return numbers


def _as_open(value: Value, decided_by: Collection[str]) -> Value:
    """Returns an output with its dimensions open, where a branch or a number decided what they are."""
    if not decided_by:
        return value
    dims = (Dim.symbol(found_dimension(value.name, axis)) for axis in range(len(value.shape)))
    return replace(value, shape=tuple(dims))


class StagedModel:
    """A graph from a file that finds numbers while it runs, as a network of an engine.

    Attributes:
        name: the graph's.
        base: the graph in the numbers of an example.
        inputs, outputs: with symbols in the place of what is open, or found.
    """

    batch = 1
    any_batch = False

    def __init__(self, base: Graph) -> None:
        found: Found = base.found
        self.name, self.base, self.metadata = base.name, base, base.metadata
        self.inputs: tuple[Value, ...] = found.graph.inputs[: found.inputs]
        read = {next(iter(s.symbols)) for symbols in found.read.values() for s in symbols.flat}
        self.outputs = tuple(
            _as_open(found.graph.values[name], found.decided_by.get(name, frozenset()) & read)
            for name in found.graph.outputs
        )

    @property
    def form(self) -> Form:
        """Its form: all that is given goes in one pass."""
        base = self.base
        outputs = tuple(base.values[name] for name in base.outputs)
        return Form(base.inputs, outputs, 1, False, 1, {}, base.sizes_of)
