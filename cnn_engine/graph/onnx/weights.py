"""The weights of a large ONNX file where they lie: its bytes are mapped, and read when they are needed.

A parsed protobuf holds a copy of every weight, and NumPy another. So large weights are cut out of the bytes
before they are parsed: what stays says where in the file they are, as ONNX's external data does.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from ..mapped import mapped, release

__all__ = ["LARGE_FILE", "LARGE_TENSOR", "release", "mapped", "without_weights"]

#: Files from this size are mapped, and of them the tensors from this one.
LARGE_FILE, LARGE_TENSOR = 2**24, 2**16

#: Numbers of fields in onnx.proto.
_GRAPH, _INITIALIZER, _RAW, _EXTERNAL, _LOCATION = 7, 5, 9, 13, 14


def without_weights(path: Path) -> bytes | None:
    """Returns the bytes of a model without its large initializers, which become external data in ``path``.

    None where the file is small, is no plain file beside its data, or is not what was expected: it is then
    read whole.
    """
    if path.stat().st_size < LARGE_FILE or path.resolve().parent != path.parent.resolve():
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return b"".join(_model(data, path.name))
        except (IndexError, ValueError):
            return None


def _model(data: mmap.mmap, name: str) -> Iterator[bytes]:
    for number, begin, payload, end in _fields(data, 0, len(data)):
        if number == _GRAPH:
            yield from _field(_GRAPH, b"".join(_graph(data, payload, end, name)))
        else:
            yield data[begin:end]


def _graph(data: mmap.mmap, first: int, last: int, name: str) -> Iterator[bytes]:
    for number, begin, payload, end in _fields(data, first, last):
        tensor = _tensor(data, payload, end, name) if number == _INITIALIZER else None
        if tensor is None:
            yield data[begin:end]
        else:
            yield from _field(_INITIALIZER, tensor)


def _tensor(data: mmap.mmap, first: int, last: int, name: str) -> bytes | None:
    """Returns a tensor whose elements are external data, or None where it stays as it is."""
    if last - first < LARGE_TENSOR:
        return None
    kept, raw = [], []
    for number, begin, payload, end in _fields(data, first, last):
        if number == _EXTERNAL:  # its data is elsewhere already
            return None
        if number == _RAW:
            raw.append((payload, end - payload))
        else:
            kept.append(data[begin:end])
    if len(raw) != 1 or raw[0][1] < LARGE_TENSOR:
        return None
    offset, length = raw[0]
    for key, value in (("location", name), ("offset", str(offset)), ("length", str(length))):
        entry = b"".join((*_field(1, key.encode()), *_field(2, value.encode())))
        kept += _field(_EXTERNAL, entry)
    return b"".join((*kept, _varint(_LOCATION << 3), _varint(1)))


def _fields(data: mmap.mmap, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (number, begin, payload's begin, end) of the fields of a message; 0 stands for numbers.

    Raises:
        IndexError, ValueError: it is no message.
    """
    at = first
    while at < last:
        begin = at
        key, at = _read(data, at)
        number, wire = key >> 3, key & 7
        payload = at
        if wire == 0:
            _, at = _read(data, at)
        elif wire == 1:
            at += 8
        elif wire == 2:
            length, payload = _read(data, at)
            at = payload + length
        elif wire == 5:
            at += 4
        else:
            raise ValueError(f"wire type {wire}")
        if at > last:
            raise ValueError("a field that is longer than its message")
        yield number if wire == 2 else 0, begin, payload, at


def _read(data: mmap.mmap, at: int) -> tuple[int, int]:
    """Returns a number in base 128, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def _field(number: int, payload: bytes) -> tuple[bytes, bytes]:
    return _varint(number << 3 | 2) + _varint(len(payload)), payload
