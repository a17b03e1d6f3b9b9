"""Image files to arrays: decoded by Pillow, resized and cropped as torchvision does.

What a network reads is made in two steps. :func:`decode` makes pixels, uint8 [C, H, W], equal to those of
torchvision's transforms on PIL images; :meth:`.Preprocess.normalised` makes float32 of them.
:mod:`.image_workers` decodes many files in processes.
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import CnnEngineError, InputError, UnsupportedError, expected
from ..locks import ForkSafeLock
from . import resample
from .files import describe_os_error
from .preprocess import Preprocess, first_of

#: Names of files that are taken for images: those of torchvision's ``ImageFolder``, and GIF.
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp", ".gif")

#: What Pillow may read: none of the formats that it hands to other programs.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")

#: Of one image, as stored and as resized: Pillow's own limit against decompression bombs.
MOST_PIXELS = 2**30 // 12

#: Modes of Pillow with 8 bits a channel or less, which it converts to RGB or grey without loss of range.
_MODES = (
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
)

#: EXIF's tag of the orientation, and how pixels of each but the first become upright; as Pillow's
#: ``ImageOps.exif_transpose``.
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}

#: TIFF's tag of the bits of each channel.
_BITS_PER_SAMPLE = 258


#: A path, or the bytes of a file with the name that errors call it.
File = str | os.PathLike[str] | tuple[str, bytes]


def decode(file: File, preprocess: Preprocess, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the pixels of one file, resized and cropped.

    Colours become grey for one channel, and any other mode RGB for three, as Pillow converts: transparency
    is dropped, and CMYK is taken without a profile. The image is turned upright first, as its EXIF says,
    unless :attr:`Preprocess.orientation` is ``ignore``; EXIF that is broken says nothing.

    Args:
        file: a path, or (name, bytes).
        preprocess: its mean and std are left to :meth:`Preprocess.normalised`.
        shape: [C, H, W], C being 1 or 3.

    Returns:
        uint8 ``shape``, C-contiguous.

    Raises:
        InputError: the file cannot be read, is no image, is broken, has more than 8 bits a channel or more
            than :data:`MOST_PIXELS` pixels, or the result is not of ``shape``.
        UnsupportedError: Pillow is not installed.
    """
    name = str(file[0]) if isinstance(file, tuple) else os.fspath(file)
    pixels = _read(
        file, name, lambda pillow, image: _prepared(pillow, image, name, preprocess, shape[0])
    )
    _check_shape(pixels, preprocess, shape, name)
    return pixels


def picture(image: Any, orientation: str = "exif", name: str = "image") -> Any:
    """Returns an image to draw on, in Pillow's mode ``RGB``, turned upright as :func:`decode` does.

    Args:
        image: a path, (name, bytes), an image of Pillow's, or uint8 [H, W] or [H, W, 3].
        orientation: of :class:`Preprocess`.
        name: what errors call an image that has no path.

    Raises:
        InputError, UnsupportedError: as :func:`decode` and :func:`pixels_of`.
    """

    def upright(pillow: Any, found: Any) -> Any:
        return _upright(pillow, found, name, orientation, "RGB")

    if isinstance(image, (str, os.PathLike, tuple)):
        name = str(image[0]) if isinstance(image, tuple) else os.fspath(image)
        return _read(image, name, upright).copy()
    return _of_memory(image, name, upright)


def _read(file: File, name: str, work: Callable[[Any, Any], Any]) -> Any:
    """Returns what ``work`` makes of the image in a file; what goes wrong is one line."""
    image_module = require_pillow()
    try:
        with (
            open(file, "rb") if not isinstance(file, tuple) else io.BytesIO(file[1]) as stream,
            _opened_jpeg(stream) or _opened(image_module, stream) as image,
        ):
            return work(image_module, image)
    except CnnEngineError:
        raise
    except MemoryError:
        raise InputError(f"{name}: expected an image that fits in memory") from None
    except Exception as error:  # on broken files, Pillow's readers fail in any way
        raise expected(name, "an image", _reason(error, name)) from error


def is_picture(image: Any) -> bool:
    """Whether ``image`` is one of Pillow's, without importing Pillow for those that are not."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(image, pillow.Image)


def pixels_of(
    image: Any, preprocess: Preprocess, shape: tuple[int, ...], name: str = "image"
) -> np.ndarray:
    """Returns the pixels of an image in memory, resized and cropped, as :func:`decode` does a file's.

    Args:
        image: an image of Pillow's, or uint8 [H, W] or [H, W, 3].
        preprocess, shape: as for :func:`decode`.
        name: what errors call it.

    Returns:
        uint8 ``shape``, C-contiguous.

    Raises:
        InputError: it is no such image, or the result is not of ``shape``.
        UnsupportedError: Pillow is not installed.
    """
    pixels = _of_memory(
        image, name, lambda pillow, found: _prepared(pillow, found, name, preprocess, shape[0])
    )
    _check_shape(pixels, preprocess, shape, name, "preprocess= of cnn_engine.Classifier")
    return pixels


def _of_memory(image: Any, name: str, work: Callable[[Any, Any], Any]) -> Any:
    """Returns what ``work`` makes of an image in memory."""
    image_module = require_pillow()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or not (
            image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)
        ):
            found = f"{image.dtype} {list(image.shape)}"
            raise expected(name, "uint8 [H, W] or [H, W, 3] (rows, columns, colours)", found)
        _check_pixels(name, image.shape[1::-1])
        image = image_module.fromarray(image)
    elif not is_picture(image):
        raise expected(name, "an image of Pillow's or an array", type(image).__name__)
    try:
        return work(image_module, image)
    except (OSError, SyntaxError, ValueError) as error:  # of files that Pillow reads only now
        if isinstance(error, CnnEngineError):
            raise
        raise expected(name, "an image", _reason(error, name)) from error


def _check_shape(
    pixels: np.ndarray,
    preprocess: Preprocess,
    shape: tuple[int, ...],
    name: str,
    option: str = "--preprocess",
) -> None:
    if pixels.shape != tuple(shape):
        found = f"{pixels.shape[1]}x{pixels.shape[2]}"
        hint = "" if preprocess.size else f" ({option} resizes and crops)"
        raise expected(name, f"an image of {shape[1]}x{shape[2]}{hint}", found)


_opening = ForkSafeLock()


def _prepared(
    pillow: Any, image: Any, name: str, preprocess: Preprocess, channels: int
) -> np.ndarray:
    image = _upright(pillow, image, name, preprocess.orientation, "RGB" if channels == 3 else "L")
    rows, columns = preprocess.resized(image.height, image.width)
    _check_pixels(name, (columns, rows))
    if (columns, rows) != image.size:
        if _quick(preprocess, (image.height, image.width)):
            pixels = np.asarray(image).reshape(image.height, image.width, channels)
            return _resampled(pixels, preprocess)
        method = getattr(pillow.Resampling, preprocess.interpolation.upper())
        image = image.resize((columns, rows), method)
    pixels = np.asarray(_cropped(pillow, image, preprocess))
    return np.ascontiguousarray(pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1))


def _upright(pillow: Any, image: Any, name: str, orientation: str, mode: str) -> Any:
    """Returns an image of Pillow's in ``mode``, turned as its EXIF says unless that is ignored."""
    _check_pixels(name, image.size)
    if (deep := _deep(image)) is not None:
        raise expected(name, "an image of at most 8 bits a channel", deep)
    image.load()  # which turns a TIFF upright
    turn = _turn(image) if orientation == "exif" else None
    if image.mode != mode:
        image = image.convert(mode)
    return image if turn is None else image.transpose(pillow.Transpose[turn])


def _cropped(pillow: Any, image: Any, preprocess: Preprocess) -> Any:
    window = _window(preprocess, *image.size)
    found = image.crop(window)
    if preprocess.fill and found.size != image.size:  # Pillow's crop has zeros beyond the image
        filled = pillow.new(image.mode, found.size, (preprocess.fill,) * len(image.getbands()))
        filled.paste(image, (-window[0], -window[1]))
        return filled
    return found


def _opened_jpeg(stream: Any) -> Any:
    """Returns what Pillow's ``open`` makes of most JPEGs, without its lock below; None: it has to tell."""
    from PIL.JpegImagePlugin import JpegImageFile

    begins = stream.read(3)
    stream.seek(0)
    if begins == b"\xff\xd8\xff":
        with suppress(Exception):  # on broken files, Pillow's readers fail in any way
            return JpegImageFile(stream)
    stream.seek(0)
    return None


def _opened(pillow: Any, stream: Any) -> Any:
    # Filters of warnings belong to all threads, so one at a time changes them.
    with _opening, warnings.catch_warnings():
        # Pillow warns from its limit and fails from twice that; the check of pixels is of both, in our words.
        warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
        return pillow.open(stream, formats=FORMATS)


def _deep(image: Any) -> str | None:
    """Returns what an image has more than 8 bits a channel by, or None.

    Pillow drops the lower bits of colours as it decodes: its mode is one of 8 bits then.
    """
    if image.mode not in _MODES:
        return f"mode {image.mode}"
    bits = 8
    if image.format == "TIFF":
        bits = max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,)))
    elif image.format == "PNG" and any(";16" in str(tile[3]) for tile in image.tile):
        bits = 16
    elif image.format == "PPM":
        largest = max((tile[3][-1] for tile in image.tile if isinstance(tile[3], tuple)), default=0)
        bits = max(int(largest).bit_length(), bits)
    return f"{bits} bits" if bits > 8 else None


def _turn(image: Any) -> str | None:
    """Returns the transpose of Pillow's that makes an image upright; None: it is, or its EXIF is broken."""
    with suppress(Exception):  # on broken EXIF, Pillow's reader fails in any way
        return _UPRIGHT.get(image.getexif().get(_ORIENTATION))
    return None


def is_upright(jpeg: bytes) -> bool:
    """Whether the pixels of a JPEG are as they are to be seen, by its EXIF, or by XMP where that has none."""
    head = _segments(jpeg)
    if b"Exif\0\0" not in head and b"Orientation" not in head:
        return True
    image = _opened_jpeg(io.BytesIO(jpeg))
    return image is None or _turn(image) is None


def _segments(jpeg: bytes) -> bytes:
    """Returns what is before the pixels of a JPEG, all of it where that cannot be told."""
    place = 2
    while jpeg[place : place + 1] == b"\xff" and jpeg[place : place + 2] != b"\xff\xda":
        filled = jpeg[place + 1 : place + 2] == b"\xff"
        place += 1 if filled else 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
    return jpeg[:place] if jpeg[place : place + 2] == b"\xff\xda" else jpeg


def _window(preprocess: Preprocess, width: int, height: int) -> tuple[int, int, int, int]:
    """Returns (left, top, right, bottom) of what is kept of a resized image; as ``center_crop``."""
    rows, columns = preprocess.window or (height, width)
    left, top = first_of(width, columns), first_of(height, rows)
    return left, top, left + columns, top + rows


def quick_pixels(image: np.ndarray, preprocess: Preprocess) -> np.ndarray | None:
    """Returns ``image``, uint8 [H, W, C], resized and cropped, [C, rows, columns]; None: Pillow has to do it.

    The pixels are those of :func:`decode`, perhaps in the memory of ``image``.
    """
    if preprocess.resize is preprocess.window is None:
        return image.transpose(2, 0, 1)
    height, width = image.shape[:2]
    size = preprocess.resized(height, width)
    if size == (height, width):
        left, top, right, bottom = _window(preprocess, width, height)
        if left < 0 or top < 0 or right > width or bottom > height:
            return None
        return image[top:bottom, left:right].transpose(2, 0, 1)
    return _resampled(image, preprocess) if _quick(preprocess, (height, width)) else None


def _quick(preprocess: Preprocess, size: tuple[int, int]) -> bool:
    """Whether images of a size, (rows, columns), can be resized by :mod:`.resample`."""
    method, to = preprocess.interpolation, preprocess.resized(*size)
    if method not in resample.METHODS or to[0] * to[1] > MOST_PIXELS:
        return False
    left, top, right, bottom = _window(preprocess, to[1], to[0])
    inside = left >= 0 and top >= 0 and right <= to[1] and bottom <= to[0]
    return inside and resample.agrees(size, to, method)


def _resampled(image: np.ndarray, preprocess: Preprocess) -> np.ndarray:
    rows, columns = preprocess.resized(*image.shape[:2])
    left, top, right, bottom = _window(preprocess, columns, rows)
    crop = top, left, bottom - top, right - left
    return resample.resampled(image, (rows, columns), crop, preprocess.interpolation)


def _check_pixels(name: str, size: tuple[int, int]) -> None:
    if min(size) < 1 or size[0] * size[1] > MOST_PIXELS:
        raise expected(name, f"an image of 1 to {MOST_PIXELS:,} pixels", f"{size[0]}x{size[1]}")


def _reason(error: Exception, name: str) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"none that can be read ({describe_os_error(error)})"
    words = " ".join(str(error).split()) or type(error).__name__
    if "cannot identify image file" in words:
        return f"none that Pillow reads ({', '.join(FORMATS)})"
    return re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "the file", words)


def require_pillow() -> Any:
    """Returns the module ``PIL.Image``; raises UnsupportedError where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError(
            f"images: expected the package Pillow to decode them, found none ({error}); "
            "pip install 'cnn-engine[images]'"
        ) from error
    return Image
