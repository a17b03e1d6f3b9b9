"""Image files to pixels: JPEGs of the network's size by libjpeg-turbo, others by :mod:`..io.images`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..errors import InputError
from ..io.images import Preprocess, decode
from .readers import Chunk, Slot

#: Images of a chunk that one thread decodes at a time, at most.
PART = 64


class Decoder:
    """Decodes the chunks of one worker on ``threads`` threads.

    simplejpeg gives the pixels that Pillow gives, in a fraction of the time for small images
    (``python -m benchmarks.infer_readers``); it is used where it is installed and nothing is to be resized.

    Args:
        shape: [C, H, W] of the network's images.
        preprocess: what is done to every image; None: they must be of the network's size.
    """

    def __init__(self, shape: tuple[int, ...], preprocess: Preprocess | None, threads: int) -> None:
        self._shape = tuple(shape)
        self._preprocess = preprocess or Preprocess()
        self._normalises = preprocess is not None and preprocess.normalises
        self._jpeg = None
        if self._shape[0] in (1, 3) and self._preprocess.resize is self._preprocess.crop is None:
            self._jpeg = _simplejpeg()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    @property
    def name(self) -> str:
        """What decodes JPEGs of the network's size."""
        return "simplejpeg" if self._jpeg is not None else "Pillow"

    def decode(self, chunk: Chunk, slot: Slot) -> None:
        """Fills ``slot`` with the images of ``chunk``; a bad one is zeros and an error."""
        assert chunk.encoded is not None
        pixels = slot.images("uint8")
        self._in_parts(chunk, slot, lambda part: self._decode(chunk, pixels, part))
        chunk.slot, chunk.encoded = slot, None

    def normalise(self, chunk: Chunk) -> None:
        """Makes of a chunk of pixels the float32 images that the network reads, where it is to."""
        if self._normalises and chunk.dtype == "uint8" and chunk.slot is not None:
            self._in_parts(chunk, chunk.slot, lambda part: None)

    def _in_parts(self, chunk: Chunk, slot: Slot, work: Callable[[range], None]) -> None:
        """Does ``work``, and normalises where that is to be, for some images at a time on every thread."""
        count = len(chunk)
        pixels = slot.images("uint8")
        floats = slot.images("float32") if self._normalises else None
        step = min(PART, max(-(-count // self._threads), 1))
        parts = [range(first, min(first + step, count)) for first in range(0, count, step)]

        def both(part: range) -> None:
            work(part)
            if floats is not None:
                some = slice(part.start, part.stop)
                self._preprocess.normalised(pixels[some], floats[some])

        list((map if self._pool is None or len(parts) < 2 else self._pool.map)(both, parts))
        if self._normalises:
            chunk.dtype = "float32"

    def _decode(self, chunk: Chunk, pixels: np.ndarray, part: range) -> None:
        for at in part:
            if at in chunk.errors:
                pixels[at] = 0
                continue
            try:
                self._one(chunk.encoded[at], pixels[at])
            except InputError as error:
                chunk.errors[at] = str(error).removeprefix("image: ")
                pixels[at] = 0

    def _one(self, data: bytes, target: np.ndarray) -> None:
        if self._jpeg is not None and data[:2] == b"\xff\xd8":
            rows = self._by_jpeg(data)
            if rows is not None:
                target[...] = rows.transpose(2, 0, 1)
                return
        target[...] = decode(("image", data), self._preprocess, self._shape)

    def _by_jpeg(self, data: bytes) -> np.ndarray | None:
        """Returns [H, W, C], or None where another reader has to say what is wrong."""
        try:
            height, width, space, _ = self._jpeg.decode_jpeg_header(data)
            if (height, width) != self._shape[1:] or space not in ("YCbCr", "Gray", "RGB"):
                return None
            wanted = "RGB" if self._shape[0] == 3 else "GRAY"
            if (wanted == "GRAY") != (space == "Gray"):
                return None  # between colours and grey, libjpeg rounds otherwise than Pillow
            return self._jpeg.decode_jpeg(data, wanted)
        except ValueError:
            return None


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
