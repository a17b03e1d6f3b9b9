"""Passes as one CUDA graph: captured after a plan's first pass, then launched.

To launch a kernel costs the host some microseconds, a kernel of a small batch runs for as long; a graph costs
the host one launch for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .l2_prefetch import Branch
    from .plan import Plan, Step

#: Pairs of addresses of a caller's arrays for which a plan keeps graphs.
KEPT_GRAPHS = 8

#: Pairs of addresses that a plan has seen, of which the next pass makes a graph.
KEPT_ADDRESSES = 64

#: Steps in a row that are worth a graph.
FEWEST_STEPS = 2


class Replays:
    """The CUDA graphs of a plan, with the steps before, between and after them.

    Args:
        device: on which the plan runs.
        on_device: whether inputs and outputs are a caller's memory of the device, whose addresses are then
            part of the graphs, and whose stream may itself be captured.
        branch: what graphs ask for beside their steps, or None.

    Attributes:
        why_not: why passes are run step by step, or None.
    """

    def __init__(self, device: Any, on_device: bool, branch: Branch | None = None) -> None:
        self.device = device
        self.why_not: str | None = None
        self.branch = branch
        self._on_device = on_device
        self._seen: dict[tuple[int, ...], None] = {}
        self._calls: dict[tuple[int, ...], list[tuple]] = {}

    def calls(self, plan: Plan) -> Sequence[tuple]:
        """Returns the calls of the next pass of ``plan``."""
        if self.why_not is not None:
            return plan.calls
        key: tuple[int, ...] = ()
        if self._on_device:
            if self.device.is_capturing(self.device.stream_handle):
                return plan.calls  # the caller's graph takes the steps themselves
            key = plan.bound
        found = self._calls.get(key)
        if found is None and key in self._seen:
            found = self._made(plan, key)
        if found is None:  # what is compiled or loaded at the first pass is not captured
            _keep(self._seen, key, None, KEPT_ADDRESSES)
        return plan.calls if found is None else found

    def ran(self, plan: Plan) -> None:
        """Makes the graph of a plan for host memory once it has run."""
        if not self._on_device and self.why_not is None and () not in self._calls:
            self._made(plan, ())

    def _made(self, plan: Plan, key: tuple[int, ...]) -> list[tuple] | None:
        """Returns the calls with a new graph; None where there can be none."""
        try:
            made = self._capture(plan)
        except Exception as error:  # CuPy's and ours: a step that cannot be part of a graph
            self.why_not = f"capture failed: {error}"
            return None
        _keep(self._calls, key, made, KEPT_GRAPHS)
        return made

    def _capture(self, plan: Plan) -> list[tuple]:
        made: list[tuple] = []
        for steps, captured in _segments(plan.steps):
            if not captured:
                made += [(step.function, step.args) for step in steps]
                continue
            made.append(self.device.capture(partial(self._run, plan, steps)))
        return made

    def _run(self, plan: Plan, steps: Sequence[Step], stream: int) -> None:
        """Queues steps on a stream that is captured, and beside them what they ask for."""
        device, branch, join = self.device, self.branch, None
        plan.on_stream(stream)
        try:
            for step in steps:
                if branch is not None and step is branch.step:
                    join = device.beside(stream, partial(branch.run, device.kernels))
                step.function(*step.args)
            if join is not None:
                join()
        finally:
            plan.on_stream(device.stream_handle)


class Queued:
    """The calls of a pass in chunks, in which a chunk's work on the device is queued by its own plan."""

    why_not = None

    def __init__(self, calls: Sequence[tuple]) -> None:
        self._calls = calls

    def calls(self, plan: Plan) -> Sequence[tuple]:
        """Returns the calls of the next pass of ``plan``."""
        return self._calls


def _segments(steps: Sequence[Step]) -> list[tuple[list[Step], bool]]:
    """Returns the steps in runs, and whether each is work on the device alone and worth a graph."""
    runs: list[tuple[list[Step], bool]] = []
    for step in steps:
        moves = step.direction in ("h2d", "d2h", "h2h") and not step.staged
        inside = step.place == "cuda" and not moves
        if not runs or runs[-1][1] != inside:
            runs.append(([], inside))
        runs[-1][0].append(step)
    return [(run, inside and len(run) >= FEWEST_STEPS) for run, inside in runs]


def _keep(kept: dict, key: Any, value: Any, most: int) -> None:
    """Puts a value into ``kept``, from which the oldest goes."""
    while len(kept) >= most:
        kept.pop(next(iter(kept)))
    kept[key] = value
