"""A shard's rows as a Parquet file: whole or not at all, and once."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CnnEngineError
from ..io.files import describe_os_error
from ..io.model_metadata import CLASSES
from . import columns as outputs
from . import packages
from .columns import Column, RowsFile

#: Bytes of probabilities that are written as one row group, and how many rows that may be: what Arrow makes
#: of them on the way stays in a core's caches, and is little of a process's memory.
GROUP_BYTES = 2 << 20
LEAST_ROWS, MOST_ROWS = 256, 1 << 14

#: Levels of a column that Arrow encodes at a time, and bytes of a page of ids.
BATCH_LEVELS, PAGE_BYTES = 1 << 17, 1 << 16

#: What a run notes of a file in its metadata, and what the network's numbers are called.
KEY, NUMBERS_KEY = b"cnn_engine", b"cnn_engine.numbers"


class OutputError(CnnEngineError):
    """The output folder cannot be written, and another attempt would not help."""


#: Bad images and lost labels of a shard that are kept by name.
NAMED = 5


@dataclass(frozen=True)
class Record:
    """Facts of a shard that is done.

    Attributes:
        rows: in its file.
        errors: rows that have one.
        bytes: of the file.
        label_texts: labels that are texts, in a column of their own.
        labels_lost: labels that were there and are in no column.
        bad, lost: the first :data:`NAMED` bad images and lost labels, each with what is wrong.
        arrays: the files of large outputs beside it: ``name``, ``bytes``, and ``sha256`` of the rows.
    """

    rows: int
    errors: int
    bytes: int
    label_texts: int = 0
    labels_lost: int = 0
    bad: tuple[str, ...] = field(default=(), compare=False)
    lost: tuple[str, ...] = field(default=(), compare=False)
    arrays: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, facts: dict[str, Any], size: int) -> Record:
        """Returns the record that JSON has, for a file of ``size`` bytes.

        Raises:
            ValueError: it is none.
        """
        counts = {
            name: facts.get(name, 0) for name in ("rows", "errors", "label_texts", "labels_lost")
        }
        names = {name: facts.get(name, []) for name in ("bad", "lost")}
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise ValueError("counts")
        for some in names.values():
            if not isinstance(some, list | tuple) or not all(isinstance(one, str) for one in some):
                raise ValueError("names")
        if counts["errors"] > counts["rows"]:
            raise ValueError("errors")
        arrays = facts.get("arrays", [])
        if not isinstance(arrays, list | tuple) or not all(map(_is_noted, arrays)):
            raise ValueError("arrays")
        kept = {name: tuple(some) for name, some in names.items()}
        return cls(**counts, bytes=size, **kept, arrays=tuple(arrays))


def _is_noted(one: Any) -> bool:
    """Whether JSON says of a file in the folder what :meth:`.RowsFile.facts` does."""
    kinds = {"name": str, "bytes": int, "sha256": str}
    if not isinstance(one, dict) or {name: type(value) for name, value in one.items()} != kinds:
        return False
    return os.path.basename(one["name"]) == one["name"] and one["name"].endswith(".npy")


class Faults:
    """Counts of faults by kind, with the first names."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []

    def add(self, name: str, what: str) -> None:
        self.count += 1
        if len(self.names) < NAMED:
            self.names.append(f"{name}: {what}")

    def join(self, others: Faults) -> None:
        self.count += others.count
        self.names = (self.names + others.names)[:NAMED]


def schema(
    columns: Sequence[Column],
    top: int | None,
    texts: bool = False,
    names: Sequence[str] | None = None,
) -> Any:
    """Returns the columns: the same in every file of a run, whatever is known of the images.

    Args:
        columns: of outputs.
        top: how many of the largest numbers of the only one are kept; None: all.
        texts: whether labels may be texts.
        names: of classes, where they are known.
    """
    pa = packages.arrow()
    numbers = columns[0].title
    if top is None:
        fields = [column.field() for column in columns if not column.in_files]
    else:
        fields = [
            pa.field("top_classes", pa.list_(pa.int32())),
            *([pa.field("top_names", pa.list_(pa.string()))] if names else []),
            pa.field(f"top_{numbers}", pa.list_(pa.float32())),
        ]
    metadata = {NUMBERS_KEY: numbers} if numbers in (outputs.PROBABILITIES, outputs.OUTPUTS) else {}
    if names:
        metadata[CLASSES] = json.dumps(list(names), ensure_ascii=False)
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            *fields,
            pa.field("label", pa.int64()),
            *([pa.field("label_text", pa.string())] if texts else []),
            pa.field("error", pa.string()),
        ],
        metadata,
    )


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
        columns, top, texts, names: see :func:`schema`.

    Raises:
        OutputError: it cannot be created or, in any method, written.
    """

    def __init__(
        self,
        folder: Path,
        temporary: Path,
        name: str,
        run: str,
        columns: Sequence[Column],
        top: int | None = None,
        texts: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        self._final, self._temporary, self._name, self._run = (
            folder / f"{name}.parquet", temporary, name, run,
        )  # fmt: skip
        self._columns = [column for column in columns if not column.in_files]
        self._top, self._texts, self._names = top, texts, names
        self._schema = schema(columns, top, texts, names)
        each = 4 * top if top else outputs.row_bytes(self._columns)
        self._group = min(max(GROUP_BYTES // max(each, 1), LEAST_ROWS), MOST_ROWS)
        self._parts: list[Any] = []
        self._waiting = self.rows = self._label_texts = 0
        self._bad, self._lost = Faults(), Faults()
        self._complete = False
        pa, pq = packages.arrow(), packages.parquet()
        plain = [title for column in columns for title in (column.title, f"top_{column.title}")
                 if column.is_number]  # fmt: skip
        self._arrays: list[tuple[Column, RowsFile]] = []
        with _written(self._final):
            self._file = open(temporary, "xb")  # noqa: SIM115
            try:
                for number, column in enumerate(columns):
                    if column.in_files:
                        path = temporary.with_name(f"{temporary.name}.{number}")
                        self._arrays.append((column, RowsFile(path, column)))
                # Arrow's own file: what it writes needs no lock of Python's.
                self._sink = pa.OSFile(os.fsencode(temporary), "wb")
                self._writer = pq.ParquetWriter(
                    self._sink,
                    self._schema,
                    # A network's numbers are noise to a compressor; ids begin alike.
                    compression={
                        name: "none" if name in plain else "zstd" for name in self._schema.names
                    },
                    use_dictionary=["label_text", "error"] if texts else ["error"],
                    # Nobody looks for rows by their numbers, and to compare all of them takes time.
                    write_statistics=["id", "label", "error"],
                    write_page_checksum=True,
                    data_page_size=PAGE_BYTES,
                    # Levels are encoded all at once; the default, 1,024 of them, takes a twentieth longer.
                    write_batch_size=BATCH_LEVELS,
                )
            except BaseException:
                for _, array in self._arrays:
                    array.close()
                self._file.close()
                raise

    def add(
        self,
        ids: Any,
        rows: Mapping[str, np.ndarray],
        labels: Any,
        errors: dict[int, str],
        texts: Any = None,
    ) -> None:
        """Writes ``rows``, which may change once it returns; a bad image has none.

        Rows that are fewer than a row group wait for more.

        Args:
            rows: output -> [N, ...].
            ids, labels, texts: of each row, as lists or as Arrow has them; texts None: no label is one.
            errors: position -> what is wrong with that image.
        """
        full = self._waiting + len(ids) >= self._group
        with _written(self._final):
            for column, file in self._arrays:
                file.add(rows[column.output], sorted(errors))
        kept = [rows[column.output] for column in self._columns]
        kept = kept if full else [array.copy() for array in kept]
        self._parts.append(self._batch(ids, kept, labels, errors, texts))
        self._waiting += len(ids)
        self.rows += len(ids)
        for at in sorted(errors):
            self._bad.add(str(ids[at]), errors[at])
        if texts is not None:
            self._label_texts += len(texts) - self._parts[-1].column("label_text").null_count
        if full:
            self._write()

    def lose(self, labels: Faults) -> None:
        """Records labels that no column holds."""
        self._lost.join(labels)

    def _batch(
        self, ids: Any, rows: list[np.ndarray], labels: Any, errors: dict[int, str], texts: Any
    ) -> Any:
        pa = packages.arrow()
        count = len(ids)
        bad = None
        if errors:
            mask = np.zeros(count, bool)
            mask[list(errors)] = True
            bad = pa.array(mask)
        if self._top is None:
            lists = [
                column.array(array, bad) for column, array in zip(self._columns, rows, strict=True)
            ]
        else:
            lists = self._best(rows[0], bad)
        messages = pa.nulls(count, pa.string())
        if errors:
            messages = pa.array([errors.get(at) for at in range(count)], pa.string())
        ids = ids if isinstance(ids, pa.Array) else pa.array(ids, pa.string())
        labels = [labels if isinstance(labels, pa.Array) else pa.array(labels, pa.int64())]
        if self._texts:
            texts = pa.nulls(count, pa.string()) if texts is None else texts
            labels.append(texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string()))
        return pa.record_batch([ids, *lists, *labels, messages], schema=self._schema)

    def _best(self, rows: np.ndarray, bad: Any) -> list[Any]:
        pa = packages.arrow()
        classes, values = best(rows, self._top)
        found = [outputs.lists(array, bad) for array in (classes, values)]
        if self._names:
            names = [[self._names[number] for number in row] for row in classes]
            mask = None if bad is None else np.asarray(bad)
            found.insert(1, pa.array(names, pa.list_(pa.string()), mask=mask))
        return found

    def _write(self) -> None:
        """Writes all rows that there are, as row groups of one size."""
        table = packages.arrow().Table.from_batches(self._parts, self._schema)
        groups = max(-(-len(table) // self._group), 1)
        with _written(self._final):
            self._writer.write_table(table, row_group_size=max(-(-len(table) // groups), 1))
        self._parts, self._waiting = [], 0

    def complete(self) -> None:
        """Flushes the file: nothing of it is left in this process."""
        if self._waiting or not self.rows:
            self._write()
        with _written(self._final):
            for _, array in self._arrays:
                array.complete()
            facts = {"run": self._run, "shard": self._name, **self._facts()}
            self._writer.add_key_value_metadata({KEY: json.dumps(facts).encode()})
            self._writer.close()
            self._sink.close()
        self._complete = True

    def _facts(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "errors": self._bad.count,
            "label_texts": self._label_texts,
            "labels_lost": self._lost.count,
            "bad": self._bad.names,
            "lost": self._lost.names,
            **({"arrays": [file.facts(self._array(column)) for column, file in self._arrays]}
               if self._arrays else {}),
        }  # fmt: skip

    def _array(self, column: Column) -> str:
        return f"{self._name}.{column.title}.npy"

    @property
    def paths(self) -> list[Path]:
        """Paths of the file and of the files of large outputs."""
        arrays = [self._final.with_name(self._array(column)) for column, _ in self._arrays]
        return [self._final, *arrays]

    def commit(self) -> Record:
        """Completes the file, renames it once it is on the disk, and returns its facts."""
        if not self._complete:
            self.complete()
        facts = self._facts()
        with _written(self._final):
            # First, so that where the shard's own file is, all is.
            for (_, array), path in zip(self._arrays, self.paths[1:], strict=True):
                array.commit(path)
            os.fsync(self._file.fileno())
            size = os.fstat(self._file.fileno()).st_size
            self._file.close()
            publish(self._temporary, self._final)
        return Record.of(facts, size)

    def discard(self) -> None:
        """Removes the part that was written."""
        arrays = [file for _, file in self._arrays]
        for file in (self._writer, self._sink, self._file, *arrays):
            with suppress(Exception):  # what could not be written cannot be closed well either
                file.close()
        for path in (self._temporary, *(file.path for file in arrays)):
            with suppress(OSError):
                os.unlink(path)


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
    """Renames a complete file and syncs its folder; returns whether the name was free.

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
    """Syncs a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inspect(path: Path, name: str, run: str) -> Record | None:
    """Returns the facts of a shard's file; None where there is none, or not a whole one of this run.

    A Parquet file that was cut off has no footer; rows and sizes in the footer are compared with the file.
    """
    found = _footer(path)
    if found is None:
        return None
    facts, rows, size = found
    try:
        record = Record.of(facts, size)
    except ValueError:
        return None
    same = (facts.get("run"), facts.get("shard"), record.rows) == (run, name, rows)
    if not same or any(outputs.fault(path.with_name(a["name"]), a, False) for a in record.arrays):
        return None
    return record


def is_of_others(path: Path, name: str, run: str) -> bool:
    """Whether there is a whole Parquet file that this run did not write under that name."""
    found = _footer(path)
    return found is not None and (found[0].get("run"), found[0].get("shard")) != (run, name)


def _footer(path: Path) -> tuple[dict[str, Any], int, int] | None:
    """Returns (what a run noted, rows, bytes of the file) of a Parquet file; None where it is none."""
    pa, pq = packages.arrow(), packages.parquet()
    try:
        size = path.stat().st_size
        if not path.is_file():  # to open a pipe would take until somebody writes
            return None
        with pq.ParquetFile(path) as file:
            noted = (file.metadata.metadata or {}).get(KEY, b"{}")
            rows = file.metadata.num_rows
    except (OSError, ValueError, pa.ArrowException):
        return None
    try:
        facts = json.loads(noted)
    except (ValueError, RecursionError):
        facts = None
    return facts if isinstance(facts, dict) else {}, rows, size


def verify(path: Path) -> str | None:
    """Reads all of a shard's files with their checksums; returns the fault, or None."""
    pa, pq = packages.arrow(), packages.parquet()
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group)
    except (OSError, pa.ArrowException) as error:
        return " ".join(str(error).split())
    noted = _footer(path)[0].get("arrays", [])
    faults = (outputs.fault(path.with_name(one["name"]), one, True) for one in noted)
    return next(filter(None, faults), None)
