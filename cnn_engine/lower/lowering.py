"""Lowers an engine's graph for its device, with constants on the device that plans share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..devices import Buffer
from ..devices.cpu import CpuDevice, release_free_memory
from ..graph import mapped
from ..graph.dims import Sizes
from ..graph.graph import Graph, Node, same_bits
from ..graph.specialization import Specializations
from ..kernels import Kernel
from ..kernels.cuda.requirements import TENSOR_CORES
from ..kernels.select import Choice
from ..operators.report_kinds import REPORT_KINDS
from . import batch_invariance, fused_network
from .pipeline import Lowered, Setting, lower, stages
from .placement import KernelsOfAllSizes, Placed, Placement, chosen, place

if TYPE_CHECKING:
    from ..engine.autotune import Chosen, Tuner


class Program:
    """A network, prepared for plans of any size: its graphs, kernels and constants.

    Args:
        graph_of: returns the graph for a batch or for sizes, whose images are pixels or not.
        placement: where nodes run.
        choice: the variant.
        dtype: what fused kernels compute in, and what others may round the operands of sums to.
        first: the batch that constants are loaded with, and whether its images are pixels.
        fuses: whether what follows a convolution may become part of it, as reports then show it.
        own: node, or operator -> a kernel of a user's own.
        tuner: chooses kernels by measuring them, or None.
        fused_layers: where the variant is fused: how many layers one kernel runs, the others running by
            themselves; None: all.
        saved: what an engine that was saved has of all this, or None.
        batch_invariant: whether all is decided as for one batch, so that an image has the same bits in any.

    Attributes:
        channels_last: whether images lie with their channels side by side between convolutions.
        replays: whether the device's part of a pass is to become one call.
        covered: nodes of the graph, from the first on, that one kernel runs, where the variant is fused.
        setting: what decides which passes run.
    """

    def __init__(
        self,
        graph_of: Callable[[int | Sizes, bool], Graph],
        placement: Placement,
        choice: Choice,
        dtype: str = "float32",
        first: tuple[int, bool] = (1, True),
        fuses: bool = False,
        own: Mapping[str, Kernel] | None = None,
        tuner: Tuner | None = None,
        fused_layers: int | None = None,
        saved: Saved | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.graph_of = graph_of
        self.saved = saved
        self.placement = placement
        self.choice = choice
        self.dtype = dtype
        self.first = first
        self.own = dict(own or {})
        self.tuner: Tuner | Chosen | None = tuner
        self.fused_layers = fused_layers
        self._sizes = graph_of(*first).sizes
        self.covered = 0
        has_rest, fuse_network = False, None  # after a chain
        if not choice.layered:
            graph = graph_of(*first)
            fuse_network = partial(_fuse_network, graph_of, dtype, fused_layers, first[1])
            self.covered = len(fuse_network(graph).nodes[0].covers)
            has_rest = self.covered < len(graph.nodes)
        layers = fuses and choice.layered and (choice.automatic or choice.variant == "blocked")
        self.channels_last = (
            layers
            and choice.automatic
            and not choice.reduction
            and not self.own  # whose tensors are row-major
            and placement.data_mode == "resident"
            and (placement.device.kind == "cpu" or TENSOR_CORES.met_by(placement.device.target))
        )
        # What follows a chain are layers of rows, which tensor cores, or a warp per output, are faster at.
        rows_follow = (
            has_rest
            and not self.own
            and placement.data_mode == "resident"
            and TENSOR_CORES.met_by(placement.device.target)
        )
        self.replays = (
            ((fuses and choice.automatic) or has_rest)
            and not self.own  # which may queue work elsewhere
            and placement.device.kind == "cuda"
            and placement.data_mode == "resident"
        )
        self.setting = Setting(
            placement.device, dtype, layers, self.channels_last, fuse_network, rows_follow,
            batch_invariant=batch_invariant and placement.device.kind == "cuda",
        )  # fmt: skip
        #: By whether images are pixels: graphs after the first stage, and the passes that made them.
        self._specializations: dict[bool, tuple[Specializations, list[Lowered]]] = {}
        #: Takes bytes, and returns memory of the host for what lies between the nodes of a plan.
        self.allocate: Callable[[int], Buffer] = CpuDevice().allocate_alone
        self.room = 0  # bytes that it returns without taking more memory
        #: What plans of one size leave for those of another, by who reads it.
        self.remembered: dict[tuple, Any] = {}
        #: By graph with symbols, threads and part: what is common to plans of all sizes.
        self.templates: dict[tuple, Any] = {}
        #: What the passes made of constants, by name: each of one value is one array, for all batches.
        self._constants: dict[str, list[np.ndarray]] = {}
        # By the arrays themselves, which are kept: plans hold addresses for as long as there are plans.
        self._uploaded: dict[tuple[int, str], tuple[np.ndarray, Buffer]] = {}
        self._prepared: dict[tuple, tuple[list, Any]] = {}
        self._of_all_sizes = KernelsOfAllSizes()
        #: Sizes and whether images are pixels -> the kernels of nodes, of an engine that is batch invariant.
        self._any_batch: dict[tuple[Sizes, bool], Mapping[str, Kernel]] = {}
        #: The same by nodes of graphs with symbols, which live as long as this.
        self._prepared_of: dict[tuple, tuple[list, Any]] = {}

    @property
    def in_float32(self) -> Mapping[str, str] | None:
        """Node -> why it runs in float32 though others round; None: none was looked for yet."""
        return self.setting.in_float32

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

    def with_memory(self, allocate: Callable[[int], Buffer], room: int = 0) -> Program:
        """Returns the same program with memory of the host from ``allocate``, which plans share.

        Args:
            room: bytes that are there already.
        """
        other = self.on(self.placement.device)
        other.allocate, other.room = allocate, room
        return other

    def with_kernels(self, chosen: Chosen) -> Program:
        """Returns the same program with these kernels for some of its nodes, in place of a tuner's."""
        other = self.on(self.placement.device)
        other.tuner = chosen
        other.remembered, other.templates = {}, {}
        return other

    def sizes(self, size: int | Sizes | None) -> Sizes:
        """Returns all sizes of a pass: of a batch alone, the others are those of the first pass.

        Raises:
            UnsupportedError: the graph is for another batch alone.
        """
        if isinstance(size, Sizes):
            return size
        if size is None or size == self.first[0]:
            return self._sizes
        if self._sizes.batch is None:
            return self.graph_of(size, self.first[1]).sizes
        return self._sizes.with_batch(size)

    def placed(self, size: int | Sizes | None, pixels: bool, on_device: bool = False) -> Placed:
        """Returns the graph of a pass with a place and a kernel for every node.

        Args:
            size: a batch, or the sizes of all open dimensions.
        """
        graph = self.laid(size, pixels)
        if self.batch_invariant:
            kernels = self._kernels_of_any_batch(self.sizes(size), pixels)
            batch_invariance.check(graph, kernels, self.placement.device.target)
            return self.place(graph, on_device, kernels)
        tuned = self.tuner.kernels(self, graph, size, pixels) if self.tuner else {}
        return self.place(graph, on_device, tuned)

    def place(
        self, graph: Graph, on_device: bool = False, tuned: Mapping[str, Kernel] | None = None
    ) -> Placed:
        """Returns a graph that :meth:`laid` made with a place and a kernel for every node."""
        return place(
            graph, self.placement, *self._wanted, on_device, self.own, tuned, self._of_all_sizes,
        )  # fmt: skip

    @property
    def _wanted(self) -> tuple[str | None, bool | None]:
        """The variant and the form of sums that nodes must have; None: the fastest."""
        if not self.choice.layered:  # the fastest kernel for each node after the fused network
            return None, None
        return None if self.choice.automatic else self.choice.variant, self.choice.reduction

    def chosen(self, node: Node, graph: Graph) -> Kernel | None:
        """Returns the kernel that :meth:`place` gives a node, where it is not a user's or a tuner's."""
        return chosen(self.placement, *self._wanted, node, graph)

    def symbolic(self, sizes: Sizes, pixels: bool) -> Graph | None:
        """Returns the graph of these sizes with symbols, as far as one was lowered and does not differ."""
        known = self._specializations.get(pixels)
        if known is None or stages(self.setting)[1]:
            return None
        found = known[0].symbolic(sizes)
        return None if found is None else found.graph

    def laid(self, size: int | Sizes | None, pixels: bool) -> Graph:
        """Returns the graph of a pass, rewritten for the device, before its nodes have kernels."""
        return self.lowered(size, pixels).graph

    def lowered(self, size: int | Sizes | None, pixels: bool) -> Lowered:
        """Returns the same, and the passes that made it.

        Those that decide alike for every size have run once, for all: see :func:`pipeline.stages`.
        """
        sizes = self.sizes(size)
        decided = batch_invariance.deciding(sizes) if self.batch_invariant else sizes
        if sizes == decided:
            return self._lowered(sizes, pixels)
        known = self._lowered(decided, pixels)
        graph = batch_invariance.resized(
            known.graph, self._specializations[pixels][0], decided, sizes
        )
        return replace(known, graph=graph)

    @property
    def batch_invariant(self) -> bool:
        """Whether an image has the same bits in any batch, though the device decides by it."""
        return self.setting.batch_invariant

    def _kernels_of_any_batch(self, sizes: Sizes, pixels: bool) -> Mapping[str, Kernel]:
        """Returns the kernels of all nodes, which are those of one batch."""
        decided = batch_invariance.deciding(sizes)
        found = self._any_batch.get((decided, pixels))
        if found is None:
            graph = self._lowered(decided, pixels).graph
            found = self.place(graph).kernels
            one = cache(lambda: self.laid(sizes.with_batch(1), pixels))
            batch_invariance.check_parts(graph, one, found, self.placement.device.target)
            self._any_batch[decided, pixels] = found
        return found

    def _lowered(self, sizes: Sizes, pixels: bool) -> Lowered:
        """Returns the graph for these sizes, decided as for these."""
        if self.setting.fuse_network is not None:
            graph = self.graph_of(sizes, pixels)
            mapped.check(graph.constants.values())
            return lower(graph, self.setting)
        if pixels not in self._specializations:
            firsts: list[Lowered] = []
            make = partial(_first_stage, self.graph_of, self.setting, pixels, firsts)
            if self.saved is not None:  # which has been through the first stage
                firsts.append(Lowered(self.graph_of(sizes, pixels), (), ()))
                made = self.saved.specializations
            else:
                made = Specializations(make)
            self._specializations[pixels] = made, firsts
        specializations, firsts = self._specializations[pixels]
        graph = specializations(sizes)
        mapped.check(graph.constants.values())
        _, by_size = stages(self.setting)
        found = lower(graph, self.setting, by_size)
        graph = self._sharing(found.graph)
        first = firsts[-1]
        refused = *first.refused, *found.refused
        return Lowered(graph, (*first.ran, *found.ran), refused)

    def _sharing(self, graph: Graph) -> Graph:
        """Returns a graph with the arrays of those before it where constants of a name are equal.

        Devices know constants by their arrays: of an array that is made anew each would have one copy more.
        """
        shared: dict[str, np.ndarray] = {}
        for name, array in graph.constants.items():
            known = self._constants.setdefault(name, [])
            if any(one is array for one in known):
                continue
            same = next((one for one in known if same_bits(one, array)), None)
            if same is None:
                known.append(array)
            else:
                shared[name] = same
        constants = {**graph.constants, **shared}
        return replace(graph, constants=constants, like=graph) if shared else graph

    def output_shapes(self, size: int | Sizes, pixels: bool) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all outputs of a pass, by their names."""
        sizes = self.sizes(size)
        known = self._specializations.get(pixels)
        symbolic = None if known is None else known[0].symbolic(sizes)
        if symbolic is None:
            graph = self.graph_of(size, pixels)
            return {name: graph.values[name].shape for name in graph.outputs}
        graph = symbolic.graph
        return {name: sizes.resolve(graph.values[name].shape) for name in graph.outputs}

    def load(self) -> None:
        """Uploads constants to the memory that the kernels read, before the first pass.

        With a tuner that is done for the batch of each plan: another batch may have other kernels.
        """
        if self.tuner is not None:
            return
        self.fetch(self.placed(*self.first))
        release_free_memory()

    def fetch(self, placed: Placed) -> None:
        """Uploads the constants of a pass to the memory that its kernels read, unless they are there."""
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
                if name in constants and not kernel.packs_input(index):
                    self.constant(placed.graph, name, placed.spaces[node.name])
                if name in constants:
                    mapped.release(constants[name])

    def constant(self, graph: Graph, name: str, where: str) -> int:
        """Returns the address of a constant in a memory space.

        One of this size alone is kept for that graph: who uses it holds it.
        """
        array = graph.constants[name]
        if name in graph.sized:
            own = graph.__dict__.setdefault("uploaded", {})
            if (name, where) not in own:
                own[name, where] = self.device_of(where).upload(np.ascontiguousarray(array))
            return own[name, where].address
        key = id(array), where
        if key not in self._uploaded:
            buffer = self.device_of(where).upload(np.ascontiguousarray(mapped.read(array)))
            self._uploaded[key] = array, buffer
        return self._uploaded[key][1].address

    def prepared(self, graph: Graph, node: Node, kernel: Kernel) -> Any:
        """Returns the constants of ``node`` as ``kernel`` prepares them: once for all nodes and sizes.

        What is made of constants that are of one size alone is kept for that graph: who uses it holds it.
        """
        device = self.device_of(kernel.device)
        way, known = kernel.packed_for(node, graph, device), self._symbolic_key(graph, node, kernel)
        if known is not None:
            known = *known, kernel.prepare, way
            if known in self._prepared_of:
                return self._prepared_of[known][1]
        values, packed = [], []
        for index, (name, value) in enumerate(zip(node.inputs, graph.inputs_of(node), strict=True)):
            array = graph.constants.get(name)
            if array is None:
                # Kernels of a GPU may pack for the very sizes.
                shape = value and (
                    graph.fixed_shape(value) if kernel.device == "cpu" else value.shape[1:]
                )
                values.append(value and (shape, value.dtype, value.storage_dtype))
            elif kernel.packs_input(index):
                packed.append(array)
                values.append(id(array))
            else:
                values.append("brought to the device")
        op = node.op.without_activation
        if not graph.sized.isdisjoint(node.inputs):
            own = graph.__dict__.setdefault("prepared", {})
            if node.name not in own:
                own[node.name] = kernel.prepare(node, _with_copies(graph, packed), device)
            return own[node.name]
        key = kernel.prepare, way, op, tuple(values)
        if key not in self._prepared:
            source = graph
            if self.saved is not None and self.saved.has(node, kernel, way, packed):
                device = self.saved.device(device, node, kernel, way)
            else:
                source = _with_copies(graph, packed)
            self._prepared[key] = packed, kernel.prepare(node, source, device)
        if known is not None:
            self._prepared_of[known] = self._prepared[key]
        return self._prepared[key][1]

    @staticmethod
    def _symbolic_key(graph: Graph, node: Node, kernel: Kernel) -> tuple | None:
        """Returns what stands for a node in graphs of all sizes; None where it depends on the size."""
        if not graph.is_substituted or not graph.sized.isdisjoint(node.inputs):
            return None
        if kernel.device != "cpu":
            return None
        symbolic = graph.symbolic
        position = symbolic.positions.get(node.name)
        if position is None or symbolic.nodes[position].op is not node.op:
            return None
        return id(symbolic), node.name

    def gemm_kernels(self) -> list[str]:
        """Returns the kernels of the first batch's convolutions and products, as reports name them."""
        placed, found = self.placed(*self.first), {}
        for node in placed.graph.nodes:
            kernel = placed.kernels.get(node.name)
            kind = REPORT_KINDS.get(node.op.kind, node.op.kind)
            if kernel is not None and kind in ("conv", "fc", "matmul"):
                found[kernel.shown_as(node, placed.graph, self.device_of(kernel.device))] = None
        return list(found)

    def forget_prepared(self, known: Collection[tuple]) -> None:
        """Frees the constants prepared since :meth:`prepared_keys` returned ``known``."""
        for key in self._prepared.keys() - known:
            del self._prepared[key]
        self._prepared_of.clear()

    def prepared_keys(self) -> Collection[tuple]:
        """Returns the keys of all constants prepared until now."""
        return set(self._prepared)

    def device_of(self, where: str) -> Any:
        """Returns the device of a memory space."""
        device = self.placement.device
        return device if device.kind == where else CpuDevice()


class Saved(Protocol):
    """Contents of a saved engine: :class:`cnn_engine.engine.saved.SavedWeights`."""

    specializations: Specializations

    def has(self, node: Node, kernel: Kernel, way: Any, constants: Collection[np.ndarray]) -> bool:
        """Whether the file holds the kernel's packed form of these constants."""

    def device(self, device: Any, node: Node, kernel: Kernel, way: Any) -> Any:
        """Returns a device whose memory for packed weights is the file's, in the order of the kernel."""


def _first_stage(
    graph_of: Callable[[Sizes, bool], Graph],
    setting: Setting,
    pixels: bool,
    firsts: list[Lowered],
    sizes: Sizes,
) -> Graph:
    """Returns the graph of a size after the passes that decide alike for all, and keeps what they did."""
    first, _ = stages(setting)
    firsts[:] = [lower(graph_of(sizes, pixels), setting, first)]
    return firsts[0].graph


def _fuse_network(
    graph_of: Callable[[int, bool], Graph],
    dtype: str,
    count: int | None,
    first_pixels: bool,
    graph: Graph,
) -> Graph:
    """Returns ``graph`` with its first ``count`` layers as one node, for the kernel that runs them."""
    scale_and_offset = ()
    if first_pixels and graph.inputs[0].dtype != "uint8":
        # One compiled network for pixels and for what they become.
        op = fused_network.chain(graph_of(1, True), dtype, count).op
        scale_and_offset = op.scale, op.offset
    chain = fused_network.chain(graph, dtype, count, *scale_and_offset)
    return graph.replaced([n for n in graph.nodes if n.name in chain.covers], [chain])


def _with_copies(graph: Graph, arrays: Collection[np.ndarray]) -> Graph:
    """Returns the graph with copies of those of its constants among ``arrays`` that lie in a file."""
    copies = {id(array): mapped.read(array) for array in arrays}
    read = {
        name: copies[id(array)] for name, array in graph.constants.items() if id(array) in copies
    }
    if all(array is graph.constants[name] for name, array in read.items()):
        return graph
    other = object.__new__(Graph)  # with all that is known of it: nothing is inferred again
    other.__dict__.update(graph.__dict__, constants={**graph.constants, **read})
    return other
