"""The course's workload: IDX files, the resize, the network's exact counts, and its lines of the report."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from cnn_engine.workloads.fashion_mnist import WORKLOAD, dataset, download, network
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cnn_engine import Engine, doctor, run
from cnn_engine.errors import InputError
from cnn_engine.io import fetch
from cnn_engine.kernels import select
from cnn_engine.measure.result import Accuracy, LayerTime

IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
TRAIN = "train-images-idx3-ubyte.gz"
RESIZED = "t10k-48-images-idx3-ubyte.gz"
RNG = np.random.default_rng(3)
PIXELS = RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8)


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + np.ascontiguousarray(array, np.uint8).tobytes()


def write(folder: Path, images=PIXELS, labels=None, prefix: str = "t10k", suffix: str = "") -> Path:
    """Writes a pair of files; returns the images'."""
    labels = np.arange(len(images)) % 10 if labels is None else np.asarray(labels)
    pack = gzip.compress if suffix else bytes
    path = folder / f"{prefix}-images-idx3-ubyte{suffix}"
    path.write_bytes(pack(idx(images)))
    (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(labels)))
    return path


@pytest.fixture(autouse=True)
def no_data_of_the_user(monkeypatch, tmp_path_factory):
    monkeypatch.delenv(dataset.DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


# Real files


def test_the_resize_gives_the_course_s_bytes(test_data):
    folder = test_data("fashion-mnist")
    resized = dataset.load(folder)
    given = dataset.load(folder / RESIZED)
    assert resized.images.shape == given.images.shape == (1000, 1, 48, 48)
    np.testing.assert_array_equal(resized.images, given.images)
    np.testing.assert_array_equal(resized.labels, given.labels)
    assert resized.images.flags.c_contiguous
    assert resized.note is None


def test_the_resize_is_that_of_scikit_image():
    transform = pytest.importorskip("skimage.transform", exc_type=ImportError)
    images = np.concatenate(
        [
            np.arange(256, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2),
            RNG.integers(0, 256, (200, 28, 28), dtype=np.uint8),
            RNG.integers(100, 103, (200, 28, 28), dtype=np.uint8),
            RNG.integers(0, 256, (100, 7, 7), dtype=np.uint8).repeat(4, 1).repeat(4, 2),
        ]
    )
    wanted = [
        transform.resize(image / 256.0, (48, 48), mode="constant", cval=0, anti_aliasing=False)
        * 256
        for image in images
    ]
    np.testing.assert_array_equal(dataset.resize(images), np.array(wanted).astype(np.uint8))


@pytest.mark.parametrize(
    ("name", "variant", "reduction"),
    [("", "pad", False)]
    + [(RESIZED, variant, reduction) for variant in select.VARIANTS for reduction in (False, True)],
)
def test_correct_images(test_data, device, variant, reduction, name):
    row = select.VARIANTS[variant]
    if device.kind not in row.devices or (reduction and not row.reduction):
        pytest.skip(f"{variant} has no such form on {device.kind}")
    images = dataset.load(test_data("fashion-mnist") / name)
    weights = test_data("ece408/ece408-0002.params")
    with Engine(
        "ece408", weights=weights, device=device.kind, variant=variant, reduction=reduction
    ) as engine:
        # A share for the plainest loops, which take the longest.
        count = 100 if variant == "if" and device.kind == "cpu" else len(images.images)
        right = engine.predict(images.images[:count]).argmax(axis=1) == images.labels[:count]
    assert int(right[:100].sum()) == 84
    assert count == 100 or int(right.sum()) == 852


def test_the_network_is_that_of_the_symbol_file(test_data):
    nodes = json.loads(test_data("ece408/ece408-symbol.json").read_text())["nodes"]
    kinds = {"New": "conv", "Activation": "tanh", "Pooling": "pool", "FullyConnected": "fc"}
    found = [
        (kinds[node["op"]], node["attrs"].get("num_filter") or node["attrs"].get("num_hidden"))
        for node in nodes
        if node["op"] in kinds
    ]
    ours = [
        (layer.kind, str(size) if size else None)
        for layer in network.NETWORK.layers[:-1]
        for size in [getattr(layer, "out_channels", None) or getattr(layer, "out_features", None)]
    ]
    assert ours == found
    assert network.NETWORK.infos[3].output_shape == (16, 18, 18)


# The command line


@pytest.mark.parametrize("options", [[], ["--variant", "if"], ["--variant", "pad", "--reduction"]])
def test_the_course_s_lines(test_data, capsys, options):
    arguments = ["--network", "ece408", "--device", "cpu", "--images", "100", *options]
    arguments += ["--data", str(test_data("fashion-mnist"))]
    arguments += ["--weights", str(test_data("ece408/ece408-0002.params"))]
    assert run.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    times = [line for line in lines if line.startswith("Op Time: ")]
    assert len(times) == 2
    assert all(float(line.removeprefix("Op Time: ")) > 0 for line in times)
    assert "Correctness: 0.84 Model: ece408" in lines
    assert "CNN for 100 images" in lines


def test_the_plain_call_is_the_fast_one():
    with Engine("ece408", weights="random", device="cpu") as engine:
        assert engine.choice.variant == "fused"


def test_without_weights_and_with_random_ones(capsys):
    arguments = ["--network", "ece408", "--device", "cpu", "--images", "20", "--batch", "20"]
    assert run.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "note: weights: ece408 comes without any, and runs on random ones"
    )
    out = captured.out
    arguments[1] = "fashion_mnist"  # its second name
    assert run.main([*arguments, "--weights", "random"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert re.search(r"^Network +: ece408$", captured.out, re.MULTILINE)
    assert "The weights are random: correctness means nothing" in out
    assert "Correctness: not known, since the images have no labels" in out
    assert "cnn-engine download fashion_mnist" in " ".join(out.split())


class _Result:
    layers = (LayerTime("all", "fused", "cpu", 1, 0.5),)
    accuracy = Accuracy(8397, 10000)
    weights, network = "file", "ece408"


def test_lines_where_the_convolutions_are_not_timed_apart():
    assert network.report_lines(_Result()) == [
        "Op Time: not known, since the network's parts were not timed",
        "Correctness: 0.8397 Model: ece408",
    ]


# IDX files


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_or_its_folder_plain_or_compressed(tmp_path, suffix):
    path = write(tmp_path, suffix=suffix)
    for spec in (path, tmp_path):
        found = dataset.load(spec)
        np.testing.assert_array_equal(found.images[:, 0], dataset.resize(PIXELS))
        assert found.labels.tolist() == [0, 1, 2, 3, 4]
        assert found.name == "Fashion-MNIST"
        assert found.source == str(spec)
    assert dataset.load(path, 2).labels.tolist() == [0, 1]


def test_compression_is_told_by_the_bytes_and_not_by_the_name(tmp_path):
    path = write(tmp_path, suffix=".gz")
    path.rename(tmp_path / IMAGES)
    assert len(dataset.load(tmp_path)) == 5


def test_images_of_48x48_are_taken_as_they_are(tmp_path):
    images = RNG.integers(0, 256, (3, 48, 48), dtype=np.uint8)
    write(tmp_path, images, prefix="t10k-48")
    np.testing.assert_array_equal(dataset.load(tmp_path).images[:, 0], images)


def test_a_folder_gives_the_test_images_first(tmp_path):
    write(tmp_path, labels=[5] * 5, prefix="train")
    write(tmp_path, labels=[1] * 5)
    write(tmp_path, RNG.integers(0, 256, (2, 48, 48), dtype=np.uint8), prefix="t10k-48")
    assert dataset.load(tmp_path).labels.tolist() == [1] * 5 + [5] * 5
    assert dataset.load(tmp_path, 6).labels.tolist() == [1] * 5 + [5]


def test_images_without_labels_say_so(tmp_path):
    write(tmp_path)
    (tmp_path / LABELS).unlink()
    found = dataset.load(tmp_path)
    assert found.labels is None
    assert "has no file of labels beside it" in found.note
    (tmp_path / "pictures").write_bytes(idx(PIXELS))
    assert dataset.load(tmp_path / "pictures").labels is None


def test_many_images_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "_CHUNK", 2)
    path = write(tmp_path, suffix=".gz")
    np.testing.assert_array_equal(dataset.load(path).images[:, 0], dataset.resize(PIXELS))
    assert dataset.load(path, 3).labels.tolist() == [0, 1, 2]


GOOD = idx(PIXELS)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:2], r"header: expected 4 bytes, found an end after 2"),
        (GOOD[:9], "header: expected 12 bytes, found an end after 5"),
        (b"\1" + GOOD[1:], "expected 00 00 08 03 .* found 01 00 08 03"),
        (GOOD[:2] + b"\x0d" + GOOD[3:], "expected 00 00 08 03 .* found 00 00 0d 03"),
        (idx(PIXELS[0]), "expected 00 00 08 03 .* found 00 00 08 02"),
        (idx(np.zeros(9)), "expected 00 00 08 03 .* found 00 00 08 01"),
        (idx(PIXELS[:, :27]), "expected images of 28x28 or 48x48 pixels, found 27x28"),
        (idx(PIXELS[:0]), "expected at least one image or label, found none"),
        (
            struct.pack(">IIII", 0x803, 2**32 - 1, 28, 28) + GOOD[16:],
            r"expected 3367254359296 bytes",
        ),
        (struct.pack(">IIII", 0x803, 1, 2**32 - 1, 2**32 - 1), "found 4294967295x4294967295"),
    ],
)
def test_wrong_images(tmp_path, pack, content, message):
    write(tmp_path)
    path = tmp_path / IMAGES
    path.write_bytes(pack(content))
    for spec in (path, tmp_path):
        with pytest.raises(InputError, match=message) as error:
            dataset.load(spec)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_lengths_that_differ_from_what_the_header_says(tmp_path):
    path = write(tmp_path)
    for content, message in (
        (GOOD[:-1], "expected 3936 bytes, as .* takes, found 3935 bytes"),
        (GOOD + b"x", "expected 3936 bytes, as .* takes, found 3937 bytes"),
        (gzip.compress(GOOD[:-1]), r"0 to 5: expected 3920 bytes, found an end after 3919"),
        (gzip.compress(GOOD + b"x"), r"expected an end after \[5, 28, 28\], found more bytes"),
        (gzip.compress(GOOD)[:-9], "expected a sound gzip file"),
        (gzip.compress(GOOD)[:-8] + bytes(8), "expected a sound gzip file"),
        (b"\x1f\x8b", "expected a sound gzip file"),
        (b"\x1f\x8bnot gzip at all", "expected a sound gzip file"),
        (b"", "expected an IDX file, found an empty file"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            dataset.load(path)


def test_a_small_file_that_claims_or_holds_much_costs_little(tmp_path):
    path = write(tmp_path)
    head = struct.pack(">IIII", 0x803, 200_000, 28, 28)
    path.write_bytes(gzip.compress(head + bytes(1000)))
    with pytest.raises(InputError, match="expected 156800016 bytes, .* found less than that"):
        dataset.load(path, 1)
    bomb = gzip.compress(GOOD + bytes(1 << 26))  # 64 MB of zeros, of which one byte is looked at
    path.write_bytes(bomb)
    with pytest.raises(InputError, match="found more bytes"):
        dataset.load(path)
    with open(path, "wb") as file:
        file.write(struct.pack(">IIII", 0x803, 10**6, 28, 28))
        file.truncate(16 + 784 * 10**6)  # sparse
    with pytest.raises(InputError, match="expected at most 200000, found 1000000"):
        dataset.load(path)


def test_wrong_labels(tmp_path):
    write(tmp_path)
    path = tmp_path / LABELS
    for content, message in (
        (idx(np.arange(4)), f"expected 5 labels, as {IMAGES} has images, found 4"),
        (
            idx(np.array([0, 1, 10, 3, 4])),
            r"label 2 \(the first is 0\): expected .* 0 to 9, found 10",
        ),
        (idx(PIXELS), "expected 00 00 08 01 .* found 00 00 08 03"),
        (b"", "expected an IDX file, found an empty file"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message) as error:
            dataset.load(tmp_path)
        assert str(error.value).startswith(str(path))
    path.write_bytes(idx(np.array([0, 1, 10, 3, 4])))
    assert len(dataset.load(tmp_path, 2)) == 2


def test_training_leaves_the_test_images_out(tmp_path):
    write(tmp_path)
    with pytest.raises(InputError, match="expected a folder with train-images-idx3-ubyte"):
        dataset.load(tmp_path, training=True)
    write(tmp_path, labels=[5] * 5, prefix="train")
    assert dataset.load(tmp_path).labels.tolist() == [0, 1, 2, 3, 4] + [5] * 5
    assert dataset.load(tmp_path, training=True).labels.tolist() == [5] * 5


def test_missing_files_special_files_and_counts(tmp_path):
    with pytest.raises(InputError, match="nowhere: expected a file or folder"):
        dataset.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="found: embedded null"):
        dataset.load("a\0b")
    with pytest.raises(InputError, match="expected a folder with t10k-images-idx3-ubyte"):
        dataset.load(tmp_path)
    write(tmp_path)
    with pytest.raises(InputError) as error:
        dataset.load(tmp_path, 6)
    assert str(error.value) == f"images: expected at most 5 (images in {tmp_path}), found 6"
    for spec in ("auto", "synthetic", str(tmp_path)):
        with pytest.raises(InputError, match="images: expected at least 1"):
            dataset.load(spec, 0)
    os.unlink(tmp_path / LABELS)
    os.mkfifo(tmp_path / LABELS)
    for path in (tmp_path, tmp_path / LABELS, Path("/dev/zero")):
        with pytest.raises(InputError, match="expected a regular file"):
            dataset.load(path)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_files_give_images_or_an_input_error(tmp_path, data):
    write(tmp_path)
    path = tmp_path / data.draw(st.sampled_from([IMAGES, LABELS]))
    content = bytearray(data.draw(st.sampled_from([bytes, gzip.compress]))(path.read_bytes()))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, min(len(content) - 1, 40)))
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        found = dataset.load(tmp_path)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert found.images.shape == (len(found), 1, 48, 48)
    assert found.labels.shape == (len(found),)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=300))
def test_arbitrary_bytes_are_an_input_error(tmp_path, content):
    (tmp_path / "a").write_bytes(content)  # fewer bytes than any image
    with pytest.raises(InputError):
        dataset.load(tmp_path / "a")


# auto and synthetic


def test_auto_falls_back_to_synthetic_and_says_so():
    found = dataset.load("auto", 7)
    assert (found.source, len(found), found.labels) == ("synthetic", 7, None)
    assert "cnn-engine download fashion_mnist" in found.note
    assert dataset.load("synthetic").note is None


def test_auto_finds_the_cache_and_the_variable_goes_first(tmp_path, monkeypatch):
    cached = dataset.cache_folder()
    cached.mkdir(parents=True)
    write(cached)
    assert dataset.load("auto").source == str(cached)
    (tmp_path / dataset.FOLDER).mkdir()
    write(tmp_path / dataset.FOLDER)
    for value in (tmp_path, tmp_path / dataset.FOLDER):
        monkeypatch.setenv(dataset.DATA_VARIABLE, str(value))
        assert dataset.load("auto").source == str(tmp_path / dataset.FOLDER)
    monkeypatch.setenv(dataset.DATA_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"CNN_ENGINE_DATA: .*gone: expected a file or folder"):
        dataset.load("auto")
    monkeypatch.setenv(dataset.DATA_VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match="^images: expected at most 5"):
        dataset.load("auto", 6)


SYNTHETIC_SHA256 = "ab82085cbd727b648f3ffa1ed07bc547a748ec26eb0351b39f325c5c8d024785"


def test_synthetic_images_are_the_same_everywhere():
    found = dataset.synthetic(3000)
    assert found.images.shape == (3000, 1, 48, 48)
    assert len(dataset.synthetic()) == 1000
    np.testing.assert_array_equal(dataset.synthetic(1500).images, found.images[:1500])
    assert len(np.unique(found.images.reshape(3000, -1), axis=0)) == 3000
    assert hashlib.sha256(found.images.tobytes()).hexdigest() == SYNTHETIC_SHA256
    for images in (0, 200_001, 10**30):
        with pytest.raises(InputError, match="images: expected"):
            dataset.synthetic(images)


# The download


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves files of a folder; yields the folder and the address."""
    monkeypatch.setattr(fetch, "_FIRST_PAUSE_S", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "server"
    folder.mkdir()
    write(folder, suffix=".gz")
    write(folder, prefix="train", suffix=".gz")

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{http.server_port}/"
        http.shutdown()
        thread.join()


def checksums(folder: Path) -> dict[str, str]:
    return {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in download.FILES}


def test_download_fetches_what_is_missing(server, tmp_path):
    folder, url = server
    target, lines = tmp_path / "new" / "folder", []
    files = checksums(folder)
    assert download.download(target, url, files, say=lines.append) == target
    assert sorted(os.listdir(target)) == sorted(download.FILES)
    assert len(dataset.load(target)) == 10
    assert len(lines) == 4
    (target / f"{IMAGES}.gz").unlink()
    download.download(target, url, files, say=lines.append)
    assert lines[4:] == [f"downloading {url}{IMAGES}.gz"]
    download.download(target, url, files, say=lines.append)
    assert "complete already" in lines[-1]
    download.download(target, url.rstrip("/"), files, force=True, say=lines.append)
    assert len(lines) == 10


def test_download_leaves_another_file_alone_unless_forced(server, tmp_path):
    folder, url = server
    files = checksums(folder)
    mine = tmp_path / f"{LABELS}.gz"
    mine.write_text("mine")
    with pytest.raises(InputError, match=r"labels.*: expected MD5 .* \(--force replaces it\)"):
        download.download(tmp_path, url, files)
    assert mine.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["server", mine.name]
    download.download(tmp_path, url, files, force=True)
    assert len(dataset.load(tmp_path)) == 10


def test_download_of_another_file_or_none(server, tmp_path):
    folder, url = server
    files = checksums(folder) | {f"{LABELS}.gz": "0" * 32}
    with pytest.raises(
        InputError, match="expected the file with MD5 0{32}, found .* it was deleted"
    ):
        download.download(tmp_path / "a", url, files)
    assert os.listdir(tmp_path / "a") == [f"{IMAGES}.gz"]
    (folder / f"{LABELS}.gz").unlink()
    with pytest.raises(InputError, match="expected the file, found HTTP 404"):
        download.download(tmp_path / "a", url, files)
    with pytest.raises(InputError, match="--url: expected an http"):
        download.download(tmp_path / "a", "ftp://x/", files)


def test_download_command_fills_the_cache_that_auto_reads(server, monkeypatch, capsys):
    folder, url = server
    monkeypatch.setattr(download, "FILES", checksums(folder))
    assert download.main(["--url", url]) == 0
    assert capsys.readouterr().out == f"Fashion-MNIST: {dataset.cache_folder()}\n"
    assert dataset.load("auto").source == str(dataset.cache_folder())
    assert download.main(["--url", "nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: --url: expected")


@pytest.fixture
def stalling(server):
    """Serves the files, of those named in a set only half; yields that set, the checksums and the address."""
    folder, _ = server
    stall: set[str] = set()
    release = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def copyfile(self, source, outputfile):
            content = source.read()
            if Path(self.path).name in stall:
                outputfile.write(content[: len(content) // 2])
                release.wait(60)
            else:
                outputfile.write(content)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield stall, checksums(folder), f"http://127.0.0.1:{http.server_port}/"
        release.set()
        http.shutdown()
        thread.join()


COMMAND = """
import json, sys
from cnn_engine.workloads.fashion_mnist import download
download.FILES = json.loads(sys.argv[1])
sys.exit(download.main(sys.argv[2:]))
"""


def end_in_the_middle_of(name, number, stalling, *options):
    """Runs the download until half of a file has come, then sends a signal; returns its code and errors."""
    stall, files, url = stalling
    stall.add(name)
    words = [sys.executable, "-c", COMMAND, json.dumps(files), "--url", url, *options]
    process = subprocess.Popen(words, stdout=-1, stderr=-1, text=True)
    part = dataset.cache_folder() / f"{name}.part"
    end = time.monotonic() + 60
    while not Path(f"{part}.version").exists() and time.monotonic() < end:  # the answer has begun
        time.sleep(0.01)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    stall.clear()
    assert part.exists()
    assert "Traceback" not in errors
    assert out == ""
    return process.returncode, errors


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        (f"{IMAGES}.gz", signal.SIGINT, 130),
        (TRAIN, signal.SIGTERM, 143),
        (f"{IMAGES}.gz", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_commands_work_after_a_download_that_was_ended(stalling, capsys, name, number, code):
    found, errors = end_in_the_middle_of(name, number, stalling)
    assert found == code
    if number != signal.SIGKILL:
        assert errors.splitlines()[-1] == "interrupted: the same command resumes the download"
    arguments = ["--network", "ece408", "--device", "cpu", "--weights", "random", "--images", "4"]
    assert run.main(arguments) == 0
    out, _ = capsys.readouterr()
    resume = "`cnn-engine download fashion_mnist` resumes it"
    assert "is not complete, so the images are synthetic" in " ".join(out.split())
    assert resume in " ".join(out.split())
    assert doctor.main([]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "network ece408" in line)
    assert line.startswith("--")
    assert resume in line
    cached = dataset.cache_folder()
    if name.startswith(IMAGES):
        assert run.main([*arguments, "--data", str(cached)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "found a download that is not complete" in error
        assert f"--output {cached}` resumes it" in error
    _, files, url = stalling
    assert download.download(cached, url, files) == cached
    assert sorted(os.listdir(cached)) == sorted(files)
    assert dataset.load("auto").source == str(cached)
    assert dataset.load("auto").labels is not None


def test_files_that_are_whole_are_read_while_new_ones_come(stalling):
    _, files, url = stalling
    cached = dataset.cache_folder()
    download.download(cached, url, files)
    assert end_in_the_middle_of(TRAIN, signal.SIGKILL, stalling, "--force")[0] == -signal.SIGKILL
    found = dataset.load("auto")
    assert (found.source, len(found), found.note) == (str(cached), 10, None)


def test_official_address_and_checksums():
    assert download.URL.startswith("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com")
    assert download.FILES["t10k-images-idx3-ubyte.gz"] == "bef4ecab320f06d8554ea6380940ec79"
    assert len(download.FILES) == 4


def test_the_workload_is_found_by_its_name():
    from cnn_engine import workload

    assert workload.get("ece408") is WORKLOAD
    assert "ece408" in workload.names()
