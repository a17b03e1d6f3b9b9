"""``python -m cnn_engine.transfer``: organising and predicting, without a GPU."""

from __future__ import annotations

import csv
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
    document,
    error_line,
    run,
    tree,
    two_pieces,
    write_raw,
)

from cnn_engine.devices import cuda_module
from cnn_engine.transfer import plot
from cnn_engine.transfer.files import RawNetwork
from cnn_engine.transfer.subjects import Mode

ROOT = Path(__file__).resolve().parents[2]
BATCHES = np.arange(1, 65)
PNG = b"\x89PNG\r\n\x1a\n"
GPU = "Fake_GPU_1_test"


@pytest.fixture
def raw(tmp_path):
    write_raw(tmp_path / "raw", two_pieces, BATCHES, noise=0.005)
    return tmp_path / "raw"


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


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "too long"])
def test_raw_folders_that_are_none(tmp_path, capsys, kind):
    folder = tmp_path / "DIR"
    if kind == "file":
        folder.write_text("")
    elif kind == "empty":
        folder.mkdir()
    elif kind == "too long":
        folder = tmp_path / ("n" * 300)
        assert run("--output", folder, "--predict", 3) == 2
        assert str(folder) in error_line(capsys)
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
        (["--direction", "up"], "--direction: expected one of h2d, d2h, both, d2d, found 'up'"),
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
