"""Decoding files of images: what comes out, what is refused, and worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from image_files import Image, bomb, picture, save
from process_trees import gone

from cnn_engine import InputError, UnsupportedError
from cnn_engine.io import image_workers, images
from cnn_engine.io.image_workers import decoded
from cnn_engine.io.images import decode
from cnn_engine.io.preprocess import Preprocess

PLAIN = Preprocess()


# ---- the record ----


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "imagenet",
            Preprocess(256, (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear"),
        ),
        ("imagenet,resize=232", Preprocess(232, (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))),
        ("imagenet,mean=none,std=none", Preprocess(256, (224, 224))),
        ("resize=32x48", Preprocess((32, 48))),
        (
            "crop=28,mean=0.5,std=0.25,interpolation=bicubic",
            Preprocess(None, (28, 28), (0.5,), (0.25,), "bicubic"),
        ),
    ],
)  # fmt: skip
def test_parse(text, wanted):
    found = Preprocess.parse(text)
    assert found == wanted
    assert Preprocess.parse(str(found)) == found


@pytest.mark.parametrize(
    ("rows", "columns", "resized"),
    [(375, 500, (256, 341)), (500, 333, (384, 256)), (777, 91, (2185, 256)), (64, 64, (256, 256))],
)
def test_the_longer_side_is_rounded_down(rows, columns, resized):
    """341.3, 384.4, and 2185.8 too."""
    assert Preprocess(256).resized(rows, columns) == resized


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imagent", "preprocess: expected imagenet, or settings such as"),
        ("", "found ''"),
        ("resize=0", "resize: expected sides from 1 to"),
        ("resize=1e3", "resize: expected a side such as 224"),
        ("crop=99999", "crop: expected sides from 1 to"),
        ("mean=a/b/c", "mean: expected numbers such as"),
        ("mean=0.1/0.2,std=1", "std: expected 2 numbers, as mean has, found 1"),
        ("std=1/0/1", "std: expected numbers above 0"),
        ("mean=nan", "mean: expected finite numbers"),
        ("interpolation=lanczos", "expected one of bilinear, bicubic, nearest, found lanczos"),
        ("resize=256,imagenet", "found 'imagenet'"),
        ("colour=red", "found 'colour=red'"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(InputError) as error:
        Preprocess.parse(text)
    assert message in str(error.value)


def test_it_must_fit_the_network():
    imagenet = Preprocess.parse("imagenet")
    imagenet.check((3, 224, 224))
    with pytest.raises(
        InputError, match="expected images of 32x32, as the network reads, found 224x224"
    ):
        imagenet.check((3, 32, 32))
    with pytest.raises(
        InputError, match=r"mean: expected as many numbers as channels, such as 0\.5, found 3"
    ):
        imagenet.check((1, 224, 224))
    with pytest.raises(UnsupportedError, match="1 or 3"):
        PLAIN.check((4, 224, 224))


# ---- one image ----


def test_pixels_are_the_files(tmp_path):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (20, 30, 3), np.uint8)
    path = save(tmp_path / "x.png", Image.fromarray(pixels))
    found = decode(path, PLAIN, (3, 20, 30))
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert np.array_equal(found, pixels.transpose(2, 0, 1))
    assert np.array_equal(decode(("in memory", path.read_bytes()), PLAIN, (3, 20, 30)), found)


def test_grey(tmp_path):
    pixels = np.arange(48 * 48, dtype=np.uint32).astype(np.uint8).reshape(48, 48)
    path = save(tmp_path / "x.png", Image.fromarray(pixels))
    assert np.array_equal(decode(path, PLAIN, (1, 48, 48))[0], pixels)
    assert np.array_equal(decode(path, PLAIN, (3, 48, 48)), np.stack([pixels] * 3))


def test_a_crop_beyond_the_image_is_zeros(tmp_path):
    path = save(tmp_path / "x.png", Image.new("RGB", (3, 8), (9, 9, 9)))
    found = decode(path, Preprocess(crop=6), (3, 6, 6))
    assert found[:, :, 1:4].min() == 9
    assert not found[:, :, [0, 4, 5]].any()


def test_normalised_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 7), np.uint8)
    preprocess = Preprocess(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    wanted = pixels.astype(np.float32) / np.float32(255)
    wanted = (wanted - np.float32((0.1, 0.2, 0.3)).reshape(3, 1, 1)) / np.float32(
        (0.5, 0.6, 0.7)
    ).reshape(3, 1, 1)
    out = np.full(pixels.shape, np.nan, np.float32)
    assert preprocess.normalised(pixels, out) is out
    assert np.array_equal(out, wanted)
    assert np.array_equal(PLAIN.normalised(pixels), pixels.astype(np.float32) / np.float32(255))


def truncated(path: Path, image: Image.Image) -> Path:
    content = save(path, image).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def bad_files(folder: Path) -> dict[Path, str]:
    """Returns files that are at fault, each with a part of the message."""
    folder.mkdir(exist_ok=True)
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("no image")
    (folder / "script.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    deep = Image.fromarray(np.full((9, 9), 40000, np.uint16))
    noise = bytearray(save(folder / "damaged.png", picture(64, 64)).read_bytes())
    noise[100:400] = b"\xff" * 300
    (folder / "damaged.png").write_bytes(noise)
    return {
        folder / "missing.jpg": "No such file",
        folder: "Is a directory",
        folder / "empty.jpg": "none that Pillow reads",
        folder / "text.jpg": "none that Pillow reads",
        folder / "script.eps": "none that Pillow reads",
        folder / "damaged.png": "expected an image, found",
        truncated(folder / "half.jpg", picture(300, 300)): "truncated",
        truncated(folder / "half.png", picture(300, 300)): "truncated",
        save(folder / "deep.png", deep): "at most 8 bits a channel",
        bomb(folder / "bomb.png", 20000, 20000): "pixels",
        bomb(folder / "large.png", 10000, 10000): "pixels, found 10000x10000",
        save(folder / "thin.png", Image.new("RGB", (60000, 1))): "pixels, found",
        save(folder / "small.png", Image.new("RGB", (5, 9)), ): "",
    }  # fmt: skip


def test_bad_files_are_refused_in_one_line(tmp_path):
    files = bad_files(tmp_path / "bad")
    for path, words in files.items():
        preprocess = PLAIN if path.name == "small.png" else Preprocess(256, 224)
        with pytest.raises(InputError) as error:
            decode(path, preprocess, (3, 224, 224))
        text = str(error.value)
        assert text.startswith(str(path)), text
        assert words in text, text
        assert "\n" not in text
    with pytest.raises(
        InputError, match=r"expected an image of 224x224 \(--preprocess .*found 9x5"
    ):
        decode(tmp_path / "bad" / "small.png", PLAIN, (3, 224, 224))


def test_pillow_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'cnn-engine\[images\]'"):
        decoded([], PLAIN, (3, 8, 8))


# ---- worker processes ----


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    return [save(folder / f"{i}.png", picture(16, 16, seed=i)) for i in range(50)]


def test_workers_give_the_same_in_order(files):
    shape = (3, 12, 12)
    preprocess = Preprocess(14, 12)
    names = [*files[:20], "missing.jpg", *files[20:], ("bytes", files[3].read_bytes())]
    alone = list(decoded(iter(names), preprocess, shape, workers=0))
    beside = list(decoded(iter(names), preprocess, shape, workers=2))
    assert len(alone) == len(beside) == 52
    for index, (one, other) in enumerate(zip(alone, beside, strict=True)):
        if index == 20:
            assert isinstance(one, InputError)
            assert str(one) == str(other)
        else:
            assert np.array_equal(one, other)
    assert np.array_equal(alone[-1], alone[3])


def test_files_are_taken_as_they_are_needed(files):
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield files[0]

    with closing(decoded(endless(), PLAIN, (3, 16, 16), workers=1)) as found:
        for _ in range(20):
            next(found)
        assert taken <= 20 + image_workers.CHUNK * (image_workers.AHEAD + 1)


def test_few_files_start_no_process(files, monkeypatch):
    monkeypatch.setattr(image_workers, "ProcessPoolExecutor", None)
    assert len(list(decoded(files[:5], PLAIN, (3, 16, 16)))) == 5


def test_workers_is_checked():
    for workers in (-1, 1.5, 10**6):
        with pytest.raises(InputError, match="workers: expected a whole number"):
            decoded([], PLAIN, (3, 8, 8), workers=workers)


SCRIPT = """
import signal, sys
from cnn_engine.io.image_workers import decoded
from cnn_engine.io.preprocess import Preprocess

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    path = sys.argv[1]

    def endless():
        while True:
            yield path

    found = decoded(endless(), Preprocess(), (3, 16, 16), workers=2)
    try:
        for index, pixels in enumerate(found):
            if index == 40:
                import multiprocessing
                print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    except KeyboardInterrupt:
        found.close()
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, files, sign):
    """Ctrl-C goes to the whole group, as a terminal sends it, and nobody but the parent says anything."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(files[0])], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, cwd=Path(images.__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(images.__file__).parents[2])},
    )  # fmt: skip
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        if sign == signal.SIGINT:
            os.killpg(process.pid, sign)
        else:
            process.kill()
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert gone(pids)
    if sign == signal.SIGINT:
        assert output == "interrupted\n"
        assert errors == ""


def test_a_worker_that_is_killed_is_an_error(files):
    import multiprocessing

    def endless():
        while True:
            yield files[0]

    with closing(decoded(endless(), PLAIN, (3, 16, 16), workers=1)) as found:
        next(found)
        (child,) = multiprocessing.active_children()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(InputError, match="found that one ended"):
            deque(found, maxlen=0)
