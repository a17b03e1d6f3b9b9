"""The plans of an engine: one for each kind of call, built when first asked for, and run."""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices import arrays
from ..devices.cpu import CpuDevice
from ..errors import InputError, UnsupportedError
from ..graph.dims import Sizes
from ..lower.lowering import Program
from ..lower.reduced_precision import Overflows
from ..plan.per_image import build
from ..plan.plan import Plan
from ..plan.schedule import Schedule
from ..plan.stream import build_in_device, build_stream
from .phases import Phases
from .plan_cache import CLOSED, KEPT_BYTES, KEPT_SHELVES, PlanPool, Shelf, plan_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..graph.form import Form


#: Of plans that were dropped while their stream was captured: what their work uses, until it is done.
_UNDONE: list[tuple[Any, dict[int, Any], list]] = []


class Plans:
    """The plans of one engine.

    Args:
        program: what they are built from.
        schedule: how many images move at a time.
        chunk: as many as that, where the caller says so.
        phases: takes the seconds that building took.
        form: what the network takes and gives.

    Attributes:
        pool: those that wait for their next pass.
        ready: shape and type of images, and what :meth:`is_pinned` says of them -> the plans of a call that
            needs no further look.
    """

    def __init__(
        self, program: Program, schedule: Schedule, chunk: int | None, phases: Phases, form: Form
    ) -> None:
        self._program: Program | None = program
        self.form = form
        self.schedule = schedule
        self.chunk = chunk
        self.phases = phases
        self.device = program.placement.device
        self._stages = program.replays  # copies what is not page-locked to where it is
        self.pool = PlanPool(context=self.device.context)
        self.ready: dict[tuple, Shelf] = {}
        self._lent: dict[tuple, tuple[Shelf, Plan]] = {}  # by lend()
        self._shapes: dict[tuple[int, bool], dict[str, tuple[int, ...]]] = {}
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
        """Returns the program that plans are built from; raises InputError once the engine is closed.

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
        """Returns a plan for images in host memory, which no other call uses meanwhile.

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

    def overlaps(self, batch: int, pixels: bool) -> bool:
        """Whether a pass over ``batch`` images in host memory goes in chunks: of images to rows alone."""
        return self.form.is_images_to_rows and self.schedule.overlaps(batch, pixels)

    def _host_key(self, batch: int, pixels: bool, pinned: tuple[bool, bool]) -> tuple:
        return "host", batch, pixels, pinned, None

    def _build(self, key: tuple) -> Plan:
        """Builds a plan for arrays in host memory."""
        _, batch, pixels, pinned, wanted = key
        program = self.open()
        start = perf_counter()
        if self.overlaps(batch, pixels):
            chunk = self.chunk or self.schedule.chunk(batch, pixels, pageable=not pinned[0])
            plan = build_stream(program, batch, pixels, chunk, pinned)
        else:
            make = partial(build, size=self.form.size(batch), pixels=pixels, page_locked=pinned[0])
            shared = isinstance(batch, Sizes) and self.device.kind == "cpu"
            plan = self.pool.built_in_arena(program, make) if shared else make(program)
            self._keep_unwanted(plan, wanted, CpuDevice().allocate_alone)
        plan.buffers.append(program)  # the weights: a pass may end after the engine was closed
        seconds = perf_counter() - start
        self.phases.create_outputs_s = (self.phases.create_outputs_s or 0) + seconds
        return plan

    def _keep_unwanted(
        self, plan: Plan, wanted: frozenset[str] | None, allocate: Callable[[int], Any]
    ) -> None:
        """Gives a plan memory for the outputs that are not in ``wanted``; None: all are."""
        if wanted is None:
            return
        first = len(plan.slots) - len(plan.outputs)
        plan.keep(
            {
                first + place: allocate(max(value.nbytes, 1))
                for place, (name, value) in enumerate(plan.outputs.items())
                if name not in wanted
            }
        )

    def pinned(
        self, batch: int, pixels: bool, images: int, probabilities: int
    ) -> tuple[bool, bool]:
        """Whether images and probabilities are page-locked; False where that makes no difference."""
        if not self.overlaps(batch, pixels):
            return self.is_pinned(images), False
        return self.device.is_pinned(images), self.device.is_pinned(probabilities)

    def is_pinned(self, images: int) -> bool:
        """Whether images are page-locked, where that makes a difference to a pass that has no chunks."""
        return self._stages and self.device.is_pinned(images)

    def remember(self, key: tuple, shelf: Shelf) -> None:
        """Keeps the plans for the next call of the same signature."""
        if len(self.ready) >= KEPT_SHELVES:
            self.ready.clear()
        self.ready[key] = shelf

    def run_on_host(
        self,
        inputs: Sequence[arrays.View],
        outputs: Sequence[arrays.View],
        count: int,
        batch: int,
        sizes: Sizes | None = None,
    ) -> Shelf | None:
        """Runs passes over ``batch`` of ``count`` images and the rest; returns the last pass's shelf.

        Everything has a row per image, or all images go in one pass.

        Args:
            sizes: of all images, where other dimensions than their number are open.
        """
        shelf = None
        self.open()
        pixels = inputs[0].dtype == np.uint8
        parts = [
            (self._host_key(size, pixels, self.pinned(size, pixels, places[0], places[-1])), places)
            for size, *places in _parts(inputs, outputs, count, batch, sizes)
        ]
        call = {key for key, _ in parts}
        for key, addresses in parts:
            shelf = self.pool.run(key, partial(self._build, key), *addresses, call=call)
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
        self,
        inputs: Sequence[arrays.View],
        outputs: Sequence[arrays.View],
        count: int,
        batch: int,
        wanted: frozenset[str] | None = None,
        sizes: Sizes | None = None,
    ) -> Shelf | None:
        """Queues passes on the stream that the library of ``inputs`` works on; returns the last shelf.

        None where the stream is captured.

        Args:
            wanted: outputs that are given; None: all.
            sizes: of all images, where other dimensions than their number are open.
        """
        mode = self.schedule.data_mode
        where = inputs[0].device
        if mode not in ("auto", "resident", "stream") or self.device.name != f"cuda:{where}":
            called = "images" if len(self.form.inputs) == 1 else "inputs"
            raise UnsupportedError(
                f"{called}: expected a NumPy array for the device {self.device.name} in the data mode "
                f"{mode}, found an array on cuda:{where}"
            )
        stream, keeper = arrays.stream_of(inputs[0])
        for other in inputs[1:]:
            if arrays.current_stream(other) != stream:
                raise InputError(
                    "inputs: expected arrays whose libraries work on one stream, found two streams"
                )
        owner = arrays.stream_owner(stream)
        pixels = inputs[0].dtype == np.uint8
        parts = _parts(inputs, outputs, count, batch, sizes)
        program = self.open()
        shelf = None
        with self.device.context:
            known = self.device.stream_id(stream)
            if known < 0:
                self._capture(stream, owner, pixels, parts, wanted)
                return None
            self.device.release_graphs()
            self._streams[stream] = keeper
            # Memory between layers belongs to the stream, so that passes on two streams do not meet.
            call = {size: ("stream", known, owner, size, pixels, wanted) for size, *_ in parts}
            for size, *addresses in parts:
                shelf = self.pool.run(
                    call[size], partial(self._build_on, stream, size, pixels, wanted), *addresses,
                    call=call.values(),
                )  # fmt: skip
        if self.closed:  # meanwhile, by another thread
            self._drop()
        del program  # whose weights were in use until here
        return shelf

    def _build_on(
        self,
        stream: int,
        batch: int | Sizes,
        pixels: bool,
        wanted: frozenset[str] | None = None,
        apart: bool = False,
    ) -> Plan:
        """Builds a plan for arrays on the device, with all of its work on one stream.

        Args:
            apart: whether no other work may be using its memory at present.
        """
        program = self.open()
        device = self.device.on(stream, apart)
        size = self.form.size(batch)
        plan = build(program.on(device), size, pixels, images_on_device=True)
        self._keep_unwanted(plan, wanted, device.allocate)
        plan.buffers.append(program)
        if apart:
            self._queued_in_graphs.update(plan.overflows)
        else:
            self._queued += plan.overflows
        return plan

    def _capture(
        self,
        stream: int,
        owner: int,
        pixels: bool,
        parts: Sequence[tuple[int, ...]],
        wanted: frozenset[str] | None,
    ) -> None:
        """Has a CUDA graph take passes over so many images at these addresses.

        Their plans are the graph's own: it may be launched beside any other work, for as long as it lives.
        Passes of one capture on one stream are one after the other, and share plans.
        """
        capture = self.device.capture_id(stream)
        for size, *addresses in parts:
            key = capture, stream, owner, size, pixels, wanted
            with self.pool.building, self.device.while_captured():
                plan = self._captured.get(key)
                if plan is None:
                    program = self.open()
                    # On the engine's own stream, which is not captured.
                    program.fetch(program.placed(self.form.size(size), pixels, True))
                    plan = self._build_on(stream, size, pixels, wanted, apart=True)
                    self.device.keep_in_graph(stream, plan)
                    self._captured[key] = plan
                plan.bind(*addresses)
                plan.queue()

    def run(
        self,
        inputs: Sequence[arrays.View],
        outputs: Sequence[arrays.View],
        batch: int | Sizes,
        pixels: bool,
        wanted: frozenset[str] | None,
    ) -> Shelf:
        """Runs one pass over arrays in host memory; returns its shelf.

        Args:
            batch: images, or the sizes of all open dimensions.
            outputs: those that are wanted, in the network's order; None: all.
        """
        addresses = [array.address for array in (*inputs, *outputs)]
        self.open()
        pinned = False, False
        if inputs and outputs:
            pinned = self.pinned(batch, pixels, addresses[0], addresses[-1])
        key = "host", batch, pixels, pinned, wanted
        return self.pool.run(key, partial(self._build, key), *addresses)

    def run_at(self, addresses: Sequence[int], batch: int | Sizes, pixels: bool) -> Shelf:
        """Runs one pass over pageable memory of the host: all inputs, then all outputs; returns its shelf."""
        key = "host", batch, pixels, (False, False), None
        return self.pool.run(key, partial(self._build, key), *addresses)

    def shapes(self, batch: int | Sizes, pixels: bool) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all outputs of a pass over ``batch`` images, or of these sizes."""
        key = batch, pixels
        found = self._shapes.get(key)
        if found is None:
            found = self.open().output_shapes(self.form.size(batch), pixels)
            if len(self._shapes) >= KEPT_SHELVES:
                self._shapes.clear()
            self._shapes[key] = found
        return found


def _parts(
    inputs: Sequence[arrays.View],
    outputs: Sequence[arrays.View],
    count: int,
    batch: int,
    sizes: Sizes | None = None,
) -> list[tuple[Any, ...]]:
    """Returns the images or the sizes of each pass, and the addresses of its inputs and outputs."""
    ends = [(array.address, array.nbytes // max(count, 1)) for array in (*inputs, *outputs)]
    if sizes is not None and batch >= count:
        return [(sizes, *(address for address, _ in ends))]
    parts = [
        (min(batch, count - first), first) for first in (range(0, count, batch) if batch else [0])
    ]
    return [
        (
            size if sizes is None else sizes.with_batch(size),
            *(address + first * row for address, row in ends),
        )
        for size, first in parts
    ]
