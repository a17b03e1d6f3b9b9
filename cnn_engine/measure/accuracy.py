"""Right and wrong predictions: the most probable class, and the five most probable ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from ..graph.model import Model
from ..workload import Rest
from .result import Accuracy, Prediction

if TYPE_CHECKING:
    from ..engine.engine import Engine

TOP = 5

#: Images that are handed over at a time, at least: with fewer, both sides would wait at every image.
LEAST = 32

#: Images whose predictions a result shows.
SHOWN = 5


def count(rows: np.ndarray, labels: np.ndarray) -> Accuracy:
    """Returns how many of ``rows``, float [N, classes], have their class in ``labels``, [N], on top.

    Of equal numbers the first class comes first; NaN comes before all numbers and is never a right answer
    among five. Five of five or fewer classes would always be right: then they are not counted.
    """
    labels = np.asarray(labels)
    correct = int(np.sum(rows.argmax(axis=1) == labels))
    if rows.shape[1] <= TOP:
        return Accuracy(correct, len(rows))
    known = labels < rows.shape[1]  # a label of no output, as of another data set, is never right
    some, wanted = rows[known], labels[known].astype(np.intp)[:, None]
    value = np.take_along_axis(some, wanted, axis=1)
    before = ~(some <= value)  # above it, or NaN
    before |= (some == value) & (np.arange(rows.shape[1]) < wanted)
    return Accuracy(correct, len(rows), int(np.sum(before.sum(axis=1) < TOP)))


def count_rest(
    engine: Engine, rest: Rest, batch: int, found: Accuracy | None, out: np.ndarray, progress: Any
) -> tuple[Accuracy | None, int, bool]:
    """Runs the images that are not held, decoded during the passes, and adds the right answers among them.

    Args:
        batch: images per pass.
        found: of the images that are held; None where there are no labels.
        out: float32 [rest.count, classes] for the result, or of no rows, to drop it.

    Returns:
        the sum, how many images were done, and whether Ctrl-C ended it early.
    """
    done = 0
    size = batch * -(-LEAST // batch)
    fixed = isinstance(engine.network, Model) and not engine.network.any_batch
    progress.start("images", rest.count)
    try:
        with closing(rest.chunks(size)) as chunks:
            for images in chunks:
                lacking = -len(images) % batch if fixed else 0
                images = np.concatenate([images, np.repeat(images[-1:], lacking, axis=0)])
                rows = engine.predict(images, batch=batch)[: len(images) - lacking]
                if len(out):
                    out[done : done + len(rows)] = rows
                if found is not None:
                    found += count(rows, rest.labels[done : done + len(rows)])
                done += len(rows)
                progress.advance(len(rows))
    except KeyboardInterrupt:
        return found, done, True
    finally:
        progress.stop()
    return found, done, False


def predictions(
    rows: np.ndarray,
    labels: np.ndarray | None,
    files: Sequence[str],
    classes: Sequence[str] | None,
) -> list[Prediction]:
    """Returns predictions of the first images, and of the first wrong ones, :data:`SHOWN` of each."""
    wrong = [] if labels is None else np.flatnonzero(rows.argmax(axis=1) != labels)[:SHOWN]
    found = []
    for index in dict.fromkeys([*range(min(SHOWN, len(rows))), *map(int, wrong)]):
        row = rows[index]
        top = [int(number) for number in np.argsort(-row, kind="stable")[:TOP]]
        label = None if labels is None else int(labels[index])
        found.append(
            Prediction(
                files[index], label, top, [float(row[number]) for number in top],
                [classes[number] for number in top] if classes else [],
                classes[label] if classes and label is not None else None,
            )
        )  # fmt: skip
    return found
