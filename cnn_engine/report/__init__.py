"""A result as text, JSON, CSV, Chrome trace and HTML."""

from __future__ import annotations

import os

from ..io.files import write_text
from ..measure.result import Result
from . import csv, html, json, text, trace

__all__ = ["write", "text", "json", "csv", "trace", "html"]

Path = str | os.PathLike[str]

_json, _csv, _trace, _html = json.dumps, csv.render, trace.render, html.render


def write(
    result: Result,
    *,
    json: Path | None = None,
    csv: Path | None = None,
    trace: Path | None = None,
    html: Path | None = None,
) -> None:
    """Writes ``result`` to each path that is given; ``"-"`` is standard output.

    A file appears whole or not at all.

    Raises:
        InputError: a file cannot be written.
    """
    for path, render in (
        (json, _json),
        (csv, _csv),
        (trace, _trace),
        (html, lambda only: _html([only])),
    ):
        if path is not None:
            write_text(path, render(result))
