"""Output files of a run: members' results, and the report as JSON, CSV, trace and page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..io.files import atomic_write, describe_os_error, write_text
from ..report import json as json_report
from ..report.units import printable
from . import collect, page
from .members import accuracy, combination, forget, keep
from .run import Plan, RankReport
from .source import UNKNOWN


def infer(
    plan: Plan, results: list[dict[int, dict[str, Any]]], combine: str, folder: Path | None
) -> dict[str, Any]:
    """Puts the members' probabilities together; writes them where there is a folder.

    Args:
        results: of each rank, what each of its members found.

    Returns:
        ``accuracy`` of each member and of the ensemble, by name, and ``combine``.
    """
    rows, labels = [], None
    found: dict[str, Any] = {}
    for spec in plan.specs:
        parts = [rank[spec.index] for rank in results if spec.index in rank]
        one, labels = parts[0]["probabilities"], parts[0]["labels"]
        for part in parts[1:]:  # replicas had other batches
            mine = ~np.isnan(part["probabilities"]).reshape(len(one), -1).any(1)
            one[mine], labels[mine] = part["probabilities"][mine], part["labels"][mine]
        rows.append(one)
        found[spec.name] = accuracy(one, labels)
        if folder is not None:
            keep(folder, spec, one)
    combined = combination(combine, len(rows), rows[0].ndim - 1)
    together = np.asarray(combined(np.stack(rows)), np.float32)
    if len(rows) > 1:
        found[f"ensemble ({combine})"] = accuracy(together, labels)
    if folder is not None:
        with atomic_write(folder / "ensemble.npy", "wb") as file:
            np.save(file, together)
        forget(folder, len(rows))
    known = labels is not None and (labels > UNKNOWN).any()
    return {"accuracy": found if known else None, "combine": combine}


def trained(plan: Plan, results: list[dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Returns ``training``: the log of each member, and where its weights are."""
    found = {}
    for spec in plan.specs:
        found[spec.name] = next(rank[spec.index] for rank in results if spec.index in rank)
    return {"training": found}


def _json(document: dict[str, Any]) -> str:
    return json.dumps(json_report.finite(document), indent=1, allow_nan=False) + "\n"


def write_json(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Writes the report as standard JSON."""
    write_text(path, _json(document))


def write_last_words(path: Path, document: dict[str, Any]) -> None:
    """Writes the report of a process that a launcher may kill: an unfinished file vanishes."""
    try:
        file = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except (AttributeError, OSError):  # not on Linux, or not of this file system
        write_json(path, document)
        return
    try:
        with os.fdopen(os.dup(file), "w", encoding="utf-8") as text:
            text.write(_json(document))
        path.unlink(missing_ok=True)
        # With a folder's descriptor the link in /proc is followed; for an absolute path it means nothing.
        os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file)
    except OSError as error:
        raise InputError(f"cannot write {path}: {describe_os_error(error)}") from error
    finally:
        os.close(file)


def write(document: dict[str, Any], ranks: list[RankReport], paths: dict[str, str | None]) -> None:
    """Writes the report to those of ``paths`` (``json``, ``csv``, ``trace``, ``html``) that are given."""
    makers = {
        "csv": lambda: collect.as_csv([collect.row(document, "")]),
        "trace": lambda: trace(document, ranks),
        "html": lambda: page.render(document),
    }
    if paths.get("json"):
        write_json(paths["json"], document)
    for kind, make in makers.items():
        if paths.get(kind):
            write_text(paths[kind], make())


def trace(document: dict[str, Any], ranks: list[RankReport]) -> str:
    """Returns the timeline in Chrome's trace format: a process a rank, time in microseconds."""
    rows: list[dict[str, Any]] = []
    shown = total = 0
    for rank in ranks:
        process = rank.rank + 1
        name = printable(f"rank {rank.rank}: {rank.role}")
        rows.append(
            {"name": "process_name", "ph": "M", "pid": process, "tid": 1, "args": {"name": name}}
        )
        shown += len(rank.timeline)
        total += rank.events
        for event in rank.timeline:
            rows.append({
                "name": printable(event.name), "cat": event.kind, "ph": "X", "pid": process, "tid": 1,
                "ts": event.start_s * 1e6, "dur": max(event.seconds, 0.0) * 1e6,
                "args": {"step": event.batch},
            })  # fmt: skip
        for at, cores in zip(
            *((rank.usage or {}).get(k, ()) for k in ("times_s", "cores")), strict=True
        ):
            rows.append({
                "name": "busy cores", "ph": "C", "pid": process, "tid": 1, "ts": at * 1e6,
                "args": {"cores": sum(cores)},
            })  # fmt: skip
    other = {"command": printable(document["command"]), "events": f"{shown} of {total} events"}
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": other}) + "\n"
