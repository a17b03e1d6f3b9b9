"""One ONNX node as its converter sees it: attributes, inputs, and the nodes it becomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InputError
from ...operators import KINDS
from ...operators.operator import Operator, Value
from ..dims import Dim
from ..guards import has_number
from ..terms import found_dimension, found_element
from . import model as protobuf
from .converters import CONVERTERS
from .input_dims import EXAMPLE
from .refusal import Refusal

if TYPE_CHECKING:
    from .importer import Importer

#: The records by their classes' names, which are often ONNX's names.
RECORDS = {record.__name__: record for record in KINDS.values()}
#: Types of a record's fields that an attribute is read into, or a list of them into a tuple.
TYPES = {"int": int, "bool": int, "float": float, "str": str}
#: Operators whose outputs are not the same from run to run.
RANDOM = (
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
)  # fmt: skip


class Call:
    """One ONNX node in the hands of a converter.

    Attributes:
        operator, name: of the node; every node has a unique name here.
        domain: of the operator; ``""`` is ONNX's own.
        opset: the opset of its domain.
        scope: name in the file -> name in the graph, inside functions and branches.
    """

    def __init__(self, importer: Importer, proto, name: str, scope: Mapping[str, str]) -> None:
        self._importer, self.proto, self.scope = importer, proto, scope
        self.operator, self.name = proto.op_type, name
        self.domain = "" if proto.domain == "ai.onnx" else proto.domain
        self.opset = importer.opset
        # Inside a function an input may stand for one that is absent outside: "".
        self.inputs = [(scope.get(i, i) or None) if i else None for i in proto.input]
        self.outputs = [scope.get(o, o) if o else None for o in proto.output]
        self._attributes = {a.name: a for a in proto.attribute}
        self._read: set[str] = set()
        self._emitted = 0

    # -- what the node says ----------------------------------------------------------------------

    def attribute(self, name: str, default=None):
        """Returns an attribute: int, float, str, a list of them, or an array; ``default`` where absent."""
        self._read.add(name)
        proto = self._attributes.get(name)
        if proto is None:
            return default
        kinds = {1: "f", 2: "i", 3: "s", 4: "t", 6: "floats", 7: "ints", 8: "strings"}
        if proto.type not in kinds or proto.ref_attr_name:
            raise Refusal(name, "its kind of attribute is not known")
        value = getattr(proto, kinds[proto.type])
        if proto.type == 3:
            return value.decode("utf-8", "replace")
        if proto.type == 4:
            return protobuf.array(value, self._importer.folder)
        return list(value) if proto.type in (6, 7, 8) else value

    def integers(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...] | None:
        """Returns an attribute that is a list of whole numbers."""
        value = self.attribute(name)
        if value is None:
            return None if default is None else tuple(default)
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise Refusal(name, f"expected whole numbers, found {value!r}")
        return tuple(value)

    def number(self, name: str, default):
        """Returns an attribute that is one number, of ``default``'s type."""
        value = self.attribute(name, default)
        if not isinstance(value, (int, float)):
            raise Refusal(name, f"expected a number, found {str(value)[:40]!r}")
        return type(default)(value)

    def text(self, name: str, default: str) -> str:
        """Returns an attribute that is a word."""
        value = self.attribute(name, default)
        if not isinstance(value, str):
            raise Refusal(name, f"expected a word, found {str(value)[:40]!r}")
        return value

    def body(self, name: str):
        """Returns an attribute that is a graph: a branch."""
        self._read.add(name)
        proto = self._attributes.get(name)
        if proto is None or proto.type != 5:
            raise InputError(
                f"{name}: expected a graph, found {'none' if proto is None else 'another kind'}"
            )
        return proto.g

    def initialize(self, body) -> dict[str, str]:
        """Makes the initializers of ``body`` constants; returns name -> name in the graph."""
        return self._importer.initialize(self, body)

    def inline(self, body, known: Mapping[str, str], prefix: str = "") -> list[str]:
        """Puts the nodes of ``body`` in the node's place; returns its outputs' names in the graph.

        Args:
            known: the body's inputs and initializers -> names in the graph.
            prefix: of the nodes' names, after the node's own.
        """
        return self._importer.inline(self, body, known, f"{self.name}/{prefix}")

    def check_written_out(self, more: int) -> None:
        """Refuses to write out so many nodes more of bodies where they would be too many."""
        self._importer.check_written_out(more)

    def has_attribute(self, name: str) -> bool:
        return name in self._attributes

    def refuse_others(self, *known: str) -> None:
        """Refuses attributes that were neither read nor are among ``known``."""
        for name in self._attributes:
            if name not in self._read and name not in known:
                raise Refusal(name, "the attribute is not known")

    # -- its inputs ------------------------------------------------------------------------------

    def has(self, index: int) -> bool:
        """Whether input ``index`` is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def input(self, index: int) -> str:
        """Returns the name of input ``index``, which must be given."""
        if not self.has(index):
            raise InputError(f"expected an input {index}, found none")
        return self.inputs[index]

    def value(self, index: int) -> Value:
        """Returns the shape and type of input ``index``."""
        return self._importer.values[self.input(index)]

    def value_of(self, name: str) -> Value:
        """Returns the shape and type of a tensor by name."""
        return self._importer.values[name]

    def type_of(self, index: int) -> str:
        """Returns the type of input ``index`` as the file has it."""
        name = self.input(index)
        return self._importer.narrow.get(name, self._importer.values[name].dtype)

    def is_constant(self, index: int) -> bool:
        return self.has(index) and self.inputs[index] in self._importer.constants

    def is_dimension(self, index: int) -> bool:
        """Whether input ``index`` has whole numbers among its elements that are not known yet."""
        if not self.has(index):
            return False
        name = self.inputs[index]
        importer = self._importer
        return name in importer.constants.expressions or (
            name not in importer.constants and importer.may_be_found(name, ("int32", "int64"))
        )

    def is_known(self, name: str) -> bool:
        """Whether a tensor is known while loading."""
        return name in self._importer.constants

    def was_found(self, name: str) -> bool:
        """Whether a tensor of one element was found while the graph ran, so that no example is needed."""
        return has_number(found_element(name, 0))

    def constant(self, index: int, what: str | None, why: str = "") -> np.ndarray:
        """Returns input ``index``, which must be known while loading.

        Args:
            what: the attribute or input, as a refusal names it.
            why: what a refusal says of an input that is not known; empty: that it must be.

        Raises:
            Refusal: it depends on what the graph is given.
        """
        return self.constant_of(self.input(index), what, why)

    def constant_of(
        self, name: str, what: str | None, why: str = "", example: float = 1
    ) -> np.ndarray:
        """Returns a tensor by name, which must be known while loading: see :meth:`constant`.

        A tensor that is found while the graph runs has the numbers of an example, for which alone the graph
        is right then.

        Args:
            example: each element of it, where nothing says another.
        """
        found = self._importer.constants.get(name)
        if found is None:
            found = self._importer.found_array(name, example)
        if found is None:
            inputs = sorted(self._importer.sources.get(name, ()))
            reason = f"expected a constant, found {name!r}, which depends on the graph's inputs"
            if why:
                reason = f"{why}, which must be known while loading"
            if settings := self._importer.settings(inputs):
                given = " ".join(f"--constant {setting}=VALUE" for setting in settings)
                named = ", ".join(f"{setting!r}: ..." for setting in settings)
                reason += f" (give {given}, or constants={{{named}}})"
            raise Refusal(what, reason, inputs)
        return found

    def constant_integers(self, index: int, what: str) -> tuple[int, ...] | None:
        """Returns input ``index`` as whole numbers or dimensions, or None where it is not given."""
        if not self.has(index):
            return None
        name = self.inputs[index]
        found = self._importer.constants.expressions.get(name)
        if found is None and name not in self._importer.constants:
            found = self._importer.elements(name, ("int32", "int64"))
        if found is None:
            found = self.constant(index, what)
        if found.dtype.kind not in "iuO" or found.ndim > 1:
            raise InputError(
                f"{what}: expected a row of whole numbers, found {found.dtype} {list(found.shape)}"
            )
        if found.size > 4096:
            raise InputError(f"{what}: expected up to 4096 numbers, found {found.size}")
        return tuple(v if isinstance(v, Dim) else int(v) for v in found.reshape(-1))

    def constant_size(self, index: int, what: str) -> int | Dim:
        """Returns input ``index`` as one whole number or dimension."""
        self.input(index)
        found = self.constant_integers(index, what)
        if len(found) != 1:
            raise InputError(f"{what}: expected one number, found {len(found)}")
        return found[0]

    def constant_number(self, index: int, what: str, default=None):
        """Returns input ``index`` as one number, or ``default`` where it is not given."""
        if not self.has(index):
            return default
        found = self.constant(index, what)
        if found.size != 1:
            raise InputError(f"{what}: expected one number, found {list(found.shape)}")
        return found.reshape(-1)[0].item()

    # -- what it becomes -------------------------------------------------------------------------

    def wants(self, index: int) -> bool:
        """Whether the node names its output ``index``."""
        return index < len(self.outputs) and self.outputs[index] is not None

    def output(self, index: int) -> str:
        """Returns the name of output ``index``; a new one where the node has none."""
        return self.outputs[index] if self.wants(index) else self.temporary()

    def temporary(self) -> str:
        """Returns a new name of a tensor."""
        return self._importer.fresh(f"{self.name}/")

    def emit(
        self, op: Operator, inputs: Sequence[str | None], outputs: Sequence[str] | None = None
    ) -> str:
        """Adds ``op`` to the graph, or its result where all inputs are constants; returns output 0's name.

        Args:
            outputs: names; None makes new ones.
        """
        return self._importer.emit(self, op, inputs, outputs)

    def finish(self, op: Operator, inputs: Sequence[str | None], count: int = 1) -> None:
        """Adds ``op`` with the node's own outputs, ``count`` of them."""
        self.emit(op, inputs, [self.output(index) for index in range(count)])

    def set_constant(self, array: np.ndarray, output: int | None = None) -> str:
        """Makes ``array`` a constant, output ``output`` or one with a new name; returns its name."""
        name = self.temporary() if output is None else self.output(output)
        self._importer.define_constant(name, array)
        return name

    def onnx(
        self,
        operator: str,
        inputs: Sequence[str | None],
        output: str | None = None,
        but: Collection[str] | None = None,
        **attributes: Any,
    ) -> str:
        """Adds the nodes of an operator of ONNX's own domain; returns the name of its first output.

        Args:
            output: that name; None makes a new one.
            but: takes over all of this node's attributes but these; None: none of them.
            attributes: others.
        """
        output = output or self.temporary()
        node = protobuf.package().helper.make_node(
            operator, [name or "" for name in inputs], [output], **attributes
        )
        if but is not None:
            node.attribute.extend(a for a in self.proto.attribute if a.name not in but)
            self._read.update(a.name for a in node.attribute)
        Call(self._importer, node, self.name, {}).convert()
        return output

    def found_dimension(self, axis: int):
        """Returns a dimension of output 0 that is found while the graph runs."""
        return self._importer.found(found_dimension(self.output(0), axis), EXAMPLE)

    def alias(self, source: str, output: int = 0) -> None:
        """Makes an output a copy of ``source``, for rewrites to drop."""
        self._importer.alias(self, source, self.output(output))

    def is_unknown(self, name: str) -> bool:
        """Whether a tensor comes from a node that was refused, so that nothing can be made of it."""
        return name in self._importer.unknown

    def lose(self, output: int, source: str) -> None:
        """Makes an output as unknown as ``source``."""
        self._importer.unknown[self.output(output)] = self._importer.unknown[source]

    def node_name(self) -> str:
        self._emitted += 1
        name = self.name if self._emitted == 1 else f"{self.name}/{self._emitted}"
        return self._importer.unique_node_name(name)

    # -- conversion ------------------------------------------------------------------------------

    def convert(self) -> None:
        """Converts the node by its converter, the record of its name, or ONNX's own definition of it."""
        converter = CONVERTERS.get((self.domain, self.operator))
        if converter is not None:
            converter(self)
        elif self.has_converter():
            self.finish(self._record(RECORDS[self.operator]), self.inputs)
        elif self.operator in RANDOM and not self.domain:
            raise Refusal(
                None, "random numbers are not supported: every run gives the same outputs"
            )
        elif not self._importer.expand(self):
            of = f" in the domain {self.domain!r}" if self.domain else ""
            raise Refusal(None, f"the operator is not supported{of}")

    def has_converter(self) -> bool:
        """Whether there is a converter of the operator, or a record of its name."""
        return (self.domain, self.operator) in CONVERTERS or (
            not self.domain and self.operator in RECORDS
        )

    def _record(self, record: type[Operator]) -> Operator:
        values = {}
        for field in fields(record):
            if field.name in self._attributes:
                value = self.attribute(field.name)
                kind = str(field.type)
                many = kind.startswith("tuple[")
                wanted = TYPES.get(kind.removeprefix("tuple[").removesuffix(", ...]"))
                fits = wanted is not None and isinstance(value, list) == many
                if not fits or not all(isinstance(v, wanted) for v in (value if many else [value])):
                    raise Refusal(field.name, f"expected {kind}, found {str(value)[:40]!r}")
                values[field.name] = {"bool": bool}.get(kind, tuple if many else wanted)(value)
        self.refuse_others()
        try:
            return record(**values)
        except TypeError as error:
            raise InputError(f"expected all attributes, found {list(values)} ({error})") from None
