"""Constants: what depends on nothing else is computed beforehand, what nothing needs goes."""

from __future__ import annotations

from ..folding import fold, worth_folding
from ..graph import Graph, Note


def fold_constants(graph: Graph) -> Graph:
    """Computes the nodes whose inputs are constants, where the results are not too large."""
    constants = dict(graph.constants)
    folded, made, notes = [], {}, []
    for node in graph.nodes:
        if not all(name is None or name in constants for name in node.inputs):
            continue
        arrays = [None if name is None else constants[name] for name in node.inputs]
        outputs = graph.outputs_of(node)
        if worth_folding(node.op, graph.inputs_of(node), outputs, arrays):
            results = fold(node.op, outputs, arrays)
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
