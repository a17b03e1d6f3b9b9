"""A shard's rows as a Parquet file: whole or not at all, and once."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CnnEngineError
from ..io.files import describe_os_error
from . import packages, parquet

#: Bytes of probabilities that a row group has, and how many rows that may be; from a share of that on they
#: are written as they lie in memory, fewer wait.
GROUP_BYTES = 2 << 20
LEAST_ROWS, MOST_ROWS = 256, 1 << 16
WORTH = 1 / 8

KEY = b"cnn_engine"


class OutputError(CnnEngineError):
    """The output folder cannot be written: no shard's fault, and nothing that another attempt mends."""


@dataclass(frozen=True)
class Record:
    """What is known of a shard that is done: its rows, those with an error, and the file's bytes."""

    rows: int
    errors: int
    bytes: int


def schema(classes: int, top: int | None) -> Any:
    """Returns the columns as Arrow has them: the same in every file, whatever is known of the images.

    Args:
        classes: numbers that the network gives for an image.
        top: how many of the largest are kept; None: all, as ``probabilities``.
    """
    pa = packages.arrow()
    fields = []
    for column in columns(top):
        if column.kind in _LISTS:
            kind = pa.list_(getattr(pa, _LISTS[column.kind])(), top or classes)
        else:
            kind = pa.int64() if column.kind == parquet.INT64 else pa.string()
        fields.append(pa.field(column.name, kind, nullable=column.nullable))
    return pa.schema(fields)


_LISTS = {parquet.FLOAT: "float32", parquet.INT32: "int32"}


def columns(top: int | None) -> list[parquet.Column]:
    """Returns the columns; ``top`` as for :func:`schema`."""
    numbers = [parquet.Column("probabilities", parquet.FLOAT)]
    if top is not None:
        numbers = [
            parquet.Column("top_classes", parquet.INT32),
            parquet.Column("top_probabilities", parquet.FLOAT),
        ]
    return [
        parquet.Column("id", parquet.BYTE_ARRAY, nullable=False),
        *numbers,
        parquet.Column("label", parquet.INT64),
        parquet.Column("error", parquet.BYTE_ARRAY),
    ]


def best(rows: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ``top`` largest of each row, largest first, and their classes; of equals the first."""
    classes = np.argsort(-rows, axis=1, kind="stable")[:, :top]
    return classes.astype(np.int32), np.take_along_axis(rows, classes, 1)


class ShardFile:
    """Writes one shard: rows to a temporary name, then fsync, then the shard's own name.

    A file under the shard's name is complete, since it gets that name only at the end; of two attempts, the
    first to end stays, and the other changes nothing.

    Args:
        folder: where the shard's file is to be.
        temporary: the temporary file's path, in a folder of the same file system.
        run: what tells this run's files from another's.
        top: see :func:`schema`.

    Raises:
        OutputError: it cannot be created or, in any method, written.
    """

    def __init__(
        self, folder: Path, temporary: Path, name: str, run: str, classes: int, top: int | None
    ) -> None:
        self._final, self._temporary, self._name, self._run = (
            folder / f"{name}.parquet", temporary, name, run,
        )  # fmt: skip
        self._classes, self._top = classes, top
        self.group_rows = min(max(GROUP_BYTES // (4 * (top or classes)), LEAST_ROWS), MOST_ROWS)
        self._parts: list[_Part] = []
        self._waiting = self.rows = self.errors = 0
        with _written(self._final):
            self._file = open(temporary, "xb", buffering=0)  # noqa: SIM115
            try:
                self._table = parquet.File(self._file.fileno(), columns(top))
            except BaseException:
                self._file.close()
                raise

    def add(
        self,
        ids: parquet.Names | Sequence[str],
        rows: np.ndarray,
        labels: np.ndarray | Sequence[int | None] | None,
        errors: dict[int, str],
    ) -> None:
        """Writes ``rows``, float32 [N, classes], which may change once it returns; a bad image has none.

        Rows that are far fewer than a row group wait for more.

        Args:
            ids: N of them.
            labels: int64 [N], not known where below 0; or N numbers or None; None: none is known.
            errors: position -> what is wrong with that image.
        """
        if not len(ids):
            return
        numbers = [rows] if self._top is None else list(best(rows, self._top))
        full = self._waiting + len(ids) >= WORTH * self.group_rows
        if not full and self._top is None:
            numbers = [rows.copy()]
        names = ids if isinstance(ids, parquet.Names) else parquet.Names.of(ids)
        self._parts.append(_Part(names, numbers, *_known(labels, len(ids)), errors))
        self._waiting += len(ids)
        self.rows += len(ids)
        self.errors += len(errors)
        if full:
            self._write()

    def _write(self) -> None:
        """Writes all rows that there are as a row group."""
        part = _joined(self._parts)
        count, bad = len(part.names), None
        errors = parquet.nulls(count)
        if part.errors:
            bad = np.zeros(count, bool)
            bad[list(part.errors)] = True
            errors = parquet.texts([part.errors.get(at) for at in range(count)])
        labels = parquet.nulls(count)
        if part.labels is not None:
            labels = parquet.whole_numbers(part.labels, part.known)
        lists = [parquet.lists(numbers, bad) for numbers in part.numbers]
        with _written(self._final):
            self._table.add([parquet.names(part.names), *lists, labels, errors], count)
        self._parts, self._waiting = [], 0

    def commit(self) -> Record:
        """Completes the file and gives it its name, on the disk before it returns; returns what is in it."""
        if self._waiting:
            self._write()
        facts = {"run": self._run, "shard": self._name, "rows": self.rows, "errors": self.errors}
        with _written(self._final):
            self._table.close(
                {b"ARROW:schema": _arrow(self._classes, self._top), KEY: json.dumps(facts).encode()}
            )
            os.fsync(self._file.fileno())
            size = os.fstat(self._file.fileno()).st_size
            self._file.close()
            publish(self._temporary, self._final)
        return Record(self.rows, self.errors, size)

    def discard(self) -> None:
        """Removes what was written."""
        self._file.close()
        with suppress(OSError):
            os.unlink(self._temporary)


@dataclass(frozen=True)
class _Part:
    """Rows that wait: ids, what the network gave, int64 labels and which are known (or None), and errors."""

    names: parquet.Names
    numbers: list[np.ndarray]
    labels: np.ndarray | None
    known: np.ndarray | None
    errors: dict[int, str]


def _joined(parts: list[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]
    firsts = np.cumsum([0, *(len(part.names) for part in parts)]).tolist()
    labels = known = None
    if any(part.labels is not None for part in parts):
        labels, known = np.zeros(firsts[-1], np.int64), np.zeros(firsts[-1], bool)
        for first, part in zip(firsts, parts, strict=False):
            if part.labels is not None:
                labels[first : first + len(part.names)] = part.labels
                known[first : first + len(part.names)] = part.known
    return _Part(
        parquet.Names.joined([part.names for part in parts]),
        [np.concatenate(each) for each in zip(*(part.numbers for part in parts), strict=True)],
        labels,
        known,
        {
            first + at: what
            for first, part in zip(firsts, parts, strict=False)
            for at, what in part.errors.items()
        },
    )


def _known(labels: Any, count: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns labels and which of them are known; None where none is."""
    if labels is None:
        return None, None
    if isinstance(labels, np.ndarray):
        return labels, labels >= 0
    known = np.array([label is not None for label in labels], bool)
    if not known.any():
        return None, None
    return np.array([label or 0 for label in labels], np.int64), known


@lru_cache(8)
def _arrow(classes: int, top: int | None) -> bytes:
    """Returns what tells Arrow its own types: that lists are of one size."""
    return base64.b64encode(schema(classes, top).serialize().to_pybytes())


class _written:
    """Makes an OSError of what is written to ``path`` an :class:`OutputError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            reason = os.strerror(error.errno) if error.errno else describe_os_error(error)
            raise OutputError(f"cannot write {self._path}: {reason}") from error


def publish(temporary: Path, final: Path) -> bool:
    """Gives a complete file its final name, on the disk when it returns; whether there was none of that name.

    A link fails where the name is taken; where a file system has no links, a rename replaces the file by one
    of the same bytes.
    """
    try:
        os.link(temporary, final)
    except FileExistsError:
        new = False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        os.rename(temporary, final)
        sync_folder(final.parent)
        return True
    else:
        new = True
    sync_folder(final.parent)
    os.unlink(temporary)
    return new


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inspect(path: Path, name: str, run: str) -> Record | None:
    """Returns what a shard's file has; None where there is none, or not a whole one of this run.

    A Parquet file that was cut off has no footer; rows and sizes in the footer are compared with the file.
    """
    pa, pq = packages.arrow(), packages.parquet()
    try:
        size = path.stat().st_size
        if not path.is_file():  # to open a pipe would take until somebody writes
            return None
        with pq.ParquetFile(path) as file:
            facts = json.loads((file.metadata.metadata or {}).get(KEY, b"{}"))
            rows = file.metadata.num_rows
    except (OSError, ValueError, pa.ArrowException):
        return None
    if (facts.get("run"), facts.get("shard"), facts.get("rows")) != (run, name, rows):
        return None
    return Record(rows, int(facts.get("errors", 0)), size)


def verify(path: Path) -> str | None:
    """Reads all of a shard's file with the checksums of its pages; returns what is wrong, or None."""
    pa, pq = packages.arrow(), packages.parquet()
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group)
    except (OSError, pa.ArrowException) as error:
        return " ".join(str(error).split())
    return None
