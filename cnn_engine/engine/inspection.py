"""What the engine makes of a graph, without running it: rewrites, kernels on each device, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from .. import kernels
from ..devices.cpu import CpuDevice
from ..devices.threads import default as default_threads
from ..errors import UnsupportedError
from ..graph import passes
from ..graph.graph import Graph, Node, Note, Value
from ..kernels import Kernel
from ..lower import fused_network
from ..lower.placement import Placement, check_own, own_kernel, place
from ..plan.builder import plan_memory

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class NodeFacts:
    """One node as the engine runs it.

    Attributes:
        name, kind: of the node and its operator.
        attributes: what its record says, defaults left out, as text.
        inputs: the values that it reads and that are no constants.
        outputs: what it makes.
        parameters: elements of the constants that it reads.
        flops, bytes: of one pass; see :class:`~cnn_engine.operators.operator.Cost`.
        covers: the names of the file's nodes that it stands for.
        kernels: device -> the kernel that runs it, alone or with others, ``NumPy``, ``CPU`` (on the CPU
            instead) or ``none`` (its output is the same memory under another shape).
        reasons: device -> why no kernel of ours runs it there.
    """

    name: str
    kind: str
    attributes: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: int
    flops: int
    bytes: int
    covers: tuple[str, ...]
    kernels: Mapping[str, str]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Inspection:
    """A graph before and after the engine's rewrites.

    Attributes:
        given, graph: before and after.
        nodes: facts of every node of ``graph``.
        parameter_bytes: of all constants.
        peak_bytes, alive_bytes: of the memory that values share on the CPU, and the most that is alive at
            once; inputs, outputs and constants are not among it.
        notes: what was rewritten, and why.
    """

    given: Graph
    graph: Graph
    nodes: tuple[NodeFacts, ...]
    parameter_bytes: int
    peak_bytes: int
    alive_bytes: int
    notes: tuple[Note, ...]

    @property
    def parameters(self) -> int:
        return sum(array.size for array in self.graph.constants.values())

    @property
    def flops(self) -> int:
        return sum(node.flops for node in self.nodes)

    @property
    def bytes(self) -> int:
        return sum(node.bytes for node in self.nodes)

    def kinds(self) -> list[tuple[str, int, int]]:
        """Returns (operator, nodes, FLOPs), the most FLOPs first."""
        counts = Counter(node.kind for node in self.nodes)
        flops = {kind: sum(n.flops for n in self.nodes if n.kind == kind) for kind in counts}
        return sorted(
            ((kind, count, flops[kind]) for kind, count in counts.items()),
            key=lambda row: (-row[2], -row[1], row[0]),
        )


def inspect(given: Graph, named: Mapping[str, Kernel] | None = None) -> Inspection:
    """Returns what the engine makes of ``given``.

    Args:
        named: node, or operator -> a kernel of a user's own.

    Raises:
        UnsupportedError: a kernel of a user's own can run none of its nodes.
    """
    named = named or {}
    simple = passes.simplify(given)
    graph = passes.fuse(simple)
    run = {device: _Run(graph, device, plain=bool(named)) for device in DEVICES}
    if not named and (chained := _chained(simple)) is not None:
        run["cpu"] = chained
    for kind in dict.fromkeys(kernel.device for kernel in named.values()):
        _check_named(graph, kind, {t: k for t, k in named.items() if k.device == kind})
    nodes = tuple(_facts(graph, node, run, named) for node in graph.nodes)
    laid = run["cpu"].graph
    peak, alive = _memory(laid)
    total = sum(array.nbytes for array in graph.constants.values())
    more = laid.notes[len(graph.notes) :]
    notes = (*graph.notes, *(replace(note, why=f"{note.why} (on the CPU)") for note in more))
    return Inspection(given, graph, nodes, total, peak, alive, notes)


class _Run:
    """A graph as a device runs it in float32 (on CUDA: a GPU with tensor cores).

    Attributes:
        graph: the graph; ``plain``, with kernels of a user's own or over a chain, as it is.
        nodes: the name of a node that was there before -> the node that it is part of.
    """

    def __init__(self, graph: Graph, device: str, plain: bool) -> None:
        self.graph = graph
        if not plain:
            self.graph = passes.lay_channels_last(graph, device)
            if device == "cuda":
                self.graph = passes.round_operands(self.graph, "float32")
            else:
                self.graph = passes.fuse_expansions(passes.mark_stem(self.graph))
        self.nodes = {
            name: node for node in self.graph.nodes for name in node.covers or (node.name,)
        }


def _chained(graph: Graph) -> _Run | None:
    """Returns the graph as the CPU runs it where one kernel runs its first layers, or None."""
    try:
        node = fused_network.chain(
            graph, "float32", fused_network.longest(graph, "float32", CpuDevice())
        )
    except UnsupportedError:
        return None
    covered = [graph.nodes[graph.places[name]] for name in node.covers]
    names = [name for inner in covered for name in inner.covers or (inner.name,)]
    whole = replace(node, covers=tuple(names))
    return _Run(graph.replaced(covered, [whole]), "cpu", plain=True)


def _facts(
    graph: Graph, node: Node, run: Mapping[str, _Run], named: Mapping[str, Kernel]
) -> NodeFacts:
    """Returns the facts of ``node`` and of what it is part of on each device."""
    cost = graph.cost_of(node)
    names = dict.fromkeys(name for name in node.inputs if name is not None)
    last = (node.covers or (node.name,))[-1]
    found = {
        device: _kernel(own.nodes.get(last), own.graph, device, named)
        for device, own in run.items()
    }
    return NodeFacts(
        node.name,
        node.op.kind,
        attributes_of(node),
        tuple(graph.values[name] for name in names if name not in graph.constants),
        graph.outputs_of(node),
        sum(graph.constants[name].size for name in names if name in graph.constants),
        cost.flops,
        cost.bytes,
        node.covers or (node.name,),
        {device: name for device, (name, _) in found.items()},
        {device: why for device, (_, why) in found.items() if why},
    )


def attributes_of(node: Node) -> str:
    """Returns the record's attributes that are not its defaults, as ``stride=(2, 2), groups=4``."""
    found = []
    for field in fields(node.op):
        value = getattr(node.op, field.name)
        if value != field.default:
            found.append(f"{field.name}={getattr(value, 'kind', value)}")
    return ", ".join(found)


def _kernel(
    node: Node | None, graph: Graph, device: str, named: Mapping[str, Kernel]
) -> tuple[str, str]:
    if node is None or node.op.kind in kernels.ALIASES:
        return "none", ""
    if (kernel := own_kernel(node, graph, device, named, {})) is not None:
        return f"{kernel.name} (--kernel)", ""
    kernel, why = kernels.choose(node, graph, device, reduction=False)
    if kernel is not None:
        return kernel.name, ""
    return "NumPy" if device == "cpu" else "CPU", why


def _check_named(graph: Graph, device: str, named: Mapping[str, Kernel]) -> None:
    """Refuses kernels of a user's own that run nothing on a kind of device."""
    refused: dict[str, str] = {}
    chosen = {node.name: own_kernel(node, graph, device, named, refused) for node in graph.nodes}
    check_own(named, chosen, refused)


def _memory(graph: Graph) -> tuple[int, int]:
    """Returns the bytes of the CPU's arena, and the most that are alive at once."""
    device, threads = CpuDevice(), default_threads()
    placed = place(graph, Placement(device, "resident", threads), None, None)
    planned = plan_memory(placed, lambda kind: device, threads)
    return planned.sizes.get("cpu", 0), planned.alive.get("cpu", 0)
