"""Preprocessing of images: resize, crop and normalise, as torchvision's transforms do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..errors import InputError, UnsupportedError, expected
from ..locks import cached_property

#: Longest side that an image is resized or cropped to.
LONGEST_SIDE = 8192

INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
ORIENTATIONS = ("exif", "ignore")


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of an image: resize, crop, and perhaps normalise.

    Attributes:
        resize: the shorter side, in pixels, or (rows, columns); None: not resized.
        crop: (rows, columns) or one number for both, about the centre, :attr:`fill` where the image is
            smaller; None: not cropped.
        mean, std: of the channels, where pixels are from 0 to 1; None: 0 and 1.
        interpolation: of :data:`INTERPOLATIONS`; the first two with antialiasing, as Pillow always has it.
        orientation: ``exif`` turns images upright before all else, as their EXIF says and browsers and phones
            show them; ``ignore`` takes pixels as they are stored, as torchvision's loader does.
        letterbox: in place of resize and crop, (rows, columns) or one number for both: the whole image as
            large as fits, its sides in proportion, in the middle of :attr:`fill`, as detectors are trained.
        fill: value, from 0 to 255, of pixels beyond the image.

    Raises:
        InputError: a value is at fault.
    """

    resize: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str = "bilinear"
    orientation: str = "exif"
    letterbox: tuple[int, int] | None = None
    fill: int = 0

    def __post_init__(self) -> None:
        for name in ("crop", "letterbox"):
            if isinstance(side := getattr(self, name), int):
                object.__setattr__(self, name, (side, side))
        sides = (self.resize,) if isinstance(self.resize, int) else self.resize or ()
        for name, values in (
            ("resize", sides), ("crop", self.crop or ()), ("letterbox", self.letterbox or ()),
        ):  # fmt: skip
            for side in values:
                if not isinstance(side, int) or not 1 <= side <= LONGEST_SIDE:
                    raise _expected(name, f"sides from 1 to {LONGEST_SIDE}", side)
        if self.letterbox is not None and (self.resize is not None or self.crop is not None):
            raise _expected("letterbox", "no resize and no crop with it", str(self))
        if not isinstance(self.fill, int) or not 0 <= self.fill <= 255:
            raise _expected("fill", "a whole number from 0 to 255", self.fill)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and not (values and all(map(math.isfinite, values))):
                raise _expected(name, "finite numbers, one per channel", values)
        if self.std is not None and not all(value > 0 for value in self.std):
            raise _expected("std", "numbers above 0", self.std)
        if self.mean and self.std and len(self.mean) != len(self.std):
            raise _expected("std", f"{len(self.mean)} numbers, as mean has", len(self.std))
        for name, known in (("interpolation", INTERPOLATIONS), ("orientation", ORIENTATIONS)):
            if getattr(self, name) not in known:
                raise _expected(name, f"one of {', '.join(known)}", getattr(self, name))

    @classmethod
    def parse(cls, text: str) -> Preprocess:
        """Returns the preprocessing that a ``--preprocess`` text names.

        ``imagenet`` (that of :data:`PRESETS`), or settings with commas between, perhaps after a preset's
        name: ``resize=232,crop=224,mean=0.485/0.456/0.406,std=0.229/0.224/0.225,interpolation=bicubic``.
        Sides are one number, or two as ``224x256`` (rows, columns); ``none`` undoes a preset's setting.
        ``none`` alone leaves images as they are.

        Raises:
            InputError: names what is at fault.
        """
        if text.strip() == "none":
            return cls()
        found: dict[str, Any] = {}
        known = [field.name for field in fields(cls)]
        for index, word in enumerate(text.split(",")):
            key, equals, value = word.strip().partition("=")
            if not equals and index == 0 and key in PRESETS:
                found = {name: getattr(PRESETS[key], name) for name in known}
            elif not equals or key not in known:
                settings = f"settings such as resize=256,crop=224 ({', '.join(known)})"
                wanted = f"{' or '.join(PRESETS)}, or {settings}"
                raise expected("preprocess", wanted, repr(word))
            else:
                found[key] = None if value == "none" and key != "fill" else _VALUES[key](key, value)
        return cls(**found)

    def __str__(self) -> str:
        """The settings as :meth:`parse` reads them; a preset by its name."""
        for name, preset in PRESETS.items():
            if self == preset:
                return name
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                joint = "x" if field.name in ("resize", "crop", "letterbox") else "/"
                text = joint.join(map(str, value)) if isinstance(value, tuple) else str(value)
                words.append(f"{field.name}={text}")
        return ",".join(words) or "none"

    @property
    def normalises(self) -> bool:
        """Whether a mean or a standard deviation is given, so that the result cannot be pixels."""
        return self.mean is not None or self.std is not None

    @property
    def size(self) -> tuple[int, int] | None:
        """(rows, columns) of every result; None: they follow from the image."""
        return self.window or (self.resize if isinstance(self.resize, tuple) else None)

    @property
    def window(self) -> tuple[int, int] | None:
        """(rows, columns) that are kept about the centre of a resized image; None: all of it."""
        return self.letterbox or self.crop

    def resized(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the sides of an image when it is resized.

        Those of :attr:`resize` are rounded as torchvision rounds them, those of :attr:`letterbox` to the
        nearest, as YOLO's loaders do.
        """
        if self.letterbox is not None:
            scale = min(self.letterbox[0] / rows, self.letterbox[1] / columns)
            return max(round(rows * scale), 1), max(round(columns * scale), 1)
        if not isinstance(self.resize, int):
            return self.resize or (rows, columns)
        longer = int(self.resize * max(rows, columns) / min(rows, columns))
        return (longer, self.resize) if columns <= rows else (self.resize, longer)

    def placement(self, rows: int, columns: int) -> Placement:
        """Returns where the pixels of an upright image of ``rows`` x ``columns`` are in the result."""
        height, width = self.resized(rows, columns)
        kept = self.window or (height, width)
        top, left = (first_of(*sides) for sides in zip((height, width), kept, strict=True))
        return Placement((rows, columns), (height, width), kept, -top, -left)

    def check(self, shape: tuple[int, ...], option: str = "preprocess") -> None:
        """Checks that results fit images of ``shape``, [C, H, W].

        Raises:
            InputError: they cannot.
        """
        if len(shape) != 3 or shape[0] not in (1, 3):
            wanted = "a network of images [1 or 3, H, W], which files of images fill"
            raise UnsupportedError(f"{option}: expected {wanted}, found {list(shape)}")
        if self.size is not None and self.size != tuple(shape[1:]):
            found = "x".join(map(str, self.size))
            raise expected(option, f"images of {shape[1]}x{shape[2]}, as the network reads", found)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != shape[0]:
                form = "/".join(["0.5"] * shape[0])
                wanted = f"as many numbers as channels, such as {form}"
                raise expected(f"{option}: {name}", wanted, len(values))

    def normalised(self, pixels: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Returns float32 [N, C, H, W] of uint8 ``pixels`` [N, C, H, W]: from 0 to 1, then (x - mean) / std.

        The same float32 bits as torchvision's ``convert_image_dtype`` and ``normalize`` give on a CPU.
        """
        if out is None:
            out = np.empty(pixels.shape, np.float32)
        tables = self.tables
        for channel in range(pixels.shape[1]):
            table = tables[channel % len(tables)]
            # "clip" lets NumPy write into `out` without a buffer; no pixel is out of range.
            for image, row in zip(pixels, out, strict=True):
                np.take(table, image[channel], out=row[channel], mode="clip")
        return out

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """The result for each of the 256 values of a pixel, one table per channel (or one for all)."""
        values = np.arange(256, dtype=np.float32) / np.float32(255)
        channels = len(self.mean or self.std or (0.0,))
        mean = np.float32(self.mean or (0.0,) * channels)
        std = np.float32(self.std or (1.0,) * channels)
        return [(values - m) / s for m, s in zip(mean, std, strict=True)]


@dataclass(frozen=True)
class Placement:
    """Position of an image within a network's input.

    Attributes:
        image: (rows, columns) of the upright image.
        resized: (rows, columns) that it is resized to.
        size: (rows, columns) of what the network reads.
        top, left: the resized image's first row and column in it; below 0 where it was cropped.
    """

    image: tuple[int, int]
    resized: tuple[int, int]
    size: tuple[int, int]
    top: int
    left: int

    def to_network(self, points: np.ndarray) -> np.ndarray:
        """Returns points of the image, float [..., 2 * K] as x, y, ..., in the network's pixels."""
        return points * self._scale(points) + self._offset(points)

    def to_image(self, points: np.ndarray) -> np.ndarray:
        """Returns points of the network's pixels, float [..., 2 * K] as x, y, ..., in the image's."""
        return (points - self._offset(points)) / self._scale(points)

    def _scale(self, points: np.ndarray) -> np.ndarray:
        # Not the exact ratio of the letterbox: sides were rounded to whole pixels.
        scale = self.resized[1] / self.image[1], self.resized[0] / self.image[0]
        return np.tile(scale, points.shape[-1] // 2)

    def _offset(self, points: np.ndarray) -> np.ndarray:
        return np.tile((float(self.left), float(self.top)), points.shape[-1] // 2)


def first_of(side: int, crop: int) -> int:
    """Returns the first row or column of a crop: a half rounds to even inside, and to the left outside."""
    return round((side - crop) / 2) if crop <= side else -((crop - side) // 2)


#: What ``--preprocess`` knows by name: what torchvision's ImageNet networks were first measured with.
PRESETS = {
    "imagenet": Preprocess(256, (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def _expected(name: str, wanted: str, found: object) -> InputError:
    return expected(f"preprocess: {name}", wanted, found)


def _side(key: str, text: str) -> int | tuple[int, int]:
    if not re.fullmatch(r"[0-9]{1,6}(x[0-9]{1,6})?", text):
        raise _expected(key, "a side such as 224, or 224x256 (rows, columns)", repr(text))
    sides = tuple(map(int, text.split("x")))
    return sides if len(sides) == 2 else sides[0]


def _whole(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", text):
        raise _expected(key, "a whole number from 0 to 255", repr(text))
    return int(text)


def _numbers(key: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split("/"))
    except ValueError:
        raise _expected(key, "numbers such as 0.485/0.456/0.406", repr(text)) from None


_VALUES: dict[str, Callable[[str, str], Any]] = {
    "resize": _side,
    "crop": _side,
    "letterbox": _side,
    "fill": _whole,
    "mean": _numbers,
    "std": _numbers,
    "interpolation": lambda key, text: text,
    "orientation": lambda key, text: text,
}
