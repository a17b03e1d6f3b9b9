"""A result's JSON and back: raw samples, the machine's state, and documents that are not results."""

from __future__ import annotations

import json
import math
import types
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest

from cnn_engine import Engine, InputError, report
from cnn_engine.compare import comparison
from cnn_engine.devices import nvml
from cnn_engine.measure import environment, result, step_times
from cnn_engine.measure.result import Result

RNG = np.random.default_rng(5)


@pytest.fixture(scope="module")
def measured() -> Result:
    images = RNG.integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
    with Engine(weights="random", device="cpu", variant="pad", threads=1) as engine:
        return engine.profile(images, labels=np.zeros(10, int), batch=4, iterations=2)


def test_samples_are_of_full_batches_and_add_up(measured):
    assert len(measured.latency.samples_ms) == 2 * 2  # 4 + 4 + 2 images, twice
    for layer in measured.layers:
        assert layer.calls == 3
        assert len(layer.samples_s) == measured.whole_pass.samples
        # Two full batches and half a one.
        assert 1.5 * min(layer.samples_s) < layer.seconds


def test_layers_and_what_lies_between_are_the_sum_that_is_shown(measured):
    whole = measured.whole_pass
    total = sum(row.seconds for row in (*measured.layers, *measured.copies, *whole.between))
    assert measured.timed_pass.calls == whole.calls == 3
    assert total == pytest.approx(whole.steps_s)
    assert [row.name for row in whole.between] == ["host"]
    assert whole.source == "host clock"
    assert measured.timed_pass.device_s is None
    document = measured.to_dict()["pass"]
    assert document["between"][0]["seconds"] == whole.between[0].seconds


@pytest.mark.parametrize(
    ("integer", "wanted"),
    [(0, "float32"), (1, "int8 in 1 of 4 layers, else float32"), (4, "int8")],
)
def test_the_types_that_layers_compute_in_are_named(measured, integer, wanted):
    """Those that multiply: a pool between them has no type of its own to tell."""
    multiply = [layer for layer in measured.layers if layer.flops]
    changed = [replace(layer, kind=f"quantized_{layer.kind}") for layer in multiply[:integer]]
    layers = [*changed, *multiply[integer:], replace(multiply[0], kind="max_pool", flops=0)]
    found = replace(measured, layers=layers)
    assert len(multiply) == 4
    assert found.computes_in == wanted
    assert f"Data type                    : {wanted}\n" in report.text.render(found)
    assert found.to_dict()["dtype"] == "float32"  # what was asked for


def test_every_result_says_when_it_was_and_how_long_it_took(measured):
    started = datetime.strptime(measured.started, "%Y-%m-%dT%H:%M:%SZ")
    age = datetime.now(timezone.utc) - started.replace(tzinfo=timezone.utc)
    assert timedelta(seconds=-1) < age < timedelta(hours=1)
    assert age.total_seconds() > measured.duration_s - 1
    assert measured.duration_s > measured.phases.forward_s
    assert f"Started                      : {measured.started}, took " in report.text.render(
        measured
    )


def test_a_document_read_back_is_the_same(measured, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(report.json.dumps(measured))
    again = report.json.load(path)
    assert report.json.dumps(again) == path.read_text()
    assert again.layers == measured.layers
    assert again.timeline == measured.timeline
    assert again.latency.samples_ms == measured.latency.samples_ms
    assert report.text.render(again) == report.text.render(measured)


def test_nan_is_read_back_as_nan(measured):
    document = json.loads(report.json.dumps(measured))
    document["check"]["max_abs_diff"] = None
    found = Result.from_dict(document)
    assert math.isnan(found.check.max_abs_diff)
    assert not found.check.passed


def test_documents_from_before_samples_are_read(measured):
    document = json.loads(report.json.dumps(measured))
    for key in ("latency_samples_ms", "stop", "timed_pass", "pass", "timeline", "extra_lines"):
        del document[key]
    for layer in document["layers"]:
        del layer["samples_s"]
    found = Result.from_dict(document)
    assert found.latency is None
    assert found.layers[0].samples_s == []
    assert found.timeline == []


def test_long_runs_keep_samples_evenly_thinned(monkeypatch, measured):
    monkeypatch.setattr(result, "MOST_SAMPLES", 3)
    assert result.thinned([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert result.thinned([float(i) for i in range(10)]) == [0.0, 4.0, 8.0]
    assert result.thinned([]) == []
    document = measured.to_dict()
    assert len(document["latency_samples_ms"]) == 2
    assert document["latency_ms"]["samples"] == 4
    again = Result.from_dict(document)
    assert len(again.latency.samples_ms) == 2
    assert again.latency.count == again.to_dict()["latency_ms"]["samples"] == 4


def test_thinned_samples_keep_the_figures_of_all(monkeypatch, measured):
    """The slowest pass, and each percentile, are those of all passes, however often it is read."""
    samples = [1.0 + 0.001 * i for i in range(100)]
    samples[51] = 40.0
    every = replace(measured, latency=result.Latency(samples, (50.0, 95.0)))
    monkeypatch.setattr(result, "MOST_SAMPLES", 10)
    document = every.to_dict()
    assert 40.0 not in document["latency_samples_ms"]
    again = Result.from_dict(json.loads(json.dumps(document)))
    assert again.to_dict()["latency_ms"] == document["latency_ms"] == every.latency.to_dict()
    assert dict(report.text.latency(again.latency))["max"] == "40.00 ms"
    row = comparison.compare(again, again).whole
    assert row.baseline.value == pytest.approx(every.latency.to_dict()["p50"] / 1e3)
    assert row.baseline.low < row.baseline.value < row.baseline.high
    for key, value, message in (
        ("max", None, None),
        ("p50", "x", "latency_ms: p50: expected a number"),
    ):
        changed = {**document, "latency_ms": {**document["latency_ms"], key: value}}
        if message is None:
            Result.from_dict(changed)
        else:
            with pytest.raises(InputError, match=message):
                Result.from_dict(changed)
    del document["latency_ms"]["max"]
    with pytest.raises(InputError, match="latency_ms: max: expected a value, found none"):
        Result.from_dict(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: [], "expected the JSON document of a run"),
        (lambda d: {}, "expected the JSON document of a run"),
        (lambda d: {**d, "schema": 2}, "schema: expected 1, found 2"),
        (lambda d: {k: v for k, v in d.items() if k != "layers"} | {"layers": 3}, "layers: expected a list"),
        (lambda d: {k: v for k, v in d.items() if k != "network"}, "network: expected a value, found none"),
        (lambda d: {**d, "batch": True}, "batch: expected a value of type int"),
        (lambda d: {**d, "latency_samples_ms": ["x"]}, "samples_ms: expected a number, found 'x'"),
        (lambda d: {**d, "phases": 1}, "phases: expected an object"),
        (lambda d: {**d, "throughput_images_per_s": 10**400}, "throughput_images_per_s: expected a number"),
        (lambda d: {**d, "timeline": []}, None),
        (lambda d: {**d, "timeline": {"total": 1, "events": [[1]]}}, "expected events of 6 values"),
        (lambda d: {**d, "timeline": "x"}, "timeline: expected an object"),
    ],
)  # fmt: skip
def test_what_is_not_a_result_is_named(measured, change, message):
    document = change(json.loads(report.json.dumps(measured)))
    if message is None:
        assert Result.from_dict(document).timeline == []
        return
    with pytest.raises(InputError, match=message) as error:
        Result.from_dict(document, "a.json")
    assert str(error.value).startswith("a.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_files_that_are_not_results_are_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="bad.json"):
        report.json.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="none.json: cannot be read: No such file"):
        report.json.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        report.json.load(tmp_path)


# ---- the machine's state ----


def test_the_state_of_this_machine_is_in_the_result(measured):
    found = measured.environment
    assert set(found["cpu_state"]) == {"governor", "turbo", "on_battery", "load_average"}
    assert found["cpu_state"]["load_average"] >= 0
    assert found["gpu_state"] is None
    assert isinstance(found["warnings"], list)


def test_the_state_of_a_laptop_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "SYSTEM", tmp_path)
    for path, text in (
        ("devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
        ("devices/system/cpu/intel_pstate/no_turbo", "1\n"),
        ("class/power_supply/AC/type", "Mains\n"),
        ("class/power_supply/BAT0/type", "Battery\n"),
        ("class/power_supply/BAT0/status", "Discharging\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = environment.state(types.SimpleNamespace(kind="cpu"), load_average=1e3)
    state = {"governor": "powersave", "turbo": False, "on_battery": True, "load_average": 1e3}
    assert found["cpu_state"] == state
    text = " / ".join(found["warnings"])
    for word in ("turbo frequencies are off", "battery", "load average of 1000.0"):
        assert word in text


def test_nothing_is_claimed_where_the_system_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "SYSTEM", tmp_path)
    found = environment.state(types.SimpleNamespace(kind="cpu"))
    assert set(found["cpu_state"].values()) == {None}
    assert found["warnings"] == []


def test_warnings_of_a_gpu():
    state = {
        "sm_clock_mhz": 900, "max_sm_clock_mhz": 1980, "power_limit_w": 500.0,
        "default_power_limit_w": 700.0, "throttled": ["power cap"], "other_processes": 2,
    }  # fmt: skip
    assert environment.gpu_warnings(state) == [
        "GPU: clocks held down by power cap (900 of 1980 MHz)",
        "GPU: shared with other processes: 2",
        "GPU: power limited to 500 W of 700 W",
    ]
    assert environment.gpu_warnings({}) == []
    calm = dict(state, throttled=[], other_processes=0, power_limit_w=700.0)
    assert environment.gpu_warnings(calm) == []


def test_without_nvml_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    device = types.SimpleNamespace(kind="cuda", pci_bus_id="0000:00:00.0")
    found = environment.state(device)
    assert found["gpu_state"] is None
    assert "nvidia-ml-py" in found["warnings"][0]


def test_nvml_without_a_driver_is_a_line():
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(nvml.UnsupportedError, match="NVML cannot be used"):
            nvml.Gpu("0000:00:00.0")


@pytest.mark.gpu
def test_the_state_of_a_gpu_is_plausible():
    pytest.importorskip("pynvml")
    images = RNG.integers(0, 256, (100, 3, 32, 32), dtype=np.uint8)
    with Engine(weights="random", device="cuda") as engine:
        found = engine.profile(images, batch=100, duration_s=1.0)
    state = found.environment["gpu_state"]
    assert 0 < state["sm_clock_mhz"] <= state["max_sm_clock_mhz"]
    assert 10 < state["power_w"] <= 1.2 * state["power_limit_w"]
    assert 10 < state["temperature_c"] < 110
    assert state["other_processes"] is None or state["other_processes"] >= 0


def test_whether_records_may_be_taken_is_passed_on(monkeypatch):
    asked = []
    time_layers = step_times.time_layers

    def noted(*arguments, records, **options):
        asked.append(records)
        return time_layers(*arguments, records=records, **options)

    monkeypatch.setattr(step_times, "time_layers", noted)
    images = np.zeros((2, 3, 32, 32), np.uint8)
    with Engine(weights="random", device="cpu", variant="fused") as engine:
        engine.profile(images, check=False, iterations=1)
        engine.profile(images, check=False, iterations=1, records=False)
    assert asked == [True, False]
