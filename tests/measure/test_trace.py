"""The trace: against the rules of its format, on runs that are made here and on some that need a GPU.

The rules are those of "Trace Event Format" (Chromium's documentation of the JSON that its tracing writes):
the JSON object format, complete events (``X``) and metadata events (``M``), which are all that we write.
``tests/commands/test_browser.py`` opens traces in Perfetto itself.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import every_result, make, make_cuda, make_profiled

import cnn_engine
from cnn_engine import report, run
from cnn_engine.measure import step_times
from cnn_engine.measure.cupti import activity
from cnn_engine.measure.result import Result, TimelineEvent
from cnn_engine.report import trace

#: What a metadata event of each name has in ``args``.
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def problems(document: str) -> list[str]:
    """Returns each rule that ``document`` breaks, and where; empty for a trace that any reader takes."""
    found: list[str] = []

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON")

    try:
        trace_object = json.loads(document, parse_constant=refuse)
    except ValueError as error:
        return [f"not JSON: {error}"]
    if not isinstance(trace_object, dict) or not isinstance(trace_object.get("traceEvents"), list):
        return ["expected an object with a list called traceEvents"]
    if trace_object.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append("displayTimeUnit is neither ms nor ns")
    named: set[tuple[int, int]] = set()
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for index, event in enumerate(trace_object["traceEvents"]):
        where = f"event {index}"
        if not isinstance(event, dict):
            found.append(f"{where} is no object")
            continue
        where += f" ({event.get('name')})"
        for key in ("name", "ph"):
            if not isinstance(event.get(key), str):
                found.append(f"{where}: {key} is no text")
        for key in ("pid", "tid"):
            if type(event.get(key)) is not int or event[key] < 1:
                # 0 is the kernel's idle thread, with which Perfetto confuses the process's first.
                found.append(f"{where}: {key} is no whole number above 0")
        if not isinstance(event.get("args", {}), dict):
            found.append(f"{where}: args is no object")
            continue
        track = (event.get("pid"), event.get("tid"))
        if event.get("ph") == "M":
            name, kind = METADATA.get(event.get("name"), (None, object))
            if name is None:
                found.append(f"{where}: metadata of an unknown name")
            elif type(event.get("args", {}).get(name)) is not kind:
                found.append(f"{where}: args lacks {name}, which is {kind.__name__}")
            elif event["name"] == "thread_name":
                if track in named:
                    found.append(f"{where}: a second name for track {track}")
                named.add(track)
        elif event.get("ph") == "X":
            if track not in named:
                found.append(f"{where}: on track {track} before its name")
            if not isinstance(event.get("cat"), str):
                found.append(f"{where}: cat is no text")
            if not is_number(event.get("ts")) or event["ts"] < 0:
                found.append(f"{where}: ts is no time")
            elif not is_number(event.get("dur")) or event["dur"] < 0:
                found.append(f"{where}: dur is no duration")
            else:
                start, duration = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
                tracks.setdefault(track, []).append((start, start + duration, where))
        else:
            found.append(f"{where}: ph is neither M nor X")
    for track, spans in tracks.items():
        found += overlaps(track, spans)
    return found


def overlaps(track: tuple[int, int], spans: list[tuple[int, int, str]]) -> list[str]:
    """Returns which of a track's events begin within another and end after it."""
    found = []
    around: list[tuple[int, int, str]] = []
    for start, end, where in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= start:
            around.pop()
        if around and end > around[-1][1]:
            found.append(f"{where} overlaps {around[-1][2]} on track {track}")
        around.append((start, end, where))
    return found


def complete(document: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(document)["traceEvents"] if event["ph"] == "X"]


def names(document: str) -> dict[int, str]:
    """Returns the name of each track."""
    events = json.loads(document)["traceEvents"]
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def on(track: str, *spans: tuple[float, float]) -> list[TimelineEvent]:
    """Returns an event of ``track`` from and to the microseconds of each of ``spans``."""
    return [
        TimelineEvent(f"step {i}", "conv", track, start * 1e-6, (end - start) * 1e-6, 0)
        for i, (start, end) in enumerate(spans)
    ]


def spans_by_track(result: Result) -> dict[str, list[tuple[float, float]]]:
    """Returns the trace's events on each track, as microseconds from and to."""
    document = trace.render(result)
    assert problems(document) == []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names(document).values()}
    for event in complete(document):
        end = round(event["ts"] + event["dur"], 3)
        found[names(document)[event["tid"]]].append((event["ts"], end))
    return found


# ---- the rules ----


def edited(**changes) -> str:
    """Returns a good trace in which its last event has ``changes``."""
    document = json.loads(trace.render(make()))
    document["traceEvents"][-1].update(changes)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("[", "not JSON"),
        ("[]", "expected an object"),
        ('{"traceEvents": 1}', "expected an object"),
        ('{"traceEvents": [], "displayTimeUnit": "us"}', "displayTimeUnit"),
        ('{"traceEvents": [7]}', "is no object"),
        (edited(ts=math.nan), "NaN is not JSON"),
        (edited(ts="1"), "ts is no time"),
        (edited(ts=-1), "ts is no time"),
        (edited(dur=None), "dur is no duration"),
        (edited(dur=True), "dur is no duration"),
        (edited(pid="1"), "pid is no whole number"),
        (edited(tid=0), "tid is no whole number above 0"),
        (edited(tid=0.5), "tid is no whole number"),
        (edited(tid=9), "before its name"),
        (edited(ph="B"), "ph is neither"),
        (edited(ph="M"), "unknown name"),
        (edited(ph="M", name="thread_name"), "args lacks name"),
        (edited(ph="M", name="thread_name", args={"name": "host"}), "a second name"),
        (edited(cat=1), "cat is no text"),
        (edited(name=None), "name is no text"),
        (edited(args=[]), "args is no object"),
        (edited(ts=5), "overlaps"),
    ],
)
def test_a_trace_that_breaks_a_rule_is_found(document, problem):
    assert any(problem in found for found in problems(document)), problems(document)


def test_nested_events_break_no_rule():
    assert problems(edited(ts=1, dur=2)) == []  # within the event before it


# ---- results ----


@every_result
def test_trace_obeys_the_format(result):
    document = trace.render(result)
    assert problems(document) == []
    for event in complete(document):
        assert event["name"].isprintable()


@pytest.mark.parametrize("variant", ["pad", "fused"])
def test_trace_of_a_run_on_this_cpu(variant):
    images = np.random.default_rng(3).integers(0, 256, (10, 3, 32, 32), np.uint8)
    engine = cnn_engine.Engine("cifar10", device="cpu", variant=variant)
    result = engine.profile(images, batch=4, iterations=1, check=False)
    engine.close()
    document = trace.render(result)
    assert problems(document) == []
    inside = "host, inside network (scaled)"
    tracks = names(document)
    assert set(tracks.values()) == ({"host", inside} if variant == "fused" else {"host"})
    assert len(complete(document)) == min(result.timeline_total, step_times.TIMELINE_EVENTS)
    shown = len(complete(document))
    parts = [event for event in complete(document) if tracks[event["tid"]] == inside]
    events = [event for event in complete(document) if tracks[event["tid"]] == "host"]
    if variant == "fused":  # the parts of each pass fill its one step
        of_a_pass = [event for event in parts if event["args"]["pass"] == 1]
        assert [event["name"] for event in of_a_pass] == [p.name for p in result.layers[0].inside]
        assert sum(event["dur"] for event in of_a_pass) == pytest.approx(events[1]["dur"], abs=0.01)
    assert {event["name"] for event in events} == {layer.name for layer in result.layers}
    passes = len(events) // len(result.layers)
    assert {event["args"]["pass"] for event in events} == set(range(passes))
    # The first passes are those of a full batch, whose samples the layers have.
    samples = [second for layer in result.layers for second in layer.samples_s]
    full = events[: len(samples)]
    total_us = sum(samples) * 1e6
    # Samples are less what reading the clock costs; events are as they were read.
    shown_us = sum(event["dur"] for event in full)
    assert total_us - 1e-3 * len(full) <= shown_us <= total_us + 1.0 * len(full)
    said = json.loads(document)["otherData"]["events"]
    assert said == f"{shown} of {result.timeline_total} events"


def test_trace_of_a_long_run_is_capped_and_says_so(monkeypatch):
    monkeypatch.setattr(step_times, "TIMELINE_EVENTS", 50)
    images = np.zeros((10, 3, 32, 32), np.uint8)
    engine = cnn_engine.Engine("cifar10", device="cpu", variant="fused")
    result = engine.profile(images, batch=1, iterations=1, check=False)
    engine.close()
    document = trace.render(result)
    assert problems(document) == []
    assert len(complete(document)) == 50 < result.timeline_total
    said = f"50 of {result.timeline_total} events"
    assert json.loads(document)["otherData"]["events"] == said
    labels = [e["args"].get("labels") for e in json.loads(document)["traceEvents"]]
    assert said in labels


@pytest.mark.gpu
@pytest.mark.parametrize("data_mode", ["resident", "transfer", "managed", "stream"])
def test_trace_and_page_of_a_run_on_the_gpu(data_mode, tmp_path):
    paths = {name: tmp_path / f"out.{name}" for name in ("trace", "html", "json")}
    arguments = ["--device", "cuda", "--data-mode", data_mode, "--data", "synthetic", "--quiet"]
    arguments += ["--images", "64", "--batch", "16", "--iterations", "3", "--profile"]
    if data_mode != "stream":
        arguments += ["--variant", "pad"]
    for name, path in paths.items():
        arguments += [f"--{name}", str(path)]
    assert run.main(arguments) == 0
    document = paths["trace"].read_text("utf-8")
    assert problems(document) == []
    tracks = set(names(document).values())
    timed = {track for track in tracks if "(profiled)" not in track}
    assert "host" in timed
    assert any(track.startswith("cuda:0 stream") for track in timed)
    assert not any(track.endswith(")") for track in timed)  # by no more than its resolution
    if activity.unavailable() is None:
        assert "host CUDA API (profiled)" in tracks
        kinds = {e["cat"] for e in complete(document) if "profiled" in names(document)[e["tid"]]}
        # Managed memory is migrated, not copied.
        wanted = {"kernel", "api"} if data_mode == "managed" else {"kernel", "copy", "api"}
        assert wanted <= kinds
    read = report.json.load(paths["json"])
    assert report.html.render([read]) == paths["html"].read_text("utf-8")


def test_trace_has_a_track_for_the_host_and_each_stream_and_says_what_is_left_out():
    document = trace.render(make_cuda())
    assert problems(document) == []
    assert names(document) == {1: "host", 2: "cuda:0 stream"}
    events = json.loads(document)["traceEvents"]
    assert json.loads(document)["otherData"]["events"] == "5 of 5000 events"
    assert any(e["args"].get("labels") == "5 of 5000 events" for e in events)
    copy, conv = (e for e in events if e["ph"] == "X" and e["tid"] == 2)
    assert (conv["name"], conv["ts"], conv["dur"]) == ("conv1", 20.5, 60.0)
    assert copy["dur"] == pytest.approx(19.5)  # cut where the next begins
    assert copy["args"]["measured_us"] == pytest.approx(20)


def test_trace_has_kernels_copies_and_api_calls():
    document = trace.render(make_profiled())
    assert problems(document) == []
    assert list(names(document).values()) == [
        "host", "host API", "cuda:0 stream 1", "cuda:0 stream 2", "host CUDA API (profiled)",
        "cuda:0 stream 7 (profiled)",
    ]  # fmt: skip
    kinds = {(names(document)[e["tid"]], e["cat"]) for e in complete(document)}
    assert {
        ("host", "copy"), ("host", "api"), ("host", "conv"), ("host API", "api"),
        ("cuda:0 stream 1", "copy"), ("cuda:0 stream 2", "conv"),
        ("host CUDA API (profiled)", "api"), ("cuda:0 stream 7 (profiled)", "kernel"),
    } == kinds  # fmt: skip


def test_trace_says_when_events_are_left_out():
    far = TimelineEvent("far", "conv", "host", 1e12, 1.0, 0)
    early = TimelineEvent("early", "conv", "host", -1.0, 1.0, 0)
    result = make(timeline=[*on("host", (0, 1)), far, early], timeline_total=7000)
    document = trace.render(result)
    assert [event["name"] for event in complete(document)] == ["step 0"]
    assert json.loads(document)["otherData"]["events"] == "1 of 7000 events"


# ---- overlaps ----


def test_calls_on_the_host_nest_and_the_work_of_a_stream_does_not():
    spans = [(0.0, 10.0), (2.0, 8.0), (3.0, 4.0), (9.0, 10.0), (10.0, 12.0)]
    assert spans_by_track(make(timeline=on("host", *spans)))["host"] == spans
    found = spans_by_track(make(timeline=on("gpu stream", (0, 10), (2, 8), (10, 12))))
    assert found["gpu stream"] == [(0, 10), (10, 12)]
    assert found["gpu stream (2)"] == [(2, 8)]


def test_steps_that_seem_to_overlap_by_rounding_follow_each_other():
    found = spans_by_track(make(timeline=on("gpu stream", (0, 10.4), (10, 20), (19.5, 30))))
    assert found["gpu stream"] == [(0, 10), (10, 19.5), (19.5, 30)]


def test_a_cut_call_stays_within_the_one_around_it():
    found = spans_by_track(make(timeline=on("host", (0, 100), (10, 20), (19.5, 30), (50, 60))))
    assert found["host"] == [(0, 100), (10, 19.5), (19.5, 30), (50, 60)]


time_us = st.floats(0, 50).map(lambda value: round(value, 3))


@given(
    st.lists(
        st.tuples(st.sampled_from(["host", "host API", "stream 1", "stream 2"]), time_us, time_us),
        max_size=30,
    )
)
def test_any_timeline_becomes_a_trace_that_loses_no_event(drawn):
    timeline = [e for track, start, length in drawn for e in on(track, (start, start + length))]
    document = trace.render(make(timeline=timeline, timeline_total=len(timeline)))
    assert problems(document) == []
    assert len(complete(document)) == len(timeline)
    measured = sorted(event["args"]["measured_us"] for event in complete(document))
    assert measured == sorted(event.seconds * 1e6 for event in timeline)
    for event in complete(document):  # nothing is cut by more than the clock's resolution
        assert event["dur"] >= event["args"]["measured_us"] - 1.0011
