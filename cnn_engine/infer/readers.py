"""Reads a shard's images, a chunk at a time: files as bytes, and arrays by :mod:`.array_readers`."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import InputError, expected
from ..io.images import MOST_PIXELS, SUFFIXES
from ..locks import cached_property
from . import packages
from .array_readers import array_chunks, parquet_parts
from .buffers import Slot
from .chunk import Chunk, utf8_of
from .formats import ENCODED, Wanted
from .labels import Label, Labels, label_of
from .output import Faults
from .shards import TO_THE_END, Member, Piece, TarMembers, sample_key


def chunks(
    pieces: list[Piece], size: int, wanted: Wanted, slot: Callable[[], Slot]
) -> Iterator[Chunk]:
    """Yields the images of ``pieces``, which are of one kind, in chunks of ``size`` and a smaller last one.

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
        yield from array_chunks(pieces, size, wanted, slot)


class Item(NamedTuple):
    """A file of an image: its id, its label, and its bytes or its fault."""

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


#: Bytes of a file that may be an image: as many as the largest image has as pixels, and its file's header.
MOST_FILE_BYTES = 4 * MOST_PIXELS + (1 << 20)

#: Bytes of a file that may be a label.
MOST_LABEL_BYTES = 1 << 16


def _image(piece: Piece, wanted: Wanted) -> Iterator[Item]:
    # A file that cannot be read, perhaps for a while, is no bad image: its shard is not done.
    with open(piece.path, "rb") as file:
        yield Item(utf8_of(piece.path), Label(), _file_of(file, os.fstat(file.fileno()).st_size))


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
            yield Item(f"{utf8_of(piece.path)}#{utf8_of(image.name)}", of_all, data)

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
    return Orphan(f"{utf8_of(piece.path)}#{utf8_of(member.name)}", what)


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
    for images, labels, ids in parquet_parts(piece, wanted):
        pa = packages.arrow()
        if pa.types.is_struct(images.type):
            images = images.field("bytes")
        for image, label, name in zip(images.to_pylist(), labels.each(), ids, strict=True):
            name = f"{utf8_of(piece.path)}#{at}" if name is None else str(name)
            file = "expected an image, found null" if image is None else image
            if len(file) > MOST_FILE_BYTES:
                file = f"expected a file of at most {MOST_FILE_BYTES:,} bytes, found {len(file):,}"
            yield Item(name, label, file)
            at += 1


_ENCODED: dict[str, Callable[[Piece, Wanted], Iterator[Item | Orphan]]] = {
    "image": _image,
    "tar": _tar,
    "parquet-bytes": _parquet_bytes,
}
