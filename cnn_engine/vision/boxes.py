"""Boxes as corners: areas, overlaps and non-maximum suppression."""

from __future__ import annotations

import numpy as np


def corners(centred: np.ndarray) -> np.ndarray:
    """Returns x1, y1, x2, y2 of boxes [K, 4] as centre x, centre y, width, height."""
    middle, half = centred[:, :2], centred[:, 2:] / 2
    return np.concatenate([middle - half, middle + half], axis=1)


def areas(boxes: np.ndarray) -> np.ndarray:
    """Returns the area of each box [K, 4]; 0 where corners are swapped."""
    return np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0.0), axis=1)


def suppressed(
    boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray, iou: float, most: int
) -> np.ndarray:
    """Returns the places of boxes that no better box of their class overlaps, the best first.

    Args:
        boxes: [K, 4] as corners.
        scores, classes: [K].
        iou: intersection over union above which the worse of two boxes of a class goes.
        most: boxes that are kept.
    """
    boxes = boxes.astype(np.float64)
    order = np.argsort(-scores, kind="stable")  # of equal scores the first comes first
    kept = [np.zeros(0, np.int64)]
    for number in np.unique(classes):
        kept.append(_best(boxes, order[classes[order] == number], iou, most))
    places = np.concatenate(kept)
    return places[np.lexsort((places, -scores[places]))][:most]


def _best(boxes: np.ndarray, left: np.ndarray, iou: float, most: int) -> np.ndarray:
    """Returns those of one class that are kept, of places ``left`` with the best first."""
    area = areas(boxes)
    kept: list[int] = []
    while len(left) and len(kept) < most:
        best, left = left[0], left[1:]
        kept.append(best)
        others = boxes[left]
        sides = np.minimum(others[:, 2:], boxes[best, 2:]) - np.maximum(
            others[:, :2], boxes[best, :2]
        )
        shared = np.maximum(sides[:, 0], 0.0) * np.maximum(sides[:, 1], 0.0)
        union = area[best] + area[left] - shared
        left = left[shared <= iou * union]
    return np.array(kept, np.int64)
