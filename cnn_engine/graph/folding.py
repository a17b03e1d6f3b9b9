"""Constant folding: which nodes may be computed beforehand, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..operators.operator import Operator, Value
from .dims import holds_dims
from .mapped import read

#: What folding may make of small inputs: larger results stay nodes, so that no small file fills memory.
FOLD_BYTES = 2**26
#: How many multiply-adds or moves folding one node may take.
FOLD_WORK = 2**32


def held(array: np.ndarray) -> int:
    """Returns the bytes of memory behind ``array``: less than it has where one number stands for many."""
    return array.itemsize if array.size and not any(array.strides) else array.nbytes


def worth_folding(
    op: Operator,
    inputs: Sequence[Value | None],
    outputs: Sequence[Value],
    arrays: Sequence[np.ndarray | None],
) -> bool:
    """Whether results over constants are known, and to be constants, in bounded memory and time."""
    if not op.folds or holds_dims(op):
        return False
    if any(holds_dims(value.shape) for value in (*inputs, *outputs) if value is not None):
        return False
    read = sum(held(array) for array in arrays if array is not None)
    written = sum(value.nbytes for value in outputs)
    if written > max(FOLD_BYTES, 2 * read):
        return False
    shapes = [value.shape for value in (*inputs, *outputs) if value is not None]
    if max((size for shape in shapes for size in shape), default=0) > FOLD_BYTES:
        return False  # nothing in it, perhaps, but tables of positions as long as a dimension
    window = math.prod(getattr(op, "kernel", ()))
    each = window + op.terms(inputs)
    work = op.flops(inputs, outputs) + sum(value.size for value in outputs) * each
    return work <= FOLD_WORK


def fold(
    op: Operator, outputs: Sequence[Value], arrays: Sequence[np.ndarray | None]
) -> list[np.ndarray]:
    """Returns the outputs of ``op`` by its reference, in their own types."""
    with np.errstate(all="ignore"):
        results = op.reference(*(None if array is None else read(array) for array in arrays))
        results = results if isinstance(results, tuple) else (results,)
        return [
            np.asarray(result).astype(value.dtype, copy=False)
            for value, result in zip(outputs, results, strict=True)
        ]
