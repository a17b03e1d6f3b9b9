"""Layers, copies and the time between as CSV (RFC 4180).

A header, one row per layer, each followed by the parts inside of it, then one row per copy and one per gap
between the steps. All but ``inside`` add up to the pass. Cells that do not apply, or are not
known, are empty.
"""

from __future__ import annotations

import csv
import io
import math

from ..measure.result import Result
from .text import whole_seconds
from .units import per_second, printable, share

#: Column -> its meaning.
COLUMNS = {
    "section": "`layer`, `inside` (a part of the fused layer above; do not add it), `copy` or `between`",
    "name": "the layer's name, what was copied, or what lies between",
    "kind": "the layer's kind, such as `conv`; `copy`",
    "place": "`cpu` or `cuda`: where the layer ran",
    "direction": "of a copy: `h2d`, host to device, or `d2h`",
    "calls": "calls that the other columns add up",
    "seconds": "time of the work itself: on the device where there is one, else on the host",
    "host_s": "time of the calls on the host; for a layer on a GPU, of its launches",
    "device_s": "time on the device; empty for a CPU",
    "share": "`seconds` as a fraction of all layers, copies and what lies between",
    "flops": "operations of all calls; a multiply-add is two",
    "bytes": "bytes of all calls, each tensor counted once",
    "flops_per_second": "`flops / seconds`",
    "bytes_per_second": "`bytes / seconds`",
}


def render(result: Result) -> str:
    """Returns the layers, copies and rest of ``result`` as CSV with the columns :data:`COLUMNS`."""
    total = whole_seconds(result)
    rows = []
    for layer in result.layers:
        row = {
            "section": "layer",
            "name": layer.name,
            "kind": layer.kind,
            "place": layer.place,
            "calls": layer.calls,
            "seconds": layer.seconds,
            "host_s": layer.host_s,
            "device_s": layer.device_s,
            "share": share(layer.seconds, total),
            "flops": layer.flops,
            "bytes": layer.bytes,
            "flops_per_second": per_second(layer.flops, layer.seconds),
            "bytes_per_second": per_second(layer.bytes, layer.seconds),
        }
        rows.append(row)
        for part in layer.inside:
            row = {
                "section": "inside",
                "name": part.name,
                "kind": part.kind,
                "place": layer.place,
                "calls": layer.calls,
                "seconds": part.seconds,
                "share": share(part.seconds, total),
                "flops": part.flops,
                "flops_per_second": per_second(part.flops, part.seconds),
            }
            rows.append(row)
    rows += [
        {
            "section": "copy",
            "name": copy.what,
            "kind": "copy",
            "direction": copy.direction,
            "calls": copy.calls,
            "seconds": copy.seconds,
            "device_s": copy.seconds,
            "share": share(copy.seconds, total),
            "bytes": copy.bytes,
            "bytes_per_second": per_second(copy.bytes, copy.seconds),
        }
        for copy in result.copies
    ]
    if result.whole_pass is not None:
        rows += [
            {
                "section": "between",
                "name": row.name,
                "seconds": row.seconds,
                "share": share(row.seconds, total),
            }
            for row in result.whole_pass.between
        ]
    document = io.StringIO()
    writer = csv.DictWriter(document, COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in row.items()} for row in rows)
    return document.getvalue()


def cell(value: object) -> object:
    """Returns ``value`` as the text of a cell, empty where it is not known.

    Text that a spreadsheet would take for a formula begins with an apostrophe (OWASP, "CSV Injection").
    """
    if isinstance(value, str):
        text = printable(value)
        return f"'{text}" if value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return value
