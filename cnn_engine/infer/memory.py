"""Peak memory of this process."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path


def peak_bytes() -> int:
    """Returns the largest resident size of this process since its program began.

    The system's resource usage would count what the process was forked from as well.
    """
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
