"""Templates: the steps that plans of all sizes share, with other numbers in their arguments.

A plan for a new size is a plan that is known, with numbers put in. Kernels are asked for their calls once, of
the graph with symbols; what they decide by a size is recorded, and they are asked again where that would be
decided otherwise. Memory keeps the order in which values lie above each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from types import BuiltinFunctionType
from typing import Any

from .. import kernels
from ..devices import Buffer
from ..devices.cpu import CpuDevice
from ..errors import CnnEngineError
from ..graph.dims import Dim, Sizes, substituted
from ..graph.graph import Graph, Node, Value
from ..graph.guards import recorded
from ..kernels import Bound, Call, Kernel
from ..kernels.native import Deferred
from ..lower.lowering import Program
from ..lower.placement import Placed
from ..operators.report_kinds import REPORT_KINDS
from .arenas import plan_memory
from .expressions import Expressions, FilledArguments, Numbers
from .packing import Lifetime, Stack
from .plan import Later, Slot, Step

#: Ways of running a node that are kept, of calls with symbols; those after them ask for calls at each size.
MOST_FORMS = 8

#: Outcomes of all decisions of which the forms are known at once.
MOST_CANDIDATES = 64

#: What kernels raise that take no symbols.
_TAKES_NUMBERS = TypeError, ValueError, KeyError, AttributeError, IndexError, CnnEngineError


_NO_ARGUMENTS = FilledArguments((), (), ())


@dataclass(frozen=True)
class _Form:
    """How a node runs at sizes at which the same is decided.

    Attributes:
        decisions: that hold then.
        way: (expression, struct, what it is): what packed weights depend on.
        workspace: expression, struct, or bytes.
        step: without its arguments; None: the kernel is asked for the call of each size.
        addresses: (place, storage, (expression, struct, bytes) beyond its first) of arguments.
        slots: (place, slot, the same) of arguments that are the caller's.
    """

    kernel: Kernel
    decisions: tuple[int, ...]
    way: tuple[tuple[int | None, int | None, Any], ...]
    workspace: tuple[int | None, int | None, int]
    shown: str
    step: Step | None = None
    filled: FilledArguments = _NO_ARGUMENTS
    addresses: tuple[tuple[int, int, tuple], ...] = ()
    slots: tuple[tuple[int, str, tuple], ...] = ()

    def fits(self, at: Numbers) -> bool:
        return all(at.of(*one) == one[2] for one in self.way)


class Template:
    """The steps of a graph, or of a part of it, on the CPU, for any size.

    Args:
        program: of which they are.
        placed: the graph at one size.
        symbolic: the same with symbols.
        sizes: which.

    Raises:
        TypeError, KeyError, CnnEngineError: it depends on sizes in other ways.
    """

    def __init__(self, program: Program, placed: Placed, symbolic: Graph, sizes: Sizes) -> None:
        if placed.graph.sized:
            raise TypeError("expected no constants of one size alone")
        self.symbolic = symbolic
        self.outputs = placed.outputs
        self.fallbacks = placed.fallbacks
        self._program = program
        self._threads = program.placement.threads
        self._expressions = Expressions([symbol for symbol, _ in sizes.numbers])
        names = [value.name for value in symbolic.inputs]  # in the order of the caller's addresses
        self._slots = {name: name for name in names}
        for name, called in zip(placed.graph.outputs, placed.outputs, strict=True):
            self._slots[name] = called if called not in names else f"{called} (output)"
        with recorded(sizes.numbers) as guards:
            self.planned = plan_memory(
                replace(placed, graph=symbolic), program.device_of, self._threads, scratch=False
            )
        self._decisions = tuple(map(self._expressions.decision, guards.values()))
        lives = list(self.planned.lifetimes.get("cpu", ()))
        self._values = [self._expression(symbolic.values[life.name].nbytes) for life in lives]
        self._nodes = [node for node in symbolic.nodes if node.name in placed.kernels]
        self._traits = [_traits(placed.kernels[node.name]) for node in self._nodes]
        # Scratch memory lies above the values of its step.
        offsets = [self.planned.offsets[life.name][1] for life in lives]
        offsets += [self.planned.sizes.get("cpu", 0)] * len(self._nodes)
        steps = [symbolic.positions[node.name] for node in self._nodes]
        lives += [
            Lifetime((node.name,), 0, step, step)
            for node, step in zip(self._nodes, steps, strict=True)
        ]
        self._storages = {life.name: place for place, life in enumerate(lives)}
        self._stack = Stack(lives, offsets)
        #: Of each node, its forms; None: too many, or it takes numbers.
        self._forms: list[list[_Form] | None] = [[] for _ in self._nodes]
        self._candidates: dict[tuple[bool, ...], list[list[_Form] | None]] = {}
        for place in range(len(self._nodes)):
            self._add_form(place, placed, sizes)

    def _expression(self, number: Any) -> tuple[int | None, int | None, int]:
        """Returns a number as :meth:`Numbers.of` takes it."""
        if type(number) is Dim:
            return self._expressions.number(number), None, 0
        if type(number) is Deferred:
            return None, self._expressions.struct(number), 0
        return None, None, number

    def at(
        self, sizes: Sizes, placed: Callable[[], Placed], graph: Callable[[], Graph]
    ) -> Sized | None:
        """Returns the arguments of a plan for these sizes, or None where it is another one.

        Args:
            placed: returns the graph of these sizes with places and kernels, where a node needs it.
            graph: returns that graph, for who asks for costs.
        """
        if [symbol for symbol, _ in sizes.numbers] != self._expressions.symbols:
            return None
        placed = cache(placed)
        try:
            at = self._expressions.at(sizes)
        except ZeroDivisionError:
            return None
        if not all(at.decisions[one] for one in self._decisions):
            return None
        found: list[_Form | None] = []
        for place, forms in enumerate(self._candidates_at(at)):
            form = None
            if forms is not None:
                for one in forms:
                    if not one.way or one.fits(at):
                        form = one
                        break
                else:
                    if not self._has_kernel(place, placed()):
                        return None
                    form = self._add_form(place, placed(), sizes)
                    at = self._expressions.at(sizes)
            if form is None and not self._has_kernel(place, placed()):
                return None
            found.append(form)
        return Sized(self, at, found, sizes, placed, graph)

    def _has_kernel(self, place: int, placed: Placed) -> bool:
        """Whether a node's kernel shares memory as the one by which that was planned."""
        node = self._nodes[place]
        kernel = placed.kernels.get(node.name)
        return kernel is not None and _traits(kernel) == self._traits[place]

    def _candidates_at(self, at: Numbers) -> list[list[_Form] | None]:
        found = self._candidates.get(at.decisions)
        if found is None:
            if len(self._candidates) >= MOST_CANDIDATES:
                self._candidates.clear()
            found = self._candidates[at.decisions] = [
                None
                if forms is None
                else [f for f in forms if all(at.decisions[one] for one in f.decisions)]
                for forms in self._forms
            ]
        return found

    def _add_form(self, place: int, placed: Placed, sizes: Sizes) -> _Form | None:
        """Asks how a node runs at these sizes; None where its kernel is to be chosen for every size."""
        forms = self._forms[place]
        self._candidates.clear()
        if forms is not None and len(forms) < 2 * MOST_FORMS:
            try:
                form = self._form(self._nodes[place], placed, sizes, len(forms) < MOST_FORMS)
            except _TAKES_NUMBERS:
                pass
            else:
                forms.append(form)
                return form
        self._forms[place] = None
        return None

    def _form(self, node: Node, placed: Placed, sizes: Sizes, asks: bool) -> _Form:
        """Returns how a node runs.

        Args:
            asks: whether its call is asked for with symbols; else for every size.
        """
        program, symbolic, graph = self._program, self.symbolic, placed.graph
        kernel, device = placed.kernels[node.name], CpuDevice()
        own = graph.nodes[graph.positions[node.name]]
        prepared, way = None, ()
        with recorded(sizes.numbers) as guards:
            found = program.chosen(node, symbolic) or kernels.NUMPY
            if found is not kernel or kernel.rewrite(node, symbolic):
                raise TypeError("expected the kernel of the size")
            workspace = kernel.workspace(node, symbolic, device, self._threads)
            if kernel.prepare is not None:
                way = kernel.packed_for(node, symbolic, device)
        if kernel.prepare is not None:
            if own.op is not node.op:
                raise TypeError("expected what is made of constants for all sizes")
            prepared = program.prepared(graph, own, kernel)
        call = None
        if asks:
            with suppress(*_TAKES_NUMBERS), recorded(sizes.numbers) as more:
                call = self._call(node, graph, kernel, prepared)
                guards = {**guards, **more}
        if call is None and kernel.prepare is not None:
            raise TypeError("expected what is made of constants for all sizes")
        numbers = () if prepared is None else kernel.packed_for(own, graph, device)
        ways = tuple(
            (*self._expression(one)[:2], number)
            for one, number in zip(_row(way), _row(numbers), strict=True)
            if type(one) in (Dim, Deferred)
        )
        return _Form(
            kernel, tuple(map(self._expressions.decision, guards.values())), ways,
            self._expression(workspace), kernel.shown_as(own, graph, device),
            *(self._filled(node, *call, kernel.shown_as(own, graph, device)) if call else ()),
        )  # fmt: skip

    def _call(self, node: Node, graph: Graph, kernel: Kernel, prepared: Any) -> Bound:
        """Returns the call of a node with symbols in its arguments, and what stands for addresses.

        Raises:
            TypeError: the function may have numbers of its own.
        """
        symbolic = self.symbolic
        at = tuple(
            0
            if name in graph.constants and kernel.packs_input(index)
            else self._stand_in(name, graph)
            for index, name in enumerate(node.inputs)
        )
        function, arguments = kernel.make(
            Call(
                node, symbolic.inputs_of(node), symbolic.outputs_of(node), at,
                tuple(self._stand_in(name, graph) for name in node.outputs),
                Slot((node.name,)), prepared, CpuDevice(), self._threads, self.planned.pitches,
            )
        )  # fmt: skip
        if not _is_plain(function, prepared):
            raise TypeError("expected compiled functions, found others")
        return function, arguments

    def _filled(
        self, node: Node, function: Callable[..., None], arguments: Sequence[Any], shown: str
    ) -> tuple[Any, ...]:
        """Returns a call as forms have it: the step, and what is filled into its arguments."""
        addresses, slots, plain = [], [], []
        for index, argument in enumerate(arguments):
            if isinstance(argument, Slot):
                name, offset = argument.name, self._expression(argument.offset)
                if name in self._slots:
                    slots.append((index, self._slots[name], offset))
                else:
                    addresses.append((index, self._storages[name], offset))
                argument = 0
            plain.append(argument)
        return (
            _step_of(node, function, shown),
            FilledArguments.of(plain, self._expressions),
            tuple(addresses),
            tuple(slots),
        )

    def _stand_in(self, name: str | None, graph: Graph) -> Any:
        """Returns the address of a constant, or what stands for another value's."""
        if name is None:
            return 0
        root, offset = self.planned.storage.get(name, (name, 0))
        if root in graph.constants:
            return self._program.constant(graph, root, "cpu") + offset
        return Slot(root, offset)


def _step_of(node: Node, function: Callable[..., None], shown: str) -> Step:
    """Returns the step of a node, without what depends on the size."""
    kind = REPORT_KINDS.get(node.op.kind, node.op.kind)
    return Step(node.name, kind, "cpu", function, [], kernel=shown)


def _row(way: Any) -> tuple[Any, ...]:
    return way if isinstance(way, tuple) else (way,)


def _traits(kernel: Kernel) -> tuple[Any, ...]:
    """Returns by what a kernel decides where values lie."""
    return kernel.in_place, kernel.pitched


def _is_plain(function: Callable[..., Any], prepared: Any) -> bool:
    """Whether a function is compiled, or calls such functions with all that it is given."""
    if isinstance(function, BuiltinFunctionType):
        return True
    called = getattr(function, "functions", None)  # of strided.together and strided.keeping
    owners = getattr(function, "owners", ())
    return (
        called is not None
        and all(_is_plain(one, prepared) for one in called)
        and all(owner is prepared for owner in owners)
    )


class Sized:
    """A template at some sizes.

    Attributes:
        nbytes: of its memory.
    """

    def __init__(
        self,
        template: Template,
        at: Numbers,
        forms: Sequence[_Form | None],
        sizes: Sizes,
        placed: Callable[[], Placed],
        graph: Callable[[], Graph],
    ) -> None:
        self._template, self._at, self._forms = template, at, tuple(forms)
        self._sizes, self._placed, self._graph = sizes, placed, graph
        sizes_of = [at.of(*one) for one in template._values]
        sizes_of += [
            self._numeric_workspace(place) if form is None else at.of(*form.workspace)
            for place, form in enumerate(forms)
        ]
        self._offsets, self.nbytes = template._stack.offsets(sizes_of)

    def _numeric_workspace(self, place: int) -> int:
        template, placed = self._template, self._placed()
        node = placed.graph.nodes[placed.graph.positions[template._nodes[place].name]]
        kernel = placed.kernels[node.name]
        return kernel.workspace(node, placed.graph, CpuDevice(), template._threads)

    @property
    def fallbacks(self) -> Mapping[str, str]:
        """Node -> why it runs without a kernel of ours."""
        return self._template.fallbacks

    @property
    def slots(self) -> tuple[str, ...]:
        """Slots of the caller's addresses: of inputs, then of outputs."""
        return tuple(self._template._slots.values())

    def value(self, name: str) -> Value:
        """Returns a value of the graph at these sizes."""
        value = self._template.symbolic.values[name]
        shape = self._sizes.resolve(value.shape)
        return Value(
            name, shape, value.dtype, value.layout, value.storage_dtype, value.quantization
        )

    def outputs(self) -> dict[str, Value]:
        """Returns the outputs, by the caller's names."""
        names = self._template.symbolic.outputs
        return {
            called: self.value(name)
            for name, called in zip(names, self._template.outputs, strict=True)
        }

    def steps(self, memory: Buffer | None) -> list[Step]:
        """Returns the steps, with all that lies in ``memory``."""
        return self.steps_of(self.calls(memory))

    def calls(self, memory: Buffer | None) -> list[Bound]:
        """Returns the functions and arguments of the steps, with all that lies in ``memory``."""
        at, of = self._at, self._at.of
        first = 0 if memory is None else memory.address
        addresses = [first + offset for offset in self._offsets]
        calls = []
        for place, form in enumerate(self._forms):
            if form is None or form.step is None:
                calls.append(self._numeric_call(place, form, addresses))
                continue
            arguments = form.filled.at(at)
            for index, storage, offset in form.addresses:
                arguments[index] = addresses[storage] + of(*offset)
            for index, slot, offset in form.slots:
                arguments[index] = Slot(slot, of(*offset))
            calls.append((form.step.function, arguments))
        return calls

    @property
    def steps_of(self) -> Callable[[list[Bound]], list[Step]]:
        """A function that returns the steps of these calls; it keeps nothing of their size alive."""
        placed = self._placed.__wrapped__  # which keeps no graph
        return partial(_steps, self._template._nodes, self._forms, placed, self._graph)

    def _numeric_call(self, place: int, form: _Form | None, addresses: Sequence[int]) -> Bound:
        """Returns the call of a node whose kernel is asked for that of this size."""
        template = self._template
        program, graph, device = template._program, template.symbolic, CpuDevice()
        node = template._nodes[place]
        if form is None:
            graph = self._placed().graph
            node = graph.nodes[graph.positions[node.name]]
            kernel = self._placed().kernels[node.name]
        else:
            kernel = form.kernel
            node = replace(node, op=substituted(node.op, self._number))

        def address(name: str | None) -> Any:
            found = template._stand_in(name, graph)
            if not isinstance(found, Slot):
                return self._number(found)
            if found.name in template._slots:
                return Slot(template._slots[found.name], self._number(found.offset))
            return addresses[template._storages[found.name]] + self._number(found.offset)

        prepared = program.prepared(graph, node, kernel) if kernel.prepare is not None else None
        at = tuple(
            0 if name in graph.constants and kernel.packs_input(index) else address(name)
            for index, name in enumerate(node.inputs)
        )
        pitches = {name: self._number(n) for name, n in template.planned.pitches.items()}
        return kernel.make(
            Call(
                node, tuple(name and self.value(name) for name in node.inputs),
                tuple(map(self.value, node.outputs)), at, tuple(map(address, node.outputs)),
                addresses[template._storages[(node.name,)]], prepared, device, template._threads, pitches,
            )
        )  # fmt: skip

    def _number(self, size: Dim | int) -> int:
        return self._sizes.resolve((size,))[0]


def _steps(
    nodes: Sequence[Node],
    forms: Sequence[_Form | None],
    placed: Callable[[], Placed],
    graph: Callable[[], Graph],
    calls: Sequence[Bound],
) -> list[Step]:
    """Returns the steps of calls of these nodes, which count their costs when they are asked for.

    Args:
        forms, placed, graph: see :class:`Sized`.
    """
    placed, graph = cache(placed), cache(graph)

    def cost(name: str, what: str) -> int:
        found = graph()
        return getattr(found.cost_of(found.nodes[found.positions[name]]), what)

    later, steps = Later(cost), []
    for node, form, (function, arguments) in zip(nodes, forms, calls, strict=True):
        if form is None:
            own = placed().graph
            shown = (
                placed()
                .kernels[node.name]
                .shown_as(own.nodes[own.positions[node.name]], own, CpuDevice())
            )
        else:
            shown = form.shown
        step = _step_of(node, function, shown) if form is None or form.step is None else form.step
        steps.append(step.with_arguments(arguments, flops=later, bytes=later, function=function))
    return steps
