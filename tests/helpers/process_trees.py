"""Processes of other tests' commands: whether they have ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def gone(pids: Iterable[int], seconds: float = 60) -> bool:
    """Whether all processes have ended, after at most so many seconds; zombies have."""
    pids, until = list(pids), time.monotonic() + seconds
    while any(map(_runs, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
