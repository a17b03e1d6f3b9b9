"""Photos to names of classes: :class:`Classifier`, and ``cnn-engine classify photo.jpg --model x.onnx``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import cli, shared_options
from .devices import threads
from .engine.engine import Engine
from .errors import InputError, UnsupportedError, expected
from .graph.model import Model
from .graph.probabilities import gives_sigmoids
from .io import image_files, images
from .io.files import write_text
from .io.model_metadata import ImageSettings, image_settings
from .io.preprocess import Preprocess
from .kernels import select

#: Images that are held at once.
HELD = 64


class Prediction(NamedTuple):
    """One class of an image.

    Attributes:
        name: what the class is called; its number where that is not known.
        score: from 0 to 1; see :class:`Classifier`.
        number: of the class: the place of its output, from 0.
    """

    name: str
    score: float
    number: int


class Classifier:
    """A network that classifies images, with its preprocessing and the names of its classes.

    Scores are probabilities: what the network gives where it ends in a softmax, else the softmax of what it
    gives. Where it ends in a sigmoid, each class has a score for itself, and they do not add up to 1.

    Args:
        model: what :class:`~cnn_engine.Engine` takes, such as the path of an ONNX file.
        preprocess: how images are prepared, such as ``"imagenet"``; None: as the model's file or the
            :class:`~cnn_engine.Workload` says.
        classes: a file of names (JSON, or a line each), or the names; None: those in the model's file or the
            workload.
        options: of :class:`~cnn_engine.Engine`, such as ``device`` and ``threads``.

    Attributes:
        engine: the network.
        settings: how images are prepared, and the names.

    Raises:
        InputError: an argument or the model's file is at fault, or nobody says how images are prepared.
        UnsupportedError: the device or this installation lacks what is asked for.
    """

    def __init__(
        self,
        model: Any,
        *,
        preprocess: str | Preprocess | None = None,
        classes: str | os.PathLike | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self.engine = Engine(model, **options)
        network = self.engine.network
        if isinstance(network, Model) and (reason := network.why_not_images):
            raise UnsupportedError(f"{network.name}: {reason}; Engine.run takes any graph")
        if network.classes < 2:
            raise expected(network.name, "a network of at least 2 classes", network.classes)
        if (workload := self.engine.workload) is not None:
            preprocess = workload.preprocess if preprocess is None else preprocess
            classes = workload.classes if classes is None else classes
        if isinstance(classes, os.PathLike):
            classes = os.fspath(classes)
        self.settings: ImageSettings = image_settings(network, preprocess, classes)
        self._sigmoids = isinstance(network, Model) and gives_sigmoids(network.base)
        self._multiple = 1
        if isinstance(network, Model) and not network.any_batch:
            self._multiple = network.batch

    def __call__(self, image: Any, top: int = 5) -> list[Prediction]:
        """Returns the ``top`` classes of one image, the best first.

        Args:
            image: a path, an image of Pillow's, or uint8 [H, W] or [H, W, 3].

        Raises:
            InputError: the image is at fault, or does not become what the network reads.
        """
        return self.many([image], top)[0]

    def many(self, images: Sequence[Any], top: int = 5) -> list[list[Prediction]]:
        """Returns the ``top`` classes of each image; see :meth:`__call__`."""
        if isinstance(images, (str, os.PathLike)):
            raise expected("images", "a list of images", repr(images))
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise expected("top", "a whole number of at least 1", top)
        found: list[list[Prediction]] = []
        for first in range(0, len(images), HELD):
            pixels = [self.pixels(image) for image in images[first : first + HELD]]
            found += self.named(self.scores(np.stack(pixels)), top)
        return found

    def pixels(self, image: Any) -> np.ndarray:
        """Returns the pixels of one image as the network reads them before they are normalised.

        Returns:
            uint8 [C, H, W].

        Raises:
            InputError: the image is at fault, or does not become what the network reads.
        """
        prepare, shape = self.settings.preprocess, self.engine.network.input_shape
        if isinstance(image, (str, os.PathLike)):
            return images.decode(image, prepare, shape)
        return images.pixels_of(image, prepare, shape)

    def scores(self, pixels: np.ndarray) -> np.ndarray:
        """Returns the score of every class.

        Args:
            pixels: uint8 [N, C, H, W], as :meth:`pixels` makes them.

        Returns:
            float64 [N, classes], from 0 to 1.

        Raises:
            InputError: the network gives numbers that are none.
        """
        count = len(pixels)
        if self.settings.dtype == "float32":
            pixels = self.settings.preprocess.normalised(pixels)
        if missing := -count % self._multiple:  # a model for so many images alone
            pixels = np.concatenate([pixels, np.zeros((missing, *pixels.shape[1:]), pixels.dtype)])
        rows = self.engine.predict(pixels)[:count].astype(np.float64)
        if np.isnan(rows).any() or (np.isinf(rows).all(axis=1)).any():
            raise expected(self.engine.network.name, "numbers as outputs", "NaN or infinity")
        if self._sigmoids or self.engine.gives_probabilities:
            return rows
        largest = rows.max(axis=1, keepdims=True)
        rows = np.exp(rows - largest)
        return rows / rows.sum(axis=1, keepdims=True)

    def named(self, scores: np.ndarray, top: int) -> Iterator[list[Prediction]]:
        """Yields the ``top`` classes of each row of scores, the best first."""
        names = self.settings.classes and self.settings.classes.names
        # Stable, so that of equal scores the first class comes first.
        for row, order in zip(scores, np.argsort(-scores, axis=1, kind="stable"), strict=True):
            yield [
                Prediction(names[n] if names else f"class {n}", float(row[n]), int(n))
                for n in order[:top]
            ]

    def close(self) -> None:
        """Frees the engine's memory."""
        self.engine.close()

    def __enter__(self) -> Classifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.__exit__(*exception)


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = cli.ArgumentParser(
        prog="cnn-engine classify",
        description="Classifies photos: prints the classes with the highest scores. Scores are "
        "probabilities, by a softmax where the network has none.",
        epilog="exit codes: 0 done; 2 the input is at fault, or some photos are, which are named",
    )
    p.add_argument("photos", metavar="PHOTO", nargs="+", help="image files, or folders of them")
    shared_options.add_network(p)
    shared_options.add_images(p)
    p.add_argument(
        "--top", type=cli.whole_number(1, 10**6), default=5, metavar="N",
        help="classes that are shown of each photo (default: 5)",
    )  # fmt: skip
    p.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    p.add_argument(
        "--dtype", default="float32", help=f"one of {', '.join(select.DTYPES)} (default: float32)"
    )
    p.add_argument(
        "--threads", type=cli.whole_number(1, threads.MOST),
        help="CPU threads (default: the CPUs granted)",
    )  # fmt: skip
    p.add_argument(
        "--json", metavar="PATH", help="write the classes as JSON; - for standard output"
    )
    p.add_argument("--quiet", action="store_true", help="print errors only")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command with ``arguments`` (None: the process's); returns its exit code."""
    options = parser().parse_args(arguments)
    files = _files(options.photos)
    cli.check_outputs({"--json": options.json}, [*shared_options.files_read(options), *files])
    classifier = Classifier(
        shared_options.workload_of(options),
        preprocess=options.preprocess,
        classes=options.classes,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
    )
    shows = not options.quiet and options.json != "-"
    if shows and classifier.settings.stated:
        cli.show(classifier.settings.stated)
    rows: list[dict[str, Any]] = []
    code = cli.DONE
    with classifier:
        for first in range(0, len(files), HELD):
            good, pixels = [], []
            for file in files[first : first + HELD]:
                try:
                    pixels.append(classifier.pixels(file))
                    good.append(file)
                except UnsupportedError:
                    raise
                except InputError as error:
                    cli.print_error(error)
                    code = cli.INPUT_AT_FAULT
            if not good:
                continue
            scores = classifier.scores(np.stack(pixels))
            for file, found in zip(good, classifier.named(scores, options.top), strict=True):
                rows.append({"file": file, "classes": [one._asdict() for one in found]})
                if shows:
                    cli.show("\n".join([file, *(_line(one) for one in found)]))
    if options.json is not None:
        write_text(options.json, json.dumps({"photos": rows}, indent=2, ensure_ascii=False) + "\n")
    return code


def _line(one: Prediction) -> str:
    return f"  {one.score:8.2%}  {one.name}"


def _files(photos: list[str]) -> list[str]:
    """Returns the files that the command line names, those of folders in order of their names."""
    found: list[str] = []
    for photo in photos:
        found += image_files.inside_of(photo) if os.path.isdir(photo) else [photo]
    return found


if __name__ == "__main__":
    sys.exit(main())
