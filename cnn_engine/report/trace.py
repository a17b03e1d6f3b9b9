"""The timeline of a result in Chrome's trace format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import math
from typing import Any

from ..result import Result, TimelineEvent
from .units import printable

PROCESS = 1


def render(result: Result) -> str:
    """Returns one track for the host and one for each stream, with complete events in microseconds.

    How many of the run's events are there is in ``otherData``, and beside the process's name.
    """
    tracks: dict[str, list[TimelineEvent]] = {"host": []}
    for event in result.timeline:
        if math.isfinite(event.start_s) and math.isfinite(event.seconds):
            tracks.setdefault(event.track, []).append(event)
    shown = sum(len(events) for events in tracks.values())
    total = max(result.timeline_total, shown)
    coverage = f"{shown} of {total} events"
    name = printable(f"cnn_engine {result.network} {result.variant} on {result.device}")
    events = [
        _metadata("process_name", 0, name=name),
        _metadata("process_labels", 0, labels=coverage),
    ]
    for thread, (track, of_track) in enumerate(tracks.items()):
        events.append(_metadata("thread_name", thread, name=printable(track)))
        events.append(_metadata("thread_sort_index", thread, sort_index=thread))
        events.extend(_complete(of_track, thread))
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "command": printable(result.command),
            "device": printable(result.device_name),
            "events": coverage,
            "run": "the one that times each layer and copy",
        },
    }
    return json.dumps(document, allow_nan=False) + "\n"


def _metadata(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": thread, "args": args}


def _complete(events: list[TimelineEvent], thread: int) -> list[dict[str, Any]]:
    """Returns the events of one track in order, without overlaps.

    Steps of a track follow each other, but CUDA's events resolve about half a microsecond, so that by
    rounding a step can seem to begin before the last one's end. The format has no such events: they would
    be drawn as nested, so the earlier one is cut. ``args`` keeps the time that was measured.
    """
    rows: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: event.start_s):
        start = round(event.start_s * 1e6, 3)
        if rows and rows[-1]["ts"] + rows[-1]["dur"] > start:
            rows[-1]["dur"] = round(start - rows[-1]["ts"], 3)
        rows.append(
            {
                "name": printable(event.name),
                "cat": printable(event.kind),
                "ph": "X",
                "pid": PROCESS,
                "tid": thread,
                "ts": start,
                "dur": round(max(event.seconds, 0.0) * 1e6, 3),
                "args": {"pass": event.batch, "measured_us": event.seconds * 1e6},
            }
        )
    return rows
