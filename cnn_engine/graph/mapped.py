"""Memory-mapped weights in files that others may change: changed ones are refused.

A file that is replaced by renaming another over it stays what it was for those that have it open. One that
is written in place becomes another network, and one that shrinks takes memory away that is still mapped.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from ..errors import InputError


class _File:
    """A file as it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self.state = self._state()

    def _state(self) -> tuple[int, ...]:
        found = os.fstat(self.descriptor)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Raises InputError where the file has changed since it was opened."""
        if self._state() != self.state:
            raise InputError(
                f"{self.path}: expected the file as it was when it was loaded, found it changed since; "
                "load it again, and replace a file in use by renaming another over it"
            )


class _Map(mmap.mmap):
    """A part of a file, which knows where it is from."""

    file: _File
    start: int
    expected: Callable[[np.ndarray], bool] | None = None


#: Files that are open, by their paths and states: one descriptor for all arrays of a file.
_OPEN: weakref.WeakValueDictionary[tuple, _File] = weakref.WeakValueDictionary()


def mapped(path: Path, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
    """Returns ``count`` elements of a file from byte ``offset``, read-only.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is shorter.
    """
    file = _File(path)
    file = _OPEN.setdefault((path, file.state), file)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset - start + count * dtype.itemsize
    data = _Map(file.descriptor, length, access=mmap.ACCESS_READ, offset=start)
    data.file, data.start = file, start
    return np.frombuffer(data, dtype, count, offset - start)


def expect(array: np.ndarray, is_right: Callable[[np.ndarray], bool]) -> None:
    """Has :func:`read` refuse all of a mapped array whose bytes are not right: a file that was damaged."""
    _map_of(array).expected = is_right


def verify(arrays: Iterable[np.ndarray]) -> None:
    """Raises InputError where the bytes of any of ``arrays`` are known not to be right."""
    for array in arrays:
        base = _map_of(array)
        if base is not None and base.expected is not None:
            read(array)
            base.expected = None


def _map_of(array: np.ndarray) -> _Map | None:
    base = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, _Map) else None


def release(array: np.ndarray) -> None:
    """Gives back the memory of pages that were read of a mapped file; they are read again where needed."""
    base = _map_of(array)
    if base is not None and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)


def check(arrays: Iterable[np.ndarray]) -> None:
    """Raises InputError where a file that any of ``arrays`` lies in has changed since it was mapped."""
    for file in {one.file for one in map(_map_of, arrays) if one is not None}:
        file.check()


def read(array: np.ndarray) -> np.ndarray:
    """Returns ``array``, or a copy of a file's part, so that a file that shrinks meanwhile ends no process.

    Raises:
        InputError: the file has changed since it was mapped.
    """
    base = _map_of(array)
    if base is None:
        return array
    if not array.flags.c_contiguous:
        base.file.check()
        return np.array(array)
    found = np.empty(array.shape, array.dtype)
    first = np.frombuffer(base, np.uint8).__array_interface__["data"][0]
    at = base.start + array.__array_interface__["data"][0] - first
    left = memoryview(found.reshape(-1).view(np.uint8))
    while left and (count := os.preadv(base.file.descriptor, [left], at)):
        left, at = left[count:], at + count
    base.file.check()
    if base.expected is not None and not base.expected(found.reshape(-1).view(np.uint8)):
        raise InputError(f"{base.file.path}: expected the bytes that were saved, found others")
    return found
