"""Runs a network on photos of any size: :class:`Viewer`, and :class:`Detector` for boxes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..engine.engine import Engine
from ..errors import InputError, UnsupportedError, expected
from ..graph.dims import holds_dims
from ..graph.form import form_of
from ..graph.model import Model
from ..io import images
from ..io.files import read_text
from ..io.image_files import LARGEST_TEXT, Classes
from ..io.model_metadata import key_points_of, names_of, preprocess_of
from ..io.preprocess import Placement, Preprocess
from . import boxes, heads

#: Unless said: score above which a box counts, intersection over union above which the worse of two boxes of
#: a class goes, and boxes that are kept of an image.
CONFIDENCE, IOU, MOST_BOXES = 0.25, 0.45, 300


class Detection(NamedTuple):
    """One box.

    Attributes:
        name: what its class is called; its number where that is not known.
        score: from 0 to 1.
        box: x1, y1, x2, y2 in pixels of the upright image, whose first pixel reaches from 0 to 1.
        number: of the class, from 0.
    """

    name: str
    score: float
    box: tuple[float, float, float, float]
    number: int


@dataclass(frozen=True)
class Boxes:
    """The boxes of one image, the best first.

    Attributes:
        boxes: float64 [K, 4]: x1, y1, x2, y2 in pixels of the upright image.
        scores: float64 [K], from 0 to 1.
        classes: int64 [K].
        names: of all classes, where they are known.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    names: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    def __iter__(self) -> Iterator[Detection]:
        for box, score, number in zip(self.boxes, self.scores, self.classes, strict=True):
            corners = tuple(map(float, box))
            yield Detection(self.name(int(number)), float(score), corners, int(number))

    def name(self, number: int) -> str:
        """Returns a class's name."""
        return class_name(self.names, number)


@dataclass(frozen=True)
class Mask:
    """The class of every pixel of one image.

    Attributes:
        classes: int64 [H, W], as large as the upright image.
        names: of all classes, where they are known.
    """

    classes: np.ndarray
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class Restored:
    """A picture that a network makes of an image: larger, sharper, in another style.

    Attributes:
        pixels: uint8 [H, W] or [H, W, 3].
    """

    pixels: np.ndarray


Found = Boxes | Mask | Restored


def class_name(names: Sequence[str] | None, number: int) -> str:
    """Returns a class's name; ``class N`` where nobody knows."""
    return names[number] if names is not None and 0 <= number < len(names) else f"class {number}"


@dataclass(frozen=True)
class Sight:
    """Preprocessing of images, and the head that reads a network's outputs.

    Attributes:
        head: the layout of the outputs.
        form: what the head looks at.
        preprocess: how images are prepared.
        names: of the classes, where they are known.
        stated: where that is from, as a sentence.
        confidence, iou, most: of boxes; see :func:`sight_of`.
    """

    head: heads.Head
    form: heads.Form
    preprocess: Preprocess
    names: Sequence[str] | None
    stated: str
    confidence: float
    iou: float
    most: int

    def found(self, rows: heads.Rows, placement: Placement) -> Found:
        """Returns the findings in the outputs of one image.

        Args:
            rows: the part of each output for the image, by name.
            placement: of the image in what the network read.

        Raises:
            InputError: the network gives numbers that are none.
        """
        if any(array.dtype.kind == "f" and np.isnan(array).any() for array in rows.values()):
            raise expected("outputs", "numbers", "NaN")
        form = replace(
            self.form,
            outputs=tuple(one._replace(row=rows[one.name].shape) for one in self.form.outputs),
            size=(self.form.size[0], *placement.size),
        )
        found = self.head.read(form, rows, self.confidence)
        if self.head.kind == "boxes":
            return self._boxes(found, placement)
        if self.head.kind == "mask":
            return Mask(_unletterboxed(found, placement, placement.image), self.names)
        return Restored(self._picture(found, placement))

    def _boxes(self, found: heads.Candidates, placement: Placement) -> Boxes:
        if not (np.isfinite(found.boxes).all() and np.isfinite(found.scores).all()):
            raise expected("outputs", "finite boxes and scores", "infinity")
        scores = found.scores.astype(np.float64)
        if self.head.overlapping:
            kept = boxes.suppressed(found.boxes, scores, found.classes, self.iou, self.most)
        else:
            kept = np.argsort(-scores, kind="stable")[: self.most]
        height, width = placement.image
        corners = placement.to_image(found.boxes[kept])
        corners = np.clip(corners, 0, (width, height, width, height))
        inside = boxes.areas(corners) > 0
        kept = kept[inside]
        return Boxes(corners[inside], scores[kept], found.classes[kept], self.names)

    def _picture(self, found: np.ndarray, placement: Placement) -> np.ndarray:
        """Returns the pixels of what a network makes of an image, by the inverse of what made its input."""
        if found.dtype != np.uint8:
            count = len(found)
            mean = np.float64(self.preprocess.mean or (0.0,) * count)[:, None, None]
            std = np.float64(self.preprocess.std or (1.0,) * count)[:, None, None]
            found = np.clip(np.rint((found * std + mean) * 255), 0, 255).astype(np.uint8)
        times = found.shape[1] // placement.size[0]
        size = tuple(times * side for side in placement.image)
        pixels = found[0] if len(found) == 1 else np.ascontiguousarray(found.transpose(1, 2, 0))
        return _unletterboxed(pixels, placement, size)


def _unletterboxed(plane: np.ndarray, placement: Placement, size: tuple[int, int]) -> np.ndarray:
    """Returns the part of a plane [H, W, ...] that an image has in it, at ``size``, by nearest pixels.

    Where the image was cropped, the border's pixels stand for what the network did not see.
    """
    places = []
    for axis, first in enumerate((placement.top, placement.left)):
        centre = (np.arange(size[axis]) + 0.5) * placement.resized[axis] / size[axis] + first
        at = np.floor(centre * plane.shape[axis] / placement.size[axis]).astype(np.int64)
        places.append(np.clip(at, 0, plane.shape[axis] - 1))
    return plane[np.ix_(*places)]


def sight_of(
    network: Any,
    *,
    preprocess: str | Preprocess | None = None,
    classes: str | os.PathLike | Sequence[str] | None = None,
    head: str | None = None,
    confidence: float = CONFIDENCE,
    iou: float = IOU,
    most: int = MOST_BOXES,
) -> Sight:
    """Returns the preprocessing and the head of a network; see :class:`Viewer` for the arguments.

    Raises:
        InputError: an argument is at fault, or nobody says how images are prepared.
        UnsupportedError: the network takes no images, or its outputs are of no layout that is known.
    """
    form = form_of(network, network.base) if isinstance(network, Model) else None
    if form is None:
        raise UnsupportedError(f"{network.name}: expected an ONNX model, found a network of layers")
    if not form.is_of_images or network.input_shape[0] not in (1, 3):
        found = ", ".join(f"{v.name} {v.dtype} {list(v.shape)}" for v in network.inputs) or "none"
        wanted = "one input, images [N, 1 or 3, H, W]"
        raise UnsupportedError(f"{network.name}: expected {wanted}, found {found}")
    for name, value in (("confidence", confidence), ("iou", iou)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise expected(name, "a number from 0 to 1", value)
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise expected("most", "a whole number of at least 1", most)
    words = []
    names = _names(network, classes)
    outputs = tuple(
        heads.Output(v.name, v.dtype, v.shape[1:] if v.name in form.rows else v.shape)
        for v in form.outputs
    )
    found = heads.Form(outputs, network.input_shape, names, _extra(network, outputs), network.base)
    chosen = heads.choose(found, head, network.name)
    words.append(f"outputs are read as {chosen.name} {chosen.summary}")
    if isinstance(preprocess, str):
        preprocess = Preprocess.parse(preprocess)
    if preprocess is None and (preprocess := preprocess_of(network)) is not None:
        words.append(f"images are prepared by {preprocess} as its file says")
    if preprocess is None:
        preprocess = _usual(network, form, chosen)
        words.append(f"images are prepared by {preprocess} as networks with this head are used to")
    _check_sizes(network, form, preprocess)
    return Sight(chosen, found, preprocess, names, "; ".join(words), confidence, iou, most)


def _names(
    network: Model, classes: str | os.PathLike | Sequence[str] | None
) -> tuple[str, ...] | None:
    if classes is None:
        found = names_of(network)
        rows = None if found is None else found[0]
    elif isinstance(classes, (str, os.PathLike)):
        path = os.fspath(classes)
        rows = Classes.rows(read_text(path, LARGEST_TEXT), path, path.endswith(".json"))
    else:
        rows = [[name] for name in classes]
    return None if rows is None else tuple(row[-1] for row in rows)


def _extra(network: Model, outputs: Sequence[heads.Output]) -> int:
    """Returns the columns of a YOLO's box beyond its classes: of masks' prototypes, or of key points."""
    if (points := key_points_of(network)) is not None:
        return points
    grids = [min(one.row) for one in outputs if len(one.row) == 2]
    planes = [one.row[0] for one in outputs if len(one.row) == 3]
    fits = len(grids) == 1 and len(planes) == 1 and planes[0] < grids[0] - 4
    return planes[0] if fits else 0


def _usual(network: Model, form: Any, head: heads.Head) -> Preprocess:
    if form.inputs[0].dtype == "uint8":
        return Preprocess()
    if head.letterbox is None or form.sizes_of is not None:
        wanted = (
            f"letterbox=640 or other settings, for {network.name} reads {form.inputs[0].dtype}, files hold "
            "pixels, and the model's file does not say how they are prepared"
        )
        raise expected("preprocess", wanted, "none")
    return Preprocess(letterbox=tuple(network.input_shape[1:]), fill=head.letterbox)


def _check_sizes(network: Model, form: Any, preprocess: Preprocess) -> None:
    shape = network.input_shape
    if form.sizes_of is not None and holds_dims(network.inputs[0].shape[2:]):
        shape = (shape[0], *(preprocess.size or shape[1:]))
    preprocess.check(shape)


class Viewer:
    """Reads a network's outputs for photos: boxes, masks or pictures.

    Non-maximum suppression and all else that follows the network's outputs is computed on the host.

    Args:
        model: what :class:`~cnn_engine.Engine` takes, such as the path of an ONNX file.
        preprocess: how images are prepared, such as ``"letterbox=640,fill=114"``; None: as the model's file
            says, else for YOLO's layouts a grey letterbox of the network's size.
        classes: a file of names (JSON, or a line each), or the names; None: those in the model's file.
        head: the layout of the outputs, of :data:`.heads.HEADS`; None: found from their shapes.
        confidence: score above which a box counts.
        iou: intersection over union above which the worse of two boxes of a class goes.
        most: boxes that are kept of an image.
        options: of :class:`~cnn_engine.Engine`, such as ``device`` and ``threads``.

    Attributes:
        engine: the network.
        sight: how its images are prepared, and its outputs read.

    Raises:
        InputError: an argument or the model's file is at fault, or nobody says how images are prepared.
        UnsupportedError: the outputs are of no layout that is known, or the device or this installation lacks
            what is asked for.
    """

    def __init__(
        self,
        model: Any,
        *,
        preprocess: str | Preprocess | None = None,
        classes: str | os.PathLike | Sequence[str] | None = None,
        head: str | None = None,
        confidence: float = CONFIDENCE,
        iou: float = IOU,
        most: int = MOST_BOXES,
        **options: Any,
    ) -> None:
        self.engine = Engine(model, **options)
        self.sight = sight_of(
            self.engine.network, preprocess=preprocess, classes=classes, head=head,
            confidence=confidence, iou=iou, most=most,
        )  # fmt: skip

    def __call__(self, image: Any) -> Found:
        """Returns what the network sees in one image.

        Args:
            image: a path, an image of Pillow's, or uint8 [H, W] or [H, W, 3].

        Raises:
            InputError: the image is at fault, or does not become what the network reads.
        """
        return seen(self.engine, self.sight, image)[0]

    def many(self, images: Sequence[Any]) -> list[Found]:
        """Returns the findings in each image; see :meth:`__call__`."""
        if isinstance(images, (str, os.PathLike)):
            raise expected("images", "a list of images", repr(images))
        return [self(image) for image in images]

    def close(self) -> None:
        """Frees the engine's memory."""
        self.engine.close()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.__exit__(*exception)


class Detector(Viewer):
    """Finds objects in photos: a network, how its images are prepared, and how its outputs are boxes.

    The arguments are those of :class:`.Viewer`. A call returns :class:`.Boxes`: arrays of boxes, scores and
    classes, and when iterated a :class:`.Detection` each, the best first.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        if self.sight.head.kind != "boxes":
            found = f"{self.engine.network.name}, which gives a {self.sight.head.name}"
            self.close()
            raise UnsupportedError(f"model: expected a detector, found {found}")


def detect(model: Any, image: Any, **options: Any) -> Boxes:
    """Returns the boxes that a detector finds in one image; for many, make a :class:`Detector` once.

    Args:
        model, options: as :class:`Detector` takes them.
        image: a path, an image of Pillow's, or uint8 [H, W] or [H, W, 3].

    Raises:
        InputError, UnsupportedError: as :class:`Detector` and its calls.
    """
    with Detector(model, **options) as detector:
        return detector(image)


def seen(engine: Engine, sight: Sight, image: Any, name: str = "image") -> tuple[Found, Any]:
    """Returns the findings in an image, and the upright image, of Pillow's mode ``RGB``.

    Args:
        image: a path, an image of Pillow's, or uint8 [H, W] or [H, W, 3].
        name: what errors call an image that has no path.

    Raises:
        InputError: the image is at fault, or does not become what the network reads.
    """
    if isinstance(image, (str, os.PathLike)):
        name = os.fspath(image)
    photo = images.picture(image, sight.preprocess.orientation, name)
    placement = sight.preprocess.placement(photo.height, photo.width)
    upright = replace(sight.preprocess, orientation="ignore")
    shape = engine.network.input_shape
    if engine.form.sizes_of is not None:
        shape = (shape[0], *placement.size)
    pixels = images.pixels_of(photo, upright, shape, name)[None]
    if engine.form.inputs[0].dtype != "uint8":
        pixels = sight.preprocess.normalised(pixels)
    if (count := engine.form.only_batch) and count > 1:  # a model for so many images alone
        pixels = np.concatenate([pixels, np.zeros((count - 1, *shape), pixels.dtype)])
    found = engine.run({engine.form.inputs[0].name: pixels})
    rows = {key: a[0] if key in engine.form.rows else a for key, a in found.items()}
    try:
        return sight.found(rows, placement), photo
    except InputError as error:
        raise InputError(f"{engine.network.name}: {error}") from None
