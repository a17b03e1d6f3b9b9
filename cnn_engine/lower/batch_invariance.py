"""Decides for every batch as for one, so that an image has the same bits in any: ``batch_invariant=True``.

Passes and kernels are chosen at :data:`DECIDING_BATCH` images. Graphs of other batches have the same nodes,
with the numbers of their own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from .. import kernels
from ..errors import CnnEngineError, UnsupportedError
from ..graph.dims import Sizes, holds_dims
from ..graph.graph import Graph, Node
from ..graph.specialization import Specializations
from ..kernels import Kernel
from ..target import Target

#: The batch that decides for all: one of the larger of those for which nothing is special.
DECIDING_BATCH = 16


def deciding(sizes: Sizes) -> Sizes:
    """Returns the sizes whose decisions count for these; those of no image are their own."""
    return sizes if sizes.is_empty else sizes.with_batch(DECIDING_BATCH)


def resized(graph: Graph, known: Specializations, decided: Sizes, sizes: Sizes) -> Graph:
    """Returns a lowered graph for another batch.

    Args:
        graph: lowered, of the sizes ``decided``.
        known: what it was lowered from.

    Raises:
        UnsupportedError: the graph depends on its batch in other ways than by its shapes.
    """
    symbolic = known.symbolic(decided)
    if symbolic is None:
        raise _refused(graph, f"one that is made for any batch, found: {known.refusal}")
    before, after = (symbolic.at(size, known) for size in (decided, sizes))
    nodes = dict(zip((node.name for node in before.nodes), before.nodes, strict=True))
    of_size = {
        node.name: node
        for node in after.nodes
        if holds_dims(symbolic.graph.nodes[symbolic.graph.positions[node.name]].op)
    }

    def numbered(node: Node) -> Node:
        if node.name not in of_size:
            return node
        if node.op != nodes[node.name].op:
            raise _refused(graph, f"node {node.name} as it is in every batch, found it rewritten")
        return replace(node, op=of_size[node.name].op)

    constants = {**graph.constants, **{name: after.constants[name] for name in after.sized}}
    try:
        found = replace(
            graph, inputs=after.inputs, nodes=tuple(map(numbered, graph.nodes)),
            constants=constants, at=after.at, like=None,
        )  # fmt: skip
    except CnnEngineError as error:
        raise _refused(graph, f"shapes that follow the batch, found: {error}") from None
    for name in graph.outputs:
        if found.values[name].shape != after.values[name].shape:
            shapes = found.values[name].shape, after.values[name].shape
            raise _refused(graph, f"{name} of shape {shapes[1]}, found {shapes[0]}")
    return found


def check(graph: Graph, chosen: Mapping[str, Kernel], target: Target) -> None:
    """Refuses a batch that the kernels which are the same for all cannot run.

    Args:
        chosen: node -> its kernel.

    Raises:
        UnsupportedError: says which node, and why.
    """
    for node, kernel in _running(graph, chosen, target):
        if reason := kernel.refuses(node, graph, target):
            raise _refused(graph, f"a batch for {kernel.name} of node {node.name}: {reason}")


def check_parts(
    graph: Graph, one: Callable[[], Graph], chosen: Mapping[str, Kernel], target: Target
) -> None:
    """Refuses a graph of which a node is to take one image after the other, and cannot.

    Args:
        one: returns the graph of one image.
        chosen: node -> its kernel.

    Raises:
        UnsupportedError: says which node.
    """
    if graph.batch is None:  # what there is is one image
        return
    for node, kernel in _running(graph, chosen, target):
        if kernels.is_batch_invariant(kernel, node, graph):
            continue
        for value in (*graph.inputs_of(node), *graph.outputs_of(node)):
            if value is None or value.name in graph.constants:
                continue
            shape = one().values[value.name].shape
            if value.shape != (*(graph.batch * first for first in shape[:1]), *shape[1:]):
                wanted = f"images in front of {value.name}, which node {node.name} takes one by one"
                raise _refused(graph, f"{wanted}, found shape {value.shape}")


def graph_of_calls(node: Node, kernel: Kernel, graph: Graph) -> Graph:
    """Returns the graph in which a node's arrays are those of each of its calls: of all images, or of one."""
    images, values = graph.batch or 1, dict(graph.values)
    if images == 1 or kernel.device != "cuda" or kernels.is_batch_invariant(kernel, node, graph):
        return graph
    for name in (*node.inputs, *node.outputs):
        if name is not None and name not in graph.constants:
            value = graph.values[name]
            values[name] = replace(value, shape=(value.shape[0] // images, *value.shape[1:]))
    found = object.__new__(Graph)
    found.__dict__.update(graph.__dict__, values=MappingProxyType(values))
    return found


def _running(
    graph: Graph, chosen: Mapping[str, Kernel], target: Target
) -> Iterator[tuple[Node, Kernel]]:
    """Yields the nodes that the device runs as they are, with their kernels."""
    for node in graph.nodes:
        kernel = chosen.get(node.name)
        if kernel is not None and kernel.device == target.kind and not kernel.rewrite(node, graph):
            yield node, kernel


def _refused(graph: Graph, why: str) -> UnsupportedError:
    return UnsupportedError(f"batch_invariant: {graph.name}: expected {why}")
