"""Files of images by format: their contents, read from headers, and the network's demands on them."""

from __future__ import annotations

import gzip
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import InputError, expected
from ..io.files import describe_os_error
from ..io.images import SUFFIXES
from . import packages
from .labels import idx_labels, is_text
from .stamps import stamp

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
            ``parquet-uint8``, ``parquet-float32``, or ``npz``: all inputs of a network by name.
        path: as it was found from what the user gave.
        images: in it; None where only reading all of it tells.
        bytes: of the file.
        units: (images, bytes) of parts that are best read whole (row groups); empty: cut anywhere.
        whole: whether it can only be read from its beginning.
        texts: whether labels may be texts.
        stamp: what the file was when it was found; see :func:`.stamps.stamp`.
    """

    kind: str
    path: str
    images: int | None
    bytes: int
    units: tuple[tuple[int, int], ...] = ()
    whole: bool = False
    texts: bool = False
    stamp: str = ""


@dataclass(frozen=True)
class Wanted:
    """Properties that the files have to have.

    Attributes:
        shape: [C, H, W] of the network's images.
        columns: of Parquet files: ``image``, ``label`` and ``id`` -> its name, where the user gave one.
        inputs: of the network: name, type, and shape for one row.
        a_file: whether a ``.npz`` is one row, all arrays of which are whole; else dimension 0 is the rows.
    """

    shape: tuple[int, ...]
    columns: dict[str, str]
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    a_file: bool = False


def known() -> list[str]:
    """Returns the names and endings of files of images."""
    return [".tar", ".parquet", ".npy", ".npz", "CIFAR's .bin", "IDX", *SUFFIXES]


def examine(path: str, wanted: Wanted) -> Source | None:
    """Returns the facts of a file; None where its name is no image file's.

    Raises:
        InputError: it cannot be read, is broken, or its images are not of the network's shape.
    """
    examiner = examiner_of(os.path.basename(path))
    if examiner is None:
        return None
    try:
        there = os.stat(path)
        if not stat.S_ISREG(there.st_mode):  # a pipe may never be written to
            raise expected(path, "a file of images", "a special file")
        source = examiner(path, there.st_size, wanted)
        return replace(source, stamp=stamp(source.kind, path))
    except (OSError, EOFError, zlib.error) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read: {reason}") from error


def examiner_of(name: str) -> Callable[[str, int, Wanted], Source] | None:
    """Returns the function that examines files of a name; None where it is no image file's."""
    name = name.lower()
    if name.endswith(SUFFIXES):
        return _plain("image", 1)
    if name.endswith(".tar"):
        return _plain("tar", None)
    for end, examiner in _ENDS.items():
        if name.endswith(end):
            return examiner
    return _idx if "-images-idx3-ubyte" in name else None


def _plain(kind: str, images: int | None) -> Any:
    texts = kind == "tar"  # a .cls may be anything
    return lambda path, size, wanted: Source(kind, path, images, size, texts=texts)


def _check_shape(path: str, found: tuple[int, ...], wanted: Wanted) -> None:
    if tuple(found) != tuple(wanted.shape):
        raise expected(
            path, f"images of {list(wanted.shape)}, as the network reads", list(map(int, found))
        )


def _npy(path: str, size: int, wanted: Wanted) -> Source:
    shape, dtype, offset = npy_header(path)
    if len(shape) != 4 or dtype not in (np.uint8, np.float32) or not dtype.isnative:
        raise expected(path, "uint8 or float32 [N, C, H, W]", f"{dtype} {list(shape)}")
    _check_shape(path, shape[1:], wanted)
    needed = offset + math.prod(shape) * dtype.itemsize
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
            read = _HEADERS.get(version)
            if read is None:
                raise ValueError(f"format {version}")
            shape, fortran, dtype = read(file)
        except OSError:
            raise
        except Exception as error:  # on broken headers, NumPy's reader fails in many ways
            words = " ".join(str(error).split()) or type(error).__name__
            raise expected(path, "a .npy file", words[:200]) from error
        if fortran:
            raise expected(path, "an array in C order", "Fortran order")
        if any(size < 0 for size in shape):
            raise expected(path, "sizes of 0 and more", list(shape))
        return tuple(map(int, shape)), dtype, file.tell()


_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def npz_headers(path: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Returns the shape and the type of each array in a ``.npz`` file, without reading them.

    Raises:
        InputError: it is none.
    """
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    version = np.lib.format.read_magic(file)
                    shape, _, dtype = _HEADERS[version](file)
                    found[name.removesuffix(".npy")] = (tuple(map(int, shape)), dtype)
    except OSError:
        raise
    except Exception as error:  # on broken archives, zipfile and NumPy's reader fail in many ways
        words = " ".join(str(error).split()) or type(error).__name__
        raise expected(path, "a .npz file", words[:200]) from error
    return found


def _npz(path: str, size: int, wanted: Wanted) -> Source:
    return Source("npz", path, check_npz(path, npz_headers(path), wanted), size, whole=True)


def check_npz(
    path: str, found: Mapping[str, tuple[tuple[int, ...], np.dtype]], wanted: Wanted
) -> int:
    """Returns the rows in a ``.npz`` file of all inputs of a network.

    Args:
        found: the shape and the type of each array.

    Raises:
        InputError: an array is not there, or of another type or shape.
    """
    rows: int | None = None
    for name, dtype, row in wanted.inputs:
        if name not in found:
            names = ", ".join(one for one, *_ in wanted.inputs)
            raise expected(path, f"the arrays {names}", ", ".join(found) or "none")
        shape, kind = found[name]
        if kind != np.dtype(dtype):
            raise expected(f"{path}: {name}", f"type {dtype}", kind)
        if not wanted.a_file and (shape[1:] != row or not shape):
            words = ", ".join(["N", *map(str, row)])
            raise expected(f"{path}: {name}", f"shape [{words}]", list(shape))
        if wanted.a_file and shape != row:
            raise expected(f"{path}: {name}", f"shape {list(row)}", list(shape))
        count = 1 if wanted.a_file else shape[0]
        if rows not in (None, count):
            raise expected(f"{path}: {name}", f"{rows} rows, as other arrays have", count)
        rows = count
    return rows or 0


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


def _idx(path: str, size: int, wanted: Wanted) -> Source:
    with open_idx(path) as file:
        count, rows, columns = idx_header(path, file, 3)
    _check_shape(path, (1, rows, columns), wanted)
    _check_idx_size(path, size, 16 + count * rows * columns)
    labels = idx_labels(path)
    if labels is not None:
        with open_idx(labels) as file:
            (found,) = idx_header(labels, file, 1)
        if found != count:
            raise expected(labels, f"{count:,} labels, one per image", f"{found:,}")
        _check_idx_size(labels, os.path.getsize(labels), 8 + count)
    return Source("idx", path, count, size, whole=path.endswith(".gz"))


#: How many times its size what deflate compresses may be, at most.
_MOST_DEFLATED = 1032


def _check_idx_size(path: str, size: int, needed: int) -> None:
    """Refuses a header that says more than the file can have; of a compressed one only reading tells all."""
    most = size * _MOST_DEFLATED if path.endswith(".gz") else size
    if most < needed:
        raise expected(path, f"{needed:,} bytes, as its header says", f"at most {most:,}")


def _parquet(path: str, size: int, wanted: Wanted) -> Source:
    pa, pq = packages.arrow(), packages.parquet()
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the latter of columns' names
        raise expected(path, "a Parquet file", _first_line(error)) from error
    image = schema.field(column(path, schema, "image", wanted)).type
    units = tuple(
        (metadata.row_group(i).num_rows, metadata.row_group(i).total_byte_size)
        for i in range(metadata.num_row_groups)
    )
    rows = sum(count for count, _ in units)
    most = max((nbytes for _, nbytes in units), default=0)
    if rows != metadata.num_rows or min(map(min, units), default=0) < 0 or most > _MOST_GROUP_BYTES:
        raise expected(path, "a sound Parquet file", "sizes in its footer that cannot be")
    kind = parquet_kind(path, image, wanted)
    label = column(path, schema, "label", wanted)
    texts = bool(label) and is_text(schema.field(label).type)
    return Source(kind, path, rows, size, units, texts=texts)


#: Bytes of a row group, uncompressed, that a footer may claim.
_MOST_GROUP_BYTES = 1 << 46


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
        if schema.names.count(name) > 1:
            raise expected(path, f"one column {name} (--columns)", schema.names.count(name))
        if name in schema.names:
            return name
    if named or role == "image":
        found = ", ".join(schema.names) or "none"
        raise expected(path, f"a column {' or '.join(choices)} (--columns)", found)
    return ""


def parquet_kind(path: str, kind: Any, wanted: Wanted) -> str:
    """Returns the contents of a column of Arrow type ``kind``: files of images, or arrays.

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
        raise expected(path, f"{values} values per image, as the network reads", size)
    return "parquet-uint8" if str(kind) == "uint8" else "parquet-float32"


_ENDS = {".parquet": _parquet, ".npy": _npy, ".npz": _npz, ".bin": _cifar}
