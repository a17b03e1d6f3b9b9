"""linear_layers: linear layers one after another, each with a function at its end, and then maybe softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import InputError
from .linear import Linear
from .operator import Operator, Value
from .softmax import Softmax
from .unary import Unary


@dataclass(frozen=True)
class LinearLayers(Operator):
    """Inputs: x [N, ...] taken as [N, F]; of each layer weight [M, F] and bias [M] or None. Output: [N, M].

    Attributes:
        activations: what is applied to each layer's sums, or None.
        softmax: whether the output is the softmax of each row.
    """

    kind: ClassVar[str] = "linear_layers"
    activations: tuple[Unary | None, ...] = ()
    softmax: bool = False

    def layers(self, inputs: Sequence[Any]) -> Iterator[tuple[Linear, Any, Any]]:
        """Yields each layer with its weight and bias: values, arrays or whatever stands for them."""
        for activation, *parameters in zip(
            self.activations, inputs[1::2], inputs[2::2], strict=True
        ):
            yield Linear(activation), *parameters

    def infer(self, inputs):
        if len(inputs) != 1 + 2 * len(self.activations) or not self.activations:
            raise InputError(
                f"expected x and a weight and a bias of {len(self.activations)} layers, "
                f"found {len(inputs)} inputs"
            )
        x = inputs[0]
        for layer, weight, bias in self.layers(inputs):
            ((shape, dtype),) = layer.infer([x, weight, *([] if bias is None else [bias])])
            x = Value("", shape, dtype)
        return ((x.shape, x.dtype),)

    def reference(self, x, *parameters):
        for layer, weight, bias in self.layers((x, *parameters)):
            x = layer.reference(x, weight, bias)
        return Softmax().reference(x) if self.softmax else x

    def flops(self, inputs, outputs) -> int:
        return sum(2 * inputs[0].shape[0] * weight.size for _, weight, _ in self.layers(inputs))

    def terms(self, inputs) -> int:
        return max(weight.shape[1] for _, weight, _ in self.layers(inputs))
