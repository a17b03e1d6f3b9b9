"""The Kernel record: which nodes a kernel can run, and how it is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..devices import Buffer
from ..graph.graph import Graph, Node, Value
from ..target import Requires, Target
from .native import _cpu

#: For calls that do not report results past float16's range.
NO_ONE = _cpu.Overflow(0, 0)

#: The rank of a product's launch of which tile and split are the same for every batch (``rated.h``).
ANY_BATCH = -1

#: What a kernel requires that runs on every device of its kind.
NOTHING = Requires()

#: A compiled function and its arguments, addresses among them as integers.
Bound = tuple[Callable[..., None], list[Any]]


@dataclass(frozen=True)
class Call:
    """One node where a kernel runs it, with every address known.

    Attributes:
        node: the node.
        inputs, outputs: its values; None is an optional input that is absent.
        input_addresses: of every input, 0 for an absent one.
        output_addresses: of every output.
        workspace: the address of the kernel's scratch memory, or 0.
        prepared: what the kernel's ``prepare`` returned, or None.
        device: where it runs.
        threads: CPU threads.
        pitches: name of a value -> elements from one row of its last dimension to the next, where other
            values' columns lie between.
        stream: what stands for the stream's handle, or None: the device's own.
        overflow: where kernels that round report results past float16's range.
        ready: of input 0, the first channels that are there when the kernel starts, which kernels that read
            ahead need not wait for.
        holds: whether such a kernel lets the next one start only when it has waited itself.
        any_batch: whether what decides the order of sums must be the same for every batch.
    """

    node: Node
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    input_addresses: tuple[Any, ...]
    output_addresses: tuple[Any, ...]
    workspace: Any
    prepared: Any
    device: Any
    threads: int
    pitches: Mapping[str, int] = field(default_factory=dict)
    stream: Any = None
    overflow: Any = NO_ONE
    ready: int = 0
    holds: bool = False
    any_batch: bool = False

    def pitch(self, value: Value | None) -> int:
        """Returns the elements from one row of the last dimension of ``value`` to the next; 0 for None."""
        return 0 if value is None else self.pitches.get(value.name, value.shape[-1])

    @property
    def uses_storage_dtype(self) -> bool:
        """Whether any of its values lies in memory in another type than its own."""
        return any(
            value is not None and value.storage_dtype for value in (*self.inputs, *self.outputs)
        )

    def native(self, function: str, *arguments: Any) -> Bound:
        """Returns the call of a compiled function; the threads, the stream or the device come last."""
        kind = self.device.kind
        where = self.threads
        if kind == "cuda":
            where = self.device.stream_handle if self.stream is None else self.stream
        if kind == "openacc":
            where = self.device.number
        return getattr(functions(self.device), function), [*arguments, where]


def functions(device: Any) -> Any:
    """Returns the module with a device's compiled functions."""
    return _cpu if device.kind == "cpu" else device.kernels


def workspace_for(device: Any, threads: int) -> Any:
    """Returns the argument of workspace functions: a CPU's threads, or a GPU."""
    return threads if device.kind == "cpu" else device.target.native


def upload(array: np.ndarray, device: Any) -> Any:
    """Returns a buffer of the device with ``array``: on the CPU it is the array itself, if aligned."""
    array = np.require(array, requirements=("C", "A"))
    if device.kind == "cpu":
        return Buffer(_cpu.address_of(array), array.nbytes, array)
    return device.upload(array)


def packed(device: Any, nbytes: int, fill: Callable[[int], Any]) -> Any:
    """Returns a buffer of the device with packed weights.

    Args:
        fill: fills it, given its address; returns what is read meanwhile. It is not called where an engine
            that was saved has the bytes already.
    """
    known = getattr(device, "saved", None)
    if known is not None and (buffer := known(nbytes)) is not None:
        return buffer
    buffer = device.allocate(nbytes)
    source = fill(buffer.address)
    device.synchronize()
    del source
    return buffer


def first_computed(node: Node, graph: Graph, positions: Iterable[int]) -> int | None:
    """Returns the first of these inputs that is no constant: an input or an intermediate value."""
    for place in positions:
        name = node.inputs[place] if place < len(node.inputs) else None
        if name is not None and name not in graph.constants:
            return place
    return None


def _never(node: Node, graph: Graph) -> str | None:
    return None


def _any_device(node: Node, graph: Graph, device: Any) -> str | None:
    return None


def _always(node: Node, graph: Graph, target: Target) -> bool:
    return True


def _no_positions(node: Node, graph: Graph) -> Container[int | None]:
    return ()


def storing(*positions: int | None) -> Callable[[Node, Graph], Container[int | None]]:
    """Returns a :attr:`Kernel.stores` that is the same for every node."""
    return lambda node, graph: positions


def storage_of(value: Value | None) -> Any:
    """Returns how a value lies in memory, as the compiled functions take it."""
    return getattr(
        _cpu.ElementType, (value.storage_dtype if value is not None else "") or "float32"
    )


def _no_forms(node: Node, graph: Graph, device: Any) -> Sequence[Kernel]:
    return ()


def _nothing_else(node: Node, graph: Graph, device: Any) -> None:
    return None


def _no_bytes(node: Node, graph: Graph, device: Any, threads: int) -> int:
    return 0


@dataclass(frozen=True)
class Kernel:
    """One way of running one operator on one kind of device.

    Attributes:
        op: the operator's kind.
        name: what ``--variant`` takes, where it is a variant; what reports show beside the node.
        device: ``cpu``, ``cuda`` or ``openacc``.
        make: returns the compiled function and its arguments. Addresses may be stand-ins that are filled in
            later, so they are passed on as they are, each an argument of its own.
        dtypes: of input 0 that it takes; empty: all.
        computes: what ``--dtype`` may ask it to compute in.
        layouts: of input 0 that it takes.
        requires: what it needs of a GPU or CPU.
        why_not: returns why it cannot run a node, or None where it can.
        why_not_fuse: of a region: returns why a device does not run it sooner than others run its nodes, or
            None where it does. The graph still has the nodes, and not the region.
        automatic: whether ``auto`` may pick it for a node that it can run, on a target that it can run on.
        workspace: returns the bytes of scratch memory that a call needs on a device, with so many threads.
        in_place: whether output 0 may lie where input 0 lies.
        pitched: the inputs, and None for the outputs, that may be columns of wider rows: see Call.pitches.
        stores: returns the inputs, and None for the outputs, that may lie in memory in 16 bits where the
            operator has them as float32: see Value.storage_dtype.
        same_storage: whether those lie in memory in the same type.
        reads_early: returns, of what ``prepare`` returned, whether it heeds what a call says is known, and
            whether it holds: see Call. None: never.
        holds: whether such a kernel always holds, as several of them in a row read ahead.
        reduction: None, or whether this is the form in which several lanes share one output's sum.
        rewrite: returns the nodes that stand for a node before this kernel runs it, or None as it stands.
        prepare: returns what is made once from constants of a node (packed weights, say) and kept for every
            plan, and for all nodes that have the same ones and the same record but for the activation,
            on a CPU whatever is open of their inputs' shapes, on a GPU for images of the same sizes.
        packed_for: returns what else of a node that depends on.
        shows: returns the name that reports show of a node on a device, where ``prepare`` chooses among
            several; None: ``name``.
        packs: the inputs that ``prepare`` takes up, constants that are not brought to the device otherwise;
            their addresses are 0. None: all.
        early: the inputs beside those that it reads before it waits for the kernels before it: they must be
            constants, which no kernel of a pass writes.
        form: what tells kernels of one name apart that run a node in different ways, such as the size of a
            tile; empty where the kernel chooses for itself.
        forms: returns the kernel in the forms that a node may also have on a device, those first that ought
            to be fastest: what ``--tune`` measures beside the kernel itself.
        summary: one line for ``--help`` and the docs, where the name is a variant.
        file: of a kernel of a user's own, its path.
        again: returns a kernel of a user's own once more: what it is made of can be pickled, its functions
            cannot.
    """

    op: str
    name: str
    device: str
    make: Callable[[Call], Bound]
    dtypes: tuple[str, ...] = ("float32",)
    computes: tuple[str, ...] = ("float32",)
    layouts: tuple[str, ...] = ("contiguous",)
    requires: Requires = NOTHING
    why_not: Callable[[Node, Graph], str | None] = _never
    why_not_fuse: Callable[[Node, Graph, Any], str | None] = _any_device
    automatic: Callable[[Node, Graph, Target], bool] = _always
    workspace: Callable[[Node, Graph, Any, int], int] = _no_bytes
    in_place: bool = False
    pitched: Container[int | None] = ()
    stores: Callable[[Node, Graph], Container[int | None]] = _no_positions
    same_storage: bool = False
    reads_early: Callable[[Any], bool] | None = None
    holds: bool = False
    reduction: bool | None = None
    rewrite: Callable[[Node, Graph], Sequence[Node] | None] = _never
    prepare: Callable[[Node, Graph, Any], Any] | None = None
    packed_for: Callable[[Node, Graph, Any], Hashable] = _nothing_else
    shows: Callable[[Node, Graph, Any], str] | None = None
    packs: tuple[int, ...] | None = None
    early: tuple[int, ...] = ()
    form: str = ""
    forms: Callable[[Node, Graph, Any], Sequence[Kernel]] = _no_forms
    summary: str = ""
    file: str | None = None
    again: Callable[[], Kernel] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple:
        return super().__reduce__() if self.again is None else (self.again, ())

    @staticmethod
    def from_file(path: str | os.PathLike[str]) -> Kernel:
        """Returns the kernel in a file of a user's own, CUDA (``.cu``) or C++ (``.cpp``).

        ``docs/reference/kernel_files.md`` has the form of such a file.

        Raises:
            InputError: the file cannot be read, or what it says of itself is at fault.
        """
        from . import user  # which stands on this module

        return user.from_file(path)

    @staticmethod
    def from_callable(
        function: Callable[..., None], op: str, device: str = "cuda", **options: Any
    ) -> Kernel:
        """Returns the kernel that a Python callable runs: CuPy's RawKernel, Numba's, Triton's.

        See :func:`cnn_engine.kernels.user.from_callable`.
        """
        from . import user

        return user.from_callable(function, op, device, **options)

    def packs_input(self, place: int) -> bool:
        """Whether ``prepare`` packs the constant that is input ``place``."""
        return self.prepare is not None and (self.packs is None or place in self.packs)

    def allows_pitch(self, node: Node, place: int | None) -> bool:
        """Whether an input of ``node``, or its outputs (None), may be columns of wider rows."""
        planar = place == 0 and getattr(node.op, "planar", False)  # its rows are not of channels
        return place in self.pitched and not planar

    def shown_as(self, node: Node, graph: Graph, device: Any) -> str:
        """Returns the name of the kernel that runs ``node`` on a device, for reports."""
        return self.name if self.shows is None else self.shows(node, graph, device)

    def refuses(self, node: Node, graph: Graph, target: Target | None = None) -> str | None:
        """Returns why the kernel cannot run ``node``, or None.

        Args:
            target: where; None: on one that has what it requires.
        """
        if target is not None and (reason := self.requires.why_not(target)):
            return reason
        first = graph.values[node.inputs[0]] if node.inputs and node.inputs[0] else None
        if first is not None and self.dtypes and first.dtype not in self.dtypes:
            return f"expected {' or '.join(self.dtypes)}, found {first.dtype}"
        if first is not None and first.layout not in self.layouts:
            return f"expected the layout {' or '.join(self.layouts)}, found {first.layout}"
        positions = None
        for place, name in (*enumerate(node.inputs), *((None, name) for name in node.outputs)):
            if name is not None and (found := graph.values[name].storage_dtype):
                positions = self.stores(node, graph) if positions is None else positions
                if place not in positions:
                    return f"expected float32 in memory, found {found}"
        if (place := first_computed(node, graph, self.early)) is not None:
            return (
                f"expected a constant, which is read before others end, found {node.inputs[place]}"
            )
        return self.why_not(node, graph)


def on_both(op: str, name: str, make: Callable[[Call], Bound], **options: Any) -> list[Kernel]:
    """Returns the rows of a kernel that both kinds of device have, with the same arguments."""
    return [Kernel(op, name, device, make, **options) for device in ("cpu", "cuda")]
