"""The readers of CIFAR-10 images, and the synthetic set."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from cnn_engine.workloads.cifar10 import dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cnn_engine import workload
from cnn_engine.ensemble import source
from cnn_engine.errors import InputError


def records(count: int, first: int = 0) -> bytes:
    """Records whose label is their number modulo 10 and whose pixels count up from it."""
    return b"".join(
        bytes([n % 10]) + bytes((n + k) % 256 for k in range(3072))
        for n in range(first, first + count)
    )


def npy(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def jpeg_members(count: int = 3, size: tuple[int, int] = (32, 32)) -> dict[str, bytes]:
    image = pytest.importorskip("PIL.Image")
    jpegs = []
    for number in range(count):
        file = io.BytesIO()
        image.new("RGB", size, (40 * number, 80, 200)).save(file, "JPEG", quality=95)
        jpegs.append(file.getvalue())
    lengths = np.array([len(j) for j in jpegs], np.uint32)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.uint32)
    return {
        "images.bin": b"".join(jpegs),
        "offsets.npy": npy(np.stack([starts, lengths], axis=1)),
        "labels.npy": npy(np.arange(count, dtype=np.uint8) % 10),
    }


@pytest.fixture(autouse=True)
def no_data_of_the_user(monkeypatch, tmp_path_factory):
    monkeypatch.delenv(dataset.DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


# Binary records


def test_one_file_of_any_name(tmp_path):
    path = tmp_path / "pictures"
    path.write_bytes(records(5))
    data = dataset.load(path)
    assert data.images.shape == (5, 3, 32, 32)
    assert data.images.dtype == np.uint8
    assert data.images.flags.c_contiguous
    assert data.labels.tolist() == [0, 1, 2, 3, 4]
    assert data.images[2].ravel()[:3].tolist() == [2, 3, 4]
    assert data.source == str(path)
    assert data.note is None


def test_folder_is_read_in_numeric_order_test_last(tmp_path):
    for name, first in (("data_batch_10.bin", 4), ("data_batch_2.bin", 2), ("test_batch.bin", 6)):
        (tmp_path / name).write_bytes(records(2, first))
    (tmp_path / "batches.meta.txt").write_text("not read")
    assert dataset.load(tmp_path).labels.tolist() == [2, 3, 4, 5, 6, 7]
    assert dataset.load(tmp_path, 3).labels.tolist() == [2, 3, 4]
    training, test = dataset.find_files(tmp_path)
    assert [p.name for p in training] == ["data_batch_2.bin", "data_batch_10.bin"]
    assert [p.name for p in test] == ["test_batch.bin"]


def test_members_train_on_training_images_alone(tmp_path):
    """Through what an ensemble reads; others, as members that infer, get all images."""
    for name, first in (("data_batch_1.bin", 4), ("test_batch.bin", 6)):
        (tmp_path / name).write_bytes(records(2, first))
    for part, labels in (("train", [4, 5]), ("test", [4, 5, 6, 7])):
        found = source.source(str(tmp_path), workload.get("cifar10"), None, part=part)
        assert found.labels.tolist() == labels
    with pytest.raises(InputError, match="at most 2"):
        source.source(str(tmp_path), workload.get("cifar10"), 3, part="train")
    (tmp_path / "data_batch_1.bin").unlink()
    with pytest.raises(InputError, match="expected images to train on"):
        dataset.load(tmp_path, training=True)


def test_only_what_is_asked_for_is_read(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(records(3) + b"\xff" * dataset.RECORD_BYTES)  # the last label is wrong
    assert len(dataset.load(path, 3)) == 3
    with pytest.raises(InputError, match=r"record 3 .*expected a label from 0 to 9, found 255"):
        dataset.load(path)


def test_huge_sparse_file_costs_nothing(tmp_path):
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.truncate(dataset.RECORD_BYTES * 10**9)
    assert dataset.load(path, 2).labels.tolist() == [0, 0]
    with pytest.raises(InputError, match="expected at most 1000000, found 1000000000"):
        dataset.load(path)


def test_more_images_than_there_are(tmp_path):
    (tmp_path / "test_batch.bin").write_bytes(records(4))
    with pytest.raises(InputError) as error:
        dataset.load(tmp_path, 5)
    assert str(error.value) == f"images: expected at most 4 (images in {tmp_path}), found 5"


@pytest.mark.parametrize("images", [0, -1])
@pytest.mark.parametrize("spec", ["auto", "synthetic"])
def test_no_images_asked_for(spec, images):
    with pytest.raises(InputError, match="images: expected at least 1"):
        dataset.load(spec, images)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected CIFAR-10 images, found an empty file"),
        (records(2)[:-1], "found 6145 bytes: 1 records and 3072 bytes"),
        (b"\x0a" + bytes(3072), r"record 0 \(the first is 0\): expected a label .*, found 10"),
    ],
)
def test_broken_binary_file(tmp_path, content, message):
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(content)
    for spec in (path, tmp_path):
        with pytest.raises(InputError, match=message) as error:
            dataset.load(spec)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_missing_path_empty_folder_and_special_files(tmp_path):
    with pytest.raises(InputError, match="nowhere: expected a file or folder"):
        dataset.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="expected a file or folder, found: embedded null"):
        dataset.load("a\0b")
    with pytest.raises(InputError, match=r"folder with data_batch_\*.bin .* found none of them"):
        dataset.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="expected a regular file"):
            dataset.load(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    path = tmp_path / "secret.bin"
    path.write_bytes(records(1))
    path.chmod(0)
    with pytest.raises(InputError, match="cannot be read: permission denied"):
        dataset.load(path)


def test_access_denied(tmp_path, monkeypatch):
    path = tmp_path / "secret.bin"
    path.write_bytes(records(1))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=r"secret\.bin: cannot be read: permission denied"):
        dataset.load(path)


# .npz


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("label_type", [np.uint8, np.int64, None])
def test_npz(tmp_path, save, label_type):
    images = np.arange(4 * 3072, dtype=np.int64).astype(np.uint8).reshape(4, 3, 32, 32)
    arrays = {"images": images}
    if label_type:
        arrays["labels"] = np.array([9, 0, 1, 2], label_type)
    save(tmp_path / "a.npz", **arrays)
    data = dataset.load(tmp_path / "a.npz", 3)
    np.testing.assert_array_equal(data.images, images[:3])
    assert (data.labels.tolist() if label_type else data.labels) == (
        [9, 0, 1] if label_type else None
    )


GOOD = np.zeros((2, 3, 32, 32), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": GOOD}, "expected an array `images`, found pictures.npy"),
        (
            {"images": GOOD[0]},
            r"images: expected uint8 \[N, 3, 32, 32\], found uint8 \[3, 32, 32\]",
        ),
        ({"images": GOOD.astype(np.float32)}, "images: expected uint8 .* found float32"),
        ({"images": GOOD[:0]}, "images: expected at least one image, found none"),
        ({"images": np.asfortranarray(GOOD)}, "expected C order, found Fortran order"),
        ({"images": GOOD, "labels": np.zeros(3, int)}, r"labels: expected shape \(2,\)"),
        ({"images": GOOD, "labels": np.zeros((2, 1), int)}, r"labels: expected integers \[N\]"),
        ({"images": GOOD, "labels": np.zeros(2)}, "labels: expected integers .* found float64"),
        ({"images": GOOD, "labels": np.array([0, 10])}, "record 1 .* 0 to 9, found 10"),
        ({"images": GOOD, "labels": np.array([-1, 1])}, "record 0 .* 0 to 9, found -1"),
        ({"images": np.array([{}, None])}, "images: expected uint8 .* found object"),
        ({"images": GOOD, "labels": np.array([{}, None])}, "labels: expected integers .* object"),
    ],
)
def test_wrong_npz(tmp_path, arrays, message):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=message) as error:
        dataset.load(path)
    assert str(path) in str(error.value)


def test_npz_header_that_claims_more_than_there_is(tmp_path):
    header = io.BytesIO()
    shape = (10**12, 3, 32, 32)
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(3072))
    with pytest.raises(InputError, match=r"images\.npy: 3072 bytes where uint8"):
        dataset.load(path, 1)


def test_broken_npz(tmp_path):
    good = io.BytesIO()
    np.savez_compressed(good, images=GOOD)
    broken = bytearray(good.getvalue())
    broken[len(broken) // 3] ^= 0xFF
    for content in (b"not a zip", good.getvalue()[:-30], bytes(broken)):
        path = tmp_path / "a.npz"
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"a\.npz: expected a sound \.npz, found"):
            dataset.load(path)


# The JPEG copy


def test_jpeg_tar(tmp_path):
    write_tar(tmp_path / "train.tar", jpeg_members(3))
    write_tar(tmp_path / "test.tar", jpeg_members(2))
    data = dataset.load(tmp_path / "train.tar", 2)
    assert data.images.shape == (2, 3, 32, 32)
    assert data.labels.tolist() == [0, 1]
    np.testing.assert_allclose(data.images[1].mean(axis=(1, 2)), [40, 80, 200], atol=4)
    assert dataset.load(tmp_path).labels.tolist() == [0, 1, 2, 0, 1]
    with pytest.raises(InputError, match="images: expected at most 3"):
        dataset.load(tmp_path / "train.tar", 4)


def test_wrong_jpeg_tar(tmp_path):
    good = jpeg_members(2)
    end = len(good["images.bin"])

    def offsets(*rows):
        return npy(np.array(rows, np.uint32).reshape(-1, 2))

    cases = [
        ({"images.bin": good["images.bin"]}, "found no offsets.npy, labels.npy"),
        (good | {"offsets.npy": offsets((0, end + 1), (0, 9))}, "image 0 .* within the"),
        (good | {"offsets.npy": offsets((2**32 - 1, 2**32 - 1), (0, 9))}, "image 0 .* within the"),
        (good | {"offsets.npy": offsets((0, 0), (0, 9))}, "image 0 .* within the"),
        (good | {"offsets.npy": offsets((0, 9))}, "as many offsets as labels"),
        (good | {"offsets.npy": npy(np.zeros((2, 2), np.int64))}, "offsets.npy: expected uint32"),
        (good | {"offsets.npy": npy(np.zeros((2, 3), np.uint32))}, "offsets.npy: expected uint32"),
        (good | {"labels.npy": npy(np.zeros((2, 2), np.uint8))}, "labels.npy: expected uint8"),
        (good | {"labels.npy": npy(np.array([1, 99], np.uint8))}, "record 1 .* found 99"),
        (
            good | {"labels.npy": good["labels.npy"][:-1]},
            r"labels.npy: 1 bytes where uint8 \[2\] takes 2",
        ),
        (good | {"images.bin": b"x" * end}, "image 0 .*: expected a JPEG"),
        (jpeg_members(1, size=(33, 32)), "expected 32x32 pixels, found 33x32"),
    ]
    path = tmp_path / "a.tar"
    for members, message in cases:
        write_tar(path, members)
        with pytest.raises(InputError, match=message) as error:
            dataset.load(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    write_tar(path, good, "w:gz")
    with pytest.raises(InputError, match=r"a\.tar: expected a sound tar"):
        dataset.load(path)
    write_tar(path, good)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(InputError, match=r"a\.tar: expected"):
        dataset.load(path)


def test_jpeg_tar_without_pillow(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "a.tar", jpeg_members(1))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match="pip install pillow"):
        dataset.load(path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=400), suffix=st.sampled_from([".bin", ".npz", ".tar", ""]))
def test_arbitrary_bytes_give_images_or_an_input_error(tmp_path, content, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError):  # 400 bytes are less than any image
        dataset.load(path)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_give_images_or_an_input_error(tmp_path, data):
    path = tmp_path / data.draw(st.sampled_from(["a.bin", "a.npz", "a.tar"]))
    if path.suffix == ".bin":
        content = bytearray(records(2))
    elif path.suffix == ".npz":
        file = io.BytesIO()
        np.savez_compressed(file, images=GOOD, labels=np.zeros(2, np.int32))
        content = bytearray(file.getvalue())
    else:
        content = bytearray(write_tar(path, jpeg_members(2)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        found = dataset.load(path)
    except InputError:
        return
    assert found.images.dtype == np.uint8
    assert found.images.shape[1:] == (3, 32, 32)
    assert found.labels is None or found.labels.shape == (len(found),)


# auto and synthetic


def test_auto_falls_back_to_synthetic_and_says_so():
    data = dataset.load("auto", 7)
    assert data.source == "synthetic"
    assert len(data) == 7
    assert data.labels is None
    assert "cnn-engine download cifar10" in data.note
    assert "synthetic" in data.note
    assert dataset.load("synthetic").note is None


def test_auto_finds_the_cache_and_the_variable_goes_first(tmp_path, monkeypatch):
    cached = dataset.cache_folder() / dataset.FOLDER
    cached.mkdir(parents=True)
    (cached / "data_batch_1.bin").write_bytes(records(3))
    assert dataset.load("auto").source == str(cached)
    (tmp_path / "mine.bin").write_bytes(records(2))
    monkeypatch.setenv(dataset.DATA_VARIABLE, str(tmp_path / "mine.bin"))
    assert dataset.load("auto").source == str(tmp_path / "mine.bin")


def test_wrong_variable_is_an_error_not_a_fallback(tmp_path, monkeypatch):
    monkeypatch.setenv(dataset.DATA_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"CNN_ENGINE_DATA: .*gone: expected a file or folder"):
        dataset.load("auto")


def test_synthetic_images_are_the_same_everywhere():
    data = dataset.synthetic(5000)
    assert len(dataset.synthetic()) == 1000
    assert data.images.dtype == np.uint8
    assert data.images.shape == (5000, 3, 32, 32)
    np.testing.assert_array_equal(dataset.synthetic(4100).images, data.images[:4100])
    assert len(np.unique(data.images.reshape(5000, -1), axis=0)) == 5000
    assert hashlib.sha256(data.images.tobytes()).hexdigest() == SYNTHETIC_SHA256
    # Smooth but not flat, over the whole range of values.
    steps = np.abs(np.diff(data.images.astype(int), axis=3)).mean()
    assert 1 < steps < 15
    assert data.images.min() < 5
    assert data.images.max() > 250


SYNTHETIC_SHA256 = "823f6661fb9a3de029d8c8559765449e6101517b6dc5c660dffd5f23c07c0220"


@pytest.mark.parametrize("images", [0, -3, 1_000_001, 10**30])
def test_absurd_number_of_synthetic_images(images):
    with pytest.raises(InputError, match="images: expected"):
        dataset.synthetic(images)


# Real files


def test_real_records(test_data):
    data = dataset.load(test_data("cifar-10-batches-bin"))
    assert data.images.shape == (1102, 3, 32, 32)
    assert data.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.images[0, :, 0, 0].tolist() == [59, 62, 63]


def test_real_jpegs_are_close_to_the_real_records(test_data):
    pytest.importorskip("PIL")
    exact = dataset.load(test_data("cifar-10-batches-bin"), 200)
    lossy = dataset.load(test_data("cifar10-jpeg/train.tar"), 200)
    np.testing.assert_array_equal(exact.labels, lossy.labels)
    assert np.abs(exact.images.astype(int) - lossy.images).mean() < 10
