"""Images resized and cropped to Pillow's bits."""

from __future__ import annotations

import io

import numpy as np
import pytest

from cnn_engine import _cpu
from cnn_engine.infer.decoding import Decoder
from cnn_engine.io import images, resample
from cnn_engine.io.preprocess import Preprocess

Image = pytest.importorskip("PIL.Image")

SIZES = [(375, 500), (500, 375), (256, 341), (1, 1), (1, 9), (9, 1), (2, 300), (97, 64), (700, 5)]


def pillow(image: np.ndarray, size: tuple[int, int], method: str) -> np.ndarray:
    one = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    found = np.asarray(one.resize(size[::-1], Image.Resampling[method.upper()]))
    return found.reshape(*size, image.shape[2]).transpose(2, 0, 1)


@pytest.mark.parametrize("method", resample.METHODS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("isa", _cpu.instruction_sets())
def test_pixels_are_pillows(isa, channels, method):
    rng = np.random.default_rng(channels)
    before = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(isa)
    try:
        for size in SIZES:
            image = rng.integers(0, 2, (*size, channels), np.uint8) * rng.integers(
                128, 256, dtype=np.uint8
            )
            for to in ((256, 341), (300, 225), (1, 1), size, (size[0], 7), (7, size[1]), (41, 40)):
                # One axis after the other, for which there is one order alone.
                between = pillow(image, (size[0], to[1]), method)
                wanted = pillow(np.ascontiguousarray(between.transpose(1, 2, 0)), to, method)
                top, left = (int(rng.integers(0, side)) for side in to)
                rows, columns = to[0] - top, to[1] - left
                found = resample.resampled(image, to, (top, left, rows, columns), method)
                assert np.array_equal(found, wanted[:, top:, left:]), (size, to)
    finally:
        _cpu.select_instruction_set(before)


def test_sizes_that_pillow_resizes_otherwise_are_left_to_it():
    resample._seen.clear()
    rng = np.random.default_rng(0)
    for size, to in (((375, 500), (256, 341)), ((300, 120), (40, 300)), ((40, 300), (300, 120))):
        image = rng.integers(0, 256, (*size, 3), np.uint8)
        same = np.array_equal(
            resample.resampled(image, to, (0, 0, *to), "bilinear"), pillow(image, to, "bilinear")
        )
        assert [resample.agrees(size, to, "bilinear") for _ in range(3)] == [False, same, same]
    assert resample.agrees((375, 500), (256, 341), "bilinear")


def test_sizes_that_were_seen_are_not_kept_for_ever(monkeypatch):
    resample._seen.clear()
    monkeypatch.setattr(resample, "MOST_SEEN", 5)
    for side in range(1, 30):
        resample.agrees((side, side), (8, 8), "bilinear")
        assert len(resample._seen) <= 5


@pytest.mark.parametrize(
    ("what", "shape"),
    [
        ("imagenet", (3, 224, 224)),
        ("imagenet", (1, 224, 224)),
        ("resize=40,crop=32,interpolation=bicubic", (3, 32, 32)),
        ("resize=30x50", (3, 30, 50)),
        ("resize=64,crop=64,interpolation=nearest", (3, 64, 64)),
        ("resize=20,crop=24", (3, 24, 24)),
        ("crop=17", (3, 17, 17)),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpegs_become_the_same_pixels_by_every_way(what, shape, mode):
    rng = np.random.default_rng(0)
    preprocess = Preprocess.parse(what)
    for size in ((40, 60), (60, 40), (375, 500), (16, 31)):
        coarse = Image.fromarray(rng.integers(0, 256, (*(n // 8 + 1 for n in size), 3), np.uint8))
        stream = io.BytesIO()
        coarse.resize(size[::-1]).convert(mode).save(stream, "JPEG", quality=80)
        for data in (stream.getvalue(), stream.getvalue()[: len(stream.getvalue()) // 2]):
            found = []
            for way in range(3):  # Pillow's, then this project's
                resample._seen.clear()
                decoder = Decoder(shape, preprocess, 1)
                for _ in range(way + 1):
                    target = np.zeros(shape, np.uint8)
                    try:
                        decoder._one(data, target)
                    except images.InputError:
                        target = None
                found.append(target)
            assert all((one is None) == (found[0] is None) for one in found)
            if found[0] is not None:
                assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("name", "values"),
    [("channels", (2, 9, 9, 4, 4, 1, 1)), ("rows", (3, 2, 9, 4, 4, 3, 1)), ("columns", (3, 9, 2, 4, 4, 1, 3)),
     ("out_rows", (3, 9, 9, 0, 4, 1, 1)), ("row_taps", (3, 9, 9, 4, 4, 0, 1))],
)  # fmt: skip
def test_shapes_that_cannot_be_are_refused(name, values):
    pixels = np.zeros(9 * 9 * 3, np.uint8)
    tables = np.zeros(100, np.int32)
    arrays = (pixels, tables, tables, tables, tables, np.zeros(300, np.uint8))
    with pytest.raises(ValueError, match=rf"{name}: expected"):
        _cpu.resample(*map(_cpu.address_of, arrays), _cpu.ResampleShape(*values))
