"""Plans that wait for their next pass: each serves one call at a time, and what they hold is bounded.

A pass's memory belongs to the call that runs it, so that one engine serves several Python threads: a call
takes an idle plan, or builds another when all are in use, and gives it back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

from ..errors import InputError
from ..floating_point import usual_mode
from ..locks import ForkSafeLock
from ..plan.plan import Plan

_log = logging.getLogger(__name__)

#: Bytes that idle plans keep together, unless a single plan needs more: then it is kept alone.
KEPT_BYTES = 256 << 20

CLOSED = "engine: expected an open engine, found a closed one"

#: Kinds of calls that are remembered: a plan without memory of its own still costs some kilobytes.
KEPT_SHELVES = 512


def plan_bytes(plan: Plan) -> int:
    """Returns the bytes of all memory that a plan has for itself."""
    return sum(plan.nbytes.values())


class Shelf:
    """Plans for calls that are alike.

    Attributes:
        idle: plans that no call uses. To pop and to append are single steps of the interpreter, so that a
            call needs no lock.
        made: plans that are idle or in use.
        most: as many of them are kept once they are idle; 0 for a shelf that was cleared away.
        nbytes: of one plan's memory.
        used: whether there was a call since this was last looked at.
    """

    __slots__ = ("idle", "made", "most", "nbytes", "used")

    def __init__(self) -> None:
        self.idle: list[Plan] = []
        self.made = 0
        self.most = 1
        self.nbytes = 0
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
        try:
            plan.bind(*addresses)
            plan.run()
        except BaseException:  # it may be anywhere in its pass: it is not given to another call
            self.made -= 1
            plan.abandon()
            raise
        self.used = True
        if self.made <= self.most:
            self.idle.append(plan)
        else:
            self.give_back(plan)
        return True

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
        self.building = ForkSafeLock()

    @property
    def nbytes(self) -> int:
        """Bytes of the plans that are idle or in use."""
        with self.building:
            return sum(shelf.made * shelf.nbytes for shelf in self._shelves.values())

    def run(self, key: Hashable, make: Callable[[], Plan], *addresses: int) -> Shelf:
        """Runs a pass over these addresses on a plan of ``make``; returns its shelf.

        Raises:
            InputError: the pool is closed, or what ``make`` raises.
        """
        shelf = self._shelves.get(key)
        if shelf is None or not shelf.run(*addresses):
            shelf, plan = self.take(key, make)
            shelf.run(*addresses, plan=plan)
        return shelf

    def take(self, key: Hashable, make: Callable[[], Plan]) -> tuple[Shelf, Plan]:
        """Returns a plan that is now the caller's, and the shelf to give it back to."""
        with self.building:
            if self.closed:
                raise InputError(CLOSED)
            shelf = self._shelves.pop(key, None) or Shelf()
            self._shelves[key] = shelf  # the last: the most recently used
            shelf.used = True
            if shelf.idle:
                try:
                    return shelf, shelf.idle.pop()
                except IndexError:  # another thread was faster
                    pass
            with self._context, usual_mode():
                try:
                    plan = make()
                except InputError:  # perhaps for lack of memory that idle plans hold
                    if not self._clear_until(0, shelf):
                        raise
                    plan = make()
            shelf.nbytes = plan_bytes(plan)
            shelf.most = max(1, self.kept_bytes // max(shelf.nbytes, 1))
            shelf.made += 1
            _log.debug("plan built: %d steps, %d bytes of memory", len(plan.steps), shelf.nbytes)
            self._clear_until(max(self.kept_bytes, shelf.nbytes), shelf)
            return shelf, plan

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
        return dropped

    def _clear_until(self, kept_bytes: int, but: Shelf) -> bool:
        """Clears shelves away until the rest holds ``kept_bytes`` at most; returns whether any was."""
        total = self.nbytes
        cleared = False
        for _ in range(2):  # those used since they were last looked at get a second chance
            for key, shelf in list(self._shelves.items()):
                if total <= kept_bytes and len(self._shelves) <= KEPT_SHELVES:
                    return cleared
                if shelf is but:
                    continue
                if shelf.used:
                    shelf.used = False
                    self._shelves[key] = self._shelves.pop(key)
                    continue
                shelf.most = 0  # so that plans in use are dropped afterwards
                shelf.idle.clear()
                del self._shelves[key]
                total -= shelf.made * shelf.nbytes
                cleared = True
        return cleared
