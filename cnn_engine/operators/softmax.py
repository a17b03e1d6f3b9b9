"""softmax: y = exp(x - max) / sum of exp(x - max), and log_softmax, its logarithm, along one axis."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .operator import Operator, axis_in, float64, need, record


@record
class Softmax(Operator):
    """Input: x of any shape; a row along ``axis`` with NaN or +inf comes out NaN."""

    kind: ClassVar[str] = "softmax"
    in_place: ClassVar[bool] = True
    axis: int = -1

    def infer(self, inputs):
        need(inputs, 1)
        axis_in(self.axis, len(inputs[0].shape))
        return ((inputs[0].shape, inputs[0].dtype),)

    def reference(self, x):
        exponentials = np.exp(self._below_maximum(x))
        return exponentials / exponentials.sum(axis=self.axis, keepdims=True)

    def _below_maximum(self, x: np.ndarray) -> np.ndarray:
        # ONNX's softmax of float16 rounds its steps to float16: more exact ones come out elsewhere.
        x = x if x.dtype == np.float16 else float64(x)
        with np.errstate(invalid="ignore"):
            return x - x.max(axis=self.axis, keepdims=True, initial=-np.inf)

    def terms(self, inputs) -> int:
        return inputs[0].shape[self.axis]


@record
class LogSoftmax(Softmax):
    """x - max - log(sum of exp(x - max)) along ``axis``."""

    kind: ClassVar[str] = "log_softmax"

    def reference(self, x):
        below = self._below_maximum(x)
        return below - np.log(np.exp(below).sum(axis=self.axis, keepdims=True))
