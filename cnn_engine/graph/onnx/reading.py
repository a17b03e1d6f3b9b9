"""Reads an ONNX file as a graph: its types, functions, sizes and nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ...errors import InputError, UnsupportedError, printable
from ...floating_point import usual_mode
from ..dims import Dim, Sizes
from ..graph import Graph, Value
from ..guards import TYPICAL_BATCH, example_numbers, recorded
from ..specialization import FoundError, Specializations, SymbolicGraph
from ..stages import Found
from ..terms import lowest
from . import local_functions
from . import model as protobuf
from .importer import Importer
from .input_dims import EXAMPLE, EXAMPLES, decided_otherwise, dims_of, usual_names
from .inputs import Inputs, OpenInput
from .result import build, finish_outputs

#: Characters of an error: names in a file may be of any length.
LONGEST_MESSAGE = 4000


@usual_mode()
def load(
    source: str | os.PathLike | bytes | object,
    *,
    batch: int | None = None,
    input_shape: Mapping[str, Sequence[int | None]] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Graph:
    """Reads an ONNX model.

    Nodes whose inputs are constants are computed while loading, shape arithmetic among them.

    Args:
        source: a path, a model's bytes or an ``onnx.ModelProto``.
        batch: for inputs whose first dimension the model leaves open; None: what ``input_shape`` says of
            them, else 1. The graph can be made for another one by :meth:`Graph.with_batch`.
        input_shape: input -> its shape, which fixes dimensions that the model leaves open; the batch can
            still be another. A dimension of None is as the file has it. What stays open has a size that the
            model can be run at, and the graph can be made for others by :meth:`Graph.with_sizes`.
        constants: input -> its value, for models that take a shape, an axis, a rate or a flag as an input:
            an array, a number or lists of numbers. These inputs are no inputs of the graph.

    Raises:
        InputError: the file cannot be read, or is at fault: one line that says how.
        UnsupportedNodesError: the engine lacks some of its operators; names all of them.
    """
    try:
        model, name, folder = protobuf.read(source)
        reader = _Reader(
            model, name, folder, dict(input_shape or {}), dict(constants or {}), model is not source
        )
        return reader.first(batch)
    except UnicodeDecodeError as error:  # protobuf decodes names when they are asked for
        raise InputError(
            f"model: expected names in UTF-8, found the bytes {error.object!r}"[:200]
        ) from None
    except InputError as error:
        error.args = (_one_line(str(error)),)
        raise


def _one_line(message: str) -> str:
    """Returns ``message`` with what would break the line written as escapes: names come from the file."""
    line = printable(message)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."


#: How often other sizes are tried before a model is refused.
_TRIALS = 24
#: Of these, as many may end at what the engine does not support, where examples of what is found decide.
_REFUSALS = 3


class _Reader:
    """A model that has been parsed, and makes graphs for one batch after another."""

    def __init__(
        self,
        model,
        source: str,
        folder: Path | None,
        shapes: dict[str, Sequence[int | None]],
        constants: dict[str, Any],
        own: bool,
    ) -> None:
        self.source, self.folder = source, folder
        self.metadata = _metadata(model)
        self.opset = self._opset(model)
        self.domains = {entry.domain: entry.version for entry in model.opset_import}
        self.model = local_functions.written_out(model, source)
        self.protos = self.model.graph
        for named in (*self.protos.input, *self.protos.output, *self.protos.initializer):
            protobuf.check_text(named.name)
        self.initializers: dict[str, np.ndarray] = {}
        for tensor in self.protos.initializer:
            if not tensor.name or tensor.name in self.initializers:
                raise InputError(
                    f"{source}: expected initializers of unique names, found {tensor.name!r}"
                )
            try:
                self.initializers[tensor.name] = protobuf.array(tensor, folder)
            except InputError as error:
                raise type(error)(f"{source}: {error}") from None
        if self.protos.sparse_initializer:
            raise UnsupportedError(f"{source}: sparse initializers are not supported")
        if own:  # a parsed message keeps its memory until it goes, and its weights are arrays now
            del self.protos.initializer[:]
            slim = type(self.model)()
            slim.CopyFrom(self.model)
            self.model, self.protos = slim, slim.graph
        self.inputs = Inputs(source, self.protos.input, self.initializers, shapes, constants)

    def _opset(self, model) -> int:
        versions = {entry.domain: entry.version for entry in model.opset_import}
        opset = versions.get("", versions.get("ai.onnx", 1))
        if not protobuf.OLDEST_OPSET <= opset <= protobuf.NEWEST_OPSET:
            raise UnsupportedError(
                f"{self.source}: expected an opset from {protobuf.OLDEST_OPSET} to "
                f"{protobuf.NEWEST_OPSET}, found {opset}"
            )
        return opset

    def first(self, batch: int | None) -> Graph:
        """Returns the graph of sizes that the model can have: those that are given, or examples.

        Args:
            batch: None: what ``input_shape`` says of it, else 1.
        """
        if isinstance(batch, int) and batch < 0:
            raise InputError(f"batch: expected at least 0, found {batch}")
        inputs, batched, given = self.inputs.stated()
        batch = (1 if given is None else given) if batch is None else batch
        numbers: dict[str, int] = {}
        symbol = None
        for value in inputs:
            if isinstance(value, OpenInput):
                continue
            usual = usual_names(value.shape)
            for axis, dim in enumerate(value.shape):
                if isinstance(dim, Dim):
                    (named,) = dim.symbols
                    if value.name in batched and axis == 0:
                        symbol, numbers[named] = named, batch
                    else:
                        numbers.setdefault(named, EXAMPLES.get(usual[axis], EXAMPLE))
        sizes = Sizes.of(numbers, symbol)
        try:
            if not numbers or any(isinstance(value, OpenInput) for value in inputs):
                return self.graph(sizes)
            if len(numbers) == (symbol is not None):
                return Specializations(self.graph)(sizes)
            sizes, variants = self._possible(sizes)
            return Specializations(self.graph, variants=variants)(sizes)
        except FoundError:
            return self.found(sizes).example()

    def found(self, sizes: Sizes, known: Mapping[str, int] = MappingProxyType({})) -> Found:
        """Returns the graph of a model that finds numbers while it runs.

        Args:
            sizes: of all open dimensions, and examples of what is found.
            known: symbol -> its number, which is no example.
        """
        sizes = sizes.updated(known)
        _, (variant,) = self._possible(sizes, finds=True, fixed=frozenset(known))
        at = partial(_found_at, self, sizes)
        guards = (*sizes.zero_guards(), *variant.guards)
        return replace(variant.graph.found, guards=guards, at=at)

    def _possible(
        self, sizes: Sizes, finds: bool = False, fixed: frozenset[str] = frozenset()
    ) -> tuple[Sizes, tuple[SymbolicGraph, ...]]:
        """Returns sizes that the model can have: these, or others where a check of its nodes fails.

        Args:
            finds: whether the model finds numbers while it runs.
            fixed: symbols of which no other numbers are tried.

        Returns:
            the sizes, and graphs with symbols that were made on the way.

        Raises:
            InputError: none were found; says what the first ones met.
            UnsupportedError: none were, of numbers that the model finds while it runs.
        """
        first: InputError | UnsupportedError | None = None
        tried, met = {sizes}, {}
        for trial in range(_TRIALS):
            usual = sizes if sizes.batch in fixed else sizes.with_batch(TYPICAL_BATCH)
            for wanted in dict.fromkeys((usual, sizes)):
                with recorded(wanted.numbers) as guards:
                    try:
                        graph = self.graph(wanted.as_symbols(), finds)
                    except (UnsupportedError, InputError) as error:
                        refuses = isinstance(error, UnsupportedError)
                        if refuses and (trial >= _REFUSALS or not _finds(example_numbers())):
                            raise first if isinstance(first, UnsupportedError) else error from None
                        first = first or error
                        met |= example_numbers()
                        continue
                return sizes, (SymbolicGraph(graph, tuple(guards.values())),)
            sizes = sizes.updated({**met, **dict(sizes.numbers)})
            decided = list(guards.values())
            sizes = decided_otherwise(decided, sizes, tried, fixed, elements_first=trial % 2 == 1)
            if sizes is None:
                break
            tried.add(sizes)
        inputs = [value for value in self.inputs.stated()[0] if isinstance(value, Value)]
        if finds and first is not None:
            if isinstance(first, UnsupportedError):
                raise first
            if _finds(met.keys() - fixed):
                raise UnsupportedError(
                    f"{first}: expected numbers of found elements that fit, found none that do"
                )
            raise first
        raise self.inputs.shapes_wanted(
            [v for v in inputs if any(isinstance(d, Dim) for d in v.shape)], first
        )

    def graph(self, sizes: Sizes, finds: bool = False) -> Graph:
        """Returns the graph for these sizes; of symbolic ones with their symbols in its shapes.

        Args:
            finds: whether the model finds numbers while it runs: see :attr:`Graph.found`.

        Raises:
            FoundError: it does, and was not said to.
        """
        importer = Importer(self.source, self.folder, self.opset, self.domains, finds)
        inputs, batched, _ = self.inputs.stated()
        scope: dict[str, str] = {}
        for value in inputs:
            if isinstance(value, OpenInput):
                importer.unknown[value.name] = frozenset((value.name,))
            else:
                shape = sizes.resolve(value.shape)
                scope |= importer.define_input(replace(value, shape=shape))
        for name, array in {**self.initializers, **self.inputs.constants}.items():
            importer.define_constant(name, array)
        for proto in self.protos.value_info:
            self._declare(proto, importer)
        try:
            importer.run(self.protos.node, scope)
        except FoundError as error:
            numbers = replace(sizes, symbolic=False)
            error.graph = lambda: self.found(numbers).example()
            raise
        # A tensor that is named twice is one output: callers get outputs by name.
        outputs = list(dict.fromkeys(proto.name for proto in self.protos.output))
        for name in outputs:
            if name not in importer.values and name not in importer.unknown:
                raise InputError(f"{self.source}: output {name!r}: no node makes it")
        if not outputs:
            raise InputError(f"{self.source}: expected at least one output, found none")
        importer.refuse_problems()
        if left := [value for value in inputs if isinstance(value, OpenInput)]:
            raise self.inputs.shapes_wanted(left)
        finish_outputs(
            importer,
            {
                proto.name: protobuf.DTYPES.get(proto.type.tensor_type.elem_type)
                for proto in self.protos.output
            },
        )
        title = Path(self.source).stem if self.folder else self.source
        open_shapes = {
            value.name: value.shape
            for value in inputs
            if any(isinstance(dim, Dim) for dim in value.shape)
        }
        values = [importer.values[value.name] for value in inputs]
        facts: dict[str, Any] = {
            "batched": batched, "open_shapes": open_shapes, "metadata": self.metadata,
        }  # fmt: skip
        if finds:
            facts |= {"at": sizes}
        graph = build(importer, title, values, outputs, **facts)
        return (
            replace(graph, found=_found(importer, graph, len(values)), like=graph)
            if finds
            else graph
        )

    def _declare(self, proto, importer: Importer) -> None:
        """Notes the shape that the file states of a tensor: what stands for it behind unsupported nodes."""
        if not proto.type.HasField("tensor_type"):
            return
        tensor = proto.type.tensor_type
        dims = dims_of(tensor)
        dtype = protobuf.DTYPES.get(tensor.elem_type)
        if dims is not None and dtype is not None and all(isinstance(d, int) for d in dims):
            importer.declared[proto.name] = (tuple(dims), dtype)


def _finds(symbols: Iterable[str]) -> bool:
    """Whether any is found while the graph runs."""
    return any(lowest(symbol) != 1 for symbol in symbols)


def _found(importer: Importer, graph: Graph, inputs: int) -> Found:
    """Returns what an import met that is found while its graph runs; guards are the caller's to add."""
    computed = {
        value.name: (importer.constants.expressions[value.name], value.dtype)
        for value in graph.inputs[inputs:]
    }
    decided = {
        name: importer.decided_by[name] for name in graph.outputs if name in importer.decided_by
    }
    return Found(
        replace(graph, like=graph), inputs, (), example_numbers(), importer.read, computed,
        {**decided, **importer.node_decided_by}, None,
    )  # fmt: skip


def _found_at(reader: _Reader, sizes: Sizes, known: Mapping[str, int]) -> Found:
    return reader.found(sizes, known)


def _metadata(model) -> dict[str, str]:
    """Returns the file's metadata; entries that are no text are left out, since no graph depends on them."""
    pairs = ((entry.key, entry.value) for entry in model.metadata_props)
    return {key: value for key, value in pairs if isinstance(key, str) and isinstance(value, str)}
