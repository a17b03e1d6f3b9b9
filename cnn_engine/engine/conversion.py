"""Converts arguments of a call that are not arrays of the network's types: lists, numbers, Pillow images.

One rule: an array of an input's own type is read where it is, and all else is converted first, which takes a
copy. Whole numbers are pixels (uint8, from 0 to 255), floating ones are float32; images of Pillow's are
prepared as files of images are. Arrays on a device are never converted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import expected
from ..graph.form import Form
from ..graph.model import Model
from ..graph.network import Network


def images_of(form: Form, network: Network | Model, given: Any) -> Any:
    """Returns ``given`` as an array that :func:`.arguments.images_of` can check.

    Raises:
        InputError: it is a list or an image that cannot be converted, or a path.
    """
    if len(form.inputs) != 1:
        return given
    (value,) = form.inputs
    if len(value.shape) != 4 or value.dtype not in ("float32", "uint8"):
        return as_array(value.name, given, value.dtype)
    first = given[0] if isinstance(given, (list, tuple)) and given else given
    if isinstance(first, (str, os.PathLike)):
        wanted = "an array or images of Pillow's (cnn_engine.Classifier takes paths of photos)"
        raise expected("images", wanted, repr(os.fspath(first)))
    if _are_pictures(given):
        return _pixels_of(network, given if isinstance(given, (list, tuple)) else [given])
    array = _host_array("images", given)
    if array is None or array.dtype.name in ("float32", "uint8"):
        return given if array is None else array
    whole = array.dtype.kind in "iu"
    return as_array("images", array, "uint8" if whole else "float32")


def inputs_of(form: Form, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``given`` with each value converted to an array of its input's type.

    Raises:
        InputError: a list or an array cannot be converted.
    """
    found = dict(given)
    for place, value in enumerate(form.inputs):
        if value.name not in given:
            continue
        array = _host_array(f"inputs: {value.name}", given[value.name])
        pixels = place == 0 and array is not None and array.dtype == np.uint8
        if array is not None and not pixels:  # pixels are for the network to take or refuse
            found[value.name] = as_array(f"inputs: {value.name}", array, value.dtype)
    return found


def as_array(name: str, given: Any, dtype: str) -> Any:
    """Returns numbers as an array of ``dtype``: lists, and arrays of another type whose values it has.

    What is of ``dtype`` already, and what cannot be converted, is returned as it is.

    Raises:
        InputError: lists are of unequal lengths, or a value is none of ``dtype``.
    """
    array = _host_array(name, given)
    if array is None or array.dtype == np.dtype(dtype):
        return given if array is None else array
    kind, wanted = array.dtype.kind, np.dtype(dtype)
    if array.size == 0 and kind in "iuf":
        return np.ascontiguousarray(array, wanted)
    if kind in "iu" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            values = f"whole numbers from {limits.min} to {limits.max}"
            raise expected(name, values, low if low < limits.min else high)
    elif kind in "iuf" and wanted.kind == "f":
        with np.errstate(over="ignore"):
            found = np.ascontiguousarray(array, wanted)
        if kind != "f" and not np.array_equal(found, array):
            raise expected(name, f"whole numbers that {dtype} has", array.dtype)
        if not np.array_equal(np.isfinite(found), np.isfinite(array)):
            raise expected(name, f"numbers in the range of {dtype}", f"{np.abs(array).max():g}")
        return found
    else:
        return array
    return np.ascontiguousarray(array, wanted)


def _host_array(name: str, given: Any) -> np.ndarray | None:
    """Returns what is in the host's memory as an array of NumPy's; None: it is elsewhere, or no array."""
    if isinstance(given, np.ndarray):
        return given
    if isinstance(given, (list, tuple, int, float)):
        try:
            return np.array(given)
        except ValueError:
            raise expected(name, "lists of equal lengths, of numbers", "others") from None
    try:
        if given.__dlpack_device__()[0] == 1:  # kDLCPU
            return np.from_dlpack(given)
    except Exception:  # who looks at it next says what is wrong
        pass
    return None


def _are_pictures(given: Any) -> bool:
    """Whether ``given`` is an image of Pillow's, or a list of some."""
    pillow = sys.modules.get("PIL.Image")  # without it, there is none
    if pillow is None:
        return False
    if isinstance(given, (list, tuple)):
        return bool(given) and all(isinstance(one, pillow.Image) for one in given)
    return isinstance(given, pillow.Image)


def _pixels_of(network: Network | Model, pictures: Any) -> np.ndarray:
    from ..io import images
    from ..io.model_metadata import image_settings

    settings = image_settings(network, None, None)
    prepare, shape = settings.preprocess, network.input_shape
    pixels = np.stack([images.pixels_of(one, prepare, shape, "images") for one in pictures])
    return prepare.normalised(pixels) if settings.dtype == "float32" else pixels
