"""Signals: Ctrl-C and SIGTERM end a command with one line, and results so far are written.

The package imports it before all else, and it imports next to nothing: from then on Ctrl-C ends one of our
commands in one line, also while the rest, such as NumPy, is still being imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

INTERRUPTED, TERMINATED = 130, 143

#: Top-level packages whose modules are commands; their folders lie beside this package in a checkout.
_OURS = ("cnn_engine", "cifar10", "fashion_mnist")


def _is_our_command() -> bool:
    words = sys.orig_argv
    if "-m" in words[1:-1]:
        return words[words.index("-m") + 1].partition(".")[0] in _OURS
    return os.path.basename(sys.argv[0] if sys.argv else "") == "cnn-engine"


def _guard_imports() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_our_command():
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def raised() -> Iterator[list[int]]:
    """Makes SIGINT and SIGTERM a ``KeyboardInterrupt`` while a command runs.

    Yields a list that is empty until SIGTERM comes, so that its exit code can be told from Ctrl-C's.
    """
    terminated: list[int] = []

    def terminate(number: int, frame: object) -> None:
        terminated.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not in the main thread, which alone has them
        before = {}
    if before.get(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield terminated
    finally:
        for number, handler in before.items():  # a command may have replaced either
            signal.signal(number, handler)


_guard_imports()
