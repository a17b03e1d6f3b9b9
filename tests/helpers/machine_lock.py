"""Taking turns on a machine: a test that looks at times has it for itself, all others share it.

For processes of any origin: pytest-xdist's workers, a suite beside a suite, several users of one GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / f"cnn_engine-tests-{os.getuid()}"


@contextlib.contextmanager
def turn(alone: bool, folder: Path = FOLDER) -> Iterator[None]:
    """Waits until the machine is free, or ``alone`` empty, and keeps it so inside of the block.

    Who wants to be alone keeps the gate shut while it waits, or there would always be somebody inside. The
    locks are of the process: those that it forks do not hold them, and its end gives them back.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / "gate", "w+b") as gate, open(folder / "room", "w+b") as room:
        fcntl.lockf(gate, fcntl.LOCK_EX)
        fcntl.lockf(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.lockf(gate, fcntl.LOCK_UN)
        yield
