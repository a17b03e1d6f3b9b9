"""A network as data: operators over named tensors, in order, with every shape known.

A :class:`Graph` is frozen and sound: what it names exists, is made before it is used, and fits. Rewrites
make new graphs through :meth:`Graph.replaced`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import InputError, expected
from ..locks import cached_property
from ..operators.operator import Cost, Operator, Value, output_value
from .dims import BATCH, Dim, Sizes
from .mapped import check

__all__ = ["Graph", "Node", "Note", "Operator", "Value"]


@dataclass(frozen=True)
class Node:
    """One use of an operator.

    Attributes:
        name: unique among the graph's nodes.
        op: the operator's record.
        inputs: names of tensors; None is an optional input that is absent.
        outputs: names of tensors that it alone makes.
        covers: names of the nodes that it stands for since rewrites, for reports.
    """

    name: str
    op: Operator
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    covers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """A change that a pass made, for reports.

    Attributes:
        what: the node that was there.
        into: what it became, or the node that it became part of.
        why: what allowed it.
    """

    what: str
    into: str
    why: str


@dataclass(frozen=True)
class Graph:
    """Operators in order over inputs and constants.

    Attributes:
        name: the graph's name in reports.
        inputs: what a caller gives.
        outputs: names of tensors that a caller gets; any tensor of the graph, each once.
        nodes: in an order in which they can run.
        constants: name -> array, such as weights; never written to.
        batched: names of the inputs whose dimension 0 is the batch.
        rebuild: returns the same graph for other sizes, where shapes alone cannot say it (a file's shape
            arithmetic has sizes folded into it); None where :meth:`with_sizes` can.
        notes: what rewrites have done so far.
        storage_dtype: value -> the type of its elements in memory, where that is not their own.
        open_shapes: input -> its shape with a :class:`~cnn_engine.graph.dims.Dim` where it is open, of inputs
            with other open dimensions than a batch.
        sized: the names of constants that were computed for this size alone.
        symbolic: the graph with symbols that this one was made of by putting numbers in, or None.
        like: a graph that has some of the nodes: what it knows of them is not found out again.
        metadata: what the file says beside its graph: key -> text.
        at: the sizes that it is for, where the shapes of inputs do not say them; None: they do.
        found: the graph with symbols, where some are found while it runs
            (:class:`~cnn_engine.graph.stages.Found`); this one has their numbers in an example.

    Raises:
        InputError: a name is used twice, a tensor is used before it is made, or shapes do not fit.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    batched: tuple[str, ...] = ()
    rebuild: Callable[[Sizes], Graph] | None = field(default=None, compare=False, repr=False)
    notes: tuple[Note, ...] = field(default=(), compare=False, repr=False)
    storage_dtype: Mapping[str, str] = field(default_factory=dict)
    open_shapes: Mapping[str, tuple[int | Dim, ...]] = field(default_factory=dict, compare=False)
    sized: frozenset[str] = field(default=frozenset(), compare=False)
    symbolic: Graph | None = field(default=None, compare=False, repr=False)
    like: Graph | None = field(default=None, compare=False, repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    at: Sizes | None = field(default=None, compare=False, repr=False)
    found: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", MappingProxyType(dict(self.constants)))
        object.__setattr__(self, "storage_dtype", MappingProxyType(dict(self.storage_dtype)))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        object.__setattr__(self, "open_shapes", MappingProxyType(dict(self.open_shapes)))
        _ = self.values  # everything that can be wrong is found while the values are made
        object.__setattr__(self, "like", None)

    def __reduce__(self) -> tuple:
        """Pickles what the graph was made of; views of dictionaries cannot be pickled."""
        check(self.constants.values())
        return Graph, (
            self.name, self.inputs, self.outputs, self.nodes, dict(self.constants), self.batched,
            self.rebuild, self.notes, dict(self.storage_dtype), dict(self.open_shapes), self.sized,
            None, None, dict(self.metadata), self.at, self.found,
        )  # fmt: skip

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Every tensor: inputs, constants and the outputs of nodes, by name."""
        values: dict[str, Value] = {}

        def define(value: Value) -> None:
            if value.name in values:
                raise InputError(
                    f"{self.name}: expected every tensor made once, found {value.name!r} twice"
                )
            values[value.name] = value

        for value in self.inputs:
            define(value)
        known = {} if self.like is None else self.like.values
        makers = {} if self.like is None else self.like.producers
        for name, array in self.constants.items():
            value = known.get(name)
            given = value is not None and self.like.constants.get(name) is array
            define(value if given else Value(name, array.shape, array.dtype.name))
        names: set[str] = set()
        for node in self.nodes:
            if node.name in names:
                raise InputError(
                    f"{self.name}: expected unique names of nodes, found {node.name!r} twice"
                )
            names.add(node.name)
            if all(makers.get(name) is node for name in node.outputs) and all(
                values.get(name) is known[name] for name in node.inputs if name is not None
            ):
                for name in node.outputs:
                    storage_dtype = self.storage_dtype.get(name, "")
                    value = known[name]
                    define(
                        value
                        if value.storage_dtype == storage_dtype
                        else replace(value, storage_dtype=storage_dtype)
                    )
                continue
            for value in self._infer(node, values):
                define(value)
        for output in self.outputs:
            if output not in values:
                raise InputError(f"{self.name}: output {output!r}: no node makes it")
        if len(set(self.outputs)) != len(self.outputs):
            raise InputError(f"{self.name}: expected every output named once, found {self.outputs}")
        return MappingProxyType(values)

    def _infer(self, node: Node, values: Mapping[str, Value]) -> Iterable[Value]:
        where = f"{self.name}, node {node.name} ({node.op.kind})"
        for name in node.inputs:
            if name is not None and name not in values:
                raise InputError(f"{where}: input {name!r} is not made before it is used")
        inputs = [None if name is None else values[name] for name in node.inputs]
        try:
            found = node.op.infer(inputs)
        except InputError as error:
            raise type(error)(f"{where}: {error}") from None
        if len(found) != len(node.outputs):
            raise InputError(f"{where}: expected {len(found)} outputs, found {len(node.outputs)}")
        for name, inferred in zip(node.outputs, found, strict=True):
            yield output_value(name, inferred, self.storage_dtype.get(name, ""))

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Node by which each tensor is made, of those that are neither input nor constant."""
        return {output: node for node in self.nodes for output in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """Nodes that use each tensor, each node once, in order; empty for the unused."""
        found: dict[str, list[Node]] = {name: [] for name in self.values}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                if name is not None:
                    found[name].append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def reads(self) -> Mapping[str, int]:
        """Number of reads of each tensor: by every input of a node, and as an output of the graph."""
        return Counter(
            name for names in (*(n.inputs for n in self.nodes), self.outputs) for name in names
        )

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Node name -> its index in :attr:`nodes`."""
        return {node.name: place for place, node in enumerate(self.nodes)}

    def has(self, name: str) -> bool:
        """Whether a tensor or a node is called ``name``."""
        return name in self.values or name in self.positions

    def inputs_of(self, node: Node) -> tuple[Value | None, ...]:
        """Values that ``node`` reads."""
        return tuple(None if name is None else self.values[name] for name in node.inputs)

    def outputs_of(self, node: Node) -> tuple[Value, ...]:
        """Values that ``node`` makes."""
        return tuple(self.values[name] for name in node.outputs)

    @cached_property
    def is_quantized(self) -> bool:
        """Whether integers of the graph stand for floats; a table's do, too."""
        return any("quantize" in node.op.kind or node.op.kind == "lookup" for node in self.nodes)

    @cached_property
    def is_substituted(self) -> bool:
        """Whether the graph is :attr:`symbolic` with numbers put in, and nothing was rewritten since."""
        return False  # what puts numbers in says otherwise

    def fixed_shape(self, value: Value) -> tuple[int | None, ...]:
        """The shape of a value with None for its batch and other open dimensions."""
        known = None if self.symbolic is None else self.symbolic.values.get(value.name)
        shape = value.shape if known is None else known.shape
        first = (None,) if shape else ()
        return *first, *(None if isinstance(dim, Dim) else dim for dim in shape[1:])

    def cost_of(self, node: Node) -> Cost:
        """The least operations and bytes of one run of ``node``."""
        return node.op.cost(self.inputs_of(node), self.outputs_of(node))

    @property
    def batch(self) -> int | None:
        """Batch of the graph, or None where no input has one."""
        by_name = {value.name: value for value in self.inputs}
        return by_name[self.batched[0]].shape[0] if self.batched else None

    def replaced(
        self,
        nodes: Iterable[Node],
        by: Iterable[Node],
        constants: Mapping[str, np.ndarray] | None = None,
        notes: Iterable[Note] = (),
    ) -> Graph:
        """Returns the graph with ``by`` instead of ``nodes``.

        A node of ``by`` stands where the node of its name stood; others where the last of ``nodes`` did.
        Nodes that would then come before what they read move back. Constants that nothing uses any more are
        dropped.

        Args:
            nodes: nodes of this graph.
            by: what stands there instead; may be empty.
            constants: new ones.
            notes: what is done, and why.
        """
        removed = {node.name for node in nodes}
        new = {node.name: node for node in by}
        last = max((self.positions[name] for name in removed), default=len(self.nodes))
        order: list[Node] = []
        for place, node in enumerate(self.nodes):
            if place == last:  # what has no node of its name to stand for
                order += [made for name, made in new.items() if name not in removed]
            if node.name not in removed:
                order.append(node)
            elif node.name in new:
                order.append(new[node.name])
        if last == len(self.nodes):
            order += new.values()
        used = _sorted(order)
        return self._with(used, constants or {}, (*self.notes, *notes))

    def _with(
        self,
        nodes: Sequence[Node],
        constants: Mapping[str, np.ndarray],
        notes: tuple[Note, ...],
    ) -> Graph:
        used = {name for node in nodes for name in node.inputs} | set(self.outputs)
        kept = {
            name: array for name, array in {**self.constants, **constants}.items() if name in used
        }
        return replace(self, nodes=tuple(nodes), constants=kept, notes=notes, like=self)

    @cached_property
    def open_inputs(self) -> tuple[Value, ...]:
        """The inputs with a :class:`~cnn_engine.graph.dims.Dim` where a dimension is open."""
        return tuple(
            replace(value, shape=self.open_shapes[value.name])
            if value.name in self.open_shapes
            else replace(value, shape=(BATCH, *value.shape[1:]))
            if value.name in self.batched
            else value
            for value in self.inputs
        )

    @cached_property
    def sizes(self) -> Sizes:
        """The numbers of the inputs' open dimensions that the graph is made for."""
        if self.at is not None:
            return self.at
        return self.sizes_of({value.name: value.shape for value in self.inputs})

    def sizes_of(self, shapes: Mapping[str, Sequence[int]]) -> Sizes:
        """Returns the sizes at which the inputs have these shapes.

        Raises:
            InputError: they do not fit the graph; says which input, what was expected and found.
        """
        numbers: dict[str, int] = {}
        batch = None
        for value in self.open_inputs:
            shape = tuple(shapes[value.name])
            symbols = [next(iter(d.symbols)) if isinstance(d, Dim) else None for d in value.shape]
            if value.name in self.batched:
                batch = symbols[0]
            fits = len(shape) == len(symbols) and all(
                size == (dim if symbol is None else numbers.setdefault(symbol, size))
                for dim, symbol, size in zip(value.shape, symbols, shape, strict=True)
            )
            if not fits:
                wanted = [
                    dim if symbol is None else numbers.get(symbol, symbol)
                    for dim, symbol in zip(value.shape, symbols, strict=True)
                ]
                raise expected(
                    f"inputs: {value.name}", f"shape [{', '.join(map(str, wanted))}]", list(shape)
                )
        return Sizes.of(numbers, batch)

    def with_batch(self, batch: int) -> Graph:
        """Returns the graph for another batch.

        Raises:
            InputError: no input has a batch, or the graph cannot be made for this one.
        """
        if batch == self.batch:
            return self
        if not self.batched:
            raise InputError(
                f"{self.name}: batch: expected a graph made for any batch, found its inputs fixed"
            )
        if batch < 0:
            raise InputError(f"{self.name}: batch: expected at least 0, found {batch}")
        return self.with_sizes(self.sizes.with_batch(batch))

    def with_sizes(self, sizes: Sizes) -> Graph:
        """Returns the graph for other numbers of its open dimensions, or with symbols for them.

        Raises:
            InputError: the graph cannot be made for these.
        """
        if sizes == self.sizes:
            return self
        if self.rebuild is not None:
            return self.rebuild(sizes)
        inputs = tuple(
            replace(value, shape=sizes.resolve(value.shape)) for value in self.open_inputs
        )
        return replace(self, inputs=inputs)

    def sharing(self, other: Graph) -> Graph:
        """Returns the graph with ``other``'s arrays where a constant of the same name is equal to it."""
        constants = dict(self.constants)
        for name, array in constants.items():
            known = other.constants.get(name)
            if known is not None and known is not array and same_bits(known, array):
                constants[name] = known
        return replace(self, constants=constants, like=self)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have one type, one shape and the same bits, NaNs and zeros of either sign too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    words = f"u{a.dtype.itemsize}"  # compared where they are: weights may be hundreds of megabytes
    return np.array_equal(a.view(words), b.view(words))


def _sorted(nodes: Sequence[Node]) -> Sequence[Node]:
    """Returns ``nodes`` in an order in which they can run; each as early as its place in ``nodes`` says."""
    order = runnable_order([node.inputs for node in nodes], [node.outputs for node in nodes])
    return [nodes[place] for place in order]


def runnable_order(
    reads: Sequence[Iterable[str | None]], makes: Sequence[Iterable[str]]
) -> list[int]:
    """Returns the positions of nodes in an order in which they can run: a stable topological sort.

    Nodes of a circle, and those that wait for one, come last, as they were.

    Args:
        reads, makes: of each node, the names of its inputs and of its outputs.
    """
    maker = {output: index for index, outputs in enumerate(makes) for output in outputs}
    waits = [
        {maker[name] for name in inputs if name is not None and name in maker} for inputs in reads
    ]
    if all(all(index < place for index in wait) for place, wait in enumerate(waits)):
        return list(range(len(waits)))
    users: list[list[int]] = [[] for _ in waits]
    for place, wait in enumerate(waits):
        for index in wait:
            users[index].append(place)
    left = [len(wait) for wait in waits]
    ready = [place for place, count in enumerate(left) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for user in users[place]:
            left[user] -= 1
            if left[user] == 0:
                heapq.heappush(ready, user)
    return order + [place for place, count in enumerate(left) if count > 0]
