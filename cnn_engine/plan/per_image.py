"""Runs the first layers of a pass image by image, so that activations stay in caches.

The first layers of a network make much of few weights: what they write for eight images leaves a core's
caches before the next layer reads it, for one image it does not. The last ones read many weights for few
positions, once for all images. With more threads each takes images of its own, and none waits between layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .. import _cpu, kernels
from ..errors import InputError, UnsupportedError
from ..graph.dims import Sizes
from ..graph.graph import Graph, Node, Value
from ..lower.lowering import Program
from ..lower.placement import Placed, memory_of
from ..operators.average_pool2d import AveragePool2d
from ..operators.binary import Binary
from ..operators.conv2d import Conv2d
from ..operators.max_pool2d import MaxPool2d
from ..operators.norm import BatchNorm
from ..operators.reduce import Reduce
from ..operators.region import records_of
from ..operators.shaping import Concat, Reshape, Transpose
from ..operators.unary import Unary
from . import template_cache
from .arenas import allocate, check_fits, kept_of, plan_memory
from .builder import Builder
from .builder import build as build_together
from .memory import MemoryPlan
from .plan import Plan, Slot, Step
from .schedule import CPU_LAYERED
from .template import Sized

#: Images of a pass at most, each of which has steps of its own: as many as a plain call gives a pass.
MOST_IMAGES = CPU_LAYERED

#: What plans of as many sizes leave for those of others.
REMEMBERED = 64

#: What computes an image's part of its output from that image alone, as long as the batch stays in front.
OF_EACH_IMAGE = (
    AveragePool2d, BatchNorm, Binary, Concat, Conv2d, MaxPool2d, Reduce, Reshape, Transpose, Unary,
)  # fmt: skip


def is_of_each_image(node: Node, graph: Graph, whole: Graph) -> bool:
    """Whether a node of a graph for one image treats each image of ``whole`` as that image."""

    def is_image(name: str | None) -> bool:
        if name is None or name in graph.constants:
            return True
        one, all_of_them = graph.values[name].shape, whole.values[name].shape
        images = {(whole.batch, *one)}  # a gate of one image has no batch
        if one[:1] == (1,):
            images.add((whole.batch, *one[1:]))
        return all_of_them in images

    return all(isinstance(op, OF_EACH_IMAGE) for op in records_of(node.op)) and all(
        map(is_image, (*node.inputs, *node.outputs))
    )


def cut(graph: Graph, whole: Graph) -> int:
    """Returns how many nodes are to run image by image, from the first on; 0: none.

    After the last of them one value alone is needed further on. They are those of which what is read and
    written exceeds the weights, which are read again for each image, by most.

    Args:
        graph: for one image.
        whole: the same for all images of a pass.
    """
    if [node.name for node in graph.nodes] != [node.name for node in whole.nodes]:
        return 0
    (value,) = graph.inputs
    written = {memory_of(name, graph.producers) for name in graph.outputs} | set(graph.outputs)
    last = {
        name: graph.positions[nodes[-1].name] for name, nodes in graph.consumers.items() if nodes
    }
    alive = {value.name} & last.keys()
    best = gain = most = 0
    for place, node in enumerate(graph.nodes):
        if written & set(node.outputs) or not is_of_each_image(node, graph, whole):
            break
        for name in node.inputs:
            if name in graph.constants:
                gain -= graph.constants[name].nbytes
            elif name is not None:
                gain += graph.values[name].nbytes
                if last[name] == place:
                    alive.discard(name)
        for name in node.outputs:
            gain += graph.values[name].nbytes
            if name in last:
                alive.add(name)
        alone = alive == set(node.outputs[:1]) and graph.values[node.outputs[0]].shape[:1] == (1,)
        if alone and node.op.kind not in kernels.ALIASES and gain > most:
            best, most = place + 1, gain
    return best


def pays(images: int, threads: int) -> bool:
    """Whether a pass over so many images is to run image by image: all threads have nearly as many."""
    even = images >= 4 * threads or images % threads == 0
    return 1 < images <= MOST_IMAGES and (threads == 1 or even)


def halves(placed: Placed, count: int) -> tuple[Placed, Placed]:
    """Returns the first ``count`` nodes, whose output the others read, and those others."""
    first, second = _cut(placed.graph, count)
    return replace(placed, graph=first, outputs=first.outputs), replace(placed, graph=second)


def _cut(graph: Graph, count: int) -> tuple[Graph, Graph]:
    (name,) = graph.nodes[count - 1].outputs
    return tuple(
        replace(
            graph, nodes=nodes, inputs=inputs, outputs=outputs, batched=(), rebuild=None, like=graph,
            constants={
                n: graph.constants[n] for node in nodes for n in node.inputs if n in graph.constants
            },
        )
        for nodes, inputs, outputs in (
            (graph.nodes[:count], graph.inputs, (name,)),
            (graph.nodes[count:], (graph.values[name],), graph.outputs),
        )
    )  # fmt: skip


class Lanes:
    """The image by image part of a plan, on several threads at once.

    Args:
        lanes: for each thread a plan of one image, from an image's address to where its result goes.
        count: images.
        images: bytes of one.
        results: bytes of one's result.
        address: where the results go, one after the other.
        rest: what follows, for all images.
    """

    def __init__(
        self,
        lanes: Sequence[Plan],
        count: int,
        images: int,
        results: int,
        address: int,
        rest: Sequence[Step],
    ) -> None:
        self.lanes = lanes
        self.count = count
        self.images = images
        self.results = results
        self.address = address
        self.rest = [(step.function, step.args) for step in rest]

    def run(self, images: int) -> None:
        """Runs a pass over the images at this address."""
        following = itertools.count()

        def take(index: int) -> None:
            lane = self.lanes[index]
            while (image := next(following)) < self.count:
                lane.bind(images + image * self.images, self.address + image * self.results)
                lane.run_steps()

        _cpu.on_threads(len(self.lanes), take)
        for function, args in self.rest:
            function(*args)


def build(
    program: Program,
    size: int | Sizes | None,
    pixels: bool,
    images_on_device: bool = False,
    page_locked: bool = False,
) -> Plan:
    """Builds the plan of a pass, with images apart where that may pay: see :func:`.builder.build`."""
    sizes = program.sizes(size)
    if (
        program.channels_last
        and program.placement.device.kind == "cpu"
        and sizes.images is not None
        and pays(sizes.images, program.placement.threads)
    ):
        cuts = _Cuts(program, sizes, pixels)
        parts = None if images_on_device else cuts.known()
        if parts is None:
            whole = program.placed(sizes, pixels, images_on_device)
            if len(whole.graph.inputs) == 1 and whole.graph.batched and not whole.fallbacks:
                one = _of_one_image(program, sizes.with_batch(1), pixels, images_on_device)
                if one is not None and (count := cut(one.graph, whole.graph)):
                    parts = cuts.made(one, whole, count, learns=not images_on_device)
        if parts is not None:
            return _build(program, sizes, *parts)
    return build_together(program, sizes, pixels, images_on_device, page_locked)


def _of_one_image(
    program: Program, sizes: Sizes, pixels: bool, images_on_device: bool
) -> Placed | None:
    """Returns a pass over one image; None where the graph has the batch in its shapes."""
    key = "one image", sizes, pixels, images_on_device
    if key not in program.remembered:
        _forget(program)
        try:
            program.remembered[key] = program.placed(sizes, pixels, images_on_device)
        except (InputError, UnsupportedError):
            program.remembered[key] = None
    return program.remembered[key]


def _forget(program: Program) -> None:
    """Drops what plans of earlier sizes left, where there is much of it."""
    while len(program.remembered) >= REMEMBERED:
        program.remembered.pop(next(iter(program.remembered)))


def _bound(steps: Sequence[Step], *all_of: Callable[[Slot], Any]) -> list[Step]:
    """Returns steps once for each of ``all_of``, with ``of(slot)`` in the place of every slot.

    Steps without any slot are the same objects each time.
    """
    slotted = [any(isinstance(argument, Slot) for argument in step.args) for step in steps]
    return [
        step.with_arguments([of(a) if isinstance(a, Slot) else a for a in step.args])
        if changes
        else step
        for of in all_of
        for step, changes in zip(steps, slotted, strict=True)
    ]


class _Part:
    """A part of a pass on the CPU, with its memory planned.

    Attributes:
        nbytes: of its memory.
    """

    def __init__(self, program: Program, placed: Placed, planned: MemoryPlan | None = None) -> None:
        self.program = program
        self.placed = placed
        threads = program.placement.threads
        self.planned = planned or plan_memory(placed, program.device_of, threads)
        self.nbytes = sum(self.planned.sizes.values())

    def value(self, name: str) -> Value:
        """Returns a value of the part."""
        return self.placed.graph.values[name]

    def outputs(self) -> dict[str, Value]:
        """Returns the outputs, by what the caller calls them."""
        names = zip(self.placed.graph.outputs, self.placed.outputs, strict=True)
        return {called: self.value(name) for name, called in names}

    def steps(self) -> tuple[list[Step], Any]:
        """Returns the part's steps, and the memory of their own that they use."""
        buffers = allocate(self.program, self.planned)
        builder = Builder(self.program, self.placed, self.planned, buffers)
        steps = builder.steps(self.placed.graph, caller_waits=True)
        return steps, (buffers, kept_of(self.placed.graph))


class _SizedPart:
    """The same of a template."""

    def __init__(self, program: Program, sized: Sized) -> None:
        self._program, self._sized = program, sized
        self.nbytes, self.value, self.outputs = sized.nbytes, sized.value, sized.outputs

    def steps(self) -> tuple[list[Step], Any]:
        memory = self._program.allocate(self.nbytes) if self.nbytes else None
        return self._sized.steps(memory), memory


#: The part of one image on all threads, the same on one, and what follows; the names of the image and of what
#: lies between.
_Parts = tuple[Any, Any, Any, str, str]


class _Cuts:
    """Passes of a program of which the first nodes run image by image."""

    def __init__(self, program: Program, sizes: Sizes, pixels: bool) -> None:
        self.program, self.sizes, self.pixels = program, sizes, pixels
        self.one = sizes.with_batch(1)
        self.symbolic = program.symbolic(sizes, pixels)
        self.symbolic_one = program.symbolic(self.one, pixels)
        self.key = "cut", id(self.symbolic), id(self.symbolic_one)

    def known(self) -> _Parts | None:
        """Returns the parts as templates have them, or None."""
        found = self.program.templates.get(self.key)
        if found is None:
            return None
        count, image, between = found
        first = self._first(self.program, count)
        several = self.program.placement.threads > 1
        parts = (
            first,
            self._first(self.program.alone(), count) if several else first,
            template_cache.sized(
                self.program, self.sizes, self.pixels, self.symbolic, ("from", count)
            ),
        )
        if None in parts:
            return None
        return (*(_SizedPart(self.program, part) for part in parts), image, between)

    def _first(self, program: Program, count: int) -> Sized | None:
        return template_cache.sized(
            program, self.one, self.pixels, self.symbolic_one, ("until", count)
        )

    def made(self, one: Placed, whole: Placed, count: int, learns: bool) -> _Parts:
        """Returns the parts of these graphs, for one image and for all.

        Args:
            learns: whether templates may be made of them.
        """
        alone = self.program.alone()
        first, rest = halves(one, count)[0], halves(whole, count)[1]
        (image,), (between,) = first.graph.inputs, rest.graph.inputs
        if learns and all(
            placed.graph.is_substituted and placed.graph.symbolic is symbolic
            for placed, symbolic in ((one, self.symbolic_one), (whole, self.symbolic))
        ):
            if template_cache.learn(
                self.program, rest, self.symbolic, self.sizes, ("from", count),
                lambda graph: _cut(graph, count)[1],
            ):  # fmt: skip
                for program in (self.program, alone):
                    template_cache.learn(
                        program, first, self.symbolic_one, self.one, ("until", count),
                        lambda graph: _cut(graph, count)[0], at_once=True,
                    )  # fmt: skip
            self.program.templates[self.key] = count, image.name, between.name
        return (
            _first_part(self.program, one, count), _first_part(alone, one, count),
            _Part(self.program, rest), image.name, between.name,
        )  # fmt: skip


def _first_part(program: Program, one: Placed, count: int) -> _Part:
    """Returns the first nodes of a pass over one image: for all batches that are cut there."""
    key = "first part", id(one), count, program.placement.threads
    if key not in program.remembered:
        _forget(program)
        part = _Part(program, halves(one, count)[0])
        program.remembered[key] = one, part.placed, part.planned
    _, placed, planned = program.remembered[key]
    return _Part(program, placed, planned)


def _build(
    program: Program, sizes: Sizes, part: Any, alone: Any, rest: Any, image: str, between: str
) -> Plan:
    """Builds a plan whose first part runs image by image: see :data:`_Parts`."""
    batch, threads = sizes.images, program.placement.threads
    of_image, of_rest = part.value(image), rest.value(between)
    result = of_rest.nbytes // batch
    count = threads if threads > 1 else 0
    nbytes = {"cpu": part.nbytes + rest.nbytes + of_rest.nbytes + count * alone.nbytes}
    check_fits(program.placement, nbytes, sizes)
    memory = program.allocate(of_rest.nbytes)
    kept: list[Any] = [memory, program]

    def of(index: int) -> Callable[[Slot], Any]:
        def address(argument: Slot) -> Any:
            if argument.name == between:
                return memory.address + index * result + argument.offset
            if argument.name == image:
                return Slot(image, index * of_image.nbytes + argument.offset)
            return argument

        return address

    def made(part: Any) -> list[Step]:
        steps, buffers = part.steps()
        kept.append(buffers)
        return steps

    every = _bound(made(part), *map(of, range(batch)))
    last = _bound(made(rest), of(0))
    outputs = rest.outputs()
    lanes = None
    if count:
        slots = image, between
        plans = [Plan(1, made(alone), {"cpu": alone.nbytes}, [], slots=slots) for _ in range(count)]
        lanes = Lanes(plans, batch, of_image.nbytes, result, memory.address, last)
    return Plan(
        batch, [*every, *last], nbytes, kept, slots=(image, *outputs), outputs=outputs, lanes=lanes
    )
