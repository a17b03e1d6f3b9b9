"""Reports: what each must hold, on results that a run can make and on some that it should not."""

from __future__ import annotations

import csv as csv_reader
import io
import json as json_reader
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnn_engine import report
from cnn_engine.errors import InputError
from cnn_engine.report import csv, html, json, text, trace, units
from cnn_engine.result import (
    Accuracy,
    Check,
    CopyTime,
    Latency,
    LayerTime,
    Phases,
    Result,
    TimelineEvent,
)

HOSTILE = "<script>alert(1)</script>&\"'\x1b[31m\n\udc80,=1+1 http://evil.example/{{ 7*7 }}"


def make(**changes) -> Result:
    """Returns the result of a CPU run, with ``changes``."""
    values = {
        "command": "python -m cnn_engine.run --batch 2",
        "environment": {
            "host": "somewhere",
            "cpu": "A CPU",
            "gpu": None,
            "driver": None,
            "versions": {"python": "3.12.0", "cnn_engine": None},
            "commit": "0123abc",
        },
        "network": "cifar10",
        "weights": "default",
        "dataset": {"name": "CIFAR-10", "source": "data", "images": 1102},
        "device": "cpu",
        "device_name": "A CPU",
        "variant": "pad",
        "variant_reason": "the fastest here",
        "reduction": True,
        "dtype": "float32",
        "data_mode": "resident",
        "batch": 2,
        "threads": 4,
        "phases": Phases(0.1, 2e-4, 3e-3, 4e-5, 0.5, 6e-7, 8e-9),
        "accuracy": Accuracy(865, 1102),
        "check": Check("NumPy float64", 256, 7e-8, 1.0, 1e-5),
        "layers": [
            LayerTime("pad1", "pad", "cpu", 551, 0.01, None, 0, 10**6),
            LayerTime("conv1", "conv", "cpu", 551, 0.36, None, 2 * 10**9, 10**8),
            LayerTime("relu1", "relu", "cpu", 551, 0.02, None, 0, 10**7),
            LayerTime("pool1", "pool", "cpu", 551, 0.005, None, 0, 10**7),
            LayerTime("fc", "fc", "cpu", 551, 0.004, None, 10**6, 10**5),
            LayerTime("softmax", "softmax", "cpu", 551, 1e-9, None, 0, 10**4),
        ],
        "latency": Latency([1.0, 2.0, 3.0, 4.0], (50.0, 99.9)),
        "throughput_images_per_s": 2204.0,
        "iterations": 3,
        "images_done": 1102,
        "timeline": [
            TimelineEvent("pad1", "pad", "host", 0.0, 1e-5, 0),
            TimelineEvent("conv1", "conv", "host", 1e-5, 6e-4, 0),
        ],
        "timeline_total": 2,
    }
    return Result(**{**values, **changes})


def make_cuda(**changes) -> Result:
    """Returns the result of a CUDA run that mixes devices, whose stream's events overlap by rounding."""
    values = {
        "device": "cuda:0",
        "device_name": "A GPU",
        "data_mode": "transfer",
        "variant": "if",
        "variant_reason": None,
        "reduction": False,
        "layers": [
            LayerTime("conv1", "conv", "cuda", 551, 0.004, 0.006, 2 * 10**9, 10**8),
            LayerTime("relu1", "relu", "cpu", 551, 0.02, None, 0, 10**7),
            LayerTime("tanh1", "tanh", "cpu", 551, 0.01, None, 0, 10**7),
        ],
        "copies": [
            CopyTime("conv1 input", "h2d", 551, 3 * 10**6, 0.003),
            CopyTime("conv1 output", "d2h", 551, 9 * 10**6, 0.0),
        ],
        "timeline": [
            TimelineEvent("conv1 input", "copy", "host", 0.0, 5e-6, 0),
            TimelineEvent("conv1 input", "copy", "cuda:0 stream", 1e-6, 2e-5, 0),
            TimelineEvent("conv1", "conv", "cuda:0 stream", 2.05e-5, 6e-5, 0),
            TimelineEvent("conv1", "conv", "host", 6e-6, 4e-6, 0),
            TimelineEvent("sync", "sync", "host", 1e-5, 7e-5, 1),
        ],
        "timeline_total": 5000,
        "notes": ["the GPU is shared"],
    }
    return make(**{**values, **changes})


def make_bare(**changes) -> Result:
    """Returns the result of a run that timed nothing."""
    values = {
        "environment": {},
        "phases": Phases(),
        "accuracy": None,
        "check": None,
        "layers": [],
        "latency": None,
        "throughput_images_per_s": None,
        "iterations": 0,
        "images_done": 0,
        "timeline": [],
        "timeline_total": 0,
    }
    return make(**{**values, **changes})


CASES = {
    "cpu": make(),
    "cuda": make_cuda(),
    "bare": make_bare(),
    "no labels": make(accuracy=None),
    "zero images": make_bare(dataset={"name": "none", "source": "none", "images": 0}),
    "check failed": make_bare(check=Check("NumPy float64", 4, math.nan, 0.0, 1e-5)),
    "interrupted": make(interrupted=True, images_done=300, iterations=0, layers=[], timeline=[]),
    "interrupted later": make(interrupted=True, iterations=3),
    "huge": make(
        phases=Phases(*[1e300] * 7),
        layers=[LayerTime("conv1", "conv", "cpu", 10**15, 1e300, None, 10**30, 10**30)],
        throughput_images_per_s=1e300,
        latency=Latency([1e300, 1e-300]),
    ),
    "tiny": make(
        phases=Phases(*[1e-300] * 7),
        layers=[LayerTime("conv1", "conv", "cpu", 1, 1e-300, None, 1, 1)],
        throughput_images_per_s=1e-300,
        latency=Latency([1e-300]),
        timeline=[TimelineEvent("conv1", "conv", "host", 0.0, 0.0, 0)],
    ),
    "not finite": make(
        phases=Phases(math.nan, math.inf),
        layers=[LayerTime("conv1", "conv", "cuda", 1, math.nan, math.inf, 1, 1)],
        throughput_images_per_s=math.inf,
        timeline=[TimelineEvent("conv1", "conv", "host", math.nan, 1.0, 0)],
    ),
    "hostile": make_cuda(
        command=HOSTILE,
        environment={HOSTILE: HOSTILE, "versions": {HOSTILE: HOSTILE}},
        network=HOSTILE,
        weights=HOSTILE,
        dataset={"name": HOSTILE, "source": HOSTILE, "images": 1102},
        device=HOSTILE,
        device_name=HOSTILE,
        variant=HOSTILE,
        variant_reason=HOSTILE,
        check=Check(HOSTILE, 1, 0.0, 1.0, 1e-5),
        layers=[LayerTime(HOSTILE, HOSTILE, "cuda", 1, 1.0, 2.0, 1, 1)],
        copies=[CopyTime(HOSTILE, "h2d", 1, 1, 1.0)],
        notes=[HOSTILE],
        timeline=[TimelineEvent(HOSTILE, HOSTILE, HOSTILE, 0.0, 1.0, 0)],
    ),
    "long names": make(
        weights="/a/" + "b" * 300,
        layers=[LayerTime("conv1+relu1+pool1+" * 9, "fused", "cpu", 1, 1.0, None, 1, 1)],
        notes=["word " * 60],
    ),
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def result(request) -> Result:
    return request.param


# ---- units ----


@given(st.floats(min_value=1e-290, max_value=1e290))  # beyond, floats themselves run over
def test_units_never_print_zero_for_what_is_not_zero(value):
    for printed in (
        units.number(value),
        units.seconds(value),
        units.percent(value),
        units.size(max(1, int(value))),
        units.giga_per_second(value, 1.0),
    ):
        found = re.match(r"[<>]?([\d.,]+(e[+-]\d+)?)", printed)
        assert found, printed
        assert float(found[1].replace(",", "")) > 0, printed
        assert not re.match(r"0\.00(?!\d*e)", printed), printed


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_units_keep_four_digits(value):
    digits, unit = units.seconds(value).split()
    factor = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert float(digits.replace(",", "")) * factor == pytest.approx(value, rel=5.01e-4)
    assert unit == "s" or float(digits) < 1000


@pytest.mark.parametrize(
    ("printed", "wanted"),
    [
        (units.seconds(None), "-"),
        (units.seconds(0.0), "0 s"),
        (units.seconds(math.nan), "nan s"),
        (units.seconds(12.5), "12.50 s"),
        (units.seconds(999.96e-6), "1.000 ms"),
        (units.seconds(1e-6), "1.000 us"),
        (units.seconds(2.5e-9), "2.500 ns"),
        (units.seconds(2.5e-15), "2.500e-06 ns"),
        (units.seconds(-1e-3), "-1.000 ms"),
        (units.size(0), "0 B"),
        (units.size(999), "999 B"),
        (units.size(1000), "1.000 kB"),
        (units.size(3_385_344), "3.385 MB"),
        (units.percent(0.0), "0 %"),
        (units.percent(1e-9), "<0.01 %"),
        (units.percent(0.784936), "78.49 %"),
        (units.percent(0.999999), ">99.99 %"),
        (units.percent(1.0), "100.00 %"),
        (units.percent(12.345678), "1,235 %"),
        (units.percent(math.nan), "nan %"),
        (units.number(1234567.0), "1,234,567"),
        (units.count(10_000), "10,000"),
        (units.counted(1, "image"), "1 image"),
        (units.giga_per_second(3e9, 2.0), "1.500"),
        (units.giga_per_second(0, 2.0), "-"),
        (units.giga_per_second(1, 0.0), "-"),
    ],
)
def test_units_examples(printed, wanted):
    assert printed == wanted


# ---- text ----


def test_text_keeps_the_lines_of_the_thesis():
    lines = text.render(make())
    assert lines.startswith("CNN for 1102 images\n")
    for name, value in {
        "Load Data time": "100.0 ms",
        "Create Network time": "200.0 us",
        "Load Network Parameters time": "3.000 ms",
        "Create Outputs time": "40.00 us",
        "Net Forward total time": "500.0 ms",
        "Time for pad1": "10.00 ms",
        "Time for conv1": "360.0 ms",
        "Time for softmax": "1.000 ns",
        "Net Accuracy time": "600.0 ns",
        "Free memory time": "8.000 ns",
        "Total time": "603.2 ms",
    }.items():
        assert re.search(rf"^{name} *: +{re.escape(value)}( |$)", lines, re.M), name
    sums = "Conv: 360.0 ms  ReLU: 20.00 ms  Pool: 5.000 ms  FC: 4.000 ms  Softmax: 1.000 ns"
    assert f"\n{sums}\nPad: 10.00 ms\n" in lines
    assert "\nNet Accuracy: 78.49 % (865 of 1,102 correct)\n" in lines


def test_text_says_what_else_was_found():
    lines = text.render(make_cuda(extra_lines=["the workload's  own"]))
    for pattern in (
        r"^Device +: cuda:0, A GPU$",
        r"^Time for conv1 +: +6\.000 ms +15\.38 % +333\.3 +16\.67 +551 +cuda +4\.000 ms$",
        r"^Time for relu1 +: +20\.00 ms .* cpu +-$",
        r"^Copy of conv1 input +: +3\.000 ms +7\.69 % +3\.000 MB +1\.000 +551 +h2d$",
        r"^Copy of conv1 output +: +0 s +0 % +9\.000 MB +- +551 +d2h$",
        r"^Conv: 6\.000 ms  ReLU: 20\.00 ms  Pool: -  FC: -  Softmax: -$",
        r"^Tanh: 10\.00 ms$",
        r"^Sum of layers and copies +: 39\.00 ms, 7\.80 % of",
        r"^Latency p99\.9 +: 3\.997 ms$",
        r"^Throughput +: 2,204 images/s$",
        r"^Check +: passed: max abs diff 7\.000e-08 \(tolerance 1e-05\), top-1 agreement$",
        r"^Note +: the GPU is shared$",
        r"^the workload's  own\Z",
    ):
        assert re.search(pattern, lines, re.M), pattern
    assert "Latency p90" not in lines  # was not asked for
    assert re.search(
        r"^Variant +: pad, chosen by auto: the fastest here$", text.render(make()), re.M
    )


def test_text_of_what_is_missing():
    assert "\nNet Accuracy: no labels\n" in text.render(make(accuracy=None))
    assert "\nNet Accuracy: not measured\n" in text.render(make_bare())
    assert "300 of 1,102 images done" in text.render(CASES["interrupted"])
    assert "(part of a pass over 300 images" in text.render(CASES["interrupted"])
    assert "FAILED, so nothing was timed" in text.render(CASES["check failed"])
    assert re.search(r"^Time for conv1\+relu1.* 1\.000 s ", text.render(CASES["long names"]), re.M)


def test_text_is_plain_and_narrow(result):
    lines = text.render(result).split("\n")
    assert max(map(len, lines)) <= 100
    for line in lines:
        assert line.isprintable(), line
        assert line == line.rstrip()
        assert not re.search(r"(?<![\d.])0\.00(?!\d)", line), line
    for fixed in (
        "CNN for ",
        "Load Data time",
        "Net Forward total time",
        "Net Accuracy:",
        "Total time",
    ):
        assert any(line.startswith(fixed) for line in lines), fixed


# ---- JSON ----

KEYS = {
    None: "schema command environment network weights dataset device variant reduction dtype data_mode "
    "batch threads accuracy check phases layers copies latency_ms throughput_images_per_s",
    "environment": "host cpu gpu driver versions commit",
    "dataset": "name source images",
    "accuracy": "correct total top1",
    "check": "reference images max_abs_diff top1_agreement",
    "phases": "load_data_s create_network_s load_parameters_s create_outputs_s forward_s accuracy_s "
    "free_memory_s total_s",
    "layers": "name kind calls host_s device_s flops bytes",
    "copies": "what direction calls bytes seconds",
    "latency_ms": "min p50 p90 p99 max mean",
}


def test_json_has_the_keys_of_schema_1():
    document = json_reader.loads(json.dumps(make_cuda()))
    assert document["schema"] == 1
    for key, names in KEYS.items():
        found = document if key is None else document[key]
        for entry in found if isinstance(found, list) else [found]:
            assert set(names.split()) <= set(entry), key
    assert document["layers"][1]["device_s"] is None


def test_json_is_standard(result):
    def refuse(token):
        pytest.fail(f"not JSON: {token}")

    document = json_reader.loads(json.dumps(result), parse_constant=refuse)
    assert document["dataset"]["images"] == result.dataset["images"]


def test_json_takes_numpys_numbers_and_nulls_what_it_lacks():
    check = Check("reference", np.int64(3), np.float32(math.nan), np.float64(1), 1e-5)
    found = json_reader.loads(json.dumps(make(check=check, throughput_images_per_s=math.inf)))
    assert found["throughput_images_per_s"] is None
    assert found["check"]["max_abs_diff"] is None
    assert found["check"]["images"] == 3


# ---- CSV ----


def test_csv_reads_back(result):
    document = csv.render(result)
    assert (
        document.count("\n")
        == document.count("\r\n")
        == 1 + len(result.layers) + len(result.copies)
    )
    rows = list(csv_reader.DictReader(io.StringIO(document, newline=""), strict=True))
    sections = [row["section"] for row in rows]
    assert sections == ["layer"] * len(result.layers) + ["copy"] * len(result.copies)
    for row, layer in zip(rows, result.layers, strict=False):
        assert row["name"] == units.printable(layer.name)
        assert int(row["calls"]) == layer.calls
        if math.isfinite(layer.seconds):
            assert float(row["seconds"]) == layer.seconds
        assert None not in row  # no more cells than columns


def test_csv_numbers_are_exact_and_columns_documented():
    rows = list(csv_reader.DictReader(io.StringIO(csv.render(make_cuda()), newline="")))
    assert rows[0]["device_s"] == "0.006"
    assert rows[1]["device_s"] == ""
    assert float(rows[0]["flops_per_second"]) == pytest.approx(2e9 / 0.006)
    assert sum(float(row["share"] or 0) for row in rows) == pytest.approx(1)
    assert float(rows[4]["share"]) == 0
    assert rows[4]["bytes_per_second"] == ""  # it took no time
    assert rows[4]["direction"] == "d2h"
    for column in csv.COLUMNS:
        assert f"``{column}``" in csv.__doc__


# ---- trace ----


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


# ---- HTML ----


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
    found = html._histogram(make(latency=Latency(samples)))
    counted = sum(int(bin["title"].rpartition(": ")[2].split()[0]) for bin in found["bins"])
    beyond = int(found["beyond"].split()[0])
    assert counted + beyond == len(samples)
    assert 1 <= beyond <= 10


# ---- files ----


def test_write_makes_the_files_that_are_asked_for(tmp_path):
    result = make_cuda()
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "trace", "html")}
    report.write(result, **paths)
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())
    assert paths["json"].read_text("utf-8") == json.dumps(result)
    assert paths["csv"].read_bytes().decode() == csv.render(result)
    assert paths["trace"].read_text("utf-8") == trace.render(result)
    assert paths["html"].read_text("utf-8") == html.render([result])
    report.write(result, json=None)


@pytest.mark.parametrize("name", ["json", "csv", "trace", "html"])
def test_write_takes_standard_output_and_any_text(name, capsys, tmp_path):
    report.write(CASES["hostile"], **{name: "-"})
    printed = capsys.readouterr().out
    report.write(CASES["hostile"], **{name: tmp_path / "file"})
    assert printed == (tmp_path / "file").read_bytes().decode()
    assert printed.endswith("\n")


def test_write_says_what_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*missing.*: No such file"):
        report.write(make(), json=tmp_path / "missing" / "out.json")
