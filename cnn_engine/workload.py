"""A workload: a network together with its data, its weights and what its users expect to read.

The engine, the runner and the reports know no network by name. What differs between networks is
here, as data, and found by name in a registry: the project's own workloads, those that another
package declares under the entry point group ``cnn_engine.workloads``, and those registered by hand.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CnnEngineError, InputError, UnsupportedError, expected, not_one_of

if TYPE_CHECKING:
    import importlib.metadata

    from .graph.model import Model
    from .graph.network import Network
    from .measure.result import Result


@dataclass(frozen=True)
class Rest:
    """Images of a data set beyond those that are held in memory.

    Attributes:
        count: how many.
        labels: [count], or None where they are not known.
        chunks: takes how many images; yields as many at a time, [<= N, C, H, W] as those that are held are,
            until all have come; to be closed where it is left before its end.
    """

    count: int
    labels: np.ndarray | None
    chunks: Callable[[int], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Dataset:
    """Images and, where they are known, their labels.

    Attributes:
        name: the data set's name, as the reports print it.
        source: the path that it was read from, or ``"synthetic"``.
        images: uint8 [N, C, H, W], pixel values; or float32, what the network reads.
        labels: [N], the numbers of classes, or None where the images have no labels.
        note: a sentence for the user, such as why synthetic images are used, or None.
        files: what each image was read from, where each has a file of its own.
        classes: the name of each output of the network, where they are known.
        rest: more images, that memory would not hold.
    """

    name: str
    source: str
    images: np.ndarray
    labels: np.ndarray | None = None
    note: str | None = None
    files: Sequence[str] | None = None
    classes: Sequence[str] | None = None
    rest: Rest | None = None

    def __len__(self) -> int:
        return len(self.images)


def synthetic_images(
    shape: tuple[int, ...],
    make: Callable[[int, int], np.ndarray],
    images: int | None,
    most: int,
    note: str | None = None,
) -> Dataset:
    """Returns images that are made, not read, in parts that need little memory.

    Args:
        shape: of one image.
        make: takes the first image's number and how many, returns them as uint8 [N, *shape]; an image
            depends on its number alone.
        images: how many; None: 1,000.
        most: how many there may be.
        note: for the user, such as why they are used.

    Raises:
        InputError: fewer than 1 or more than ``most`` images are asked for.
    """
    wanted = 1000 if images is None else images
    if not 1 <= wanted <= most:
        raise expected("images", f"1 to {most} synthetic images", wanted)
    pixels = np.empty((wanted, *shape), np.uint8)
    for first in range(0, wanted, 1000):
        count = min(1000, wanted - first)
        pixels[first : first + count] = make(first, count)
    return Dataset("synthetic images", "synthetic", pixels, None, note)


def data_folder(path: str, name: str) -> str:
    """Returns ``path/name`` where that is a folder, else ``path``: one may hold several data sets."""
    nested = os.path.join(path, name)
    return nested if os.path.isdir(nested) else path


@dataclass(frozen=True)
class Workload:
    """A network, where its images come from, and where its weights come from.

    Attributes:
        network: the network; ``network.name`` is the workload's name.
        load_data: takes ``"auto"``, ``"synthetic"`` or a path, and the number of images wanted (None:
            all there are); returns a :class:`Dataset` of that many. Raises :class:`InputError`.
        default_weights: the file that ``--weights default`` reads, or None where none is shipped.
        report_lines: extra lines of the text report, made from the result.
    """

    network: Network | Model
    load_data: Callable[[str, int | None], Dataset]
    default_weights: Path | None = None
    report_lines: Callable[[Result], list[str]] | None = None

    @property
    def name(self) -> str:
        return self.network.name


#: Images that are made for a model unless said.
MODEL_IMAGES = 32


def of_model(
    source: Any,
    input_shape: Mapping[str, Sequence[int | None]] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> Workload:
    """Returns the workload of an ONNX model: its images are read from an array, or random.

    Args:
        source: a path, a model's bytes or an ``onnx.ModelProto``.
        input_shape, constants: as :func:`cnn_engine.graph.onnx.load` takes them.

    Raises:
        InputError: the model is at fault, or is no network from images to rows of numbers.
        UnsupportedError: the engine lacks some of its operators.
    """
    from .graph import onnx
    from .graph.model import Model

    model = Model(onnx.load(source, input_shape=input_shape, constants=constants))
    if reason := model.why_not_images:
        raise UnsupportedError(f"{source}: {reason}; Engine.run takes any graph")
    dtype = model.base.inputs[0].dtype

    def load_data(path: str, images: int | None) -> Dataset:
        if path in ("auto", "synthetic"):
            count = MODEL_IMAGES if images is None else images
            generator = np.random.default_rng(0)
            shape = (count, *model.input_shape)
            made = (
                generator.integers(0, 256, shape, np.uint8)
                if dtype == "uint8"
                else generator.standard_normal(shape, np.float32)
            )
            note = "images: random, since none are given; --data PATH.npy reads some"
            return Dataset("random images", "synthetic", made, None, note)
        return _from_array(path, images, dtype)

    return Workload(model, load_data)


def _from_array(path: str, images: int | None, dtype: str) -> Dataset:
    """Reads images, and labels where an ``.npz`` has them, from NumPy's files."""
    labels = None
    try:
        with open(path, "rb") as file:  # of a broken one NumPy leaves its own open
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, np.ndarray):
                if "images" not in found:
                    raise expected(path, "an array called images", ", ".join(found.files) or "none")
                labels = found.get("labels")
                found = found["images"]
    except (CnnEngineError, MemoryError):
        raise
    except Exception as error:  # zipfile, zlib and NumPy have a dozen kinds for broken bytes
        raise expected(
            "data",
            "auto, synthetic or a .npy or .npz file, or files of images",
            f"{path}: {error}",
        ) from None
    if found.dtype.name != dtype:
        raise expected(path, f"images of type {dtype}", found.dtype.name)
    if found.ndim != 4 or not len(found):
        raise expected(path, "images [N, C, H, W], at least one", f"shape {list(found.shape)}")
    if images is not None and images > len(found):
        raise expected("images", f"at most {len(found)}, as {path} has", images)
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != found.shape[:1]):
        wanted = f"labels, a whole number each of {len(found)} images"
        raise expected(path, wanted, f"{labels.dtype} {list(labels.shape)}")
    if labels is not None and labels.min() < 0:
        raise expected(path, "labels from 0 on", labels.min())
    found = np.ascontiguousarray(found[:images])
    if not np.isfinite(found).all():  # no check can tell what becomes of them
        number = int(np.isfinite(found).all((1, 2, 3)).argmin())
        raise expected(path, "finite numbers", f"others in image {number} (the first is 0)")
    return Dataset(Path(path).name, path, found, None if labels is None else labels[:images])


#: The project's own workloads: name -> "module:attribute", imported when first asked for.
BUILT_IN: Mapping[str, str] = {
    "cifar10": "cnn_engine.workloads.cifar10:WORKLOAD",
    "ece408": "cnn_engine.workloads.fashion_mnist:WORKLOAD",
}

#: What built-in workloads are called elsewhere, for the hint of an error.
OTHER_NAMES: Mapping[str, str] = {
    "fashion_mnist": "ece408", "fashion-mnist": "ece408", "mnist": "ece408", "cifar": "cifar10",
}  # fmt: skip

_registered: dict[str, Workload] = {}


def register(workload: Workload) -> None:
    """Makes ``workload`` known under its name, before built-in ones and entry points.

    Raises:
        InputError: the name is taken by another registered workload.
    """
    if _registered.get(workload.name, workload) is not workload:
        raise InputError(
            f"workload: expected a new name, found {workload.name!r} registered already"
        )
    _registered[workload.name] = workload


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    import importlib.metadata  # 3 MiB, which networks of other sources have no use for

    return {e.name: e for e in importlib.metadata.entry_points(group="cnn_engine.workloads")}


def names() -> list[str]:
    """Returns the names of all workloads that can be asked for, sorted."""
    return sorted({*BUILT_IN, *_registered, *_entry_points()})


def get(name: str) -> Workload:
    """Returns the workload called ``name``.

    Raises:
        InputError: there is none of that name.
    """
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name].split(":")
        return getattr(importlib.import_module(module), attribute)
    if name in (entry_points := _entry_points()):
        return entry_points[name].load()
    raise not_one_of("network", names(), name, OTHER_NAMES)
