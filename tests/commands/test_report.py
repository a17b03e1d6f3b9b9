"""Reports as text, JSON and CSV, and the files that they are written to."""

from __future__ import annotations

import csv as csv_reader
import io
import json as json_reader
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import CASES, every_result, make, make_bare, make_cuda

from cnn_engine import report
from cnn_engine.errors import InputError
from cnn_engine.measure.result import Check, LayerTime
from cnn_engine.report import csv, html, json, text, trace, units

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
        (units.percent(1.00004), ">100.00 %"),
        (units.percent(-0.99999), "<-99.99 %"),
        (units.percent(-1.00004), "<-100.00 %"),
        (units.percent(-1.0), "-100.00 %"),
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
        r"^Copy of conv1 input +: +3\.000 ms +7\.69 % +3\.000 MB +1\.000 +551 +h2d +-$",
        r"^Copy of conv1 output +: +0 s +0 % +9\.000 MB +- +551 +d2h +-$",
        r"^Conv: 6\.000 ms  ReLU: 20\.00 ms  Pool: -  FC: -  Softmax: -$",
        r"^Tanh: 10\.00 ms$",
        r"^Sum of layers and copies +: 39\.00 ms$",
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


def test_text_shows_what_lies_between_beside_the_pass():
    lines = text.render(CASES["taken apart"])
    for pattern in (
        r"^Time for network +: +13\.00 us +20\.00 % .* 1 +cuda +4\.000 us$",
        r"^Time for conv1\+relu1\+pool1 +: +\(10\.00 us\) +\(15\.38 %\) +200\.0 +- +- +inside +-$",
        r"^Time for softmax +: +\(3\.000 us\) +\(4\.62 %\) +- +- +- +inside +-$",
        r"^Conv: -  ReLU: -  Pool: -  FC: -  Softmax: 3\.000 us$",
        r"^Conv\+ReLU\+Pool: 10\.00 us$",
        r"^In parentheses +: inside of network, which has them in its time",
        r"^Copy of images +: +8\.000 us +12\.31 % .* h2d +pageable$",
        r"^Staging +: +40\.00 us +61\.54 % +in copies of pageable memory, the device idle$",
        r"^Host +: +4\.000 us +6\.15 % ",
        r"^Sum of all rows +: +65\.00 us +100\.00 %$",
        r"^1 plain pass +: +64\.00 us +98\.46 % +median 64\.00 us$",
        r"^Started +: 2026-01-31T12:00:00Z, took 2\.500 s$",
    ):
        assert re.search(pattern, lines, re.M), pattern
    flat = " ".join(lines.split())
    assert "clock read after each step 64.64 us (1.010 times)" in flat
    assert "under activity records 96.00 us (1.500 times)" in flat
    assert "parts of the fused network counted 67.20 us (1.050 times)" in flat


def test_csv_adds_up_to_the_pass_without_what_is_inside():
    rows = list(csv_reader.DictReader(io.StringIO(csv.render(CASES["taken apart"]), newline="")))
    assert [row["section"] for row in rows] == [
        "layer", "inside", "inside", "copy", "between", "between",
    ]  # fmt: skip
    shares = [float(row["share"]) for row in rows if row["section"] != "inside"]
    assert sum(shares) == pytest.approx(1)
    inside = [float(row["seconds"]) for row in rows if row["section"] == "inside"]
    assert sum(inside) == pytest.approx(float(rows[0]["seconds"]))


def test_text_of_what_is_missing():
    assert "\nNet Accuracy: no labels\n" in text.render(make(accuracy=None))
    assert "\nNet Accuracy: not measured\n" in text.render(make_bare())
    assert "300 of 1,102 images done" in text.render(CASES["interrupted"])
    assert "(part of an iteration over 300 images" in text.render(CASES["interrupted"])
    assert "FAILED, so nothing was timed" in text.render(CASES["check failed"])
    assert re.search(r"^Time for conv1\+relu1.* 1\.000 s ", text.render(CASES["long names"]), re.M)


def test_long_names_are_shortened_as_long_as_they_differ():
    head, tail = "backbone.stage1.block", ".convolution.pointwise/node"
    names = [f"{head}{index}{tail}" for index in range(3)]  # which differ in the middle alone
    names += [f"{names[0]}_{index}" for index in range(3)]
    layers = [LayerTime(name, "conv", "cpu", 1, 1.0, None, 1, 1) for name in names]
    lines = text.render(make(layers=layers)).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("Time for backbone"))
    folded = "".join(
        line.split(" : ")[0].removeprefix("Time for ").rstrip() for line in lines[first : first + 6]
    )
    assert folded == "".join(names[:3])
    for line, name in zip(lines[first + 6 :], names[3:], strict=False):
        assert re.match(rf"Time for backbone\S*\.\.\.\S*{name[-8:]} +: +1\.000 s ", line)


@every_result
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


@every_result
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


@every_result
def test_csv_reads_back(result):
    document = csv.render(result)
    rows = list(csv_reader.DictReader(io.StringIO(document, newline=""), strict=True))
    assert document.count("\n") == document.count("\r\n") == 1 + len(rows)
    between = result.whole_pass.between if result.whole_pass else []
    sections = [row["section"] for row in rows if row["section"] != "inside"]
    wanted = ["layer"] * len(result.layers) + ["copy"] * len(result.copies)
    assert sections == wanted + ["between"] * len(between)
    layers = [row for row in rows if row["section"] == "layer"]
    for row, layer in zip(layers, result.layers, strict=True):
        assert row["name"] == units.printable(layer.name)
        assert int(row["calls"]) == layer.calls
        if math.isfinite(layer.seconds):
            assert float(row["seconds"]) == layer.seconds
        assert None not in row  # no more cells than columns


def test_csv_numbers_are_exact():
    rows = list(csv_reader.DictReader(io.StringIO(csv.render(make_cuda()), newline="")))
    assert rows[0]["device_s"] == "0.006"
    assert rows[1]["device_s"] == ""
    assert float(rows[0]["flops_per_second"]) == pytest.approx(2e9 / 0.006)
    assert sum(float(row["share"] or 0) for row in rows) == pytest.approx(1)
    assert float(rows[4]["share"]) == 0
    assert rows[4]["bytes_per_second"] == ""  # it took no time
    assert rows[4]["direction"] == "d2h"
    assert tuple(rows[0]) == tuple(csv.COLUMNS)


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
