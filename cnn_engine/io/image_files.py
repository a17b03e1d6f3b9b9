"""Data sets of image files: a folder with one folder per class, a list of files, and the names of classes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, expected
from ..workload import Dataset, Rest
from .files import describe_os_error, read_text
from .image_workers import decoded
from .images import SUFFIXES
from .preprocess import Preprocess

#: What a list of files is called: lines of a path and a label.
LISTS = (".txt", ".lst", ".list", ".tsv")

#: Of a list, or of the names of classes.
LARGEST_TEXT = 2**30

#: Bytes of images that are held at once to be timed; accuracy is of all, decoded beside the passes.
HELD_BYTES = 2**29

#: Names of synsets, by which ImageNet calls its classes.
_SYNSET = re.compile(r"n[0-9]{8}")


@dataclass(frozen=True)
class Classes:
    """The classes of a network's outputs.

    Attributes:
        names: of every output, for people.
        keys: every word that stands for one output alone -> its number.
    """

    names: tuple[str, ...]
    keys: dict[str, int]

    @classmethod
    def read(cls, path: str, outputs: int) -> Classes:
        """Reads names from JSON or text.

        JSON is a list of names, or an object from the output's number to its name or names (as Keras'
        ``imagenet_class_index.json``), or from names to numbers. Text has a line per output; a synset in
        front, such as ``n01440764``, is one more name for it (as ``LOC_synset_mapping.txt`` has them).

        Raises:
            InputError: it cannot be read, or does not have a name for each of ``outputs``.
        """
        text = read_text(path, LARGEST_TEXT)
        return cls.parse(text, path, outputs, json_alone=path.endswith(".json"))

    @classmethod
    def parse(cls, text: str, name: str, outputs: int, json_alone: bool = True) -> Classes:
        """Returns the names that ``text`` has, as :meth:`read` does of a file's.

        Args:
            name: what errors call the text.
            outputs: how many names there must be.
            json_alone: whether lines of names are refused.

        Raises:
            InputError: as :meth:`read`.
        """
        return cls.of_rows(cls.rows(text, name, json_alone), name, outputs)

    @staticmethod
    def rows(text: str, name: str, json_alone: bool = True) -> list[list[str]]:
        """Returns the names of each class that ``text`` has, however many classes there are.

        Raises:
            InputError: it has none.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            if json_alone:
                raise expected(name, "JSON", error) from error
            return [_split_line(line) for line in text.splitlines() if line.strip()]
        return _rows(found, name)

    @classmethod
    def of_names(cls, names: Sequence[str], outputs: int) -> Classes:
        """Returns the classes that are called ``names``, in order.

        Raises:
            InputError: they are no texts, or more or fewer than ``outputs``.
        """
        return cls.of_rows(_rows(list(names), "classes"), "classes", outputs)

    @classmethod
    def of_rows(cls, rows: list[list[str]], name: str, outputs: int) -> Classes:
        """Returns the classes of names that :meth:`rows` gives.

        Raises:
            InputError: they are more or fewer than ``outputs``.
        """
        if len(rows) != outputs:
            raise expected(name, f"{outputs} names, one for each output of the network", len(rows))
        return cls(tuple(row[-1] for row in rows), _unique(rows))


def _split_line(line: str) -> list[str]:
    first, _, rest = line.strip().partition(" ")
    return [first, rest.strip()] if _SYNSET.fullmatch(first) and rest.strip() else [line.strip()]


def _rows(found: Any, path: str) -> list[list[str]]:
    """Returns the names of each output that a JSON document gives it."""
    if isinstance(found, dict):
        if found and all(type(value) is int for value in found.values()):
            found = {str(number): name for name, number in found.items()}
        numbers = [str(number) for number in range(len(found))]
        if set(found) != set(numbers):
            raise expected(path, f"the numbers from 0 to {len(found) - 1}, each once", "others")
        found = [found[number] for number in numbers]
    if not isinstance(found, list):
        raise expected(path, "a list of names, or an object", type(found).__name__)
    rows = [row if isinstance(row, list) else [row] for row in found]
    for row in rows:
        if not row or not all(isinstance(name, str) for name in row):
            raise expected(path, "names as text", repr(row)[:60])
    return rows


def _unique(rows: list[list[str]]) -> dict[str, int]:
    """Returns the names that stand for one output alone: ImageNet has two called crane."""
    keys: dict[str, int] = {}
    several = set()
    for number, row in enumerate(rows):
        for name in row:
            if keys.setdefault(name, number) != number:
                several.add(name)
    return {name: number for name, number in keys.items() if name not in several}


#: Labels that a path may have where nobody wants to know them.
LABELS = 1 << 31


@dataclass(frozen=True)
class ImageFiles:
    """Image files in order, with their labels and classes.

    Attributes:
        source: the path that was given.
        files: of every image.
        labels: int64 [N], the number of the class; None where they are not known.
        classes: names of the classes, where the data set has them.
        note: for the user, or None.
    """

    source: str
    files: Sequence[str]
    labels: np.ndarray | None = None
    classes: Sequence[str] | None = None
    note: str | None = None

    def __len__(self) -> int:
        return len(self.files)

    def spread(self, count: int | None) -> ImageFiles:
        """Returns ``count`` of the files, evenly spread, so that no class is left out; all for None.

        Raises:
            InputError: there are fewer.
        """
        if count is None:
            return self
        if count > len(self):
            raise expected("images", f"at most {len(self)}, as {self.source} has", count)
        positions = np.arange(count) * len(self) // count
        files = [self.files[place] for place in positions]
        labels = None if self.labels is None else self.labels[positions]
        return ImageFiles(self.source, files, labels, self.classes, self.note)


def is_image_files(path: str) -> bool:
    """Whether ``path`` is an image, a list of them, or a folder with some in it or in its folders."""
    if os.path.isdir(path):
        with suppress(OSError):  # whoever reads it will say so
            names = sorted(os.listdir(path))
            inside = (os.path.join(path, name) for name in names)
            deeper = (
                name for place in inside if os.path.isdir(place) for name in os.listdir(place)
            )
            return any(map(_is_image, names)) or any(map(_is_image, deeper))
    return path.lower().endswith((*SUFFIXES, *LISTS)) and os.path.isfile(path)


def find(path: str, outputs: int | None, classes: Classes | None = None) -> ImageFiles:
    """Finds the image files that ``path`` names, and their labels.

    A folder with one folder per class: these are numbered in the order of their names, as torchvision and
    Keras do, or as ``classes`` says. A folder of images alone, or one image: no labels. A list: a line an
    image, its path (relative to the list) and, after the last white space, its class by number or name.

    Args:
        outputs: of the network; labels are from 0 to one less. None: its outputs are no classes, and what the
            path says of labels is left aside.
        classes: what the outputs are called.

    Raises:
        InputError: there is no image, or a label that is none of the network's.
    """
    if outputs is None and os.path.isdir(path):
        return ImageFiles(path, inside_of(path))
    if outputs is None:
        found = find(path, LABELS, classes)
        return replace(found, labels=None, classes=None, note=None)
    if os.path.isdir(path):
        try:
            return _find_in_folder(path, outputs, classes)
        except OSError as error:  # a folder that may not be read, or that went away
            raise InputError(f"{path}: cannot be read: {describe_os_error(error)}") from error
    if path.lower().endswith(SUFFIXES):
        return ImageFiles(path, [path])
    return _find_in_list(path, outputs, classes)


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _walk(folder: str) -> Iterator[str]:
    """Yields the images in ``folder`` and all below, in order of their names; links are followed."""

    def fail(error: OSError) -> None:
        raise error

    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:  # a link to what it lies in
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if _is_image(name):
                yield os.path.join(place, name)


def inside_of(folder: str) -> list[str]:
    """Returns the images in a folder and all below, in order of their names.

    Raises:
        InputError: there is none, or a folder cannot be read.
    """
    try:
        files = list(_walk(folder))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {describe_os_error(error)}") from error
    if not files:
        raise expected(folder, f"images ({', '.join(SUFFIXES)})", "none")
    return files


def _find_in_folder(path: str, outputs: int, classes: Classes | None) -> ImageFiles:
    inside = sorted(name for name in os.listdir(path) if not name.startswith("."))
    names = [name for name in inside if os.path.isdir(os.path.join(path, name))]
    found = [list(_walk(os.path.join(path, name))) for name in names]
    if not any(found):
        return ImageFiles(path, inside_of(path), classes=classes and classes.names)
    numbers, note = _number(path, names, outputs, classes)
    labels = None
    if numbers is not None:
        labels = np.repeat(np.array(numbers, np.int64), [len(files) for files in found])
    shown = names if len(names) == outputs else None
    files = [file for part in found for file in part]
    return ImageFiles(path, files, labels, classes.names if classes else shown, note)


def _number(
    path: str, names: list[str], outputs: int, classes: Classes | None
) -> tuple[list[int] | None, str | None]:
    """Returns the output that each folder is of, None where nobody knows, and what to say of it."""
    if classes is not None and any(name in classes.keys for name in names):
        unknown = [name for name in names if name not in classes.keys]
        if unknown:
            raise expected(path, "folders called as the network's classes", unknown[0])
        return [classes.keys[name] for name in names], None
    if len(names) > outputs:
        raise expected(path, f"at most {outputs} folders, one for each output", len(names))
    if len(names) < outputs:
        return None, (
            f"labels: none, and no accuracy: {len(names):,} folders do not say which of {outputs:,} outputs "
            "they are; --classes FILE, or folders that have the names of classes, say it"
        )
    return list(range(len(names))), None


def _find_in_list(path: str, outputs: int, classes: Classes | None) -> ImageFiles:
    lines = [line.strip() for line in read_text(path, LARGEST_TEXT).splitlines()]
    rows = [line.rsplit(maxsplit=1) for line in lines if line]
    if not rows:
        raise expected(path, "lines of a path and a label", "none")
    folder = os.path.dirname(path)
    if all(len(row) == 1 for row in rows):
        files = [os.path.join(folder, row[0]) for row in rows]
        return ImageFiles(path, files, classes=classes and classes.names)
    for row in rows:
        if len(row) == 1:
            raise expected(path, "a label after every path, or after none", repr(row[0]))
    files = [os.path.join(folder, row[0]) for row in rows]
    labels, names = _labels(path, [row[1] for row in rows], outputs, classes)
    return ImageFiles(path, files, labels, names)


def _labels(
    path: str, words: list[str], outputs: int, classes: Classes | None
) -> tuple[np.ndarray, Sequence[str] | None]:
    """Returns the numbers that ``words`` stand for, and the names of all classes where they are known."""
    shown = classes and classes.names
    if all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        labels = np.array([int(word) for word in words], np.int64)
    elif classes is not None:
        for word in words:
            if word not in classes.keys:
                raise expected(path, "labels that the network's classes have", repr(word))
        labels = np.array([classes.keys[word] for word in words], np.int64)
    else:
        shown = sorted(set(words))
        if len(shown) != outputs != LABELS:
            wanted = f"labels by number, or {outputs} names, or --classes FILE with it"
            raise expected(path, wanted, f"{len(shown)} names, such as {shown[0]!r}")
        numbers = {name: number for number, name in enumerate(shown)}
        labels = np.array([numbers[word] for word in words], np.int64)
    if labels.max() >= outputs:
        raise expected(path, f"labels from 0 to {outputs - 1}", int(labels.max()))
    return labels, shown


# ---- images ----


def load(
    path: str,
    shape: tuple[int, ...],
    outputs: int | None,
    *,
    dtype: str,
    preprocess: Preprocess,
    classes: Classes | None = None,
    images: int | None = None,
    held_bytes: int | None = HELD_BYTES,
    batch: int = 1,
    workers: int | None = None,
) -> Dataset:
    """Returns the images that ``path`` names, preprocessed for a network; see :func:`find`.

    Args:
        shape: of one image, [C, H, W].
        outputs: of the network; None: they are no classes.
        dtype: ``uint8`` for pixels, ``float32`` for what :meth:`Preprocess.normalised` makes of them.
        images: how many, evenly spread; None: all.
        held_bytes: images that take more are decoded when they are asked for (:attr:`Dataset.rest`); None:
            all are held.
        batch: of a model that is made for so many images alone: as many are held as fill passes.
        workers: processes that decode; see :func:`~cnn_engine.io.image_workers.decoded`.

    Raises:
        InputError: there is no image, or one is at fault, or does not fit the network.
    """
    found = find(path, outputs, classes).spread(images)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if len(found) < batch:
        raise expected(
            path, f"at least {batch} images, for which alone the model is made", len(found)
        )
    held = len(found) if held_bytes is None else min(len(found), max(held_bytes // size, batch))
    held -= held % batch

    def chunks(files: Sequence[str], count: int) -> Iterator[np.ndarray]:
        return _chunks(files, preprocess, shape, dtype, count, workers)

    with closing(chunks(found.files[:held], held)) as all_of_them:
        pixels = next(all_of_them)
    labels = found.labels
    rest = None
    if held < len(found):
        rest = Rest(
            len(found) - held,
            None if labels is None else labels[held:],
            lambda count: _ahead(chunks(found.files[held:], count)),
        )
    return Dataset(
        Path(path).name or path, path, pixels,
        None if labels is None else labels[:held],
        found.note,
        files=[os.path.relpath(f, path if os.path.isdir(path) else ".") for f in found.files[:held]],
        classes=None if found.classes is None else tuple(found.classes),
        rest=rest,
    )  # fmt: skip


def _chunks(
    files: Sequence[str],
    preprocess: Preprocess,
    shape: tuple[int, ...],
    dtype: str,
    count: int,
    workers: int | None,
) -> Iterator[np.ndarray]:
    """Yields ``dtype`` [<= count, C, H, W] until the files end; raises the first error among them."""
    with closing(decoded(files, preprocess, shape, workers=workers)) as found:
        for first in range(0, len(files), count):
            images = np.empty((min(count, len(files) - first), *shape), dtype)
            for row, pixels in zip(images, islice(found, len(images)), strict=True):
                if isinstance(pixels, InputError):
                    raise pixels
                if dtype == "uint8":
                    row[...] = pixels
                else:
                    preprocess.normalised(pixels[None], row[None])
            yield images


def _ahead(items: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields ``items``; while the caller works on one, the next is made in another thread."""
    with closing(items), ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item
