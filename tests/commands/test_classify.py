"""Photos to names of classes, by what a model's file says of its images and outputs."""

from __future__ import annotations

import json
import pickle

import numpy as np
import onnx
import onnx_models
import pytest
from image_files import Image, picture, save
from onnx import helper, numpy_helper

import cnn_engine
from cifar10 import dataset as cifar10
from cnn_engine import Classifier, InputError, UnsupportedError, classify, run
from cnn_engine.engine.engine import Engine
from cnn_engine.infer import command as infer
from cnn_engine.io import images, model_metadata
from cnn_engine.io.preprocess import Preprocess

PREPARED = Preprocess(20, (16, 16), (0.5, 0.25, 0.125), (0.5, 0.25, 2.0))
NAMES = ["red", "green", "blauer Fuß"]


def model(head: str | None = None, metadata: dict | None = None, batch: int | str = "n"):
    """Outputs are the means of the three channels, four times: a red image is of class 0."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w"], ["y" if head is None else "g"]),
    ]
    if head is not None:
        nodes.append(helper.make_node(head, ["g"], ["y"]))
    made = onnx_models.model(
        nodes,
        [onnx_models.tensor("x", [batch, 3, 16, 16])],
        [onnx_models.tensor("y", [batch, 3])],
        {"w": 4 * np.eye(3, dtype=np.float32)},
    )
    if metadata is not None:
        helper.set_model_props(made, {"producer's own": "1", **metadata})
    return made


SAID = model_metadata.entries(PREPARED, NAMES)


def colour(red: int, green: int, blue: int) -> Image.Image:
    return Image.new("RGB", (30, 25), (red, green, blue))


def logits(*pixel: int) -> np.ndarray:
    """What the model gives for an image of one colour, in float64."""
    return 4 * (np.array(pixel) / 255 - PREPARED.mean) / PREPARED.std


@pytest.mark.parametrize("head", [None, "Softmax", "LogSoftmax", "Sigmoid"])
def test_scores_and_names_of_a_photo(head, tmp_path):
    save(tmp_path / "a.png", colour(200, 90, 30))
    with Classifier(model(head, SAID).SerializeToString(), device="cpu") as classifier:
        found = classifier(str(tmp_path / "a.png"))
    x = logits(200, 90, 30)
    wanted = 1 / (1 + np.exp(-x)) if head == "Sigmoid" else np.exp(x) / np.exp(x).sum()
    order = np.argsort(-wanted)
    assert [(one.name, one.number) for one in found] == [(NAMES[n], n) for n in order]
    np.testing.assert_allclose([one.score for one in found], wanted[order], rtol=1e-5)


def test_paths_pillow_and_arrays_are_one_image(tmp_path):
    photo = picture(70, 50, seed=3)
    path = save(tmp_path / "a.png", photo)
    classifier = Classifier(model(None, SAID), device="cpu")
    pixels = images.decode(path, PREPARED, (3, 16, 16))
    rows = classifier.engine.predict(PREPARED.normalised(pixels[None])).astype(np.float64)
    wanted = np.exp(rows[0]) / np.exp(rows[0]).sum()
    four = classifier.many([path, str(path), photo, np.asarray(photo)], top=1)
    assert four == four[:1] * 4
    assert four[0][0].number == wanted.argmax()
    assert four[0][0].score == pytest.approx(wanted.max(), rel=1e-12)
    grey = photo.convert("L")
    assert classifier(grey) == classifier(np.asarray(grey))
    turned = Image.new("RGB", (30, 25))
    turned.putpixel((0, 0), (255, 0, 0))
    exif = turned.getexif()
    exif[0x0112] = 6
    other = save(tmp_path / "turned.png", turned, exif=exif)
    with Image.open(other) as opened:
        assert classifier(opened) == classifier(other)


def test_a_model_for_two_images_takes_one_and_three():
    classifier = Classifier(model(None, SAID, batch=2), device="cpu")
    photos = [colour(200, 90, 30), colour(0, 250, 0), colour(0, 0, 255)]
    alone = [classifier(photo) for photo in photos]
    assert classifier.many(photos) == alone
    assert alone[1][0].name == "green"


def test_who_says_wins_over_the_file_and_the_file_over_nobody(tmp_path):
    photo = colour(200, 90, 30)
    names = tmp_path / "names.txt"
    names.write_text("eins\nzwei\ndrei\n")
    plain = Classifier(model(None, SAID), device="cpu", classes=names, preprocess="resize=16x16")
    x = 4 * np.array([200, 90, 30]) / 255
    found = plain(photo)
    assert [one.name for one in found] == ["eins", "zwei", "drei"]
    np.testing.assert_allclose([p.score for p in found], np.exp(x) / np.exp(x).sum(), rtol=1e-5)
    nobody = Classifier(model(), device="cpu", preprocess=PREPARED, classes=NAMES)
    assert nobody(photo) == Classifier(model(None, SAID), device="cpu")(photo)
    unnamed = Classifier(model(), device="cpu", preprocess=PREPARED)
    assert unnamed(photo, top=1)[0].name == f"class {nobody(photo)[0].number}"


@pytest.mark.parametrize(
    ("metadata", "options", "words"),
    [
        (None, {}, "preprocess: expected imagenet or other settings, for test reads float32"),
        ({model_metadata.PREPROCESS: "squash=7"}, {}, "metadata cnn_engine.preprocess: preprocess: expected"),
        ({model_metadata.PREPROCESS: "resize=16"}, {"preprocess": "crop=17"}, "expected images of 16x16"),
        ({**SAID, model_metadata.CLASSES: "[1, 2, 3]"}, {}, "cnn_engine.classes: expected names as text"),
        ({**SAID, model_metadata.CLASSES: '["a"]'}, {}, "classes: expected 3 names, one for each output"),
        ({**SAID, model_metadata.CLASSES: "[" * 10**5}, {}, "classes: expected JSON"),
        (SAID, {"classes": ["a", "b"]}, "classes: expected 3 names, one for each output"),
        (SAID, {"classes": "missing.txt"}, "missing.txt: cannot be read"),
    ],
)  # fmt: skip
def test_what_is_said_wrongly_is_one_line(metadata, options, words):
    with pytest.raises(InputError) as error:
        Classifier(model(None, metadata), device="cpu", **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_image_and_no_number(tmp_path):
    classifier = Classifier(model(None, SAID), device="cpu")
    for given, words in (
        (np.zeros((16, 16, 3), np.float32), r"uint8 \[H, W\] or \[H, W, 3\]"),
        (np.zeros((3, 16, 16), np.uint8), r"uint8 \[H, W\] or \[H, W, 3\]"),
        (7, "an image of Pillow's or an array, found int"),
        (Image.new("I;16", (16, 16)), "at most 8 bits a channel"),
        (str(tmp_path / "none.jpg"), r"none.jpg: expected an image, found none .*\(No such file"),
    ):
        with pytest.raises(InputError, match=words):
            classifier(given)
    with pytest.raises(InputError, match="top: expected a whole number"):
        classifier(colour(1, 2, 3), top=0)
    with pytest.raises(InputError, match="images: expected a list"):
        classifier.many("photo.jpg")
    broken = model(None, SAID)
    broken.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.full((3, 3), 3e38, np.float32), "w")
    )
    with pytest.raises(InputError, match="numbers as outputs, found NaN or infinity"):
        Classifier(broken, device="cpu")(colour(255, 255, 255))
    flat = onnx_models.model(
        [helper.make_node("Relu", ["x"], ["y"])],
        [onnx_models.tensor("x", [1, 3, 16, 16])],
        [onnx_models.tensor("y", [1, 3, 16, 16])],
    )
    with pytest.raises(UnsupportedError, match="expected one row of float32 per image"):
        Classifier(flat, device="cpu", preprocess="none")


def test_what_a_file_says_is_kept_by_large_files_batches_and_pickles(tmp_path):
    made = model(None, SAID)
    large = numpy_helper.from_array(np.zeros((2**22 + 8,), np.float32), "unused")
    made.graph.initializer.append(large)  # of a size from which files are mapped
    path = tmp_path / "large.onnx"
    path.write_bytes(made.SerializeToString())
    graph = cnn_engine.load(path)
    assert graph.metadata == {"producer's own": "1", **SAID}
    assert graph.with_batch(5).metadata == graph.metadata
    assert pickle.loads(pickle.dumps(graph)).metadata == graph.metadata
    engine = pickle.loads(pickle.dumps(Engine(path, device="cpu")))
    assert model_metadata.preprocess_of(engine.network) == PREPARED
    data = model_metadata.added(model().SerializeToString(), SAID)
    assert cnn_engine.load(data).metadata == SAID
    onnx.checker.check_model(onnx.load_from_string(data))


@pytest.fixture
def folder(tmp_path):
    """A model's file, and three photos in folders that have the names of its classes."""
    (tmp_path / "net.onnx").write_bytes(model(None, SAID).SerializeToString())
    for name, pixel in zip(NAMES, ((255, 0, 0), (0, 255, 0), (0, 0, 255)), strict=True):
        save(tmp_path / "photos" / name / "a.png", colour(*pixel))
    return tmp_path


def test_the_command_names_photos_and_says_who_said_so(folder, capsys):
    (folder / "bad.jpg").write_text("none")
    words = ["--model", str(folder / "net.onnx"), "--device", "cpu"]
    assert classify.main([str(folder / "photos"), *words, "--top", "1"]) == 0
    found = capsys.readouterr().out
    assert f"images are prepared by {PREPARED} and outputs have their names as its file" in found
    assert found.index("blauer Fuß/a.png") < found.index("green/a.png")
    assert found.count("%") == 3
    classes = [str(folder / "bad.jpg"), str(folder / "photos/green/a.png")]
    assert classify.main([*classes, *words, "--json", "-"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {folder}/bad.jpg: expected an image")
    (row,) = json.loads(captured.out)["photos"]
    assert row["file"] == classes[1]
    assert row["classes"][0]["name"] == "green"
    assert classify.main([classes[1], *words, "--classes", "missing.txt"]) == 2
    assert classify.main([classes[1], *words, "--json", classes[1]]) == 2
    assert "error: --json: expected a path of its own" in capsys.readouterr().err


def test_run_and_infer_prepare_as_the_file_says(folder, capsys):
    model_at, photos = str(folder / "net.onnx"), str(folder / "photos")
    words = ["--model", model_at, "--device", "cpu"]
    saved = folder / "p.npy"
    more = [
        "--iterations",
        "1",
        "--save-probabilities",
        str(saved),
        "--json",
        str(folder / "r.json"),
    ]
    assert run.main([*words, "--data", photos, *more]) == 0
    document = json.loads((folder / "r.json").read_text())
    assert document["accuracy"]["correct"] == 3
    assert any(f"images are prepared by {PREPARED}" in note for note in document["notes"])
    wanted = [logits(*pixel) for pixel in ((0, 0, 255), (0, 255, 0), (255, 0, 0))]
    np.testing.assert_allclose(np.load(saved), wanted, rtol=1e-5, atol=1e-6)
    assert run.main([*words, "--data", photos, *more, "--preprocess", "resize=16x16"]) == 0
    np.testing.assert_allclose(np.load(saved), 4 * np.eye(3)[::-1], rtol=1e-5, atol=1e-6)
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    out = folder / "out"
    assert infer.main([photos, "--output", str(out), *words, "--workers", "1"]) == 0
    assert f"prepared by {PREPARED}, as the model's file says" in " ".join(
        capsys.readouterr().out.split()
    )
    table = parquet.read_table(out)
    np.testing.assert_allclose(table["outputs"].to_pylist(), wanted, rtol=1e-5, atol=1e-6)


def test_a_photo_of_any_size_by_the_network_that_comes_with_its_weights(tmp_path, capsys):
    photo = picture(70, 50, seed=3)
    with Classifier("cifar10", device="cpu") as classifier:
        found = classifier(photo)
        pixels = images.pixels_of(photo, Preprocess(32, (32, 32)), (3, 32, 32))
        wanted = classifier.engine.predict(pixels[None])[0]
    assert [(one.name, one.number) for one in found] == [
        (cifar10.CLASSES[n], n) for n in np.argsort(-wanted)[:5]
    ]
    path = str(save(tmp_path / "a.png", photo))
    assert classify.main([path, "--device", "cpu", "--top", "1"]) == 0
    _, line = capsys.readouterr().out.strip().split("\n")
    assert line.split()[-1] == found[0].name
