"""Preprocessing against torchvision's own transforms on PIL images: equal, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from image_files import Image, picture, save

from benchmarks.models_worker import ignore_compiled_operators
from cnn_engine.io.images import decode
from cnn_engine.io.preprocess import Preprocess

torch = pytest.importorskip("torch")
ignore_compiled_operators()
presets = pytest.importorskip("torchvision.transforms._presets")
modes = pytest.importorskip("torchvision.transforms").InterpolationMode

#: Rows and columns: landscape, portrait, square, odd, smaller than the crop, thin.
SIZES = [
    (375, 500),
    (500, 333),
    (256, 256),
    (301, 257),
    (180, 200),
    (100, 640),
    (64, 64),
    (777, 91),
]


def preset(**options: object) -> object:
    return presets.ImageClassification(**options)


@pytest.mark.parametrize("size", SIZES)
def test_imagenet_is_torchvisions_preset(tmp_path, size):
    path = save(tmp_path / "x.jpg", picture(*size, seed=sum(size)), quality=90)
    preprocess = Preprocess.parse("imagenet")
    pixels = decode(path, preprocess, (3, 224, 224))
    with Image.open(path) as image:
        wanted = preset(crop_size=224)(image.convert("RGB"))
    found = preprocess.normalised(pixels[None])[0]
    assert np.array_equal(found, wanted.numpy())


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("imagenet,resize=232", {"resize_size": 232}),
        ("imagenet,interpolation=bicubic", {"interpolation": modes.BICUBIC}),
        ("imagenet,interpolation=nearest", {"interpolation": modes.NEAREST}),
        (
            "resize=200,crop=224,mean=0.1/0.2/0.3,std=0.7/0.11/0.9",
            {"resize_size": 200, "mean": (0.1, 0.2, 0.3), "std": (0.7, 0.11, 0.9)},
        ),
        ("resize=256,crop=224", {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
    ],
)
@pytest.mark.parametrize("size", [(375, 500), (431, 257)])
def test_spelled_out(tmp_path, text, options, size):
    path = save(tmp_path / "x.png", picture(*size, seed=3))
    preprocess = Preprocess.parse(text)
    with Image.open(path) as image:
        wanted = preset(crop_size=224, **options)(image.convert("RGB"))
    found = preprocess.normalised(decode(path, preprocess, (3, 224, 224))[None])[0]
    assert np.array_equal(found, wanted.numpy())


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "YCbCr", "1"])
def test_other_modes_become_rgb_as_its_loader_makes_them(tmp_path, mode):
    kind = {"CMYK": "jpg", "YCbCr": "jpg"}.get(mode, "png")
    path = save(tmp_path / f"x.{kind}", picture(300, 280, mode=mode))
    folder = pytest.importorskip("torchvision.datasets.folder")
    wanted = preset(crop_size=224)(folder.pil_loader(str(path)))
    preprocess = Preprocess.parse("imagenet")
    found = preprocess.normalised(decode(path, preprocess, (3, 224, 224))[None])[0]
    assert np.array_equal(found, wanted.numpy())
