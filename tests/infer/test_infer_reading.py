"""What infer reads into: memory for chunks, a GPU's, and stages that are kept beside each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_cuda
import infer_inputs
import numpy as np
import pytest

from cnn_engine import Engine, infer
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.errors import InputError
from cnn_engine.infer import buffers, formats, readers, shards, stage_limits
from cnn_engine.measure import environment
from cnn_engine.plan.schedule import Schedule


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    """Saves the time that processes take to start."""
    monkeypatch.setattr("cnn_engine.infer.local_pool.LocalPool", infer_inputs.InlinePool)


@pytest.fixture(scope="module")
def images():
    return infer_inputs.pixels(300)


def test_memory_does_not_grow_with_the_data(tmp_path):
    """Shards as of a million images and as of ten take the same, read and written as always."""
    code = """
import sys
import infer_inputs
from cnn_engine import infer
from cnn_engine.engine.engine import Engine
from cnn_engine.infer import local_pool, memory

def predict(self, images, batch, out):
    out[...] = images[:, 0, 0, :10]  # a network that costs nothing

Engine.predict, local_pool.LocalPool = predict, infer_inputs.InlinePool
assert infer.main(sys.argv[1:]) == 0
print(memory.peak_bytes())"""
    peaks = []
    for images, size in ((360_000, "12MB"), (1_200_000, "120MB")):
        folder = tmp_path / size
        folder.mkdir()
        array = np.lib.format.open_memmap(folder / "0.npy", "w+", np.uint8, (60_000, 3, 32, 32))
        del array  # a file without a block
        for number in range(1, images // 60_000):
            os.link(folder / "0.npy", folder / f"{number}.npy")
        words = [
            str(folder),
            "--output",
            str(tmp_path / f"rows-{size}"),
            "--shard-size",
            size,
            "--quiet",
            *infer_inputs.COMMON,
        ]
        more = {
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).resolve().parents[1] / "helpers"), *sys.path]
            ),
            "ARROW_DEFAULT_MEMORY_POOL": "system",  # as a worker has it, which is this process here
        }
        done = subprocess.run(
            [sys.executable, "-c", code, *words], check=True, capture_output=True, text=True,
            env={**os.environ, **more},
        )  # fmt: skip
        peaks.append(int(done.stdout))
    assert peaks[1] <= 1.05 * peaks[0]


def test_stages_are_kept_beside_each_other():
    """What is counted is what the slowest has done, and none goes far before it."""
    done = {"fast": 0, "slow": 0}
    most = 0

    def steps(name, images, seconds):
        nonlocal most
        while True:
            time.sleep(seconds)
            done[name] += images
            most = max(most, done["fast"] - done["slow"])
            yield images, 0

    beside = stage_limits._Beside(done, 100, 0.2)
    work = [("fast", steps("fast", 20, 0)), ("slow", steps("slow", 10, 0.002))]
    started = [threading.Thread(target=beside.work, args=each) for each in work]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    found = beside.found()
    assert found["seconds"] >= 0.2
    assert 0 < found["images"] <= min(5000 * found["seconds"], done["slow"])
    assert 0 < most <= 100 + 20 + 10


def test_a_stage_that_fails_ends_all_of_them():
    def broken():
        yield 1, 0
        raise OSError("gone")

    beside = stage_limits._Beside(["broken", "other"], 10, 60)
    other = threading.Thread(target=beside.work, args=("other", iter([(1, 0)] * 10**6)))
    other.start()
    beside.work("broken", broken())
    other.join()  # soon, of a million steps
    with pytest.raises(OSError, match="gone"):
        beside.found()


class _Slots:
    """Memory for chunks of arrays of so many images, kept."""

    def __init__(self, size):
        self.size, self.made = size, []

    def __call__(self):
        self.made.append(np.zeros((self.size, 3, 32, 32), np.uint8))
        return self

    def images(self, dtype):
        return self.made[-1]


def test_arrays_are_read_in_parts_while_the_next_chunk_is_begun(images, tmp_path, monkeypatch):
    monkeypatch.setattr(buffers, "READ_BYTES", 10_000)  # a chunk is 70 of them
    held, read_at = threading.Event(), buffers.read_at

    def waiting(*words):
        assert held.wait(30)
        return read_at(*words)

    monkeypatch.setattr(buffers, "read_at", waiting)
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path, some in zip(paths, (images[:150], images[150:]), strict=True):
        np.save(path, some)
    pieces = [shards.Piece("npy", str(path), 0, 150, 1) for path in paths]
    memory = _Slots(230)  # the first chunk is of both files
    wanted = formats.Wanted((3, 32, 32), {})
    found = list(readers.chunks(pieces, memory.size, wanted, memory))
    assert [len(chunk) for chunk in found] == [230, 70]
    assert not any(array.any() for array in memory.made)
    held.set()
    assert all(chunk.finish_reading() is not None for chunk in found)
    assert np.array_equal(memory.made[0], images[:230])
    assert np.array_equal(memory.made[1][:70], images[230:])


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that files are read into; returns the command's words for it."""
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(Schedule, "chunk", lambda *words, **more: 8)
    described = environment.describe(CpuDevice())
    monkeypatch.setattr(environment, "describe", lambda device: described)
    return ["--device", "cuda", "--workers", "1", "--variant", "fused", "--batch", "50"]


@pytest.mark.parametrize("kind", ["npy", "npy-float32", "cifar", "tar"])
def test_arrays_are_read_into_a_gpus_memory(kind, images, tmp_path, gpu, monkeypatch):
    wanted = infer_inputs.make(kind, tmp_path / "in", images, parts=2)
    found, read = [], buffers.read_into_device

    def noted(file, target, offset):
        found.append(len(target))
        return read(file, target, offset)

    monkeypatch.setattr(buffers, "read_into_device", noted)
    words = [tmp_path / "in", "--output", tmp_path / "out", "--shard-size", "330kB", *gpu]
    report = tmp_path / "report.json"
    more = [] if kind == "npy" else ["--no-ceilings"]
    assert infer.main([str(word) for word in (*words, "--json", report, *more)]) == 0
    assert (sum(found) >= 300) == kind.startswith("npy")
    document = json.loads(report.read_text())
    assert document["stages"]["read"]["images"] == document["stages"]["compute"]["images"] == 300
    table = infer_inputs.rows(tmp_path / "out")
    assert len(set(table["id"].to_pylist())) == 300
    with Engine("cifar10", device="cuda", variant="fused") as engine:
        rows = engine.predict(np.ascontiguousarray(wanted), batch=50)
    assert infer_inputs.probabilities(table).tobytes() == rows.tobytes()


def test_an_array_that_ends_while_a_gpu_reads_it_is_told(
    images, tmp_path, gpu, monkeypatch, capsys
):
    infer_inputs.make("npy", tmp_path / "in", images, parts=2)
    words = [str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--shard-size", "330kB", *gpu,
             "--no-ceilings"]  # fmt: skip
    read, path = buffers.read_into_device, tmp_path / "in/part-000.npy"
    whole = path.read_bytes()

    def cut(file, target, offset):
        if file.path == str(path):
            os.truncate(path, len(whole) // 2)
        return read(file, target, offset)

    monkeypatch.setattr(buffers, "read_into_device", cut)
    assert infer.main(words) == 1
    assert "bytes more, found its end" in capsys.readouterr().err
    before = infer_inputs.contents(tmp_path / "out")
    assert 0 < len(before) < 4
    path.write_bytes(whole)
    monkeypatch.setattr(buffers, "read_into_device", read)
    assert infer.main(words) == 0
    after = infer_inputs.contents(tmp_path / "out")
    assert before.items() <= after.items()
    assert len(infer_inputs.rows(tmp_path / "out")) == 300


def test_nothing_reads_into_memory_that_is_given_back(images, tmp_path, monkeypatch):
    monkeypatch.setattr(buffers, "READ_BYTES", 10_000)
    done, read_at = [], buffers.read_at

    def slow(*words):
        time.sleep(0.01)
        done.append(read_at(*words))
        return done[-1]

    monkeypatch.setattr(buffers, "read_at", slow)
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path in paths:
        np.save(path, images)
    pieces = [shards.Piece("npy", str(path), 0, 300, 1) for path in paths]
    np.save(paths[1], images[:200])  # since it was planned
    with pytest.raises(InputError, match="expected 300 images as planned"):
        list(readers.chunks(pieces, 1000, formats.Wanted((3, 32, 32), {}), _Slots(1000)))
    assert len(done) == -(
        -images.nbytes // 10_000
    )  # of the first file: all ended before it was told

    np.save(paths[1], images)
    memory = _Slots(600)
    (chunk,) = readers.chunks(pieces, 1000, formats.Wanted((3, 32, 32), {}), memory)
    assert chunk.finish_reading() is not None
    assert np.array_equal(memory.made[0][300:], images)
    done.clear()
    (chunk,) = readers.chunks(pieces, 1000, formats.Wanted((3, 32, 32), {}), memory)
    os.truncate(paths[0], 50_000)  # while it is read
    with pytest.raises(InputError, match="bytes more, found its end"):
        chunk.finish_reading()
