"""Finds the inputs: image files, tars, Parquet files and arrays, in one order on every run."""

from __future__ import annotations

import glob
import gzip
import hashlib
import math
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, expected
from ..io.files import describe_os_error, status
from ..io.images import SUFFIXES
from . import packages
from .labels import is_text

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
        stamp: what the file was when it was found; see :func:`stamp`.
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


def find(inputs: Sequence[str], wanted: Wanted) -> Iterator[Source]:
    """Yields every file that ``inputs`` stand for: in their order, and within each sorted by name.

    An input is a file, a folder (searched through all that lies in it; hidden names and those that begin
    with ``_`` are passed over), a glob, or ``@LIST``, a file with one input a line.

    Raises:
        InputError: an input names nothing, nothing that is known, or the same as another.
    """
    paths = list(_expanded(inputs))
    apart = _Apart() if len(paths) > 1 else None
    for path in paths:
        if apart is not None:
            apart.begin(path)
        if os.path.isdir(path):
            yield from _folder(path, wanted, set(), apart)
        elif (source := examine(path, wanted)) is not None:
            yield source
        elif not _is_labels(path):
            raise expected(
                path, f"a file of images ({', '.join(_known())})", "another kind of file"
            )


def first_kind(inputs: Sequence[str], columns: dict[str, str]) -> str | None:
    """Returns the kind of the first input; None, if it is at fault."""
    try:
        first = next(find(inputs, Wanted(CIFAR_SHAPE, columns)), None)
    except InputError:  # arrays of another shape, or a fault that planning tells
        return None
    return None if first is None else first.kind


def _known() -> list[str]:
    return [".tar", ".parquet", ".npy", ".npz", "CIFAR's .bin", "IDX", *SUFFIXES]


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


class _Apart:
    """Refuses inputs that overlap, by links too: their images would have two rows each.

    Within one input, every name of a file is a row. All folders are kept, but of their files only those that
    have other names: the others are found by their folders.
    """

    def __init__(self) -> None:
        self._folders: dict[tuple[int, int], int] = {}
        self._files: dict[tuple[int, int], int] = {}
        self._inputs: list[str] = []

    def begin(self, path: str) -> None:
        """Begins with the next input."""
        self._inputs.append(path)
        if os.path.isfile(path):
            self.file(path, status(Path(path)), named=True)

    def folder(self, path: str, found: os.stat_result) -> None:
        """Notes a folder of the input.

        Raises:
            InputError: it is in an input before this one.
        """
        self._add(self._folders, path, found, "each folder once")

    def file(self, path: str, found: os.stat_result, named: bool = False) -> None:
        """Notes a file of the input.

        Args:
            named: whether it has, or may have, other names.

        Raises:
            InputError: it is in an input before this one.
        """
        if named or (found.st_dev, found.st_ino) in self._files:
            self._add(self._files, path, found, "each image once")
        if named:
            place, name = os.path.split(os.path.realpath(path))
            if _examiner(name) is not None and not _is_hidden(name):
                inside = status(Path(place))
                owner = self._folders.get((inside.st_dev, inside.st_ino))
                if owner is not None and owner != len(self._inputs):
                    raise expected(path, "each image once", f"it in {self._inputs[owner - 1]} too")

    def _add(self, known: dict, path: str, found: os.stat_result, wanted: str) -> None:
        this = len(self._inputs)
        owner = known.setdefault((found.st_dev, found.st_ino), this)
        if owner != this:
            raise expected(path, wanted, f"it in {self._inputs[owner - 1]} too")


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _folder(
    path: str, wanted: Wanted, seen: set[tuple[int, int]], apart: _Apart | None
) -> Iterator[Source]:
    try:
        place = os.stat(path)
        if (place.st_dev, place.st_ino) in seen:  # a link to a folder that was gone through
            return
        seen.add((place.st_dev, place.st_ino))
        if apart is not None:
            apart.folder(path, place)
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    for entry in found:
        if _is_hidden(entry.name):
            continue
        if os.path.isdir(entry.path):  # the entry's own raise an error for a link to itself
            yield from _folder(entry.path, wanted, seen, apart)
        elif os.path.isfile(entry.path) and (source := examine(entry.path, wanted)) is not None:
            if apart is not None:
                there = status(Path(entry.path))
                apart.file(entry.path, there, entry.is_symlink() or there.st_nlink > 1)
            yield source


def _is_labels(path: str) -> bool:
    return "-labels-idx1-ubyte" in os.path.basename(path)


def examine(path: str, wanted: Wanted) -> Source | None:
    """Returns the facts of a file; None where its name is no image file's.

    Raises:
        InputError: it cannot be read, is broken, or its images are not of the network's shape.
    """
    examiner = _examiner(os.path.basename(path))
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


def _examiner(name: str) -> Callable[[str, int, Wanted], Source] | None:
    """Returns what tells of a file by its name what it has; None where that is no image file's."""
    name = name.lower()
    if name.endswith(SUFFIXES):
        return _plain("image", 1)
    if name.endswith(".tar"):
        return _plain("tar", None)
    for end, examiner in _ENDS.items():
        if name.endswith(end):
            return examiner
    return _idx if "-images-idx3-ubyte" in name else None


#: Bytes of a part that a stamp is of, and parts of a file: of one image its two ends, for there are many.
_STAMPED_BYTES, _STAMPED_PARTS, _STAMPED_OF_AN_IMAGE = 1 << 12, 16, 2


def stamp(kind: str, path: str) -> str:
    """Returns a stamp by which a change of a file is seen: size, time, and a digest of parts of it.

    Raises:
        OSError: it cannot be read.
    """
    parts = _STAMPED_OF_AN_IMAGE if kind == "image" else _STAMPED_PARTS
    stamps = [_stamp(path, parts)]
    if kind == "idx" and (labels := idx_labels(path)) is not None:
        stamps.append(_stamp(labels, parts))
    return " ".join(stamps)


def _stamp(path: str, parts: int) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # whoever reads all of it will say so
        there = os.stat(path)
        found = "unread"
    else:
        try:
            there = os.fstat(descriptor)
            digest = hashlib.blake2b(digest_size=12)
            last = max(there.st_size - _STAMPED_BYTES, 0)
            for place in sorted({last * part // (parts - 1) for part in range(parts)}):
                digest.update(os.pread(descriptor, _STAMPED_BYTES, place))
            found = digest.hexdigest()
        finally:
            os.close(descriptor)
    return f"{there.st_size} {there.st_mtime_ns} {found}"


def without_time(stamp: str) -> str:
    """Returns the parts of a stamp that a copy of the file has, too."""
    words = stamp.split(" ")
    return " ".join(word for at, word in enumerate(words) if at % 3 != 1)


def difference(before: str, now: str) -> str:
    """Returns the difference of two stamps of a file, in words."""
    names = ("size", "time of change", "content")
    pairs = zip(before.split(" "), now.split(" "), strict=False)
    found = next((at for at, (one, other) in enumerate(pairs) if one != other), -1)
    if found < 0:
        return "file of labels"
    return names[found % 3] + (" of the file of labels" if found >= 3 else "")


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


def first_npz(inputs: Sequence[str]) -> str | None:
    """Returns the first ``.npz`` file that inputs name, whose arrays say sizes that a model leaves open."""
    for path in inputs:
        if os.path.isdir(path):
            inside = sorted(
                glob.glob(os.path.join(glob.escape(path), "**", "*.npz"), recursive=True)
            )
        else:
            inside = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
        some = [name for name in inside if name.lower().endswith(".npz") and os.path.isfile(name)]
        if some:
            return some[0]
    return None


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
