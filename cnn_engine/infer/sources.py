"""Finds the inputs: image files, tars, Parquet files and arrays, in one order on every run."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import InputError, expected
from ..io.files import describe_os_error, status
from .formats import CIFAR_SHAPE, Source, Wanted, examine, examiner_of, known


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
            raise expected(path, f"a file of images ({', '.join(known())})", "another kind of file")


def first_kind(inputs: Sequence[str], columns: dict[str, str]) -> str | None:
    """Returns the kind of the first input; None, if it is at fault."""
    try:
        first = next(find(inputs, Wanted(CIFAR_SHAPE, columns)), None)
    except InputError:  # arrays of another shape, or a fault that planning tells
        return None
    return None if first is None else first.kind


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
            if examiner_of(name) is not None and not _is_hidden(name):
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
        elif (source := examine(entry.path, wanted)) is not None:  # it refuses a link to nothing
            if apart is not None:
                there = status(Path(entry.path))
                apart.file(entry.path, there, entry.is_symlink() or there.st_nlink > 1)
            yield source


def _is_labels(path: str) -> bool:
    return "-labels-idx1-ubyte" in os.path.basename(path)


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
