"""Describes how the engine would run a graph: passes, kernels of each device, memory.

Each device's nodes come from the very program that an engine's plans are built from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .. import devices, kernels
from ..devices.cpu import CpuDevice
from ..devices.described import DescribedDevice
from ..devices.threads import default as default_threads
from ..errors import CnnEngineError, UnsupportedError
from ..graph.graph import Graph, Node, Note, Value
from ..graph.model import Model
from ..kernels import Kernel, select
from ..lower import fused_network, pipeline
from ..lower.lowering import Program
from ..lower.placement import Move, Placed, Placement
from ..plan.builder import plan_memory
from ..target import Target

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
class DeviceNode:
    """One node as a device runs it.

    Attributes:
        name, kind: of the node and its operator, as ``run`` reports them.
        kernel: that runs it; see :class:`NodeFacts`.
        covers: the names of the file's nodes that it stands for.
        why: why no kernel of ours runs it there; empty where one does.
        outputs: what it makes.
    """

    name: str
    kind: str
    kernel: str
    covers: tuple[str, ...]
    why: str
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class DeviceFacts:
    """The part of a graph that one device runs.

    Attributes:
        name: of the device.
        nodes: in the order in which they run; those of the kernel ``none`` run nothing.
        passes: what made them, in order, with nodes before and after.
        refused: what a kernel could run as one node, and why none does: see :class:`pipeline.Lowered`.
    """

    name: str
    nodes: tuple[DeviceNode, ...]
    passes: tuple[pipeline.Ran, ...]
    refused: tuple[Note, ...]

    @property
    def running(self) -> tuple[DeviceNode, ...]:
        """Nodes that run something: the layers in the report of ``run``."""
        return tuple(node for node in self.nodes if node.kernel != "none")


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
        on: kind of device -> what it runs.
    """

    given: Graph
    graph: Graph
    nodes: tuple[NodeFacts, ...]
    parameter_bytes: int
    peak_bytes: int
    alive_bytes: int
    notes: tuple[Note, ...]
    on: Mapping[str, DeviceFacts]

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


def inspect(
    given: Graph,
    named: Mapping[str, Kernel] | None = None,
    target: Target | None = None,
    dtype: str = "float32",
) -> Inspection:
    """Returns the engine's plan for ``given``: passes, kernels and memory.

    Args:
        named: node, or operator -> a kernel of a user's own.
        target: the GPU or CPU in the place of this machine's.
        dtype: what the target, or the GPU where there is none, may round to what it multiplies.

    Raises:
        InputError: no such data type.
        UnsupportedError: the device does not compute in it, a kernel of a user's own can run none of its
            nodes, or this installation has no cost models of the target's kernels.
    """
    named = named or {}
    cpu, gpu = CpuDevice(), None
    if target is not None and target.kind == "cpu":
        cpu = DescribedDevice(target)
    elif target is not None:
        gpu = DescribedDevice(target)
    simplified = pipeline.lower(
        given, pipeline.Setting(CpuDevice(), simplified=False), (pipeline.SIMPLIFY,)
    )
    model = Model(replace(simplified.graph, found=None))  # as an example has what it finds
    fused = pipeline.lower(
        model.base, pipeline.Setting(CpuDevice()), (*pipeline.LOWER_QDQ, pipeline.FUSE)
    ).graph
    on: dict[str, DeviceFacts] = {}
    for device in (cpu, gpu or _gpu()):
        own = {target: kernel for target, kernel in named.items() if kernel.device == device.kind}
        rounds = device.kind == ("cuda" if target is None else target.kind)
        own_dtype = dtype if rounds else "float32"
        on[device.kind], placed = _on(model, device, own, simplified.ran, own_dtype)
        if device.kind == "cpu":
            planned = plan_memory(placed, lambda kind: CpuDevice(), default_threads())
            more = placed.graph.notes[len(model.base.notes) :]
    makers = {
        kind: {name: node for node in facts.nodes for name in node.covers}
        for kind, facts in on.items()
    }
    nodes = tuple(_facts(fused, node, makers) for node in fused.nodes)
    known = set(fused.notes)
    notes = (
        *fused.notes,
        *(replace(n, why=f"{n.why} (on the CPU)") for n in more if n not in known),
    )
    return Inspection(
        given, fused, nodes, sum(array.nbytes for array in fused.constants.values()),
        planned.sizes.get("cpu", 0), planned.alive.get("cpu", 0), notes, on,
    )  # fmt: skip


def _gpu() -> Any:
    """Returns this machine's GPU, or a description of one that no kernel's cost model is asked for."""
    try:
        return devices.select("cuda")
    except CnnEngineError:
        return DescribedDevice(Target.named("sm_80"), "cuda")


def _on(
    model: Model,
    device: Any,
    own: Mapping[str, Kernel],
    simplified: tuple[pipeline.Ran, ...],
    dtype: str,
) -> tuple[DeviceFacts, Placed]:
    """Returns what an engine of default options runs on a device, and the placed graph.

    Args:
        own: kernels of a user's own for the device.
        simplified: the passes that came before.
        dtype: what kernels may round to what they multiply.
    """
    fused_layers: list[int] = []

    def why_not_fused() -> str | None:
        if own:
            return "kernels of your own run nodes by themselves"
        if isinstance(device, DescribedDevice) and device.kind == "cuda":
            return "there is no GPU to ask"
        try:
            fused_layers.append(fused_network.longest(model.base, dtype, device))
        except UnsupportedError as error:
            return str(error)
        return None

    choice = select.choose(
        device.kind, "auto", None, dtype, "resident", why_not_fused,
        select.layered_dtypes(device, not own),
        lambda: fused_network.why_slower(model.base, fused_layers[0], device),
    )  # fmt: skip
    pixels = any(value.dtype == "uint8" for value in model.base.inputs[:1])
    program = Program(
        lambda batch, pixels: model.base, Placement(device, "resident", default_threads()), choice, dtype,
        first=(model.batch, pixels), fuses=True, own=own,
        fused_layers=fused_layers[0] if fused_layers else None,
    )  # fmt: skip
    lowered = program.lowered(*program.first)
    placed = program.place(lowered.graph)
    simple = {node.name: node.covers or (node.name,) for node in model.base.nodes}
    nodes = []
    for node in placed.graph.nodes:
        if isinstance(node.op, Move):
            continue
        covers = (
            inner for name in node.covers or (node.name,) for inner in simple.get(name, (name,))
        )
        kernel, why = placed.kernels.get(node.name), placed.fallbacks.get(node.name, "")
        shown = "none"
        if kernel is not None:
            shown = kernel.shown_as(node, placed.graph, program.device_of(kernel.device))
            shown = f"{shown} (--kernel)" if kernel.file is not None else shown
            shown = _instead(kernel, device.kind) or shown
        nodes.append(
            DeviceNode(
                node.name, node.op.kind, shown, tuple(covers), why.split(": ", 1)[-1],
                placed.graph.outputs_of(node),
            )
        )  # fmt: skip
    ran = *simplified, *lowered.ran
    return DeviceFacts(device.name, tuple(nodes), ran, lowered.refused), placed


def _instead(kernel: Kernel, device: str) -> str | None:
    """Returns what runs a node that no kernel of ours runs on a device, or None."""
    if kernel is kernels.NUMPY:
        return "NumPy" if device == "cpu" else "CPU"
    return "CPU" if kernel.device != device else None


def _facts(graph: Graph, node: Node, makers: Mapping[str, Mapping[str, DeviceNode]]) -> NodeFacts:
    """Returns the facts of ``node`` and of what it is part of on each device."""
    cost = graph.cost_of(node)
    names = dict.fromkeys(name for name in node.inputs if name is not None)
    covers = node.covers or (node.name,)
    found = {kind: known.get(covers[-1]) for kind, known in makers.items()}
    return NodeFacts(
        node.name,
        node.op.kind,
        attributes_of(node),
        tuple(graph.values[name] for name in names if name not in graph.constants),
        graph.outputs_of(node),
        sum(graph.constants[name].size for name in names if name in graph.constants),
        cost.flops,
        cost.bytes,
        covers,
        {kind: "none" if own is None else own.kernel for kind, own in found.items()},
        {kind: own.why for kind, own in found.items() if own is not None and own.why},
    )


def attributes_of(node: Node) -> str:
    """Returns the record's attributes that are not its defaults, as ``stride=(2, 2), groups=4``."""
    found = []
    for field in fields(node.op):
        value = getattr(node.op, field.name)
        if value != field.default:
            found.append(f"{field.name}={getattr(value, 'kind', value)}")
    return ", ".join(found)
