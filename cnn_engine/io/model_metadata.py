"""Metadata of a model's file: preparation of images, and names of outputs.

:mod:`cnn_engine.export` writes both into an ONNX file's ``metadata_props``; every command that reads image
files takes them from there, unless an option says otherwise.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, expected
from ..graph.form import form_of
from ..graph.model import Model
from ..graph.onnx.model import messages
from .image_files import Classes
from .preprocess import Preprocess

#: Keys: settings as ``--preprocess`` takes them, and a JSON list of names.
PREPROCESS, CLASSES = "cnn_engine.preprocess", "cnn_engine.classes"

#: Characters of settings, and of a literal, that are read.
LONGEST_SETTINGS, LARGEST_LITERAL = 4096, 1 << 20

#: Value beyond the image with which YOLO's networks are trained.
GREY = 114


def preprocess_of(network: Any) -> Preprocess | None:
    """Returns how a network's images are prepared, as its file says; None: it does not say.

    Raises:
        InputError: the file's metadata is at fault.
    """
    metadata = getattr(network, "metadata", {})
    text = metadata.get(PREPROCESS)
    if text is None:
        return _ultralytics_preprocess(network.name, metadata)
    try:
        return Preprocess.parse(text[:LONGEST_SETTINGS])
    except InputError as error:
        raise InputError(f"{network.name}: metadata {PREPROCESS}: {error}") from None


def open_shapes(model: Model, preprocess: str | Preprocess | None) -> dict[str, tuple]:
    """Returns the shape of a model's images, by input, where it leaves sizes open that preprocessing decides.

    Raises:
        InputError: the preprocessing is at fault.
    """
    form = form_of(model, model.base)
    if form.sizes_of is None or not form.is_of_images:
        return {}
    if isinstance(preprocess, str):
        preprocess = Preprocess.parse(preprocess)
    preprocess = preprocess or preprocess_of(model)
    if preprocess is None or preprocess.size is None:
        return {}
    return {form.inputs[0].name: (None, None, *preprocess.size)}


def classes_of(network: Any) -> Classes | None:
    """Returns the names of a network's outputs, as its file says; None: it does not say.

    Raises:
        InputError: the file's metadata is at fault, or has more or fewer names than there are outputs.
    """
    if (
        isinstance(network, Model) and network.why_not_images
    ):  # its outputs are no scores of classes
        return None
    names = names_of(network)
    return None if names is None else Classes.of_rows(*names, network.classes)


def names_of(network: Any) -> tuple[list[list[str]], str] | None:
    """Returns the names of a network's classes, however many, and the source of these names."""
    metadata = getattr(network, "metadata", {})
    if (text := metadata.get(CLASSES)) is not None:
        called = f"{network.name}: metadata {CLASSES}"
        return Classes.rows(text, called, json_alone=True), called
    if (found := _ultralytics(network.name, metadata, "names")) is not None:
        called = f"{network.name}: metadata names"
        found = {str(n): name for n, name in found.items()} if isinstance(found, dict) else found
        return Classes.rows(json.dumps(found), called, json_alone=True), called
    return None


def _ultralytics(name: str, metadata: Mapping[str, str], key: str) -> Any:
    """Returns a value of what Ultralytics' exporter writes, Python's literals; None: it wrote none.

    Raises:
        InputError: it is no literal.
    """
    if metadata.get("author") != "Ultralytics" or (text := metadata.get(key)) is None:
        return None
    try:
        return ast.literal_eval(text[:LARGEST_LITERAL])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise expected(f"{name}: metadata {key}", "a list or a dictionary", text[:60]) from None


def key_points_of(network: Any) -> int | None:
    """Returns how many numbers of key points a box has, as Ultralytics' exporter writes; None: it has none.

    Raises:
        InputError: the file's metadata is at fault.
    """
    metadata = getattr(network, "metadata", {})
    found = _ultralytics(network.name, metadata, "kpt_shape")
    if found is None:
        return None
    if not isinstance(found, list | tuple) or not all(
        type(one) is int and one > 0 for one in found
    ):
        raise expected(f"{network.name}: metadata kpt_shape", "[points, numbers of each]", found)
    return math.prod(found)


def _ultralytics_preprocess(name: str, metadata: Mapping[str, str]) -> Preprocess | None:
    """Returns how Ultralytics' networks see images: all of them letterboxed but classifiers, from 0 to 1."""
    size = _ultralytics(name, metadata, "imgsz")
    if size is None:
        return None
    sides = [size, size] if isinstance(size, int) else size
    if not isinstance(sides, list | tuple) or len(sides) != 2:
        raise expected(f"{name}: metadata imgsz", "[rows, columns]", size)
    if metadata.get("task") == "classify":
        return Preprocess(min(sides), tuple(sides))
    return Preprocess(letterbox=tuple(sides), fill=GREY)


@dataclass(frozen=True)
class ImageSettings:
    """Preprocessing of image files for one network.

    Attributes:
        preprocess: how they are prepared.
        dtype: what becomes of their pixels: ``uint8``, or ``float32`` where the network reads no pixels or
            they are normalised.
        classes: what the outputs are called, where that is known.
        stated: the sentence that says what was taken from the model's file, or None.
    """

    preprocess: Preprocess
    dtype: str
    classes: Classes | None
    stated: str | None


def image_settings(
    network: Any, preprocess: str | Preprocess | None, classes: str | Sequence[str] | None
) -> ImageSettings:
    """Returns how files of images are prepared for a network, as the caller says, else as its file does.

    Args:
        network: a Network or a Model.
        preprocess: as ``--preprocess`` has it; None: not said.
        classes: a file of names, or the names; None: not said.

    Raises:
        InputError: what is said does not fit the network, or nobody says how images are prepared for a
            network that reads no pixels.
    """
    is_model = isinstance(network, Model)
    reads = (network.base.inputs[0].dtype,) if is_model else ("uint8", "float32")
    words, options = [], []
    if preprocess is None and (found := preprocess_of(network)) is not None:
        preprocess = found
        words.append(f"images are prepared by {found}")
        options.append("--preprocess")
    if classes is None:
        named = classes_of(network)
        if named is not None:
            words.append("outputs have their names")
            options.append("--classes")
    elif isinstance(classes, str):
        named = Classes.read(classes, network.classes)
    else:
        named = Classes.of_names(classes, network.classes)
    if isinstance(preprocess, str):
        preprocess = Preprocess.parse(preprocess)
    if preprocess is None:
        if "uint8" not in reads:
            wanted = (
                f"imagenet or other settings, for {network.name} reads {reads[0]}, files hold pixels, and "
                "the model's file does not say how they are prepared"
            )
            raise expected("preprocess", wanted, "none")
        preprocess = Preprocess()
    preprocess.check(network.input_shape)
    dtype = reads[-1] if preprocess.normalises else reads[0]
    if preprocess.normalises and dtype == "uint8":
        raise expected("preprocess", f"no mean or std, for {network.name} reads pixels", preprocess)
    stated = f"{' and '.join(words)} as its file says ({' and '.join(options)} override it)"
    return ImageSettings(preprocess, dtype, named, f"model: {stated}" if words else None)


def entries(preprocess: Preprocess | None, classes: Sequence[str] | None) -> dict[str, str]:
    """Returns metadata for the preparation of images and the names of outputs."""
    found = {}
    if preprocess is not None:
        found[PREPROCESS] = str(preprocess)
    if classes is not None:
        found[CLASSES] = json.dumps(list(classes), ensure_ascii=False)
    return found


def added(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes of an ONNX model with ``metadata`` added to its own.

    Raises:
        InputError: the package onnx is not installed.
    """
    more = messages().ModelProto()
    for key, value in metadata.items():
        more.metadata_props.add(key=key, value=value)
    return data + more.SerializeToString()  # protobuf merges messages that follow each other
