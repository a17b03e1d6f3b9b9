"""Placement of nodes: the device and kernel of each, and the copies that this needs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from .. import kernels
from ..devices.cpu import CpuDevice
from ..errors import UnsupportedError
from ..graph.graph import Graph, Node
from ..graph.guards import Guard, recorded
from ..graph.terms import Evaluator
from ..kernels import Kernel
from ..operators.copy import Copy
from ..target import Target


@dataclass(frozen=True)
class Move(Copy):
    """A copy from one memory space to another.

    Attributes:
        direction: ``h2d``, ``d2h``, or ``d2d`` and ``h2h`` within a place.
        what: what the reports call it.
    """

    direction: str = "h2d"
    what: str = ""


@dataclass(frozen=True)
class Placement:
    """Devices of nodes and of their data.

    Attributes:
        device: the engine's device.
        data_mode: see ``--data-mode``.
        threads: CPU threads.
    """

    #: What runs on the device in ``transfer`` and ``managed``, as the thesis began.
    CONVOLUTIONS: ClassVar[frozenset[str]] = frozenset({"conv2d", "conv_transpose2d"})

    device: Any
    data_mode: str
    threads: int

    def wants(self, kind: str) -> str:
        """Returns the kind of device that is to run an operator."""
        whole = self.data_mode == "resident"
        return self.device.kind if whole or kind in self.CONVOLUTIONS else "cpu"

    def target_of(self, kind: str) -> Target:
        """Returns the capabilities of a kind of device: the engine's, or the host CPU."""
        return self.device.target if kind == self.device.kind else CpuDevice().target

    @property
    def regions(self) -> bool:
        """Whether data directives around a node copy for it, so that no copy is a node of its own."""
        return self.device.kind == "openacc" and self.data_mode == "transfer"


@dataclass(frozen=True)
class Placed:
    """A graph of which every node has its place and its kernel.

    Attributes:
        graph: with its copies; its outputs lie where the caller wants them.
        spaces: node -> the kind of its device: ``cpu``, ``cuda``, ``openacc``.
        kernels: node -> its kernel; a node that runs nothing has none.
        memory_spaces: value -> a kind of device, or ``managed``, which both reach.
        outputs: what the caller calls the outputs.
        fallbacks: node -> why it runs on another device than the rest, or without a kernel of ours.
        refused: node -> why a kernel of a user's own does not run it.
    """

    graph: Graph
    spaces: Mapping[str, str]
    kernels: Mapping[str, Kernel]
    memory_spaces: Mapping[str, str]
    outputs: tuple[str, ...]
    fallbacks: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=dict)


class KernelsOfAllSizes:
    """Kernels of nodes of graphs with symbols, with the decisions that led to them."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], tuple[Kernel, tuple[Guard, ...]] | None] = {}

    def of(
        self, graph: Graph, choose: Callable[[Node, Graph], Kernel | None]
    ) -> Callable[[Node], Kernel | None]:
        """Returns a function that gives a node of ``graph`` its kernel, where that is known; else None.

        Args:
            choose: chooses the kernel of a node of a graph.
        """
        symbolic = graph.symbolic
        if symbolic is None or not graph.is_substituted:
            return lambda node: None
        at, known = Evaluator(graph.sizes.numbers), {}

        def holds(guard: Guard) -> bool:
            key = id(guard)
            if key not in known:
                known[key] = guard.holds(at)
            return known[key]

        def kernel(node: Node) -> Kernel | None:
            key = id(symbolic), node.name
            if key not in self._found:
                self._found[key] = self._decided(graph, node, choose)
            found = self._found[key]
            return found[0] if found is not None and all(map(holds, found[1])) else None

        return kernel

    @staticmethod
    def _decided(
        graph: Graph, node: Node, choose: Callable[[Node, Graph], Kernel | None]
    ) -> tuple[Kernel, tuple[Guard, ...]] | None:
        symbolic = graph.symbolic
        position = symbolic.positions.get(node.name)
        if position is None or not graph.sized.isdisjoint(node.inputs):
            return None
        try:
            with recorded(graph.sizes.numbers) as guards:
                kernel = choose(symbolic.nodes[position], symbolic)
                if kernel is None or kernel.rewrite(symbolic.nodes[position], symbolic):
                    return None
        except Exception:  # what takes numbers is asked again for each size
            return None
        return kernel, tuple(guards.values())


def place(
    graph: Graph,
    placement: Placement,
    variant: str | None,
    reduction: bool | None,
    on_device: bool = False,
    own: Mapping[str, Kernel] | None = None,
    tuned: Mapping[str, Kernel] | None = None,
    of_all_sizes: KernelsOfAllSizes | None = None,
) -> Placed:
    """Chooses a place and a kernel for every node, and inserts the copies between them.

    Args:
        variant: the kernel that operators which have one of that name must run; None: the fastest.
        reduction: whether sums are shared among lanes; None: what is fastest.
        on_device: whether the caller's inputs and outputs are memory of the device.
        own: node, or operator -> the kernel of a user's own that runs it, or all of them that it can.
        tuned: node -> the kernel that was measured to be faster than the first that can run it.
        of_all_sizes: what was decided for other sizes, of a device without kernels of a user's own.

    Raises:
        UnsupportedError: a node's operator has the variant, but it cannot run this node.
    """
    found: dict[str, Kernel] = {}
    fallbacks: dict[str, str] = {}
    refused: dict[str, str] = {}

    def choose(graph: Graph, node: Node) -> Kernel | None:
        kind = node.op.kind
        if kind in kernels.ALIASES:
            return None
        wanted = placement.wants(kind)
        kernel = own_kernel(node, graph, wanted, own or {}, refused)
        kernel = kernel or (tuned or {}).get(node.name)
        if kernel is not None:
            return kernel
        kernel, why = kernels.choose(node, graph, placement.target_of(wanted), variant, reduction)
        if kernel is None and kernels.is_variant(kind, wanted, variant):
            raise UnsupportedError(f"variant: {variant}: node {node.name} ({kind}): {why}")
        if kernel is None and wanted != "cpu":
            fallbacks[node.name] = f"on the CPU: {why}"
            kernel, why = kernels.choose(
                node, graph, placement.target_of("cpu"), variant, reduction
            )
        if kernel is None:
            fallbacks[node.name] = f"NumPy on the CPU: {why}"
            kernel = kernels.NUMPY
        return kernel

    old: list[Node] = []
    new: list[Node] = []
    known = None
    if of_all_sizes is not None and not own and not tuned:
        known = of_all_sizes.of(graph, partial(chosen, placement, variant, reduction))
    for node in graph.nodes:
        kernel = None if known is None else known(node)
        kernel = kernel or choose(graph, node)
        if kernel is not None:
            found[node.name] = kernel
            if nodes := kernel.rewrite(node, graph):
                old.append(node)
                new += nodes
    if old:
        graph = graph.replaced(old, new)
        for node in new:
            if (kernel := choose(graph, node)) is not None:
                found[node.name] = kernel
    check_own(own or {}, found, refused)
    spaces = {name: kernel.device for name, kernel in found.items()}
    placed = _with_copies(graph, placement, spaces, found, fallbacks, on_device)
    return replace(placed, refused=refused)


def chosen(
    placement: Placement, variant: str | None, reduction: bool | None, node: Node, graph: Graph
) -> Kernel | None:
    """Returns the fastest kernel of the device that can run a node; None for one that runs nothing."""
    kind = node.op.kind
    if kind in kernels.ALIASES:
        return None
    target = placement.target_of(placement.wants(kind))
    return kernels.choose(node, graph, target, variant, reduction)[0]


def own_kernel(
    node: Node, graph: Graph, device: str, own: Mapping[str, Kernel], refused: dict[str, str]
) -> Kernel | None:
    """Returns the user's kernel of a node, or None where there is none or it cannot run it."""
    kernel = own.get(node.name) or own.get(node.op.kind)
    if kernel is None or kernel.op != node.op.kind:
        return None
    if kernel.device != device:
        refused[node.name] = f"it is for {kernel.device}, and the node runs on {device}"
        return None
    plain = node
    if (nodes := kernel.rewrite(node, graph)) is not None:
        graph = graph.replaced([node], nodes)
        plain = nodes[0]
    reason = kernel.refuses(plain, graph)
    if reason is not None:
        refused[node.name] = reason
        return None
    return kernel


def check_own(
    own: Mapping[str, Kernel], chosen: Mapping[str, Kernel | None], refused: Mapping[str, str]
) -> None:
    """Refuses kernels of a user's own that run nothing."""
    for target, kernel in own.items():
        if target in refused or not any(row is kernel for row in chosen.values()):
            reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
            raise UnsupportedError(
                f"kernels: {kernel.name}: expected {target} that it can run, found "
                f"{reasons or 'none in the network'}"
            )


def _with_copies(
    graph: Graph,
    placement: Placement,
    spaces: dict[str, str],
    chosen: dict[str, Kernel],
    fallbacks: dict[str, str],
    on_device: bool,
) -> Placed:
    """Inserts copies as nodes where a value is needed in another place than the one where it is made."""
    kind = placement.device.kind
    caller = kind if on_device else "cpu"
    managed = placement.data_mode == "managed"
    transfer = placement.data_mode == "transfer" and not placement.regions
    inputs = {value.name for value in graph.inputs}
    outside = set(graph.outputs)
    home = dict.fromkeys(inputs, caller)
    copies: dict[tuple[str, str], str] = {}  # (value, place) -> its name there
    names = {node.name for node in graph.nodes}
    nodes: list[Node] = []

    def move(value: str, source: str, to: str, what: str, keep: bool = True) -> str:
        if (value, to) in copies:
            return copies[value, to]
        direction = f"{'h' if source == 'cpu' else 'd'}2{'h' if to == 'cpu' else 'd'}"
        made = f"{value}@{to}"
        while made in home or made in graph.values:
            made += "'"
        name = what
        while name in names:
            name += "'"
        names.add(name)
        nodes.append(Node(name, Move(direction, what), (value,), (made,)))
        spaces[name] = "cpu" if direction == "h2h" else kind
        chosen[name] = kernels.of("copy", spaces[name])[0]
        home[made] = "managed" if managed else to
        if keep:
            copies[value, to] = made
        return made

    for node in graph.nodes:
        own = [n for n in node.inputs if n is not None and n not in graph.constants]
        if node.name not in spaces:  # an alias, where its input is
            spaces[node.name] = "cpu" if not own else _reached(home[own[0]], caller)
        place = "cpu" if placement.regions else spaces[node.name]  # where its memory is
        reads = {}
        for value in own:
            if home[value] in (place, "managed") or value in reads:
                continue
            resident = placement.data_mode == "resident" and value in inputs
            what = value if resident else f"{node.name} input"
            reads[value] = move(
                value, home[value], place, what, keep=not (transfer and place != "cpu")
            )
        if reads:
            node = replace(node, inputs=tuple(reads.get(n, n) for n in node.inputs))
        nodes.append(node)
        for value in node.outputs:
            home[value] = "managed" if managed else place
            alone = value in outside and not graph.consumers[value]
            if transfer and place != "cpu" and not alone:
                # As the thesis began: what a convolution writes goes back to the host at once.
                copies[value, "cpu"] = move(value, "cuda", "cpu", f"{node.name} output")
    outputs: list[str] = []
    producers = {value: node for node in nodes for value in node.outputs}
    taken = set(inputs) | set(graph.constants)  # memory that is spoken for
    for value in graph.outputs:
        source = producers.get(value)
        lies = home.get(value, "cpu")
        if (
            lies == "managed"
        ):  # written where the caller wants it, if his side writes it and no other reads it
            lies = spaces[source.name]
            if graph.consumers[value]:
                taken.add(value)
        if lies != caller:
            value = copies.get((value, caller)) or move(value, lies, caller, value)
        elif memory_of(value, producers) in taken:
            value = move(value, lies, caller, value, keep=False)
        taken.add(memory_of(value, producers))
        outputs.append(value)
    placed = graph
    same = len(nodes) == len(graph.nodes) and all(map(operator.is_, nodes, graph.nodes))
    if not same or tuple(outputs) != graph.outputs:
        placed = replace(graph, nodes=tuple(nodes), outputs=tuple(outputs), like=graph)
    return Placed(placed, spaces, chosen, home, graph.outputs, fallbacks)


def _reached(home: str, caller: str) -> str:
    return caller if home == "managed" else home


def memory_of(value: str, producers: Mapping[str, Node]) -> str:
    """Returns the value of which ``value`` is but another shape."""
    while (node := producers.get(value)) is not None and node.op.kind in kernels.ALIASES:
        value = node.inputs[0]
    return value
