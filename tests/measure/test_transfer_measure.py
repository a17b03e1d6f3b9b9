"""``python -m cnn_engine.transfer``: measuring and resuming, on a device with known times and on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_models
import pytest
from fake_cupti import install
from onnx import helper
from transfers import (
    BREAK,
    SLOPE,
    FakeDevice,
    document,
    error_line,
    run,
    tree,
    two_pieces,
)

from cnn_engine import devices
from cnn_engine.measure import environment
from cnn_engine.measure.cupti import activity
from cnn_engine.transfer import command, files, measure
from cnn_engine.transfer.files import RawNetwork
from cnn_engine.transfer.measure import Bench, Settings
from cnn_engine.transfer.subjects import Mode, find

GPU = "Fake_GPU_1_test"


@pytest.fixture
def device(monkeypatch):
    """A device whose copies take exactly what :func:`two_pieces` says of CIFAR-10's images."""
    fake = FakeDevice(lambda nbytes: float(two_pieces(nbytes / 3072)))
    monkeypatch.setattr(command.devices, "select", lambda name: fake)
    monkeypatch.setattr(measure, "perf_counter", fake.now)
    monkeypatch.setattr(measure, "PEAK_BYTES", 2**20)
    monkeypatch.setattr(command, "PEAK_BYTES", 2**20)
    return fake


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
            assert times == pytest.approx([float(two_pieces(batch))] * 2, abs=1e-9)
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


def test_a_models_images_and_weights(device, tmp_path, capsys):
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "w"], ["y"], name="fc"),
    ]
    made = onnx_models.model(
        nodes, [onnx_models.tensor("x", ["n", 3, 8, "w"])], [onnx_models.tensor("y", ["n", 5])],
        {"w": np.ones((96, 5), np.float32)},
    )  # fmt: skip
    path = tmp_path / "small.onnx"
    path.write_bytes(made.SerializeToString())
    arguments = ["--batch", "1-4", "--repeats", 2, "--no-plot", "--output", tmp_path / "out"]
    shape = ["--input-shape", "x=1,3,8,4"]
    assert run("--model", path, *shape, *arguments) == 0
    (folder,) = (tmp_path / "out" / GPU).iterdir()
    found = document(folder / "regression_h2d_pageable_float32.json")
    assert found["image_bytes"] == 4 * 3 * 8 * 4
    assert found["weights"]["bytes"] == 4 * 96 * 5
    assert found["weights"]["samples"] == 2
    moved = {nbytes for nbytes, direction in device.copies if direction == "h2d"}
    assert {4 * 96, 8 * 96, 12 * 96, 16 * 96, 4 * 480} <= moved
    assert run("--model", path, *shape, "--dtype", "uint8", *arguments) == 0
    assert document(folder / "regression.json")["image_bytes"] == 96
    capsys.readouterr()
    for options, words in (
        (["--model", path, *shape, "--network", "cifar10"], "--dtype: expected uint8 or float32"),
        (["--model", path], "--input-shape x="),
        (["--model", tmp_path / "none.onnx"], "none.onnx"),
        (shape, "--input-shape: expected the option --model with it"),
    ):
        assert run(*options, *arguments) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("memory", ["managed", "graph"])
def test_prefetched_pages_and_copies_in_graphs(device, tmp_path, capsys, memory):
    """What moves pages back before a prefetch is not timed, and a launched copy takes what a copy does."""
    arguments = ["--network", "cifar10", "--batch", "1-9", "--repeats", 8, "--output", tmp_path]
    assert run(*arguments, "--direction", "both", "--memory", memory, "--predict", 5) == 0
    predicted = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert predicted == pytest.approx([float(two_pieces(5))] * 2, rel=1e-3)
    network = tmp_path / "raw_data" / GPU / "transfer" / "cifar10"
    for direction in ("h2d", "d2h"):
        for batch in (1, 9):
            folder, suffix = network / str(batch), f"_{direction}_{memory}"
            times = files.read_times(folder / f"data_transfer_time{suffix}.txt")
            assert times == pytest.approx([float(two_pieces(batch))] * 8, abs=1e-9)
            # A prefetch is no copy that a record or an event could tell of.
            there = (folder / f"device_transfer_time{suffix}.txt").exists()
            assert there == (memory == "graph")
        found = document(tmp_path / GPU / "cifar10" / f"regression_{direction}_{memory}.json")
        assert found["memory"] == memory
        assert found["weights"] is None
    assert (device.captured > 0) == (memory == "graph")
    moved = [direction for nbytes, direction in device.copies if nbytes == 9 * 3072]
    if memory == "managed":  # as many moves back
        assert min(moved.count("h2d"), moved.count("d2h")) >= 2 * 8
    device.corrupts = True
    with pytest.raises(measure.TransferMismatch, match=rf"\(h2d, {memory}, uint8, 3.072 kB\)"):
        Bench(device, 3072, (memory,), seed=0).time(
            Mode("h2d", memory), 3072, 1, 0, files.Samples()
        )


def test_pages_that_cannot_be_prefetched_are_refused(device, tmp_path, capsys):
    arguments = ["--shape", "3,8,8", "--batch", "1-4", "--memory", "managed", "--output", tmp_path]
    device.properties["concurrent_managed_access"] = False
    assert run(*arguments) == 2
    assert "--memory managed: expected a GPU whose pages can be prefetched" in error_line(capsys)
    device.properties["managed_memory"] = False
    assert run(*arguments) == 2
    assert "--memory managed: Fake GPU/1 (test) has no managed memory" in error_line(capsys)
    device.properties |= {"managed_memory": True, "concurrent_managed_access": True}
    device.free = 4 * 2**20
    assert run(*arguments, "--batch", 2**20 // 192 + 1) == 2
    assert "--memory managed: expected at most a quarter" in error_line(capsys)
    assert run("--shape", "3,8,8", "--direction", "d2d", "--memory", "graph") == 2
    assert "--memory: expected peer, pinned or both with --direction d2d" in error_line(capsys)
    assert run("--shape", "3,8,8", "--plan", "100", "--output-bytes", 4, "--memory", "managed") == 2
    assert "--memory: expected pageable or pinned with --plan, found managed" in error_line(capsys)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["managed", "graph"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_prefetches_and_graphs_move_bytes(memory, direction):
    """On a GPU: 8 MiB arrive as they were, in times that such a bus can have."""
    device = devices.select("cuda")
    samples = files.Samples()
    with device.context:
        bench = Bench(device, 2**23, (memory,), seed=0)
        bench.time(Mode(direction, memory), 2**23, 5, 2, samples)
    assert len(samples.wall) == 5
    assert 2**23 / 1e12 < min(samples.wall) < 1.0


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


@pytest.mark.parametrize("after", [0, 30, 500, 1300])
def test_interrupted_it_keeps_what_was_measured_and_goes_on_later(device, tmp_path, after):
    device.interrupt_after = after
    others = 20 + 20 + 1 + 20 * find("cifar10").weights["tensors"]  # the peak, the weights
    arguments = ["--network", "cifar10", "--batch", "1-20", "--repeats", 40, "--no-plot"]
    arguments += ["--quiet", "--output", tmp_path, "--hold-out", 5]
    assert run(*arguments) == 130
    raw = RawNetwork(tmp_path / "raw_data" / GPU / "transfer" / "cifar10")
    kept = sum(point.samples for point in raw.points().get(Mode(), []))
    groups, rest = divmod(max(after - others, 0), 3 + 10 + 1)  # warm-up, wall, check
    assert kept == min(10 * groups + min(max(rest - 3, 0), 10), 20 * 40)
    assert (tmp_path / GPU / "cifar10" / "data_transfer_time.csv").exists() == (kept > 0)
    assert not list(tmp_path.rglob(".*"))
    assert run(*arguments) == 0
    raw = RawNetwork(raw.folder)
    assert {point.samples for point in raw.points()[Mode()]} == {40}
    assert {len(raw.samples(Mode(), batch).device) for batch in range(1, 21)} == {10}
    found = document(tmp_path / GPU / "cifar10" / "regression.json")
    assert len(found["hold_out"]["batch_sizes"]) == 5


def test_events_are_less_what_an_empty_pair_of_them_takes(device, tmp_path):
    """And out of page-locked memory: pageable memory would hold the host's staging."""
    device.event_s = 2e-6
    pinned = []
    empty_pinned = device.empty_pinned
    device.empty_pinned = lambda shape, dtype: pinned.append(shape) or empty_pinned(shape, dtype)
    arguments = ["--shape", "3,32,32", "--batch", "1-4", "--repeats", 4, "--no-plot", "--quiet"]
    assert run(*arguments, "--output", tmp_path) == 0
    raw = RawNetwork(tmp_path / "raw_data" / GPU / "transfer" / "3x32x32")
    for batch in range(1, 5):
        assert raw.samples(Mode(), batch).device == pytest.approx([float(two_pieces(batch))])
    assert (4 * 3072,) in pinned
    found = document(tmp_path / GPU / "3x32x32" / "regression.json")
    assert found["environment"]["device_times"] == "events"
    assert found["environment"]["duration_s"] > 0
    assert found["environment"]["started"].endswith("Z")


def test_records_are_taken_after_all_wall_times(device, tmp_path, monkeypatch):
    cupti = install(monkeypatch)
    recorded = []

    def copy(to, source, nbytes, direction):
        FakeDevice._copy(device, to, source, nbytes, direction)
        on = bool(cupti.enabled)
        recorded.append(on)
        if on:  # at 1 GB/s
            cupti.copy(1 if direction == "h2d" else 2, nbytes)

    monkeypatch.setattr(device, "_copy", copy)
    arguments = ["--shape", "3,32,32", "--shape", "1,4,4", "--batch", "1-4", "--repeats", 8]
    assert run(*arguments, "--no-plot", "--quiet", "--output", tmp_path) == 0
    for name, size in (("3x32x32", 3072), ("1x4x4", 16)):
        raw = RawNetwork(tmp_path / "raw_data" / GPU / "transfer" / name)
        for batch in range(1, 5):
            wanted = [batch * size * 1e-9] * 2
            assert raw.samples(Mode(), batch).device == pytest.approx(wanted)
            assert len(raw.samples(Mode(), batch).wall) == 8
        found = document(tmp_path / GPU / name / "regression.json")
        assert found["device"]["slope_s_per_image"] == pytest.approx(size * 1e-9, rel=1e-3)
        assert found["environment"]["device_times"] == "activity records"
    # The last wall time, its check, and after it nothing but device times.
    assert sum(recorded) == 2 * 4 * 2
    groups = 2 * 4 * 4  # of wall times: warm-up, two copies, check
    once = 2 * 4 * 2 * (3 + 1 + 1)  # of device times: two rounds with a copy each
    assert not any(recorded[:-once])
    assert len(recorded) == 20 + 20 + 1 + groups * (3 + 2 + 1) + once


def test_records_that_are_lost_give_way_to_events(device, tmp_path, monkeypatch):
    install(monkeypatch)  # records nothing, as the stand-in's copies are none of its own
    arguments = ["--shape", "3,32,32", "--batch", "1-4", "--repeats", 4, "--no-plot", "--quiet"]
    assert run(*arguments, "--output", tmp_path) == 0
    raw = RawNetwork(tmp_path / "raw_data" / GPU / "transfer" / "3x32x32")
    assert raw.samples(Mode(), 3).device == pytest.approx([float(two_pieces(3))])


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
    assert len(document(path)["notes"]) == 1  # four sizes show little
    device.kernels.driver_version = lambda: 13010
    assert run(*arguments, "--repeats", 4) == 0
    assert "several machines" in document(path)["notes"][0]
    assert "CUDA 13.1" in document(path)["notes"][0]


@pytest.mark.parametrize(("plan", "repeats"), [(measure.plan, 10), (measure.plan_device, 40)])
def test_order_is_random_and_spreads_samples_over_the_run(plan, repeats):
    settings = Settings((Mode(), Mode("d2h")), tuple(range(1, 33)), repeats=repeats)
    raw = RawNetwork(Path("nowhere"))
    groups = plan(raw, settings)
    total = {}
    for group in groups:
        total[group.mode, group.batch] = total.get((group.mode, group.batch), 0) + group.copies
    assert set(total.values()) == {10}
    assert len(total) == 64
    batches = [group.batch for group in groups]
    assert abs(np.corrcoef(np.arange(len(batches)), batches)[0, 1]) < 0.3
    quarter = len(groups) // 4
    assert {group.batch for group in groups[:quarter]} == set(range(1, 33))
    assert plan(raw, settings) == groups
    other = Settings(settings.modes, settings.batches, settings.repeats, seed=1)
    assert plan(raw, other) != groups


def test_a_drift_of_the_device_does_not_look_like_a_slope(device, tmp_path):
    """Copies that take ever longer, whatever their size, leave the slope at zero."""
    device.seconds = lambda nbytes: 1e-5 * (1 + len(device.copies) / 5000)
    arguments = ["--shape", "3,32,32", "--batch", "1-100", "--repeats", 20, "--no-plot"]
    assert run(*arguments, "--quiet", "--output", tmp_path) == 0
    found = document(tmp_path / GPU / "3x32x32" / "regression.json")
    low, high = found["confidence_intervals"]["slope_s_per_image"]
    assert low < 0 < high or abs(found["slope_s_per_image"]) * 100 < 0.02 * found["intercept_s"]


def test_contents_are_fresh_for_every_group(device):
    bench = Bench(device, 3_000_000, ("pinned",), seed=0)
    arrays = [bench.host_array(3_000_000, memory).copy() for memory in ("pageable", "pinned") * 3]
    for index, array in enumerate(arrays):
        assert len(np.unique(array[:10_000])) == 256
        for other in arrays[:index]:
            assert np.mean(array == other) < 0.05


# ---- from a GPU to another ----


@pytest.fixture
def peer(device, monkeypatch):
    """Another device, ``cuda:1``, whose copies take a microsecond on the first one's clock."""
    other = FakeDevice(lambda nbytes: 0.0)
    other.name = "cuda:1"

    def seconds(nbytes: int) -> float:
        device.clock += 1e-6
        return 0.0

    other.seconds = seconds
    monkeypatch.setattr(
        command.devices, "select", {"cuda": device, "cuda:0": device, "cuda:1": other}.get
    )
    return other


def test_copies_to_another_gpu_are_timed_both_ways(device, peer, tmp_path, capsys):
    arguments = ["--network", "cifar10", "--batch", "1-16", "--repeats", 4, "--output", tmp_path]
    assert run(*arguments, "--direction", "d2d", "--peer", "cuda:1", "--predict", 8) == 0
    printed = capsys.readouterr().out
    assert "d2d, peer, uint8" in printed
    assert printed.count("(past the host, ") == 2  # the peak of either way
    direct = float(two_pieces(8))
    seconds = [float(line.split()[0]) for line in printed.splitlines()[-2:]]
    assert seconds == pytest.approx([direct, direct + 1e-6], rel=1e-3)
    raw = tmp_path / "raw_data" / GPU / "transfer"
    assert not list(raw.glob("cifar10/*/device_*"))
    assert not list(raw.glob("cifar10/model_*"))
    machine = document(raw / "machine.json")
    assert machine["environment"]["peer"] == "cuda:1"
    assert list(machine["peak"]) == ["d2d"]
    batch = {nbytes for nbytes, direction in device.copies if direction == "d2d"}
    assert batch == {3072 * n for n in range(1, 17)} | {measure.PEAK_BYTES}


def test_what_another_gpu_has_not_got_is_told(device, peer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(device, "copy_to_peer", lambda *_: None)
    arguments = ["--shape", "3,8,8", "--batch", "4", "--quiet", "--output", tmp_path]
    assert run(*arguments, "--direction", "d2d", "--peer", "cuda:1", "--memory", "peer") == 1
    assert "check of a copy (d2d, peer, uint8" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--direction", "d2d"], "--peer: expected the GPU that d2d copies to"),
        (["--peer", "cuda:1"], "--peer: expected --direction d2d with it"),
        (["--direction", "d2d", "--peer", "cuda:0"], "--peer: expected another GPU than"),
        (["--direction", "d2d", "--peer", "cpu"], "--peer: expected cuda or cuda:N"),
        (["--direction", "d2d", "--memory", "pageable"], "--memory: expected peer, pinned or both"),
        (["--memory", "peer"], "--memory: expected pageable, pinned, graph, managed or both"),
        (["--direction", "d2d", "--peer", "cuda:1"], "--memory peer: expected GPUs that reach"),
    ],
)
def test_peers_that_cannot_be_had(device, peer, tmp_path, capsys, arguments, found):
    device.reaches_others = False
    output = tmp_path / "out"
    assert run("--shape", "3,8,8", "--batch", "4", *arguments, "--output", output) == 2
    assert found in error_line(capsys)
    assert not output.exists()


def test_gpus_that_reach_no_other_copy_through_the_host(device, peer, tmp_path, capsys):
    device.reaches_others = False
    arguments = ["--shape", "3,8,8", "--batch", "1-4", "--repeats", 2, "--output", tmp_path]
    wanted = ["--direction", "d2d", "--peer", "cuda:1", "--memory", "pinned"]
    assert run(*arguments, *wanted) == 0
    assert "d2d, pinned, uint8" in capsys.readouterr().out


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.alone
def test_measuring_a_gpu(tmp_path, capsys):
    arguments = [
        "--network",
        "cifar10",
        "--shape",
        "3,224,224",
        "--batch",
        "1-64:3",
        "--repeats",
        40,
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
            assert point["samples"] == 40
            assert 0 < point["device_median_s"] < 1
            # What the device copied for is within what whoever waited for the copy waited.
            assert point["device_median_s"] < 1.05 * point["median_s"]
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
        bench = Bench(device, 2**25, ("pinned",), seed=0)
        samples = files.Samples()
        bench.time(Mode("h2d", memory), 2**25, 40, 3, samples)
        time = bench.time_by_events if activity.unavailable() else bench.time_recorded
        time(Mode("h2d", memory), 2**25, 10, 3, samples)
    wall, on_device = np.median(samples.wall), np.median(samples.device)
    assert on_device > 0.95 * 2**25 / peak
    assert wall > 0.95 * 2**25 / peak
    if memory == "pinned":
        assert wall > 0.95 * on_device
        assert wall - on_device < 100e-6 + 0.1 * on_device


@pytest.mark.gpu
@pytest.mark.alone
def test_copies_between_two_gpus(tmp_path, capsys):
    if devices.cuda_module.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = ["--shape", "3,224,224", "--batch", "1-32:5", "--repeats", 8, "--output", tmp_path]
    assert run(*arguments, "--device", "cuda:1", "--direction", "d2d", "--peer", "cuda:0") == 0
    printed = capsys.readouterr().out
    assert "d2d, peer, uint8" in printed
    assert "d2d, pinned, uint8" in printed
