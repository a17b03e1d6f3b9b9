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
    assert "open: expected sizes, by --preprocess letterbox=640 or" in capsys.readouterr().err


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


# ---- inputs that are no images ----


@pytest.fixture
def speech(tmp_path) -> str:
    """Samples [N, T] of any length and ids [N], each with a row of numbers and a value."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Mul", ["wave", "rows"], ["y"]),
        helper.make_node("ReduceMax", ["y", "axes"], ["loudest"], keepdims=0),
    ]
    inputs = [tensor("wave", ["n", "t"]), tensor("ids", ["n"], TensorProto.INT64)]
    outputs = [tensor("y", ["n", "t"]), tensor("loudest", ["n"])]
    constants = {"table": np.array([[1.0], [2], [3]], np.float32), "axes": np.array([1])}
    onnx.save(model(nodes, inputs, outputs, constants), tmp_path / "speech.onnx")
    return str(tmp_path / "speech.onnx")


def waves(folder, sizes=(5, 1, 4), seed: int = 0, **more) -> list[dict[str, np.ndarray]]:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    made = []
    for at, count in enumerate(sizes):
        wave = rng.normal(size=(count, 6)).astype(np.float32)
        made.append({"wave": wave, "ids": rng.integers(0, 3, count), **more})
        (np.savez if at % 2 else np.savez_compressed)(
            folder / f"{at}.npz", labels=np.arange(count), **made[-1]
        )
    return made


def test_inputs_by_name_give_a_row_each(speech, tmp_path):
    made = waves(tmp_path / "in")
    out = tmp_path / "out"
    assert command(speech, tmp_path / "in", out, "--shard-size", "1") == 0
    assert len(list(out.glob("shard-*.parquet"))) == 3
    table = rows(out)
    wanted = np.concatenate([one["wave"] * np.float32(one["ids"][:, None] + 1) for one in made])
    np.testing.assert_array_equal(np.array(table["y"].to_pylist(), np.float32), wanted)
    np.testing.assert_array_equal(np.float32(table["loudest"].to_pylist()), wanted.max(1))
    assert table["label"].to_pylist() == [*range(5), 0, *range(4)]
    assert table["id"][5].as_py() == f"{tmp_path / 'in/1.npz'}#0"
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    (out / "shard-000001.parquet").unlink()
    assert command(speech, tmp_path / "in", out, "--shard-size", "1") == 0
    changed = {
        path.name for path in out.glob("shard-*") if path.stat().st_mtime_ns != before[path.name]
    }
    assert changed == {"shard-000001.parquet"}
    assert rows(out).equals(table)


def test_where_inputs_have_no_rows_a_file_is_one(tmp_path):
    """As of a network that carries a state: its dimension 0 is no batch."""
    nodes = [
        helper.make_node("Mul", ["wave", "rate"], ["faster"]),
        helper.make_node("Add", ["faster", "state"], ["next"]),
    ]
    inputs = [tensor("wave", [1, 4]), tensor("state", [2, 1, 4]), tensor("rate", [])]
    onnx.save(model(nodes, inputs, [tensor("next", [2, 1, 4])]), tmp_path / "s.onnx")
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(0)
    wanted = []
    for at in range(3):
        wave, state = rng.normal(size=(1, 4)), rng.normal(size=(2, 1, 4))
        one = {"wave": np.float32(wave), "state": np.float32(state), "rate": np.float32(at)}
        np.savez(tmp_path / f"in/{at}.npz", **one)
        wanted.append(one["wave"] * one["rate"] + one["state"])
    out = tmp_path / "out"
    words = ["--model", str(tmp_path / "s.onnx"), "--output", str(out), "--quiet", *COMMON]
    assert infer.main([str(tmp_path / "in"), *words]) == 0
    found = np.array(rows(out)["next"].to_pylist(), np.float32).reshape(3, 2, 1, 4)
    np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-6)


def test_inputs_at_fault_are_one_line(speech, photos, tmp_path, capsys):
    rng = np.random.default_rng(0)
    wave, ids = rng.normal(size=(3, 6)).astype(np.float32), np.arange(3)
    (tmp_path / "bad").mkdir()
    path = tmp_path / "bad/b.npz"
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    cases = (
        ({"wave": wave}, "expected the arrays wave, ids, found wave"),
        ({"wave": wave, "ids": ids.astype(np.int32)}, "ids: expected type int64, found int32"),
        ({"wave": wave, "ids": ids[:2]}, "ids: expected 3 rows, as other arrays have, found 2"),
        ({"wave": wave, "ids": np.array([None] * 3)}, "ids: expected type int64, found object"),
    )
    for number, (arrays, message) in enumerate(cases):
        np.savez(path, **arrays)
        more = ("--input-shape", "wave=?,6")
        assert command(speech, tmp_path / "bad", tmp_path / f"out{number}", *more) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    for given, message in (
        (
            photos,
            "expected a .npz of the arrays wave, ids, for speech takes no images, found image",
        ),
        (tmp_path / "broken.npz", "broken.npz: expected a .npz file"),
    ):
        out = tmp_path / f"other{given.name}"
        assert command(speech, given, out, "--input-shape", "wave=?,6") == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
