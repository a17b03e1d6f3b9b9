"""The number of threads of CPU work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import expected

MOST = 1024


def default() -> int:
    """Returns the number of CPUs that this process may run on, or its cgroup's quota if that is less."""
    cpus = len(os.sched_getaffinity(0))
    granted = quota()
    if granted is not None:
        # Rounded down: a thread beyond the quota makes the system stop all of them for the rest of a
        # period, tens of milliseconds, in the middle of a pass.
        cpus = min(cpus, int(granted))
    return max(1, min(cpus, MOST))


def quota(
    root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Returns how many CPUs the cgroups of this process grant (CFS bandwidth), or None: no limit.

    Args:
        root: where cgroups are mounted: version 2, or version 1's controllers in folders of their names.
        process: the cgroups of the process, as ``/proc/self/cgroup`` has them.
    """
    try:
        lines = process.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "none", "")
        if controllers == "":
            limits += [_limit_v2(folder) for folder in _upwards(root, path)]
            limits += [_limit_v2(folder) for folder in _upwards(root / "unified", path)]
        elif "cpu" in controllers.split(","):
            for name in dict.fromkeys((controllers, "cpu", "cpu,cpuacct")):
                limits += [_limit_v1(folder) for folder in _upwards(root / name, path)]
    return min((limit for limit in limits if limit is not None), default=None)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """A cgroup's folder and all above it, each of which may have a limit.

    In a container, ``path`` may name folders that only the host sees: then the mount is the cgroup itself.
    """
    folder = root / path.lstrip("/")
    if ".." not in folder.parts:
        yield from (place for place in (folder, *folder.parents) if place.is_relative_to(root))
    else:
        yield root


def _limit_v2(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split()
    return _cpus(*fields) if len(fields) == 2 else None


def _limit_v1(folder: Path) -> float | None:
    return _cpus(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _cpus(share: str, period: str) -> float | None:
    try:
        microseconds, every = int(share), int(period)
    except ValueError:  # "max", or there is no such file
        return None
    return microseconds / every if microseconds > 0 and every > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def check(threads: int | None, name: str = "threads") -> int:
    """Returns ``threads``, or the default for None.

    Raises:
        InputError: it is not a whole number from 1 to 1,024.
    """
    if threads is None:
        return default()
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MOST:
        raise expected(name, f"a whole number from 1 to {MOST}", repr(threads))
    return threads
