"""The plans of an engine: one for each kind of call, built when first asked for, and run."""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from .. import _cpu
from ..devices import arrays
from ..errors import InputError, UnsupportedError
from ..lower.lowering import Program
from ..lower.reduced_precision import Overflows
from ..plan.per_image import build
from ..plan.plan import Plan
from ..plan.schedule import Schedule
from ..plan.stream import build_in_device, build_stream
from .phases import Phases
from .plan_cache import CLOSED, KEPT_BYTES, KEPT_SHELVES, PlanPool, Shelf, plan_bytes

address_of = _cpu.address_of


#: Of plans that were dropped while their stream was captured: what their work uses, until it is done.
_UNDONE: list[tuple[Any, dict[int, Any], list]] = []


class Plans:
    """The plans of one engine.

    Args:
        program: what they are built from.
        schedule: how many images move at a time.
        chunk: as many as that, where the caller says so.
        phases: takes the seconds that building took.

    Attributes:
        pool: those that wait for their next pass.
        ready: shape and type of images, and what :meth:`is_pinned` says of them -> the plans of a call that
            needs no further look.
    """

    def __init__(
        self, program: Program, schedule: Schedule, chunk: int | None, phases: Phases
    ) -> None:
        self._program: Program | None = program
        self.schedule = schedule
        self.chunk = chunk
        self.phases = phases
        self.device = program.placement.device
        self._stages = program.replays  # copies what is not page-locked to where it is
        self.pool = PlanPool(context=self.device.context)
        self.ready: dict[tuple, Shelf] = {}
        self._lent: dict[tuple, tuple[Shelf, Plan]] = {}  # by lend()
        self._queued: list[Overflows] = []  # of plans whose passes are not waited for
        self._queued_in_graphs: weakref.WeakSet[Overflows] = weakref.WeakSet()
        #: Streams on which calls have queued work, by their handles; None: it may be gone.
        self._streams: dict[int, Any] = {}
        #: Plans of graphs that are being captured, which these keep.
        self._captured: weakref.WeakValueDictionary[tuple, Plan] = weakref.WeakValueDictionary()
        if self.device.kind == "cuda":
            self.device.release_graphs()

    @property
    def closed(self) -> bool:
        return self._program is None

    def open(self) -> Program:
        """Returns what plans are built from.

        Raises:
            InputError: they were closed.
        """
        program = self._program
        if program is None:
            raise InputError(CLOSED)
        return program

    def close(self) -> None:
        """Drops all plans; those in use when their passes end. Calls from now on are refused.

        What is queued on a caller's stream is waited for: it uses plans and weights.

        Raises:
            UnsupportedError: as :meth:`check_overflow`.
        """
        self._drop()
        self.check_overflow()
        self._queued.clear()

    def _drop(self) -> None:
        """Closes without a look at results."""
        dropped = [self._program, *self.pool.close()]
        self._program = None
        self.ready.clear()
        self._lent.clear()
        if self._streams:
            _UNDONE.append((self.device, self._streams, dropped))
            self._streams = {}
        for undone in list(_UNDONE):
            device, streams, _ = undone
            if device.wait_for(streams):
                with suppress(ValueError):  # another thread was faster
                    _UNDONE.remove(undone)
        if self.device.kind == "cuda":
            self.device.release_graphs()

    def __del__(self) -> None:
        if getattr(self, "_streams", None) and not sys.is_finalizing():
            self._drop()

    def check_overflow(self) -> None:
        """Waits for passes over arrays on the device, and refuses results that float16 did not hold.

        Raises:
            UnsupportedError: there was one since this was last asked.
        """
        queued = [*self._queued, *self._queued_in_graphs]
        if queued:
            self.device.synchronize_streams()
        for overflows in queued:
            overflows.check("a call on arrays of the device")

    def lend(self, batch: int, pixels: bool, pinned: tuple[bool, bool]) -> Plan:
        """Returns a plan over images in host memory that no other call runs.

        ``pinned`` says whether images and probabilities are page-locked, which ``stream`` uses.
        """
        key = self._host_key(batch, pixels, pinned)
        if key not in self._lent:
            self._lent[key] = self.pool.take(key, lambda: self._build(key))
            while len(self._lent) > 1 and self._lent_bytes() > KEPT_BYTES:
                shelf, _ = self._lent.pop(next(iter(self._lent)))
                shelf.made -= 1  # whoever still has the plan keeps its memory
        return self._lent[key][1]

    def _lent_bytes(self) -> int:
        return sum(plan_bytes(plan) for _, plan in self._lent.values())

    def _host_key(self, batch: int, pixels: bool, pinned: tuple[bool, bool]) -> tuple:
        return "host", batch, pixels, pinned

    def _build(self, key: tuple) -> Plan:
        """Builds a plan for images in host memory."""
        _, batch, pixels, pinned = key
        program = self.open()
        start = perf_counter()
        if self.schedule.overlaps(batch, pixels):
            chunk = self.chunk or self.schedule.chunk(batch, pixels, pageable=not pinned[0])
            plan = build_stream(program, batch, pixels, chunk, pinned)
        else:
            plan = build(program, batch, pixels, page_locked=pinned[0])
        plan.buffers.append(program)  # the weights: a pass may end after the engine was closed
        seconds = perf_counter() - start
        self.phases.create_outputs_s = (self.phases.create_outputs_s or 0) + seconds
        return plan

    def pinned(
        self, batch: int, pixels: bool, images: int, probabilities: int
    ) -> tuple[bool, bool]:
        """Whether each is page-locked, where that makes a difference."""
        if not self.schedule.overlaps(batch, pixels):
            return self.is_pinned(images), False
        return self.device.is_pinned(images), self.device.is_pinned(probabilities)

    def is_pinned(self, images: int) -> bool:
        """Whether images are page-locked, where that makes a difference to a pass that has no chunks."""
        return self._stages and self.device.is_pinned(images)

    def remember(self, key: tuple, shelf: Shelf) -> None:
        """Lets the next call alike go straight to its plans."""
        if len(self.ready) >= KEPT_SHELVES:
            self.ready.clear()
        self.ready[key] = shelf

    def run_on_host(
        self, images: arrays.View, probabilities: np.ndarray, batch: int
    ) -> Shelf | None:
        """Runs passes over ``batch`` images and what is left; returns the last one's shelf."""
        source, target = images.address, address_of(probabilities)
        pixels = images.dtype == np.uint8
        count = images.shape[0]
        image_bytes, row_bytes = (
            array.nbytes // max(count, 1) for array in (images, probabilities)
        )
        shelf = None
        self.open()
        for first in range(0, count, batch):
            addresses = source + first * image_bytes, target + first * row_bytes
            size = min(batch, count - first)
            key = self._host_key(size, pixels, self.pinned(size, pixels, *addresses))
            shelf = self.pool.run(key, lambda key=key: self._build(key), *addresses)
        return shelf

    def run_in_device(self, batch: int, pixels: bool, images: int, probabilities: int) -> None:
        """Runs a pass over images in the device's memory; rows go to page-locked memory of the host."""
        key = "in device", batch, pixels
        self.pool.run(key, lambda: self._build_in_device(key), images, probabilities)

    def _build_in_device(self, key: tuple) -> Plan:
        _, batch, pixels = key
        program = self.open()
        plan = build_in_device(program, batch, pixels)
        plan.buffers.append(program)
        return plan

    def run_on_device(
        self, images: arrays.View, probabilities: arrays.View, batch: int
    ) -> Shelf | None:
        """Queues passes on the stream that the library of ``images`` works on; returns the last shelf.

        None where the stream is captured.
        """
        mode = self.schedule.data_mode
        if (
            mode not in ("auto", "resident", "stream")
            or self.device.name != f"cuda:{images.device}"
        ):
            raise UnsupportedError(
                f"images: expected a NumPy array for the device {self.device.name} in the data mode "
                f"{mode}, found an array on cuda:{images.device}"
            )
        stream, keeper = arrays.stream_of(images)
        owner = arrays.stream_owner(stream)
        count = images.shape[0]
        image_bytes, row_bytes = (
            array.nbytes // max(count, 1) for array in (images, probabilities)
        )
        pixels = images.dtype == np.uint8
        parts = [
            (min(batch, count - first), images.address + first * image_bytes,
             probabilities.address + first * row_bytes)
            for first in range(0, count, max(batch, 1))
        ]  # fmt: skip
        program = self.open()
        shelf = None
        with self.device.context:
            known = self.device.stream_id(stream)
            if known < 0:
                self._capture(stream, owner, pixels, parts)
                return None
            self.device.release_graphs()
            self._streams[stream] = keeper
            for size, *addresses in parts:
                # Memory between layers belongs to the stream, so that passes on two streams do not meet.
                key = "stream", known, owner, size, pixels
                shelf = self.pool.run(
                    key, partial(self._build_on, stream, size, pixels), *addresses
                )
        if self.closed:  # meanwhile, by another thread
            self._drop()
        del program  # whose weights were in use until here
        return shelf

    def _build_on(self, stream: int, batch: int, pixels: bool, apart: bool = False) -> Plan:
        """Builds a plan for images on the device, with all of its work on one stream.

        Args:
            apart: whether no other work may be using its memory at present.
        """
        program = self.open()
        plan = build(
            program.on(self.device.on(stream, apart)), batch, pixels, images_on_device=True
        )
        plan.buffers.append(program)
        if apart:
            self._queued_in_graphs.update(plan.overflows)
        else:
            self._queued += plan.overflows
        return plan

    def _capture(
        self, stream: int, owner: int, pixels: bool, parts: list[tuple[int, int, int]]
    ) -> None:
        """Has a CUDA graph take passes over so many images at these addresses.

        Their plans are the graph's own: it may be launched beside any other work, for as long as it lives.
        Passes of one capture on one stream are one after the other, and share plans.
        """
        capture = self.device.capture_id(stream)
        for size, images, probabilities in parts:
            key = capture, stream, owner, size, pixels
            with self.pool.building, self.device.while_captured():
                plan = self._captured.get(key)
                if plan is None:
                    program = self.open()
                    # On the engine's own stream, which is not captured.
                    program.fetch(program.placed(size, pixels, True))
                    plan = self._build_on(stream, size, pixels, apart=True)
                    self.device.keep_in_graph(stream, plan)
                    self._captured[key] = plan
                plan.bind(images, probabilities)
                plan.queue()

    def run(self, inputs: list[arrays.View], batch: int | None, pixels: bool) -> dict[str, Any]:
        """Runs any graph once; returns its outputs by name."""
        key = "run", batch, pixels
        program = self.open()
        if batch == 0:
            graph = program.graph_of(0, pixels)
            values = [graph.values[name] for name in graph.outputs]
            if all(0 in value.shape for value in values):
                return {value.name: np.empty(value.shape, value.dtype) for value in values}
        shelf, plan = self.pool.take(key, lambda: self._build_run(batch, pixels))
        outputs = {name: np.empty(value.shape, value.dtype) for name, value in plan.outputs.items()}
        try:
            plan.bind(*(array.address for array in inputs), *map(address_of, outputs.values()))
            plan.run()
        except BaseException:  # it may be anywhere in its pass: it is not given to another call
            shelf.made -= 1
            plan.abandon()
            raise
        shelf.give_back(plan)
        return outputs

    def _build_run(self, batch: int | None, pixels: bool) -> Plan:
        program = self.open()
        plan = build(program, batch, pixels)
        plan.buffers.append(program)
        return plan
