"""Tables of a profile, from activity records or, without them, from timed steps.

Nothing here measures: :func:`from_trace` and :func:`from_steps` are functions of what was measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .cupti.activity_records import ApiCall, Copy, Kernel, Trace, covered_s
from .openacc_events import Timing

if TYPE_CHECKING:
    from ..plan.plan import Step
    from .result import CopyTime, LayerTime, Result

RECORDS, EVENTS, HOST_CLOCK = "activity records", "events", "host clock"

#: What a copy and a set are called, as the profilers that came with CUDA do.
COPY_NAMES = {
    "h2d": "[CUDA memcpy HtoD]",
    "d2h": "[CUDA memcpy DtoH]",
    "d2d": "[CUDA memcpy DtoD]",
    "h2h": "[CUDA memcpy HtoH]",
    "p2p": "[CUDA memcpy PtoP]",
}
#: The end of the names of tracks of activity records.
PROFILED = " (profiled)"

SET_NAME = "[CUDA memset]"


@dataclass
class Row:
    """All calls of one name; seconds.

    Attributes:
        kind: ``kernel``, ``copy``, ``set``, ``api``, or the kind of a layer.
        min_s, max_s: None where single calls were not kept.
        share: of the table's total.
        cumulative: the shares of this row and of all above it; tables are sorted by ``total_s``.
    """

    name: str
    kind: str
    calls: int
    total_s: float
    average_s: float
    min_s: float | None
    max_s: float | None
    share: float | None = None
    cumulative: float | None = None


@dataclass
class KernelRow:
    """All launches of one kernel by one layer.

    Attributes:
        layer, kind: of the step of the pass; ``-`` for a kernel that no step launched.
        share: of the time of all kernels.
        grid, block, registers, shared_bytes: of most of the launches: blocks, threads, registers per thread,
            and bytes of shared memory per block.
    """

    layer: str
    kind: str
    kernel: str
    calls: int
    total_s: float
    average_s: float
    min_s: float | None
    max_s: float | None
    share: float | None
    grid: list[int]
    block: list[int]
    registers: int
    shared_bytes: int


@dataclass
class CopyRow:
    """All copies of one thing in one direction.

    Attributes:
        what: the step of the pass, such as ``images``; ``-`` for a copy that no step made.
        memory: of the host: ``pinned`` or ``pageable``; ``device`` for copies without a host; ``-`` where it
            is not known.
    """

    what: str
    direction: str
    memory: str
    calls: int
    bytes: int
    total_s: float
    average_s: float
    min_s: float | None
    max_s: float | None
    bytes_per_second: float | None


@dataclass
class ManagedRow:
    """All events of one kind and cause that happened to managed memory; see Migration for the kinds."""

    kind: str
    cause: str
    calls: int
    bytes: int
    faults: int
    total_s: float
    average_s: float
    min_s: float
    max_s: float
    bytes_per_second: float | None


@dataclass
class Capture:
    """Share of kernels and copies that have a record.

    Attributes:
        launches, launches_captured: API calls that launch kernels; those that have the record of a kernel.
        kernels: records of kernels.
        steps, steps_captured: the steps of the passes that run on the GPU, counted from the plan; those that
            launched a kernel that has a record.
        copies, copies_captured, bytes, bytes_captured: the same of its copies and of their bytes.
        kernels_outside, calls_outside: kernels and API calls that no step of the passes made; such calls are
            not in the table.
        dropped: records that were lost.
    """

    launches: int = 0
    launches_captured: int = 0
    kernels: int = 0
    steps: int = 0
    steps_captured: int = 0
    copies: int = 0
    copies_captured: int = 0
    bytes: int = 0
    bytes_captured: int = 0
    kernels_outside: int = 0
    calls_outside: int = 0
    dropped: int = 0

    @property
    def complete(self) -> bool:
        return (
            self.launches == self.launches_captured
            and self.steps == self.steps_captured
            and self.copies == self.copies_captured
            and self.bytes == self.bytes_captured
            and self.dropped == 0
        )


@dataclass
class Cost:
    """Cost of profiling: medians of passes of a full batch, profiled and plain interleaved.

    Attributes:
        plain_s, profiled_s: seconds; ``samples`` of each.
        ratio, interval: profiled to plain, and its 95 % interval; None with too few samples.
        ordinary_s: the median of the run that times whole passes, before anything was recorded.
    """

    plain_s: float
    profiled_s: float
    ratio: float | None
    interval: tuple[float, float] | None
    samples: int
    ordinary_s: float | None = None


@dataclass
class Profile:
    """Parts of the time of ``passes`` passes over ``images`` images.

    Attributes:
        source: where ``gpu`` comes from: ``activity records``, ``events`` around layers and copies, or ``host
            clock`` (a CPU; ``gpu`` is empty).
        top: percent; where a report draws its line in ``gpu`` and ``api``.
        wall_s: the passes on the host, each from its first call until it is done.
        kernel_s, copy_s, gpu_s: seconds in which at least one kernel, one copy, anything at all ran on the
            GPU.
        api_s: seconds in calls of the CUDA API, waiting included; ``cpu_s``: in layers that ran on the CPU.
        gpu: kernels, copies and sets by name; with ``events``, layers and copies.
        api: calls of the CUDA API by name. ``cpu``: layers that ran on the CPU.
        layers: kernels by layer. ``copies``, ``managed``: copies, and events of managed memory.
        capture, cost: None without records.
        openacc: what ran directive by directive (:class:`.openacc_events.Timing`); None on other devices.
        notes: what is left out, and why.
        interrupted: whether Ctrl-C ended it early.
        events: [name, kind, track, start, seconds, pass] for traces, ``events_total`` before they were
            capped; not part of :meth:`to_dict`.
    """

    source: str
    top: float
    passes: int
    images: int
    wall_s: float | None
    kernel_s: float | None = None
    copy_s: float | None = None
    gpu_s: float | None = None
    api_s: float | None = None
    cpu_s: float | None = None
    gpu: list[Row] = field(default_factory=list)
    api: list[Row] = field(default_factory=list)
    cpu: list[Row] = field(default_factory=list)
    layers: list[KernelRow] = field(default_factory=list)
    copies: list[CopyRow] = field(default_factory=list)
    managed: list[ManagedRow] = field(default_factory=list)
    capture: Capture | None = None
    cost: Cost | None = None
    openacc: Timing | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    events: list[Any] = field(default_factory=list, repr=False)
    events_total: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain numbers, strings, lists and dictionaries, for the JSON document."""
        document = asdict(replace(self, events=[]))
        del document["events"], document["events_total"]
        return document


def from_trace(
    trace: Trace,
    ran: Sequence[Step],
    cpu: Iterable[tuple[Step, float]],
    *,
    top: float,
    passes: int,
    images: int,
    wall_s: float,
) -> Profile:
    """Returns the tables of ``trace``.

    Args:
        trace: marks in it are indices of ``ran``.
        ran: every step that was run, in order, once for each time.
        cpu: the steps that worked on the CPU, with their seconds.
    """

    def step_of(record: Any) -> Step | None:
        mark = trace.marks.get(record.correlation)
        return None if mark is None else ran[mark]

    calls = [call for call in trace.api if call.correlation in trace.marks]
    notes = []
    if trace.api and not trace.marks:
        calls = trace.api
        notes.append("the way from layers to kernels is left out: CUPTI gave no correlation ids")
    if trace.managed_error is not None:
        notes.append(trace.managed_error)
    device_work = [*trace.kernels, *trace.copies, *trace.sets]
    profile = Profile(
        RECORDS, top, passes, images, wall_s,
        kernel_s=trace.busy_s(), copy_s=covered_s(trace.copies), gpu_s=covered_s(device_work),
        api_s=covered_s(calls), notes=notes,
    )  # fmt: skip
    profile.gpu, profile.api = activities(trace), api_calls(calls)
    profile.cpu = rows(((step.name, step.kind), seconds) for step, seconds in cpu)
    profile.cpu_s = sum(row.total_s for row in profile.cpu)
    profile.layers = _kernels_by_layer([(step_of(kernel), kernel) for kernel in trace.kernels], ran)
    profile.copies = _copies([(step_of(copy), copy) for copy in trace.copies])
    profile.managed = _managed(trace)
    profile.capture = capture(trace, ran)
    profile.capture.calls_outside = len(trace.api) - len(calls)
    return profile


def activities(trace: Trace) -> list[Row]:
    """Returns a row for each kernel, direction of copies and the sets of a trace."""
    return rows(
        [
            *(((kernel.name, "kernel"), kernel.seconds) for kernel in trace.kernels),
            *(((copy_name(copy), "copy"), copy.seconds) for copy in trace.copies),
            *(((SET_NAME, "set"), found.seconds) for found in trace.sets),
        ]
    )


def api_calls(calls: Iterable[ApiCall]) -> list[Row]:
    """Returns a row for each API function."""
    return rows(((call.name, "api"), call.seconds) for call in calls)


def from_steps(result: Result, *, top: float, notes: Sequence[str]) -> Profile:
    """Returns the tables of the timed layers and copies of ``result``, without records.

    All columns are of the same calls: those of the sampled passes of a full batch. ``min_s`` and ``max_s``
    are None where a pass has several calls of one name, whose samples are sums.
    """
    whole = result.whole_pass
    calls_of_all = whole.calls if whole is not None else 0

    def row(name: str, kind: str, step: LayerTime | CopyTime) -> Row:
        each = -(-step.calls // calls_of_all) if calls_of_all else 1  # calls per pass
        samples = step.samples_s
        if not samples:
            return _row(name, kind, step.calls, step.seconds, [])
        single = samples if each == 1 else []
        return _row(name, kind, each * len(samples), sum(samples), single)

    on_gpu = [layer for layer in result.layers if layer.device_s is not None]
    stamped = EVENTS if on_gpu or result.copies else HOST_CLOCK  # by a version that did not say
    source = whole.source if whole is not None else stamped
    passes = max((len(layer.samples_s) for layer in result.layers), default=0)
    images = passes * result.batch
    wall_s = whole.sampled_s if whole is not None else None
    found = Profile(source, top, passes, images, wall_s, notes=list(notes))
    gpu = [row(layer.name, layer.kind, layer) for layer in on_gpu]
    for copy in result.copies:
        of = row(f"{copy.what} {copy.direction}", "copy", copy)
        size = copy.bytes // max(copy.calls, 1) * of.calls
        times = of.total_s, of.average_s, of.min_s, of.max_s, _rate(size, of.total_s)
        found.copies.append(CopyRow(copy.what, copy.direction, "-", of.calls, size, *times))
        gpu.append(of)
    on_cpu = [layer for layer in result.layers if layer.device_s is None]
    found.gpu = _shared(gpu)
    found.cpu = _shared([row(layer.name, layer.kind, layer) for layer in on_cpu])
    found.cpu_s = sum(row.total_s for row in found.cpu)
    return found


def capture(trace: Trace, ran: Sequence[Step]) -> Capture:
    """Returns how much of the steps that ``ran``, and of the calls in ``trace``, has a record."""
    marks = trace.marks
    with_kernel = {marks[k.correlation] for k in trace.kernels if k.correlation in marks}
    copied: Counter[int] = Counter()
    for copy in trace.copies:
        if copy.correlation in marks:
            copied[marks[copy.correlation]] += copy.bytes
    on_gpu = [index for index, step in enumerate(ran) if step.place == "cuda"]
    kernels = [index for index in on_gpu if ran[index].kind != "copy"]
    copies = [index for index in on_gpu if ran[index].kind == "copy"]
    return Capture(
        launches=trace.launches,
        launches_captured=trace.launches_captured,
        kernels=len(trace.kernels),
        steps=len(kernels),
        steps_captured=sum(index in with_kernel for index in kernels),
        copies=len(copies),
        copies_captured=sum(index in copied for index in copies),
        bytes=sum(ran[index].bytes for index in copies),
        bytes_captured=sum(copied[index] for index in copies),
        kernels_outside=sum(kernel.correlation not in marks for kernel in trace.kernels),
        dropped=trace.dropped,
    )


def copy_name(copy: Copy) -> str:
    """Returns the name of a copy's row, such as ``[CUDA memcpy HtoD]``."""
    return COPY_NAMES.get(copy.direction, "[CUDA memcpy]")


def rows(calls: Iterable[tuple[tuple[str, str], float]]) -> list[Row]:
    """Returns a row for each (name, kind) of ``calls``, the longest in total first."""
    return _shared(
        [_row(*key, len(times), sum(times), times) for key, times in _grouped(calls).items()]
    )


def line_after(table: Sequence[Row], top: float) -> int:
    """Returns how many rows it takes to reach ``top`` percent of the table's total."""
    for index, row in enumerate(table):
        if row.cumulative is None or 100 * row.cumulative >= top - 1e-9:
            return index + 1
    return len(table)


def _row(name: str, kind: str, calls: int, total_s: float, times: Sequence[float]) -> Row:
    least, most = (min(times), max(times)) if len(times) else (None, None)
    return Row(name, kind, calls, total_s, total_s / max(calls, 1), least, most)


def _shared(table: list[Row]) -> list[Row]:
    """Returns ``table`` sorted, with shares."""
    table.sort(key=lambda row: (-row.total_s, row.name))
    total = sum(row.total_s for row in table)
    reached = 0.0
    for row in table:
        reached += row.total_s
        row.share = row.total_s / total if total else None
        row.cumulative = reached / total if total else None
    if total:
        table[-1].cumulative = 1.0  # whatever the rounding
    return table


def _grouped(items: Iterable[tuple[Hashable, Any]]) -> Mapping[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for key, value in items:
        groups[key].append(value)
    return groups


def _rate(size: int, seconds: float) -> float | None:
    return size / seconds if size and seconds else None


def _times(records: Sequence[Any]) -> tuple[float, float, float, float]:
    """Returns the total, average, least and longest of ``records``."""
    times = [record.seconds for record in records]
    return sum(times), sum(times) / len(times), min(times), max(times)


def _kernels_by_layer(
    found: list[tuple[Step | None, Kernel]], ran: Sequence[Step]
) -> list[KernelRow]:
    """Returns kernels in the order in which their layers first ran, those of no layer last."""
    order: dict[str, int] = {}
    for step in ran:
        order.setdefault(step.name, len(order))
    total = sum(kernel.seconds for _, kernel in found)
    table = []
    for (layer, kind, name), kernels in _grouped(
        ((step.name if step else "-", step.kind if step else "-", kernel.name), kernel)
        for step, kernel in found
    ).items():
        shapes = Counter((k.grid, k.block, k.registers, k.shared_bytes) for k in kernels)
        (grid, block, registers, shared), _ = shapes.most_common(1)[0]
        times = _times(kernels)
        times = *times, times[0] / total if total else None
        shape = list(grid), list(block), registers, shared
        table.append(KernelRow(layer, kind, name, len(kernels), *times, *shape))
    return sorted(table, key=lambda row: (order.get(row.layer, len(order)), -row.total_s))


def _copies(found: list[tuple[Step | None, Copy]]) -> list[CopyRow]:
    table = []
    for (what, direction, memory), copies in _grouped(
        ((step.name if step else "-", copy.direction, _memory(copy)), copy) for step, copy in found
    ).items():
        times, size = _times(copies), sum(copy.bytes for copy in copies)
        rate = _rate(size, times[0])
        table.append(CopyRow(what, direction, memory, len(copies), size, *times, rate))
    return sorted(table, key=lambda row: -row.total_s)


def _memory(copy: Copy) -> str:
    if copy.direction not in ("h2d", "d2h", "h2h"):
        return "device"
    return "pinned" if copy.pinned else "pageable"


def _managed(trace: Trace) -> list[ManagedRow]:
    table = []
    for (kind, cause), found in _grouped(((m.kind, m.cause), m) for m in trace.managed).items():
        times, size = _times(found), sum(migration.bytes for migration in found)
        faults = sum(migration.faults for migration in found)
        rate = _rate(size, times[0])
        table.append(ManagedRow(kind, cause, len(found), size, faults, *times, rate))
    return sorted(table, key=lambda row: (-row.total_s, -row.calls))
