"""infer on networks that are no classifiers: outputs of any rank, small ones as columns, large as files."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pyarrow.parquet as pq
import pytest
from image_files import picture, save
from infer_inputs import COMMON, rows
from onnx import TensorProto, helper
from onnx_models import model, tensor

import cnn_engine
from cnn_engine.infer import columns
from cnn_engine.infer import command as infer
from cnn_engine.io import images, model_metadata
from cnn_engine.io.preprocess import Preprocess

PREPARED = Preprocess(letterbox=(16, 24), fill=114)
FEW = 1000


@pytest.fixture
def detector(tmp_path) -> str:
    """Boxes [N, 96, 2], a number an image, and a mask [N, 16, 24] of whole numbers."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("MaxPool", ["c"], ["small"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Reshape", ["small", "shape"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["/head/boxes"], perm=[0, 2, 1]),
        helper.make_node("ReduceMean", ["c", "axes"], ["label"], keepdims=0),
        helper.make_node("ArgMax", ["c"], ["mask"], axis=1, keepdims=0),
    ]
    outputs = [
        tensor("/head/boxes", ["n", 96, 2]),
        tensor("label", ["n"]),
        tensor("mask", ["n", 16, 24], TensorProto.INT64),
    ]
    constants = {
        "w": rng.normal(0, 0.3, (2, 3, 3, 3)).astype(np.float32),
        "shape": np.array([0, 2, 96]),
        "axes": np.array([1, 2, 3]),
    }
    made = model(nodes, [tensor("x", ["n", 3, 16, 24])], outputs, constants)
    helper.set_model_props(made, model_metadata.entries(PREPARED, None))
    onnx.save(made, tmp_path / "det.onnx")
    return str(tmp_path / "det.onnx")


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "in").mkdir()
    for at in range(7):
        save(tmp_path / f"in/{at}.png", picture(20 + at, 31, seed=at))
    (tmp_path / "in/3.png").write_bytes(b"no image")
    return tmp_path / "in"


def wanted_of(detector: str, photos) -> dict[str, np.ndarray]:
    files = [path for path in sorted(photos.iterdir()) if path.name != "3.png"]
    pixels = np.stack([images.decode(path, PREPARED, (3, 16, 24)) for path in files])
    with cnn_engine.Engine(detector, device="cpu", threads=1) as engine:
        return engine.run({"x": PREPARED.normalised(pixels)})


def command(detector: str, photos, out, *more: str) -> int:
    words = ["--model", detector, "--output", str(out), "--batch", "2", "--quiet", *COMMON]
    return infer.main([str(photos), *words, *more])


def test_outputs_are_columns_and_large_ones_files(detector, photos, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(columns, "MOST_BYTES", FEW)
    assert inline(monkeypatch, detector, photos, out, "--json", str(tmp_path / "r.json")) == 0
    table, wanted = rows(out), wanted_of(detector, photos)
    good = [at for at in range(7) if at != 3]
    assert table.column_names == ["id", "/head/boxes", "label-2", "label", "error"]
    assert table["error"][3].as_py().startswith("expected an image")
    field = table.schema.field("/head/boxes")
    assert field.metadata == {b"shape": b"96,2"}
    boxes = np.array([table["/head/boxes"][at].as_py() for at in good], np.float32)
    np.testing.assert_array_equal(boxes.reshape(-1, 96, 2), wanted["/head/boxes"])
    found = [table["label-2"][at].as_py() for at in good]
    np.testing.assert_array_equal(np.float32(found), wanted["label"])
    assert table["/head/boxes"][3].as_py() is None
    assert table["label-2"][3].as_py() is None
    masks = np.load(out / "shard-000000.mask.npy")
    assert (masks.shape, masks.dtype) == ((7, 16, 24), np.int64)
    np.testing.assert_array_equal(masks[good], wanted["mask"])
    assert not masks[3].any()
    manifest = json.loads((out / "_manifest.json").read_text())
    assert [one["output"] for one in manifest["settings"]["outputs"]] == [
        "/head/boxes",
        "label",
        "mask",
    ]
    (noted,) = manifest["files"][0]["arrays"]
    assert noted["bytes"] == (out / "shard-000000.mask.npy").stat().st_size
    assert sorted(path.name for path in out.glob("shard*")) == [
        "shard-000000.mask.npy", "shard-000000.parquet",
    ]  # fmt: skip
    assert not list((out / "_run/temporary").rglob("*.*"))


def inline(monkeypatch, detector, photos, out, *more) -> int:
    """Runs the command with its worker in this process, so that what is patched holds for it."""
    import infer_inputs

    from cnn_engine.infer import local_pool

    def pool(config, workers, cuda):
        return infer_inputs.InlinePool(config, workers, cuda)

    monkeypatch.setattr(local_pool, "LocalPool", pool)
    return command(detector, photos, out, *more)


def test_what_is_missing_or_broken_is_done_again(detector, photos, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(columns, "MOST_BYTES", FEW)
    more = ("--shard-size", "1")  # a shard a file
    assert inline(monkeypatch, detector, photos, out, *more) == 0
    before = {path.name: path.read_bytes() for path in out.glob("shard*")}
    assert len(before) == 14
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("shard*")}
    (out / "shard-000001.mask.npy").unlink()
    data = before["shard-000002.mask.npy"]
    (out / "shard-000002.mask.npy").write_bytes(data[:-8])
    changed = bytearray(before["shard-000004.mask.npy"])
    changed[-8] ^= 1  # of the same size: only reading tells
    (out / "shard-000004.mask.npy").write_bytes(changed)
    assert inline(monkeypatch, detector, photos, out, *more) == 0
    found = {path.name: path.read_bytes() for path in out.glob("shard*")}
    assert {name for name in before if found[name] != before[name]} == {"shard-000004.mask.npy"}
    same = [
        name for name in before if name[:12] not in ("shard-000001", "shard-000002", "shard-000004")
    ]
    assert all((out / name).stat().st_mtime_ns == stamps[name] for name in same)
    assert inline(monkeypatch, detector, photos, out, *more, "--verify") == 0
    assert {path.name: path.read_bytes() for path in out.glob("shard*")} == before


def test_bad_images_beyond_the_limit_are_told(detector, photos, tmp_path, capsys):
    assert command(detector, photos, tmp_path / "out", "--max-bad", "0") == 1
    assert "--max-bad: expected at most 0 bad images, found 1" in capsys.readouterr().err
    assert pq.read_table(tmp_path / "out/shard-000000.parquet").num_rows == 7


def test_what_a_detector_does_not_have_is_one_line(detector, photos, tmp_path, capsys):
    assert command(detector, photos, tmp_path / "out", "--top", "2") == 2
    error = capsys.readouterr().err
    assert "--top: expected a network of classes" in error
    assert error.count("\n") == 1


def test_a_size_that_the_file_leaves_open_is_that_of_the_letterbox(photos, tmp_path, capsys):
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    made = model(nodes, [tensor("x", ["n", 3, "h", "w"])], [tensor("y", ["n", 3, "h", "w"])])
    onnx.save(made, tmp_path / "open.onnx")
    path = str(tmp_path / "open.onnx")
    assert command(path, photos, tmp_path / "a", "--preprocess", "letterbox=8x12") == 0
    found = np.array(rows(tmp_path / "a")["y"][0].as_py(), np.float32).reshape(3, 8, 12)
    prepared = Preprocess(letterbox=(8, 12))
    pixels = images.decode(photos / "0.png", prepared, (3, 8, 12))
    np.testing.assert_array_equal(found, prepared.normalised(pixels[None])[0])
    assert command(path, photos, tmp_path / "b") == 2
    assert "expected a size of the images, by --preprocess letterbox" in capsys.readouterr().err


def test_names_of_classes_are_those_of_the_file(photos, tmp_path):
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    made = model(nodes, [tensor("x", ["n", 3, 16, 24])], [tensor("y", ["n", 3])])
    helper.set_model_props(made, model_metadata.entries(PREPARED, ["rot", "grün", "blau"]))
    onnx.save(made, tmp_path / "c.onnx")
    out = tmp_path / "out"
    assert command(str(tmp_path / "c.onnx"), photos, out, "--top", "2") == 0
    table = rows(out)
    names = np.array(["rot", "grün", "blau"])
    for number, name in zip(table["top_classes"], table["top_names"], strict=True):
        if number.as_py() is None:
            assert name.as_py() is None
        else:
            assert name.as_py() == names[number.as_py()].tolist()
    assert json.loads(table.schema.metadata[b"cnn_engine.classes"]) == names.tolist()
