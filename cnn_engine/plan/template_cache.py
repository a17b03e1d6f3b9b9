"""The templates that a program has: when one is made of its plans, and which one a plan is made by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from ..devices.cpu import CpuDevice
from ..errors import CnnEngineError
from ..graph.dims import Sizes
from ..graph.graph import Graph
from ..lower.lowering import Program
from ..lower.placement import Placed
from .template import Sized, Template

_log = logging.getLogger(__name__)

#: Plans of a graph from which on there is a template, and templates of one graph, where sizes decide where
#: its values lie.
WORTH_ONE, MOST_TEMPLATES = 3, 4


class _Known:
    """The templates of a graph, and the sizes of which plans were built without one."""

    def __init__(self) -> None:
        self.templates: list[Template] = []
        self.sizes: set[Sizes] = set()


def _key(program: Program, symbolic: Graph, part: Hashable) -> tuple:
    return id(symbolic), program.placement.threads, part


def sized(
    program: Program, sizes: Sizes, pixels: bool, symbolic: Graph | None, part: Hashable = None
) -> Sized | None:
    """Returns the arguments of a plan for these sizes, where a template has it.

    Args:
        symbolic: the program's graph of these sizes with symbols, or None.
        part: of the graph; None: all of it.
    """
    known = None if symbolic is None else program.templates.get(_key(program, symbolic, part))
    for template in () if known is None else known.templates:
        found = template.at(
            sizes,
            lambda: program.placed(sizes, pixels),
            lambda: program.laid(sizes, pixels),
        )
        if found is not None:
            return found
    return None


def learn(
    program: Program,
    placed: Placed,
    symbolic: Graph | None,
    sizes: Sizes,
    part: Hashable = None,
    cut: Callable[[Graph], Graph] = lambda graph: graph,
    at_once: bool = False,
) -> bool:
    """Makes a template of a plan, once there were several of one graph; returns whether it did.

    Args:
        placed: the graph, or the part of it, that was planned.
        symbolic: the whole graph with symbols, or None.
        cut: returns the part of that which was planned.
        at_once: whether one is worth it now.
    """
    if symbolic is None or program.own or program.tuner is not None:
        return False
    if set(placed.spaces.values()) != {"cpu"}:  # its memory and its kernels would be the CPU's
        return False
    known = program.templates.setdefault(_key(program, symbolic, part), _Known())
    known.sizes.add(sizes)
    if len(known.templates) >= MOST_TEMPLATES or not (at_once or len(known.sizes) >= WORTH_ONE):
        return False
    known.sizes.clear()
    # Without the memory that plans share, which would live as long as the template.
    own = program.with_memory(CpuDevice().allocate_alone)
    try:
        known.templates.append(Template(own, placed, cut(symbolic), sizes))
    except (TypeError, ValueError, KeyError, CnnEngineError) as error:
        _log.debug("no template for %s: %s", sizes, error)
        return False
    return True
