"""That tests which look at times have the machine for themselves."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parents[1] / "helpers"

#: Takes a turn when told to, says so, and keeps it until told to end.
VISITOR = """
import sys
from pathlib import Path
from machine_lock import turn

with turn(sys.argv[1] == "alone", Path(sys.argv[2])):
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def visit(tmp_path):
    """Returns a function that starts a process which wants a turn."""
    started = []

    def start(how: str) -> subprocess.Popen:
        visitor = subprocess.Popen(
            [sys.executable, "-c", VISITOR, how, str(tmp_path)],
            cwd=HELPERS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(visitor)
        return visitor

    yield start
    for visitor in started:
        visitor.kill()
        visitor.communicate()


def is_in(visitor: subprocess.Popen) -> bool:
    """Waits for it; to be asked of one that gets its turn."""
    return visitor.stdout.readline() == "in\n"


def waits(visitor: subprocess.Popen) -> bool:
    """Whether it waits for a lock, as only the kernel knows for certain, and is not in."""
    while not select.select([visitor.stdout], [], [], 0.01)[0]:
        waiting = Path("/proc/locks").read_text("utf-8")
        if any("->" in line and f" {visitor.pid} " in line for line in waiting.splitlines()):
            return True
    return False


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="no /proc/locks here")
def test_one_that_is_alone_waits_for_all_and_lets_nobody_by(visit):
    first, second = visit("beside"), visit("beside")
    assert is_in(first)
    assert is_in(second)
    alone = visit("alone")
    assert waits(alone)
    late = visit("beside")
    assert waits(late)  # though those inside would not mind it
    first.communicate()
    assert waits(alone)
    second.kill()  # gives its turn back as well
    assert is_in(alone)
    assert waits(late)
    alone.communicate()
    assert is_in(late)
