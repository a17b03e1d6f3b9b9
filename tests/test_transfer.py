"""``python -m cnn_engine.transfer``: measuring, resuming, organising and predicting."""

from __future__ import annotations

import csv
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transfers import (
    BREAK,
    INTERCEPT,
    LATE_INTERCEPT,
    LATE_SLOPE,
    SLOPE,
    FakeDevice,
    two_pieces,
    write_raw,
)

from cnn_engine import cuda_module, devices, environment
from cnn_engine.transfer import command, files, main, measure, plot
from cnn_engine.transfer.files import RawNetwork
from cnn_engine.transfer.measure import Bench, Settings
from cnn_engine.transfer.subjects import Mode, find

ROOT = Path(__file__).resolve().parent.parent
BATCHES = np.arange(1, 65)
PNG = b"\x89PNG\r\n\x1a\n"
GPU = "Fake_GPU_1_test"


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def error_line(capsys) -> str:
    """Returns the one line on standard error, which is an error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def document(path: Path) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"not standard JSON: {constant}")

    return json.loads(path.read_text(), parse_constant=refuse)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def raw(tmp_path):
    write_raw(tmp_path / "raw", two_pieces, BATCHES, noise=0.005)
    return tmp_path / "raw"


@pytest.fixture
def device(monkeypatch):
    """A device whose copies take exactly what :func:`two_pieces` says of CIFAR-10's images."""
    fake = FakeDevice(lambda nbytes: float(two_pieces(nbytes / 3072)))
    monkeypatch.setattr(command.devices, "select", lambda name: fake)
    monkeypatch.setattr(measure, "perf_counter", fake.now)
    monkeypatch.setattr(measure, "PEAK_BYTES", 2**20)
    monkeypatch.setattr(command, "PEAK_BYTES", 2**20)
    return fake


# ---- organise ----


def test_organize_recovers_lines_and_break(raw, tmp_path, capsys):
    assert run("--organize", raw, "--output", tmp_path / "out", "--hold-out", 20) == 0
    folder = tmp_path / "out" / "NVIDIA_H200" / "cifar10"
    found = document(folder / "regression.json")
    assert found["break_batch"] == BREAK
    assert found["break_interval"][0] <= BREAK <= found["break_interval"][1]
    for piece, intercept, slope in zip(
        found["pieces"], (INTERCEPT, LATE_INTERCEPT), (SLOPE, LATE_SLOPE), strict=True
    ):
        assert piece["intercept_s"] == pytest.approx(intercept, rel=0.05)
        assert piece["slope_s_per_image"] == pytest.approx(slope, rel=0.05)
    points = RawNetwork(raw / "NVIDIA_H200" / "transfer" / "cifar10").points()[Mode()]
    slope, intercept = np.polyfit(BATCHES, [point.median_s for point in points], 1)
    assert found["slope_s_per_image"] == pytest.approx(slope)
    assert found["intercept_s"] == pytest.approx(intercept)
    assert 0.9 < found["r2"] < 1
    intervals = found["confidence_intervals"]
    assert intervals["level"] == 0.95
    for key in ("intercept_s", "slope_s_per_image"):
        assert intervals[key][0] < found[key] < intervals[key][1]
    medians = np.array([point.median_s for point in points])
    off = np.abs((intercept + slope * BATCHES) / medians - 1)
    assert found["line_error"]["max_relative"] == pytest.approx(off.max())
    assert found["line_error"]["at_batch"] == BATCHES[off.argmax()]
    assert found["line_error"]["median_relative"] == pytest.approx(np.median(off))
    assert found["pieces_error"]["max_relative"] < 0.03
    assert len(found["residuals"]["line_s"]) == len(found["residuals"]["pieces_s"]) == 64
    assert found["residuals"]["line_s"][9] == pytest.approx(
        points[9].median_s - intercept - slope * 10
    )
    assert len(found["hold_out"]["batch_sizes"]) == 20
    assert found["hold_out"]["pieces"]["max_relative"] < found["hold_out"]["line"]["max_relative"]
    assert found["image_bytes"] == 3072
    rates = [3072 * point.batch_size / point.median_s for point in points]
    assert found["gb_per_s"]["best"] == pytest.approx(max(rates) / 1e9)
    with (folder / "data_transfer_time.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["batch_size", "mean_s", "median_s", "std_s", "samples"]
    assert [int(row["batch_size"]) for row in rows] == list(BATCHES)
    assert float(rows[9]["median_s"]) == points[9].median_s
    assert (folder / "transfer.png").read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert f"break       : at {BREAK} images" in printed
    assert "0.00" not in printed.replace("0.000", "")


def test_organize_takes_all_gpus_networks_and_modes(raw, tmp_path):
    pinned = Mode("d2h", "pinned", "float32")
    write_raw(raw, lambda b: 1e-5 + 1e-7 * b, BATCHES, network="3x8x8", mode=pinned)
    write_raw(raw, lambda b: 2e-5 + 1e-7 * b, BATCHES, gpu="Other", network="unknown_net")
    (raw / "Other" / "another tool").mkdir()
    assert run("--organize", raw, "--output", tmp_path / "out", "--quiet", "--no-plot") == 0
    assert set(tree(tmp_path / "out")) == {
        "NVIDIA_H200/cifar10/data_transfer_time.csv",
        "NVIDIA_H200/cifar10/regression.json",
        "NVIDIA_H200/3x8x8/data_transfer_time_d2h_pinned_float32.csv",
        "NVIDIA_H200/3x8x8/regression_d2h_pinned_float32.json",
        "Other/unknown_net/data_transfer_time.csv",
        "Other/unknown_net/regression.json",
    }
    found = document(tmp_path / "out" / "NVIDIA_H200/3x8x8/regression_d2h_pinned_float32.json")
    assert (found["direction"], found["memory"], found["dtype"]) == ("d2h", "pinned", "float32")
    assert found["image_bytes"] == 3 * 8 * 8 * 4
    assert found["break_batch"] is None
    assert len(found["pieces"]) == 1
    unknown = document(tmp_path / "out" / "Other/unknown_net/regression.json")
    assert unknown["image_bytes"] is None
    assert "not known" in unknown["notes"][0]


def test_organize_one_network(raw, tmp_path, capsys):
    write_raw(raw, two_pieces, BATCHES, network="3x8x8")
    arguments = ("--organize", raw, "--output", tmp_path / "out", "--quiet", "--no-plot")
    assert run(*arguments, "--shape", "3,8,8") == 0
    assert {path.split("/")[1] for path in tree(tmp_path / "out")} == {"3x8x8"}
    assert run(*arguments, "--network", "resnet") == 2
    assert "expected one of 3x8x8, cifar10 in" in error_line(capsys)


def test_organize_without_enough_sizes_for_a_line(tmp_path, capsys):
    write_raw(tmp_path / "raw", two_pieces, [1, 2], samples=1)
    assert run("--organize", tmp_path / "raw", "--output", tmp_path / "out") == 0
    assert "no regression: expected at least 3 batch sizes, found 2" in capsys.readouterr().out
    assert list(tree(tmp_path / "out")) == ["NVIDIA_H200/cifar10/data_transfer_time.csv"]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda f: (f / "5" / "data_transfer_time.txt").write_text("x\n"), "5/data_transfer_time.txt, line"),
        (lambda f: (f / "5" / "device_transfer_time.txt").write_text("\n"), "an empty line"),
        (lambda f: (f / "five").mkdir(), "expected a folder named by a batch size"),
        (lambda f: (f / "network.json").write_text("{"), "network.json: expected"),
        (lambda f: (f.parent / "machine.json").write_text("{"), "machine.json: expected"),
        (lambda f: (f / "model_transfer_time.txt").write_text("1\nnan\n"), "model_transfer_time.txt, line 2"),
        (lambda f: (f.parent / "empty_network").mkdir(), "empty_network: expected <batch>"),
    ],
)  # fmt: skip
def test_malformed_raw_data_write_nothing(raw, tmp_path, capsys, spoil, found):
    spoil(raw / "NVIDIA_H200" / "transfer" / "cifar10")
    assert run("--organize", raw, "--output", tmp_path / "out") == 2
    assert found in error_line(capsys)
    assert tree(tmp_path / "out") == {}


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_raw_folders_that_are_none(tmp_path, capsys, kind):
    folder = tmp_path / "DIR"
    if kind == "file":
        folder.write_text("")
    elif kind == "empty":
        folder.mkdir()
    assert run("--organize", folder, "--output", tmp_path / "out") == 2
    assert str(folder) in error_line(capsys)


def test_raw_data_are_found_in_the_folder_that_was_the_output(raw, tmp_path):
    raw.rename(tmp_path / "raw_data")
    assert run("--organize", tmp_path, "--output", tmp_path, "--quiet", "--no-plot") == 0
    assert (tmp_path / "NVIDIA_H200" / "cifar10" / "regression.json").exists()


def test_output_that_cannot_be_written(raw, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert run("--organize", raw, "--output", tmp_path / "file") == 2
    assert "--output: expected a folder, found a file" in error_line(capsys)
    assert run("--organize", raw, "--output", "/proc/none") == 2
    assert "--output: cannot create /proc/none" in error_line(capsys)
    assert run("--organize", raw, "--output", "a\0b") == 2
    assert "--output" in error_line(capsys)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_without_permission(raw, tmp_path, capsys):
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert run("--organize", raw, "--output", tmp_path / "locked") == 2
    assert "--output" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--batch", "5-1"], "--batch: expected rising ranges"),
        (["--batch", "x"], "--batch: expected sizes such as"),
        (["--predict", "0"], "--predict: expected"),
        (["--shape", "3,3"], "--shape: expected C,H,W"),
        (["--network", "nope"], "network: expected one of"),
        (["--repeats", "1"], "--repeats: expected a whole number from 2"),
        (["--direction", "up"], "--direction: invalid choice"),
        (["--device", "cpu"], "--device: expected cuda or cuda:N"),
        (["--organize", "raw", "--batch", "1"], "--organize: expected no --batch"),
    ],
)
def test_bad_options_are_one_line(tmp_path, monkeypatch, capsys, arguments, found):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    assert found in error_line(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(cuda_module.unavailable() is None, reason="needs a machine without a GPU")
def test_without_a_gpu_nothing_is_made(tmp_path, capsys):
    assert run("--batch", "1-4", "--output", tmp_path / "out") == 2
    assert "cuda" in error_line(capsys)
    assert not (tmp_path / "out").exists()


def test_hold_out_of_too_few_sizes(raw, tmp_path, capsys):
    assert run("--organize", raw, "--output", tmp_path / "out", "--hold-out", 62) == 2
    assert "--hold-out: expected 1 to 61 of 64 batch sizes" in error_line(capsys)


def test_missing_packages_are_told(raw, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--organize", raw, "--output", tmp_path / "out") == 0
    assert "no plot: expected the package matplotlib" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.png"))
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert run("--organize", raw, "--output", tmp_path / "other") == 2
    assert "regression: expected the package scipy" in error_line(capsys)


@pytest.mark.parametrize("batches", [[1, 2, 3], [5, 500, 50_000], list(range(1, 40))])
@pytest.mark.parametrize("network", ["cifar10", "unknown_net"])
def test_every_shape_of_data_can_be_drawn(tmp_path, batches, network):
    write_raw(tmp_path / "raw", two_pieces, batches, network=network)
    assert run("--organize", tmp_path / "raw", "--output", tmp_path / "out", "--quiet") == 0
    picture = tmp_path / "out" / "NVIDIA_H200" / network / "transfer.png"
    assert picture.read_bytes().startswith(PNG)


# ---- predict ----


def test_predict_reads_what_was_written(raw, tmp_path, capsys):
    assert run("--organize", raw, "--output", tmp_path / "out", "--quiet", "--no-plot") == 0
    assert capsys.readouterr().out == ""
    shutil.rmtree(raw)
    assert run("--output", tmp_path / "out", "--predict", "10,60", "--quiet") == 0
    seconds = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert seconds == pytest.approx(list(two_pieces(np.array([10, 60]))), rel=0.02)
    assert run("--output", tmp_path / "out", "--network", "cifar10", "--predict", 500) == 0
    line = capsys.readouterr().out
    assert float(line.split()[0]) == pytest.approx(two_pieces(500), rel=0.05)
    assert "extrapolated: measured 1 to 64" in line


def test_predict_after_organizing(raw, tmp_path, capsys):
    assert run("--organize", raw, "--output", tmp_path / "o", "--predict", 5, "--no-plot") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.split()[0]) == pytest.approx(two_pieces(5), rel=0.02)


def test_predict_without_a_regression(raw, tmp_path, capsys):
    assert run("--predict", 5, "--output", tmp_path / "none") == 2
    assert "regression.json, found none; measure first" in error_line(capsys)
    assert run("--organize", raw, "--output", tmp_path / "out", "--quiet", "--no-plot") == 0
    for extra in (["--memory", "pinned"], ["--network", "ece408"], ["--dtype", "float32"]):
        assert run("--predict", 5, "--output", tmp_path / "out", *extra) == 2
        assert "found none" in error_line(capsys)


@pytest.mark.parametrize(
    "pieces",
    [
        "7",
        "[]",
        "[{}]",
        '[{"from_batch": 1, "to_batch": 2, "intercept_s": NaN, "slope_s_per_image": 1}]',
        '[{"from_batch": 1, "to_batch": 2, "intercept_s": "1", "slope_s_per_image": 1}]',
    ],
)
def test_predict_from_a_malformed_regression(tmp_path, capsys, pieces):
    (tmp_path / "g" / "n").mkdir(parents=True)
    path = tmp_path / "g" / "n" / "regression.json"
    path.write_text(f'{{"schema": 1, "pieces": {pieces}}}')
    assert run("--predict", 5, "--output", tmp_path) == 2
    assert f"{path}: pieces: expected" in error_line(capsys)


def test_predict_refuses_a_time_below_zero(tmp_path, capsys):
    write_raw(tmp_path / "raw", lambda b: 1e-6 * b - 5e-5, range(100, 120))
    out = tmp_path / "out"
    assert run("--organize", tmp_path / "raw", "--output", out, "--quiet", "--no-plot") == 0
    assert run("--predict", 1, "--output", out) == 2
    assert "near those measured (100 to 119), found 1" in error_line(capsys)


# ---- measure, on a device with known times ----


def test_measuring_recovers_what_the_device_takes(device, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--network", "cifar10", "--batch", "1-64", "--repeats", 8, "--output", out]
    assert run(*arguments, "--direction", "both", "--memory", "both", "--predict", 30) == 0
    printed = capsys.readouterr().out
    seconds = [float(line.split()[0]) for line in printed.splitlines()[-4:]]
    assert seconds == pytest.approx([float(two_pieces(30))] * 4, rel=1e-3)
    network = out / "raw_data" / GPU / "transfer" / "cifar10"
    for suffix in ("", "_h2d_pinned", "_d2h_pageable", "_d2h_pinned"):
        for batch in (1, 64):
            times = files.read_times(network / str(batch) / f"data_transfer_time{suffix}.txt")
            assert times == pytest.approx([float(two_pieces(batch))] * 8, abs=1e-9)
            times = files.read_times(network / str(batch) / f"device_transfer_time{suffix}.txt")
            assert times == pytest.approx([float(two_pieces(batch))] * 4, abs=1e-9)
        found = document(out / GPU / "cifar10" / f"regression{suffix}.json")
        assert found["break_batch"] == BREAK
        assert found["pieces"][0]["slope_s_per_image"] == pytest.approx(SLOPE, rel=1e-3)
        assert found["samples"] == 64 * 8
        assert (out / GPU / "cifar10" / f"transfer{suffix}.png").exists()
    weights = find("cifar10").weights
    found = document(out / GPU / "cifar10" / "regression.json")
    shapes = find("cifar10").parameters.values()
    each = sum(float(two_pieces(4 * np.prod(shape) / 3072)) for shape in shapes)
    assert found["weights"] == {
        **weights, "first_s": pytest.approx(each, abs=1e-9), "median_s": pytest.approx(each, abs=1e-9),
        "samples": 8,
    }  # fmt: skip
    assert document(out / GPU / "cifar10" / "regression_d2h_pageable.json")["weights"] is None
    peak = 2**20 / float(two_pieces(2**20 / 3072))
    assert found["gb_per_s"]["peak"] == pytest.approx(peak / 1e9, rel=1e-3)
    assert found["environment"]["gpu"] == device.model
    assert found["environment"]["gpu_state"] is None
    assert "break       : at 22 images" in printed


def test_all_networks_and_shapes_in_one_command(device, tmp_path):
    arguments = ["--batch", "1-4", "--repeats", 2, "--no-plot", "--quiet", "--output", tmp_path]
    assert run(*arguments) == 0
    assert {path.name for path in (tmp_path / GPU).iterdir()} == {"cifar10", "ece408"}
    assert run(*arguments, "--shape", "3,8,8", "--shape", "1,4,4") == 0
    names = {"cifar10", "ece408", "3x8x8", "1x4x4"}
    assert {path.name for path in (tmp_path / GPU).iterdir()} == names
    found = document(tmp_path / GPU / "3x8x8" / "regression.json")
    assert found["weights"] is None
    assert found["image_bytes"] == 192


def test_what_exists_is_not_measured_again(device, tmp_path):
    arguments = ["--shape", "3,32,32", "--no-plot", "--quiet", "--output", tmp_path]
    assert run(*arguments, "--batch", "1-8", "--repeats", 4) == 0
    raw = tmp_path / "raw_data" / GPU / "transfer"
    before = tree(raw)
    copies = len(device.copies)
    assert run(*arguments, "--batch", "1-8", "--repeats", 4) == 0
    assert len(device.copies) == copies
    assert tree(raw) == before
    assert run(*arguments, "--batch", "1-10", "--repeats", 6) == 0
    times = {batch: RawNetwork(raw / "3x32x32").samples(Mode(), batch) for batch in range(1, 11)}
    assert {len(each.wall) for each in times.values()} == {6}
    for path, content in before.items():
        if "data_transfer" in path:
            assert (raw / path).read_bytes().startswith(content)
    device.seconds = lambda nbytes: 1e-3
    assert run(*arguments, "--batch", "1-8", "--repeats", 4, "--fresh") == 0
    times = {batch: RawNetwork(raw / "3x32x32").samples(Mode(), batch) for batch in (3, 9)}
    assert times[3].wall == pytest.approx([1e-3] * 4)
    assert len(times[9].wall) == 6  # was not asked for


def test_a_corrupt_file_is_refused_before_anything_is_measured(device, tmp_path, capsys):
    arguments = ["--shape", "3,32,32", "--no-plot", "--quiet", "--output", tmp_path]
    arguments += ["--batch", "1-8", "--repeats", 4]
    assert run(*arguments) == 0
    path = tmp_path / "raw_data" / GPU / "transfer" / "3x32x32" / "3" / "data_transfer_time.txt"
    path.write_text("1e-5\n1e-")
    copies = len(device.copies)
    assert run(*arguments) == 2
    assert f"{path}, line 2" in error_line(capsys)
    assert len(device.copies) == copies
    assert run(*arguments, "--fresh") == 0
    assert len(files.read_times(path)) == 4


def test_a_corrupt_file_of_weights_is_refused_before_anything_is_measured(device, tmp_path, capsys):
    arguments = ["--network", "cifar10", "--no-plot", "--quiet", "--output", tmp_path]
    assert run(*arguments, "--batch", "1-4", "--repeats", 2) == 0
    path = tmp_path / "raw_data" / GPU / "transfer" / "cifar10" / "model_transfer_time.txt"
    path.write_text("")
    copies = len(device.copies)
    assert run(*arguments, "--batch", "1-8", "--repeats", 2) == 2
    assert f"{path}: expected one time" in error_line(capsys)
    assert len(device.copies) == copies


def test_raw_data_of_another_shape_are_refused(device, tmp_path, capsys):
    arguments = ["--network", "cifar10", "--batch", "1-4", "--repeats", 2, "--quiet"]
    arguments += ["--no-plot", "--output", tmp_path]
    assert run(*arguments) == 0
    path = tmp_path / "raw_data" / GPU / "transfer" / "cifar10" / "network.json"
    files.write_document(path, {"shape": [3, 64, 64], "weights": None})
    assert run(*arguments) == 2
    assert "network.json: shape: expected [3, 32, 32], as cifar10 has it" in error_line(capsys)


@pytest.mark.parametrize("after", [0, 30, 500, 1500])
def test_interrupted_it_keeps_what_was_measured_and_goes_on_later(device, tmp_path, after):
    device.interrupt_after = after
    others = 20 + 80 + 20 + 1 + 20 * find("cifar10").weights["tensors"]  # the peak, the weights
    arguments = ["--network", "cifar10", "--batch", "1-20", "--repeats", 40, "--no-plot"]
    arguments += ["--quiet", "--output", tmp_path, "--hold-out", 5]
    assert run(*arguments) == 130
    raw = RawNetwork(tmp_path / "raw_data" / GPU / "transfer" / "cifar10")
    kept = sum(point.samples for point in raw.points().get(Mode(), []))
    groups, rest = divmod(max(after - others, 0), 3 + 10 + 3 + 1)  # warm-up, wall, device, check
    assert kept == 10 * groups + min(max(rest - 3, 0), 10)
    assert (tmp_path / GPU / "cifar10" / "data_transfer_time.csv").exists() == (kept > 0)
    assert not list(tmp_path.rglob(".*"))
    assert run(*arguments) == 0
    raw = RawNetwork(raw.folder)
    assert {point.samples for point in raw.points()[Mode()]} == {40}
    found = document(tmp_path / GPU / "cifar10" / "regression.json")
    assert len(found["hold_out"]["batch_sizes"]) == 5


def test_a_copy_that_loses_a_byte_fails_the_check(device, tmp_path, capsys):
    arguments = ["--shape", "3,32,32", "--batch", "1-4", "--repeats", 2, "--quiet"]
    arguments += ["--output", tmp_path]
    device.corrupts = True
    assert run(*arguments) == 1
    assert "check of a copy (h2d, pinned, uint8, 1.049 MB): expected" in error_line(capsys)
    assert not list(tmp_path.rglob("data_transfer_time*"))


def test_what_the_driver_refuses_is_one_line(device, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(device, "empty_pinned", refuse)
    assert run("--shape", "3,32,32", "--batch", "1-4", "--quiet", "--output", tmp_path) == 2
    assert "cuda:0: cudaErrorMemoryAllocation" in error_line(capsys)


def test_batches_that_do_not_fit_are_refused(device, tmp_path, capsys):
    arguments = ["--shape", "3,99999,99999", "--batch", "9999999", "--quiet", "--output", tmp_path]
    assert run(*arguments) == 2
    assert "--batch: expected copies of at most" in error_line(capsys)
    device.free = 1000
    assert run("--shape", "3,32,32", "--batch", "1", "--quiet", "--output", tmp_path) == 2
    assert "half of the GPU's free memory" in error_line(capsys)


def test_raw_data_of_two_machines_are_told(device, tmp_path, monkeypatch):
    arguments = ["--shape", "3,32,32", "--batch", "1-4", "--quiet", "--no-plot"]
    arguments += ["--output", tmp_path]
    assert run(*arguments, "--repeats", 2) == 0
    path = tmp_path / GPU / "3x32x32" / "regression.json"
    assert document(path)["notes"] == []
    device.kernels.driver_version = lambda: 13010
    assert run(*arguments, "--repeats", 4) == 0
    assert "several machines" in document(path)["notes"][0]
    assert "CUDA 13.1" in document(path)["notes"][0]


def test_order_is_random_and_spreads_samples_over_the_run():
    settings = Settings((Mode(), Mode("d2h")), tuple(range(1, 33)), repeats=10)
    raw = RawNetwork(Path("nowhere"))
    groups = measure.plan(raw, settings)
    total = {}
    for group in groups:
        total[group.mode, group.batch] = total.get((group.mode, group.batch), 0) + group.copies
    assert set(total.values()) == {10}
    assert len(total) == 64
    batches = [group.batch for group in groups]
    assert abs(np.corrcoef(np.arange(len(batches)), batches)[0, 1]) < 0.3
    quarter = len(groups) // 4
    assert {group.batch for group in groups[:quarter]} == set(range(1, 33))
    assert measure.plan(raw, settings) == groups
    other = Settings(settings.modes, settings.batches, settings.repeats, seed=1)
    assert measure.plan(raw, other) != groups


def test_a_drift_of_the_device_does_not_look_like_a_slope(device, tmp_path):
    """Copies that take ever longer, whatever their size, leave the slope at zero."""
    device.seconds = lambda nbytes: 1e-5 * (1 + len(device.copies) / 5000)
    arguments = ["--shape", "3,32,32", "--batch", "1-100", "--repeats", 20, "--no-plot"]
    assert run(*arguments, "--quiet", "--output", tmp_path) == 0
    found = document(tmp_path / GPU / "3x32x32" / "regression.json")
    low, high = found["confidence_intervals"]["slope_s_per_image"]
    assert low < 0 < high or abs(found["slope_s_per_image"]) * 100 < 0.02 * found["intercept_s"]


def test_contents_are_fresh_for_every_group(device):
    bench = Bench(device, 3_000_000, pinned=True, seed=0)
    arrays = [bench.host_array(3_000_000, memory).copy() for memory in ("pageable", "pinned") * 3]
    for index, array in enumerate(arrays):
        assert len(np.unique(array[:10_000])) == 256
        for other in arrays[:index]:
            assert np.mean(array == other) < 0.05


# ---- as a program ----


def test_as_a_program(raw, tmp_path):
    arguments = [sys.executable, "-m", "cnn_engine.transfer", "--organize", str(raw)]
    arguments += ["--output", str(tmp_path / "out"), "--predict", "10", "--quiet"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) == pytest.approx(two_pieces(10), rel=0.02)


def test_plot_names_the_extra_when_matplotlib_is_missing(monkeypatch):
    assert plot.unavailable() is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "cnn-engine[lab]" in plot.unavailable()


# ---- on a GPU ----


@pytest.mark.gpu
def test_measuring_a_gpu(tmp_path, capsys):
    arguments = [
        "--network",
        "cifar10",
        "--shape",
        "3,224,224",
        "--batch",
        "1-64:3",
        "--repeats",
        8,
    ]
    arguments += ["--direction", "both", "--memory", "both", "--output", tmp_path]
    assert run(*arguments) == 0
    model = environment.describe(devices.select("cuda"))["gpu"]
    (folder,) = (path for path in tmp_path.iterdir() if path.name != "raw_data")
    assert folder.name == command.subjects.path_safe(model)
    for suffix in ("", "_h2d_pinned", "_d2h_pageable", "_d2h_pinned"):
        found = document(folder / "3x224x224" / f"regression{suffix}.json")
        assert found["slope_s_per_image"] > 0
        assert 0.5 < found["r2"] <= 1
        assert 0 < found["gb_per_s"]["best"] < 1.05 * found["gb_per_s"]["peak"]
        assert found["gb_per_s"]["peak"] > 1
        for point in found["points"]:
            assert point["samples"] == 8
            assert 0 < point["device_median_s"] < 1
        cifar10 = document(folder / "cifar10" / f"regression{suffix}.json")
        assert (cifar10["weights"] is None) == ("d2h" in suffix)
    pageable = document(folder / "3x224x224" / "regression.json")
    pinned = document(folder / "3x224x224" / "regression_h2d_pinned.json")
    assert pinned["slope_s_per_image"] < pageable["slope_s_per_image"]
    before = tree(tmp_path / "raw_data")
    assert run(*arguments) == 0
    assert tree(tmp_path / "raw_data") == before


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def test_a_copy_of_known_size_takes_as_long_as_its_bytes_need(memory):
    """Wall time holds the device's copy, and no copy is faster than the peak of the bus."""
    device = devices.select("cuda")
    with device.context:
        peak = measure.PEAK_BYTES / min(measure.peak_times(device, "h2d"))
        bench = Bench(device, 2**25, pinned=True, seed=0)
        samples = files.Samples()
        bench.time(Mode("h2d", memory), 2**25, 40, 3, samples)
    wall, on_device = np.median(samples.wall), np.median(samples.device)
    assert on_device > 0.95 * 2**25 / peak
    assert wall > 0.95 * 2**25 / peak
    if memory == "pinned":
        assert wall > 0.95 * on_device
        assert wall - on_device < 100e-6 + 0.1 * on_device
