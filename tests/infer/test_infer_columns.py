"""What infer calls a network's numbers, and in what columns it keeps which labels; what it says of others."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path

import infer_inputs
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper, numpy_helper

from cnn_engine import infer
from cnn_engine.infer import output
from cnn_engine.infer.labels import Labels


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    """Saves the time that processes take to start."""
    monkeypatch.setattr("cnn_engine.infer.local_pool.LocalPool", infer_inputs.InlinePool)


@pytest.fixture(scope="module")
def images():
    return infer_inputs.pixels(12)


def run(*words: object) -> int:
    return infer.main([str(word) for word in (*words, *infer_inputs.COMMON)])


# ---- the network's numbers ----


def classifier(path: Path, *, softmax: bool, classes: int = 5) -> None:
    weights = np.random.default_rng(0).normal(size=(3 * 32 * 32, classes)).astype(np.float32) / 9
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["logits"]),
    ]
    if softmax:
        nodes.append(helper.make_node("Softmax", ["logits"], ["y"]))
    graph = helper.make_graph(
        nodes, "classifier",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 32, 32])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["n", classes])],
        [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )


@pytest.mark.parametrize(("softmax", "numbers"), [(True, "probabilities"), (False, "outputs")])
@pytest.mark.parametrize("top", [None, 3])
def test_columns_call_probabilities_what_a_softmax_gives_alone(
    softmax, numbers, top, images, tmp_path, capsys
):
    classifier(tmp_path / "m.onnx", softmax=softmax)
    np.save(tmp_path / "x.npy", images.astype(np.float32) / 255)
    more = [] if top is None else ["--top", top]
    out = tmp_path / "out"
    assert run(tmp_path / "x.npy", "--model", tmp_path / "m.onnx", "--output", out, *more) == 0
    (path,) = out.glob("*.parquet")
    table = pq.read_table(path)
    name = numbers if top is None else f"top_{numbers}"
    assert [column for column in table.column_names if "prob" in column or "outputs" in column] == [
        name
    ]
    rows = np.array(table[name].to_pylist())
    assert np.allclose(rows.sum(1), 1) == (softmax and top is None)
    for metadata in (table.schema.metadata, pq.read_metadata(path).metadata):
        assert metadata[output.NUMBERS_KEY] == numbers.encode()
    assert json.loads((out / "_manifest.json").read_text())["settings"]["numbers"] == numbers
    shown = capsys.readouterr().out
    assert (f"all {numbers}" if top is None else f"the 3 largest {numbers}") in shown


def test_of_equal_numbers_the_lowest_classes_are_on_top():
    rows = np.zeros((3, 1000), np.float32)
    rows[1, 700:] = 1
    rows[2, ::2] = 0.5
    classes, numbers = output.best(rows, 20)
    assert classes.tolist() == [[*range(20)], [*range(700, 720)], [*range(0, 40, 2)]]
    assert numbers.tolist() == [[0.0] * 20, [1.0] * 20, [0.5] * 20]


# ---- labels ----

LOST = "expected a whole number of 64 bits or a text as label, found "

#: A column; its whole numbers, its texts, and those that are neither, by their place.
COLUMNS = {
    "int8": (pa.array([1, None, -3], pa.int8()), [1, None, -3], [None] * 3, {}),
    "uint8": (pa.array([255, 0, None], pa.uint8()), [255, 0, None], [None] * 3, {}),
    "uint64": (pa.array([1, 2**63, None], pa.uint64()), [1, None, None], [None] * 3, {1: str(2**63)}),
    "bool": (pa.array([True, None, False]), [1, None, 0], [None] * 3, {}),
    "float": (pa.array([3.0, 2.5, np.nan]), [3, None, None], [None] * 3, {1: "2.5"}),
    "halves": (pa.array(np.array([7, np.inf, -1], np.float16)), [7, None, -1], [None] * 3, {1: "inf"}),
    "decimal": (pa.array([decimal.Decimal(4), None, None]), [4, None, None], [None] * 3, {}),
    "text": (pa.array(["cat", "07", None]), [None, 7, None], ["cat", None, None], {}),
    "large text": (pa.array(["a b", "", "-1"], pa.large_string()), [None, None, -1],
                   ["a b", None, None], {1: "''"}),
    "text view": (pa.array(["a", None, "b"], pa.string_view()), [None] * 3, ["a", None, "b"], {}),
    "bytes": (pa.array([b"dog", b"\xff", b"9"]), [None, None, 9], ["dog", "\\xff", None], {}),
    "long number": (pa.array(["9" * 30, "1", "2"]), [None, 1, 2], [None] * 3, {0: repr("9" * 30)}),
    "categories": (pa.array(["b", "a", "b"]).dictionary_encode(), [None] * 3, ["b", "a", "b"], {}),
    "numbers by dictionary": (pa.array([5, None, 6]).dictionary_encode(), [5, None, 6], [None] * 3, {}),
    "lists": (pa.array([[1, 2], None, []]), [None] * 3, [None] * 3, {0: "[1, 2]", 2: "[]"}),
    "dates": (pa.array([datetime.date(2020, 1, 2), None, None]), [None] * 3, [None] * 3,
              {0: "datetime.date(2020, 1, 2)"}),
    "null": (pa.nulls(3), [None] * 3, [None] * 3, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_what_becomes_of_a_column_of_labels(name):
    column, numbers, texts, lost = COLUMNS[name]
    found = Labels.of_column(column)
    assert found.numbers.to_pylist() == numbers
    assert (found.texts.to_pylist() if found.texts is not None else [None] * 3) == texts
    assert found.lost == {at: LOST + what for at, what in lost.items()}
    assert Labels.of(found.each()).each() == found.each()
    parts = Labels.join([found[:1], found[1:]])
    assert (parts.each(), parts.lost) == (found.each(), found.lost)


@pytest.mark.parametrize("kind", ["files", "arrays"])
@pytest.mark.parametrize("name", COLUMNS)
def test_no_label_costs_an_image_its_row(name, kind, images, tmp_path, capsys):
    column, numbers, texts, lost = COLUMNS[name]
    if kind == "files":
        data = pa.array([infer_inputs.encoded(image) for image in images[:3]])
    else:
        data = pa.FixedSizeListArray.from_arrays(pa.array(images[:3].reshape(-1)), images[0].size)
    pq.write_table(pa.table({"image": data, "label": column}), tmp_path / "a.parquet")
    out = tmp_path / "out"
    assert run(tmp_path / "a.parquet", "--output", out, "--json", tmp_path / "r.json") == 0
    table = infer_inputs.rows(out)
    assert table["label"].to_pylist() == numbers
    assert table["probabilities"].null_count == 0
    if any(texts):
        assert table["label_text"].to_pylist() == texts
    report = json.loads((tmp_path / "r.json").read_text())
    manifest = json.loads((out / "_manifest.json").read_text())
    kept = len(texts) - texts.count(None)
    for document in (report, manifest, manifest["files"][0]):
        assert (document["label_texts"], document["labels_lost"]) == (kept, len(lost))
    assert report["lost_labels"] == [f"{tmp_path}/a.parquet#{at}: {LOST}{lost[at]}" for at in lost]
    captured = capsys.readouterr()
    assert captured.err.count("warning: lost label: ") == len(lost)
    assert (f"{len(lost)} lost" in captured.out) == bool(lost)
    assert (f"{kept} are texts, in the column label_text" in captured.out) == bool(kept)


def test_a_column_twice_is_refused(images, tmp_path, capsys):
    data = pa.array([infer_inputs.encoded(images[0])])
    for name in ("image", "label"):
        columns = {"image": [data, data], "label": [data, pa.array([1]), pa.array([2])]}[name]
        names = ["image", *[name] * (len(columns) - 1)]
        pq.write_table(pa.Table.from_arrays(columns, names), tmp_path / "a.parquet")
        assert run(tmp_path / "a.parquet", "--output", tmp_path / "out") == 2
        assert f"expected one column {name} (--columns), found 2" in capsys.readouterr().err


# ---- WebDataset ----


def of_tar(members: list[tuple[str, bytes]], folder: Path) -> tuple[list[dict], dict]:
    """Returns the rows of a tar, and the report."""
    infer_inputs.write_tar(folder / "a.tar", members)
    words = ["--output", folder / "out", "--json", folder / "r.json", "--quiet"]
    assert run(folder / "a.tar", *words) == 0
    return infer_inputs.rows(folder / "out").to_pylist(), json.loads(
        (folder / "r.json").read_text()
    )


def test_every_image_of_a_sample_has_its_row_and_label(images, tmp_path):
    """Wherever the label is among them, and however many there are."""
    data = [infer_inputs.encoded(image) for image in images]
    members = [
        ("a.left.jpg", data[0]), ("a.right.jpg", data[1]), ("a.cls", b"7\n"),
        ("b.cls", b"8"), ("b.jpg", data[2]), ("b.json", b"{}"), ("b.png", data[3]),
        ("c.0.jpg", data[4]), ("c.cls", b" cat "), ("c.1.jpg", data[5]), ("c.2.jpg", data[6]),
        ("d.jpg", data[7]),
    ]  # fmt: skip
    rows, report = of_tar(members, tmp_path)
    names = [name for name, _ in members if not name.endswith((".cls", ".json"))]
    assert [row["id"].rpartition("#")[2] for row in rows] == names
    assert [row["label"] for row in rows] == [7, 7, 8, 8, None, None, None, None]
    assert [row["label_text"] for row in rows] == [None] * 4 + ["cat"] * 3 + [None]
    assert (report["label_texts"], report["labels_lost"], report["errors"]) == (3, 0, 0)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_labels_apart_from_their_images_are_found_and_others_named(batch, images, tmp_path, capsys):
    data = [infer_inputs.encoded(image) for image in images]
    members = [("0.cls", b"1")]
    members += [(f"{at}.jpg", data[at]) for at in range(1, 4)]
    members += [(f"{at}.cls", b"7") for at in range(1, 4)]
    members += [("9.jpg", data[9]), ("9.cls", b"2"), ("9.b.cls", b"3")]
    infer_inputs.write_tar(tmp_path / "a.tar", members)
    out = tmp_path / "out"
    assert run(tmp_path / "a.tar", "--output", out, "--batch", batch) == 0
    assert infer_inputs.rows(out)["label"].to_pylist() == [7, 7, 7, 2]
    manifest = json.loads((out / "_manifest.json").read_text())
    assert (manifest["images"], manifest["labels_lost"]) == (4, 2)
    captured = capsys.readouterr()
    assert "a.tar#0.cls: expected an image of the same stem, found none" in captured.err
    assert "a.tar#1.cls" not in captured.err
    assert "a.tar#9.b.cls: expected one label a sample, found one more" in captured.err
    assert "2 lost" in captured.out


def test_a_tar_of_one_stem_is_no_sample_that_grows(images, tmp_path, monkeypatch):
    monkeypatch.setattr("cnn_engine.infer.readers.MOST_OF_A_SAMPLE", 3)
    data = infer_inputs.encoded(images[0])
    members = [(f"a.{at}.jpg", data) for at in range(7)]
    rows, report = of_tar([*members, ("a.cls", b"5"), ("b.cls", b"4"), ("b.jpg", data)], tmp_path)
    assert [row["label"] for row in rows] == [None] * 7 + [4]
    assert report["labels_lost"] == 1
    assert (
        "a.cls: expected one label a sample, before its images, found" in report["lost_labels"][0]
    )


def test_a_label_that_is_too_long_is_lost(images, tmp_path):
    data = infer_inputs.encoded(images[0])
    rows, report = of_tar(
        [("a.jpg", data), ("a.cls", b"x" * (1 << 17)), ("b.jpg", data), ("b.cls", b"  ")], tmp_path
    )
    assert [row["label"] for row in rows] == [row["label_text"] for row in rows] == [None, None]
    assert report["labels_lost"] == 2
    assert (
        "a.jpg: expected a file of at most 65,536 bytes, found 131,072" in report["lost_labels"][0]
    )
