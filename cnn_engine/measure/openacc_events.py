"""Events of OpenACC's profiling interface, counted by directive."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Row:
    """All events of one kind at one directive; seconds.

    Attributes:
        file, line, function: of the directive.
        source, said: the directive, and what the compiler made of it.
        kind: ``region`` (a compute construct), ``kernel`` (a launch on a GPU), ``data`` (a data region's
            beginning or end), ``implicit`` (one that a construct has for itself), ``copyin`` and ``copyout``
            (transfers), ``wait``.
        kernel, variable: the names of what was launched or copied, where the runtime says them.
        gangs, workers, vector: of a launch.
        bytes: of transfers.
        event: as the interface calls it: ``acc_compute_construct`` and so on.
        excl_s, excl_min_s, excl_max_s: without the events inside, so that they add up.
    """

    file: str
    line: int
    function: str
    source: str
    said: list[str]
    kind: str
    kernel: str
    variable: str
    gangs: int
    workers: int
    vector: int
    count: int
    bytes: int
    total_s: float
    min_s: float
    max_s: float
    event: str = ""
    excl_s: float = 0.0
    excl_min_s: float = 0.0
    excl_max_s: float = 0.0


@dataclass
class Timing:
    """Work of one device.

    Attributes:
        where: the device, as the tables of ``NV_ACC_TIME`` name it; ``number``: which of them.
        host: whether it is the host, on which nothing is launched and nothing copied.
        rows: by file and line.
    """

    where: str
    number: int
    host: bool
    compiler: str
    rows: list[Row] = field(default_factory=list)

    def count(self, kind: str, function: str = "") -> int:
        """Returns how many events of a kind there were, in functions whose names begin so."""
        return sum(
            row.count for row in self.rows if row.kind == kind and row.function.startswith(function)
        )
