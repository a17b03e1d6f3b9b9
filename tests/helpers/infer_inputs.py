"""Inputs of every kind for the tests of infer, from the same pixels."""

from __future__ import annotations

import io
import queue
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from cnn_engine.errors import CnnEngineError
from cnn_engine.infer.worker import Worker

#: How most tests run the command.
COMMON = ("--device", "cpu", "--workers", "1", "--no-ceilings")


def pixels(count: int, seed: int = 0) -> np.ndarray:
    """Returns smooth images, uint8 [count, 3, 32, 32], as JPEG keeps them."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (count, 3, 4, 4), np.uint8)
    return np.ascontiguousarray(coarse.repeat(8, 2).repeat(8, 3))


def encoded(image: np.ndarray, form: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file, form)
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image).transpose(2, 0, 1)


def write_tar(path: Path, files: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def make(kind: str, folder: Path, images: np.ndarray, parts: int = 1) -> np.ndarray:
    """Writes ``images`` as ``kind`` in ``parts`` files; returns what a reader is to get, in order.

    Labels, where the kind has them, are the image's number modulo 10.
    """
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.arange(len(images)) % 10
    files = [encoded(image) for image in images] if kind in JPEGS else []
    bounds = np.linspace(0, len(images), parts + 1).astype(int)
    for part, (first, last) in enumerate(pairwise(bounds)):
        path, some = folder / f"part-{part:03d}", range(first, last)
        if kind == "npy":
            np.save(f"{path}.npy", images[first:last])
        elif kind == "npy-float32":
            np.save(f"{path}.npy", images[first:last].astype(np.float32) / 255 - 0.5)
        elif kind == "cifar":
            records = np.concatenate(
                [
                    labels[first:last, None].astype(np.uint8),
                    images[first:last].reshape(len(some), -1),
                ],
                1,
            )
            records.tofile(f"{path}.bin")
        elif kind == "parquet-uint8":
            flat = pa.array(images[first:last].reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(flat, images[0].size)
            _write_parquet(f"{path}.parquet", column, labels[first:last])
        elif kind == "parquet-bytes":
            column = pa.array([files[at] for at in some], pa.binary())
            _write_parquet(f"{path}.parquet", column, labels[first:last])
        elif kind == "tar":
            members = []
            for at in some:
                members += [(f"{at:06d}.jpg", files[at]), (f"{at:06d}.cls", b"%d" % labels[at])]
            write_tar(Path(f"{path}.tar"), members)
        elif kind == "image":
            path.mkdir()
            for at in some:
                (path / f"{at:06d}.jpg").write_bytes(files[at])
    if kind == "npy-float32":
        return images.astype(np.float32) / 255 - 0.5
    return np.stack([decoded(data) for data in files]) if files else images


def _write_parquet(path: str, images: pa.Array, labels: np.ndarray) -> None:
    table = pa.table({"image": images, "label": pa.array(labels, pa.int64())})
    pq.write_table(table, path, row_group_size=50)


JPEGS = ("tar", "image", "parquet-bytes")
KINDS = ("npy", "npy-float32", "cifar", "parquet-uint8", "parquet-bytes", "tar", "image")
LABELLED = ("cifar", "parquet-uint8", "parquet-bytes", "tar")


def rows(folder: Path) -> pa.Table:
    """Returns what a command wrote, in order."""
    return pq.read_table(sorted(folder.glob("shard-*.parquet")))


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files of rows in ``folder``, by name."""
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def probabilities(table: pa.Table) -> np.ndarray:
    column = table["probabilities"].combine_chunks()
    return column.flatten().to_numpy().reshape(len(table) - column.null_count, -1)


class InlinePool:
    """Workers in threads of this process, which need not be started; otherwise as the local engine's."""

    start_limit_s = 300.0

    def __init__(self, config: dict, workers: int, cuda: bool) -> None:
        self._config, self._workers = config, {}
        self.events: queue.Queue = queue.Queue()

    def start(self, worker: int) -> None:
        def emit(event: dict) -> None:
            self.events.put((worker, event))

        try:
            self._workers[worker] = Worker({**self._config, "threads": 1}, emit)
        except CnnEngineError as error:
            emit({"event": "error", "message": str(error)})
        else:
            emit(self._workers[worker].hello())

    def send(self, worker: int, message: dict) -> None:
        self._workers[worker].handle(message)

    def cores(self) -> int:
        return 1

    def close(self) -> None:
        self._workers = {}
