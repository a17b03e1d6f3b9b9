"""CPU times that the collection of other tests' objects does not disturb."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import process_time


def cpu_seconds(work: Callable[[], object]) -> float:
    """Returns the CPU time of one call in seconds, of all threads; Python's collector rests meanwhile."""
    gc.collect()
    gc.disable()
    try:
        start = process_time()
        work()
        return process_time() - start
    finally:
        gc.enable()
