"""Activation functions: y = f(x) for every element. One record a function, named for it.

:attr:`Unary.function` names a kernel's function; ``alpha`` and ``beta`` are its two numbers.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from ..errors import InputError
from .operator import Operator, check_types, float64, need, record


@record
class Unary(Operator):
    """Input: x of any shape; floats, unless the function says otherwise.

    Attributes:
        types: what x may be: ``floats``, ``numbers`` (integers exactly), ``integers`` or ``booleans``.
        alpha, beta: numbers of the function; 0 where it has none.
    """

    in_place: ClassVar[bool] = True
    types: ClassVar[str] = "floats"
    alpha: ClassVar[float] = 0.0
    beta: ClassVar[float] = 0.0

    @property
    def function(self) -> str:
        """The name of the function among a kernel's."""
        return self.kind

    def infer(self, inputs):
        need(inputs, 1)
        (x,) = inputs
        check_types(self.types, x.dtype)
        return ((x.shape, self.result(x.dtype)),)

    def result(self, dtype: str) -> str:
        """Returns the type of the output for an input of ``dtype``."""
        return dtype

    def reference(self, x):
        with np.errstate(all="ignore"):
            return self.of(float64(x))

    def of(self, x: np.ndarray) -> np.ndarray:
        """Returns f(x) for ``x`` in float64, or in its own type of integers."""
        raise NotImplementedError


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def softplus(x: np.ndarray) -> np.ndarray:
    """Returns log(1 + exp(x)), without overflow."""
    return np.logaddexp(x, 0.0)


def erf(x: np.ndarray) -> np.ndarray:
    """Returns the error function."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), np.float64)


@record
class Relu(Unary):
    """max(x, 0); NaN stays NaN."""

    kind: ClassVar[str] = "relu"
    types: ClassVar[str] = "numbers"

    def of(self, x):
        return np.maximum(x, x.dtype.type(0))


@record
class Affine(Unary):
    """alpha * x + beta."""

    kind: ClassVar[str] = "affine"
    alpha: float = 1.0
    beta: float = 0.0

    def of(self, x):
        return self.alpha * x + self.beta


@record
class LeakyRelu(Unary):
    """x, or alpha * x below 0."""

    kind: ClassVar[str] = "leaky_relu"
    alpha: float = 0.01

    def of(self, x):
        return np.where(x < 0, self.alpha * x, x)


@record
class ThresholdedRelu(Unary):
    """x above alpha, else 0."""

    kind: ClassVar[str] = "thresholded_relu"
    alpha: float = 1.0

    def of(self, x):
        return np.where(x > self.alpha, x, 0.0)


@record
class Elu(Unary):
    """x, or alpha * (exp(x) - 1) below 0."""

    kind: ClassVar[str] = "elu"
    alpha: float = 1.0

    def of(self, x):
        return np.where(x < 0, self.alpha * np.expm1(x), x)


@record
class Selu(Unary):
    """beta * x, or beta * alpha * (exp(x) - 1) below 0; beta is ONNX's gamma."""

    kind: ClassVar[str] = "selu"
    alpha: float = 1.67326319217681884765625
    beta: float = 1.05070102214813232421875

    def of(self, x):
        return self.beta * np.where(x < 0, self.alpha * np.expm1(x), x)


@record
class Celu(Unary):
    """x, or alpha * (exp(x / alpha) - 1) below 0."""

    kind: ClassVar[str] = "celu"
    alpha: float = 1.0

    def of(self, x):
        return np.maximum(x, 0.0) + np.minimum(0.0, self.alpha * np.expm1(x / self.alpha))


@record
class Sigmoid(Unary):
    """1 / (1 + exp(-x))."""

    kind: ClassVar[str] = "sigmoid"

    def of(self, x):
        return sigmoid(x)


@record
class HardSigmoid(Unary):
    """alpha * x + beta, held between 0 and 1."""

    kind: ClassVar[str] = "hard_sigmoid"
    alpha: float = 0.2
    beta: float = 0.5

    def of(self, x):
        return np.clip(self.alpha * x + self.beta, 0.0, 1.0)


@record
class HardSwish(Unary):
    """x * (x / 6 + 1/2 held between 0 and 1)."""

    kind: ClassVar[str] = "hard_swish"

    def of(self, x):
        return x * np.clip(x / 6 + 0.5, 0.0, 1.0)


@record
class Swish(Unary):
    """x * sigmoid(alpha * x)."""

    kind: ClassVar[str] = "swish"
    alpha: float = 1.0

    def of(self, x):
        return x * sigmoid(self.alpha * x)


@record
class Mish(Unary):
    """x * tanh(log(1 + exp(x)))."""

    kind: ClassVar[str] = "mish"

    def of(self, x):
        return x * np.tanh(softplus(x))


@record
class Gelu(Unary):
    """x * Phi(x), Phi the normal distribution's; or its approximation by tanh.

    Attributes:
        approximate: ``none`` or ``tanh``.
    """

    kind: ClassVar[str] = "gelu"
    approximate: str = "none"

    @property
    def function(self) -> str:
        return "gelu_tanh" if self.approximate == "tanh" else "gelu"

    def of(self, x):
        if self.approximate == "tanh":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + erf(x / math.sqrt(2)))


@record
class Clip(Unary):
    """x held between alpha (the lowest) and beta (the highest); NaN stays NaN.

    The highest wins where it is below the lowest: alpha becomes beta then, so that kernels may take the two
    in either order. A limit that is NaN is refused: max and min, of two numbers, take it, and give NaN.
    """

    kind: ClassVar[str] = "clip"
    types: ClassVar[str] = "numbers"
    alpha: float = -math.inf
    beta: float = math.inf

    def __post_init__(self) -> None:
        if self.alpha > self.beta:
            object.__setattr__(self, "alpha", self.beta)

    def infer(self, inputs):
        if self.alpha != self.alpha or self.beta != self.beta:
            raise InputError(
                f"clip: expected numbers as limits, found {self.alpha} and {self.beta}: max and min take NaN"
            )
        return super().infer(inputs)

    def of(self, x):
        if x.dtype.kind != "f":
            limits = np.iinfo(x.dtype)
            lowest = max(self.alpha, limits.min)
            highest = min(self.beta, limits.max)
            return np.minimum(np.maximum(x, x.dtype.type(lowest)), x.dtype.type(highest))
        return np.minimum(np.maximum(x, self.alpha), self.beta)


@record
class Shrink(Unary):
    """x - beta above alpha, x + beta below -alpha, else 0; alpha is ONNX's lambd."""

    kind: ClassVar[str] = "shrink"
    types: ClassVar[str] = "numbers"
    alpha: float = 0.5
    beta: float = 0.0

    def of(self, x):
        below, above = x < -self.alpha, x > self.alpha
        moved = np.where(below, x + self.beta, np.where(above, x - self.beta, 0))
        return moved.astype(x.dtype)


@record
class Tanh(Unary):
    """The hyperbolic tangent."""

    kind: ClassVar[str] = "tanh"

    def of(self, x):
        return np.tanh(x)


@record
class ScaledTanh(Unary):
    """alpha * tanh(beta * x)."""

    kind: ClassVar[str] = "scaled_tanh"
    alpha: float = 1.0
    beta: float = 1.0

    def of(self, x):
        return self.alpha * np.tanh(self.beta * x)


@record
class Erf(Unary):
    """The error function."""

    kind: ClassVar[str] = "erf"

    def of(self, x):
        return erf(x)


@record
class Softplus(Unary):
    """log(1 + exp(x))."""

    kind: ClassVar[str] = "softplus"

    def of(self, x):
        return softplus(x)


@record
class Softsign(Unary):
    """x / (1 + |x|)."""

    kind: ClassVar[str] = "softsign"

    def of(self, x):
        return x / (1 + np.abs(x))
