"""``kernel grade``: marks of a class, and the packs that say what they are for."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cnn_engine.errors import InputError
from cnn_engine.kernel import command, grade, packs, rank, templates
from cnn_engine.kernels.user import source


@pytest.fixture(autouse=True)
def kernel_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(tmp_path / "cache"))


RELU = templates.text("relu", "cpu", "relu.cpp")


def pack(folder: Path, **changes) -> Path:
    """Writes a pack of one relu in a small model."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 300])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 300])],
    )
    folder.mkdir()
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        folder / "one.onnx",
    )
    content = {
        "title": '"a relu"', "operator": '"relu"', "model": '"one.onnx"', "batch": "4",
        "points": "{ correct = 60, speedups = [{ times = 0, points = 30 }, { times = 1e6, points = 10 }] }",
        **changes,
    }  # fmt: skip
    lines = [f"{key} = {value}" for key, value in content.items() if value is not None]
    (folder / "pack.toml").write_text("\n".join(lines))
    (folder / "statement.md").write_text("# A relu\n\nWrite it.\n")
    return folder


@pytest.mark.parametrize("name", packs.names())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_packs_of_the_package_start_from_a_kernel_of_their_operator(tmp_path, name, device):
    found = packs.find(name)
    file = tmp_path / f"start.{templates.ENDINGS[device]}"
    assert command.main(["new", "--pack", name, "--device", device, "--output", str(file)]) == 0
    assert source.read(file).contract.op == found.operator
    assert found.statement.splitlines()[0].removeprefix("# ") in file.read_text()
    assert found.most == 100
    assert 0 < found.points(0) < found.points(1e9) == 100


def test_a_class_is_marked_whatever_some_hand_in(tmp_path, capsys):
    files = {
        "good": RELU,
        "wrong": RELU.replace("v < 0 ? 0.0f : v", "v"),
        "hostile": RELU.replace("v < 0 ? 0.0f : v", "(_exit(0), v)").replace(
            '#include "cnn_engine/kernel.h"', '#include "cnn_engine/kernel.h"\n#include <unistd.h>'
        ),
        "other": templates.text("tanh", "cpu", "tanh.cpp"),
        "empty": "",
        "=cmd()": "not C++",
    }
    paths = []
    for name, content in files.items():
        paths.append(str(tmp_path / f"{name}.cpp"))
        Path(paths[-1]).write_text(content)
    paths += [str(tmp_path / "none.cpp"), str(tmp_path)]
    marks, result = tmp_path / "marks.csv", tmp_path / "marks.json"
    code = command.main(
        ["grade", "--pack", str(pack(tmp_path / "pack")), "--calls=2", "--rounds=2", "--limit=20",
         f"--csv={marks}", f"--json={result}", *paths]
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    rows = {row["submission"]: row for row in csv.DictReader(marks.read_text().splitlines())}
    assert len(rows) == len(paths)
    assert (rows["good.cpp"]["points"], rows["good.cpp"]["correct"]) == ("90", "yes")
    assert float(rows["good.cpp"]["speedup_low"]) < float(rows["good.cpp"]["speedup_high"])
    for name, reason in (
        ("wrong.cpp", "wrong"),
        ("hostile.cpp", "exit(0) was called"),
        ("other.cpp", "operator: expected relu, found tanh"),
        ("empty.cpp", "expected"),
        ("'=cmd().cpp", "expected"),
        ("none.cpp", "No such file"),
    ):
        assert (rows[name]["points"], rows[name]["correct"]) == ("0", "no"), rows[name]
        assert reason in rows[name]["fault"]
    found = json.loads(result.read_text())
    assert found["complete"]
    assert found["grades"][0]["submission"] == "good.cpp"
    assert "90 of 100" in capsys.readouterr().out


def entry(name, totals, fault=None):
    return rank.Entry(name, name, processes=[{"n": t} for t in totals], fault=fault)


def test_noise_costs_nobody_a_point_and_a_clear_gap_does(tmp_path):
    given = packs.find(
        str(
            pack(tmp_path / "p", points="{ correct = 50, speedups = [{ times = 2, points = 50 }] }")
        )
    )
    rng = np.random.default_rng(0)
    noise = np.exp(0.03 * rng.standard_normal((3, 5)))
    entries = [
        entry(grade.BASELINE, 2.0 * noise[0]),
        entry("near", 1.01 * noise[1]),
        entry("far", 1.5 * noise[2]),
        entry("wrong", [], "wrong"),
    ]
    found = {mark.submission: mark for mark in grade.grades(entries, given)}
    assert (found["near"].points, found["far"].points, found["wrong"].points) == (100, 50, 0)
    assert found["near"].speedup.low < 2 / 1.01 < found["near"].speedup.high
    wild = [entry(grade.BASELINE, [1.0, 100.0]), entry("wild", [1.0, 100.0 / 1.2])]
    assert wild[0].total.high > 1e6  # of two processes: it must not give points away
    assert grade.grades(wild, given)[0].points == 50
    with pytest.raises(InputError, match="baseline: expected a right kernel"):
        grade.grades([entry(grade.BASELINE, [], "wrong"), entries[1]], given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operator": '"relus"'}, "did you mean relu"),
        ({"title": "3"}, "title: expected a text"),
        ({"model": None}, "network: expected a network, or a model"),
        ({"network": '"cifar10"'}, "network: expected"),
        ({"model": '"../one.onnx"'}, "a file in the pack's folder"),
        ({"batch": "0"}, "batch: expected"),
        ({"batch": "1.5"}, "batch: expected"),
        ({"computes": '["float7"]'}, "computes: expected"),
        ({"points": "{ right = 3 }"}, "points: expected"),
        ({"points": "{ speedups = [{ times = 2 }] }"}, "speedups: expected"),
        ({"points": "{ correct = nan }"}, "correct: expected"),
        ({"extra": "1"}, "extra"),
        ({"title": '"'}, "expected TOML"),
    ],
)
def test_faults_of_a_pack_are_named(tmp_path, changes, message):
    folder = pack(tmp_path / "pack", **changes)
    with pytest.raises(InputError, match=message):
        packs.find(str(folder))
    with pytest.raises(InputError, match="course/convolution"):
        packs.find("course/convolutoin")
