"""Folders, lists and names of classes; and networks run over them, with top-1 and top-5."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_models
import pytest
import tolerances
from image_files import picture, save
from onnx import helper

import cnn_engine
from cnn_engine import InputError, Network, run
from cnn_engine.characterize import command as characterize
from cnn_engine.engine.engine import Engine
from cnn_engine.io import image_files
from cnn_engine.io.image_files import Classes, find, is_image_files, load
from cnn_engine.io.images import FORMATS, decode
from cnn_engine.io.preprocess import Preprocess
from cnn_engine.measure import accuracy
from cnn_engine.measure.result import Accuracy, Result
from cnn_engine.report import text as report_text

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seven classes of three images of 40 to 60 pixels, and what is none."""
    folder = tmp_path_factory.mktemp("folder")
    for number, name in enumerate(NAMES):
        for index in range(3):
            image = picture(40 + number, 60 - index, seed=10 * number + index)
            save(folder / name / f"{index}.jpg", image)
    (folder / "ant" / "notes.txt").write_text("not an image")
    (folder / "bee" / ".hidden.jpg").write_text("not an image")
    (folder / ".cache").mkdir()
    save(folder / "cat" / "deeper" / "9.png", picture(40, 40))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A network of 3 x 24 x 24 to seven logits, for any batch."""
    generator = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[2, 2], name="layer1.0.conv"),
        helper.make_node("Relu", ["c"], ["r"], name="layer1.0.relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "v"], ["y"], name="fc"),
    ]
    constants = {
        "w": generator.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "v": generator.standard_normal((8, 7)).astype(np.float32),
    }
    made = onnx_models.model(
        nodes,
        [onnx_models.tensor("x", ["n", 3, 24, 24])],
        [onnx_models.tensor("y", ["n", 7])],
        constants,
    )
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    path.write_bytes(made.SerializeToString())
    return path


PREPROCESS = "resize=30,crop=24,mean=0.5/0.4/0.3,std=0.2/0.3/0.4"


# ---- what is found ----


def test_a_folder_with_one_folder_a_class(folder):
    assert is_image_files(str(folder))
    found = find(str(folder), 7)
    assert found.classes == list(NAMES)
    assert list(found.labels) == [0] * 3 + [1] * 3 + [2] * 4 + [3] * 3 + [4] * 3 + [5] * 3 + [6] * 3
    names = [file.removeprefix(str(folder)) for file in found.files]
    assert names[:3] == ["/ant/0.jpg", "/ant/1.jpg", "/ant/2.jpg"]
    assert "/cat/deeper/9.png" in names
    assert found.note is None
    subset = find(str(folder), 9)  # of which outputs, nobody says: no accuracy that means nothing
    assert subset.labels is None
    assert "7 folders do not say which of 9 outputs they are" in subset.note
    with pytest.raises(
        InputError, match="expected at most 6 folders, one for each output, found 7"
    ):
        find(str(folder), 6)


def test_a_folder_that_lies_in_itself(tmp_path):
    save(tmp_path / "a" / "x.png", picture(4, 4))
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert len(find(str(tmp_path / "a"), 3)) == 1


def test_a_part_is_spread_over_the_classes(folder):
    found = find(str(folder), 7)
    assert list(found.spread(7).labels) == [0, 1, 2, 2, 3, 4, 5]
    assert len(set(found.spread(11).labels)) == 7
    assert list(found.spread(None).labels) == list(found.labels)
    with pytest.raises(InputError, match="images: expected at most 22, .*found 23"):
        found.spread(23)


def test_every_format_that_is_read_is_found_by_its_name(tmp_path):
    Pillow = pytest.importorskip("PIL.Image")
    image = np.full((5, 4, 3), (20, 40, 60), np.uint8)
    formats = {Pillow.registered_extensions()[suffix] for suffix in image_files.SUFFIXES}
    assert formats == set(FORMATS)
    for suffix in image_files.SUFFIXES:
        how = {"lossless": True} if suffix == ".webp" else {}
        Pillow.fromarray(image).save(tmp_path / f"image{suffix}", **how)
    found = find(str(tmp_path), 3)
    assert len(found.files) == len(image_files.SUFFIXES)
    for file in found.files:
        read = decode(file, Preprocess(), (3, 5, 4)).astype(int)
        lost = 2 if file.endswith(("jpg", "jpeg")) else 0
        assert abs(read - image.transpose(2, 0, 1)).max() <= lost


def test_images_without_classes(tmp_path):
    for name in ("b.png", "a.PNG"):
        save(tmp_path / name, picture(4, 4), format="png")
    found = find(str(tmp_path), 7)
    assert [file.rsplit("/")[-1] for file in found.files] == ["a.PNG", "b.png"]
    assert found.labels is None
    assert len(find(str(tmp_path / "b.png"), 7)) == 1


def test_no_images(tmp_path):
    assert not is_image_files(str(tmp_path))
    assert not is_image_files(str(tmp_path / "missing.jpg"))
    with pytest.raises(InputError, match="expected images"):
        find(str(tmp_path), 7)


def test_lists(tmp_path, folder):
    def found(text: str, classes: Classes | None = None):
        path = tmp_path / "list.txt"
        path.write_text(text)
        assert is_image_files(str(path))
        return find(str(path), 7, classes)

    plain = found(f"{folder}/ant/0.jpg 3\n\nwith a space.jpg\t6\n")
    assert list(plain.labels) == [3, 6]
    assert plain.files == [f"{folder}/ant/0.jpg", f"{tmp_path}/with a space.jpg"]
    assert found("a.jpg\nb.jpg\n").labels is None
    named = found("".join(f"{n}.jpg {n}\n" for n in reversed(NAMES)))
    assert list(named.labels) == [6, 5, 4, 3, 2, 1, 0]
    assert named.classes == list(NAMES)
    classes = Classes(NAMES, {name: number for number, name in enumerate(NAMES)})
    assert list(found("a.jpg bee\n", classes).labels) == [1]
    for text, words in {
        "": "expected lines of a path and a label, found none",
        "a.jpg 7\n": "expected labels from 0 to 6, found 7",
        "a.jpg -1\n": "expected labels by number",
        "a.jpg 1\nb.jpg\n": "expected a label after every path, or after none, found 'b.jpg'",
        "a.jpg bee\n": "or 7 names, or --classes FILE with it, found 1 names, such as 'bee'",
    }.items():
        with pytest.raises(InputError) as error:
            found(text)
        assert words in str(error.value)
    with pytest.raises(
        InputError, match="expected labels that the network's classes have, found 'bat'"
    ):
        found("a.jpg bat\n", classes)


# ---- names of classes ----


@pytest.mark.parametrize(
    ("name", "text", "names", "keys"),
    [
        ("a.txt", "tench\n\ngoldfish \n", ("tench", "goldfish"), {"tench": 0, "goldfish": 1}),
        (
            "a.txt",
            "n01440764 tench, Tinca tinca\nn01443537 goldfish\n",
            ("tench, Tinca tinca", "goldfish"),
            {"n01440764": 0, "tench, Tinca tinca": 0, "n01443537": 1, "goldfish": 1},
        ),
        ("a.json", '["a", "b"]', ("a", "b"), {"a": 0, "b": 1}),
        (
            "a.json",
            '{"0": ["n01440764", "crane"], "1": ["n01443537", "crane"]}',
            ("crane", "crane"),
            {"n01440764": 0, "n01443537": 1},
        ),
        ("a.json", '{"b": 1, "a": 0}', ("a", "b"), {"a": 0, "b": 1}),
        ("words", '{"1": "b", "0": "a"}', ("a", "b"), {"a": 0, "b": 1}),
    ],
)
def test_names_of_classes(tmp_path, name, text, names, keys):
    (tmp_path / name).write_text(text)
    found = Classes.read(str(tmp_path / name), 2)
    assert (found.names, found.keys) == (names, keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('["a"]', "expected 2 names, one for each output of the network, found 1"),
        ('{"0": "a", "2": "b"}', "expected the numbers from 0 to 1, each once"),
        ('{"a": 1, "b": 1}', "expected the numbers from 0 to 0, each once"),
        ("[1, 2]", "expected names as text, found [1]"),
        ("7", "expected a list of names, or an object, found int"),
        ("{", "expected JSON"),
    ],
)
def test_names_that_are_refused(tmp_path, text, words):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        Classes.read(str(path), 2)
    assert words in str(error.value)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Classes.read(str(tmp_path / "missing"), 2)


def test_folders_are_found_by_the_names_of_classes(folder, tmp_path):
    path = tmp_path / "c.txt"
    path.write_text("\n".join(reversed(NAMES)))
    found = find(str(folder), 7, Classes.read(str(path), 7))
    assert list(found.labels)[:4] == [6, 6, 6, 5]
    assert found.classes == tuple(reversed(NAMES))
    path.write_text("\n".join(["wolf", *NAMES[1:]]))
    with pytest.raises(InputError, match="folders called as the network's classes, found ant"):
        find(str(folder), 7, Classes.read(str(path), 7))
    path.write_text(
        "\n".join(name.upper() for name in NAMES)
    )  # names for people, in the folders' order
    found = find(str(folder), 7, Classes.read(str(path), 7))
    assert list(found.labels)[:4] == [0, 0, 0, 1]
    assert found.classes[6] == "GNU"


# ---- accuracy ----


def test_top1_and_top5_are_counted():
    rows = np.zeros((6, 8), np.float32)
    rows[0, 3] = 1  # first
    rows[1, :5] = (5, 4, 3, 2, 1)  # fifth
    rows[2, :6] = (6, 5, 4, 3, 2, 1)  # sixth
    rows[4, 2] = np.nan
    labels = np.array([3, 4, 5, 4, 2, 99])  # the fourth: fifth of equals; the last: no output
    found = accuracy.count(rows, labels)
    assert found == Accuracy(2, 6, 3)  # argmax takes NaN for the largest, as it always did
    assert accuracy.count(rows, np.array([3, 0, 0, 5, 0, 0])) == Accuracy(4, 6, 5)
    assert accuracy.count(rows[:, :5], labels).top5 is None
    assert found + found == Accuracy(4, 12, 6)
    assert (found + Accuracy(1, 1)).top5 is None


# ---- networks over files ----


def run_json(capsys, *arguments: object) -> dict:
    plain = ["--device", "cpu", "--threads", "1", "--iterations", "1", "--json", "-", "--quiet"]
    assert run.main([*map(str, arguments), *plain]) == 0
    return json.loads(capsys.readouterr().out)


def expected_rows(model, folder) -> tuple[np.ndarray, np.ndarray]:
    found = find(str(folder), 7)
    preprocess = Preprocess.parse(PREPROCESS)
    shape = (3, 24, 24)
    pixels = np.stack([image_files.decoded([f], preprocess, shape).__next__() for f in found.files])
    return Engine(model, device="cpu", threads=1).predict(
        preprocess.normalised(pixels)
    ), found.labels


def test_a_model_over_a_folder(model, folder, tmp_path, capsys):
    out = tmp_path / "p.npy"
    document = run_json(
        capsys, "--model", model, "--data", folder, "--preprocess", PREPROCESS,
        "--save-probabilities", out,
    )  # fmt: skip
    rows, labels = expected_rows(model, folder)
    assert np.array_equal(np.load(out), rows)
    correct = int(np.sum(rows.argmax(1) == labels))
    fifth = np.sort(rows, axis=1)[:, -5]
    top5 = int(np.sum(rows[np.arange(22), labels] >= fifth))
    assert 0 < top5 < 22
    assert document["accuracy"] == {
        "correct": correct, "total": 22, "top5_correct": top5, "top1": correct / 22, "top5": top5 / 22,
    }  # fmt: skip
    assert document["dataset"] == {"name": folder.name, "source": str(folder), "images": 22}
    first = document["predictions"][0]
    assert first["file"] == "ant/0.jpg"
    assert first["label_name"] == "ant"
    assert first["top"][0] == rows[0].argmax()
    assert first["names"][0] == NAMES[first["top"][0]]
    assert first["outputs"][0] == pytest.approx(float(rows[0].max()))


def test_what_is_not_held_is_decoded_beside_the_passes(
    model, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(load.__kwdefaults__, "held_bytes", 5 * 3 * 24 * 24 * 4)
    out = tmp_path / "p.npy"
    document = run_json(
        capsys, "--model", model, "--data", folder, "--preprocess", PREPROCESS, "--batch", 2,
        "--save-probabilities", out,
    )  # fmt: skip
    rows, labels = expected_rows(model, folder)
    assert document["dataset"]["images"] == 5
    assert document["dataset"]["total_images"] == document["dataset"]["predicted_images"] == 22
    assert document["accuracy"]["total"] == 22
    assert document["accuracy"]["correct"] == int(np.sum(rows.argmax(1) == labels))
    assert np.array_equal(np.load(out), rows)
    assert any("times are of 5 of 22" in note for note in document["notes"])
    result = Result.from_dict(document)
    assert result.predictions[0].file == "ant/0.jpg"
    assert f"{folder.name}, 5 images of 22" in report_text.render(result)
    document["dataset"]["total_images"] = "many"
    with pytest.raises(InputError, match="total_images: expected a value of type int"):
        Result.from_dict(document)


def test_a_model_for_one_size_of_batch_is_given_full_passes(model, folder, tmp_path, capsys):
    made = onnx.load(model)
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    fixed = tmp_path / "fixed.onnx"
    onnx.save(made, fixed)
    out = tmp_path / "p.npy"
    document = run_json(
        capsys, "--model", fixed, "--data", folder, "--preprocess", PREPROCESS,
        "--save-probabilities", out,
    )  # fmt: skip
    rows, labels = expected_rows(model, folder)
    assert document["dataset"]["images"] == 20
    assert document["accuracy"]["total"] == 22
    assert document["accuracy"]["correct"] == int(np.sum(rows.argmax(1) == labels))
    assert np.abs(np.load(out) - rows).max() <= tolerances.NETWORK_LOGITS * np.abs(rows).max()
    data = ["--data", str(folder), "--preprocess", PREPROCESS, "--images", "3"]
    assert run.main(["--model", str(fixed), *data]) == 2
    assert (
        "expected at least 4 images, for which alone the model is made, found 3"
        in capsys.readouterr().err
    )


def test_interrupted_it_keeps_what_was_counted(model, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(load.__kwdefaults__, "held_bytes", 5 * 3 * 24 * 24 * 4)
    ahead = image_files._ahead

    def interrupted(items):
        yield next(ahead(items))
        raise KeyboardInterrupt

    monkeypatch.setattr(image_files, "_ahead", interrupted)
    monkeypatch.setattr(accuracy, "LEAST", 4)
    path, out = tmp_path / "r.json", tmp_path / "p.npy"
    data = ["--data", str(folder), "--preprocess", PREPROCESS, "--batch", "2"]
    options = ["--device", "cpu", "--threads", "1", "--iterations", "1", "--json", str(path)]
    words = ["--model", str(model), *data, *options, "--save-probabilities", str(out)]
    assert run.main(words) == 130
    document = json.loads(path.read_text())
    assert document["interrupted"] is True
    assert document["accuracy"]["total"] == document["dataset"]["predicted_images"] == 9
    assert len(np.load(out)) == 9
    assert any("interrupted after 4 of them" in note for note in document["notes"])


def test_the_report_shows_top5_and_predictions(model, folder, tmp_path, capsys):
    page = tmp_path / "r.html"
    options = ["--device", "cpu", "--threads", "1", "--iterations", "1", "--html", str(page)]
    data = ["--data", str(folder), "--preprocess", PREPROCESS]
    assert run.main(["--model", str(model), *data, *options]) == 0
    out = capsys.readouterr().out
    assert "Net Accuracy top-5: " in out
    assert "ant/0.jpg" in out
    assert "wrong: " in out
    html = page.read_text()
    assert "Accuracy, top-5" in html
    assert "ant/0.jpg" in html


def test_a_network_of_pixels_over_a_folder(tmp_path, capsys):
    for number in range(10):
        save(tmp_path / "data" / str(number) / "x.png", picture(32, 32, seed=number))
    document = run_json(capsys, "--data", tmp_path / "data")
    assert document["accuracy"]["total"] == 10
    found = find(str(tmp_path / "data"), 10)
    pixels = np.stack(
        [next(image_files.decoded([f], Preprocess(), (3, 32, 32))) for f in found.files]
    )
    wanted = Engine("cifar10", device="cpu").predict(pixels)
    assert document["accuracy"]["correct"] == int(np.sum(wanted.argmax(1) == found.labels))
    assert document["predictions"][0]["outputs"][0] == pytest.approx(float(wanted[0].max()))


def test_characterize_takes_files_too(model, folder, tmp_path):
    code = characterize.main(
        ["--model", str(model), "--data", str(folder), "--preprocess", PREPROCESS, "--batch", "2,22",
         "--duration", "0.01", "--settle", "0.01", "--device", "cpu", "--no-plot", "--quiet",
         "--output", str(tmp_path)]
    )  # fmt: skip
    assert code == 0
    document = json.loads((tmp_path / "characterize.json").read_text())
    rows, labels = expected_rows(model, folder)
    assert document["points"][1]["accuracy"] == pytest.approx(np.mean(rows.argmax(1) == labels))


def test_characterize_takes_a_model_and_makes_images(model, tmp_path):
    options = ["--duration", "0.01", "--settle", "0.01", "--device", "cpu", "--no-plot", "--quiet"]
    out = ["--output", str(tmp_path)]
    model_options = ["--model", str(model), "--variant", "blocked,if", "--batch", "1,3"]
    assert characterize.main([*model_options, *options, *out]) == 0
    document = json.loads((tmp_path / "characterize.json").read_text())
    assert [point["status"] for point in document["points"]] == ["ok"] * 4
    assert {point["variant"] for point in document["points"]} == {"blocked", "if"}
    assert all(point["throughput_images_per_s"] > 0 for point in document["points"])
    assert document["options"]["dataset"]["labels"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "MODEL", "--data", "DATA"], "--preprocess: expected imagenet or other settings"),
        (["--model", "MODEL", "--data", "DATA", "--preprocess", "imagenet"], "images of 24x24"),
        (["--model", "MODEL", "--data", "DATA", "--preprocess", "crop=24", "--images", "99"],
         "--images: expected at most 22"),
        (["--data", "DATA"], "expected an image of 32x32 (--preprocess resizes and crops), found 40x60"),
        (["--preprocess", "imagenet"], "--preprocess: expected files of images in --data with it"),
        (["--classes", "x"], "--classes: expected files of images in --data with it, found auto"),
        (["--data", "BROKEN"], "broken/a/x.jpg: expected an image, found"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(arguments, words, model, folder, tmp_path, capsys):
    broken = tmp_path / "broken" / "a" / "x.jpg"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"\xff\xd8\xff\xe0 and no more")
    given = {"MODEL": str(model), "DATA": str(folder), "BROKEN": str(tmp_path / "broken")}
    assert run.main([given.get(word, word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


def test_an_engine_profiles_files(folder):
    layers = (cnn_engine.Linear("fc", 7), cnn_engine.Softmax("softmax"))
    network = Network("tiny", (1, 20, 30), layers, scale=1 / 255, offset=-0.5)
    data = load(str(folder), (1, 20, 30), 7, dtype="uint8", preprocess=Preprocess((20, 30)))
    result = Engine(network, weights="random", device="cpu").profile(data, iterations=1)
    assert result.accuracy.total == 22
    assert result.check.passed
