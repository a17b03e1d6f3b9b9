"""A walk over an ONNX graph in its order: each node becomes the engine's nodes, or constants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import InputError, UnsupportedError
from ...operators.cast import Cast
from ...operators.copy import Copy
from ...operators.operator import Operator, Value, output_value
from ..dims import Dim
from ..folding import fold, held, worth_folding
from ..graph import Node, Note, runnable_order
from ..guards import decisive, meet
from ..specialization import FoundError
from ..terms import found_element
from . import definitions, expressions
from . import model as protobuf
from .call import Call
from .refusal import Refusal, UnsupportedNode, UnsupportedNodesError

#: Elements of a tensor that are read while the graph runs: a shape's, a condition.
MOST_ELEMENTS = 64
#: Types of these; floats are known by their bits.
INTEGERS = ("bool", "int32", "int64")
READ = (*INTEGERS, "float32", "float64", "uint8")


def as_array(numbers: Sequence[int], dtype: str) -> np.ndarray:
    """Returns elements from the whole numbers that stand for them: floats by their bits."""
    if dtype.startswith("float"):
        return np.array(numbers, f"i{np.dtype(dtype).itemsize}").view(dtype)
    return np.array(numbers, dtype)


#: Nodes that branches and loops may be when they are written out, all of them together.
MOST_WRITTEN_OUT = 20_000


class Importer:
    """The state of one import."""

    def __init__(
        self,
        source: str,
        folder: Path | None,
        opset: int,
        domains: Mapping[str, int],
        finds: bool = False,
    ) -> None:
        """Makes an import of nothing yet.

        Args:
            opset: of ONNX's own domain.
            domains: others and their versions.
            finds: whether there may be numbers that are found while the graph runs; else
                :class:`FoundError` is raised where one is met.
        """
        self.finds = finds
        #: Tensor -> its elements that are found while the graph runs: symbols of :func:`.guards.meet`.
        self.read: dict[str, np.ndarray] = {}
        #: Tensor, or node -> symbols found while the graph runs by which it was decided.
        self.decided_by: dict[str, frozenset[str]] = {}
        self.node_decided_by: dict[str, frozenset[str]] = {}
        self._decisive: set[str] = set()
        self._makers: dict[str, Node] = {}
        self.source, self.folder, self.opset = source, folder, opset
        self.domains = dict(domains)
        self.values: dict[str, Value] = {}
        self.constants = expressions.Constants()
        self.nodes: list[Node] = []
        self.notes: list[Note] = []
        self.problems: list[UnsupportedNode] = []
        self.unknown: dict[str, frozenset[str]] = {}  # made by unsupported nodes; no shape is known
        self.sources: dict[str, frozenset[str]] = {}  # graph inputs that a tensor depends on
        self.declared: dict[str, tuple[tuple[int, ...], str]] = {}
        #: Tensor -> its type in the file, where it is computed in float32.
        self.narrow: dict[str, str] = {}
        #: Results of casts that round float32: kept where nothing but casts reads them.
        self.rounded: dict[str, str] = {}
        self._node_names: set[str] = set()
        self._counters: dict[str, int] = {}
        self.depth = 0
        self._written_out = 0

    # -- what is found while the graph runs ------------------------------------------------------

    def found(self, symbol: str, number: int) -> Dim:
        """Returns the dimension of a symbol that is found while the graph runs, ``number`` in an example.

        Raises:
            FoundError: the import is of a graph without such.
        """
        if not self.finds:
            raise FoundError(
                f"{self.source}: expected sizes at which the network finds no number while it runs, as at "
                f"those of its making; found others, which make it find {symbol}; give them as input_shape, "
                "or call Engine.run or Engine.predict"
            )
        meet(symbol, number)
        return Dim.symbol(symbol)

    def may_be_found(self, name: str, dtypes: Sequence[str]) -> bool:
        """Whether a tensor is small, of one of some types and not known: it may be read by the host."""
        value = self.values.get(name)
        return (
            value is not None
            and value.dtype in dtypes
            and not any(isinstance(size, Dim) for size in value.shape)
            and value.size <= MOST_ELEMENTS
        )

    def elements(self, name: str, dtypes: Sequence[str], example: float = 1) -> np.ndarray | None:
        """Returns a tensor's elements: numbers, expressions of dimensions, and symbols of elements to read.

        None: the tensor is too large, or of another type.

        Args:
            example: each of those to read, where nothing says another.
        """
        if name in self.constants:
            return self.constants.known(name)
        if not self.may_be_found(name, dtypes):
            return None
        if name in self.read:
            return self.read[name]
        value, node = self.values[name], self._makers.get(name)
        if node is not None and expressions.may_fold(node.op):
            arrays = [None if i is None else self.elements(i, INTEGERS) for i in node.inputs]
            if all(a is not None or i is None for a, i in zip(arrays, node.inputs, strict=True)):
                made = [self.values[output] for output in node.outputs]
                folded = expressions.fold(node.op, arrays, made)
                if folded is not None:
                    return folded[node.outputs.index(name)]
        found = np.empty(value.shape, object)
        bits = int(np.array(example, value.dtype).view(f"u{np.dtype(value.dtype).itemsize}"))
        for index in range(found.size):
            found.flat[index] = self.found(found_element(name, index), bits)
        self.read[name] = found
        return found

    def found_array(self, name: str, example: float = 1) -> np.ndarray | None:
        """Returns a tensor that is found while the graph runs in the numbers of the example, or None."""
        found = self.elements(name, READ, example)
        if found is None:
            return None
        value = self.values[name]
        return as_array([int(item) for item in found.flat], value.dtype).reshape(value.shape)

    def where(self, call: Call) -> str:
        return f"{self.source}, node {call.name} ({call.operator})"

    def fresh(self, prefix: str) -> str:
        """Returns a new name of a tensor, which depends on no node of another prefix."""
        name = None
        while name is None or name in self.values:
            self._counters[prefix] = number = self._counters.get(prefix, 0) + 1
            name = f"{prefix}{number}"
        return name

    def unique_node_name(self, name: str) -> str:
        found, number = name, 1
        while found in self._node_names:
            number += 1
            found = f"{name}#{number}"
        self._node_names.add(found)
        return found

    def define(self, value: Value, sources: frozenset[str] = frozenset()) -> None:
        if value.name in self.values or value.name in self.unknown:
            raise InputError(
                f"{self.source}: expected every tensor made once, found {value.name!r} twice"
            )
        if not protobuf.believable(value.shape):
            raise InputError(
                f"{self.source}: tensor {value.name!r}: expected at most 2^40 elements in 32 dimensions, "
                f"found {list(value.shape)[:33]}"
            )
        if value.dtype in protobuf.NARROW:
            self.narrow[value.name] = value.dtype
            value = replace(value, dtype="float32")
        self.values[value.name] = value
        self.sources[value.name] = sources
        if self._decisive:
            self.decided_by[value.name] = frozenset(self._decisive)

    def define_input(self, value: Value) -> dict[str, str]:
        """Makes ``value`` an input of the graph; returns the tensors that nodes read instead: name -> name.

        An input in float16 stays that, and is cast to float32 for the nodes.
        """
        sources = frozenset((value.name,))
        self.define(value, sources)
        if value.dtype != "float16":
            return {}
        self.values[value.name] = value
        wide = self.fresh(f"{value.name}/float32/")
        self.define(Value(wide, value.shape, "float16"), sources)
        self.add_cast(value.name, wide, "float32")
        return {value.name: wide}

    def add_cast(self, source: str, target: str, dtype: str) -> None:
        """Adds a node that makes a tensor another in another type."""
        name = self.unique_node_name(f"{target}/cast")
        self.nodes.append(Node(name, Cast(dtype), (source,), (target,), ()))

    def define_constant(self, name: str, array: np.ndarray, dtype: str = "int64") -> None:
        """Makes ``array`` a constant; of objects, dimensions among them, it stands for one of ``dtype``."""
        if array.dtype == object:
            self.define(Value(name, array.shape, dtype))
            self.constants.expressions[name] = array
            self.constants[name] = array
            return
        self.define(Value(name, array.shape, array.dtype.name))
        self.constants[name] = _widened(array) if array.dtype == np.float16 else array

    def settings(self, inputs: Sequence[str]) -> list[str]:
        """Returns ``inputs`` where they may be settings, which are numbers or rows of them; else none."""
        values = [self.values.get(name) for name in inputs]
        small = all(value is not None and len(value.shape) < 2 for value in values)
        return list(inputs) if small else []

    def refuse_problems(self) -> None:
        """Raises UnsupportedNodesError where nodes cannot be run: all of them."""
        if self.problems:
            raise UnsupportedNodesError(self.source, self.problems)

    # -- nodes -----------------------------------------------------------------------------------

    def run(
        self, protos: Sequence, scope: Mapping[str, str] | None = None, prefix: str = ""
    ) -> None:
        """Converts nodes in an order in which they can run; unsupported ones are collected.

        Args:
            scope: name in ``protos`` -> name in the graph, where these differ.
            prefix: of the nodes' names.
        """
        for proto in protos:
            protobuf.check_text(
                proto.op_type, proto.name, proto.domain, *proto.input, *proto.output
            )
        makes = [[name for name in proto.output if name] for proto in protos]
        for index in runnable_order([_reads(proto) for proto in protos], makes):
            proto = protos[index]
            name = prefix + _module(proto) + (proto.name or f"{proto.op_type}_{index}")
            call = Call(self, proto, name, scope or {})
            for needed in call.inputs:
                if needed is not None and needed not in self.values and needed not in self.unknown:
                    why = "no input, initializer or node makes it"
                    if any(needed in outputs for outputs in makes):
                        why = "the nodes that make it wait for this one (a circle)"
                    raise InputError(f"{self.where(call)}: input {needed!r}: {why}")
            self._convert(call)

    def initialize(self, call: Call, body) -> dict[str, str]:
        """Makes the initializers of ``body``, a node's GraphProto, constants; returns name -> name."""
        if body.sparse_initializer:
            raise Refusal(None, "sparse initializers are not supported")
        protobuf.check_text(*(tensor.name for tensor in body.initializer))
        return {
            tensor.name: call.set_constant(protobuf.array(tensor, self.folder))
            for tensor in body.initializer
        }

    def inline(self, call: Call, body, known: Mapping[str, str], prefix: str) -> list[str]:
        """Converts the nodes of ``body``, a node's GraphProto, in the place of ``call``.

        Names that the body makes are its own; all others are those around the node.

        Args:
            known: the body's inputs and initializers -> names in the graph.
            prefix: of the nodes' names.

        Returns:
            the names of the body's outputs in the graph.
        """
        protobuf.check_text(*(value.name for value in body.output))
        written = max(len(body.node), 1)
        self.check_written_out(written)
        self._written_out += written
        scope = {**call.scope, **known}
        made = [name for node in body.node for name in node.output if name]
        scope.update((name, call.temporary()) for name in made)
        self.run(body.node, scope, prefix)
        results = [scope.get(value.name, value.name) for value in body.output]
        for value, source in zip(body.output, results, strict=True):
            if source not in self.values and source not in self.unknown:
                raise InputError(f"output {value.name!r}: no node makes it")
        return results

    def check_written_out(self, more: int) -> None:
        """Refuses to write out so many nodes more of bodies where they would be too many."""
        if self._written_out + more > MOST_WRITTEN_OUT:
            raise Refusal(
                None,
                f"expected loops of up to {MOST_WRITTEN_OUT} nodes when they are written out, found more",
            )

    def alias(self, call: Call, source: str, target: str) -> None:
        """Makes ``target`` a copy of ``source``, for rewrites to drop."""
        if source in self.unknown:
            self.unknown[target] = self.unknown[source]
        else:
            self.emit(call, Copy(), [source], [target])

    def _convert(self, call: Call) -> None:
        sources = frozenset().union(
            *(
                self.unknown.get(name) or self.sources.get(name, frozenset())
                for name in call.inputs
                if name is not None
            )
        )
        lost = [name for name in call.inputs if name in self.unknown]
        outside = self._decisive
        try:
            if lost:
                self._check_only(call)
            else:
                with decisive() as self._decisive:
                    for name in call.inputs:
                        self._decisive.update(self.decided_by.get(name, ()))
                    call.convert()
                    self._check_outputs(call)
                return
        except Refusal as refusal:
            inputs = refusal.inputs or ()
            self.problems.append(
                UnsupportedNode(call.name, call.operator, refusal.attribute, refusal.reason, inputs)
            )
        except InputError as error:
            if isinstance(error, UnsupportedError):
                self.problems.append(UnsupportedNode(call.name, call.operator, None, str(error)))
            elif str(error).startswith(f"{self.source}, node "):  # one inside a branch or function
                raise
            else:
                raise InputError(f"{self.where(call)}: {error}") from None
        except (OverflowError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            # What no check foresaw in a file that is not what it should be.
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{self.where(call)}: does not fit its inputs: {reason}") from None
        finally:
            self._decisive = outside
        for name in call.outputs:
            if name is not None and name not in self.values:
                if name in self.unknown:
                    raise InputError(
                        f"{self.source}: expected every tensor made once, found {name!r} twice"
                    )
                if name in self.declared:
                    shape, dtype = self.declared[name]
                    self.define(Value(name, shape, dtype), sources)
                else:
                    self.unknown[name] = sources

    def expand(self, call: Call) -> bool:
        """Converts a node by the function that ONNX defines it by; returns whether there is one."""
        return definitions.expand(self, call)

    def _check_only(self, call: Call) -> None:
        """Refuses an operator that is not known, where shapes are not known to say more."""
        if not call.has_converter() and not definitions.has_one(self, call):
            call.convert()

    def _check_outputs(self, call: Call) -> None:
        for name in call.outputs:
            if name is not None and name not in self.values and name not in self.unknown:
                raise Refusal(f"output {name!r}", "the output is not supported")

    def emit(
        self, call: Call, op: Operator, inputs: Sequence[str | None], outputs: Sequence[str] | None
    ) -> str:
        inputs = list(inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        values = [None if name is None else self.values[name] for name in inputs]
        kind = ""
        if isinstance(op, Cast) and op.dtype in protobuf.NARROW:
            kind, source = op.dtype, values[0].dtype
            rounds = source in ("float32", "float64") and self.narrow.get(inputs[0]) != kind
            op = Cast("float32", kind if rounds else "")
        elif not isinstance(op, Cast):
            floats = [n for n, v in zip(inputs, values, strict=True) if v and v.dtype == "float32"]
            kind = self.narrow.get(floats[0], "") if floats else ""
        inferred = op.infer(values)
        if outputs is None:
            outputs = [call.temporary() for _ in inferred]
        made = [output_value(name, said) for name, said in zip(outputs, inferred, strict=True)]
        given = [name for name in inputs if name is not None]
        for source in given:  # a branch within one decides for what is made of its results, too
            self._decisive.update(self.decided_by.get(source, ()))
        if self._emit_expressions(op, inputs, made):
            self.notes.append(Note(call.name, "a constant", "all its inputs are constants"))
            return outputs[0]
        arrays = [None if name is None else self.constants.get(name) for name in inputs]
        if all(name in self.constants for name in given) and worth_folding(
            op, values, made, arrays
        ):
            for value, result in zip(made, fold(op, made, arrays), strict=True):
                self.define_constant(value.name, result)
                if kind and value.dtype == "float32":
                    self.narrow[value.name] = kind
            self.notes.append(Note(call.name, "a constant", "all its inputs are constants"))
            return outputs[0]
        sources = frozenset().union(*(self.sources[name] for name in given))
        for value in made:
            self.define(value, sources)
            if kind and value.dtype == "float32":
                self.narrow[value.name] = kind
        if isinstance(op, Cast) and op.through:
            self.rounded[outputs[0]] = op.through
            op = Cast(op.dtype)
        name = call.node_name()
        node = Node(name, op, tuple(inputs), tuple(outputs), (call.name,))
        self.nodes.append(node)
        self._makers.update(dict.fromkeys(outputs, node))
        if self._decisive:
            self.node_decided_by[name] = frozenset(self._decisive)
        return outputs[0]

    def _emit_expressions(
        self, op: Operator, inputs: Sequence[str | None], made: Sequence[Value]
    ) -> bool:
        """Computes ``op`` over integers with expressions among them; returns whether it can be."""
        given = [name for name in inputs if name is not None]
        if self.constants.expressions.keys().isdisjoint(given) or not all(
            name in self.constants for name in given
        ):
            return False
        arrays = [None if name is None else self.constants.known(name) for name in inputs]
        found = expressions.fold(op, arrays, made)
        for value, array in zip(made, found or (), strict=bool(found)):
            self.define_constant(value.name, array, value.dtype)
        return found is not None


def _widened(array: np.ndarray) -> np.ndarray:
    """Returns ``array`` in float32; one number that stands for many stays one."""
    if held(array) < array.nbytes:
        return np.broadcast_to(array[(0,) * array.ndim].astype(np.float32), array.shape)
    return array.astype(np.float32)


def _reads(proto) -> set[str]:
    """Returns the names that a node reads, those inside its branches and bodies among them."""
    found = {name for name in proto.input if name}
    for attribute in proto.attribute:
        for body in (attribute.g, *attribute.graphs) if attribute.type in (5, 10) else ():
            own = {value.name for value in (*body.input, *body.initializer)}
            inside: set[str] = {value.name for value in body.output}
            for node in body.node:
                own.update(node.output)
                inside |= _reads(node)
            found |= inside - own
    return found


def _module(proto) -> str:
    """Returns ``layer1.0.conv1/`` where PyTorch's newer exporter tells a node's module beside it, else ""."""
    for prop in getattr(proto, "metadata_props", ()):
        if prop.key == "pkg.torch.onnx.name_scopes":
            scopes = re.findall(r"'([\w.]{0,200})'", prop.value)
            return f"{scopes[-2]}/" if len(scopes) > 1 and scopes[-2] else ""
    return ""
