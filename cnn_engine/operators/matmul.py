"""matmul: y[..., i, j] = sum over f of a[..., i, f] * b[..., f, j], by NumPy's rules; and einsum."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, Shape, broadcast, check_types, float64, need, record, same_dtype


@record
class Matmul(Operator):
    """Inputs: a [..., I, F] and b [..., F, J]; a vector is one row of a, or one column of b, and goes."""

    kind: ClassVar[str] = "matmul"

    def infer(self, inputs):
        need(inputs, 2)
        dtype = same_dtype(inputs)
        check_types("numbers", dtype)
        a, b = inputs[0].shape, inputs[1].shape
        if not a or not b:
            raise InputError(f"expected at least 1 dimension, found {list(a)} and {list(b)}")
        rows = () if len(a) == 1 else a[-2:-1]
        columns = () if len(b) == 1 else b[-1:]
        if a[-1] != (b[0] if len(b) == 1 else b[-2]):
            raise InputError(f"expected as many columns as rows, found {list(a)} and {list(b)}")
        return (((*broadcast(a[:-2], b[:-2]), *rows, *columns), dtype),)

    @staticmethod
    def numbers(a: Shape, b: Shape, transpose: tuple[bool, bool] = (False, False)):
        """Returns the sizes and strides of contiguous inputs, as the kernels take them (csrc/ops/matmul.h).

        Args:
            transpose: whether a's, and b's, last two dimensions are exchanged before the product.

        Returns:
            Rows, columns and depth; strides of a's rows and depth and of b's depth and columns; four batch
            dimensions, outermost first, and the strides of each in a and in b. None where neighbouring
            batch dimensions cannot be taken together until four are left.
        """
        steps = []
        matrices = []
        for shape, swapped, row in ((a, transpose[0], True), (b, transpose[1], False)):
            if len(shape) == 1:
                steps.append(())
                size, step = ((1, shape[0]), (0, 1)) if row else ((shape[0], 1), (1, 0))
            else:
                all_steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
                steps.append(tuple(all_steps[:-2]))
                size, step = tuple(shape[-2:]), tuple(all_steps[-2:])
                if swapped:
                    size, step = size[::-1], step[::-1]
            matrices.append((size, step))
        (rows, depth), (a_row, a_depth) = matrices[0]
        (_, columns), (b_depth, b_column) = matrices[1]
        batch = broadcast(a[:-2], b[:-2])
        strides = []
        for shape, own in ((a[:-2], steps[0]), (b[:-2], steps[1])):
            missing = (0,) * (len(batch) - len(shape))
            strides.append(
                (*missing, *(0 if n == 1 else s for n, s in zip(shape, own, strict=True)))
            )
        taken: list[list[int]] = []  # size, stride in a, stride in b
        for size, *both in zip(batch, *strides, strict=True):
            if size == 1:
                continue
            if taken and all(
                outer == size * inner for outer, inner in zip(taken[-1][1:], both, strict=True)
            ):
                taken[-1] = [taken[-1][0] * size, *both]
            else:
                taken.append([size, *both])
        if len(taken) > 4:
            return None
        taken = [[1, 0, 0]] * (4 - len(taken)) + taken
        dimensions = [number for column in zip(*taken, strict=True) for number in column]
        return (rows, columns, depth, a_row, a_depth, b_depth, b_column, *dimensions)

    def reference(self, a, b):
        return np.asarray(np.matmul(float64(a), float64(b)))

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.terms(inputs)

    def terms(self, inputs) -> int:
        return inputs[0].shape[-1]


@record
class Einsum(Operator):
    """Sums of products by Einstein's convention, over any number of inputs.

    Attributes:
        equation: such as ``bij,bjk->bik``; ``...`` stands for dimensions that broadcast.
    """

    kind: ClassVar[str] = "einsum"
    equation: str

    def labels(
        self, shapes: Sequence[Shape]
    ) -> tuple[list[list[str | int]], list[str | int], dict[str | int, int]]:
        """Returns the labels of each input and of the output, and the size of every label.

        ``...`` has the labels 0, 1, ... from its end.

        Raises:
            InputError: the equation does not fit the shapes.
        """
        equation = self.equation.replace(" ", "")
        if not re.fullmatch(r"[A-Za-z.,]*(->[A-Za-z.]*)?", equation):
            raise InputError(f"equation: expected letters and commas, found {self.equation!r}")
        left, arrow, right = equation.partition("->")
        terms = left.split(",")
        if len(terms) != len(shapes):
            raise InputError(f"equation: expected {len(shapes)} terms, found {len(terms)}")
        given: list[list[str | int]] = []
        sizes: dict[str | int, int] = {}
        counts: dict[str, int] = {}
        widest = 0
        for term, shape in zip(terms, shapes, strict=True):
            labels = term.replace("...", "")
            dots = len(shape) - len(labels)
            if "." in labels or dots < 0 or (dots > 0 and "..." not in term):
                raise InputError(
                    f"equation: expected {len(shape)} dimensions, found the term {term!r}"
                )
            widest = max(widest, dots)
            head = term.split("...")[0]
            rest = labels[len(head) :]
            named = [*head, *(range(dots - 1, -1, -1) if "..." in term else ()), *rest]
            given.append(named)
            for label in labels:
                counts[label] = counts.get(label, 0) + 1
            for label, size in zip(named, shape, strict=True):
                known = sizes.get(label, 1)
                if known != size and 1 not in (known, size):
                    raise InputError(
                        f"equation: expected one size for {label!r}, found {known} and {size}"
                    )
                sizes[label] = max(known, size) if known * size else 0
        if not arrow:
            once = "".join(sorted(label for label, count in counts.items() if count == 1))
            right = ("..." if widest else "") + once
        head, dots, rest = right.partition("...")
        wanted = [*head, *(range(widest - 1, -1, -1) if dots else ()), *rest]
        if "." in head + rest or len(set(wanted)) != len(wanted) or not set(wanted) <= set(sizes):
            raise InputError(
                f"equation: expected an output of the inputs' letters, found {right!r}"
            )
        return given, wanted, sizes

    def infer(self, inputs):
        need(inputs, max(1, len(inputs)))
        _, wanted, sizes = self.labels([value.shape for value in inputs])
        return ((tuple(sizes[label] for label in wanted), same_dtype(inputs)),)

    def reference(self, *arrays):
        equation = self.equation.replace(" ", "")
        return np.asarray(np.einsum(equation, *[float64(array) for array in arrays]))

    def flops(self, inputs, outputs) -> int:
        *_, sizes = self.labels([value.shape for value in inputs])
        return 2 * math.prod(sizes.values()) * max(len(inputs) - 1, 0)

    def terms(self, inputs) -> int:
        _, wanted, sizes = self.labels([value.shape for value in inputs])
        return math.prod(size for label, size in sizes.items() if label not in wanted)
