"""The timeline of a result in Chrome's trace format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from ..measure.result import Result, TimelineEvent
from .units import printable

PROCESS = 1
HOST_THREAD = (
    1  # the process's main one; 0 is the kernel's idle one, whose events Perfetto misplaces
)
LONGEST_S = 1e9  # readers count nanoseconds in 64 bits
HOST = "host"

#: CUDA's events resolve about half a microsecond, so that steps which follow each other can seem to overlap.
RESOLUTION_NS = 1000


def render(result: Result) -> str:
    """Returns a trace of complete events in microseconds: a track for the host and one for each stream.

    How many of the run's events are there is in ``otherData``, and beside the process's name. Source of the
    format: "Trace Event Format", by the Chromium project.
    """
    tracks: dict[str, list[TimelineEvent]] = {HOST: []}
    for event in result.timeline:
        if event.start_s >= 0 and event.start_s + event.seconds <= LONGEST_S:  # not so for NaN
            tracks.setdefault(event.track, []).append(event)
    shown = sum(map(len, tracks.values()))
    total = max(result.timeline_total, shown)
    coverage = f"{shown} of {total} events"
    name = printable(f"cnn_engine {result.network} {result.variant} on {result.device}")
    rows = [
        _metadata("process_name", HOST_THREAD, name=name),
        _metadata("process_labels", HOST_THREAD, labels=coverage),
    ]
    thread = HOST_THREAD
    for track, events in tracks.items():
        for number, lane in enumerate(_lanes(events, nests=track.startswith(HOST)) or [[]]):
            lane_name = track if number == 0 else f"{track} ({number + 1})"
            rows.append(_metadata("thread_name", thread, name=printable(lane_name)))
            rows.append(_metadata("thread_sort_index", thread, sort_index=thread))
            rows.extend(_complete(span, thread) for span in lane)
            thread += 1
    document = {
        "traceEvents": rows,
        "displayTimeUnit": "ns",
        "otherData": {
            "command": printable(result.command),
            "device": printable(result.device_name),
            "events": coverage,
            "run": "the one that times each layer and copy; tracks called (profiled): the one after it, "
            "from activity records",
        },
    }
    return json.dumps(document, allow_nan=False) + "\n"


class _Span:
    """An event's place on its track, in whole nanoseconds, so that rounding keeps what nests nested."""

    def __init__(self, event: TimelineEvent) -> None:
        self.event = event
        self.start = round(event.start_s * 1e9)
        self.end = round((event.start_s + max(event.seconds, 0.0)) * 1e9)


def _lanes(events: list[TimelineEvent], nests: bool) -> list[list[_Span]]:
    """Returns ``events`` in order, on as many lanes as they need not to overlap.

    The format knows no overlap on a track: an event either follows another or lies within it. Within each
    other are calls on the host (``nests``), not the work of a stream. What overlaps by no more than the
    clock's resolution follows, and the earlier is cut; ``args`` keeps the time that was measured.
    """
    lanes: list[tuple[list[_Span], list[_Span]]] = []  # with those within which the next may lie
    for span in sorted(map(_Span, events), key=lambda span: (span.start, -span.end)):
        found = next((pair for pair in lanes if _fits(span, pair[1], nests)), None)
        if found is None:
            found = [], []
            lanes.append(found)
        for part in found:
            part.append(span)
    return [lane for lane, _ in lanes]


def _fits(span: _Span, around: list[_Span], nests: bool) -> bool:
    """Whether ``span`` can come next; drops from ``around`` what has ended, or is cut where it begins."""
    while around:
        last = around[-1]
        if nests and span.end <= last.end:
            return True
        if last.end - span.start > RESOLUTION_NS:
            return False
        last.end = min(last.end, span.start)
        around.pop()
    return True


def _metadata(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": thread, "args": args}


def _complete(span: _Span, thread: int) -> dict[str, Any]:
    return {
        "name": printable(span.event.name),
        "cat": printable(span.event.kind),
        "ph": "X",
        "pid": PROCESS,
        "tid": thread,
        "ts": span.start / 1e3,
        "dur": (span.end - span.start) / 1e3,
        "args": {"pass": span.event.batch, "measured_us": span.event.seconds * 1e6},
    }
