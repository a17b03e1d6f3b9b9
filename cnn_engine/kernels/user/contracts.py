"""Signatures of user kernels: tensor names of each operator, and the struct of its sizes.

The structs are read from ``cnn_engine/kernel.h``, the header that the user's file includes, so that there is
one list of their fields.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...graph.graph import Graph, Node
from ...operators import KINDS
from ...operators.binary import Binary
from ...operators.operator import Operator, Value
from ...operators.unary import Unary

#: The folder for the compilers' ``-I``, and the header in it.
INCLUDE = Path(__file__).resolve().parents[2] / "include"
HEADER = INCLUDE / "cnn_engine" / "kernel.h"

#: 2^31 - 1: sizes are C's int, and so are indices in most students' kernels.
MOST = 2**31 - 1

_STRUCT = re.compile(r"((?:^//[^\n]*\n)*)^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_TYPES = {"int": ctypes.c_int, "float": ctypes.c_float}


@dataclass(frozen=True)
class Contract:
    """Arguments of the kernels of one operator.

    Attributes:
        op: the operator's kind.
        struct: the name of the struct in the header.
        inputs: the names of the input tensors; those in ``optional`` may be null.
        sizes: returns the struct's values for a record and its tensors' values.
        why_not: returns why the contract does not cover a node, or None.
    """

    op: str
    struct: str
    inputs: tuple[str, ...]
    sizes: Callable[[Operator, tuple[Value | None, ...], Value], tuple[float, ...]]
    optional: tuple[str, ...] = ()
    why_not: Callable[[Operator, tuple[Value | None, ...]], str | None] = lambda op, inputs: None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The inputs' names and ``y``."""
        return (*self.inputs, "y")

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the struct's members."""
        return structs()[self.struct].sizes._fields

    def refuses(self, node: Node, graph: Graph) -> str | None:
        """Returns why no kernel of this contract can run ``node``, or None."""
        inputs = graph.inputs_of(node)
        given = [value for value in (*inputs, *graph.outputs_of(node)) if value is not None]
        if len(inputs) > len(self.inputs) or len(node.outputs) != 1:
            return f"expected {', '.join(self.inputs)} alone, found {len(inputs)} inputs"
        for value in given:
            if value.dtype != "float32":
                return f"expected float32, found {value.dtype}"
            if value.size > MOST:
                return f"expected at most {MOST} elements, found {value.size}"
        return self.why_not(node.op, inputs)

    def values(
        self, op: Operator, inputs: tuple[Value | None, ...], output: Value
    ) -> dict[str, float]:
        """Returns the struct's members by name."""
        return dict(zip(self.fields, self.sizes(op, inputs, output), strict=True))


@dataclass(frozen=True)
class Struct:
    """A struct of the header.

    Attributes:
        type: as C has it.
        sizes: as Python has it: a named tuple, which Numba takes too.
        comment: what is said above it.
        text: its declaration.
    """

    type: type[ctypes.Structure]
    sizes: type[tuple]
    comment: str
    text: str


@cache
def structs() -> Mapping[str, Struct]:
    """Returns every struct of the header by its name."""
    found = {}
    for comment, name, body in _STRUCT.findall(HEADER.read_text(encoding="utf-8")):
        members = [
            (member.strip(), _TYPES[line.split()[0]])
            for line in body.strip().splitlines()
            for member in line.strip().rstrip(";").split(maxsplit=1)[1].split(",")
        ]
        made = type(name, (ctypes.Structure,), {"_fields_": members})
        sizes = namedtuple(name, [member for member, _ in members])
        found[name] = Struct(made, sizes, comment.strip(), f"struct {name} {{\n{body}}};")
    return found


def _convolution(op: Any, inputs: tuple[Value | None, ...], y: Value) -> tuple[int, ...]:
    x, weight = inputs[:2]
    return (
        *x.shape, y.shape[1], *weight.shape[2:], *y.shape[2:], *op.stride, *op.padding, *op.dilation,
        op.groups,
    )  # fmt: skip


def _alone(op: Any, inputs: Any) -> str | None:
    if op.activation is not None:
        return f"expected the sum alone, found {op.activation.kind} after it"
    return None


def _pool(op: Any, inputs: tuple[Value | None, ...], y: Value) -> tuple[int, ...]:
    counted = int(getattr(op, "count_include_pad", False))
    return (
        *inputs[0].shape, *op.kernel, *y.shape[2:], *op.stride, *op.padding, *op.dilation, counted
    )  # fmt: skip


def _pool_why_not(op: Any, inputs: Any) -> str | None:
    if getattr(op, "indices", None) is not None:
        return "expected maxima alone, found their positions asked for"
    for i in (0, 1):
        if max(op.padding[i], op.padding[2 + i]) > op.dilation[i] * (op.kernel[i] - 1):
            return f"expected padding of less than the window, found {op.padding}"
    if any(getattr(op, "extra", ())):
        return "expected windows inside the padding, found some beyond it"
    return None


def _matmul_why_not(op: Any, inputs: tuple[Value | None, ...]) -> str | None:
    a, b = (value.shape for value in inputs)
    if len(a) < 2 or len(b) < 2 or a[:-2] != b[:-2]:
        return f"expected as many matrices on both sides, found {list(a)} and {list(b)}"
    return None


def _rows_why_not(op: Any, inputs: tuple[Value | None, ...]) -> str | None:
    shape = inputs[0].shape
    if len(shape) != 2 or op.axis not in (1, -1):
        return f"expected rows, found {list(shape)} and axis {op.axis}"
    return None


def _elements(op: Any, inputs: tuple[Value | None, ...], y: Value) -> tuple[float, ...]:
    return y.size, float(getattr(op, "alpha", 0.0)), float(getattr(op, "beta", 0.0))


def _same_shapes(op: Any, inputs: tuple[Value | None, ...]) -> str | None:
    a, b = (value.shape for value in inputs)
    return None if a == b else f"expected tensors of one shape, found {list(a)} and {list(b)}"


def _plain_gelu(op: Any, inputs: Any) -> str | None:
    return None if op.function == op.kind else f"expected {op.kind}, found {op.function}"


def _is_float(record: type[Unary]) -> bool:
    return record().result("float32") == "float32"


def _contracts() -> dict[str, Contract]:
    taps = ("x", "weight", "bias")
    rows = [
        Contract("conv2d", "Conv2d", taps, _convolution, ("bias",), _alone),
        Contract("conv_transpose2d", "ConvTranspose2d", taps, _convolution, ("bias",), _alone),
        Contract(
            "pad2d", "Pad2d", ("x",),
            lambda op, inputs, y: (*inputs[0].shape, *y.shape[2:], *op.padding),
        ),
        Contract("max_pool2d", "Pool2d", ("x",), _pool, (), _pool_why_not),
        Contract("average_pool2d", "Pool2d", ("x",), _pool, (), _pool_why_not),
        Contract(
            "linear", "Linear", taps,
            lambda op, inputs, y: (y.shape[0], inputs[1].shape[1], y.shape[1]), ("bias",), _alone,
        ),
        Contract(
            "matmul", "Matmul", ("a", "b"),
            lambda op, inputs, y: (
                math.prod(y.shape[:-2]), *inputs[0].shape[-2:], inputs[1].shape[-1]
            ),
            (), _matmul_why_not,
        ),
        *(
            Contract(kind, "Rows", ("x",), lambda op, inputs, y: y.shape, (), _rows_why_not)
            for kind in ("softmax", "log_softmax")
        ),
        Contract(
            "lrn", "Lrn", ("x",),
            lambda op, inputs, y: (
                *y.shape[:2], math.prod(y.shape[2:]), op.size, op.alpha, op.beta, op.k
            ),
        ),
    ]  # fmt: skip
    for kind, record in KINDS.items():
        if (
            issubclass(record, Unary)
            and record.types in ("floats", "numbers")
            and _is_float(record)
        ):
            rows.append(Contract(kind, "Elements", ("x",), _elements, (), _plain_gelu))
    for kind in ("add", "sub", "mul", "div", "min", "max"):
        assert issubclass(KINDS[kind], Binary)
        rows.append(Contract(kind, "Elements", ("a", "b"), _elements, (), _same_shapes))
    return {row.op: row for row in rows}


#: Every operator that a kernel of a user's own can be written for.
CONTRACTS: dict[str, Contract] = _contracts()
