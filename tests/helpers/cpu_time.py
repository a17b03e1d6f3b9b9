"""Bounds of CPU time that hold on a busy machine: the least of several tries, without garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import thread_time


def cpu_seconds(work: Callable[[], object]) -> float:
    """Returns the CPU time of one call in seconds; no collection of others' objects falls into it."""
    gc.collect()
    gc.disable()
    try:
        start = thread_time()
        work()
        return thread_time() - start
    finally:
        gc.enable()


def ever(true: Callable[[], bool], tries: int = 6) -> bool:
    """Returns whether something holds once: other work on the machine disturbs a try, never all of them."""
    return any(true() for _ in range(tries))
