"""The trace."""

from __future__ import annotations

import json as json_reader

import pytest
from samples import every_result, make_cuda

from cnn_engine.report import trace


@every_result
def test_trace_obeys_the_format(result):
    document = json_reader.loads(trace.render(result), parse_constant=pytest.fail)
    events = document["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} <= {"X", "M"}
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert any(event["name"] == "process_name" for event in events)
    end: dict[int, float] = {}
    for event in complete:
        assert event["tid"] in named
        assert isinstance(event["pid"], int)
        assert event["name"].isprintable()
        assert event["dur"] >= 0
        assert event["ts"] >= end.get(event["tid"], 0.0) - 1e-9  # in order, without overlaps
        end[event["tid"]] = event["ts"] + event["dur"]


def test_trace_has_a_track_for_the_host_and_each_stream_and_says_what_is_left_out():
    document = json_reader.loads(trace.render(make_cuda()))
    events = document["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {0: "host", 1: "cuda:0 stream"}
    assert document["otherData"]["events"] == "5 of 5000 events"
    assert any(e["args"].get("labels") == "5 of 5000 events" for e in events)
    copy, conv = (e for e in events if e["ph"] == "X" and e["tid"] == 1)
    assert (conv["name"], conv["ts"], conv["dur"]) == ("conv1", 20.5, 60.0)
    assert copy["dur"] == pytest.approx(19.5)  # cut where the next begins
    assert copy["args"]["measured_us"] == pytest.approx(20)
