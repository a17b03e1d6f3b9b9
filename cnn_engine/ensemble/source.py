"""Sources of encoded samples, and their decoding to pixels."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import InputError, expected
from ..io import images as image_files
from ..io.files import describe_os_error
from ..io.preprocess import LONGEST_SIDE
from ..workload import Dataset, Workload
from ..workloads.cifar10.dataset import JpegTar

#: Labels of samples that have none, and of those that could not be decoded.
UNKNOWN, CORRUPT = -1, -2

#: Different pictures among synthetic JPEGs; further samples are these again.
SYNTHETIC_KINDS = 64
SYNTHETIC_SAMPLES = 1000


class Source(Protocol):
    """Samples by number; may be used by several threads at once.

    Attributes:
        name: for reports.
        shape: of decoded pixels, [C, H, W].
        labels: int32 [N], :data:`UNKNOWN` where there is none.
    """

    name: str
    shape: tuple[int, ...]
    labels: np.ndarray

    def __len__(self) -> int: ...

    def read(self, sample: int) -> Any:
        """Returns the encoded sample. Raises :class:`InputError`."""

    def decode(self, sample: int, encoded: Any, out: np.ndarray) -> None:
        """Writes the sample's pixels to ``out``, uint8 ``shape``. Raises :class:`InputError`."""


class _Jpegs:
    """Decodes what ``read`` gives: bytes of a JPEG, or of another format that Pillow reads."""

    shape: tuple[int, ...]
    preprocess: image_files.Preprocess

    def where(self, sample: int) -> str:
        raise NotImplementedError

    def decode(self, sample: int, encoded: bytes, out: np.ndarray) -> None:
        out[...] = image_files.decode((self.where(sample), encoded), self.preprocess, self.shape)


class TarSource(_Jpegs):
    """The JPEG copy of a data set in a tar; see :class:`JpegTar`."""

    def __init__(self, path: Path, preprocess: image_files.Preprocess, shape: tuple[int, ...]):
        self._tar = JpegTar(path, os.path.getsize(path))
        self.name, self.path = path.name, path
        self.preprocess, self.shape = preprocess, shape
        self.labels = self._tar.labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self._tar)

    def where(self, sample: int) -> str:
        return f"{self.path}: image {sample} (the first is 0)"

    def read(self, sample: int) -> bytes:
        return self._tar.jpeg(sample)


class FolderSource(_Jpegs):
    """Files of images in a folder, sorted by path; a folder within is a class, as in ImageFolder."""

    def __init__(self, path: Path, preprocess: image_files.Preprocess, shape: tuple[int, ...]):
        self.name, self.preprocess, self.shape = path.name, preprocess, shape
        self.files = sorted(
            file for file in path.rglob("*") if file.suffix.lower() in image_files.SUFFIXES
        )
        if not self.files:
            raise expected(str(path), "files of images", "none")
        folders = [file.relative_to(path).parts[:-1] for file in self.files]
        classes = {folder: number for number, folder in enumerate(sorted({*folders}))}
        flat = () in classes
        numbers = [UNKNOWN if flat else classes[folder] for folder in folders]
        self.labels = np.array(numbers, np.int32)

    def __len__(self) -> int:
        return len(self.files)

    def where(self, sample: int) -> str:
        return str(self.files[sample])

    def read(self, sample: int) -> bytes:
        try:
            return self.files[sample].read_bytes()
        except OSError as error:
            reason = describe_os_error(error)
            raise InputError(f"{self.where(sample)}: cannot be read: {reason}") from error


class SyntheticJpegs(_Jpegs):
    """JPEGs made at the start, of any size: for load, not for accuracy. The same bytes in every process."""

    def __init__(
        self,
        samples: int,
        size: tuple[int, int],
        preprocess: image_files.Preprocess,
        shape: tuple[int, ...],
    ):
        try:
            from PIL import Image
        except ImportError as error:
            raise expected("--data", "Pillow to make JPEGs (pip install pillow)", error) from error
        self.name = f"synthetic JPEGs of {size[0]}x{size[1]}"
        self.preprocess, self.shape = preprocess, shape
        self.labels = np.full(samples, UNKNOWN, np.int32)
        generator = np.random.default_rng(0)
        self._jpegs = []
        for _ in range(min(samples, SYNTHETIC_KINDS)):
            coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8))
            fine = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
            noise = generator.integers(-12, 13, fine.shape, np.int16)
            stream = io.BytesIO()
            pixels = np.clip(fine + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(stream, "JPEG", quality=90)
            self._jpegs.append(stream.getvalue())

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, sample: int) -> str:
        return f"synthetic JPEG {sample}"

    def read(self, sample: int) -> bytes:
        return self._jpegs[sample % len(self._jpegs)]


class ArraySource:
    """Images that are in memory already, such as those of binary records: to read one is to copy it.

    Attributes:
        images: all of them, uint8 [N, C, H, W], so that many can be copied at once.
    """

    def __init__(self, data: Dataset):
        self.name, self.images = data.name, data.images
        self.shape = data.images.shape[1:]
        labels = data.labels
        self.labels = (
            np.full(len(data), UNKNOWN, np.int32) if labels is None else labels.astype(np.int32)
        )

    def __len__(self) -> int:
        return len(self.images)

    def read(self, sample: int) -> np.ndarray:
        return self.images[sample]

    def decode(self, sample: int, encoded: np.ndarray, out: np.ndarray) -> None:
        out[...] = encoded


class _First:
    """The first ``samples`` of another source."""

    def __init__(self, source: Source, samples: int):
        self._source = source
        self.name, self.shape, self.labels = source.name, source.shape, source.labels[:samples]
        self.read, self.decode = source.read, source.decode
        self.images = getattr(source, "images", None)

    def __len__(self) -> int:
        return len(self.labels)


def source(
    data: str,
    workload: Workload,
    images: int | None,
    preprocess: image_files.Preprocess | None = None,
    part: str = "test",
) -> Source:
    """Returns the samples that ``data`` stands for.

    Args:
        data: a ``.tar`` of JPEGs, or a folder that has ``<part>.tar``; a folder of images; ``jpeg:WxH`` for
            synthetic JPEGs; anything else is read by the workload: whole, or what is to be trained on.
        workload: whose network reads them.
        images: how many, from the first; None: all.
        preprocess: how images are resized and cropped; None: not, but synthetic JPEGs to the network's size.
        part: ``train`` or ``test``.

    Raises:
        InputError: there is nothing of that kind, or fewer images than asked for.
    """
    shape = workload.network.input_shape
    preprocess = preprocess or image_files.Preprocess()
    preprocess.check(shape)
    path = Path(data)
    found: Source
    if data.startswith("jpeg:"):
        size = _size(data)
        if preprocess.size is None and size != (shape[2], shape[1]):
            preprocess = image_files.Preprocess(resize=(shape[1], shape[2]))
        found = SyntheticJpegs(images or SYNTHETIC_SAMPLES, size, preprocess, shape)
    elif path.suffix == ".tar" and os.path.isfile(path):
        found = TarSource(path, preprocess, shape)
    elif os.path.isfile(path / f"{part}.tar"):
        found = TarSource(path / f"{part}.tar", preprocess, shape)
    elif os.path.isdir(path) and _has_images(path):
        found = FolderSource(path, preprocess, shape)
    else:
        training = workload.load_training if part == "train" else None
        arrays = (training or workload.load_data)(data, images)
        if not isinstance(arrays.images, np.ndarray) or arrays.images.dtype != np.uint8:
            wanted = (
                "images of pixels, which members share: files, uint8 arrays, or jpeg:WIDTHxHEIGHT"
            )
            raise expected("--data", wanted, f"{arrays.images.dtype} in {arrays.name}")
        found = ArraySource(arrays)
    if images is not None and images > len(found):
        raise expected("--images", f"at most {len(found)} (images in {data})", images)
    return found if images is None or images == len(found) else _First(found, images)


def _size(data: str) -> tuple[int, int]:
    width, times, height = data.removeprefix("jpeg:").partition("x")
    if not (times and width.isdecimal() and height.isdecimal()):
        raise expected("--data", "jpeg:WIDTHxHEIGHT, such as jpeg:500x375", repr(data))
    size = int(width), int(height)
    if not all(1 <= side <= LONGEST_SIDE for side in size):
        raise expected("--data", f"sides from 1 to {LONGEST_SIDE}", repr(data))
    return size


def _has_images(path: Path) -> bool:
    files: Sequence[Path] = [*path.iterdir()]
    return any(file.is_dir() or file.suffix.lower() in image_files.SUFFIXES for file in files)
