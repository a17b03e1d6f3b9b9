"""Shared parts of passes: a list of replacements, applied at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...operators.shaping import Concat
from ..graph import Graph, Node, Note
from ..mapped import read


class Rewrites:
    """Replacements in one graph, none of which touches a node of another."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._touched: set[str] = set()
        self._removed: list[Node] = []
        self._added: list[Node] = []
        self._constants: dict[str, np.ndarray] = {}
        self._renamed: dict[str, str] = {}
        self._read_instead: set[str] = set()  # the names in the place of those
        self._outputs = set(graph.outputs)
        self._notes: list[Note] = []
        self._fresh: set[str] = set()
        self._numbers: dict[str, int] = {}  # name -> the number of the last that fresh() made of it

    def free(self, *nodes: Node) -> bool:
        """Whether no replacement has touched ``nodes``."""
        return not any(node.name in self._touched for node in nodes)

    def replace(
        self,
        nodes: Sequence[Node],
        by: Sequence[Node],
        why: str | Mapping[str, str],
        constants: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Replaces ``nodes`` by ``by``; the first of ``by`` takes their name.

        Args:
            why: for all of them, or by the name of each.

        Nothing is done where another replacement has touched one of ``nodes``: the next round finds the rest.
        """
        if not self.free(*nodes):
            return
        into = by[0].name if by else "nothing"
        kept = {node.name for node in by}
        self._touched.update(node.name for node in nodes)
        self._removed += nodes
        self._added += by
        self._constants.update(constants or {})
        self._notes += [
            Note(node.name, into, why if isinstance(why, str) else why.get(node.name, ""))
            for node in nodes
            if node.name not in kept
        ]

    def drop(self, node: Node, why: str) -> bool:
        """Takes ``node`` away: its users read its input 0 instead. Returns whether it can be."""
        graph, source, output = self.graph, node.inputs[0], node.outputs[0]
        source = self._renamed.get(source, source)
        if output not in self._outputs:
            self._renamed[output] = source
            self._read_instead.add(source)
        else:
            # A graph's output keeps its name: what makes the input takes it.
            maker = graph.producers.get(node.inputs[0])
            if (
                maker is None
                or source != node.inputs[0]
                or source in self._outputs
                or source in self._read_instead
                or not self.free(maker)
            ):
                return False
            self._renamed[source] = output
            self._read_instead.add(output)
        self._touched.add(node.name)
        self._removed.append(node)
        self._notes.append(Note(node.name, "nothing", why))
        return True

    def fresh(self, name: str) -> str:
        """Returns a name that no tensor and no node has, nor any that this has returned."""
        number = self._numbers.get(name, 1)
        found = name if number == 1 else f"{name}#{number}"
        while found in self._fresh or self.graph.has(found):
            number += 1
            found = f"{name}#{number}"
        self._numbers[name] = number
        self._fresh.add(found)
        return found

    def apply(self) -> Graph:
        """Returns the graph with all replacements done."""
        if not self._removed:
            return self.graph
        gone = {node.name for node in self._removed}
        removed, added = list(self._removed), [self._with_names(node) for node in self._added]
        for node in self.graph.nodes:
            changed = self._with_names(node)
            if node.name not in gone and changed is not node:
                removed.append(node)
                added.append(changed)
        return self.graph.replaced(removed, added, self._constants, self._notes)

    def _name(self, name: str | None) -> str | None:
        seen = name
        while seen in self._renamed:
            seen = self._renamed[seen]
        return seen

    def _with_names(self, node: Node) -> Node:
        inputs = tuple(self._name(name) for name in node.inputs)
        outputs = tuple(self._name(name) for name in node.outputs)
        if (inputs, outputs) == (node.inputs, node.outputs):
            return node
        return replace(node, inputs=inputs, outputs=outputs)


def only_user(graph: Graph, name: str) -> Node | None:
    """Returns the one node that reads the tensor ``name``, and reads it once; else None.

    A graph's output has more readers.
    """
    users = graph.consumers[name]
    return users[0] if users and graph.reads[name] == 1 else None


def makers_of(
    graph: Graph, x: str | None, after: Node
) -> tuple[list[Node], tuple[Node] | tuple[()]]:
    """Returns the nodes that make ``x``, and the concatenation of their outputs, if there is one.

    No one else reads what any of them makes, and ``after`` alone reads ``x``: where that is not so, there are
    none.
    """
    maker = None if x is None or only_user(graph, x) is not after else graph.producers.get(x)
    if maker is None:
        return [], ()
    if not isinstance(maker.op, Concat):
        return [maker], ()
    if not all(only_user(graph, name) is maker for name in maker.inputs):
        return [], ()
    parts = [graph.producers.get(name) for name in maker.inputs]
    if None in parts or len({part.name for part in parts}) < len(parts):
        return [], ()
    return parts, (maker,)


def merge_after(
    rewrites: Rewrites,
    merged: Sequence[Node],
    joined: Sequence[Node],
    row: Sequence[Node],
    why: Sequence[str],
    constants: dict[str, np.ndarray] | None = None,
) -> None:
    """Puts ``merged``, which replace a row of nodes, in its place and that of their constants.

    Args:
        joined: the concatenation between both, if :func:`makers_of` gave one.
        why: of each node of the row.
    """
    last, *others = *joined, *merged
    ends = replace(last, outputs=row[-1].outputs, covers=covering(last, *row))
    reasons = {node.name: reason for node, reason in zip(row, why, strict=True)}
    rewrites.replace([*merged, *joined, *row], [ends, *others], reasons, constants)


def covering(*nodes: Node) -> tuple[str, ...]:
    """Returns the names that ``nodes`` cover together, each its own where it covers none."""
    return tuple(dict.fromkeys(name for node in nodes for name in node.covers or (node.name,)))


def wide(weight: np.ndarray) -> np.ndarray:
    """Returns weights in a type that has room for their products with others of their own."""
    return read(weight).astype(np.longdouble if weight.dtype == np.float64 else np.float64)


def folded(
    exact: np.ndarray, dtype: np.dtype, *, apart: int | None = None, beside: np.ndarray | float = 0
) -> np.ndarray | None:
    """Returns computed constants in ``dtype``, or None where it has no room for them.

    All must be finite. Factors below the smallest normal number would lose what they multiply; they may do so
    beside larger ones, or beside a shift that their products with an input would not change: one of at most
    the root of the largest number, 2^64 in float32. Channels that training has let die are of this kind.

    Args:
        exact: in a wider type.
        apart: leading dimensions whose elements each have factors of their own: 1 of filters [K, ...], whose
            products are added up. None: these are no factors, and small ones are as small as what they make.
        beside: the shifts, float64, one for each element of dimension 0.
    """
    with np.errstate(all="ignore"):
        made = np.ascontiguousarray(exact, dtype)
        if not np.isfinite(made).all():
            return None
        if apart is not None:
            limits = np.finfo(dtype)
            largest = np.abs(exact).reshape(*exact.shape[:apart], -1).max(axis=-1, initial=0)
            shifts = np.reshape(np.abs(beside), (-1, *[1] * (apart - 1)))
            lost = (largest > 0) & (largest < limits.smallest_normal)
            if (lost & (largest * limits.max**0.5 >= limits.eps * shifts)).any():
                return None
    return made


def folded_affine(
    norm: Node, parameters: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (a, b), [C] each, where a batch norm of these constants makes a[c] * x + b[c]; else None."""
    dtype = parameters[0].dtype
    a, b = norm.op.affine(*parameters)
    scale, shift = folded(a, dtype, apart=1, beside=b), folded(b, dtype)
    return None if scale is None or shift is None else (scale, shift)


def constant(graph: Graph, node: Node, index: int) -> np.ndarray | None:
    """Returns input ``index`` of ``node`` where it is a constant; else None."""
    name = node.inputs[index] if index < len(node.inputs) else None
    return None if name is None else graph.constants.get(name)


def absent(node: Node, index: int) -> bool:
    """Whether ``node`` has no input ``index``."""
    return index >= len(node.inputs) or node.inputs[index] is None
