"""The outputs of a network as columns: of a shard's Parquet file, or where large a ``.npy`` file each."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..graph.form import Form
from ..graph.graph import Value
from ..workload import Samples
from . import packages

#: What a network's numbers are called in columns: the first where it ends in a softmax.
PROBABILITIES, OUTPUTS = "probabilities", "outputs"

#: Columns beside those of outputs.
OTHERS = ("id", "label", "label_text", "error")

#: Bytes of an output for one image beyond which it has files of its own: as many as a page of a column.
MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Column:
    """One output of the network as a column.

    Attributes:
        output: its name in the network.
        title: of the column, or the part of a file's name that says which output it has.
        dtype: NumPy's name.
        shape: for one image; Parquet has it as one list, in C order.
        in_files: whether its rows are in ``SHARD.TITLE.npy``, and not in the shard's Parquet file.
    """

    output: str
    title: str
    dtype: str
    shape: tuple[int, ...]
    in_files: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one image's row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def is_number(self) -> bool:
        return np.dtype(self.dtype).kind == "f"

    def to_dict(self) -> dict[str, Any]:
        """Returns the column as JSON has it."""
        return {**asdict(self), "shape": list(self.shape)}

    def field(self) -> Any:
        """Returns the column of Arrow: a list, or a value for a row of none."""
        pa = packages.arrow()
        kind = pa.from_numpy_dtype(np.dtype(self.dtype))
        if not self.shape:
            return pa.field(self.title, kind)
        words = ",".join(map(str, self.shape))
        return pa.field(
            self.title, pa.list_(kind),
            metadata={"shape": words} if len(self.shape) > 1 else None,
        )  # fmt: skip

    def array(self, rows: np.ndarray, bad: Any) -> Any:
        """Returns Arrow's array of ``rows``, [N, *shape]; null where the mask ``bad`` says so."""
        pa = packages.arrow()
        if not self.shape:
            return pa.array(rows, mask=None if bad is None else np.asarray(bad))
        return lists(rows.reshape(len(rows), math.prod(self.shape)), bad)


def lists(rows: np.ndarray, bad: Any) -> Any:
    """Returns Arrow's lists of ``rows``, [N, width]; null, and of no length, where the mask ``bad`` says so.

    Not lists of a fixed size: pyarrow before 26 writes or reads no nulls among those in Parquet.
    """
    pa = packages.arrow()
    mask = np.zeros(len(rows), bool) if bad is None else np.asarray(bad, bool)
    ends = np.cumsum(np.where(mask, 0, rows.shape[1]), dtype=np.int32)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
    good = rows if bad is None else rows[~mask]
    return pa.ListArray.from_arrays(
        offsets, pa.array(good.reshape(-1)), mask=None if bad is None else pa.array(mask)
    )


def of_rows(classes: int, numbers: str = PROBABILITIES, output: str = "") -> tuple[Column, ...]:
    """Returns the only column of a network that gives a row of ``classes`` numbers for an image."""
    return (Column(output, numbers, "float32", (classes,)),)


def of_engine(engine: Any) -> tuple[Column, ...]:
    """Returns the columns of a network: of its outputs for one image, or for one file of inputs."""
    form = engine.form
    if form.is_of_rows:
        numbers = PROBABILITIES if engine.gives_probabilities else OUTPUTS
        return of_rows(engine.network.classes, numbers, form.outputs[0].name)
    taken: set[str] = set(OTHERS)
    found = []
    for value in form.outputs:
        shape = _row(form, value)
        large = math.prod(shape) * np.dtype(value.dtype).itemsize > MOST_BYTES
        # Names of files take no slashes; columns keep the output's own where nothing else has it.
        title = re.sub(r"[^A-Za-z0-9_-]+", "_", value.name).strip("_") if large else value.name
        title, count = title or "output", 2
        while title in taken:
            title, count = f"{value.name or 'output'}-{count}".replace("/", "_"), count + 1
        taken.add(title)
        found.append(Column(value.name, title, value.dtype, shape, large))
    return tuple(found)


def row_bytes(columns: Sequence[Column]) -> int:
    """Returns the bytes of all outputs of one image."""
    return sum(column.nbytes for column in columns)


def is_a_file(form: Form) -> bool:
    """Whether a file of inputs is one row: some input or output has no dimension for several, as a state."""
    return not form.in_parts


def _row(form: Form, value: Value) -> tuple[int, ...]:
    """Returns the shape of an input or output for one row."""
    return tuple(value.shape if is_a_file(form) else form.rows[value.name])


def memory(engine: Any, columns: Sequence[Column], count: int) -> Samples:
    """Returns memory for the outputs of ``count`` images, page-locked on CUDA."""
    if not is_a_file(engine.form):
        return engine.empty_outputs(count, count)
    return Samples({c.output: np.empty((count, *c.shape), c.dtype) for c in columns}, count)


def inputs_of(form: Form) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Returns the name, the type and the shape for one row of each input."""
    return tuple((v.name, v.dtype, _row(form, v)) for v in form.inputs)


def inputs_memory(engine: Any, count: int) -> Samples:
    """Returns memory for all inputs of ``count`` rows."""
    inputs = inputs_of(engine.form)
    return Samples({n: np.empty((count, *row), dtype) for n, dtype, row in inputs}, count)


def run(engine: Any, inputs: Samples, rows: Samples) -> None:
    """Fills ``rows`` with the outputs for inputs of as many rows, in one pass."""
    given, out = inputs.arrays, rows.arrays
    if is_a_file(engine.form):
        for at in range(len(rows)):
            # An array of no dimensions stays one where it is taken by an ellipsis.
            engine.run(
                {name: array[at, ...] for name, array in given.items()},
                out={name: array[at, ...] for name, array in out.items()},
            )
    else:
        engine.run(given, out=out)


class RowsFile:
    """The rows of one output of a shard, as NumPy's file; how many there are is known at its end.

    Args:
        path: of the temporary file.

    Raises:
        OSError: in any method, it cannot be written.
    """

    def __init__(self, path: Path, column: Column) -> None:
        self.path, self._column = path, column
        self._rows, self._digest = 0, hashlib.sha256()
        self._file = open(path, "xb")  # noqa: SIM115
        self._file.write(self._header())

    def _header(self) -> bytes:
        """Returns the header for the rows so far, of one length however many they are."""
        column = self._column
        words = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(column.dtype)),
            "fortran_order": False,
            "shape": (self._rows, *column.shape),
        }
        text = repr(words)
        room = len(text) - len(str(self._rows)) + 20  # digits of the largest number of rows
        total = -(-(10 + room + 1) // 64) * 64
        magic = np.lib.format.magic(1, 0) + (total - 10).to_bytes(2, "little")
        return magic + text.ljust(total - 11).encode("latin-1") + b"\n"

    def add(self, rows: np.ndarray, bad: Sequence[int]) -> None:
        """Writes ``rows``, [N, *shape]; those at ``bad`` are NaN, or 0 where the type has none."""
        if bad:
            rows = rows.copy()
            rows[list(bad)] = np.nan if self._column.is_number else 0
        data = memoryview(np.ascontiguousarray(rows)).cast("B") if rows.size else b""
        self._file.write(data)
        self._digest.update(data)
        self._rows += len(rows)

    def complete(self) -> None:
        """Writes the number of rows into the header, and flushes the file."""
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()

    def facts(self, name: str) -> dict[str, Any]:
        """Returns the file's record: name, bytes, and a SHA-256 of its rows."""
        size = os.fstat(self._file.fileno()).st_size
        return {"name": name, "bytes": size, "sha256": self._digest.hexdigest()}

    def commit(self, final: Path) -> None:
        """Renames the complete file; an existing one has the same bytes, since rows are reproducible."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.path, final)

    def close(self) -> None:
        self._file.close()


def fault(path: Path, noted: dict[str, Any], reads: bool) -> str | None:
    """Returns how a file of rows differs from its record; None where it does not.

    Args:
        reads: whether its rows are read, and not its size alone.
    """
    try:
        size = path.stat().st_size
        if size != noted["bytes"]:
            return f"{path.name}: expected {noted['bytes']:,} bytes, found {size:,}"
        if not reads:
            return None
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            file.seek(10 + int.from_bytes(file.read(10)[8:], "little"))
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        return f"{path.name}: cannot be read: {error.strerror or error}"
    same = digest.hexdigest() == noted["sha256"]
    return None if same else f"{path.name}: expected rows as they were written, found others"
