"""How many threads CPU work uses."""

from __future__ import annotations

import os

from ..errors import expected

MOST = 1024


def default() -> int:
    """Returns the number of CPUs that this process may run on."""
    return min(len(os.sched_getaffinity(0)), MOST)


def check(threads: int | None, name: str = "threads") -> int:
    """Returns ``threads``, or the default for None.

    Raises:
        InputError: it is not a whole number from 1 to 1,024.
    """
    if threads is None:
        return default()
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MOST:
        raise expected(name, f"a whole number from 1 to {MOST}", threads)
    return threads
