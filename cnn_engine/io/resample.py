"""Resizes and crops as Pillow does, bit for bit and faster: only the crop is computed.

Source of the arithmetic: Pillow's ``Resample.c`` (MIT-CMU), whose weights are whole numbers of 2^-22.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from .. import _cpu
from ..locks import ForkSafeLock

#: Weights are whole numbers of 2^-BITS.
BITS = 22


def _bilinear(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return np.where(x < 1, 1 - x, 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


#: Function and support of each method, in pixels of the smaller image.
_METHODS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "bilinear": (_bilinear, 1.0),
    "bicubic": (_bicubic, 2.0),
}

#: Methods that :func:`resampled` knows.
METHODS = tuple(_METHODS)


@lru_cache(4096)
def weights(
    size: int, to: int, first: int, count: int, method: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns source pixels and weights of ``count`` pixels of a resized axis, from ``first`` on.

    Returns:
        The first neighbour of each, int32 [count], and their weights, int32 [count, taps]; all neighbours are
        inside, and those that count for nothing have the weight 0.
    """
    if size == to:  # a pass that Pillow leaves out
        return np.arange(first, first + count, dtype=np.int32), np.full(
            (count, 1), 1 << BITS, np.int32
        )
    function, support = _METHODS[method]
    scale = size / to
    stretch = max(scale, 1.0)
    support *= stretch
    centre = (np.arange(first, first + count) + 0.5) * scale
    low = np.maximum((centre - support + 0.5).astype(np.int32), 0)
    high = np.minimum((centre + support + 0.5).astype(np.int32), size)
    taps = int((high - low).max())
    at = np.minimum(low, size - taps)  # so that all are inside
    shares = np.zeros((count, taps))
    total = np.zeros(count)
    for tap in range(taps):
        inside = (at + tap >= low) & (at + tap < high)
        share = function((at + tap - centre + 0.5) * (1.0 / stretch))
        shares[:, tap] = np.where(inside, share, 0.0)
        total += shares[:, tap]
    shares /= np.where(total == 0, 1.0, total)[:, None]
    whole = (shares * (1 << BITS) + np.copysign(0.5, shares)).astype(np.int32)  # towards zero
    return at, whole


def resampled(
    image: np.ndarray, size: tuple[int, int], crop: tuple[int, int, int, int], method: str
) -> np.ndarray:
    """Returns a part of ``image`` resized to ``size``: the pixels that Pillow's ``resize`` and ``crop`` give.

    Args:
        image: uint8 [H, W, C], C-contiguous, C being 1 or 3.
        size: (rows, columns).
        crop: the part's first row and column, and its rows and columns; inside of ``size``.
        method: of :data:`METHODS`.

    Returns:
        uint8 [C, rows, columns].
    """
    top, left, rows, columns = crop
    row_first, row_weight = weights(image.shape[0], size[0], top, rows, method)
    column_first, column_weight = weights(image.shape[1], size[1], left, columns, method)
    out = np.empty((image.shape[2], rows, columns), np.uint8)
    shape = _cpu.ResampleShape(
        image.shape[2], *image.shape[:2], rows, columns, row_weight.shape[1], column_weight.shape[1]
    )
    arrays = (image, row_first, row_weight, column_first, column_weight, out)
    _cpu.resample(*map(_cpu.address_of, arrays), shape)
    return out


#: Sizes that were seen, and whether they are resized here as Pillow does; None: seen once.
_seen: dict[tuple[tuple[int, int], tuple[int, int], str], bool | None] = {}
_looking = ForkSafeLock()
MOST_SEEN = 4096


def agrees(size: tuple[int, int], to: tuple[int, int], method: str) -> bool:
    """Whether :func:`resampled` equals the installed Pillow, from ``size`` to ``to``.

    From its version 13 on, Pillow takes rows before columns where it thinks that less work. Noise is resized
    by both, once, when a size comes for the second time: where every image has a size of its own that would
    take longer than it gains.
    """
    key = (size, to, method)
    found = _seen.get(key, False)
    if found is None:
        with _looking:
            found = _seen[key]
            if found is None:
                found = _seen[key] = _same_noise(size, to, method)
    elif key not in _seen:
        with _looking:
            if len(_seen) >= MOST_SEEN:
                _seen.clear()
            _seen.setdefault(key, None)
    return found


def _same_noise(size: tuple[int, int], to: tuple[int, int], method: str) -> bool:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (*size, 1), np.uint8)
    image = Image.fromarray(noise[..., 0])
    wanted = np.asarray(image.resize(to[::-1], Image.Resampling[method.upper()]))
    return np.array_equal(resampled(noise, to, (0, 0, *to), method)[0], wanted)
