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
        crop: (rows, columns) or one number for both, about the centre, zeros where the image is smaller;
            None: not cropped.
        mean, std: of the channels, where pixels are from 0 to 1; None: 0 and 1.
        interpolation: of :data:`INTERPOLATIONS`; the first two with antialiasing, as Pillow always has it.
        orientation: ``exif`` turns images upright before all else, as their EXIF says and browsers and phones
            show them; ``ignore`` takes pixels as they are stored, as torchvision's loader does.

    Raises:
        InputError: a value is at fault.
    """

    resize: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str = "bilinear"
    orientation: str = "exif"

    def __post_init__(self) -> None:
        if isinstance(self.crop, int):
            object.__setattr__(self, "crop", (self.crop, self.crop))
        sides = (self.resize,) if isinstance(self.resize, int) else self.resize or ()
        for name, values in (("resize", sides), ("crop", self.crop or ())):
            for side in values:
                if not isinstance(side, int) or not 1 <= side <= LONGEST_SIDE:
                    raise _expected(name, f"sides from 1 to {LONGEST_SIDE}", side)
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
                found[key] = None if value == "none" else _VALUES[key](key, value)
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
                joint = "x" if field.name in ("resize", "crop") else "/"
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
        return self.crop or (self.resize if isinstance(self.resize, tuple) else None)

    def resized(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the sides of an image as :attr:`resize` makes them, rounded as torchvision rounds them."""
        if not isinstance(self.resize, int):
            return self.resize or (rows, columns)
        longer = int(self.resize * max(rows, columns) / min(rows, columns))
        return (longer, self.resize) if columns <= rows else (self.resize, longer)

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


def _numbers(key: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split("/"))
    except ValueError:
        raise _expected(key, "numbers such as 0.485/0.456/0.406", repr(text)) from None


_VALUES: dict[str, Callable[[str, str], Any]] = {
    "resize": _side,
    "crop": _side,
    "mean": _numbers,
    "std": _numbers,
    "interpolation": lambda key, text: text,
    "orientation": lambda key, text: text,
}
