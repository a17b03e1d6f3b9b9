"""Photos to boxes, masks and pictures: letterbox, layouts of outputs, suppression, and ``run --draw``."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import Image, picture, save
from onnx import TensorProto, helper

import cnn_engine
from cnn_engine import Detector, InputError, UnsupportedError, run
from cnn_engine.io import images, model_metadata
from cnn_engine.io.preprocess import Preprocess
from cnn_engine.vision import boxes, pictures, viewer

SIZE = (64, 96)  # rows, columns
CELLS = sum((SIZE[0] // s) * (SIZE[1] // s) for s in (8, 16, 32))
NAMES = ["cat", "dog", "bird"]

#: Boxes as x1, y1, x2, y2 of the network's pixels, score, class: the second is on the first and worse, the
#: third on it of another class, the last below any threshold.
PLANTED = [
    (20.0, 25.0, 60.5, 45.0, 0.9, 1),
    (21.0, 25.0, 61.5, 45.0, 0.8, 1),
    (20.0, 24.0, 60.0, 44.0, 0.7, 2),
    (3.25, 20.0, 15.0, 50.0, 0.6, 0),
    (70.0, 25.0, 80.0, 35.0, 0.1, 0),
]
WANTED = [PLANTED[0], PLANTED[2], PLANTED[3]]


def constant(outputs: dict[str, np.ndarray], ends: dict[str, str] | None = None, **more) -> bytes:
    """A network that gives the same for every image: ``outputs`` without the batch, perhaps after a node."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Mul", ["pooled", "zero"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros", "axis"], ["none"], keepdims=1),
    ]
    shapes, constants = [], {"zero": np.float32(0), "axis": np.array([1])}
    for name, array in outputs.items():
        end = (ends or {}).get(name)
        constants[f"{name}_shape"] = np.array([-1, *[1] * array.ndim])
        constants[f"{name}_values"] = array[None].astype(np.float32)
        nodes += [
            helper.make_node("Reshape", ["none", f"{name}_shape"], [f"{name}_zero"]),
            helper.make_node(
                "Add", [f"{name}_zero", f"{name}_values"], [f"{name}_end" if end else name]
            ),
        ]
        kind = TensorProto.FLOAT
        if end == "Cast":
            kind = TensorProto.INT64
            nodes.append(helper.make_node("Cast", [f"{name}_end"], [name], to=kind))
        elif end:
            nodes.append(helper.make_node(end, [f"{name}_end"], [name]))
        shapes.append(onnx_models.tensor(name, ["n", *array.shape], kind))
    size = more.get("size", SIZE)
    made = onnx_models.model(nodes, [onnx_models.tensor("x", ["n", 3, *size])], shapes, constants)
    if more.get("metadata"):
        helper.set_model_props(made, more["metadata"])
    return made.SerializeToString()


def corners() -> np.ndarray:
    return np.array([row[:4] for row in PLANTED])


def centred() -> np.ndarray:
    low, high = corners()[:, :2], corners()[:, 2:]
    return np.concatenate([(low + high) / 2, high - low], 1)


def scores(classes: int = 3, background: int = 0) -> np.ndarray:
    table = np.zeros((len(PLANTED), background + classes))
    for row, (*_, score, number) in zip(table, PLANTED, strict=True):
        row[background + number] = score
    return table


def padded(table: np.ndarray, count: int, at: int = 7) -> np.ndarray:
    """Rows of ``table`` among ``count`` rows of zeros."""
    found = np.zeros((count, table.shape[1]))
    found[at : at + len(table)] = table
    return found


def logit(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, 1e-6, 1 - 1e-6)
    return np.log(p / (1 - p))


def softmax_logits(classes: np.ndarray, last: bool) -> np.ndarray:
    rest = np.maximum(1 - classes.sum(1, keepdims=True), 1e-6)
    p = np.concatenate([classes, rest] if last else [rest, classes], 1)
    return np.log(np.maximum(p, 1e-6))


FRACTION = (SIZE[1], SIZE[0], SIZE[1], SIZE[0])
YOLO8 = padded(np.concatenate([centred(), scores()], 1), CELLS)
# The score of the box times that of the class is the planted one.
YOLO5 = padded(np.concatenate([centred(), np.full((5, 1), 0.95), scores() / 0.95], 1), 3 * CELLS)
SSD = softmax_logits(scores(), False)
FINAL = np.array([[*row[:4], row[4], row[5]] for row in WANTED])
LISTS = {"boxes": FINAL[:, :4], "scores": FINAL[:, 4], "labels": FINAL[:, 5]}

LAYOUTS = {
    "yolov8": (constant({"y": YOLO8.T}), None),
    "yolov8 turned, by its names": (constant({"y": YOLO8}), None),
    "yolov8 with masks": (constant({"y": np.pad(YOLO8, ((0, 0), (0, 2))).T, "p": np.ones((2, 8, 12))}), None),
    "yolov5": (constant({"y": YOLO5}), None),
    "yolov5 turned, by its names": (constant({"y": YOLO5.T}), None),
    "end2end": (constant({"y": padded(FINAL, 20)}), None),
    "ssd": (constant({"s": SSD, "b": corners() / FRACTION}, {"s": "Softmax"}), None),
    "ssd in pixels": (constant({"b": corners(), "s": SSD}, {"s": "Softmax"}), None),
    "retinanet": (constant({"b": corners(), "s": logit(scores())}, {"s": "Sigmoid"}), None),
    "detr": (constant({"pred_boxes": centred()[[0, 2, 3]] / FRACTION,
                       "logits": softmax_logits(scores()[[0, 2, 3]], True)}), None),
    "rtdetr": (constant({"b": centred()[[0, 2, 3]] / FRACTION, "s": logit(scores()[[0, 2, 3]])}), "rtdetr"),
    "lists": (constant(LISTS, {"labels": "Cast"}), None),
    "tensorflow": (constant({"detection_boxes": (FINAL[:, :4] / FRACTION)[:, [1, 0, 3, 2]],
                             "detection_scores": FINAL[:, 4], "detection_classes": FINAL[:, 5] + 1}), None),
}  # fmt: skip


def in_photo(box: tuple[float, ...], rows: int, columns: int) -> np.ndarray:
    """Where a box of the network's pixels is in a photo, in float64, by the letterbox's definition."""
    scale = min(SIZE[0] / rows, SIZE[1] / columns)
    height, width = max(round(rows * scale), 1), max(round(columns * scale), 1)
    top, left = (SIZE[0] - height) // 2, (SIZE[1] - width) // 2
    x, y = columns / width, rows / height
    x1, y1, x2, y2 = box
    found = [(x1 - left) * x, (y1 - top) * y, (x2 - left) * x, (y2 - top) * y]
    return np.clip(found, 0, [columns, rows, columns, rows])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_of_every_layout(layout):
    model, head = LAYOUTS[layout]
    prepared = Preprocess(letterbox=SIZE, fill=114)
    with Detector(model, device="cpu", classes=NAMES, head=head, preprocess=prepared) as detector:
        assert detector.sight.head.name == layout.split()[0]
        for rows, columns in ((96, 131), (64, 96), (480, 640)):
            found = detector(picture(rows, columns, seed=1))
            assert [one.name for one in found] == ["dog", "bird", "cat"]
            np.testing.assert_allclose(found.scores, [row[4] for row in WANTED], rtol=1e-4)
            wanted = [in_photo(row[:4], rows, columns) for row in WANTED]
            np.testing.assert_allclose(found.boxes, wanted, rtol=0, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 700), st.integers(1, 700))
def test_a_letterbox_and_its_inverse(rows, columns, height, width):
    place = Preprocess(letterbox=(height, width)).placement(rows, columns)
    points = np.random.default_rng(rows).uniform(0, 1, (50, 4)) * (columns, rows, columns, rows)
    there = place.to_network(points)
    np.testing.assert_allclose(
        place.to_image(there), points, rtol=0, atol=1e-9 * max(rows, columns)
    )
    # The image's own corners are the corners of what it was resized to, which touches the frame.
    box = place.to_network(np.array([0.0, 0.0, columns, rows]))
    low, high = (
        (place.left, place.top),
        (place.left + place.resized[1], place.top + place.resized[0]),
    )
    np.testing.assert_allclose(box, [*low, *high], rtol=0, atol=1e-9)
    assert min(low) >= 0
    beyond = np.subtract((width, height), high)
    assert min(beyond) >= 0
    assert place.resized[0] == height or place.resized[1] == width
    assert np.abs(low - beyond).max() <= 1


@pytest.mark.parametrize(
    ("rows", "columns"), [(33, 301), (301, 33), (7, 5), (64, 96), (1, 900), (126, 192)]
)
def test_a_letterbox_has_the_whole_photo_in_grey(rows, columns):
    """The pixels are those of Pillow's resize, and of the fill around it."""
    photo = picture(rows, columns, seed=2)
    prepared = Preprocess.parse("letterbox=64x96,fill=114")
    images.pixels_of(photo, prepared, (3, *SIZE))  # from the second of a size on, by our own kernel
    found = images.pixels_of(photo, prepared, (3, *SIZE))
    place = prepared.placement(rows, columns)
    wanted = np.full((*SIZE, 3), 114, np.uint8)
    resized = photo.resize(place.resized[::-1], Image.Resampling.BILINEAR)
    inside = np.s_[
        place.top : place.top + place.resized[0], place.left : place.left + place.resized[1]
    ]
    wanted[inside] = np.asarray(resized)
    np.testing.assert_array_equal(found, wanted.transpose(2, 0, 1))
    assert str(Preprocess.parse(str(prepared))) == str(prepared) == "letterbox=64x96,fill=114"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("letterbox=64,crop=64", "letterbox: expected no resize and no crop with it"),
        ("imagenet,letterbox=64", "letterbox: expected no resize and no crop with it"),
        ("letterbox=0", "letterbox: expected sides from 1"),
        ("letterbox=64,fill=256", "fill: expected a whole number from 0 to 255"),
        ("letterbox=64,fill=none", "fill: expected a whole number from 0 to 255"),
    ],
)
def test_a_letterbox_said_wrongly(text, words):
    with pytest.raises(InputError, match=words):
        Preprocess.parse(text)


def plainly_suppressed(found, score, classes, iou):
    """The definition, box by box in Python's floats."""
    kept: dict[int, list[list[float]]] = {}
    order = []
    for at in sorted(range(len(found)), key=lambda k: (-score[k], k)):
        x1, y1, x2, y2 = found[at].tolist()
        others = kept.setdefault(int(classes[at]), [])
        for a1, b1, a2, b2 in others:
            shared = max(min(x2, a2) - max(x1, a1), 0.0) * max(min(y2, b2) - max(y1, b1), 0.0)
            union = (x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - shared
            if union > 0 and shared / union > iou:
                break
        else:
            others.append([x1, y1, x2, y2])
            order.append(at)
    return order


def test_8400_boxes_of_80_classes_are_suppressed_as_one_by_one():
    rng = np.random.default_rng(3)
    table = np.empty((84, 8400), np.float32)
    low = rng.integers(0, 560, (8400, 2)) * 1.0
    sides = rng.integers(8, 80, (8400, 2)) * 1.0
    table[:4] = np.concatenate([low + sides / 2, sides], 1).T
    table[4:] = (rng.random((80, 8400)) ** 12).astype(np.float32)
    table[4:, 100:200] = table[4:, :1]  # equal scores
    form = viewer.heads.Form(
        (viewer.heads.Output("y", "float32", (84, 8400)),), (3, 640, 640), None, 0, None
    )
    found = viewer.heads.HEADS["yolov8"].read(form, {"y": table}, 0.5)
    assert 5000 < len(found.boxes) <= 8400
    assert np.array_equal(found.classes, table[4:].argmax(0)[table[4:].max(0) > 0.5])
    for classes, count, iou in ((found.classes, 8400, 0.45), (found.classes % 3, 1500, 0.0)):
        some = found.boxes[:count], found.scores[:count], classes[:count]
        wanted = plainly_suppressed(*some, iou)
        assert 100 < len(wanted) < len(some[0])
        assert boxes.suppressed(*some, iou, 8400).tolist() == wanted
        assert boxes.suppressed(*some, iou, 90).tolist() == wanted[:90]


def test_a_photo_is_turned_upright_before_its_boxes(tmp_path):
    photo = picture(96, 131, seed=4)
    exif = photo.getexif()
    exif[0x0112] = 6
    path = save(tmp_path / "turned.png", photo, exif=exif)
    with Detector(LAYOUTS["yolov8"][0], device="cpu", classes=NAMES) as detector:
        found = detector(path)
        wanted = [in_photo(row[:4], 131, 96) for row in WANTED[:2]]  # the last is beside the photo
        np.testing.assert_allclose(found.boxes, wanted, rtol=0, atol=1e-3)
        upright = photo.transpose(Image.Transpose.ROTATE_270)
        assert images.picture(path).tobytes() == upright.tobytes()
    stored = Preprocess(letterbox=SIZE, fill=114, orientation="ignore")
    found = cnn_engine.detect(LAYOUTS["yolov8"][0], path, device="cpu", preprocess=stored)
    np.testing.assert_allclose(found.boxes[0], in_photo(PLANTED[0][:4], 96, 131), rtol=0, atol=1e-3)


def test_what_ultralytics_writes_is_read():
    said = {
        "author": "Ultralytics", "imgsz": "[64, 96]", "names": "{0: 'cat', 1: \"dog's\", 2: 'bird'}",
        "task": "detect",
    }  # fmt: skip
    with Detector(constant({"y": YOLO8.T}, metadata=said), device="cpu") as detector:
        assert detector.sight.preprocess == Preprocess(letterbox=SIZE, fill=114)
        assert [one.name for one in detector(picture(*SIZE, 1))] == ["dog's", "bird", "cat"]
    posed = {**said, "kpt_shape": "[1, 2]"}
    with Detector(
        constant({"y": np.pad(YOLO8, ((0, 0), (0, 2))).T}, metadata=posed), device="cpu"
    ) as one:
        assert [found.name for found in one(picture(*SIZE, 1))] == ["dog's", "bird", "cat"]
    with pytest.raises(InputError, match="metadata names: expected a list or a dictionary"):
        Detector(
            constant({"y": YOLO8.T}, metadata={**said, "names": "os.system('x')"}), device="cpu"
        )
    ours = model_metadata.entries(Preprocess(letterbox=SIZE), NAMES)
    with Detector(constant({"y": YOLO8.T}, metadata=ours), device="cpu") as detector:
        assert (detector.sight.preprocess.fill, detector.sight.names) == (0, tuple(NAMES))


@pytest.mark.parametrize(
    ("outputs", "options", "words"),
    [
        ({"y": np.zeros(7)}, {}, r"head: expected outputs as one of end2end .* found .* y float32 \[N, 7\]"),
        ({"y": YOLO8.T}, {"head": "yolo"}, "head: expected one of .*, found 'yolo'"),
        ({"y": YOLO8.T}, {"head": "ssd"}, "head: expected outputs as one of ssd"),
        ({"y": YOLO8.T}, {"classes": list("abcd")}, "found model: y .*, and 4 classes"),
        ({"b": corners(), "s": scores()}, {}, "head: expected ssd or retinanet or detr or rtdetr, which"),
        ({"y": np.zeros((3, *SIZE))}, {}, "head: expected mask or image, which all fit"),
        ({"y": YOLO8.T}, {"confidence": 2}, "confidence: expected a number from 0 to 1"),
        ({"y": YOLO8.T}, {"preprocess": "letterbox=64"}, "expected images of 64x96"),
        ({"y": -np.ones_like(YOLO8.T)}, {"sqrt": True}, "model: outputs: expected numbers, found NaN"),
    ],
)  # fmt: skip
def test_what_cannot_be_seen_is_one_line(outputs, options, words):
    ends = {"y": "Sqrt"} if options.pop("sqrt", False) else None
    with pytest.raises((InputError, UnsupportedError), match=words) as error:
        cnn_engine.detect(constant(outputs, ends), picture(*SIZE, 1), device="cpu", **options)
    assert "\n" not in str(error.value)


def test_a_model_of_open_size_reads_letterboxes_of_the_size_that_is_said():
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], strides=[8, 8]),
             helper.make_node("Reshape", ["c", "shape"], ["y"])]  # fmt: skip
    made = onnx_models.model(
        nodes, [onnx_models.tensor("x", ["n", 3, "h", "w"])], [onnx_models.tensor("y", ["n", 7, "a"])],
        {"w": np.full((7, 3, 8, 8), 1e-4, np.float32), "shape": np.array([0, 7, -1])},
    )  # fmt: skip
    with pytest.raises(InputError, match="preprocess: expected letterbox=640 or other settings"):
        Detector(made.SerializeToString(), device="cpu")
    with Detector(
        made.SerializeToString(), device="cpu", preprocess="letterbox=96x160", head="yolov8"
    ) as one:
        assert len(one(picture(70, 50, 1))) == 0


# ---- pictures ----


def test_run_draws_boxes_of_every_photo(tmp_path, capsys):
    model = tmp_path / "yolo.onnx"
    model.write_bytes(LAYOUTS["yolov8"][0])
    photos = {"a.jpg": (96, 131), "a.png": (40, 300), "sub/b.png": SIZE}
    (tmp_path / "in/sub").mkdir(parents=True)
    for at, (name, size) in enumerate(photos.items()):
        save(tmp_path / "in" / name, picture(*size, seed=at))
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\nbird\n")
    out = tmp_path / "out"
    words = [
        "--model",
        str(model),
        "--data",
        str(tmp_path / "in"),
        "--device",
        "cpu",
        "--iterations",
        "1",
    ]
    assert run.main([*words, "--draw", str(out), "--classes", str(names)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    # A long path is folded anywhere.
    assert f"drawn:3picturesin{out},9boxes" in text.replace(" ", "")
    assert "outputs are read as yolov8" in text
    drawn = {path.relative_to(out).as_posix() for path in out.rglob("*.*")}
    assert drawn == {"a.jpg.png", "a.png.png", "sub/b.png", "found.json"}
    found = json.loads((out / "found.json").read_text())["photos"]
    assert [row["boxes"][0]["name"] for row in found] == ["dog"] * 3
    for row, size in zip(found, photos.values(), strict=True):
        with Image.open(row["picture"]) as drawing:
            assert drawing.size == size[::-1]
    box = found[2]["boxes"][0]["box"]
    np.testing.assert_allclose(box, PLANTED[0][:4], atol=1e-3)
    with Image.open(out / "sub/b.png") as drawing:  # its right edge, which no label is over
        edge = drawing.getpixel((59, 40))
        assert edge in (pictures.colour(1), pictures.colour(2))
        assert drawing.getpixel((90, 10)) == images.picture(tmp_path / "in/sub/b.png").getpixel(
            (90, 10)
        )
    for more, message in (
        (["--draw", str(tmp_path / "in/out")], "--draw: expected a folder outside of"),
        (["--draw", str(out), "--head", "detr"], "--head: expected outputs as one of detr"),
        (["--iou", "0.5"], "--iou: expected the option --draw with it"),
        (["--draw", str(out), "--data", "synthetic"], "--draw: expected files of images in --data"),
        (["--draw", str(out), "--network", "cifar10"], "cifar10: expected an ONNX model"),
    ):
        given = words[2:] if "--network" in more else words
        assert run.main([*given, *more]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "in/out").exists()


def classes_plane(model_bytes: bytes, photo, **options) -> np.ndarray:
    with viewer.Viewer(model_bytes, device="cpu", preprocess="letterbox=64x96", **options) as one:
        return one(photo).classes


def test_masks_are_as_large_as_the_photo_and_coloured_by_class():
    plane = np.zeros((4, 16, 24), np.float32)
    plane[2, 4:12, 6:18] = 1  # rows 16 to 48, columns 24 to 72 of the network's pixels
    photo = picture(96, 192, seed=5)  # 96 x 48 in the letterbox: 8 rows of fill above and below
    found = classes_plane(constant({"y": plane}), photo)
    wanted = np.zeros((96, 192), np.int64)
    wanted[16:80, 48:144] = 2
    np.testing.assert_array_equal(found, wanted)
    drawn = np.asarray(pictures.draw(viewer.Mask(found), photo)).astype(float)
    pixels = np.asarray(photo).astype(float)
    np.testing.assert_array_equal(drawn[wanted == 0], pixels[wanted == 0])
    mixed = (pixels + pictures.colour(2)) / 2
    np.testing.assert_allclose(drawn[wanted == 2], mixed[wanted == 2], atol=0.51)
    labels = classes_plane(constant({"y": plane.argmax(0)}, {"y": "Cast"}), photo)
    np.testing.assert_array_equal(labels, wanted)
    one = classes_plane(constant({"y": logit(plane[2:3])}, {"y": "Sigmoid"}), photo)
    np.testing.assert_array_equal(one, wanted > 0)


def test_a_picture_that_a_network_enlarges_is_written_as_it_gives_it(tmp_path):
    """Twice as large by nearest: of an open size, and normalised, which is undone."""
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest",
                            coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
    made = onnx_models.model(
        [node], [onnx_models.tensor("x", ["n", 3, "h", "w"])], [onnx_models.tensor("y", ["n", 3, "a", "b"])],
        {"scales": np.array([1, 1, 2, 2], np.float32)},
    )  # fmt: skip
    photo = picture(21, 37, seed=6)
    for prepared in ("none", "mean=0.5/0.4/0.3,std=0.2/0.3/0.4"):
        with viewer.Viewer(made.SerializeToString(), device="cpu", preprocess=prepared) as one:
            found = one(photo)
        np.testing.assert_array_equal(found.pixels, np.asarray(photo).repeat(2, 0).repeat(2, 1))
    onnx.save(made, tmp_path / "x2.onnx")
    (tmp_path / "in").mkdir()
    save(tmp_path / "in/a.png", photo)
    words = [
        "--model",
        str(tmp_path / "x2.onnx"),
        "--data",
        str(tmp_path / "in"),
        "--device",
        "cpu",
        "--quiet",
    ]
    draw = ["--draw", str(tmp_path / "out"), "--iterations", "1"]
    assert run.main([*words, *draw, "--preprocess", "letterbox=40x48"]) == 0
    with Image.open(tmp_path / "out/a.png") as drawn:
        assert drawn.size == (74, 42)
