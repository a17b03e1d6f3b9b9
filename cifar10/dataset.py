"""CIFAR-10 images: from the binary records, an .npz, the JPEG copy, or made up.

The data set and its binary format: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny
Images", 2009, and https://www.cs.toronto.edu/~kriz/cifar.html. A record is one label byte and then
1,024 red, 1,024 green and 1,024 blue pixels, row-major; a file is records end to end. The original
files have 10,000 records each; any whole number of them is read.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import tarfile
import weakref
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import platformdirs

from cnn_engine import environment_variables
from cnn_engine.errors import InputError, expected
from cnn_engine.io.files import describe_os_error, status
from cnn_engine.workload import Dataset, data_folder, synthetic_images

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
IMAGE_SHAPE = (3, 32, 32)
IMAGE_BYTES = 3 * 32 * 32
RECORD_BYTES = 1 + IMAGE_BYTES

#: No source yields more than this (3 GB of pixels): a typing error must not fill the memory.
MAX_IMAGES = 1_000_000

#: The folder that the official archive unpacks to, and that ``cnn-engine download cifar10`` fills.
FOLDER = "cifar-10-batches-bin"
DATA_VARIABLE = "CNN_ENGINE_DATA"
DOWNLOAD_COMMAND = "cnn-engine download cifar10"

_CHUNK = 4096  # images handled at a time, so that temporary copies stay small
_MAX_JPEG_BYTES = 1 << 20  # a 32x32 JPEG is about 1 KB


def cache_folder() -> Path:
    """Returns the user's cache folder, in which the downloaded :data:`FOLDER` is looked for."""
    return platformdirs.user_cache_path("cnn_engine")


def load(
    spec: str | os.PathLike[str] = "auto", images: int | None = None, training: bool = False
) -> Dataset:
    """Loads images of CIFAR-10, or synthetic ones of its shape.

    Args:
        spec: ``"auto"`` (``$CNN_ENGINE_DATA``, then the user's cache, then synthetic images with a
            note that says so), ``"synthetic"``, or a path as :func:`find_files` takes it, or a folder
            that has :data:`FOLDER` in it, as the download leaves it.
        images: how many images, from the first; None for all there are.
        training: whether those of the test files are left out.

    Returns:
        images uint8 [N, 3, 32, 32]; labels uint8 [N], or None where the source has none.

    Raises:
        InputError: a file is missing, unreadable, broken or of another format, a label is above 9,
            or there are fewer images than asked for.
    """
    if images is not None and images < 1:
        raise expected("images", "at least 1", images)
    spec = os.fspath(spec)
    if spec == "synthetic":
        return synthetic(images)
    if spec != "auto":
        spec = data_folder(spec, FOLDER)
        return read(_files(spec, training), images, source=spec)
    if path := environment_variables.get(DATA_VARIABLE):
        path = data_folder(path, FOLDER)
        try:
            return read(_files(path, training), images, source=path)
        except InputError as error:
            if str(error).startswith("images"):  # the number is at fault, not the variable
                raise
            raise InputError(f"{DATA_VARIABLE}: {error}") from error
    cached = cache_folder() / FOLDER
    if os.path.isdir(cached):
        return read(_files(cached, training), images, source=str(cached))
    return synthetic(
        images,
        note=f"no CIFAR-10 files found, so the images are synthetic and have no labels; "
        f"`{DOWNLOAD_COMMAND}` fetches the real ones",
    )


def find_files(path: str | os.PathLike[str]) -> tuple[list[Path], list[Path]]:
    """Finds the training files and the test files that ``path`` stands for.

    ``path`` is a folder with ``data_batch_*.bin`` (taken in numeric order) and ``test_batch.bin``,
    or with ``train.tar`` and ``test.tar`` of the JPEG copy; or one file: an ``.npz``, a ``.tar`` of
    the JPEG copy, or binary records under any other name. One file counts as training data.

    Raises:
        InputError: there is nothing at ``path``, or a folder with none of the files.
    """
    path = Path(path)
    if not stat.S_ISDIR(status(path).st_mode):
        return [path], []
    try:
        names = os.listdir(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    matches = filter(None, (re.fullmatch(r"data_batch_([0-9]+)\.bin", name) for name in names))
    training = [path / m[0] for m in sorted(matches, key=lambda m: (int(m[1]), m[0]))]
    test = [path / "test_batch.bin"] if "test_batch.bin" in names else []
    if not training and not test:
        training = [path / "train.tar"] if "train.tar" in names else []
        test = [path / "test.tar"] if "test.tar" in names else []
    if not training and not test:
        wanted = "a folder with data_batch_*.bin or test_batch.bin (or train.tar, test.tar)"
        raise expected(str(path), wanted, "none of them")
    return training, test


def read(paths: Sequence[Path], images: int | None = None, source: str | None = None) -> Dataset:
    """Reads the first ``images`` images of ``paths``, one file after the other (None: all).

    Only what is asked for is read. ``source`` names the files in the result and in errors.

    Returns:
        images uint8 [N, 3, 32, 32]; labels uint8 [N], or None where a file has none.

    Raises:
        InputError: see :func:`load`.
    """
    source = source or ", ".join(map(str, paths))
    files = [_open(path) for path in paths]
    total = sum(map(len, files))
    wanted = total if images is None else images
    if wanted > total:
        raise expected("images", f"at most {total} (images in {source})", wanted)
    if wanted > MAX_IMAGES:
        raise expected(source if images is None else "images", f"at most {MAX_IMAGES}", wanted)
    pixels = np.empty((wanted, *IMAGE_SHAPE), np.uint8)
    labels: np.ndarray | None = np.empty(wanted, np.uint8)
    start = 0
    for file in files:
        stop = min(start + len(file), wanted)
        if stop == start:
            break
        found = file.read_into(pixels[start:stop])
        if found is None:
            labels = None
        elif labels is not None:
            labels[start:stop] = found
        start = stop
    return Dataset("CIFAR-10", source, pixels, labels)


def synthetic(images: int | None = None, note: str | None = None) -> Dataset:
    """Makes images of CIFAR-10's shape: a smooth coloured background with a disc before it.

    Only integer arithmetic is used, so that every machine gets the same bytes, and image i is the
    same however many are asked for.

    Returns:
        images uint8 [N, 3, 32, 32] (None: 1,000 of them), no labels.

    Raises:
        InputError: fewer than 1 or more than 1,000,000 images are asked for.
    """
    return synthetic_images(IMAGE_SHAPE, _synthetic, images, MAX_IMAGES, note)


def _synthetic(first: int, count: int) -> np.ndarray:
    """Makes synthetic images from the number ``first`` on: uint8 [count, 3, 32, 32]."""
    # SplitMix64 (Steele, Lea, Flood 2014), 81 bytes per image: 3 grids of 5x5, a colour, a disc.
    index = np.arange(first, first + count, dtype=np.uint64)
    z = index[:, None] * np.uint64(81) + np.arange(1, 82, dtype=np.uint64)
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    random = ((z ^ (z >> np.uint64(31))) >> np.uint64(56)).astype(np.int32)

    # Bilinear interpolation of the grids: pixel 8 * c + f lies f eighths past grid point c.
    cell, fraction = np.divmod(np.arange(32), 8)
    weight = np.zeros((32, 5), np.int32)
    weight[np.arange(32), cell] = 8 - fraction
    weight[np.arange(32), cell + 1] = fraction
    pixels = (weight @ random[:, :75].reshape(-1, 3, 5, 5) @ weight.T) >> 6

    colour = random[:, 75:78].reshape(-1, 3, 1, 1)
    row, column = (8 + random[:, k].reshape(-1, 1, 1, 1) % 16 for k in (78, 79))
    radius = 4 + random[:, 80].reshape(-1, 1, 1, 1) % 7
    y, x = np.ogrid[:32, :32]
    inside = (y - row) ** 2 + (x - column) ** 2 < radius**2
    return np.where(inside, colour, pixels).astype(np.uint8)


class _File(Protocol):
    """A file of images whose number is known before any of them is read."""

    def __len__(self) -> int: ...

    def read_into(self, pixels: np.ndarray) -> np.ndarray | None:
        """Fills ``pixels``, uint8 [N, 3, 32, 32], with the first N; returns labels uint8 [N]."""


def _files(path: str | os.PathLike[str], training: bool) -> list[Path]:
    first, test = find_files(path)
    if training and not first:
        wanted = "images to train on, such as data_batch_1.bin"
        raise expected(os.fspath(path), wanted, "those of the test alone")
    return first if training else first + test


def _open(path: Path) -> _File:
    found = status(path)
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device might never end
        raise expected(str(path), "a regular file", "a folder or special file")
    if found.st_size == 0:
        raise expected(str(path), "CIFAR-10 images", "an empty file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read: permission denied")
    kinds: dict[str, Callable[[Path, int], _File]] = {".npz": _NpzFile, ".tar": JpegTar}
    return kinds.get(path.suffix.lower(), _BinaryFile)(path, found.st_size)


def _check_labels(path: Path, labels: np.ndarray, first: int = 0) -> np.ndarray:
    """Returns ``labels`` (any integers, those of the records from ``first``) as uint8."""
    wrong = np.flatnonzero((labels < 0) | (labels >= len(CLASSES)))
    if wrong.size:
        where = f"{path}: record {first + wrong[0]} (the first is 0)"
        raise expected(where, "a label from 0 to 9", labels[wrong[0]])
    return labels.astype(np.uint8)


class _BinaryFile:
    """Binary records of 3,073 bytes."""

    def __init__(self, path: Path, size: int) -> None:
        if size % RECORD_BYTES:
            wanted = f"whole records of {RECORD_BYTES} bytes (label, 3x32x32 pixels)"
            whole, rest = divmod(size, RECORD_BYTES)
            raise expected(str(path), wanted, f"{size} bytes: {whole} records and {rest} bytes")
        self._path = path
        self._count = size // RECORD_BYTES

    def __len__(self) -> int:
        return self._count

    def read_into(self, pixels: np.ndarray) -> np.ndarray:
        labels = np.empty(len(pixels), np.uint8)
        try:
            with open(self._path, "rb") as file:
                for start in range(0, len(pixels), _CHUNK):
                    count = min(_CHUNK, len(pixels) - start)
                    data = np.fromfile(file, np.uint8, count * RECORD_BYTES)
                    if data.size < count * RECORD_BYTES:
                        raise InputError(f"{self._path}: became shorter while it was read")
                    records = data.reshape(count, RECORD_BYTES)
                    chunk = slice(start, start + count)
                    labels[chunk] = _check_labels(self._path, records[:, 0], start)
                    pixels[chunk] = records[:, 1:].reshape(count, *IMAGE_SHAPE)
        except OSError as error:
            raise InputError(f"{self._path}: cannot be read: {describe_os_error(error)}") from error
        return labels


def _read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Reads the header of an .npy stream: shape and dtype, to be judged before any data is read."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"expected .npy format 1.0 or 2.0, found {version[0]}.{version[1]}")
    shape, fortran_order, dtype = readers[version](file)
    if fortran_order and len(shape) > 1:
        raise ValueError("expected C order, found Fortran order")
    return shape, dtype


def _check_size(name: str, size: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Checks that ``size`` bytes after the header are as declared, before any are allocated."""
    declared = math.prod(shape) * dtype.itemsize
    if size != declared:
        raise ValueError(f"{name}: {size} bytes where {dtype} {list(shape)} takes {declared}")


def _read_npy_data(file: IO[bytes], count: int, dtype: np.dtype) -> np.ndarray:
    """Reads ``count`` elements that follow a header."""
    data = file.read(count * dtype.itemsize)
    if len(data) < count * dtype.itemsize:
        raise ValueError(f"expected {count * dtype.itemsize} bytes of data, found {len(data)}")
    return np.frombuffer(data, dtype, count)


class _NpzFile:
    """``images`` uint8 [N, 3, 32, 32] and perhaps ``labels`` (integers, [N]), from ``np.savez``.

    Members are read by hand rather than with ``np.load``, which allocates what a header claims.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
                self._has_labels = "labels.npy" in names
                shapes = {}
                for name in ("images.npy", "labels.npy") if self._has_labels else ("images.npy",):
                    if name not in names:
                        members = ", ".join(sorted(names)[:5]) or "nothing"
                        raise expected(str(path), "an array `images`", members)
                    with archive.open(name) as file:
                        shapes[name], dtype = _read_npy_header(file)
                        self._check(name, shapes[name], dtype)
                        size = archive.getinfo(name).file_size - file.tell()
                        _check_size(name, size, shapes[name], dtype)
        except InputError:
            raise
        except Exception as error:  # zipfile, zlib and NumPy have a dozen kinds for broken bytes
            raise self._broken(error) from error
        self._count = shapes["images.npy"][0]
        if self._has_labels and shapes["labels.npy"] != (self._count,):
            found = f"shape {shapes['labels.npy']}"
            raise expected(f"{path}: labels", f"shape ({self._count},) as there are images", found)
        if self._count == 0:
            raise expected(f"{path}: images", "at least one image", "none")

    def _broken(self, error: Exception) -> InputError:
        return InputError(f"{self._path}: expected a sound .npz, found: {_reason(error)}")

    def _check(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        found = f"{dtype} {list(shape)}"
        if name == "images.npy" and (dtype != np.uint8 or shape[1:] != IMAGE_SHAPE):
            raise expected(f"{self._path}: images", "uint8 [N, 3, 32, 32]", found)
        if name == "labels.npy" and (dtype.kind not in "iu" or len(shape) != 1):
            raise expected(f"{self._path}: labels", "integers [N]", found)

    def __len__(self) -> int:
        return self._count

    def read_into(self, pixels: np.ndarray) -> np.ndarray | None:
        try:
            with zipfile.ZipFile(self._path) as archive:
                with archive.open("images.npy") as file:
                    _read_npy_header(file)
                    for start in range(0, len(pixels), _CHUNK):
                        part = pixels[start : start + _CHUNK]
                        part[...] = _read_npy_data(file, part.size, part.dtype).reshape(part.shape)
                if not self._has_labels:
                    return None
                with archive.open("labels.npy") as file:
                    dtype = _read_npy_header(file)[1]
                    labels = _read_npy_data(file, len(pixels), dtype)
        except Exception as error:
            raise self._broken(error) from error
        return _check_labels(self._path, labels)


class JpegTar:
    """A tar of the JPEG copy: ``images.bin`` (JPEGs end to end), ``offsets.npy`` (uint32 [N, 2]:
    start, length) and ``labels.npy`` (uint8 [N]). Decoding needs Pillow.
    """

    _MEMBERS = ("images.bin", "offsets.npy", "labels.npy")

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._descriptor: int | None = None
        try:
            # "r:" refuses compression, so that no member is larger than the file.
            with tarfile.open(path, "r:") as archive:
                members = self._find_members(archive)
                self._offsets = self._read_array(archive, members["offsets.npy"], np.uint32, 2)
                self._labels = self._read_array(archive, members["labels.npy"], np.uint8, 1)
                images = members["images.bin"]
                self._data_start, self._data_size = images.offset_data, images.size
        except InputError:
            raise
        except Exception as error:  # tarfile and NumPy have several kinds for broken bytes
            raise InputError(f"{path}: expected a sound tar, found: {_reason(error)}") from error
        if not 0 < len(self._offsets) == len(self._labels):
            found = f"{len(self._offsets)} and {len(self._labels)}"
            raise expected(str(path), "as many offsets as labels, and at least one", found)

    def _find_members(self, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        members = {}
        for number, member in enumerate(archive):
            # A sparse member may claim more bytes than the archive holds.
            if member.name in self._MEMBERS and member.isfile() and not member.issparse():
                members[member.name] = member
            if len(members) == len(self._MEMBERS):
                return members
            if number >= 100:
                break
        missing = ", ".join(name for name in self._MEMBERS if name not in members)
        raise expected(str(self._path), f"the members {', '.join(self._MEMBERS)}", f"no {missing}")

    def _read_array(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, dtype: type, dimensions: int
    ) -> np.ndarray:
        file = archive.extractfile(member)
        assert file is not None  # a regular file, as _find_members saw to
        shape, found = _read_npy_header(file)
        if found != dtype or len(shape) != dimensions or shape[1:] != (2,)[: dimensions - 1]:
            wanted = f"{np.dtype(dtype)} {['[N]', '[N, 2]'][dimensions - 1]}"
            raise expected(f"{self._path}: {member.name}", wanted, f"{found} {list(shape)}")
        _check_size(member.name, member.size - file.tell(), shape, found)
        return _read_npy_data(file, math.prod(shape), found).reshape(shape)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> np.ndarray:
        """uint8 [N]; checked to be classes."""
        return _check_labels(self._path, self._labels)

    def jpeg(self, number: int) -> bytes:
        """Returns the file of one image; several threads may ask at once.

        Raises:
            InputError: it cannot be read, or is not within the archive.
        """
        start, length = self._offsets[number].tolist()
        if start + length > self._data_size or not 0 < length <= _MAX_JPEG_BYTES:
            wanted = f"a JPEG within the {self._data_size} bytes of images.bin"
            raise expected(self._where(number), wanted, f"{length} bytes at {start}")
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._descriptor)
            return os.pread(self._descriptor, length, self._data_start + start)
        except OSError as error:
            raise InputError(f"{self._path}: cannot be read: {describe_os_error(error)}") from error

    def _where(self, number: int) -> str:
        return f"{self._path}: image {number} (the first is 0)"

    def read_into(self, pixels: np.ndarray) -> np.ndarray:
        try:
            from PIL import Image
        except ImportError as error:
            wanted = "Pillow to decode the JPEGs (pip install pillow)"
            raise InputError(f"{self._path}: expected {wanted}, found no such package") from error
        for number in range(len(pixels)):
            pixels[number] = _decode_jpeg(Image, self._where(number), self.jpeg(number))
        return _check_labels(self._path, self._labels[: len(pixels)])


def _decode_jpeg(pillow_image, where: str, data: bytes) -> np.ndarray:
    """Decodes one JPEG: uint8 [3, 32, 32]."""
    try:
        with pillow_image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            size = image.size  # known from the header, before any pixel is decoded
            if size == (32, 32):
                return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except Exception as error:  # Pillow has several kinds for broken bytes
        raise InputError(f"{where}: expected a JPEG, found: {_reason(error)}") from error
    raise expected(where, "32x32 pixels", f"{size[0]}x{size[1]}")


def _reason(error: Exception) -> str:
    """Returns what ``error`` says, on one line and not at length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
