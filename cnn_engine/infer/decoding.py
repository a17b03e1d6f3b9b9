"""Image files to pixels: JPEGs by libjpeg-turbo itself, others by :mod:`..io.images`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ..errors import InputError
from ..io.images import MOST_PIXELS, decode, is_upright, quick_pixels
from ..io.preprocess import Preprocess
from .buffers import Slot
from .chunk import Chunk

#: Images of a chunk that one thread decodes at a time, at most, and parts per thread, so that all end at
#: about the same time.
PART, PARTS = 64, 4


class Decoder:
    """Decodes the chunks of one worker on ``threads`` threads.

    simplejpeg gives the pixels that Pillow gives, in a fraction of the time for small images
    (docs/notes/2026-11-data-sets.md), and without Python's lock; it is used where it is installed.

    Args:
        shape: [C, H, W] of the network's images.
        preprocess: what is done to every image; None: they must be of the network's size.
        normalises: whether pixels become float32 here, and not in the network; None: where there is a mean or
            a standard deviation.

    Attributes:
        normalises: as above.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        preprocess: Preprocess | None,
        threads: int,
        normalises: bool | None = None,
    ) -> None:
        self._shape = tuple(shape)
        self._preprocess = preprocess or Preprocess()
        self.normalises = self._preprocess.normalises if normalises is None else normalises
        self._jpeg = None
        if self._shape[0] in (1, 3):
            self._jpeg = _simplejpeg()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    @property
    def name(self) -> str:
        """Name of the library that decodes JPEGs."""
        return "simplejpeg" if self._jpeg is not None else "Pillow"

    def decode(self, chunk: Chunk, slot: Slot) -> None:
        """Fills ``slot`` with the images of ``chunk``; a bad one is zeros and an error."""
        chunk.slot = slot
        self.begin(chunk)()

    def begin(self, chunk: Chunk) -> Callable[[], None]:
        """Begins to decode a chunk into its slot; returns the futures of its parts.

        Files are decoded; pixels become float32 where they are to be normalised.
        """
        slot, encoded = chunk.slot, chunk.encoded
        pixels = slot.images("uint8") if encoded is not None or chunk.dtype == "uint8" else None
        normalises = self.normalises and pixels is not None
        if encoded is None and not normalises:
            return lambda: None
        floats = slot.images("float32") if normalises else None

        def work(part: range) -> None:
            if encoded is not None:
                self._decode(encoded, chunk.errors, pixels, part)
            if floats is not None:
                some = slice(part.start, part.stop)
                self._preprocess.normalised(pixels[some], floats[some])

        step = min(PART, max(-(-len(chunk) // (PARTS * self._threads)), 1))
        parts = [
            range(first, min(first + step, len(chunk))) for first in range(0, len(chunk), step)
        ]
        doing = None if self._pool is None else [self._pool.submit(work, part) for part in parts]

        def finish() -> None:
            if doing is None:
                for part in parts:
                    work(part)
            else:
                wait(doing)  # all of them, for the slot is to be free even if one fails
                for one in doing:
                    one.result()
            chunk.encoded = None
            if normalises:
                chunk.dtype = "float32"

        return finish

    def _decode(
        self, encoded: list[bytes], errors: dict[int, str], pixels: np.ndarray, part: range
    ) -> None:
        for at in part:
            if at in errors:
                pixels[at] = 0
                continue
            try:
                self._one(encoded[at], pixels[at])
            except InputError as error:
                errors[at] = str(error).removeprefix("image: ")
                pixels[at] = 0

    def _one(self, data: bytes, target: np.ndarray) -> None:
        if self._jpeg is not None and data[:2] == b"\xff\xd8":
            pixels = self._by_jpeg(data)
            if pixels is not None and pixels.shape == self._shape:
                target[...] = pixels
                return
        target[...] = decode(("image", data), self._preprocess, self._shape)

    def _by_jpeg(self, data: bytes) -> np.ndarray | None:
        """Returns [C, rows, columns], or None where Pillow has to do it, or to say what is wrong."""
        try:
            height, width, space, _ = self._jpeg.decode_jpeg_header(data)
            if height * width > MOST_PIXELS or space not in ("YCbCr", "Gray", "RGB"):
                return None
            wanted = "RGB" if self._shape[0] == 3 else "GRAY"
            if (wanted == "GRAY") != (space == "Gray"):
                return None  # between colours and grey, libjpeg rounds otherwise than Pillow
            if self._preprocess.orientation == "exif" and not is_upright(data):
                return None
            return quick_pixels(self._jpeg.decode_jpeg(data, wanted), self._preprocess)
        except ValueError:
            return None


def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg
