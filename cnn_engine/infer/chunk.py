"""A chunk: images that go through the pipeline together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from .buffers import INPUTS, Slot
from .labels import Labels
from .output import Faults

#: Kinds whose images are the network's own float32 input.
FLOATS = ("npy-float32", "parquet-float32")


def dtype_of(kind: str) -> str:
    """Returns the type of images of a kind of input, before preprocessing: ``float32`` or ``uint8``.

    Of arrays of all types it is :data:`.buffers.INPUTS`.
    """
    if kind == "npz":
        return INPUTS
    return "float32" if kind in FLOATS else "uint8"


@dataclass
class Chunk:
    """Images that go through the pipeline together.

    Attributes:
        slot: whose first ``count`` images these are, once they are decoded.
        count: how many.
        columns: yields the ids, a string each, and the labels, some at a time; made where they are written,
            for reading is what binds.
        encoded: bytes of each file, until they are decoded; None for arrays.
        errors: position -> what is wrong with that image.
        dtype: of the images in the slot.
        reading: parts that are still being read into the slot; see :meth:`finish_reading`.
        orphans: labels of no image.
    """

    slot: Slot | None
    count: int
    columns: Callable[[], Iterator[tuple[Any, Labels]]]
    encoded: list[bytes] | None = None
    errors: dict[int, str] = field(default_factory=dict)
    dtype: str = "uint8"
    reading: list[Future] = field(default_factory=list)
    orphans: Faults = field(default_factory=Faults)

    def __len__(self) -> int:
        return self.count

    def finish_reading(self) -> float | None:
        """Waits for all of the chunk to be read; returns when it was, None if it was when it was made.

        Raises:
            InputError, OSError: see :func:`chunks`; nothing reads into the slot any more.
        """
        parts, self.reading = self.reading, []
        wait(parts)
        return max((part.result() for part in parts), default=None)


def utf8_of(path: str) -> str:
    """Returns a path as UTF-8 can have it."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
