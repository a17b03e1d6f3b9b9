"""Shape arithmetic of a file: constants that hold dimensions which are not known yet."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...operators import binary, logic
from ...operators.cast import Cast
from ...operators.copy import Copy
from ...operators.gather import Gather
from ...operators.operator import Operator, Value
from ...operators.reduce import ReduceProd
from ...operators.shaping import Concat, Reshape, Slice, Split, Transpose
from ...operators.where import Where
from ..dims import Dim, least, most


class Constants(dict):
    """Name -> array. A name in :attr:`expressions` has an array of objects there, expressions among them.

    Who asks for such an array by its name gets numbers, which pins the dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.expressions: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if (found := self.expressions.get(name)) is not None:
            return np.array([int(item) for item in found.flat], np.int64).reshape(found.shape)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def known(self, name: str) -> np.ndarray:
        """Returns the array of a name, of objects where it has expressions."""
        found = self.expressions.get(name)
        return self[name] if found is None else found


#: What moves elements.
_MOVES = (Reshape, Transpose, Slice, Split, Concat)


def _divided(a: Any, b: Any) -> Any:
    if a < 0 or b <= 0:
        raise NotImplementedError  # ONNX rounds to 0
    return a // b


#: What is computed element by element.
_EACH: dict[type[Operator], Callable[[Any, Any], Any]] = {
    binary.Add: operator.add,
    binary.Sub: operator.sub,
    binary.Mul: operator.mul,
    binary.Div: _divided,
    binary.Min: least,
    binary.Max: most,
    logic.Equal: operator.eq,
    logic.Greater: operator.gt,
    logic.Less: operator.lt,
}


def may_fold(op: Operator) -> bool:
    """Whether :func:`fold` knows the operator."""
    return (
        type(op) in _EACH
        or type(op) in (*_MOVES, Where, Copy, ReduceProd, Gather)
        or (type(op) is Cast and op.dtype in ("int64", "int32"))
    )


def fold(
    op: Operator, arrays: Sequence[np.ndarray | None], outputs: Sequence[Value]
) -> list[np.ndarray] | None:
    """Returns the result of ``op`` on integers with expressions among them; None: it takes numbers."""
    try:
        results = _computed(op, arrays)
    except NotImplementedError:
        return None
    return None if results is None else [
        _settled(result, value) for result, value in zip(results, outputs, strict=True)
    ]  # fmt: skip


def _computed(op: Operator, arrays: Sequence[np.ndarray | None]) -> Sequence[Any] | None:
    if type(op) in _EACH and len(arrays) == 2:
        return [np.frompyfunc(_EACH[type(op)], 2, 1)(*arrays)]
    if type(op) is Where and arrays[0].dtype == bool:
        return [np.where(*arrays)]
    if type(op) is Copy or (type(op) is Cast and op.dtype in ("int64", "int32")):
        return arrays
    if type(op) is ReduceProd and arrays[0].ndim == 1:
        product = math.prod(arrays[0])
        return [np.array([product] if op.keepdims else product, object)]
    if type(op) in _MOVES or (type(op) is Gather and arrays[1].dtype != object):
        found = op.reference(*arrays)
        return found if isinstance(found, tuple) else [found]
    return None


def _settled(result: Any, value: Value) -> np.ndarray:
    """Returns an array in the value's type, or of objects where it still has expressions."""
    array = np.empty(value.shape, object)
    array[...] = result
    if any(isinstance(item, Dim) for item in array.flat):
        return array
    return array.astype(value.dtype)
