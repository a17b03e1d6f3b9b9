"""Folds constants, shares equal ones, and drops unused nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...folding import fold, held, worth_folding
from ...graph import Graph, Note, same_bits

#: Elements of a constant that are compared first, and bytes from which it is compared at all.
SAMPLED, SHARED_BYTES = 64, 4096


def fold_constants(graph: Graph) -> Graph:
    """Computes the nodes whose inputs are constants, where the results are not too large.

    What several nodes make in the same way of the same constants is one array.
    """
    constants = dict(graph.constants)
    folded, made, notes = [], {}, []
    known: dict[tuple, list[np.ndarray]] = {}
    for node in graph.nodes:
        if not all(name is None or name in constants for name in node.inputs):
            continue
        arrays = [None if name is None else constants[name] for name in node.inputs]
        outputs = graph.outputs_of(node)
        if worth_folding(node.op, graph.inputs_of(node), outputs, arrays):
            how = node.op, tuple(map(id, arrays))
            if how not in known:
                known[how] = fold(node.op, outputs, arrays)
            results = known[how]
            new = dict(zip(node.outputs, results, strict=True))
            constants.update(new)
            made.update(new)
            folded.append(node)
            notes.append(Note(node.name, "a constant", "all its inputs are constants"))
    return graph.replaced(folded, (), made, notes) if folded else graph


def drop_unused(graph: Graph) -> Graph:
    """Takes away the nodes that no output depends on."""
    needed, unused = set(graph.outputs), []
    for node in reversed(graph.nodes):
        if needed.isdisjoint(node.outputs):
            unused.append(node)
        else:
            needed.update(name for name in node.inputs if name is not None)
    notes = [Note(node.name, "nothing", "no output depends on it") for node in unused]
    return graph.replaced(unused, (), notes=notes) if unused else graph


def share_constants(graph: Graph) -> Graph:
    """Returns the graph with one array for all constants that are equal, so that they are packed once."""
    first: dict[tuple, list[np.ndarray]] = {}
    shared: dict[str, np.ndarray] = {}
    for name, array in graph.constants.items():
        if held(array) < SHARED_BYTES:
            continue
        positions = np.linspace(0, array.size - 1, min(SAMPLED, array.size)).astype(np.int64)
        candidates = first.setdefault(
            (array.dtype, array.shape, array.flat[positions].tobytes()), []
        )
        known = next((one for one in candidates if one is array or same_bits(one, array)), None)
        if known is None:
            candidates.append(array)
        elif known is not array:
            shared[name] = known
    return replace(graph, constants={**graph.constants, **shared}) if shared else graph
