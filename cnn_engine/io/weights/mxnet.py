"""Weights as MXNet's NDArray list, the ``.params`` file of ``mx.nd.save`` and of a model's checkpoint.

Little-endian. uint64 0x112, uint64 0, uint64 n; n arrays, each uint32 0xF993FAC9, int32 storage type,
uint32 ndim, int64[ndim] shape, int32 device type, int32 device id, int32 data type, data; then uint64 n
names, each uint64 length and bytes. A name is ``arg:<layer>_weight`` or ``arg:<layer>_bias``; the layers
are MXNet's own (``convolution0``, ``fullyconnected1``), so they are matched with the network's by their
kind (a convolution's weight has four dimensions, a fully connected layer's two) and their numbers' order.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ...errors import InputError, expected
from ...graph.network import LayerInfo, Network

MAGIC_LIST = 0x112
MAGIC_ARRAY = 0xF993FAC9
DENSE = 0
DTYPES = {0: np.dtype("<f4"), 1: np.dtype("<f8"), 2: np.dtype("<f2")}

#: Far above what any network needs: what a header may claim before it is taken for damage.
MAX_ARRAYS = 65_536
MAX_DIMENSIONS = 8
MAX_NAME_BYTES = 256


@dataclass(frozen=True)
class _Entry:
    """An array of the file, not yet read: its shape, its type, and where its data begins."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read(path: Path, network: Network) -> dict[str, np.ndarray]:
    """Reads the weights of ``network`` from ``path``.

    Headers come first: data is read only for arrays of the shapes that the network has, so that what a
    file claims costs nothing.

    Raises:
        InputError: it is not such a file, is damaged, or belongs to another network.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        positions = _match(path, _Reader(path, file, size).entries(), network)
        weights = {}
        for name, entry in positions.items():
            file.seek(entry.offset)
            data = file.read(entry.nbytes)
            if len(data) < entry.nbytes:
                raise InputError(f"{path}: became shorter while it was read")
            weights[name] = np.frombuffer(data, entry.dtype).reshape(entry.shape)
        return weights


def _open(path: Path) -> IO[bytes]:
    if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device might never end
        raise expected(str(path), "a regular file", "a special file")
    return open(path, "rb")


class _Reader:
    """Reads headers, each number within the file."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._at = 0

    def entries(self) -> dict[str, _Entry]:
        """Returns every array of the file by its name."""
        magic, reserved, count = self._numbers("QQQ", "a header of 24 bytes")
        if magic != MAGIC_LIST or reserved != 0:
            found = f"{magic:#x} {reserved:#x}"
            raise expected(str(self._path), f"an MXNet list ({MAGIC_LIST:#x} 0x0)", found)
        self._check_count("arrays", count)
        arrays = [self._entry(f"array {index}") for index in range(count)]
        (names,) = self._numbers("Q", "the number of names")
        if names != count:
            raise expected(str(self._path), f"a name for each of {count} arrays", f"{names} names")
        entries: dict[str, _Entry] = {}
        for index, array in enumerate(arrays):
            name = self._name(index)
            if name in entries:
                raise expected(str(self._path), "different names", f"{name!r} twice")
            entries[name] = array
        if self._at != self._size:
            found = f"{self._size - self._at} bytes more"
            raise expected(str(self._path), f"an end after {self._at} bytes", found)
        return entries

    def _entry(self, where: str) -> _Entry:
        magic, storage, ndim = self._numbers("IiI", f"the header of {where}")
        if magic != MAGIC_ARRAY:
            wanted = f"{MAGIC_ARRAY:#x} (MXNet's NDArray, version 2)"
            raise expected(f"{self._path}: {where}", wanted, f"{magic:#x}")
        if storage != DENSE:
            raise expected(f"{self._path}: {where}", "dense storage (0)", storage)
        if not 1 <= ndim <= MAX_DIMENSIONS:
            raise expected(f"{self._path}: {where}", f"1 to {MAX_DIMENSIONS} dimensions", ndim)
        shape = self._numbers(f"{ndim}q", f"the shape of {where}")
        if not all(1 <= length <= self._size for length in shape):
            found = list(shape)
            raise expected(f"{self._path}: {where}", "lengths that the file can hold", found)
        _, _, flag = self._numbers("iii", f"the header of {where}")
        if flag not in DTYPES:
            known = ", ".join(f"{flag} ({dtype.name})" for flag, dtype in DTYPES.items())
            raise expected(f"{self._path}: {where}: data type", f"one of {known}", flag)
        entry = _Entry(shape, DTYPES[flag], self._at)
        self._skip(entry.nbytes, f"{where}, {entry.dtype.name} {list(shape)}")
        return entry

    def _name(self, index: int) -> str:
        (length,) = self._numbers("Q", f"the length of name {index}")
        if not 1 <= length <= MAX_NAME_BYTES:
            wanted = f"1 to {MAX_NAME_BYTES} bytes"
            raise expected(f"{self._path}: name {index}", wanted, length)
        data = self._bytes(length, f"name {index}")
        try:
            name = data.decode("ascii")
        except UnicodeDecodeError:
            name = ""
        if not name.isprintable() or not name:
            raise expected(f"{self._path}: name {index}", "printable ASCII", repr(data[:40]))
        return name

    def _check_count(self, what: str, count: int) -> None:
        if not 1 <= count <= MAX_ARRAYS:
            raise expected(str(self._path), f"1 to {MAX_ARRAYS} {what}", count)

    def _need(self, nbytes: int, what: str) -> None:
        if nbytes > self._size - self._at:
            raise InputError(
                f"{self._path}: expected {nbytes} bytes for {what} at byte {self._at}, found "
                f"{self._size - self._at}"
            )

    def _skip(self, nbytes: int, what: str) -> None:
        self._need(nbytes, what)
        self._at += nbytes
        self._file.seek(self._at)

    def _bytes(self, nbytes: int, what: str) -> bytes:
        self._need(nbytes, what)
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise InputError(f"{self._path}: became shorter while it was read")
        self._at += nbytes
        return data

    def _numbers(self, layout: str, what: str) -> tuple[int, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self._bytes(struct.calcsize(layout), what))


def _match(path: Path, entries: dict[str, _Entry], network: Network) -> dict[str, _Entry]:
    """Returns the network's parameters and the arrays of the file that hold them."""
    layers: dict[str, dict[str, _Entry]] = {}
    for name, entry in entries.items():
        parts = re.fullmatch(r"arg:(.+)_(weight|bias)", name)
        if parts is None:
            raise expected(str(path), "names arg:<layer>_weight and arg:<layer>_bias", repr(name))
        layers.setdefault(parts[1], {})[parts[2]] = entry
    positions: dict[str, _Entry] = {}
    for kind, dimensions, what in (("conv2d", 4, "convolutions"), ("linear", 2, "fully connected")):
        wanted = [info for info in network.infos if info.operator.kind == kind]
        found = sorted(
            (
                name
                for name, layer in layers.items()
                if _dimensions(path, name, layer) == dimensions
            ),
            key=_natural,
        )
        if len(found) != len(wanted):
            raise expected(
                f"{path}: {what}",
                f"{len(wanted)} layers for {network.name}",
                f"{len(found)} ({_listed(found)})",
            )
        for name, info in zip(found, wanted, strict=True):
            positions.update(_match_layer(path, name, layers.pop(name), info, network))
    if layers:
        wanted_text = "weights of 4 dimensions (convolutions) or 2 (fully connected)"
        raise expected(str(path), wanted_text, f"others: {_listed(sorted(layers))}")
    return positions


def _dimensions(path: Path, name: str, layer: dict[str, _Entry]) -> int:
    if "weight" not in layer:
        raise expected(str(path), f"arg:{name}_weight beside arg:{name}_bias", "none")
    return len(layer["weight"].shape)


def _match_layer(
    path: Path, name: str, layer: dict[str, _Entry], info: LayerInfo, network: Network
) -> dict[str, _Entry]:
    wanted = {parameter.rpartition(".")[2]: shape for parameter, shape in info.parameters.items()}
    if layer.keys() != wanted.keys():
        raise expected(
            f"{path}: {name}",
            f"{' and '.join(wanted)} for {info.layer.name} of {network.name}",
            " and ".join(sorted(layer, reverse=True)),
        )
    for part, shape in wanted.items():
        if layer[part].shape != shape:
            raise expected(
                f"{path}: arg:{name}_{part}",
                f"shape {list(shape)} for {info.layer.name} of {network.name}",
                list(layer[part].shape),
            )
    return {f"{info.layer.name}.{part}": entry for part, entry in layer.items()}


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts ``layer2`` before ``layer10``."""
    return [
        (0, int(word), "") if word.isdecimal() else (1, 0, word)
        for word in re.findall(r"[0-9]+|[^0-9]+", name)
    ]


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
