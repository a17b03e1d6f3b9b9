"""Signals: Ctrl-C and SIGTERM end a command with one line, and results so far are written.

The package imports it before all else, and it imports next to nothing: from then on Ctrl-C ends one of our
commands in one line, also while the rest, such as NumPy, is still being imported.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

INTERRUPTED, TERMINATED = 130, 143

#: Seconds after which a signal that came at a bad moment is sent again, and how often that is done.
AGAIN_S, MOST_TIMES = 0.005, 40
#: Seconds that an interrupted command's process waits for threads and exit handlers before it ends.
EXIT_S = 10.0

#: Modules that take and release locks in Python. A KeyboardInterrupt raised in one of their frames may leave
#: a lock taken for ever, and with it a thread for which the interpreter waits at its exit.
_LOCKING = {
    "threading", "queue", "concurrent.futures._base", "concurrent.futures.thread",
    "importlib._bootstrap", "logging", "cnn_engine.locks", __name__,
}  # fmt: skip

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


def leave_soon(code: int) -> None:
    """Ends the process after :data:`EXIT_S` seconds, where a thread that is stuck keeps it from ending."""

    def leave() -> None:
        time.sleep(EXIT_S)
        os._exit(code)

    if signal.getsignal(signal.SIGINT) is _leave:  # else the process is not ours to end
        _thread.start_new_thread(leave, ())
        with suppress(OSError, ValueError):
            sys.stdout.flush()


class _Raising:
    """A signal handler that raises ``KeyboardInterrupt`` where no lock can be lost.

    In a frame of a module that takes locks, the signal is sent again a little later, until the thread has
    left that frame. Where it has not moved meanwhile, it waits for a lock, and the exception is raised there.
    """

    def __init__(self) -> None:
        self.terminated: list[int] = []
        self.hook = sys.unraisablehook
        self._thread = _thread.get_ident()
        self._calls = self._times = 0
        self._seen: tuple[FrameType, int] | None = None
        self._put_off: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._calls += 1
        if frame is not None and frame.f_globals.get("__name__") in _LOCKING:
            seen, self._seen = self._seen, (frame, frame.f_lasti)
            if seen != self._seen and self._times < MOST_TIMES:
                self._times += 1
                self._put_off = number
                self._send_again(number)
                return
        self._raise(number)

    def _raise(self, number: int) -> None:
        self._seen, self._times, self._put_off = None, 0, None
        if number == signal.SIGTERM:
            self.terminated.append(number)
        raise KeyboardInterrupt

    def _send_again(self, number: int) -> None:
        """Sends the signal until this is called: a thread that is about to wait does not notice it."""

        def send(calls: int) -> None:
            time.sleep(AGAIN_S)
            while calls == self._calls:
                signal.pthread_kill(self._thread, number)
                time.sleep(AGAIN_S)

        _thread.start_new_thread(send, (self._calls,))  # a threading.Thread would take locks

    def end(self) -> None:
        """Sends no more; raises what was put off."""
        self._calls += 1
        if self._put_off is not None:
            self._raise(self._put_off)

    def unraisable(self, unraisable: Any) -> None:
        """Sends the signal again where the exception was lost, such as in a ``__del__``."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._send_again(self.terminated.pop() if self.terminated else signal.SIGINT)
        else:
            self.hook(unraisable)


@contextmanager
def raised() -> Iterator[list[int]]:
    """Makes SIGINT and SIGTERM a ``KeyboardInterrupt`` while a command runs.

    Yields a list that is empty until SIGTERM comes, so that its exit code can be told from Ctrl-C's.
    """
    raising = _Raising()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGTERM, raising)
    except ValueError:  # not in the main thread, which alone has them
        before = {}
    else:
        sys.unraisablehook = raising.unraisable
    if before.get(signal.SIGINT) in (_leave, signal.default_int_handler):
        signal.signal(signal.SIGINT, raising)
    try:
        yield raising.terminated
    finally:
        for number, handler in before.items():  # a command may have replaced either
            signal.signal(number, handler)
        if before:
            sys.unraisablehook = raising.hook
        raising.end()


_guard_imports()
