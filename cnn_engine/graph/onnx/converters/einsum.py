"""Einsum as products of matrices, which have kernels."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from ....operators.matmul import Einsum, Matmul
from ....operators.reduce import ReduceSum
from ....operators.shaping import Reshape, Transpose
from . import converts

Label = str | int


class _Term:
    """A tensor with a label for each dimension."""

    def __init__(self, call, name: str, labels: list[Label]) -> None:
        self.call, self.name, self.labels = call, name, labels

    def summed(self, kept: Collection[Label]) -> _Term:
        """Returns the term summed over all labels but ``kept``."""
        gone = tuple(i for i, label in enumerate(self.labels) if label not in kept)
        if not gone:
            return self
        name = self.call.emit(ReduceSum(gone, keepdims=False), [self.name])
        return _Term(self.call, name, [label for label in self.labels if label in kept])

    def ordered(self, labels: list[Label]) -> _Term:
        """Returns the term with its dimensions in the order of ``labels``."""
        if labels == self.labels:
            return self
        perm = tuple(self.labels.index(label) for label in labels)
        return _Term(self.call, self.call.emit(Transpose(perm), [self.name]), labels)

    def shaped(self, shape: Iterable[int], labels: list[Label]) -> _Term:
        name = self.call.emit(Reshape(tuple(shape), allow_zero=True), [self.name])
        return _Term(self.call, name, labels)


def _product(a: _Term, b: _Term, kept: Collection[Label], sizes: dict[Label, int]) -> _Term:
    """Returns the sum of products of two terms over all labels but ``kept``."""
    a, b = a.summed({*kept, *b.labels}), b.summed({*kept, *a.labels})
    shared = [label for label in a.labels if label in b.labels]
    batch = [label for label in shared if label in kept]
    depth = [label for label in shared if label not in kept]
    rows = [label for label in a.labels if label not in shared]
    columns = [label for label in b.labels if label not in shared]

    def size(labels: list[Label]) -> tuple[int, ...]:
        return tuple(sizes[label] for label in labels)

    a, b = a.ordered([*batch, *rows, *depth]), b.ordered([*batch, *depth, *columns])
    shape = (*size(batch), math.prod(size(rows)), math.prod(size(depth)))
    a = a.shaped(shape, a.labels)
    b = b.shaped((*size(batch), shape[-1], math.prod(size(columns))), b.labels)
    name = a.call.emit(Matmul(), [a.name, b.name])
    labels = [*batch, *rows, *columns]
    return _Term(a.call, name, labels).shaped(size(labels), labels)


@converts("Einsum")
def einsum(call) -> None:
    op = Einsum(call.text("equation", ""))
    call.refuse_others()
    shapes = [call.value(i).shape for i in range(len(call.inputs))]
    given, wanted, sizes = op.labels(shapes)
    plain = all(
        len(set(labels)) == len(labels) and tuple(sizes[label] for label in labels) == shape
        for labels, shape in zip(given, shapes, strict=True)
    )
    if not plain:  # diagonals, and dimensions of 1 that are repeated
        call.finish(op, call.inputs)
        return
    terms = [_Term(call, name, labels) for name, labels in zip(call.inputs, given, strict=True)]
    found = terms.pop(0)
    while terms:
        following = terms.pop(0)
        later = {label for term in terms for label in term.labels}
        found = _product(found, following, {*wanted, *later}, sizes)
    found = found.summed(wanted)
    perm = tuple(found.labels.index(label) for label in wanted)
    call.finish(Transpose(perm), [found.name])
