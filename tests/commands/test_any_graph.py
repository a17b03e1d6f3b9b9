"""Commands on networks that are no classifiers: several outputs of any rank, several inputs of any type."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import model, tensor

from cnn_engine import UnsupportedError, characterize, run, transfer
from cnn_engine.transfer import subjects

PLAIN = ["--device", "cpu", "--threads", "1"]


@pytest.fixture
def detector(tmp_path) -> str:
    """Boxes [N, 36, 2] and a mask [N, 6, 6] of images [N, 3, 6, 6]."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="stem", pads=[1] * 4),
        helper.make_node("Reshape", ["c", "shape"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["/boxes"], perm=[0, 2, 1]),
        helper.make_node("ArgMax", ["c"], ["mask"], axis=1, keepdims=0),
    ]
    outputs = [tensor("/boxes", ["n", 36, 2]), tensor("mask", ["n", 6, 6], TensorProto.INT64)]
    constants = {
        "w": rng.normal(0, 0.3, (2, 3, 3, 3)).astype(np.float32),
        "shape": np.array([0, 2, 36]),
    }
    onnx.save(
        model(nodes, [tensor("x", ["n", 3, 6, 6])], outputs, constants), tmp_path / "det.onnx"
    )
    return str(tmp_path / "det.onnx")


@pytest.fixture
def audio(tmp_path) -> str:
    """Samples [N, 16] and a state of no batch, as many speech networks have; a table by ids."""
    nodes = [
        helper.make_node("Add", ["wave", "state"], ["sum"]),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Add", ["sum", "rows"], ["y"]),
    ]
    inputs = [
        tensor("wave", ["n", 16]),
        tensor("state", [16]),
        tensor("ids", ["n"], TensorProto.INT64),
    ]
    made = model(
        nodes, inputs, [tensor("y", ["n", 16])], {"table": np.eye(5, 16, dtype=np.float32)}
    )
    onnx.save(made, tmp_path / "audio.onnx")
    return str(tmp_path / "audio.onnx")


def test_a_detector_is_checked_timed_and_saved(detector, tmp_path, capsys):
    options = ["--model", detector, "--images", "5", "--batch", "2", "--iterations", "2", *PLAIN]
    files = ["--json", str(tmp_path / "r.json"), "--save-outputs", str(tmp_path / "y.npz")]
    assert run.main([*options, *files]) == 0
    text = capsys.readouterr().out
    assert "Output /boxes                : 5 x 36 x 2: max abs diff" in text
    assert "Output mask                  : 5 x 6 x 6: max abs diff" in text
    assert "random inputs, 5 images" in text
    found = json.loads((tmp_path / "r.json").read_text())
    assert [(one["name"], one["shape"]) for one in found["check"]["outputs"]] == [
        ("/boxes", [5, 36, 2]), ("mask", [5, 6, 6]),
    ]  # fmt: skip
    assert found["check"]["passed"]
    assert found["accuracy"] is None
    assert found["throughput_images_per_s"] > 0
    assert {row["name"] for row in found["layers"]} >= {"stem", "ArgMax_3"}
    saved = np.load(tmp_path / "y.npz")
    assert {name: saved[name].shape for name in saved} == {"/boxes": (5, 36, 2), "mask": (5, 6, 6)}
    assert np.array_equal(saved["mask"], saved["/boxes"].argmax(2).reshape(5, 6, 6))


def test_several_inputs_are_made_or_read_by_name(audio, tmp_path, capsys):
    options = [
        "--model",
        audio,
        "--iterations",
        "1",
        "--save-outputs",
        str(tmp_path / "y.npz"),
        *PLAIN,
    ]
    assert run.main([*options, "--images", "3"]) == 0
    wave = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    given = {"wave": wave, "state": wave[0], "ids": np.arange(4)}
    np.savez(tmp_path / "x.npz", **given)
    assert run.main([*options, "--inputs", str(tmp_path / "x.npz")]) == 0
    wanted = wave + wave[0] + np.eye(5, 16, dtype=np.float32)[:4]
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], wanted, rtol=1e-6)
    capsys.readouterr()
    for arrays, message in (
        ({"wave": wave}, "expected the arrays wave, state, ids, found wave"),
        ({**given, "more": wave}, "expected the arrays wave, state, ids, found wave, state, ids, more"),
        ({**given, "wave": wave[:, 1:]}, "wave: expected shape [N, 16], found [4, 15]"),
        ({**given, "state": wave}, "state: expected shape [16], found [4, 16]"),
        ({**given, "ids": np.arange(3)}, "ids: expected 4 images, as wave has, found 3"),
        ({**given, "ids": np.arange(4, dtype=np.int32)}, "ids: expected type int64, found int32"),
        ({**given, "wave": wave * np.float32(np.nan)}, "expected finite numbers, found others"),
        ({**{n: a[:0] for n, a in given.items()}, "state": wave[0]}, "expected at least one image"),
    ):  # fmt: skip
        np.savez(tmp_path / "x.npz", **arrays)
        assert run.main([*options, "--inputs", str(tmp_path / "x.npz")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--save-probabilities", "p.npy"],
            "--save-probabilities: expected a network with one output",
        ),
        (["--save-outputs", "p.npy"], "--save-outputs: expected a path that ends in .npz"),
        (
            ["--inputs", "x.npz", "--data", "synthetic"],
            "--inputs: expected the option --model with it",
        ),
        (["--data-mode", "stream"], "--data-mode: expected any but stream"),
    ],
)
def test_what_a_detector_does_not_have_is_one_line(detector, more, message, capsys):
    assert run.main(["--model", detector, *more, *PLAIN]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_all_images_go_in_one_pass_where_a_state_has_them_inside(tmp_path, capsys):
    nodes = [
        helper.make_node("ReduceSum", ["state", "first"], ["sum"], keepdims=0),
        helper.make_node("Add", ["wave", "sum"], ["y"]),
        helper.make_node("Concat", ["state", "state"], ["next"], axis=0),
    ]
    inputs = [tensor("wave", ["n", 16]), tensor("state", [2, "n", 16])]
    outputs = [tensor("y", ["n", 16]), tensor("next", [4, "n", 16])]
    file = str(tmp_path / "state.onnx")
    onnx.save(model(nodes, inputs, outputs, {"first": np.array([0])}), file)
    options = ["--model", file, "--batch", "1", *PLAIN]
    times = [
        "--duration",
        "0.1",
        "--settle",
        "0.01",
        "--no-plot",
        "--output",
        str(tmp_path / "out"),
    ]
    assert characterize.main([*options, *times]) == 0
    assert run.main([*options, "--iterations", "2"]) == 0
    assert "random inputs, 1 image" in capsys.readouterr().out
    wanted = "images: expected 1, for an input has them in another dimension than 0, found "
    assert run.main([*options, "--images", "3"]) == 2
    assert wanted + "3" in capsys.readouterr().err


def test_characterize_takes_a_detector(detector, tmp_path):
    words = ["--model", detector, "--batch", "1,3", "--duration", "0.01", "--settle", "0.01"]
    more = ["--no-plot", "--quiet", "--output", str(tmp_path / "c")]
    assert characterize.main([*words, *more, *PLAIN]) == 0


def test_transfer_moves_the_images_of_a_detector_and_the_bytes_of_other_inputs(
    detector, audio, tmp_path, capsys
):
    found = subjects.of_model(detector)
    assert (found.shape, found.dtype, found.image_bytes("float32")) == ((3, 6, 6), "float32", 432)
    found = subjects.of_model(audio)  # the state is no part of a row
    assert (found.shape, found.dtype, found.is_bytes) == ((1, 1, 16 * 4 + 8), "uint8", True)
    assert transfer.main(["--model", audio, "--dtype", "float32"]) == 2
    assert "--dtype: expected uint8, for the inputs of" in capsys.readouterr().err
    # Inputs that do not agree on a batch: all of them are one pass.
    nodes = [helper.make_node("Add", ["wave", "state"], ["y"])]
    inputs = [tensor("wave", [1, 16]), tensor("state", [2, 1, 16])]
    onnx.save(model(nodes, inputs, [tensor("y", [2, 1, 16])]), tmp_path / "state.onnx")
    assert subjects.of_model(str(tmp_path / "state.onnx")).shape == (1, 1, 16 * 4 + 32 * 4)
    nodes = [helper.make_node("Relu", ["wave"], ["y"])]
    open_size = model(nodes, [tensor("wave", ["n", "t"])], [tensor("y", ["n", "t"])])
    onnx.save(open_size, tmp_path / "open.onnx")
    with pytest.raises(
        UnsupportedError, match="expected inputs of a known size: --input-shape wave="
    ):
        subjects.of_model(str(tmp_path / "open.onnx"))


@pytest.mark.parametrize("command", [run, characterize])
def test_a_network_that_finds_numbers_while_it_runs_is_refused(command, tmp_path, capsys):
    """What an example has in their place would be timed, and written as outputs; a constant settles them."""
    doubled = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["a"])], "doubled", [], [tensor("a", ["n", 4])]
    )
    same = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["b"])], "same", [], [tensor("b", ["n", 4])]
    )
    nodes = [helper.make_node("If", ["flag"], ["y"], then_branch=doubled, else_branch=same)]
    inputs = [tensor("x", ["n", 4]), tensor("flag", [], TensorProto.BOOL)]
    onnx.save(model(nodes, inputs, [tensor("y", ["n", 4])]), tmp_path / "if.onnx")
    options = ["--model", str(tmp_path / "if.onnx"), "--device", "cpu", "--batch", "1"]
    assert command.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: if: ")
    assert "--constant" in error
    assert error.count("\n") == 1
    if command is run:
        assert run.main([*options, "--iterations", "1", "--constant", "flag=true"]) == 0
