"""Memory of a pass: an arena per memory space, shared by values that are never alive together.

Nothing is allocated here. Which values need memory, for how long, and where each lies in its arena is worked
out from the graph alone, so that a batch that cannot fit is refused before anything is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..graph.graph import Graph, Node
from .packing import Lifetime, most_alive, pack
from .shared_parts import SharedParts
from .storages import Planner, Region, Storage, aligned


@dataclass(frozen=True)
class MemoryPlan:
    """Positions of values in memory.

    Attributes:
        sizes: arena -> its bytes.
        offsets: value -> (arena, first byte).
        storage: value -> (the value whose memory holds it, first byte in it), for values that have none of
            their own: those written in place, seen under another shape, or part of a concatenation.
        pitches: value -> the elements from one row of its last dimension to the next, for values that are
            columns of a concatenation's.
        workspaces: node -> (arena, first byte) of its kernel's scratch memory.
        alive: arena -> the most bytes that are alive at once, which no plan can be below.
        lifetimes: arena -> what lies in it: values, and (node,) for a node's scratch memory.
    """

    sizes: Mapping[str, int]
    offsets: Mapping[str, tuple[str, int]]
    storage: Mapping[str, tuple[str, int]]
    workspaces: Mapping[str, tuple[str, int]]
    alive: Mapping[str, int]
    pitches: Mapping[str, int] = field(default_factory=dict)
    lifetimes: Mapping[str, Sequence[Lifetime]] = field(default_factory=dict)


def alive_between(graph: Graph, nodes: Sequence[Node]) -> int:
    """Returns the most bytes of activations of ``graph`` that are alive at once, none shared."""
    positions = graph.positions
    return most_alive(
        Lifetime(
            name, graph.values[name].nbytes, positions[node.name],
            max((positions[user.name] for user in graph.consumers[name]), default=positions[node.name]),
        )
        for node in nodes
        for name in node.outputs
    )  # fmt: skip


def plan(
    graph: Graph,
    arena_of: Callable[[str], str],
    *,
    in_place: Callable[[Node], bool],
    is_alias: Callable[[Node], bool],
    workspace: Callable[[Node], int] = lambda node: 0,
    workspace_arena: Callable[[Node], str] = lambda node: "cpu",
    allows_pitch: Callable[[Node, int | None], bool] = lambda node, place: False,
) -> MemoryPlan:
    """Plans the memory of one pass.

    Inputs, constants and outputs of the graph are the caller's, and take none of the arenas. Where decisions
    are recorded, dimensions may be open: offsets in storages are then expressions, and arenas are packed as
    for the numbers by which all is decided.

    Args:
        arena_of: the arena of a value.
        in_place: whether a node's output 0 may be written over its input 0.
        is_alias: whether a node's output is its input under another shape.
        workspace: bytes of scratch memory of a node.
        allows_pitch: whether a node's input of that place, or its outputs (None), may be columns of more.
    """
    planner = Planner(graph, arena_of)
    fixed = {value.name for value in graph.inputs} | set(graph.constants)
    outputs = set(graph.outputs)
    storages, root = planner.storages, planner.root
    for name in (*fixed, *outputs):
        storages[name] = Storage(None, graph.values[name].nbytes, 0, len(graph.nodes))
    for index, node in enumerate(graph.nodes):
        alias = is_alias(node)
        for place, name in enumerate(node.outputs):
            value = graph.values[name]
            if place == 0 and (alias or in_place(node)) and node.inputs[0] is not None:
                source, offset = planner.find(node.inputs[0])
                held = storages[source]
                dies = held.arena is not None and held.last == index
                if name in outputs:
                    # An output that a reshape makes: what is reshaped is written there at once.
                    if (
                        alias
                        and held.arena is not None
                        and offset == 0
                        and held.nbytes == value.nbytes
                    ):
                        root[source] = (name, 0)
                        for region, step in held.written:
                            storages[name].written.add(region, step)
                        del storages[source]
                        continue
                    if alias:
                        raise ValueError(f"{name}: expected an output with memory of its own")
                elif alias or (dies and offset == 0 and held.nbytes == value.nbytes):
                    if not alias and any(
                        other is not None and planner.find(other)[0] == source
                        for other in node.inputs[1:]
                    ):
                        pass  # read as another input too, element against element of another place
                    else:
                        root[name] = (source, offset)
                        held.last = max(held.last, planner.last_use(name))
                        if not alias:
                            held.written.add(Region.whole(0, held.nbytes), index)
                        continue
            if name in outputs:
                continue
            last = max(planner.last_use(name), index)
            storages[name] = Storage(arena_of(name), value.nbytes, index, last)
    if any(node.op.kind in ("concat", "split", "slice") for node in graph.nodes):
        sharing = SharedParts(planner, outputs, is_alias, allows_pitch)
        sharing.split()
        sharing.concatenate()
    return _packed(planner, workspace, workspace_arena)


def _packed(
    planner: Planner,
    workspace: Callable[[Node], int],
    workspace_arena: Callable[[Node], str],
) -> MemoryPlan:
    arenas: dict[str, list[Lifetime]] = {}
    for name, held in planner.storages.items():
        if held.arena is not None:
            life = Lifetime(name, aligned(held.nbytes), held.first, held.last)
            arenas.setdefault(held.arena, []).append(life)
    for index, node in enumerate(planner.graph.nodes):
        if nbytes := workspace(node):
            life = Lifetime((node.name,), aligned(nbytes), index, index)
            arenas.setdefault(workspace_arena(node), []).append(life)
    sizes, offsets, alive, workspaces = {}, {}, {}, {}
    for arena, lifetimes in arenas.items():
        found, sizes[arena] = pack(lifetimes)
        alive[arena] = most_alive(lifetimes)
        for life in lifetimes:
            place = (arena, found.get(life.name, 0))
            if isinstance(life.name, tuple):
                workspaces[life.name[0]] = place
            else:
                offsets[life.name] = place
    storage = {name: planner.find(name) for name in planner.root}
    return MemoryPlan(sizes, offsets, storage, workspaces, alive, planner.pitches, arenas)
