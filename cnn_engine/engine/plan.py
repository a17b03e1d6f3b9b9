"""Turns a graph into the steps of one forward pass, with all memory allocated and all arguments ready.

Nothing is decided while a pass runs: a step is a compiled function and its arguments, so that the Python
between two nodes costs well under a microsecond or two. Only the addresses of the caller's inputs and outputs
change from pass to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _cpu
from ..devices import Buffer
from ..devices.cpu import CpuDevice
from ..errors import InputError, UnsupportedError
from ..graph import passes
from ..graph.graph import Graph, Node, Value
from ..graph.onnx.weights import let_go
from . import fused, kernels, memory, storage
from .kernels import Call, Kernel, openacc
from .memory import MemoryPlan
from .placement import Move, Placed, Placement, place
from .replay import Replays
from .variants import Choice, has_tensor_cores

if TYPE_CHECKING:
    from .apart import Lanes

#: What reports call operators that had names before there were records.
REPORT_KINDS = {
    "conv2d": "conv", "max_pool2d": "pool", "linear": "fc", "pad2d": "pad", "conv2d_nhwc": "conv",
    "max_pool2d_nhwc": "pool", "average_pool2d_nhwc": "average_pool2d",
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """Stands for an address that :meth:`Plan.bind` fills in: of an input or output, and bytes beyond."""

    name: str
    offset: int = 0


INPUT, OUTPUT = Slot("images"), Slot("probabilities")

#: Threads that fill page-locked memory, and bytes that are worth another.
MOST_STAGING, STAGED_A_THREAD = 8, 256 << 10

#: Stands for the handle of the stream that a step's work is queued on: see :meth:`Plan.on_stream`.
STREAM = Slot("stream of the pass")


@dataclass(frozen=True)
class Part:
    """A layer of a fused step, with the FLOPs of one call."""

    name: str
    kind: str
    flops: int


@dataclass
class Step:
    """One call of a pass.

    Attributes:
        name, kind: of the node; of a copy, what is copied and ``copy``; ``sync`` waits for the stream.
        place: ``cpu`` or ``cuda``: where the work is done.
        function, args: the call.
        flops, bytes: of the call; see :class:`~cnn_engine.operators.operator.Cost`.
        direction: of a copy, ``h2d`` or ``d2h``; ``h2h`` for staging on the CPU.
        lane: the device whose stream the work is on, where that is not the engine's own.
        kernel: the name of the kernel that runs it.
        parts: of a fused step, its layers.
        staged: whether a copy is between memory that belongs to the plan, so that it can be part of a graph.
    """

    name: str
    kind: str
    place: str
    function: Callable[..., None]
    args: list[Any]
    flops: int = 0
    bytes: int = 0
    direction: str | None = None
    lane: Any = None
    kernel: str = ""
    parts: tuple[Part, ...] = ()
    staged: bool = False


@dataclass
class Plan:
    """The steps of one forward pass, and the memory that they use.

    Attributes:
        batch: images of a pass.
        steps: in order.
        nbytes: place -> bytes of the memory that values share.
        buffers: keeps what the steps use alive.
        chunk: the number of images that move at a time where copies overlap with kernels, else None.
        slots: the names of the inputs, then of the outputs, in the order in which :meth:`bind` takes them.
        stand_ins: node -> why it runs on another device than the rest, or without a kernel of ours.
        outputs: the outputs, by their names, in order.
        replays: how the device's part of a pass becomes one call, or None: every pass goes step by step.
        lanes: how threads take images of their own, or None.
        overflows: who is told of results past float16's range.

    ``calls`` are the steps' functions and arguments, ``bound`` the addresses that were last bound.
    """

    batch: int
    steps: list[Step]
    nbytes: Mapping[str, int]
    buffers: list[Any] = field(repr=False)
    chunk: int | None = None
    slots: Sequence[str] = (INPUT.name, OUTPUT.name)
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, Value] = field(default_factory=dict)
    replays: Replays | None = None
    lanes: Lanes | None = field(default=None, repr=False)
    overflows: Sequence[storage.Overflows] = ()

    def __post_init__(self) -> None:
        self.calls = [(step.function, step.args) for step in self.steps]
        self.bound: tuple[int, ...] = ()
        slots: dict[str, list[tuple[list[Any], int, int]]] = {name: [] for name in self.slots}
        self._streams: list[tuple[list[Any], int]] = []
        for step in self.steps:
            for index, argument in enumerate(step.args):
                if argument is STREAM:
                    self._streams.append((step.args, index))
                elif isinstance(argument, Slot):
                    slots[argument.name].append((step.args, index, argument.offset))
        self._slots = [slots[name] for name in self.slots]
        if self.replays is not None:
            self.on_stream(self.replays.device.stream_handle)

    def on_stream(self, handle: int) -> None:
        """Has steps that say so queue their work on this stream from now on."""
        for args, index in self._streams:
            args[index] = handle

    def bind(self, *addresses: int) -> None:
        """Sets the addresses of the inputs and of where the outputs go, such as images, probabilities."""
        self.bound = addresses
        for places, address in zip(self._slots, addresses, strict=True):
            for args, index, offset in places:
                args[index] = address + offset

    def run(self) -> None:
        """Runs one pass; where inputs and outputs are host memory, they are done on return.

        Raises:
            UnsupportedError: a result of this pass, or of an earlier one that ended only now, did not fit
                into float16.
        """
        if self.lanes is not None:
            self.lanes.run(self.bound[0])
            return
        replays = self.replays
        calls = self.calls if replays is None else replays.calls(self)
        for function, args in calls:
            function(*args)
        if replays is not None and calls is self.calls:
            replays.ran(self)
        self.check()

    def check(self) -> None:
        """Raises UnsupportedError where a result of passes that are done did not fit into float16."""
        for overflow in self.overflows:
            overflow.check()

    def run_steps(self) -> None:
        """Runs one pass step by step, as those whose steps are timed are run."""
        for function, args in self.calls:
            function(*args)


class Program:
    """What plans are built from: a graph for any batch, how it runs, and its constants where they are needed.

    Args:
        graph_of: returns the graph for a batch, whose images are pixels or not.
        placement: where nodes run.
        choice: the variant.
        dtype: what fused kernels compute in, and what others may round the operands of sums to.
        first: the batch that constants are loaded with, and whether its images are pixels.
        fuses: whether what follows a convolution may become part of it, as reports then show it.
        own: node, or operator -> a kernel of a user's own.

    Attributes:
        channels_last: whether images lie with their channels side by side between convolutions.
        replays: whether the device's part of a pass is to become one call.
    """

    def __init__(
        self,
        graph_of: Callable[[int, bool], Graph],
        placement: Placement,
        choice: Choice,
        dtype: str = "float32",
        first: tuple[int, bool] = (1, True),
        fuses: bool = False,
        own: Mapping[str, Kernel] | None = None,
    ) -> None:
        self.graph_of = graph_of
        self.placement = placement
        self.choice = choice
        self.dtype = dtype
        self.first = first
        self.own = dict(own or {})
        self._fuses = fuses and (choice.automatic or choice.variant == "blocked")
        self.channels_last = (
            self._fuses
            and choice.automatic
            and not choice.reduction
            and not self.own  # whose tensors are row-major
            and placement.data_mode == "resident"
            and (placement.device.kind == "cpu" or has_tensor_cores(placement.device))
        )
        self.replays = (
            self._fuses
            and choice.automatic
            and not self.own  # which may queue work elsewhere
            and placement.device.kind == "cuda"
            and placement.data_mode == "resident"
        )
        self._laid: Graph | None = None
        # By the arrays themselves, which are kept: plans hold addresses for as long as there are plans.
        self._uploaded: dict[tuple[int, str], tuple[np.ndarray, Buffer]] = {}
        self._prepared: dict[tuple, tuple[list, Any]] = {}

    def on(self, device: Any) -> Program:
        """Returns the same program with its work on another stream of the same device."""
        other = Program.__new__(Program)
        other.__dict__.update(self.__dict__)
        other.placement = Placement(device, self.placement.data_mode, self.placement.threads)
        return other

    def alone(self) -> Program:
        """Returns the same program on one thread."""
        other = self.on(self.placement.device)
        other.placement = replace(self.placement, threads=1)
        return other

    def placed(self, batch: int, pixels: bool, on_device: bool = False) -> Placed:
        """Returns the graph of a pass with a place and a kernel for every node."""
        graph = self.graph_of(batch, pixels)
        choice = self.choice
        if not choice.layered:
            graph = graph.replaced(graph.nodes, [self._chain(graph, pixels)])
        elif self._fuses:
            graph = passes.fuse(graph)
        if self.channels_last:
            kind = self.placement.device.kind
            stores = kind == "cuda" and self.dtype in storage.DTYPES
            graph = passes.lay_channels_last(graph, kind, run=8 if stores else 4)
            # What the rewrites made of constants is the same for every batch.
            self._laid = self._laid or graph
            graph = graph.sharing(self._laid)
            if kind == "cuda" or self.dtype != "float32":
                graph = passes.round_operands(graph, self.dtype)
            if stores:
                graph = storage.store_rounded(graph, self.dtype, kind)
        variant = None if choice.automatic else choice.variant
        return place(graph, self.placement, variant, choice.reduction, on_device, self.own)

    def _chain(self, graph: Graph, pixels: bool) -> Node:
        if pixels or not self.first[1]:
            return fused.chain(graph, self.dtype)
        # One compiled network for pixels and for what they become.
        op = fused.chain(self.graph_of(1, True), self.dtype).op
        return fused.chain(graph, self.dtype, op.scale, op.offset)

    def load(self) -> None:
        """Brings constants to where the kernels want them, before the first pass."""
        placed = self.placed(*self.first)
        constants = placed.graph.constants

        def nbytes(node: Node) -> int:
            return sum(constants[name].nbytes for name in node.inputs if name in constants)

        # The largest first: what it takes for a moment to bring them is not on top of all others.
        for node in sorted(placed.graph.nodes, key=nbytes, reverse=True):
            kernel = placed.kernels.get(node.name)
            if kernel is None:
                continue
            if kernel.prepare is not None:
                self.prepared(placed.graph, node, kernel)
            for index, name in enumerate(node.inputs):
                if name in constants and not kernel.takes_up(index):
                    self.constant(placed.graph, name, placed.places[node.name])
                if name in constants:
                    let_go(constants[name])

    def constant(self, graph: Graph, name: str, where: str) -> int:
        """Returns the address of a constant in a place."""
        array = graph.constants[name]
        key = id(array), where
        if key not in self._uploaded:
            buffer = self.device_of(where).upload(np.ascontiguousarray(array))
            self._uploaded[key] = array, buffer
        return self._uploaded[key][1].address

    def prepared(self, graph: Graph, node: Node, kernel: Kernel) -> Any:
        """Returns what ``kernel`` made of the constants of ``node``."""
        constants = [graph.constants.get(name) for name in node.inputs]
        key = node.name, kernel, tuple(map(id, constants))
        if key in self._prepared:
            return self._prepared[key][1]
        made = kernel.prepare(node, graph, self.device_of(kernel.device))
        # One that goes on in layers after its kernel has memory of its own: one for each stream.
        if getattr(made, "whole", True):
            self._prepared[key] = constants, made
        return made

    def device_of(self, where: str) -> Any:
        """Returns the device of a place."""
        device = self.placement.device
        return device if device.kind == where else CpuDevice()


def build(program: Program, batch: int, pixels: bool, images_on_device: bool = False) -> Plan:
    """Builds the plan of a pass.

    Args:
        pixels: whether images are uint8 pixels; else they are the network's float32 input.
        images_on_device: whether inputs and outputs are memory of the device (``resident`` only).

    Raises:
        InputError: the batch needs more memory than is free.
        UnsupportedError: managed memory is refused, or a kernel cannot run what it was asked for.
    """
    placed = program.placed(batch, pixels, images_on_device)
    graph = placed.graph
    planned = plan_memory(placed, program.device_of, program.placement.threads)
    check_fits(program.placement, planned.sizes, batch)
    buffers = allocate(program.placement, planned)
    builder = Builder(program, placed, planned, buffers)
    slots = tuple(builder.slots.values())
    steps = builder.steps(graph, caller_waits=not images_on_device)
    outputs = {
        called: graph.values[name]
        for name, called in zip(graph.outputs, placed.outputs, strict=True)
    }
    sizes = dict(planned.sizes)
    if builder.staging:
        sizes["pinned"] = sum(array.nbytes for array in builder.staging)
    return Plan(
        batch, steps, sizes, [buffers, program, builder.staging], slots=slots, stand_ins=placed.stand_ins,
        outputs=outputs,
        replays=Replays(program.placement.device, images_on_device) if program.replays else None,
        overflows=() if builder.overflows is None else (builder.overflows,),
    )  # fmt: skip


def plan_memory(placed: Placed, device_of: Callable[[str], Any], threads: int) -> MemoryPlan:
    """Plans the memory of a pass.

    Args:
        device_of: returns the device of a kind.
    """
    graph, chosen = placed.graph, placed.kernels

    def workspace(node: Node) -> int:
        kernel = chosen.get(node.name)
        if kernel is None:
            return 0
        return kernel.workspace(node, graph, device_of(kernel.device), threads)

    return memory.plan(
        graph,
        placed.homes.__getitem__,
        in_place=lambda node: node.name in chosen and chosen[node.name].in_place,
        is_alias=lambda node: node.op.kind in kernels.ALIASES,
        workspace=workspace,
        workspace_arena=lambda node: placed.places[node.name],
        takes_pitch=lambda node, place: node.name in chosen and place in chosen[node.name].pitched,
    )


def check_fits(placement: Placement, sizes: Mapping[str, int], batch: int) -> None:
    """Raises InputError where arenas of these sizes are more than what is free."""
    device = placement.device
    if managed := sizes.get("managed", 0):
        device.check_managed(managed)
    for where, owner in (("cpu", CpuDevice()), (device.kind, device)):
        wanted = sizes.get(where, 0)
        if wanted and wanted > (free := owner.free_memory()):
            raise InputError(
                f"--batch: {batch} images need {wanted / 2**30:.1f} GiB on {owner.name} for "
                f"activations at their peak, expected at most the {free / 2**30:.1f} GiB that are free"
            )


def allocate(placement: Placement, planned: MemoryPlan) -> dict[str, Buffer]:
    """Returns the arenas of a plan."""
    device = placement.device
    allocators = {
        device.kind: device.allocate,
        "cpu": CpuDevice().allocate,
        "managed": getattr(device, "allocate_managed", None),
    }
    return {arena: allocators[arena](nbytes) for arena, nbytes in planned.sizes.items()}


class Builder:
    """Turns placed nodes into steps."""

    def __init__(
        self,
        program: Program,
        placed: Placed,
        planned: MemoryPlan,
        buffers: Mapping[str, Buffer],
    ) -> None:
        self.program = program
        self.placed = placed
        self.planned = planned
        self.buffers = buffers
        graph = placed.graph
        names = [value.name for value in graph.inputs]
        self.slots = {name: name for name in names}
        rounds = program.dtype == "float16" and bool(graph.stored)
        self.overflows = storage.Overflows(program.placement.device) if rounds else None
        #: Page-locked memory between the caller's and the device's, and what is copied out of it at the end.
        self.staging: list[np.ndarray] = []
        self.last: list[Step] = []
        for name, called in zip(graph.outputs, placed.outputs, strict=True):
            self.slots[name] = called if called not in names else f"{called} (output)"

    def address(self, graph: Graph, name: str | None, where: str) -> Any:
        """Returns the address of a value, or what stands for it."""
        if name is None:
            return 0
        offset = 0
        if name in self.planned.storage:
            name, offset = self.planned.storage[name]
        if name in self.slots:
            return Slot(self.slots[name], offset)
        if name in graph.constants:
            return self.program.constant(graph, name, where) + offset
        arena, start = self.planned.offsets[name]
        return self.buffers[arena].address + start + offset

    def steps(self, graph: Graph, caller_waits: bool) -> list[Step]:
        placed, device = self.placed, self.program.placement.device
        managed = self.program.placement.data_mode == "managed"
        sync = Step("sync", "sync", "cpu", getattr(device, "synchronize", None), [])
        steps: list[Step] = []
        pending = False  # whether the device may still be at work on managed memory
        for node in graph.nodes:
            kernel = placed.kernels.get(node.name)
            if kernel is None:
                continue
            if managed and pending and placed.places[node.name] == "cpu":
                steps.append(_copy_of(sync))
                pending = False
            steps += self._steps_of(graph, node, kernel)
            pending = pending or placed.places[node.name] == "cuda"
            arrives = isinstance(node.op, Move) and node.op.direction == "d2h"
            if arrives and not (
                node.outputs[0] in graph.outputs and not graph.consumers[node.outputs[0]]
            ):
                steps.append(_copy_of(sync))
        if device.kind == "cuda" and caller_waits:
            steps.append(_copy_of(sync))
        return steps + self.last

    def _steps_of(self, graph: Graph, node: Node, kernel: Kernel) -> list[Step]:
        where = self.placed.places[node.name]
        prepared = None
        if kernel.prepare is not None:
            prepared = self.program.prepared(graph, node, kernel)
        at = tuple(
            0
            if name in graph.constants and kernel.takes_up(index)
            else self.address(graph, name, where)
            for index, name in enumerate(node.inputs)
        )
        to = tuple(self.address(graph, name, where) for name in node.outputs)
        workspace: Any = 0
        if node.name in self.planned.workspaces:
            arena, start = self.planned.workspaces[node.name]
            workspace = self.buffers[arena].address + start
        call = Call(
            node, graph.inputs_of(node), graph.outputs_of(node), at, to, workspace, prepared,
            self.program.device_of(where), self.program.placement.threads, self.planned.pitches,
            STREAM if self.program.replays and where == "cuda" else None,
            kernels.NO_ONE if self.overflows is None else self.overflows.of(node.name),
        )  # fmt: skip
        try:
            function, args = kernel.make(call)
        except (TypeError, ValueError) as error:  # a shape's own limits, such as 2^31 elements
            raise UnsupportedError(f"node {node.name} ({node.op.kind}): {error}") from None
        if isinstance(node.op, Move):
            nbytes = call.inputs[0].nbytes
            crosses = self.program.replays and node.op.direction in ("h2d", "d2h")
            if crosses and any(isinstance(end, Slot) for end in (at[0], to[0])):
                return self._staged(node.op, at[0], to[0], nbytes)
            return [
                Step(
                    node.op.what, "copy", where, function, args, 0, nbytes, node.op.direction, None,
                    kernel.name,
                )
            ]  # fmt: skip
        cost = graph.cost_of(node)
        parts: tuple[Part, ...] = ()
        if isinstance(node.op, fused.Chain):
            parts = tuple(
                Part(name, REPORT_KINDS.get(kind, kind), flops)
                for name, kind, flops in node.op.layers(call.inputs)
            )
        kind = REPORT_KINDS.get(node.op.kind, node.op.kind)
        step = Step(
            node.name, kind, where, function, args, cost.flops, cost.bytes, kernel=kernel.name,
            parts=parts,
        )  # fmt: skip
        if not (self.program.placement.regions and where == "openacc"):
            return [step]
        enter, leave = (
            # On the host the region is opened all the same, and nothing is copied.
            Step(
                f"{node.name} {what}", "copy", where, *bound, 0,
                0 if call.device.host else value.nbytes, direction,
            )
            for what, bound, value, direction in zip(
                ("input", "output"), openacc.around(call), (call.inputs[0], call.outputs[0]),
                ("h2d", "d2h"), strict=True,
            )
        )  # fmt: skip
        return [enter, step, leave]

    def _staged(self, move: Move, source: Any, to: Any, nbytes: int) -> list[Step]:
        """Returns the steps of a copy from or to the caller's memory through page-locked memory.

        The host's own threads fill that faster than the driver copies pageable memory, and what is left is
        part of the graph of the pass.
        """
        device, threads = self.program.placement.device, self.program.placement.threads
        memory = device.empty_pinned((max(nbytes, 1),), np.uint8)
        self.staging.append(memory)
        address = memory.__array_interface__["data"][0]
        threads = max(1, min(threads, MOST_STAGING, nbytes // STAGED_A_THREAD))

        def step(place: str, function: Any, args: list[Any], direction: str) -> Step:
            return Step(
                move.what, "copy", place, function, args, 0, nbytes, direction,
                staged=place == "cuda",
            )  # fmt: skip

        if move.direction == "h2d":
            return [
                step("cpu", _cpu.copy, [source, address, nbytes, threads], "h2h"),
                step("cuda", device.copy_h2d, [to, address, nbytes, STREAM], "h2d"),
            ]
        self.last.append(step("cpu", _cpu.copy, [address, to, nbytes, threads], "h2h"))
        return [step("cuda", device.copy_d2h, [address, source, nbytes, STREAM], "d2h")]


def _copy_of(step: Step) -> Step:
    return Step(step.name, step.kind, step.place, step.function, [])
