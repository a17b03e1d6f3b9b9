"""Thrift's compact protocol, as far as Parquet needs it. Source: thrift-compact-protocol.md."""

from __future__ import annotations

from collections.abc import Sequence

#: Kinds of fields and of a list's items.
TRUE, I32, I64, BINARY, LIST, STRUCT = 1, 5, 6, 8, 9, 12

#: A field: its number, its kind, and its value as :func:`number`, :func:`binary` and so on make it.
Field = tuple[int, int, bytes]


def varint(value: int) -> bytes:
    """Returns a number from 0 on, seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def number(value: int) -> bytes:
    """Returns a number of either sign, of 64 bits at most."""
    return varint(value << 1 if value >= 0 else -value * 2 - 1)


def binary(value: bytes) -> bytes:
    """Returns bytes with their length before them."""
    return varint(len(value)) + value


def items(kind: int, values: Sequence[bytes]) -> bytes:
    """Returns a list of values of one kind."""
    count = len(values)
    head = bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + varint(count)
    return head + b"".join(values)


def struct(*fields: Field) -> bytes:
    """Returns fields, whose numbers increase."""
    parts, before = [], 0
    for at, kind, value in fields:
        step = at - before
        parts.append(bytes([step << 4 | kind]) if step < 16 else bytes([kind]) + number(at))
        parts.append(value)
        before = at
    return b"".join(parts) + b"\0"
