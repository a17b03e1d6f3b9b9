"""Writes the Parquet files of rows: arrays go to the file as they lie in memory.

Arrow's writer makes a level of each number on its own, which takes several times as long as to write them. A
row group here is a page a column; what all of its rows have in common is made once. Source: parquet-format
2.11 (``parquet.thrift``, ``Encodings.md``).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from . import packages, thrift
from .thrift import BINARY, I32, I64, LIST, STRUCT

MAGIC = b"PAR1"

#: Of ``parquet.thrift``: types, repetitions, encodings, codecs.
INT32, INT64, FLOAT, BYTE_ARRAY = 1, 2, 4, 6
REQUIRED, OPTIONAL, REPEATED = 0, 1, 2
PLAIN, RLE, DELTA_BYTE_ARRAY = 0, 3, 7
UNCOMPRESSED, ZSTD = 0, 6

#: Bytes that are worth compressing.
WORTH_BYTES = 64

#: Numbers of a block of DELTA_BINARY_PACKED, and of the smaller blocks in it.
BLOCK, SMALL = 128, 32


@dataclass(frozen=True)
class Page:
    """What a row group has of a column.

    Attributes:
        parts: the page's bytes, one after the other.
        crc: of them, the first of which have been counted where ``counted`` says so.
        values: how many there are, nulls included.
        size: bytes before they were compressed.
        least, most: of the values, as PLAIN has them; None where that is not said.
    """

    parts: tuple[Any, ...]
    crc: int
    values: int
    size: int
    encoding: int = PLAIN
    codec: int = UNCOMPRESSED
    nulls: int | None = None
    least: bytes | None = None
    most: bytes | None = None


# ---- levels ----


def _run(value: int, count: int) -> bytes:
    """Returns ``count`` levels of one value, below 256, with the bytes they take before them."""
    return _sized(thrift.varint(count << 1) + bytes([value]))


def _packed(levels: np.ndarray, bits: int) -> bytes:
    """Returns levels of so many bits each, in one bit-packed run."""
    levels = np.pad(levels, (0, -len(levels) % 8))
    planes = levels[:, None] >> np.arange(bits) & 1
    packed = np.packbits(planes.astype(bool), bitorder="little").tobytes()
    return _sized(thrift.varint(len(levels) // 8 << 1 | 1) + packed)


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _known_levels(known: np.ndarray) -> bytes:
    """Returns the levels of values that may be null."""
    if known.all() or not known.any():
        return _run(int(known[:1].any()), len(known))
    return _packed(known.astype(np.uint8), 1)


@lru_cache(64)
def _list_levels(rows: int, size: int) -> tuple[bytes, int]:
    """Returns the levels of ``rows`` lists of ``size``, none of them null, and their checksum."""
    repeated = np.ones((rows, size), np.uint8)
    repeated[:, 0] = 0
    levels = _packed(repeated.reshape(-1), 1) + _run(3, rows * size)
    return levels, zlib.crc32(levels)


# ---- pages ----


def lists(rows: np.ndarray, bad: np.ndarray | None) -> Page:
    """Returns a page of lists of one size: ``rows``, float32 or int32 [N, size]; null where ``bad`` is."""
    count, size = rows.shape
    if bad is None or not bad.any():
        levels, crc = _list_levels(count, size)
        values = count * size
    else:
        lengths = np.where(bad, 1, size)
        values = int(lengths.sum())
        repeated = np.ones(values, np.uint8)
        repeated[np.cumsum(lengths) - lengths] = 0
        defined = np.repeat(np.where(bad, 0, 3).astype(np.uint8), lengths)
        levels = _packed(repeated, 1) + _packed(defined, 2)
        crc, rows = zlib.crc32(levels), rows[~bad]
    data = memoryview(np.ascontiguousarray(rows)).cast("B") if rows.size else b""
    return Page((levels, data), zlib.crc32(data, crc), values, len(levels) + len(data))


def whole_numbers(values: np.ndarray, known: np.ndarray) -> Page:
    """Returns a page of int64 ``values``, null where they are not ``known``."""
    there = values[known]
    bounds = (there.min().tobytes(), there.max().tobytes()) if len(there) else (None, None)
    return _small(
        _known_levels(known) + there.tobytes(), len(values), len(values) - len(there), bounds
    )


def texts(values: Sequence[str | None]) -> Page:
    """Returns a page of texts or nulls, of which there are few."""
    there = [value.encode() for value in values if value is not None]
    known = np.array([value is not None for value in values])
    bounds = (min(there), max(there)) if there else (None, None)
    data = _known_levels(known) + b"".join(map(_sized, there))
    return _small(data, len(values), len(values) - len(there), bounds)


@lru_cache(64)
def nulls(count: int) -> Page:
    """Returns a page of nothing else, of any type."""
    return _small(_run(0, count), count, count, (None, None))


@dataclass(frozen=True)
class Names:
    """Ids as DELTA_BYTE_ARRAY has them.

    Attributes:
        shared: how many bytes of the one before each begins with, int32 [N]; of the first none.
        own: how many bytes follow, int32 [N].
        data: these bytes.
        least, most: of the ids.
    """

    shared: np.ndarray
    own: np.ndarray
    data: bytes
    least: bytes
    most: bytes

    def __len__(self) -> int:
        return len(self.own)

    @classmethod
    def of(cls, values: Sequence[str]) -> Names:
        """Returns any ids, which share nothing."""
        words = [value.encode("utf-8", "backslashreplace") for value in values]
        own = np.fromiter(map(len, words), np.int32, len(words))
        return cls(np.zeros_like(own), own, b"".join(words), min(words), max(words))

    @classmethod
    def joined(cls, some: Sequence[Names]) -> Names:
        """Returns the ids of all, one after the other."""
        if len(some) == 1:
            return some[0]
        return cls(
            np.concatenate([each.shared for each in some]),
            np.concatenate([each.own for each in some]),
            b"".join(each.data for each in some),
            min(each.least for each in some),
            max(each.most for each in some),
        )


def names(ids: Names) -> Page:
    """Returns a page of ids, of which there is none null."""
    data = _deltas(ids.shared) + _deltas(ids.own) + ids.data
    return _small(data, len(ids), 0, (ids.least, ids.most), DELTA_BYTE_ARRAY)


def _small(
    data: bytes,
    values: int,
    nulls: int,
    bounds: tuple[bytes | None, bytes | None],
    encoding: int = PLAIN,
) -> Page:
    """Returns a page that is compressed where that makes it smaller."""
    codec, shown = UNCOMPRESSED, data
    if len(data) >= WORTH_BYTES:
        shorter = packages.arrow().compress(data, "zstd", asbytes=True)
        if len(shorter) < len(data):
            codec, shown = ZSTD, shorter
    return Page((shown,), zlib.crc32(shown), values, len(data), encoding, codec, nulls, *bounds)


def _deltas(values: np.ndarray) -> bytes:
    """Returns numbers, int32 [N] with N > 0, as DELTA_BINARY_PACKED has them: the differences, in blocks."""
    head = map(thrift.varint, (BLOCK, BLOCK // SMALL, len(values)))
    steps = np.diff(values)
    count = -(-len(steps) // BLOCK)
    blocks = [
        thrift.number(0) + bytes(BLOCK // SMALL)
    ] * count  # of the same number again and again
    moves = np.pad(steps, (0, count * BLOCK - len(steps))).reshape(count, BLOCK).any(axis=1)
    for at in np.flatnonzero(moves):
        blocks[at] = _block(steps[at * BLOCK : (at + 1) * BLOCK])
    return b"".join((*head, thrift.number(int(values[0])), *blocks))


def _block(steps: np.ndarray) -> bytes:
    """Returns a block of at most :data:`BLOCK` differences, with 8, 16 or 32 bits each."""
    least = int(steps.min())
    above = steps.astype(np.int64) - least
    most = int(above.max())
    kind = np.dtype(np.uint8 if most < 1 << 8 else np.uint16 if most < 1 << 16 else np.uint32)
    smalls = -(-len(steps) // SMALL)  # others have no numbers
    widths = bytes([8 * kind.itemsize] * smalls).ljust(BLOCK // SMALL, b"\0")
    packed = np.pad(above.astype(kind), (0, smalls * SMALL - len(steps))).tobytes()
    return thrift.number(least) + widths + packed


# ---- the file ----


@dataclass(frozen=True)
class Column:
    """A column of the table: ``kind`` is BYTE_ARRAY, INT64, or FLOAT or INT32 in lists."""

    name: str
    kind: int
    nullable: bool = True

    @property
    def path(self) -> list[str]:
        return [self.name, *(["list", "element"] if self.kind in (FLOAT, INT32) else [])]

    def elements(self) -> list[bytes]:
        """Returns the column's part of the schema."""
        name, often = thrift.binary(self.name.encode()), OPTIONAL if self.nullable else REQUIRED
        if len(self.path) == 1:
            return [_element(self.kind, often, name)]
        return [
            _element(
                None, OPTIONAL, name, 1, (6, I32, thrift.number(3)), (10, STRUCT, _logical(3))
            ),
            _element(None, REPEATED, thrift.binary(b"list"), 1),
            _element(self.kind, OPTIONAL, thrift.binary(b"element")),
        ]


def _logical(which: int) -> bytes:
    """Returns a type of ``LogicalType`` that has no fields: 1 is a text, 3 a list."""
    return thrift.struct((which, STRUCT, thrift.struct()))


def _element(
    kind: int | None, often: int, name: bytes, children: int = 0, *more: thrift.Field
) -> bytes:
    if kind == BYTE_ARRAY:
        more = (6, I32, thrift.number(0)), (10, STRUCT, _logical(1))
    return thrift.struct(
        *([] if kind is None else [(1, I32, thrift.number(kind))]),
        (3, I32, thrift.number(often)),
        (4, BINARY, name),
        *([(5, I32, thrift.number(children))] if children else []),
        *more,
    )


class File:
    """Writes row groups to an open file, and last what is in it.

    Raises:
        OSError: it cannot be written; in any method.
    """

    def __init__(self, descriptor: int, columns: Sequence[Column]) -> None:
        self._descriptor, self._columns = descriptor, columns
        self._at = 0
        self._groups: list[bytes] = []
        self._rows = 0
        self._write([MAGIC])

    def add(self, pages: Sequence[Page], rows: int) -> None:
        """Writes a row group: a page of each column."""
        parts: list[Any] = []
        at = first = self._at
        chunks, whole = [], 0
        for column, page in zip(self._columns, pages, strict=True):
            shown = sum(map(len, page.parts))
            head = _head(page, shown)
            parts += [head, *page.parts]
            chunks.append(_chunk(column, page, len(head), shown, at))
            at += len(head) + shown
            whole += len(head) + page.size
        self._write(parts)
        self._rows += rows
        self._groups.append(
            thrift.struct(
                (1, LIST, thrift.items(STRUCT, chunks)),
                (2, I64, thrift.number(whole)),
                (3, I64, thrift.number(rows)),
                (5, I64, thrift.number(first)),
                (6, I64, thrift.number(at - first)),
            )
        )

    def close(self, facts: dict[bytes, bytes]) -> None:
        """Writes the footer, with ``facts`` in it; the file stays open."""
        elements = [element for column in self._columns for element in column.elements()]
        root = thrift.struct(
            (4, BINARY, thrift.binary(b"schema")), (5, I32, thrift.number(len(self._columns)))
        )
        pairs = [
            thrift.struct((1, BINARY, thrift.binary(key)), (2, BINARY, thrift.binary(value)))
            for key, value in facts.items()
        ]
        order = thrift.struct((1, STRUCT, thrift.struct()))  # that of each type
        footer = thrift.struct(
            (1, I32, thrift.number(2)),
            (2, LIST, thrift.items(STRUCT, [root, *elements])),
            (3, I64, thrift.number(self._rows)),
            (4, LIST, thrift.items(STRUCT, self._groups)),
            (5, LIST, thrift.items(STRUCT, pairs)),
            (6, BINARY, thrift.binary(b"cnn_engine")),
            (7, LIST, thrift.items(STRUCT, [order] * len(self._columns))),
        )
        self._write([footer, len(footer).to_bytes(4, "little"), MAGIC])

    def _write(self, parts: list[Any]) -> None:
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            done = os.writev(self._descriptor, left)
            self._at += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]


def _head(page: Page, shown: int) -> bytes:
    levels = (3, I32, thrift.number(RLE)), (4, I32, thrift.number(RLE))
    crc = page.crc - (1 << 32) if page.crc >= 1 << 31 else page.crc
    data = thrift.struct(
        (1, I32, thrift.number(page.values)), (2, I32, thrift.number(page.encoding)), *levels
    )
    return thrift.struct(
        (1, I32, thrift.number(0)),
        (2, I32, thrift.number(page.size)),
        (3, I32, thrift.number(shown)),
        (4, I32, thrift.number(crc)),
        (5, STRUCT, data),
    )


def _chunk(column: Column, page: Page, head: int, shown: int, at: int) -> bytes:
    bounds: list[thrift.Field] = []
    if page.nulls is not None:
        bounds.append((3, I64, thrift.number(page.nulls)))
    if page.least is not None:
        bounds += [(5, BINARY, thrift.binary(page.most)), (6, BINARY, thrift.binary(page.least))]
    path = [thrift.binary(name.encode()) for name in column.path]
    about = thrift.struct(
        (1, I32, thrift.number(column.kind)),
        (2, LIST, thrift.items(I32, list(map(thrift.number, (page.encoding, RLE))))),
        (3, LIST, thrift.items(BINARY, path)),
        (4, I32, thrift.number(page.codec)),
        (5, I64, thrift.number(page.values)),
        (6, I64, thrift.number(head + page.size)),
        (7, I64, thrift.number(head + shown)),
        (9, I64, thrift.number(at)),
        *([(12, STRUCT, thrift.struct(*bounds))] if bounds else []),
    )
    return thrift.struct((2, I64, thrift.number(0)), (3, STRUCT, about))
