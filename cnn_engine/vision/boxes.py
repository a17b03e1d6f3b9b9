"""Boxes as corners: areas, overlaps and non-maximum suppression."""

from __future__ import annotations

import numpy as np

#: Boxes that are compared with all worse ones at a time.
BLOCK = 256


def corners(centred: np.ndarray) -> np.ndarray:
    """Returns x1, y1, x2, y2 of boxes [K, 4] as centre x, centre y, width, height."""
    middle, half = centred[:, :2], centred[:, 2:] / 2
    return np.concatenate([middle - half, middle + half], axis=1)


def areas(boxes: np.ndarray) -> np.ndarray:
    """Returns the area of each box [K, 4]; 0 where corners are swapped."""
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 0.0)
    return sides[:, 0] * sides[:, 1]


def suppressed(
    boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray, iou: float, most: int
) -> np.ndarray:
    """Returns the indices of boxes that no better box of their class overlaps, the best first.

    Args:
        boxes: [K, 4] as corners.
        scores, classes: [K].
        iou: intersection over union above which the worse of two boxes of a class goes.
        most: boxes that are kept.
    """
    order = np.argsort(-scores, kind="stable")  # of equal scores the first comes first
    boxes, classes = boxes[order].astype(np.float64), classes[order]
    kept = np.ones(len(boxes), bool)
    by_class = np.argsort(classes, kind="stable")
    for places in np.split(by_class, np.flatnonzero(np.diff(classes[by_class])) + 1):
        kept[places] = _kept(boxes[places], iou, most)
    return order[kept][:most]


def _kept(boxes: np.ndarray, iou: float, most: int) -> np.ndarray:
    """Returns which boxes of one class, the best first, are kept; beyond ``most`` of them none."""
    kept, area = np.ones(len(boxes), bool), areas(boxes)
    for first in range(0, len(boxes), BLOCK):
        some = first + np.flatnonzero(kept[first : first + BLOCK])
        x1, y1, x2, y2 = boxes[first:].T
        a1, b1, a2, b2 = boxes[some].T[:, :, None]
        width = np.minimum(a2, x2) - np.maximum(a1, x1)
        height = np.minimum(b2, y2) - np.maximum(b1, y1)
        shared = np.maximum(width, 0.0) * np.maximum(height, 0.0)
        over = shared > iou * (area[some, None] + area[None, first:] - shared)
        over &= np.arange(first, len(boxes)) > some[:, None]  # a box suppresses worse ones alone
        for row in np.flatnonzero(over.any(axis=1)):
            if kept[some[row]]:
                kept[first:] &= ~over[row]
        if kept[: first + BLOCK].sum() >= most:
            kept[first + BLOCK :] = False
            break
    return kept
