"""Turns a network into the steps of one forward pass, with all memory allocated and all arguments ready.

Nothing is decided while a pass runs: a step is a compiled function and its arguments, so that the Python
between two layers costs well under a microsecond or two. Only the addresses of the images and of the
probabilities change from pass to pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import _cpu
from ..devices import Buffer
from ..devices.cpu import CpuDevice
from ..errors import InputError
from ..graph.network import (
    Conv2d,
    LayerInfo,
    Linear,
    MaxPool2d,
    Network,
    Softmax,
    operator_of,
    pair,
)
from ..ops import CONV2D_VARIANTS
from .variants import Choice

#: Chunks on their way at the same time in the data mode ``stream``: one comes in while another computes and
#: a third goes out.
LANES = 3


@dataclass(frozen=True)
class Slot:
    """Stands for an address that :meth:`Plan.bind` fills in: of the images or probabilities, and beyond."""

    name: str
    offset: int = 0


INPUT, OUTPUT = Slot("images"), Slot("probabilities")


@dataclass
class Step:
    """One call of a pass.

    Attributes:
        name, kind: of the layer; of a copy, what is copied and ``copy``; ``sync`` waits for the stream.
        place: ``cpu`` or ``cuda``: where the work is done.
        function, args: the call.
        flops, bytes: of the call; see :class:`~cnn_engine.graph.network.LayerInfo`.
        direction: of a copy, ``h2d`` or ``d2h``; ``h2h`` for staging on the CPU.
        lane: the device whose stream the work is on, where that is not the engine's own.
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


@dataclass
class Plan:
    """The steps of one forward pass over ``batch`` images, and the memory that they use.

    ``chunk`` is the number of images that move at a time where copies overlap with kernels, else None.
    """

    batch: int
    steps: list[Step]
    nbytes: Mapping[str, int]
    buffers: list[Any] = field(repr=False)
    chunk: int | None = None

    def __post_init__(self) -> None:
        self._calls = [(step.function, step.args) for step in self.steps]
        self._slots: dict[str, list[tuple[list[Any], int, int]]] = {
            "images": [],
            "probabilities": [],
        }
        for step in self.steps:
            for index, argument in enumerate(step.args):
                if isinstance(argument, Slot):
                    self._slots[argument.name].append((step.args, index, argument.offset))

    def bind(self, images: int, probabilities: int) -> None:
        """Sets the addresses of the images and of where the probabilities go."""
        for args, index, offset in self._slots["images"]:
            args[index] = images + offset
        for args, index, offset in self._slots["probabilities"]:
            args[index] = probabilities + offset

    def run(self) -> None:
        """Runs one pass; where images and probabilities are host memory, they are done on return."""
        for function, args in self._calls:
            function(*args)


@dataclass(frozen=True)
class Placement:
    """Where layers run and where their data lives.

    Attributes:
        device: the engine's device.
        data_mode: see ``--data-mode``.
        threads: of CPU work.
    """

    device: Any
    data_mode: str
    threads: int

    def place_of(self, kind: str) -> str:
        """Returns ``cpu`` or ``cuda`` for a layer's kind."""
        if self.device.kind == "cuda" and (self.data_mode == "resident" or kind == "conv"):
            return "cuda"
        return "cpu"


@dataclass(frozen=True)
class Program:
    """What a plan is built from: a network, its weights where they are needed, and how it runs.

    Attributes:
        network: the network.
        weights: place -> parameter -> its buffer, for layered variants.
        fused: makes the compiled whole network, for the variant ``fused``.
        placement: where layers run.
        choice: the variant.
    """

    network: Network
    weights: Mapping[str, Mapping[str, Buffer]]
    fused: Callable[[], Any]
    placement: Placement
    choice: Choice

    def image_bytes(self, pixels: bool) -> int:
        return math.prod(self.network.input_shape) * (1 if pixels else 4)


def build(program: Program, batch: int, pixels: bool, images_on_device: bool = False) -> Plan:
    """Builds the plan of a pass.

    Args:
        pixels: whether images are uint8 pixels; else they are the network's float32 input.
        images_on_device: whether images and probabilities are memory of the device (``resident`` only).

    Raises:
        InputError: the batch needs more memory than is free.
        UnsupportedError: managed memory is refused.
    """

    def build_with(allocate: Callable[[str, int], Buffer]) -> Plan:
        return _Builder(program, batch, pixels, images_on_device, allocate).build()

    # A first build only counts, so that a batch that cannot fit is refused before anything is taken.
    needed = build_with(lambda place, nbytes: Buffer(0, nbytes, None)).nbytes
    host = CpuDevice()
    device = program.placement.device
    if managed := needed.get("managed", 0):
        device.check_managed(managed)
    for place, memory in (("cpu", host), ("cuda", device)):
        wanted = needed.get(place, 0)
        if wanted and wanted > (free := memory.free_memory()):
            raise InputError(
                f"--batch: {batch} images need {wanted / 2**30:.1f} GiB on {memory.name}, "
                f"expected at most the {free / 2**30:.1f} GiB that are free"
            )
    allocators = {"cpu": host.allocate, "cuda": getattr(device, "allocate", None)}
    allocators["managed"] = getattr(device, "allocate_managed", None)
    return build_with(lambda place, nbytes: allocators[place](nbytes))


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
    lanes = [
        _Lane(program, placement.device.lane(), pixels, chunk, pinned)
        for _ in range(min(LANES, -(-batch // chunk)))
    ]
    steps: list[Step] = []
    for index, first in enumerate(range(0, batch, chunk)):
        lane = lanes[index % len(lanes)]
        steps += lane.finish()
        steps += lane.begin(first, min(chunk, batch - first))
    last = -(-batch // chunk)
    for index in range(last, last + len(lanes)):
        steps += lanes[index % len(lanes)].finish()
    nbytes = {"cuda": sum(lane.nbytes for lane in lanes)}
    return Plan(batch, steps, nbytes, [lanes], chunk)


class _Lane:
    """A stream, device memory for one chunk, and what of the pass is on its way there."""

    def __init__(
        self, program: Program, device: Any, pixels: bool, chunk: int, pinned: tuple[bool, bool]
    ) -> None:
        self.device = device
        self.threads = program.placement.threads
        placement = Placement(device, "resident", self.threads)
        self.program = replace(program, placement=placement)
        self.pixels = pixels
        self.image_bytes = program.image_bytes(pixels)
        self.row_bytes = 4 * program.network.classes
        self.images = device.allocate(chunk * self.image_bytes)
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

    def _stage(self, what: str, source: Any, to: Any, nbytes: int) -> Step:
        arguments = [source, to, nbytes, self.threads]
        return Step(what, "copy", "cpu", _cpu.copy, arguments, 0, nbytes, "h2h")

    def _copy(self, what: str, direction: str, to: Any, source: Any, nbytes: int) -> Step:
        function = self.device.copy_h2d if direction == "h2d" else self.device.copy_d2h
        arguments = [to, source, nbytes]
        return Step(what, "copy", "cuda", function, arguments, 0, nbytes, direction, self.device)

    def begin(self, first: int, count: int) -> list[Step]:
        """Returns the steps that send a chunk on its way."""
        if count not in self.plans:
            self.plans[count] = build(self.program, count, self.pixels, images_on_device=True)
            self.plans[count].bind(self.images.address, self.probabilities.address)
        steps = []
        source: Any = Slot("images", first * self.image_bytes)
        nbytes = count * self.image_bytes
        if self.staging[0] is not None:
            staged = self.staging[0].__array_interface__["data"][0]
            steps.append(self._stage("images", source, staged, nbytes))
            source = staged
        steps.append(self._copy("images", "h2d", self.images.address, source, nbytes))
        steps += [replace(step, lane=self.device) for step in self.plans[count].steps]
        to: Any = Slot("probabilities", first * self.row_bytes)
        nbytes = count * self.row_bytes
        self.pending = [Step("sync", "sync", "cpu", self.device.synchronize, [])]
        if self.staging[1] is not None:
            staged = self.staging[1].__array_interface__["data"][0]
            self.pending.append(self._stage("probabilities", staged, to, nbytes))
            to = staged
        steps.append(self._copy("probabilities", "d2h", to, self.probabilities.address, nbytes))
        return steps

    def finish(self) -> list[Step]:
        """Returns the steps that wait for the chunk that is on its way, if there is one."""
        steps, self.pending = self.pending or [], None
        return steps


class _Builder:
    """Walks along the layers, keeping where the last one's output is."""

    def __init__(
        self,
        program: Program,
        batch: int,
        pixels: bool,
        images_on_device: bool,
        allocate: Callable[[str, int], Buffer],
    ) -> None:
        self.program = program
        self.network = program.network
        self.placement = program.placement
        self.device = program.placement.device
        self.variant = program.choice.variant
        self.reduction = program.choice.reduction
        self.batch = batch
        self.pixels = pixels
        self.on_device = images_on_device
        self._allocate_in = allocate
        self.buffers: list[Buffer] = []
        self.nbytes: dict[str, int] = {}
        self.steps: list[Step] = []
        self.address: Any = INPUT
        self.place = "cuda" if images_on_device else "cpu"
        self.shape: tuple[int, ...] = self.network.input_shape
        self.managed = self.placement.data_mode == "managed"
        self.reachable = False  # whether the other place reaches the current buffer: managed memory

    def build(self) -> Plan:
        if self.program.choice.layered:
            self._normalize_where_pixels_arrive()
            for info in self.network.infos:
                self._layer(info)
        else:
            self._fused()
        if self.place == "cuda" and not self.on_device:
            self._copy("d2h", "probabilities", OUTPUT, self._nbytes())
        if self.device.kind == "cuda" and not self.on_device:
            self._synchronize()
        return Plan(self.batch, self.steps, self.nbytes, self.buffers)

    def _fused(self) -> None:
        """The whole network is one step, which takes pixels as they are."""
        place = self.device.kind
        images = self.batch * self.program.image_bytes(self.pixels)
        self._move(place, "images", images)
        self.shape = (self.network.classes,)
        to = self._output(place, last=True)
        where = self.placement.threads if place == "cpu" else self.device.stream_handle
        parameters = sum(math.prod(shape) for shape in self.network.parameters.values())
        step = Step(
            "network",
            "fused",
            place,
            self.program.fused().run,
            [self.address, self.pixels, self.batch, to, where],
            self.network.flops(self.batch),
            images + 4 * parameters + self._nbytes(),
        )
        self.steps.append(step)
        self._written(to, self.shape)

    def _normalize_where_pixels_arrive(self) -> None:
        first = self.network.infos[0].layer
        # Pixels travel as they are, a quarter of the bytes, and are normalised where they arrive.
        target = "cpu" if self.managed else self.placement.place_of("normalize")
        resident = self.placement.data_mode == "resident"
        if self.pixels:
            self._move(target, "images", self.batch * math.prod(self.shape))
            self._normalize()
        elif self.placement.place_of(first.kind) == "cuda" and resident:
            self._move("cuda", "images", self._nbytes())

    # ---- memory and copies ----

    def _nbytes(self) -> int:
        return 4 * self.batch * math.prod(self.shape)

    def _allocate(self, place: str, nbytes: int) -> int:
        kind = "managed" if self.managed else place
        buffer = self._allocate_in(kind, nbytes)
        self.buffers.append(buffer)
        self.nbytes[kind] = self.nbytes.get(kind, 0) + nbytes
        return buffer.address

    def _output(self, place: str, last: bool) -> Any:
        """Returns where a layer writes: the caller's memory for the last one, if it is on its side."""
        if last and (place == "cuda") == self.on_device:
            return OUTPUT
        return self._allocate(place, self._nbytes())

    def _copy(self, direction: str, what: str, to: Any, nbytes: int) -> None:
        function = self.device.copy_h2d if direction == "h2d" else self.device.copy_d2h
        self.steps.append(
            Step(what, "copy", "cuda", function, [to, self.address, nbytes], 0, nbytes, direction)
        )
        self.address = to

    def _synchronize(self) -> None:
        self.steps.append(Step("sync", "sync", "cpu", self.device.synchronize, []))

    def _move(self, place: str, what: str, nbytes: int) -> None:
        """Makes the current data reachable from ``place``."""
        if place == self.place:
            return
        if place == "cuda" and not self.reachable:
            self._copy("h2d", what, self._allocate("cuda", nbytes), nbytes)
        elif place == "cpu":
            if not self.reachable:
                self._copy("d2h", what, self._allocate("cpu", nbytes), nbytes)
            self._synchronize()
        self.place = place
        self.reachable = self.managed

    # ---- layers ----

    def _add(self, name: str, kind: str, operator: str, arguments: list[Any], shape: Any) -> None:
        module, where = (
            (_cpu, self.placement.threads)
            if self.place == "cpu"
            else (self.device.kernels, self.device.stream_handle)
        )
        function = getattr(module, operator)
        step = Step(name, kind, self.place, function, [*arguments, where], shape.flops, shape.bytes)
        self.steps.append(step)
        if operator in ("conv2d", "linear") and arguments[2] == 0:  # shapes count a bias
            step.bytes -= 4 * self.shape[0]

    def _written(self, address: Any, shape: tuple[int, ...]) -> None:
        self.address, self.shape = address, shape
        self.reachable = self.managed and address is not OUTPUT

    def _normalize(self) -> None:
        shape = _cpu.ElementwiseShape(self.batch * math.prod(self.shape), 1)
        to = self._allocate(self.place, self._nbytes())
        scale = [shape, self.network.scale, self.network.offset]
        self._add("normalize", "normalize", "normalize", [self.address, to, *scale], shape)
        self._written(to, self.shape)

    def _layer(self, info: LayerInfo) -> None:
        layer = info.layer
        place = self.placement.place_of(layer.kind)
        if isinstance(layer, Conv2d):
            self._conv2d(info, place)
            return
        self._move(place, f"{layer.name} input", self._nbytes())
        last = info is self.network.infos[-1]
        shape = layer.operator_shape(self.batch, info.input_shape)
        weights = self._weights(info, place) if isinstance(layer, Linear) else []
        self.shape = info.output_shape
        if isinstance(layer, (MaxPool2d, Linear)) or last or self.address is INPUT:
            to = self._output(place, last)
        else:
            to = self.address  # element by element: no memory of its own
        operator = operator_of(layer)
        options = [self.reduction] if isinstance(layer, (Linear, Softmax)) else []
        self._add(
            layer.name, layer.kind, operator, [self.address, *weights, to, shape, *options], shape
        )
        self._written(to, info.output_shape)

    def _conv2d(self, info: LayerInfo, place: str) -> None:
        layer = info.layer
        padding = pair("padding", layer.padding)
        input_shape = info.input_shape
        shape = layer.operator_shape(self.batch, input_shape)
        if self.variant == "pad" and padding != (0, 0):
            self._move(self.placement.place_of("pad"), f"{layer.name} input", self._nbytes())
            pad = _cpu.Pad2dShape(self.batch, *input_shape, *padding)
            self.shape = input_shape = (input_shape[0], pad.out_h, pad.out_w)
            to = self._allocate(self.place, self._nbytes())
            name = f"pad{layer.name.removeprefix('conv')}"
            self._add(name, "pad", "pad2d", [self.address, to, pad], pad)
            self._written(to, input_shape)
            kernel, stride = pair("kernel", layer.kernel), pair("stride", layer.stride)
            shape = _cpu.Conv2dShape(
                self.batch, *input_shape, layer.out_channels, *kernel, *stride, 0, 0
            )
        self._move(place, f"{layer.name} input", self._nbytes())
        weights = self._weights(info, place)
        self.shape = info.output_shape
        to = self._output(place, info is self.network.infos[-1])
        options = [shape, CONV2D_VARIANTS[self.variant], self.reduction]
        self._add(layer.name, "conv", "conv2d", [self.address, *weights, to, *options], shape)
        self._written(to, info.output_shape)
        if self.placement.data_mode == "transfer" and info is not self.network.infos[-1]:
            # As the thesis began: what a convolution writes goes back to the host at once.
            self._move("cpu", f"{layer.name} output", self._nbytes())

    def _weights(self, info: LayerInfo, place: str) -> list[int]:
        buffers = self.program.weights[place]
        name = info.layer.name
        bias = buffers.get(f"{name}.bias")
        return [buffers[f"{name}.weight"].address, 0 if bias is None else bias.address]
