"""The graph that an import ends with: outputs in the file's types, and the nodes that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...errors import InputError
from ...operators.cast import Cast
from ...operators.data_dependent import DataDependent
from ...operators.operator import Value
from ..folding import held
from ..graph import Graph, Node
from .importer import Importer
from .refusal import ALL_FILL_BYTES
from .weights import release


def finish_outputs(importer: Importer, stated: Mapping[str, str | None]) -> None:
    """Casts outputs that the file has in float16 to that, once they are computed in float32.

    Args:
        stated: output -> the type that the file states of it, or None.
    """
    renamed: dict[str, str] = {}
    for name, dtype in stated.items():
        value = importer.values.get(name)
        narrow = dtype or importer.narrow.get(name)
        if value is None or value.dtype != "float32" or narrow != "float16":
            continue
        importer.narrow[name] = narrow
        wide = renamed[name] = importer.fresh(f"{name}/float32/")
        importer.values[wide] = replace(value, name=wide)
        importer.values[name] = replace(value, dtype="float16")
        importer.narrow[wide] = narrow
        if name in importer.rounded:
            importer.rounded[wide] = importer.rounded.pop(name)
        if name in importer.constants:
            importer.constants[wide] = importer.constants[name]
            with np.errstate(over="ignore"):
                importer.constants[name] = importer.constants[name].astype(np.float16)
    if not renamed:
        return
    importer.nodes = [
        replace(
            node,
            inputs=tuple(renamed.get(i, i) for i in node.inputs),
            outputs=tuple(renamed.get(o, o) for o in node.outputs),
        )
        if not renamed.keys().isdisjoint((*node.inputs, *node.outputs))
        else node
        for node in importer.nodes
    ]
    for name, wide in renamed.items():
        if name not in importer.constants:
            importer.add_cast(wide, name, "float16")


def _settle_rounding(importer: Importer, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Returns ``nodes`` with the casts that round float32 to fewer bits and back, where that is all
    they are for: a network that was made to run in float16 is not to lose more than it must."""
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.inputs:
            if name is not None:
                readers.setdefault(name, []).append(node)

    def meant(name: str) -> bool:
        return all(isinstance(node.op, Cast) for node in readers.get(name, ()))

    return tuple(
        replace(node, op=Cast("float32", importer.rounded[node.outputs[0]]))
        if node.outputs[0] in importer.rounded and meant(node.outputs[0])
        else node
        for node in nodes
    )


def _prune(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[Node, ...]:
    """Returns the nodes that the outputs depend on."""
    needed = set(outputs)
    kept = []
    for node in reversed(nodes):
        if needed & set(node.outputs):
            kept.append(node)
            needed.update(name for name in node.inputs if name is not None)
    return tuple(reversed(kept))


def build(
    importer: Importer, name: str, inputs: Sequence[Value], outputs: Sequence[str], **facts
) -> Graph:
    """Returns the graph that an import made.

    Raises:
        UnsupportedNodesError: some nodes cannot be run.
    """
    importer.refuse_problems()
    # What is found may decide what nothing reads: see :func:`cnn_engine.graph.stages.cut`.
    finding = [o for n in importer.nodes if isinstance(n.op, DataDependent) for o in n.outputs]
    nodes = _settle_rounding(importer, _prune(importer.nodes, [*outputs, *importer.read, *finding]))
    used = {name for node in nodes for name in node.inputs} | set(outputs)
    computed = importer.constants.expressions.keys() & used if importer.finds else ()
    constants = {
        name: importer.constants[name]
        for name in importer.constants
        if name in used and name not in computed
    }
    inputs = (*inputs, *(importer.values[name] for name in sorted(computed)))
    filled = sum(array.nbytes for array in constants.values() if held(array) < array.nbytes)
    if filled > ALL_FILL_BYTES:
        raise InputError(
            f"{importer.source}: expected up to {ALL_FILL_BYTES} bytes of constants that hold one number, "
            f"found {filled}"
        )
    for key, array in constants.items():
        constants[key] = np.ascontiguousarray(array).reshape(array.shape)
    for key, array in constants.items():
        if array.dtype.kind == "f" and array.size and np.isnan(array.min()):
            place = [int(i) for i in np.argwhere(np.isnan(array))[0]]
            raise InputError(
                f"{importer.source}: constant {key!r}: expected numbers, found NaN at {place}"
            )
        release(array)
    return Graph(
        name, tuple(inputs), tuple(outputs), nodes, constants, notes=tuple(importer.notes), **facts
    )
