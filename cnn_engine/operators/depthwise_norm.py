"""depthwise_norm: y = layer_norm(conv2d(x, weight) + bias), each channel convolved by itself

Of images [N, H, W, C], of each place over its channels: as the blocks of ConvNeXt (Liu et al., 2022) begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .channels_last import Conv2dNhwc
from .norm import LayerNorm
from .operator import Operator, need


@dataclass(frozen=True)
class DepthwiseNorm(Operator):
    """Inputs: x [N, H, W, C], weight [C, 1, R, S], scale [C]; None or: bias [C], shift [C].

    Attributes:
        convolution: the convolution, with nothing before it, nothing added and no function behind it.
        epsilon: added to the variance.
    """

    kind: ClassVar[str] = "depthwise_norm"
    convolution: Conv2dNhwc
    epsilon: float = 1e-5

    def _split(self, inputs):
        """Returns what the convolution reads, and what the normalisation reads besides."""
        x, weight, scale, bias, shift = (*inputs, None, None)[:5]
        return [x, weight, bias], [scale, shift]

    def infer(self, inputs):
        need(inputs, 3, 5)
        convolved, normalised = self._split(inputs)
        ((shape, dtype),) = self.convolution.infer(convolved)
        return LayerNorm(-1, self.epsilon).infer([type(inputs[0])("", shape, dtype), *normalised])

    def reference(self, *inputs):
        convolved, normalised = self._split(inputs)
        y = self.convolution.reference(*convolved)
        return LayerNorm(-1, self.epsilon).reference(y, *normalised)

    def flops(self, inputs, outputs) -> int:
        convolved, _ = self._split(inputs)
        return self.convolution.flops(convolved, outputs)

    def terms(self, inputs) -> int:
        return self.convolution.terms(inputs) + inputs[0].shape[-1]
