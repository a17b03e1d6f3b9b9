"""What models, data and compilers are called reaches neither a terminal nor a spreadsheet as a command."""

from __future__ import annotations

import ast
import csv
import io
from pathlib import Path

import bad_kernels
import numpy as np
import onnx_models
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, save

import cnn_engine
from cnn_engine import cli, doctor, inspect, progress, run
from cnn_engine.ensemble import collect
from cnn_engine.kernel import command
from cnn_engine.report import units
from cnn_engine.report.csv import cell

ROOT = Path(cnn_engine.__file__).parent

#: Title of the window, colours, C1's control sequence, moves, and what turns the order of letters.
HOSTILE = "\x1b]0;title\x07\x1b[31mred\x9b2J\r\x08\u202eevil\u2066\u2069\x7f\x00"

#: Where print() itself is called: what is made for a file or a pipe, and a bar's own codes.
PRINTS = {
    "cli.py",
    "__main__.py",
    "progress.py",
    "valprep.py",
    "kernel/command.py",
    "devices/openacc_module.py",
}


def harmless(text: str) -> bool:
    return all(character.isprintable() for character in text.replace("\n", ""))


@given(st.text())
def test_only_lines_are_kept(text):
    stream = io.StringIO()
    cli.show(text, stream)
    assert harmless(stream.getvalue())
    assert stream.getvalue().count("\n") == text.count("\n") + 1
    if harmless(text):
        assert stream.getvalue() == text + "\n"


def test_an_error_is_one_harmless_line(capsys):
    cli.print_error(f"{HOSTILE}\nmore")
    assert harmless(capsys.readouterr().err)


def test_commands_print_through_one_function():
    found = {}
    for path in ROOT.rglob("*.py"):
        text, name = path.read_text("utf-8"), str(path.relative_to(ROOT))
        if "print(" not in text or name in PRINTS:
            continue
        calls = [
            node.lineno for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]  # fmt: skip
        if calls:
            found[name] = calls
    assert not found, "write cli.show() in place of print()"


@pytest.fixture
def hostile(tmp_path):
    """A network with a hostile name, whose node, input and output have one, too."""
    name = HOSTILE.replace("\x00", "")  # protobuf's own reader ends there
    node = helper.make_node("Relu", [f"in{name}"], [f"out{name}"], f"node{name}")
    model = onnx_models.model(
        [node], [onnx_models.tensor(f"in{name}", [1, 2, 3, 3])],
        [onnx_models.tensor(f"out{name}", [1, 2, 3, 3])], {},
    )  # fmt: skip
    model.graph.name = f"graph{name}"
    path = tmp_path / "\x1b[31m\u202e.onnx"
    save(model, str(path))
    return path


def test_names_of_a_model_are_escaped(hostile, capsys):
    inspect.main([str(hostile)])
    run.main(["--model", str(hostile), "--data", "synthetic", "--images", "1", "--device", "cpu"])
    found = capsys.readouterr()
    assert "node" in found.out
    assert harmless(found.out)
    assert harmless(found.err)


def test_a_compilers_words_and_a_files_name_are_escaped(tmp_path, capsys):
    path = tmp_path / "\x1b[31m\u202e.cpp"
    path.write_text(
        f'#error "{HOSTILE[:-1]}"\n' + bad_kernels.templates.text("relu", "cpu", "x.cpp")
    )
    assert command.main(["check", str(path)]) == 1
    found = capsys.readouterr()
    assert "#error" in found.err
    assert harmless(found.out + found.err)


def test_a_board_is_escaped(tmp_path, capsys):
    path = tmp_path / "\x1b[31m\u202e.cpp"
    path.write_text(bad_kernels.templates.text("conv2d", "cpu", "x.cpp"))
    words = [
        "rank",
        str(path),
        "--network",
        "ece408",
        "--batch",
        "1",
        "--calls",
        "2",
        "--rounds",
        "1",
    ]
    assert command.main(words) == 0
    found = capsys.readouterr()
    assert harmless(found.out + found.err)


def test_paths_of_the_environment_are_escaped(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "findings", lambda: [doctor.Finding("ok", "data", HOSTILE, HOSTILE)]
    )
    assert doctor.main([]) == 0
    assert harmless(capsys.readouterr().out)


def test_progress_has_no_codes_but_its_own(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress.teller()(HOSTILE)
    assert harmless(capsys.readouterr().err.removeprefix("\r\033[K"))


@pytest.mark.parametrize("first", "=+-@\t\r\n")
def test_text_is_no_formula(first):
    assert cell(f"{first}1+1").startswith("'")


@pytest.mark.parametrize("value", [-1.5, -3, np.float64(-2.5), 1e-7])
def test_numbers_stay_numbers(value):
    assert cell(value) == value


def test_csv_writers_use_such_cells():
    row = dict.fromkeys(collect.COLUMNS, -1.5) | {"work": "=1+1"}
    (found,) = csv.DictReader(io.StringIO(collect.as_csv([row])))
    assert found["work"] == "'=1+1"
    assert found["seconds"] == "-1.5"


@pytest.mark.parametrize("most", [4, 9, 34])
def test_long_names_lose_their_middle(most):
    for length in range(most + 5):
        name = "".join(chr(97 + k % 26) for k in range(length))
        found = units.shortened(name, most)
        assert len(found) == min(length, most)
        if length <= most:
            assert found == name
        else:
            head, tail = found.split("...")
            assert name.startswith(head)
            assert name.endswith(tail)
            assert len(head) - len(tail) in (0, 1)
