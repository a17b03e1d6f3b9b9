"""Cache of idle plans: each serves one call at a time, and their memory is bounded.

A pass's memory belongs to the call that runs it, so that one engine serves several Python threads: a call
takes an idle plan, or builds another when all are in use, and gives it back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ..devices import Buffer
from ..devices.cpu import CpuDevice
from ..errors import InputError
from ..floating_point import usual_mode
from ..locks import ForkSafeLock
from ..plan.packing import ALIGNMENT
from ..plan.plan import Plan

if TYPE_CHECKING:
    from ..lower.lowering import Program

_log = logging.getLogger(__name__)

#: Bytes that idle plans keep together, unless the plans of one call need more: then those are kept alone.
KEPT_BYTES = 256 << 20

CLOSED = "engine: expected an open engine, found a closed one"

#: Bytes of one call of a plan that shares memory, about; and those of all such plans together: as a part of
#: the memory that they share, and at least.
CALL_BYTES, KEPT_CALLS_PART, LEAST_KEPT_CALL_BYTES = 512, 1 / 8, 256 << 10

#: The same where sizes come back: where most of the plans that were built last, so many, are of sizes dropped
#: lately, of which so many are remembered. A few sizes in turn would be planned at each call otherwise.
RECURRING_CALL_BYTES, LOOKED_BACK, REMEMBERED = 16 << 20, 16, 64

#: Kinds of calls that are remembered: a plan without memory of its own still costs some kilobytes.
KEPT_SHELVES = 512


def plan_bytes(plan: Plan) -> int:
    """Returns the bytes of all memory that a pass of a plan uses."""
    return sum(plan.nbytes.values())


class Arena:
    """Memory of the host for plans of several sizes, of which one runs at a time.

    Attributes:
        capacity: its bytes.
        retired: whether a larger one has taken its place.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.retired = False
        self._memory = CpuDevice().allocate_alone(capacity) if capacity else None
        self._used = 0
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        """Takes the memory for a plan, where no other has it and it is not retired."""
        return not self.retired and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Lets other plans have the memory."""
        self._lock.release()

    def begin(self) -> None:
        """Begins a plan, which may use all of the memory."""
        self._used = 0

    def allocate(self, nbytes: int) -> Buffer:
        """Returns the next bytes for the plan that was begun; memory of its own where no room is left."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._used = start + nbytes
        if self._memory is None or self._used > self.capacity:
            return CpuDevice().allocate_alone(nbytes)
        return Buffer(self._memory.address + start, nbytes, self._memory)

    @property
    def wanted(self) -> int:
        """Bytes that the plan that was begun asked for, all together."""
        return self._used


class Shelf:
    """Plans for calls of one signature.

    Attributes:
        idle: plans that no call uses. To pop and to append are single steps of the interpreter, so that a
            call needs no lock.
        made: plans that are idle or in use.
        most: as many of them are kept once they are idle; 0 for a shelf that was cleared away.
        nbytes: of one plan's memory, without what it shares.
        shares: whether they share the memory of their activations with other plans.
        used: whether there was a call since this was last looked at.
    """

    __slots__ = ("idle", "made", "most", "nbytes", "shares", "used")

    def __init__(self) -> None:
        self.idle: list[Plan] = []
        self.made = 0
        self.most = 1
        self.nbytes = 0
        self.shares = False
        self.used = True

    def run(self, *addresses: int, plan: Plan | None = None) -> bool:
        """Runs a pass over these addresses on ``plan``, which is the caller's, or on an idle one.

        Returns False, with nothing done, where none is idle.
        """
        if plan is None:
            try:
                plan = self.idle.pop()
            except IndexError:
                return False
            if plan.arena is not None and not plan.arena.acquire():
                self._return(plan)
                return False
        try:
            plan.bind(*addresses)
            plan.run()
        except BaseException:  # it may be anywhere in its pass: it is not given to another call
            self.made -= 1
            plan.abandon()
            raise
        finally:
            if plan.arena is not None:
                plan.arena.release()
        self.used = True
        if self.made <= self.most:
            self.idle.append(plan)
        else:
            self.give_back(plan)
        return True

    def pop(self) -> Plan | None:
        """Returns an idle plan with its memory, or None where there is none."""
        for _ in range(len(self.idle)):
            try:
                plan = self.idle.pop(0)
            except IndexError:  # another thread was faster
                return None
            if plan.arena is None or plan.arena.acquire():
                return plan
            self._return(plan)
        return None

    def _return(self, plan: Plan) -> None:
        """Makes a plan idle whose memory another plan has; drops it where that is retired."""
        if plan.arena.retired:
            self.made -= 1
        else:
            self.idle.append(plan)

    def give_back(self, plan: Plan) -> None:
        """Makes ``plan`` idle, or drops it where enough are kept."""
        if self.made <= self.most:
            self.idle.append(plan)
        else:
            self.made -= 1


class PlanPool:
    """Shelves of plans, cleared away by least recent use when they hold more than ``kept_bytes``.

    Args:
        context: in which plans are built: their device's.

    Attributes:
        building: held by whoever builds a plan, and checks and takes its memory: one thread at a time.
    """

    def __init__(
        self,
        kept_bytes: int = KEPT_BYTES,
        context: AbstractContextManager[object] | None = None,
    ) -> None:
        self.kept_bytes = kept_bytes
        self._context = context or nullcontext()
        self.closed = False
        self._shelves: dict[Hashable, Shelf] = {}
        self._arenas: list[Arena] = []
        self._dropped: dict[Hashable, None] = {}  # sizes that were cleared away, the last ones
        # Of each plan that was built: was its size among them?
        self._came_back: deque[bool] = deque(maxlen=LOOKED_BACK)
        self.building = ForkSafeLock()

    @property
    def nbytes(self) -> int:
        """Bytes of the plans that are idle or in use, and of the memory that they share."""
        with self.building:
            shared = sum(arena.capacity for arena in self._arenas)
            return shared + sum(shelf.made * shelf.nbytes for shelf in self._shelves.values())

    def run(
        self,
        key: Hashable,
        make: Callable[[], Plan],
        *addresses: int,
        call: Collection[Hashable] = (),
    ) -> Shelf:
        """Runs a pass over these addresses on a plan of ``make``; returns its shelf.

        Args:
            call: the keys of all passes of the caller's call. Their plans are kept together: the next call
                needs them all again.

        Raises:
            InputError: the pool is closed, or what ``make`` raises.
        """
        shelf = self._shelves.get(key)
        if shelf is None or not shelf.run(*addresses):
            shelf, plan = self.take(key, make, call)
            shelf.run(*addresses, plan=plan)
        return shelf

    def take(
        self, key: Hashable, make: Callable[[], Plan], call: Collection[Hashable] = ()
    ) -> tuple[Shelf, Plan]:
        """Returns a plan that is now the caller's, and the shelf to give it back to.

        Args:
            call: see :meth:`run`.
        """
        with self.building:
            if self.closed:
                raise InputError(CLOSED)
            shelf = self._shelves.pop(key, None) or Shelf()
            self._shelves[key] = shelf  # the last: the most recently used
            shelf.used = True
            if (plan := shelf.pop()) is not None:
                return shelf, plan
            with self._context, usual_mode():
                try:
                    plan = make()
                except InputError:  # perhaps for lack of memory that idle plans hold
                    if not self._clear_until(0, [shelf]):
                        raise
                    plan = make()
            shares = plan.arena is not None
            shelf.shares = shares
            if shelf.made == 0:
                self._came_back.append(key in self._dropped)
                self._dropped.pop(key, None)
            shelf.nbytes = CALL_BYTES * len(plan.calls) if shares else plan_bytes(plan)
            shelf.most = max(1, self.kept_bytes // max(shelf.nbytes, 1))
            shelf.made += 1
            _log.debug(
                "plan built: %d steps, %d bytes of memory", len(plan.calls), plan_bytes(plan)
            )
            kept = [shelf, *(self._shelves[k] for k in call if k != key and k in self._shelves)]
            self._clear_until(max(self.kept_bytes, sum(one.nbytes for one in kept)), kept)
            return shelf, plan

    def built_in_arena(self, program: Program, make: Callable[[Program], Plan]) -> Plan:
        """Returns the plan that ``make`` builds, in memory that plans share.

        The memory grows to what the largest plan uses. Plans in what it was before are dropped.
        """
        arena = next((known for known in self._arenas if known.acquire()), None)
        if arena is None:
            arena = self._new_arena(0)
        try:
            plan = self._made_in(arena, program, make)
            if arena.wanted > arena.capacity:
                wanted, _ = arena.wanted, self._retire(arena)
                del plan  # its memory, before as much is taken again
                arena = self._new_arena(wanted + wanted // 16)
                plan = self._made_in(arena, program, make)
        except BaseException:
            arena.release()
            raise
        plan.arena = arena
        return plan

    def _new_arena(self, capacity: int) -> Arena:
        arena = Arena(capacity)
        arena.acquire()
        self._arenas.append(arena)
        return arena

    @staticmethod
    def _made_in(arena: Arena, program: Program, make: Callable[[Program], Plan]) -> Plan:
        arena.begin()
        return make(program.with_memory(arena.allocate, arena.capacity))

    def _retire(self, arena: Arena) -> None:
        """Drops memory that plans shared, with the plans in it; its holder has it to the end of a pass."""
        arena.retired = True
        self._arenas.remove(arena)
        for shelf in self._shelves.values():
            if shelf.shares:
                for _ in range(len(shelf.idle)):
                    if (plan := shelf.pop()) is not None:
                        plan.arena.release()
                        shelf.idle.append(plan)

    def close(self) -> list[Plan]:
        """Drops all plans, and returns them; those in use when their passes end.

        Calls from now on are refused.
        """
        dropped: list[Plan] = []
        with self.building:
            self.closed = True
            for shelf in self._shelves.values():
                shelf.most = 0
                dropped += shelf.idle
                shelf.idle.clear()
            self._shelves.clear()
            self._dropped.clear()
            self._arenas.clear()
        return dropped

    def _kept_call_bytes(self) -> int:
        """Returns how many bytes the calls of plans that share memory may have together."""
        shared = sum(arena.capacity for arena in self._arenas)
        most = max(LEAST_KEPT_CALL_BYTES, int(shared * KEPT_CALLS_PART))
        recur = 2 * sum(self._came_back) > LOOKED_BACK
        return max(most, RECURRING_CALL_BYTES) if recur else most

    def _clear_until(self, kept_bytes: int, but: Collection[Shelf]) -> bool:
        """Clears shelves away until the rest holds ``kept_bytes`` at most; returns whether any was."""
        total = self.nbytes
        calls = sum(s.made * s.nbytes for s in self._shelves.values() if s.shares)
        most = self._kept_call_bytes()
        cleared = False
        for _ in range(2):  # those used since they were last looked at get a second chance
            for key, shelf in list(self._shelves.items()):
                if total <= kept_bytes and calls <= most and len(self._shelves) <= KEPT_SHELVES:
                    return cleared
                if shelf in but:
                    continue
                if shelf.used:
                    shelf.used = False
                    self._shelves[key] = self._shelves.pop(key)
                    continue
                shelf.most = 0  # so that plans in use are dropped afterwards
                shelf.idle.clear()
                del self._shelves[key]
                self._dropped[key] = None
                if len(self._dropped) > REMEMBERED:
                    del self._dropped[next(iter(self._dropped))]
                total -= shelf.made * shelf.nbytes
                calls -= shelf.made * shelf.nbytes if shelf.shares else 0
                cleared = True
        return cleared
