"""``run --model``: an ONNX file in a network's place, from the command line to the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cnn_engine import run

onnx = pytest.importorskip("onnx")


@pytest.fixture
def model(tmp_path, rng):
    """A file with a convolution, an operator that has no kernel of ours, and a row per image."""
    helper, proto = onnx.helper, onnx.TensorProto
    weight = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1], name="conv"),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("Hardmax", ["r"], ["h"], axis=3, name="hardmax"),
            helper.make_node("GlobalAveragePool", ["h"], ["g"], name="pool"),
            helper.make_node("Flatten", ["g"], ["y"], name="flat"),
        ],
        "net",
        [helper.make_tensor_value_info("x", proto.FLOAT, ["n", 3, "h", 8])],
        [helper.make_tensor_value_info("y", proto.FLOAT, ["n", 4])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return str(path)


SHAPE = ["--input-shape", "x=1,3,8,8"]
PLAIN = ["--device", "cpu", "--threads", "1", "--iterations", "1"]


def test_a_model_is_checked_timed_and_told_of_node_by_node(model, tmp_path, capsys):
    images = np.random.default_rng(0).standard_normal((3, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", images=images, labels=np.array([0, 1, 2], np.uint8))
    path = tmp_path / "r.json"
    options = ["--data", str(tmp_path / "data.npz"), "--json", str(path), *PLAIN]
    fixed = ["--model", model, "--input-shape", "x=3,3,8,8"]
    assert run.main([*fixed, *options]) == 0
    text = capsys.readouterr().out
    assert "cpu channels_last" in text
    assert "activations at their peak" in text
    assert "(hardmax): NumPy on the CPU" in text
    found = json.loads(path.read_text())
    assert found["network"] == "net"
    assert found["accuracy"]["total"] == 3
    assert {row["name"]: row["kernel"] for row in found["layers"]}["hardmax"] == "numpy"
    assert found["check"]["max_abs_diff"] < found["check"]["tolerance"]
    assert found["memory"]["weights_bytes"] >= 4 * 27 * 4
    assert 0 < found["memory"]["peak_activation_bytes"] < 100_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--input-shape x="),
        (["--network", "cifar10"], "not allowed with argument"),
        ([*SHAPE, "--weights", "random"], "--weights: expected default"),
        ([*SHAPE, "--data", "/nowhere.npy"], "--data: expected auto, synthetic or a .npy or .npz"),
    ],
)
def test_what_does_not_fit_is_one_line(model, options, message, capsys):
    try:
        code = run.main(["--model", model, *options, *PLAIN])
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


NUMBERS = np.arange(3 * 3 * 8 * 8, dtype=np.float32).reshape(3, 3, 8, 8)
NAN = np.where(NUMBERS == 300, np.float32(np.nan), NUMBERS)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": NUMBERS[:0]}, "expected images [N, C, H, W], at least one, found shape [0, 3, 8, 8]"),
        ({"images": np.float32(1)}, "expected images [N, C, H, W], at least one, found shape []"),
        ({"images": NAN}, "expected finite numbers, found others in image 1 (the first is 0)"),
        ({"images": np.array([{}])}, "--data: expected auto, synthetic or a .npy or .npz"),
        ({"images": NUMBERS, "labels": np.arange(2)}, "each of 3 images, found int64 [2]"),
        ({"images": NUMBERS, "labels": np.int64(3)}, "each of 3 images, found int64 []"),
        ({"images": NUMBERS, "labels": np.full(3, "a")}, "each of 3 images, found <U1 [3]"),
        ({"images": NUMBERS, "labels": np.full(3, 0.5)}, "each of 3 images, found float64 [3]"),
        ({"images": NUMBERS, "labels": np.full(3, -1)}, "expected labels from 0 on, found -1"),
        ({"images": NUMBERS}, "--images: expected at most 3, as "),
        ("cut off", "--data: expected auto, synthetic or a .npy or .npz"),
        ("empty", "--data: expected auto, synthetic or a .npy or .npz"),
        ("text", "data.npz: neither numbers nor images\n"),
    ],
)  # fmt: skip
def test_arrays_at_fault_are_one_line(model, arrays, message, tmp_path, capsys):
    path = tmp_path / "data.npz"
    np.savez(path, **(arrays if isinstance(arrays, dict) else {"images": NUMBERS}))
    if arrays == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    if arrays == "empty":
        path.write_bytes(b"")
    if arrays == "text":
        path.write_text("what NumPy takes for a pickle\n")
    words = [
        "--model",
        model,
        *SHAPE,
        "--data",
        str(path),
        "--images",
        "4" if "at most" in message else "3",
    ]
    assert run.main([*words, *PLAIN]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--csv", "--html", "--trace"])
def test_an_output_never_replaces_the_model(model, option, capsys):
    content = Path(model).read_bytes()
    assert run.main(["--model", model, *SHAPE, option, model, *PLAIN]) == 2
    assert f"error: {option}: expected a path of its own, found" in capsys.readouterr().err
    assert Path(model).read_bytes() == content
