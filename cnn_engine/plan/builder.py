"""Turns a graph with positions and kernels into a plan: the steps of a pass, and the memory that they use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .. import _cpu, kernels
from ..devices import Buffer
from ..devices.cpu import CpuDevice
from ..errors import UnsupportedError
from ..graph.dims import Sizes
from ..graph.graph import Graph, Node, Value
from ..kernels import Bound, Call, Kernel, openacc, strided
from ..kernels.select import Choice
from ..lower import batch_invariance, fused_network, reduced_precision
from ..lower.lowering import Program
from ..lower.placement import Move, Placed, Placement
from ..operators.report_kinds import REPORT_KINDS
from . import early_reads, l2_prefetch, template_cache
from .arenas import allocate, check_fits, kept_of, plan_memory
from .cuda_graph import Replays
from .memory import MemoryPlan
from .plan import STREAM, Part, Plan, Slot, Step
from .template import Sized

#: Threads that fill page-locked memory, and bytes that are worth another.
MOST_STAGING, STAGED_A_THREAD = 8, 64 << 10

#: Parts in which a caller's input crosses to the device, and bytes that are worth one.
STAGED_PARTS, STAGED_A_PART = 8, 288 << 10

#: Bytes of an output that the kernel that makes it writes to page-locked memory itself.
MOST_WRITTEN_AWAY = 128 << 10


def build(
    program: Program,
    size: int | Sizes | None,
    pixels: bool,
    images_on_device: bool = False,
    page_locked: bool = False,
) -> Plan:
    """Builds the plan of a pass.

    Args:
        size: a batch, or the sizes of all open dimensions.
        pixels: whether images are uint8 pixels; else they are the network's float32 input.
        images_on_device: whether inputs and outputs are memory of the device (``resident`` only).
        page_locked: whether inputs are page-locked memory of the host, from where they are copied at once.

    Raises:
        InputError: the size needs more memory than is free.
        UnsupportedError: managed memory is refused, or a kernel cannot run what it was asked for.
    """
    sizes = program.sizes(size)
    symbolic = None if images_on_device else program.symbolic(sizes, pixels)
    if (found := template_cache.sized(program, sizes, pixels, symbolic)) is not None:
        return _plan_of(program, found, sizes)
    placed = program.placed(sizes, pixels, images_on_device)
    graph = placed.graph
    planned = plan_memory(
        placed,
        program.device_of,
        program.placement.threads,
        batch_invariant=program.batch_invariant,
    )
    check_fits(program.placement, planned.sizes, sizes)
    buffers = allocate(program, planned)
    builder = Builder(program, placed, planned, buffers, page_locked)
    slots = tuple(builder.slots.values())
    steps = builder.steps(graph, caller_waits=not images_on_device)
    outputs = {
        called: graph.values[name]
        for name, called in zip(graph.outputs, placed.outputs, strict=True)
    }
    replays = None
    if program.replays:
        branch = l2_prefetch.plan(program, placed, steps)
        replays = Replays(program.placement.device, images_on_device, branch)
    if graph.is_substituted and graph.symbolic is symbolic:
        template_cache.learn(program, placed, symbolic, sizes)
    nbytes = dict(planned.sizes)
    if builder.staging:
        nbytes["pinned"] = sum(array.nbytes for array in builder.staging)
    return Plan(
        sizes.images, steps, nbytes, [buffers, program, builder.staging, kept_of(graph)],
        slots=slots, outputs=outputs,
        fallbacks={**placed.fallbacks, **(program.in_float32 or {})},
        replays=replays,
        overflows=() if builder.overflows is None else (builder.overflows,),
        waits=not images_on_device,
        devices=(program.placement.device,) if program.placement.device.kind == "cuda" else (),
    )  # fmt: skip


def build_layers(graph: Graph) -> Plan:
    """Builds the plan of a graph on one thread of the CPU, by the plainest kernels."""
    placement = Placement(CpuDevice(), "resident", 1)
    return build(
        Program(lambda _batch, _pixels: graph, placement, Choice("if", True, None)), 1, False
    )


def _plan_of(program: Program, found: Sized, sizes: Sizes) -> Plan:
    """Returns the plan of a template at these sizes."""
    nbytes = {"cpu": found.nbytes} if found.nbytes else {}
    if found.nbytes > program.room:  # to ask the system takes as long as a tenth of the rest
        check_fits(program.placement, nbytes, sizes)
    memory = program.allocate(found.nbytes) if found.nbytes else None
    return Plan(
        sizes.images, found.steps_of, nbytes, [memory, program], slots=found.slots,
        outputs=found.outputs(), fallbacks={**found.fallbacks, **(program.in_float32 or {})},
        calls=found.calls(memory),
    )  # fmt: skip


class Builder:
    """Turns placed nodes into steps."""

    def __init__(
        self,
        program: Program,
        placed: Placed,
        planned: MemoryPlan,
        buffers: Mapping[str, Buffer],
        page_locked: bool = False,
    ) -> None:
        self.program = program
        self.page_locked = page_locked
        self.placed = placed
        self.planned = planned
        self.buffers = buffers
        graph = placed.graph
        names = [value.name for value in graph.inputs]
        self.slots = {name: name for name in names}
        rounds = program.dtype == "float16" and (
            bool(graph.storage_dtype)
            or any(getattr(node.op, "compute_dtype", None) == "float16" for node in graph.nodes)
        )
        self.overflows = reduced_precision.Overflows(program.placement.device) if rounds else None
        #: Page-locked memory between the caller's and the device's, and what is copied out of it at the end.
        self.staging: list[np.ndarray] = []
        self.last: list[Step] = []
        for name, called in zip(graph.outputs, placed.outputs, strict=True):
            self.slots[name] = called if called not in names else f"{called} (output)"
        self.reads_early = early_reads.plan(placed, planned, program.prepared)
        #: Values that lie in page-locked memory, of which nothing is read on the device -> their addresses.
        self.host_mapped = {
            node.inputs[0]: self._page_locked(graph.values[node.inputs[0]].nbytes)
            for node in graph.nodes
            if program.replays and self._is_written_away(graph, node)
        }

    def _is_written_away(self, graph: Graph, move: Node) -> bool:
        """Whether what ``move`` copies to the caller may leave the device as it is made."""
        if (
            not self._is_last(graph, move)
            or graph.values[move.inputs[0]].nbytes > MOST_WRITTEN_AWAY
        ):
            return False
        name, storage = move.inputs[0], self.planned.storage
        shares = name in storage or any(name == root for root, _ in storage.values())
        return name in self.planned.offsets and graph.consumers[name] == (move,) and not shares

    @staticmethod
    def _is_last(graph: Graph, node: Node) -> bool:
        """Whether it copies from the device what nothing on the host reads on."""
        copies = isinstance(node.op, Move) and node.op.direction == "d2h"
        return copies and not graph.consumers[node.outputs[0]]

    def _page_locked(self, nbytes: int) -> int:
        """Returns the address of page-locked memory of the plan."""
        memory = self.program.placement.device.empty_pinned((max(nbytes, 1),), np.uint8)
        self.staging.append(memory)
        return memory.__array_interface__["data"][0]

    def address(self, graph: Graph, name: str | None, where: str) -> Any:
        """Returns the address of a value, or its slot."""
        if name is None:
            return 0
        offset = 0
        if name in self.planned.storage:
            name, offset = self.planned.storage[name]
        if name in self.host_mapped:
            return self.host_mapped[name]
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
            if managed and pending and placed.spaces[node.name] == "cpu":
                steps.append(_copy_of(sync))
                pending = False
            steps += self._steps_of(graph, node, kernel)
            pending = pending or placed.spaces[node.name] == "cuda"
            arrives = isinstance(node.op, Move) and node.op.direction == "d2h"
            if arrives and not (
                node.outputs[0] in graph.outputs and not graph.consumers[node.outputs[0]]
            ):
                steps.append(_copy_of(sync))
        if device.kind == "cuda" and caller_waits:
            steps.append(_copy_of(sync))
        return steps + self.last

    def _steps_of(self, graph: Graph, node: Node, kernel: Kernel) -> list[Step]:
        where = self.placed.spaces[node.name]
        prepared = None
        if kernel.prepare is not None:
            prepared = self.program.prepared(graph, node, kernel)
        at = tuple(
            0
            if name in graph.constants and kernel.packs_input(index)
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
            self.reads_early.known.get(node.name, 0), node.name in self.reads_early.holders,
            self.program.batch_invariant and where == "cuda",
        )  # fmt: skip
        called = batch_invariance.graph_of_calls(node, kernel, graph) if call.any_batch else graph
        try:
            function, args = (
                kernel.make(call) if called is graph else self._by_image(call, kernel, called)
            )
        except (TypeError, ValueError) as error:  # a shape's own limits, such as 2^31 elements
            raise UnsupportedError(f"node {node.name} ({node.op.kind}): {error}") from None
        if isinstance(node.op, Move):
            nbytes = call.inputs[0].nbytes
            # What the host reads on must be in its place with the copy, not at the end of the pass.
            last = self._is_last(graph, node)
            pageable = node.op.direction == "h2d" and not self.page_locked
            crosses = self.program.replays and (pageable or last)
            if crosses and any(isinstance(end, Slot) for end in (at[0], to[0])):
                return self._staged(node.op, at[0], to[0], nbytes)
            return [
                Step(
                    node.op.what, "copy", where, function, args, 0, nbytes, node.op.direction, None,
                    kernel.name,
                )
            ]  # fmt: skip
        cost = partial(node.op.cost, call.inputs, call.outputs)
        parts: tuple[Part, ...] = ()
        if isinstance(node.op, fused_network.FusedNetwork):
            parts = tuple(
                Part(name, REPORT_KINDS.get(kind, kind), flops)
                for name, kind, flops in node.op.layers(call.inputs)
            )
        kind = REPORT_KINDS.get(node.op.kind, node.op.kind)
        step = Step(
            node.name, kind, where, function, args, lambda: cost().flops, lambda: cost().bytes,
            kernel=kernel.shown_as(node, graph, call.device), parts=parts,
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

    def _by_image(self, call: Call, kernel: Kernel, of_one: Graph) -> Bound:
        """Returns the calls of a kernel for one image after the other, whose bits no other changes.

        Args:
            of_one: in which the node's values are those of one image.
        """
        inputs, outputs = of_one.inputs_of(call.node), of_one.outputs_of(call.node)

        def addresses(values: Sequence[Value | None], known: Sequence[Any], image: int) -> tuple:
            found = []
            for value, address in zip(values, known, strict=True):
                if value is not None and value.name not in of_one.constants:
                    row = call.pitch(value) * value.item_bytes
                    address = _beyond(address, image * math.prod(value.shape[:-1]) * row)
                found.append(address)
            return tuple(found)

        return strided.together(
            [
                kernel.make(
                    replace(
                        call, inputs=inputs, outputs=outputs,
                        input_addresses=addresses(inputs, call.input_addresses, image),
                        output_addresses=addresses(outputs, call.output_addresses, image),
                    )
                )
                for image in range(self.placed.graph.batch)
            ]
        )  # fmt: skip

    def _staged(self, move: Move, source: Any, to: Any, nbytes: int) -> list[Step]:
        """Returns the steps of a copy from or to the caller's memory through page-locked memory.

        The host's own threads fill that faster than the driver copies pageable memory. On the way in one part
        crosses the bus while the next is filled; from the last part on all is part of the graph of the pass.
        """
        device, threads = self.program.placement.device, self.program.placement.threads

        def step(place: str, function: Any, args: list[Any], direction: str) -> Step:
            return Step(
                move.what, "copy", place, function, args, 0, args[2], direction,
                staged=place == "cuda",
            )  # fmt: skip

        def host(function: Any, source: Any, to: Any, nbytes: int) -> Step:
            most = max(1, min(threads, MOST_STAGING, nbytes // STAGED_A_THREAD))
            return step("cpu", function, [source, to, nbytes, most], "h2h")

        if move.direction == "h2d":
            address, steps = self._page_locked(nbytes), []
            count = max(1, min(STAGED_PARTS, nbytes // STAGED_A_PART))
            size = max(-(-nbytes // count // 4096) * 4096, 1)
            for first in range(0, nbytes, size):
                part, there = min(size, nbytes - first), address + first
                steps += [
                    host(_cpu.stage, _beyond(source, first), there, part),
                    step("cuda", device.copy_h2d, [_beyond(to, first), there, part, STREAM], "h2d"),
                ]
            return steps
        if source in self.host_mapped.values():
            self.last.append(host(_cpu.copy, source, to, nbytes))
            return []
        address = self._page_locked(nbytes)
        self.last.append(host(_cpu.copy, address, to, nbytes))
        return [step("cuda", device.copy_d2h, [address, source, nbytes, STREAM], "d2h")]


def _beyond(address: Any, offset: int) -> Any:
    """Returns what is so many bytes beyond an address, or beyond what stands for one."""
    if isinstance(address, Slot):
        return replace(address, offset=address.offset + offset)
    return address + offset


def _copy_of(step: Step) -> Step:
    return Step(step.name, step.kind, step.place, step.function, [])
