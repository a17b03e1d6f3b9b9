"""Shared parts of kernels that run several nodes at once over images [N, H, W, C]: reasons and epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...graph.graph import Graph, Node, Value
from ..arguments import NO_IMAGES, epilogue, input_images
from ..convolution import limits
from ..kernel import Call

#: Why regions are left to the kernels of their nodes.
NOT_SOONER = "its nodes one by one are sooner there, or it takes no such sizes"
ONLY_CLAMPS = "expected relu, clip or nothing after its sums"
AT_ANY_ADDRESS = "expected images that lie in the engine's memory, at a multiple of 16 bytes"


def is_clamp(function: Any) -> bool:
    """Whether a function, or none, is one that limits values alone."""
    return limits(function) is not None


def not_in_16_bits(node: Node, *images: Value) -> str | None:
    """Returns why a kernel that multiplies images as they lie, in 16 bits, does not run a region of them."""
    records = {getattr(part.op, "compute_dtype", None) for part in node.op.nodes} - {None}
    if len({value.storage_dtype for value in images} | records) != 1 or not images[0].storage_dtype:
        return "expected images in 16 bits, in the type that weights are rounded to"
    return None


def images_of(node: Node, graph: Graph, *positions: int) -> list[Value]:
    """Returns the inputs at ``positions`` that a region has, and its outputs."""
    read = (node.inputs[place] for place in positions)
    return [graph.values[name] for name in (*read, *node.outputs) if name is not None]


#: The convolutions of a block, as far as it has them.
ROLES = ("first", "second", "third")


def epilogues(call: Call, biases: Sequence[Any], residual: int | None = None) -> list[Any]:
    """Returns the Epilogue of each convolution of a block, which are as many as the biases.

    Args:
        residual: the input that is added to the second one.
    """
    found = []
    for place, (role, bias) in enumerate(zip(ROLES, biases, strict=False)):
        added = NO_IMAGES if residual is None or place != 1 else input_images(call, residual)
        found += epilogue(call.node.op.activation(role), bias, added, call.overflow)
    return found
