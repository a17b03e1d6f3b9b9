"""Finds tensors that stand for integers in a graph, for the rewrites of quantized networks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....operators.operator import Value
from ....operators.quantized import EIGHT_BITS, DequantizeLinear, QuantizeLinear
from ...graph import Graph, Node
from ..rewriting import absent, constant


@dataclass(frozen=True)
class Quantized:
    """A tensor of integers and its quantization.

    Attributes:
        node: that quantizes or dequantizes it.
        integers: the tensor's value.
        scale, zero: names of constants; None: 0.
        steps, offsets: their numbers, float32 and whole, of one dimension or none.
        axis: the dimension along which they differ, or None.
    """

    node: Node
    integers: Value
    scale: str
    zero: str | None
    steps: np.ndarray
    offsets: np.ndarray
    axis: int | None

    @property
    def is_8_bit(self) -> bool:
        return self.integers.dtype in EIGHT_BITS

    @property
    def step(self) -> np.float32:
        """The scale of a tensor that has one."""
        return np.float32(self.steps.reshape(-1)[0])

    @property
    def offset(self) -> int:
        """The zero point of a tensor that has one."""
        return int(self.offsets.reshape(-1)[0])

    def same_as(self, other: Quantized) -> bool:
        """Whether equal integers stand for equal numbers; both have one scale."""
        return (
            self.integers.dtype == other.integers.dtype
            and self.step == other.step
            and self.offset == other.offset
        )


def _quantized(graph: Graph, node: Node, integers: str) -> Quantized | None:
    steps = constant(graph, node, 1)
    offsets = None if absent(node, 2) else constant(graph, node, 2)
    if steps is None or node.op.block_size or (offsets is None and not absent(node, 2)):
        return None
    value = graph.values[integers]
    if not value.dtype.startswith(("int", "uint")) or steps.dtype != np.float32:
        return None
    rank = len(value.shape)
    axis = None if steps.size == 1 or not rank else node.op.axis % rank
    offsets = np.zeros(1, np.int64) if offsets is None else offsets.astype(np.int64)
    zero = None if absent(node, 2) else node.inputs[2]
    return Quantized(node, value, node.inputs[1], zero, steps, offsets, axis)


def dequantized(graph: Graph, name: str | None) -> Quantized | None:
    """Returns the integers that a float tensor is made of by constants alone; else None."""
    node = None if name is None else graph.producers.get(name)
    if node is None or not isinstance(node.op, DequantizeLinear):
        return None
    return _quantized(graph, node, node.inputs[0])


def quantizes(graph: Graph, node: Node | None) -> Quantized | None:
    """Returns the integers that ``node`` makes, where it quantizes by one constant scale; else None."""
    if node is None or not isinstance(node.op, QuantizeLinear):
        return None
    found = _quantized(graph, node, node.outputs[0])
    return None if found is None or found.axis is not None else found
