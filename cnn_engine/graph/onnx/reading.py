"""Reads an ONNX file as a graph: its types, functions, sizes and nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ...errors import InputError, UnsupportedError, printable
from ...floating_point import usual_mode
from ..dims import Dim, Sizes
from ..graph import Graph
from ..graph import Value as _Value
from ..guards import TYPICAL_BATCH, example_numbers, recorded
from ..specialization import Specializations, SymbolicGraph
from ..stages import Found
from ..terms import lowest
from . import model as protobuf
from .importer import FoundError, Importer, build
from .input_dims import EXAMPLE, EXAMPLES, decided_otherwise, dims_of, example, text_of, usual_names

#: Characters of an error: names in a file may be of any length.
LONGEST_MESSAGE = 4000

#: What local functions may grow to when they are written out.
MOST_NODES = 200_000


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


@dataclass(frozen=True)
class _Open:
    """An input of which not even the number of dimensions is known."""

    name: str


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
        self.source, self.folder, self.shapes = source, folder, shapes
        self.constants: dict[str, np.ndarray] = {}
        self.metadata = _metadata(model)
        self.opset = self._opset(model)
        self.domains = {entry.domain: entry.version for entry in model.opset_import}
        self.model = self._without_functions(model)
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
        self._check_names(constants)
        for proto in self.protos.input:
            if proto.name in constants:
                self.constants[proto.name] = self._constant(proto, constants[proto.name])

    def _opset(self, model) -> int:
        versions = {entry.domain: entry.version for entry in model.opset_import}
        opset = versions.get("", versions.get("ai.onnx", 1))
        if not protobuf.OLDEST_OPSET <= opset <= protobuf.NEWEST_OPSET:
            raise UnsupportedError(
                f"{self.source}: expected an opset from {protobuf.OLDEST_OPSET} to "
                f"{protobuf.NEWEST_OPSET}, found {opset}"
            )
        return opset

    def _without_functions(self, model):
        """Returns ``model`` with its local functions written out, where that stays of bounded size."""
        if not model.functions:
            return model
        bodies = {(f.domain, f.name): f.node for f in model.functions}
        sizes: dict[tuple[str, str], int] = {}

        def size(nodes, above: tuple) -> int:
            total = 0
            for node in nodes:
                key = (node.domain, node.op_type)
                if key not in bodies:
                    total += 1
                elif key in above:
                    raise InputError(
                        f"{self.source}: expected functions that do not call themselves, found {key[1]!r}"
                    )
                else:
                    if key not in sizes:
                        if len(above) > 64:
                            raise InputError(
                                f"{self.source}: expected functions in up to 64 levels"
                            )
                        sizes[key] = size(bodies[key], (*above, key))
                    total += sizes[key]
            if total > MOST_NODES:
                raise InputError(
                    f"{self.source}: expected functions that grow to up to {MOST_NODES} nodes, "
                    "found more"
                )
            return total

        size(model.graph.node, ())
        from onnx import inliner

        try:
            return inliner.inline_local_functions(model)
        except Exception as error:  # ONNX's own C++, on functions that are not sound
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{self.source}: its functions cannot be written out: {reason}"
            ) from None

    def _constant(self, proto, given: Any) -> np.ndarray:
        """Returns what ``constants`` says of an input, in the type and shape that the file states."""
        dims, dtype = self._type(proto)
        where = f"{self.source}: constants: {proto.name!r}"
        try:
            found = np.asarray(given)
            array = found.astype("float32" if dtype == "bfloat16" else dtype)
            exact = found.dtype.kind in "biuf" and (
                np.array_equal(array, found) or array.dtype.kind == found.dtype.kind == "f"
            )
        except (TypeError, ValueError, OverflowError):
            exact = False
        if not exact:
            raise InputError(f"{where}: expected {dtype}, found {_short(given)}")
        if (
            dims is not None
            and array.size == 1
            and all(d == 1 or not isinstance(d, int) for d in dims)
        ):
            array = array.reshape([1] * len(dims))  # a number, where the file has a row of one
        if dims is not None and (
            len(dims) != array.ndim
            or any(isinstance(d, int) and d != n for d, n in zip(dims, array.shape, strict=True))
        ):
            raise InputError(f"{where}: expected shape {text_of(dims)}, found {list(array.shape)}")
        return array

    def _check_names(self, constants: Mapping[str, Any]) -> None:
        names = [i.name for i in self.protos.input if i.name not in self.initializers]
        if "" in names or len(set(names)) != len(names):
            raise InputError(f"{self.source}: expected inputs of unique names, found {names[:16]}")
        for given, what in ((self.shapes, "input_shape"), (constants, "constants")):
            unknown = [name for name in given if name not in names]
            if unknown:
                raise InputError(
                    f"{self.source}: {what}: expected inputs of the model ({', '.join(names[:16])}), "
                    f"found {unknown[0]!r}"
                )

    def stated(self) -> tuple[list[_Value | _Open], tuple[str, ...], int | None]:
        """Returns the inputs with symbols for open dimensions, the names of those with a batch, and it.

        The batch is None where nothing says how many.
        """
        types = {
            proto.name: self._type(proto)
            for proto in self.protos.input
            if proto.name not in self.initializers and proto.name not in self.constants
        }
        given = {name: self._given(name, known) for name, (known, _) in types.items()}
        # The first open dimension 0 is the batch's, and so is every dimension of its name.
        symbols = [
            known[0] for known, _ in types.values() if known and not isinstance(known[0], int)
        ]
        symbol = symbols[0] if symbols else None
        batched = [
            name for name, (known, _) in types.items()
            if known and not isinstance(known[0], int) and known[0] in (None, symbol)
        ]  # fmt: skip
        sizes = {given[name][0] for name in batched if isinstance(given[name][0], int)}
        if len(sizes) > 1:  # they share no batch: each stays as it is given
            batched = [name for name in batched if not isinstance(given[name][0], int)]
        batch = sizes.pop() if len(sizes) == 1 else None
        # A symbol that one input's shape fixes is fixed in all.
        fixed = {
            dim: size
            for name, (known, _) in types.items()
            for dim, size in zip(known or (), given[name] or (), strict=False)
            if isinstance(dim, str) and dim != symbol and isinstance(size, int)
        }
        taken = {dim for dims in given.values() for dim in dims or () if isinstance(dim, str)}
        found: list[_Value | _Open] = []
        for name, (_, dtype) in types.items():
            if given[name] is None:
                found.append(_Open(name))
                continue
            shape: list[int | Dim] = []
            usual = usual_names(given[name])
            for axis, dim in enumerate(given[name]):
                if name in batched and axis == 0:
                    dim = symbol or "batch"
                elif isinstance(dim, str):
                    dim = fixed.get(dim, dim)
                elif dim is None:
                    dim = usual[axis] if usual[axis] not in taken else f"{name}.{usual[axis]}"
                    taken.add(dim)
                shape.append(Dim.symbol(dim) if isinstance(dim, str) else dim)
            found.append(_Value(name, tuple(shape), "float32" if dtype == "bfloat16" else dtype))
        return found, tuple(batched), batch

    def first(self, batch: int | None) -> Graph:
        """Returns the graph of sizes that the model can have: those that are given, or examples.

        Args:
            batch: None: what ``input_shape`` says of it, else 1.
        """
        if isinstance(batch, int) and batch < 0:
            raise InputError(f"batch: expected at least 0, found {batch}")
        inputs, batched, given = self.stated()
        batch = (1 if given is None else given) if batch is None else batch
        numbers: dict[str, int] = {}
        symbol = None
        for value in inputs:
            if isinstance(value, _Open):
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
            if not numbers or any(isinstance(value, _Open) for value in inputs):
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
        inputs = [value for value in self.stated()[0] if isinstance(value, _Value)]
        if finds and first is not None:
            if isinstance(first, UnsupportedError):
                raise first
            if _finds(met.keys() - fixed):
                raise UnsupportedError(
                    f"{first}: expected numbers of found elements that fit, found none that do"
                )
            raise first
        raise self._shapes_wanted(
            [v for v in inputs if any(isinstance(d, Dim) for d in v.shape)], first
        )

    def _type(self, proto) -> tuple[list[int | str | None] | None, str]:
        """Returns the dimensions and the type of elements that the file states of an input."""
        where = f"{self.source}: input {proto.name!r}"
        if not proto.type.HasField("tensor_type"):
            kind = proto.type.WhichOneof("value") or "no type"
            raise UnsupportedError(f"{where}: expected a tensor, found {kind}")
        try:
            dtype = protobuf.dtype_name(proto.type.tensor_type.elem_type, True)
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error} are not supported") from None
        return dims_of(proto.type.tensor_type), dtype

    def _given(
        self, name: str, dims: list[int | str | None] | None
    ) -> list[int | str | None] | None:
        """Returns ``dims`` with what ``input_shape`` says of them; it may leave some open, as None."""
        given = self.shapes.get(name)
        if given is None:
            return dims
        sizes = [None if size is None else int(size) for size in given]
        fits = dims is None or (
            len(dims) == len(sizes)
            and all(
                d == g or g is None or not isinstance(d, int)
                for d, g in zip(dims, sizes, strict=True)
            )
        )
        if not fits or min((size for size in sizes if size is not None), default=0) < 0:
            raise InputError(
                f"{self.source}: input {name!r}: input_shape: expected a shape for {text_of(dims)}, "
                f"found {text_of(sizes)}"
            )
        if dims is None:
            return sizes
        return [d if g is None else g for d, g in zip(dims, sizes, strict=True)]

    def graph(self, sizes: Sizes, finds: bool = False) -> Graph:
        """Returns the graph for these sizes; of symbolic ones with their symbols in its shapes.

        Args:
            finds: whether the model finds numbers while it runs: see :attr:`Graph.found`.

        Raises:
            FoundError: it does, and was not said to.
        """
        importer = Importer(self.source, self.folder, self.opset, self.domains, finds)
        inputs, batched, _ = self.stated()
        scope: dict[str, str] = {}
        for value in inputs:
            if isinstance(value, _Open):
                importer.unknown[value.name] = frozenset((value.name,))
            else:
                shape = sizes.resolve(value.shape)
                scope |= importer.define_input(replace(value, shape=shape))
        for name, array in {**self.initializers, **self.constants}.items():
            importer.define_constant(name, array)
        for proto in self.protos.value_info:
            self._declare(proto, importer)
        importer.run(self.protos.node, scope)
        # A tensor that is named twice is one output: callers get outputs by name.
        outputs = list(dict.fromkeys(proto.name for proto in self.protos.output))
        for name in outputs:
            if name not in importer.values and name not in importer.unknown:
                raise InputError(f"{self.source}: output {name!r}: no node makes it")
        if not outputs:
            raise InputError(f"{self.source}: expected at least one output, found none")
        importer.refuse_problems()
        if left := [value for value in inputs if isinstance(value, _Open)]:
            raise self._shapes_wanted(left)
        importer.finish_outputs(
            {
                proto.name: protobuf.DTYPES.get(proto.type.tensor_type.elem_type)
                for proto in self.protos.output
            }
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

    def _shapes_wanted(
        self, left: Sequence[_Value | _Open], why: InputError | None = None
    ) -> InputError:
        """Returns the error that asks for the shapes of inputs, with a shape that would do for each."""
        dims = {
            value.name: None if isinstance(value, _Open) else list(value.shape)
            for value in left[:16]
        }
        shapes = {name: example(known) for name, known in dims.items()}
        found = ", ".join(f"{name!r} {text_of(known)}" for name, known in dims.items())
        options = " ".join(
            f"--input-shape {name}={','.join(map(str, shape))}" for name, shape in shapes.items()
        )
        python = ", ".join(f"{name!r}: {shape}" for name, shape in shapes.items())
        reason = "" if why is None else f" ({why})"
        return InputError(
            f"{self.source}: inputs: expected dimensions that the model can have, found {found}{reason}: "
            f"give shapes, such as {options} (input_shape={{{python}}})"
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


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:60]}..."
