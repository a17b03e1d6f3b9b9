"""Locks after a fork: the threads that held them in the parent are not in the child."""

from __future__ import annotations

import ast
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from graphs import Builder

import cnn_engine
from cnn_engine import Engine
from cnn_engine.engine.plan_runner import Plans
from cnn_engine.locks import ForkSafeLock, cached_property

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

#: Are never waited for: they say that a recording is under way, that an arena is in use.
MARKS = {"measure/cupti/activity.py", "engine/plan_cache.py"}


#: Seconds after which a child is taken to hang; what it waits for is held for longer.
HANGS_S = 60


def in_a_child(body) -> bool:
    """Whether ``body`` returns true in a forked child, which is not to hang."""
    child = os.fork()
    if child == 0:
        signal.alarm(HANGS_S)
        os._exit(0 if body() else 1)
    return os.waitpid(child, 0)[1] == 0


def taken(lock: ForkSafeLock) -> bool:
    with lock:
        return True


def test_a_lock_that_another_thread_holds_is_free_in_a_child():
    lock, held, end = ForkSafeLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            end.wait(2 * HANGS_S)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        assert in_a_child(lambda: taken(lock) and taken(lock))
    finally:
        end.set()
        holder.join()
    assert taken(lock)


def test_a_lock_that_the_forking_thread_holds_stays_its_own():
    lock = ForkSafeLock()

    def child() -> bool:
        others: list[bool] = []
        other = threading.Thread(target=lambda: others.append(taken(lock)), daemon=True)
        other.start()
        other.join(0.2)
        return not others

    with lock:
        assert in_a_child(child)

    def released() -> bool:
        other = threading.Thread(target=taken, args=(lock,))
        other.start()
        other.join()
        return True

    lock.__enter__()
    child = os.fork()
    lock.__exit__(None, None, None)
    if child == 0:
        signal.alarm(HANGS_S)
        os._exit(0 if released() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_predicts_while_its_parent_builds_a_plan(monkeypatch):
    """The lock of the plans is held from before the fork until after the child has ended."""
    b = Builder((1, 3, 8, 8))
    engine = Engine(b.graph(b.head(b.relu(b.conv("images", 8)), 4)), device="cpu", threads=1)
    images = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
    wanted = engine.predict(images)
    building, end = threading.Event(), threading.Event()
    real = Plans._build

    def build(self, key):
        if key[1] == 2:
            building.set()
            end.wait(2 * HANGS_S)
        return real(self, key)

    monkeypatch.setattr(Plans, "_build", build)
    builder = threading.Thread(target=lambda: engine.predict(images[:2]))
    builder.start()
    building.wait()
    try:
        assert in_a_child(lambda: np.allclose(engine.predict(images[:3]), wanted[:3], atol=1e-5))
    finally:
        end.set()
        builder.join()


def test_a_child_reads_a_property_that_its_parent_computes():
    held, end = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, waits: bool) -> None:
            self.waits = waits

        @cached_property
        def value(self) -> list[int]:
            if self.waits:
                held.set()
                end.wait(2 * HANGS_S)
            return [1]

    thread = threading.Thread(target=lambda: Slow(True).value)
    thread.start()
    held.wait()
    try:
        assert in_a_child(lambda: Slow(False).value == [1])
    finally:
        end.set()
        thread.join()
    quick = Slow(False)
    assert quick.value is quick.value


def test_all_locks_of_the_package_are_such():
    root = Path(cnn_engine.__file__).parent
    plain = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("threading.Lock", "threading.RLock")
        )
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "functools"
            and "cached_property" in {alias.name for alias in node.names}
        )
    }
    assert plain == MARKS | {"locks.py"}
