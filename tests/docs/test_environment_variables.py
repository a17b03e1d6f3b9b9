"""The table of environment variables names all that are read, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cnn_engine import __main__ as command_line
from cnn_engine import environment_variables as variables

ROOT = Path(__file__).resolve().parents[2]
NAME = r"CNN_ENGINE_[A-Z0-9_]+"
OWN = {**variables.PROGRAM, **variables.BUILD, **variables.TESTS}


def files(folders: str, *endings: str) -> Iterator[Path]:
    for folder in folders.split():
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in endings)


def in_python(text: str) -> set[str]:
    """Returns the names that a program has as texts, however it comes to read them."""
    if "CNN_ENGINE_" not in text:
        return set()  # most files have none, and parsing is slow
    nodes = ast.walk(ast.parse(text))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {value for value in texts if isinstance(value, str) and re.fullmatch(NAME, value)}


def in_cpp(text: str) -> set[str]:
    return set(re.findall(rf'getenv\(\s*"({NAME})"', text))


def in_shell(text: str) -> set[str]:
    return set(re.findall(rf"\$\{{?({NAME})", text))


def macros() -> set[str]:
    """Returns the names that C++ takes for macros, which Python may hand to a compiler."""
    texts = (path.read_text("utf-8") for path in files("csrc", ".h", ".cuh", ".cpp", ".cu"))
    return {
        name
        for text in texts
        for name in re.findall(rf"\b(?:ifdef|defined|if)\b.*?\b({NAME})", text)
    }


def read() -> set[str]:
    tables = (ROOT / "cnn_engine" / "environment_variables.py", Path(__file__))
    python = files("cnn_engine cifar10 fashion_mnist benchmarks tests scripts examples", ".py")
    found: set[str] = set()
    for path in [ROOT / "setup.py", *(path for path in python if path not in tables)]:
        found |= in_python(path.read_text("utf-8"))
    for path in files("csrc", ".h", ".cuh", ".cpp", ".cu"):
        found |= in_cpp(path.read_text("utf-8"))
    for path in [ROOT / ".ci" / "run", *files("scripts", ".sh")]:
        found |= in_shell(path.read_text("utf-8"))
    return found


def test_the_table_has_every_variable_that_is_read():
    assert read() - set(OWN) <= macros()


def test_every_variable_of_the_table_is_read():
    assert set(OWN) <= read()


def test_reads_are_found():
    assert in_python("import os\nX = 'CNN_ENGINE_A'\nos.environ.get('CNN_ENGINE_B', 'see CNN_ENGINE_C')") == {
        "CNN_ENGINE_A", "CNN_ENGINE_B",
    }  # fmt: skip
    assert in_cpp('auto x = std::getenv("CNN_ENGINE_A"), y = "CNN_ENGINE_B";') == {"CNN_ENGINE_A"}
    assert in_shell('CNN_ENGINE_A=1 x "$CNN_ENGINE_B" "${CNN_ENGINE_C:-on}"') == {
        "CNN_ENGINE_B", "CNN_ENGINE_C",
    }  # fmt: skip


def test_get_reads_the_programs_own(monkeypatch):
    monkeypatch.setenv("CNN_ENGINE_DATA", "here")
    assert variables.get("CNN_ENGINE_DATA") == "here"
    monkeypatch.setenv("CNN_ENGINE_DATA", "")
    assert variables.get("CNN_ENGINE_DATA") is None
    with pytest.raises(KeyError):
        variables.get("CNN_ENGINE_DATUM")


def test_help_lists_the_programs_variables(capsys):
    assert command_line.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, variable in variables.PROGRAM.items():
        assert (name in shown) == (variable.values != variables.INTERNAL)
