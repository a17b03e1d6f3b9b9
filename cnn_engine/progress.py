"""Progress messages for work that takes seconds, on terminals only."""

from __future__ import annotations

import sys
from collections.abc import Callable

from .errors import printable


def teller(show: bool = True) -> Callable[[str], object]:
    """Returns a function that shows words on stderr's terminal, if any, in place of those before."""
    if not show or not sys.stderr or not sys.stderr.isatty():
        return lambda words: None
    return lambda words: print(f"\r\033[K{printable(words)}", end="", file=sys.stderr, flush=True)
