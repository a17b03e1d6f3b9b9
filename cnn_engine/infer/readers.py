"""Reads a shard's images, a chunk at a time: files as bytes, arrays straight into the engine's memory."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, expected
from ..io.images import MOST_PIXELS, SUFFIXES
from ..locks import cached_property
from . import packages
from .buffers import File, Slot, begin_reading
from .labels import Label, Labels, label_of, values_of
from .output import Faults
from .shards import TO_THE_END, Member, Piece, TarMembers, sample_key
from .sources import (
    CIFAR_RECORD,
    ENCODED,
    Wanted,
    column,
    idx_header,
    idx_labels,
    npy_header,
    open_idx,
)

#: Kinds whose images are the network's own float32 input.
FLOATS = ("npy-float32", "parquet-float32")


def dtype_of(kind: str) -> str:
    """Returns the type of images of a kind of input, before preprocessing: ``float32`` or ``uint8``."""
    return "float32" if kind in FLOATS else "uint8"


@dataclass
class Chunk:
    """Images that go through the pipeline together.

    Attributes:
        slot: whose first ``count`` images these are, once they are decoded.
        count: how many.
        columns: yields the ids, a string each, and the labels, some at a time; made where they are written,
            for reading is what binds.
        encoded: bytes of each file, until they are decoded; None for arrays.
        errors: position -> what is wrong with that image.
        dtype: of the images in the slot.
        reading: parts that are still being read into the slot; see :meth:`finish_reading`.
        orphans: labels of no image.
    """

    slot: Slot | None
    count: int
    columns: Callable[[], Iterator[tuple[Any, Labels]]]
    encoded: list[bytes] | None = None
    errors: dict[int, str] = field(default_factory=dict)
    dtype: str = "uint8"
    reading: list[Future] = field(default_factory=list)
    orphans: Faults = field(default_factory=Faults)

    def __len__(self) -> int:
        return self.count

    def finish_reading(self) -> float | None:
        """Waits for all of the chunk to be read; returns when it was, None if it was when it was made.

        Raises:
            InputError, OSError: see :func:`chunks`; nothing reads into the slot any more.
        """
        parts, self.reading = self.reading, []
        wait(parts)
        return max((part.result() for part in parts), default=None)


def chunks(
    pieces: list[Piece], size: int, wanted: Wanted, slot: Callable[[], Slot]
) -> Iterator[Chunk]:
    """Yields the images of ``pieces``, which are of one kind, in chunks of ``size`` and one of what is left.

    Arrays may be read while the next chunk is begun: :meth:`Chunk.finish_reading` waits for them.

    Args:
        slot: returns memory for a chunk of arrays; it may wait until there is some.

    Raises:
        InputError: a file is broken, so that the shard cannot be had.
        OSError: a file cannot be read, perhaps for a while.
    """
    kind = pieces[0].kind
    if kind in ENCODED:
        items = _ENCODED[kind]
        every = (item for piece in pieces for item in items(piece, wanted))
        yield from _encoded_chunks(every, size)
    else:
        yield from _array_chunks(pieces, size, wanted, slot)


class Item(NamedTuple):
    """A file of an image: its id, its label, and its bytes or what is wrong with it."""

    id: str
    label: Label
    file: bytes | str


class Orphan(NamedTuple):
    """A label that no image has, and why."""

    name: str
    what: str


def _encoded_chunks(items: Iterator[Item | Orphan], size: int) -> Iterator[Chunk]:
    made: Chunk | None = (
        None  # held until the next image is read: what follows this one may be orphans
    )
    part: list[Item] = []
    orphans = Faults()
    for item in items:
        if isinstance(item, Orphan):
            (orphans if made is None else made.orphans).add(*item)
            continue
        if made is not None:
            yield made
            made = None
        part.append(item)
        if len(part) == size:
            made, part, orphans = _encoded_chunk(part, orphans), [], Faults()
    if made is None and part:
        made = _encoded_chunk(part, orphans)
    if made is not None:
        yield made


def _encoded_chunk(items: list[Item], orphans: Faults) -> Chunk:
    ids, labels, files = map(list, zip(*items, strict=True))
    errors = {at: file for at, file in enumerate(files) if isinstance(file, str)}
    encoded = [b"" if isinstance(file, str) else file for file in files]

    def columns() -> Iterator[tuple[list[str], Labels]]:
        yield ids, Labels.of(labels)

    return Chunk(None, len(ids), columns, encoded, errors, orphans=orphans)


def _text(path: str) -> str:
    """Returns a path as UTF-8 can have it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


#: Bytes of a file that may be an image: as many as the largest image has as pixels, and its file's header.
MOST_FILE_BYTES = 4 * MOST_PIXELS + (1 << 20)

#: Bytes of a file that may be a label.
MOST_LABEL_BYTES = 1 << 16


def _image(piece: Piece, wanted: Wanted) -> Iterator[Item]:
    # A file that cannot be read, perhaps for a while, is no bad image: its shard is not done.
    with open(piece.path, "rb") as file:
        yield Item(_text(piece.path), Label(), _file_of(file, os.fstat(file.fileno()).st_size))


def _file_of(file: Any, size: int) -> bytes | str:
    """Reads the file of an image; returns what is wrong with one that is too large to be any."""
    if size > MOST_FILE_BYTES:
        return f"expected a file of at most {MOST_FILE_BYTES:,} bytes, found {size:,}"
    return file.read()


def _tar(piece: Piece, wanted: Wanted) -> Iterator[Item | Orphan]:
    """Yields a tar's samples: files of one stem, of which some are images and ``.cls`` is their label."""
    with open(piece.path, "rb") as file:
        yield from _samples(piece, file, _members(piece, file))


def _members(piece: Piece, file: Any) -> Iterator[Member]:
    """Yields the plain files in a part of a tar, of which nothing but their headers is read."""
    last = piece.images == TO_THE_END  # whatever the file's size was when it was planned
    file.seek(piece.first)
    members = TarMembers(piece.path, file)
    for member in members:
        if not last and member.offset >= piece.first + piece.bytes:
            return
        yield member
    # tarfile takes what it cannot read for the end, which is marked by zeros, and a hole for it too.
    file.seek(members.end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        found = f"neither a file nor the archive's end at byte {members.end:,}"
        raise expected(piece.path, "a sound tar", found)
    while part := file.read(1 << 20):
        if part.strip(b"\0"):
            found = f"more behind the archive's end at byte {members.end:,}"
            raise expected(piece.path, "a sound tar", found)


#: Images of one sample that may wait for their label: a tar whose files all have one stem is no WebDataset.
MOST_OF_A_SAMPLE = 4096


class _Apart:
    """Labels of a part of a tar that do not lie beside their images, looked for where one is missed.

    Attributes:
        labels: stem -> its first label, of those without images beside them.
        images: stems of images without a label beside them.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece

    @cached_property
    def _found(self) -> tuple[dict[str, Member], set[str]]:
        labels: dict[str, Member] = {}
        images: set[str] = set()
        key, label, has_image = None, None, False

        def end() -> None:
            if label is not None and not has_image:
                labels.setdefault(key, label)
            if has_image and label is None:
                images.add(key)

        # A broken tar is reported where it is read.
        with suppress(InputError), open(self._piece.path, "rb") as file:
            for member in _members(self._piece, file):
                stem = sample_key(member.name)
                if stem != key:
                    end()
                    key, label, has_image = stem, None, False
                lower = member.name.lower()
                has_image |= lower.endswith(SUFFIXES)
                if lower.endswith(".cls") and label is None:
                    label = member
            end()
        return labels, images

    def of(self, stem: str) -> Member | None:
        """Returns the label of images without one beside them, or None where there is none."""
        return self._found[0].get(stem)

    def has_images(self, label: Member) -> bool:
        """Whether a label without images beside it is that of others."""
        stem = sample_key(label.name)
        return stem in self._found[1] and self._found[0].get(stem) == label


def _samples(piece: Piece, file: Any, members: Iterable[Member]) -> Iterator[Item | Orphan]:
    """Yields the images of each sample, each with the sample's label, wherever that is in the piece."""
    key, images, label, done = None, [], None, 0
    apart = _Apart(piece)

    def sample() -> Iterator[Item | Orphan]:
        alone = label is not None and not images and not done
        if alone and not apart.has_images(label):
            yield _orphan(piece, label, "expected an image of the same stem, found none")
        mine = label
        if images and mine is None and not done:
            mine = apart.of(key)
        of_all = Label() if mine is None or not images else _label(piece, file, mine)
        for image in images:  # several of one stem, such as left.jpg and right.jpg have
            data = _content(piece, file, image, MOST_FILE_BYTES)
            yield Item(f"{_text(piece.path)}#{_text(image.name)}", of_all, data)

    for member in members:
        stem = sample_key(member.name)
        if stem != key:
            yield from sample()
            key, images, label, done = stem, [], None, 0
        elif len(images) == MOST_OF_A_SAMPLE:
            yield from sample()
            images, done = [], done + len(images)
        lower = member.name.lower()
        if lower.endswith(SUFFIXES):
            images.append(member)
        elif lower.endswith(".cls"):
            if label is not None or done:
                what = "expected one label a sample" + (", before its images" if done else "")
                yield _orphan(piece, member, f"{what}, found one more")
            else:
                label = member
    yield from sample()


def _orphan(piece: Piece, member: Member, what: str) -> Orphan:
    return Orphan(f"{_text(piece.path)}#{_text(member.name)}", what)


def _content(piece: Piece, file: Any, member: Member, most: int) -> bytes | str:
    """Returns what a member has, or what is wrong with it."""
    if member.sparse:
        raise expected(piece.path, f"a sound tar, with all of {member.name}", "holes")
    if member.size > most:
        return f"expected a file of at most {most:,} bytes, found {member.size:,}"
    file.seek(member.data)  # several times as fast as extractfile
    data = file.read(member.size)
    if len(data) < member.size:
        raise expected(piece.path, f"a sound tar, with all of {member.name}", "less")
    return data


def _label(piece: Piece, file: Any, member: Member) -> Label:
    data = _content(piece, file, member, MOST_LABEL_BYTES)
    if isinstance(data, str):
        return Label(lost=data)
    return label_of(data.decode("utf-8", "backslashreplace").strip())


def _parquet_bytes(piece: Piece, wanted: Wanted) -> Iterator[Item]:
    at = piece.first
    for images, labels, ids in _parquet_parts(piece, wanted):
        pa = packages.arrow()
        if pa.types.is_struct(images.type):
            images = images.field("bytes")
        for image, label, name in zip(images.to_pylist(), labels.each(), ids, strict=True):
            name = f"{_text(piece.path)}#{at}" if name is None else str(name)
            file = "expected an image, found null" if image is None else image
            if len(file) > MOST_FILE_BYTES:
                file = f"expected a file of at most {MOST_FILE_BYTES:,} bytes, found {len(file):,}"
            yield Item(name, label, file)
            at += 1


def _parquet_parts(piece: Piece, wanted: Wanted) -> Iterator[tuple[Any, Labels, list[Any]]]:
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


#: Rows of a Parquet file that are decompressed at a time.
PARQUET_ROWS = 1024

_ENCODED: dict[str, Callable[[Piece, Wanted], Iterator[Item | Orphan]]] = {
    "image": _image,
    "tar": _tar,
    "parquet-bytes": _parquet_bytes,
}


# ---- arrays ----


def _array_chunks(
    pieces: list[Piece], size: int, wanted: Wanted, slot: Callable[[], Slot]
) -> Iterator[Chunk]:
    """Fills one slot after the other, over the ends of files."""
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
    prefix = f"{_text(path)}#".encode()
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
    for images, some, names in _parquet_parts(piece, wanted):
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
    "npy-float32": _npy,
    "cifar": _cifar,
    "idx": _idx,
    "parquet-uint8": _parquet_arrays,
    "parquet-float32": _parquet_arrays,
}
