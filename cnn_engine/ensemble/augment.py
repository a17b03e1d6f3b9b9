"""Preprocessing on the member's side: augmentation and, for some networks, normalisation.

How an image is augmented depends on its number and the epoch alone.

``fast`` mirrors; ``full`` mirrors and shifts by up to a sixteenth of the sides, the border reflected, which
for 32x32 pixels is what the CIFAR-10 recipe does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..io.preprocess import Preprocess
from .order import AUGMENT, Batch
from .philox import words

KINDS = ("none", "fast", "full")


def _reflected(position: np.ndarray, size: int) -> np.ndarray:
    return size - 1 - np.abs(size - 1 - np.abs(position))


def positions(batch: Batch, shape: tuple[int, ...], kind: str, seed: int) -> tuple[Any, Any]:
    """Returns which row and which column of its source each row and column of an image is.

    Args:
        shape: [C, H, W] of an image.

    Returns:
        int64 [N, H] and [N, W].
    """
    _, height, width = shape
    drawn = words(batch.samples, seed, batch.epoch, AUGMENT)
    rows = np.broadcast_to(np.arange(height), (len(batch), height))
    columns = np.broadcast_to(np.arange(width), (len(batch), width))
    columns = np.where(drawn[:, :1] & 1, width - 1 - columns, columns)
    if kind == "full":
        shifts = []
        for word, size in ((1, height), (2, width)):
            most = max(size // 16, 1) if size > 1 else 0
            shifts.append(drawn[:, word : word + 1].astype(np.int64) % (2 * most + 1) - most)
        rows = _reflected(rows + shifts[0], height)
        columns = _reflected(columns + shifts[1], width)
    return rows, columns


def augmented(
    images: Any,
    batch: Batch,
    kind: str,
    seed: int,
    move: Callable[[Any], Any] = lambda images: images,
) -> Any:
    """Returns ``images`` as ``kind`` makes them of ``seed``, the epoch and the samples' numbers.

    Args:
        images: uint8 [N, C, H, W]: a NumPy or CuPy array, or a tensor of PyTorch on any device.
        kind: of :data:`KINDS`.
        move: to where they are augmented, such as a GPU; called once the host's part is done, for it may
            wait until the step before has ended there.

    Returns:
        an array of the same shape, of the kind that ``move`` makes; for ``none`` what that makes.
    """
    if kind == "none":
        return move(images)
    rows, columns = positions(batch, tuple(images.shape[1:]), kind, seed)
    images = move(images)
    count, channels = images.shape[:2]
    index: tuple[Any, ...] = (
        np.arange(count)[:, None, None, None],
        np.arange(channels)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    )
    if not isinstance(images, np.ndarray):
        module = type(images).__module__.partition(".")[0]
        if module == "torch":
            import torch

            index = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in index)
            index = tuple(part.to(images.device) for part in index)
        elif module == "cupy":
            import cupy

            index = tuple(cupy.asarray(part) for part in index)
    return images[index]


def normalised(images: Any, preprocess: Preprocess) -> Any:
    """Returns float32 of pixels, (x / 255 - mean) / std: the same bits on a GPU as on the host.

    Args:
        images: uint8 [N, C, H, W], NumPy or CuPy.

    Returns:
        float32 [N, C, H, W], of the same kind.
    """
    if isinstance(images, np.ndarray):
        return preprocess.normalised(images)
    import cupy

    found = cupy.empty(images.shape, np.float32)
    for channel in range(images.shape[1]):
        table = preprocess.tables[channel % len(preprocess.tables)]
        found[:, channel] = cupy.asarray(table).take(images[:, channel])
    return found
