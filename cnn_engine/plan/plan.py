"""The steps of one forward pass, with all memory allocated and all arguments ready.

Nothing is decided while a pass runs: a step is a compiled function and its arguments, so that the Python
between two nodes costs well under a microsecond or two. Only the addresses of the caller's inputs and outputs
change from pass to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..graph.graph import Value
from ..kernels import Bound
from ..lower import reduced_precision
from .cuda_graph import Queued, Replays

if TYPE_CHECKING:
    from .per_image import Lanes


@dataclass(frozen=True)
class Slot:
    """Stands for an address that :meth:`Plan.bind` fills in: of an input or output, and bytes beyond."""

    name: str
    offset: int = 0


INPUT, OUTPUT = Slot("images"), Slot("probabilities")

#: Stands for the handle of the stream that a step's work is queued on: see :meth:`Plan.on_stream`.
STREAM = Slot("stream of the pass")


@dataclass(frozen=True)
class Part:
    """A layer of a fused step, with the FLOPs of one call."""

    name: str
    kind: str
    flops: int


@dataclass(frozen=True)
class Later:
    """Numbers of all steps of a plan, each counted when it is first asked for.

    Attributes:
        count: takes the step's name, and ``flops`` or ``bytes``.
    """

    count: Callable[[str, str], int]


class _Count:
    """A number of a step, or a function that returns it, which is called when it is first asked for."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, step: Any, owner: type | None = None) -> Any:
        if step is None:  # the default
            return 0
        value = step.__dict__[self._name]
        if type(value) is Later:
            value = step.__dict__[self._name] = value.count(step.name, self._name)
        elif callable(value):
            value = step.__dict__[self._name] = value()
        return value

    def __set__(self, step: Any, value: Any) -> None:
        step.__dict__[self._name] = value


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
    flops: _Count = _Count()
    bytes: _Count = _Count()
    direction: str | None = None
    lane: Any = None
    kernel: str = ""
    parts: tuple[Part, ...] = ()
    staged: bool = False

    def with_arguments(self, args: list[Any], **others: Any) -> Step:
        """Returns the same step with other arguments, and other fields; its cost is not counted again."""
        other = object.__new__(Step)  # plans have hundreds of them
        other.__dict__.update(self.__dict__, args=args, **others)
        return other


#: Plans whose last pass failed, and was not waited for: a GPU may still write to their memory.
_ABANDONED: list[Plan] = []


class _Steps:
    """The steps of a plan, or a function of its calls that returns them: called when they are asked for."""

    def __get__(self, plan: Any, owner: type | None = None) -> list[Step]:
        if plan is None:
            raise AttributeError("steps")  # there is no default
        steps = plan.__dict__["steps"]
        if callable(steps):
            steps = plan.__dict__["steps"] = steps(plan.calls)
        return steps

    def __set__(self, plan: Any, steps: list[Step] | Callable[[list[Bound]], list[Step]]) -> None:
        plan.__dict__["steps"] = steps


@dataclass
class Plan:
    """The steps of one forward pass, and the memory that they use.

    Attributes:
        batch: images of a pass.
        steps: in order; see :class:`_Steps`.
        nbytes: place -> bytes of the memory that values share.
        buffers: keeps what the steps use alive.
        chunk: the number of images that move at a time where copies overlap with kernels, else None.
        slots: the names of the inputs, then of the outputs, in the order in which :meth:`bind` takes them.
        fallbacks: node -> why it runs on another device than the rest, without a kernel of ours, or in
            float32 where the rest rounds.
        outputs: the outputs, by their names, in order.
        replays: how the device's part of a pass becomes one call, or None: every pass goes step by step.
        lanes: how threads take images of their own, or None.
        overflows: where results past float16's range are reported.
        waits: whether a pass is done when :meth:`run` returns.
        arena: memory that plans share which do not run at once, or None.
        devices: those on whose streams work is queued; the first is current while a pass runs.
        calls: the steps' functions and arguments; to be given where ``steps`` are made of them.

    ``bound`` are the addresses that were last bound.
    """

    batch: int
    steps: _Steps = _Steps()
    nbytes: Mapping[str, int]
    buffers: list[Any] = field(repr=False)
    chunk: int | None = None
    slots: Sequence[str] = (INPUT.name, OUTPUT.name)
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, Value] = field(default_factory=dict)
    replays: Replays | Queued | None = None
    lanes: Lanes | None = field(default=None, repr=False)
    overflows: Sequence[reduced_precision.Overflows] = ()
    waits: bool = True
    devices: Sequence[Any] = field(default=(), repr=False)
    arena: Any = field(default=None, repr=False)
    calls: list[Bound] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.__dict__["steps"]):
            self.calls = [(step.function, step.args) for step in self.steps]
        self.bound: tuple[int, ...] = ()
        self._device = self.devices[0] if self.devices else None
        slots: dict[str, list[tuple[list[Any], int, int]]] = {name: [] for name in self.slots}
        self._streams: list[tuple[list[Any], int]] = []
        own = {id(args): args for _, args in self.calls}  # some are run several times
        for args in own.values():
            if Slot not in map(type, args):
                continue
            for index, argument in enumerate(args):
                if argument is STREAM:
                    self._streams.append((args, index))
                elif isinstance(argument, Slot):
                    slots[argument.name].append((args, index, argument.offset))
        self._slots = [slots[name] for name in self.slots]
        if isinstance(self.replays, Replays):
            self.on_stream(self.replays.device.stream_handle)

    def on_stream(self, handle: int) -> None:
        """Has steps that say so queue their work on this stream from now on."""
        for args, index in self._streams:
            args[index] = handle

    def bind(self, *addresses: int) -> None:
        """Sets the addresses of the inputs and of where the outputs go, such as images, probabilities."""
        self.bound = addresses
        for positions, address in zip(self._slots, addresses, strict=True):
            for args, index, offset in positions:
                args[index] = address + offset

    def keep(self, buffers: Mapping[int, Any]) -> None:
        """Has outputs that no caller wants written to memory of the plan: :meth:`bind` takes them no more.

        Args:
            buffers: place among the slots -> the memory.
        """
        for place in sorted(buffers, reverse=True):
            for args, index, offset in self._slots.pop(place):
                args[index] = buffers[place].address + offset
            self.slots = (*self.slots[:place], *self.slots[place + 1 :])
        self.buffers += buffers.values()

    def run(self) -> None:
        """Runs one pass on its device: see :meth:`_run`."""
        device = self._device
        if device is None or device.is_current():
            self._run()
            return
        with device.context:
            self._run()

    def abandon(self) -> None:
        """Waits for the work of a pass that failed, so that its memory is not freed too early.

        Where that fails too, all that the plan has is kept for good.
        """
        try:
            for device in self.devices:
                with device.context:
                    device.synchronize()
        except BaseException:  # the device's error, or Ctrl-C again: the first one is reported
            _ABANDONED.append(self)

    def _run(self) -> None:
        """Runs one pass; where inputs and outputs are host memory, they are done on return.

        Raises:
            UnsupportedError: a result of this pass did not fit into float16; where it is not waited for,
                one of an earlier call, and this pass was not begun.
        """
        if self.lanes is not None:
            self.lanes.run(self.bound[0])
            return
        if not self.waits:
            self.check("an earlier call")
        self.queue()
        if self.waits:
            self.check()

    def queue(self) -> None:
        """Runs one pass as :meth:`run` does, and does not look at results."""
        replays = self.replays
        calls = self.calls if replays is None else replays.calls(self)
        for function, args in calls:
            function(*args)
        if replays is not None and calls is self.calls:
            replays.ran(self)

    def check(self, of: str = "this pass") -> None:
        """Raises UnsupportedError where a result of passes that are done did not fit into float16."""
        for overflow in self.overflows:
            overflow.check(of)

    def run_steps(self) -> None:
        """Runs one pass step by step, as timing of steps does."""
        for function, args in self.calls:
            function(*args)
