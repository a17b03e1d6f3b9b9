"""Activity records as plain tuples: kernels, copies, sets, API calls and migrations of managed memory.

Source of kinds, fields and units: "CUPTI Activity API" of NVIDIA's CUPTI documentation.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from ...errors import InputError

NANOSECOND = 1e-9

# Values of CUpti_ActivityKind, which CUPTI's binary interface fixes.
MEMCPY, MEMSET, KERNEL, DRIVER, RUNTIME, CONCURRENT_KERNEL = 1, 2, 3, 4, 5, 10
MEMCPY_PEER, UNIFIED_MEMORY_COUNTER, EXTERNAL_CORRELATION = 22, 25, 39

RECORDED = (
    CONCURRENT_KERNEL, MEMCPY, MEMCPY_PEER, MEMSET, RUNTIME, DRIVER, EXTERNAL_CORRELATION,
)  # fmt: skip

#: CUpti_ActivityMemcpyKind; copies to and from CUDA arrays count as the device's.
DIRECTIONS = {
    1: "h2d", 2: "d2h", 3: "h2d", 4: "d2h", 5: "d2d", 6: "d2d", 7: "d2d", 8: "d2d", 9: "h2h", 10: "p2p",
}  # fmt: skip
PINNED = 2  # of CUpti_ActivityMemoryKind

#: CUpti_ActivityUnifiedMemoryCounterKind
MIGRATIONS = {
    1: "h2d", 2: "d2h", 3: "cpu page fault", 4: "gpu page fault", 5: "thrashing", 6: "throttling",
    7: "remote map", 8: "d2d",
}  # fmt: skip
CPU_PAGE_FAULT, GPU_PAGE_FAULT, THROTTLING = 3, 4, 6
NOT_BYTES = (CPU_PAGE_FAULT, GPU_PAGE_FAULT, THROTTLING)
NO_END = (CPU_PAGE_FAULT, 5, 7)  # a moment, not an interval

#: CUpti_ActivityUnifiedMemoryMigrationCause
CAUSES = {1: "user", 2: "coherence", 3: "prefetch", 4: "eviction", 5: "access counters"}

LAUNCH = re.compile(r"cu(da)?(Graph)?Launch(?!HostFunc)")
VERSION_SUFFIX = re.compile(r"(_(v\d+|ptsz|ptds))+$")

CUSTOM_0 = 3  # of CUpti_ExternalCorrelationKind: ids that mean something to us alone


class Kernel(NamedTuple):
    """One kernel on the GPU; ``name`` is readable, without the parameters of the function.

    ``grid`` in blocks and ``block`` in threads are (x, y, z); ``registers`` a thread; ``shared_bytes`` a
    block, static and dynamic.
    """

    name: str
    start_s: float
    end_s: float
    stream: int
    correlation: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    shared_bytes: int
    device: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Copy(NamedTuple):
    """One copy; ``pinned``: whether its host memory, if it has any, is page-locked."""

    direction: str  # h2d, d2h, d2d, h2h or p2p
    bytes: int
    start_s: float
    end_s: float
    stream: int
    correlation: int
    pinned: bool
    device: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Set(NamedTuple):
    """One fill of memory with a value."""

    bytes: int
    start_s: float
    end_s: float
    stream: int
    correlation: int
    device: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class ApiCall(NamedTuple):
    """One call of the CUDA runtime or driver API on the host, such as ``cudaLaunchKernel``."""

    name: str
    start_s: float
    end_s: float
    correlation: int
    thread: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def launches(self) -> bool:
        """Whether it launches a kernel, or a graph of them."""
        return LAUNCH.match(self.name) is not None


class Migration(NamedTuple):
    """An event of managed memory: pages moved, or a fault.

    Attributes:
        kind: ``h2d``, ``d2h`` or ``d2d`` for pages that moved; ``cpu page fault``, ``gpu page fault``,
            ``thrashing``, ``throttling``, ``remote map``.
        bytes: moved, or of the region concerned; 0 for faults and throttling.
        faults: 1 for a fault of the CPU; for the GPU, how many groups of faults on one page; else 0.
        cause: of pages that moved, such as ``coherence`` (someone touched them); else empty.
    """

    kind: str
    start_s: float
    end_s: float
    bytes: int
    faults: int
    cause: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass
class _New:
    """Records since the last :meth:`Trace.finish`; each call with the kind and number of its function."""

    kernels: list[Kernel] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    sets: list[Set] = field(default_factory=list)
    managed: list[Migration] = field(default_factory=list)
    calls: list[tuple[int, int, ApiCall]] = field(default_factory=list)
    marks: dict[int, int] = field(default_factory=dict)


class Trace:
    """The activity records of one recording, or of several in turn; times in seconds on one clock.

    Attributes:
        kernels, copies, sets, api, managed: the records, each list in the order of time. ``api`` has the
            calls that the program made; those that CUDA made inside of them are left out, and
            ``correlation`` of what they queued is that of the program's call.
        marks: correlation id -> the number that :meth:`push` had set when the call was made.
        dropped: records that were lost: for want of buffers, or of work still running when a recording ended.
        managed_error: why ``managed`` is empty although it was asked for; None otherwise.
    """

    def __init__(self, origin_ns: int = 0) -> None:
        self.kernels: list[Kernel] = []
        self.copies: list[Copy] = []
        self.sets: list[Set] = []
        self.api: list[ApiCall] = []
        self.managed: list[Migration] = []
        self.marks: dict[int, int] = {}
        self.dropped = 0
        self.managed_error: str | None = None
        self.push: Callable[[int], Any] = not_recording
        self.pop: Callable[[], Any] = not_recording
        self._origin_ns = origin_ns
        self._new = _New()

    @property
    def launches(self) -> int:
        """Number of calls that launched a kernel or a graph."""
        return sum(call.launches for call in self.api)

    @property
    def launches_captured(self) -> int:
        """Number of launches with the record of at least one kernel."""
        captured = {kernel.correlation for kernel in self.kernels}
        return sum(call.launches and call.correlation in captured for call in self.api)

    def busy_s(self) -> float:
        """Returns the seconds in which at least one kernel ran."""
        return covered_s(self.kernels)

    def span_s(self) -> float:
        """Returns the seconds from the first record's start to the last one's end, of any kind."""
        records = [*self.kernels, *self.copies, *self.sets, *self.api, *self.managed]
        if not records:
            return 0.0
        return max(record.end_s for record in records) - min(record.start_s for record in records)

    def add(self, records: Iterable[Any]) -> None:
        """Copies CUPTI's ``records``; :meth:`finish` completes them.

        Records are objects with the fields of CUPTI's structures in snake case; other kinds are ignored.
        """
        for record in records:
            kind = record.kind
            if kind == EXTERNAL_CORRELATION:
                if record.external_kind == CUSTOM_0:
                    self._new.marks[record.correlation_id] = record.external_id
            elif kind == UNIFIED_MEMORY_COUNTER:
                self._new.managed.append(self._migration(record))
            elif kind not in (*RECORDED, KERNEL):
                continue
            elif not record.end:  # not finished when the buffers were flushed
                self.dropped += 1
            elif kind in (RUNTIME, DRIVER):
                times = self._times(record)
                call = ApiCall("", *times, record.correlation_id, record.thread_id)
                self._new.calls.append((kind, record.cbid, call))
            elif kind in (KERNEL, CONCURRENT_KERNEL):
                self._new.kernels.append(self._kernel(record))
            elif kind == MEMSET:
                found = Set(record.bytes, *self._queued(record), record.device_id)
                self._new.sets.append(found)
            else:
                self._new.copies.append(self._copy(record))

    def finish(self, name_of: Callable[[int, int], str]) -> None:
        """Names the API calls, leaves out those inside of others, and sorts all records by time.

        ``name_of`` returns the name of an API function from its kind (RUNTIME or DRIVER) and its number.
        """
        new, self._new = self._new, _New()
        names = {(kind, number): "" for kind, number, _ in new.calls}
        for key in names:
            names[key] = VERSION_SUFFIX.sub("", name_of(*key))
        calls = [call._replace(name=names[kind, number]) for kind, number, call in new.calls]
        calls, inside = outermost(calls)
        for number, mark in new.marks.items():
            self.marks[inside.get(number, number)] = mark
        for found, mine in (
            (new.kernels, self.kernels),
            (new.copies, self.copies),
            (new.sets, self.sets),
        ):
            for record in found:
                outer = inside.get(record.correlation, record.correlation)
                mine.append(record._replace(correlation=outer))
        self.api += calls
        self.managed += new.managed
        for mine in (self.kernels, self.copies, self.sets, self.api, self.managed):
            mine.sort(key=lambda record: record.start_s)

    def _times(self, record: Any) -> tuple[float, float]:
        start, end = record.start - self._origin_ns, record.end - self._origin_ns
        return start * NANOSECOND, end * NANOSECOND

    def _queued(self, record: Any) -> tuple[float, float, int, int]:
        return *self._times(record), record.stream_id, record.correlation_id

    def _kernel(self, record: Any) -> Kernel:
        return Kernel(
            readable(record.name),
            *self._queued(record),
            (record.grid_x, record.grid_y, record.grid_z),
            (record.block_x, record.block_y, record.block_z),
            record.registers_per_thread,
            record.static_shared_memory + record.dynamic_shared_memory,
            record.device_id,
        )

    def _copy(self, record: Any) -> Copy:
        if record.kind == MEMCPY_PEER:
            return Copy("p2p", record.bytes, *self._queued(record), False, record.device_id)
        direction = DIRECTIONS.get(record.copy_kind, "unknown")
        host = record.dst_kind if direction == "d2h" else record.src_kind
        pinned = direction in ("h2d", "d2h", "h2h") and host == PINNED
        return Copy(direction, record.bytes, *self._queued(record), pinned, record.device_id)

    def _migration(self, record: Any) -> Migration:
        kind, value = record.counter_kind, int(record.value)
        start_s, end_s = self._times(record)
        if kind in NO_END or end_s < start_s:
            end_s = start_s
        faults = {CPU_PAGE_FAULT: 1, GPU_PAGE_FAULT: value}.get(kind, 0)
        moved = MIGRATIONS.get(kind, "unknown")
        cause = CAUSES.get(record.flags_, "") if moved in ("h2d", "d2h", "d2d") else ""
        return Migration(moved, start_s, end_s, 0 if kind in NOT_BYTES else value, faults, cause)


def covered_s(records: Iterable[Any]) -> float:
    """Returns the seconds in which at least one of ``records`` (with start_s and end_s) ran."""
    return covered((record.start_s, record.end_s) for record in records)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of ``intervals``, each a start and an end."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def outermost(calls: Iterable[ApiCall]) -> tuple[list[ApiCall], dict[int, int]]:
    """Returns the calls that lie in no other call of their thread, and inner correlation id -> outer.

    The runtime's functions call the driver's, and CUPTI may record both: counted twice, the same time would
    appear twice in a table.
    """
    outer: list[ApiCall] = []
    inside: dict[int, int] = {}
    last: dict[int, ApiCall] = {}
    for call in sorted(calls, key=lambda call: (call.start_s, -call.end_s)):
        around = last.get(call.thread)
        if around is not None and call.start_s < around.end_s and call.end_s <= around.end_s:
            inside[call.correlation] = around.correlation
        else:
            last[call.thread] = call
            outer.append(call)
    return outer, inside


@cache
def readable(name: str) -> str:
    """Returns a kernel's name as its source has it, with template arguments, without its parameters."""
    name = _demangled(name) or name
    if name.endswith(")"):
        depth, position = 0, len(name)
        for position in range(len(name) - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(name[position], 0)
            if depth == 0:
                break
        name = name[:position] or name
    return name.removeprefix("void ")


def _demangled(name: str) -> str | None:
    """Returns a C++ name without the Itanium ABI's mangling; None where it cannot be had."""
    if not name.startswith("_Z"):
        return None
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__getattr__("__cxa_demangle")
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return None
    demangle.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]
    found = demangle(name.encode(), None, None, None)
    if not found:
        return None
    try:
        return ctypes.string_at(found).decode("utf-8", "replace")
    finally:
        free(found)


def not_recording(*_: Any) -> None:
    """Does nothing: :attr:`Trace.push` and :attr:`Trace.pop` outside of a recording."""
    raise InputError("activity records: expected a recording under way, found none")
