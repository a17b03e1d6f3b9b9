"""``--collect DIR``: the results of several runs as one table, and as a chart."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError, UnsupportedError, expected
from ..io.files import MOST_JSON_BYTES, atomic_write, parse_json, read_bytes, write_text
from ..report.csv import cell
from ..report.plotting import unavailable
from .roles import DESIGNS

#: Columns that say what was run; runs with the same ones are one row of the table.
KEYS = ("work", "design", "ranks", "members", "preprocessors", "batch", "data", "images", "cpus")
#: Columns of which a row has the mean.
MEANS = (
    "images_per_s", "seconds", "start_up_s", "preprocessing_core_s", "processes_core_s",
    "machines_core_s",
)  # fmt: skip
COLUMNS = (*KEYS, "count", *MEANS, "images_per_s_least", "images_per_s_most", "bound_by", "commit")

STEM = "ensembles"


def row(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a row of :data:`COLUMNS` from one run's report.

    Raises:
        InputError: it is none; says so of ``name``.
    """
    try:
        if document["kind"] != "ensemble":
            raise KeyError("kind")
        core, rate = document["core_s"], document["throughput_images_per_s"]
        environment = document.get("environment") or {}
        found = {
            "work": document["work"],
            "design": document["design"],
            "ranks": document["ranks"],
            "members": len(document["members"]),
            "preprocessors": document["preprocessors"],
            "batch": document["batch"],
            "data": document["data"]["name"],
            "images": document["images"],
            "cpus": len(next(iter(_cores(document)), [])) or None,
            "count": 1,
            "images_per_s": rate,
            "seconds": document["seconds"],
            "start_up_s": document["start_up_s"],
            "preprocessing_core_s": core["preprocessing"],
            "processes_core_s": core["processes"],
            "machines_core_s": core["machines"],
            "images_per_s_least": rate,
            "images_per_s_most": rate,
            "bound_by": document["bound_by"],
            "commit": environment.get("commit"),
        }
        for column, value in found.items():
            if not _fits(column, value):
                raise TypeError(f"{column}: {value!r:.60}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise expected(name or "report", "the report of an ensemble", f"none ({error})") from error
    return found


def _fits(column: str, value: Any) -> bool:
    """Whether a column may have ``value``."""
    if column in ("work", "design"):
        return isinstance(value, str) and (column == "work" or value in DESIGNS)
    if column in ("data", "bound_by", "commit"):
        return value is None or isinstance(value, str)
    if column in ("cpus", *MEANS, "images_per_s_least", "images_per_s_most") and value is None:
        return True
    whole = column in (*KEYS, "count")
    return type(value) in ((int,) if whole else (int, float)) and 0 <= value <= 1e18  # NaN is not


def _cores(document: dict[str, Any]) -> list[list[float]]:
    usages = [rank.get("usage") for rank in document.get("rank_reports", ())]
    return [cores for usage in usages if usage for cores in usage["cores"]]


def read(folder: Path) -> list[dict[str, Any]]:
    """Returns a row for each report in ``folder`` and below; those of interrupted runs are left out.

    Raises:
        InputError: there is none, or a file cannot be read.
    """
    rows = []
    for path in sorted(folder.rglob("*.json")):
        content = read_bytes(path, MOST_JSON_BYTES)
        try:
            document = parse_json(content, str(path), "a report")
        except InputError:
            continue  # some other file
        is_report = isinstance(document, dict) and document.get("kind") == "ensemble"
        if is_report and not document.get("interrupted"):
            rows.append(row(document, str(path)))
    if not rows:
        raise expected(f"--collect {folder}", "reports of cnn-engine ensemble", "none")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for all of ``rows`` with the same :data:`KEYS`, in the order of designs and sizes."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault(tuple(one[key] for key in KEYS), []).append(one)
    found = []
    for same in groups.values():
        joined = dict(same[-1])
        joined["count"] = sum(one["count"] for one in same)
        for column in MEANS:
            known = [one[column] for one in same if one[column] is not None]
            joined[column] = statistics.fmean(known) if known else None
        rates = [one["images_per_s"] for one in same if one["images_per_s"] is not None]
        joined["images_per_s_least"] = min(rates, default=None)
        joined["images_per_s_most"] = max(rates, default=None)
        bounds = [one["bound_by"] for one in same if one["bound_by"]]
        joined["bound_by"] = statistics.mode(bounds) if bounds else None
        found.append(joined)
    designs = list(DESIGNS)
    return sorted(
        found,
        key=lambda one: (
            one["work"], str(one["data"]), one["ranks"], designs.index(one["design"]),
            one["members"], one["preprocessors"], one["batch"],
        ),
    )  # fmt: skip


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Returns ``rows`` as CSV (RFC 4180); unknown values are empty."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, COLUMNS)
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in row.items()} for row in rows)
    return stream.getvalue()


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes ``rows`` as Parquet.

    Raises:
        UnsupportedError: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UnsupportedError(
            f"no Parquet: expected the package pyarrow, found none ({error}); "
            "pip install 'cnn-engine[ensemble]'"
        ) from error
    columns = {column: [one[column] for one in rows] for column in COLUMNS}
    with atomic_write(path, "wb") as file:
        parquet.write_table(pyarrow.table(columns), file)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws images/s and core-seconds of preprocessing against the number of members, a line a design.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if reason := unavailable():
        raise UnsupportedError(reason)
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((one["work"], one["data"], one["ranks"]) for one in rows))
    figure = Figure(figsize=(11, 4.2 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 2, squeeze=False)
    for (work, data, ranks), (rate, cores) in zip(kinds, axes, strict=True):
        some = [
            one for one in rows if (one["work"], one["data"], one["ranks"]) == (work, data, ranks)
        ]
        for number, design in enumerate(dict.fromkeys(one["design"] for one in some)):
            line = [one for one in some if one["design"] == design]
            for panel, column in ((rate, "images_per_s"), (cores, "preprocessing_core_s")):
                points = [(one["members"], one[column]) for one in line if one[column] is not None]
                if points:
                    panel.plot(*zip(*points, strict=True), marker="osD^v"[number % 5], label=design)
        rate.set_ylabel("images/s, to every member")
        cores.set_ylabel("core-seconds of preprocessing")
        for panel in (rate, cores):
            panel.set_title(f"{work}, {data}, {ranks} ranks", fontsize=10)
            panel.set_xlabel("members")
            panel.set_ylim(bottom=0)
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.grid(alpha=0.3)
        rate.legend(fontsize=8)
    with atomic_write(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def collect(folder: Path, output: Path) -> list[str]:
    """Writes ``ensembles.csv``, ``.parquet`` and ``.png`` of the reports in ``folder``.

    Returns:
        a line a file, and one for each that could not be written for want of a package.
    """
    rows = table(read(folder))
    write_text(output / f"{STEM}.csv", as_csv(rows))
    said = [f"{output / STEM}.csv: {len(rows)} rows of {sum(one['count'] for one in rows)} runs"]
    for suffix, write in ((".parquet", write_parquet), (".png", draw)):
        path = output / f"{STEM}{suffix}"
        try:
            write(rows, path)
            said.append(str(path))
        except UnsupportedError as error:
            said.append(f"note: {error}")
    return said
