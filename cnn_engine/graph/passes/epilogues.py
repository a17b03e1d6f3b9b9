"""What follows a convolution's sum, a residual addition and an activation, into the convolution's record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...operators import KINDS
from ...operators.binary import Add
from ...operators.channels_last import Conv2dNhwc
from ...operators.conv2d import Conv2d
from ...operators.unary import Unary
from ..graph import Graph, Node
from .rewriting import Rewrites, absent, covering, only_user

#: Every function from floats to floats.
FUNCTIONS = tuple(
    kind
    for kind, record in KINDS.items()
    if issubclass(record, Unary)
    and record.types in ("floats", "numbers")
    and record.result is Unary.result
)

#: Which functions an operator's kernels apply to their sums.
EPILOGUES: Mapping[str, tuple[str, ...]] = {"conv2d": ("relu", "clip"), "conv2d_nhwc": FUNCTIONS}

#: The same on CUDA, of linear layers with constant weights too.
EPILOGUES_ON_CUDA: Mapping[str, tuple[str, ...]] = {**EPILOGUES, "linear": FUNCTIONS}


def fuse_residuals(graph: Graph) -> Graph:
    """Makes the addition of a tensor of the same shape to a convolution's output part of the convolution."""
    rewrites = Rewrites(graph)
    for add in graph.nodes:
        if type(add.op) is not Add or add.inputs[0] == add.inputs[1]:
            continue
        # Of two convolutions the later one takes the sum: the earlier one is done by then.
        makers = [(graph.producers.get(name), name) for name in add.inputs]
        for index in _later_first(graph, makers):
            conv, name = makers[index]
            other = add.inputs[1 - index]
            if (
                conv is not None
                and type(conv.op) in (Conv2d, Conv2dNhwc)
                and conv.op.activation is None
                and absent(conv, 3)
                and only_user(graph, name) is add
                and graph.values[other].shape == graph.values[name].shape
                and rewrites.free(conv, add)
            ):
                bias = None if absent(conv, 2) else conv.inputs[2]
                merged = replace(
                    conv, inputs=(*conv.inputs[:2], bias, other, *conv.inputs[4:]), outputs=add.outputs,
                    covers=covering(conv, add),
                )  # fmt: skip
                rewrites.replace([conv, add], [merged], "it is added to the sum while it is stored")
                break
    return rewrites.apply()


def _later_first(graph: Graph, makers) -> list[int]:
    places = graph.places
    found = [-1 if node is None else places[node.name] for node, _ in makers]
    return sorted((0, 1), key=lambda index: -found[index])


def fuse_activations(graph: Graph, functions: Mapping[str, tuple[str, ...]] = EPILOGUES) -> Graph:
    """Makes a function of a convolution's output part of the convolution.

    Args:
        functions: operator -> names of the functions that its kernels can apply.
    """
    rewrites = Rewrites(graph)
    for node in graph.nodes:
        allowed = functions.get(node.op.kind, ())
        if not allowed or node.op.activation is not None:
            continue
        if node.op.kind == "linear" and node.inputs[1] not in graph.constants:
            continue
        after = only_user(graph, node.outputs[0])
        if after is None or after.op.kind not in allowed or not rewrites.free(node, after):
            continue
        merged = _with_activation(node, after)
        rewrites.replace([node, after], [merged], "it is applied to the sum while it is stored")
    return rewrites.apply()


def _with_activation(node: Node, after: Node) -> Node:
    op = replace(node.op, activation=after.op)
    return replace(node, op=op, outputs=after.outputs, covers=covering(node, after))
