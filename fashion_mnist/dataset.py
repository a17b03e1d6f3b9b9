"""Fashion-MNIST images, 48x48 as the course has them: from IDX files, or made up.

The data set: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking
Machine Learning Algorithms", 2017, https://github.com/zalandoresearch/fashion-mnist. Its format, IDX, is
that of MNIST: bytes 0, 0, a type (8: uint8), a number of dimensions, each dimension as a big-endian
uint32, then the data, row-major; plain or compressed by gzip. Images are uint8 [N, rows, columns], labels
uint8 [N]. Images of 28x28 are resized to 48x48; images of 48x48 are taken as they are.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import platformdirs

from cnn_engine import environment_variables
from cnn_engine.errors import InputError, expected
from cnn_engine.io.files import describe_os_error, status
from cnn_engine.workload import Dataset, data_folder, synthetic_images

CLASSES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
    "ankle boot",
)  # fmt: skip
IMAGE_SHAPE = (1, 48, 48)
#: Rows and columns of the images as they are published, and as the network takes them.
ORIGINAL_SIZE, SIZE = 28, 48

#: No source yields more than this (460 MB of pixels): a typing error must not fill the memory.
MAX_IMAGES = 200_000

#: The folder that ``cnn-engine download fashion_mnist`` fills, in the user's cache.
FOLDER = "fashion-mnist"
DATA_VARIABLE = "CNN_ENGINE_DATA"
DOWNLOAD_COMMAND = "cnn-engine download fashion_mnist"

#: What a folder is searched for, the first that is there: the names of the published files, and of
#: copies that were resized. The test images come first, since the course's figures are of them.
_SETS = (("t10k", "train"), ("t10k-48", "train-48"))
_UINT8 = 8  # IDX's type
_CHUNK = 1024  # images handled at a time, so that temporary copies stay small
_MOST_DEFLATED = 1032  # bytes that one byte of gzip can stand for (zlib's technical details)


def cache_folder() -> Path:
    """Returns the folder of the user's cache that the downloaded files are looked for in."""
    return platformdirs.user_cache_path("cnn_engine") / FOLDER


def load(
    spec: str | os.PathLike[str] = "auto", images: int | None = None, training: bool = False
) -> Dataset:
    """Loads images of Fashion-MNIST, or synthetic ones of the network's shape.

    Args:
        spec: ``"auto"`` (``$CNN_ENGINE_DATA``, then the user's cache, then synthetic images with a
            note that says so), ``"synthetic"``, or a path as :func:`find_files` takes it, or a folder
            that has :data:`FOLDER` in it.
        images: how many images, from the first; None for all there are.
        training: whether those of the test files are left out.

    Returns:
        images uint8 [N, 1, 48, 48]; labels uint8 [N], or None (with a note) where there are none.

    Raises:
        InputError: a file is missing, unreadable, broken or of another format, images and labels
            differ in number, a label is above 9, or there are fewer images than asked for.
    """
    if images is not None and images < 1:
        raise expected("images", "at least 1", images)
    spec = os.fspath(spec)
    if spec == "synthetic":
        return synthetic(images)
    if spec != "auto":
        spec = data_folder(spec, FOLDER)
        return read(find_files(spec, training), images, source=spec)
    if path := environment_variables.get(DATA_VARIABLE):
        path = data_folder(path, FOLDER)
        try:
            return read(find_files(path, training), images, source=path)
        except InputError as error:
            if str(error).startswith("images"):  # the number is at fault, not the variable
                raise
            raise InputError(f"{DATA_VARIABLE}: {error}") from error
    cached = cache_folder()
    what, verb = "no Fashion-MNIST files found", "fetches the real ones"
    if cached.is_dir():
        if not _unfinished(cached):
            return read(find_files(cached, training), images, source=str(cached))
        what, verb = f"the download in {cached} is not complete", "resumes it"
    return synthetic(
        images,
        note=f"{what}, so the images are synthetic and have no labels; `{DOWNLOAD_COMMAND}` {verb}",
    )


def _unfinished(folder: Path) -> bool:
    """Whether a download into ``folder`` was cut short: the file under way, or all of them, are missing.

    One that replaces what is there (``--force``) leaves each old file until the new one is whole.
    """
    names = _names(folder)
    return _under_way(names) or not any("images-idx3" in name for name in names)


def _under_way(names: list[str]) -> bool:
    """Whether a download left one of these files, of one folder, in part only."""
    return any(name.partition(".part")[0] not in names for name in names)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {describe_os_error(error)}") from error


def find_files(
    path: str | os.PathLike[str], training: bool = False
) -> list[tuple[Path, Path | None]]:
    """Finds the files of images that ``path`` stands for, each with its file of labels.

    ``path`` is one file of images, or a folder with ``t10k-images-idx3-ubyte`` and perhaps
    ``train-images-idx3-ubyte``, with or without ``.gz`` (failing that, ``t10k-48-images-...``). Labels
    are beside the images, with ``labels-idx1`` in place of ``images-idx3``; None where there are none.
    For training ``t10k-...`` are left out; one file is what is trained on.

    Raises:
        InputError: there is nothing at ``path``, or a folder with none of the files.
    """
    path = Path(path)
    if not stat.S_ISDIR(status(path).st_mode):
        return [(path, _labels_of(path))]
    for names in _SETS:
        parts = [name for name in names if not (training and name.startswith("t10k"))]
        stems = [f"{name}-images-idx3-ubyte" for name in parts]
        found = [file for stem in stems if (file := _first_file(path, stem)) is not None]
        if found:
            return [(file, _labels_of(file)) for file in found]
    found = "none"
    if _under_way(_names(path)):
        found = f"a download that is not complete; `{DOWNLOAD_COMMAND} --output {path}` resumes it"
    which = "train-images-idx3-ubyte" if training else "t10k-images-idx3-ubyte or train-..."
    raise expected(str(path), f"a folder with {which} (or .gz)", found)


def _first_file(folder: Path, stem: str) -> Path | None:
    """Returns the file called ``stem``, plain (which is quicker to read) or ``.gz``, or None."""
    return next((folder / n for n in (stem, f"{stem}.gz") if os.path.lexists(folder / n)), None)


def _labels_of(images: Path) -> Path | None:
    stem = images.name.removesuffix(".gz").replace("images-idx3", "labels-idx1")
    if stem == images.name.removesuffix(".gz"):  # labels cannot be told from the name
        return None
    return _first_file(images.parent, stem)


def read(
    files: list[tuple[Path, Path | None]], images: int | None = None, source: str | None = None
) -> Dataset:
    """Reads the first ``images`` images of ``files``, one after the other (None: all).

    Only what is asked for is read. ``source`` names the files in the result and in errors.

    Raises:
        InputError: see :func:`load`.
    """
    source = source or ", ".join(str(path) for path, _ in files)
    total = sum(_header(path, 3).count for path, _ in files)
    wanted = total if images is None else images
    if wanted > total:
        raise expected("images", f"at most {total} (images in {source})", wanted)
    if wanted > MAX_IMAGES:
        raise expected(source if images is None else "images", f"at most {MAX_IMAGES}", wanted)
    pixels = np.empty((wanted, *IMAGE_SHAPE), np.uint8)
    labels: np.ndarray | None = np.empty(wanted, np.uint8)
    note = None
    start = 0
    for path, labels_path in files:
        stop = start + _read_images(path, pixels[start:, 0])
        if labels_path is None:
            labels = None
            note = f"{path} has no file of labels beside it, so correctness is not known"
        elif labels is not None:
            _read_labels(labels_path, path, labels[start:stop])
        start = stop
        if start == wanted:
            break
    return Dataset("Fashion-MNIST", source, pixels, labels, note)


def resize(images: np.ndarray) -> np.ndarray:
    """Resizes uint8 [N, 28, 28] to uint8 [N, 48, 48], byte for byte as the course did.

    The course called scikit-image: ``resize(image / 256.0, (48, 48), mode="constant", cval=0,
    anti_aliasing=False) * 256``, cast to uint8. That is bilinear interpolation at pixel centres with zeros
    around the image, in float64, and the cast cuts off the fraction: where the exact value is a whole
    number, the rounding of each step decides. So the steps are those of ``scipy.ndimage.zoom``, in its
    order, rather than a dependency of 60 MB for twenty lines; a test compares the two.
    """
    result = np.empty((len(images), SIZE, SIZE), np.uint8)
    centre = (np.arange(SIZE) + 0.5) * (ORIGINAL_SIZE / SIZE) - 0.5
    near = np.floor(centre).astype(int)
    far_weight = centre - near
    near_weight = 1 - far_weight
    near += 1  # in the padded image
    for start in range(0, len(images), _CHUNK):
        part = images[start : start + _CHUNK] / 256.0
        padded = np.pad(part, ((0, 0), (1, 1), (1, 1)))
        above = padded[:, near] * near_weight[:, None]
        below = padded[:, near + 1] * far_weight[:, None]
        value = above[:, :, near] * near_weight
        value += above[:, :, near + 1] * far_weight
        value += below[:, :, near] * near_weight
        value += below[:, :, near + 1] * far_weight
        # scikit-image keeps the result within the image's own range, which the zeros around fall short of.
        lowest, highest = part.min(axis=(1, 2)), part.max(axis=(1, 2))
        np.clip(value, lowest[:, None, None], highest[:, None, None], out=value)
        result[start : start + _CHUNK] = value * 256
    return result


def synthetic(images: int | None = None, note: str | None = None) -> Dataset:
    """Makes images of the network's shape: a smooth background with a bright disc before it.

    Only integer arithmetic is used, so that every machine gets the same bytes, and image i is the
    same however many are asked for.

    Returns:
        images uint8 [N, 1, 48, 48] (None: 1,000 of them), no labels.

    Raises:
        InputError: fewer than 1 or more than 200,000 images are asked for.
    """
    return synthetic_images(IMAGE_SHAPE, _synthetic, images, MAX_IMAGES, note)


def _synthetic(first: int, count: int) -> np.ndarray:
    """Makes synthetic images from the number ``first`` on: uint8 [count, 1, 48, 48]."""
    # Philox's stream is fixed by its definition, and can be entered anywhere. 56 bytes per image are
    # used (a grid of 7x7, a disc) of the 64 that two of its counts give.
    generator = np.random.Philox(key=SIZE).advance(2 * first)
    random = generator.random_raw(8 * count).astype("<u8").view(np.uint8).reshape(count, 64)
    random = random.astype(np.int32)

    # Bilinear interpolation of the grid: pixel 8 * c + f lies f eighths past grid point c.
    cell, fraction = np.divmod(np.arange(SIZE), 8)
    weight = np.zeros((SIZE, 7), np.int32)
    weight[np.arange(SIZE), cell] = 8 - fraction
    weight[np.arange(SIZE), cell + 1] = fraction
    background = (weight @ (random[:, :49].reshape(-1, 7, 7) // 2) @ weight.T) >> 6

    row, column = (12 + random[:, k].reshape(-1, 1, 1) % 24 for k in (49, 50))
    radius = 6 + random[:, 51].reshape(-1, 1, 1) % 11
    brightness = 128 + random[:, 52].reshape(-1, 1, 1) // 2
    y, x = np.ogrid[:SIZE, :SIZE]
    inside = (y - row) ** 2 + (x - column) ** 2 < radius**2
    return np.where(inside, brightness, background).astype(np.uint8)[:, None]


# IDX


@dataclass(frozen=True)
class _Header:
    """What the head of an IDX file says."""

    shape: tuple[int, ...]
    nbytes: int  # of the header itself

    @property
    def count(self) -> int:
        return self.shape[0]


@contextmanager
def _reading(path: Path) -> Iterator[tuple[IO[bytes], int, bool]]:
    """Opens an IDX file for reading; yields the stream, the file's size, and whether it is gzip.

    What the disk and the decompressor refuse becomes an error about ``path``.
    """
    if not stat.S_ISREG(status(path).st_mode):  # reading a pipe or a device might never end
        raise expected(str(path), "a regular file", "a folder or special file")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise expected(str(path), "an IDX file", "an empty file")
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if compressed:
                with gzip.GzipFile(fileobj=file) as stream:
                    yield stream, size, True
            else:
                yield file, size, False
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise expected(str(path), "a sound gzip file", " ".join(str(error).split())) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from error


def _take(stream: IO[bytes], nbytes: int, path: Path, what: str) -> bytes:
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise expected(f"{path}: {what}", f"{nbytes} bytes", f"an end after {len(data)}")
    return data


def _read_header(
    stream: IO[bytes], size: int, compressed: bool, path: Path, dimensions: int
) -> _Header:
    """Reads the head of an IDX file of ``dimensions`` dimensions, and checks what it claims."""
    head = _take(stream, 4, path, "header")
    if head[:2] != b"\0\0" or head[2] != _UINT8 or head[3] != dimensions:
        wanted = f"00 00 {_UINT8:02x} {dimensions:02x} (IDX, uint8, {dimensions} dimensions)"
        raise expected(f"{path}: header", wanted, head.hex(" "))
    data = _take(stream, 4 * dimensions, path, "header")
    shape = tuple(int(length) for length in np.frombuffer(data, ">u4"))
    header = _Header(shape, 4 + 4 * dimensions)
    sizes = (ORIGINAL_SIZE, SIZE)
    if dimensions == 3 and shape[1:] not in {(length, length) for length in sizes}:
        found = f"{shape[1]}x{shape[2]}"
        raise expected(str(path), "images of 28x28 or 48x48 pixels", found)
    if header.count == 0:
        raise expected(str(path), "at least one image or label", "none")
    declared = header.nbytes + int(np.prod(shape, dtype=object))
    if not compressed and size != declared:
        raise expected(str(path), f"{declared} bytes, as {list(shape)} takes", f"{size} bytes")
    if compressed and declared > size * _MOST_DEFLATED:
        raise expected(str(path), f"{declared} bytes, as {list(shape)} takes", "less than that")
    return header


def _header(path: Path, dimensions: int) -> _Header:
    with _reading(path) as (stream, size, compressed):
        return _read_header(stream, size, compressed, path, dimensions)


def _read_data(
    stream: IO[bytes], header: _Header, path: Path, count: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields the first ``count`` images or labels in parts, and checks the end if it comes there."""
    item = header.shape[1:]
    nbytes = int(np.prod(item, dtype=np.int64))
    for start in range(0, count, _CHUNK):
        part = min(_CHUNK, count - start)
        data = _take(stream, part * nbytes, path, f"{start} to {start + part}")
        yield slice(start, start + part), np.frombuffer(data, np.uint8).reshape(part, *item)
    # Reading the end also checks gzip's checksum of all that came before.
    if count == header.count and stream.read(1):
        raise expected(str(path), f"an end after {list(header.shape)}", "more bytes")


def _read_images(path: Path, pixels: np.ndarray) -> int:
    """Fills ``pixels``, uint8 [N, 48, 48], as far as the file goes; returns how many there were."""
    with _reading(path) as (stream, size, compressed):
        header = _read_header(stream, size, compressed, path, 3)
        count = min(header.count, len(pixels))
        for where, images in _read_data(stream, header, path, count):
            pixels[where] = images if header.shape[1] == SIZE else resize(images)
    return count


def _read_labels(path: Path, images_path: Path, labels: np.ndarray) -> None:
    """Fills ``labels``, uint8 [N], with the first N of the labels of ``images_path``."""
    images = _header(images_path, 3).count
    with _reading(path) as (stream, size, compressed):
        header = _read_header(stream, size, compressed, path, 1)
        if header.count != images:
            wanted = f"{images} labels, as {images_path.name} has images"
            raise expected(str(path), wanted, header.count)
        for where, values in _read_data(stream, header, path, len(labels)):
            labels[where] = values
            if (values >= len(CLASSES)).any():
                index = int(np.argmax(values >= len(CLASSES)))
                place = f"{path}: label {where.start + index} (the first is 0)"
                raise expected(place, "a label from 0 to 9", values[index])
