"""Reads arrays of images straight into the engine's memory: .npy, .npz, CIFAR, IDX, Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import numpy as np

from ..errors import InputError, expected
from . import packages
from .buffers import File, Slot, begin_reading
from .chunk import Chunk, dtype_of, utf8_of
from .formats import (
    CIFAR_RECORD,
    Wanted,
    check_npz,
    column,
    idx_header,
    npy_header,
    open_idx,
)
from .labels import Labels, idx_labels, values_of
from .shards import Piece


def array_chunks(
    pieces: list[Piece], size: int, wanted: Wanted, slot: Callable[[], Slot]
) -> Iterator[Chunk]:
    """Fills one slot after another; a slot may hold images of several files."""
    dtype = dtype_of(pieces[0].kind)
    total = sum(piece.images for piece in pieces)
    filled = done = 0
    current: Slot | None = None
    parts: list[Callable[[], Iterator[tuple[Any, Labels]]]] = []
    errors: dict[int, str] = {}
    reading: list[Future] = []
    try:
        for piece in pieces:
            read = _ARRAYS[piece.kind](piece, wanted)
            next(read)  # opens it
            at = 0
            while at < piece.images:
                if current is None:
                    current, filled, parts, errors, reading = slot(), 0, [], {}, []
                count = min(size - filled, piece.images - at)
                target = current.images(dtype)[filled : filled + count]
                names, found, faults, begun = read.send(target)
                reading += begun
                parts.append(partial(_part, piece.path, piece.first + at, count, names, found))
                errors.update({filled + position: what for position, what in faults.items()})
                at, filled, done = at + count, filled + count, done + count
                if filled == size or done == total:
                    columns = partial(_in_turn, parts)
                    yield Chunk(current, filled, columns, None, errors, dtype, reading)
                    current, reading = None, []
            read.close()
    finally:
        wait(reading)  # of a chunk that was not made whole


#: Images that ids and labels are made for at a time: most chunks whole, since writers take turns with
#: Python's lock, and parts of large ones, so that what lives while they are written is bounded.
PART_IMAGES = 1 << 16


def _part(
    path: str, first: int, count: int, names: Any, labels: Labels | None
) -> Iterator[tuple[Any, Labels]]:
    for at in range(0, count, PART_IMAGES):
        end = min(at + PART_IMAGES, count)
        ids = numbered(path, first + at, end - at) if names is None else names[at:end]
        yield ids, Labels.none(end - at) if labels is None else labels[at:end]


def _in_turn(
    parts: list[Callable[[], Iterator[tuple[Any, Labels]]]],
) -> Iterator[tuple[Any, Labels]]:
    for part in parts:
        yield from part()


#: The last digits of numbers that follow each other, which are the same in every so many of them.
_DIGITS = 5
_ENDINGS = np.arange(10**_DIGITS)[:, None] // 10 ** np.arange(_DIGITS)[::-1] % 10
_ENDINGS = (_ENDINGS + ord("0")).astype(np.uint8)


def numbered(path: str, first: int, count: int) -> Any:
    """Returns the ids ``path#first`` and so on, as Arrow has them.

    Their last digits are copied from a table into memory: joining strings takes several times as long, which
    is more than a GPU takes for an image.
    """
    pa = packages.arrow()
    prefix = f"{utf8_of(path)}#".encode()
    period, parts = 10**_DIGITS, []
    while count or not parts:
        digits = len(str(first))  # those of one length at a time
        width = len(prefix) + digits
        some = min(count, 10**digits - first, np.iinfo(np.int32).max // width)
        text = np.empty((some, width), np.uint8)
        done = 0
        while done < some:
            high, low = divmod(first + done, period)
            same = min(period - low, some - done)
            shown = min(digits, _DIGITS)
            begin = prefix + (str(high).encode() if digits > _DIGITS else b"")
            text[done : done + same, : len(begin)] = np.frombuffer(begin, np.uint8)
            text[done : done + same, len(begin) :] = _ENDINGS[low : low + same, _DIGITS - shown :]
            done += same
        offsets = np.arange(some + 1, dtype=np.int32) * np.int32(width)
        buffers = pa.py_buffer(offsets), pa.py_buffer(text)
        parts.append(pa.StringArray.from_buffers(some, *buffers))
        first, count = first + some, count - some
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


#: What one ``send`` of an array reader gives: ids or None, labels or None, faults by position, and what still
#: reads.
Part = tuple[Any, Labels | None, dict[int, str], list[Future]]


def _read_into(file: Any, target: np.ndarray, path: str) -> None:
    view = memoryview(target).cast("B")
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise expected(path, f"{len(view) - done:,} bytes more", "its end")
        done += count


def _npy(piece: Piece, wanted: Wanted) -> Iterator[Part]:
    shape, dtype, offset = npy_header(piece.path)
    planned = dtype_of(piece.kind)
    last = piece.first + piece.images
    if shape[0] < last or shape[1:] != tuple(wanted.shape) or dtype != planned:
        found = f"{dtype} {list(shape)}"
        raise expected(piece.path, f"{last:,} images as planned, of {planned}", found)
    image_bytes = int(np.prod(shape[1:])) * dtype.itemsize
    at = offset + piece.first * image_bytes
    file = File(piece.path)
    target = yield None
    while True:
        begun = begin_reading(file, target, at)
        at += len(target) * image_bytes
        target = yield None, None, {}, begun


def _npz(piece: Piece, wanted: Wanted) -> Iterator[Part]:
    """Reads all of a file: what zipfile decompresses can be read from its beginning only."""
    try:
        with open(piece.path, "rb") as file:  # of a broken one NumPy leaves its own open
            archive = np.load(file, allow_pickle=False)
            found = {name: archive[name] for name in archive.files}
    except OSError:
        raise
    except MemoryError:
        raise InputError(f"{piece.path}: expected arrays that fit in memory") from None
    except Exception as error:  # zipfile, zlib and NumPy have a dozen kinds for broken bytes
        raise expected(piece.path, "a sound .npz file", error) from error
    headers = {name: (array.shape, array.dtype) for name, array in found.items()}
    if check_npz(piece.path, headers, wanted) != piece.images:
        raise expected(piece.path, f"{piece.images:,} rows as planned", "others")
    names = [name for name, *_ in wanted.inputs]
    labels = None if "labels" in names else found.get("labels")
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != (piece.images,)):
        wants = f"labels, a whole number each of {piece.images} rows"
        raise expected(piece.path, wants, f"{labels.dtype} {list(labels.shape)}")
    at = piece.first
    target = yield None
    while True:
        end = at + len(target)
        for name in names:
            target.arrays[name][...] = found[name] if wanted.a_file else found[name][at:end]
        some = None if labels is None else _numbers(labels[at:end])
        at = end
        target = yield None, some, {}, []


def _cifar(piece: Piece, wanted: Wanted) -> Iterator[Part]:
    with open(piece.path, "rb", buffering=0) as file:
        file.seek(piece.first * CIFAR_RECORD)
        target = yield None
        while True:
            records = np.empty((len(target), CIFAR_RECORD), np.uint8)
            _read_into(file, records, piece.path)
            target.reshape(len(target), -1)[...] = records[:, 1:]
            target = yield None, _numbers(records[:, 0]), {}, []


def _numbers(labels: np.ndarray) -> Labels:
    return Labels(packages.arrow().array(labels.astype(np.int64)))


def _idx(piece: Piece, wanted: Wanted) -> Iterator[Part]:
    beside = idx_labels(piece.path)
    labels = None
    if beside is not None:
        with open_idx(beside) as file:
            (count,) = idx_header(beside, file, 1)
            labels = np.frombuffer(file.read(count), np.uint8)
        if len(labels) < piece.first + piece.images:
            raise expected(beside, "a label an image", f"{len(labels):,}")
    with open_idx(piece.path) as file:
        shape = idx_header(piece.path, file, 3)
        file.seek(piece.first * shape[1] * shape[2], os.SEEK_CUR)
        at = piece.first
        target = yield None
        while True:
            _read_into(file, target, piece.path)
            some = None if labels is None else _numbers(labels[at : at + len(target)])
            at += len(target)
            target = yield None, some, {}, []


def _parquet_arrays(piece: Piece, wanted: Wanted) -> Iterator[Part]:
    pa = packages.arrow()
    values = int(np.prod(wanted.shape))
    dtype = np.dtype("uint8" if piece.kind == "parquet-uint8" else "float32")
    at = piece.first
    target = yield None
    filled = 0
    ids: list[Any] = []
    labels: list[Labels] = []
    faults: dict[int, str] = {}
    for images, some, names in parquet_parts(piece, wanted):
        begin = 0
        while begin < len(images):
            count = min(len(images) - begin, len(target) - filled)
            part = images.slice(begin, count)
            found = _rectangular(part, values, dtype)
            rows = target[filled : filled + count].reshape(count, -1)
            if found is not None:
                rows[...] = found
            else:
                for position, array in enumerate(part):
                    flat = _flat(array.as_py(), dtype)
                    if flat is None or flat.size != values:
                        size = "null" if flat is None else f"{flat.size}"
                        faults[filled + position] = f"expected {values} values, found {size}"
                        rows[position] = 0
                    else:
                        rows[position] = flat
            some_names = names[begin : begin + count]
            if any(name is None for name in some_names):
                ids.append(numbered(piece.path, at, count))
            else:
                ids.append(pa.array([str(name) for name in some_names], pa.string()))
            labels.append(some[begin : begin + count])
            at, begin, filled = at + count, begin + count, filled + count
            if filled == len(target):
                target = yield pa.concat_arrays(ids), Labels.join(labels), faults, []
                filled, ids, labels, faults = 0, [], [], {}
    raise InputError(f"{piece.path}: expected more rows")


def _rectangular(part: Any, values: int, dtype: np.dtype) -> np.ndarray | None:
    """Returns [N, values] of lists that all have so many, without a copy; None where one has not."""
    count = len(part)
    while hasattr(part, "flatten") and str(part.type) not in ("uint8", "float"):
        if part.null_count:
            return None
        if len(part) == count and not _even(part, values):
            return None
        part = part.flatten()
    if part.null_count or len(part) != count * values:
        return None
    return part.to_numpy(zero_copy_only=True).reshape(count, values)


def _even(part: Any, values: int) -> bool:
    """Whether the outermost lists have one length each, so that equal shares of the values are theirs."""
    types = packages.arrow().types
    if types.is_fixed_size_list(part.type):
        return True
    lengths = np.diff(part.offsets.to_numpy())
    return bool(len(lengths) == 0 or (lengths == lengths[0]).all())


def _flat(value: Any, dtype: np.dtype) -> np.ndarray | None:
    if value is None:
        return None
    try:
        return np.array(value, dtype).reshape(-1)
    except (TypeError, ValueError):  # ragged, or null inside
        return None


_ARRAYS: dict[str, Callable[[Piece, Wanted], Any]] = {
    "npy": _npy,
    "npz": _npz,
    "npy-float32": _npy,
    "cifar": _cifar,
    "idx": _idx,
    "parquet-uint8": _parquet_arrays,
    "parquet-float32": _parquet_arrays,
}


#: Rows of a Parquet file that are decompressed at a time.
PARQUET_ROWS = 1024


def parquet_parts(piece: Piece, wanted: Wanted) -> Iterator[tuple[Any, Labels, list[Any]]]:
    """Yields (images, labels, ids) of the rows of a piece; images as Arrow has them."""
    pa, pq = packages.arrow(), packages.parquet()
    try:
        with pq.ParquetFile(piece.path, pre_buffer=False) as file:
            schema = file.schema_arrow
            names = [column(piece.path, schema, role, wanted) for role in ("image", "label", "id")]
            groups, at = [], 0
            for index in range(file.num_row_groups):
                if piece.first <= at < piece.first + piece.images:
                    groups.append(index)
                at += file.metadata.row_group(index).num_rows
            done = 0
            for part in file.iter_batches(
                PARQUET_ROWS, groups, [name for name in names if name], use_threads=False
            ):
                done += len(part)
                image, label, name = names
                labels = Labels.of_column(part.column(label)) if label else Labels.none(len(part))
                ids = values_of(part.column(name)) if name else [None] * len(part)
                yield part.column(image), labels, ids
            if done != piece.images:
                raise expected(piece.path, f"{piece.images:,} images as planned", f"{done:,}")
    except (pa.ArrowException, UnicodeDecodeError) as error:
        words = " ".join(str(error).split())
        raise expected(piece.path, "a sound Parquet file", words) from error
