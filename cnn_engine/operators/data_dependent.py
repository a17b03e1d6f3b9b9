"""Operators that make as many elements as their inputs' values say: where is it not 0, which boxes stay.

How many, the record's ``count``, is a dimension that is found while the graph runs. The references are what
runs: see :mod:`cnn_engine.engine.staged`.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, need, record


@record
class DataDependent(Operator):
    """Base of the records.

    Attributes:
        count: how many there are.
    """

    folds: ClassVar[bool] = False
    count: int


@record
class NonZero(DataDependent):
    """The positions of elements that are not 0, in row-major order: int64 [rank, count]."""

    kind: ClassVar[str] = "non_zero"

    def infer(self, inputs):
        need(inputs, 1)
        return (((len(inputs[0].shape), self.count), "int64"),)

    def reference(self, x):
        x = np.asarray(x)
        found = np.nonzero(np.atleast_1d(x))[: x.ndim]
        return np.array(found, np.int64).reshape(x.ndim, np.count_nonzero(x))


@record
class Unique(DataDependent):
    """The elements of x, or its slices along an axis, each once; their first positions, where each of x is
    among them, and how often it is there.

    Attributes:
        axis: None: all elements.
        ordered: whether they are sorted; else in the order in which they come first.
    """

    kind: ClassVar[str] = "unique"
    axis: int | None = None
    ordered: bool = True

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        shape, places = (self.count,), x.size
        if self.axis is not None:
            shape = (*x.shape[: self.axis], self.count, *x.shape[self.axis + 1 :])
            places = x.shape[self.axis]
        return (
            (shape, x.dtype),
            ((self.count,), "int64"),
            ((places,), "int64"),
            ((self.count,), "int64"),
        )

    def reference(self, x):
        axis = self.axis or 0
        rows = np.asarray(x)
        rows = rows.reshape(-1) if self.axis is None else rows
        found, first, inverse, counts = np.unique(
            rows, return_index=True, return_inverse=True, return_counts=True, axis=axis
        )
        inverse = inverse.reshape(-1)
        if not self.ordered:
            order = np.argsort(first, kind="stable")
            found, first, counts = np.take(found, order, axis), first[order], counts[order]
            inverse = np.argsort(order, kind="stable")[inverse]
        return found, *(array.astype(np.int64) for array in (first, inverse, counts))


@record
class NonMaxSuppression(DataDependent):
    """Boxes of each class that overlap none of a higher score: int64 [count, 3] of image, class and box.

    Inputs: boxes [N, B, 4], scores [N, C, B]; then one number each, or None: the most of a class (0), the
    intersection over union from above which boxes overlap (0), and the score that they must be above.

    Attributes:
        centred: whether boxes are (x, y) of the middle, width, height; else two corners (y, x, y, x).
    """

    kind: ClassVar[str] = "non_max_suppression"
    centred: bool = False

    def infer(self, inputs):
        need(inputs, 2, 5)
        boxes, scores = (value.shape for value in inputs[:2])
        if (
            len(boxes) != 3
            or boxes[2] != 4
            or len(scores) != 3
            or scores[0] != boxes[0]
            or scores[2] != boxes[1]
        ):
            raise InputError(
                f"expected boxes [N, B, 4] and scores [N, C, B], found {list(boxes)} and {list(scores)}"
            )
        for value, name in zip(inputs[2:], ("most", "overlap", "score"), strict=False):
            if value is not None and value.size != 1:
                raise InputError(f"{name}: expected one number, found {list(value.shape)}")
        return (((self.count, 3), "int64"),)

    def reference(self, boxes, scores, *limits):
        limits = [None if limit is None else np.asarray(limit).item() for limit in limits]
        given = dict(zip(("most", "overlap", "least"), limits, strict=False))
        most, overlap = given.get("most") or 0, given.get("overlap") or 0.0
        least = given.get("least")
        least = -math.inf if least is None else least
        low, high = self._corners(np.asarray(boxes, np.float64))
        areas = np.prod(high - low, axis=-1)
        chosen: list[tuple[int, int, int]] = []
        for image, kind in np.ndindex(*scores.shape[:2]):
            line = scores[image, kind]
            above = np.flatnonzero(line > least)
            left = above[np.argsort(-line[above], kind="stable")]
            for _ in range(max(most, 0)):
                if not len(left):
                    break
                best, left = left[0], left[1:]
                chosen.append((image, kind, int(best)))
                sides = np.minimum(high[image, left], high[image, best]) - np.maximum(
                    low[image, left], low[image, best]
                )
                shared = np.prod(np.maximum(sides, 0.0), axis=-1)
                whole = areas[image, left] + areas[image, best] - shared
                with np.errstate(all="ignore"):
                    same = np.where(whole > 0, shared / whole, 0.0)
                left = left[same <= overlap]
        return np.array(chosen, np.int64).reshape(-1, 3)

    def _corners(self, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lower and the upper corners."""
        a, b = boxes[..., :2], boxes[..., 2:]
        if self.centred:
            half = np.abs(b) / 2
            return a - half, a + half
        return np.minimum(a, b), np.maximum(a, b)
