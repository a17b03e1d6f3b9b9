"""The base of operator records: shape inference, a float64 reference, costs, facts for kernels.

A record is a frozen dataclass of attributes. It knows no names of tensors, no device and no kernel; a
:class:`~cnn_engine.graph.graph.Node` gives it inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..errors import InputError
from ..locks import cached_property
from ..types import Quantization, Shape, TensorType

#: What an operator says of an output: shape, dtype and, where there is one, quantization.
Inferred = tuple[Shape, str] | tuple[Shape, str, Quantization]


@dataclass(frozen=True, init=False)
class Value(TensorType):
    """A tensor of a graph: a type and a name.

    Attributes:
        name: unique in its graph.
    """

    name: str = ""

    def __init__(
        self,
        name: str,
        shape: Shape,
        dtype: str = "float32",
        layout: str = "contiguous",
        storage_dtype: str = "",
        quantization: Quantization | None = None,
    ) -> None:
        object.__setattr__(self, "name", name)
        super().__init__(dtype, shape, layout, storage_dtype, quantization)

    @property
    def type(self) -> TensorType:
        """The type by itself: equal for tensors of any name."""
        return TensorType(
            self.dtype, self.shape, self.layout, self.storage_dtype, self.quantization
        )

    @property
    def inferred(self) -> Inferred:
        """The type that the value's operator infers."""
        said = self.shape, self.dtype
        return said if self.quantization is None else (*said, self.quantization)


def output_value(name: str, inferred: Inferred, storage_dtype: str = "") -> Value:
    """Returns output ``name`` of an operator, of which ``infer`` has said this."""
    shape, dtype, *quantization = inferred
    return Value(name, tuple(shape), dtype, "contiguous", storage_dtype, *quantization)


@dataclass(frozen=True)
class Cost:
    """The least operations and bytes of one call.

    Attributes:
        flops: two per multiply-add of a sum of products; nothing for comparisons, moves and functions.
        bytes: every tensor, parameters too, moved once.
    """

    flops: int
    bytes: int


class _Record:
    """What records have in common, in the place of methods that ``dataclass`` compiles for each."""

    _names: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self is other or self._attributes() == other._attributes()

    def __hash__(self) -> int:
        return hash(self._attributes())

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
        return f"{self.__class__.__qualname__}({shown})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _attributes(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._names)


def record(made: type) -> type:
    """Makes a class of attributes a frozen dataclass, as ``dataclass(frozen=True)`` does, at less cost.

    All operators are made when the package is imported. What adds no attributes to another is left as it is.
    """
    own = vars(made).get("__annotations__", {}).values()
    if not is_dataclass(made) or any("ClassVar" not in str(annotation) for annotation in own):
        made = dataclass(frozen=True, eq=False, repr=False)(made)
        made._names = tuple(field.name for field in fields(made))
    return made


@record
class Operator(_Record):
    """Base of the records.

    Attributes:
        kind: the operator's name: its file, its kernels, what reports show.
        in_place: whether a kernel may write output 0 over input 0 (same shape and type, element by element).
        folds: whether it becomes a constant where its inputs are constants.
    """

    kind: ClassVar[str]
    in_place: ClassVar[bool] = False
    folds: ClassVar[bool] = True

    def infer(self, inputs: Sequence[Value | None]) -> tuple[Inferred, ...]:
        """Returns (shape, dtype) of every output, or (shape, dtype, quantization) of quantized ones.

        Raises:
            InputError: the inputs do not fit the operator; says what was expected and found.
        """
        raise NotImplementedError

    def reference(self, *arrays: np.ndarray | None) -> np.ndarray | tuple[np.ndarray, ...]:
        """Computes the outputs in NumPy: floats in float64, integers and booleans exactly.

        Operators that only move elements keep the type that they are given.
        One output is returned as an array, several as a tuple. Inputs fit (:meth:`infer` has passed).
        """
        raise NotImplementedError

    def cost(self, inputs: Sequence[Value | None], outputs: Sequence[Value]) -> Cost:
        """Returns the least operations and bytes of one call."""
        tensors = [value for value in inputs if value is not None] + list(outputs)
        return Cost(self.flops(inputs, outputs), sum(value.nbytes for value in tensors))

    def flops(self, inputs: Sequence[Value | None], outputs: Sequence[Value]) -> int:
        """Returns the FLOPs of one call; 0 unless the operator sums products."""
        return 0

    def terms(self, inputs: Sequence[Value | None]) -> int:
        """Returns the length of the longest sum that one output element is; 1 for pointwise operators."""
        return 1

    @cached_property
    def without_activation(self) -> Operator:
        """The record without its activation: packed weights depend on nothing else."""
        has_one = any(field.name == "activation" for field in fields(self))
        return replace(self, activation=None) if has_one else self


def need(inputs: Sequence[Value | None], lowest: int, highest: int | None = None) -> None:
    """Checks how many inputs there are; the first ``lowest`` of them must be given.

    Raises:
        InputError: there are more or fewer.
    """
    highest = lowest if highest is None else highest
    given = len(inputs)
    if not lowest <= given <= highest or any(value is None for value in inputs[:lowest]):
        wanted = str(lowest) if lowest == highest else f"{lowest} to {highest}"
        found = sum(value is not None for value in inputs)
        raise InputError(f"expected {wanted} inputs, found {found}")


def is_float(dtype: str) -> bool:
    """Whether ``dtype`` is a floating type."""
    return dtype.startswith("float")


def check_types(wanted: str, dtype: str) -> None:
    """Checks ``dtype`` against ``wanted``: ``floats``, ``integers``, ``numbers`` (both) or ``booleans``.

    Raises:
        InputError: it is not.
    """
    found = "booleans" if dtype == "bool" else "floats" if is_float(dtype) else "integers"
    if found != wanted and (wanted != "numbers" or found == "booleans"):
        raise InputError(f"expected {wanted}, found {dtype}")


def same_dtype(inputs: Sequence[Value | None]) -> str:
    """Returns the one element type of ``inputs``.

    Raises:
        InputError: they differ.
    """
    dtypes = list(dict.fromkeys(value.dtype for value in inputs if value is not None))
    if len(dtypes) != 1:
        raise InputError(f"expected inputs of one type, found {', '.join(dtypes)}")
    return dtypes[0]


def float64(array: np.ndarray) -> np.ndarray:
    """Returns floats as float64, and leaves integers and booleans as they are."""
    array = np.asarray(array)
    return array.astype(np.float64, copy=False) if array.dtype.kind == "f" else array


def axis_in(axis: int, rank: int) -> int:
    """Returns ``axis``, counted from the end where negative, as an index from 0.

    Raises:
        InputError: there is no such dimension.
    """
    if not -rank <= axis < rank:
        raise InputError(f"axis: expected a dimension of {rank}, found {axis}")
    return axis % rank


def broadcast(*shapes: Shape) -> Shape:
    """Returns the shape that ``shapes`` broadcast to by NumPy's rules.

    Raises:
        InputError: they do not fit.
    """
    rank = max(len(shape) for shape in shapes)
    result = []
    for sizes in zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        wide: int | None = None
        for size in sizes:  # one that is not known yet is never asked whether it is 1
            if (isinstance(size, int) and size == 1) or (wide is not None and size == wide):
                continue
            if wide is not None and (size == 1 or wide == 1):
                wide = size if wide == 1 else wide
                continue
            if wide is not None:
                found = " and ".join(str(list(shape)) for shape in shapes)
                raise InputError(f"expected shapes that broadcast, found {found}")
            wide = size
        result.append(1 if wide is None else wide)
    return tuple(result)
