"""Locks that a forked child finds free: the threads that held them in the parent are not there."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from types import TracebackType
from typing import Any


class ForkSafeLock:
    """A re-entrant lock for ``with``, which is free in a forked child unless the thread that forked holds it.

    What it guards must be whole between any two steps of the interpreter, since a fork may fall there.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


_all: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in list(_all):
        if lock._lock.acquire(blocking=False):  # free, or this thread's
            lock._lock.release()
        else:
            lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class cached_property(functools.cached_property):
    """``functools.cached_property`` without the lock that it has before Python 3.12.

    That one is all instances', and held while the value is computed: a child forked meanwhile waits for ever.
    Two threads may compute the value at once.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        kept = instance.__dict__
        if self.attrname not in kept:
            kept[self.attrname] = self.func(instance)
        return kept[self.attrname]
