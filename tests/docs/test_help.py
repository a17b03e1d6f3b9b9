"""``--help`` of every program of this checkout: says how it is called, and runs nothing."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cnn_engine import __main__, completion
from cnn_engine.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    path
    for folder in ("benchmarks", "scripts", "cifar10", "fashion_mnist")
    for path in sorted((ROOT / folder).glob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_help_runs_nothing(path, monkeypatch, capsys):
    def runs(*arguments, **options):
        raise AssertionError("something is run")

    monkeypatch.setattr(Engine, "__init__", runs)
    monkeypatch.setattr(subprocess, "Popen", runs)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    inside = (path.parent / "__init__.py").exists()
    name = f"{path.parent.name}.{path.stem}"
    monkeypatch.delitem(sys.modules, name, raising=False)  # else runpy warns
    before = set(sys.modules)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(name, run_name="__main__") if inside else runpy.run_path(
            str(path), run_name="__main__"
        )
    assert not stop.value.code
    assert capsys.readouterr().out.startswith("usage: ")
    for new in set(sys.modules) - before:
        if new.partition(".")[0] in ("cifar10", "fashion_mnist"):
            del sys.modules[new]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completions_know_commands_and_options(shell, capsys):
    pytest.importorskip("shtab")
    assert __main__.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("classify", "characterize", "doctor"):
        assert word in script
    if shell != "bash":
        return
    bash = shutil.which("bash")
    for words, wanted in (
        ("cnn-engine cla", "classify"),
        ("cnn-engine run --save-p", "--save-probabilities"),
        ("cnn-engine kernel check --sani", "--sanitize"),
    ):
        line = words.split()
        ask = (
            f"COMP_WORDS=({words}); COMP_CWORD={len(line) - 1}; COMPREPLY=(); "
            '$(complete -p cnn-engine | sed "s/.*-F \\([^ ]*\\).*/\\1/"); echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run([bash, "-c", f"{script}\n{ask}"], capture_output=True, text=True)
        assert done.stdout.split() == [wanted], done.stderr


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert __main__.main(["completion", "bash"]) == 2
    assert "pip install 'cnn-engine[completion]'" in capsys.readouterr().err


def test_download_has_one_name(capsys):
    assert __main__.main(["download", "--help"]) == 0
    assert "one of cifar10, fashion_mnist" in " ".join(capsys.readouterr().out.split())
    for name, wanted in (("cifar10", "CIFAR-10"), ("fashion-mnist", "Fashion-MNIST")):
        assert __main__.main(["download", name, "--help"]) == 0
        out = capsys.readouterr().out
        assert re.match(r"usage: cnn-engine download (cifar10|fashion_mnist) ", out)
        assert f"Downloads {wanted}" in out
    assert __main__.main(["download", "cifar11"]) == 2
    assert "did you mean cifar10?" in capsys.readouterr().err
    assert __main__.main(["download"]) == 2
