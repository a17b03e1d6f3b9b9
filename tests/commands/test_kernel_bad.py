"""Kernels that are wrong are answered in one line each, and harm nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import bad_kernels
import numpy as np
import pytest

from cnn_engine import InputError
from cnn_engine.kernel import cases, check, command, text
from cnn_engine.kernel.process import Limits

#: Short cases that show what each kernel does wrong, and the one that is timed.
FEW = ("one image, one channel", "odd sizes", "padding", "stride")
LIMITS = Limits(seconds=3.0, memory=2 << 30)


def few():
    return [case for case in cases.grid("conv2d") if case.label in FEW]


def says(bad, path):
    """Returns what the line must have, with the line of the file that is wrong where it names one."""
    lines = path.read_text().splitlines()
    at = [number for number, line in enumerate(lines, 1) if bad.new in line]
    return bad.says.replace("{line}", str(at[0] if at else None))


def finding(path, limits=LIMITS, **options):
    """Returns what a check says is wrong, however it says it."""
    try:
        found = check.check(str(path), threads=2, limits=limits, cases=few(), **options)
    except InputError as error:
        return str(error)
    return found.fault or ""


@pytest.mark.parametrize("name", bad_kernels.CPP)
def test_cpp_is_answered_in_one_line(name, tmp_path):
    bad = bad_kernels.CPP[name]
    path = tmp_path / "bad.cpp"
    path.write_text(bad_kernels.cpp(bad))
    line = finding(path, time=False)
    assert line, "it passed"
    assert "\n" not in line
    assert says(bad, path) in line, line


def test_sanitizers_name_the_line(tmp_path):
    bad = bad_kernels.CPP["out of bounds"]
    path = tmp_path / "bad.cpp"
    text = bad_kernels.cpp(bad).replace("{_STORE}", "")
    text = text.replace(
        "float sum =", "int wide = 2147483647; wide += shape.n; y[0] = wide; float sum ="
    )
    path.write_text(text)
    line = finding(path, sanitize=True)
    assert "signed integer overflow" in line, line
    assert "bad.cpp:" in line


def test_board_of_bad_kernels(tmp_path):
    """All of them beside one that is right: it is first, they are last, each with its line."""
    right = tmp_path / "right.cpp"
    right.write_text(bad_kernels.templates.text("conv2d", "cpu", "right.cpp"))
    files = [str(right)]
    for name in ("syntax", "infinite loop", "calls exit", "writes inputs", "wrong stride"):
        path = tmp_path / f"{name.replace(' ', '_')}.cpp"
        path.write_text(bad_kernels.cpp(bad_kernels.CPP[name]))
        files.append(str(path))
    board, page = tmp_path / "board.json", tmp_path / "board.html"
    done = subprocess.run(
        [sys.executable, "-m", "cnn_engine.kernel", "rank", *files, "--network", "ece408",
         "--batch", "1", "--calls", "8", "--rounds", "3", "--limit", "8", "--beside", "blocked,pad",
         "--json", str(board), "--html", str(page)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(board.read_text())
    names = [entry["name"] for entry in found["entries"]]
    # Where the grid pads, `pad` is left out: another node makes the copy that it reads.
    assert set(names[:3]) == {"right.cpp", "blocked", "pad"}
    assert names[3:] == [file.rpartition("/")[2] for file in files[1:]]
    assert all(entry["fault"] for entry in found["entries"][3:])
    assert [entry["place"] for entry in found["entries"][3:]] == [None] * 5
    for entry in found["entries"][:3]:
        assert entry["seconds"]["low"] <= entry["seconds"]["value"] <= entry["seconds"]["high"]
        assert set(entry["nodes"]) == {"conv1", "conv2"}
    assert found["command"].startswith(f"cnn-engine kernel rank {right} ")
    html = page.read_text()
    assert "infinite_loop.cpp" in html
    assert "<script" not in html


def test_names_of_files_are_escaped(tmp_path):
    path = tmp_path / "<b>.cpp"
    path.write_text(bad_kernels.templates.text("conv2d", "cpu", "x.cpp"))
    page = tmp_path / "board.html"
    code = command.main(
        ["rank", str(path), "--network", "ece408", "--batch", "1", "--calls", "6", "--rounds", "1",
         "--html", str(page), "--quiet"]
    )  # fmt: skip
    assert code == 0
    assert "<b>.cpp" not in page.read_text()
    assert "&lt;b&gt;.cpp" in page.read_text()


def test_board_of_a_models_nodes(tmp_path, capsys):
    """An ONNX file's convolutions; of more than fit a line the text has the sum alone."""
    onnx = pytest.importorskip("onnx")
    from onnx_models import model, tensor

    count = text.MOST_NODES + 1
    weights = {f"w{i}": np.full((2, 2, 3, 3), 0.1, np.float32) for i in range(count)}
    nodes = [
        onnx.helper.make_node("Conv", [f"x{i}", f"w{i}"], [f"x{i + 1}"], f"conv{i}", pads=[1] * 4)
        for i in range(count)
    ]
    shape = [1, 2, 6, 6]
    path, board = tmp_path / "chain.onnx", tmp_path / "board.json"
    made = model(nodes, [tensor("x0", shape)], [tensor(f"x{count}", shape)], weights)
    onnx.save(made, str(path))
    file = tmp_path / "my_conv.cpp"
    file.write_text(bad_kernels.templates.text("conv2d", "cpu", file.name))
    words = ["rank", str(file), "--model", str(path), "--calls", "6", "--rounds", "1"]
    assert command.main([*words, "--json", str(board)]) == 0
    assert "conv2d of chain (7 nodes), batch 1" in capsys.readouterr().out
    found = json.loads(board.read_text())
    assert list(found["entries"][0]["nodes"]) == [f"conv{i}" for i in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", bad_kernels.CUDA)
def test_cuda_is_answered_in_one_line(name, tmp_path):
    bad = bad_kernels.CUDA[name]
    path = tmp_path / "bad.cu"
    path.write_text(bad_kernels.cuda(bad))
    line = finding(path, Limits(), time=False)  # a trap is told of late where others have the GPU
    assert line, "it passed"
    assert "\n" not in line
    assert says(bad, path) in line, line
