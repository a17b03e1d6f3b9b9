"""Inputs of a model of the user's own: from NumPy's files, or random."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import expected
from ..graph.dims import Dim, holds_dims
from ..graph.form import Form, form_of
from ..graph.graph import Graph, Value
from ..graph.model import Model
from ..operators.gather import Gather
from ..workload import Dataset, Samples
from .files import describe_os_error

#: Images that are made unless said, and bytes that they and what comes out for them may take together.
IMAGES = 32
BYTES = 256 << 20


def load(model: Model, source: str, images: int | None) -> Dataset:
    """Returns the inputs of a model: one array of images, or :class:`~cnn_engine.workload.Samples`.

    Args:
        source: ``auto`` or ``synthetic`` for random ones, or the path of a ``.npy`` or ``.npz``.
        images: how many; None: all.

    Raises:
        InputError: the file is at fault, or has too few.
    """
    form = form_of(model, model.base)
    if form.sizes_of is not None:
        name, shape = next((v.name, v.shape) for v in model.inputs if holds_dims(v.shape[1:]))
        numbers = next(v.shape for v in form.inputs if v.name == name)
        like = ",".join(map(str, numbers))
        raise expected(
            f"{model.name}: inputs",
            f"sizes to measure at: --input-shape {name}={like}, or --inputs FILE.npz",
            f"{name} {list(shape)}",
        )
    one = form.batch if _has_images_elsewhere(model) else None
    if source in ("auto", "synthetic"):
        return _random(form, model.base, images, one)
    return _read(form, source, images, one)


def _has_images_elsewhere(model: Model) -> bool:
    """Whether an input has the images in another dimension than the first, such as a state of an LSTM.

    It has no part in memory for some of them: all go in one pass.
    """
    batch = model.base.sizes.batch
    dims = (dim for value in model.inputs for dim in value.shape[1:])
    return any(isinstance(dim, Dim) and batch in dim.symbols for dim in dims)


def open_shapes(model: Model, path: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a file's arrays by input, of a model that leaves sizes open beside the batch.

    Raises:
        InputError: the file is at fault.
    """
    return {} if form_of(model, model.base).sizes_of is None else shapes_in(model, path)


def shapes_in(model: Model, path: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a file's arrays by input, of those that it has.

    Raises:
        InputError: the file is at fault.
    """
    found = _arrays(path)
    if isinstance(found, np.ndarray):
        found = {model.base.inputs[0].name: found}
    shapes = {v.name: found[v.name].shape for v in model.base.inputs if v.name in found}
    for value in model.base.inputs:  # of a batch that the file states there may be several
        if value.name in shapes and value.shape and isinstance(value.shape[0], int):
            shapes[value.name] = (value.shape[0], *shapes[value.name][1:])
    return shapes


def _random(form: Form, graph: Graph, images: int | None, one: int | None) -> Dataset:
    """Returns inputs by their shapes and types.

    Args:
        one: as many images as there must be, or None.
    """
    once = not form.any_batch and not form.rows
    values = (*form.inputs, *form.outputs)
    nbytes = sum(value.nbytes for value in values) // max(form.batch, 1)
    count = images
    if count is None:
        count = 1 if once else max(min(IMAGES, BYTES // max(nbytes, 1)), 1)
        count = count if form.any_batch else -(-count // form.batch) * form.batch
    if one is not None:
        count = one if images is None else images
        _check_one(one, count)
    if once and count != 1:
        raise expected("images", "1, for all inputs of the network are one sample", count)
    generator = np.random.default_rng(0)
    made = {
        value.name: _values(
            generator, _shape(form, value, count), value.dtype, _below(graph, value.name)
        )
        for value in form.inputs
    }
    if form.is_images_to_rows:
        note = "images: random, since none are given; --data PATH.npy reads some"
        return Dataset("random images", "synthetic", *made.values(), None, note)
    note = "inputs: random, since none are given; --inputs FILE.npz reads them by name"
    return Dataset("random inputs", "synthetic", samples(form, made, count), None, note)


def _check_one(one: int | None, count: int) -> None:
    """Raises InputError where all images go in one pass, and there are others than it takes."""
    if one is not None and count != one:
        raise expected("images", f"{one}, for an input has them in another dimension than 0", count)


def samples(form: Form, made: Mapping[str, np.ndarray], count: int) -> Samples:
    """Returns the arrays of all inputs as ``count`` images; those without a row for each are shared."""
    return Samples(made, count, frozenset(made) - form.rows.keys())


def _shape(form: Form, value: Value, count: int) -> tuple[int, ...]:
    return (count, *form.rows[value.name]) if value.name in form.rows else value.shape


def _below(graph: Graph, name: str) -> int:
    """Returns what whole numbers of an input stay below: the rows of the tables that they index; else 2."""
    sizes = [
        graph.values[node.inputs[0]].shape[node.op.axis]
        for node in graph.consumers[name]
        if isinstance(node.op, Gather) and node.inputs[1] == name
    ]
    return max(min(sizes, default=2), 1)


def _values(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: str, below: int
) -> np.ndarray:
    kind = np.dtype(dtype).kind
    if kind == "f":
        return np.asarray(generator.standard_normal(shape, np.float32)).astype(dtype, copy=False)
    if dtype == "uint8":
        return np.asarray(generator.integers(0, 256, shape, np.uint8))
    return np.asarray(generator.integers(0, 2 if kind == "b" else below, shape)).astype(dtype)


def _read(form: Form, path: str, images: int | None, one: int | None) -> Dataset:
    found = _arrays(path)
    inputs = {value.name: value for value in form.inputs}
    alone = next(iter(inputs)) if len(inputs) == 1 else None
    if isinstance(found, np.ndarray):
        if alone is None:
            raise expected(path, f"a .npz with the arrays {', '.join(inputs)}", "one array")
        found = {alone: found}
    labels = None if "labels" in inputs else found.pop("labels", None)
    if form.is_images_to_rows:
        if "images" not in found and alone not in found:
            raise expected(path, "an array called images", ", ".join(found) or "none")
        found = {alone: found["images" if "images" in found else alone]}
    if found.keys() != inputs.keys():
        raise expected(path, f"the arrays {', '.join(inputs)}", ", ".join(found) or "none")
    count = check(form, path, found)
    if images is not None and images > count:
        raise expected("images", f"at most {count}, as {path} has", images)
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != (count,)):
        wanted = f"labels, a whole number each of {count} images"
        raise expected(path, wanted, f"{labels.dtype} {list(labels.shape)}")
    if labels is not None and labels.min() < 0:
        raise expected(path, "labels from 0 on", labels.min())
    taken = count if images is None else images
    _check_one(one, taken)
    made = {name: np.require(found[name], requirements="C") for name in inputs}
    some = samples(form, made, count)[:taken]
    given = some.arrays[alone] if form.is_images_to_rows else some
    return Dataset(Path(path).name, path, given, None if labels is None else labels[:taken])


def check(form: Form, path: str, found: Mapping[str, np.ndarray]) -> int:
    """Returns how many images arrays are for, by name those of all inputs.

    Args:
        path: what messages call their source.

    Raises:
        InputError: one is of another type or shape, is for other images, or holds what is not finite.
    """
    count: int | None = None
    for value in form.inputs:
        array, dtype = found[value.name], value.dtype
        if form.is_images_to_rows:  # as messages have called them all along
            if array.dtype.name != dtype:
                raise expected(path, f"images of type {dtype}", array.dtype.name)
            if array.ndim != 4 or not len(array):
                found_shape = f"shape {list(array.shape)}"
                raise expected(path, "images [N, C, H, W], at least one", found_shape)
        called = value.name if path == value.name else f"{path}: {value.name}"
        if array.dtype.name != dtype:
            raise expected(called, f"type {dtype}", array.dtype.name)
        row = form.rows.get(value.name)
        wanted = list(value.shape) if row is None else ["N", *row]
        fits = array.shape == value.shape if row is None else array.shape[1:] == row and array.ndim
        if not fits:
            words = ", ".join(map(str, wanted))
            raise expected(called, f"shape [{words}]", list(array.shape))
        if row is not None:
            count = len(array) if count is None else count
            if len(array) != count:
                raise expected(called, f"{count} images, as {form.inputs[0].name} has", len(array))
            if not count or (not form.any_batch and count % form.batch):
                least = (
                    "at least one image" if form.any_batch else f"a multiple of {form.batch} images"
                )
                raise expected(called, least, count)
        if array.dtype.kind == "f" and not np.isfinite(array).all():  # no check could tell of them
            rows = np.isfinite(array).reshape(len(array), -1) if row is not None else None
            where = "others" if rows is None else f"others in image {int((~rows.all(1)).argmax())}"
            raise expected(path, "finite numbers", f"{where} (the first is 0)" if row else where)
    return 1 if count is None else count


def _arrays(path: str) -> np.ndarray | dict[str, np.ndarray]:
    """Reads one of NumPy's files: an array, or arrays by name."""
    try:
        with open(path, "rb") as file:  # of a broken one NumPy leaves its own open
            found = np.load(file, allow_pickle=False)
            return found if isinstance(found, np.ndarray) else {n: found[n] for n in found.files}
    except MemoryError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy have a dozen kinds for broken bytes
        found = f"{path}: {describe_os_error(error) if isinstance(error, OSError) else error}"
        if (
            "pickle" in found
        ):  # NumPy takes any bytes it does not know for one, and names a way to run it
            found = f"{path}: neither numbers nor images"
        raise expected(
            "data", "auto, synthetic or a .npy or .npz file, or files of images", found
        ) from None
