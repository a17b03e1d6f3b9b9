"""Several nodes that a kernel runs at once as one: a pattern finds them, the kernel table may refuse them.

A fused block is a pattern in ``patterns.py``, a row of the kernel table under the pattern's name, and the
kernel. :func:`fuse_regions` is the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from ....operators.region import Part, Region
from ...graph import Graph, Node
from ..rewriting import Rewrites, covering, only_user

#: Returns why no kernel runs a region sooner than others run its nodes, or None where one does. The graph
#: still has the nodes, and not the region.
WhyNot = Callable[[Graph, Node], str | None]


@dataclass(frozen=True)
class Role:
    """One node of a pattern.

    Attributes:
        name: of the part that it becomes.
        fits: whether a node can have the role.
        reads: (role, place): this node's input ``place`` is what ``role`` makes.
        makes: (role, place): what this node makes is input ``place`` of ``role``.
        optional: whether the pattern fits without it.
        shared: whether nodes outside may read what it makes; else one node of the region alone does.
        stays: whether the node stays in the graph, too, for others that read it.
    """

    name: str
    fits: Callable[[Graph, Node], bool]
    reads: tuple[str, int] | None = None
    makes: tuple[str, int] | None = None
    optional: bool = False
    shared: bool = False
    stays: bool = False


@dataclass(frozen=True)
class Match:
    """Nodes that a pattern found.

    Attributes:
        region: the node that is to stand for the others.
        nodes: which go.
        constants: new ones, which the region reads.
    """

    region: Node
    nodes: Sequence[Node]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)


class Finder(Protocol):
    """A finder for :func:`fuse_regions`: a :class:`Pattern`, or a class where no chain or tree suffices."""

    name: str

    def match(self, rewrites: Rewrites, anchor: Node) -> Match | None:
        """Returns the region that ``anchor`` is the first node of, or None."""


def _any(graph: Graph, nodes: Mapping[str, Node]) -> bool:
    return True


@dataclass(frozen=True)
class Pattern:
    """A chain or a small tree of nodes.

    Attributes:
        name: of the regions: their kind.
        roles: first the anchor, then each after the role that it is beside.
        inputs: the region's inputs in order, each as ``role.place``; ``a.0|b.0`` is ``b.0`` where the region
            has no ``a``. All constants and images from outside that kernels tell apart.
        outputs: roles whose results are outputs, as far as the region has them.
        named: the role whose node gives the region its name and its place.
        fits: whether nodes that fit one by one fit together.
    """

    name: str
    roles: tuple[Role, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    named: str
    fits: Callable[[Graph, Mapping[str, Node]], bool] = _any

    def match(self, rewrites: Rewrites, anchor: Node) -> Match | None:
        """Returns the region that ``anchor`` is the first role of, or None."""
        graph, found = rewrites.graph, {}
        for role in self.roles:
            node = anchor if role is self.roles[0] else self._beside(graph, role, found)
            if node is not None and rewrites.free(node) and role.fits(graph, node):
                found[role.name] = node
            elif not role.optional:
                return None
        if not self.fits(graph, found):
            return None
        nodes = {role.name: found[role.name] for role in self.ordered if role.name in found}
        stays = [role.name for role in self.roles if role.stays]
        gone = [node for name, node in nodes.items() if name not in stays]
        made = region_of(self.name, nodes, self.inputs, self.outputs)
        return Match(replace(made, name=nodes[self.named].name, covers=covering(*gone)), gone)

    @property
    def ordered(self) -> list[Role]:
        """The roles in an order in which nodes can run."""
        found: list[Role] = []
        for role in self.roles:
            names = [other.name for other in found]
            found.insert(names.index(role.makes[0]) if role.makes else len(found), role)
        return found

    def _beside(self, graph: Graph, role: Role, found: Mapping[str, Node]) -> Node | None:
        """Returns the node that may have ``role``, by the edge between it and one that was found."""
        other, place = role.reads or role.makes
        if other not in found:
            return None
        if role.makes:
            node = found[other]
            value = node.inputs[place] if place < len(node.inputs) else None
            made = graph.producers.get(value)
            alone = made is not None and (role.shared or only_user(graph, value) is node)
            return made if alone else None
        (value,) = found[other].outputs[:1]
        if not self._role(other).shared:
            alone = only_user(graph, value)
            readers = [] if alone is None else [alone]
        else:
            readers = graph.consumers[value]
        return next(
            (
                node
                for node in readers
                if node.inputs[place : place + 1] == (value,)
                and node.inputs.count(value) == 1
                and role.fits(graph, node)
            ),
            None,
        )

    def _role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)


def region_of(
    name: str, nodes: Mapping[str, Node], inputs: Sequence[str], outputs: Sequence[str]
) -> Node:
    """Returns the node of a region.

    Args:
        name: the region's kind.
        nodes: role -> node of one output, in an order in which they can run.
        inputs, outputs: as a :class:`Pattern` has them. What nodes read besides must be made by one of them,
            or be one of these inputs.
    """
    slots: dict[tuple[str, int], str] = {}
    outer: list[str | None] = []
    known: dict[str, str] = {}
    for slot in inputs:
        positions = [
            (role, int(place)) for role, place in (one.split(".") for one in slot.split("|"))
        ]
        role, place = next((one for one in positions if one[0] in nodes), positions[0])
        tensor = nodes[role].inputs[place : place + 1] if role in nodes else ()
        slots[role, place] = local = slot.split("|")[0]
        outer += tensor or (None,)
        if outer[-1] is not None:
            known.setdefault(outer[-1], local)
    known.update((node.outputs[0], role) for role, node in nodes.items())
    parts = []
    for role, node in nodes.items():
        own = [
            slots.get((role, place)) or (tensor and known[tensor])
            for place, tensor in enumerate(node.inputs)
        ]
        own += [
            slots.get((role, place))
            for place in range(len(own), 1 + max((p for r, p in slots if r == role), default=-1))
        ]
        while own and own[-1] is None:
            own.pop()
        parts.append(Part(role, node.op, tuple(own), (role,)))
    made = [role for role in outputs if role in nodes]
    local = tuple(slot.split("|")[0] for slot in inputs)
    op = Region(name, tuple(parts), local, tuple(made))
    last = next(reversed(nodes.values()))
    return Node(last.name, op, tuple(outer), tuple(nodes[role].outputs[0] for role in made))


def fuse_regions(graph: Graph, patterns: Sequence[Finder], why_not: WhyNot | None = None) -> Graph:
    """Makes regions of nodes that fit ``patterns``: of each node the first pattern that is not refused.

    Args:
        why_not: None: nothing is refused.
    """
    rewrites = Rewrites(graph)
    for anchor in graph.nodes:
        for pattern in patterns if rewrites.free(anchor) else ():
            found = pattern.match(rewrites, anchor)
            if found is None or (why_not is not None and why_not(graph, found.region)):
                continue
            why = f"together they are {pattern.name}"
            rewrites.replace(found.nodes, [found.region], why, found.constants)
            break
    return rewrites.apply()
