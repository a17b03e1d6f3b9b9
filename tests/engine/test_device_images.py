"""Images that files are read into a GPU's memory as: the bits of images of the host, and faults told."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import fake_cuda
import numpy as np
import pytest
from test_engine import pixels

from cnn_engine import Engine, InputError


@pytest.fixture
def storage_dtype(tmp_path):
    """Returns a function that writes bytes to a file and opens it."""
    opened = []

    def store(data: bytes) -> int:
        path = tmp_path / str(len(opened))
        path.write_bytes(data)
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    yield store
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_rows_are_those_of_images_of_the_host(monkeypatch, rng, storage_dtype, dtype):
    fake_cuda.install(monkeypatch)
    with Engine("cifar10", device="cuda", variant="fused", data_mode="stream", chunk=8) as e:
        images = pixels(rng, 50, e.network.input_shape)
        if dtype == "float32":
            images = images.astype(np.float32) / 255 - 0.5
        descriptor = storage_dtype(b"head" + images.tobytes())
        found = e.device_images(60, dtype)
        assert found[:20].read(descriptor, 4) == images[:20].nbytes
        assert found[20:50].read(descriptor, 4 + images[:20].nbytes) == images[20:].nbytes
        rows = np.zeros((50, e.network.classes), np.float32)
        found[:50].predict(rows)
        assert rows.tobytes() == e.predict(images).tobytes()
        found[30:40].predict(rows[:10])
        assert np.array_equal(rows[:10], rows[30:40])
        found[:0].predict(rows[:0])
        assert found[:50].read(descriptor, 4 + images[:49].nbytes) == images[49:].nbytes
        with pytest.raises(InputError, match="out: expected 5 rows, found 6"):
            found[:5].predict(rows[:6])
        with pytest.raises(InputError, match="without a step"):
            found[::2]
    with pytest.raises(InputError, match="expected an open engine"):
        found[:50].predict(rows)


@pytest.mark.parametrize(
    "options",
    [{"device": "cpu"}, {"device": "cuda", "variant": "fused", "data_mode": "resident"},
     {"device": "cuda", "variant": "tiled", "data_mode": "stream", "chunk": 8}],
)  # fmt: skip
def test_where_it_brings_nothing_there_is_none(monkeypatch, options):
    fake_cuda.install(monkeypatch)
    with Engine("cifar10", **options) as e:
        assert not e.takes_files(50)
        with pytest.raises(InputError, match="passes in chunks, by one kernel, found 50 images"):
            e.device_images(50)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gpu_gives_the_same_bits(rng, storage_dtype, dtype):
    with Engine("cifar10", device="cuda", dtype=dtype) as e:
        images = pixels(rng, 40_001, e.network.input_shape)
        locked = e.empty_images(len(images))
        locked[...] = images
        wanted = e.predict(locked, batch=40_001).tobytes()
        descriptor = storage_dtype(images.tobytes())

        def call(_) -> bytes:
            found, rows = e.device_images(len(images)), e.empty_probabilities(len(images))
            assert found.read(descriptor, 0) == images.nbytes
            found.predict(rows)
            return rows.tobytes()

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(call, range(12))) == {wanted}


@pytest.mark.gpu
@pytest.mark.parametrize(("threads", "piece"), [(1, 1000), (3, 4096), (8, 1 << 20)])
def test_a_reader_reads_each_byte_once(rng, storage_dtype, threads, piece):
    import cupy

    from cnn_engine import _cuda

    data = rng.bytes(3_000_001)
    descriptor = storage_dtype(data)
    reader = _cuda.FileReader(0, threads, piece)
    target = cupy.empty(len(data), np.uint8)

    def part(first: int) -> int:
        size = min(700_000, len(data) - first)
        return reader.read(descriptor, first, size, target.data.ptr + first)

    for _ in range(3):
        target[...] = 0
        cupy.cuda.Device().synchronize()
        with ThreadPoolExecutor(5) as pool:
            assert sum(pool.map(part, range(0, len(data), 700_000))) == len(data)
        assert target.get().tobytes() == data
    assert reader.read(descriptor, 5, 0, target.data.ptr) == 0
    assert reader.read(descriptor, 0, 2_000_000, 0) == 2_000_000  # into the pieces alone
    # The end of a file, before a read, in it, and at a piece's end.
    assert reader.read(descriptor, len(data) - 10, 2_000_000, target.data.ptr) == 10
    assert reader.read(descriptor, len(data), 10, target.data.ptr) == 0
    assert reader.read(descriptor, len(data) - 2 * piece, 3 * piece, target.data.ptr) == 2 * piece
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.read(-1, 0, 10, target.data.ptr)
    assert reader.read(descriptor, 0, len(data), target.data.ptr) == len(data)
    assert target.get().tobytes() == data
