"""Ctrl-C at a bad moment: no lock and no signal is lost, and no thread keeps a command from ending."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from cnn_engine import interrupts
from cnn_engine.locks import ForkSafeLock

ROOT = Path(__file__).resolve().parents[2]
INTERRUPT = partial(signal.raise_signal, signal.SIGINT)


class Interrupted:
    """A lock: once it is taken, Ctrl-C comes before the interpreter's next step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.release, self.__exit__ = self.lock.release, self.lock.__exit__
        # All in C, so that the frame that is interrupted is the caller's.
        steps = map(partial.__call__, [partial(self.lock.acquire), INTERRUPT])
        self.acquire = self.__enter__ = partial(list, steps)


def wait_for_ctrl_c() -> None:
    time.sleep(60)
    raise AssertionError("the signal was lost")


def test_no_lock_is_lost_as_it_is_taken():
    """As a semaphore of a pool of threads was: its thread waited for ever, and the command for the thread."""
    interrupted = Interrupted()
    condition = threading.Condition(interrupted)
    begun = False
    with pytest.raises(KeyboardInterrupt), interrupts.raised(), condition:  # noqa: PT012
        begun = True
        wait_for_ctrl_c()
    assert begun
    assert not interrupted.lock.locked()


def test_our_own_lock_is_not_lost_as_it_is_taken():
    lock = ForkSafeLock()
    lock._lock = Interrupted()
    with pytest.raises(KeyboardInterrupt), interrupts.raised(), lock:
        wait_for_ctrl_c()
    assert not lock._lock.lock.locked()


@pytest.mark.parametrize(
    "wait",
    [
        lambda: queue.Queue().get(), lambda: threading.Event().wait(60), lambda: poll(0.002),
        lambda: poll(0.0),
    ],
    ids=["queue", "event", "polling", "spinning"],
)  # fmt: skip
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_a_lock_is_interrupted(wait, number):
    # A process sends it: a thread of this one would run just as the main thread lets it, to wait.
    words = ["sh", "-c", f"read go; kill -s {number.name[3:]} {os.getpid()}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as sends:  # noqa: SIM117
        with pytest.raises(KeyboardInterrupt), interrupts.raised() as terminated:  # noqa: PT012
            sends.stdin.write(b"\n")
            sends.stdin.close()
            wait()
    assert terminated == [signal.SIGTERM] * (number == signal.SIGTERM)


def poll(seconds: float) -> None:
    """Waits in many short steps, nearly always in a frame of a module that takes locks."""
    empty: queue.Queue = queue.Queue()
    while True:
        try:
            empty.get(timeout=seconds)
        except queue.Empty:
            continue


def test_a_signal_is_not_lost_in_a_finaliser():
    class Collected:
        def __del__(self) -> None:
            INTERRUPT()

    with pytest.raises(KeyboardInterrupt), interrupts.raised():  # noqa: PT012
        Collected()
        wait_for_ctrl_c()


def test_a_signal_that_is_put_off_is_raised_when_the_command_ends():
    condition = threading.Condition(Interrupted())
    with pytest.raises(KeyboardInterrupt), interrupts.raised():
        condition.__enter__()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_thread_that_is_stuck_does_not_keep_a_command_from_ending(tmp_path, number, code):
    script = tmp_path / "cnn-engine"  # by its name, the process is the command's own
    script.write_text(
        "import signal, sys, threading\nfrom cnn_engine import cli, interrupts\n"
        "interrupts.EXIT_S = 0.1\ndef main(words):\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        f"    print('kept'); signal.raise_signal({int(number)})\n"
        "sys.exit(cli.run(main, []))\n"
    )
    found = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (code, "kept\n", "interrupted\n")
