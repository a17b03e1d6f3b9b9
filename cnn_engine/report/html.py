"""One self-contained HTML page with results side by side.

Tables of many layers are sorted and searched by ``page.js``, which is in the page; without it all is there.

This module turns results into what the page shows, in the order of the page; ``charts.py`` makes its charts,
``profile_page.py`` the tables of a profile, and ``page.html`` is the page.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..measure.result import LayerPart, LayerTime, Result
from . import charts, grouping, profile_page, text, units
from .pages import template

if TYPE_CHECKING:
    from ..compare.comparison import Comparison

SUM = "Sum of layers"

#: Rows of layers from which on there are sums by operator and by block, and a script to sort and search.
MANY = 20


@dataclass
class Table:
    """``rows`` of a label and one cell a result."""

    rows: list[tuple[str, list[str]]]

    def differs(self, cells: list[str]) -> bool:
        return len(set(cells)) > 1


@dataclass
class Groups:
    """``rows`` of a label and, for each result, a cell a column; None where a result has no such row."""

    columns: list[str]
    rows: list[tuple[str, list[list[str] | None]]]
    sum: str | None = None  # the label of the last row, where that is the sum of the others


@dataclass
class View:
    """One result on the page: ``key`` is its letter, ``name`` how texts call it."""

    key: str
    name: str
    result: Result
    title: str
    summary: list[tuple[str, str]]
    warnings: list[str]
    steps: str
    scaled: list[charts.Segment]  # on the scale that all results share
    shares: list[charts.Segment]  # on its own scale
    histogram: dict[str, Any] | None
    samples: dict[str, Any] | None
    timelines: list[dict[str, Any]]
    profile: list[profile_page.Activity]
    predictions: list[tuple[str, str, str]]


def render(results: Sequence[Result], comparisons: Sequence[Comparison] = ()) -> str:
    """Returns a page on ``results``, side by side in their order.

    What a result lacks, as one read from an older file may, is left out or shown as ``-``. ``comparisons``
    are of the first result with each of the others, in their order; none: no verdicts are shown.

    Raises:
        InputError: there are none.
    """
    if not results:
        raise InputError("results: expected at least one to show, found none")
    longest = max(map(charts.total, results))
    axis = charts.latency_axis(results)
    alone = len(results) == 1
    views = [_view(index, result, longest, axis, alone) for index, result in enumerate(results)]
    segments = (
        segment
        for view in views
        for lane in (
            view.shares,
            *(lane for chart in view.timelines for lane in chart["lanes"].values()),
        )
        for segment in lane
    )
    layers = _layers(results)
    many = len(layers.rows) > MANY
    page = template("page.html").render(
        title=_title(results[0]) if alone else _compared(results),
        views=views,
        what_ran=_table(dict(text.what_ran(result)) for result in results),
        environment=_table(dict(text.environment(result)) for result in results),
        state=_table(map(text.state, results)),
        phases=_table(map(_phases, results)),
        verdicts=[_verdicts(index, found) for index, found in enumerate(comparisons, 1)],
        timers=_table(map(_timers, results)),
        unlike=len({_images(result) for result in results}) > 1,
        layers=layers,
        summaries=_summaries(results) if many else [],
        script=_script() if many else None,
        copies=_copies(results),
        between=_between(results),
        profile=_table(map(profile_page.summary, results)),
        latency=_table(map(_latency, results)),
        check=_table(map(_check, results)),
        legend=charts.legend(segments),
        colours=charts.COLOURS,
    )
    return page.strip() + "\n"


@cache
def _script() -> dict[str, Any]:
    """Returns the page's script, and the hash by which its policy lets it run, and nothing else."""
    from markupsafe import Markup  # Jinja2's own

    text = files(__package__).joinpath("page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"text": Markup(text), "hash": digest}


def _title(result: Result) -> str:
    """Returns what the window is called: the network, its device and the day."""
    day = f", {result.started[:10]}" if result.started else ""
    return f"{result.network} on {result.device} ({result.device_name}){day}"


def _compared(results: Sequence[Result]) -> str:
    """Returns the title of a page on several results: what they differ in, then what they share."""
    fields: list[Callable[[Result], str]] = [
        lambda result: result.network,
        lambda result: result.variant + (" with reduction" if result.reduction else ""),
        lambda result: result.computes_in,
        lambda result: result.data_mode,
        lambda result: f"batch {units.count(result.batch)}",
        lambda result: f"{result.device} ({result.device_name})",
    ]
    differ = [field for field in fields if len(set(map(field, results))) > 1]
    names = [", ".join(field(result) for field in differ) for result in results]
    shared = [field(results[0]) for field in fields if field not in differ]
    if not differ:  # runs of the same, such as before and after a change
        return f"{len(results)} runs of {', '.join(shared)}"
    return " / ".join(names) + (f": {', '.join(shared)}" if shared else "")


def _view(
    index: int,
    result: Result,
    longest: float,
    axis: tuple[float, float] | None,
    alone: bool,
) -> View:
    reduction = " with reduction" if result.reduction else ""
    accuracy = result.accuracy and units.percent(result.accuracy.top1)
    top5 = result.accuracy and result.accuracy.top5
    verdict = "not made" if result.check is None else ("passed", "FAILED")[not result.check.passed]
    median = result.latency and result.latency.to_dict()["p50"] / 1e3
    return View(
        key=_letters(index),
        name="Result" if alone else f"Result {_letters(index)}",
        result=result,
        title=f"{result.network}, {result.variant}{reduction}, {result.data_mode} on {result.device}",
        summary=[
            ("Forward, all images", units.seconds(result.phases.forward_s)),
            (f"Median latency, batch {units.count(result.batch)}", units.seconds(median)),
            ("Throughput", _throughput(result)),
            ("Accuracy", accuracy or text.accuracy(result)),
            *([("Accuracy, top-5", units.percent(top5))] if top5 is not None else []),
            ("Check", verdict),
        ],
        warnings=_warnings(result),
        steps=units.seconds(text.whole_seconds(result)),
        scaled=charts.bar(result, longest),
        shares=charts.bar(result, charts.total(result)),
        histogram=charts.histogram(result, axis),
        samples=charts.samples(result, axis),
        timelines=charts.timelines(result),
        profile=profile_page.tables(result),
        predictions=[text.predicted(found) for found in result.predictions],
    )


def _warnings(result: Result) -> list[str]:
    """Returns what the reader has to know before any number is read."""
    warnings = text.warnings(result)
    if result.check is not None and not result.check.passed:
        warnings.insert(0, "the check against the reference failed, so nothing was timed")
    capture = result.profile and result.profile.capture
    if capture and not capture.complete:
        warnings.append("profile: incomplete: totals and shares are of what was captured")
    return warnings


def _letters(index: int) -> str:
    """Returns A, B, ... Z, AA, ..."""
    name = ""
    while index >= 0:
        name = chr(ord("A") + index % 26) + name
        index = index // 26 - 1
    return name


def _table(columns: Iterable[dict[str, str]]) -> Table:
    """Makes a table of one dictionary a result; rows are in the order in which they appear."""
    columns = list(columns)
    labels = _merged([list(column) for column in columns])
    return Table([(k, [column.get(k, units.UNKNOWN) for column in columns]) for k in labels])


def _merged(lists: list[list[Any]]) -> list[Any]:
    """Returns all items once, each after those that it follows where it first appears."""
    merged: list[Any] = []
    for items in lists:
        position = 0
        for item in items:
            if item in merged:
                position = merged.index(item) + 1
            else:
                merged.insert(position, item)
                position += 1
    return merged


def _throughput(result: Result) -> str:
    rate = result.throughput_images_per_s
    return units.UNKNOWN if rate is None else f"{units.number(rate)} images/s"


# ---- comparisons ----


def _verdicts(index: int, found: Comparison) -> dict[str, Any]:
    """Returns the table of one comparison with the first result, and what it says besides."""
    rows: list[tuple] = []
    reasons: dict[str, list[str]] = {}
    ratios = [row.ratio for row in found.rows]
    for row, span in zip(found.rows, charts.ratios(ratios), strict=True):
        ratio = row.ratio
        known = ratio is not None and ratio.known
        ends = (
            f"{units.number(ratio.low)} to {units.number(ratio.high)}" if known else units.UNKNOWN
        )
        cells = [
            ("interval", ends),
            ("A", _amount(row.baseline.value, row.unit)),
            (_letters(index), _amount(row.other.value, row.unit)),
        ]
        value = units.number(None if ratio is None else ratio.value)
        rows.append((row.title, row.verdict, value, span, cells))
        if row.reason:
            reasons.setdefault(row.reason, []).append(row.title)
    per = f"; times are of one {found.per}" if found.per != "pass" else ""
    return {
        "key": _letters(index),
        "summary": found.summary(_letters(index)),
        "caption": f"{_letters(index)} ({found.other}) against A ({found.baseline}): ratios with 95 % "
        f"intervals, differences below {units.percent(found.threshold)} do not count{per}",
        "rows": rows,
        "reasons": reasons,
        "warnings": found.warnings,
    }


def _amount(value: float, unit: str) -> str:
    if math.isnan(value):
        return units.UNKNOWN
    return units.seconds(value) if unit == "s" else f"{units.number(value)} {unit}"


# ---- phases ----


def _phases(result: Result) -> dict[str, str]:
    phases = result.phases
    return {
        "Load data": units.seconds(phases.load_data_s),
        "Create network": units.seconds(phases.create_network_s),
        "Load network parameters": units.seconds(phases.load_parameters_s),
        "Create outputs": units.seconds(phases.create_outputs_s),
        "Forward, all images": units.seconds(phases.forward_s),
        "Accuracy": units.seconds(phases.accuracy_s),
        "Free memory": units.seconds(phases.free_memory_s),
        "Total": units.seconds(phases.total_s),
    }


# ---- layers and copies ----


def _images(result: Result) -> int | None:
    """Returns how many images the times of layers and copies are of; None where it is not known."""
    return None if result.interrupted else result.images_done


def _timers(result: Result) -> dict[str, str]:
    """Returns the sum of all rows next to the plain passes, and what it costs to look into passes."""
    timed, whole, plain_s = result.timed_pass, result.whole_pass, result.phases.forward_s
    rows = {"No layer timed, wall time": units.seconds(plain_s)}
    if whole is not None:
        sum_s = text.whole_seconds(result)
        ratio = units.share(sum_s, whole.wall_s)
        rows |= {
            "Plain passes, interleaved with timed ones": units.seconds(whole.wall_s),
            "Sum of layers, copies and what lies between": units.seconds(sum_s),
            "the sum as a share of the plain passes": units.percent(ratio),
            "Times of the device": whole.source,
            "Cost": text.cost_of_timing(result),
        }
    elif timed is not None:  # of a version that did not know it
        rows["Every layer timed, wall time"] = units.seconds(timed.host_s)
        rows["Sum of layers and copies"] = units.seconds(text.steps_seconds(result))
    else:
        return {}
    return rows


def _layers(results: Sequence[Result]) -> Groups:
    """Returns a row per layer."""
    columns: dict[str, Callable[[Result, LayerTime], str]] = {
        "time": lambda result, layer: units.seconds(layer.seconds),
        "share": lambda result, layer: _share(result, layer.seconds),
        "median": lambda result, layer: units.seconds(_median(layer.samples_s)),
        "GFLOP/s": lambda result, layer: units.giga_per_second(layer.flops, layer.seconds),
        "GB/s": lambda result, layer: units.giga_per_second(layer.bytes, layer.seconds),
        "calls": lambda result, layer: units.count(layer.calls),
        "on": lambda result, layer: layer.place,
        "kernel": lambda result, layer: layer.kernel or units.UNKNOWN,
    }
    if any(layer.device_s is not None for result in results for layer in result.layers):
        columns["launch"] = lambda result, layer: units.seconds(
            None if layer.device_s is None else layer.host_s
        )
    found = []
    for result in results:
        layers = {}
        for layer in result.layers:
            layers[layer.name] = layer
            layers |= {
                f"{part.name} (inside {layer.name})": _inside(layer, part) for part in layer.inside
            }
        found.append(layers | {SUM: _sum(result.layers)} if layers else layers)
    return _groups(results, columns, found, SUM)


def _summaries(results: Sequence[Result]) -> list[tuple[str, str, Groups]]:
    """Returns tables of layers taken together: caption, what a row is, and the table."""
    columns: dict[str, Callable[[Result, LayerTime], str]] = {
        "time": lambda result, row: units.seconds(row.seconds),
        "share": lambda result, row: _share(result, row.seconds),
        "GFLOP/s": lambda result, row: units.giga_per_second(row.flops, row.seconds),
        "GB/s": lambda result, row: units.giga_per_second(row.bytes, row.seconds),
        "calls": lambda result, row: units.count(row.calls),
    }
    tables = []
    for way in grouping.WAYS:
        found = [
            {_label(way, row.name): row for row in grouping.grouped(result.layers, way)}
            for result in results
        ]
        if max(map(len, found)) < max(len(result.layers) for result in results):
            table = _groups(results, columns, found)
            tables.append((f"Layers by {way}", way.capitalize(), table))
    return tables


def _label(way: str, name: str) -> str:
    return text.kind_name(name) if way == "operator" else name


def _inside(layer: LayerTime, part: LayerPart) -> LayerTime:
    """Returns a part of a fused layer as a row like a layer's, which the sum leaves out."""
    return LayerTime(
        part.name, part.kind, f"inside {layer.name}", layer.calls, part.seconds, flops=part.flops
    )


def _between(results: Sequence[Result]) -> Groups:
    """Returns a row for what lies between the steps."""
    columns = {
        "time": lambda result, row: units.seconds(row.seconds),
        "share": lambda result, row: _share(result, row.seconds),
        "what it is": lambda result, row: text.BETWEEN.get(row.name, units.UNKNOWN),
    }
    found = [
        {row.name: row for row in r.whole_pass.between} if r.whole_pass else {} for r in results
    ]
    return _groups(results, columns, found)


def _sum(layers: list[LayerTime]) -> LayerTime:
    return LayerTime(
        SUM,
        kind="",
        place=", ".join(sorted({layer.place for layer in layers})),
        calls=sum(layer.calls for layer in layers),
        host_s=sum(layer.seconds for layer in layers),
        flops=sum(layer.flops for layer in layers),
        bytes=sum(layer.bytes for layer in layers),
    )


def _copies(results: Sequence[Result]) -> Groups:
    """Returns a row per copy."""
    columns = {
        "time": lambda result, copy: units.seconds(copy.seconds),
        "share": lambda result, copy: _share(result, copy.seconds),
        "median": lambda result, copy: units.seconds(_median(copy.samples_s)),
        "size": lambda result, copy: units.size(copy.bytes),
        "GB/s": lambda result, copy: units.giga_per_second(copy.bytes, copy.seconds),
        "calls": lambda result, copy: units.count(copy.calls),
        "memory": lambda result, copy: text.MEMORY[copy.pageable],
    }
    found = [{f"{copy.what} {copy.direction}": copy for copy in r.copies} for r in results]
    return _groups(results, columns, found)


def _groups(
    results: Sequence[Result],
    columns: dict[str, Callable[[Result, Any], str]],
    found: list[dict[str, Any]],  # of each result, its steps by name
    last: str | None = None,
) -> Groups:
    rows = []
    for name in _merged([list(steps) for steps in found]):
        row = [
            [cell(result, steps[name]) for cell in columns.values()] if name in steps else None
            for result, steps in zip(results, found, strict=True)
        ]
        rows.append((name, row))
    return Groups(list(columns), rows, last)


def _share(result: Result, seconds: float) -> str:
    return units.percent(units.share(seconds, text.whole_seconds(result)))


def _median(samples: list[float]) -> float | None:
    return statistics.median(samples) if samples else None


# ---- latency ----


def _latency(result: Result) -> dict[str, str]:
    if result.latency is None:
        return {}
    rows = dict(text.latency(result.latency))
    stop = result.stop
    if stop is not None and stop.interval_ms is not None:
        ends = " to ".join(units.seconds(end / 1e3) for end in stop.interval_ms)
        rows["median, 95 % interval within this run"] = ends
    rows["samples"] = units.count(result.latency.count)
    if stop is not None:
        rows["ended because"] = stop.reason
    return rows


# ---- check ----


def _check(result: Result) -> dict[str, str]:
    found = result.check
    if found is None:
        return {"Verdict": "not made"}
    return {
        "Verdict": "passed" if found.passed else "FAILED, nothing was timed",
        "Reference": found.reference,
        "Images compared": units.count(found.images),
        "Largest difference of an output": units.number(found.max_abs_diff),
        "Tolerance": f"{found.tolerance:g}",
        "Top-1 agreement": units.percent(found.top1_agreement),
        "NaN or infinite in the reference": units.count(found.not_finite),
        **dict(text.outputs(found)),
    }
