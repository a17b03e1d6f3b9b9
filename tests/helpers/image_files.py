"""Files of images for tests: small ones that need no data set, and broken ones."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")


def picture(rows: int, columns: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Returns smooth shapes with noise on them, so that resizing and decoding have something to get wrong."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:rows, :columns]
    waves = [np.sin(x / (7 + c) + seed) + np.cos(y / (5 + c)) for c in range(3)]
    pixels = np.stack(waves, -1) * 50 + 128 + generator.normal(0, 12, (rows, columns, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def save(path: Path, image: Image.Image, **options: object) -> Path:
    """Writes ``image``; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def bomb(path: Path, columns: int, rows: int) -> Path:
    """Writes a PNG of a few bytes that claims to be of that size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    signature = b"\x89PNG\r\n\x1a\n"
    path.write_bytes(
        signature + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )
    return path
