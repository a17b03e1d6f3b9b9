"""The HTML page."""

from __future__ import annotations

import json as json_reader
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import CASES, every_result, make, make_bare, make_cuda, make_profiled, make_taken_apart

from cnn_engine.compare import comparison
from cnn_engine.errors import InputError
from cnn_engine.measure.result import Latency, Result, TimelineEvent
from cnn_engine.measure.statistics import Estimate
from cnn_engine.report import charts, html, json


class Page(HTMLParser):
    """Checks that elements nest, and collects what a page refers to and what it shows."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.shown: list[str] = []
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())


@every_result
def test_html_is_self_contained_and_whole(result):
    document = html.render([result])
    page = Page(document)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    identifiers = [value for _, name, value in page.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href"):
            assert value.startswith("#"), (tag, value)
            assert value[1:] in identifiers
        if name in ("x", "width") and value.endswith("%"):
            assert 0 <= float(value[:-1]) <= 100.01, (tag, name, value)
    style = document.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    document.encode()
    for section in ("What ran", "Phases", "Layers", "Latency", "Timeline", "Check"):
        assert section in page.text


def test_html_escapes_what_comes_from_outside():
    document = html.render([CASES["hostile"]])
    assert "<script" not in document
    assert "\x1b" not in document
    page = Page(document)
    assert "<script>alert(1)</script>&\"'\\x1b[31m\\n\\udc80" in page.text
    assert "{{ 7*7 }}" in page.text  # text, not a template


def test_html_shows_results_side_by_side():
    document = html.render([make(), make_cuda(), make_bare()])
    page = Page(document)
    for shown in (
        "A cifar10, pad with reduction, resident on cpu",
        "B cifar10, if, transfer on cuda:0",
        "360.0 ms",
        "conv1 input h2d",
        "78.49 %",
        "first 2 passes, 5 of 5,000 events",
        "the GPU is shared",
        "All on one scale",
    ):
        assert shown in page.text, shown
    assert page.text.index("pad1") < page.text.index("relu1")
    with pytest.raises(InputError, match=r"results: expected at least one to show, found none"):
        html.render([])


def test_html_keeps_order_when_results_have_different_layers():
    merged = html._merged([["conv1", "relu1", "fc"], ["pad1", "conv1", "pool1", "fc"]])
    assert merged == ["pad1", "conv1", "pool1", "relu1", "fc"]
    assert [html._letters(i) for i in (0, 25, 26, 701, 702)] == ["A", "Z", "AA", "ZZ", "AAA"]


def test_html_histogram_counts_every_sample_once():
    samples = [*np.random.default_rng(1).gamma(2, 1, 1000), 1e6]
    result = make(latency=Latency(samples))
    found = charts.histogram(result, charts.latency_axis([result]))
    counted = sum(int(bin["title"].rpartition(": ")[2].split()[0]) for bin in found["bins"])
    beyond = int(found["beyond"].split()[0])
    assert counted + beyond == len(samples)
    assert 1 <= beyond <= 10


# ---- tables ----


class Tables(HTMLParser):
    """Collects tables by caption: each row's cells, the label first."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] = []
        self.text: list[str] | None = None
        self.caption = ""
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        if tag in ("td", "th", "caption"):
            self.text = []

    def handle_data(self, data):
        if self.text is not None:
            self.text.append(data)

    def handle_endtag(self, tag):
        if tag in ("td", "th", "caption"):
            text, self.text = " ".join("".join(self.text).split()), None
            if tag == "caption":
                self.caption = text
            else:
                self.rows[-1].append(text)
        elif tag == "table":
            assert self.caption not in self.found, "two tables of one caption"
            self.found[self.caption] = self.rows

    def row(self, caption: str, label: str) -> list[str]:
        """Returns the cells of a row of the table whose caption begins so."""
        rows = next(rows for name, rows in self.found.items() if name.startswith(caption))
        return next(row[1:] for row in rows if row[0] == label)


def tables(*results: Result, comparisons=()) -> Tables:
    return Tables(html.render(results, comparisons))


def test_html_shows_the_state_of_the_machine_with_units():
    found = tables(make_profiled(), make())
    state = "Read right after the run"
    for label, cell in {
        "GPU SM clock": "1755 MHz",
        "GPU max SM clock": "1980 MHz",
        "GPU power": "412.5 W",
        "GPU temperature": "61 \N{DEGREE SIGN}C",
        "GPU throttled": "power cap",
        "GPU other processes": "2",
        "CPU governor": "performance",
        "CPU turbo": "no",
    }.items():
        assert found.row(state, label) == [cell, "-"]
    labels = [row[0] for row in next(v for k, v in found.found.items() if k.startswith(state))]
    assert "GPU memory clock" not in labels  # not known of either
    environment = [row[0] for row in found.found["Environment"]]
    assert not {"gpu state", "cpu state", "warnings"} & set(environment)
    assert not any(caption.startswith(state) for caption in tables(make()).found)


def test_html_says_first_what_to_beware_of():
    results = [make(), make_profiled(), CASES["check failed"], CASES["interrupted"]]
    page = Page(html.render(results)).text
    warnings = page[page.index("Before you trust") : page.index("Forward, all images")]
    for warning in (
        "B GPU: clocks held down by power cap (1755 of 1980 MHz)",
        "B profile: incomplete: totals and shares are of what was captured",
        "C the check against the reference failed, so nothing was timed",
        "D interrupted: 300 of 1,102 images done",
    ):
        assert warning in warnings
    assert "A " not in warnings.partition("numbers")[2].partition("A cifar10")[0]
    assert "Before you trust" not in Page(html.render([make()])).text


def test_html_shows_what_the_timers_cost():
    found = tables(make_profiled(), make(), make_taken_apart())
    caption = "How the rows add up"
    assert found.row(caption, "No layer timed, wall time") == ["500.0 ms", "-", "500.0 ms"]
    assert found.row(caption, "Every layer timed, wall time") == ["550.0 ms", "-", "-"]
    assert found.row(caption, "Sum of layers and copies")[0] == "150.0 us"
    of_all = found.row(caption, "Sum of layers, copies and what lies between")
    assert of_all == ["-", "-", "65.00 us"]
    assert found.row(caption, "the sum as a share of the plain passes")[2] == "101.56 %"
    assert "1.050 times" in found.row(caption, "Cost")[2]


def test_html_shows_what_lies_between_and_what_is_inside():
    found = tables(make_taken_apart(), make())
    layers = "Time of each layer"
    inside = found.row(layers, "conv1+relu1+pool1 (inside network)")
    assert inside[:2] == ["10.00 us", "15.38 %"]
    assert inside[6] == "inside network"
    assert found.row(layers, "Sum of layers")[0] == "13.00 us"  # what is inside is counted once
    assert found.row("Time of a pass that is neither", "staging")[:2] == ["40.00 us", "61.54 %"]
    assert found.row("Copies between", "images h2d")[6] == "pageable"
    bar = charts.bar(make_taken_apart(), 65e-6)
    assert [segment.name for segment in bar] == [
        "conv1+relu1+pool1", "softmax", "images h2d", "staging", "host",
    ]  # fmt: skip
    assert bar[-1].x + bar[-1].width == pytest.approx(100)


def test_html_shows_medians_sums_and_when_the_timing_stopped():
    found = tables(make_profiled(), make_cuda())
    conv1 = found.row("Time of each layer", "conv1")
    assert conv1[:3] == ["60.00 us", "40.00 %", "20.00 us"]
    assert conv1[9:12] == ["6.000 ms", "15.38 %", "-"]  # a file without samples
    assert found.row("Time of each layer", "Sum of layers")[9] == "36.00 ms"
    assert found.row("Copies between", "images h2d")[2] == "30.00 us"
    latency = "Wall time of one pass"
    assert found.row(latency, "median, 95 % interval within this run") == [
        "1.045 ms to 1.055 ms",
        "-",
    ]
    assert found.row(latency, "ended because")[0] == "the median's 95 % interval is within 1%"


def test_html_shows_what_filled_the_time():
    document = html.render([make_profiled(), make()])
    found = Tables(document)
    assert found.row("In sum", "Times come from") == ["activity records of CUPTI", "-"]
    captured = found.row("In sum", "Captured")[0]
    assert captured.startswith("2 of 3 launches")
    assert "INCOMPLETE" in captured
    kernel = "conv2d_tiled_kernel<float, 5, Shape<32, 32, 3>>"
    assert found.row("A: GPU activities", kernel) == [
        "60.00 %", "60.00 %", "60.00 us", "3", "20.00 us", "10.00 us", "30.00 us",
    ]  # fmt: skip
    assert found.row("A: CUDA API calls", "cudaLaunchKernel")[-2:] == ["-", "-"]
    assert found.row("A: Kernels by layer", "conv1")[6:] == [
        "8x8x2",
        "32x4x1",
        "96",
        "49.15 kB",
        kernel,
    ]
    assert found.row("A: Copies by what they move", "images")[:4] == [
        "h2d",
        "pinned",
        "3.000 MB",
        "85.71",
    ]
    assert found.row("A: Managed memory", "h2d migration")[0] == "gpu fault"
    assert "Above the line: 90 % of the time, in 2 of 3 rows." in Page(document).text
    assert document.count('class="line"') == 2  # GPU activities and API calls
    assert "What filled the time" not in html.render([make()])


def test_html_shows_verdicts_on_several_results():
    rng = np.random.default_rng(5)
    slow, fast = (make(latency=Latency(list(rng.normal(scale, 0.01, 400)))) for scale in (2.0, 1.0))
    verdict = comparison.compare(slow, fast, ("slow.json", "fast.json"))
    found = tables(slow, fast, comparisons=[verdict])
    caption = "B (fast.json) against A (slow.json)"
    p50 = found.row(caption, "pass p50")
    assert p50[0] == "faster"  # first, where a phone shows it
    assert 0.49 < float(p50[1]) < 0.51
    low, high = (float(end) for end in p50[3].split(" to "))
    assert low < float(p50[1]) < high
    assert found.row(caption, "conv1")[0] == "cannot tell"
    other_way = tables(fast, slow, comparisons=[comparison.compare(fast, slow)])
    assert other_way.row("B (", "pass p50")[0] == "slower"
    page = html.render([slow, fast], [verdict])
    assert re.search(r"Cannot tell, no raw samples: .*conv1", Page(page).text)
    assert page.count("B is faster than A") == 1
    assert page.index("B is faster than A") < page.index("<article>")  # above what was run


def test_html_charts_the_profiled_run_apart():
    timed, profiled = charts.timelines(make_profiled())
    assert list(timed["lanes"]) == ["host", "host API", "cuda:0 stream 1", "cuda:0 stream 2"]
    assert list(profiled["lanes"]) == ["host CUDA API", "cuda:0 stream 7"]
    assert timed["caption"] == "layers timed: first 3 passes, 18 of 24 events"
    assert profiled["caption"] == "profiled: first 3 passes, 6 of 24 events"
    assert profiled["lanes"]["host CUDA API"][0].x == 0  # on its own axis


def test_html_leaves_out_passes_for_which_there_is_no_room():
    events = [
        TimelineEvent("conv1", "conv", "host", index * 1e-3, 1e-4, index // 180)
        for index in range(900)
    ]
    (chart,) = charts.timelines(make(timeline=events, timeline_total=5000))
    assert chart["caption"] == "layers timed: first 2 passes, 360 of 5,000 events"


# ---- results that were read ----


def read_back(result: Result) -> Result:
    return Result.from_dict(json_reader.loads(json.dumps(result)))


def test_html_of_a_result_read_from_json_is_the_same():
    result = make_profiled()
    assert html.render([read_back(result)]) == html.render([result])


def test_html_of_an_older_file_leaves_out_what_it_lacks():
    document = make_profiled().to_dict()
    for key in ("latency_samples_ms", "timeline", "timed_pass", "pass", "stop", "profile"):
        del document[key]
    for step in (*document["layers"], *document["copies"]):
        del step["samples_s"]
    document["environment"] = {"cpu": "A CPU"}
    page = Page(html.render([Result.from_dict(document)])).text
    assert "No pass of a full batch was timed." in page
    assert "No step was timed." in page
    assert "State of the machine" not in page


junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
junk |= st.lists(junk, max_size=3) | st.dictionaries(st.text(max_size=5), junk, max_size=3)


@settings(derandomize=True)
@given(st.data())
def test_html_of_any_document_is_a_page_or_an_error_of_one_line(data):
    document = json_reader.loads(json.dumps(make_profiled()))
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(junk)
    try:
        result = Result.from_dict(document)
    except InputError as error:
        assert "\n" not in str(error)
        return
    Page(html.render([result]))


def test_html_begins_with_the_result_and_ends_with_the_settings():
    text = Page(html.render([make()])).text
    order = [text.rindex(f" {name} ") for name in ("Layers", "Latency", "Phases", "What ran")]
    assert order == sorted(order)
    assert "Result A" not in html.render([make()])
    assert 'class="key"' not in html.render([make()])


def test_html_title_says_network_device_and_day():
    document = html.render([make(started="2026-11-21T10:00:00Z")])
    title = document.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("cifar10 on cpu (")
    assert ", 2026-11-21 - cnn_engine" in title


def test_a_page_on_several_results_is_titled_by_what_is_compared():
    pad = make(variant="pad", reduction=True, batch=4)
    title = (
        html.render([make(variant="if", reduction=False, batch=4), pad])
        .partition("<h1>")[2]
        .partition("</h1>")[0]
    )
    assert title.startswith("if / pad with reduction: cifar10, float32, resident, batch 4, cpu (")
    assert "<h1>2 runs of cifar10, " in html.render([pad, pad])


def test_bars_of_many_layers_are_by_operator():
    few = make()
    layers = [
        replace(few.layers[0], name=f"conv{i}", kind=("conv", "relu")[i % 2]) for i in range(30)
    ]
    assert [one.name for one in charts.bar(make(layers=layers[:3]), 1.0)] == [
        "conv0",
        "conv1",
        "conv2",
    ]
    many = charts.bar(make(layers=layers), 1.0)
    assert sorted(one.name for one in many) == ["Conv", "ReLU"]
    assert sum(one.width for one in many) == pytest.approx(100 * sum(row.seconds for row in layers))


def test_a_histogram_needs_twenty_samples():
    for count, shown in ((19, False), (20, True)):
        result = make(latency=Latency(list(np.linspace(1, 2, count))))
        assert (charts.histogram(result, charts.latency_axis([result])) is not None) == shown


def test_kernels_are_named():
    rows = [replace(make().layers[0], kernel="winograd4")]
    assert tables(make(layers=rows)).row("Time of each layer", rows[0].name)[6:8] == [
        "cpu",
        "winograd4",
    ]


def test_ratios_lie_on_one_axis_about_one():
    def ratio(value, low, high):
        return Estimate(value, low, high)

    half, same, unknown = charts.ratios([ratio(0.5, 0.4, 0.6), ratio(1.0, 0.9, 1.1), None])
    assert unknown is None
    assert same["value"] == pytest.approx(50)
    assert 0 < half["low"] < half["value"] < half["high"] < 50
    assert same["low"] < 50 < same["high"] <= 100


def test_samples_over_time_share_the_axis_of_the_histograms():
    rising = make(latency=Latency(list(np.linspace(1, 2, 1000))))
    other = make(latency=Latency([4.0] * 10))
    axis = charts.latency_axis([rising, other])
    assert axis[0] == 1
    assert axis[1] >= 4
    heights = [float(point.split(",")[1]) for point in charts.samples(rising, axis)["line"].split()]
    assert heights == sorted(heights, reverse=True)  # SVG counts downwards: later passes lie higher
    assert charts.samples(make(latency=None), None) is None


def test_captions_wrap_where_a_table_is_wider_than_the_screen():
    """A caption is as wide as its table, and would be cut off on a phone: its text has a span."""
    folder = Path(html.__file__).parents[1]
    text = "".join(path.read_text("utf-8") for path in folder.rglob("*.html"))
    captions = re.findall(r"<caption>(?:<span>)?", text)
    assert len(captions) > 10
    assert set(captions) == {"<caption><span>"}
    rule = r"^caption span {.*max-width: min\(calc\(100vw"
    assert re.search(rule, (folder / "report/base.html").read_text("utf-8"), re.MULTILINE)
