"""Which way up images are, and how many bits they have: EXIF as Pillow reads it, and no bits dropped."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from image_files import Image, picture

from cnn_engine import InputError
from cnn_engine.infer.decoding import Decoder
from cnn_engine.io.images import decode, is_upright
from cnn_engine.io.preprocess import Preprocess

ImageOps = pytest.importorskip("PIL.ImageOps")

PLAIN = Preprocess()
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF")


def tagged(form: str, exif: bytes, **more: object) -> bytes:
    file = io.BytesIO()
    picture(24, 40, seed=1).save(file, form, exif=exif, **more)
    return file.getvalue()


def exif(orientation: object) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def upright(data: bytes) -> np.ndarray:
    """Returns [3, H, W] as Pillow turns it."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1)


def by_infer(data: bytes, shape: tuple[int, ...], preprocess: Preprocess) -> np.ndarray:
    pixels = np.empty(shape, np.uint8)
    Decoder(shape, preprocess, 1)._one(data, pixels)
    return pixels


@pytest.mark.parametrize("orientation", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("form", FORMATS)
def test_images_are_turned_upright_as_pillow_turns_them(form, orientation):
    data = tagged(form, exif(orientation))
    wanted = upright(data)
    assert wanted.shape[1:] == ((40, 24) if 5 <= orientation <= 8 else (24, 40))
    assert np.array_equal(decode(("x", data), PLAIN, wanted.shape), wanted)
    assert np.array_equal(by_infer(data, wanted.shape, PLAIN), wanted)


@pytest.mark.parametrize("orientation", [1, 6])
def test_orientation_can_be_ignored(orientation):
    data = tagged("JPEG", exif(orientation))
    with Image.open(io.BytesIO(data)) as image:
        storage_dtype = np.asarray(image).transpose(2, 0, 1)
    as_stored = Preprocess.parse("orientation=ignore")
    assert str(as_stored) == "orientation=ignore"
    assert np.array_equal(decode(("x", data), as_stored, (3, 24, 40)), storage_dtype)
    assert np.array_equal(by_infer(data, (3, 24, 40), as_stored), storage_dtype)
    with pytest.raises(InputError, match="orientation: expected one of exif, ignore, found up"):
        Preprocess.parse("orientation=up")


def test_an_image_is_turned_before_it_is_resized():
    data = tagged("JPEG", exif(6))
    wanted = Image.fromarray(upright(data).transpose(1, 2, 0)).resize(
        (12, 20), Image.Resampling.BILINEAR
    )
    wanted = np.asarray(wanted).transpose(2, 0, 1)
    some = Preprocess(resize=12)
    for _ in range(3):  # the kernel of this project takes over from the second of a size on
        assert np.array_equal(decode(("x", data), some, (3, 20, 12)), wanted)
        assert np.array_equal(by_infer(data, (3, 20, 12), some), wanted)


@pytest.mark.parametrize("form", FORMATS[:3])
def test_xmp_says_it_where_exif_does_not(form):
    name = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    if form == "PNG":
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        info.add_itxt("XML:com.adobe.xmp", name)
        data = tagged(form, b"", pnginfo=info)
    else:
        data = tagged(form, b"", xmp=name.encode())
    wanted = upright(data)
    assert wanted.shape == (3, 40, 24)
    assert np.array_equal(decode(("x", data), PLAIN, wanted.shape), wanted)
    assert np.array_equal(by_infer(data, wanted.shape, PLAIN), wanted)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's own
def test_exif_that_is_broken_says_nothing():
    """Of every cut of it, and of bytes that are changed, an image comes out, turned or not."""
    whole = exif(6)
    rng = np.random.default_rng(0)
    broken = [whole[:length] for length in range(6, len(whole))]
    for _ in range(60):
        some = bytearray(whole)
        some[rng.integers(6, len(some))] = rng.integers(256)
        broken.append(bytes(some))
    for tags in [
        *broken,
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*" + b"\xff" * 50,
    ]:
        data = tagged("JPEG", tags)
        shape = (3, 24, 40) if is_upright(data) else (3, 40, 24)
        found = decode(("x", data), PLAIN, shape)
        assert np.array_equal(by_infer(data, shape, PLAIN), found)


def test_where_a_jpegs_segments_are_odd_its_orientation_is_found():
    data = tagged("JPEG", exif(6))
    assert not is_upright(data)
    place = data.index(b"Exif") - 4
    for between in (b"\xff" * 9, b"\xff\xfe\0\x04ab", b"\xff\xe2\x80\0" + bytes(0x7FFE)):
        odd = data[:place] + between + data[place:]
        with Image.open(io.BytesIO(odd)) as image:
            assert image.getexif()[0x0112] == 6
        assert not is_upright(odd)
        assert np.array_equal(by_infer(odd, (3, 40, 24), PLAIN), upright(data))
    plain = tagged("JPEG", b"")
    hidden = plain[:-2] + b"Exif\0\0 Orientation" + plain[-2:]  # among the pixels it says nothing
    assert is_upright(plain)
    assert is_upright(hidden)
    for length in range(0, len(data), 7):  # of one that was cut off, something is said
        is_upright(data[:length])


# ---- bits ----


def png(bits: int, kind: int) -> bytes:
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[kind]
    rows = b"".join(b"\0" + bytes(9 * channels * bits // 8) for _ in range(9))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", 9, 9, bits, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff(bits: int, channels: int) -> bytes:
    pixels = bytes(9 * 9 * channels * bits // 8)
    colours = 2 if channels > 1 else 1
    place = 8 + 2 + 12 * 9 + 4
    fields = [
        (256, 3, 1, 9), (257, 3, 1, 9),
        (258, 3, channels, place if channels > 2 else bits),
        (259, 3, 1, 1), (262, 3, 1, colours), (273, 4, 1, place + 2 * channels),
        (277, 3, 1, channels), (278, 3, 1, 9), (279, 4, 1, len(pixels)),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", *field) for field in fields)
    head = b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4)
    return head + struct.pack("<H", bits) * channels + pixels


def floats() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((9, 9), np.float32)).save(file, "TIFF")
    return file.getvalue()


DEEP = {
    **{f"png of kind {kind}": png(16, kind) for kind in (0, 2, 4, 6)},
    "ppm": b"P6 9 9 65535\n" + bytes(9 * 9 * 6),
    "ppm of 9 bits": b"P6 9 9 256\n" + bytes(9 * 9 * 6),
    "plain ppm": b"P3 9 9 65535\n" + b"0 " * 243,
    "pgm": b"P5 9 9 65535\n" + bytes(9 * 9 * 2),
    "plain pgm": b"P2 9 9 1023\n" + b"0 " * 81,
    "tiff": tiff(16, 1),
    "tiff in colour": tiff(16, 3),
    "tiff with alpha": tiff(16, 4),
    "tiff of floats": floats(),
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_more_than_8_bits_a_channel_are_refused(name, channels):
    message = (
        r"x: expected an image of at most 8 bits a channel, found (mode|9 bits|10 bits|16 bits)"
    )
    with pytest.raises(InputError, match=message):
        decode(("x", DEEP[name]), PLAIN, (channels, 9, 9))


@pytest.mark.parametrize(
    "data",
    [png(8, 0), png(8, 2), png(8, 6), b"P6 9 9 255\n" + bytes(243), b"P6 9 9 100\n" + bytes(243),
     b"P3 9 9 255\n" + b"0 " * 243, b"P4 9 9\n" + bytes(18), tiff(8, 1), tiff(8, 3)],
)  # fmt: skip
def test_images_of_8_bits_and_less_are_taken(data):
    assert decode(("x", data), PLAIN, (3, 9, 9)).shape == (3, 9, 9)
