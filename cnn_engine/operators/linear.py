"""linear: y[n,m] = b[m] + sum over f of x[n,f] * w[m,f]; an image counts as one row of features."""

from __future__ import annotations

import math
from typing import ClassVar

from ..errors import InputError
from .operator import Operator, float64, need, record, same_dtype
from .unary import Unary


@record
class Linear(Operator):
    """Inputs: x [N, ...] taken as [N, F], weight [M, F], bias [M] or None; output [N, M].

    Attributes:
        activation: what is applied to the sum, or None.
        compute_dtype: what x and the weights may be rounded to before they are multiplied, or None for the
            kernels of plain variants; the reference rounds nothing.
    """

    kind: ClassVar[str] = "linear"
    activation: Unary | None = None
    compute_dtype: str | None = None

    def infer(self, inputs):
        need(inputs, 2, 3)
        dtype = same_dtype(inputs)
        x, weight, bias = (*inputs, None)[:3]
        if len(x.shape) < 2 or len(weight.shape) != 2:
            raise InputError(
                f"expected rows of features and a weight of 2 dimensions, "
                f"found {list(x.shape)} and {list(weight.shape)}"
            )
        if math.prod(x.shape[1:]) != weight.shape[1]:
            raise InputError(
                f"expected a weight of {math.prod(x.shape[1:])} columns, found {list(weight.shape)}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InputError(f"bias: expected {[weight.shape[0]]}, found {list(bias.shape)}")
        return (((x.shape[0], weight.shape[0]), dtype),)

    def reference(self, x, weight, bias=None):
        weight = float64(weight)
        y = float64(x).reshape(len(x), weight.shape[1]) @ weight.T
        if bias is not None:
            y = y + float64(bias)
        return y if self.activation is None else self.activation.reference(y)

    def flops(self, inputs, outputs) -> int:
        return 2 * outputs[0].size * self.terms(inputs)

    def terms(self, inputs) -> int:
        return inputs[1].shape[1]
