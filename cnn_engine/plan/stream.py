"""The data mode ``stream``: a pass in chunks whose copies overlap with kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .. import _cpu
from ..devices.cpu import CpuDevice
from ..errors import InputError
from ..lower.lowering import Program
from .builder import build
from .cuda_graph import Queued
from .plan import Plan, Slot, Step
from .schedule import PAST_CACHES_BYTES

#: Chunks on their way at the same time: one comes in while another computes and a third goes out.
LANES = 3


def build_stream(
    program: Program, batch: int, pixels: bool, chunk: int, pinned: tuple[bool, bool]
) -> Plan:
    """Builds the plan of a pass in which copies of one chunk overlap with the kernels of another.

    Args:
        chunk: images that move at a time.
        pinned: whether the images, and whether the probabilities, are page-locked memory, which is used in
            place; else they are staged through page-locked buffers.

    Raises:
        InputError: the chunks need more memory than is free.
    """
    placement = program.placement
    chunk = min(chunk, batch)
    count = min(LANES, -(-batch // chunk))
    staged = _check_free(program, pixels, chunk, count, pinned)
    lanes = [_Lane(program, placement.device.lane(), pixels, chunk, pinned) for _ in range(count)]
    steps: list[Step] = []
    calls: list[tuple] = []

    def add(found: list[Step]) -> None:
        steps.extend(found)
        calls.extend((step.function, step.args) for step in found)

    for index, first in enumerate(range(0, batch, chunk)):
        lane = lanes[index % len(lanes)]
        add(lane.finish())
        begin, inner, end = lane.begin(first, min(chunk, batch - first))
        add(begin)
        steps += [replace(step, lane=lane.device) for step in inner.steps]
        calls.append((inner.queue, ()))
        add(end)
    last = -(-batch // chunk)
    for index in range(last, last + len(lanes)):
        add(lanes[index % len(lanes)].finish())
    nbytes = {"cuda": sum(lane.nbytes for lane in lanes), "pinned": staged}
    inner = [plan for lane in lanes for plan in lane.plans.values()]
    overflows = [overflow for plan in inner for overflow in plan.overflows]
    return Plan(
        batch, steps, nbytes, [lanes], chunk, lanes[0].slots, overflows=overflows,
        replays=Queued(calls) if program.replays else None, devices=[lane.device for lane in lanes],
    )  # fmt: skip


def build_in_device(program: Program, batch: int, pixels: bool) -> Plan:
    """Builds the plan of a pass over images that lie in the device's memory.

    Rows go to page-locked memory of the host, and are there on return.
    """
    device = program.placement.device.lane()
    inner = build(program.on(device), batch, pixels, images_on_device=True)
    images, rows = inner.slots
    graph = program.graph_of(batch, pixels)
    nbytes = graph.values[graph.outputs[0]].nbytes
    buffer = device.allocate(nbytes)

    def compute(source: int) -> None:
        inner.bind(source, buffer.address)
        inner.queue()

    copy = [Slot(rows), buffer.address, nbytes]
    steps = [
        Step("forward", "forward", "cuda", compute, [Slot(images)], lane=device),
        Step(rows, "copy", "cuda", device.queue_copy, copy, 0, nbytes, "d2h", device),
        Step("sync", "sync", "cpu", device.synchronize, []),
    ]
    taken = {"cuda": nbytes + inner.nbytes.get("cuda", 0)}
    return Plan(
        batch,
        steps,
        taken,
        [inner, buffer],
        None,
        (images, rows),
        overflows=inner.overflows,
        devices=(device,),
    )


def _check_free(
    program: Program, pixels: bool, chunk: int, lanes: int, pinned: tuple[bool, bool]
) -> int:
    """Refuses chunks that cannot come in and go out; returns the bytes that stage them, page-locked."""
    graph = program.graph_of(chunk, pixels)
    ends = graph.inputs[0].nbytes, graph.values[graph.outputs[0]].nbytes
    staged = lanes * sum(end for end, there in zip(ends, pinned, strict=True) if not there)
    for memory, wanted in ((CpuDevice(), staged), (program.placement.device, lanes * sum(ends))):
        if wanted > (free := memory.free_memory()):
            raise InputError(
                f"batch: {lanes} chunks of {chunk} images need {wanted / 2**30:.1f} GiB on "
                f"{memory.name}, expected at most the {free / 2**30:.1f} GiB that are free"
            )
    return staged


class _Lane:
    """A stream, device memory for one chunk, and what of the pass is on its way there."""

    def __init__(
        self, program: Program, device: Any, pixels: bool, chunk: int, pinned: tuple[bool, bool]
    ) -> None:
        self.device = device
        self.threads = program.placement.threads
        self.program = program.on(device)
        self.pixels = pixels
        graph = program.graph_of(chunk, pixels)
        (images,), (rows,) = graph.inputs, graph.outputs
        self.slots = (images.name, rows)
        self.image_bytes = images.nbytes // chunk
        self.row_bytes = graph.values[rows].nbytes // chunk
        self.images = device.allocate(images.nbytes)
        self.stage = _cpu.stage if images.nbytes < PAST_CACHES_BYTES else _cpu.copy
        self.probabilities = device.allocate(chunk * self.row_bytes)
        self.staging = [
            None if is_pinned else device.empty_pinned((chunk * nbytes,), np.uint8)
            for is_pinned, nbytes in zip(pinned, (self.image_bytes, self.row_bytes), strict=True)
        ]
        self.plans: dict[int, Plan] = {}
        self.pending: list[Step] | None = None

    @property
    def nbytes(self) -> int:
        own = self.images.nbytes + self.probabilities.nbytes
        return own + sum(plan.nbytes.get("cuda", 0) for plan in self.plans.values())

    def _stage(
        self, what: str, function: Callable[..., None], source: Any, to: Any, nbytes: int
    ) -> Step:
        arguments = [source, to, nbytes, self.threads]
        return Step(what, "copy", "cpu", function, arguments, 0, nbytes, "h2h")

    def _copy(self, what: str, direction: str, to: Any, source: Any, nbytes: int) -> Step:
        function, arguments = self.device.queue_copy, [to, source, nbytes]
        return Step(what, "copy", "cuda", function, arguments, 0, nbytes, direction, self.device)

    def begin(self, first: int, count: int) -> tuple[list[Step], Plan, list[Step]]:
        """Returns what sends a chunk on its way: steps before its own plan, that plan, and steps after it."""
        if count not in self.plans:
            self.plans[count] = build(self.program, count, self.pixels, images_on_device=True)
            self.plans[count].bind(self.images.address, self.probabilities.address)
        steps = []
        source: Any = Slot(self.slots[0], first * self.image_bytes)
        nbytes = count * self.image_bytes
        if self.staging[0] is not None:
            staged = self.staging[0].__array_interface__["data"][0]
            steps.append(self._stage(self.slots[0], self.stage, source, staged, nbytes))
            source = staged
        steps.append(self._copy(self.slots[0], "h2d", self.images.address, source, nbytes))
        to: Any = Slot(self.slots[1], first * self.row_bytes)
        nbytes = count * self.row_bytes
        self.pending = [Step("sync", "sync", "cpu", self.device.synchronize, [])]
        if self.staging[1] is not None:
            staged = self.staging[1].__array_interface__["data"][0]
            self.pending.append(self._stage(self.slots[1], _cpu.copy, staged, to, nbytes))
            to = staged
        end = self._copy(self.slots[1], "d2h", to, self.probabilities.address, nbytes)
        return steps, self.plans[count], [end]

    def finish(self) -> list[Step]:
        """Returns the steps that wait for the chunk that is on its way, if there is one."""
        steps, self.pending = self.pending or [], None
        return steps
