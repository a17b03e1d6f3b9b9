"""Fuses residual additions and activations into the epilogue of a convolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....operators import KINDS
from ....operators.binary import Add
from ....operators.channels_last import Conv2dNhwc
from ....operators.conv2d import Conv2d
from ....operators.shaping import DepthToSpace, Reshape, Slice, SpaceToDepth, Transpose
from ....operators.unary import Unary
from ...graph import Graph, Node
from ..rewriting import Rewrites, absent, covering, makers_of, merge_after, only_user

#: Every function from floats to floats.
FUNCTIONS = tuple(
    kind
    for kind, record in KINDS.items()
    if issubclass(record, Unary)
    and record.types in ("floats", "numbers")
    and record.result is Unary.result
)

#: Operators that move elements or leave some out: a function may as well be applied before them.
MOVES = (DepthToSpace, Reshape, Slice, SpaceToDepth, Transpose)

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
                rewrites.replace([conv, add], [merged], "it is added in the epilogue")
                break
    return rewrites.apply()


def _later_first(graph: Graph, makers) -> list[int]:
    positions = graph.positions
    found = [-1 if node is None else positions[node.name] for node, _ in makers]
    return sorted((0, 1), key=lambda index: -found[index])


def fuse_activations(graph: Graph, functions: Mapping[str, tuple[str, ...]] = EPILOGUES) -> Graph:
    """Fuses a function of a convolution's output, or of several outputs, into the convolution.

    Between both, elements may be moved or left out: see :data:`MOVES`.

    Args:
        functions: operator -> names of the functions that its kernels can apply.
    """
    rewrites = Rewrites(graph)
    for after in graph.nodes:
        if not isinstance(after.op, Unary):
            continue
        moves = _moves_before(graph, after)
        first = moves[0] if moves else after
        nodes, joined = makers_of(graph, first.inputs[0], first)
        if not nodes or not all(
            _can_fuse_function(graph, node, after, functions) for node in nodes
        ):
            continue
        if not rewrites.free(after, *moves, *nodes, *joined):
            continue
        merged = [replace(node, op=replace(node.op, activation=after.op)) for node in nodes]
        why = "it runs in the epilogue"
        if moves:
            last = replace(moves[-1], outputs=after.outputs)
            merged[-1] = replace(merged[-1], covers=covering(merged[-1], after))
            rewrites.replace([*nodes, moves[-1], after], [*merged, last], why)
        else:
            merge_after(rewrites, merged, joined, [after], [why])
    return rewrites.apply()


def _moves_before(graph: Graph, after: Node) -> list[Node]:
    """Returns the row of nodes before ``after`` that only move what one of them hands to the next."""
    row: list[Node] = []
    reader = after
    while (x := reader.inputs[0]) is not None and only_user(graph, x) is reader:
        maker = graph.producers.get(x)
        if maker is None or type(maker.op) not in MOVES:
            break
        row.insert(0, maker)
        reader = maker
    return row


def _can_fuse_function(
    graph: Graph, node: Node, after: Node, functions: Mapping[str, tuple[str, ...]]
) -> bool:
    """Whether the kernels of ``node`` can apply ``after`` to their sums."""
    return (
        after.op.kind in functions.get(node.op.kind, ())
        and node.op.activation is None
        and (node.op.kind != "linear" or node.inputs[1] in graph.constants)
    )
