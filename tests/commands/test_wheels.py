"""scripts/wheels.py: which interpreters it builds for, and what another machine's build is told of them."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import wheels

sys.path.pop(0)


def interpreter(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_interpreters_that_do_not_run_hide_no_other(tmp_path, monkeypatch):
    """Such as pyenv's shims of versions that are not chosen, which come first on PATH."""
    interpreter(tmp_path / "shims", "python3.12", "echo 'not chosen' >&2; exit 127")
    interpreter(tmp_path / "shims", "python3.13", "echo 3.12")  # a name that lies
    (tmp_path / "shims" / "python3.14").mkdir()
    runs = interpreter(tmp_path / "bin", "python3.12", "echo 3.12")
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}::{tmp_path / 'bin'}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wheels.found_pythons() == [str(runs)]


def test_an_interpreter_that_does_not_run_is_refused_before_anything_is_built(
    tmp_path, monkeypatch, capsys
):
    path = str(tmp_path / "python3.11")
    output = str(tmp_path / "dist")
    monkeypatch.setattr(sys, "argv", ["wheels.py", "--python", path, "--output", output])
    assert wheels.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --python: expected a CPython 3.10, ")
    assert error.endswith(f"that runs, found {path}\n")
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize(
    ("platform", "machine", "runs"),
    [
        ("manylinux_2_27_x86_64.manylinux_2_28_x86_64", "x86_64", True),
        ("manylinux_2_28_aarch64", "aarch64", True),
        ("manylinux_2_34_x86_64", "x86_64", False),
        ("manylinux_2_17_x86_64.manylinux2014_x86_64", "aarch64", False),
        ("linux_x86_64", "x86_64", False),
    ],
)
def test_names_of_wheels_say_where_they_run(platform, machine, runs):
    assert wheels.fits_machine(f"cnn_engine-0.2.0-cp312-cp312-{platform}.whl", machine) is runs


def test_another_machine_is_told_of_headers_and_of_names():
    options = dict(
        word[2:].split("=") for word in wheels.for_another_machine(sys.executable, "aarch64")
    )
    assert (Path(options["Python_INCLUDE_DIR"]) / "Python.h").is_file()
    assert options["Python_INCLUDE_DIR"] == sysconfig.get_path("include")
    suffix = f".{sys.implementation.cache_tag}-aarch64-linux-gnu.so"
    assert options["PYTHON_MODULE_EXTENSION"] == suffix
