"""Splits the input into shards by size, the same way for the same files."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError, expected
from ..io.files import describe_os_error
from . import packages
from .formats import ENCODED, Source
from .stamps import without_time

#: Shards unless ``--shard-size`` says otherwise: about so many, but none smaller or larger than this, or
#: smaller than a pass. Small enough to lose little with a worker, and for all workers to end together; large
#: enough that opening, fsync and rename do not count, and that a few images take the memory that many take.
SHARDS, LEAST_BYTES, MOST_BYTES = 256, 4 << 20, 1 << 30

#: Pieces that are in memory while a plan is written.
PIECES_A_PART = 1 << 16

#: A tar is cut where it is so many times a shard: to find where, all of its headers have to be read.
CUT_TAR = 2


TO_THE_END, SO_MANY_BYTES = -1, -2


@dataclass(frozen=True)
class Piece:
    """A part of one file: images from ``first`` on, ``images`` of them.

    Of a tar, ``first`` is the byte at which the part begins, and ``images`` is :data:`TO_THE_END`, or
    :data:`SO_MANY_BYTES` where another part follows after ``bytes``. ``stamp`` is the file's; see
    :func:`.stamps.stamp`.
    """

    kind: str
    path: str
    first: int
    images: int
    bytes: int
    stamp: str = ""


@dataclass(frozen=True)
class Shard:
    """Pieces that are computed together and whose rows are in one file.

    Attributes:
        index: from 0.
        kind: of all of its pieces.
        images: in it; -1 where only reading tells.
        bytes: of input.
        first, pieces: which of the plan's pieces.
    """

    index: int
    kind: str
    images: int
    bytes: int
    first: int
    pieces: int

    @property
    def name(self) -> str:
        return f"shard-{self.index:06d}"


@dataclass(frozen=True)
class Totals:
    """Totals of a plan.

    Attributes:
        images: -1 where only reading tells.
        digest: tells plans apart, and what the files had.
        texts: whether labels may be texts.
    """

    shards: int
    images: int
    bytes: int
    digest: str
    texts: bool = False


def write(
    sources: Iterable[Source], folder: Path, shard_bytes: int | None = None, batch: int = 1
) -> Totals:
    """Plans shards and writes them to ``folder/pieces`` and ``folder/shards``, which must not be there.

    The sources are gone through twice, from a file, so that memory does not grow with them.

    Args:
        shard_bytes: of input in a shard; None: by the size of all.
        batch: images per pass, of which shards have whole ones where files can be cut anywhere.

    Raises:
        InputError: a source is at fault, or there is no image.
    """
    listed = folder / "sources"
    with _writing(listed, _SOURCE) as add:
        total = arrays = array_bytes = 0
        texts = False
        for source in sources:
            units = [value for unit in source.units for value in unit]
            images = -1 if source.images is None else source.images
            add((source.kind, os.fsencode(source.path), images, source.bytes, units, source.whole,
                 source.stamp))  # fmt: skip
            total += source.bytes
            texts |= source.texts
            if source.kind not in ENCODED:
                arrays, array_bytes = arrays + source.images, array_bytes + source.bytes
    if shard_bytes is None:
        a_pass = -(-batch * array_bytes // max(arrays, 1))
        shard_bytes = min(max(total // SHARDS, LEAST_BYTES, a_pass), MOST_BYTES)
    digest = hashlib.sha256()
    count = images = size = first = 0
    with ExitStack() as files:
        add_piece = files.enter_context(_writing(folder / "pieces", _PIECE))
        add_shard = files.enter_context(_writing(folder / "shards", _SHARD))
        for pieces in _grouped(_cut(_sources(listed), shard_bytes, batch), shard_bytes):
            for piece in pieces:
                row = (piece.kind, os.fsencode(piece.path), piece.first, piece.images, piece.bytes)
                digest.update(repr((*row, without_time(piece.stamp))).encode())
                add_piece((*row, piece.stamp))
            known = -1 if any(p.images < 0 for p in pieces) else sum(p.images for p in pieces)
            nbytes = sum(piece.bytes for piece in pieces)
            add_shard((pieces[0].kind, known, nbytes, first, len(pieces)))
            digest.update(b"shard")
            images = -1 if known < 0 or images < 0 else images + known
            count, size, first = count + 1, size + nbytes, first + len(pieces)
    listed.unlink()
    if images == 0:
        raise InputError("INPUT: expected at least one image, found none")
    return Totals(count, images, size, digest.hexdigest(), texts)


_SOURCE = {
    "kind": "string", "path": "binary", "images": "int64", "bytes": "int64", "units": "list", "whole": "bool",
    "stamp": "string",
}  # fmt: skip
_PIECE = {
    "kind": "string", "path": "binary", "first": "int64", "images": "int64", "bytes": "int64",
    "stamp": "string",
}  # fmt: skip
_SHARD = {
    "kind": "string",
    "images": "int64",
    "bytes": "int64",
    "first": "int64",
    "pieces": "int64",
}


class _writing:
    """Writes rows to an Arrow file a part at a time."""

    def __init__(self, path: Path, columns: dict[str, str]) -> None:
        pa = packages.arrow()
        types = {
            "string": pa.string(), "binary": pa.binary(), "int64": pa.int64(), "bool": pa.bool_(),
            "list": pa.list_(pa.int64()),
        }  # fmt: skip
        self._schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
        self._path, self._rows, self._pa = path, [], pa

    def __enter__(self) -> Any:
        self._file = open(self._path, "xb")
        self._writer = self._pa.ipc.new_file(self._file, self._schema)
        return self._add

    def _add(self, row: tuple) -> None:
        self._rows.append(row)
        if len(self._rows) >= PIECES_A_PART:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            columns = list(zip(*self._rows, strict=True))
            arrays = [
                self._pa.array(column, field.type)
                for column, field in zip(columns, self._schema, strict=True)
            ]
            self._writer.write_batch(self._pa.record_batch(arrays, schema=self._schema))
            self._rows.clear()

    def __exit__(self, kind: Any, *_: object) -> None:
        with self._file:
            if kind is None:
                self._flush()
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Opens an Arrow file that was planned.

    Raises:
        InputError: it is not there, or broken.
    """
    pa = packages.arrow()
    try:
        with pa.OSFile(str(path)) as file:
            yield pa.ipc.open_file(file)
    except (OSError, pa.ArrowException) as error:
        reason = "none" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        raise InputError(f"{path}: expected a part of the run's plan, found {reason}") from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with _reading(path) as reader:
        for index in range(reader.num_record_batches):
            yield from reader.get_batch(index).to_pylist()


def _sources(path: Path) -> Iterator[Source]:
    for row in _rows(path):
        units = tuple(zip(row["units"][::2], row["units"][1::2], strict=True))
        images = None if row["images"] < 0 else row["images"]
        yield Source(
            row["kind"], os.fsdecode(row["path"]), images, row["bytes"], units, row["whole"],
            stamp=row["stamp"],
        )  # fmt: skip


def _cut(sources: Iterable[Source], shard_bytes: int, batch: int) -> Iterator[Piece]:
    """Yields pieces of at most about ``shard_bytes``."""
    for source in sources:
        if source.images is None:
            yield from _cut_tar(source, shard_bytes)
        elif source.units:
            yield from _cut_units(source, shard_bytes)
        elif source.images:
            most = max(shard_bytes * source.images // max(source.bytes, 1), 1)
            most -= most % batch if most > batch else 0
            most = source.images if source.whole else most
            for first in range(0, source.images, most):
                images = min(most, source.images - first)
                nbytes = source.bytes * images // source.images
                yield Piece(source.kind, source.path, first, images, nbytes, source.stamp)


def _cut_units(source: Source, shard_bytes: int) -> Iterator[Piece]:
    """Yields runs of row groups, none of which is read in two shards."""
    first = images = nbytes = 0
    for rows, size in source.units:
        if images and nbytes + size > shard_bytes:
            yield Piece(source.kind, source.path, first, images, nbytes, source.stamp)
            first, images, nbytes = first + images, 0, 0
        images, nbytes = images + rows, nbytes + size
    if images:
        yield Piece(source.kind, source.path, first, images, nbytes, source.stamp)


def _cut_tar(source: Source, shard_bytes: int) -> Iterator[Piece]:
    """Yields a tar as it is, or in parts that begin with a sample, all files of which have one stem."""
    first = 0
    if source.bytes > CUT_TAR * shard_bytes:
        try:
            with open(source.path, "rb") as file:
                stem = None
                for member in TarMembers(source.path, file):
                    if sample_key(member.name) != stem:
                        stem = sample_key(member.name)
                        begin = member.offset  # headers of long names included
                        if begin - first >= shard_bytes:
                            yield _tar_piece(source, first, SO_MANY_BYTES, begin - first)
                            first = begin
        except OSError as error:
            reason = describe_os_error(error)
            raise InputError(f"{source.path}: cannot be read: {reason}") from error
    yield _tar_piece(source, first, TO_THE_END, source.bytes - first)


def _tar_piece(source: Source, first: int, images: int, nbytes: int) -> Piece:
    return Piece("tar", source.path, first, images, nbytes, source.stamp)


class Member(NamedTuple):
    """A plain file in a tar: where its header and its content begin, and the latter's bytes."""

    name: str
    offset: int
    data: int
    size: int
    sparse: bool


#: Bytes of a header, at most, which tarfile reads whole.
MOST_HEADER_BYTES = 1 << 20


class TarMembers:
    """Plain files of a tar from a position on; only headers are read.

    Attributes:
        end: where the last header was followed by none, when all are gone through.

    Raises:
        InputError: while it is gone through: the tar is broken.
    """

    def __init__(self, path: str, file: Any) -> None:
        self._path, self._file, self.end = path, file, 0
        self._size = os.fstat(file.fileno()).st_size

    def __iter__(self) -> Iterator[Member]:
        try:
            with tarfile.open(fileobj=self, mode="r:") as archive:
                for found in archive:
                    archive.members = []  # else it keeps all of them
                    if archive.offset <= found.offset:  # a size below 0 would lead back
                        raise tarfile.ReadError(f"{found.name} of {found.size:,} bytes")
                    if found.isfile():
                        yield Member(
                            found.name,
                            found.offset,
                            found.offset_data,
                            found.size,
                            found.issparse(),
                        )
                self.end = archive.offset
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise expected(self._path, "a sound tar", error) from error

    # ---- what tarfile needs of a file ----

    def read(self, size: int) -> bytes:
        if size > MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._file.read(size)

    def seek(self, place: int) -> int:
        if place > self._size:
            raise tarfile.ReadError("unexpected end of data")
        return self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


def sample_key(name: str) -> str:
    """Returns the key of a sample's files, as in WebDataset: the path up to the name's first dot."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def _grouped(pieces: Iterable[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    """Yields the pieces of each shard: as many of one kind as do not exceed ``shard_bytes``."""
    group: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        if group and (piece.kind != group[0].kind or nbytes + piece.bytes > shard_bytes):
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += piece.bytes
    if group:
        yield group


def read(folder: Path) -> list[Shard]:
    """Returns the shards of a plan that :func:`write` made.

    Raises:
        InputError: a part of the plan is not there, or broken.
    """
    with _reading(folder / "pieces"):
        pass
    return [
        Shard(index, row["kind"], row["images"], row["bytes"], row["first"], row["pieces"])
        for index, row in enumerate(_rows(folder / "shards"))
    ]


def pieces_of(folder: Path, shard: Shard) -> list[Piece]:
    """Returns the pieces of one shard.

    Raises:
        InputError: the plan is not there, or broken.
    """
    with _reading(folder / "pieces") as reader:
        found, at = [], shard.first
        while at < shard.first + shard.pieces:  # every part but the last has PIECES_A_PART rows
            part = reader.get_batch(at // PIECES_A_PART)
            inside = at % PIECES_A_PART
            rows = part.slice(inside, min(shard.first + shard.pieces - at, len(part) - inside))
            found += rows.to_pylist()
            at += len(rows)
    return list(map(_piece, found))


def _piece(row: dict[str, Any]) -> Piece:
    return Piece(**{**row, "path": os.fsdecode(row["path"])})


def pieces_by_shard(folder: Path, every: list[Shard]) -> Iterator[tuple[Shard, list[Piece]]]:
    """Yields all shards of a plan with their pieces.

    Raises:
        InputError: the plan is not there, or broken.
    """
    rows = _rows(folder / "pieces")
    for shard in every:
        yield shard, list(map(_piece, islice(rows, shard.pieces)))
