"""What INPUT names: image files, tars, Parquet files and arrays, found in one order on every run."""

from __future__ import annotations

import glob
import gzip
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, expected
from ..io.files import describe_os_error
from ..io.images import SUFFIXES
from . import packages

#: A CIFAR-10 record: a label and 3 x 32 x 32 pixels.
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + 3 * 32 * 32

#: Columns of Parquet files that are taken where ``--columns`` names none: the first that is there.
COLUMNS = {
    "image": ("image", "images", "img", "jpg", "jpeg", "png", "bytes", "pixels"),
    "label": ("label", "labels", "cls", "class", "target", "fine_label"),
    "id": ("id", "key", "__key__", "image_id"),
}

#: Kinds whose images are files, to be decoded; those of the others are arrays.
ENCODED = ("image", "tar", "parquet-bytes")

_IDX_TYPE_UINT8 = 8


@dataclass(frozen=True)
class Source:
    """A file of images.

    Attributes:
        kind: ``image``, ``tar``, ``cifar``, ``idx``, ``npy`` or ``npy-float32``, ``parquet-bytes``,
            ``parquet-uint8`` or ``parquet-float32``.
        path: as it was found from what the user gave.
        images: in it; None where only reading all of it tells.
        bytes: of the file.
        units: (images, bytes) of parts that are best read whole (row groups); empty: cut anywhere.
        whole: whether it can only be read from its beginning.
    """

    kind: str
    path: str
    images: int | None
    bytes: int
    units: tuple[tuple[int, int], ...] = ()
    whole: bool = False


@dataclass(frozen=True)
class Wanted:
    """What the files have to fit.

    Attributes:
        shape: [C, H, W] of the network's images.
        columns: of Parquet files: ``image``, ``label`` and ``id`` -> its name, where the user gave one.
    """

    shape: tuple[int, ...]
    columns: dict[str, str]


def find(inputs: Sequence[str], wanted: Wanted) -> Iterator[Source]:
    """Yields every file that ``inputs`` stand for: in their order, and within each sorted by name.

    An input is a file, a folder (searched through all that lies in it; hidden names and those that begin
    with ``_`` are passed over), a glob, or ``@LIST``, a file with one input a line.

    Raises:
        InputError: an input names nothing, nothing that is known, or the same as another.
    """
    paths = list(_expanded(inputs))
    _check_apart(paths)
    for path in paths:
        if os.path.isdir(path):
            yield from _folder(path, wanted, set())
        elif (source := examine(path, wanted)) is not None:
            yield source
        elif not _is_labels(path):
            raise expected(
                path, f"a file of images ({', '.join(_known())})", "another kind of file"
            )


def first_kind(inputs: Sequence[str], columns: dict[str, str]) -> str | None:
    """Returns of what kind the first input is; None, if it is at fault."""
    try:
        first = next(find(inputs, Wanted(CIFAR_SHAPE, columns)), None)
    except InputError:  # arrays of another shape, or a fault that planning tells
        return None
    return None if first is None else first.kind


def _known() -> list[str]:
    return [".tar", ".parquet", ".npy", "CIFAR's .bin", "IDX", *SUFFIXES]


def _expanded(inputs: Sequence[str], depth: int = 0) -> Iterator[str]:
    for text in inputs:
        if text.startswith("@") and not os.path.lexists(text):
            if depth:
                raise expected(text, "no list inside of a list", "one")
            yield from _expanded(_lines(text[1:]), depth + 1)
        elif os.path.exists(text):
            yield text
        else:
            found = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) else []
            if not found:
                raise expected(text or "INPUT", "a file, a folder or a glob of some", "nothing")
            yield from found


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.strip("\r\n") for line in file]
    except (OSError, ValueError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: expected a list of inputs, found: {reason}") from error
    return [line for line in lines if line.strip()]


def _check_apart(paths: Sequence[str]) -> None:
    """Refuses inputs that overlap: their images would have two rows each."""
    places: dict[str, str] = {}
    for path in paths:
        place = os.path.realpath(path)
        if place in places:
            raise expected(path, "each input once", f"it again as {places[place]}")
        places[place] = path
    for place, path in places.items():
        for folder in Path(place).parents:
            if str(folder) in places:
                raise expected(
                    path, "each image once", f"its folder {places[str(folder)]} beside it"
                )


def _folder(path: str, wanted: Wanted, seen: set[tuple[int, int]]) -> Iterator[Source]:
    try:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder that was gone through
            return
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    for entry in found:
        if entry.name.startswith((".", "_")):
            continue
        if os.path.isdir(entry.path):  # the entry's own raise an error for a link to itself
            yield from _folder(entry.path, wanted, seen)
        elif os.path.isfile(entry.path) and (source := examine(entry.path, wanted)) is not None:
            yield source


def _is_labels(path: str) -> bool:
    return "-labels-idx1-ubyte" in os.path.basename(path)


def examine(path: str, wanted: Wanted) -> Source | None:
    """Returns what a file has; None where its name is no image file's.

    Raises:
        InputError: it cannot be read, is broken, or its images are not of the network's shape.
    """
    name = os.path.basename(path).lower()
    examiner = None
    if name.endswith(SUFFIXES):
        examiner = _plain("image", 1)
    elif name.endswith(".tar"):
        examiner = _plain("tar", None)
    elif name.endswith(".parquet"):
        examiner = _parquet
    elif name.endswith(".npy"):
        examiner = _npy
    elif name.endswith(".bin"):
        examiner = _cifar
    elif "-images-idx3-ubyte" in name:
        examiner = _idx
    if examiner is None:
        return None
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe may never be written to
            raise expected(path, "a file of images", "a special file")
        return examiner(path, status.st_size, wanted)
    except (OSError, EOFError, zlib.error) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from error


def _plain(kind: str, images: int | None) -> Any:
    return lambda path, size, wanted: Source(kind, path, images, size)


def _check_shape(path: str, found: tuple[int, ...], wanted: Wanted) -> None:
    if tuple(found) != tuple(wanted.shape):
        raise expected(
            path, f"images of {list(wanted.shape)}, as the network reads", list(map(int, found))
        )


def _npy(path: str, size: int, wanted: Wanted) -> Source:
    shape, dtype, offset = npy_header(path)
    if len(shape) != 4 or dtype.name not in ("uint8", "float32"):
        raise expected(path, "uint8 or float32 [N, C, H, W]", f"{dtype} {list(shape)}")
    _check_shape(path, shape[1:], wanted)
    needed = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size < needed:
        raise expected(path, f"{needed:,} bytes, as its header says", f"{size:,}")
    return Source("npy" if dtype == np.uint8 else "npy-float32", path, shape[0], size)


def npy_header(path: str) -> tuple[tuple[int, ...], np.dtype, int]:
    """Returns (shape, type, where the data begins) of a ``.npy`` file in C order.

    Raises:
        InputError: it is none.
    """
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read is None:
                raise ValueError(f"format {version}")
            shape, fortran, dtype = read(file)
        except ValueError as error:
            raise expected(path, "a .npy file", str(error)) from error
        if fortran:
            raise expected(path, "an array in C order", "Fortran order")
        return shape, dtype, file.tell()


def _cifar(path: str, size: int, wanted: Wanted) -> Source:
    _check_shape(path, CIFAR_SHAPE, wanted)
    if not size or size % CIFAR_RECORD:
        raise expected(
            path, f"records of {CIFAR_RECORD} bytes, as CIFAR-10 has them", f"{size:,} bytes"
        )
    return Source("cifar", path, size // CIFAR_RECORD, size)


def open_idx(path: str) -> Any:
    """Opens an IDX file, which gzip may have compressed."""
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def idx_header(path: str, file: Any, dimensions: int) -> tuple[int, ...]:
    """Reads the dimensions at the beginning of an IDX file of uint8.

    Raises:
        InputError: it is none.
    """
    head = file.read(4 + 4 * dimensions)
    if len(head) < 4 + 4 * dimensions or head[:4] != bytes((0, 0, _IDX_TYPE_UINT8, dimensions)):
        raise expected(path, f"an IDX file of uint8 with {dimensions} dimensions", "something else")
    return tuple(int.from_bytes(head[at : at + 4], "big") for at in range(4, len(head), 4))


def idx_labels(path: str) -> str | None:
    """Returns the file of labels beside a file of images, or None."""
    folder, name = os.path.split(path)
    labels = os.path.join(folder, name.replace("-images-idx3-", "-labels-idx1-"))
    return labels if os.path.exists(labels) else None


def _idx(path: str, size: int, wanted: Wanted) -> Source:
    with open_idx(path) as file:
        count, rows, columns = idx_header(path, file, 3)
    _check_shape(path, (1, rows, columns), wanted)
    return Source("idx", path, count, size, whole=path.endswith(".gz"))


def _parquet(path: str, size: int, wanted: Wanted) -> Source:
    pa, pq = packages.arrow(), packages.parquet()
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except pa.ArrowException as error:
        raise expected(path, "a Parquet file", _first_line(error)) from error
    image = schema.field(column(path, schema, "image", wanted)).type
    units = tuple(
        (metadata.row_group(i).num_rows, metadata.row_group(i).total_byte_size)
        for i in range(metadata.num_row_groups)
    )
    kind = parquet_kind(path, image, wanted)
    return Source(kind, path, metadata.num_rows, size, units)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def column(path: str, schema: Any, role: str, wanted: Wanted) -> str:
    """Returns the name of the column that holds images, labels or ids; "" where there is none of the latter.

    Raises:
        InputError: the column that was named, or that of images, is not there.
    """
    named = wanted.columns.get(role)
    choices = (named,) if named else COLUMNS[role]
    for name in choices:
        if name in schema.names:
            return name
    if named or role == "image":
        found = ", ".join(schema.names) or "none"
        raise expected(path, f"a column {' or '.join(choices)} (--columns)", found)
    return ""


def parquet_kind(path: str, kind: Any, wanted: Wanted) -> str:
    """Returns what a column of Arrow type ``kind`` holds: files of images, or arrays.

    Raises:
        InputError: neither.
    """
    types = packages.arrow().types
    if types.is_struct(kind) and any(kind.field(i).name == "bytes" for i in range(kind.num_fields)):
        return "parquet-bytes"  # as Hugging Face's data sets have images
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "parquet-bytes"
    size = 1
    while types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        size = size * kind.list_size if types.is_fixed_size_list(kind) and size else 0
        kind = kind.value_type
    if str(kind) not in ("uint8", "float", "float32"):
        wants = "a column of bytes, or of lists of uint8 or float32"
        raise expected(path, wants, f"images of type {kind}")
    values = int(np.prod(wanted.shape))
    if size not in (0, values):  # 0: lists of any length, each of which is checked when read
        raise expected(path, f"{values} values an image, as the network reads", size)
    return "parquet-uint8" if str(kind) == "uint8" else "parquet-float32"
