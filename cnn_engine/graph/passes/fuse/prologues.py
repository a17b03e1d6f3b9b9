"""Fuses scale, shift and activation into the prologue of a channels-last 1x1 convolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ....operators.binary import Mul
from ....operators.channels_last import Conv2dNhwc
from ....operators.norm import BatchNorm
from ....operators.shaping import Concat, Reshape
from ....operators.unary import Relu
from ...graph import Graph, Node, Note
from ..rewriting import Rewrites, absent, constant, covering, folded_affine, only_user


@dataclass
class _Prologue:
    """What ``nodes`` do to x: times ``affine``'s or ``factors``' numbers per channel, at least ``floor``."""

    x: str
    nodes: list[Node] = field(default_factory=list)
    floor: float | None = None
    affine: tuple[np.ndarray, np.ndarray] | None = None
    factors: str | None = None


def fuse_prologues(graph: Graph, run: int = 1) -> Graph:
    """Fuses scale, shift and clamp of a 1x1 convolution's input into the convolution.

    The batch norm, the relu or the product with one number per channel of an image that did so go, where no
    one else reads what they make.

    Args:
        run: channels that convolutions read at once, where they can do so: 16 bytes of them.
    """
    rewrites = Rewrites(graph)
    if any(width % run for width in _columns(graph)):
        return graph
    into: dict[str, str] = {}
    for conv in graph.nodes:
        found = _prologue(graph, conv.inputs[0]) if _can_fuse_prologue(graph, conv) else None
        if found is not None and any(
            graph.values[name].shape[-1] % run for name in (found.x, conv.outputs[0])
        ):
            continue
        if found is None or not found.nodes:
            continue
        name = rewrites.fresh(f"{conv.name}.scale")
        scale = shift = None
        by, constants = [], {}
        if found.affine is not None:
            scale, shift = name, rewrites.fresh(f"{conv.name}.shift")
            constants = dict(zip((scale, shift), found.affine, strict=True))
        elif found.factors is not None:
            scale = name
            images, *_, channels = graph.values[found.factors].shape
            shape = (images, channels) if images > 1 else (channels,)
            by.append(Node(name, Reshape(shape), (found.factors,), (scale,)))
        bias, residual = (None if absent(conv, place) else conv.inputs[place] for place in (2, 3))
        merged = replace(
            conv,
            op=replace(conv.op, floor=found.floor),
            inputs=(found.x, conv.inputs[1], bias, residual, scale, shift),
            covers=covering(*reversed(found.nodes), conv),
        )
        rewrites.replace([conv], [merged, *by], "", constants)
        into.update((node.name, conv.name) for node in found.nodes)
    return _without_unread(rewrites.apply(), into)


def _without_unread(graph: Graph, into: Mapping[str, str]) -> Graph:
    """Takes away the nodes of ``into`` that no one reads any more: they are part of another node."""
    needed, gone = set(graph.outputs), []
    for node in reversed(graph.nodes):
        if node.name in into and needed.isdisjoint(node.outputs):
            gone.append(node)
        else:
            needed.update(name for name in node.inputs if name is not None)
    notes = [Note(node.name, into[node.name], "it is applied to what is read") for node in gone]
    return graph.replaced(gone, (), notes=notes) if gone else graph


def _can_fuse_prologue(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a 1x1 convolution that reads its input as it is."""
    op = node.op
    return (
        isinstance(op, Conv2dNhwc)
        and not op.planar
        and op.groups == 1
        and op.floor is None
        and absent(node, 4)
        and graph.values[node.inputs[1]].shape[2:] == (1, 1)
        and not any(op.padding)
    )


def _columns(graph: Graph) -> list[int]:
    """Returns the channels of all images that may be columns of wider rows."""
    return [
        graph.values[name].shape[-1]
        for node in graph.nodes
        if isinstance(node.op, Concat)
        for name in node.inputs
        if len(graph.values[name].shape) == 4
    ]


def _prologue(graph: Graph, x: str) -> _Prologue:
    """Returns what makes ``x`` that can be done where it is read: at most a relu after a scale."""
    found = _Prologue(x)
    node = _made_for_convolutions(graph, x)
    if node is not None and isinstance(node.op, Relu):
        found.x, found.floor, found.nodes = node.inputs[0], 0.0, [node]
        x = found.x
        node = graph.producers.get(x) if only_user(graph, x) is node else None
    if node is None:
        return found
    if isinstance(node.op, BatchNorm) and node.op.axis == -1:
        parameters = [constant(graph, node, place) for place in range(1, 5)]
        if all(array is not None for array in parameters):
            found.affine = folded_affine(node, parameters)
            if found.affine is not None:
                found.x = node.inputs[0]
                found.nodes.append(node)
    elif type(node.op) is Mul:
        for index in (0, 1):
            images, factors = (
                graph.values[node.inputs[place]].shape for place in (index, 1 - index)
            )
            given = node.inputs[1 - index] not in graph.constants
            each = (images[:1], (1,)) if len(images) == len(factors) == 4 else ()
            if given and factors[:1] in each and factors[1:] == (1, 1, images[-1]):
                found.x, found.factors = node.inputs[index], node.inputs[1 - index]
                found.nodes.append(node)
                break
    return found


def _made_for_convolutions(graph: Graph, x: str) -> Node | None:
    """Returns the node that makes ``x`` where only convolutions that take a prologue read it."""
    users = graph.consumers[x]
    if x in graph.outputs or any(
        not _can_fuse_prologue(graph, user) or user.inputs.count(x) > 1 for user in users
    ):
        return None
    return graph.producers.get(x)
