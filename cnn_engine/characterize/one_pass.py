"""One pass of a subject of ``characterize``, for a profiler: ``python -m ... SUBJECT BATCH OPTIONS...``.

SUBJECT is its index among those of the options. Kernels before the pass are outside of the profiler's range.
"""

from __future__ import annotations

import sys

from .. import devices
from .command import parser, subjects_of


def main(arguments: list[str]) -> None:
    """Runs a pass to warm up, then one between ``cudaProfilerStart`` and ``cudaProfilerStop``."""
    from cupy.cuda import profiler

    index, batch, *words = arguments
    options = parser().parse_args(words)
    device = devices.select(options.device)
    subjects, _ = subjects_of(options, device, [int(batch)])
    with subjects[int(index)].load(int(batch)) as load:
        load.next_pass()()
        run = load.next_pass()
        profiler.start()
        run()
        profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
