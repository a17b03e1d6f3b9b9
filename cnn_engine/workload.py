"""A workload: a network together with its data, weights and report lines.

The engine, the runner and the reports know no network by name. What differs between networks is
here, as data, and found by name in a registry: the project's own workloads, those that another
package declares under the entry point group ``cnn_engine.workloads``, and those registered by hand.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _cpu
from .errors import InputError, expected, not_one_of

if TYPE_CHECKING:
    import importlib.metadata

    from .graph.model import Model
    from .graph.network import Network
    from .measure.result import Result


class Samples:
    """Arrays by name whose dimension 0 are the same images, as the inputs or the outputs of any network.

    ``len`` says how many, and slices share memory. :func:`addresses` takes them where it takes an array.

    Args:
        arrays: name -> C-contiguous array, in the network's order.
        count: images.
        shared: names of arrays that all images have in common, which slices have whole.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        count: int,
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self.arrays, self.count, self.shared = dict(arrays), count, shared

    @property
    def dtype(self) -> np.dtype:
        """Of the first array: uint8 where images are pixels."""
        return next((array.dtype for array in self.arrays.values()), np.dtype(np.float32))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, some: slice) -> Samples:
        first, last, _ = some.indices(self.count)
        parts = {n: a if n in self.shared else a[some] for n, a in self.arrays.items()}
        return Samples(parts, max(last - first, 0), self.shared)


def addresses(data: np.ndarray | Samples) -> int | tuple[int, ...]:
    """Returns the address of an array, or those of all arrays of samples."""
    if isinstance(data, Samples):
        return tuple(map(_cpu.address_of, data.arrays.values()))
    return _cpu.address_of(data)


@dataclass(frozen=True)
class Rest:
    """Images of a data set beyond those in memory.

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
        images: uint8 [N, C, H, W], pixel values; or float32, what the network reads; or all inputs of a
            network of any kind.
        labels: [N], the numbers of classes, or None where the images have no labels.
        note: a sentence for the user, such as why synthetic images are used, or None.
        files: what each image was read from, where each has a file of its own.
        classes: the name of each output of the network, where they are known.
        rest: more images, that memory would not hold.
    """

    name: str
    source: str
    images: np.ndarray | Samples
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
        preprocess: how :class:`~cnn_engine.Classifier` prepares photos, as ``--preprocess`` has it; None: not
            at all.
        classes: the name of each class, where they have names.
        load_training: as ``load_data``, of the images to train on alone; None: all are.
    """

    network: Network | Model
    load_data: Callable[[str, int | None], Dataset]
    default_weights: Path | None = None
    report_lines: Callable[[Result], list[str]] | None = None
    preprocess: str | None = None
    classes: Sequence[str] | None = None
    load_training: Callable[[str, int | None], Dataset] | None = None

    @property
    def name(self) -> str:
        return self.network.name


def of_model(
    source: Any,
    input_shape: Mapping[str, Sequence[int | None]] | None = None,
    constants: Mapping[str, Any] | None = None,
    inputs: str | None = None,
    preprocess: Any = None,
) -> Workload:
    """Returns the workload of an ONNX model: its inputs are read from arrays, or random.

    Args:
        source: a path, a model's bytes or an ``onnx.ModelProto``.
        input_shape, constants: as :func:`cnn_engine.graph.onnx.load` takes them.
        inputs: a ``.npz`` of all inputs, which say what sizes are that the file leaves open.
        preprocess: what images are prepared by, as ``--preprocess`` has it, which says the same of theirs;
            None: as the file says.

    Raises:
        InputError: the model is at fault.
        UnsupportedError: the engine lacks some of its operators.
    """
    from .graph import onnx
    from .graph.model import Model
    from .io import model_inputs, model_metadata

    model = Model(onnx.load(source, input_shape=input_shape, constants=constants))
    if not input_shape:
        if inputs is not None:
            shapes = model_inputs.open_shapes(model, inputs)
        else:
            shapes = model_metadata.open_shapes(model, preprocess)
        if shapes:
            model = Model(onnx.load(source, input_shape=shapes, constants=constants))
    return Workload(model, partial(model_inputs.load, model))


#: The project's own workloads: name -> "module:attribute", imported when first asked for.
BUILT_IN: Mapping[str, str] = {
    "cifar10": "cnn_engine.workloads.cifar10:WORKLOAD",
    "ece408": "cnn_engine.workloads.fashion_mnist:WORKLOAD",
}

#: Second names of built-in workloads, which can be asked for too.
ALIASES: Mapping[str, str] = {
    "fashion_mnist": "ece408", "fashion-mnist": "ece408", "fashionmnist": "ece408",
    "cifar-10": "cifar10", "cifar_10": "cifar10",
}  # fmt: skip

#: What they are called elsewhere, for the hint of an error.
OTHER_NAMES: Mapping[str, str] = {**ALIASES, "mnist": "ece408", "cifar": "cifar10"}

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
    """Returns the workload called ``name``, or of which that is a second name (:data:`ALIASES`).

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
    if name.lower() in ALIASES:
        return get(ALIASES[name.lower()])
    raise not_one_of("network", names(), name, OTHER_NAMES)
