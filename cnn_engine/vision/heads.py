"""Layouts of outputs: heads of detectors, segmentation and restoration networks.

A head says whether a network's outputs fit it, and turns those of one image into :class:`Candidates`, a mask
or a picture. :func:`choose` finds the head of a network from the shapes of its outputs, what its file
says, and how its scores end; ``--head`` names one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedError, not_one_of
from ..graph.probabilities import last_activation
from ..io.model_metadata import GREY
from .boxes import corners

#: Strides of the feature maps that YOLO's heads read, as the sizes of a model have them.
_STRIDES = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32), (16, 32))

#: Coordinates that are no larger, in all of an image's boxes, are fractions of the image.
LARGEST_FRACTION = 2.0

Rows = Mapping[str, np.ndarray]


class Output(NamedTuple):
    """An output: its name, type, and the shape of its part for one image."""

    name: str
    dtype: str
    row: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [N, {', '.join(map(str, self.row))}]"


@dataclass(frozen=True)
class Form:
    """Facts about a network by which a head is chosen.

    Attributes:
        outputs: of the network.
        size: (channels, rows, columns) of the images that it reads.
        names: of the classes, where they are known.
        extra: columns of each box beyond its classes: of key points, or of masks.
        graph: for how scores are made.
    """

    outputs: tuple[Output, ...]
    size: tuple[int, int, int]
    names: Sequence[str] | None
    extra: int
    graph: Any

    def ends_in(self, output: Output) -> str | None:
        """Returns ``softmax`` or ``sigmoid`` where an output is made by one over its last axis."""
        return last_activation(self.graph, output.name)


class Candidates(NamedTuple):
    """Boxes of one image before the worse of those that overlap go.

    Attributes:
        boxes: float64 [K, 4]: x1, y1, x2, y2 in pixels of what the network read.
        scores: [K], from 0 to 1.
        classes: int64 [K].
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


@dataclass(frozen=True)
class Head:
    """A layout of outputs.

    Attributes:
        name: as ``--head`` takes it.
        summary: its outputs, for people.
        kind: what comes of it: ``boxes``, ``mask`` or ``image``.
        fits: takes a form; whether its shapes are this head's.
        sure: whether the form says that it is this head and no other of its shapes.
        read: takes (form, outputs of one image by name, confidence) and returns :class:`Candidates`, a mask
            of classes, int64 [H, W], or a picture as the network gives it, [C, H, W].
        overlapping: whether boxes come with others that overlap them, for non-maximum suppression to choose.
        letterbox: value beyond the image where images are letterboxed unless somebody says otherwise, with
            pixels from 0 to 1; None: somebody has to say.
    """

    name: str
    summary: str
    kind: str
    fits: Callable[[Form], bool]
    sure: Callable[[Form], bool]
    read: Callable[[Form, Rows, float], Any]
    overlapping: bool = False
    letterbox: int | None = None


# ---- YOLO: one output with a row or a column a box ----


def _grid(form: Form) -> Output | None:
    """Returns the output of boxes: the only one with two dimensions per image, and room for boxes."""
    found = [one for one in form.outputs if one.is_float and len(one.row) == 2]
    return found[0] if len(found) == 1 and min(found[0].row) >= 5 else None


def _anchors(form: Form) -> set[int]:
    """Returns how many boxes the heads of YOLO have for images of this size."""
    _, rows, columns = form.size
    cells = {sum((rows // s) * (columns // s) for s in strides) for strides in _STRIDES}
    return cells | {3 * count for count in cells}


def _columns(form: Form) -> tuple[int, bool] | None:
    """Returns (numbers of a box, whether they come before the boxes); None: they cannot be told apart."""
    first, second = _grid(form).row
    known = [count in _anchors(form) for count in (first, second)]
    if known[0] != known[1]:
        return (second, False) if known[0] else (first, True)
    return None if first == second else (min(first, second), first < second)


def _has_objectness(form: Form) -> bool | None:
    """Whether a score of the box itself comes before those of classes; None: not known."""
    numbers, leads = _columns(form)
    if form.names is not None:
        count = numbers - form.extra - len(form.names)
        return {4: False, 5: True}.get(count)
    return not leads


def _is_end_to_end(form: Form) -> bool:
    found = _grid(form)
    if found is None or found.row[1] != 6:
        return False
    return found.row[0] not in _anchors(form)


def _is_yolo(objectness: bool) -> Callable[[Form], bool]:
    def fits(form: Form) -> bool:
        if _grid(form) is None or (numbers := _columns(form)) is None:
            return False
        count = numbers[0] - form.extra - (5 if objectness else 4)
        return count >= 1 and (form.names is None or len(form.names) == count)

    return fits


def _is_surely_yolo(objectness: bool) -> Callable[[Form], bool]:
    return lambda form: not _is_end_to_end(form) and _has_objectness(form) is objectness


def _read_yolo(objectness: bool) -> Callable[[Form, Rows, float], Candidates]:
    def read(form: Form, rows: Rows, confidence: float) -> Candidates:
        numbers, leads = _columns(form)
        table = rows[_grid(form).name]
        table = table.T if leads else table  # [A, numbers]
        first = 5 if objectness else 4
        scores = table[:, first : numbers - form.extra]
        best = scores.argmax(axis=1)
        values = np.take_along_axis(scores, best[:, None], 1)[:, 0]
        if objectness:
            values = values * table[:, 4]
        keep = values > confidence
        return Candidates(corners(table[keep, :4].astype(np.float64)), values[keep], best[keep])

    return read


def _read_end_to_end(form: Form, rows: Rows, confidence: float) -> Candidates:
    table = rows[_grid(form).name]
    table = table[table[:, 4] > confidence]
    return Candidates(table[:, :4].astype(np.float64), table[:, 4], table[:, 5].astype(np.int64))


# ---- boxes and scores in outputs of their own ----


def _pair(form: Form) -> tuple[Output, Output] | None:
    """Returns the outputs of boxes [A, 4] and of scores [A, C], by shape, name or how scores are made."""
    found = [one for one in form.outputs if one.is_float and len(one.row) == 2]
    boxes = [one for one in found if one.row[1] == 4]
    if len(boxes) > 1:  # four classes
        named = [one for one in boxes if "box" in one.name.lower() or "loc" in one.name.lower()]
        boxes = named or [one for one in boxes if form.ends_in(one) is None]
    if len(found) != 2 or len(boxes) != 1:
        return None
    scores = found[1 - found.index(boxes[0])]
    return (boxes[0], scores) if scores.row[0] == boxes[0].row[0] else None


def _scaled(boxes: np.ndarray, form: Form) -> np.ndarray:
    """Returns boxes in pixels: those that are fractions of the image times its sides."""
    boxes = boxes.astype(np.float64)
    if np.abs(boxes).max(initial=0.0) > LARGEST_FRACTION:
        return boxes
    return boxes * (form.size[2], form.size[1], form.size[2], form.size[1])


def _best(
    boxes: np.ndarray, scores: np.ndarray, confidence: float, background: int | None
) -> Candidates:
    """Returns the best class of each box, of those besides the ``background``."""
    known = np.arange(scores.shape[1])
    if background is not None:
        known = np.delete(known, background)
    some = scores[:, known]
    best = some.argmax(axis=1)
    values = np.take_along_axis(some, best[:, None], 1)[:, 0]
    keep = values > confidence
    return Candidates(boxes[keep], values[keep], best[keep])


def _fits_pair(background: bool) -> Callable[[Form], bool]:
    def fits(form: Form) -> bool:
        if (found := _pair(form)) is None:
            return False
        classes = found[1].row[1] - background
        return classes >= 1 and (form.names is None or len(form.names) == classes)

    return fits


def _surely_pair(activation: str) -> Callable[[Form], bool]:
    return lambda form: form.ends_in(_pair(form)[1]) == activation


def _surely_queries(form: Form) -> bool:
    """Whether names are those of Hugging Face's DETRs; classes that are known say which."""
    boxes, scores = _pair(form)
    return (boxes.name, scores.name) == ("pred_boxes", "logits") and form.names is not None


def _read_pair(background: int | None) -> Callable[[Form, Rows, float], Candidates]:
    def read(form: Form, rows: Rows, confidence: float) -> Candidates:
        boxes, scores = (rows[one.name] for one in _pair(form))
        return _best(_scaled(boxes, form), scores, confidence, background)

    return read


def _read_queries(softmax: bool) -> Callable[[Form, Rows, float], Candidates]:
    def read(form: Form, rows: Rows, confidence: float) -> Candidates:
        boxes, logits = (rows[one.name].astype(np.float64) for one in _pair(form))
        if softmax:
            scores = np.exp(logits - logits.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-logits))
        sides = (form.size[2], form.size[1], form.size[2], form.size[1])
        return _best(corners(boxes) * sides, scores, confidence, -1 if softmax else None)

    return read


# ---- lists of what was found, whose overlaps the network has suppressed itself ----


def _lists(form: Form) -> tuple[Output, Output, Output] | None:
    """Returns the outputs of boxes [K, 4], scores [K] and classes [K], by shape, type and name."""
    boxes = [one for one in form.outputs if one.is_float and one.row[1:] == (4,)]
    if len(boxes) != 1:
        return None
    rest = [one for one in form.outputs if one.row == boxes[0].row[:1]]
    whole = [one for one in rest if not one.is_float]
    if not whole:
        whole = [one for one in rest if any(w in one.name.lower() for w in ("class", "label"))]
    floats = [one for one in rest if one.is_float and one not in whole]
    if len(whole) != 1 or len(floats) != 1:
        return None
    return boxes[0], floats[0], whole[0]


def _is_tensorflow(form: Form) -> bool:
    return _lists(form)[0].name.startswith("detection_boxes")


def _read_lists(rows_first: bool) -> Callable[[Form, Rows, float], Candidates]:
    def read(form: Form, rows: Rows, confidence: float) -> Candidates:
        boxes, scores, classes = (rows[one.name] for one in _lists(form))
        if rows_first:
            boxes = boxes[:, [1, 0, 3, 2]]
        keep = scores > confidence
        found = _scaled(boxes, form)[keep]
        # TensorFlow's classes are counted from 1, for 0 is the background.
        return Candidates(found, scores[keep], classes[keep].astype(np.int64) - rows_first)

    return read


# ---- masks and pictures ----


def _plane(form: Form) -> Output | None:
    """Returns the first output that is an image: [C, H, W], or classes [H, W]."""
    for one in form.outputs:
        if len(one.row) == 3 or (len(one.row) == 2 and not one.is_float):
            return one
    return None


def _is_mask(form: Form) -> bool:
    found = _plane(form)
    if found is None or (not found.is_float and len(found.row) == 3 and found.row[0] != 1):
        return False
    classes = found.row[0] if found.is_float and found.row[0] > 1 else None
    return form.names is None or classes in (None, len(form.names))


def _enlarges(form: Form, found: Output) -> tuple[int, int]:
    """Returns how many times the rows and columns of the input an output has; 0: no whole number."""
    sides = zip(found.row[1:], form.size[1:], strict=True)
    return tuple(0 if many % few else many // few for many, few in sides)


def _is_image(form: Form) -> bool:
    found = _plane(form)
    if found is None or len(found.row) != 3 or found.row[0] not in (1, 3):
        return False
    down, across = _enlarges(form, found)
    return found.row[0] == form.size[0] and down == across >= 1


def _is_surely_mask(form: Form) -> bool:
    found = _plane(form)
    if not found.is_float or form.names is not None:
        return True
    return not _is_image(form)


def _is_surely_image(form: Form) -> bool:
    return _enlarges(form, _plane(form))[0] > 1 and form.names is None


def _read_mask(form: Form, rows: Rows, confidence: float) -> np.ndarray:
    found = _plane(form)
    plane = rows[found.name]
    if found.is_float and found.row[0] > 1:
        return plane.argmax(axis=0)
    if plane.ndim == 3:
        plane = plane[0]
    if not found.is_float:
        return plane.astype(np.int64)
    return (plane > (0.5 if form.ends_in(found) == "sigmoid" else 0.0)).astype(np.int64)


def _read_image(form: Form, rows: Rows, confidence: float) -> np.ndarray:
    return rows[_plane(form).name]


HEADS: Mapping[str, Head] = {
    head.name: head
    for head in (
        Head(
            "end2end", "[N, K, 6]: x1, y1, x2, y2, score, class", "boxes",
            _is_end_to_end, _is_end_to_end, _read_end_to_end, letterbox=GREY,
        ),
        Head(
            "yolov8", "[N, 4+C, A]: centre, size, scores", "boxes",
            _is_yolo(False), _is_surely_yolo(False), _read_yolo(False), True, GREY,
        ),
        Head(
            "yolov5", "[N, A, 5+C]: centre, size, score, scores", "boxes",
            _is_yolo(True), _is_surely_yolo(True), _read_yolo(True), True, GREY,
        ),
        Head(
            "ssd", "[N, A, 4] corners and [N, A, 1+C] after a softmax", "boxes",
            _fits_pair(True), _surely_pair("softmax"), _read_pair(0), True,
        ),
        Head(
            "retinanet", "[N, A, 4] corners and [N, A, C] after a sigmoid", "boxes",
            _fits_pair(False), _surely_pair("sigmoid"), _read_pair(None), True,
        ),
        Head(
            "detr", "[N, Q, 4] centre, size and logits [N, Q, C+1]", "boxes",
            _fits_pair(True), _surely_queries, _read_queries(True),
        ),
        Head(
            "rtdetr", "[N, Q, 4] centre, size and logits [N, Q, C]", "boxes",
            _fits_pair(False), _surely_queries, _read_queries(False),
        ),
        Head(
            "tensorflow", "detection_boxes [N, K, 4] rows first, scores and classes [N, K]", "boxes",
            lambda form: _lists(form) is not None, _is_tensorflow, _read_lists(True),
        ),
        Head(
            "lists", "[N, K, 4] corners, scores and classes [N, K]", "boxes",
            lambda form: _lists(form) is not None, lambda form: not _is_tensorflow(form),
            _read_lists(False),
        ),
        Head(
            "mask", "scores [N, C, H, W] or classes [N, H, W]", "mask",
            _is_mask, _is_surely_mask, _read_mask,
        ),
        Head(
            "image", "[N, 1 or 3, k*H, k*W]", "image", _is_image, _is_surely_image, _read_image,
        ),
    )
}  # fmt: skip


def choose(form: Form, name: str | None, network: str) -> Head:
    """Returns the head called ``name``, or that of a form.

    Raises:
        InputError: there is none of that name.
        UnsupportedError: the outputs do not fit it, or fit none, or several.
    """
    if name is not None and name not in HEADS:
        raise not_one_of("head", HEADS, name)
    wanted = [HEADS[name]] if name is not None else HEADS.values()
    fitting = [head for head in wanted if head.fits(form)]
    sure = fitting if name is not None else [head for head in fitting if head.sure(form)]
    if sure:
        return sure[0]
    outputs = "; ".join(map(str, form.outputs))
    if form.names is not None:
        outputs += f", and {len(form.names)} classes"
    if fitting:
        names = " or ".join(head.name for head in fitting)
        raise UnsupportedError(f"head: expected {names}, which all fit {network}, found {outputs}")
    known = "; ".join(f"{head.name} {head.summary}" for head in wanted)
    raise UnsupportedError(f"head: expected outputs as one of {known}; found {network}: {outputs}")
