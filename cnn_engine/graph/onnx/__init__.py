"""ONNX files as graphs: :func:`load`.

The package ``onnx`` parses; everything that a file claims is checked here before it is believed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...errors import InputError, UnsupportedError
from ..graph import Graph
from ..graph import Value as _Value
from . import model as protobuf
from .importer import Importer, build
from .refusal import UnsupportedNode, UnsupportedNodesError

__all__ = ["UnsupportedNode", "UnsupportedNodesError", "load"]

#: Characters of an error: names in a file may be of any length.
LONGEST_MESSAGE = 4000

#: What local functions may grow to when they are written out.
MOST_NODES = 200_000


def load(
    source: str | os.PathLike | bytes | object,
    *,
    batch: int | None = None,
    input_shape: Mapping[str, tuple[int, ...]] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Graph:
    """Reads an ONNX model.

    Nodes whose inputs are constants are computed while loading, shape arithmetic among them.

    Args:
        source: a path, a model's bytes or an ``onnx.ModelProto``.
        batch: for inputs whose first dimension the model leaves open; 1 where it is not given. The graph
            can be made for another one by :meth:`Graph.with_batch`.
        input_shape: input -> its shape, for models that leave other dimensions open.
        constants: input -> its value, for models that take a shape or an axis as an input: these inputs are
            no inputs of the graph.

    Raises:
        InputError: the file cannot be read, or is at fault: one line that says how.
        UnsupportedNodesError: the engine lacks some of its operators; names all of them.
    """
    try:
        model, name, folder = protobuf.read(source)
        reader = _Reader(
            model, name, folder, dict(input_shape or {}), dict(constants or {}), model is not source
        )
        return reader.graph(1 if batch is None else batch)
    except UnicodeDecodeError as error:  # protobuf decodes names when they are asked for
        raise InputError(
            f"model: expected names in UTF-8, found the bytes {error.object!r}"[:200]
        ) from None
    except InputError as error:
        error.args = (_one_line(str(error)),)
        raise


def _one_line(message: str) -> str:
    """Returns ``message`` with what would break the line written as escapes: names come from the file."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."


class _Reader:
    """A model that has been parsed, and makes graphs for one batch after another."""

    def __init__(
        self,
        model,
        source: str,
        folder: Path | None,
        shapes: dict[str, tuple[int, ...]],
        constants: dict[str, np.ndarray],
        own: bool,
    ) -> None:
        self.source, self.folder, self.shapes, self.constants = source, folder, shapes, constants
        self.opset = self._opset(model)
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
        self._check_names()

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

    def _check_names(self) -> None:
        names = [i.name for i in self.protos.input if i.name not in self.initializers]
        if "" in names or len(set(names)) != len(names):
            raise InputError(f"{self.source}: expected inputs of unique names, found {names[:16]}")
        for given, what in ((self.shapes, "input_shape"), (self.constants, "constants")):
            unknown = [name for name in given if name not in names]
            if unknown:
                raise InputError(
                    f"{self.source}: {what}: expected inputs of the model ({', '.join(names[:16])}), "
                    f"found {unknown[0]!r}"
                )

    def inputs(self, batch: int, importer: Importer) -> tuple[list[_Value], tuple[str, ...]]:
        """Returns the graph's inputs, and the names of those that have a batch."""
        if batch < 1:
            raise InputError(f"batch: expected at least 1, found {batch}")
        found, batched, symbol = [], [], None
        for proto in self.protos.input:
            if proto.name in self.initializers or proto.name in self.constants:
                continue
            where = f"{self.source}: input {proto.name!r}"
            if not proto.type.HasField("tensor_type"):
                kind = proto.type.WhichOneof("value") or "no type"
                raise UnsupportedError(f"{where}: expected a tensor, found {kind}")
            tensor = proto.type.tensor_type
            try:
                dtype = protobuf.dtype_name(tensor.elem_type)
            except UnsupportedError as error:
                raise UnsupportedError(f"{where}: {error} are not supported") from None
            dims = _dims(tensor)
            if dims and not isinstance(dims[0], int) and proto.name not in self.shapes:
                symbol = dims[0] if symbol is None else symbol
                if dims[0] in (None, symbol):
                    batched.append(proto.name)
                    dims = [batch, *dims[1:]]
            if dims is not None and symbol is not None:
                dims = [batch if d == symbol else d for d in dims]
            found.append(_Value(proto.name, self._shape(where, proto.name, dims), dtype))
        return found, tuple(batched)

    def _shape(self, where: str, name: str, dims) -> tuple[int, ...]:
        given = self.shapes.get(name)
        if given is not None:
            given = tuple(int(size) for size in given)
            fits = dims is None or (
                len(dims) == len(given)
                and all(d == g or not isinstance(d, int) for d, g in zip(dims, given, strict=True))
            )
            if not fits or min(given, default=0) < 0:
                raise InputError(
                    f"{where}: expected a shape for {_text(dims)}, found {list(given)}"
                )
            return given
        if dims is None or not all(isinstance(d, int) for d in dims):
            found = "no shape" if dims is None else _text(dims)
            raise InputError(
                f"{where}: expected known dimensions beside the batch, found {found}: give its shape "
                f"(--input-shape {name}=1,3,224,224; input_shape={{{name!r}: (1, 3, 224, 224)}})"
            )
        if min(dims, default=0) < 0:
            raise InputError(f"{where}: expected dimensions of at least 0, found {list(dims)}")
        return tuple(dims)

    def graph(self, batch: int) -> Graph:
        """Returns the graph for ``batch``."""
        importer = Importer(self.source, self.folder, self.opset)
        inputs, batched = self.inputs(batch, importer)
        for value in inputs:
            importer.define(value, frozenset((value.name,)))
        for name, array in {**self.initializers, **self.constants}.items():
            importer.define_constant(name, np.asarray(array))
        for proto in self.protos.value_info:
            self._declare(proto, importer)
        importer.run(self.protos.node)
        # A tensor that is named twice is one output: callers get outputs by name.
        outputs = list(dict.fromkeys(proto.name for proto in self.protos.output))
        for name in outputs:
            if name not in importer.values and name not in importer.unknown:
                raise InputError(f"{self.source}: output {name!r}: no node makes it")
        if not outputs:
            raise InputError(f"{self.source}: expected at least one output, found none")
        title = Path(self.source).stem if self.folder else self.source
        return build(importer, title, inputs, outputs, batched=batched, rebuild=self.graph)

    def _declare(self, proto, importer: Importer) -> None:
        """Notes the shape that the file states of a tensor: what stands for it behind unsupported nodes."""
        if not proto.type.HasField("tensor_type"):
            return
        tensor = proto.type.tensor_type
        dims = _dims(tensor)
        dtype = protobuf.DTYPES.get(tensor.elem_type)
        if dims is not None and dtype is not None and all(isinstance(d, int) for d in dims):
            importer.declared[proto.name] = (tuple(dims), dtype)


def _dims(tensor) -> list[int | str | None] | None:
    """Returns a tensor type's dimensions: a number, or a name or None where it is open; None: no shape.

    A negative number is open too: some exporters write -1.
    """
    if not tensor.HasField("shape"):
        return None
    return [
        d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else (d.dim_param or None)
        for d in tensor.shape.dim
    ]


def _text(dims) -> str:
    if dims is None:
        return "any"
    return f"[{', '.join('?' if d is None else str(d) for d in dims)}]"
